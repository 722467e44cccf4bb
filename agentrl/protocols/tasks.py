"""Task sources: where the tasks of a run come from.

Dimension suffix: G members of a group.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentrl.protocols.offers import Offers
from agentrl.trajectory import Task


class TaskSource(Protocol):
    """The tasks of one split of a run, by index: the same config gives the same tasks in every
    launch.

    The section `tasks` of a config names a class, which is called with its settings, the
    environment's name, the run's seed, the split ("train", "held-out", "demonstrations" or
    "corpus") and the environment's options.

    A finite source has `__len__`, and a `fingerprint` (`TaskSourceOffers`). Its `task` wraps around
    after the last one, with the same tasks in another order.
    """

    def task(self, index: int) -> Task:
        """The task of this index."""
        ...


@runtime_checkable
class Curriculum(TaskSource, Protocol):
    """A task source that observes the outcomes of its tasks, and may choose the next tasks by them.

    Outcomes come with each batch: first those of filtered groups, then those of trained ones, each
    by task number. A resumed run replays them in that order from its ledger before it asks for a
    task. A resumed run equals one that was not stopped, if what `task` chooses depends only on the
    index, the seed and these outcomes. It may also have the method `metrics` of
    `TaskSourceOffers`.
    """

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """The members of this task's group earned these rewards. The group is trained on, or was
        filtered.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaskSourceOffers(Offers):
    """The optional attributes of a task source, which are found by their names."""

    fingerprint: str | None = None
    """Changes with the tasks of a finite source: a run is not resumed on others than it began
    with."""
    metrics: Callable[[], Mapping[str, float]] | None = None
    """Returns metrics of its tasks; called after each step."""


def count_tasks(source: TaskSource, most: int) -> int:
    """The number of different tasks of a source, if it is finite; at most `most`."""
    return min(most, len(source)) if isinstance(source, Sized) else most
