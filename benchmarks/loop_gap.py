"""The longest gap of the controller's event loop while a step of many tokens is played and made
into a batch.

    python benchmarks/loop_gap.py [--tokens 1000000 --tokens 10000000] [--live 1000]

The real scheduler, renderer and ledger (on disk) play groups of 8 episodes of 20 turns, each with
about 50 new prompt tokens and 100 sampled tokens. The engine is scripted: an answer takes
lognormal(median 2 s, sigma 0.6). Then batch, shards for 8 ranks, trajectory file and metrics are
made beside the loop, as in a run. A task on the loop wakes up every 5 ms; a gap is its delay. The
output for each size and each of the two halves, in milliseconds: the longest gap, the 99th
percentile of the gaps, and Python's longest garbage collection.
"""

import argparse
import asyncio
import gc
import multiprocessing
import random
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from overhead import MAX_CONTEXT, Game, MockEngine

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import batch_of
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import freeze_gc, run_steadily
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.models.tiny import create_tiny_model
from agentrl.observe.metrics import rollout_metrics
from agentrl.observe.trajectories import write_trajectories
from agentrl.plugins import NoSettings
from agentrl.protocols import GenerateRequest
from agentrl.rewards.environment import EnvironmentReward
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.tokens.arrays import floats, ints
from agentrl.trainers.batch_shards import shard_batch
from agentrl.trainers.settings import TrainerSettings
from agentrl.trajectory import Completion, Group

T = TypeVar("T")
TURNS, SAMPLED, MEMBERS, EPISODE = 20, 100, 8, 20 * 150
HEARTBEAT_SECONDS = 0.005
PACKING = TrainerSettings(micro_batch_tokens=8192)


class LongGame(Game):
    """A game of 20 turns that answers at once, on the loop."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return something new."""
        said, reward, _, truncated, info = super().step(action)
        return said, reward, self._turn == TURNS, truncated, info


class SlowEngine(MockEngine):
    """Answers with 100 random tokens, after some seconds."""

    max_context = 2 * MAX_CONTEXT

    def __init__(self) -> None:
        super().__init__(1_000_000, lambda seed: (), lambda tokens: 0.0)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        own = random.Random(request.seed)
        await asyncio.sleep(2 * own.lognormvariate(0, 0.6))
        tokens = own.choices(range(300, 400), k=SAMPLED)
        return Completion(ints(tokens), floats([-0.5] * SAMPLED), ints([0] * SAMPLED), "length")


@dataclass
class Gaps:
    """The heartbeat's delays and the durations of garbage collections, in milliseconds."""

    late: list[float] = field(default_factory=list)
    collections: list[float] = field(default_factory=lambda: [0.0])

    async def of(self, work: Awaitable[T]) -> T:
        """Do the work while the heartbeat runs."""
        beating = asyncio.ensure_future(self._beat())
        with self._collections():
            result = await work
        beating.cancel()
        return result

    def __str__(self) -> str:
        ordered = sorted(self.late)
        figures = ordered[-1], ordered[-1 - len(ordered) // 100], max(self.collections)
        return " ".join(f"{figure:>12.0f}" for figure in figures)

    async def _beat(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.late.append(1e3 * (time.perf_counter() - begun - HEARTBEAT_SECONDS))

    @contextmanager
    def _collections(self) -> Iterator[None]:
        begun = 0.0

        def note(phase: str, info: object) -> None:
            nonlocal begun
            if phase == "start":
                begun = time.perf_counter()
            else:
                self.collections.append(1e3 * (time.perf_counter() - begun))

        gc.callbacks.append(note)
        yield
        gc.callbacks.remove(note)


async def play(folder: Path, renderer: TemplateRenderer, tokens: int, live: int) -> list[Group]:
    """Play the groups of a step."""
    engine = SlowEngine()
    config = RolloutConfig(
        groups_per_step=max(1, tokens // (EPISODE * MEMBERS)),
        group_size=MEMBERS,
        budget=Budget(turns=TURNS),
        max_live_episodes=live,
        min_live_episodes=live,
    )
    host = EnvPool({"game": LongGame}, config.deadlines)
    sampling = SamplingParams(
        max_tokens=SAMPLED, temperature=1.0, stop_token_ids=renderer.stop_token_ids
    )
    policy = EnginePolicy(engine, sampling, config.deadlines.generate)
    ledger = Ledger(folder / "ledger.sqlite")
    rollouts = Rollouts(
        config,
        tasks=SeededTasks(NoSettings(), "game", seed=0),
        runner=EnvEpisodeRunner(policy, renderer, host, config.budget, config.deadlines.episode),
        reward=EnvironmentReward(EnvironmentReward.Config()),
        engine=engine,
        ledger=ledger,
        seed=0,
        groups=config.groups_per_step,
    )
    async with rollouts:
        groups = await rollouts.next_batch()
    await host.close()
    ledger.close()
    return groups


async def write(folder: Path, groups: list[Group]) -> int:
    """Make batch, shards, file and metrics; returns the number of tokens of the batch."""
    make = partial(
        batch_of, groups, Grpo(Grpo.Config()), BatchProcessing(BatchProcessingConfig()), 0
    )
    batch = await asyncio.to_thread(make)
    await asyncio.to_thread(shard_batch, batch, PACKING, parts=8)
    pairs = [
        pair for group in groups for pair in zip(group.trajectories, group.scores, strict=True)
    ]
    await asyncio.to_thread(write_trajectories, folder / "step.parquet", pairs)
    await asyncio.to_thread(rollout_metrics, groups, 0)
    return len(batch.tokens_S)


async def benchmark(folder: Path, renderer: TemplateRenderer, tokens: int, live: int) -> None:
    """Measure a size, and print its row."""
    playing, writing = Gaps(), Gaps()
    freeze_gc()
    begun = time.perf_counter(), time.process_time()
    groups = await playing.of(play(folder, renderer, tokens, live))
    wall, cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
    made = await writing.of(write(folder, groups))
    print(f"{made:>12,} {playing} {writing} {wall:>12.0f} {cpu:>12.0f}", flush=True)


def measure(tokens: int, live: int) -> None:
    """Measure a size; runs in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        create_tiny_model(Path(folder) / "model")
        renderer = TemplateRenderer.of_model(Path(folder) / "model")
        run_steadily(benchmark(Path(folder), renderer, tokens, live))


def main() -> None:
    """Measure each size in its own process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--live", type=int, default=1000)
    options = parser.parse_args()
    above = ("", "playing", "", "", "writing", "", "", "playing", "")
    below = (
        "tokens",
        "longest",
        "1 in 100",
        "collection",
        "longest",
        "1 in 100",
        "collection",
        "seconds",
        "CPU-s",
    )
    for names in (above, below):
        print(" ".join(f"{name:>12}" for name in names))
    for tokens in options.tokens or [1_000_000, 10_000_000]:
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(tokens, options.live)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(
                f"the measurement of {tokens:,} tokens ended with exit code {process.exitcode}"
            )


if __name__ == "__main__":
    main()
