"""What the staleness rules cost where a few environment steps take very long: seconds per step,
bias, wasted tokens.

    python benchmarks/heavy_tails.py [--bound 4] [--steps 60] [--seeds 3]

Each rule plays the same episodes on the production scheduler under the virtual clock: eight turns,
whose environment steps last as a Pareto distribution says (shape 1.1, at least 1 s), or 1 s with a
chance of 1 in 100 of 300 s. `oldest` is the age of the oldest token that carried loss, `left out`
the share of tokens that were too old to carry any, and `duration` the mean length of trained
episodes over that of all sampled ones (below 1, long ones are missing).
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from random import Random

from rich.console import Console
from rich.table import Table

from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.rule_registry import installed_rules, load_rule
from agentrl.rollout.seeds import derive_seed
from agentrl.simulate.config import SimulatedEngineConfig, SimulationConfig
from agentrl.simulate.env import EpisodePlan
from agentrl.simulate.latency import Constant
from agentrl.simulate.world import Report, World

TURNS = 8
PATIENCE = Deadlines(reset=1e5, step=1e5, generate=1e5, episode=1e6, group=1e7, stall=5e6)
TAILS: dict[str, Callable[[Random], float]] = {
    "Pareto, shape 1.1": lambda rng: min(rng.paretovariate(1.1), 5000.0),
    "1 s or 300 s": lambda rng: 300.0 if rng.random() < 0.01 else 1.0,
}


def played(rule: str, tail: Callable[[Random], float], bound: int, steps: int, seed: int) -> Report:
    """A run of `steps` steps under a rule."""

    def plan_of(task: int, member: int) -> EpisodePlan:
        rng = Random(derive_seed(seed, task, member))
        return EpisodePlan(0.0, tuple(tail(rng) for _ in range(TURNS)), 1.0)

    rollout = RolloutConfig(
        groups_per_step=16,
        group_size=1,
        max_staleness=bound,
        staleness_rule=rule,
        budget=Budget(turns=TURNS),
        deadlines=PATIENCE,
        sampling={"max_tokens": 32},
    )
    engine = SimulatedEngineConfig(slots=256, seconds_per_token=0.01)
    simulation = SimulationConfig(engine=engine, prompt_tokens=1, train_seconds=Constant(value=5.0))
    return World(rollout, simulation, steps, seed, plan_of=plan_of, goes_on=True).run()


def main() -> None:
    """Print a table for each distribution."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bound", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for name, tail in TAILS.items():
        table = Table(
            "rule", "s/step", "oldest", "left out", "duration", title=f"{name}, K = {args.bound}"
        )
        for rule in installed_rules():
            masks = load_rule(rule).masks
            reports = [
                played(rule, tail, args.bound, args.steps, seed) for seed in range(args.seeds)
            ]
            tokens = sum((report.staleness_tokens for report in reports), start=Counter[int]())
            old = (
                sum(count for age, count in tokens.items() if age > args.bound) / tokens.total()
                if masks
                else 0.0
            )
            oldest = min(args.bound, max(tokens)) if masks else max(tokens)
            seconds = statistics.fmean(report.seconds / report.steps for report in reports)
            duration = statistics.fmean(report.metrics["bias/seconds"] for report in reports)
            table.add_row(rule, f"{seconds:.1f}", str(oldest), f"{old:.3f}", f"{duration:.2f}")
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
