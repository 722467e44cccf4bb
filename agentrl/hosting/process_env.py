"""`ProcessEnv`: an environment in a worker process, as a plain sync `Env`.

A process holds one instance and plays one episode at a time. A hang, a crash, a `sys.exit` or the
out-of-memory killer therefore costs only the current episode. The worker
(`agentrl/hosting/process_worker.py`) gets the environment's address and imports it. It answers in
JSON, never pickle, so that an untrusted environment cannot make the driver run code.
"""

import base64
import json
import random
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from agentrl.errors import ConfigError, EnvError, EnvProcessDiedError, OutageError
from agentrl.hosting.worker_handle import WorkerHandle
from agentrl.hosting.wrappers import inner_name
from agentrl.protocols.env import ResetResult, ScriptedPlayer, StepResult

LARGEST_ANSWER_BYTES = 64 << 20
"""Largest answer; a worker that sends more is killed."""


class ProcessEnv:
    """An environment in a worker process, given by its address (a registered name or
    `package.module:Name`).

    `python` is the interpreter of the worker, by default this one; its fork server has imported
    `preload`. The process starts with the first `reset` and serves until `close` or `kill`; after a
    crash or `close`, the next `reset` starts another. Calls block, so a `LiveEnv` makes them in a
    thread. `system_prompt` and `tools` are known after `reset`.

    Raises `EnvError` if the environment raises or the process dies; its text has the signal or exit
    status and the last lines of output. Raises `ConfigError` for an unknown address or wrong
    options, and `OutageError` if the environment does.
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
        """The environment draws its states (`render_html`); known to a worker when it starts."""
        self.records_calls = False
        """The infos have the calls that the environment made; known when a worker starts."""
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.has_played = False
        """The run has played an episode: what is missing now is only away (`has_played`)."""
        self.restorable = False
        """The environment can tell its states and go back to them; known after `reset`."""
        self._worker: WorkerHandle | None = None
        self._killed = False

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Start an episode, and the process if none is running."""
        self._start("reset").forget_old_output()
        answer = self._ask("reset", seed=seed, options=dict(options), **self._extras)
        self._note_episode(answer)
        result: ResetResult = _result(answer)
        return result

    def snapshot(self) -> bytes:
        """The state of the episode. It is read again in a worker of the same environment only."""
        return base64.b64decode(str(_result(self._ask("snapshot"))))

    def restore(self, state: bytes) -> None:
        """Go back to a state of an episode, in a process that is started if none is running."""
        self._start("restore").forget_old_output()
        text = base64.b64encode(state).decode()
        self._note_episode(self._ask("restore", state=text, **self._extras))

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
        name = player.__qualname__ if isinstance(player, FunctionType) else "?"
        address = f"{player.__module__}:{name}"
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

    @property
    def _extras(self) -> dict[str, bool]:
        return {
            "pictures": self.pictures,
            "records_calls": self.records_calls,
            "has_played": self.has_played,
        }

    def _note_episode(self, answer: Mapping[str, Any]) -> None:
        self.system_prompt, self.tools = str(answer["system_prompt"]), tuple(answer["tools"])
        self.restorable = bool(answer["restorable"])

    def _start(self, call: str) -> WorkerHandle:
        if self._worker is None:
            self._worker = WorkerHandle(self.address, self.python, self.preload)
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
            answer: dict[str, Any] = json.loads(worker.connection.recv_bytes(LARGEST_ANSWER_BYTES))
        except (OSError, EOFError, ValueError) as error:
            output, how = worker.last_output(), worker.end()
            self._worker = None
            said = f"{self.name}.{call}: the process of the environment"
            if isinstance(error, EOFError | ConnectionError):
                raise EnvProcessDiedError(f"{said} {how}{output}") from error
            raise EnvError(f"{said} its answer cannot be read: {error!r}{output}") from error
        if "error" in answer:
            kind = answer.get("kind")  # an interpreter of its own may have an older agentrl
            if kind == "config":
                raise ConfigError(str(answer["error"]))
            if kind == "outage":
                raise OutageError(str(answer["error"]))
            raise EnvError(f"{self.name}.{call} raised {answer['error']}{worker.last_output()}")
        return answer


def _result(answer: Mapping[str, Any]) -> Any:
    """The returned value of the method: a tuple as a tuple, anything else as text."""
    return tuple(answer["tuple"]) if "tuple" in answer else answer.get("text")
