"""Segments: a straggler is trained on in parts, each turn once, each in time, and its future is
left to a critic.
"""

import asyncio
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import collate, to_samples
from agentrl.errors import RewardError
from agentrl.rewards.environment import EnvironmentReward
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.trajectory import SEGMENT, Score, Terminated, Trajectory
from tests.properties import examples
from tests.rollout.test_scheduler import DEADLINES, SlowEnv, Sum, World, config


class LongEnv(SlowEnv):
    """Six turns; in some episodes each takes 30 s, in the others a moment. Each turn earns its
    number.
    """

    async def reset(self, *, seed, options):
        self.attempts[seed] += 1
        self.turn = 0
        self.seconds = 30.0 if self.attempts[seed] == 1 and seed // 4 % 5 == 0 else 0.1
        return "begin", {}

    async def step(self, action):
        await asyncio.sleep(self.seconds)
        self.turn += 1
        return "on", float(self.turn), self.turn == 6, False, {}


def environment_reward() -> RewardPipeline:
    return RewardPipeline(
        [RewardPart(EnvironmentReward(EnvironmentReward.Config()), "environment")], deadline=50
    )


def played(rule: str = "segment", env: type = LongEnv, **settings) -> World:
    given = {"max_staleness": 1, "group_size": 2, "staleness_rule": rule, **settings}
    return World(
        config(**given), steps=12, env=env, reward=environment_reward(), train_seconds=5.0
    ).run()


def pieces(world: World) -> dict[tuple[str, str], list[tuple[int, Trajectory, list[float]]]]:
    """By episode and agent: (step, trajectory, rewards of its turns) of each part that was trained
    on, in order.
    """
    found = defaultdict(list)
    for step, batch in enumerate(world.batches):
        for group in batch:
            for trajectory, rewards in zip(group.trajectories, group.turn_rewards_G, strict=True):
                if trajectory.new_turns:
                    found[trajectory.id, trajectory.agent].append((step, trajectory, list(rewards)))
    return found


def test_each_turn_of_a_straggler_is_trained_on_once_in_order_and_with_its_own_reward():
    world = played()
    several = [parts for parts in pieces(world).values() if len(parts) > 1]
    assert several
    for parts in several:
        assert [t.trained_turns for _, t, _ in parts] == [
            0,
            *(len(t.turns) for _, t, _ in parts[:-1]),
        ]
        assert [t.status for _, t, _ in parts] == [SEGMENT] * (len(parts) - 1) + [Terminated()]
        earned = [reward for _, t, rewards in parts for reward in rewards[t.trained_turns :]]
        assert earned == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_part_ends_before_the_prompt_that_follows_it():
    for parts in pieces(played()).values():
        *_, (_, whole, _) = parts
        for _, part, _ in parts[:-1]:
            following = whole.turns[len(part.turns)].prompt_ids
            assert part.tail_ids.tolist() == following.tolist()
            assert len(following)


def test_the_trainer_waits_for_no_straggler_and_every_episode_is_still_trained_on():
    patient, cutting = played("deadline_first"), played()
    assert cutting.seconds < patient.seconds
    assert cutting.ledger.task_fates() == patient.ledger.task_fates()
    assert cutting.metrics["bias/seconds"] == pytest.approx(1.0)


def test_no_token_older_than_the_bound_carries_loss():
    world = played()
    for step, batch in enumerate(world.batches):
        samples = [
            sample
            for group in batch
            for trajectory in group.trajectories
            for sample in to_samples(trajectory, 1.0, oldest_version=max(0, step - 1))
        ]
        versions_N = np.concatenate([s.policy_versions[s.loss_mask] for s in samples])
        assert versions_N.min() >= step - 1


def test_the_ledger_has_a_record_of_every_part():
    world = played()
    recorded = Counter(
        (f"{world.ledger.task(number).task.id}/{s.member}/{s.attempt}", s.first, s.turns, s.step)
        for number in range(48)
        for s in world.ledger.segments(number)
    )
    trained = Counter(
        (t.id, t.trained_turns, len(t.new_turns), step)
        for parts in pieces(world).values()
        for step, t, _ in parts
        if any(t in group.trajectories for group in world.batches[step] if group.partial)
    )
    assert recorded == trained
    assert recorded


def test_a_turn_whose_outcome_is_not_known_is_in_no_part():
    class Env(LongEnv):
        async def step(self, action):
            result = await super().step(action)
            if self.seconds > 1 and self.turn == 4:
                raise KeyError("the lake is gone")
            return result

    world = played(env=Env)
    failed = [
        parts
        for (name, _), parts in pieces(world).items()
        if name.endswith("/0") and parts[-1][1].status == SEGMENT
    ]
    assert failed
    assert all(len(parts[-1][1].turns) <= 3 for parts in failed)
    fates = world.ledger.episode_fates()
    assert fates.failed >= len(failed)
    assert world.ledger.task_fates().trained == 48


def test_the_verdict_on_the_whole_belongs_to_the_last_turn_also_of_parts():
    class Verdict:
        async def score(self, trajectory):
            if trajectory.status == SEGMENT:
                raise RewardError("only whole episodes are judged")
            return Score(10.0)

    reward = RewardPipeline(
        [
            RewardPart(
                EnvironmentReward(EnvironmentReward.Config(scale=2.0)), "environment", weight=0.5
            ),
            RewardPart(Verdict(), "verdict"),
        ],
        deadline=50,
    )
    world = World(
        config(max_staleness=1, group_size=2, staleness_rule="segment"),
        steps=12,
        env=LongEnv,
        reward=reward,
    ).run()
    several = [parts for parts in pieces(world).values() if len(parts) > 1]
    assert several
    for parts in several:
        earned = [reward for _, t, rewards in parts for reward in rewards[t.trained_turns :]]
        assert earned == [1.0, 2.0, 3.0, 4.0, 5.0, 16.0]


def test_with_several_agents_the_last_turn_of_each_waits_for_what_the_others_do():
    class Duel(LongEnv):
        """Each step pays the other agent for its last turn."""

        async def reset(self, *, seed, options):
            observation, _ = await super().reset(seed=seed, options=options)
            return observation, {"agents": ["a", "b"], "agent": "a"}

        async def step(self, action):
            await asyncio.sleep(self.seconds)
            actor, other = ("a", "b") if self.turn % 2 == 0 else ("b", "a")
            self.turn += 1
            info = {"rewards": {actor: 0.0, other: float(self.turn)}}
            if self.turn < 8:
                info["agent"] = other
            return "on", 0.0, self.turn == 8, False, info

    found = pieces(played(env=Duel))
    several = [(agent, parts) for (_, agent), parts in found.items() if len(parts) > 1]
    assert {agent for agent, _ in several} == {"a", "b"}
    for agent, parts in several:
        earned = [reward for _, t, rewards in parts for reward in rewards[t.trained_turns :]]
        # What b earns before its first turn belongs to its last one.
        assert earned == ([2.0, 4.0, 6.0, 8.0] if agent == "a" else [3.0, 5.0, 7.0, 1.0])


def test_a_reward_that_scores_no_turns_leaves_the_parts_without_reward():
    world = World(
        config(max_staleness=1, group_size=2, staleness_rule="segment"),
        steps=12,
        env=LongEnv,
        reward=Sum(),
    ).run()
    several = [parts for parts in pieces(world).values() if len(parts) > 1]
    assert several
    for parts in several:
        earned = [reward for _, t, rewards in parts for reward in rewards[t.trained_turns :]]
        assert earned == [0.0] * 5 + [21.0]


@examples(20)
@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.integers(0, 3),
    trouble=st.sampled_from(["", "crash", "hang"]),
)
def test_under_failures_and_hangs_each_turn_is_trained_on_once_and_all_fates_are_known(
    seed, max_staleness, trouble
):
    class Env(SlowEnv):
        trouble = staticmethod(
            lambda env_seed, attempts: trouble if attempts[env_seed] % 3 == 1 else ""
        )

    Env.trouble = staticmethod(
        lambda env_seed, attempts: trouble if attempts[env_seed] % 3 == 1 else ""
    )
    world = World(
        config(max_staleness=max_staleness, staleness_rule="segment", deadlines=DEADLINES),
        steps=8,
        env=Env,
        reward=environment_reward(),
        seed=seed,
        train_seconds=1.0,
    ).run()
    assert world.ledger.task_fates().settled
    assert world.ledger.episode_fates().settled
    assert world.ledger.task_fates().trained == 32
    for parts in pieces(world).values():
        assert [t.trained_turns for _, t, _ in parts] == [
            0,
            *(len(t.turns) for _, t, _ in parts[:-1]),
        ]
    for step, batch in enumerate(world.batches):
        partial = [group.partial for group in batch]
        assert partial == sorted(partial)
        assert partial.count(False) == 4
        oldest = max(0, step - max_staleness)
        collate(
            s
            for group in batch
            for t in group.trajectories
            for s in to_samples(t, 1.0, oldest_version=oldest)
        )
