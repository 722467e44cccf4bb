"""Whether branches learn more from the same number of sampled tokens.

    python benchmarks/branches.py                          # FrozenLake with the seeds 1, 2 and 4
    python benchmarks/branches.py --seeds 1 --steps 8      # in runs/branches-with-1 and -without-1

For each seed a tiny model imitates a weak player and then learns FrozenLake twice, with the same
settings but for the groups: eight episodes from the beginning (`advantage=leave_one_out`), or four
with a branch each (`advantage=branch`), which sample fewer tokens in a step and so take more steps.
A row has the success of 200 held-out tasks, interpolated between evaluations, when both have
sampled a quarter, a half, three quarters and all of the tokens that the shorter of the two has. At
the end stands the mean difference over seeds with its standard error. A run that has ended is not
trained again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from training import run_to_end

CONFIG = Path(__file__).parents[1] / "examples" / "frozen_lake.yaml"
ARMS = {
    "without": ["rollout.group_size=8", "algorithm.advantage=leave_one_out"],
    "with": [
        "rollout.group_size=4",
        "algorithm.advantage=branch",
        "rollout.branches={at: uniform, width: 1, budget: 1, before: 5}",
    ],
}
LONGER = 1.4
"""How many times as many steps a run with branches has."""
SHARES = (0.25, 0.5, 0.75, 1.0)

Curve = list[tuple[float, float]]
"""Held-out success after so many sampled tokens."""


def trained(arm: str, seed: int, steps: int) -> Path:
    """The folder of a run that has ended; it is trained, if it has not been."""
    folder = Path(f"runs/branches-{arm}-{seed}")
    count = round(steps * (LONGER if arm == "with" else 1))
    # Both begin with the same imitation, which is made once.
    imitated = Path(f"runs/branches-without-{seed}/demonstrations")
    begun = [f"model={imitated}", "recipe.demonstrations=null"] if arm == "with" else []
    settings = [
        *begun,
        f"seed={seed}",
        f"steps={count}",
        "trainer.schedule=constant",
        "rollout.groups_per_step=16",
        f"evaluation.every={max(1, steps // 4)}",
        *ARMS[arm],
    ]
    return run_to_end(folder, CONFIG, settings)


def curve_of(folder: Path) -> Curve:
    """The evaluations of a run by the tokens that were sampled and trained on before."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spent = {int(row["step"]): row["loss_tokens"] for row in rows if "loss_tokens" in row}
    evaluated = {int(row["step"]): row["eval/success"] for row in rows if "eval/success" in row}
    return [
        (sum(tokens for at, tokens in spent.items() if at < step), success)
        for step, success in sorted(evaluated.items())
    ]


def successes(curve: Curve, budget: float) -> list[float]:
    """Success at shares of a number of tokens."""
    tokens, success = zip(*curve, strict=True)
    return [float(np.interp(share * budget, tokens, success)) for share in SHARES]


def differences(seed: int, steps: int) -> list[float]:
    """Print the rows of a seed: how much more success branches have at each share."""
    curves = {arm: curve_of(trained(arm, seed, steps)) for arm in ARMS}
    budget = min(curve[-1][0] for curve in curves.values())
    found = {arm: successes(curve, budget) for arm, curve in curves.items()}
    for arm, values in found.items():
        shown = " | ".join(f"{value:.1%}" for value in values)
        print(f"| {seed} | {arm} | {budget:,.0f} | {curves[arm][0][1]:.1%} | {shown} |", flush=True)
    return [b - a for a, b in zip(found["without"], found["with"], strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=24, help="Steps without branches.")
    given = parser.parse_args(arguments)
    shares = " | ".join(f"{share:.0%}" for share in SHARES)
    print(f"| seed | branches | tokens | before | {shares} |\n|{'---|' * (4 + len(SHARES))}")
    by_seed = [differences(seed, given.steps) for seed in given.seeds]
    told = []
    for values in zip(*by_seed, strict=True):
        error = f" ± {stdev(values) / sqrt(len(values)):.1%}" if len(values) > 1 else ""
        told.append(f"{fmean(values):+.1%}{error}")
    print(f"| mean difference | | | | {' | '.join(told)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
