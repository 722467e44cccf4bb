"""The server of a jail: for each program it forks a supervisor, which forks the program, watches it
and reports.

    driver --- channel ---> server -- fork --> supervisor -- fork --> program
                            reads nothing      reads the order        runs it

A program inherits the memory of the processes that it was forked from, and can search it. So the
server never reads what others have sent or written: only the supervisor does, and it ends with its
program.

A bare interpreter calls `main` (`agentrl.sandbox.jail`). In the server, `main` serves forever. In a
program's process, all these frames return before the program runs, so that it has the whole stack,
and it exits as any interpreter does. This module uses only the standard library.
"""

import array  # noqa: F401  `send_fds` imports it when it is called
import atexit
import builtins
import errno
import gc
import importlib
import json
import linecache
import os
import resource
import select
import signal
import site
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from agentrl.sandbox import kernel
from agentrl.sandbox.cgroup import ControlGroup
from agentrl.sandbox.cut_output import CutOutput
from agentrl.sandbox.filter import is_clone
from agentrl.sandbox.order import DONE, HEADER, LARGEST_JSON, PIECE, Order, pack
from agentrl.sandbox.walls import WALLS, Walls

CHECK_SECONDS = 0.02
"""Seconds between two checks of the resources that a run has used."""
_SOCKET_BYTES = 320 << 10
"""Bytes that a socket may hold: Linux's default of 208 KiB, and the last message. Programs may not
raise it."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_OPEN_FILES = 256
_READY = b"ready"
_LISTENER = b"+"


def main(
    *,
    backend: str,
    readable: Sequence[str],
    scratch: str,
    preload: Sequence[str],
    paths: Sequence[str],
    group: Sequence[str],
    disk: int,
    port: int,
) -> None:
    """Serve runs on the socket that is file descriptor 0 until its other end is closed.

    `disk`: with 0, each run has a new folder; else all have one, of so many bytes. `port`: a port
    of the loopback that the driver serves, on a socket that it is sent with the first message.
    """
    # With the default action, unlike with Python's handler, SIGINT does not reach the first process
    # of a namespace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    walls = WALLS[backend](readable, scratch, ControlGroup(group), disk, port)
    channel = socket.socket(fileno=0)
    try:
        walls.enter()
        sys.path += paths
        site.setquit()  # `exit` and `quit`, which programs expect
        for name in preload:
            importlib.import_module(name)
    except Exception as error:
        channel.sendall(pack({"error": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    gc.collect()
    gc.freeze()  # collections in a child then do not touch, and so copy, existing objects
    served = [] if walls.listener is None else [walls.listener.detach()]
    socket.send_fds(channel, [pack({"ready": backend})], served)
    for fd in served:
        os.close(fd)
    _run_main(_serve(channel, walls))


def _serve(channel: socket.socket, walls: Walls) -> str:
    """Serve orders until the channel closes. Returns only in a program's process: the program."""
    while _wait_for_order(channel):
        supervisor = os.fork()
        if supervisor == 0:
            return _supervise(channel, walls)
        if status := os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]):
            sys.exit(f"a supervisor ended with {status}")
        with suppress(ConnectionError):
            channel.sendall(DONE)
    walls.group.remove()
    os._exit(0)


def _wait_for_order(channel: socket.socket) -> bool:
    """Wait for the next order, and leave it to the supervisor to read; False if the driver is gone,
    or has closed this jail.
    """
    with suppress(ConnectionError):
        return bool(channel.recv(1, socket.MSG_PEEK))
    return False


def _supervise(channel: socket.socket, walls: Walls) -> str:
    """Serve one order and exit. Returns only in the program's process: the program."""
    # The order is read inside the walls, and by a process that ends with its program: the server
    # must hold nothing of it for later programs to find.
    walls.enclose()
    order, size = _receive_order(channel)
    walls.group.begin(order)
    folder = walls.begin(order)
    (stdin, feed), (stdout, to_stdout), (stderr, to_stderr) = (os.pipe() for _ in range(3))
    ready, say_ready = socket.socketpair()
    child = os.fork()
    if child == 0:
        _prepare_child(order, walls, folder, (stdin, to_stdout, to_stderr, say_ready.detach()))
        return order.program
    for fd in (stdin, to_stdout, to_stderr, say_ready.detach()):
        os.close(fd)
    with ready:
        word, listener = _receive_word(ready)
    if word != _READY:
        sys.exit(f"a child could not be confined: {word.decode(errors='replace') or 'it died'}")
    fds = (channel.fileno(), feed, stdout, stderr, listener)
    run = _Run(order, walls, folder, child, fds)
    run.watch(size)
    walls.end(folder)
    for part in run.report():
        channel.sendall(part)
    os._exit(0)


def _receive_word(ready: socket.socket) -> tuple[bytes, int]:
    """The child's output until it closed its end, and the listener that it sent; -1 for none."""
    word, listener = b"", -1
    while True:
        part, fds, *_ = socket.recv_fds(ready, 1 << 12, 1)
        listener = fds[0] if fds else listener
        if not part:
            return word.removeprefix(_LISTENER), listener
        word += part


def _receive_order(channel: socket.socket) -> tuple[Order, int]:
    """An order without its input, and the bytes of that, which are left to be read."""
    size, follows = HEADER.unpack(_receive_exactly(channel, HEADER.size))
    if size > LARGEST_JSON:
        os._exit(1)
    return Order(stdin=b"", **json.loads(_receive_exactly(channel, size))), follows


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            os._exit(0)  # the driver is gone, or has closed this jail
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Run:
    """One program from its fork to its end."""

    def __init__(
        self,
        order: Order,
        walls: Walls,
        folder: str,
        child: int,
        fds: tuple[int, int, int, int, int],
    ) -> None:
        self.order, self.walls, self.folder, self.child = order, walls, folder, child
        self.channel, self.stdin, self.stdout, self.stderr, self.listener = fds
        self.exit: int | None = None
        self.hit = ""
        self.begun = time.monotonic()
        self.input, self.to_come = memoryview(b""), 0
        self.output = {self.stdout: CutOutput(order.output), self.stderr: CutOutput(order.output)}
        self.written = 0
        self.poll = select.poll()
        for fd, events in (
            (self.stdin, select.POLLOUT),
            (self.stdout, select.POLLIN),
            (self.stderr, select.POLLIN),
        ):
            os.set_blocking(fd, False)
            self.poll.register(fd, events)
        self.poll.register(self.channel, select.POLLRDHUP)
        self.ended = os.pidfd_open(child)
        for fd in {self.ended, self.listener} - {-1}:
            self.poll.register(fd, select.POLLIN)

    def watch(self, size: int) -> None:
        """Watch the program until it ends or hits a limit; then kill its remaining processes.

        `size`: bytes of its input that are still in the channel. It gets them as it reads them, so
        that this process never has all of them in its memory.
        """
        self.to_come = size
        next_look = self.begun
        while self.exit is None and not self.hit:
            for fd, events in self.poll.poll(CHECK_SECONDS * 1000):
                self._handle_event(fd, events)
            if time.monotonic() >= next_look:
                self.hit = self.hit or self._find_limit_hit()
                next_look = time.monotonic() + CHECK_SECONDS
        self.seconds = time.monotonic() - self.begun
        self.walls.kill(self.child)
        self._reap(wait=True)
        for fd in (self.stdout, self.stderr):  # no process is left to write
            self._read(fd)
        for fd in {self.stdin, self.stdout, self.stderr, self.ended, self.listener} - {-1}:
            os.close(fd)
        self.hit = self.hit or self._limit_exceeded()
        while self.to_come:  # unread input must not be taken for the next order
            self._read_input()

    def report(self) -> Sequence[bytes | bytearray]:
        """The parts of the message that reports it."""
        written = [self.output[fd] for fd in (self.stdout, self.stderr)]
        parts = [part for output in written for part in output.parts]
        told = {
            "cut": [output.cut for output in written],
            "sizes": [sum(map(len, output.parts)) for output in written],
            "hit": self.hit,
            "exit": self.exit,
            "seconds": self.seconds,
        }
        return [pack(told, sum(map(len, parts))), *parts]

    def _handle_event(self, fd: int, events: int) -> None:
        if fd == self.ended:
            self._reap()
        elif fd == self.channel:
            if events & ~select.POLLIN:  # the driver died, or cancelled this run
                self._abandon()
            self._read_input()
            self.poll.modify(self.channel, select.POLLRDHUP)
            self.poll.register(self.stdin, select.POLLOUT)
        elif fd == self.stdin:
            self._write()
        elif fd != self.listener:
            self._read(fd)
        elif events & select.POLLIN:
            self._answer()
        else:  # nobody is left to ask
            self.poll.unregister(fd)

    def _answer(self) -> None:
        """Let the call that waits go on, or refuse it."""
        with suppress(OSError):  # who asks has been killed
            asked = kernel.question(self.listener)
            try:
                error = self._refusal(asked)
            except OSError as unknown:
                error = unknown.errno or errno.EPERM
            kernel.answer(self.listener, asked, error)

    def _refusal(self, asked: kernel.AskedCall) -> int:
        """The error of a call that is refused, else 0.

        A thread beyond the limit is refused as RLIMIT_NPROC does it. Each counted thread may be
        starting another, so there may be twice as many for a moment. A lock is allowed on the
        run's own files alone: on others it would stall other processes, or signal to them.
        """
        if is_clone(asked.number):
            return (
                errno.EAGAIN
                if len(os.listdir(f"/proc/{self.child}/task")) >= self.order.processes
                else 0
            )
        try:
            path = os.readlink(f"/proc/{asked.thread}/fd/{asked.argument}")
        except FileNotFoundError:
            return errno.EBADF
        return 0 if path.startswith(f"{self.folder}/") else errno.ENOLCK

    def _abandon(self) -> NoReturn:
        """Nobody waits for this run any longer."""
        self.walls.kill(self.child)
        self._reap(wait=True)
        self.walls.end(self.folder)
        os._exit(0)

    def _read_input(self) -> None:
        """Read the next part of the input from the channel."""
        self.input = memoryview(os.read(self.channel, min(PIECE, self.to_come)))
        if not self.input:
            self._abandon()
        self.to_come -= len(self.input)

    def _write(self) -> None:
        """Write some of the input; then wait for more of it, or close the program's stdin."""
        reads = True
        try:
            self.input = self.input[os.write(self.stdin, self.input) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed its stdin
            reads = False
        if self.input and reads:
            return
        self.poll.unregister(self.stdin)
        if self.to_come and reads:
            self.poll.modify(self.channel, select.POLLRDHUP | select.POLLIN)
        else:
            os.close(self.stdin)
            self.stdin = -1

    def _read(self, fd: int) -> None:
        with suppress(BlockingIOError):
            while self.hit != "output":
                part = os.read(fd, 1 << 16)
                if not part:
                    with suppress(KeyError):
                        self.poll.unregister(fd)
                    return
                room = self.order.output - self.written
                self.written += len(part)
                self.output[fd].add(part if self.order.cut else part[: max(room, 0)])
                if len(part) > room and not self.order.cut:
                    self.hit = self.hit or "output"
                    return

    def _reap(self, wait: bool = False) -> None:
        """Reap the children that have ended; with `wait`, wait until all have ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, 0 if wait else os.WNOHANG))[0]:
                if ended[0] == self.child:
                    self.exit = os.waitstatus_to_exitcode(ended[1])

    def _find_limit_hit(self) -> str:
        """The limit that has been hit by now, or an empty string."""
        order = self.order
        if time.monotonic() - self.begun >= order.wall:
            return "wall"
        self._reap()  # dead orphans would count as processes
        pids = self.walls.processes(self.child)
        cpu, pages = _children_cpu_time(), 0
        for pid in pids:
            its_cpu, its_pages = _usage_of(pid)
            cpu, pages = cpu + its_cpu, pages + its_pages
        if cpu >= order.cpu:
            return "cpu"
        buffers = 0 if self.walls.group else _buffer_bytes(pids)
        # `pages` counts shared pages once for each process that shares them. The exact count takes
        # longer.
        if (
            pages * _PAGE_BYTES + buffers > order.memory
            and sum(map(_memory_of, pids)) + buffers > order.memory
        ):
            return "memory"
        if self.walls.used(self.folder, self.child) > order.disk:
            return "disk"
        return self._limit_exceeded()

    def _limit_exceeded(self) -> str:
        """The limit that all processes have hit together, those included that have ended."""
        if _children_cpu_time() >= self.order.cpu:
            return "cpu"
        return self.walls.group.limit_hit()


def _children_cpu_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _buffer_bytes(pids: Sequence[int]) -> int:
    """Bytes that the buffers of these processes' sockets may hold. Others than pairs of sockets
    cannot be made.
    """
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            folder = f"/proc/{pid}/fd"
            for name in os.listdir(folder):
                with suppress(OSError):
                    if (target := os.readlink(f"{folder}/{name}")).startswith("socket:"):
                        sockets.add(target)
    return len(sockets) * _SOCKET_BYTES


def _usage_of(pid: int) -> tuple[float, int]:
    """CPU seconds, including those of children it has waited for, and resident pages:
    proc_pid_stat(5).
    """
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) / _CLOCK_TICKS, int(fields[21])
    return 0.0, 0


def _memory_of(pid: int) -> int:
    """Bytes of memory; of shared pages, its share."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:")), 0)
    return 0


def _prepare_child(
    order: Order, walls: Walls, folder: str, pipes: tuple[int, int, int, int]
) -> None:
    """In the child: set up the program's folder, streams and limits, and confine it. If that fails,
    nothing is run.
    """
    *standard, say_ready = pipes
    try:
        os.setsid()
        walls.group.join()
        for to, fd in enumerate(standard):
            os.dup2(fd, to)
        say_ready = os.dup2(say_ready, 3)
        os.closerange(4, 1 << 16)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        for limit, most in (
            (resource.RLIMIT_CPU, int(order.cpu) + 1),  # for programs faster than the checks
            (resource.RLIMIT_AS, order.memory),
            (resource.RLIMIT_FSIZE, order.disk),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_SIGPENDING, 128),
            (resource.RLIMIT_STACK, 8 << 20),
        ):
            resource.setrlimit(limit, (most, most))
        if (listener := walls.listen()) is not None:
            with socket.socket(fileno=os.dup(say_ready)) as saying:
                socket.send_fds(saying, [_LISTENER], [listener])
            os.close(listener)
        walls.confine(folder, order)
        os.write(say_ready, _READY)
    except BaseException as error:
        os.write(say_ready, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(say_ready)


def _run_main(program: str) -> None:
    """In the child: run the program as the main module, and exit as Python does."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__="main.py", __builtins__=builtins)
    for name in [name for name in sys.modules if name.startswith("agentrl")]:
        del sys.modules[name]
    sys.modules["__main__"] = module
    sys.argv[:] = ["main.py"]
    sys.path.insert(0, os.getcwd())
    linecache.cache["main.py"] = (len(program), None, program.splitlines(keepends=True), "main.py")
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        exec(compile(program, "main.py", "exec"), module.__dict__)
        status = 0
    except SystemExit as leaving:
        status = _exit_status(leaving.code)
    except BaseException as error:
        status = 1
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace)
    # What an interpreter does at exit, except freeing every object, which takes longer than most
    # programs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for written in (sys.stdout, sys.stderr, sys.__stdout__):
        with suppress(Exception):  # the program may have put anything there
            written.flush()  # type: ignore[union-attr]
    os._exit(status)


def _exit_status(code: object) -> int:
    """The exit status that the argument of `sys.exit` means."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
