"""What is sampled and thrown away: stopped as soon as it is certain, and counted by reason. Under
the virtual clock.
"""

import asyncio

import pytest

from agentrl.flow import now
from agentrl.rollout.accounts import DiscardedTokens
from agentrl.rollout.seeds import SPLITS
from agentrl.testing import ScriptedEngine
from agentrl.trajectory import Score
from tests.rollout.test_scheduler import SlowEnv, Sum, World, config

TOKENS = 3
"""Of each answer: "go" and the stop token."""


def engine() -> ScriptedEngine:
    return ScriptedEngine.replying(lambda request: b"go", seconds_per_token=lambda request: 0.02)


def wasted(world: World) -> dict[str, float]:
    return {
        key.partition("/")[2]: n
        for key, n in world.metrics.items()
        if key.startswith("wasted_tokens/")
    }


def trained(world: World) -> int:
    return sum(
        trajectory.num_tokens
        for batch in world.batches
        for group in batch
        for trajectory in group.trajectories
    )


def test_a_run_in_which_all_is_trained_on_wastes_nothing():
    world = World(config(max_staleness=2), steps=5, engine=engine()).run()
    assert world.metrics["wasted_tokens"] == world.metrics["wasted_share"] == 0.0
    assert world.metrics["generated_tokens"] == trained(world)


class Crashing(SlowEnv):
    """The first episode of each task crashes in its first step."""

    trouble = staticmethod(lambda seed, attempts: "crash" if attempts[seed] == 1 else "")


class Varied(Sum):
    async def score(self, trajectory):
        return Score(float(trajectory.task.seed // len(SPLITS) % 2 * len(trajectory.turns)))


@pytest.mark.parametrize(
    ("settings", "parts", "why"),
    [
        ({}, {"env": Crashing}, "failed"),
        ({"extra_members": 2}, {}, "surplus"),
        ({"max_staleness": 1, "staleness_rule": "drop"}, {"train_seconds": 1.0}, "stale"),
        ({"filter_zero_variance": True}, {"reward": Varied()}, "filtered"),
    ],
)
def test_tokens_that_are_thrown_away_are_counted_by_the_reason(settings, parts, why):
    world = World(config(**settings), steps=6, engine=engine(), **parts).run()
    counted = wasted(world)
    assert set(counted) == {why}
    assert counted[why] % TOKENS == 0
    assert world.metrics["wasted_tokens"] == counted[why]
    assert world.metrics["wasted_share"] == pytest.approx(
        counted[why] / (counted[why] + trained(world))
    )
    # The rest are answers that were cut short, of less than an answer each.
    cut = world.metrics["generated_tokens"] - trained(world) - counted[why]
    fates = world.ledger.episode_fates()
    assert 0 <= cut <= TOKENS * (fates.cancelled + fates.stale)


class Uneven(SlowEnv):
    """The steps of every third task last a hundred times as long."""

    async def step(self, action):
        await asyncio.sleep(50.0 if self.seed % 3 == 0 else 0.5)
        self.left -= 1
        return "on", 0.5, self.left == 0, False, {}

    async def reset(self, *, seed, options):
        self.seed = seed // len(SPLITS)
        return await super().reset(seed=seed, options=options)


def test_nothing_is_sampled_for_a_group_that_is_certain_to_be_dropped_while_the_trainer_works():
    asked, live = {}, []

    def reply(request):
        asked[request.id.split("/")[0]] = now()
        return b"go"

    class Timed(ScriptedEngine):
        async def update_weights(self, weights, version):
            live.append(now())
            await super().update_weights(weights, version)

    settings = config(max_staleness=1, staleness_rule="drop")
    world = World(
        settings, steps=12, env=Uneven, engine=Timed.replying(reply), train_seconds=60.0
    ).run()
    records = [world.ledger.task(number) for number in range(world.ledger.task_fates().total)]
    dropped = [record for record in records if record.fate == "stale"]
    assert len(dropped) > 3
    for record in dropped:
        last_step = record.admitted_version + settings.max_staleness
        chosen = live[last_step] - world.train_seconds
        assert asked[record.task.id] <= chosen


def test_the_count_begins_again_with_each_step():
    tokens = DiscardedTokens()
    tokens.add_episodes("stale", ())
    assert tokens.metrics() == {"wasted_tokens": 0.0, "wasted_share": 0.0}
