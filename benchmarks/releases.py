"""Figures of each release, kept in the tree, so that one sees what a version has made worse.

    python benchmarks/releases.py              # measure this version, and write the page
    python benchmarks/releases.py --page       # measure nothing

The figures are ratios within a run, seconds of the virtual clock, or counts, so those of different
machines can be compared; a ratio of seconds wants two quiet cores. They stand in
`benchmarks/releases.json`, by version, with the commit. From all of them the page docs/releases.md
is made, with its picture. `make release` measures a version that has none yet. It takes about three
minutes.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import heavy_tails
import lockstep
import numpy as np
import overhead
import workers
from house import House
from matplotlib.figure import Figure
from training import commit

import agentrl
from agentrl.flow import run_steadily
from agentrl.models.tiny import create_tiny_model
from agentrl.placement.rows import lockstep_ratio

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "releases.md"
PICTURE = ROOT / "docs" / "pictures" / "releases.png"
COLUMNS = 4
BEGINNING = """\
# Figures of releases

This page shows what releases have made better or worse. `python benchmarks/releases.py` measures
the version at hand and writes the page; `make release` does so for a version without figures.
Ratios are within one run, seconds are those of the virtual clock.

![The figures of each version](pictures/releases.png)
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Some figures that are measured together."""

    names: Sequence[str]
    """What each is, with its unit; less is better, unless the name says otherwise."""
    measure: Callable[[], Sequence[float]]
    """Measures them, in this order."""


def seconds_under_heavy_tails() -> Sequence[float]:
    """Virtual seconds of a step, by rule."""
    tail = heavy_tails.TAILS["1 s or 300 s"]
    found = []
    for rule in ("deadline_first", "segment"):
        reports = [heavy_tails.played(rule, tail, 4, 60, seed) for seed in range(3)]
        found.append(statistics.fmean(report.seconds / report.steps for report in reports))
    return found


def overhead_of_many() -> Sequence[float]:
    """CPU time of a turn with ten thousand live episodes over that with sixteen."""
    few, many = 16, 10_000
    spent = run_steadily(overhead.in_process(overhead.tiny_renderer(), [few, many], 3))
    return [spent[many] / spent[few]]


def gain_of_workers() -> Sequence[float]:
    """Turns a second with two rollout workers over those without."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        create_tiny_model(model)
        without, with_two = (
            run_steadily(workers.measure(model, count, 64, 8, 0.005)).turns_per_second
            for count in (0, 2)
        )
    return [with_two / without]


def waiting_of_ranks() -> Sequence[float]:
    """The work of the slowest of sixteen ranks over that of the mean one."""
    draw_lengths = lockstep.LENGTHS["lognormal, median 8k, sigma 1.0, up to 128k"]
    ratios = []
    for seed in range(5):
        lengths = draw_lengths(np.random.default_rng(seed), 512).tolist()
        ratios.append(lockstep_ratio(lockstep.by_rows(lengths, 16), 16))
    return [statistics.fmean(ratios)]


def shape_of_the_code() -> Sequence[float]:
    """Counts of `benchmarks/house.py`."""
    found = House.read(ROOT).figures()
    return [found["rooms"], found["longest chain of imports"], found["functions"]]


FIGURES = (
    Figures(
        ("seconds of a step with stragglers, deadline_first", "the same, segment"),
        seconds_under_heavy_tails,
    ),
    Figures(("overhead of a turn, 10,000 live episodes / 16",), overhead_of_many),
    Figures(("turns a second, 2 workers / none (more is better)",), gain_of_workers),
    Figures(("work of the slowest of 16 ranks / mean",), waiting_of_ranks),
    Figures(("rooms", "longest chain of imports", "functions"), shape_of_the_code),
)

Releases = Mapping[str, Mapping[str, float]]
"""The figures of each version, by their names."""


def measured() -> dict[str, float]:
    """All figures of the code at hand."""
    found: dict[str, float] = {}
    for figures in FIGURES:
        values = zip(figures.names, figures.measure(), strict=True)
        for name, value in values:
            found[name] = round(float(value), 3)
            print(f"{name}: {found[name]:g}", flush=True)
    return found


def page_of(releases: Releases, commits: Mapping[str, str]) -> str:
    """The page, as Markdown."""
    names = list(dict.fromkeys(name for figures in releases.values() for name in figures))
    lines = ["| | " + " | ".join(releases) + " |", "|---|" + "---|" * len(releases)]
    for name in names:
        shown = [f"{figures[name]:g}" if name in figures else "" for figures in releases.values()]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines.append("| commit | " + " | ".join(f"`{commits[one]}`" for one in releases) + " |")
    return BEGINNING + "\n" + "\n".join(lines) + "\n"


def draw(releases: Releases, path: Path) -> None:
    """A panel for each figure, over the versions, into a PNG."""
    names = [name for figures in FIGURES for name in figures.names]
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(3.4 * COLUMNS, 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for panel, name in zip(panels, names, strict=False):
        has = {version: found[name] for version, found in releases.items() if name in found}
        panel.plot(list(has), list(has.values()), marker="o", color="#1f6f8b")
        panel.set_title(name.replace(", ", ",\n"), fontsize="small")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    for panel in list(figure.axes)[len(names) :]:
        panel.set_visible(False)
    figure.savefig(path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, keep and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--missing", action="store_true", help="measure if there are no figures")
    given = parser.parse_args(arguments)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    now = agentrl.__version__
    if not given.page and not (given.missing and now in kept):
        kept[now] = {"commit": commit(), "figures": measured()}
        RESULTS.write_text(json.dumps(kept, indent=2) + "\n")
    releases = {version: entry["figures"] for version, entry in kept.items()}
    commits = {version: entry["commit"] for version, entry in kept.items()}
    PAGE.write_text(page_of(releases, commits))
    draw(releases, PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
