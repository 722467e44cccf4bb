"""The Dockerfile builds where an engine runs, and its image has the command."""

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.docker_engine import BASE, needs_docker

ROOT = Path(__file__).parents[1]
WITH_PIP = f"""FROM {BASE}
COPY pip /pip/pip
ENV PYTHONPATH=/pip PATH={sys.base_prefix}/bin:/usr/bin:/bin
"""
"""The tests' base image with what the Dockerfile needs: pip, and a path to what that installs."""


def docker(host: str, *words: str) -> str:
    """What a command of Docker prints."""
    done = subprocess.run(
        ["docker", "--host", host, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@needs_docker
@pytest.mark.long
def test_the_image_has_the_wheel_and_its_command(docker_host: str, tmp_path: Path) -> None:
    """Without what the wheel depends on, which takes a network."""
    base, context = tmp_path / "base", tmp_path / "context"
    # Found without an import: after `import pip`, setuptools no longer replaces distutils, and
    # vLLM's import warns in this process.
    pip = Path(str(distribution("pip").locate_file("pip")))
    shutil.copytree(pip, base / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    (base / "Dockerfile").write_text(WITH_PIP)
    docker(docker_host, "build", "--network", "none", "-t", "agentrl-test-pip", str(base))
    wheel = ("wheel", "--quiet", "--no-deps", "--wheel-dir", str(context / "dist"), ".")
    subprocess.run([sys.executable, "-m", "pip", *wheel], cwd=ROOT, check=True)
    for name in ("Dockerfile", ".dockerignore"):
        shutil.copy(ROOT / name, context)
    arguments = ["BASE=agentrl-test-pip", "TORCH_INDEX=", "PIP_OPTIONS=--no-index --no-deps"]
    given = [word for argument in arguments for word in ("--build-arg", argument)]
    docker(docker_host, "build", "--network", "none", *given, "-t", "agentrl-test", str(context))
    run = ("run", "--rm", "--network", "none")
    command = ("--entrypoint", "python3", "agentrl-test", "-c")
    check = "import agentrl, shutil; print(agentrl.__version__, shutil.which('agentrl'))"
    version, path = docker(docker_host, *run, *command, check).split()
    assert path.endswith("/agentrl")
    assert version in next((context / "dist").iterdir()).name
