"""On-policy distillation: its gradient is that of the reverse KL, and a teacher has the same
tokens.
"""

from pathlib import Path

import pytest
import torch

from agentrl.algorithms.distill import Distill
from agentrl.errors import ConfigError
from agentrl.models.tiny import create_tiny_model
from agentrl.models.tokenizer import check_same_tokens
from agentrl.oracles.estimators import Oracle, bandit, residual


def test_the_expected_gradient_is_that_of_the_reverse_kl_to_the_teacher() -> None:
    oracle, algorithm = Oracle(bandit()), Distill(Distill.Config(normalizer=1.0))
    logits, teacher = oracle.logits(1), oracle.logits(2)
    total = oracle.expected_gradient(algorithm, logits, members=1, reference_P=teacher)
    own = logits.clone().requires_grad_()
    divergence = (own.log_softmax(0).exp() * (own.log_softmax(0) - teacher.log_softmax(0))).sum()
    (expected,) = torch.autograd.grad(-divergence, own)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)


def test_the_reward_counts_beside_the_teacher_by_its_weight() -> None:
    oracle, algorithm = Oracle(bandit()), Distill(Distill.Config(normalizer=1.0, reward_weight=2.0))
    logits = oracle.logits(1)
    # The teacher is the policy itself.
    found = oracle.expected_gradient(algorithm, logits, members=2)
    assert residual(found, oracle.gradient(logits)) < 1e-5


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "one", corpus=["left right"] * 9)
    create_tiny_model(tmp_path / "same", corpus=["left right"] * 9, seed=3)
    create_tiny_model(tmp_path / "other", corpus=["up and down the hill"] * 9)
    check_same_tokens(tmp_path / "one", tmp_path / "same")
    with pytest.raises(
        ConfigError, match=r"differs from that of .* in \d+ tokens, such as .*same family"
    ):
        check_same_tokens(tmp_path / "one", tmp_path / "other")
    with pytest.raises(ConfigError, match="is no folder of a Hugging Face model"):
        check_same_tokens(tmp_path / "one", tmp_path / "nothing")
