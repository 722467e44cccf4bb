"""Going back to a state: from there an episode goes on as if it had never been interrupted."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import plugins
from agentrl.envs.guess_number import GuessNumber
from agentrl.errors import EnvError
from agentrl.hosting.calls import calls_taken
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.wrappers import address, wrapper
from agentrl.protocols import Env, StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.testing.envs import _plausible_message
from tests.properties import examples
from tests.remote.served import served

Episode = list[tuple[Any, ...]]

TASK = {"instruction": "", "test": "true", "short_calls": True}
QUESTION = {"prompt": "What is 6 times 7?", "answer": "42", "tool": "calculator"}
BUILT_IN: dict[str, Mapping[str, Any]] = {
    "calculator": {},
    "frozen_lake": {"slippery": True},
    "guess_number": {},
    "kuhn_poker": {},
    "oracle": {"problem": "corridor"},
    "qa": QUESTION,
    "search": {"short_calls": True},
    "shop": {},
    "sokoban": {},
    "text_maze": {},
    "gymnasium": {"id": "Taxi-v4"},
}
"""The options of every built-in environment that needs no sandbox."""
WRAPPERS = [
    wrapper({"name": "time_limit", "turns": 5}),
    wrapper({"name": "action_format", "pattern": "<a>(.*)</a>"}),
]


async def go_on(env: LiveEnv, actions: list[str]) -> Episode:
    """The replies to these actions, up to the end of the episode, without the times of calls."""
    replies: Episode = []
    for action in actions:
        *reply, info = await env.step(action)
        made, info = calls_taken(info)
        replies.append((*reply, {**info, "made": made}))
        if replies[-1][2] or replies[-1][3]:
            break
    return replies


def check_way_back(
    make: Callable[[], Env], options: Mapping[str, Any], seed: int, cut: int, then: int = 4
) -> None:
    """After `cut` plausible actions, the instance, another one and the same again go on alike."""
    asyncio.run(_check_way_back(make, options, seed, cut, then))


async def _check_way_back(
    make: Callable[[], Env], options: Mapping[str, Any], seed: int, cut: int, then: int
) -> None:
    pool = EnvPool({"env": make}, EnvDeadlines(reset=60, step=60, tool=60))
    first, second = pool.acquire("env"), pool.acquire("env")
    rng = random.Random(seed)
    try:
        shown, _ = await first.reset(seed, options)
        over = False
        for _ in range(cut):
            action = _plausible_message(first.env, shown, rng)
            shown, _, ended, cut_off, _ = await first.step(action)
            over = ended or cut_off
            if over:
                return
        tools, prompt = first.tools, first.system_prompt
        state = await first.snapshot()
        rest = [_plausible_message(first.env, shown, rng) for _ in range(then)]
        uninterrupted = await go_on(first, rest)
        await second.reset(seed + 1, options)
        await second.restore(state)
        assert (second.tools, second.system_prompt) == (tools, prompt)
        assert await go_on(second, rest) == uninterrupted
        await first.reset(seed + 2, options)
        await first.restore(state)
        assert await go_on(first, rest) == uninterrupted
    finally:
        await first.close()
        await second.close()


@pytest.mark.parametrize("name", BUILT_IN)
@examples(8)
@given(st.integers(0, 50), st.integers(0, 4))
def test_every_built_in_environment_goes_on_from_a_state_as_if_never_interrupted(
    name: str, seed: int, cut: int
) -> None:
    check_way_back(env_factory(name), BUILT_IN[name], seed, cut)


def test_all_built_in_environments_are_tried() -> None:
    sandboxed = {"python_tool", "repair", "shell"}  # below
    own = {
        found.name
        for found in plugins.installed("envs")
        if found.address.startswith("agentrl.envs.")
    }
    assert own > BUILT_IN.keys()
    missing = own - BUILT_IN.keys() - sandboxed
    assert not missing, f"write the options of {missing}"


@pytest.mark.parametrize(
    ("name", "options", "actions", "shown"),
    [
        (
            "python_tool",
            {"short_calls": True, "allow_unsafe": True},
            ["python x = 41", "python print(x + 1)"],
            "42",
        ),
        (
            "shell",
            {"sandbox": {"name": "agentrl.testing.sandboxes:FakeSandboxes"}, **TASK},
            ["run echo 42 > kept", "run cat kept"],
            "42",
        ),
    ],
)
def test_what_an_episode_has_in_its_sandbox_is_there_again(
    name: str, options: Mapping[str, Any], actions: list[str], shown: str
) -> None:
    async def main() -> None:
        pool = EnvPool({name: env_factory(name)}, EnvDeadlines(reset=60, step=60, tool=60))
        first, second = pool.acquire(name), pool.acquire(name)
        try:
            await first.reset(0, options)
            before = await first.snapshot()
            await first.step(actions[0])
            after = await first.snapshot()
            for state, expected in ((before, False), (after, True)):
                await second.restore(state)
                assert (shown in (await second.step(actions[1]))[0]) is expected
            assert shown in (await first.step(actions[1]))[0]
        finally:
            await first.close()
            await second.close()

    asyncio.run(main())


class Draws:
    """Draws numbers; deterministic, with no way back of its own."""

    deterministic = True

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.rng = random.Random(seed)
        return "draw", {}

    def step(self, action: str) -> StepResult:
        return f"{action} {self.rng.random()}", 0.0, False, False, {}

    def close(self) -> None:
        pass


class DrawsLater(Draws):
    """The same, async."""

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)


class Forgets(Draws):
    """Says that it is deterministic, and draws from what no seed decides."""

    drawn = 0

    def step(self, action: str) -> StepResult:
        Forgets.drawn += 1
        return f"{Forgets.drawn}", 0.0, False, False, {}


@pytest.mark.parametrize("env", [Draws, DrawsLater])
def test_a_deterministic_environment_goes_back_by_its_actions(env: type[Env]) -> None:
    check_way_back(env, {"level": 1}, seed=3, cut=3)


def test_a_replay_that_gives_other_replies_is_refused() -> None:
    with pytest.raises(EnvError, match="declares itself deterministic, and its 2 actions"):
        check_way_back(Forgets, {}, seed=0, cut=2)


def test_an_environment_without_a_way_back_says_what_to_write() -> None:
    class Plain(Draws):
        deterministic = False

    with pytest.raises(EnvError, match="Plain cannot go back to a state: write its `snapshot`"):
        check_way_back(Plain, {}, seed=0, cut=0)


def transports() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "thread": lambda: nullcontext(partial(_threaded, GuessNumber)),
        "process": lambda: nullcontext(env_factory("guess_number", "process")),
        "http": lambda: served(GuessNumber),
        "wrapped": lambda: nullcontext(plugins.load("envs", address("guess_number", WRAPPERS))),
        "wrapped in a process": lambda: nullcontext(
            env_factory(address("guess_number", WRAPPERS), "process")
        ),
    }


def _threaded(make: Callable[[], Env]) -> Env:
    env = make()
    env.isolation = "thread"  # type: ignore[attr-defined]
    return env


@pytest.mark.parametrize("name", transports())
@pytest.mark.parametrize("cut", [0, 2])
def test_states_cross_every_transport(name: str, cut: int) -> None:
    with transports()[name]() as given:
        make = given if callable(given) else partial(RemoteEnv, [given.url])
        check_way_back(make, {}, seed=5, cut=cut)


def test_a_server_takes_no_state_that_it_has_not_given() -> None:
    async def main(url: str, other: str) -> None:
        pool = EnvPool(
            {"one": partial(RemoteEnv, [url]), "other": partial(RemoteEnv, [other])},
            EnvDeadlines(),
        )
        here, there = pool.acquire("one"), pool.acquire("other")
        await here.reset(0, {})
        await there.reset(0, {})
        state = (await there.snapshot()).replace(other.encode(), url.encode())
        with pytest.raises(EnvError, match="was not given by this server"):
            await here.restore(state)
        await here.close()
        await there.close()

    with served(GuessNumber) as one, served(GuessNumber) as other:
        asyncio.run(main(one.url, other.url))
