"""Compares the production scheduler with the rules of others, on the same random episodes, with
five seeds, in one run.

    python benchmarks/scheduler.py [--settings gauss lognormal-1.0] [--bounds 1 2 4] [--seeds 5]
    [--steps 50]

`agentrl` is `Rollouts` itself with a simulated engine and simulated environments
(`agentrl.simulate`), with its deadlines, retries and ledger; `agentrl mask` is the same with
`rollout.staleness_rule=mask`, whose masked tokens count as discarded. The others are the models of
`rivals.py`. Every run stops after its last step as if more steps followed, so some groups are still
running. Three columns give our seconds per step / theirs (below 1, ours is faster): `at K`, with
the same bound; `at kept`, with our bound set to the largest staleness that the other rule reached,
which is the fair comparison if that rule exceeds its bound; `mask`, with our mask rule at the same
K. `at least` is the lower bound of any schedule that drops nothing and leaves nothing over.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rich.console import Console
from rich.table import Table
from rivals import SETTINGS, Result, Workload, lower_bound, mean, rivals

from agentrl.flow import Retries
from agentrl.protocols import GenerateRequest
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.env import EpisodePlan
from agentrl.simulate.latency import Constant
from agentrl.simulate.world import World
from agentrl.trajectory import Task

WITHOUT_K = ("synchronous", "lockstep", "workers", "ring")
# A step is late after four times the longest one.
PATIENCE = Deadlines(reset=100, step=60, generate=1e6, episode=2e6, group=1e7, stall=5e6)


@dataclass(frozen=True)
class IndexedTasks:
    """`TaskSource` whose seeds are the tasks' indices, which the workload uses to find them."""

    def task(self, index: int) -> Task:
        return Task("simulated", index, {}, f"task-{index:06d}")


def world(workload: Workload, bound: int, rule: str) -> World:
    """The workload as a simulation of the production scheduler."""
    instant = workload.slots >= 1_000_000

    def plan_of(task: int, member: int) -> EpisodePlan:
        return EpisodePlan(0.0, tuple(env for _, env in workload.turns(task, member)), 1.0)

    def length_of(request: GenerateRequest) -> int:
        task, member, _, turn = request.id.split("+")[0].split("/")
        return max(1, workload.turns(int(task.removeprefix("task-")), int(member))[int(turn)][0])

    engine = SimulatedEngineConfig(
        slots=workload.slots,
        seconds_per_token=0.0 if instant else workload.seconds_per_token,
        slowdown=workload.slowdown,
        knee=workload.knee,
        max_context=10_000_000,
        kv_on_update="keep",
    )
    rollout = RolloutConfig(
        groups_per_step=workload.groups_per_step,
        group_size=workload.group_size,
        max_staleness=bound,
        staleness_rule=rule,
        budget=Budget(turns=workload.num_turns),
        max_live_episodes=1_000_000,
        min_live_episodes=1_000_000 if instant else workload.slots,
        max_failed_tasks=0,
        retries=Retries(environment=20),
        sampling={"max_tokens": 1_000_000},
        deadlines=PATIENCE,
    )
    troubles = SimulatedEnvsConfig(hung=workload.hung, fail_slow=workload.fail_slow)
    simulation = SimulationConfig(
        engine=engine,
        env=troubles,
        prompt_tokens=1,
        train_seconds=Constant(value=workload.train_seconds),
    )
    parts = {"tasks": IndexedTasks(), "plan_of": plan_of, "length_of": length_of}
    return World(rollout, simulation, workload.steps, workload.seed, goes_on=True, **parts)


def ours(workload: Workload, bound: int, rule: str = "deadline_first") -> Result:
    """The result of `Rollouts`. Tokens that `mask` leaves out of the loss count as discarded."""
    report = world(workload, bound, rule).run()
    fates, tokens = report.episode_fates, report.staleness_tokens
    masked = sum(count for age, count in tokens.items() if age > bound) / tokens.total()
    return Result(
        f"agentrl, K = {bound}" if rule == "deadline_first" else f"agentrl {rule}, K = {bound}",
        report.seconds / report.steps,
        fates.trained / report.seconds,
        report.slot_utilisation if workload.slots < 1_000_000 else float("nan"),
        min(bound, report.largest_staleness),
        1 - fates.trained / (fates.total - fates.open) * (1 - masked),
        report.metrics["bias/seconds"],
    )


def rows(
    workloads: Sequence[Workload], bounds: Sequence[int]
) -> Iterator[tuple[Result, float, Sequence[float]]]:
    """(a rule's result, half its range over seeds, our seconds / its seconds: at K, at the bound
    kept, by `mask`).
    """

    @cache
    def all_of_ours(bound: int, rule: str = "deadline_first") -> tuple[Result, float]:
        return summary([ours(workload, bound, rule) for workload in workloads])

    def ours_at(bound: int) -> Result:
        return all_of_ours(bound)[0]

    for bound in bounds:
        yield *all_of_ours(bound), ()
        yield *all_of_ours(bound, "mask"), ()
        for name, run in rivals(bound).items():
            if name in WITHOUT_K and bound != bounds[0]:
                continue
            result, spread = summary([run(workload) for workload in workloads])
            result = replace(result, rule=name if name in WITHOUT_K else f"{name}, K = {bound}")
            same = 0 if name in WITHOUT_K else bound
            against = [
                ours_at(same),
                ours_at(max(result.largest_staleness, 0)),
                all_of_ours(same, "mask")[0],
            ]
            yield (
                result,
                spread,
                [ours.seconds_per_step / result.seconds_per_step for ours in against],
            )


def summary(results: Sequence[Result]) -> tuple[Result, float]:
    """The mean over seeds, and half the range of its seconds per step."""
    seconds = [result.seconds_per_step for result in results]
    return mean(results), (max(seconds) - min(seconds)) / 2


def main() -> None:
    """Print a table per setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME"
    )
    parser.add_argument("--bounds", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    console = Console(width=140)
    for name in args.settings:
        workloads = [replace(SETTINGS[name](seed), steps=args.steps) for seed in range(args.seeds)]
        floor = statistics.fmean(lower_bound(workload) / workload.steps for workload in workloads)
        columns = (
            "rule",
            "s/step",
            "±",
            "at K",
            "at kept",
            "mask",
            "slots",
            "staleness",
            "discarded",
            "trained/all",
            "stalls",
        )
        table = Table(
            *columns,
            title=f"{name}: at least {floor:.1f} s/step unless work is left over or dropped",
        )
        for result, spread, against in rows(workloads, args.bounds):
            ratios = [f"{ratio:.2f}" for ratio in against] or [""] * 3
            figures = (
                f"{result.slot_utilisation:.2f}",
                str(result.largest_staleness),
                f"{result.discarded:.2f}",
            )
            stalls = "" if result.stalled_after is None else f"after {result.stalled_after}"
            style = "bold" if result.rule.startswith("agentrl") else ""
            table.add_row(
                result.rule,
                f"{result.seconds_per_step:.1f}",
                f"{spread:.1f}",
                *ratios,
                *figures,
                f"{result.duration_ratio:.2f}",
                stalls,
                style=style,
            )
        console.print(table)


if __name__ == "__main__":
    main()
