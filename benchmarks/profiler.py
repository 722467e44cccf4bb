"""What the profiler finds in a run whose times are known, and what recording costs.

The production scheduler plays a simulated world in real time: engine, environments, rewards,
trainer and weights only sleep. The same world under the virtual clock says exactly how long each of
them is busy. Printed are, for each resource, these seconds and those that a profile of the real
time attributes to it; the run's seconds by the profile, without recording, and under the virtual
clock; and the CPU time of the process with and without recording. Last, what spans cost a scheduler
that never waits.

    python benchmarks/profiler.py [--steps 4] [--rounds 3]

What to aim for: each resource within 2 %, the total within 5 %, recording below 3 %. On cores that
others use too, timers are late by more than on quiet ones, and CPU times differ between rounds: all
rounds are printed.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from agentrl.flow import SpanLog, record_spans, run_steadily
from agentrl.observe.profiler import Profiler
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.latency import Constant, Normal
from agentrl.simulate.world import Report, World
from agentrl.trajectory import Score, Trajectory
from agentrl.viewer.timing import busy_sets
from agentrl.viewer.traced import TracedTime, newest_trace

RESOURCES = ("engine", "environments", "rewards", "trainer", "weights")


@dataclass(frozen=True, slots=True)
class SleepingReward:
    """Takes its time, and pays what the environment paid."""

    seconds: float

    async def score(self, trajectory: Trajectory) -> Score:
        await asyncio.sleep(self.seconds)
        return Score(trajectory.env_return)


@dataclass(frozen=True, slots=True)
class Round:
    """A world in real time: its seconds, the CPU seconds of the process, and its trace if it was
    recorded.
    """

    seconds: float
    cpu_seconds: float
    traced: TracedTime | None


def world(steps: int) -> World:
    rollout = RolloutConfig(groups_per_step=4, group_size=4, budget=Budget(turns=8))
    simulation = SimulationConfig(
        engine=SimulatedEngineConfig(seconds_per_token=0.01, answer_tokens=Normal(mean=40, sd=10)),
        env=SimulatedEnvsConfig(turns=Constant(value=4), step_seconds=Normal(mean=0.2, sd=0.04)),
        train_seconds=Constant(value=1.0),
        update_seconds=Constant(value=0.2),
    )
    return World(rollout, simulation, steps, reward=SleepingReward(0.4))


def in_real_time(steps: int, profiled: bool) -> Round:
    def run(main) -> Report:
        return run_steadily(main())

    with tempfile.TemporaryDirectory() as folder:
        with Profiler(Path(folder), always=profiled):
            began, cpu = time.monotonic(), time.process_time()
            world(steps).run(on=run)
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        return Round(seconds, cpu, newest_trace(Path(folder), None))


def busy_seconds(
    spans: dict[str, list[tuple[float, float]]], begin: float, end: float
) -> dict[str, float]:
    sets = busy_sets({name: spans.get(name, []) for name in RESOURCES}, begin, end)
    return {
        name: sum(seconds for names, seconds in sets.items() if name in names) for name in RESOURCES
    }


def expected(steps: int) -> tuple[float, dict[str, float]]:
    """The seconds of the run and of each resource, under the virtual clock."""
    with record_spans(SpanLog()) as log:
        report = world(steps).run()
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in log.take():
        spans.setdefault(one.resource, []).append((one.begin, one.end))
    return report.seconds, busy_seconds(spans, 0.0, report.seconds)


def never_waiting(recording: bool) -> float:
    """CPU seconds of a scheduler that plays a thousand episodes of eight turns under the virtual
    clock.
    """
    rollout = RolloutConfig(groups_per_step=25, group_size=4)
    busy = World(rollout, SimulationConfig(), steps=10)
    if not recording:
        return busy.run().cpu_seconds
    with record_spans(SpanLog()):
        return busy.run().cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    total, known = expected(chosen.steps)
    print(f"under the virtual clock: {total:.3f} s")
    rounds = [
        (in_real_time(chosen.steps, False), in_real_time(chosen.steps, True))
        for _ in range(chosen.rounds)
    ]
    for plain, profiled in rounds:
        traced = profiled.traced
        assert traced is not None
        found = busy_seconds(traced.resources, traced.begin, traced.end)
        shown = ", ".join(
            f"{name} {found[name]:.3f} s ({found[name] / known[name] - 1:+.1%})"
            for name in RESOURCES
        )
        print(f"attributed: {shown}")
        print(
            f"the run: {profiled.seconds - traced.tracing:.3f} s by its profile,"
            f" {plain.seconds:.3f} s without recording"
            f" ({(profiled.seconds - traced.tracing) / plain.seconds - 1:+.1%}); CPU"
            f" {profiled.cpu_seconds:.3f} s and {plain.cpu_seconds:.3f} s; by its own count,"
            f" recording took {traced.tracing:.3f} s ({traced.tracing / profiled.seconds:.2%})"
        )
    costs = [profiled.seconds / plain.seconds - 1 for plain, profiled in rounds]
    print(f"recording makes the run longer by {median(costs):+.2%} (median)")
    pairs = [(never_waiting(False), never_waiting(True)) for _ in range(chosen.rounds)]
    ratio = median(recorded_cpu / plain_cpu for plain_cpu, recorded_cpu in pairs) - 1
    print(f"spans cost a scheduler that never waits {ratio:+.1%} of its CPU time (median)")


if __name__ == "__main__":
    main()
