"""`agentrl.train`: a run from Python, in a script or in the cell of a notebook."""

import asyncio
import json
import subprocess
import sys
from multiprocessing.spawn import get_preparation_data
from pathlib import Path

import pytest

import agentrl

CONFIG = Path(__file__).parents[2] / "examples" / "frozen_lake.yaml"
SMALL = (
    "steps=1",
    "recipe.demonstrations=null",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "evaluation.tasks=2",
    "trackers=[]",
)


@pytest.mark.slow
def test_a_run_is_trained_from_a_notebook_and_resumed_from_a_script(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [*SMALL, f"run_dir={run}"]

    async def cell() -> dict[str, object]:  # a notebook runs its cells in a loop
        return agentrl.train(CONFIG, overrides)

    summary = asyncio.run(cell())
    assert summary == json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 1

    again = agentrl.train(run / "config.yaml", ["steps=2"], resume=True)
    assert again["steps"] == 2
    assert [row["step"] for row in agentrl.metrics_of(run) if "loss" in row] == [0, 1]


def test_a_wrong_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(agentrl.ConfigError, match="Did you mean 'lr'"):
        agentrl.train(CONFIG, ["trainer.lrr=1", f"run_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


RECIPE = """
import json
from multiprocessing.spawn import get_preparation_data

async def look(run):
    told = [name for name in get_preparation_data("a process") if name.startswith("init_main")]
    (run.folder / "told.json").write_text(json.dumps(told))
"""


def test_no_process_of_a_run_imports_the_script_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "__file__", "script.py", raising=False)
    monkeypatch.setattr(script, "__spec__", None)
    told_before = get_preparation_data("a process")["init_main_from_path"]
    (tmp_path / "looks.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("env: frozen_lake\nrecipe: looks:look\nrun_dir: run\n")
    agentrl.train("run.yaml", ["trackers=[]"])
    assert json.loads((tmp_path / "run" / "told.json").read_text()) == []
    assert get_preparation_data("a process")["init_main_from_path"] == told_before


@pytest.mark.long
def test_a_script_without_a_guard_trains_with_workers_also_from_standard_input(
    tmp_path: Path,
) -> None:
    script = (
        "import sys, agentrl\n"
        f"agentrl.train({str(CONFIG)!r}, [*{SMALL!r}, 'rollout.workers=1', *sys.argv[1:]])\n"
    )
    (tmp_path / "script.py").write_text(script)
    for name, text in (("script.py", ""), ("-", script)):
        command = [sys.executable, name, f"run_dir=run{name}"]
        done = subprocess.run(
            command, input=text, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / f"run{name}" / "summary.json").exists()
