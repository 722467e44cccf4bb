"""The curves of a report: static SVG of a run's metrics (no JavaScript)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from agentrl.observe.meanings import meaning_of

WIDTH, HEIGHT = 420, 190
"""Size of a drawing, in its own units."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 8, 20
_MAX_CURVE_POINTS = 400
"""A curve of more points is drawn by the means of as many pieces of equal length."""
_LEADING = (
    "reward",
    "success",
    "eval/success",
    "preference_loss",
    "accuracy",
    "margin",
    "eval/preference_accuracy",
    "demonstrations/success",
    "entropy",
    "mixed_groups",
    "health/effective_sample_size",
    "staleness/mean",
    "logprob_gap_mean",
    "turns",
    "sampled_tokens",
    "truncated",
    "grad_norm",
    "kl",
    "tokens_per_second",
    "seconds",
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the steps, ready to be drawn."""

    name: str
    meaning: str
    line: str
    """A path of SVG."""
    band: str
    """A path of SVG around the interval; empty if the metric has none."""
    ticks_x: Sequence[tuple[float, str]]
    """Places on the axis of steps, with the number at each."""
    ticks_y: Sequence[tuple[float, str]]
    """Places on the axis of values, with the number at each."""
    dots: Sequence[tuple[float, float]]
    first: float
    last: float
    low: float
    high: float
    per_point: int
    """Steps that a point stands for."""


def curves_of(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """The curves that tell most about a run: those of the page *Run*, of which it has any value."""
    names = dict.fromkeys(name for row in rows for name in row)
    suites = [name for name in names if name.startswith("eval/") and name.endswith("/success")]
    parts = [name for name in names if name.startswith("reward/")]
    leading = [*_LEADING[:3], *suites, *(parts if len(parts) > 1 else ()), *_LEADING[3:]]
    return [
        curve
        for name in dict.fromkeys(leading)
        if name in names and (curve := _curve(name, rows)) is not None
    ]


def _curve(name: str, rows: Sequence[Mapping[str, Any]]) -> Curve | None:
    bounds = f"{name}_low", f"{name}_high"
    found = [
        (row["step"], row[name], *(row.get(bound, row[name]) for bound in bounds))
        for row in rows
        if name in row
    ]
    values = np.array(
        [one for one in found if all(isinstance(value, int | float) for value in one)], np.float64
    )
    values = values[np.isfinite(values).all(1)] if len(values) else values
    if not len(values):
        return None
    pieces = np.array_split(
        values[np.argsort(values[:, 0], kind="stable")], min(_MAX_CURVE_POINTS, len(values))
    )
    drawn = np.array([piece.mean(0) for piece in pieces])
    x, px = _axis(drawn[:, 0], _LEFT, WIDTH - _RIGHT, whole=True)
    y, py = _axis(drawn[:, 1:].ravel(), HEIGHT - _BOTTOM, _TOP)
    xs, (ys, lows, highs) = px(drawn[:, 0]), py(drawn[:, 1:]).T
    has_band = len(drawn) > 1 and any(bounds[0] in row for row in rows)
    outline = [*zip(xs, highs, strict=True), *zip(xs[::-1], lows[::-1], strict=True)]
    few = len(drawn) == 1 or name.startswith("eval/")
    return Curve(
        name=name,
        meaning=meaning_of(name) or "",
        line=_path(list(zip(xs, ys, strict=True))),
        band=f"{_path(outline)}Z" if has_band else "",
        ticks_x=[(float(place), f"{at:g}") for at, place in zip(x, px(x), strict=True)],
        ticks_y=[(float(place), f"{at:.4g}") for at, place in zip(y, py(y), strict=True)],
        dots=[(float(a), float(b)) for a, b in zip(xs, ys, strict=True)] if few else (),
        first=float(values[0, 1]),
        last=float(values[-1, 1]),
        low=float(values[:, 1].min()),
        high=float(values[:, 1].max()),
        per_point=max(map(len, pieces)),
    )


def _axis(
    values: np.ndarray, begin: float, end: float, *, whole: bool = False
) -> tuple[np.ndarray, Any]:
    """The ticks of an axis, three or more, and the function from values to coordinates between
    `begin` and `end`.
    """
    low, high = float(values.min()), float(values.max())
    room = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
    low, high = (low, max(high, low + 2)) if whole else (low - room, high + room)
    ticks = np.asarray(MaxNLocator(4, integer=whole, min_n_ticks=3).tick_values(low, high))
    visible = ticks[(ticks >= low) & (ticks <= high)]
    return visible, lambda at: begin + (np.asarray(at) - low) / (high - low) * (end - begin)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
