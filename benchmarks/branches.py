"""Whether branches learn more from the same number of sampled tokens, or for the same CPU time.

    python benchmarks/branches.py                    # all problems, with the seeds 1, 2 and 4
    python benchmarks/branches.py search --seeds 1   # in runs/branches-search-eights-1, and others
    python benchmarks/branches.py frozen_lake search --picture docs/pictures/branches.png

For each seed a tiny model imitates a weak player, once, and from there learns a problem in three
ways. Their settings differ in the groups alone: eight episodes from the beginning (`eights`) or
four of them (`fours`), both with `advantage=leave_one_out`, or four with a branch each
(`branches`, with `advantage=branch`). Smaller groups sample fewer tokens in a step, and so take
more steps for the same tokens: `fours` tell what that alone does.

A row has the success on held-out tasks, interpolated between evaluations, when all have sampled a
quarter, a half, three quarters and all of the tokens that the shortest of them has; and the same
by CPU seconds, of which each step has its share by time. At the end of a problem stand the mean
differences over seeds, with their standard errors. A run that has ended is not trained again.
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
SHARES = (0.25, 0.5, 0.75, 1.0)
AXES = {"tokens": "thousand tokens trained on", "CPU seconds": "CPU seconds"}
"""What all may have spent equally much of, as it is called in pictures."""
EVALUATIONS = 4
"""After the first one, of what was imitated."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to make groups."""

    colour: str
    longer: float
    """How many times as many steps it has as groups of eight."""
    settings: tuple[str, ...]


ARMS = {
    "eights": Arm("#1f6f8b", 1.0, ("rollout.group_size=8", "algorithm.advantage=leave_one_out")),
    "fours": Arm("#8a8a8a", 2.0, ("rollout.group_size=4", "algorithm.advantage=leave_one_out")),
    "branches": Arm("#c8553d", 1.4, ("rollout.group_size=4", "algorithm.advantage=branch")),
}
COMPARED = (("branches", "eights"), ("branches", "fours"), ("fours", "eights"))


@dataclass(frozen=True, slots=True)
class Problem:
    """An example, and how it is trained here."""

    config: str
    steps: int
    """Steps of a run with groups of eight."""
    before: int
    """Branches leave before this turn: a usual length of episodes."""
    settings: tuple[str, ...] = ()
    """What differs from the example."""


PROBLEMS = {
    "frozen_lake": Problem("frozen_lake.yaml", steps=12, before=5),
    "search": Problem("learn/search.yaml", steps=16, before=3),
    "sokoban": Problem("learn/sokoban.yaml", steps=12, before=6),
    "repair": Problem(
        "repair.yaml",
        steps=16,
        before=2,
        settings=("env.options.sandbox={name: benchmarks.sed_sandbox:SedSandboxes}",),
    ),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out success, and what had been spent before each of its measurements."""

    spent: dict[str, list[float]]
    success: list[float]

    def at(self, axis: str, places: Sequence[float]) -> list[float]:
        """Success, interpolated."""
        return np.interp(places, self.spent[axis], self.success).tolist()


def imitated(name: str, seed: int) -> Path:
    """The folder of the model that all ways begin with. Its run has one step, which none sees."""
    folder = Path(f"runs/branches-{name}-imitated-{seed}")
    problem = PROBLEMS[name]
    settings = [f"seed={seed}", "steps=1", "rollout.groups_per_step=1", "evaluation.tasks=1"]
    settings += problem.settings
    return run_to_end(folder, EXAMPLES / problem.config, settings) / "demonstrations"


def trained(name: str, arm: str, seed: int) -> Path:
    """The folder of a run that has ended; it is trained, if it has not been."""
    problem = PROBLEMS[name]
    count = round(problem.steps * ARMS[arm].longer)
    settings = [
        f"seed={seed}",
        f"steps={count}",
        f"model={imitated(name, seed)}",
        "recipe.demonstrations=null",
        "trainer.schedule=constant",
        "rollout.groups_per_step=16",
        f"evaluation.every={max(1, count // EVALUATIONS)}",
        *ARMS[arm].settings,
        *problem.settings,
    ]
    if arm == "branches":
        where = f"{{at: uniform, width: 1, budget: 1, before: {problem.before}}}"
        settings.append(f"rollout.branches={where}")
    folder = Path(f"runs/branches-{name}-{arm}-{seed}")
    return run_to_end(folder, EXAMPLES / problem.config, settings)


def rows_with(folder: Path, metric: str) -> list[dict[str, float]]:
    """The metrics of a run, as far as they have this one, by step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = (json.loads(line) for line in lines)
    return sorted((row for row in rows if metric in row), key=lambda row: row["step"])


def tokens_of(folder: Path) -> list[float]:
    """The tokens that a run had trained on before its first step, its second one, and so on."""
    return list(
        accumulate((one["loss_tokens"] for one in rows_with(folder, "loss_tokens")), initial=0.0)
    )


def curve_of(folder: Path, metric: str = "eval/success") -> Curve:
    """The evaluations of a run by the tokens that were sampled and trained on before, and by the
    CPU seconds that this took.
    """
    steps = rows_with(folder, "loss_tokens")
    success = {int(row["step"]): row[metric] for row in rows_with(folder, metric)}
    seconds = list(accumulate((row["seconds"] for row in steps), initial=0.0))
    busy = float((folder / "cpu_seconds").read_text()) / seconds[-1]
    spent = {
        "tokens": tokens_of(folder),
        "CPU seconds": [busy * one for one in seconds],
    }
    at = sorted(success)
    return Curve(
        {axis: [before[step] for step in at] for axis, before in spent.items()},
        [success[step] for step in at],
    )


def budget_of(curves: dict[str, Curve], axis: str) -> float:
    """What all ways have spent."""
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
    """How much more success one way has than another, over the seeds."""
    for axis in AXES:
        for one, other in COMPARED:
            differences = []
            for curves in by_seed:
                places = [share * budget_of(curves, axis) for share in SHARES]
                pair = zip(
                    curves[one].at(axis, places), curves[other].at(axis, places), strict=True
                )
                differences.append([a - b for a, b in pair])
            told = []
            for values in zip(*differences, strict=True):
                error = f" ± {stdev(values) / sqrt(len(values)):.1%}" if len(values) > 1 else ""
                told.append(f"{fmean(values):+.1%}{error}")
            print(
                f"| `{name}` | mean | {one} - {other} | {axis} | | {' | '.join(told)} |", flush=True
            )


def draw(problems: dict[str, list[dict[str, Curve]]], path: Path) -> None:
    """Means over seeds, and the range, by tokens and by CPU seconds, into a PNG."""
    figure = Figure(figsize=(3.2 * len(problems), 5), layout="constrained")
    panels = figure.subplots(len(AXES), len(problems), squeeze=False)
    for column, (name, by_seed) in enumerate(problems.items()):
        for panel, (axis, label) in zip(panels[:, column], AXES.items(), strict=True):
            grid = np.linspace(0, min(budget_of(curves, axis) for curves in by_seed), 60)
            for arm, way in ARMS.items():
                values = np.array([curves[arm].at(axis, grid.tolist()) for curves in by_seed])
                shown = grid / 1000 if axis == "tokens" else grid
                panel.plot(shown, values.mean(0), color=way.colour, label=arm)
                panel.fill_between(
                    shown, values.min(0), values.max(0), color=way.colour, alpha=0.15
                )
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
    print("| problem | seed | groups | equal | before | " + shares + " |")
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
