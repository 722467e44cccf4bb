"""No command writes over what is a run's own."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.run_folders import OWN, output
from agentrl.errors import ConfigError
from agentrl.runs import run as run_module

COMMANDS = [
    ("report", "{run}", "-o", "{own}"),
    ("profile", "{run}", "--trace", "{own}"),
    ("export", "{run}", "{own}"),
    ("export-episodes", "{run}", "{own}"),
    ("eval", "{run}", "--report", "{own}"),
    ("rescore", "{run}", "--reward", "environment", "-o", "{own}"),
    ("gateway", "{run}", "--record", "{own}"),
    ("model", "init", "{own}"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "lake"
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    (folder / "evaluations").mkdir()
    for name in ("metrics.jsonl", "ledger.sqlite", "evaluations/held_out_000002.json"):
        (folder / name).write_text(f"the run's {name}")
    (folder / "config.yaml").write_text("env: frozen_lake\n")
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    "own", ["config.yaml", "summary.json", "evaluations", "checkpoints/step_000003", "."]
)
def test_a_command_that_would_write_over_a_run_is_refused_before_it_does_anything(
    run: Path, command: tuple[str, ...], own: str, agentrl: Callable[..., Any]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = [word.format(run=run, own=run / own) for word in command]
    done = agentrl(*words, cwd=run.parent)
    assert done.returncode == 2
    assert "belongs to the run in" in done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_place_that_is_read_only_is_refused_before_a_command_works_for_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only, access = run.parent, os.access

    def may(path: Path, mode: int) -> bool:  # root may do everything
        return access(path, mode) and not (path.is_relative_to(read_only) and mode & os.W_OK)

    monkeypatch.setattr(os, "access", may)
    report = run / "evaluations" / "eval-20261128-152252"
    with pytest.raises(
        ConfigError, match=f"{report} cannot be written: {report.parent} is read-only"
    ):
        output(report, within="evaluations")
    assert output(tmp_path / "new" / "report") == tmp_path / "new" / "report"


def test_a_link_or_another_spelling_is_no_way_round(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.html").symlink_to(run / "config.yaml")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(run)
    for path in (
        tmp_path / "out.html",
        Path("~/runs/lake/config.yaml"),
        Path("config.yaml"),
        Path("../lake/lock.x"),
    ):
        with pytest.raises(
            ConfigError, match="no command writes over what is a run's own: name another place"
        ):
            output(path)


def test_other_places_are_free_also_beside_a_runs_own_files(run: Path, tmp_path: Path) -> None:
    for path in (
        run / "lake.html",
        run / "shared" / "model",
        run.parent / "report.html",
        tmp_path / "config.yaml",
    ):
        assert output(path) == path
    again = run / "evaluations" / "eval-1"
    again.mkdir()
    assert output(again, within="evaluations") == again
    with pytest.raises(ConfigError):
        output(again)


def test_all_that_a_run_writes_is_known_as_its_own() -> None:
    described = re.findall(r"^  ([\w.]+)/? ", str(run_module.__doc__), re.MULTILINE)
    assert len(described) > 20
    assert [name for name in described if name not in OWN and not name.startswith("config.")] == []
