"""The task sources of a run, by its config, and a check of them before anything starts."""

import json
from collections.abc import Mapping

from agentrl.config.loading import blind_part
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.protocols import TaskSource, TaskSourceOffers, count_tasks
from agentrl.rollout.mixture import Mixture, Share
from agentrl.rollout.next_task import next_task
from agentrl.scoring.build import task_checks
from agentrl.tasks.dataset import DatasetTasks, pay_check, picture_check
from agentrl.tasks.suite_tasks import suite_source
from agentrl.trajectory import Task


def task_source(config: RunConfig, split: str) -> TaskSource:
    """The tasks of one split ("train", "held-out", "demonstrations", "corpus"), of all environments
    of the run.
    """
    sources = sources_by_env(config, split)
    if not config.env.mixture:
        return next(iter(sources.values()))
    rollout = config.rollout
    return Mixture(
        [
            Share(
                one.run_name,
                one.name,
                one.weight,
                sources[one.run_name],
                one.group_size or rollout.group_size,
                rollout.max_failed_tasks if one.max_failed_tasks is None else one.max_failed_tasks,
            )
            for one in config.env.mixture
        ],
        config.env.weights_count,
    )


def sources_by_env(config: RunConfig, split: str) -> dict[str, TaskSource]:
    """The tasks of one split, by the environment's name in the run."""
    chosen = {one.run_name: one.tasks or config.tasks for one in config.env.mixture} or {
        config.env.name: config.tasks
    }
    made = {}
    for name, env in config.env.all.items():
        try:
            made[name] = chosen[name].make(env.name, config.seed, split, env.options)
        except ConfigError as error:
            raise ConfigError(f"tasks of {name}: {error}") from error
    return made


def held_out_tasks(config: RunConfig, count: int) -> list[Task]:
    """The tasks to evaluate on: `count` of each environment, or as many as it has."""
    tasks: list[Task] = []
    for name, source in sources_by_env(config, "held-out").items():
        own = [next_task(source, index) for index in range(count_tasks(source, count))]
        tasks += (
            [Task(name, one.seed, one.options, f"{name}-{one.id}") for one in own]
            if config.env.mixture
            else own
        )
    return tasks


def fingerprints(config: RunConfig) -> Mapping[str, str]:
    """Descriptions of the tasks of a run that come from data, by split. All data is read and
    checked for it.

    Raises:
        ConfigError: the data cannot be read, or is not fit for this run.
    """
    found: dict[str, str] = {}
    for split in ("train", "held-out") if config.evaluation.tasks else ("train",):
        for name, source in sources_by_env(config, split).items():
            _check_rewards(config, name, name, source)
            fingerprint = TaskSourceOffers.of(source).fingerprint
            if fingerprint is not None:
                found[f"{split} of {name}" if config.env.mixture else split] = fingerprint
    for suite in config.evaluation.suites:
        try:
            source = suite_source(suite, config.envs[suite.label])
        except ConfigError as error:
            raise ConfigError(f"the suite {suite.name}: {error}") from error
        _check_rewards(config, suite.label, f"the suite {suite.name}", source)
        fingerprint = TaskSourceOffers.of(source).fingerprint
        if fingerprint is not None:
            found[f"suite {suite.name}"] = fingerprint
    return found


def _check_rewards(config: RunConfig, env: str, called: str, source: TaskSource) -> None:
    """Check that the reward can score each row of data, or the first task of another source.

    Raises:
        ConfigError: some cannot be scored; names them.
    """
    rewards = config.rewards_by_env().get(env, config.reward)
    checks, of_first = task_checks(rewards), task_checks(rewards, "check_first_task")
    name, blind = config.envs[env].name, blind_part(config)
    if isinstance(source, DatasetTasks):
        pays = pay_check(name) if rewards.is_the_environments else None
        checks += filter(None, [pays, picture_check(name, blind)])
    if checks or of_first:
        try:
            if isinstance(source, DatasetTasks):
                source.check(checks, json.dumps([rewards.dump(), blind]), of_first)
            else:
                first = next_task(source, 0)
                for check in (*checks, *of_first):
                    check(first)
        except ConfigError as error:
            raise ConfigError(
                f"tasks of {called}, with the reward "
                f"{', '.join(part.name for part in rewards.parts)}: {error}"
            ) from error
