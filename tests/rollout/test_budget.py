"""The budget of an episode: turns, tokens and seconds, with one meaning wherever it is read."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.conversation.context import FULL, ContextPolicy, Summary
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget, OwnBudget
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.settings.sampling import SamplingParams
from agentrl.simulate.config import SimulationConfig
from agentrl.simulate.stages import workload
from agentrl.testing.engines import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Task, Trajectory, Truncated

RENDERER = TemplateRenderer(ByteTokenizer())


class Endless:
    """Never ends; each step takes ten seconds and pays one."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "go on", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(10)
        return "go on", 1.0, False, False, {}

    def close(self) -> None:
        pass


def played(budget: Budget, own: Budget | None = None, context: ContextPolicy = FULL) -> Trajectory:
    async def main() -> Trajectory:
        async with ScriptedEngine.replying(
            lambda request: b"abcdefghi", max_context=4096
        ) as engine:
            policy = EnginePolicy(
                engine, SamplingParams(max_tokens=64, stop_token_ids=RENDERER.stop_token_ids), 60.0
            )
            host = EnvPool({"endless": Endless}, EnvDeadlines())
            budgets = {"endless": own} if own is not None else {}
            runner = EnvEpisodeRunner(
                policy, RENDERER, host, budget, 900.0, context, own_budgets=budgets
            )
            (trajectory,) = await runner.play(Assignment("e", Task("endless", 0, {}), 0))
            await host.close()
        return trajectory

    return run_virtual(main)


@pytest.mark.parametrize(
    ("budget", "limit", "turns", "tokens"),
    [
        (Budget(turns=3), "turns", 3, [10, 10, 10]),
        (Budget(tokens=25), "tokens", 3, [10, 10, 5]),
        (Budget(tokens=20), "tokens", 2, [10, 10]),
        (Budget(tokens=1), "tokens", 1, [1]),
        (Budget(seconds=25), "seconds", 3, [10, 10, 10]),
        (Budget(seconds=0.1), "seconds", 1, [10]),
        (Budget(turns=2, tokens=500, seconds=500), "turns", 2, [10, 10]),
    ],
)
def test_an_episode_that_has_used_up_its_budget_is_truncated_with_what_it_earned(
    budget, limit, turns, tokens
):
    trajectory = played(budget)
    assert trajectory.status == Truncated(limit)
    assert [len(turn.completion.token_ids) for turn in trajectory.turns] == tokens
    assert trajectory.env_return == turns


def test_an_environment_with_a_budget_of_its_own_has_that():
    usual = Budget(turns=2, tokens=25)
    assert played(usual, usual.with_own(OwnBudget(turns=9))).status == Truncated("tokens")
    assert len(played(usual, usual.with_own(OwnBudget(turns=9, tokens=42))).turns) == 5
    assert usual.with_own(OwnBudget()) == usual


def test_a_summary_counts_its_tokens_and_ends_an_episode_that_has_none_left():
    trajectory = played(Budget(tokens=20), context=Summary(max_prompt_tokens=1, prompt="Sum up."))
    assert trajectory.status == Truncated("tokens")
    assert [turn.info.get("context") for turn in trajectory.turns] == [None, "summary"]


def test_deadlines_and_the_planned_work_follow_the_budget():
    long = {"sampling": {"max_tokens": 1000}}
    assert RolloutConfig(**long).deadlines.episode == 900 + 0.2 * 16_000
    assert RolloutConfig(**long, budget={"tokens": 5000}).deadlines.episode == 900 + 0.2 * 5000
    patient = RolloutConfig(budget={"seconds": 7200}).deadlines
    assert patient.episode > 7200 + patient.generate
    assert patient.group >= 2 * patient.episode
    with pytest.raises(
        ValidationError, match=r"raise rollout\.deadlines\.episode, or leave it out"
    ):
        RolloutConfig(budget={"seconds": 600}, deadlines={"episode": 600})
    longest = [
        workload(RolloutConfig(**long, budget=budget), SimulationConfig()).longest
        for budget in ({}, {"tokens": 5000})
    ]
    assert longest[0] - longest[1] == 11_000
