"""`Stopwatch`: the seconds of a step by phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.flow import elapsed


class Stopwatch:
    """Measures seconds by phase. `begins` is called with each phase's name when it begins."""

    def __init__(self, begins: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = {}
        self._begins = begins
        self._phase: str | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of the block as `phase`, which may have several blocks."""
        if phase != self._phase:  # else it goes on, after what lay between its blocks
            self._phase = phase
            self._begins(phase)
        started = elapsed()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed() - started
