"""`RunConfig`: the settings of a run.

Each component (engine, trainer, algorithm, reward, cluster) is a plug-in with its own `Config`; a
run's config composes them. `compatibility.py` has the rules between sections, `loading.py` reads a
config.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.conversation.config import RendererConfig
from agentrl.gateway.config import GatewayConfig
from agentrl.observe.config import ObserveConfig
from agentrl.placement.config import PlacementConfig
from agentrl.plugins import Component
from agentrl.protocols.algorithm import Algorithm
from agentrl.protocols.recipe import RecipeOffers
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.scoring.config import RewardsConfig
from agentrl.settings.base import NameText, PathText, Settings
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
OTHER_MODEL = (
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "vocab_size",
)
"""Entries that make the folder another model, or that other settings decide."""
HELPERS = ("reference", "critic")
"""Sections of the additional trainers that some algorithms need; their settings default to the
trainer's.
"""


class ModelConfig(RendererConfig):
    """The model to train, and the renderer of its conversations."""

    name: PathText = "tiny"
    """The folder of a Hugging Face model, or the id of a model on the hub (`Qwen/Qwen3-8B`), or
    `tiny`, `small` or `tiny_vision` (which sees), which are randomly initialised at the start. An
    existing folder comes first.
    """
    revision: NameText | None = None
    """Branch, tag or commit of a model on the hub; by default its newest. A run stays with the
    commit that it began with."""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """Entries of the model's config.json that are replaced for engines, trainers and checkpoints
    alike, such as YaRN for longer contexts: `{rope_parameters: {rope_type: yarn, factor: 4.0,
    original_max_position_embeddings: 32768}}`. Mappings are merged."""

    @field_validator("hf_overrides")
    @classmethod
    def _describe_the_same_model(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        if others := [name for name in OTHER_MODEL if name in overrides]:
            raise ValueError(
                f"{others[0]} would make it another model: name another one in model.name, or set"
                " the data type by trainer.dtype and engine.dtype"
            )
        return overrides


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
    """The checkpoints that a killed run resumes from: their times, and the number that is kept."""

    every: int = Field(10, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, gt=0)
    """Latest checkpoints to keep."""
    best: str | None = None
    """Also keep the checkpoints with the largest values of this metric, such as `eval/success`."""
    keep_best: int = Field(1, gt=0)
    """Best checkpoints to keep."""
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
    """The work of the run: `policy_gradient`, `self_play`, `sft`, `dpo`, `iterative_dpo`,
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
    """The source of the tasks: `seeded` (a new seed of the environment for each), a file, a folder
    or a dataset (`data.jsonl`, short for `{name: dataset, data: data.jsonl}`), or
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
    """The way of new weights from the trainer to the engines."""
    batch_processing: BatchProcessingConfig = BatchProcessingConfig()
    """Processing of a batch's scores before advantages are computed, and of its advantages before
    the loss.
    """
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    placement: PlacementConfig = PlacementConfig()
    """The devices of the engine and the trainer."""
    gateway: GatewayConfig = GatewayConfig()
    """The address at which programs reach the model (`env: agent:...`)."""
    simulation: SimulationConfig = SimulationConfig()
    """The models that replace the engine, the environments and the trainer in `agentrl simulate`.
    """
    trackers: tuple[ComponentField, ...]
    """The receivers of metrics besides `metrics.jsonl`: a list such as `[tensorboard, {name: wandb,
    project: lakes}]`; by default `[tensorboard]`."""

    def trained_with(self) -> Iterator[tuple[str, Algorithm]]:
        """The algorithms that learn from what the run plays, with what they are called in the
        config.
        """
        if not brings_algorithm(self.recipe):
            yield f"algorithm={self.algorithm.name}", self.algorithm.make()
        elif made := RecipeOffers.of(self.recipe.settings).learns_by:
            yield f"recipe={self.recipe.name}", made
        for one in self.env.mixture:
            if one.algorithm is not None:
                yield f"the algorithm of {one.run_name} in env.mixture", one.algorithm.make()

    @property
    def envs(self) -> Mapping[str, OneEnv]:
        """All environments by their names in the run: those that are trained on, and those of
        suites.
        """
        suites = {suite.label: suite.env or self.env for suite in self.evaluation.suites}
        return {**self.env.all, **suites}

    def rewards_by_env(self) -> dict[str, RewardsConfig]:
        """The rewards of environments that have their own."""
        own = {one.run_name: one.reward for one in self.env.mixture}
        own |= {suite.label: suite.reward for suite in self.evaluation.suites}
        return {env: reward for env, reward in own.items() if reward is not None}

    def own_max_tokens(self) -> dict[str, int]:
        """The longest answer in environments that have their own `max_tokens`."""
        own = {one.run_name: one.max_tokens for one in self.env.mixture}
        own |= {suite.label: suite.max_tokens for suite in self.evaluation.suites}
        return {env: limit for env, limit in own.items() if limit is not None}

    def own_budgets(self) -> dict[str, Budget]:
        """The budget of an episode in the environments of a mixture, and in those of suites."""
        own = {one.run_name: one.budget for one in self.env.mixture}
        own |= {suite.label: suite.budget for suite in self.evaluation.suites}
        return {env: self.rollout.budget.with_own(budget) for env, budget in own.items()}

    def to_yaml(self) -> str:
        """The resolved config as YAML; `agentrl train` reads it back as the same run."""
        return to_yaml(self.model_dump(mode="json"))


PLAYED = ("algorithm", "engine", "reward", "evaluation", "batch_processing", "weights")
"""Sections that only a recipe in which the model plays can use."""


def unused_by(recipe: Component) -> tuple[str, ...]:
    """The sections that a recipe, as configured, does not use."""
    offers = RecipeOffers.of(recipe.settings)
    own = ("algorithm",) if offers.own_algorithm else ()
    return tuple(dict.fromkeys((*own, *offers.unused)))


def brings_algorithm(recipe: Component) -> bool:
    """True if a recipe has an algorithm of its own, and does not use the section `algorithm`."""
    return RecipeOffers.of(recipe.settings).own_algorithm
