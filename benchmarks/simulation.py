"""The cost of simulating an episode: a million spans, and episodes with turns on a simulated
engine.

    python benchmarks/simulation.py [--episodes 1000000] [--turned 100000]

Both run the production scheduler under the virtual clock with a ledger on disk, on one core. Each
runs twice with a tenth of the episodes, whose event hashes must be equal, and then with all. Memory
is the peak of the process so far, so it shows whether memory grows with the number of episodes.
"""

import argparse
import resource
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.rollout.config import RolloutConfig
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.latency import Constant, Lognormal
from agentrl.simulate.world import Report, World

ROLLOUT = RolloutConfig(
    groups_per_step=32, group_size=8, max_staleness=1, max_live_episodes=2048, min_live_episodes=512
)
SPANS = SimulationConfig(
    episode_seconds=Lognormal(median=5.0, sigma=1.0, cap=100), train_seconds=Constant(value=1.0)
)
TURNS = SimulationConfig(
    engine=SimulatedEngineConfig(slots=512, answer_tokens=Lognormal(median=64, sigma=0.6, cap=512)),
    env=SimulatedEnvsConfig(
        turns=Constant(value=1), step_seconds=Lognormal(median=0.5, sigma=1.0, cap=10)
    ),
    train_seconds=Constant(value=1.0),
)


def simulate(simulation: SimulationConfig, episodes: int) -> tuple[Report, int]:
    """The report of a run of `episodes` episodes, and the peak memory of the process in MiB after
    it.
    """
    steps = max(1, episodes // (ROLLOUT.groups_per_step * ROLLOUT.group_size))
    with tempfile.TemporaryDirectory() as folder:
        report = World(ROLLOUT, simulation, steps, ledger=Path(folder) / "ledger.sqlite").run()
    return report, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--turned", type=int, default=100_000)
    args = parser.parse_args()
    table = Table(
        "episodes",
        "of",
        "CPU s",
        "µs each",
        "virtual s",
        "MiB",
        "staleness",
        "trained/sampled",
        "hash",
    )
    for name, simulation, episodes in (
        ("spans", SPANS, args.episodes),
        ("a turn", TURNS, args.turned),
    ):
        for count in (episodes // 10, episodes // 10, episodes):
            report, memory = simulate(simulation, count)
            each = 1e6 * report.cpu_seconds / report.episodes
            table.add_row(
                f"{report.episodes:,}",
                name,
                f"{report.cpu_seconds:.1f}",
                f"{each:.1f}",
                f"{report.seconds:,.0f}",
                str(memory),
                str(report.largest_staleness),
                f"{report.metrics['bias/seconds']:.4f}",
                report.event_hash[:12],
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
