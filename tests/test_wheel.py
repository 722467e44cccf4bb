"""The wheel is all that a user needs: it installs into an empty environment and runs the demo
there.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONE_STEP = (
    "steps=1 recipe.demonstrations.episodes=32 rollout.groups_per_step=2 rollout.group_size=4"
    " evaluation.tasks=4 checkpoint.every=1 run_dir=run"
)


def demo_of_the_wheel(folder: Path, overrides: str) -> str:
    """What the demo prints, in an environment of its own in `folder`."""
    command = ["make", "wheel-demo", f"WHEEL_VENV={folder / 'venv'}", f"OVERRIDES={overrides}"]
    environment = {**os.environ, "MAKEFLAGS": ""}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.long
def test_the_wheel_has_all_that_its_command_needs(tmp_path: Path) -> None:
    """Its files alone, beside the libraries that are here: nothing of the repository can be
    imported.
    """
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            tmp_path,
            ".",
        ],
        cwd=ROOT,
        check=True,
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    command = [
        sys.executable,
        "-P",
        "-c",
        "from agentrl.cli import main; main()",
        "demo",
        *ONE_STEP.split(),
    ]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "after 1 steps" in ended.stdout
    assert (tmp_path / "run" / "reward_curve.png").exists()


@pytest.mark.long
def test_the_wheel_runs_a_step_of_the_demo_in_an_empty_environment(tmp_path: Path) -> None:
    assert "after 1 steps" in demo_of_the_wheel(tmp_path, ONE_STEP)
    assert (tmp_path / "venv" / "run" / "reward_curve.png").exists()


@pytest.mark.long
def test_the_demo_of_the_wheel_learns(tmp_path: Path) -> None:
    printed = demo_of_the_wheel(tmp_path, "run_dir=run")
    assert "after 12 steps" in printed
