"""The roster: how many workers of each role are alive.

What keeps workers running posts how many there are. Displays read it, from any thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of a role: `alive` of `count` are. `restarts`: how many times one, or all at
    once, had to be started again because of a death. `set_aside`: requests that they died of twice,
    and which are not tried again.
    """

    role: str
    alive: int
    count: int
    restarts: int = 0
    set_aside: int = 0

    def __add__(self, other: "Crew") -> "Crew":
        """Both as one, under the role of the first."""
        return Crew(
            self.role,
            self.alive + other.alive,
            self.count + other.count,
            self.restarts + other.restarts,
            self.set_aside + other.set_aside,
        )


_posted: list[Callable[[], Crew]] = []
"""One for the process, like the notices: the display reads it from its own thread."""


@contextmanager
def posted(crew: Callable[[], Crew]) -> Iterator[None]:
    """Inside the block, the roster has this crew. `crew` is called by the threads that read the
    roster.
    """
    _posted.append(crew)
    try:
        yield
    finally:
        _posted.remove(crew)


def restart_metrics() -> dict[str, float]:
    """Metrics of the crews: how often the workers of each role were started again, and how many
    requests were set aside, in this process so far.
    """
    found = {}
    for crew in roster():
        role = crew.role.replace(" ", "_")
        found[f"restarts/{role}"] = float(crew.restarts)
        if crew.set_aside:
            found[f"set_aside/{role}"] = float(crew.set_aside)
    return found


def roster() -> list[Crew]:
    """The crews, those of the same role as one, in the order in which they were posted."""
    found: dict[str, Crew] = {}
    for crew in [ask() for ask in list(_posted)]:
        known = found.get(crew.role)
        found[crew.role] = crew if known is None else known + crew
    return list(found.values())
