"""What reads a run writes nothing into its folder."""

import shutil
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.ledger.ledger import Ledger
from agentrl.observe.reports import EpisodeResult, EvaluationReport
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.trajectory import Task
from agentrl.viewer.notebook import metrics_of, plot
from agentrl.viewer.server import create_page_app


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """The files and folders in a folder, with when they changed and how long they are."""
    found = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.fixture(params=["ended", "killed"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = MadeUpRun(tmp_path / "made" / "one", env="guess_number")
    made.begin()
    made.step()
    made.evaluate((0.0, 1.0))
    lake = EpisodeResult("held_out-000000", True, 1.0)
    EvaluationReport("held_out", 1, {"eval/failed": 0.0}, (lake,)).write(
        made.folder / "evaluations"
    )
    if request.param == "ended":
        return made.folder
    with Ledger(made.folder / "ledger.sqlite") as ledger:
        ledger.admit(99, Task("made_up", 0, {}, "train-000099"), 1)
        ledger.flush()
        return shutil.copytree(
            made.folder, tmp_path / "killed", ignore=shutil.ignore_patterns("*-shm")
        )


def test_the_page_and_notebooks_write_nothing_into_a_run(run):
    before = everything(run)
    client = TestClient(create_page_app([run]), base_url="http://127.0.0.1")
    name = client.get("/api/runs").json()[0]["name"]
    page = client.get(f"/api/episodes?run={name}").json()
    assert page["rows"]
    assert page["unreadable"] == []
    for asked in (
        "metrics",
        "config",
        "choices",
        "evaluations",
        "tools",
        "time",
        f"group?task={page['rows'][0]['task']}&",
        "gantt?step=0&",
    ):
        place = asked if "?" in asked else f"{asked}?"
        assert client.get(f"/api/{place}run={name}").status_code == 200
    assert client.get(f"/api/episode?run={name}&id={page['rows'][0]['id']}").status_code == 200
    plot(run)
    assert metrics_of(run)
    assert everything(run) == before


@pytest.mark.parametrize(
    "command",
    [
        ["report", "RUN", "-o", "report.html"],
        ["ledger", "RUN"],
        ["ledger", "RUN", "train-000000"],
        ["profile", "RUN"],
        ["replay", "RUN"],
        ["compare", "RUN", "RUN"],
        ["export-episodes", "RUN", "episodes.jsonl"],
        ["rescore", "RUN", "--reward", "{name: length, free: 0, limit: 99}", "-o", "scores.jsonl"],
    ],
    ids=lambda command: command[0],
)
def test_no_command_that_reads_a_run_writes_into_it(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    before = everything(run)
    done = CliRunner().invoke(app, [str(run) if word == "RUN" else word for word in command])
    assert done.exit_code == 0, done.output
    assert everything(run) == before
