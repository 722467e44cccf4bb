"""Programs under the production scheduler, by the virtual clock: they train as environments do, and
may fail.
"""

import asyncio
import random
from collections import Counter
from dataclasses import fields
from zlib import crc32

import numpy as np
import pytest

from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import samples_of
from agentrl.batch import collate
from agentrl.errors import EnvError
from agentrl.flow import run_virtual
from agentrl.gateway.call import ChatRequest
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.plugins import NoSettings
from agentrl.rewards.environment import EnvironmentReward
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.testing import ScriptedEngine
from agentrl.tokens.arrays import Ragged
from agentrl.trajectory import Message, Terminated
from tests.gateway.scripted import RENDERER, said, user

DEADLINES = Deadlines(
    reset=50, step=50, generate=1000, reward=50, episode=500, group=100_000, stall=6000
)
SAMPLING = SamplingParams(max_tokens=6, stop_token_ids=RENDERER.stop_token_ids)


class CountLetters:
    """Three turns; each earns the share of lower-case letters in the message."""

    isolation = "inline"
    system_prompt = "Write letters."

    def reset(self, *, seed, options):
        self.left = 3
        return f"begin with {seed % 10}", {}

    def step(self, action):
        self.left -= 1
        reward = sum(letter.islower() for letter in action) / 6
        return f"{self.left} left after {len(action)}", reward, self.left == 0, False, {}

    def close(self):
        pass


async def count_letters(session) -> AgentOutcome:
    """The same as a program: it keeps the conversation itself."""
    env = CountLetters()
    observation, _ = env.reset(seed=session.episode.task.seed, options={})
    messages = [Message("system", env.system_prompt), user(observation)]
    while True:
        (answer,) = await said(session, messages)
        text = answer.message.content
        observation, reward, terminated, _, _ = env.step(text)
        session.call_earned(answer.id, reward)
        if terminated:
            return AgentOutcome()
        messages += [Message("assistant", text), user(observation)]


class Plays:
    """A program that is a function of its session."""

    def __init__(self, play, registry):
        self.play, self.registry = play, registry

    async def run(self, assignment):
        session = self.registry.session(assignment.api_key)
        session.key = assignment.api_key
        return await self.play(session)


def sampling_engine() -> ScriptedEngine:
    """Samples bytes by logits that depend on all tokens before, and on the version."""

    def logits(tokens):
        return np.random.default_rng(crc32(bytes(tokens))).normal(0, 2, 128)

    return ScriptedEngine(logits, max_context=100_000, seconds_per_token=lambda request: 0.1)


def rolled(make_runner, engine, config, steps, ledger=None):
    """The batches of a run, with the metrics of its end."""

    async def main():
        batches = []
        policy = EnginePolicy(engine, SAMPLING, config.deadlines.generate)
        rollouts = Rollouts(
            config,
            tasks=SeededTasks(NoSettings(), "task", 0),
            runner=make_runner(policy),
            reward=EnvironmentReward(EnvironmentReward.Config()),
            engine=engine,
            ledger=ledger or Ledger(":memory:"),
            seed=5,
            groups=steps * config.groups_per_step,
        )
        async with engine, rollouts:
            for step in range(steps):
                batches.append(await rollouts.next_batch())
                async with rollouts.new_weights(step + 1):
                    await engine.update_weights({}, step + 1)
        return batches

    return run_virtual(main)


def agent_runner(play, registry):
    return lambda policy: AgentEpisodeRunner(
        policy, RENDERER, registry, Plays(play, registry), Budget(turns=100), 500.0
    )


def test_a_task_gives_the_same_batch_as_an_environment_and_as_a_program():
    config = RolloutConfig(groups_per_step=3, group_size=4, deadlines=DEADLINES)
    host = EnvPool({"task": CountLetters}, DEADLINES)
    as_env = rolled(
        lambda policy: EnvEpisodeRunner(policy, RENDERER, host, Budget(), 500.0),
        sampling_engine(),
        config,
        steps=3,
    )
    as_agent = rolled(
        agent_runner(count_letters, SessionRegistry()), sampling_engine(), config, steps=3
    )
    algorithm = Grpo(Grpo.Config())
    for env_groups, agent_groups in zip(as_env, as_agent, strict=True):
        one, other = (
            collate(samples_of(groups, algorithm)) for groups in (env_groups, agent_groups)
        )
        assert one.num_loss_tokens > 0
        assert np.any(one.advantages_N)
        for field in fields(one):  # the loss and its gradient are functions of these
            values, same = getattr(one, field.name), getattr(other, field.name)
            if isinstance(values, Ragged):
                assert values == same, field.name
            else:
                np.testing.assert_array_equal(values, same, field.name)
        env_texts = [t.messages for group in env_groups for t in group.trajectories]
        agent_texts = [t.messages for group in agent_groups for t in group.trajectories]
        assert [
            texts[: len(agent)] for texts, agent in zip(env_texts, agent_texts, strict=True)
        ] == agent_texts


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fifth_of_programs_may_crash_hang_or_disconnect(seed):
    rng = random.Random(seed)
    outcomes: Counter = Counter()

    async def unreliable(session):
        for number in range(rng.randint(1, 3)):
            await said(session, [user(f"{session.episode.task.seed} {number}")])
            await asyncio.sleep(rng.expovariate(0.1))
        trouble = rng.choice(["crash", "hang", "disconnect", "leave"]) if rng.random() < 0.2 else ""
        outcomes[trouble] += 1
        if trouble == "crash":
            raise EnvError("the program is lost")
        if trouble == "hang":
            await asyncio.Event().wait()
        # With a call in flight, or one whose answer it does not take.
        if trouble in (
            "disconnect",
            "leave",
        ):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), session.asking(ChatRequest((user("gone"),))):
                    pass
        if trouble == "disconnect":
            raise EnvError("the connection is lost")
        return AgentOutcome(float(int(session.episode.id.split("/")[1]) + 1))

    registry, ledger, engine = (
        SessionRegistry(GatewayConfig(idle_seconds=400)),
        Ledger(":memory:"),
        sampling_engine(),
    )
    config = RolloutConfig(groups_per_step=4, group_size=4, max_staleness=2, deadlines=DEADLINES)
    batches = rolled(agent_runner(unreliable, registry), engine, config, steps=8, ledger=ledger)
    groups = [group for batch in batches for group in batch]
    assert len(groups) == 32
    for group in groups:
        # None is invented, and none is missing.
        assert list(group.rewards_G) == [
            1.0,
            2.0,
            3.0,
            4.0,
        ]
        assert {trajectory.status for trajectory in group.trajectories} == {Terminated()}
    fates = ledger.episode_fates()
    assert fates.settled
    assert fates.trained == 128
    assert fates.failed == outcomes["crash"] + outcomes["hang"] + outcomes["disconnect"] > 0
    assert ledger.unused_answers().get("unfinished", (0, 0))[0] == outcomes["leave"]
    assert len(registry) == 0
    assert engine.stats().running == 0
