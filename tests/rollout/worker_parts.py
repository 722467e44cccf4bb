"""What rollout workers of tests play with: it is imported in their processes."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import Engine, GenerateRequest
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.workers.messages import PlayedPolicy
from agentrl.sandbox.providers import borrow_provider, give_back_provider
from agentrl.testing import FakeSandboxes, ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Trajectory

RENDERER = TemplateRenderer(ByteTokenizer())


def harm_once(once: str, how: str) -> None:
    """Harm this process if there is no file `once`, which then has its id."""
    with suppress(FileExistsError), Path(once).open("x") as file:
        file.write(str(os.getpid()))
        file.flush()
        if how == "block":
            threading.Event().wait()
        os.kill(os.getpid(), getattr(signal, how))


class Sandboxes(FakeSandboxes):
    """A provider that cannot be opened while there is a file `away`."""

    class Config(FakeSandboxes.Config):
        away: str

    @classmethod
    async def open(cls, settings):
        if await asyncio.to_thread(Path(settings.away).exists):
            raise ConfigError("could not reach the engine of containers")
        return cls(settings)


def says(request: GenerateRequest) -> bytes:
    """An answer that depends on the request's seed and prompt."""
    return f"throw {request.seed % 1000} after {len(request.prompt_ids)}".encode()


class Dice:
    """Ends after as many turns as its seed says; each turn earns a number that depends on the
    answer. Its options say what else happens in the second turn.
    """

    async def reset(self, *, seed, options):
        if "sandbox" in options:
            await give_back_provider(await borrow_provider(options["sandbox"]))
        self.left = self.turns = 1 + seed % 4
        self.options = options
        return f"{self.left} throws left", {}

    async def step(self, action):
        self.left -= 1
        if self.turns - self.left == 2:
            await self._misbehave()
        info = {"at": self.left, "said": action}
        earned = sum(action.encode()) % 7
        return f"{self.left} throws left", float(earned), self.left == 0, False, info

    async def _misbehave(self):
        if "raises" in self.options:
            raise KeyError("the dice are gone")
        if "hangs" in self.options:
            await asyncio.Event().wait()
        if "kills" in self.options:
            os.kill(os.getpid(), signal.SIGKILL)
        if "once" in self.options:
            harm_once(**self.options)

    async def close(self):
        pass


@asynccontextmanager
async def dice_parts(
    engine: Callable[[str], Engine],
) -> AsyncIterator[Callable[..., EpisodeRunner]]:
    """The parts of a worker that plays `Dice`."""
    host = EnvPool({"dice": Dice}, Deadlines())

    def make_runner(policy: PlayedPolicy) -> EpisodeRunner:
        if policy.sampling.max_tokens == 13:
            raise ConfigError("13 tokens bring bad luck")
        asked = engine(policy.engine)
        served = EnginePolicy(asked, policy.sampling, 60.0, policy.trained)
        return EnvEpisodeRunner(served, RENDERER, host, Budget(), 600.0)

    try:
        yield make_runner
    finally:
        await host.close()


def letters(trajectory: Trajectory) -> float:
    """A reward that is almost never the same twice."""
    return sum(int(turn.completion.token_ids.sum()) for turn in trajectory.turns) % 97 / 97


ASKED: list[Engine] = []
"""The engines that `noted_parts` has found."""


@asynccontextmanager
async def noted_parts(
    engine: Callable[[str], Engine],
) -> AsyncIterator[Callable[..., EpisodeRunner]]:
    """`dice_parts` of inline workers, of which the tests see the engine."""
    ASKED.append(engine("policy"))
    async with dice_parts(engine) as make_runner:
        yield make_runner


@asynccontextmanager
async def no_parts(engine: Callable[[str], Engine]) -> AsyncIterator[Callable[..., EpisodeRunner]]:
    raise ConfigError("there is no environment 'dise': did you mean 'dice'?")
    yield


def make_scripted(config: object, model: object) -> ScriptedEngine:
    """An engine for an actor, whose answers depend on the request's seed and prompt."""
    return ScriptedEngine.replying(says)
