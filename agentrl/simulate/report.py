"""Prints the results of a simulation to the terminal."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, quantiles
from typing import get_args

from rich.console import Console, Group
from rich.table import Table

from agentrl.ledger.ledger import Fate, Fates
from agentrl.simulate.world import Moment, Report

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 50


def print_report(report: Report, bound: int, console: Console) -> None:
    """Print throughput, use of time, staleness, bias and fates, and the timeline below them."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="bold")
    facts.add_column()
    for name, value in _rows(report, bound):
        facts.add_row(name, value)
    console.print(Group(facts, "", *_timeline(report)), highlight=False, soft_wrap=True)


def _rows(report: Report, bound: int) -> list[tuple[str, str]]:
    seconds, steps = report.seconds, report.step_seconds
    late = quantiles(steps, n=20)[-1] if len(steps) > 1 else steps[0]
    # Of processes and cores whose CPU time is not simulated, the load is 0.
    loads = (
        ("controller", "busy", report.controller_load),
        ("workers", "busy on average", report.worker_load),
        ("env cores", "busy on average", report.env_core_load),
    )
    return [
        (
            "throughput",
            f"{3600 * len(steps) / seconds:,.1f} steps/h   {report.episodes / seconds:,.2f} "
            f"episodes/s   {report.tokens / seconds:,.0f} tokens/s",
        ),
        ("step time", f"{fmean(steps):,.1f} s on average, one in twenty over {late:,.1f} s"),
        (
            "trainer",
            f"busy {report.train_seconds / seconds:.1%}, "
            f"waiting for groups {report.blocked_seconds / seconds:.1%}",
        ),
        (
            "engine",
            f"{report.slot_utilisation:.1%} of its slots in use on average, "
            f"live episodes limited to {report.metrics['live_episodes/limit']:.0f} at the end",
        ),
        *((name, f"{how} {load:.1%} of the time") for name, how, load in loads if load),
        ("staleness", f"at most {report.largest_staleness} (bound {bound})"),
        ("  of groups", _shares(report.staleness_groups)),
        ("  of tokens", _shares(report.staleness_tokens)),
        (
            "bias",
            f"trained episodes are {report.metrics['bias/seconds']:.3f} times as long as sampled "
            "ones",
        ),
        ("tasks", _fates(report.task_fates)),
        ("episodes", _fates(report.episode_fates)),
        ("events", f"{report.events:,}, hash {report.event_hash[:16]}"),
        (
            "simulated",
            f"{seconds:,.0f} s in {report.cpu_seconds:.1f} s of CPU, "
            f"{1e6 * report.cpu_seconds / max(1, report.episodes):.0f} µs an episode",
        ),
    ]


def _shares(counts: Counter[int]) -> str:
    total = counts.total() or 1
    return "   ".join(f"{age}: {count / total:.1%}" for age, count in sorted(counts.items()))


def _fates(fates: Fates) -> str:
    named = ((name, getattr(fates, name)) for name in (*get_args(Fate), "open"))
    return f"{fates.total:,}: " + "   ".join(
        f"{name} {n / fates.total:.1%}" for name, n in named if n
    )


def _timeline(report: Report) -> list[str]:
    moments = report.timeline
    rows: list[tuple[str, Callable[[Moment], float]]] = [
        ("live episodes", lambda m: m.live),
        ("running requests", lambda m: m.running),
        ("waiting requests", lambda m: m.waiting),
        ("trainer busy", lambda m: m.training),
    ]
    lines = []
    for name, value in rows:
        values = [value(moment) for moment in moments]
        most = max([*values, 1])
        lines.append(
            f"{name:>16} │{_spark(values, most)}│"
            f" {'' if name == 'trainer busy' else f'to {most:,.0f}'}"
        )
    end = f"{moments[-1].second:,.0f} s"
    return [*lines, f"{'':>16}  0 s{end:>{_COLUMNS - 2}}"]


def _spark(values: Sequence[float], most: float) -> str:
    """One character for each of `_COLUMNS` equal spans of time, for the mean of its values."""
    blocks = []
    for column in range(_COLUMNS):
        begin, end = (n * len(values) // _COLUMNS for n in (column, column + 1))
        # With fewer values than columns, a span may be empty: it repeats the value at its place.
        span = values[begin:end] or values[min(begin, len(values) - 1) :][:1]
        blocks.append(_BLOCKS[min(8, round(8 * fmean(span) / most))])
    return "".join(blocks)
