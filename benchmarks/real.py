"""The table of `make real`: held-out success of a pretrained model before and after training, for
each seed.

    python benchmarks/real.py runs/real-1 runs/real-2 runs/real-3

It ends with status 1 unless success rose in all runs: the interval of the difference is above 0
(Newcombe 1998, method 10: from the Wilson intervals of both shares), and the interval of success
after training is above what the best constant answer earns (`benchmarks/constant.py`). The commit
is that of the code that prints the table.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from constant import best_constant
from training import commit


def rise(summary: dict[str, Any]) -> tuple[float, float]:
    """The 95 % interval of success after minus success before."""
    before, after = summary["success_before"], summary["success_after"]
    (low_before, high_before), (low_after, high_after) = (
        summary["success_before_interval"],
        summary["success_after_interval"],
    )
    down = ((after - low_after) ** 2 + (high_before - before) ** 2) ** 0.5
    up = ((high_after - after) ** 2 + (before - low_before) ** 2) ** 0.5
    return after - before - down, after - before + up


def summary_of(run: str) -> dict[str, Any]:
    """The summary of a run that has ended and was evaluated before and after."""
    path = Path(run) / "summary.json"
    if not path.exists():
        sys.exit(
            f"{path} is missing: the run has not ended. `agentrl train --resume {run}` ends it."
        )
    summary: dict[str, Any] = json.loads(path.read_text())
    ended = summary.get("ended")  # before 0.2.0 only runs that were complete had a summary
    if ended is not None and ended["how"] != "completed":
        sys.exit(f"{run} {ended['how']}: {ended['why']}. `{ended['resume']}` ends it.")
    if summary["success_before_interval"] is None or summary["success_after_interval"] is None:
        sys.exit(f"{run} was not evaluated: train it with evaluation.tasks=200.")
    return summary


def main(runs: Sequence[str]) -> int:
    """Print a row for each run."""
    if not runs:
        sys.exit("which runs? python benchmarks/real.py runs/real-1 runs/real-2 runs/real-3")
    print("| run | before | after | best constant | difference | steps | minutes | commit |")
    print("|---|---|---|---|---|---|---|---|")
    all_rose = True
    for run in runs:
        summary = summary_of(run)
        low, high = rise(summary)
        constant, _ = best_constant(Path(run))
        all_rose = all_rose and low > 0 and summary["success_after_interval"][0] > constant
        shares = []
        for when in ("success_before", "success_after"):
            bounds = " to ".join(f"{end:.1%}" for end in summary[f"{when}_interval"])
            shares.append(f"{summary[when]:.1%} ({bounds})")
        print(
            f"| {Path(run).name} | {' | '.join(shares)} | {constant:.1%} | {low:+.1%} to"
            f" {high:+.1%} | {summary['steps']} | {summary['seconds'] / 60:.1f} | {commit()} |",
            flush=True,
        )
    return 0 if all_rose else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
