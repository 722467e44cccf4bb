"""Task sources: where the tasks of a run come from.

Dimension suffix: G members of a group.
"""

from collections.abc import Callable, Mapping, Sequence
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
    """

    def task(self, index: int) -> Task:
        """The task of this index."""
        ...


@runtime_checkable
class FiniteTasks(TaskSource, Protocol):
    """A finite task source; `task` wraps around after the last one, with the same tasks in another
    order.

    `fingerprint` changes with the tasks: a run is not resumed on others than it began with.
    """

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class Curriculum(TaskSource, Protocol):
    """A task source that observes the outcomes of its tasks, and may choose the next tasks by them.

    Outcomes come with each batch: first those of filtered groups, then those of trained ones, each
    by task number. A resumed run replays them in that order from its ledger before it asks for a
    task. A resumed run equals one that was not stopped, if what `task` chooses depends only on the
    index, the seed and these outcomes. It may also have the method of `TaskSourceOffers`.
    """

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """The members of this task's group earned these rewards. The group is trained on, or was
        filtered.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaskSourceOffers(Offers):
    """The optional methods of a task source, which are found by their names."""

    metrics: Callable[[], Mapping[str, float]] | None = None
    """Returns metrics of its tasks; called after each step."""
