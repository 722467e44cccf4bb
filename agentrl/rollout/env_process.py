"""An environment in a process of its own: what `isolation = "process"` means.

`ProcessEnv` is the driver's end, a plain sync `Env`; `serve` is the worker's. One process holds one instance and plays
one episode after the other. So it can be killed at any moment and nothing but its own episode is lost: a hang, a crash,
a `sys.exit`, the memory killer. The environment travels by its address and is imported over there; what comes back is
JSON and never pickle, so that an environment which is not trusted cannot make the driver run anything.

The worker's current folder is an empty one of its own, removed with it; what it writes to stdout and stderr is caught,
and its last lines stand in the errors. It leads a process group of its own, and the group dies with the driver.
"""

import asyncio
import faulthandler
import fcntl
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from agentrl import plugins
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env, ResetResult, ScriptedPlayer, StepResult

logger = logging.getLogger(__name__)

LARGEST_ANSWER = 64 << 20
"""Bytes of one answer; a worker that sends more is ended."""
_OUTPUT_KEPT = 1 << 20
"""Bytes of output after which, at the next reset, what was caught is thrown away."""
_SECONDS_TO_DIE = 5.0
"""How long a process that was sent SIGKILL may take to be gone before it is left to the system."""

_START = "import sys; sys.path[:] = {path!r}; from agentrl.rollout.env_process import serve; serve{arguments!r}"


def with_frame(error: BaseException) -> str:
    """`KeyError: 'x' (game.py:31 in move)`: the error and the innermost frame it came from."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return f"{type(error).__name__}: {error}"
    code = frame.tb_frame.f_code
    return f"{type(error).__name__}: {error} ({code.co_filename}:{frame.tb_lineno} in {code.co_name})"


class ProcessEnv:
    """The environment of an address (a registered name or `package.module:Name`) in a worker process.

    The process starts with the first `reset` and serves until `close` or `kill`; after a crash or `close`, the next
    `reset` starts another. Calls block, so a `LiveEnv` makes them in a thread. `system_prompt` and `tools` are known
    after `reset`.

    Raises `EnvError` for what the environment raises and for a process that dies, with its signal or exit status and
    the last lines it wrote, and `ConfigError` for an unknown address or wrong options.
    """

    isolation = "thread"

    def __init__(self, address: str) -> None:
        self.address = address
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._worker: _Worker | None = None
        self._killed = False

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Start an episode, and the process if none is running."""
        if self._worker is None:
            self._worker = _Worker(self.address)
        if self._killed:  # while the process was starting
            self.reap()
            raise EnvError(f"{self.address}.reset: its process was killed")
        self._worker.forget_old_output()
        answer = self._ask("reset", seed=seed, options=dict(options))
        self.system_prompt, self.tools = str(answer["system_prompt"]), tuple(answer["tools"])
        result: ResetResult = _result(answer)
        return result

    def step(self, action: str) -> StepResult:
        """Take the model's message."""
        result: StepResult = _result(self._ask("step", action=action))
        return result

    def consult(self, player: ScriptedPlayer, rng: random.Random) -> str:
        """What `player`, a function of a module, would say. It looks at the environment over there, with a copy of
        `rng`.
        """
        address = f"{player.__module__}:{getattr(player, '__qualname__', '?')}"
        if "<" in address or "?" in address:
            raise ConfigError(
                f"{player!r} cannot be found by a worker process: a player is a function at the top of a module"
            )
        return str(_result(self._ask("consult", player=address, state=rng.getstate())))

    def close(self) -> None:
        """Let the environment close and end its process."""
        try:
            if self._worker is not None:
                self._ask("close")
        finally:
            self.reap()

    def kill(self) -> None:
        """End the process at once and for good, from any thread; a call that is going on raises `EnvError`."""
        self._killed = True
        worker = self._worker
        if worker is not None:
            worker.signal_group()

    def reap(self) -> None:
        """Kill it, wait until it is gone, and remove its folder. For the thread that makes the calls."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    @property
    def pid(self) -> int | None:
        """The worker's process id, where one is running."""
        return None if self._worker is None else self._worker.process.pid

    def _ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        worker = self._worker
        if worker is None:
            raise EnvError(f"{self.address}.{call}: its process is not running; call reset first")
        try:
            message = json.dumps({"call": call, **arguments}).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.address}.{call}: the options of a process must be plain JSON: {error}") from error
        try:
            worker.connection.send_bytes(message)
            answer: dict[str, Any] = json.loads(worker.connection.recv_bytes(LARGEST_ANSWER))
        except (OSError, EOFError, ValueError) as error:
            output, how = worker.last_output(), worker.end()
            self._worker = None
            why = how if isinstance(error, EOFError | ConnectionError) else f"its answer cannot be read: {error!r}"
            raise EnvError(f"{self.address}.{call}: the process of the environment {why}{output}") from error
        if "error" in answer:
            if answer.get("config"):
                raise ConfigError(str(answer["error"]))
            raise EnvError(f"{self.address}.{call} raised {answer['error']}{worker.last_output()}")
        return answer


def _result(answer: Mapping[str, Any]) -> Any:
    """What the method returned: a tuple where it was one; what it should not have returned, as text."""
    return tuple(answer["tuple"]) if "tuple" in answer else answer.get("text")


class _Worker:
    """A running process, the driver's end of its socket, its scratch folder and its output."""

    def __init__(self, address: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-env-"))
        scratch = self._folder / "scratch"
        scratch.mkdir()
        mine, theirs = socket.socketpair()
        reads, lifeline = os.pipe()
        arguments = (theirs.fileno(), reads, address, str(scratch))
        with theirs, (self._folder / "output").open("ab") as output:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _START.format(path=_absolute_path(), arguments=arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Unbuffered, so that nothing is lost in a crash; and no text of a model is one that print refuses.
                    env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"},
                    pass_fds=(theirs.fileno(), reads),
                    start_new_session=True,
                )
            finally:
                os.close(reads)
        self.connection = Connection(mine.detach())
        # Also at the driver's exit, and when a broken environment was forgotten.
        self._end = weakref.finalize(self, _end, self.process, self.connection, lifeline, self._folder)

    def signal_group(self) -> None:
        _kill_group(self.process)

    def end(self) -> str:
        """Kill, reap and clean up; how it had ended by itself, or was ended."""
        self._end()
        return _how_it_ended(self.process.returncode)

    def forget_old_output(self) -> None:
        path = self._folder / "output"
        if path.stat().st_size > _OUTPUT_KEPT:
            os.truncate(path, 0)  # it is open for appending, so the next line begins the file

    def last_output(self, lines: int = 16) -> str:
        try:
            with (self._folder / "output").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return "; it last wrote:\n  " + "\n  ".join(text.splitlines()[-lines:]) if text else ""


def _end(process: "subprocess.Popen[bytes]", connection: Connection, lifeline: int, folder: Path) -> None:
    _kill_group(process)
    connection.close()
    os.close(lifeline)
    try:
        process.wait(_SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        logger.warning("process %d of an environment did not die of SIGKILL", process.pid)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    # The number of a process that was reaped may be another's by now; the group is then gone with its leader's end.
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "cannot be ended"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _absolute_path() -> list[str]:
    """`sys.path` as it is meant here, for a process whose current folder is another."""
    return [str(Path(entry).absolute()) for entry in sys.path]


# --- in the worker ---


def serve(fd: int, lifeline: int, address: str, scratch: str) -> None:
    """Answer the calls of the driver until it goes away."""
    faulthandler.enable()
    for inherited in (fd, lifeline):
        os.set_inheritable(inherited, False)
    _die_with_the_driver(lifeline)
    # `fd` itself stays open to the very end of the process: when the driver reads the end of the stream, the exit
    # status is settled, and killing what is left of the group cannot change it.
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
    """The instance of a worker process, made for the first call."""

    def __init__(self, address: str, scratch: str) -> None:
        self._address = address
        self._scratch = scratch
        self._env: Env | None = None

    def answer(self, runner: asyncio.Runner, request: dict[str, Any]) -> bytes:
        """What a call gave, or what it raised, as JSON."""
        call = request.pop("call")
        try:
            result = self._call(call, request)
            if inspect.isawaitable(result):
                result = runner.run(_awaited(result))
            answer: dict[str, Any] = {"tuple": result} if isinstance(result, tuple) else {"text": _text(result)}
            if call == "reset":
                answer["system_prompt"] = str(getattr(self._env, "system_prompt", "") or "")
                answer["tools"] = list(getattr(self._env, "tools", ()))
            return json.dumps(answer, default=_plain).encode()
        except (Exception, asyncio.CancelledError) as error:
            config = isinstance(error, ConfigError)
            text = str(error) if config else with_frame(error)
            return json.dumps({"error": text, "config": config}).encode()

    def _call(self, call: str, arguments: dict[str, Any]) -> Any:
        if self._env is None:
            if call == "close":  # it could not be made
                return None
            # The address may be a path from the driver's current folder; what it makes lives in the scratch folder.
            make = plugins.load("envs", self._address)
            os.chdir(self._scratch)
            self._env = make()
        env = self._env
        if call != "consult":
            return getattr(env, call)(**arguments)
        module, _, name = arguments["player"].partition(":")
        player: Any = importlib.import_module(module)
        for part in name.split("."):
            player = getattr(player, part)
        version, internal, gauss = arguments["state"]
        rng = random.Random()
        rng.setstate((version, tuple(internal), gauss))
        return player(env, rng)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value!r:.200}"


def _plain(value: Any) -> Any:
    """What JSON does not know: scalars and arrays of NumPy."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"{value!r:.80} ({type(value).__name__}) cannot leave its process: answer with text, numbers, lists and dicts"
    )


def _die_with_the_driver(lifeline: int) -> None:
    """Have this process and those it starts killed when the driver, which alone holds the pipe's other end, is gone."""
    if hasattr(fcntl, "F_SETSIG"):
        # Linux: the kernel does it, however busy this process is (a regular expression may hold the interpreter).
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        return
    threading.Thread(target=_wait_for_the_end, args=(lifeline,), daemon=True).start()


def _wait_for_the_end(lifeline: int) -> NoReturn:
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise SystemExit
