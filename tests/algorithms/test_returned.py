"""What an algorithm returns as advantages: read as numbers of any library, or refused by name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import samples_of
from agentrl.batch import collate
from agentrl.errors import TrainingError
from agentrl.protocols import AlgorithmOffers
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn

Returns = Callable[[Group], Any]


class Returning(Grpo):
    """An algorithm whose advantages, or normalised advantages, are what a function returns."""

    def __init__(self, advantages: Returns, normalized: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._returns, self._normalizes = advantages, normalized

    @property
    def offers(self) -> AlgorithmOffers:
        return replace(super().offers, normalized=self._normalizes)

    def advantages(self, group: Group) -> Any:
        return self._returns(group)


def group_of(name: str, turns_G: Sequence[int]) -> Group:
    """A group whose members have so many turns, of one token each, and the rewards 0, 1, ..."""
    task = Task("any", 0, {}, name)
    said = Completion(ints((7,)), floats((-0.5,)), ints((0,)), "stop")
    members = tuple(
        Trajectory(f"{name}/{g}", task, (Turn(ints((5,)), said, 0.0, {}),) * turns, Terminated())
        for g, turns in enumerate(turns_G)
    )
    return Group(task, members, tuple(Score(float(g)) for g in range(len(members))))


def trained_with(algorithm: Grpo, groups: list[Group], normalize: str = "group") -> list[float]:
    """The advantages of the tokens of a batch."""
    processing = BatchProcessing(BatchProcessingConfig(normalize=normalize))
    found: list[float] = collate(
        samples_of(groups, algorithm, processing=processing)
    ).advantages_N.tolist()
    return found


@pytest.mark.parametrize("normalize", ["group", "batch"])
@pytest.mark.parametrize(
    "returns",
    [
        lambda group: np.array([0.5, -0.5, 1.0], np.float32),
        lambda group: torch.tensor([0.5, -0.5, 1.0]),
        lambda group: [np.float32(0.5), torch.tensor(-0.5), np.int64(1)],
        lambda group: [torch.full((len(t.turns),), a) for t, a in member_pairs(group)],
        lambda group: [np.full(len(t.turns), a, np.float32) for t, a in member_pairs(group)],
    ],
)
def test_advantages_may_be_numbers_and_arrays_of_any_library(
    returns: Returns, normalize: str
) -> None:
    groups = [group_of("a", (1, 1, 1))]
    plain = Returning(lambda group: [0.5, -0.5, 1.0])
    assert trained_with(Returning(returns), groups, normalize) == pytest.approx(
        trained_with(plain, groups, normalize)
    )


def member_pairs(group: Group) -> list[tuple[Trajectory, float]]:
    return list(zip(group.trajectories, (0.5, -0.5, 1.0), strict=True))


def test_arrays_by_turn_give_each_turn_its_own() -> None:
    algorithm = Returning(lambda group: [np.arange(len(t.turns)) for t in group.trajectories])
    assert trained_with(algorithm, [group_of("a", (1, 3))]) == [0, 0, 1, 2]


def test_an_algorithm_that_miscounts_cannot_give_a_member_the_advantage_of_another_group() -> None:
    counts = {"a": 2, "b": 4}  # as many as there are members, but not of each group
    algorithm = Returning(lambda group: [1.0] * counts[group.task.id])
    groups = [group_of("a", (1, 1, 1)), group_of("b", (1, 1, 1))]
    with pytest.raises(TrainingError, match=r"advantages returned 2 entries .* 3 members .* 'a'"):
        trained_with(algorithm, groups)

    def moved(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
        first, second = map(list, advantages)
        return [first[:-1], [first[-1], *second]]

    shifting = Returning(lambda group: [1.0] * 3, moved)
    with pytest.raises(TrainingError, match=r"normalized returned 2 entries .* 3 members .* 'a'"):
        trained_with(shifting, groups)
    short = Returning(lambda group: [1.0] * 3, lambda advantages: advantages[:1])
    with pytest.raises(TrainingError, match=r"normalized returned 1 entries .* for 2 groups"):
        trained_with(short, groups)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned None for the 2 members"),
        (1.0, r"returned 1\.0 for the 2 members"),
        ("12", "returned '12' for the 2 members"),
        ([1.0, float("nan")], "returned nan for the episode 'a/1' of 2 turns"),
        ([1.0, 1e39], "at most 1e\\+30"),
        ([1.0, "2"], "returned '2' for the episode 'a/1'"),
        ([1.0, [1.0]], r"returned 1 entries \(\[1.0\]\) for the episode 'a/1' of 2 turns"),
        ([1.0, [1.0, None]], "for the episode 'a/1' of 2 turns"),
    ],
)
def test_what_is_no_advantage_of_a_member_is_refused_by_name(returned: Any, says: str) -> None:
    algorithm, group = Returning(lambda group: returned), group_of("a", (1, 2))
    with pytest.raises(TrainingError, match=says):
        trained_with(algorithm, [group])
    with pytest.raises(TrainingError, match=says):
        BatchProcessing(BatchProcessingConfig(), algorithm).teaches(group)
