"""Environments in their own processes: `isolation = "process"`.

`ProcessEnv` is the driver's end, a plain sync `Env`; `serve` is the worker's. A process holds one
instance and plays one episode at a time. A hang, a crash, a `sys.exit` or the out-of-memory killer
therefore costs only the current episode. The worker gets the environment's address and imports it.
It answers in JSON, never pickle, so that an untrusted environment cannot make the driver run code.

The worker starts in its own empty folder, which is removed when it ends. Its stdout and stderr are
captured, and error messages quote the last lines. It leads its own process group, which is killed
when the driver dies.

Workers are forked from one process, the fork server, which has imported agentrl and no environment:
a start takes milliseconds, and a worker needs only the memory that its environment adds. Each
interpreter (`agentrl/hosting/interpreter.py`) has its own fork server. The fork server imports the
modules that the environment's factory lists in `preload`: those that take seconds to import and
survive a fork.
"""

import asyncio
import faulthandler
import fcntl
import gc
import importlib
import inspect
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, cast

from agentrl import plugins
from agentrl.errors import ConfigError, EnvError, EnvProcessDiedError, describe
from agentrl.hosting.calls import recorded
from agentrl.hosting.interpreter import agentrl_alone, environment
from agentrl.hosting.pictures import pictured
from agentrl.hosting.wrappers import inner_name
from agentrl.protocols import Env, ResetResult, ScriptedPlayer, StepResult

logger = logging.getLogger(__name__)

LARGEST_ANSWER = 64 << 20
"""Largest answer in bytes; a worker that sends more is killed."""
_OUTPUT_KEPT = 1 << 20
"""Bytes of captured output above which it is discarded at the next reset."""

_START = """
import sys
rest = sys.path[:] if {foreign!r} else []
sys.path[:] = [*{path!r}, *rest]
from agentrl.hosting.process import preload, run_fork_server
preload(*{preload!r})
run_fork_server(*{arguments!r}, rest)
"""


class ProcessEnv:
    """An environment in a worker process, given by its address (a registered name or
    `package.module:Name`).

    `python` is the interpreter of the worker, by default this one; its fork server has imported
    `preload`. The process starts with the first `reset` and serves until `close` or `kill`; after a
    crash or `close`, the next `reset` starts another. Calls block, so a `LiveEnv` makes them in a
    thread. `system_prompt` and `tools` are known after `reset`.

    Raises `EnvError` if the environment raises or the process dies; its text has the signal or exit
    status and the last lines of output. Raises `ConfigError` for an unknown address or wrong
    options.
    """

    isolation = "thread"

    def __init__(
        self, address: str, python: str | None = None, preload: tuple[str, ...] = ()
    ) -> None:
        self.address = address
        self.name = inner_name(address)
        """The environment's name, without its wrappers: for messages."""
        self.python = python
        self.preload = preload
        self.pictures = False
        """Whether the environment draws its states, if it can (`render_html`); known to a worker
        when it starts.
        """
        self.records_calls = False
        """Whether the infos have the calls that the environment made, if it keeps them; known when
        a worker starts.
        """
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._worker: _Worker | None = None
        self._killed = False

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Start an episode, and the process if none is running."""
        self._start("reset").forget_old_output()
        extras = {"pictures": self.pictures, "records_calls": self.records_calls}
        answer = self._ask("reset", seed=seed, options=dict(options), **extras)
        self.system_prompt, self.tools = str(answer["system_prompt"]), tuple(answer["tools"])
        result: ResetResult = _result(answer)
        return result

    def check(self) -> tuple[str, ...]:
        """Check in a worker that the environment can be found, without making it; return the
        modules to `preload`.

        Raises:
            ConfigError: there is no such environment.
        """
        try:
            self._start("check")
            return tuple(self._ask("check")["preload"])
        finally:
            self.reap()

    def step(self, action: str) -> StepResult:
        """Act on the model's message."""
        result: StepResult = _result(self._ask("step", action=action))
        return result

    def consult(self, player: ScriptedPlayer, rng: random.Random) -> str:
        """The action of `player`, a function of a module. It runs in the worker, with a copy of
        `rng`.
        """
        address = f"{player.__module__}:{getattr(player, '__qualname__', '?')}"
        if "<" in address or "?" in address:
            raise ConfigError(
                f"a worker process cannot import {player!r}: a player must be a function at the top"
                " level of a module"
            )
        return str(_result(self._ask("consult", player=address, state=rng.getstate())))

    def close(self) -> None:
        """Close the environment and end its process."""
        try:
            if self._worker is not None:
                self._ask("close")
        finally:
            self.reap()

    def kill(self) -> None:
        """Kill the process from any thread, and never start another; a call in progress raises
        `EnvError`.
        """
        self._killed = True
        worker = self._worker
        if worker is not None:
            worker.signal_group()

    def reap(self) -> None:
        """Kill the process, wait for its end, and remove its folder. Only for the thread that makes
        the calls.
        """
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    @property
    def pid(self) -> int | None:
        """The worker's process id, or `None` if none is running."""
        return None if self._worker is None else self._worker.pid

    def _start(self, call: str) -> "_Worker":
        if self._worker is None:
            self._worker = _Worker(self.address, self.python, self.preload)
        if self._killed:  # while the process was starting
            self.reap()
            raise EnvError(f"{self.name}.{call}: its process was killed")
        return self._worker

    def _ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        worker = self._worker
        if worker is None:
            raise EnvError(f"{self.name}.{call}: its process is not running; call reset first")
        try:
            message = json.dumps({"call": call, **arguments}).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name}.{call}: the options of a process must be plain JSON: {error}"
            ) from error
        try:
            worker.connection.send_bytes(message)
            answer: dict[str, Any] = json.loads(worker.connection.recv_bytes(LARGEST_ANSWER))
        except (OSError, EOFError, ValueError) as error:
            output, how = worker.last_output(), worker.end()
            self._worker = None
            said = f"{self.name}.{call}: the process of the environment"
            if isinstance(error, EOFError | ConnectionError):
                raise EnvProcessDiedError(f"{said} {how}{output}") from error
            raise EnvError(f"{said} its answer cannot be read: {error!r}{output}") from error
        if "error" in answer:
            if answer.get("config"):
                raise ConfigError(str(answer["error"]))
            raise EnvError(f"{self.name}.{call} raised {answer['error']}{worker.last_output()}")
        return answer


def _result(answer: Mapping[str, Any]) -> Any:
    """What the method returned: a tuple as a tuple, anything else as text."""
    return tuple(answer["tuple"]) if "tuple" in answer else answer.get("text")


class _ForkServer:
    """The process that the workers are forked from. It imports no environment, since not every
    package survives a fork. It reaps a worker only on request: until then no other process can get
    the worker's process id.
    """

    def __init__(self, python: str | None, preload: tuple[str, ...]) -> None:
        mine, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        arguments = (theirs.fileno(), lifeline)
        self._python = python
        code = _START.format(
            path=_path(python), foreign=python is not None, preload=preload, arguments=arguments
        )
        with theirs:
            self._process = subprocess.Popen(
                [python or sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=arguments,
                start_new_session=True,
                env=environment(python) if python else None,
            )
        os.close(lifeline)
        self._socket = mine
        self._calls = Connection(os.dup(mine.fileno()))
        self._lock = threading.Lock()
        weakref.finalize(
            self, _end_fork_server, self._process, self._calls, self._socket, self._lifeline
        )

    def start(self, address: str, folder: Path, socket_fd: int, lifeline: int, output: int) -> int:
        """Fork a worker, and return its process id."""
        return self._call(
            {
                "address": address,
                "scratch": str(folder),
                "path": _path(self._python),
                "home": str(Path.cwd()),
                "environment": environment(self._python) if self._python else dict(os.environ),
            },
            socket_fd,
            lifeline,
            output,
        )

    def end(self, pid: int) -> int:
        """Reap a worker that was killed, and return its wait status."""
        return self._call({"end": pid})

    @property
    def is_dead(self) -> bool:
        """Whether the fork server has ended, for example because it was killed."""
        return self._process.poll() is not None

    def _call(self, request: Mapping[str, Any], *fds: int) -> int:
        with self._lock:
            self._calls.send_bytes(json.dumps(request).encode())
            if fds:
                socket.send_fds(self._socket, [b"+"], fds)
            return int(self._calls.recv_bytes())


def _end_fork_server(
    process: "subprocess.Popen[bytes]", calls: Connection, control: socket.socket, lifeline: int
) -> None:
    process.kill()
    process.wait()
    calls.close()
    control.close()
    os.close(lifeline)


_fork_servers: dict[tuple[int, str | None, tuple[str, ...]], _ForkServer] = {}
_fork_servers_lock = threading.Lock()


def _fork_server(python: str | None, preload: tuple[str, ...]) -> _ForkServer:
    """This process's fork server (by process id, as this process may itself be a fork), or a new
    one if it has died.
    """
    with _fork_servers_lock:
        key = (os.getpid(), python, preload)
        found = _fork_servers.get(key)
        if found is None or found.is_dead:
            found = _fork_servers[key] = _ForkServer(python, preload)
        return found


class _Worker:
    """A running process, the driver's end of its socket, its scratch folder and its output."""

    def __init__(self, address: str, python: str | None, preload: tuple[str, ...]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-env-")).resolve()
        scratch = self._folder / "scratch"
        scratch.mkdir()
        mine, theirs = socket.socketpair()
        reads, lifeline = os.pipe()
        self.connection = Connection(mine.detach())
        fork_server = _fork_server(python, preload)
        try:
            with theirs, (self._folder / "output").open("ab") as output:
                self.pid = fork_server.start(
                    address, scratch, theirs.fileno(), reads, output.fileno()
                )
        except BaseException:
            _clean_up(self.connection, lifeline, self._folder)
            raise
        finally:
            os.close(reads)
        # Also runs at the driver's exit, and when a broken environment is garbage-collected.
        self._end = weakref.finalize(
            self, _end, fork_server, self.pid, self.connection, lifeline, self._folder
        )

    def signal_group(self) -> None:
        # The fork server reaps the process only on request; until then no other process can get its
        # id.
        if self._end.alive:
            _kill_group(self.pid)

    def end(self) -> str:
        """Kill, reap and clean up; return how the process ended, by itself or by this kill."""
        status = self._end()
        return "is gone" if status is None else _how_it_ended(os.waitstatus_to_exitcode(status))

    def forget_old_output(self) -> None:
        path = self._folder / "output"
        if path.stat().st_size > _OUTPUT_KEPT:
            os.truncate(path, 0)  # it is open for appending, so the next line starts the file

    def last_output(self, lines: int = 16) -> str:
        try:
            with (self._folder / "output").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return "; it last wrote:\n  " + "\n  ".join(text.splitlines()[-lines:]) if text else ""


def _end(
    fork_server: _ForkServer, pid: int, connection: Connection, lifeline: int, folder: Path
) -> int | None:
    _kill_group(pid)
    try:
        return fork_server.end(pid)
    except (OSError, EOFError):  # the fork server has died, and the system reaps the worker
        return None
    finally:
        _clean_up(connection, lifeline, folder)


def _clean_up(connection: Connection, lifeline: int, folder: Path) -> None:
    connection.close()
    os.close(lifeline)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _path(python: str | None) -> list[str]:
    """The first entries of a worker's `sys.path`: those of this process, as absolute paths. For
    another interpreter, only agentrl, and the current folder if it is on the path here.
    """
    here = [str(Path(entry).absolute()) for entry in sys.path]
    return [str(agentrl_alone()), *({str(Path.cwd())} & set(here))] if python else here


# --- in the fork server ---


def preload(*modules: str) -> None:
    """Import modules for all workers. Failures are ignored here; a worker that needs the module
    reports them.
    """
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no garbage collection in a worker writes to the shared memory


def run_fork_server(control: int, lifeline: int, rest_of_path: Sequence[str]) -> None:
    """Fork and reap workers at the driver's request, until the driver is gone. In a worker: serve
    its environment.
    """
    os.set_inheritable(control, False)
    _die_with_the_driver(lifeline)
    with socket.socket(fileno=control) as channel:
        calls = Connection(os.dup(control))
        while True:
            try:
                request = json.loads(calls.recv_bytes())
            except (EOFError, OSError):
                return
            if "end" in request:
                os.kill(request["end"], signal.SIGKILL)
                _, answer = os.waitpid(request["end"], 0)
            else:
                _, fds, _, _ = socket.recv_fds(channel, 1, 3)
                answer = os.fork()
                if answer == 0:
                    break
                # In the parent too, so that the driver can kill the group as soon as it has the
                # process id.
                os.setpgid(answer, answer)
                for fd in fds:
                    os.close(fd)
            calls.send_bytes(str(answer).encode())
        calls.close()
        os.close(lifeline)
    _become_a_worker({**request, "path": [*request["path"], *rest_of_path]}, *fds)


def _become_a_worker(request: Mapping[str, Any], fd: int, lifeline: int, output: int) -> None:
    os.setpgid(0, 0)  # the parent does the same; whichever comes first
    _die_with_the_driver(lifeline)
    for inherited in (fd, lifeline):
        os.set_inheritable(inherited, False)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        # Unbuffered, so that a crash loses nothing; with `backslashreplace`, so that print accepts
        # any text of a model.
        cast(TextIOWrapper, stream).reconfigure(
            encoding="utf-8", errors="backslashreplace", write_through=True
        )
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    os.chdir(request["home"])
    serve(fd, request["address"], request["scratch"])


# --- in the worker ---


def serve(fd: int, address: str, scratch: str) -> None:
    """Answer the driver's calls until it disconnects."""
    faulthandler.enable()
    # `fd` itself stays open until the process ends. So when the driver reads the end of the stream,
    # the exit status is fixed, and killing the rest of the group cannot change it.
    connection = Connection(os.dup(fd))
    host = _Hosted(address, scratch)
    with asyncio.Runner() as runner:
        while True:
            try:
                request = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            connection.send_bytes(host.answer(runner, request))


class _Hosted:
    """The instance of a worker process, made at the first call."""

    def __init__(self, address: str, scratch: str) -> None:
        self._address = address
        self._scratch = scratch
        self._env: Env | None = None
        self._preload: list[str] = []

    def answer(self, runner: asyncio.Runner, request: dict[str, Any]) -> bytes:
        """The result of a call, or its error, as JSON."""
        call = request.pop("call")
        try:
            result = self._call(call, request)
            if inspect.isawaitable(result):
                result = runner.run(_awaited(result))
            answer: dict[str, Any] = (
                {"tuple": result} if isinstance(result, tuple) else {"text": _text(result)}
            )
            if call == "check":
                answer["preload"] = self._preload
            if call == "reset":
                answer["system_prompt"] = str(getattr(self._env, "system_prompt", "") or "")
                answer["tools"] = list(getattr(self._env, "tools", ()))
            return json.dumps(answer, default=_plain).encode()
        except (Exception, asyncio.CancelledError) as error:
            config = isinstance(error, ConfigError)
            text = str(error) if config else describe(error)
            return json.dumps({"error": text, "config": config}).encode()
        except SystemExit as leaving:
            print(describe(leaving), file=sys.stderr)  # the driver quotes it beside the exit status
            raise

    def _call(self, call: str, arguments: dict[str, Any]) -> Any:
        draws, records = arguments.pop("pictures", False), arguments.pop("records_calls", False)
        if self._env is None:
            if call == "close":  # there is none to close
                return None
            # The address may be a path from the driver's current folder; the instance runs in the
            # scratch folder.
            make = plugins.load("envs", self._address)
            if call == "check":
                self._preload = list(getattr(make, "preload", ()))
                return None
            os.chdir(self._scratch)
            env = pictured(make()) if draws else make()
            self._env = recorded(env) if records else env
        env = self._env
        if (
            call == "step"
        ):  # by position, as everywhere: an environment may call its parameter what it likes
            return env.step(arguments["action"])
        if call != "consult":
            return getattr(env, call)(**arguments)
        module, _, name = arguments["player"].partition(":")
        player: Any = importlib.import_module(module)
        for part in name.split("."):
            player = getattr(player, part)
        version, internal, gauss = arguments["state"]
        rng = random.Random()
        rng.setstate((version, tuple(internal), gauss))
        return player(getattr(env, "unwrapped", env), rng)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value!r:.200}"


def _plain(value: Any) -> Any:
    """Convert what JSON cannot represent: scalars and arrays of NumPy."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"{value!r:.80} ({type(value).__name__}) cannot leave its process: answer with text,"
        " numbers, lists and dicts"
    )


def _die_with_the_driver(lifeline: int) -> None:
    """Kill this process and those it starts when the driver is gone, which alone holds the pipe's
    other end.
    """
    if hasattr(fcntl, "F_SETSIG"):
        # Linux: the kernel does it, even if this process is busy (a regular expression may hold the
        # GIL).
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        return
    threading.Thread(target=_wait_for_the_end, args=(lifeline,), daemon=True).start()


def _wait_for_the_end(lifeline: int) -> NoReturn:
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise SystemExit
