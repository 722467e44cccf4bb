"""One environment, policy and seed over every transport: here, in a thread, in a process, over
HTTP, as OpenEnv's, from a server over processes.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl import plugins
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import Env, Isolation, Prompt
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.runner import Episode
from agentrl.rollout.seeds import derive_seed
from agentrl.testing import check_env
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Completion, Task, Terminated, Trajectory, Truncated
from tests.remote.served import served, spread

SOURCE = Path(__file__).parent / "one_env.py"
ADDRESS = f"file:{SOURCE}:Dials"
RENDERER = TemplateRenderer(ByteTokenizer())
SAID = [f"{number:03b}" for number in range(8)] + ["", "1", "é 漢 🦆 \u202e", "<tool_call>{"]


@dataclass(frozen=True, slots=True)
class ScriptedRoute:
    """A policy that says what the episode's seed and the turn say, wherever the environment is."""

    max_context: int = 1 << 20

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        ids = RENDERER.answer_ids(random.Random(derive_seed(episode.seed, turn)).choice(SAID))
        return Completion(ids, (-0.25,) * len(ids), (0,) * len(ids), "stop")


@dataclass(frozen=True, slots=True)
class Transport:
    """What makes the environment, and where it is said to run."""

    make: Callable[[], Env]
    isolation: Isolation | None = None


@contextmanager
def here(isolation: Isolation) -> Iterator[Transport]:
    yield Transport(env_factory(ADDRESS, isolation), isolation)


@contextmanager
def over(scheme: str) -> Iterator[Transport]:
    with served(plugins.load("envs", ADDRESS), name="dials") as server:
        yield Transport(plugins.load("envs", f"{scheme}{server.url}"))


@contextmanager
def over_processes() -> Iterator[Transport]:
    with spread(partial(env_factory, ADDRESS), 2) as server:
        yield Transport(plugins.load("envs", server.url))


TRANSPORTS = {
    "inline": lambda: here("inline"),
    "thread": lambda: here("thread"),
    "process": lambda: here("process"),
    "http": lambda: over(""),
    "openenv": lambda: over("openenv:"),
    "spread": over_processes,
}


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with TRANSPORTS[request.param]() as opened:
        yield opened


def trajectories(transport: Transport, episodes: int = 24) -> list[Trajectory]:
    """Episodes of six seeds, eight at a time, as they were but for when, and for how long."""

    async def play() -> list[Trajectory]:
        host = EnvPool({"dials": transport.make}, EnvDeadlines(), transport.isolation)
        player = EnvEpisodeRunner(ScriptedRoute(), RENDERER, host, Budget(turns=8), deadline=60)
        tasks = [
            Task("dials", number % 6, {"digits": 2 + number % 2}, f"{number}")
            for number in range(episodes)
        ]
        places = asyncio.Semaphore(8)

        async def one(task: Task) -> Trajectory:
            async with places:
                (trajectory,) = await player.play(
                    Assignment(task.id, task, derive_seed(7, task.id))
                )
            return trajectory

        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(one(task)) for task in tasks]
        await host.close()
        return [without_times(task.result()) for task in playing]

    return asyncio.run(play())


def without_times(trajectory: Trajectory) -> Trajectory:
    turns = tuple(
        replace(turn, asked=0.0, generate_seconds=0.0, env_seconds=0.0) for turn in trajectory.turns
    )
    return replace(trajectory, turns=turns, started=0.0, seconds=0.0)


@pytest.fixture(scope="module")
def played_here() -> list[Trajectory]:
    with here("inline") as transport:
        return trajectories(transport)


def test_the_episodes_are_worth_comparing(played_here: list[Trajectory]) -> None:
    assert {type(played.status) for played in played_here} == {Terminated, Truncated}
    assert len({played.messages for played in played_here}) == len(played_here)
    assert (
        len(
            [
                line
                for line in SOURCE.read_text().partition("class ")[2].splitlines()
                if line.strip()
            ]
        )
        <= 25
    )


def test_every_transport_gives_the_same_trajectories(
    transport: Transport, played_here: list[Trajectory]
) -> None:
    for played, expected in zip(trajectories(transport), played_here, strict=True):
        assert played == expected


def test_the_contract_is_kept_over_every_transport(transport: Transport) -> None:
    def finds(env: Any, rng: random.Random) -> str:
        return rng.choice(SAID)

    make = transport.make if transport.isolation != "thread" else in_thread(transport.make)
    assert check_env(make, seeds=(0, 3), actions=finds, options={"digits": 2}, deadline=30) == ()


def in_thread(make: Callable[[], Env]) -> Callable[[], Env]:
    """`check_env` plays on a thread of its own in any case, and reads the attribute."""

    def threaded() -> Env:
        env = make()
        env.isolation = "thread"  # type: ignore[attr-defined]
        return env

    return threaded
