"""The reward curve of a run as a picture: the whole, each environment of a mixture, each evaluation
suite.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

Rows = Sequence[Mapping[str, Any]]


def draw_curve(rows: Rows, path: Path, title: str) -> None:
    """Draw reward and success by training step, and held-out success where it was evaluated, into a
    PNG.

    Below, if there are any, the success in each environment of a mixture, and on each evaluation
    suite.
    """
    from matplotlib.figure import Figure

    panels: list[Callable[[Axes], None]] = [partial(_draw_run, rows=rows, title=title)]
    if envs := _matching_names(rows, r"(?:eval/)?envs/(.+)/success"):
        panels.append(partial(_draw_envs, rows=rows, envs=envs))
    if suites := _matching_names(rows, r"eval/([^/]+)/success"):
        panels.append(partial(_draw_suites, rows=rows, suites=suites))
    figure = Figure(figsize=(8, 4.5 + 3 * (len(panels) - 1)), layout="constrained")
    heights = [4.5, *[3.0] * (len(panels) - 1)]
    plots = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for draw, axes in zip(panels, plots, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        legend = axes.legend(loc="lower right", fontsize="small")
        show_names_as_written([axes.title, *legend.get_texts()])
    plots[-1].set_xlabel("training step")
    figure.savefig(path, dpi=120)


def show_names_as_written(texts: "Iterable[Text]") -> None:
    """Have texts drawn that hold names of others: two dollar signs are no formula, and a byte that
    is no text is a question mark.
    """
    for text in texts:
        text.set_parse_math(False)
        text.set_text(text.get_text().encode("utf-8", "replace").decode())


def _matching_names(rows: Rows, pattern: str) -> list[str]:
    """The names in metrics of this form, in order of their appearance."""
    found = (re.fullmatch(pattern, name) for row in rows for name in row)
    return list(dict.fromkeys(match[1] for match in found if match))


def _draw_run(axes: "Axes", rows: Rows, title: str) -> None:
    trained = [row for row in rows if "reward" in row]
    steps = [row["step"] for row in trained]
    axes.plot(
        steps,
        [row["reward"] for row in trained],
        color="#1f6f8b",
        linewidth=2,
        label="reward (training)",
    )
    axes.plot(
        steps,
        [row["success"] for row in trained],
        color="#99b898",
        linewidth=1,
        label="success (training)",
    )
    _draw_evaluated(axes, rows, "eval/success", "success (held out, 95 % interval)", "#e84a5f")
    for row in rows:
        if (rate := row.get("eval/success")) is not None:
            axes.annotate(
                f"{rate:.0%}", (row["step"], rate), xytext=(6, 4), textcoords="offset points"
            )
    axes.set(ylim=(min(0.0, *axes.get_ylim()), max(1.05, axes.get_ylim()[1])), title=title)


def _draw_envs(axes: "Axes", rows: Rows, envs: Sequence[str]) -> None:
    for number, env in enumerate(envs):
        colour = f"C{number % 10}"
        trained = [row for row in rows if f"envs/{env}/success" in row]
        steps = [row["step"] for row in trained]
        axes.plot(
            steps,
            [row[f"envs/{env}/success"] for row in trained],
            color=colour,
            linewidth=1,
            label=env,
        )
        _draw_evaluated(axes, rows, f"eval/envs/{env}/success", f"{env} (held out)", colour)
    axes.set(ylim=(-0.05, 1.05), title="success by environment")


def _draw_suites(axes: "Axes", rows: Rows, suites: Sequence[str]) -> None:
    for number, suite in enumerate(suites):
        _draw_evaluated(axes, rows, f"eval/{suite}/success", suite, f"C{number % 10}")
    axes.set(ylim=(-0.05, 1.05), title="success on suites, with 95 % intervals")


def _draw_evaluated(axes: "Axes", rows: Rows, name: str, label: str, colour: str) -> None:
    """The rates of a metric with their intervals, where it was evaluated."""
    tested = [row for row in rows if name in row]
    if not tested:
        return
    # Matplotlib takes how far an interval reaches below and above its point.
    rates, below, above = [], [], []
    for row in tested:
        rate = row[name]
        rates.append(rate)
        below.append(max(0.0, rate - row.get(f"{name}_low", rate)))
        above.append(max(0.0, row.get(f"{name}_high", rate) - rate))
    axes.errorbar(
        [row["step"] for row in tested],
        rates,
        [below, above],
        fmt="o--",
        capsize=3,
        color=colour,
        label=label,
    )
