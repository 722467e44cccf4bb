"""The worker registry: how many workers of each role are alive.

Each owner of workers registers a function that counts them. Displays read the registry from any
thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The number of workers of a role."""

    role: str
    """The role in messages and metrics, such as "engine" or "env"."""
    alive: int
    """Workers that are alive."""
    count: int
    """Workers that there should be."""
    restarts: int = 0
    """Restarts so far because of a death, of one worker or of all together."""
    set_aside: int = 0
    """Requests that workers died of twice, which are not tried again."""

    def __add__(self, other: "WorkerCount") -> "WorkerCount":
        """The sum, under the role of the first."""
        return WorkerCount(
            self.role,
            self.alive + other.alive,
            self.count + other.count,
            self.restarts + other.restarts,
            self.set_aside + other.set_aside,
        )


_counters: list[Callable[[], WorkerCount]] = []
"""One list for the process: pools of environments and of rules start workers too, which know no
run, and the display reads it from a thread of its own. An entry lives as long as its owner's block.
"""


@contextmanager
def register_workers(counter: Callable[[], WorkerCount]) -> Iterator[None]:
    """Inside the block, the registry has these workers. `counter` is called by the threads that
    read the registry.
    """
    _counters.append(counter)
    try:
        yield
    finally:
        _counters.remove(counter)


def worker_metrics() -> dict[str, float]:
    """Metrics by role: workers that are alive, and restarts and requests set aside, in this process
    so far.
    """
    metrics = {}
    for workers in registered_workers():
        role = workers.role.replace(" ", "_")
        metrics[f"workers/{role}"] = float(workers.alive)
        metrics[f"restarts/{role}"] = float(workers.restarts)
        if workers.set_aside:
            metrics[f"set_aside/{role}"] = float(workers.set_aside)
    return metrics


def registered_workers() -> list[WorkerCount]:
    """The sum for each role, in the order in which the roles were registered."""
    by_role: dict[str, WorkerCount] = {}
    # The list may change meanwhile, in another thread.
    for counter in list(_counters):
        workers = counter()
        known = by_role.get(workers.role)
        by_role[workers.role] = workers if known is None else known + workers
    return list(by_role.values())
