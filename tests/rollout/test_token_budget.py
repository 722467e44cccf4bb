"""The budget of tokens: the learned cost of an environment, the limit, and who is preempted."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest

from agentrl.config import RunConfig, validate_config
from agentrl.flow import Flow, run_virtual
from agentrl.recipes.evaluate import play_members
from agentrl.rollout.assignment import Assignment, Report, TokensSampled
from agentrl.rollout.member import Member
from agentrl.rollout.token_budget import EnvironmentCost, Holding, TokenBudget
from agentrl.simulate.config import SimulatedEngineConfig
from agentrl.simulate.engine import SimulatedEngine
from agentrl.trajectory import Task, Terminated, Trajectory

MAX_CONTEXT = 1000


def served(kv_tokens: int | None) -> SimulatedEngine:
    """An engine of which only the size of its KV cache is asked."""
    return SimulatedEngine(SimulatedEngineConfig(max_context=MAX_CONTEXT, kv_tokens=kv_tokens))


def test_the_cost_of_an_environment_is_learned_by_turn() -> None:
    cost = EnvironmentCost(4)
    # Nothing is known: a new episode fills the context at once, and goes on to its last turn.
    of_live, of_new = cost.expected(MAX_CONTEXT)
    assert of_live.tolist() == [0.0] * 5
    assert of_new.tolist() == [0.0] + [MAX_CONTEXT] * 4
    for _ in range(2):  # two episodes: 100 tokens after the first answer, then 50 more
        cost.begin()
        cost.advance(0, 1, 100)
        cost.hold(0, -1, 0)
        cost.hold(1, 1, 100)
    # The second turn is expected to add as much as the first one, and so on.
    np.testing.assert_allclose(cost.expected(MAX_CONTEXT)[1], [0, 100, 200, 300, 400])
    cost.end(1)  # one of them ends, the other one goes on
    cost.hold(1, -1, -100)
    cost.advance(1, 2, 50)
    cost.hold(1, -1, -100)
    cost.hold(2, 1, 150)
    of_live, of_new = cost.expected(MAX_CONTEXT)
    # Earlier events count a little less, so "one of two" is not exactly a half.
    goes_on = 1 / (1 + 255 / 256)
    expected = [0, 100, goes_on * 150, goes_on * 200, goes_on * 250]
    np.testing.assert_allclose(of_new, expected, rtol=1e-12)
    np.testing.assert_allclose(of_live, [150, 200, 250, 0, 0], rtol=1e-12)


def test_many_turns_are_counted_in_spans_and_a_mean_fades() -> None:
    cost = EnvironmentCost(640)
    assert [cost.stage(answers) for answers in (0, 1, 10, 11, 640)] == [0, 1, 1, 2, 64]
    for _ in range(3000):
        cost.advance(0, 1, 100)
    for _ in range(3000):
        cost.advance(0, 1, 300)
    assert cost.expected(MAX_CONTEXT)[1][1] == pytest.approx(300, rel=1e-3)


def test_a_run_begins_with_what_surely_fits_and_goes_on_with_what_was_learned() -> None:
    async def main() -> None:
        budget = TokenBudget(served(10_000), turns=2)
        changes: list[int | None] = []
        share = budget.join(lambda: changes.append(share.limit))
        assert share.limit == 9  # 0.9 of the cache / the longest context
        gate = asyncio.Event()

        async def episode(holding: Holding) -> int:
            holding.answered(1, 100)
            await gate.wait()
            holding.end(whole=True)
            return 1

        async with Flow("episodes") as flow:
            for number in range(9):
                flow.start(share.play("env", episode), name=str(number))
            await asyncio.sleep(1)
            # Two turns of 100 tokens: 9000 / 200 when those that live have ended.
            assert (share.limit, share.live, budget.held) == (9 + 45, 9, 900)
            gate.set()
        assert (share.live, budget.held) == (0, 0)
        # None has come to a second turn.
        assert share.limit == changes[-1] == 90
        assert budget.metrics()["live_episodes/tokens_limit"] == 10_000

    run_virtual(main)


def test_engines_that_do_not_tell_what_they_hold_limit_nothing() -> None:
    async def main() -> None:
        for engine in (None, served(None)):
            budget = TokenBudget(engine, turns=2)
            share = budget.join()

            async def episode(holding: Holding) -> str:
                holding.answered(1, 1 << 40)
                await asyncio.sleep(1)
                return "played"

            assert await share.play("env", episode) == "played"
            assert share.limit is None
            assert budget.metrics() == {}

    run_virtual(main)


def test_a_hard_cap_preempts_the_youngest() -> None:
    async def main() -> None:
        budget = TokenBudget(served(1000), turns=8)
        share = budget.join()

        def growing(tokens: int) -> Callable[[Holding], Awaitable[str]]:
            async def episode(holding: Holding) -> str:
                await asyncio.sleep(1)
                holding.answered(1, tokens)
                await asyncio.sleep(1)
                return "played"

            return episode

        async with Flow("episodes") as flow:
            sizes = (600, 300, 200, 50)
            playing = [
                flow.start(share.play("env", growing(size)), name=str(size)) for size in sizes
            ]
        # 600 + 300 + 200 tokens do not fit: the last to begin goes, which has reported nothing yet,
        # and then the one before.
        assert [task.result() for task in playing] == ["played", "played", None, None]
        assert (share.live, budget.held, share.preempted) == (0, 0, 2)

    run_virtual(main)


def test_who_is_cancelled_while_it_is_preempted_stays_cancelled() -> None:
    async def main() -> None:
        budget = TokenBudget(served(1000), turns=8)
        share = budget.join()
        begun: list[Holding] = []

        async def episode(holding: Holding) -> None:
            begun.append(holding)
            await asyncio.sleep(1)

        async with Flow("episodes") as flow:
            playing = flow.start(share.play("env", episode), name="episode")
            await asyncio.sleep(0)
            begun[0].preempt()
            asyncio.get_running_loop().call_soon(playing.cancel)
        assert playing.cancelled()
        assert (share.live, budget.held, share.preempted) == (0, 0, 0)

    run_virtual(main)


def test_an_episode_that_ends_as_it_is_preempted_keeps_its_result() -> None:
    async def main() -> None:
        budget = TokenBudget(served(1000), turns=8)
        share = budget.join()

        async def old(holding: Holding) -> str:
            await asyncio.sleep(1)
            holding.answered(1, 900)
            await asyncio.sleep(5)
            return "old"

        async def young(holding: Holding) -> str:
            await asyncio.sleep(2)
            holding.answered(1, 500)  # it preempts itself, and is over before that happens
            return "young"

        async with Flow("episodes") as flow:
            first, second = (
                flow.start(share.play("env", one), name=one.__name__) for one in (old, young)
            )
        assert (first.result(), second.result()) == ("old", "young")
        await asyncio.sleep(1)  # no cancellation is left over
        assert (share.live, budget.held, share.preempted) == (0, 0, 0)

    run_virtual(main)


@dataclass
class _Runner:
    """Episodes that hold ever more, and how many of them lived at once."""

    contexts: tuple[int, ...] = (100, 200, 300, 400)
    budget: TokenBudget | None = None
    live: int = 0
    most: int = 0
    most_tokens: int = 0
    begun: int = 0

    async def play(self, assignment: Assignment, report: Report) -> tuple[Trajectory]:
        self.live, self.begun = self.live + 1, self.begun + 1
        self.most = max(self.most, self.live)
        try:
            for context in self.contexts:
                await asyncio.sleep(1)
                report(TokensSampled(10, 1, context))
                if self.budget is not None:
                    self.most_tokens = max(self.most_tokens, self.budget.held)
        finally:
            self.live -= 1
        return (Trajectory(assignment.id, assignment.task, (), Terminated()),)


def run_config() -> RunConfig:
    return validate_config({"env": {"name": "guess_number"}}).config


def test_evaluations_play_as_many_episodes_as_the_caches_hold() -> None:
    async def main() -> None:
        budget = TokenBudget(served(4000), turns=4)
        runner, config = _Runner(budget=budget), run_config()
        tasks = [Task("guess_number", seed, {}, f"t{seed}") for seed in range(60)]
        results = await play_members(Member(runner), tasks, config, tokens=budget)
        assert [result.trajectories[0].task for result in results] == tasks
        assert 9 <= runner.most < 36  # between 100 and 400 tokens each, in 3600
        assert 2400 < runner.most_tokens <= 3600
        assert runner.begun == len(tasks)  # none was preempted
        assert (budget.held, budget.metrics()["live_episodes/tokens"]) == (0, 0)
        free = _Runner()
        await play_members(Member(free), tasks, config)
        assert free.most == 60

    run_virtual(main)


def test_an_evaluation_plays_again_what_was_preempted() -> None:
    async def main() -> None:
        runner = _Runner(contexts=(10, 20, 30, 600, 600))  # the first turns promise too much
        config = run_config()
        tasks = [Task("guess_number", seed, {}, f"t{seed}") for seed in range(40)]
        budget = TokenBudget(served(4000), turns=5)
        results = await play_members(Member(runner), tasks, config, tokens=budget)
        assert [result.trajectories[0].task for result in results] == tasks
        assert runner.begun > len(tasks)
        assert (runner.live, budget.held) == (0, 0)

    run_virtual(main)
