"""The simulator against a real run, and then at 15,360 cores of environments.

    python benchmarks/at_scale.py [calibrate] [frontier] [scaling] [published]

*calibrate*: the same episodes twice: played by the production code with the real renderer and
tokenizer (engine and environments only wait), and simulated. The CPU time of an episode and of a
turn is measured in runs of other lengths before. The clock of the real run stands still while its
thread waits for a core that other processes use, so a busy machine does not count; a step takes as
long as it would on a core of its own.

*frontier*: how many of 15,360 cores of environments 0, 8 and 64 rollout workers keep busy, by how
long a step computes. *scaling*: ROLL's setting (10 turns of N(10, 5) s, groups of 8) with 256 and
15,360 cores, synchronous and one step off.

*published*: steps that NVIDIA published for NeMo RL, planned and simulated (`agentrl plan`).

The CPU times at scale are those of `benchmarks/workers.py --actor` (`MEASURED`).
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agentrl.config.from_file import load_config
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.engines.router import Router
from agentrl.flow import freeze_gc, now
from agentrl.flow.steady_loop import SteadyLoop
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.models.tiny import create_tiny_model
from agentrl.placement.devices import gpu_named
from agentrl.placement.inventory import Inventory
from agentrl.planner.plan import Plan
from agentrl.planner.run_facts import model_of
from agentrl.planner.search import make_plan
from agentrl.plugins import NoSettings
from agentrl.protocols import GenerateRequest
from agentrl.protocols.env import ResetResult, StepResult
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.settings.sampling import SamplingParams
from agentrl.simulate.config import (
    SimulatedCpuConfig,
    SimulatedEngineConfig,
    SimulatedEnvsConfig,
    SimulationConfig,
)
from agentrl.simulate.engine import SimulatedEngine
from agentrl.simulate.env import SimulatedEnv, SimulatedEnvs
from agentrl.simulate.latency import Constant, Latency, Lognormal, Normal
from agentrl.simulate.world import Report, ReturnReward, World
from agentrl.tasks.seeded import SeededTasks
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion

CORES = 15_360
GROUP = 8
MEASURED = SimulatedCpuConfig(
    turn_seconds=0.001,
    controller_episode_seconds=0.000_33,
    controller_turn_seconds=0.000_013,
    batch_episode_seconds=0.000_8,
)
"""Of this machine, with engines in other processes (docs/simulator.md)."""


# Calibration


class OwnCore:
    """A clock that stands still while this thread could run but has no core."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def __call__(self) -> float:
        """Seconds."""
        waited = int(os.pread(self._file, 64, 0).split()[1])
        return time.monotonic() - waited / 1e9


class TextEnv:
    """A simulated environment that says something, as the real renderer needs it."""

    isolation = "inline"
    words = "The door is locked. You see a key, a lamp and a letter on the table. " * 4

    def __init__(self, env: SimulatedEnv) -> None:
        self._env = env
        self._turn = 0

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin."""
        await _waited(self._env.reset(seed=seed, options=options))
        return f"Game {seed}. {self.words}", {}

    async def step(self, action: str) -> StepResult:
        """Take the planned time."""
        self._turn += 1
        _, *rest = await _waited(self._env.step(action))
        return f"Turn {self._turn}. {self.words}", *rest  # type: ignore[return-value]

    def close(self) -> None:
        """End."""
        self._env.close()


async def _waited(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result


class TextEngine(SimulatedEngine):
    """A simulated engine that answers with words."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Answer."""
        said = await super().generate(request)
        token_ids = np.resize(_WORDS, len(said.token_ids))
        token_ids[-1] = said.token_ids[-1]
        return Completion(ints(token_ids), said.logprobs, said.policy_versions, said.finish_reason)


_WORDS = np.arange(300, 400)


@dataclass(frozen=True)
class Point:
    """What is played in a calibration."""

    live: int
    turns: int
    engine_seconds: float
    """Of an answer, on average."""
    env_seconds: float
    steps: int = 3
    groups: int = 0
    """Of a step; as many as live at once, by default."""

    @property
    def rollout(self) -> RolloutConfig:
        """The settings of the scheduler."""
        return RolloutConfig(
            groups_per_step=self.groups or self.live // GROUP,
            group_size=GROUP,
            max_live_episodes=self.live,
            min_live_episodes=self.live,
            budget=Budget(turns=self.turns),
            sampling=SamplingParams(max_tokens=512),
        )

    def simulation(self, cpu: SimulatedCpuConfig) -> SimulationConfig:
        """The models of engine and environments."""
        return SimulationConfig(
            engine=SimulatedEngineConfig(
                slots=1024,
                seconds_per_token=self.engine_seconds / 80,
                answer_tokens=Lognormal(median=70, sigma=0.5, cap=300),
            ),
            env=SimulatedEnvsConfig(
                turns=Constant(value=self.turns),
                step_seconds=Lognormal(median=self.env_seconds * 0.8, sigma=0.7, cap=2),
            ),
            cpu=cpu,
            train_seconds=Constant(value=0.05),
        )


@dataclass(frozen=True)
class Played:
    """A real run."""

    cpu_seconds: float
    step_seconds: list[float]


async def play(point: Point, renderer: TemplateRenderer, folder: Path) -> Played:
    """Play a calibration's episodes with the production code."""
    config, simulation = point.rollout, point.simulation(SimulatedCpuConfig())
    engine, envs = TextEngine(simulation.engine), SimulatedEnvs(simulation.env, seed=0)
    host = EnvPool({"simulated": lambda: TextEnv(envs())}, config.deadlines)
    sampling = config.sampling.model_copy(update={"stop_token_ids": renderer.stop_token_ids})
    steps: list[float] = []
    with Ledger(folder / f"{time.monotonic_ns()}.sqlite") as ledger:
        async with Router([engine]) as router:
            policy = EnginePolicy(router, sampling, 600.0)
            runner = EnvEpisodeRunner(policy, renderer, host, config.budget, 3600.0)
            rollouts = Rollouts(
                config,
                tasks=SeededTasks(NoSettings(), "simulated", 0),
                runner=runner,
                reward=ReturnReward(),
                engine=router,
                ledger=ledger,
                seed=0,
                groups=point.steps * config.groups_per_step,
            )
            freeze_gc()  # as a run does
            cpu = time.process_time()
            async with rollouts:
                for step in range(point.steps):
                    began = now()
                    await rollouts.next_batch()
                    await asyncio.sleep(0.05)
                    async with rollouts.new_weights(step + 1):
                        await router.update_weights({}, step + 1)
                    steps.append(now() - began)
            cpu = time.process_time() - cpu
        await host.close()
    return Played(cpu, steps)


def on_own_core(main: Callable[[], Any]) -> Any:
    """Run `main()` on a loop with the clock of `OwnCore`."""
    with asyncio.Runner(loop_factory=partial(SteadyLoop, OwnCore())) as runner:
        return runner.run(main())


def measure_cpu(renderer: TemplateRenderer, folder: Path) -> SimulatedCpuConfig:
    """The CPU time of an episode and of a turn, of runs with 4 and 16 turns in which nothing takes
    long.
    """
    spent = {}
    for turns in (4, 4, 16):  # the first is a warm-up
        point = Point(256, turns, 0.001, 0.001, steps=64 // turns // 4)
        played = on_own_core(partial(play, point, renderer, folder))
        spent[turns] = played.cpu_seconds / (point.steps * point.live)
    a_turn = (spent[16] - spent[4]) / 12
    return SimulatedCpuConfig(
        turn_seconds=a_turn, controller_episode_seconds=max(0.0, spent[4] - 4 * a_turn)
    )


POINTS = {
    "engine and environments take most of the time": Point(64, 16, 0.2, 0.1, steps=2),
    "both": Point(256, 16, 0.12, 0.05, steps=1),
    "the core is the bottleneck": Point(512, 16, 0.02, 0.01, steps=1),
}


def calibrate(console: Console) -> None:
    """Print the error of the simulated seconds of a step."""
    table = Table(
        "episodes at once",
        "",
        "real s a step",
        "simulated",
        "error",
        "without CPU times",
        title="16 turns an episode",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_tiny_model(folder / "model")
        renderer = TemplateRenderer.of_model(folder / "model")
        for what, point in POINTS.items():
            # Again for each run: a busy machine also computes more slowly, by its caches.
            cpu = measure_cpu(renderer, folder)
            console.print(
                f"CPU-ms: {1000 * cpu.turn_seconds:.3f} a turn,"
                f" {1000 * cpu.controller_episode_seconds:.3f} an episode"
            )
            real = fmean(on_own_core(partial(play, point, renderer, folder)).step_seconds)
            with_cpu, without = (
                fmean(World(point.rollout, point.simulation(one), point.steps).run().step_seconds)
                for one in (cpu, SimulatedCpuConfig())
            )
            table.add_row(
                f"{point.live:,}",
                what,
                f"{real:.2f}",
                f"{with_cpu:.2f}",
                f"{with_cpu / real - 1:+.1%}",
                f"{without / real - 1:+.1%}",
            )
            console.print(f"{what}: {real:.2f} s, simulated {with_cpu:.2f} s")
    console.print(table)


# At scale


@dataclass(frozen=True)
class Setting:
    """Episodes on cores of environments, each of which computes one step at a time."""

    step: Latency
    turns: int
    cores: int = CORES
    workers: int = 64
    train_seconds: float = 0.0
    max_staleness: int = 0
    steps: int = 1

    def run(self) -> Report:
        """Simulate steps of as many episodes as there are cores. The engines answer at once: they
        never are the bottleneck.
        """
        rollout = RolloutConfig(
            max_staleness=self.max_staleness,
            groups_per_step=self.cores // GROUP,
            group_size=GROUP,
            workers=self.workers,
            min_live_episodes=self.cores,
            max_live_episodes=self.cores,
            budget=Budget(turns=self.turns),
            deadlines=Deadlines(step=600.0),
        )
        simulation = SimulationConfig(
            engine=SimulatedEngineConfig(seconds_per_token=0.0, answer_tokens=Constant(value=1)),
            env=SimulatedEnvsConfig(
                turns=Constant(value=self.turns), step_seconds=self.step, cores=self.cores
            ),
            cpu=MEASURED,
            train_seconds=Constant(value=self.train_seconds),
        )
        return World(rollout, simulation, self.steps).run()


def frontier(console: Console) -> None:
    """Print how many cores workers keep busy."""
    table = Table(
        "a step computes",
        "rollout workers",
        "turns/s",
        "cores busy",
        "controller busy",
        "workers busy",
        title=f"{CORES:,} cores of environments, episodes of 4 turns",
    )
    for seconds, workers in ((1.0, 64), (1.0, 8), (10.0, 0), (10.0, 8), (0.1, 64)):
        report = Setting(Constant(value=seconds), 4, workers=workers).run()
        # An answer has one token. The batch is made when no core of an environment is busy.
        played = report.seconds - CORES * MEASURED.batch_episode_seconds
        table.add_row(
            f"{seconds:g} s",
            str(workers),
            f"{report.tokens / played:,.0f}",
            f"{report.env_core_load * report.seconds / played:.1%}",
            f"{report.controller_load:.1%}",
            f"{report.worker_load * report.seconds / played:.1%}" if workers else "",
        )
        console.print(f"{seconds:g} s, {workers} workers: {report.cpu_seconds:.0f} CPU-s")
    console.print(table)


def scaling(console: Console) -> None:
    """Print seconds a step in ROLL's setting, by the number of cores."""
    table = Table(
        "cores",
        "rollout workers",
        "steps off",
        "s a step",
        "episodes/s",
        "a core, of 256",
        "cores busy",
        "controller busy",
        title="10 turns of N(10, 5) s, groups of 8, an episode a core a step, 30 s of training",
    )
    step = Normal(mean=10, sd=5, floor=0.1)
    first: dict[int, float] = {}
    for cores, workers, off in (
        (256, 0, 0),
        (CORES, 0, 0),
        (CORES, 8, 0),
        (256, 0, 1),
        (CORES, 8, 1),
    ):
        # One step off, the first step and the last have nothing beside them.
        steps = 5 if off else 1
        report = Setting(step, 10, cores, workers, 30.0, off, steps).run()
        seconds = fmean(report.step_seconds[1:-1] if off else report.step_seconds)
        rate = cores / seconds
        first.setdefault(off, rate / cores)
        table.add_row(
            f"{cores:,}",
            str(workers),
            str(off),
            f"{seconds:.0f}",
            f"{rate:.1f}",
            f"{rate / cores / first[off]:.0%}",
            f"{report.env_core_load:.0%}",
            f"{report.controller_load:.1%}",
        )
        console.print(f"{cores:,} cores, {workers} workers: {report.cpu_seconds:.0f} CPU-s")
    console.print(table)


# Published steps


@dataclass(frozen=True)
class Row:
    """A step that was published, and what is known of it."""

    what: str
    nodes: int
    seconds: float
    settings: str
    """The config, as YAML."""


def _fitted(mean: float, sigma: float, cap: float) -> Lognormal:
    """Lognormal with a cap, and this mean."""
    z_N = np.random.default_rng(0).standard_normal(20_000)
    low, high = 1.0, 100 * mean
    for _ in range(60):
        median = (low + high) / 2
        if np.minimum(median * np.exp(sigma * z_N), cap).mean() < mean:
            low = median
        else:
            high = median
    return Lognormal(median=round(median, 1), sigma=sigma, cap=cap)


_MATH = """
steps: 10
env: search
model: Qwen/Qwen3-30B-A3B
cluster: ray
placement: {placement}
rollout:
  groups_per_step: 64
  group_size: 32
  max_staleness: {staleness}
  budget: {{turns: 1}}
  sampling: {{max_tokens: 3840}}
  max_live_episodes: 4096
engine: {{name: vllm, tensor_parallel: 2, max_context: 4096{more}}}
trainer:
  {{name: fsdp, moments: int8, minibatches: 4, world_size: {ranks}, expert_parallel: 8}}
simulation:
  prompt_tokens: 150
  engine: {{answer_tokens: {answers}}}
  env: {{turns: {{kind: constant, value: 1}}}}
"""
_SWE = """
steps: 10
env: search
model: {{name: Qwen/Qwen3-30B-A3B, hf_overrides: {{max_position_embeddings: 131072}}}}
cluster: ray
placement: disaggregated
rollout:
  groups_per_step: 32
  group_size: 16
  max_staleness: 1
  budget: {{turns: 160}}
  sampling: {{max_tokens: 4096}}
  max_live_episodes: 1024
  deadlines: {{step: 600, episode: 36000, group: 36000}}
engine: {{name: vllm, tensor_parallel: 8, max_context: 131072}}
trainer:
  {{name: fsdp, moments: int8, world_size: 64, context_parallel: 8, expert_parallel: 8}}
simulation:
  prompt_tokens: 2000
  observation_tokens: 400
  engine: {{answer_tokens: {answers}}}
  env: {{turns: {turns}, step_seconds: {{kind: lognormal, median: {step}, sigma: 1, cap: 60}}}}
"""


def _written(latency: Lognormal) -> str:
    return (
        f"{{kind: lognormal, median: {latency.median}, sigma: {latency.sigma}, cap: {latency.cap}}}"
    )


def published() -> Iterator[Row]:
    """Rows of NeMo RL's page of performance (v0.6, H100, bfloat16)."""
    answers = _written(_fitted(3_203 - 150, 0.5, 3_840))
    yield Row(
        "30B-A3B, math, on policy, 32 GPUs",
        4,
        192.0,
        _MATH.format(
            placement="colocated", ranks=32, staleness=0, more=", sleep_mode: true", answers=answers
        ),
    )
    yield Row(
        "30B-A3B, math, one step off, 32 GPUs",
        4,
        152.0,
        _MATH.format(placement="disaggregated", ranks=16, staleness=1, more="", answers=answers),
    )
    for step in (0.01, 2.0):
        yield Row(
            f"30B-A3B, agents, one step off, 128 GPUs, median of {step:g} s a tool call",
            16,
            430.0,
            _SWE.format(
                answers=_written(_fitted(350, 0.8, 4_096)),
                turns=_written(_fitted(40, 0.6, 160)),
                step=step,
            ),
        )


def planned(row: Row) -> Plan:
    """The plan of a row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(row.settings)
        config = load_config(path).config
    inventory = Inventory.uniform(gpu_named("H100"), 8, row.nodes)
    return make_plan(config, inventory, model_of(config))


def compare(console: Console) -> None:
    """Print published and planned seconds of a step."""
    table = Table(
        "step", "published", "planned", "deviation", "waiting for episodes", "training", "weights"
    )
    for row in published():
        step = planned(row).step
        table.add_row(
            row.what,
            f"{row.seconds:.0f} s",
            f"{step.seconds:.0f} s",
            f"{step.seconds / row.seconds - 1:+.0%}",
            f"{step.rollout:.0f} s",
            f"{step.train:.0f} s",
            f"{step.weights + step.switch:.1f} s",
        )
        console.print(f"{row.what}: {step}")
    console.print(table)


PARTS: dict[str, Callable[[Console], None]] = {
    "calibrate": calibrate,
    "frontier": frontier,
    "scaling": scaling,
    "published": compare,
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    console = Console(width=130)
    for part in parser.parse_args().parts:
        PARTS[part](console)


if __name__ == "__main__":
    main()
