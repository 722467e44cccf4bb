"""`next_task`: the task of an index, from a task source that may return anything."""

from agentrl.errors import ConfigError
from agentrl.protocols import TaskSource
from agentrl.trajectory import Task


def next_task(source: TaskSource, index: int) -> Task:
    """The task of this index.

    Raises:
        ConfigError: the source returned something else.
    """
    task = source.task(index)
    if not isinstance(task, Task):
        raise ConfigError(
            f"the task source {type(source).__name__} returned {task!r:.80} for the index {index},"
            " and not an agentrl.Task: there has to be a task for every index"
        )
    return task
