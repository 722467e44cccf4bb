"""The task sources of a run, by its config, and a check of them before anything starts."""

from collections.abc import Mapping

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.protocols import FiniteTasks, TaskSource


def task_source(config: RunConfig, split: str) -> TaskSource:
    """The tasks of one split ("train", "held-out", "demonstrations", "corpus")."""
    source: TaskSource = config.tasks.make(config.env.name, config.seed, split, config.env.options)
    return source


def fingerprints(config: RunConfig) -> Mapping[str, str]:
    """What the tasks of a run are, by split, where they come from data. All data is read and checked for it.

    Raises:
        ConfigError: the data cannot be read, or is not fit for this run.
    """
    found = {}
    for split in ("train", "held-out") if config.evaluation.tasks else ("train",):
        try:
            source = task_source(config, split)
        except ConfigError as error:
            raise ConfigError(f"tasks: {error}") from error
        if isinstance(source, FiniteTasks):
            found[split] = source.fingerprint
    return found
