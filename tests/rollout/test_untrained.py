"""Episodes that were not trained on: which of them are kept."""

from agentrl.rollout.untrained import UntrainedEpisodes
from agentrl.trajectory import Completion, Failed, Score, Task, Trajectory, Turn


def played(number: int, turns: int = 1) -> tuple[Trajectory, Score]:
    turn = Turn([1], Completion([5], [-1.0], [0], "stop"), 0.0, {})
    failed = Failed("engine", "it is gone")
    return Trajectory(f"t/{number}/0", Task("lake", 0, id="t"), (turn,) * turns, failed), Score.failed("no")


def names(kept: list[tuple[Trajectory, Score]]) -> list[str]:
    return [trajectory.id for trajectory, _ in kept]


def test_the_first_of_each_kind_are_kept_until_they_are_taken() -> None:
    untrained = UntrainedEpisodes(2)
    untrained.keep("engine", [played(number) for number in range(5)])
    untrained.keep("filtered", [played(9)])
    assert names(untrained.take()) == ["t/0/0", "t/1/0", "t/9/0"]
    assert untrained.take() == []
    untrained.keep("engine", [played(6)])
    assert names(untrained.take()) == ["t/6/0"]


def test_those_without_a_turn_and_all_where_none_is_wanted_are_left_out() -> None:
    untrained = UntrainedEpisodes(1)
    untrained.keep("environment", [played(0, turns=0), played(1)])
    assert names(untrained.take()) == ["t/1/0"]
    none = UntrainedEpisodes(0)
    none.keep("environment", [played(1)])
    assert none.take() == []
