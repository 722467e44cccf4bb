"""The metrics of programs' calls."""

from agentrl.observe.metrics import rollout_metrics
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn


def turn(kind: str, *, forked: bool = False) -> Turn:
    return Turn([1, 2], Completion([3], [0.0], [0], "stop"), 0.0, {"call_kind": kind}, forked)


def test_calls_are_counted_by_row_and_by_kind():
    turns = (turn("start"), turn("extension"), turn("subagent", forked=True), turn("extension"))
    task = Task("agent:x", 0)
    played = Trajectory("e", task, turns, Terminated(), dropped={"unseen": (1, 7)})
    metrics = rollout_metrics([Group(task, (played,), (Score(1.0),))], 0)
    assert metrics["calls/per_row"] == 2.0
    assert metrics["calls/dropped_tokens"] == 7.0
    assert metrics["calls/extension"] == 0.5


def test_environments_make_no_calls():
    task = Task("frozen_lake", 0)
    played = Trajectory(
        "e", task, (Turn([1], Completion([3], [0.0], [0], "stop"), 0.0, {}),), Terminated()
    )
    assert not [
        name
        for name in rollout_metrics([Group(task, (played,), (Score(1.0),))], 0)
        if "calls" in name
    ]
