"""Episodes that were not trained on: which of them are kept."""

import asyncio
from io import StringIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from agentrl.config import load_config
from agentrl.errors import FilterBudgetError
from agentrl.rollout.accounts import DiscardedSamples
from agentrl.runs.run import Run
from agentrl.trajectory import Completion, Failed, Score, Task, Trajectory, Turn


def played(number: int, turns: int = 1) -> tuple[Trajectory, Score]:
    turn = Turn([1], Completion([5], [-1.0], [0], "stop"), 0.0, {})
    failed = Failed("engine", "it is gone")
    return Trajectory(
        f"t/{number}/0", Task("lake", 0, id="t"), (turn,) * turns, failed
    ), Score.failed("no")


def names(kept: list[tuple[Trajectory, Score]]) -> list[str]:
    return [trajectory.id for trajectory, _ in kept]


def test_the_first_of_each_kind_are_kept_until_they_are_taken() -> None:
    untrained = DiscardedSamples(2)
    untrained.keep("engine", [played(number) for number in range(5)])
    untrained.keep("filtered", [played(9)])
    assert names(untrained.take()) == ["t/0/0", "t/1/0", "t/9/0"]
    assert untrained.take() == []
    untrained.keep("engine", [played(6)])
    assert names(untrained.take()) == ["t/6/0"]


def test_those_without_a_turn_and_all_where_none_is_wanted_are_left_out() -> None:
    untrained = DiscardedSamples(1)
    untrained.keep("environment", [played(0, turns=0), played(1)])
    assert names(untrained.take()) == ["t/1/0"]
    none = DiscardedSamples(0)
    none.keep("environment", [played(1)])
    assert none.take() == []


def test_a_run_that_ends_amid_a_step_keeps_its_episodes_and_one_that_ends_after_it_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"env: frozen_lake\nrun_dir: {tmp_path / 'run'}\ntrackers: []\n")

    async def ends(run: Run, step: int, phase: str, error: BaseException | None) -> None:
        run.status.begin_phase(step, phase)
        async with run.recorder.keeping_episodes(lambda: [played(step)]):
            if error is not None:
                raise error

    with Run(load_config(path), Console(file=StringIO())) as run:
        asyncio.run(ends(run, 1, "train", None))
        for step, phase, error in (
            (2, "train", FilterBudgetError("too many")),
            (3, "rollout", asyncio.CancelledError()),  # as by Ctrl-C
            (4, "record", OSError("the disk is full")),  # it has been kept already
        ):
            with pytest.raises(type(error)):
                asyncio.run(ends(run, step, phase, error))
        kept = sorted((run.folder / "untrained").iterdir())
        assert [one.name for one in kept] == ["step_000002.parquet", "step_000003.parquet"]
        assert pq.read_table(kept[0])["id"].to_pylist() == ["t/2/0"]
