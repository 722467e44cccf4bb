"""Curves of runs, and the file that keeps them."""

import json
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

from benchmarks.yardsticks.yardstick import Curve, Results

RESULTS = Path(__file__).with_name("results.json")


def curve_of(folder: Path, metric: str) -> Curve:
    """The metric of a run wherever it was measured, by the steps and the tokens trained on before.

    Raises:
        ValueError: the run has no such metric.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spent = {int(row["step"]): int(row["loss_tokens"]) for row in rows if "loss_tokens" in row}
    # What is measured at a step was so before it.
    before = dict(enumerate(accumulate([0, *(spent[step] for step in sorted(spent))])))
    found = {int(row["step"]): float(row[metric]) for row in rows if metric in row}
    if not found:
        raise ValueError(f"{folder} has no metric {metric!r}")
    steps = sorted(found)
    return Curve(
        steps,
        [before[step] for step in steps],
        [round(found[step], 4) for step in steps],
        float((folder / "cpu_seconds").read_text()),
        (folder / "commit").read_text(),
    )


def read_results(path: Path = RESULTS) -> Results:
    """All curves so far."""
    if not path.exists():
        return {}
    read = json.loads(path.read_text())
    return {
        name: {
            arm: {seed: Curve(**curve) for seed, curve in seeds.items()}
            for arm, seeds in arms.items()
        }
        for name, arms in read.items()
    }


def write_results(results: Results, path: Path = RESULTS) -> None:
    """Keep all curves, one a line."""
    lines = []
    for name, arms in results.items():
        of_arms = [
            f"  {json.dumps(arm)}: {{\n"
            + ",\n".join(
                f"   {json.dumps(seed)}: {json.dumps(asdict(curve))}"
                for seed, curve in seeds.items()
            )
            + "\n  }"
            for arm, seeds in arms.items()
        ]
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(of_arms) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
