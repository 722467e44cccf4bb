"""Tasks of evaluation suites."""

from collections.abc import Mapping
from typing import Any

from agentrl.plugins import NoSettings
from agentrl.protocols import TaskSource, count_tasks
from agentrl.tasks.dataset import DatasetTasks
from agentrl.tasks.env_config import OneEnv
from agentrl.tasks.row_reader import RowSettings
from agentrl.tasks.seeded import SeededTasks
from agentrl.tasks.suites import SuiteConfig
from agentrl.trajectory import Task


def suite_episodes(suite: SuiteConfig, env: OneEnv) -> list[Task]:
    """Each task as often as it is played, in `env`. Their seeds belong to no training task of any
    run.

    Raises:
        ConfigError: the data cannot be read, or is not fit for the environment.
    """
    source = suite_source(suite, env)
    tasks = [source.task(index) for index in range(count_tasks(source, suite.tasks))]
    return [
        Task(suite.label, task.seed, task.options, f"{suite.name}-{task.id}/{sample}")
        for task in tasks
        for sample in range(suite.samples)
    ]


def suite_source(suite: SuiteConfig, env: OneEnv) -> TaskSource:
    """The task source of a suite."""
    options: Mapping[str, Any] = env.options
    if suite.data is None:
        return SeededTasks(NoSettings(), env.name, 0, "held-out", options)
    names = ("data", "split", "subset", *RowSettings.model_fields)
    settings = DatasetTasks.Config(**{name: getattr(suite, name) for name in names}, held_out=0.0)
    return DatasetTasks(settings, env.name, 0, "corpus", options)
