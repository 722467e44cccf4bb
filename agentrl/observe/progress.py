"""The terminal display of a run in progress."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from agentrl.flow import notices


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows step, reward, success, tokens per second, staleness, how the time was spent, and what episodes wait for.

    On a terminal it is redrawn in place; to a file or a pipe it writes one line per step, and waits are in the log.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("training", total=steps)
        self._last_step: RenderableType = ""
        self._live = None
        if console.is_terminal:
            self._live = Live(get_renderable=self._shown, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, highlight=False, soft_wrap=self._live is None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        self._bar.update(self._task, completed=step + 1)
        shown = _cells(metrics)
        if self._live is None:
            self.say(f"step {step + 1:4d}  " + "  ".join(f"{name} {value}" for name, value in shown.items()))
            return
        table = Table(box=None, padding=(0, 1), show_edge=False)
        for name in shown:
            table.add_column(name, justify="right")
        table.add_row(*shown.values())
        self._last_step = table
        self._live.refresh()

    def _shown(self) -> RenderableType:
        """What the terminal shows now; called by the thread that redraws it."""
        waits = [Text(f"waiting: {each}", style="yellow") for each in notices()]
        return Group(self._bar, *([self._last_step] if self._last_step else []), *waits)


def _cells(metrics: Mapping[str, float]) -> dict[str, str]:
    seconds = max(metrics["seconds"], 1e-9)
    phases = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")}
    return {
        "reward": f"{metrics['reward']:.3f}",
        "success": f"{metrics['success']:.0%}",
        "turns": f"{metrics['turns']:.1f}",
        "tokens/s": f"{metrics['tokens_per_second']:,.0f}",
        "staleness": f"{metrics['staleness/mean']:.2f} (max {metrics['staleness/max']:.0f})",
        "gap": f"{metrics.get('logprob_gap_max', 0.0):.1e}",
        "time": f"{seconds:.1f}s = " + " + ".join(f"{value / seconds:.0%} {name}" for name, value in phases.items()),
    }
