"""The exact gradient of whole steps: several groups and environments, filtered, cut, and played by
older policies.
"""

import pytest
import torch

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Rloo
from agentrl.algorithms.policy_loss import PolicyAlgorithm
from agentrl.algorithms.ppo import Ppo
from agentrl.oracles.estimators import Oracle, bandit, stopping
from agentrl.oracles.exact_steps import ExactShare, ExactStep, StepRules
from agentrl.settings.sampling import SamplingParams

PLAIN = Rloo(Rloo.Config(normalizer=1.0))
WIDE = Rloo(Rloo.Config(normalizer=1.0, importance_cap=1e6, importance_level="sequence"))
EVERYTHING = StepRules()
CRITIC = Ppo(Ppo.Config(normalizer=1.0, whiten=False))


def step_with(
    algorithm: PolicyAlgorithm, rules: StepRules = EVERYTHING, groups: int = 1
) -> ExactStep:
    return ExactStep(
        [ExactShare("a", stopping(), groups, 2)],
        algorithm,
        BatchProcessing(BatchProcessingConfig()),
        rules,
    )


def gradient_of(step: ExactStep, played: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's expected gradient, and that of the mean return."""
    logits = step.oracle.logits(1)
    batches = list(step.batches(logits, logits + played * step.oracle.logits(2), logits))
    return step.gradient(batches, logits), step.oracle.gradient(logits)


@pytest.mark.parametrize(
    ("step", "played"),
    [
        (step_with(PLAIN), 0.0),
        (step_with(PLAIN, groups=2), 0.0),
        (step_with(WIDE), 0.3),
        (step_with(CRITIC, StepRules(cut=1)), 0.0),
    ],
    ids=["one group", "two groups", "of an older policy", "in two parts"],
)
def test_an_unbiased_step_follows_the_gradient_of_the_mean_return(
    step: ExactStep, played: float
) -> None:
    found, wanted = gradient_of(step, played)
    (share,) = step.shares
    torch.testing.assert_close(found, share.groups * share.members * wanted, rtol=1e-4, atol=1e-6)


def test_filtered_groups_are_replaced_by_others_that_are_trained_on() -> None:
    """Groups of equal rewards teach nothing here, so the gradient is that of all groups, by the
    share that is kept.
    """
    step = step_with(PLAIN, StepRules(trains=lambda group: group.has_signal))
    found, wanted = gradient_of(step)
    kept = step.kept(step.shares[0], step.oracle.logits(1))
    assert 0 < kept < 1
    torch.testing.assert_close(found, 2 / kept * wanted, rtol=1e-4, atol=1e-6)


def test_a_step_on_two_environments_follows_the_sum_of_both() -> None:
    shares = [ExactShare("a", stopping(), 1, 2), ExactShare("b", bandit(), 1, 3)]
    step = ExactStep(shares, PLAIN, BatchProcessing(BatchProcessingConfig()))
    logits = step.oracle.logits(1)
    found = step.gradient(list(step.batches(logits, logits, logits)), logits)
    for share in shares:
        own = step.states_of(share)
        wanted = share.members * step.oracle.gradient(logits)[own]
        torch.testing.assert_close(found[own], wanted, rtol=1e-4, atol=1e-6)


def test_truncated_sampling_leaves_what_an_engine_would() -> None:
    oracle = Oracle(bandit((1.0, 0.4, 0.0)))
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).log_softmax(0)
    assert oracle.left(logits, SamplingParams(top_k=2)).tolist() == [True, True, False]
    assert oracle.left(logits, SamplingParams(top_p=0.6)).tolist() == [True, False, False]
    assert oracle.left(logits, SamplingParams(min_p=0.2)).tolist() == [True, True, False]
    oracle.kept_P, oracle.temperature = oracle.left(logits, SamplingParams(top_k=2)), 0.5
    odds = torch.tensor([4.0, 2.0], dtype=torch.float64).softmax(0)
    assert oracle.probabilities(logits).tolist() == pytest.approx([*odds.tolist(), 0.0])
    assert float(oracle.entropies(logits)[1]) == pytest.approx(float(-(odds * odds.log()).sum()))
