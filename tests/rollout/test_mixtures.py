"""Mixtures in the scheduler, under the virtual clock: the weights hold, and each environment has
its own budget.
"""

import asyncio
import random
from collections import Counter
from typing import Any, ClassVar

import pytest

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import RetriesExhaustedError
from agentrl.flow import Retries, run_virtual
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.plugins import NoSettings
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.mixture import Mixture, Share
from agentrl.rollout.scheduler import Rollouts
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Group, Score, Trajectory

DEADLINES = Deadlines(reset=500, step=500, generate=1000, reward=50, episode=5000, stall=6000)


class Healthy:
    """One turn of a second."""

    seconds: ClassVar[float] = 1.0
    crashes: ClassVar[float] = 0.0

    async def reset(self, *, seed: int, options: Any) -> Any:
        self.rng = random.Random(seed)
        return "begin", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self.seconds * self.rng.lognormvariate(0, 1))
        if self.rng.random() < self.crashes:
            raise KeyError("gone")
        return "end", 1.0, True, False, {}

    async def close(self) -> None:
        pass


class Slow(Healthy):
    seconds = 20.0


class Crashing(Healthy):
    """Half of its tasks crash, whenever they are played."""

    crashes = 0.5


class Earned:
    async def score(self, trajectory: Trajectory) -> Score:
        return Score(trajectory.env_return)


ENVS = {"healthy": Healthy, "slow": Slow, "crashing": Crashing}


def play(
    steps: int,
    weights: dict[str, float],
    *,
    budget: int = 10**6,
    gives_up: bool = False,
    failed_before: int = 0,
) -> list[Group]:
    """The groups of so many steps of 10. `failed_before`: the tasks of each environment that failed
    in an earlier launch.
    """
    groups: list[Group] = []

    async def main() -> None:
        config = RolloutConfig(
            groups_per_step=10,
            group_size=2,
            max_staleness=1,
            deadlines=DEADLINES,
            retries=Retries(environment=1),
        )
        renderer = TemplateRenderer(ByteTokenizer())  # type: ignore[arg-type]
        engine = ScriptedEngine.replying(lambda request: b"go", max_batch=64)
        host = EnvPool(ENVS, config.deadlines)  # type: ignore[arg-type]
        sampling = SamplingParams(max_tokens=8, stop_token_ids=renderer.stop_token_ids)
        policy = EnginePolicy(engine, sampling, config.deadlines.generate, max_tokens={"slow": 1})
        shares = [
            Share(
                name,
                name,
                weight,
                SeededTasks(NoSettings(), name, 0),
                3 if name == "slow" else 2,
                budget,
            )
            for name, weight in weights.items()
        ]
        mixture = Mixture(shares)
        failed = [name for name in weights for _ in range(failed_before)]
        mixture.replay([(n, name, "failed") for n, name in enumerate(failed)], gives_up=gives_up)
        with Ledger(":memory:") as ledger:
            rollouts = Rollouts(
                config,
                tasks=mixture,
                runner=EnvEpisodeRunner(
                    policy, renderer, host, Budget(turns=8), config.deadlines.episode
                ),
                reward=Earned(),
                engine=engine,
                ledger=ledger,
                seed=0,
                groups=steps * 10,
                gives_up=gives_up,
            )
            async with engine, rollouts:
                for step in range(steps):
                    groups.extend(await rollouts.next_batch())
                    async with rollouts.new_weights(step + 1):
                        await engine.update_weights({}, step + 1)
        await host.close()

    run_virtual(main)
    return groups


def test_a_slow_and_a_crashing_environment_keep_their_shares_of_a_thousand_groups() -> None:
    groups = play(100, {"slow": 3, "crashing": 2, "healthy": 5})
    trained = Counter(group.task.env for group in groups)
    assert trained.total() == 1000
    for env, share in {"slow": 0.3, "crashing": 0.2, "healthy": 0.5}.items():
        assert abs(trained[env] / 1000 - share) < 0.02
    by_now = Counter(group.task.env for group in groups[:500])
    assert abs(by_now["slow"] / 500 - 0.3) < 0.04
    assert {len(group.trajectories) for group in groups if group.task.env == "slow"} == {3}
    assert {len(group.trajectories) for group in groups if group.task.env != "slow"} == {2}
    lengths = {
        len(t.turns[0].completion.token_ids)
        for g in groups
        if g.task.env == "slow"
        for t in g.trajectories
    }
    assert lengths == {1}


def test_a_spent_budget_ends_the_run_or_gives_the_weight_to_the_others() -> None:
    weights = {"crashing": 1.0, "healthy": 1.0}
    with pytest.raises(RetriesExhaustedError, match="max_failed_tasks of crashing allows only 3"):
        play(10, weights, budget=3)
    trained = Counter(group.task.env for group in play(10, weights, budget=3, gives_up=True))
    assert trained.total() == 100
    assert 0 < trained["crashing"] < 20


def test_what_an_earlier_launch_has_spent_of_a_budget_counts() -> None:
    with pytest.raises(RetriesExhaustedError, match=r"^4 tasks failed.*allows only 3") as ended:
        play(10, {"crashing": 1.0}, budget=3, gives_up=True, failed_before=2)
    assert str(ended.value).count("\n") == 2, "two more have failed"
