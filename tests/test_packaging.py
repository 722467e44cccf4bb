"""What users install: agentrl's own wheel, and somebody else's environment in a package of its own.
No network.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAPPED = ("envs", "rewards", "trainers")
OFFLINE = (
    "--no-deps",
    "--no-build-isolation",
    "--no-index",
    "--quiet",
    "--disable-pip-version-check",
)
"""Setuptools, which builds both, is there already: torch needs it."""


def run(*command: str | Path, cwd: Path, packages: Path | None = None) -> str:
    """What the command says, run where no checkout can be found by accident; `packages` comes first
    on the path.
    """
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": str(packages or "")}
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", *arguments, *OFFLINE, cwd=cwd)


def agentrl(*arguments: str | Path, cwd: Path, packages: Path) -> str:
    return run(
        sys.executable,
        "-c",
        "from agentrl.cli import main; main()",
        *arguments,
        cwd=cwd,
        packages=packages,
    )


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example package was installed into. It was built from a copy: building
    leaves files.
    """
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(ROOT / "examples" / "higher_lower", folder / "source")
    pip("install", folder / "source", "--target", folder / "installed", cwd=folder)
    return folder / "installed"


@pytest.mark.slow  # pip builds and installs
def test_an_environment_of_another_package_is_there_by_name(example: Path, tmp_path: Path) -> None:
    row = next(
        line
        for line in agentrl("envs", cwd=tmp_path, packages=example).splitlines()
        if line.startswith("higher_lower")
    )
    assert "higher_lower:HigherLower" in row
    assert "agentrl-higher-lower 0.1.0" in row
    assert "Five of thirteen cards" in row


@pytest.mark.slow  # pip builds and installs
def test_an_environment_of_another_package_is_checked_by_name(
    example: Path, tmp_path: Path
) -> None:
    assert "keeps the contract" in agentrl(
        "check-env", "higher_lower", cwd=tmp_path, packages=example
    )


@pytest.mark.slow  # pip builds and installs
def test_the_other_package_is_an_entry_point_and_one_module(example: Path) -> None:
    modules = [path.relative_to(example).as_posix() for path in example.rglob("*.py")]
    assert modules == ["higher_lower.py"]
    points = next(example.glob("*.dist-info")) / "entry_points.txt"
    assert points.read_text().split() == [
        "[agentrl.envs]",
        "higher_lower",
        "=",
        "higher_lower:HigherLower",
    ]


@pytest.mark.long
def test_an_environment_of_another_package_is_trained_by_name(
    example: Path, tmp_path: Path
) -> None:
    config = ROOT / "examples" / "higher_lower" / "higher_lower.yaml"
    small = (
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "evaluation.tasks=4",
        "recipe.demonstrations.episodes=16",
    )
    agentrl("train", config, "steps=2", *small, cwd=tmp_path, packages=example)
    run_dir = tmp_path / "runs" / "higher_lower"
    assert "name: higher_lower\n" in (run_dir / "config.yaml").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["tasks"]["trained"] == summary["tasks"]["total"] == 4
    assert summary["episodes"]["trained"] == summary["episodes"]["total"] == 8


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """agentrl's own wheel, built from a copy of what is not ignored."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("agentrl", *MAPPED):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    pip("wheel", folder / "source", "--wheel-dir", folder, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_exactly_once_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name, count in Counter(names).items() if count > 1] == []
    package = ROOT / "agentrl"
    own = [
        path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in MAPPED
    ]
    mapped = [path for name in MAPPED for path in (ROOT / name).rglob("*.py")]
    expected = {path.relative_to(ROOT).as_posix() for path in own}
    expected |= {f"agentrl/{path.relative_to(ROOT).as_posix()}" for path in mapped}
    data = [*package.glob("viewer/page/*"), *package.glob("models/published/**/config.json")]
    data += [package / "viewer" / "report.html", package / "doctor" / "counting.yaml"]
    data += [package / "py.typed"]
    expected |= {path.relative_to(ROOT).as_posix() for path in data}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {
        "agentrl/envs/frozen_lake.py",
        "agentrl/rewards/environment.py",
        "agentrl/trainers/local.py",
    } <= expected


LOAD_EVERYTHING = """
import json, sys
from importlib.metadata import distribution
from agentrl import plugins
for kind in plugins.GROUPS:
    for plugin in plugins.installed(kind):
        if plugin.origin.startswith("agentrl-train "):
            plugins.load(kind, plugin.name)
own = [name for name in sys.modules if name.split(".")[0] == "agentrl"]
files = {name: sys.modules[name].__file__ for name in own}
print(json.dumps([str(distribution("agentrl-train").locate_file("")), files]))
"""


@pytest.mark.long
def test_the_wheel_alone_is_enough(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    pip("install", wheel, "--target", installed, cwd=tmp_path)
    metadata, files = json.loads(
        run(sys.executable, "-c", LOAD_EVERYTHING, cwd=tmp_path, packages=installed)
    )
    assert Path(metadata) == installed
    assert [file for file in files.values() if not Path(file).is_relative_to(installed)] == []
    assert {
        "agentrl.envs.frozen_lake",
        "agentrl.trainers.local",
        "agentrl.rewards.environment",
    } <= set(files)
    assert "keeps the contract" in agentrl(
        "check-env", "frozen_lake", cwd=tmp_path, packages=installed
    )
