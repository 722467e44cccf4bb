"""Plays one assignment in a process of its own: pickles in, pickles out."""

import asyncio
import pickle
import sys

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import Retries
from agentrl.hosting.pool import EnvPool
from agentrl.rollout.assignment import Assignment, MemberReport
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.member import Member, MemberResult
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Score, Trajectory


class Countdown:
    """Ends after as many turns as its seed says; each turn earns 1."""

    async def reset(self, *, seed, options):
        self.left = seed
        return f"{self.left} left", {}

    async def step(self, action):
        if action == "crash":
            raise KeyError("the rocket is gone")
        self.left -= 1
        return f"{self.left} left", 1.0, self.left == 0, False, {"left": self.left}

    async def close(self):
        pass


class Return:
    """The reward: what the environment paid."""

    async def score(self, trajectory: Trajectory) -> Score:
        return Score(trajectory.env_return, {"env": trajectory.env_return})


async def play(assignment: Assignment) -> tuple[MemberResult, list[MemberReport]]:
    """The result of an assignment, and what its member reported meanwhile."""
    reports: list[MemberReport] = []
    renderer = TemplateRenderer(ByteTokenizer())
    sampling = SamplingParams(
        max_tokens=64, temperature=1.0, stop_token_ids=renderer.stop_token_ids
    )
    says = str(assignment.task.options.get("says", "on")).encode()
    engine = ScriptedEngine.replying(lambda request: says)
    host = EnvPool({"countdown": Countdown}, Deadlines())
    runner = EnvEpisodeRunner(EnginePolicy(engine, sampling, 60.0), renderer, host, Budget(), 600.0)
    member = Member(runner, RewardPipeline.of(Return(), 60.0, Retries()))
    async with engine:
        result = await member.play(assignment, reports.append)
    await host.close()
    return result, reports


if __name__ == "__main__":
    given = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(asyncio.run(play(given))))
