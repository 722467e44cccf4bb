"""`RunConfig`: the settings of a run.

Each component (engine, trainer, algorithm, reward, cluster) is a plug-in with its own `Config`; a
run's config composes them. What settings need of each other is checked here; where they come from,
agentrl/config/loading.py knows.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.own_settings import without_effect
from agentrl.config.group_checks import check_groups
from agentrl.conversation.config import RendererConfig
from agentrl.gateway.config import GatewayConfig
from agentrl.observe.config import ObserveConfig
from agentrl.placement.config import PlacementConfig
from agentrl.plugins import Component
from agentrl.protocols import ActorCritic, Algorithm, NormalizesAdvantages
from agentrl.rollout.agents import FrozenRoute
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.scoring.config import RewardsConfig, name_of
from agentrl.settings.base import PathText, Settings
from agentrl.settings.yaml_values import to_yaml
from agentrl.simulate.config import SimulationConfig
from agentrl.tasks.env_config import ComponentField, EnvConfig, OneEnv, RewardsField
from agentrl.tasks.suites import EvaluationSampling, SuiteConfig
from agentrl.weights.config import WeightsConfig

COMPONENTS = {
    "engine": "engines",
    "trainer": "trainers",
    "algorithm": "algorithms",
    "cluster": "clusters",
    "recipe": "recipes",
    "tasks": "task_sources",
}
"""Sections of a config that are plug-ins with settings, and the kind of each."""
HELPERS = ("reference", "critic")
"""Sections of the additional trainers that some algorithms need; their settings default to the
trainer's.
"""


class ModelConfig(RendererConfig):
    """Which model to train, and how its conversations become tokens."""

    name: PathText = "tiny"
    """The folder of a Hugging Face model, or the id of a model on the hub (`Qwen/Qwen3-8B`), or
    `tiny` or `small`, which are randomly initialised at the start. An existing folder comes first.
    """
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; by default its newest. A run stays with the
    commit that it began with."""


class EvaluationConfig(EvaluationSampling):
    """Evaluation on held-out seeds before, during and after training."""

    tasks: int = Field(200, ge=0)
    """Held-out tasks; 0 turns evaluation off."""
    every: int = Field(0, ge=0)
    """Also evaluate every so many steps; 0: only before and after."""
    engines: int = Field(0, ge=0)
    """Engines of the evaluation's own, as many times those of training: it then runs beside
    training, pinned to its version, and changes nothing of what is trained. 0: the engines of
    training evaluate."""
    overlap: bool = False
    """Let the engines of training evaluate while training goes on, which comes first. New weights
    wait for the end of the evaluation, because all of it must be of one version. By default,
    training waits for evaluations."""
    suites: tuple[SuiteConfig, ...] = ()
    """More evaluations, each on a fixed set of tasks of its own (`agentrl/tasks/suites.py`)."""

    @model_validator(mode="after")
    def _is_played_at_one_place(self) -> Self:
        if self.overlap and self.engines:
            raise ValueError(
                f"overlap is for the engines of training, and there are engines={self.engines} for"
                " evaluations, which run beside training anyway: leave one of both out"
            )
        return self

    @field_validator("suites")
    @classmethod
    def _each_has_a_name_of_its_own(
        cls, suites: tuple[SuiteConfig, ...]
    ) -> tuple[SuiteConfig, ...]:
        names = [suite.name for suite in suites]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"more than one suite is called {min(twice)!r}")
        return suites


class CheckpointConfig(Settings):
    """When to save the checkpoints that a killed run resumes from, and how many to keep."""

    every: int = Field(10, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, gt=0)
    """How many of the latest to keep."""
    best: str | None = None
    """Also keep the checkpoints with the largest values of this metric, such as `eval/success`."""
    keep_best: int = Field(1, gt=0)
    """How many of the best to keep."""
    allow_foreign: bool = False
    """Resume from checkpoints that lie outside of the run's folder, by a link, or that belong to
    another user.
    """

    @field_validator("best")
    @classmethod
    def _is_measured_on_held_out_tasks(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(
            r"eval/((agents|envs)/.+/|[\w-]+/)?(success|reward|pass@\d+)", name
        ):
            raise ValueError(
                "write eval/success or eval/reward, or those of a suite or an agent:"
                " eval/SUITE/success, eval/agents/NAME/success"
            )
        return name


class RunConfig(Settings):
    """All settings of a run."""

    recipe: ComponentField
    """What the run does: `policy_gradient`, `self_play`, `sft`, `dpo`, `iterative_dpo`,
    `reward_model`, or `package.module:function`, with its settings."""
    seed: int = Field(0, ge=0)
    """All randomness derives from it."""
    steps: int = Field(100, gt=0)
    """Training steps."""
    run_dir: Path = Path("runs/run")
    """The folder that the run writes to; by default `runs/` and the config file's name."""
    env: EnvConfig
    model: ModelConfig = ModelConfig()
    tasks: ComponentField
    """Where the tasks come from: `seeded` (a new seed of the environment for each), a file, a
    folder or a dataset (`data.jsonl`, short for `{name: dataset, data: data.jsonl}`), or
    `package.module:Name`, a `TaskSource` or `Curriculum` (agentrl/protocols/tasks.py) with its
    settings.
    """
    rollout: RolloutConfig = RolloutConfig()
    engine: ComponentField
    trainer: ComponentField
    algorithm: ComponentField
    reference: ComponentField | None = None
    """The trainer that computes the logprobs of the model that the policy is kept near
    (`algorithm.kl`). Its settings default to those of `trainer`."""
    critic: ComponentField | None = None
    """The trainer of the critic, whose values determine the advantages of `algorithm=ppo`. Its
    settings default to those of `trainer`."""
    reward: RewardsField
    """One reward, or a list of parts with weights: `[environment, {name: numeric, weight: 0.5, as:
    answer}]`.
    """
    cluster: ComponentField
    weights: WeightsConfig = WeightsConfig()
    """How new weights go from the trainer to the engines."""
    batch_processing: BatchProcessingConfig = BatchProcessingConfig()
    """Processing of a batch's scores before advantages are computed, and of its advantages before
    the loss.
    """
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    placement: PlacementConfig = PlacementConfig()
    """Which devices the engine and the trainer run on."""
    gateway: GatewayConfig = GatewayConfig()
    """Where programs reach the model (`env: agent:...`)."""
    simulation: SimulationConfig = SimulationConfig()
    """The models that replace the engine, the environments and the trainer in `agentrl simulate`.
    """
    trackers: tuple[ComponentField, ...]
    """Where metrics go besides `metrics.jsonl`: a list such as `[tensorboard, {name: wandb,
    project: lakes}]`; by default `[tensorboard]`."""

    @model_validator(mode="after")
    def _the_recipe_can_do_its_work(self) -> Self:
        check = getattr(self.recipe.settings, "check_run", None)
        if check is not None:
            check(self)
        return self

    @model_validator(mode="after")
    def _a_mixture_can_be_trained_on(self) -> Self:
        own = [one for one in self.env.mixture if one.algorithm is not None]
        if own and (brings_algorithm(self.recipe) or hasattr(self.algorithm.factory, "estimate")):
            raise ValueError(
                f"env.mixture: {own[0].called} has algorithm settings of its own, which only the"
                " advantages of groups can have: leave them out with an algorithm that has a"
                " critic, or a recipe with its own algorithm"
            )
        if other := [
            one for one in own if one.algorithm and one.algorithm.name != self.algorithm.name
        ]:
            raise ValueError(
                f"env.mixture: {other[0].called} names another algorithm: write only settings of it"
            )
        for one in own:
            made = one.algorithm or self.algorithm
            if idle := without_effect(made.factory, made.settings, self.algorithm.settings):
                raise ValueError(
                    f"env.mixture: {one.called} sets algorithm.{' and algorithm.'.join(idle)} of"
                    " its own, which the advantages of its groups do not use, as configured. The"
                    " loss is the same for the whole batch: write it in the section algorithm of"
                    " the run, for all environments"
                )
        return self

    @model_validator(mode="after")
    def _an_agent_decides_what_an_environment_leaves_to_the_run(self) -> Self:
        if programs := [one.name for one in self.env.mixture if one.is_agent]:
            raise ValueError(
                f"env.mixture: {programs[0]} is a program, which a run trains alone: write it"
                " as env"
            )
        if not self.env.is_agent:
            return self
        own = {
            "env.wrappers": bool(self.env.wrappers),
            "env.system_prompt": self.env.system_prompt is not None,
            "env.rules": bool(self.env.rules),
            "env.agents": bool(self.env.agents),
            "cluster.env_workers": bool(getattr(self.cluster.settings, "env_workers", 0)),
            "env.requires": bool(self.env.requires),
            "env.isolation=inline": self.env.isolation == "inline",
            "rollout.context": self.rollout.context.name != "full",
            "model.history=template": self.model.history == "template",
        }
        if wrong := [name for name, is_set in own.items() if is_set]:
            raise ValueError(
                f"env is a program, {self.env.name!r}, which keeps its own conversations and runs"
                f" as it is: leave out {' and '.join(wrong)}"
            )
        self._check_containment()
        return self

    def _check_containment(self) -> None:
        """Refuse to keep a program from the network that does not run in processes of its own."""
        env = self.env
        if self.gateway.network == "open" or env.name.startswith("agent:command "):
            return
        if env.name == "agent:remote":
            raise ValueError(
                "gateway.network=gateway keeps the programs that the run starts from the network,"
                " and agents elsewhere (agent:remote) are started by others: leave it out"
            )
        if env.isolation != "process" and env.python is None:
            raise ValueError(
                f"gateway.network=gateway needs a process for each episode, and {env.name!r} runs"
                " in threads: write env.isolation=process"
            )

    @model_validator(mode="after")
    def _members_have_others_to_be_compared_with(self) -> Self:
        if brings_algorithm(self.recipe):
            return self
        own = [one.algorithm or self.algorithm for one in self.env.mixture]
        comparing = [
            one for one in own or [self.algorithm] if getattr(one.make(), "compares_members", False)
        ]
        sizes = {one.group_size or self.rollout.group_size for one in self.env.mixture} or {
            self.rollout.group_size
        }
        if 1 in sizes and comparing:
            by = [
                name
                for name in ("group_baseline", "reward_weight")
                if getattr(comparing[0].settings, name, None)
            ]
            by_what = f" ({by[0]}={getattr(comparing[0].settings, by[0])})" if by else ""
            raise ValueError(
                f"rollout.group_size is 1, and the algorithm {self.algorithm.name!r}, as"
                f" configured, compares the members of a group{by_what}: all advantages would be 0,"
                " and nothing would be learned. Set rollout.group_size to 2 or more (8 is usual),"
                " or choose algorithm=ppo, whose critic needs no group"
            )
        return self

    @model_validator(mode="after")
    def _a_batch_has_others_to_be_normalised_with(self) -> Self:
        if brings_algorithm(self.recipe):
            return self
        alone = self.rollout.groups_per_step == self.rollout.group_size == 1
        algorithm, scope = self.algorithm.make(), self.batch_processing.normalize
        if not alone or getattr(algorithm, "credits_turns", False):
            return self  # the turns of one episode are several numbers
        if scope != "group" or isinstance(algorithm, NormalizesAdvantages):
            by = (
                f"the algorithm {self.algorithm.name!r}"
                if scope == "group"
                else f"batch_processing.normalize={scope}"
            )
            whole = (
                " (algorithm.reward_to_go=false)"
                if hasattr(self.algorithm.settings, "reward_to_go")
                else ""
            )
            raise ValueError(
                f"rollout.groups_per_step and rollout.group_size are 1, and {by} compares the"
                f" episodes of a batch: the only advantage{whole} would be 0, and nothing would be"
                " learned. Set rollout.groups_per_step to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _a_critics_advantages_are_its_own(self) -> Self:
        has_critic = hasattr(self.algorithm.factory, "estimate") and not brings_algorithm(
            self.recipe
        )
        if self.batch_processing.normalize != "group" and has_critic:
            raise ValueError(
                f"batch_processing.normalize={self.batch_processing.normalize} normalises what is"
                f" found by comparing the members of groups, and {self.algorithm.name!r} asks a"
                " critic: leave it out (ppo has algorithm.whiten=true)"
            )
        return self

    @model_validator(mode="after")
    def _parts_of_episodes_can_be_trained_on(self) -> Self:
        if self.rollout.staleness_rule != "segment":
            return self
        algorithm, own = self.algorithm.make(), brings_algorithm(self.recipe)
        if own or not (isinstance(algorithm, ActorCritic) and algorithm.bootstraps):
            asks_none = (
                f"recipe {self.recipe.name!r}" if own else f"algorithm {self.algorithm.name!r}"
            )
            raise ValueError(
                "rollout.staleness_rule=segment trains on parts of episodes that go on, and what"
                f" follows them is worth what a critic says: the {asks_none}, as configured, asks"
                " none. Choose algorithm=ppo or algorithm=turn_ppo, with"
                " algorithm.truncated=bootstrap, or another staleness_rule"
            )
        rewards = [self.reward, *(one.reward for one in self.env.mixture if one.reward is not None)]
        parts = [part for reward in rewards for part in reward.parts]
        if compared := [name_of(part) for part in parts if hasattr(part.factory, "score_group")]:
            raise ValueError(
                "rollout.staleness_rule=segment trains on parts of groups, and the reward"
                f" {compared[0]!r} compares whole ones: leave it out, or choose another"
                " staleness_rule"
            )
        if self.rollout.filter_zero_variance or self.batch_processing.keep_variance < 1:
            raise ValueError(
                "rollout.staleness_rule=segment trains on parts of groups before their rewards are"
                " known, so these cannot be filtered by them: leave out"
                " rollout.filter_zero_variance and batch_processing.keep_variance"
            )
        return self

    @model_validator(mode="after")
    def _groups_teach_what_the_algorithm_learns_from_them(self) -> Self:
        for name, algorithm in self.trained_with():
            check_groups(
                name, algorithm, self.batch_processing, filters=self.rollout.filter_zero_variance
            )
        return self

    @model_validator(mode="after")
    def _a_resumed_run_meets_the_same_opponents(self) -> Self:
        for agent, route in self.env.agents.items():
            if (
                isinstance(route, FrozenRoute)
                and route.refresh
                and self.checkpoint.every % route.refresh
            ):
                raise ValueError(
                    f"env.agents.{agent}.refresh ({route.refresh}) must divide checkpoint.every"
                    f" ({self.checkpoint.every}), or a resumed run would meet other opponents than"
                    " an uninterrupted one"
                )
        return self

    @model_validator(mode="after")
    def _what_is_best_is_measured(self) -> Self:
        best, every = self.checkpoint.best, self.checkpoint.every
        if not best:
            return self
        suites = {suite.name: suite for suite in self.evaluation.suites}
        of = best.split("/")[1]
        if of in suites:
            section, measured, tasks = f"that of the suite {of}", suites[of].every, suites[of].tasks
        elif best.count("/") == 2:
            raise ValueError(
                f"checkpoint.best names the suite {of!r}; there is {', '.join(suites) or 'none'}"
            )
        else:
            section, measured, tasks = (
                "evaluation.every",
                self.evaluation.every,
                self.evaluation.tasks,
            )
        if not (tasks and measured and measured % every == 0):
            raise ValueError(
                "checkpoint.best needs evaluations of steps that are saved: checkpoint.every"
                f" ({every}) must divide {section} ({measured}), and evaluation.tasks ({tasks})"
                " must be more than 0"
            )
        if best.endswith("/reward") and all(
            reward.only_compares for reward in self._rewards_of(best)
        ):
            raise ValueError(
                f"checkpoint.best={best} is never measured: evaluations play each task once, and"
                " every part of the reward compares the members of a group. Add a part that scores"
                " single episodes, or write checkpoint.best=eval/success if the environment gives"
                " a verdict"
            )
        return self

    def _rewards_of(self, metric: str) -> list[RewardsConfig]:
        """What scores the episodes that a metric of evaluations is about."""
        own, parts = self.rewards_by_env(), metric.split("/")
        if parts[1] == "envs":
            return [own.get("/".join(parts[2:-1]), self.reward)]
        suite = next((suite for suite in self.evaluation.suites if suite.name == parts[1]), None)
        if suite is not None:
            return [own.get(suite.label, self.reward)]
        return [own.get(env, self.reward) for env in self.env.all]

    @model_validator(mode="after")
    def _suites_have_an_environment(self) -> Self:
        if self.env.mixture and (
            none := [suite.name for suite in self.evaluation.suites if suite.env is None]
        ):
            raise ValueError(
                f"evaluation.suites: the run has several environments, so name that of {none[0]} in"
                " its env"
            )
        return self

    def trained_with(self) -> Iterator[tuple[str, Algorithm]]:
        """The algorithms that learn from what the run plays, with what they are called in the
        config.
        """
        if not brings_algorithm(self.recipe):
            yield f"algorithm={self.algorithm.name}", self.algorithm.make()
        elif made := getattr(self.recipe.settings, "trains_with", lambda: None)():
            yield f"recipe={self.recipe.name}", made
        for one in self.env.mixture:
            if one.algorithm is not None:
                yield f"the algorithm of {one.called} in env.mixture", one.algorithm.make()

    @property
    def envs(self) -> Mapping[str, OneEnv]:
        """All environments by their names in the run: those that are trained on, and those of
        suites.
        """
        suites = {suite.label: suite.env or self.env for suite in self.evaluation.suites}
        return {**self.env.all, **suites}

    def rewards_by_env(self) -> dict[str, RewardsConfig]:
        """The rewards of environments that have their own."""
        own = {one.called: one.reward for one in self.env.mixture}
        own |= {suite.label: suite.reward for suite in self.evaluation.suites}
        return {env: reward for env, reward in own.items() if reward is not None}

    def own_max_tokens(self) -> dict[str, int]:
        """The longest answer in environments that have their own `max_tokens`."""
        own = {one.called: one.max_tokens for one in self.env.mixture}
        own |= {suite.label: suite.max_tokens for suite in self.evaluation.suites}
        return {env: limit for env, limit in own.items() if limit is not None}

    def own_budgets(self) -> dict[str, Budget]:
        """The budget of an episode in the environments of a mixture, and in those of suites."""
        own = {one.called: one.budget for one in self.env.mixture}
        own |= {suite.label: suite.budget for suite in self.evaluation.suites}
        return {env: self.rollout.budget.with_own(budget) for env, budget in own.items()}

    def to_yaml(self) -> str:
        """The resolved config as YAML; `agentrl train` reads it back as the same run."""
        return to_yaml(self.model_dump(mode="json"))


PLAYED = ("algorithm", "engine", "reward", "evaluation", "batch_processing", "weights")
"""Sections that only a recipe in which the model plays can use."""


def unused_by(recipe: Component) -> tuple[str, ...]:
    """The sections that a recipe, as configured, does not use: its settings say so in `unused`."""
    own = ("algorithm",) if brings_algorithm(recipe) else ()
    return tuple(dict.fromkeys((*own, *getattr(recipe.settings, "unused", ()))))


def brings_algorithm(recipe: Component) -> bool:
    """Whether a recipe has an algorithm of its own, and does not use the section `algorithm`."""
    return bool(getattr(recipe.settings, "own_algorithm", False))
