"""Environments in threads: what blocks, hangs or breaks costs its own episode only. Real time,
short deadlines.
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from agentrl.errors import ConfigError, DeadlineError, EnvError
from agentrl.flow import now, run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import Isolation


class Blocking:
    """A sync environment that blocks, hangs or raises as its options say."""

    closed = 0

    def reset(self, *, seed, options):
        self.options = dict(options)
        return "begin", {}

    def step(self, action):
        if "hang" in self.options:
            self.options["hang"].wait()
        if "raise" in self.options:
            raise ZeroDivisionError("mine")
        if "shape" in self.options:
            return "only an observation"
        time.sleep(self.options.get("block", 0))
        return threading.current_thread().name, 0.0, True, False, {}

    def close(self):
        type(self).closed += 1


def host(**deadlines) -> EnvPool:
    return EnvPool({"blocking": Blocking}, EnvDeadlines(**deadlines))


def test_a_task_of_an_environment_that_the_run_has_not_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="a task is of the environment 'other', and this run has blocking"
    ):
        host().acquire("other")


def test_a_blocking_env_runs_in_a_thread_of_its_own_and_the_loop_goes_on():
    async def main() -> None:
        envs = host()
        live = [envs.acquire("blocking") for _ in range(4)]
        for env in live:
            await env.reset(0, {"block": 0.3})
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            stepping = [group.create_task(env.step("go")) for env in live]
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert not any(task.done() for task in stepping)
        assert time.perf_counter() - started < 0.9
        assert {task.result()[0] for task in stepping} == {"env-Blocking"}
        for env in live:
            await envs.release("blocking", env)
        await envs.close()

    asyncio.run(main())


def test_a_hung_env_is_left_at_its_deadline_and_never_used_again():
    release = threading.Event()

    async def main() -> None:
        envs = host(step=0.2)
        env = envs.acquire("blocking")
        await env.reset(0, {"hang": release})
        with pytest.raises(DeadlineError, match=r"rollout\.deadlines\.step"):
            await env.step("go")
        await envs.release("blocking", env)
        assert envs.acquire("blocking") is not env

    asyncio.run(main())
    release.set()


def test_a_sound_env_is_used_again_and_closed_at_the_end():
    async def main() -> None:
        envs = host()
        env = envs.acquire("blocking")
        await env.reset(0, {})
        await envs.release("blocking", env)
        assert envs.acquire("blocking") is env
        await envs.release("blocking", env)
        before = Blocking.closed
        await envs.close()
        for _ in range(100):
            if Blocking.closed == before + 1:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("not closed")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"raise": True},
            r"Blocking.step raised ZeroDivisionError: mine \(.*test_host.py:\d+ in step\)",
        ),
        ({"shape": True}, r"Blocking.step must return \(observation: str, reward"),
    ],
)
def test_what_an_env_does_wrong_is_said_with_its_own_frame(options, said):
    async def main() -> None:
        env = host().acquire("blocking")
        await env.reset(0, options)
        with pytest.raises(EnvError, match=said):
            await env.step("go")
        assert env.broken
        await env.close()

    asyncio.run(main())


class SlowToClose:
    """Its step is sync, its close async, and hangs where the options say so."""

    closed: ClassVar[list[int]] = []

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.seed, self.hangs = seed, bool(options.get("hangs"))
        return "go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "over", 0.0, True, False, {}

    async def close(self) -> None:
        await asyncio.sleep(math.inf if self.hangs else 0)
        self.closed.append(self.seed)


@pytest.mark.parametrize("isolation", ["thread", "inline"])
def test_an_async_close_beside_a_sync_step_is_awaited(isolation: Isolation) -> None:
    async def main() -> None:
        envs = EnvPool({"slow": SlowToClose}, EnvDeadlines(), isolation)
        live = envs.acquire("slow")
        await live.reset(7, {})
        await envs.release("slow", live)
        await envs.close()

    SlowToClose.closed.clear()
    asyncio.run(main())
    assert SlowToClose.closed == [7]


def test_closes_that_hang_take_one_deadline_together() -> None:
    async def main() -> float:
        envs = EnvPool({"slow": SlowToClose}, EnvDeadlines(close=5.0), "inline")
        live = [envs.acquire("slow") for _ in range(8)]
        for number, env in enumerate(live):
            await env.reset(number, {"hangs": True})
        for env in live:
            await envs.release("slow", env)
        began = now()
        await envs.close()
        return now() - began

    assert run_virtual(main) == pytest.approx(5.0)


class Leaves:
    """An environment whose step or constructor raises what would end a program in silence."""

    raised: BaseException | None = None
    made: BaseException | None = None

    def __init__(self):
        if self.made is not None:
            raise self.made

    def reset(self, *, seed, options):
        return "begin", {}

    def step(self, action):
        raise self.raised

    def close(self):
        """Nothing is held."""


class LeavesAsync(Leaves):
    async def step(self, action):
        raise self.raised


@pytest.mark.parametrize("kind", [Leaves, LeavesAsync])
@pytest.mark.parametrize("isolation", ["inline", "thread"])
@pytest.mark.parametrize(
    "raised", [SystemExit(3), asyncio.CancelledError(), StopIteration(), KeyError("x")], ids=repr
)
def test_an_env_that_exits_or_cancels_costs_its_own_episode(
    kind, isolation: Isolation, raised: BaseException
) -> None:
    async def main() -> None:
        env = EnvPool(
            {"it": type("Leaves", (kind,), {"raised": raised})}, EnvDeadlines(), isolation
        ).acquire("it")
        await env.reset(0, {})
        with pytest.raises(EnvError, match=rf"Leaves.step raised .*{type(raised).__name__}"):
            await env.step("go")
        assert env.broken
        await env.close()

    asyncio.run(main())


def test_an_env_that_exits_when_it_is_made_costs_its_own_episode() -> None:
    kind = type("Leaves", (Leaves,), {"made": SystemExit("usage: game.py")})
    with pytest.raises(
        EnvError,
        match=r"making the environment 'it' raised SystemExit: usage: game.py \(.*in __init__\)",
    ):
        EnvPool({"it": kind}, EnvDeadlines()).acquire("it")


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError()], ids=repr)
def test_a_player_that_exits_or_cancels_is_a_failure_that_is_told(raised: BaseException) -> None:
    def player(env, rng):
        raise raised

    async def main() -> None:
        env = host().acquire("blocking")
        await env.reset(0, {})
        with pytest.raises(
            EnvError, match=rf"a player of Blocking raised {type(raised).__name__}.*in player\)"
        ):
            await env.consult(player, random.Random(0))
        await env.close()

    asyncio.run(main())


def test_the_end_of_a_run_is_no_failure_of_its_env() -> None:
    release = threading.Event()

    async def main() -> None:
        env = host().acquire("blocking")
        await env.reset(0, {"hang": release})
        async with asyncio.TaskGroup() as group:
            stepping = group.create_task(env.step("go"))
            await asyncio.sleep(0.01)
            stepping.cancel()
        assert stepping.cancelled()
        assert env.broken

    asyncio.run(main())
    release.set()
