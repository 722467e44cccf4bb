"""Interpreters for environments whose packages cannot be installed beside agentrl's.

A worker process (`agentrl/hosting/process.py`) runs under any Python from 3.11 on that has pydantic
and NumPy. It imports this installation of agentrl, from a folder that holds only a link to it and
its entry points. The packages that an environment `requires` are installed once into a virtual
environment in the cache folder (`$XDG_CACHE_HOME/agentrl`, or `~/.cache/agentrl`), named by the
hash of the requirements and the Python's version. It can be deleted at any time.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path

import agentrl
from agentrl.errors import ConfigError
from agentrl.files.caches import cache_folder
from agentrl.files.file_lock import locked
from agentrl.package.distribution import DISTRIBUTION

logger = logging.getLogger(__name__)

WORKER_NEEDS = ("numpy", "pydantic>=2.7")
"""Packages that the worker's modules import."""
INSTALL_SECONDS = 1800.0
"""Time for an installation, in seconds."""

_COMPLETE = ".complete"
_VERSION = "import sys; print(sys.implementation.name, *sys.version_info[:3])"
_ABLE = "import sys; sys.path[:0] = [{path!r}]; import agentrl.hosting.fork_server_process"


def find_interpreter(python: str | None, requires: Sequence[str] = ()) -> str:
    """The path of a Python that can host a worker.

    `python` is its path or name; by default this Python. With `requires` (in pip's syntax; a folder
    is installed as editable) the result is that of a virtual environment based on it, which takes
    minutes the first time and milliseconds later.

    Raises:
        ConfigError: there is no such Python, it is too old, lacks a package, or the installation
        fails.
    """
    base = _executable(python)
    try:
        found = _venv(base, requires) if requires else base
        _check_can_host(found)
    except OSError as error:
        raise ConfigError(
            f"env: nothing can be written into the cache folder {cache_folder()}: {error}."
            " XDG_CACHE_HOME names another one"
        ) from error
    return found


@functools.cache
def _check_can_host(python: str) -> None:
    able = _run([python, "-P", "-c", _ABLE.format(path=str(agentrl_alone()))], "starting it")
    if able.returncode:
        raise ConfigError(
            f"{python} cannot host an environment: {_last_lines(able.stderr, 3)}\nInstall what a"
            f" worker needs: {python} -m pip install {' '.join(map(repr, WORKER_NEEDS))}"
        )


@functools.cache
def agentrl_alone() -> Path:
    """A folder with only agentrl and its entry points, to put first on the path of another
    interpreter.
    """
    this = distribution(DISTRIBUTION)
    files = {name: this.read_text(name) or "" for name in ("METADATA", "entry_points.txt")}
    package = Path(agentrl.__file__).parent
    folder = cache_folder() / "sources" / _hash([str(package), files])
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        (unfinished / "agentrl").symlink_to(package)
        info = unfinished / f"{DISTRIBUTION.replace('-', '_')}-{this.version}.dist-info"
        info.mkdir()
        for name, text in files.items():
            (info / name).write_text(text)
        # Renaming is atomic, so other processes find the folder whole or not at all.
        with suppress(OSError):  # another process was faster
            unfinished.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _executable(python: str | None) -> str:
    """An interpreter's absolute path, with links unresolved: a virtual environment's Python is
    known by its link.
    """
    found = shutil.which(Path(python or sys.executable).expanduser())
    if found is None:
        raise ConfigError(
            f"env.python: there is no executable {python!r}: give a path, or a name on the PATH"
        )
    _version(found)
    return os.path.abspath(found)


def _version(python: str) -> str:
    asked = _run([python, "-c", _VERSION], "asking its version")
    words = asked.stdout.split()
    if asked.returncode or len(words) != 4:
        raise ConfigError(
            f"env.python: {python} is not a Python: {_last_lines(asked.stderr or asked.stdout, 3)}"
        )
    if (int(words[1]), int(words[2])) < (3, 11):
        raise ConfigError(
            f"env.python: {python} is Python {'.'.join(words[1:])}; agentrl's worker needs 3.11 or"
            " later"
        )
    return asked.stdout.strip()


def _venv(base: str, requires: Sequence[str]) -> str:
    """The Python of the virtual environment with these requirements, which is made if it does not
    exist.
    """
    wanted = sorted({*map(_resolve_requirement, requires), *WORKER_NEEDS})
    folder = cache_folder() / "venvs" / _hash([_version(base), wanted])
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):  # one process installs, and others wait for it
        if not ((folder / _COMPLETE).exists() and python.exists()):
            shutil.rmtree(folder, ignore_errors=True)
            logger.warning("installing %s into %s, once", " ".join(requires), folder)
            try:
                _install(base, folder, wanted)
                (folder / _COMPLETE).write_text("\n".join(wanted))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    return str(python)


def _resolve_requirement(requirement: str) -> str:
    """A requirement that is written as a path, such as `.`, as seen from the current folder."""
    path = Path(requirement).expanduser()
    is_path = os.sep in requirement or requirement in (os.curdir, os.pardir)
    return str(path.resolve()) if is_path and path.exists() else requirement


def _install(base: str, folder: Path, wanted: Sequence[str]) -> None:
    arguments = [part for one in wanted for part in (("-e", one) if Path(one).is_dir() else (one,))]
    python = str(folder / "bin" / "python")
    if uv := _uv():
        make = [uv, "venv", "--quiet", "--no-python-downloads", "--python", base, str(folder)]
        install = [uv, "pip", "install", "--python", python, *arguments]
    else:
        make = [base, "-m", "venv", str(folder)]
        install = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    for command in (make, install):
        # Not in the current folder, whose pyproject.toml may be another project's.
        done = _run(command, "installing", cwd=folder.parent)
        if done.returncode:
            raise ConfigError(
                f"env.requires: {' '.join(wanted)} cannot be installed; `{' '.join(command)}`"
                f" printed:\n{_last_lines(done.stderr or done.stdout, 12)}"
            )


def _uv() -> str | None:
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _run(
    command: Sequence[str], doing: str, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
            env=environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]}: {doing} failed: {error}") from error


def environment(python: str | None = None) -> dict[str, str]:
    """This process's environment variables for another interpreter, whose programs come first on
    the PATH.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONHOME", "VIRTUAL_ENV")
    }
    if python:
        kept["PATH"] = f"{Path(python).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return kept


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _last_lines(text: str, count: int) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
