"""The worker's end of an environment in a process: it makes the instance and answers the calls."""

import asyncio
import base64
import faulthandler
import importlib
import inspect
import json
import os
import random
import sys
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from agentrl import plugins
from agentrl.errors import ConfigError, OutageError, describe, text_of
from agentrl.flow import note_played
from agentrl.hosting.calls import recorded
from agentrl.hosting.observations import as_result
from agentrl.hosting.pictures import pictured
from agentrl.hosting.snapshots import rewindable
from agentrl.protocols.env import (
    Env,
    call_restore,
    can_restore,
    preload_of,
    system_prompt_of,
    tools_of,
    unwrapped_env,
)


def serve(fd: int, address: str, scratch: str) -> None:
    """Answer the driver's calls until it disconnects."""
    # What was last written is shown: the stack of C would push that of Python out of it.
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)
    else:
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
            if request.pop("has_played", False):
                runner.get_loop().call_soon(note_played)
            result = self._call(call, request)
            if inspect.isawaitable(result):
                result = runner.run(_await_result(result))
            result = as_result(result)
            answer: dict[str, Any] = (
                {"tuple": result} if isinstance(result, tuple) else {"text": _result_text(result)}
            )
            if call == "check":
                answer["preload"] = self._preload
            if call in ("reset", "restore"):
                answer["restorable"] = can_restore(self._env)
                answer["system_prompt"] = str(system_prompt_of(self._env) or "")
                answer["tools"] = list(tools_of(self._env))
            return json.dumps(answer, default=_plain).encode()
        except (Exception, asyncio.CancelledError) as error:
            kind = _error_kind(error)
            text = text_of(error) if kind else describe(error)
            return json.dumps({"error": text, "kind": kind}).encode()
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
                self._preload = list(preload_of(make))
                return None
            os.chdir(self._scratch)
            env = pictured(make()) if draws else make()
            self._env = rewindable(recorded(env) if records else env)
        env = self._env
        # By position, as everywhere: an environment may call its parameter what it likes.
        if call == "step":
            return env.step(arguments["action"])
        if call == "restore":
            return call_restore(env, base64.b64decode(arguments["state"]))
        if call != "consult":
            return getattr(env, call)(**arguments)
        module, _, name = arguments["player"].partition(":")
        player: Any = importlib.import_module(module)
        for part in name.split("."):
            player = getattr(player, part)
        version, internal, gauss = arguments["state"]
        rng = random.Random()
        rng.setstate((version, tuple(internal), gauss))
        return player(unwrapped_env(env), rng)


def _error_kind(error: BaseException) -> str:
    """What the driver raises, if not a plain `EnvError`."""
    if isinstance(error, OutageError):
        return "outage"
    return "config" if isinstance(error, ConfigError) else ""


async def _await_result(awaitable: Any) -> Any:
    return await awaitable


def _result_text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str) else f"{value!r:.200}"


def _plain(value: Any) -> Any:
    """Convert what JSON cannot represent: scalars and arrays of NumPy, and fractions."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"{value!r:.80} ({type(value).__name__}) cannot leave its process: answer with text,"
        " numbers, lists and dicts"
    )
