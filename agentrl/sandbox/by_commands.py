"""The base of sandboxes that run a shell: their files are read and written by commands.

So a path means what it means to the commands, links included, and no path that a sandbox has made
up is ever opened on this machine.
"""

import asyncio
import posixpath
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.protocols import Command, EndedBy, Executed, SandboxSnapshot
from agentrl.sandbox.archive import checked_archive
from agentrl.sandbox.cut_output import KeptOutput

FILE_SECONDS = 60.0
"""Seconds in which a small file must be read or written."""
_SLOWEST_BYTES_PER_SECOND = 4 << 20
"""Bytes a second at which a large file is read or written at least."""
_NO_FILE, _NO_REGULAR_FILE = 41, 42
_READ = f'[ -e "$1" ] || exit {_NO_FILE}; [ -f "$1" ] || exit {_NO_REGULAR_FILE}; head -c "$2" "$1"'
_WRITE = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
_UNPACK = 'mkdir -p "$1" && tar -x -o -f - -C "$1"'
_PACK = f'[ -d "$1" ] || exit {_NO_FILE}; tar -c -f - -C "$1" . | head -c "$2"'


@dataclass(frozen=True, slots=True)
class Output:
    """What a command has left, in bytes."""

    exit: int
    stdout: KeptOutput
    stderr: KeptOutput
    ended_by: EndedBy
    seconds: float

    @property
    def executed(self) -> Executed:
        """The same as text."""
        return Executed(
            self.exit, self.stdout.text(), self.stderr.text(), self.ended_by, self.seconds
        )


class CommandSandbox(ABC):
    """A `Sandbox` whose subclass implements `_execute`, `snapshot` and `close`."""

    folder: str
    listener: socket.socket | None = None

    @abstractmethod
    async def _execute(self, command: Command) -> Output:
        """Run a command, in an absolute folder.

        Raises:
            SandboxError: the sandbox is lost, closed, or does not answer.
        """

    @abstractmethod
    async def snapshot(self) -> SandboxSnapshot:
        """See `Sandbox`."""

    @abstractmethod
    async def close(self) -> None:
        """See `Sandbox`."""

    async def run(self, command: Command) -> Executed:
        """See `Sandbox`."""
        return (await self._execute(replace(command, folder=self._path(command.folder)))).executed

    async def read(self, path: str, most: int = 1 << 20) -> bytes:
        """See `Sandbox`."""
        return await self._content(_READ, path, most)

    async def write(self, path: str, content: bytes) -> None:
        """See `Sandbox`."""
        output = await self._script(_WRITE, [self._path(path)], content)
        if output.exit or output.ended_by != "itself":
            raise OSError(f"{path!r} could not be written: {_failure_reason(output)}")

    async def upload(self, archive: bytes, folder: str = ".") -> None:
        """See `Sandbox`."""
        harmless = await asyncio.to_thread(checked_archive, archive)
        output = await self._script(_UNPACK, [self._path(folder)], harmless)
        if output.exit or output.ended_by != "itself":
            raise OSError(
                f"an archive could not be unpacked in {folder!r}: {_failure_reason(output)}"
            )

    async def download(self, folder: str = ".", most: int = 32 << 20) -> bytes:
        """See `Sandbox`."""
        return await self._content(_PACK, folder, most)

    async def _content(self, script: str, path: str, most: int) -> bytes:
        # One byte more than allowed, to tell a file that is too large from one that just fits.
        output = await self._script(script, [self._path(path), str(most + 1)], output=most + 1)
        if output.exit == _NO_FILE:
            raise FileNotFoundError(f"{path!r} does not exist")
        if output.exit == _NO_REGULAR_FILE:
            raise OSError(f"{path!r} is not a file")
        content = output.stdout.content
        if len(content) > most or output.stdout.cut:
            raise OSError(f"{path!r} has more than {most} bytes")
        if output.exit or output.ended_by != "itself":
            raise OSError(f"{path!r} could not be read: {_failure_reason(output)}")
        return content

    async def _script(
        self, script: str, arguments: Sequence[str], stdin: bytes = b"", output: int = 4096
    ) -> Output:
        return await self._execute(
            Command(
                ["/bin/sh", "-c", script, "sh", *arguments],
                stdin=stdin,
                deadline=FILE_SECONDS + (len(stdin) + output) / _SLOWEST_BYTES_PER_SECOND,
                output=output,
                folder=self.folder,
            )
        )

    def _path(self, path: str) -> str:
        return posixpath.join(self.folder, path) if path else self.folder


def _failure_reason(output: Output) -> str:
    ended = "" if output.ended_by == "itself" else f"ended by its limit of {output.ended_by}; "
    return f"{ended}{output.stderr.text().strip()[-500:] or f'exit status {output.exit}'}"
