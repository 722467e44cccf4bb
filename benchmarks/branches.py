"""Whether branches learn more from the same number of sampled tokens, or in the same time.

    python benchmarks/branches.py                    # all problems, with the seeds 1, 2 and 4
    python benchmarks/branches.py search --seeds 1   # in runs/branches-search-with-1, -without-1
    python benchmarks/branches.py frozen_lake search --picture docs/pictures/branches.png

For each seed a tiny model imitates a weak player and then learns a problem twice, with the same
settings but for the groups: eight episodes from the beginning (`advantage=leave_one_out`), or four
with a branch each (`advantage=branch`), which sample fewer tokens in a step and so take more steps.
A row has the success on held-out tasks, interpolated between evaluations, when both have sampled a
quarter, a half, three quarters and all of the tokens that the shorter of the two has; and the same
by the seconds of training, which mean something if nothing else ran. At the end of a problem stands
the mean difference over seeds with its standard error. A run that has ended is not trained again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from matplotlib.figure import Figure
from training import run_to_end

EXAMPLES = Path(__file__).parents[1] / "examples"
ARMS = ("without", "with")
COLOURS = ("#1f6f8b", "#c8553d")
LONGER = 1.4
"""How many times as many steps a run with branches has."""
SHARES = (0.25, 0.5, 0.75, 1.0)
AXES = {"tokens": "thousand tokens trained on", "seconds": "seconds of training"}
"""What both may have spent equally much of, as it is called in pictures."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An example, and how it is trained here."""

    config: str
    steps: int
    """Steps of a run without branches."""
    before: int
    """Branches leave before this turn: a usual length of episodes."""


PROBLEMS = {
    "frozen_lake": Problem("frozen_lake.yaml", steps=12, before=5),
    "search": Problem("learn/search.yaml", steps=16, before=3),
    "sokoban": Problem("learn/sokoban.yaml", steps=12, before=6),
    "repair": Problem("repair.yaml", steps=16, before=2),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out success, and what had been spent before each of its measurements."""

    spent: dict[str, list[float]]
    success: list[float]

    def at(self, axis: str, places: Sequence[float]) -> list[float]:
        """Success, interpolated."""
        return np.interp(places, self.spent[axis], self.success).tolist()


def trained(name: str, arm: str, seed: int) -> Path:
    """The folder of a run that has ended; it is trained, if it has not been."""
    problem = PROBLEMS[name]
    count = round(problem.steps * (LONGER if arm == "with" else 1))
    settings = [
        f"seed={seed}",
        f"steps={count}",
        "trainer.schedule=constant",
        "rollout.groups_per_step=16",
        f"evaluation.every={max(1, problem.steps // 4)}",
    ]
    if arm == "with":
        branches = f"{{at: uniform, width: 1, budget: 1, before: {problem.before}}}"
        settings += [
            "rollout.group_size=4",
            "algorithm.advantage=branch",
            f"rollout.branches={branches}",
            # Both begin with the same imitation, which is made once.
            f"model=runs/branches-{name}-without-{seed}/demonstrations",
            "recipe.demonstrations=null",
        ]
    else:
        settings += ["rollout.group_size=8", "algorithm.advantage=leave_one_out"]
    folder = Path(f"runs/branches-{name}-{arm}-{seed}")
    return run_to_end(folder, EXAMPLES / problem.config, settings)


def curve_of(folder: Path) -> Curve:
    """The evaluations of a run by the tokens that were sampled and trained on before, and by the
    seconds that this took.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = sorted((row for row in rows if "loss_tokens" in row), key=lambda row: row["step"])
    success = {int(row["step"]): row["eval/success"] for row in rows if "eval/success" in row}
    spent = {
        "tokens": list(accumulate((row["loss_tokens"] for row in steps), initial=0.0)),
        "seconds": list(accumulate((row["seconds"] for row in steps), initial=0.0)),
    }
    at = sorted(success)
    return Curve(
        {axis: [before[step] for step in at] for axis, before in spent.items()},
        [success[step] for step in at],
    )


def budget_of(curves: dict[str, Curve], axis: str) -> float:
    """What both arms have spent."""
    return min(curve.spent[axis][-1] for curve in curves.values())


def print_rows(name: str, seed: int, curves: dict[str, Curve]) -> None:
    """The rows of a seed."""
    for axis in AXES:
        budget = budget_of(curves, axis)
        for arm, curve in curves.items():
            found = curve.at(axis, [share * budget for share in SHARES])
            shown = " | ".join(f"{value:.1%}" for value in found)
            print(
                f"| `{name}` | {seed} | {arm} | {budget:,.0f} {axis} | {curve.success[0]:.1%} |"
                f" {shown} |",
                flush=True,
            )


def print_differences(name: str, by_seed: Sequence[dict[str, Curve]]) -> None:
    """How much more success branches have, over the seeds."""
    for axis in AXES:
        differences = []
        for curves in by_seed:
            places = [share * budget_of(curves, axis) for share in SHARES]
            without, with_them = (curves[arm].at(axis, places) for arm in ARMS)
            differences.append([b - a for a, b in zip(without, with_them, strict=True)])
        told = []
        for values in zip(*differences, strict=True):
            error = f" ± {stdev(values) / sqrt(len(values)):.1%}" if len(values) > 1 else ""
            told.append(f"{fmean(values):+.1%}{error}")
        print(f"| `{name}` | mean difference | | {axis} | | {' | '.join(told)} |", flush=True)


def draw(problems: dict[str, list[dict[str, Curve]]], path: Path) -> None:
    """Means over seeds, and the range, by tokens and by seconds, into a PNG."""
    figure = Figure(figsize=(3.2 * len(problems), 5), layout="constrained")
    panels = figure.subplots(len(AXES), len(problems), squeeze=False)
    for column, (name, by_seed) in enumerate(problems.items()):
        for panel, (axis, label) in zip(panels[:, column], AXES.items(), strict=True):
            grid = np.linspace(0, min(budget_of(curves, axis) for curves in by_seed), 60)
            for arm, colour in zip(ARMS, COLOURS, strict=True):
                values = np.array([curves[arm].at(axis, grid.tolist()) for curves in by_seed])
                shown = grid / 1000 if axis == "tokens" else grid
                panel.plot(shown, values.mean(0), color=colour, label=f"{arm} branches")
                panel.fill_between(shown, values.min(0), values.max(0), color=colour, alpha=0.15)
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
        panels[0, column].set_title(name)
    for panel in panels[:, 0]:
        panel.set_ylabel("held-out success")
    panels[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(PROBLEMS)}"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--picture", type=Path, help="A PNG to draw the curves into.")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - PROBLEMS.keys()):
        parser.error(f"there is no {unknown[0]!r}: {', '.join(PROBLEMS)}")
    shares = " | ".join(f"{share:.0%}" for share in SHARES)
    print("| problem | seed | branches | equal | before | " + shares + " |")
    print(f"|{'---|' * (5 + len(SHARES))}")
    problems: dict[str, list[dict[str, Curve]]] = {}
    for name in given.names or PROBLEMS:
        problems[name] = []
        for seed in given.seeds:
            curves = {arm: curve_of(trained(name, arm, seed)) for arm in ARMS}
            print_rows(name, seed, curves)
            problems[name].append(curves)
        print_differences(name, problems[name])
    if given.picture:
        draw(problems, given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
