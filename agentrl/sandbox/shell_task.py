"""A task with a shell: instruction, files, setup and test; and the sandboxes that it needs.

The test runs in a fresh sandbox, which gets the working folder and then the files of the test:
nothing else that has been done in the first sandbox has any effect there.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from agentrl.errors import EnvError
from agentrl.protocols import Command, Sandbox, SandboxProvider, SandboxSpec, shell
from agentrl.sandbox.archive import LARGEST_ARCHIVE, archive_of

logger = logging.getLogger(__name__)

_EMPTY_FOLDER = "find . -mindepth 1 -delete"
LARGEST_FOLDER = LARGEST_ARCHIVE
"""Bytes of the largest working folder that is judged, as an archive."""
_SMALL_FOLDER = 8 << 20
"""Bytes. Of larger folders, this process holds one at a time, in two copies at most."""
_large_folder_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
    WeakKeyDictionary()
)
_MOST_PRINTED = 1 << 20
"""Bytes that a test may print where its output is compared."""


@dataclass(frozen=True, slots=True)
class ShellTask:
    """What is to be done, and how it is tested."""

    instruction: str
    """What the model is told."""
    files: Mapping[str, str]
    """The working folder at the beginning, by relative paths."""
    test: str
    """The command that tests the result: with exit status 0, the task is done."""
    test_files: Mapping[str, str] = field(default_factory=dict)
    """Files that the test needs, by relative paths. The model never sees them."""
    setup: str = ""
    """A command that prepares the working folder, also in the sandbox of the test."""
    printed: str | None = None
    """What the test must print, too. It is compared outside of the sandbox, where no program of the
    model can read what is expected."""


@dataclass(frozen=True, slots=True)
class TaskSandboxes:
    """Starts the sandboxes of one task. `seconds`: the time of its setup, and of its test."""

    provider: SandboxProvider
    spec: SandboxSpec
    task: ShellTask
    seconds: float

    async def to_work_in(self) -> Sandbox:
        """A sandbox with the task's files, prepared.

        Raises:
            EnvError: the setup failed.
        """
        return await self._start_prepared(self.spec, self.task.files)

    @asynccontextmanager
    async def work_in(self, sandbox: Sandbox) -> AsyncIterator[bytes | None]:
        """The working folder of a sandbox, for as long as it is judged; None if it cannot be had,
        or its archive is larger than `LARGEST_FOLDER` or than the files of a sandbox may be.

        A large one waits until another large one has been judged, so that the memory that they
        take is bounded.
        """
        async with AsyncExitStack() as stack:
            made: bytes | None = None
            try:
                made = await sandbox.download(most=min(_SMALL_FOLDER, self._largest))
            except OSError:
                loop = asyncio.get_running_loop()
                lock = _large_folder_locks.setdefault(loop, asyncio.Lock())
                await stack.enter_async_context(lock)
                made = await self._download_folder(sandbox)
            yield made

    @property
    def _largest(self) -> int:
        return min(LARGEST_FOLDER, self.spec.resources.disk)

    async def _download_folder(self, sandbox: Sandbox) -> bytes | None:
        try:
            return await sandbox.download(most=self._largest)
        except OSError as error:
            await check_alive(sandbox)
            logger.warning("a working folder is judged as a failed task: %s", error)
            return None

    async def verdict(self, made: bytes | None) -> float:
        """1 if the test passes on a working folder, which is an archive, in a sandbox that nobody
        had before. None for a folder that could not be had.
        """
        if made is None:
            return 0.0
        judge = await self._start_prepared(replace(self.spec, port=0), {})
        try:
            await self._run_sound(judge, _EMPTY_FOLDER)
            try:
                await judge.upload(made)
                if self.task.test_files:
                    await judge.upload(archive_of(self.task.test_files))
            except (OSError, ValueError):
                await check_alive(judge)
                return 0.0  # what was made cannot be unpacked, or is in the test's way
            test = Command(shell(self.task.test), deadline=self.seconds, output=_MOST_PRINTED)
            done = await judge.run(test)
            ended_well = done.exit == 0 and done.ended_by == "itself"
            if ended_well and self.task.printed in (None, done.stdout):
                return 1.0
            await check_alive(judge)
            return 0.0
        finally:
            await judge.close()

    async def _start_prepared(self, spec: SandboxSpec, files: Mapping[str, str]) -> Sandbox:
        sandbox = await self.provider.start(spec)
        try:
            if files:
                await sandbox.upload(archive_of(files))
            if self.task.setup:
                await self._run_sound(sandbox, self.task.setup)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _run_sound(self, sandbox: Sandbox, line: str) -> None:
        """Run a command of the task's, which must succeed."""
        done = await sandbox.run(Command(shell(line), deadline=self.seconds))
        if done.exit or done.ended_by != "itself":
            raise EnvError(f"the task's command {line!r:.200} failed: {done}")


async def check_alive(sandbox: Sandbox) -> None:
    """Raise `SandboxError` if it has been lost, before a failure there is the model's."""
    await sandbox.run(Command(shell("true")))
