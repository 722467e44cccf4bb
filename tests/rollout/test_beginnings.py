"""Members of a group begin with the same task; where an environment ignores its seed, a metric says
so.
"""

import random
from dataclasses import replace

import pytest

from agentrl.observe.metrics import rollout_metrics
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Group, Score, Trajectory
from tests.rollout.test_scheduler import SlowEnv, World, config


class Seeded(SlowEnv):
    """Begins as its seed says."""

    async def reset(self, *, seed, options):
        await super().reset(seed=seed, options=options)
        return f"begin with {random.Random(seed).random()}", {}


class Careless(SlowEnv):
    """Begins as it likes."""

    drawn = random.Random(0)

    async def reset(self, *, seed, options):
        await super().reset(seed=seed, options=options)
        return f"begin with {self.drawn.random()}", {}


class Prompts(SlowEnv):
    """Only its system prompt differs."""

    async def reset(self, *, seed, options):
        self.system_prompt = f"You are number {Careless.drawn.random()}."
        return await super().reset(seed=seed, options=options)


class Game(SlowEnv):
    """Two agents. The second one's first sight depends on the first one's luck, and is no start."""

    async def reset(self, *, seed, options):
        await super().reset(seed=seed, options=options)
        self.turn = 0
        return f"begin with {seed}", {"agents": ["a", "b"], "agent": "a"}

    async def step(self, action):
        _, reward, over, _, _ = await super().step(action)
        self.turn += 1
        info = {"agent": "ab"[self.turn % 2]}
        return f"you draw {Careless.drawn.random()}", reward, over, False, info


@pytest.mark.parametrize(
    ("env", "share"), [(Seeded, 0.0), (Careless, 1.0), (Prompts, 1.0), (Game, 0.0)]
)
def test_the_metric_is_the_share_of_groups_whose_members_began_differently(env, share):
    world = World(config(group_size=4), steps=2, env=env).run()
    for step, batch in enumerate(world.batches):
        assert rollout_metrics(batch, step)["different_starts"] == share
        assert all(len({one.id for one in group.trajectories}) == 4 for group in batch)


def begun(*prompts: int, agent: str = "") -> Group:
    members: list[Trajectory] = []
    for prompt in prompts:
        one = trajectory("yes")
        turn = replace(one.turns[0], prompt_ids=(prompt,))
        members.append(replace(one, turns=(turn,), agent=agent))
    return Group(members[0].task, tuple(members), (Score(0.0),) * len(members))


def test_without_a_name_of_its_beginning_an_episode_is_known_by_its_first_prompt():
    assert begun(1, 1, 1).begins_alike
    assert not begun(1, 1, 2).begins_alike
    assert begun(1, 2, agent="second").begins_alike, "unknown: others have moved before it"
