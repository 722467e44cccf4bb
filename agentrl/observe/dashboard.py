"""A run's progress: as a panel for terminals, and as a line for everything else."""

import math
from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.cluster.worker_registry import registered_workers
from agentrl.flow import wait_reasons
from agentrl.observe.braille import braille_curve
from agentrl.observe.run_progress import RunProgress
from agentrl.rollout.accounts import SchedulerStatus

_CURVE_ROWS = 4
_NARROW = 60
"""Fewer columns than these leave no room for the curve."""
_LABEL = 12
_WARNINGS = 2
_FRESH_STEPS = 20
"""Steps for which a warning stays in the picture. It is above it, too, when it is given."""


class Dashboard:
    """Renders the progress of a run, as it is when it is drawn."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress = self._progress
        underway = progress.underway() if progress.underway is not None else None
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", width=_LABEL, no_wrap=True)
        rows.add_column(ratio=1, overflow="fold")
        for label, text in self._rows(underway):
            rows.add_row(label, text)
        parts: list[RenderableType] = [self._head()]
        if progress.rewards and options.max_width >= _NARROW and not options.ascii_only:
            parts.append(self._curve(options.max_width - 4))
        yield Panel(
            Group(*parts, rows),
            title=f"[bold]{escape(progress.name or 'training')}[/bold]",
            title_align="left",
            border_style="cyan",
        )

    def _head(self) -> RenderableType:
        progress = self._progress
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        left = "" if progress.remaining is None else f", about {duration(progress.remaining)} left"
        head.add_row(
            f"[bold]{progress.done}[/bold] of {progress.steps} steps",
            ProgressBar(total=max(1, progress.steps), completed=progress.done),
            f"{duration(progress.elapsed)}{left}",
        )
        return head

    def _curve(self, width: int) -> RenderableType:
        rewards = self._progress.rewards
        low, high = f"{min(rewards):.3g}", f"{max(rewards):.3g}"
        margin = max(len(low), len(high), _LABEL)
        lines = braille_curve(rewards, max(10, width - margin - 3), _CURVE_ROWS)
        labels = [high, *[""] * (_CURVE_ROWS - 2), low]
        labels[1] = "reward"
        return Text("\n").join(
            Text.assemble((f"{label:>{margin}}  ", "dim"), (line, "green"))
            for label, line in zip(labels, lines, strict=True)
        )

    def _rows(self, underway: SchedulerStatus | None) -> Iterator[tuple[str, RenderableType]]:
        progress = self._progress
        if progress.phase:
            seconds = duration(progress.clock() - progress.phase_since)
            yield "now", f"[bold]{progress.phase}[/bold] for {seconds}{_ready(underway)}"
        if progress.metrics:
            cells = cells_of(progress.metrics)
            yield (
                "last step",
                Text("  ").join(
                    Text.assemble((f"{name} ", "dim"), value) for name, value in cells.items()
                ),
            )
        if progress.held_out is not None:
            step, success = progress.held_out
            share = "unknown how many" if math.isnan(success) else f"[bold]{success:.1%}[/bold]"
            failed = (
                f"; {progress.held_out_failed} failed, and do not count"
                if progress.held_out_failed
                else ""
            )
            yield "held out", f"{share} succeed after {step} steps{failed}"
        if progress.slowest:
            shown = (
                f"{escape(env)} {mean:.2g} s a step, at most {most:.2g} s"
                for env, mean, most in progress.slowest
            )
            yield "slowest", "; ".join(shown)
        if underway is not None and underway.longest:
            longest = (
                f"{escape(task)} ({escape(env)}) {duration(s)}" for task, env, s in underway.longest
            )
            yield "in play", "; ".join(longest)
        if lost := [crew for crew in registered_workers() if crew.alive < crew.count]:
            yield (
                "workers",
                Text(
                    "; ".join(f"{crew.role} {crew.alive} of {crew.count}" for crew in lost),
                    style="yellow",
                ),
            )
        if underway is not None and underway.failures:
            failures = ", ".join(
                f"{layer} {count}" for layer, count in sorted(underway.failures.items())
            )
            yield "failures", f"[red]{failures}[/red]"
        for each in wait_reasons():
            yield "waiting", Text(f"waiting: {each}", style="yellow")
        for step, text in progress.warnings[-_WARNINGS:]:
            if progress.done - step <= _FRESH_STEPS:
                yield "warning", Text(f"step {step}: {text}", style="yellow")


def _ready(underway: SchedulerStatus | None) -> str:
    if underway is None:
        return ""
    return (
        f"; {underway.ready} of {underway.wanted} groups ready, {underway.slots} of"
        f" {underway.slots_limit} slots taken"
    )


def line_of(progress: RunProgress) -> str:
    """The line of the step that has just ended, by its number in the run's files, for files and
    pipes.
    """
    cells = cells_of(progress.metrics)
    underway = progress.underway() if progress.underway is not None else None
    if underway is not None and underway.failures:
        cells["failures"] = " + ".join(
            f"{count} {layer}" for layer, count in sorted(underway.failures.items())
        )
    if progress.remaining is not None:
        cells["left"] = duration(progress.remaining)
    return f"step {progress.done - 1:4d}  " + "  ".join(
        f"{name} {value}" for name, value in cells.items()
    )


def cells_of(metrics: Mapping[str, float]) -> dict[str, str]:
    """The shown metrics of a step, by name."""
    seconds = max(metrics["seconds"], 1e-9)
    phases = {
        name.removeprefix("seconds/"): value
        for name, value in metrics.items()
        if name.startswith("seconds/")
    }
    return {
        "reward": f"{metrics['reward']:.3f}",
        "success": "unknown" if math.isnan(metrics["success"]) else f"{metrics['success']:.0%}",
        "turns": f"{metrics['turns']:.1f}",
        "tokens/s": f"{metrics['tokens_per_second']:,.0f}",
        "staleness": f"{metrics['staleness/mean']:.2f} (max {metrics['staleness/max']:.0f})",
        "gap": f"{metrics.get('logprob_gap_max', 0.0):.1e}",
        "time": (
            f"{seconds:.1f}s = "
            + " + ".join(f"{value / seconds:.0%} {name}" for name, value in phases.items())
        ),
    }


def duration(seconds: float) -> str:
    """Seconds as `12 s`, `3:20` (minutes) or `1:03:20` (hours)."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
