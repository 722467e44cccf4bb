"""Task sources: where the tasks of a run come from.

Dimension suffix: G members of a group.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from agentrl.trajectory import Group, Task


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
    """A task source with so many different tasks. `task` goes on after the last, with the same ones
    in another order.

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
    index, the seed and these outcomes. If it has a method `metrics() -> Mapping[str, float]`, the
    run calls it after each step.
    """

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """The members of this task's group earned these rewards. The group is trained on, or was
        filtered.
        """
        ...


class EnvLimits(Protocol):
    """What an environment of a mixture has of its own."""

    @property
    def group_size(self) -> int:
        """Members of its groups."""
        ...

    @property
    def max_failed_tasks(self) -> int:
        """How many of its tasks may fail permanently."""
        ...


@runtime_checkable
class MixesEnvironments(TaskSource, Protocol):
    """A task source of several environments, which keeps their shares of what is trained on."""

    def __getitem__(self, env: str, /) -> EnvLimits: ...

    def trained(self, groups: Iterable[Group]) -> None:
        """These groups are trained on."""
        ...

    def lost(self, task: Task) -> None:
        """The group of this task will not be trained on."""
        ...

    def give_up(self, env: str) -> bool:
        """Give an environment no more tasks; returns whether another is left."""
        ...
