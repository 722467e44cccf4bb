"""Plots of runs for notebooks: `from agentrl import plot`, and then
`plot("runs/frozen_lake")` in a cell.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentrl import plugins
from agentrl.errors import ConfigError
from agentrl.observe.curve import show_names_as_written
from agentrl.viewer.folders import find_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFAULT = ("reward", "success", "entropy", "staleness/mean", "turns", "tokens_per_second")
"""The metrics that are plotted by default, if the runs have them."""

_COLOURS = ("#1f6f8b", "#e84a5f", "#5b8c5a", "#e0a030", "#7a5195", "#4d4d4d")
_GRID_COLUMNS = 3
_PANEL = (4.2, 2.9)
_HELD_OUT = {"success": "eval/success", "reward": "eval/reward"}


def plot(*runs: str | Path, metrics: Sequence[str] = (), smooth: int = 1) -> "RunPlot":
    """Draw the metrics of runs by training step, one panel for each metric, with all runs in it.

    Points are held-out tasks, with their 95 % interval where the run has one. A run may still go
    on: call it again.

    Args:
        runs: Folders of runs, or folders with runs in them.
        metrics: Names as in `metrics.jsonl`, such as "reward" or "health/repetition"; by default
        those of `DEFAULT`.
        smooth: Mean over the last so many steps; the values themselves are then drawn thinly.

    Raises:
        ConfigError: there is no such run, or no run has such a metric.
    """
    if smooth < 1:
        raise ConfigError(f"smooth={smooth}: it is a number of steps, 1 or more")
    found = find_runs(Path(run) for run in runs)
    if not found:
        raise ConfigError(
            f"there is no run in {', '.join(map(str, runs)) or 'nothing'}: plot('runs/frozen_lake')"
        )
    rows = {run.name: list(run.metrics()) for run in found}
    return RunPlot(rows, _choose_metrics(rows, metrics), smooth)


def metrics_of(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, one for each step and evaluation:
    `pandas.DataFrame(metrics_of("runs/demo"))`.

    Raises:
        ConfigError: it is not the folder of one run.
    """
    found = find_runs([Path(run)])
    if len(found) != 1:
        raise ConfigError(f"{run} holds {len(found)} runs: name one, such as runs/frozen_lake")
    return [dict(row) for row in found[0].metrics()]


class RunPlot:
    """A plot of runs, which notebooks show. `figure` is a figure of matplotlib, to change or to
    save.
    """

    def __init__(
        self, rows: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str], smooth: int
    ) -> None:
        from matplotlib.figure import Figure

        columns = min(_GRID_COLUMNS, len(metrics))
        lines = -(-len(metrics) // columns)
        size = (_PANEL[0] * columns, _PANEL[1] * lines + (0.3 if len(rows) > 1 else 0))
        self.figure = Figure(figsize=size, layout="constrained")
        axes = self.figure.subplots(lines, columns, squeeze=False).flatten()
        for panel, metric in zip(axes, metrics, strict=False):
            for number, (name, of_run) in enumerate(rows.items()):
                line = {"color": _COLOURS[number % len(_COLOURS)], "label": name}
                _draw(panel, of_run, metric, smooth, line)
            panel.set_title(metric, fontsize=10)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        for panel in axes[len(metrics) :]:
            panel.set_visible(False)
        for panel in axes[max(0, len(metrics) - columns) : len(metrics)]:
            panel.set_xlabel("training step")
        if len(rows) > 1:
            handles, names = axes[0].get_legend_handles_labels()
            legend = self.figure.legend(
                handles, names, loc="outside upper center", ncols=min(4, len(rows)), frameon=False
            )
            show_names_as_written(legend.get_texts())
        show_names_as_written(panel.title for panel in axes)

    def save(self, path: str | Path) -> None:
        """Write it as a picture; the ending of the name chooses the format (.png, .svg, .pdf)."""
        self.figure.savefig(path, dpi=120)

    def _repr_png_(self) -> bytes:
        """The image that IPython shows."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=100)
        return file.getvalue()


def _choose_metrics(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str]
) -> Sequence[str]:
    known = dict.fromkeys(
        name for of_run in rows.values() for row in of_run for name in row if name != "step"
    )
    if not known:
        raise ConfigError(f"{', '.join(rows)}: no step has ended yet, so there is nothing to plot")
    for name in metrics:
        if name not in known:
            raise ConfigError(
                f"no run has the metric {name!r}.{plugins.nearest(name, known)} There are:"
                f" {', '.join(known)}"
            )
    return metrics or [name for name in DEFAULT if name in known] or list(known)[:_GRID_COLUMNS]


def _draw(
    panel: "Axes",
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    smooth: int,
    line: Mapping[str, str],
) -> None:
    """One metric of one run, and what belongs to it of the held-out tasks."""
    own = [row for row in rows if isinstance(row.get(metric), int | float)]
    # Step s plays with the weights after s steps, of which an evaluation after s steps is too.
    steps = np.array([row["step"] for row in own])
    values = np.array([row[metric] for row in own], np.float64)
    if smooth > 1:
        panel.plot(steps, values, color=line["color"], linewidth=0.7, alpha=0.35)
    panel.plot(
        steps, moving_mean(values, smooth), linewidth=1.8, color=line["color"], label=line["label"]
    )
    held_out = _HELD_OUT.get(metric, "")
    tested = [row for row in rows if held_out in row]
    if tested:
        rates = np.array([row[held_out] for row in tested])
        low = np.array([row.get(f"{held_out}_low", row[held_out]) for row in tested])
        high = np.array([row.get(f"{held_out}_high", row[held_out]) for row in tested])
        spread = np.maximum(0, [rates - low, high - rates])
        panel.errorbar(
            [row["step"] for row in tested],
            rates,
            spread,
            fmt="o",
            markersize=4,
            capsize=2,
            color=line["color"],
            alpha=0.8,
        )


def moving_mean(values: npt.NDArray[np.float64], steps: int) -> npt.NDArray[np.float64]:
    """The mean of each value and those before it, of up to `steps` of them."""
    summed = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - steps)
    means: npt.NDArray[np.float64] = (summed[ends] - summed[begins]) / np.maximum(1, ends - begins)
    return means
