"""Building of a run's reward from its settings."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError
from agentrl.flow import Retries
from agentrl.plugins import Component, nested_settings, unbound
from agentrl.protocols.env import isolation_of
from agentrl.protocols.reward import GroupReward, Reward, Rule
from agentrl.scoring.config import PART_SETTINGS, RewardsConfig, name_of
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.rule_pool import RulePool
from agentrl.trajectory import Task


def build_pipeline(
    rewards: RewardsConfig,
    rules: RulePool,
    *,
    deadline: float,
    retries: Retries,
    by_env: Mapping[str, RewardsConfig] = MappingProxyType({}),
    needed: Collection[str] = (),
) -> RewardPipeline:
    """Build the reward of these settings, not yet entered; its rules run in the processes of
    `rules`. `by_env`: the settings of environments that have their own. `needed`: parts that must
    not fail, whatever their weight.
    """
    pipelines = {
        env: build_pipeline(settings, rules, deadline=deadline, retries=retries, needed=needed)
        for env, settings in by_env.items()
    }
    parts = [replace(part, needed=part.name in needed) for part in map(build_part, rewards.parts)]
    return RewardPipeline(parts, rules, deadline=deadline, retries=retries, by_env=pipelines)


def task_checks(rewards: RewardsConfig, name: str = "check_task") -> list[Callable[[Task], None]]:
    """Checks that parts make of a task before it is played: their methods of this name, if they
    have them.
    """
    owners = [part.owner for part in map(build_part, rewards.parts) if not part.watches]
    return [getattr(owner, name) for owner in owners if hasattr(owner, name)]


def build_reward(factory: Any, settings: Mapping[str, Any]) -> Any:
    """Build a reward from its class or function and its validated settings, put into its own
    settings class to pickle.
    """
    if not isinstance(factory, type):
        return partial(factory, **settings) if settings else factory
    config = nested_settings(factory)
    return factory() if config is None else factory(config(**settings))


def build_part(component: Component) -> RewardPart:
    """Build a part of the reward.

    Raises:
        ConfigError: the component is no reward.
    """
    shared = {key: getattr(component.settings, key) for key in PART_SETTINGS}
    own = {key: value for key, value in component.settings if key not in PART_SETTINGS}
    reward = build_reward(component.factory, own)
    shared["isolation"] = shared["isolation"] or isolation_of(unbound(component.factory), None)
    if not (callable(reward) or isinstance(reward, Reward | Rule | GroupReward)):
        raise ConfigError(
            f"the reward {component.name!r} has no score(trajectory), score_group(trajectories) or"
            " content and evaluate"
        )
    named = name_of(component)
    return RewardPart(reward, named, shared["weight"], shared["isolation"], shared["success_at"])
