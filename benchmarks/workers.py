"""What rollout workers (`rollout.workers`) gain, and what an episode costs the controller.

    python benchmarks/workers.py [--episodes 64] [--workers 0 1 2] [--burn 0 5] [--turns 4 16 64]
        [--actor] [--seconds 0] [--calls]

The engine answers at once; scheduler, ledger, renderer and links are the real ones. The first table
has turns per second with environments that compute for `--burn` milliseconds a step, for each
number of workers, the CPU time of the controller, and how long the workers took to start (the first
time, with the imports of the process that they are forked from). The second has the CPU time of the
controller for an episode of so many `--turns`, without workers and with most of them: until it is
in a batch of the scheduler (of all threads, and of the event loop alone), and to make the samples
of the batch, to measure and to write it. The threads of Ray cost by second, not by episode, and so
do reports of live episodes, so long episodes cost more than short ones because they last longer:
with `--seconds`, the environment of every episode waits for so long in all, whatever its turns.
With `--calls`, each row is played once more, and the calls of functions by the event loop are
counted: they do not depend on what the processor's caches have kept since the last episode.

The engine is in the controller. With `--actor`, the second table also has rows with one in an actor
of Ray, which workers ask themselves.

All rows are of one run on one machine; the ratios mean something only if as many cores are free as
there are processes. CPU times mean something on a busy machine too.
"""

import argparse
import asyncio
import cProfile
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import traced_batch_of
from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.ray_cluster import join_ray
from agentrl.cluster.ray_engine import RayEngine
from agentrl.cluster.ray_receivers import RayReceivers
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.engines.router import Router
from agentrl.flow import freeze_gc, run_steadily
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.models.tiny import create_tiny_model
from agentrl.observe.trajectories import episodes_of_step, write_trajectories
from agentrl.plugins import Component, NoSettings
from agentrl.protocols import Engine, EngineStats, GenerateRequest
from agentrl.rewards.environment import EnvironmentReward
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.rollout.workers.messages import PlayedPolicy
from agentrl.rollout.workers.pool import RolloutWorkers, WorkerRunner
from agentrl.runs.recorder import metrics_of_step
from agentrl.runs.scribe import Scribe
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Group

GROUP = 8
GRPO = Grpo(Grpo.Config())
ANSWER_TOKENS = 100
SAMPLING = SamplingParams(max_tokens=512, temperature=1.0)
IMPORTS = ("transformers.models.auto.tokenization_auto", "renderers.base", "benchmarks.workers")
OBSERVATION = "The door is locked. You see a key, a lamp and a letter on the table. " * 8


class InstantEngine(Engine):
    """Answers every request in the next iteration of the loop, with the same tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = ints(token_ids)
        self.serve(0)

    @property
    def policy_version(self) -> int:
        """That of its answers."""
        return int(self._answer.policy_versions[0])

    @property
    def max_context(self) -> int:
        """More than any episode needs."""
        return 65536

    def serve(self, version: int) -> None:
        """Answer as this version."""
        size = len(self._token_ids)
        versions = ints(np.full(size, version))
        self._answer = Completion(self._token_ids, floats(np.zeros(size)), versions, "stop")

    async def generate(self, request: GenerateRequest) -> Completion:
        """Answer."""
        await asyncio.sleep(0)
        return self._answer

    async def interrupt(self) -> None:
        """Nothing is ever live."""

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Answer as this version."""
        self.serve(version)

    def stats(self) -> EngineStats:
        """It is never busy."""
        return EngineStats(0, 0, 0, 0, 0)


class Room:
    """Plays a number of turns, and waits and computes in each."""

    def __init__(self, turns: int, burn: float, pause: float) -> None:
        self._turns = turns
        self._burn = burn
        self._pause = pause

    async def reset(self, *, seed: int, options: object) -> tuple[str, dict[str, object]]:
        """Begin."""
        self._left = self._turns
        return OBSERVATION, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Wait for `pause` seconds, and compute for `burn` seconds of CPU time."""
        if self._pause:
            await asyncio.sleep(self._pause)
        until = time.thread_time() + self._burn
        while time.thread_time() < until:
            pass
        self._left -= 1
        return OBSERVATION, 1.0, self._left == 0, False, {}

    async def close(self) -> None:
        """Nothing to do."""


@asynccontextmanager
async def parts(
    model: Path, turns: int, burn: float, pause: float, engine: Callable[[str], Engine]
) -> AsyncIterator[Callable[[PlayedPolicy], EpisodeRunner]]:
    """What a worker plays with, and the controller if there are none."""
    renderer = TemplateRenderer.of_model(model)
    envs = EnvPool({"room": partial(Room, turns, burn, pause)}, Deadlines())

    def make_runner(policy: PlayedPolicy) -> EpisodeRunner:
        served = EnginePolicy(engine(policy.engine), policy.sampling, 600.0)
        return EnvEpisodeRunner(served, renderer, envs, Budget(turns=turns), 3600.0)

    yield make_runner
    await envs.close()


@dataclass(frozen=True)
class Measured:
    """A batch."""

    turns_per_second: float
    cpu_ms_per_episode: float
    """Of the controller."""
    loop_cpu_ms_per_episode: float
    """Of its event loop alone, without the threads of the ledger and of Ray."""
    calls_per_episode: float = 0.0
    """Calls of functions by its event loop; 0 if they are not counted."""
    recording_cpu_ms_per_episode: float = 0.0
    """Of the controller, to make, measure and write a batch."""
    start_seconds: float = 0.0
    """Until all workers played."""


@asynccontextmanager
async def engine_at(place: str, token_ids: Sequence[int], model: Path) -> AsyncIterator[Engine]:
    """An engine in the controller, or in an actor of Ray."""
    if place == "controller":
        yield InstantEngine(token_ids)
        return
    actor = Component("instant", partial(make_engine, token_ids), NoSettings())
    replica = RayEngine(actor, model, {"num_cpus": 0.1}, RayReceivers())
    async with Router([replica], lease=600.0) as router:
        yield router


def make_engine(token_ids: Sequence[int], config: NoSettings, model: Path) -> InstantEngine:
    """The engine of an actor."""
    return InstantEngine(token_ids)


async def measure(
    model: Path,
    workers: int,
    episodes: int,
    turns: int,
    burn: float,
    *,
    place: str = "controller",
    pause: float = 0.0,
    calls: bool = False,
) -> Measured:
    """Play a batch of episodes, with an engine at this place. `calls`: count those of functions."""
    renderer = TemplateRenderer.of_model(model)
    words = "I take the key, and I try to open the door with it. "
    token_ids = list(renderer.answer_ids(words * 40))[:ANSWER_TOKENS]
    opened = partial(parts, model, turns, burn, pause)
    policy = PlayedPolicy("policy", SAMPLING, trained=True)
    async with engine_at(place, token_ids, model) as engine:
        if not workers:
            async with opened(lambda name: engine) as make_runner:
                return await play(make_runner(policy), engine, episodes, turns, calls=calls)
        start = partial(ProcessWorker.start, lease=600.0)
        began = time.perf_counter()
        async with RolloutWorkers(start, opened, workers, silence=600.0, imports=IMPORTS) as pool:
            took = time.perf_counter() - began
            pool.engines.name_of(engine, "policy")
            runner = WorkerRunner(pool, policy, renderer)
            played = await play(runner, engine, episodes, turns, calls=calls)
            return replace(played, start_seconds=took)


async def play(
    runner: EpisodeRunner, engine: Engine, episodes: int, turns: int, *, calls: bool
) -> Measured:
    """Play a batch with the real scheduler, after a small one."""
    config = RolloutConfig(groups_per_step=episodes // GROUP, group_size=GROUP)
    apart = isinstance(runner, WorkerRunner)
    with tempfile.TemporaryDirectory() as folder:
        scribe = Scribe()
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        rollouts = Rollouts(
            config,
            tasks=SeededTasks(NoSettings(), "room", seed=1),
            runner=runner,
            reward=EnvironmentReward(EnvironmentReward.Config()),
            engine=engine,
            ledger=ledger,
            seed=0,
            groups=2 * config.groups_per_step,
        )
        async with scribe.in_own_process(apart), rollouts:
            # Warm: imports, caches, connections.
            await record(scribe, Path(folder), await rollouts.next_batch())
            while apart and await scribe.call(os.getpid) == os.getpid():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await record(scribe, Path(folder), [])
            freeze_gc()  # as a run does; a full collection by chance would be most of what is seen
            profile = cProfile.Profile()
            cpu, loop, wall = time.process_time(), time.thread_time(), time.perf_counter()
            with profile if calls else nullcontext():
                async with rollouts.new_weights(1):
                    await engine.update_weights({}, 1)
                groups = await rollouts.next_batch()
            cpu, loop = time.process_time() - cpu, time.thread_time() - loop
            wall = time.perf_counter() - wall
            recording = time.process_time()
            await record(scribe, Path(folder), groups)
            recording = time.process_time() - recording
        ledger.close()
    rate = episodes * turns / wall
    of_all, of_loop, of_recording = (
        1000 * seconds / episodes for seconds in (cpu, loop, recording)
    )
    counted = sum(entry.callcount for entry in profile.getstats())
    return Measured(rate, of_all, of_loop, counted / episodes, of_recording)


async def record(scribe: Scribe, folder: Path, groups: list[Group]) -> None:
    """What a run does with the episodes of a step: samples, files, metrics."""
    if groups:
        processing = BatchProcessing(BatchProcessingConfig(), GRPO, {})
        await asyncio.to_thread(traced_batch_of, groups, GRPO, processing, 0)
    path = folder / "trajectories" / "step.parquet"
    await scribe.call(write_trajectories, path, episodes_of_step(groups))
    if groups:
        await scribe.call(metrics_of_step, groups, 0, 0, [])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--burn", type=float, nargs="+", default=[0.0, 5.0])
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--actor", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--calls", action="store_true")
    chosen = parser.parse_args()
    places = ["controller", "actor"] if chosen.actor else ["controller"]
    if chosen.actor:
        join_ray()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        create_tiny_model(model)
        by_workers = Table(
            "ms a step", "workers", "start", "turns/s", "ratio", "controller: CPU-ms a turn"
        )
        for burn in chosen.burn:
            first = 0.0
            for workers in chosen.workers:
                found = run_steadily(measure(model, workers, chosen.episodes, 8, burn / 1000))
                first = first or found.turns_per_second
                by_workers.add_row(
                    f"{burn:g}",
                    str(workers),
                    f"{found.start_seconds:.1f} s",
                    f"{found.turns_per_second:.0f}",
                    f"{found.turns_per_second / first:.2f}",
                    f"{found.cpu_ms_per_episode / 8:.3f}",
                )
        console.print(by_workers)
        by_turns = Table(
            "turns",
            "workers",
            "engine",
            "controller: CPU-ms an episode",
            "of its event loop",
            "its calls",
            "recorded",
        )
        for turns in chosen.turns:
            for workers, place in product((0, max(chosen.workers)), places):
                again = partial(measure, model, workers, chosen.episodes, turns, 0.0)
                again = partial(again, place=place, pause=chosen.seconds / turns)
                found = run_steadily(again())
                calls = "-"
                if chosen.calls:
                    counted = run_steadily(again(calls=True))
                    calls = f"{counted.calls_per_episode:.0f}"
                by_turns.add_row(
                    str(turns),
                    str(workers),
                    place,
                    f"{found.cpu_ms_per_episode:.2f}",
                    f"{found.loop_cpu_ms_per_episode:.2f}",
                    calls,
                    f"{found.recording_cpu_ms_per_episode:.2f}",
                )
        console.print(by_turns)


if __name__ == "__main__":
    main()
