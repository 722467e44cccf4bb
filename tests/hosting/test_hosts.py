"""The contract of the three hosts: an environment that fails in whatever way costs one instance."""

import asyncio
import gc
import json
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, DeadlineError, EnvError, EnvProcessDiedError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.inline import InlineHost
from agentrl.hosting.live_env import LiveEnv, host_for
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process import ProcessHost
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.thread import ThreadHost
from agentrl.hosting.wrappers import Wrapper
from agentrl.protocols import Env
from tests.processes import still_alive

PATIENT = EnvDeadlines()
HASTY = EnvDeadlines(step=0.3, close=0.3)


class Unruly:
    """An environment that does what its options say, and notes in a file that it was closed."""

    tools = ()
    system_prompt = "Be good."

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        self.does, self.note = options.get("does"), options.get("note")
        self.episodes = getattr(self, "episodes", 0) + 1
        if self.does == "refuse":
            raise ConfigError("these options are wrong")
        return "begin", {"episodes": self.episodes, "pid": os.getpid()}

    def step(self, action: str) -> Any:
        match self.does:
            case "hang":
                self.hang()
            case "raise":
                raise ZeroDivisionError("mine")
            case "exit":
                raise SystemExit(3)
            case "reply":
                return "only an observation"
        return f"did {action}", 1.0, True, False, {}

    def hang(self) -> None:
        __import__("threading").Event().wait()

    def close(self) -> None:
        if self.note:
            with open(self.note, "a") as file:
                file.write("closed\n")


class Polite(Unruly):
    """The same on the event loop, where a hang must be an await."""

    isolation = "inline"

    async def step(self, action: str) -> Any:
        if self.does == "hang":
            await asyncio.Event().wait()
        return super().step(action)


class ClosesSlowly(Unruly):
    async def close(self) -> None:
        await asyncio.sleep(0 if self.does != "hang" else 3600)
        super().close()


class ClosesSlowlyInline(ClosesSlowly):
    isolation = "inline"


HOSTS: dict[str, tuple[type, Callable[[], Env], Callable[[], Env]]] = {
    "inline": (InlineHost, Polite, ClosesSlowlyInline),
    "thread": (ThreadHost, Unruly, ClosesSlowly),
    "process": (
        ProcessHost,
        lambda: ProcessEnv(f"{__name__}:Unruly"),
        lambda: ProcessEnv(f"{__name__}:ClosesSlowly"),
    ),
}


@pytest.fixture(params=HOSTS)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def play(live: LiveEnv, options: Mapping[str, Any]) -> Any:
    await live.reset(0, options)
    return await live.step("this")


def wait_for(note: Path) -> None:
    """Wait for the note of a close, which may be written by a thread after `close` has returned."""
    while not note.exists():
        time.sleep(0.005)


def test_a_sound_instance_is_used_again_and_closed_once(place: str, tmp_path) -> None:
    kind, make, _ = HOSTS[place]
    note = tmp_path / "note"

    async def main() -> None:
        assert isinstance(host_for(make()), kind)
        pool = EnvPool({"it": make}, PATIENT)
        live = pool.acquire("it")
        for episode in (1, 2):
            observation, info = await live.reset(0, {"note": str(note)})
            assert (observation, info["episodes"]) == ("begin", episode)
            assert live.system_prompt == "Be good."
            assert await live.step("this") == ("did this", 1.0, True, False, {})
            await pool.release("it", live)
            assert pool.acquire("it") is live
        assert not live.broken
        await live.close()
        await asyncio.to_thread(wait_for, note)

    asyncio.run(main())
    assert note.read_text() == "closed\n"


@pytest.mark.parametrize(
    ("does", "error", "said"),
    [
        ("raise", EnvError, r"step raised ZeroDivisionError: mine \(.*test_hosts.py:\d+ in step\)"),
        ("exit", EnvError, r"step raised SystemExit: 3|ended with exit status 3"),
        ("reply", EnvError, r"step must return \(observation: str, reward"),
        ("refuse", ConfigError, "these options are wrong"),
    ],
)
def test_a_failure_is_raised_with_its_cause_and_breaks_the_instance(
    place: str, does: str, error: type[Exception], said: str
) -> None:
    async def main() -> None:
        pool = EnvPool({"it": HOSTS[place][1]}, PATIENT)
        live = pool.acquire("it")
        with pytest.raises(error, match=said) as caught:
            await play(live, {"does": does})
        assert isinstance(caught.value, EnvProcessDiedError) == (
            (place, does) == ("process", "exit")
        )
        assert live.broken
        await pool.release("it", live)
        assert pool.acquire("it") is not live

    asyncio.run(main())


def test_an_instance_that_hangs_is_abandoned_at_its_deadline(place: str) -> None:
    async def main() -> None:
        live = LiveEnv(HOSTS[place][1](), HASTY)
        _, info = await live.reset(0, {"does": "hang"})
        with pytest.raises(DeadlineError, match=r"rollout\.deadlines\.step"):
            await live.step("this")
        assert live.broken
        await live.close()  # returns, although the call never does
        if info["pid"] != os.getpid():
            assert await asyncio.to_thread(still_alive, [info["pid"]], 10) == []

    asyncio.run(main())


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_async_close_is_awaited(place: str, wrapped: bool, tmp_path) -> None:
    make, note = HOSTS[place][2], tmp_path / "note"

    async def main() -> None:
        # A process wraps where the environment runs, by its address.
        env = Wrapper(make()) if wrapped and place != "process" else make()
        live = LiveEnv(env, PATIENT)
        await live.reset(0, {"note": str(note)})
        await live.close()
        assert note.exists()

    asyncio.run(main())


def test_a_close_that_hangs_is_given_up_at_its_deadline(place: str, tmp_path, caplog) -> None:
    async def main() -> None:
        live = LiveEnv(HOSTS[place][2](), HASTY)
        await live.reset(0, {"does": "hang", "note": str(tmp_path / "note")})
        await live.close()
        assert not (tmp_path / "note").exists()

    asyncio.run(main())
    assert "rollout.deadlines.close" in caplog.text


def first_word(env: Any, rng: random.Random) -> str:
    return json.dumps([type(env).__name__, rng.random()])


def test_a_player_is_called_where_the_environment_runs(place: str) -> None:
    async def main() -> None:
        live = LiveEnv(HOSTS[place][1](), PATIENT)
        await live.reset(0, {})
        name, drawn = json.loads(await live.consult(first_word, random.Random(7)))
        assert name == ("Polite" if place == "inline" else "Unruly")
        assert drawn == random.Random(7).random()
        await live.close()

    asyncio.run(main())


class SlowlyAsync(Unruly):
    """An environment whose step is an async method behind a lock, as some libraries have."""

    def __init__(self, entered: threading.Event, left: threading.Event) -> None:
        self.entered, self.left = entered, left

    def step(self, action: str) -> Any:
        self.entered.set()
        self.left.wait()
        return self.answer(action)

    async def answer(self, action: str) -> Any:
        return f"did {action}", 1.0, True, False, {}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "with the answer"])
def test_a_caller_that_leaves_closes_the_coroutine_that_its_thread_answers(
    wrapped: bool, answered: bool
) -> None:
    entered, left = threading.Event(), threading.Event()
    env: Env = SlowlyAsync(entered, left)

    async def leave() -> None:
        host = ThreadHost(Wrapper(env) if wrapped else env)
        await host.reset(60, seed=1, options={})
        call = asyncio.ensure_future(host.step("step", 60, "x"))
        await asyncio.to_thread(entered.wait)
        if answered:
            # The thread's answer and the caller's end come in the same turn of the loop.
            asyncio.get_running_loop().call_soon(call.cancel)
            left.set()
            time.sleep(0.05)  # noqa: ASYNC251  the loop stands still
        else:
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        left.set()
        await host.close(60)
        await asyncio.sleep(0.05)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(leave())
        gc.collect()
    assert not [warning for warning in caught if "never awaited" in str(warning.message)]
