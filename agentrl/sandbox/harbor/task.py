"""Tasks in Harbor's format: folders with an instruction, a machine, tests and a solution."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.plugins import nearest
from agentrl.protocols import Dockerfile, Image, SandboxOffers
from agentrl.sandbox.harbor.task_file import TaskFile, TaskMachine, read_task_file

_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_COMPOSE = "docker-compose.yaml"


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task."""

    folder: Path
    instruction: str
    """What the agent is told, without the marks of a benchmark."""
    file: TaskFile

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def origin(self) -> Image | Dockerfile:
        """Where the agent's machine comes from."""
        image = self.file.environment.docker_image
        return Image(image) if image else Dockerfile(self.folder / "environment")

    @property
    def loose_files(self) -> Path | None:
        """The folder whose files go into the working folder of an image that is not built."""
        folder = self.folder / "environment"
        is_loose = (
            self.file.environment.docker_image
            and folder.is_dir()
            and not (folder / "Dockerfile").exists()
        )
        return folder if is_loose else None

    @property
    def verifier(self) -> "VerifierMachine":
        """The machine of a separate verifier."""
        own, tests = self.file.verifier.environment, self.folder / "tests"
        if own is not None and own.docker_image:
            return VerifierMachine(Image(own.docker_image), own, True)
        if (tests / "Dockerfile").is_file():
            return VerifierMachine(Dockerfile(tests), own or self.file.environment, True)
        return VerifierMachine(self.origin, own or self.file.environment, False)


@dataclass(frozen=True, slots=True)
class VerifierMachine:
    """Where a separate verifier runs."""

    origin: Image | Dockerfile
    machine: TaskMachine
    has_tests: bool
    """True if the image brings its tests along."""


def read_task(folder: Path) -> HarborTask:
    """Read a task.

    Raises:
        ConfigError: a file is missing, or cannot be read.
    """
    try:
        file = read_task_file((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(folder / 'task.toml')!r} cannot be read: {error}") from error
    if file.steps:
        raise ConfigError(f"the task {folder.name!r} has several steps, which are not offered yet")
    try:
        instruction = (folder / "instruction.md").read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the task {folder.name!r} has no instruction.md: {error}") from error
    task = HarborTask(folder, _remove_canary(instruction), file)
    if not (folder / "tests" / "test.sh").is_file() and not (
        file.verifier.is_separate and task.verifier.has_tests
    ):
        raise ConfigError(f"the task {folder.name!r} has no tests/test.sh")
    if not file.environment.docker_image and not (folder / "environment").is_dir():
        raise ConfigError(
            f"the task {folder.name!r} has neither a folder 'environment' nor a docker_image"
        )
    return task


def task_folders(folder: Path) -> list[Path]:
    """The folders of tasks in a folder, by name, or the folder itself if it is a task.

    Raises:
        ConfigError: there is none.
    """
    if (folder / "task.toml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise ConfigError(
            f"{str(folder)!r} is no task of Harbor, and has none: a task is a folder with a"
            " task.toml, an instruction.md, environment/ and tests/"
        )
    return found


def named_folder(folders: Sequence[Path], name: str) -> Path:
    """The folder of the task with this name.

    Raises:
        ConfigError: there is none.
    """
    by_name = {folder.name: folder for folder in folders}
    if name not in by_name:
        raise ConfigError(
            f"env.options.task: there is no task {name!r}.{nearest(name, by_name)} There are:"
            f" {', '.join(by_name)}"
        )
    return by_name[name]


def lacking(task: HarborTask, offers: SandboxOffers, network: bool) -> list[str]:
    """The demands of a task that agentrl, or the provider of sandboxes, cannot meet.

    Args:
        task: the task
        offers: what the provider can do
        network: False if tasks run without a network, whatever they ask for
    """
    lacks = []
    file = task.file
    machines = [
        file.environment,
        *([file.verifier.environment] if file.verifier.environment else []),
    ]
    for folder in ("environment", "tests"):
        if (task.folder / folder / _COMPOSE).exists():
            lacks.append(f"compose ({folder}/{_COMPOSE})")
    for machine in machines:
        if machine.gpus:
            lacks.append(f"GPUs ({machine.gpus})")
        if machine.tpu:
            lacks.append("a TPU")
        if machine.os != "linux":
            lacks.append(f"the operating system {machine.os!r}")
        if machine.mcp_servers:
            lacks.append("MCP servers")
    modes = {file.environment.network_mode, file.agent.network_mode, file.verifier.network_mode}
    if network and "allowlist" in modes:
        lacks.append("a network with a list of allowed hosts")
    services = {one.service for one in file.artifacts} | {
        one.service for one in file.verifier.collect
    }
    if services - {None, "main"}:
        lacks.append("services beside the main one")
    users = {file.agent.user, file.verifier.user} - {None}
    if users and not offers.users:
        lacks.append(f"users ({', '.join(map(str, users))})")
    return lacks


def resolved(templates: Mapping[str, str], what: str) -> dict[str, str]:
    """Variables with `${NAME}` and `${NAME:-default}` replaced by those of this process.

    Raises:
        ConfigError: one is not set and has no default.
    """

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name in os.environ:
            return os.environ[name]
        if default is None:
            raise ConfigError(f"{what} needs the variable {name}: set it, as `{name}=...`")
        return str(default)

    return {
        name: value(found) if (found := _VARIABLE.fullmatch(text)) else text
        for name, text in templates.items()
    }


def _remove_canary(text: str) -> str:
    lines = text.split("\n")
    at = 0
    while at < len(lines) and _CANARY.match(lines[at].strip()):
        at += 1
    while at < len(lines) and not lines[at].strip():
        at += 1
    return "\n".join(lines[at:])
