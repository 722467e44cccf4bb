"""`next_task`: the task of an index, from a task source that may return anything."""

from typing import SupportsIndex

from agentrl.errors import ConfigError
from agentrl.protocols import TaskSource
from agentrl.settings.base import check_plain
from agentrl.trajectory import Task


def next_task(source: TaskSource, index: int) -> Task:
    """The task of this index.

    Raises:
        ConfigError: the source returned something else, or a task that cannot be recorded.
    """
    task = source.task(index)
    if not isinstance(task, Task):
        raise ConfigError(
            f"the task source {type(source).__name__} returned {task!r:.80} for the index {index},"
            " and not an agentrl.Task: there has to be a task for every index"
        )
    if problem := _problem(task.id, task.seed):
        raise ConfigError(
            f"the task source {type(source).__name__} returned a task for the index {index} whose"
            f" {problem}"
        )
    return task


def _problem(name: object, seed: object) -> str:
    """What keeps a task of this id and seed from being recorded, and read back the same; "" if
    nothing does.
    """
    # True and False are integers, but text of another kind. Those of numpy are none.
    if not isinstance(seed, SupportsIndex) or isinstance(seed, bool):
        return f"seed is {seed!r:.80}: write an integer"
    if not isinstance(name, str):
        return f"id is {name!r:.80}: write text"
    try:
        check_plain(name)
    except ValueError as error:
        return f"id cannot be stored: {error}"
    return ""
