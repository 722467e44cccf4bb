"""The settings that need others: `RULES`, one table of all rules between sections of a config.

A rule names the settings that it is about, and returns the message to the user where a config
breaks it. What a section needs of its own settings is checked in that section. A recipe of a
plug-in adds its own rules by a method `check_run(config)` of its settings, which raises ValueError.

Rules of the stage `config` hold for every config; those of `training` when the run is about to
train on what its engine samples, and those of `start` when it starts on this machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

from agentrl.algorithms.own_settings import without_effect
from agentrl.config.components import component_like
from agentrl.config.environments import envs_of, shows_pictures
from agentrl.config.run_config import RunConfig, brings_algorithm
from agentrl.conversation.eyes import seeing_family
from agentrl.errors import ConfigError
from agentrl.models.vision_families import FAMILIES
from agentrl.plugins import Component
from agentrl.protocols.algorithm import (
    ActorCritic,
    Algorithm,
    AlgorithmOffers,
)
from agentrl.protocols.component_settings import (
    ClusterOffers,
    EngineSettingsOffers,
    TrainerSettingsOffers,
)
from agentrl.protocols.engine import EngineOffers
from agentrl.protocols.recipe import RecipeOffers
from agentrl.protocols.reward import GroupReward
from agentrl.rollout.agents import FrozenRoute
from agentrl.sandbox.config import AgentPlace
from agentrl.scoring.config import RewardsConfig, name_of
from agentrl.tasks.env_config import MixedEnv

Stage = Literal["config", "training", "start"]
"""The time at which a rule must hold."""


@dataclass(frozen=True)
class ConfiguredRun:
    """A config with the components that rules ask, which are made when the first one does."""

    config: RunConfig

    @cached_property
    def algorithm(self) -> Any:
        """The algorithm of the section `algorithm`."""
        return self.config.algorithm.make()

    @cached_property
    def algorithms(self) -> tuple[tuple[str, Algorithm], ...]:
        """The algorithms that learn from played groups, with their names in the config."""
        return tuple(self.config.trained_with())

    @cached_property
    def own_algorithm(self) -> bool:
        """True if the recipe brings its algorithm, so that the section is not used."""
        return brings_algorithm(self.config.recipe)

    @cached_property
    def teacher_engine(self) -> Component:
        """The engine that serves the teacher of `recipe=distill`."""
        teacher = self.recipe.teacher
        return component_like(
            self.config.engine, "recipe.teacher.engine", "engines", teacher.engine
        )

    @property
    def recipe(self) -> Any:
        """The settings of the recipe."""
        return self.config.recipe.settings

    def has_recipe(self, *names: str) -> bool:
        """True if its recipe is one of these, which agentrl has."""
        function = self.config.recipe.factory
        places = {(f"agentrl.recipes.{name}", name) for name in names}
        # A recipe of a user's may be any callable, which need not have a name.
        is_function = isinstance(function, FunctionType)
        return is_function and (function.__module__, function.__name__) in places


@dataclass(frozen=True, slots=True)
class CompatibilityRule:
    """A rule between settings of several sections."""

    settings: tuple[str, ...]
    """The settings that it is about, dotted."""
    find_problem: Callable[[ConfiguredRun], str]
    """The message to the user if a config breaks the rule; else an empty text."""
    stage: Stage = "config"
    """The time at which it must hold."""

    @property
    def name(self) -> str:
        """Its name: that of its function."""
        return self.find_problem.__name__

    def problem(self, run: ConfiguredRun) -> str:
        """The message to the user, which may be that of a component that cannot be made."""
        try:
            return self.find_problem(run)
        except (ValueError, ConfigError) as error:
            return str(error)


def first_problem(config: RunConfig, stage: Stage = "config") -> str:
    """The message of the first rule of a stage that a config breaks; empty if it breaks none."""
    run = ConfiguredRun(config)
    messages = (rule.problem(run) for rule in _rules_of(config) if rule.stage == stage)
    return next(filter(None, messages), "")


def check_stage(config: RunConfig, stage: Stage) -> None:
    """Check the rules of a stage.

    Raises:
        ConfigError: the config breaks one.
    """
    if message := first_problem(config, stage):
        raise ConfigError(message)


def _rules_of(config: RunConfig) -> Iterator[CompatibilityRule]:
    """The rules of a config: that of its recipe, and those of the table."""
    check = RecipeOffers.of(config.recipe.settings).check_run
    if check is not None:

        def recipe_accepts(run: ConfiguredRun) -> str:
            check(run.config)
            return ""

        yield CompatibilityRule(("recipe",), recipe_accepts)
    yield from RULES


# Recipes


def archer_has_a_critic_of_answers(run: ConfiguredRun) -> str:
    algorithm = run.config.algorithm
    if not run.has_recipe("archer") or AlgorithmOffers.of(algorithm.make()).values_answers:
        return ""
    return (
        "recipe=archer teaches a critic what answers are worth, and"
        f" algorithm={algorithm.name} has none: set algorithm=archer, or"
        " recipe=policy_gradient"
    )


def archer_trains_on_whole_episodes(run: ConfiguredRun) -> str:
    if not run.has_recipe("archer") or not run.config.rollout.rule.trains_on_segments:
        return ""
    return (
        f"{_chosen_rule(run)} trains on parts of episodes, and recipe=archer uses"
        " tasks again only when they have been trained on whole: choose another"
        " staleness_rule, or recipe=policy_gradient"
    )


def archer_warms_up_before_the_end(run: ConfiguredRun) -> str:
    if not run.has_recipe("archer") or run.recipe.critic_warmup < run.config.steps:
        return ""
    return (
        f"recipe.critic_warmup is {run.recipe.critic_warmup}, and the run has {run.config.steps}"
        " steps, so the policy would never learn: lower it, or raise steps"
    )


_SERVE_THE_TEACHER = (
    "with engine=local or engine=vllm, or train with algorithm=distill, whose teacher a trainer"
    " computes"
)


def teacher_can_score(run: ConfiguredRun) -> str:
    if not run.has_recipe("distill") or EngineOffers.of(run.teacher_engine.factory).scores:
        return ""
    return (
        f"recipe.teacher.engine.name: engine {run.teacher_engine.name!r} has no method `score`, so"
        f" it cannot say how likely given tokens are: serve the teacher {_SERVE_THE_TEACHER}"
    )


def teacher_scores_at_the_temperature(run: ConfiguredRun) -> str:
    temperature = run.config.rollout.sampling.temperature
    if not run.has_recipe("distill") or temperature == 1:
        return ""
    if not EngineOffers.of(run.teacher_engine.factory).scores_at_one_only:
        return ""
    return (
        f"recipe.teacher.engine.name: engine {run.teacher_engine.name!r} scores tokens at"
        f" temperature 1 only, and rollout.sampling.temperature is {temperature:g}: set it to 1, or"
        " serve the teacher with engine=local"
    )


def teacher_compares_the_whole_vocabulary(run: ConfiguredRun) -> str:
    if not run.has_recipe("distill") or not run.config.rollout.sampling.truncated:
        return ""
    return (
        "rollout.sampling leaves tokens out (top_p, top_k or min_p), and an engine scores"
        " tokens over the whole vocabulary, so teacher and policy could not be compared:"
        " leave them out, or write recipe=policy_gradient algorithm=distill, whose teacher"
        " is computed over the same tokens"
    )


def distill_compares_several_members(run: ConfiguredRun) -> str:
    size = run.config.rollout.group_size
    if not run.has_recipe("distill") or size != 1 or not run.recipe.reward_weight:
        return ""
    return (
        "recipe.reward_weight compares the members of a group, and rollout.group_size is 1:"
        " set it to 2 or more, or leave reward_weight out"
    )


def teacher_is_the_same_after_a_resume(run: ConfiguredRun) -> str:
    if not run.has_recipe("distill"):
        return ""
    refresh, every = run.recipe.teacher.refresh, run.config.checkpoint.every
    if not refresh or every % refresh == 0:
        return ""
    return (
        f"recipe.teacher.refresh ({refresh}) must divide checkpoint.every"
        f" ({every}), or a resumed run would have another teacher than an"
        " uninterrupted one"
    )


def pairs_are_weighed_once_a_step(run: ConfiguredRun) -> str:
    if not run.has_recipe("dpo", "iterative_dpo"):
        return ""
    if TrainerSettingsOffers.of(run.config.trainer.settings).minibatches == 1:
        return ""
    return (
        f"trainer.minibatches is above 1, and recipe={run.config.recipe.name} weighs pairs before"
        " each update: leave it out, and set pairs_per_step in the section `recipe`"
    )


def iterative_dpo_has_pairs(run: ConfiguredRun) -> str:
    if not run.has_recipe("iterative_dpo") or run.config.rollout.group_size != 1:
        return ""
    return (
        "rollout.group_size is 1, and recipe=iterative_dpo compares the members of a group:"
        " there would be no pairs. Set rollout.group_size to 2 or more (8 is usual)"
    )


def iterative_dpo_plays_with_the_newest_model(run: ConfiguredRun) -> str:
    staleness = run.config.rollout.max_staleness
    if not run.has_recipe("iterative_dpo") or not staleness:
        return ""
    return (
        f"rollout.max_staleness is {staleness}, and recipe=iterative_dpo"
        " plays each iteration with the model that the last one has trained: write"
        " rollout.max_staleness=0"
    )


def iterative_dpo_compares_whole_episodes(run: ConfiguredRun) -> str:
    if not run.has_recipe("iterative_dpo") or not run.config.rollout.rule.trains_on_segments:
        return ""
    return (
        f"{_chosen_rule(run)} trains on parts of episodes, and"
        " recipe=iterative_dpo compares whole ones: choose another rule"
    )


def iterative_dpo_has_no_advantages(run: ConfiguredRun) -> str:
    normalize = run.config.batch_processing.normalize
    if not run.has_recipe("iterative_dpo") or normalize == "group":
        return ""
    return (
        f"batch_processing.normalize={normalize} normalises"
        " advantages, and recipe=iterative_dpo has none, but pairs: leave it out"
    )


def self_play_has_one_environment(run: ConfiguredRun) -> str:
    if not run.has_recipe("self_play") or not run.config.env.mixture:
        return ""
    return "recipe=self_play plays one environment: name it in env, instead of a list"


def self_play_has_seats(run: ConfiguredRun) -> str:
    env = run.config.env
    if not run.has_recipe("self_play") or not env.is_agent:
        return ""
    return (
        f"recipe=self_play needs an environment of several agents, and {env.name!r}"
        " is a program, which asks one model: take an environment such as kuhn_poker, or"
        " recipe=policy_gradient"
    )


# Environments


def _with_own_algorithm(run: ConfiguredRun) -> list[tuple[MixedEnv, Component]]:
    return [(env, env.algorithm) for env in run.config.env.mixture if env.algorithm is not None]


def mixture_settings_are_of_advantages(run: ConfiguredRun) -> str:
    entries = _with_own_algorithm(run)
    has_critic = AlgorithmOffers.of(run.config.algorithm.factory).estimate is not None
    if not entries or not (run.own_algorithm or has_critic):
        return ""
    return (
        f"env.mixture: {entries[0][0].run_name} has algorithm settings of its own, which only the"
        " advantages of groups can have: leave them out with an algorithm that has a"
        " critic, or a recipe with its own algorithm"
    )


def mixture_has_one_algorithm(run: ConfiguredRun) -> str:
    for env, algorithm in _with_own_algorithm(run):
        if algorithm.name != run.config.algorithm.name:
            return f"env.mixture: {env.run_name} names another algorithm: write only settings of it"
    return ""


def mixture_settings_have_an_effect(run: ConfiguredRun) -> str:
    shared = run.config.algorithm.settings
    for env, algorithm in _with_own_algorithm(run):
        if idle := without_effect(algorithm.factory, algorithm.settings, shared):
            return (
                f"env.mixture: {env.run_name} sets algorithm.{' and algorithm.'.join(idle)} of"
                " its own, which the advantages of its groups do not use, as configured. The"
                " loss is the same for the whole batch: write it in the section algorithm of"
                " the run, for all environments"
            )
    return ""


def program_is_trained_alone(run: ConfiguredRun) -> str:
    programs = [env.name for env in run.config.env.mixture if env.is_agent]
    if not programs:
        return ""
    return f"env.mixture: {programs[0]} is a program, which a run trains alone: write it as env"


def program_keeps_its_conversations(run: ConfiguredRun) -> str:
    config, env = run.config, run.config.env
    if not env.is_agent:
        return ""
    idle = {
        "env.wrappers": bool(env.wrappers),
        "env.system_prompt": env.system_prompt is not None,
        "env.rules": bool(env.rules),
        "env.agents": bool(env.agents),
        "cluster.env_workers": ClusterOffers.of(config.cluster.settings).env_workers > 0,
        "env.requires": bool(env.requires),
        "env.isolation=inline": env.isolation == "inline",
        "rollout.context": config.rollout.context.name != "full",
        "model.history=template": config.model.history == "template",
    }
    written = [name for name, is_set in idle.items() if is_set]
    if not written:
        return ""
    return (
        f"env is a program, {env.name!r}, which keeps its own conversations and runs"
        f" as it is: leave out {' and '.join(written)}"
    )


def programs_in_sandboxes_are_commands(run: ConfiguredRun) -> str:
    env = run.config.env
    if env.agent == AgentPlace():
        return ""
    if not env.is_agent:
        return "env.agent says where a program (agent:...) runs, and env is none: leave it out"
    if env.agent.where == "outside":
        return "env.agent is about sandboxes: write env.agent.where=inside too, or leave it out"
    is_function = ":" in env.name.removeprefix("agent:") and "agent:command " not in env.name
    if env.name == "agent:remote" or is_function or env.isolation or env.python:
        return (
            f"env.agent.where=inside is for programs that the run starts by a command, and not for"
            f' {env.name!r}: write env="agent:command ..." or the name of a coding agent,'
            " without env.isolation and env.python"
        )
    return ""


def _contains_programs(run: ConfiguredRun) -> bool:
    """True if the run keeps programs from the network that do not contain themselves."""
    config = run.config
    is_command = config.env.name.startswith("agent:command ") or config.env.name.count(":") == 1
    is_contained = config.gateway.network == "open" or (
        is_command and config.env.name != "agent:remote"
    )
    return config.env.is_agent and not is_contained


def contained_programs_are_started_here(run: ConfiguredRun) -> str:
    if not _contains_programs(run) or run.config.env.name != "agent:remote":
        return ""
    return (
        "gateway.network=gateway keeps the programs that the run starts from the network,"
        " and agents elsewhere (agent:remote) are started by others: leave it out"
    )


def contained_programs_run_in_processes(run: ConfiguredRun) -> str:
    env = run.config.env
    if not _contains_programs(run) or env.isolation == "process" or env.python is not None:
        return ""
    return (
        f"gateway.network=gateway needs a process for each episode, and {env.name!r} runs"
        " in threads: write env.isolation=process"
    )


# Rollout workers


def workers_have_environments_of_their_own(run: ConfiguredRun) -> str:
    workers = run.config.rollout.worker_range
    served = ClusterOffers.of(run.config.cluster.settings).env_workers
    if not workers or not served:
        return ""
    return (
        f"rollout.workers={workers} have environments of their own, and"
        f" cluster.env_workers={served} are for those that the controller plays: leave one of both"
        " out"
    )


def workers_have_gateways_of_their_own(run: ConfiguredRun) -> str:
    config, gateway = run.config, run.config.gateway
    workers = config.rollout.worker_range
    if not workers or not config.env.is_agent:
        return ""
    if config.env.name == "agent:remote":
        why = "agents elsewhere (env=agent:remote) get their tasks at one address"
    elif gateway.port:
        why = f"gateway.port={gateway.port} is one port"
    elif gateway.url:
        why = "gateway.url is one address"
    else:
        return ""
    return (
        f"{why}, and each of the rollout.workers={workers} has a gateway of its own:"
        " leave rollout.workers out"
    )


# Groups and batches


def members_have_others_to_compare_with(run: ConfiguredRun) -> str:
    config = run.config
    if run.own_algorithm:
        return ""
    mixture, size = config.env.mixture, config.rollout.group_size
    algorithms = [env.algorithm or config.algorithm for env in mixture] or [config.algorithm]
    comparing = [
        algorithm
        for algorithm in algorithms
        if AlgorithmOffers.of(algorithm.make()).compares_members
    ]
    sizes = {env.group_size or size for env in mixture} or {size}
    if 1 not in sizes or not comparing:
        return ""
    settings = comparing[0].settings
    causes = [
        f" ({name}={getattr(settings, name)})"
        for name in ("group_baseline", "reward_weight")
        if getattr(settings, name, None)
    ]
    cause = causes[0] if causes else ""
    return (
        f"rollout.group_size is 1, and the algorithm {config.algorithm.name!r}, as"
        f" configured, compares the members of a group{cause}: all advantages would be 0,"
        " and nothing would be learned. Set rollout.group_size to 2 or more (8 is usual),"
        " or choose algorithm=ppo, whose critic needs no group"
    )


def branches_can_be_played(run: ConfiguredRun) -> str:
    config, rollout = run.config, run.config.rollout
    if rollout.branches is None:
        return ""
    reasons = {
        "rollout.workers": (rollout.worker_range is not None, "play no branches yet"),
        "rollout.extra_members": (
            rollout.extra_members > 0,
            "end a group before its branches are played",
        ),
        f"rollout.staleness_rule={rollout.staleness_rule}": (
            rollout.rule.trains_on_segments,
            "trains on parts of episodes, which branches share",
        ),
        f"rollout.context={rollout.context.name}": (
            rollout.context.name != "full",
            "shows the model other prompts than those that branches share",
        ),
        f"batch_processing.normalize={config.batch_processing.normalize}": (
            config.batch_processing.normalize != "group",
            "counts the turns that branches share more than once",
        ),
        f"env={config.env.name}": (
            config.env.is_agent,
            "is a program, which cannot go back to a state",
        ),
        "env.agents": (bool(config.env.agents), "makes several agents, and branches have one"),
        f"recipe={config.recipe.name}": (
            not run.has_recipe("policy_gradient"),
            "plays no branches",
        ),
    }
    for setting, (is_set, why) in reasons.items():
        if is_set:
            return f"rollout.branches: {setting} {why}. Leave one of both out"
    if all(AlgorithmOffers.of(algorithm).credits_trees for _, algorithm in run.algorithms):
        return ""
    return (
        "rollout.branches: episodes that share turns need an advantage that knows it, or it would"
        " be biased: write algorithm.advantage=branch or tree, or leave rollout.branches out"
    )


def branches_have_turns_to_choose_from(run: ConfiguredRun) -> str:
    branches, limit = run.config.rollout.branches, run.config.rollout.budget.turns
    if branches is None or branches.at != "disagreement":
        return ""
    turns = len(branches.possible(limit))
    if turns > branches.budget // branches.width:
        return ""
    return (
        f"rollout.branches.at=disagreement chooses among turns, and budget={branches.budget} is"
        f" enough for all {turns} of them: write rollout.branches.at=every, or raise"
        " rollout.branches.before or rollout.budget.turns"
    )


def episodes_have_others_to_be_normalised_with(run: ConfiguredRun) -> str:
    config, scope = run.config, run.config.batch_processing.normalize
    is_alone = config.rollout.groups_per_step == config.rollout.group_size == 1
    if run.own_algorithm or not is_alone:
        return ""
    if AlgorithmOffers.of(run.algorithm).credits_turns:
        return ""  # the turns of one episode are several numbers
    if scope == "group" and AlgorithmOffers.of(run.algorithm).normalized is None:
        return ""
    by_algorithm = f"the algorithm {config.algorithm.name!r}"
    cause = by_algorithm if scope == "group" else f"batch_processing.normalize={scope}"
    by_turn = "reward_to_go" in type(config.algorithm.settings).model_fields
    whole = " (algorithm.reward_to_go=false)" if by_turn else ""
    return (
        f"rollout.groups_per_step and rollout.group_size are 1, and {cause} compares the"
        f" episodes of a batch: the only advantage{whole} would be 0, and nothing would be"
        " learned. Set rollout.groups_per_step to 2 or more"
    )


def critic_advantages_are_not_normalised(run: ConfiguredRun) -> str:
    algorithm, normalize = run.config.algorithm, run.config.batch_processing.normalize
    has_critic = AlgorithmOffers.of(algorithm.factory).estimate is not None
    if normalize == "group" or run.own_algorithm or not has_critic:
        return ""
    return (
        f"batch_processing.normalize={normalize} normalises what is"
        f" found by comparing the members of groups, and {algorithm.name!r} asks a"
        " critic: leave it out (ppo has algorithm.whiten=true)"
    )


def _chosen_rule(run: ConfiguredRun) -> str:
    return f"rollout.staleness_rule={run.config.rollout.staleness_rule}"


def segments_have_a_critic(run: ConfiguredRun) -> str:
    config = run.config
    if not config.rollout.rule.trains_on_segments:
        return ""
    has_critic = isinstance(run.algorithm, ActorCritic) and run.algorithm.bootstraps
    if has_critic and not run.own_algorithm:
        return ""
    by_recipe = f"recipe {config.recipe.name!r}"
    cause = by_recipe if run.own_algorithm else f"algorithm {config.algorithm.name!r}"
    return (
        f"{_chosen_rule(run)} trains on parts of episodes that go on, and what"
        f" follows them is worth what a critic says: the {cause}, as configured, asks"
        " none. Choose algorithm=ppo or algorithm=turn_ppo, with"
        " algorithm.truncated=bootstrap, or another staleness_rule"
    )


def segments_have_rewards_of_single_episodes(run: ConfiguredRun) -> str:
    config = run.config
    if not config.rollout.rule.trains_on_segments:
        return ""
    rewards = [env.reward for env in config.env.mixture if env.reward is not None]
    parts = [part for reward in (config.reward, *rewards) for part in reward.parts]
    comparing = [name_of(part) for part in parts if isinstance(part.factory, GroupReward)]
    if not comparing:
        return ""
    return (
        f"{_chosen_rule(run)} trains on parts of groups, and the reward"
        f" {comparing[0]!r} compares whole ones: leave it out, or choose another"
        " staleness_rule"
    )


def segments_are_not_filtered(run: ConfiguredRun) -> str:
    config = run.config
    if not config.rollout.rule.trains_on_segments:
        return ""
    if not config.rollout.filter_zero_variance and config.batch_processing.keep_variance == 1:
        return ""
    return (
        f"{_chosen_rule(run)} trains on parts of groups before their rewards are"
        " known, so these cannot be filtered by them: leave out"
        " rollout.filter_zero_variance and batch_processing.keep_variance"
    )


# A group may be left out only if that is seen from the group alone, and only if it then would have
# taught nothing, or less than others. Otherwise the expected gradient is another one: with
# `reinforce`, which learns as much from groups whose members all earned the same, it may even point
# backwards.


def normalised_advantages_have_no_scale(run: ConfiguredRun) -> str:
    normalize = run.config.batch_processing.normalize
    for name, algorithm in run.algorithms:
        if normalize != "group" and AlgorithmOffers.of(algorithm).fixed_scale:
            return (
                f"batch_processing.normalize={normalize} divides advantages by their spread, and"
                f" those of {name} are labels or weights, whose size means something: leave it out"
            )
    return ""


def filtered_groups_teach_nothing(run: ConfiguredRun) -> str:
    is_on = run.config.rollout.filter_zero_variance
    return _left_out_for_nothing(run, "rollout.filter_zero_variance", "false") if is_on else ""


def kept_groups_teach_all(run: ConfiguredRun) -> str:
    is_on = run.config.batch_processing.keep_variance < 1
    return _left_out_for_nothing(run, "batch_processing.keep_variance", "1") if is_on else ""


def _left_out_for_nothing(run: ConfiguredRun, setting: str, off: str) -> str:
    normalize = run.config.batch_processing.normalize
    for name, algorithm in run.algorithms:
        why = _why_group_is_not_enough(algorithm)
        if why := why or _why_normalizing_moves_zeros(algorithm, normalize):
            return (
                f"{setting} leaves out groups whose advantages are all 0, and {name} {why}: write"
                f" {setting}={off}"
            )
    return ""


def groups_that_vary_teach_more(run: ConfiguredRun) -> str:
    if run.config.batch_processing.keep_variance == 1:
        return ""
    for name, algorithm in run.algorithms:
        if not _compares(algorithm):
            return (
                "batch_processing.keep_variance keeps the groups whose members differ most, and"
                f" {name} does not compare the members of a group: it learns as much from the"
                " others, and without them its gradient may point backwards. Write"
                " batch_processing.keep_variance=1, or choose an algorithm that compares (grpo,"
                " rloo)"
            )
    return ""


def _compares(algorithm: Algorithm) -> bool:
    offers = AlgorithmOffers.of(algorithm)
    return offers.compares_members or offers.spread is not None


def _why_group_is_not_enough(algorithm: Algorithm) -> str:
    """The reason why a group alone does not tell what the algorithm would learn from it; empty if
    it does."""
    if isinstance(algorithm, ActorCritic):
        return "asks a critic for them, so the group does not tell"
    offers = AlgorithmOffers.of(algorithm)
    if offers.learn is not None:
        return (
            "compares with what earlier batches have earned, which may have moved until the group"
            " is trained on"
        )
    if offers.normalized is not None:
        return "compares with the whole batch, so the group does not tell"
    if offers.beyond_rewards:
        return (
            f"adds to them what no reward says ({offers.beyond_rewards}), so the group does not"
            " tell"
        )
    return ""


def _why_normalizing_moves_zeros(algorithm: Algorithm, normalize: str) -> str:
    by_turn = AlgorithmOffers.of(algorithm).credits_turns
    if normalize == "group" or (_compares(algorithm) and not by_turn):
        return ""
    whose = "of single turns (reward_to_go), which" if by_turn else "that"
    return (
        f"has advantages {whose} do not add up to 0 in a group, so that"
        f" batch_processing.normalize={normalize} would move those that are 0"
    )


# Checkpoints and evaluations


def opponents_are_the_same_after_a_resume(run: ConfiguredRun) -> str:
    every = run.config.checkpoint.every
    for agent, route in run.config.env.agents.items():
        if isinstance(route, FrozenRoute) and route.refresh and every % route.refresh:
            return (
                f"env.agents.{agent}.refresh ({route.refresh}) must divide checkpoint.every"
                f" ({every}), or a resumed run would meet other opponents than"
                " an uninterrupted one"
            )
    return ""


def best_names_a_suite(run: ConfiguredRun) -> str:
    best = run.config.checkpoint.best
    suites = [suite.name for suite in run.config.evaluation.suites]
    if not best or best.count("/") != 2 or best.split("/")[1] in suites:
        return ""
    return (
        f"checkpoint.best names the suite {best.split('/')[1]!r}; there is"
        f" {', '.join(suites) or 'none'}"
    )


def best_is_measured_when_steps_are_saved(run: ConfiguredRun) -> str:
    best, every = run.config.checkpoint.best, run.config.checkpoint.every
    if not best:
        return ""
    evaluation, name = run.config.evaluation, best.split("/")[1]
    section, measured, tasks = "evaluation.every", evaluation.every, evaluation.tasks
    for suite in evaluation.suites:
        if suite.name == name:
            section, measured, tasks = f"that of the suite {name}", suite.every, suite.tasks
    if tasks and measured and measured % every == 0:
        return ""
    return (
        "checkpoint.best needs evaluations of steps that are saved: checkpoint.every"
        f" ({every}) must divide {section} ({measured}), and evaluation.tasks ({tasks})"
        " must be more than 0"
    )


def best_reward_is_of_single_episodes(run: ConfiguredRun) -> str:
    best = run.config.checkpoint.best
    if not best or not best.endswith("/reward"):
        return ""
    if not all(reward.only_compares for reward in _evaluated_rewards(run.config, best)):
        return ""
    return (
        f"checkpoint.best={best} is never measured: evaluations play each task once, and"
        " every part of the reward compares the members of a group. Add a part that scores"
        " single episodes, or write checkpoint.best=eval/success if the environment gives"
        " a verdict"
    )


def _evaluated_rewards(config: RunConfig, metric: str) -> list[RewardsConfig]:
    """The rewards of the episodes that a metric of evaluations is about."""
    by_env, parts = config.rewards_by_env(), metric.split("/")
    if parts[1] == "envs":
        return [by_env.get("/".join(parts[2:-1]), config.reward)]
    for suite in config.evaluation.suites:
        if suite.name == parts[1]:
            return [by_env.get(suite.label, config.reward)]
    return [by_env.get(env, config.reward) for env in config.env.all]


def suites_name_their_environment(run: ConfiguredRun) -> str:
    unnamed = [suite.name for suite in run.config.evaluation.suites if suite.env is None]
    if not run.config.env.mixture or not unnamed:
        return ""
    return (
        f"evaluation.suites: the run has several environments, so name that of {unnamed[0]} in"
        " its env"
    )


# Engines and placement


def engine_takes_weights(run: ConfiguredRun) -> str:
    engine = run.config.engine
    layout = EngineSettingsOffers.of(engine.settings).layout
    if layout is None or layout().here:
        return ""
    return (
        f"engine={engine.name} samples from a model that is served elsewhere: it can"
        " neither take new weights nor say what truncated sampling left to sample from. Train"
        f" with engine=vllm or engine=local, and evaluate with engine={engine.name}"
        " (`agentrl eval`)"
    )


def engine_reads_arrivals(run: ConfiguredRun) -> str:
    engine, transport = run.config.engine, run.config.weights.transport
    is_live = transport in ("stream", "handles")
    if not is_live or EngineOffers.of(engine.factory).reads_arrivals:
        return ""
    return (
        f"weights.transport={transport}: engine {engine.name!r} cannot load weights as they arrive"
        " (`EngineOffers.reads_arrivals`). Write weights.transport=auto"
    )


def trainer_reads_pictures(run: ConfiguredRun) -> str:
    trainer = run.config.trainer
    if TrainerSettingsOffers.of(trainer.settings).sees:
        return ""
    shown = [env.name for _, env in envs_of(run.config) if shows_pictures(env)]
    if not shown:
        return ""
    return (
        f"{shown[0]} shows pictures, and trainer={trainer.name} learns from text alone: choose what"
        " the environment says in words, such as env.options.view=grid"
    )


def engine_gets_whole_models(run: ConfiguredRun) -> str:
    engine, trainer = run.config.engine, TrainerSettingsOffers.of(run.config.trainer.settings)
    folder = Path(run.config.model.name)
    if (
        EngineOffers.of(engine.factory).reads_images
        or trainer.lora is not None
        or (trainer.train_tower and trainer.train_projector)
        or not (folder.is_dir() and seeing_family(folder) in FAMILIES)
    ):
        return ""
    return (
        f"model={folder} sees, and engine={engine.name} takes updates of whole models only, in"
        " which frozen parts are missing: write trainer.train_tower=true and"
        " trainer.train_projector=true, which take no gradients without pictures, or engine=local"
    )


def engine_reports_experts(run: ConfiguredRun) -> str:
    engine = run.config.engine
    routing = TrainerSettingsOffers.of(run.config.trainer.settings).routing
    if routing == "off" or EngineOffers.of(engine.factory).reports_experts:
        return ""
    return (
        f"trainer.routing={routing}: engine {engine.name!r} does not say which experts it chose."
        " Leave the setting out, or write engine=vllm (on GPUs) or engine=local"
    )


def proposals_are_sampled_without_min_p(run: ConfiguredRun) -> str:
    config = run.config
    if EngineSettingsOffers.of(config.engine.settings).speculative is None:
        return ""
    sampling = config.rollout.sampling
    settings = {
        "rollout.sampling.min_p": sampling.min_p,
        "evaluation.min_p": config.evaluation.sampling(sampling).min_p,
    }
    for suite in config.evaluation.suites:
        settings[f"the min_p of the suite {suite.name}"] = suite.sampling(sampling).min_p
    written = [name for name, min_p in settings.items() if min_p > 0]
    if not written:
        return ""
    return (
        f"{written[0]} is above 0, and engine.speculative cannot check proposed tokens against it"
        " (vLLM refuses such requests): leave one of both out, or write top_p instead"
    )


def cluster_can_place(run: ConfiguredRun) -> str:
    cluster, placement = run.config.cluster, run.config.placement
    name = "lists of devices" if placement.lists else placement.name
    if not ClusterOffers.of(cluster.factory).one_device or name in ("auto", "local"):
        return ""
    return (
        f"placement: {name}, but cluster={cluster.name} puts everything on the first"
        " device: write placement=local, or take a cluster that can place (cluster=ray)"
    )


_RULE, _NORMALIZE, _KEEP, _FILTER = (
    "rollout.staleness_rule",
    "batch_processing.normalize",
    "batch_processing.keep_variance",
    "rollout.filter_zero_variance",
)
RULES = (
    CompatibilityRule(("recipe", "algorithm"), archer_has_a_critic_of_answers),
    CompatibilityRule(("recipe", _RULE), archer_trains_on_whole_episodes),
    CompatibilityRule(("recipe.critic_warmup", "steps"), archer_warms_up_before_the_end),
    CompatibilityRule(("recipe.teacher.engine", "engine"), teacher_can_score),
    CompatibilityRule(
        ("recipe.teacher.engine", "rollout.sampling"), teacher_scores_at_the_temperature
    ),
    CompatibilityRule(
        ("recipe.teacher", "rollout.sampling"), teacher_compares_the_whole_vocabulary
    ),
    CompatibilityRule(
        ("recipe.reward_weight", "rollout.group_size"), distill_compares_several_members
    ),
    CompatibilityRule(
        ("recipe.teacher.refresh", "checkpoint.every"), teacher_is_the_same_after_a_resume
    ),
    CompatibilityRule(("recipe", "trainer.minibatches"), pairs_are_weighed_once_a_step),
    CompatibilityRule(("recipe", "rollout.group_size"), iterative_dpo_has_pairs),
    CompatibilityRule(
        ("recipe", "rollout.max_staleness"), iterative_dpo_plays_with_the_newest_model
    ),
    CompatibilityRule(("recipe", _RULE), iterative_dpo_compares_whole_episodes),
    CompatibilityRule(("recipe", _NORMALIZE), iterative_dpo_has_no_advantages),
    CompatibilityRule(("recipe", "env.mixture"), self_play_has_one_environment),
    CompatibilityRule(("recipe", "env"), self_play_has_seats),
    CompatibilityRule(("env.mixture", "algorithm", "recipe"), mixture_settings_are_of_advantages),
    CompatibilityRule(("env.mixture", "algorithm"), mixture_has_one_algorithm),
    CompatibilityRule(("env.mixture", "algorithm"), mixture_settings_have_an_effect),
    CompatibilityRule(("env.mixture",), program_is_trained_alone),
    CompatibilityRule(
        ("env", "cluster", "rollout.context", "model.history"), program_keeps_its_conversations
    ),
    CompatibilityRule(("env", "env.agent"), programs_in_sandboxes_are_commands),
    CompatibilityRule(("env", "gateway.network"), contained_programs_are_started_here),
    CompatibilityRule(("env.isolation", "gateway.network"), contained_programs_run_in_processes),
    CompatibilityRule(
        ("rollout.workers", "cluster.env_workers"), workers_have_environments_of_their_own
    ),
    CompatibilityRule(("rollout.workers", "gateway", "env"), workers_have_gateways_of_their_own),
    CompatibilityRule(("rollout.group_size", "algorithm"), members_have_others_to_compare_with),
    CompatibilityRule(
        (
            "rollout.branches",
            "rollout.workers",
            "rollout.extra_members",
            "rollout.staleness_rule",
            "rollout.context",
            "batch_processing.normalize",
            "env",
            "recipe",
            "algorithm",
        ),
        branches_can_be_played,
    ),
    CompatibilityRule(("rollout.branches", "rollout.budget"), branches_have_turns_to_choose_from),
    CompatibilityRule(
        ("rollout", "algorithm", _NORMALIZE), episodes_have_others_to_be_normalised_with
    ),
    CompatibilityRule((_NORMALIZE, "algorithm"), critic_advantages_are_not_normalised),
    CompatibilityRule((_RULE, "algorithm"), segments_have_a_critic),
    CompatibilityRule((_RULE, "reward"), segments_have_rewards_of_single_episodes),
    CompatibilityRule((_RULE, _FILTER, _KEEP), segments_are_not_filtered),
    CompatibilityRule((_NORMALIZE, "algorithm"), normalised_advantages_have_no_scale),
    CompatibilityRule((_FILTER, "algorithm"), filtered_groups_teach_nothing),
    CompatibilityRule((_KEEP, "algorithm"), kept_groups_teach_all),
    CompatibilityRule((_KEEP, "algorithm"), groups_that_vary_teach_more),
    CompatibilityRule(("env.agents", "checkpoint.every"), opponents_are_the_same_after_a_resume),
    CompatibilityRule(("checkpoint.best", "evaluation.suites"), best_names_a_suite),
    CompatibilityRule(("checkpoint.best", "evaluation"), best_is_measured_when_steps_are_saved),
    CompatibilityRule(("checkpoint.best", "reward"), best_reward_is_of_single_episodes),
    CompatibilityRule(("evaluation.suites", "env.mixture"), suites_name_their_environment),
    CompatibilityRule(("engine", "weights.transport"), engine_reads_arrivals, "training"),
    CompatibilityRule(("engine", "trainer.routing"), engine_reports_experts, "training"),
    CompatibilityRule(("engine",), engine_takes_weights, "training"),
    CompatibilityRule(("env", "trainer"), trainer_reads_pictures, "training"),
    CompatibilityRule(("model", "engine", "trainer"), engine_gets_whole_models, "training"),
    CompatibilityRule(
        ("engine.speculative", "rollout.sampling", "evaluation"),
        proposals_are_sampled_without_min_p,
    ),
    CompatibilityRule(("cluster", "placement"), cluster_can_place, "start"),
)
"""All rules, in the order in which they are checked."""
