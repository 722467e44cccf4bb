"""Sandboxes on this machine without images: a jail with a folder that its commands have in common.

The walls are those of programs (`agentrl.sandbox.walls`): the root of a jail shows this machine's
system and Python, read-only. A command and all that it started end together, and a jail ends with
the process that started it, so nothing can be left behind.
"""

import asyncio
import logging
import os
import posixpath
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import Field

from agentrl.errors import ConfigError, SandboxError
from agentrl.protocols import (
    Command,
    Dockerfile,
    EndedBy,
    Folder,
    Image,
    SandboxOffers,
    SandboxSnapshot,
    SandboxSpec,
)
from agentrl.sandbox.archive import LARGEST_ARCHIVE, archive_of_folder
from agentrl.sandbox.by_commands import CommandSandbox, Output
from agentrl.sandbox.jail import Jail, JailError
from agentrl.sandbox.order import Order
from agentrl.sandbox.outcome import SandboxLost
from agentrl.sandbox.settings import SandboxConfig
from agentrl.settings.base import PathText, Settings

logger = logging.getLogger(__name__)

_FOLDER = "/box"
_BACKEND = "namespaces"
_KILLED, _NOT_FOUND, _NOT_RUNNABLE = 137, 127, 126
_ENDED: Mapping[str, EndedBy] = {
    "wall": "deadline",
    "cpu": "cpu",
    "memory": "memory",
    "disk": "disk",
}
_PROGRAM = """
import os, sys
try:
    os.chdir({folder!r})
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit({not_runnable})
try:
    os.execvpe({argv!r}[0], {argv!r}, os.environ | {environment!r})
except OSError as error:
    print(f"{{error.strerror}}:", {argv!r}[0], file=sys.stderr)
    sys.exit({not_found} if isinstance(error, FileNotFoundError) else {not_runnable})
"""


class JailSandboxes:
    """A `SandboxProvider`: jails with a shell and files of their own."""

    class Config(Settings):
        """Settings of `sandbox: {name: jail}`."""

        paths: tuple[PathText, ...] = ()
        """Further folders of this machine that commands may read, such as a virtual environment;
        programs in the `bin` of each are found by their names."""
        cpu_share: float = Field(1.0, gt=0)
        """CPU seconds that a command may use for each second of its deadline and each of its CPUs.
        """

    offers = SandboxOffers(limits_disk=True, serves_port=True, root=_FOLDER)

    def __init__(self, settings: Config) -> None:
        self.settings = settings
        self._config = SandboxConfig(preload=(), paths=settings.paths, size=1)
        self._sandboxes: set[JailSandbox] = set()
        self._snapshots = tempfile.TemporaryDirectory(prefix="agentrl-snapshots-")
        self._closed = False

    @classmethod
    async def open(cls, settings: Config) -> Self:
        """Check that this machine can isolate.

        Raises:
            ConfigError: it cannot; says what it lacks.
        """
        provider = cls(settings)
        try:
            (await provider._jail(1 << 20)).kill()
        except SandboxError as error:
            await provider.close()
            raise ConfigError(
                f"{error}. Jails with a shell need namespaces (docs/sandbox.md); with a Docker"
                " engine, write sandbox: {name: docker}"
            ) from error
        return provider

    async def start(self, spec: SandboxSpec) -> "JailSandbox":
        """See `SandboxProvider`."""
        if self._closed:
            raise SandboxError("the provider of sandboxes is closed")
        _check_spec(spec)
        files = await self._initial_files(spec)
        sandbox = JailSandbox(self, await self._jail(spec.resources.disk, spec.port), spec)
        self._sandboxes.add(sandbox)
        try:
            if spec.folder:
                await sandbox.make_folder()
            if files is not None:
                await sandbox.upload(files)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def remove(self, snapshot: SandboxSnapshot) -> None:
        """See `SandboxProvider`."""
        with suppress(FileNotFoundError):
            os.unlink(snapshot.name)

    async def close(self) -> None:
        """See `SandboxProvider`."""
        self._closed = True
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        self._snapshots.cleanup()

    async def keep(self, archive: bytes, folder: str) -> SandboxSnapshot:
        """Keep the files of a sandbox."""
        path = Path(self._snapshots.name, uuid.uuid4().hex)
        await asyncio.to_thread(path.write_bytes, archive)
        return SandboxSnapshot(str(path), folder)

    def forget(self, sandbox: "JailSandbox") -> None:
        """A sandbox has been closed."""
        self._sandboxes.discard(sandbox)

    async def _jail(self, disk: int, port: int = 0) -> Jail:
        try:
            return await Jail.start(_BACKEND, self._config, disk, port)
        except JailError as error:
            raise SandboxError(f"a jail did not start: {error}") from error

    async def _initial_files(self, spec: SandboxSpec) -> bytes | None:
        match spec.origin:
            case Folder(path=path):
                return await asyncio.to_thread(archive_of_folder, path)
            case SandboxSnapshot(name=name):
                try:
                    return await asyncio.to_thread(Path(name).read_bytes)
                except OSError as error:
                    raise SandboxError(f"the snapshot is gone: {error}") from error
        return None


def _check_spec(spec: SandboxSpec) -> None:
    """Refuse what a jail cannot do."""
    folder = posixpath.normpath(spec.folder or _FOLDER)
    asked = {
        "an image": isinstance(spec.origin, Image),
        "a Dockerfile": isinstance(spec.origin, Dockerfile),
        "a network": spec.network != "none",
        "a user": bool(spec.user),
        f"a folder outside of {_FOLDER}": not f"{folder}/".startswith(f"{_FOLDER}/"),
    }
    if wanted := [what for what, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"the task asks for {' and '.join(wanted)}, which a jail does not have: write sandbox:"
            " {name: docker}"
        )


class JailSandbox(CommandSandbox):
    """A jail, in which each command is a program of its own."""

    def __init__(self, provider: JailSandboxes, jail: Jail, spec: SandboxSpec) -> None:
        self.folder = spec.folder or _FOLDER
        self.listener = jail.listener
        self._provider, self._jail, self._spec = provider, jail, spec
        self._one_at_a_time = asyncio.Lock()
        self._until = time.monotonic() + spec.lease

    async def make_folder(self) -> None:
        """Make the working folder."""
        await self._execute(Command(["mkdir", "-p", self.folder], folder=_FOLDER))

    async def snapshot(self) -> SandboxSnapshot:
        """See `Sandbox`."""
        return await self._provider.keep(await self.download(most=LARGEST_ARCHIVE), self.folder)

    async def close(self) -> None:
        """See `Sandbox`."""
        self._jail.kill()
        self._provider.forget(self)

    async def _execute(self, command: Command) -> Output:
        if command.user:
            raise ConfigError("a jail has no users: write sandbox: {name: docker}")
        async with self._one_at_a_time:  # a jail runs one program after another
            if time.monotonic() > self._until:
                await self.close()
            if self._jail.dead:
                raise SandboxError("the sandbox is closed, or its lease is over")
            report = await self._jail.report_on(self._order(command))
        if isinstance(report, SandboxLost):
            raise SandboxError(report.error)
        written = (report.stdout, report.stderr)
        if not isinstance(report.end, int):
            ended_by = _ENDED.get(report.end, "itself")
            return Output(_KILLED, *written, ended_by, report.seconds)
        # Of a program that a signal has ended, the status is negative; shells add it to 128.
        status = report.end if report.end >= 0 else 128 - report.end
        return Output(status, *written, "itself", report.seconds)

    def _order(self, command: Command) -> Order:
        limits, cpus = self._spec.resources, self._spec.resources.cpus
        own = [f"{Path(path, 'bin')}" for path in (*self._provider.settings.paths, sys.base_prefix)]
        path = ":".join([*own, "/usr/local/bin:/usr/bin:/bin"])
        environment = {"PATH": path, **self._spec.environment, **command.environment}
        program = _PROGRAM.format(
            folder=command.folder,
            argv=list(command.argv),
            environment=environment,
            not_found=_NOT_FOUND,
            not_runnable=_NOT_RUNNABLE,
        )
        return Order(
            program,
            command.stdin,
            wall=command.deadline,
            cpu=command.deadline * cpus * self._provider.settings.cpu_share,
            memory=limits.memory,
            processes=limits.processes,
            disk=limits.disk,
            output=command.output,
            cut=True,
        )
