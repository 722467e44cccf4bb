"""The page of the yardsticks, and its pictures."""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.yardsticks.table import YARDSTICKS
from benchmarks.yardsticks.yardstick import Curve, Order, Results, Verdict, Yardstick

DOCS = Path(__file__).parents[2] / "docs"
HEAD = """# Yardsticks: what others found, repeated

This page says whether published results about the learning of agents hold here, with models of
about a million parameters. `make yardsticks` trains all of it and writes this page
([benchmarks/yardsticks](../benchmarks/yardsticks/table.py) has the settings, and `results.json`
there every curve, with its commit). Each run imitates a weak player and then learns; with one
seed, all arms of a yardstick begin with the same imitated model.

Lines are means over seeds, bands the range; to the right the same by the tokens that were trained
on. An order *holds* if the mean difference at the end, over seeds, is more than twice its standard
error, is *reversed* if it is as much below 0, and is else *not shown*; and again at equal tokens
trained on, all that the shorter run of each seed has (without those of groups that a filter leaves
out, which have been sampled too). *Collapsed* are runs that lost more than half of what they had
gained. An order that does not hold is reported, and nothing is tuned until it does.
"""
COLOURS = ("#1f6f8b", "#c8553d", "#5b8c5a", "#8a5a9e")


def write_page(results: Results, docs: Path = DOCS) -> None:
    """Write the page and its pictures from all curves that there are."""
    parts, missing = [HEAD], []
    for yardstick in YARDSTICKS:
        if arms := results.get(yardstick.name):
            draw(yardstick, arms, docs / "pictures" / f"yardstick_{yardstick.name}.png")
            parts.append(section(yardstick, arms))
        else:
            missing.append(yardstick.name)
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        parts.append(f"## Not measured yet\n\n{names}: `python -m benchmarks.yardsticks NAME`.\n")
    (docs / "yardsticks.md").write_text("\n".join(parts))


def section(yardstick: Yardstick, arms: Mapping[str, Mapping[str, Curve]]) -> str:
    """What was published, the picture, the table, and the verdicts."""
    title = yardstick.name.replace("_", " ").capitalize()
    lines = [
        f"## {title}",
        "",
        f"Published: {yardstick.published}",
        "",
        f"![{title}: {yardstick.metric} by step and by tokens]"
        f"(pictures/yardstick_{yardstick.name}.png)",
        "",
        f"| arm | seeds | `{yardstick.metric}` before | at the end, mean | range | collapsed"
        " | CPU seconds a run |",
        f"|{'---|' * 7}",
    ]
    for arm, curves in arms.items():
        first = [curve.values[0] for curve in curves.values()]
        last = [curve.values[-1] for curve in curves.values()]
        fallen = sum(curve.collapsed(yardstick.best) for curve in curves.values())
        seconds = fmean(curve.cpu_seconds for curve in curves.values())
        lines.append(
            f"| {arm} | {len(curves)} | {fmean(first):.3f} | {fmean(last):.3f} |"
            f" {min(last):.3f} to {max(last):.3f} | {fallen} | {seconds:.0f} |"
        )
    lines.append("")
    for order in yardstick.orders:
        if order.better in arms and order.worse in arms:
            verdict = verdict_of(yardstick, order, arms)
            equal = verdict_of(yardstick, order, arms, equal_tokens=True)
            lines.append(
                f"- {order.better} better than {order.worse}: **{verdict.words}**"
                f" ({verdict.difference:+.3f} ± {verdict.error:.3f}; seeds: {verdict.seeds}); at"
                f" equal tokens **{equal.words}** ({equal.difference:+.3f} ± {equal.error:.3f})"
            )
    if yardstick.orders:
        lines.append("")
    lines += [*([yardstick.note, ""] if yardstick.note else [])]
    lines += [f"`python -m benchmarks.yardsticks {yardstick.name}`", ""]
    return "\n".join(lines)


def verdict_of(
    yardstick: Yardstick,
    order: Order,
    arms: Mapping[str, Mapping[str, Curve]],
    *,
    equal_tokens: bool = False,
) -> Verdict:
    """Whether a published order holds, of the seeds that both arms have: at the end, or when both
    have trained on as many tokens as the shorter one of them has.
    """
    sign = 1 if yardstick.best == "high" else -1
    differences = []
    for seed, better in arms[order.better].items():
        if (worse := arms[order.worse].get(seed)) is None:
            continue
        ends = better.values[-1], worse.values[-1]
        if equal_tokens:
            tokens = min(better.tokens[-1], worse.tokens[-1])
            ends = better.at(tokens), worse.at(tokens)
        differences.append(sign * (ends[0] - ends[1]))
    error = stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else float("inf")
    return Verdict(order, fmean(differences), error, len(differences))


def draw(yardstick: Yardstick, arms: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Means and ranges by step and by tokens, into a PNG."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for colour, (arm, curves) in zip(COLOURS, arms.items(), strict=False):
        own = list(curves.values())
        draw_arm(left, [curve.steps for curve in own], own, arm, colour)
        draw_arm(right, [np.array(curve.tokens) / 1000 for curve in own], own, arm, colour)
    left.set_xlabel("training step")
    left.set_ylabel(yardstick.metric)
    right.set_xlabel("thousand tokens trained on")
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def draw_arm(
    axes: Axes,
    places: Sequence[Sequence[float] | np.ndarray],
    curves: Sequence[Curve],
    arm: str,
    colour: str,
) -> None:
    """The mean and the range of curves, as far as all of them go."""
    grid = np.linspace(0, min(float(place[-1]) for place in places), 60)
    values = np.stack(
        [np.interp(grid, place, curve.values) for place, curve in zip(places, curves, strict=True)]
    )
    axes.plot(grid, values.mean(0), color=colour, linewidth=2, label=arm)
    axes.fill_between(grid, values.min(0), values.max(0), color=colour, alpha=0.15)
