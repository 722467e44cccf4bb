"""The display of a run in progress, in the terminal or in a log."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from agentrl.observe.dashboard import Dashboard, line_of
from agentrl.observe.run_progress import RunProgress
from agentrl.rollout.accounts import SchedulerStatus
from agentrl.trajectory import Group


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows a run's step, phase, reward curve, time left, slots, slowest environments, failures,
    waits and warnings.

    On a terminal it is redrawn in place. To a file, a pipe, a notebook or a terminal that cannot
    move its cursor it writes one line per step, and waits are in the log.
    """

    def __init__(self, console: Console, steps: int, name: str = "") -> None:
        self._console = console
        self._progress = RunProgress(steps, name)
        self._live = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(Dashboard(self._progress), console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, highlight=False, soft_wrap=self._live is None)

    def warn(self, step: int, text: str) -> None:
        """Print a warning of a step (counted from 0) above the display, and show it there for a
        while.
        """
        self._progress.warn(step, text)
        self.say(f"[yellow]warning:[/yellow] {escape(text)} (docs/why-it-does-not-learn.md)")

    def watch(self, underway: Callable[[], SchedulerStatus]) -> None:
        """Show a scheduler's work from now on. `underway` is called by the redrawing thread."""
        self._progress.underway = underway

    def resume(self, done: int, rewards: Iterable[float]) -> None:
        """Go on after so many steps, which earned these rewards."""
        self._progress.done, self._progress.rewards = done, tuple(rewards)

    def begin_phase(self, phase: str) -> None:
        """Show the phase that begins."""
        self._progress.begin_phase(phase)

    def step(self, step: int, metrics: Mapping[str, float], groups: Iterable[Group] = ()) -> None:
        """Show a finished step, counted from 0, and the groups that it was trained on."""
        self._progress.step(step, metrics, groups)
        if self._live is None:
            self.say(line_of(self._progress))
        else:
            self._live.refresh()

    def held_out(self, steps: int, success: float, failed: int = 0) -> None:
        """Show the success on held-out tasks after so many steps, and how many of their episodes
        failed.
        """
        self._progress.held_out, self._progress.held_out_failed = (steps, success), failed
