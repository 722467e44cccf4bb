"""Settings with which algorithms do as published or as other libraries do, where the default is
another.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev, stdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algorithms.advantages import (
    STD_EPSILON,
    compared_by_state,
    compared_by_turn,
    group_std,
)
from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.gigpo import Gigpo
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.policy_loss import PolicyLoss
from agentrl.algorithms.reinforce import ReinforcePlusPlus
from agentrl.algorithms.samples import batch_of
from agentrl.protocols import LossTokens
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Group, Score, Task, Trajectory


def group(rewards: Sequence[float]) -> Group:
    return Group(
        Task("env", 0), tuple(trajectory("x") for _ in rewards), tuple(map(Score, rewards))
    )


@given(st.lists(st.integers(0, 100).map(lambda n: n / 8), min_size=2, max_size=9))
def test_advantages_may_be_divided_by_the_sample_standard_deviation(rewards: list[float]) -> None:
    found = Grpo(Grpo.Config(std="sample")).advantages(group(rewards))
    expected = [(r - fmean(rewards)) / (stdev(rewards) + STD_EPSILON) for r in rewards]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    usual = [(r - fmean(rewards)) / (pstdev(rewards) + STD_EPSILON) for r in rewards]
    assert Grpo().advantages(group(rewards)) == pytest.approx(usual, rel=1e-9, abs=1e-9)


def test_the_sample_standard_deviation_is_that_of_torch_as_in_trl() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.25]
    of_torch = torch.tensor(rewards, dtype=torch.float64)
    expected = (of_torch - of_torch.mean()) / (of_torch.std() + STD_EPSILON)
    assert group_std(rewards, deviation="sample") == pytest.approx(expected.tolist(), rel=1e-12)
    ratio = group_std(rewards, deviation="sample")[0] / group_std(rewards)[0]
    assert ratio == pytest.approx(math.sqrt(7 / 8), rel=1e-5)  # smaller by 6 % in groups of 8


def test_turns_and_states_are_divided_by_the_same_standard_deviation() -> None:
    turns_G = [[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]]
    centred = [1 - 0.5, 1 - 0.5, 0.5 - 0.5, 0 - 0.5, -0.5, -0.5]
    spread = math.sqrt(math.fsum(a * a for a in centred) / 5) + STD_EPSILON
    found = compared_by_turn(turns_G, "group_std", 1.0, "episode", "sample")
    assert [a for of_member in found for a in of_member] == pytest.approx(
        [a / spread for a in centred]
    )
    alike = compared_by_state([[1.0], [0.0]], [["s"], ["s"]], 1.0, by_std=True, deviation="sample")
    assert alike == [
        [pytest.approx(math.sqrt(0.5), rel=1e-5)],
        [pytest.approx(-math.sqrt(0.5), rel=1e-5)],
    ]
    # Both begin in the same state, so they are compared twice.
    (won,), (lost,) = Gigpo(Gigpo.Config(std="sample")).advantages(group([1.0, 0.0]))  # type: ignore[misc]
    assert (won, lost) == pytest.approx((2 * math.sqrt(0.5), -2 * math.sqrt(0.5)), rel=1e-5)


def long_and_short() -> Group:
    """A long episode that fails, and a short one that wins."""

    def played(tokens: int) -> Trajectory:
        (turn,) = trajectory("x").turns
        completion = replace(
            turn.completion,
            token_ids=np.full(tokens, 5, np.int32),
            logprobs=np.full(tokens, -1.0, np.float32),
            policy_versions=np.zeros(tokens, np.int32),
        )
        return replace(trajectory("x"), turns=(replace(turn, completion=completion),))

    return Group(Task("env", 0), (played(6), played(2)), (Score(0.0), Score(1.0)))


@pytest.mark.parametrize(("statistics", "lengths"), [("trajectories", (1, 1)), ("tokens", (6, 2))])
def test_the_batch_of_reinforce_plus_plus_counts_trajectories_or_tokens(
    statistics: Any, lengths: tuple[int, int]
) -> None:
    algorithm = ReinforcePlusPlus(ReinforcePlusPlus.Config(statistics=statistics))
    processing = BatchProcessing(BatchProcessingConfig())
    batch = algorithm.prepared(batch_of([long_and_short()], algorithm, processing, 0))
    counted = [0.0] * lengths[0] + [1.0] * lengths[1]
    mean, std = fmean(counted), pstdev(counted)
    expected = [(0 - mean) / (std + STD_EPSILON)] * 6 + [(1 - mean) / (std + STD_EPSILON)] * 2
    assert batch.advantages_N.tolist() == pytest.approx(expected, rel=1e-5)


WEIGHTS = (0.1, 0.5, 1.0, 5.0, 9.0)


def weighed(**settings: Any) -> tuple[list[float], list[float]]:
    """The weights of these tokens in the gradient, and which are reported as cut."""
    zeros = torch.zeros(len(WEIGHTS))
    rollout = -torch.tensor(WEIGHTS).log()
    tokens = LossTokens(zeros, rollout, zeros, torch.ones(len(WEIGHTS)), zeros)
    new = zeros.clone().requires_grad_()
    found = Grpo(Grpo.Config(**settings)).loss(new, tokens)
    found.loss_N.sum().backward()
    assert new.grad is not None
    return (-new.grad).tolist(), found.metrics["importance_truncated"].tolist()


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        # IcePop.
        (
            {"importance": "mask", "importance_floor": 0.4, "importance_cap": 6.0},
            [0, 0.5, 1, 5, 0],
        ),
        (
            {"importance": "truncate", "importance_floor": 0.4, "importance_cap": 6.0},
            [0.4, 0.5, 1, 5, 6],
        ),
        ({"importance": "mask", "importance_cap": 6.0}, [0.1, 0.5, 1, 5, 0]),
        ({"importance_cap": None}, [1, 1, 1, 1, 1]),
    ],
)
def test_small_importance_weights_may_be_left_out_or_raised(
    settings: Any, weights: list[float]
) -> None:
    found, cut = weighed(**settings)
    assert found == pytest.approx(weights, rel=1e-5)
    if settings["importance_cap"] is not None:
        floor = settings.get("importance_floor", 0.0)
        assert cut == [float(weight < floor or weight > 6.0) for weight in WEIGHTS]


@pytest.mark.parametrize(
    ("kind", "wrong", "why"),
    [
        (
            PolicyLoss,
            {"importance_floor": 0.5, "importance_cap": None},
            "without one nothing is corrected",
        ),
        (PolicyLoss, {"importance_floor": 0.5, "importance_cap": 0.25}, "needs an importance_cap"),
        (PolicyLoss, {"importance_floor": 1.5, "importance_cap": 2.0}, "less than or equal to 1"),
        (Grpo.Config, {"std": "sample", "advantage": "group_mean"}, "divides by none"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    kind: Any, wrong: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        kind(**wrong)
