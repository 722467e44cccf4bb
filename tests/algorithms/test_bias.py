"""How far the expected gradient of an estimator is from the gradient of the mean reward:
docs/algorithms.md says it.

The policy chooses among three answers of different lengths, all groups that it can play are
enumerated, and each is weighted by its probability. The third answer is too long: where a setting
leaves truncated or failed episodes out, it leaves out that one.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from agentrl.algorithms.advantages import group_mean, group_std, leave_one_out, whitened
from agentrl.tokens.arrays import FloatArray, floats

REWARDS = np.array([1.0, 0.4, 0.0])
TOKENS = np.array([2, 5, 12])
OFTEN, RARELY = np.array([0.5, 0.3, 0.2]), np.array([0.61, 0.37, 0.02])
"""Policies that give the third answer often, and rarely."""
SIZES = (2, 8, 32)
OTHER_TASK = np.array([0.2, 0.1, 0.1])
"""Rewards of a second task, on which the answers differ less."""

Weigh = Callable[[Sequence[int]], FloatArray]
Gradient = npt.NDArray[np.float64]


def by(
    advantages: Callable[[Sequence[float]], Sequence[float]], rewards: Gradient = REWARDS
) -> Weigh:
    return lambda answers: floats(advantages([float(rewards[a]) for a in answers]))


def by_tokens(answers: Sequence[int]) -> FloatArray:
    """`normalizer=tokens`, with one group in a batch."""
    return by(leave_one_out)(answers) / int(TOKENS[list(answers)].sum())


def white(answers: Sequence[int]) -> FloatArray:
    """`whiten=true`, with a batch of this group. A baseline that is the same for all does not
    matter.
    """
    return whitened(floats(REWARDS[list(answers)]))


def masked(answers: Sequence[int]) -> FloatArray:
    """`overlong=mask`: the third answer counts in the baseline, and carries no loss."""
    return floats(np.where(np.array(answers) == 2, 0.0, by(leave_one_out)(answers)))


def expected(weigh: Weigh, size: int, plays: Gradient, policy: Gradient) -> Gradient:
    """The expected sum of a group's weights times scores, which are the gradients of the policy's
    log-probabilities.
    """
    scores, total = np.eye(3) - policy, np.zeros(3)
    for first in range(size + 1):
        for second in range(size + 1 - first):
            counts = (first, second, size - first - second)
            chance = math.factorial(size) * math.prod(
                float(p) ** n for p, n in zip(plays, counts, strict=True)
            )
            chance /= math.prod(map(math.factorial, counts))
            answers = [answer for answer, count in enumerate(counts) for _ in range(count)]
            total += chance * (weigh(answers)[:, None] * scores[answers]).sum(0)
    return total


def true(policy: Gradient, rewards: Gradient = REWARDS) -> Gradient:
    """The gradient of the mean reward with respect to the policy's logits."""
    return policy * (rewards - policy @ rewards)


def residual(found: Gradient, wanted: Gradient) -> float:
    """What of the true gradient is not along the expected one, relative to the whole: 0 is unbiased
    up to a factor.
    """
    return float(
        np.linalg.norm(wanted - found * (found @ wanted) / (found @ found)) / np.linalg.norm(wanted)
    )


def of(weigh: Weigh, policy: Gradient = OFTEN) -> Callable[[int], float]:
    return lambda size: residual(expected(weigh, size, policy, policy), true(policy))


def of_two_tasks(
    advantages: Callable[[Sequence[float]], Sequence[float]],
) -> Callable[[int], float]:
    def found(size: int) -> float:
        both = sum(
            expected(by(advantages, task), size, OFTEN, OFTEN) for task in (REWARDS, OTHER_TASK)
        )
        return residual(np.asarray(both), true(OFTEN) + true(OFTEN, OTHER_TASK))

    return found


def played_again(policy: Gradient) -> Callable[[int], float]:
    """The third answer fails always, and is played again until another one comes."""
    left = policy * np.array([1.0, 1.0, 0.0])
    return lambda size: residual(
        expected(by(leave_one_out), size, left / left.sum(), policy), true(policy)
    )


ESTIMATORS = {
    "`advantage=leave_one_out`": of_two_tasks(leave_one_out),
    "`advantage=group_mean`": of_two_tasks(group_mean),
    "`advantage=group_std`": of_two_tasks(group_std),
    "`normalizer=tokens`": of(by_tokens),
    "`whiten=true`": of(white),
    "`overlong=mask`, 20 % truncated": of(masked),
    "`overlong=mask`, 2 % truncated": of(masked, RARELY),
    "failures played again, 20 %": played_again(OFTEN),
    "failures played again, 2 %": played_again(RARELY),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_docs_say_how_biased_an_estimator_is(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", page, re.MULTILINE)
    stated = [float(cell) for cell in row.split("|")[: len(SIZES)]]
    assert stated == [pytest.approx(ESTIMATORS[name](size), abs=6e-4) for size in SIZES]


@pytest.mark.parametrize("name", ["`advantage=leave_one_out`", "`advantage=group_mean`"])
def test_without_a_spread_the_expected_gradient_is_that_of_the_mean_reward(name: str) -> None:
    for size in SIZES:
        assert ESTIMATORS[name](size) < 1e-7
