"""Whether tasks that begin in the middle teach more, for the same number of sampled tokens.

    python benchmarks/backplay.py             # with the seeds 1, 2 and 4
    python benchmarks/backplay.py --seeds 1   # in runs/backplay-start-1, -before-1, -middle-1

For each seed a tiny model imitates a weak player of Sokoban (the model of benchmarks/branches.py)
and then learns twice, with the same settings but for the tasks: from the start, or by
`tasks: backplay` from the middle of episodes in which that model has succeeded. The tokens of
these recordings count as the first ones of `middle`. A row has the success on held-out rooms,
played from the start, when both have sampled a quarter, a half, three quarters and all of the
tokens that the shorter of the two has. At the end stands the mean difference over seeds with its
standard error. A run that has ended is not trained again.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from branches import EXAMPLES, PROBLEMS, SHARES, Curve, curve_of, imitated, tokens_of
from training import run_to_end

NAME = "sokoban"
STEPS = {"start": 12, "middle": 24}
"""Episodes from the middle are shorter, and so take more steps for the same tokens."""
RECORDED_GROUPS = 32


def run_of(arm: str, seed: int, settings: Sequence[str]) -> Path:
    """The folder of a run from the imitated model that has ended."""
    given = [
        f"seed={seed}",
        f"model={imitated(NAME, seed)}",
        "recipe.demonstrations=null",
        "trainer.schedule=constant",
        "algorithm.advantage=leave_one_out",
        *settings,
    ]
    folder = Path(f"runs/backplay-{arm}-{seed}")
    return run_to_end(folder, EXAMPLES / PROBLEMS[NAME].config, given)


def recorded(seed: int) -> Path:
    """The folder of a run whose only step has what the imitated model plays."""
    groups = f"rollout.groups_per_step={RECORDED_GROUPS}"
    return run_of("before", seed, ["steps=1", groups, "evaluation.tasks=0"])


def trained(arm: str, seed: int) -> Path:
    """The folder of a run that has ended; it is trained, if it has not been."""
    steps = STEPS[arm]
    # The tasks of a suite are the same for both: rooms that are not trained on, from their start.
    suite = f"{{name: start, tasks: 200, every: {steps // 4}}}"
    settings = [
        f"steps={steps}",
        "rollout.groups_per_step=16",
        "evaluation.tasks=0",
        f"evaluation.suites=[{suite}]",
    ]
    if arm == "middle":
        settings.append(f"tasks={{name: backplay, path: {recorded(seed)}, held_out: 0}}")
    return run_of(arm, seed, settings)


def curves_of(seed: int) -> dict[str, Curve]:
    """Success by tokens, those of the recordings included."""
    found = {arm: curve_of(trained(arm, seed), "eval/start/success") for arm in STEPS}
    before, middle = tokens_of(recorded(seed))[-1], found["middle"]
    spent = {"tokens": [before + one for one in middle.spent["tokens"]]}
    return found | {"middle": replace(middle, spent=spent)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 4])
    given = parser.parse_args(arguments)
    shares = " | ".join(f"{share:.0%}" for share in SHARES)
    print(f"| seed | tasks | tokens | before | {shares} |")
    print(f"|{'---|' * (4 + len(SHARES))}")
    differences = []
    for seed in given.seeds:
        curves = curves_of(seed)
        budget = min(curve.spent["tokens"][-1] for curve in curves.values())
        found = {
            arm: curve.at("tokens", [share * budget for share in SHARES])
            for arm, curve in curves.items()
        }
        for arm, values in found.items():
            told = " | ".join(f"{value:.1%}" for value in values)
            first = curves[arm].success[0]
            print(f"| {seed} | {arm} | {budget:,.0f} | {first:.1%} | {told} |", flush=True)
        pairs = zip(found["middle"], found["start"], strict=True)
        differences.append([middle - start for middle, start in pairs])
    means = []
    for values in zip(*differences, strict=True):
        error = f" ± {stdev(values) / sqrt(len(values)):.1%}" if len(values) > 1 else ""
        means.append(f"{fmean(values):+.1%}{error}")
    print(f"| mean | middle - start | | | {' | '.join(means)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
