"""A run on Ray whose engines are added and removed while it trains, by the command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.trace_file import read_trace
from agentrl.runs.engine_requests import read_changes
from tests.cluster.chaos import Running, finish
from tests.commands import ROOT, Command
from tests.processes import PATIENCE_SECONDS, title

pytestmark = pytest.mark.long

CONFIG = """
steps: 1000000
env: frozen_lake
model: tiny
rollout: {groups_per_step: 2, group_size: 12, budget: {turns: 5}, sampling: {max_tokens: 4}}
cluster: {name: ray}
engine: {max_batch: 96}
trainer: {micro_batch_tokens: 2048, lr: 3e-3}
evaluation: {tasks: 0}
observe: {profile: true}
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Running]:
    """A run, which ends with the test."""
    with Running(tmp_path / "run", config=CONFIG, patience=PATIENCE_SECONDS) as running:
        yield running


def command(run: Running, *arguments: str) -> tuple[int, str]:
    """`agentrl engines ...`: its exit status, and what it has printed."""
    log = run.folder.with_name("command.log")
    log.unlink(missing_ok=True)
    asked = Command("engines", *arguments, cwd=ROOT, log=log)
    return asked.wait(PATIENCE_SECONDS), asked.output


def rows(run: Running) -> list[dict[str, Any]]:
    """The metrics of all steps."""
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def trains_on(run: Running) -> None:
    """Wait for two more steps."""
    before = run.steps()
    run.wait_for("two more steps", lambda: run.steps() >= before + 2, run.patience)


def engines(run: Running) -> int:
    """How many processes of engines there are."""
    return sum(title(process).startswith("ray::engine") for process in run.processes())


def test_engines_are_added_to_a_run_and_removed_from_it_while_it_trains(run: Running) -> None:
    folder = str(run.folder)
    run.start()
    run.wait_for("first step", lambda: run.steps() >= 1, run.patience)
    assert command(run, "remove", folder) == (
        1,
        "a run needs an engine, and this one has one\n",
    )
    code, said = command(run, "add", folder)
    assert (code, said.endswith("; 2 serve\n")) == (0, True), said
    assert engines(run) == 2
    trains_on(run)
    assert rows(run)[-1]["workers/engine"] == 2
    assert rows(run)[-1]["live_episodes/limit"] >= 2 * 96
    code, said = command(run, "list", folder)
    assert "engine: 2 of 2 serve; 0 restarts" in said
    code, said = command(run, "remove", folder)
    assert (code, said.startswith("engine 1 was removed in ")) == (0, True), said
    assert engines(run) == 1
    trains_on(run)
    assert rows(run)[-1]["workers/engine"] == 1
    assert command(run, "add", folder)[0] == 0
    run.stop()
    changes = [(change.change, change.engine) for change in read_changes(run.folder)]
    assert changes == [("added", 1), ("removed", 1), ("added", 1)]
    # The added engine has answered requests, and with the weights that the tokens' versions name.
    (trace,) = (run.folder / "profile").glob("*.pftrace")
    answered = {each.group for each in read_trace(trace).slices if each.name == "generate"}
    assert answered == {"engine 0", "engine 1"}
    assert max(row["logprob_gap_max"] for row in rows(run)) < 1e-4
    # A resumed run begins with the engines of its config.
    finish(run)
    assert rows(run)[-1]["workers/engine"] == 1
    code, said = command(run, "add", folder)
    assert (code, "does not run on this machine" in said) == (2, True), said
