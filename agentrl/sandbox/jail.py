"""The driver's side of a jail: a process that runs one program after another."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import agentrl
from agentrl.flow import made_in_thread
from agentrl.sandbox import cgroup
from agentrl.sandbox.order import DONE, HEADER, LARGEST_REPORT, PIECE, JailReport, Order
from agentrl.sandbox.outcome import LimitHit, Outcome, Ran, SandboxLost
from agentrl.sandbox.settings import SandboxConfig

_START_SECONDS = 30.0
_FIRST_BYTES = 1 << 16
_GRACE_SECONDS = 3.0
"""Seconds after a run's wall limit within which its jail must report that."""
_SLOWEST_BYTES_PER_SECOND = 8 << 20
"""Bytes a second of a report: more time is given to long ones."""
_SYSTEM_PATHS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache"),
    "/etc/alternatives",  # links to which programs of Debian lead, such as awk
)
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""The whole environment. The hash seed gives a set the same order in every run."""
_START = (
    "import sys; sys.path.insert(0, {source!r}); from agentrl.sandbox.server import main; del"
    " sys.path[0]; main(**{arguments!r})"
)


class JailError(Exception):
    """A jail did not start, or was lost."""


def _start_server(
    arguments: Mapping[str, Any], channel: socket.socket, errors: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Start `agentrl.sandbox.server`, with its end of the channel as its input."""
    code = _START.format(source=str(Path(agentrl.__file__).parent.parent), arguments=arguments)
    return subprocess.Popen(
        [os.path.realpath(sys.executable), "-s", "-S", "-P", "-c", code],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )


class Jail:
    """A process that forks another for every program. Made by `start`; after a `SandboxLost` it is
    `dead`. Whatever it sends, no more of it is kept than an order asks for.
    """

    def __init__(self, backend: str, config: SandboxConfig, disk: int = 0, port: int = 0) -> None:
        self.dead = False
        self.listener: socket.socket | None = None
        """What listens at `port` of the jail's loopback, for a server of this process."""
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        with ExitStack() as unless_started:
            self._socket, theirs = socket.socketpair()
            unless_started.enter_context(self._socket)
            with theirs:
                self._scratch = os.path.realpath(tempfile.mkdtemp(prefix="agentrl-jail-"))
                unless_started.callback(os.rmdir, self._scratch)
                self._errors = unless_started.enter_context(tempfile.TemporaryFile())
                self._group = cgroup.make(os.path.basename(self._scratch))
                unless_started.callback(cgroup.remove, self._group)
                arguments = {
                    "backend": backend,
                    "readable": (
                        *_SYSTEM_PATHS,
                        sys.base_prefix,
                        sys.base_exec_prefix,
                        *config.paths,
                    ),
                    "scratch": self._scratch,
                    "preload": config.preload,
                    "paths": config.paths,
                    "group": self._group,
                    "disk": disk,
                    "port": port,
                }
                self._process = _start_server(arguments, theirs, self._errors)
            unless_started.pop_all()  # `kill` does all this now

    @classmethod
    async def start(cls, backend: str, config: SandboxConfig, disk: int = 0, port: int = 0) -> Self:
        """Start a jail and wait until it is ready. `disk`: bytes of a folder that its programs have
        in common; with 0, each has a new one. `port`: a port of its loopback, for the `listener`.

        Raises:
            JailError: the machine does not support `backend`; says what it lacks.
        """
        # In a thread, because starting a process can block for long on a busy machine.
        make = partial(cls, backend, config, disk, port)
        jail = await made_in_thread(make, undo=cls.kill)
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply = await jail._first_message()
                jail._reader, jail._writer = await asyncio.open_connection(
                    sock=jail._socket, limit=PIECE
                )
        except (OSError, EOFError, TimeoutError) as error:
            raise JailError(jail._kill_and_explain(error)) from error
        except BaseException:
            jail.kill()
            raise
        if "ready" not in reply:
            jail.kill()
            raise JailError(str(reply.get("error")))
        os.rmdir(jail._scratch)
        return jail

    @property
    def metered(self) -> bool:
        """True if a control group measures the use of its programs."""
        return bool(self._group)

    async def run(self, order: Order) -> Outcome:
        """Run one program. Cancelling kills the jail and all that the program has started."""
        report = await self.report_on(order)
        if isinstance(report, SandboxLost):
            return report
        stdout, stderr = report.stdout.text(), report.stderr.text()
        if isinstance(report.end, int):
            return Ran(stdout, stderr, report.end, report.seconds)
        return LimitHit(report.end, stdout, stderr, report.seconds)

    async def report_on(self, order: Order) -> JailReport | SandboxLost:
        """Run one program, and return its supervisor's report. Cancelling kills the jail."""
        try:
            async with asyncio.timeout(
                order.wall + _GRACE_SECONDS + order.output / _SLOWEST_BYTES_PER_SECOND
            ):
                await self._send(order)
                report = await self._receive(order)
                if await self._reader.readexactly(len(DONE)) != DONE:
                    raise ValueError("more than a report")
                return report
        except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
            return SandboxLost(self._kill_and_explain(error))
        except BaseException:
            self.kill()
            raise

    async def _first_message(self) -> Mapping[str, Any]:
        """The first message of the jail, which may bring the listener: streams drop sockets."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(self._socket, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(self._socket)
        said, sockets, *_ = socket.recv_fds(self._socket, _FIRST_BYTES, 1)
        if sockets:
            self.listener = socket.socket(fileno=sockets[0])
        if not said:
            raise EOFError("it said nothing")
        message: dict[str, Any] = json.loads(said[HEADER.size :])
        return message

    async def _send(self, order: Order) -> None:
        """Send an order, and of its input no more at a time than the jail has taken."""
        assert self._writer is not None
        self._writer.write(order.head)
        with memoryview(order.stdin) as stdin:
            for at in range(0, len(stdin), PIECE):
                self._writer.write(stdin[at : at + PIECE])
                await self._writer.drain()
        await self._writer.drain()

    async def _receive(self, order: Order) -> JailReport:
        """The report on an order. All of it is checked, because a program may have taken over what
        sends it.
        """
        size, follows = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if size > LARGEST_REPORT or follows > order.most_written:
            raise ValueError(f"a report of {size} and {follows} bytes")
        told = json.loads(await self._reader.readexactly(size))
        sizes = [int(one) for one in told["sizes"]]
        if len(sizes) != 2 or min(sizes) < 0 or sum(sizes) != follows:
            raise ValueError(f"a report of {follows} bytes that are {sizes}")
        stdout, stderr = [await self._read_bytes(one) for one in sizes]
        return JailReport.read(told, (stdout, stderr), order.output)

    async def _read_bytes(self, count: int) -> bytes:
        """`count` bytes, read piece by piece, because `readexactly` would hold them twice."""
        parts = []
        while count:
            parts.append(await self._reader.read(min(count, PIECE)))
            if not parts[-1]:
                raise EOFError("the jail ended within its report")
            count -= len(parts[-1])
        return b"".join(parts)

    def _kill_and_explain(self, error: Exception) -> str:
        """Kill the jail, and return what went wrong."""
        if self.dead:
            return "the sandbox was closed during the run"
        self._errors.seek(0)
        written = self._errors.read().decode(errors="replace").strip()
        self.kill()
        how = (
            f"the jail's process ended with {self._process.returncode}; it wrote:"
            f" {written[-2000:] or 'nothing'}"
        )
        return f"{type(error).__name__}: {error}; {how}"

    def kill(self) -> None:
        """Kill the jail and all processes in it, and remove its files. May be repeated."""
        if self.dead:
            return
        self.dead = True
        self._process.kill()
        self._process.wait()
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
        if self.listener is not None:
            self.listener.close()
        self._errors.close()
        cgroup.remove(self._group)
        with suppress(OSError, RecursionError):
            shutil.rmtree(self._scratch)
