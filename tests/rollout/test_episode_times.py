"""When an episode's parts happened, as its trajectory says it."""

import time
from typing import Any

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import SteadyLoop, elapsed, now
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Task, Trajectory

RENDERER = TemplateRenderer(ByteTokenizer())
PAUSE = 1000.0


class PausingClock:
    """The machine's time, and what it is set forward by."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def test_the_times_of_an_episode_contain_the_pauses_that_its_deadlines_leave_out() -> None:
    """Else the episodes of a run that computes on its loop, or on a busy machine, seem to be ever
    earlier.
    """
    clock = PausingClock()

    class Slow:
        isolation = "inline"

        def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
            self.steps = 0
            return "begin", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            clock.ahead += PAUSE
            self.steps += 1
            return "go on", 0.0, self.steps == 2, False, {}

        def close(self) -> None:
            pass

    async def main() -> tuple[Trajectory, float, float]:
        begun = elapsed()
        async with ScriptedEngine.replying(lambda request: list(b"on")) as engine:
            policy = EnginePolicy(
                engine, SamplingParams(stop_token_ids=RENDERER.stop_token_ids), PAUSE / 2
            )
            host = EnvPool({"slow": Slow}, EnvDeadlines(step=PAUSE / 2))
            runner = EnvEpisodeRunner(policy, RENDERER, host, Budget(), PAUSE / 2)
            (trajectory,) = await runner.play(Assignment("e", Task("slow", 0, {}), 0))
            await host.close()
        return trajectory, begun, now()

    loop = SteadyLoop(clock)
    try:
        trajectory, begun, ended = loop.run_until_complete(main())
    finally:
        loop.close()
    assert ended - begun < PAUSE  # the loop's own clock stood still, so no deadline expired
    assert trajectory.seconds >= 2 * PAUSE
    assert trajectory.started >= begun
    first, second = trajectory.turns
    assert second.asked - first.asked >= PAUSE
    assert min(first.env_seconds, second.env_seconds) >= PAUSE
