"""The tools that were called in a run: calls, failures and times by name, and the episodes that
called one.
"""

import pyarrow.parquet as pq
import pytest

from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.episodes import EpisodeIndex, EpisodeQuery
from agentrl.viewer.folders import RunFolder


@pytest.fixture
def made(tmp_path):
    """Two steps of 16 episodes, and an evaluation of two; each has three turns with a call, of
    which `b` fails.
    """
    run = MadeUpRun(tmp_path / "run", tools=("a", "b"))
    run.begin()
    run.step()
    run.evaluate((1.0, 0.0))
    run.step()
    return run


def index_of(run: MadeUpRun) -> EpisodeIndex:
    return EpisodeIndex(RunFolder("run", run.folder))


def test_calls_failures_and_times_of_each_tool_are_counted_by_name_and_step(made):
    found = index_of(made).tools()
    assert [
        (tool["name"], tool["calls"], tool["failed"], tool["episodes"]) for tool in found["tools"]
    ] == [
        ("a", 64, 0, 32),
        ("b", 32, 32, 32),
    ]
    assert [(tool["seconds"], tool["median"], tool["p99"]) for tool in found["tools"]] == [
        pytest.approx((6.4, 0.1, 0.1)),
        pytest.approx((6.4, 0.2, 0.2)),
    ]
    assert [pytest.approx([step, 16, 16, 3.2]) for step in (0, 1)] == found["tools"][1]["by_step"]
    assert (found["steps"], found["evaluations"], found["unknown"]) == ([0, 1], ["held_out"], False)


def test_calls_of_some_steps_and_of_evaluations_are_counted_apart(made):
    index = index_of(made)
    assert [tool["calls"] for tool in index.tools(first=1)["tools"]] == [32, 16]
    assert [tool["calls"] for tool in index.tools(evaluation="held_out")["tools"]] == [4, 2]
    assert index.tools(first=7)["tools"] == []


def test_the_episodes_that_called_a_tool_or_whose_call_failed_are_found(made):
    index = index_of(made)
    assert index.page(EpisodeQuery(tool="a"))["total"] == 32
    assert index.page(EpisodeQuery(tool="a", step=1))["total"] == 16
    assert index.page(EpisodeQuery(tool="a", refused=True))["total"] == 0
    assert index.page(EpisodeQuery(tool="b", refused=True, evaluation="held_out"))["total"] == 2
    assert index.page(EpisodeQuery(tool="'; DROP TABLE episodes; --"))["total"] == 0


def test_files_of_earlier_releases_have_no_calls_and_are_told_apart(made):
    for step in (0, 1):
        path = made.folder / "trajectories" / f"step_{step:06d}.parquet"
        assert [tool["calls"] for tool in index_of(made).tools()["tools"]] == [
            64 // (step + 1),
            32 // (step + 1),
        ]
        pq.write_table(pq.read_table(path).drop_columns(["calls"]), path)
    index = index_of(made)
    assert (index.tools()["tools"], index.tools()["unknown"]) == ([], True)
    assert index.page(EpisodeQuery(tool="a"))["total"] == 0
    assert index.page(EpisodeQuery())["total"] == 34
