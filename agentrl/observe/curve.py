"""The reward curve of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw reward and success by training step, and held-out success where it was evaluated, into a PNG."""
    from matplotlib.figure import Figure

    trained = [row for row in rows if "reward" in row]
    tested = [row for row in rows if "eval/success" in row]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] + 1 for row in trained]
    axes.plot(steps, [row["reward"] for row in trained], color="#1f6f8b", linewidth=2, label="reward (training)")
    axes.plot(steps, [row["success"] for row in trained], color="#99b898", linewidth=1, label="success (training)")
    axes.errorbar(
        [row["step"] for row in tested],
        [row["eval/success"] for row in tested],
        _to_interval(tested),
        fmt="o--",
        capsize=3,
        color="#e84a5f",
        label="success (held out, 95 % interval)",
    )
    for row in tested:
        axes.annotate(
            f"{row['eval/success']:.0%}", (row["step"], row["eval/success"]), xytext=(6, 4), textcoords="offset points"
        )
    axes.set(xlabel="training step", ylim=(min(0.0, *axes.get_ylim()), max(1.05, axes.get_ylim()[1])), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _to_interval(tested: Sequence[dict[str, Any]]) -> list[list[float]]:
    """How far the interval of each evaluation reaches below and above its success."""
    rates = [row["eval/success"] for row in tested]
    lows = [row.get("eval/success_low", rate) for row, rate in zip(tested, rates, strict=True)]
    highs = [row.get("eval/success_high", rate) for row, rate in zip(tested, rates, strict=True)]
    return [
        [max(0.0, rate - low) for rate, low in zip(rates, lows, strict=True)],
        [max(0.0, high - rate) for rate, high in zip(rates, highs, strict=True)],
    ]
