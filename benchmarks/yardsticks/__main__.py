"""Whether published results about the learning of agents hold here, on a small scale.

    python -m benchmarks.yardsticks                          # all of them, with five seeds
    python -m benchmarks.yardsticks kuhn t_maze --seeds 1 2
    python -m benchmarks.yardsticks --page                   # trains nothing

Each run is a tiny model that imitates a weak player and then learns (`table.py`), in
`runs/yardsticks/NAME/ARM-SEED`. A run that has ended is not trained again, and one that was stopped
goes on. After each yardstick its curves are written into `results.json` beside this file, and from
all that is there the page docs/yardsticks.md is made, with its pictures.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.training import run_to_end
from benchmarks.yardsticks.curves import curve_of, read_results, write_results
from benchmarks.yardsticks.page import write_page
from benchmarks.yardsticks.table import YARDSTICKS
from benchmarks.yardsticks.yardstick import EXAMPLES, Curve, Yardstick

SEEDS = (1, 2, 4, 6, 8)
"""With these no held-out task is trained on (`tests/envs/test_learn.py`)."""
RUNS = Path("runs/yardsticks")


def folder_of(yardstick: Yardstick, arm: str, seed: int) -> Path:
    """Where a run is."""
    return RUNS / yardstick.name / f"{arm.replace(' ', '_').replace(',', '')}-{seed}"


def trained(yardstick: Yardstick, arm: str, seed: int) -> Curve:
    """The curve of a run, which is trained if it has not been."""
    folder = folder_of(yardstick, arm, seed)
    first = folder_of(yardstick, next(iter(yardstick.arms)), seed)
    begun = []
    if folder != first:
        # All begin with the same imitation, which is made once.
        begun = [f"model={first / 'demonstrations'}", "recipe.demonstrations=null"]
    settings = [*yardstick.settings, *yardstick.arms[arm], f"seed={seed}", *begun]
    if begun:
        settings = [one for one in settings if not one.startswith("recipe.demonstrations.")]
    run_to_end(folder, EXAMPLES / f"{yardstick.config}.yaml", settings)
    return curve_of(folder, yardstick.metric)


@dataclass(slots=True)
class Deadline:
    """When no more runs begin, and whether any did not."""

    at: float
    missed: bool = False

    def has_passed(self) -> bool:
        """Whether it is too late to begin a run."""
        self.missed = self.missed or time.monotonic() > self.at
        return self.missed


def curves_of(yardstick: Yardstick, late: Deadline, seed: int) -> dict[str, Curve]:
    """The curves of all arms with a seed, or none if it is late: only whole comparisons count."""
    found = {}
    for arm in yardstick.arms:
        if late.has_passed():
            print(f"the time is up before {yardstick.name}, {arm}, seed {seed}", file=sys.stderr)
            return {}
        found[arm] = trained(yardstick, arm, seed)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.yardsticks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = {yardstick.name: yardstick for yardstick in YARDSTICKS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="none begins later")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, on a core each")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"there is no yardstick {unknown[0]!r}: {', '.join(known)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results, late = read_results(), Deadline(time.monotonic() + 60 * given.minutes)
    with ThreadPoolExecutor(given.processes) as pool:
        for name in [] if given.page else given.names or known:
            curves = partial(curves_of, known[name], late)
            for seed, of_arms in zip(given.seeds, pool.map(curves, given.seeds), strict=True):
                for arm, curve in of_arms.items():
                    results.setdefault(name, {}).setdefault(arm, {})[str(seed)] = curve
            write_results(results)
            write_page(results)
    write_page(results)
    return int(late.missed)


if __name__ == "__main__":
    sys.exit(main())
