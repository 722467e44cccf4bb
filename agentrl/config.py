"""`RunConfig`: the settings of a run, from a YAML file and `a.b=c` overrides; strict, with the origin of every value.

Each component (engine, trainer, algorithm, reward, cluster) is a plug-in with its own `Config`; a run's config composes
them. All errors are found before anything starts and reported together, with the nearest valid names. `engine: local`
is short for `engine: {name: local}`, in the file and on the command line.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from agentrl import plugins
from agentrl.algorithms.batch_processing import BatchProcessingConfig
from agentrl.credentials import refuse_credentials, without_credentials
from agentrl.errors import ConfigError
from agentrl.gateway.config import GatewayConfig
from agentrl.observe.config import ObserveConfig
from agentrl.placement.device_map import PlacementConfig
from agentrl.plugins import Component
from agentrl.protocols import ActorCritic, Settings, SupportsPredict
from agentrl.rollout.agents import FrozenRoute
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.renderer import RendererConfig
from agentrl.scoring.config import RewardsConfig, name_of, settings_of_part
from agentrl.simulate.world import SimulationConfig
from agentrl.tasks.env_config import ComponentField, EnvConfig, OneEnv, RewardsField
from agentrl.tasks.rows import is_data
from agentrl.tasks.suites import EvaluationSampling, SuiteConfig
from agentrl.weights.publisher import WeightsConfig

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
"""Sections of the additional trainers that some algorithms need; their settings default to the trainer's."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, if PyYAML has it, is ten times as fast
_NAMED = (*COMPONENTS, *HELPERS, "reward", "env", "model", "placement")
RENAMED = {
    "demonstrations": "recipe.demonstrations",
    "preferences": "recipe.preferences",
    "env.mixture.N.max_turns": "env.mixture.N.budget.turns",
    "evaluation.suites.N.max_turns": "evaluation.suites.N.budget.turns",
    "rollout.deadlines.update_weights": "weights.deadline",
    "rollout.max_turns": "rollout.budget.turns",
    "rollout.weight_update": "weights.update",
    "shaping": "batch_processing",
    "simulation.in_turns": "simulation.time_shared",
}
"""Old names of settings, with their present ones; N is the number of an entry."""
GONE = {
    "row_tokens": "a micro-batch is samples end to end, without rows: leave it out (see micro_batch_tokens)",
    "cpu_offload": "write optimizer_offload",
    "gradient_checkpointing": "write activation_checkpointing=full for true, and none for false",
}
"""Settings of trainers that there were once, and what to do instead."""


class ModelConfig(RendererConfig):
    """Which model to train, and how its conversations become tokens."""

    name: str = "tiny"
    """The folder of a Hugging Face model, or the id of a model on the hub (`Qwen/Qwen3-8B`), or `tiny` or `small`,
    which are randomly initialised at the start. An existing folder comes first."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; by default its newest. A run stays with the commit that it began
    with."""


class EvaluationConfig(EvaluationSampling):
    """Evaluation on held-out seeds before, during and after training."""

    tasks: int = Field(200, ge=0)
    """Held-out tasks; 0 turns evaluation off."""
    every: int = Field(0, ge=0)
    """Also evaluate every so many steps; 0: only before and after."""
    engines: int = Field(0, ge=0)
    """Engines of the evaluation's own, as many times those of training: it then runs beside training, pinned to its
    version, and changes nothing of what is trained. 0: the engines of training evaluate."""
    overlap: bool = False
    """Let the engines of training evaluate while training goes on, which comes first. New weights wait for the end of
    the evaluation, because all of it must be of one version. By default, training waits for evaluations."""
    suites: tuple[SuiteConfig, ...] = ()
    """More evaluations, each on a fixed set of tasks of its own (`agentrl/tasks/suites.py`)."""

    @model_validator(mode="after")
    def _is_played_at_one_place(self) -> Self:
        if self.overlap and self.engines:
            raise ValueError(
                f"overlap is for the engines of training, and there are engines={self.engines} for evaluations, which "
                "run beside training anyway: leave one of both out"
            )
        return self

    @field_validator("suites")
    @classmethod
    def _each_has_a_name_of_its_own(cls, suites: tuple[SuiteConfig, ...]) -> tuple[SuiteConfig, ...]:
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
    """Resume from checkpoints that lie outside of the run's folder, by a link, or that belong to another user."""

    @field_validator("best")
    @classmethod
    def _is_measured_on_held_out_tasks(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"eval/((agents|envs)/.+/|[\w-]+/)?(success|reward|pass@\d+)", name):
            raise ValueError(
                "write eval/success or eval/reward, or those of a suite or an agent: eval/SUITE/success, "
                "eval/agents/NAME/success"
            )
        return name


class RunConfig(Settings):
    """All settings of a run."""

    recipe: ComponentField
    """What the run does: `policy_gradient`, `self_play`, `sft`, `dpo`, `iterative_dpo`, `reward_model`, or
    `package.module:function`, with its settings."""
    seed: int = Field(0, ge=0)
    """All randomness derives from it."""
    steps: int = Field(100, gt=0)
    """Training steps."""
    run_dir: Path = Path("runs/run")
    """The folder that the run writes to; by default `runs/` and the config file's name."""
    env: EnvConfig
    model: ModelConfig = ModelConfig()
    tasks: ComponentField
    """Where the tasks come from: `seeded` (a new seed of the environment for each), a file, a folder or a dataset
    (`data.jsonl`, short for `{name: dataset, data: data.jsonl}`), or `package.module:Name`, a `TaskSource` or
    `Curriculum` (agentrl/protocols.py) with its settings."""
    rollout: RolloutConfig = RolloutConfig()
    engine: ComponentField
    trainer: ComponentField
    algorithm: ComponentField
    reference: ComponentField | None = None
    """The trainer that computes the logprobs of the model that the policy is kept near (`algorithm.kl`). Its settings
    default to those of `trainer`."""
    critic: ComponentField | None = None
    """The trainer of the critic, whose values determine the advantages of `algorithm=ppo`. Its settings default to
    those of `trainer`."""
    reward: RewardsField
    """One reward, or a list of parts with weights: `[environment, {name: numeric, weight: 0.5, as: answer}]`."""
    cluster: ComponentField
    weights: WeightsConfig = WeightsConfig()
    """How new weights go from the trainer to the engines."""
    batch_processing: BatchProcessingConfig = BatchProcessingConfig()
    """Processing of a batch's scores before advantages are computed, and of its advantages before the loss."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    placement: PlacementConfig = PlacementConfig()
    """Which devices the engine and the trainer run on."""
    gateway: GatewayConfig = GatewayConfig()
    """Where programs reach the model (`env: agent:...`)."""
    simulation: SimulationConfig = SimulationConfig()
    """The models that replace the engine, the environments and the trainer in `agentrl simulate`."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides `metrics.jsonl`: tensorboard, wandb, mlflow, or your own."""

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
                f"env.mixture: {own[0].called} has algorithm settings of its own, which only the advantages of groups "
                "can have: leave them out with an algorithm that has a critic, or a recipe with its own algorithm"
            )
        if other := [one for one in own if one.algorithm and one.algorithm.name != self.algorithm.name]:
            raise ValueError(f"env.mixture: {other[0].called} names another algorithm: write only settings of it")
        return self

    @model_validator(mode="after")
    def _an_agent_decides_what_an_environment_leaves_to_the_run(self) -> Self:
        if programs := [one.name for one in self.env.mixture if one.is_agent]:
            raise ValueError(f"env.mixture: {programs[0]} is a program, which a run trains alone: write it as env")
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
                f"env is a program, {self.env.name!r}, which keeps its own conversations and runs as it is: leave out "
                f"{' and '.join(wrong)}"
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
                "gateway.network=gateway keeps the programs that the run starts from the network, and agents elsewhere "
                "(agent:remote) are started by others: leave it out"
            )
        if env.isolation != "process" and env.python is None:
            raise ValueError(
                f"gateway.network=gateway needs a process for each episode, and {env.name!r} runs in threads: write "
                "env.isolation=process"
            )

    @model_validator(mode="after")
    def _members_have_others_to_be_compared_with(self) -> Self:
        compares = getattr(self.algorithm.factory, "compares_members", False) and not brings_algorithm(self.recipe)
        sizes = {one.group_size or self.rollout.group_size for one in self.env.mixture} or {self.rollout.group_size}
        if 1 in sizes and compares:
            raise ValueError(
                f"rollout.group_size is 1, and the algorithm {self.algorithm.name!r} compares the members of a group: "
                "all advantages would be 0, and nothing would be learned. Set rollout.group_size to 2 or more (8 is "
                "usual), or choose algorithm=ppo, whose critic needs no group"
            )
        return self

    @model_validator(mode="after")
    def _a_critics_advantages_are_its_own(self) -> Self:
        has_critic = hasattr(self.algorithm.factory, "estimate") and not brings_algorithm(self.recipe)
        if self.batch_processing.normalize != "group" and has_critic:
            raise ValueError(
                f"batch_processing.normalize={self.batch_processing.normalize} normalises what is found by comparing "
                f"the members of groups, and {self.algorithm.name!r} asks a critic: leave it out (ppo has "
                "algorithm.whiten=true)"
            )
        return self

    @model_validator(mode="after")
    def _parts_of_episodes_can_be_trained_on(self) -> Self:
        if self.rollout.staleness_rule != "segment":
            return self
        algorithm, own = self.algorithm.make(), brings_algorithm(self.recipe)
        if own or not (isinstance(algorithm, ActorCritic) and algorithm.bootstraps):
            asks_none = f"recipe {self.recipe.name!r}" if own else f"algorithm {self.algorithm.name!r}"
            raise ValueError(
                "rollout.staleness_rule=segment trains on parts of episodes that go on, and what follows them is worth "
                f"what a critic says: the {asks_none}, as configured, asks none. Choose "
                "algorithm=ppo or algorithm=turn_ppo, with algorithm.truncated=bootstrap, or another staleness_rule"
            )
        rewards = [self.reward, *(one.reward for one in self.env.mixture if one.reward is not None)]
        parts = [part for reward in rewards for part in reward.parts]
        if compared := [name_of(part) for part in parts if hasattr(part.factory, "score_group")]:
            raise ValueError(
                f"rollout.staleness_rule=segment trains on parts of groups, and the reward {compared[0]!r} compares "
                "whole ones: leave it out, or choose another staleness_rule"
            )
        if self.rollout.filter_zero_variance or self.batch_processing.keep_variance < 1:
            raise ValueError(
                "rollout.staleness_rule=segment trains on parts of groups before their rewards are known, so these "
                "cannot be filtered by them: leave out rollout.filter_zero_variance and batch_processing.keep_variance"
            )
        return self

    @model_validator(mode="after")
    def _a_resumed_run_meets_the_same_opponents(self) -> Self:
        for agent, route in self.env.agents.items():
            if isinstance(route, FrozenRoute) and route.refresh and self.checkpoint.every % route.refresh:
                raise ValueError(
                    f"env.agents.{agent}.refresh ({route.refresh}) must divide checkpoint.every "
                    f"({self.checkpoint.every}), or a resumed run would meet other opponents than an uninterrupted one"
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
            raise ValueError(f"checkpoint.best names the suite {of!r}; there is {', '.join(suites) or 'none'}")
        else:
            section, measured, tasks = "evaluation.every", self.evaluation.every, self.evaluation.tasks
        if not (tasks and measured and measured % every == 0):
            raise ValueError(
                f"checkpoint.best needs evaluations of steps that are saved: checkpoint.every ({every}) must divide "
                f"{section} ({measured}), and evaluation.tasks ({tasks}) must be more than 0"
            )
        return self

    @model_validator(mode="after")
    def _suites_have_an_environment(self) -> Self:
        if self.env.mixture and (none := [suite.name for suite in self.evaluation.suites if suite.env is None]):
            raise ValueError(
                f"evaluation.suites: the run has several environments, so name that of {none[0]} in its env"
            )
        return self

    @property
    def envs(self) -> Mapping[str, OneEnv]:
        """All environments by their names in the run: those that are trained on, and those of suites."""
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
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def brings_algorithm(recipe: Component) -> bool:
    """Whether a recipe has an algorithm of its own, and does not use the section `algorithm`."""
    return bool(getattr(recipe.settings, "own_algorithm", False))


_MIXTURE, _SUITES = _LISTS = (("env", "mixture"), ("evaluation", "suites"))
"""Sections that are lists of sections, of which some are components."""
_DEFAULT_NAMES = {
    "reward": "environment",
    "engine": "local",
    "trainer": "local",
    "algorithm": "grpo",
    "cluster": "local",
    "recipe": "policy_gradient",
    "tasks": "seeded",
}


def _is_named(path: tuple[str, ...]) -> bool:
    """Whether a name alone may stand for the section at `path`."""
    if len(path) == 1:
        return path[0] in _NAMED
    if path[:2] == _SUITES:
        return (len(path) == 4 and path[3] == "reward") or _is_part(path)
    if path[:2] == _MIXTURE:
        return len(path) == 3 or (len(path) == 4 and path[3] in ("tasks", "reward", "algorithm")) or _is_part(path)
    return path == ("rollout", "context") or path[:-1] == ("env", "agents") or _is_part(path)


def _as_listed(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The path under which the items of a list are kept by their numbers, if a list at `path` is of sections."""
    if path in (("env",), _MIXTURE):
        return _MIXTURE
    return path if path in (("reward",), _SUITES) or (path[:2] in _LISTS and path[3:] == ("reward",)) else None


@dataclass(slots=True)
class _Source:
    """A nested mapping under construction, and where each of its leaves was written."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def set(self, path: Sequence[str], value: Any, origin: str) -> None:
        refuse_credentials(value, f"{'.'.join(path)} ({origin})")
        if path == ("reward",) and isinstance(value, list | str):
            self._forget("reward", keep_one=isinstance(value, str))
        listed = _as_listed(tuple(path))
        if listed is not None and isinstance(value, list) and value:
            path, value = listed, {str(number): part for number, part in enumerate(value)}
        if isinstance(value, str) and path[-1] == "tasks" and is_data(value):
            value = {"name": "dataset", "data": value}
        if isinstance(value, str) and _is_named(tuple(path)):
            path = (*path, "name")
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                self.set((*path, str(key)), inner, origin)
            return
        node = self.values
        for i, key in enumerate(path[:-1]):
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{'.'.join(path)} ({origin}): {'.'.join(path[: i + 1])} is {inner!r}, not a section")
            node = inner
        node[path[-1]] = value
        self.origins[".".join(path)] = origin

    def _forget(self, section: str, *, keep_one: bool) -> None:
        """Remove the old settings of a section that is written again, unless only one component gets a new name."""
        if keep_one and "0" not in self.values.get(section, {}):
            return
        self.values.pop(section, None)
        self.origins = {key: origin for key, origin in self.origins.items() if key.split(".")[0] != section}


def _is_part(path: Sequence[str]) -> bool:
    """Whether this is the path of a part of a reward: `reward.1`, `env.mixture.0.reward.1`."""
    return len(path) in (2, 5) and path[-2] == "reward" and path[-1].isdigit()


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config, and the origin of each value that is not a default."""

    config: RunConfig
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every setting."""
        for key, value in _leaves(self.config.model_dump(mode="json")):
            yield key, value, self.origins.get(key) or "default"


def load_config(path: Path, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Read a YAML file, apply `a.b=c` overrides, validate everything.

    Raises:
        ConfigError: something is wrong. Names every problem, where it was written, and the nearest valid name.
    """
    source = _Source()
    source.set(("run_dir",), f"runs/{path.stem}", "the config's file name")
    _read_yaml(path, source)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            shown = without_credentials(override)
            raise ConfigError(f"cannot read the override {shown!r}: write key=value, such as trainer.lr=1e-3")
        source.set(tuple(key.split(".")), _scalar(text), "command line")
    _look_beside(path, source)
    return validate_config(source.values, source.origins)


def _look_beside(path: Path, source: _Source) -> None:
    """Find what belongs to a program (`agent:...`) beside the config file too, after all other places.

    The folder becomes a setting: a resumed run reads its own config file, which lies elsewhere.
    """
    env = source.values.get("env")
    if not isinstance(env, dict) or not str(env.get("name")).startswith("agent:"):
        return
    if not env.get("folder"):
        source.set(("env", "folder"), str(path.absolute().parent), "the config's folder")
    if (folder := str(env["folder"])) not in sys.path:
        sys.path.append(folder)


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a string
        except ValueError:
            return value
    return value


def _read_yaml(path: Path, source: _Source) -> None:
    try:
        root = yaml.compose(path.read_text(), Loader=_LOADER)
    except FileNotFoundError:
        there = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(f"no config file {str(path)!r}.{plugins.nearest(str(path), there)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} must be a mapping of settings, such as `steps: 100`")
    _read_node(root, (), path, source)


def _read_node(node: yaml.Node, keys: tuple[str, ...], path: Path, source: _Source) -> None:
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, inner in node.value:
            _read_node(inner, (*keys, str(key.value)), path, source)
        return
    listed = _as_listed(keys)
    if listed is not None and isinstance(node, yaml.SequenceNode) and node.value:
        for number, part in enumerate(node.value):
            _read_node(part, (*listed, str(number)), path, source)
        return
    value: Any = yaml.SafeLoader("").construct_object(node, deep=True)
    bare = (
        isinstance(value, str) and isinstance(node, yaml.ScalarNode) and node.style is None
    )  # a quoted scalar stays a string
    source.set(keys, _scalar(value) if bare else value, f"{path}:{node.start_mark.line + 1}")


def validate_config(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> LoadedConfig:
    """Validate nested settings.

    Raises:
        ConfigError: something is wrong. Names every problem.
    """
    origins = origins or {}
    refuse_credentials(values, "")
    sections = dict(values)
    problems: list[str] = []
    for section in (*COMPONENTS, "reward"):
        raw = sections.get(section, {})
        try:
            sections[section] = (
                _rewards(raw, origins)
                if section == "reward"
                else _component(section, COMPONENTS[section], raw, origins)
            )
        except ConfigError as error:
            problems.append(str(error))
            sections.pop(section, None)
    for at in _LISTS:
        try:
            sections[at[0]] = _listed(sections.get(at[0], {}), at, sections.get("algorithm"), origins)
        except ConfigError as error:
            problems.append(str(error))
            del sections[at[0]]
    if not problems:
        try:
            sections |= {helper: _helper(helper, sections, values, origins) for helper in HELPERS}
        except ConfigError as error:
            problems.append(str(error))
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as error:
        failed = {problem.split(":")[0].split(".")[0] for problem in problems}
        problems += [
            line
            for line, at in _explain(RunConfig, error, (), origins)
            if at not in failed or at not in (*COMPONENTS, "reward", "env", "evaluation")
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    for env in config.envs.values():
        if not env.foreign:
            plugins.load("envs", env.name)
    for tracker in config.trackers:
        plugins.load("trackers", tracker)
    return LoadedConfig(config, origins)


def _component(section: str, kind: str, raw: Any, origins: Mapping[str, str]) -> Component:
    raw = {"name": raw} if isinstance(raw, str) else dict(raw or {})
    name = raw.pop("name", _DEFAULT_NAMES.get(section.rpartition(".")[2]))
    if name is None:
        raise ConfigError(f"{section}.name: missing{_at(origins, section)}. {_installed(kind)}")
    try:
        factory = plugins.load(kind, name)
        model = settings_of_part(name, factory) if kind == "rewards" else plugins.settings_of(factory)
    except ConfigError as error:
        raise ConfigError(f"{section}.name: {error}{_at(origins, f'{section}.name')}") from error
    try:
        return Component(name, factory, model.model_validate(raw))
    except ValidationError as error:
        lines = (line for line, _ in _explain(model, error, tuple(section.split(".")), origins))
        raise ConfigError("\n".join(lines)) from error


def _helper(
    section: str, made: Mapping[str, Any], values: Mapping[str, Any], origins: Mapping[str, str]
) -> Component | None:
    """The section `reference` or `critic`, or `None` if the algorithm does not use it."""
    chosen: Component = made["algorithm"]
    algorithm = chosen.make()
    users = (algorithm, made["recipe"].settings)
    needed = (
        isinstance(algorithm, ActorCritic)
        if section == "critic"
        else any(getattr(user, "uses_reference", False) for user in users)
    )
    own = values.get(section) or {}
    if not needed or brings_algorithm(made["recipe"]):
        if own:
            way_out = "algorithm=ppo" if section == "critic" else "algorithm.kl=0.01"
            raise ConfigError(
                f"{section}{_at(origins, section)}: the algorithm {chosen.name!r}, as configured, uses none; "
                f"set {way_out}, or leave the section out"
            )
        return None
    trainer: Component = made["trainer"]
    shared = {} if own.get("name", trainer.name) != trainer.name else trainer.settings.model_dump(exclude_unset=True)
    shared.pop("lora", None)  # a reference is not trained, and a critic must train its head
    helper = _component(section, "trainers", {"name": trainer.name, **shared, **own}, origins)
    if not (isinstance(helper.factory, type) and issubclass(helper.factory, SupportsPredict)):
        raise ConfigError(
            f"{section}.name: the trainer {helper.name!r} has no method `predict`, which a {section} needs"
        )
    if getattr(helper.settings, "lora", None) is not None:
        raise ConfigError(f"{section}.lora{_at(origins, f'{section}.lora')}: a {section} has no adapters; leave it out")
    return helper


def component_like(other: Component, section: str, kind: str, own: Mapping[str, Any]) -> Component:
    """The component that a section configures, whose settings default to those of `other` if it has the same name.

    Raises:
        ConfigError: it does not exist, or a setting is wrong.
    """
    same = own.get("name", other.name) == other.name
    shared = other.settings.model_dump(exclude_unset=True) if same else {}
    return _component(section, kind, {"name": other.name, **shared, **own}, {})


def _listed(raw: Any, at: tuple[str, str], algorithm: Component | None, origins: Mapping[str, str]) -> Any:
    """A section with a list of sections (`_LISTS`), with the components in them made."""
    section, name = at
    if not isinstance(raw, dict) or not isinstance(raw.get(name), dict):
        return raw
    entries, problems = [], []
    for number, entry in raw[name].items():
        made, path = dict(entry), f"{section}.{name}.{number}"
        try:
            if isinstance(entry.get("tasks"), dict):
                made["tasks"] = _component(f"{path}.tasks", "task_sources", entry["tasks"], origins)
            if entry.get("reward") is not None:
                made["reward"] = _rewards(entry["reward"], origins, f"{path}.reward")
            if made.pop("algorithm", None) is not None and algorithm is not None:
                shared = algorithm.settings.model_dump(exclude_unset=True)
                settings = {"name": algorithm.name, **shared, **entry["algorithm"]}
                made["algorithm"] = _component(f"{path}.algorithm", "algorithms", settings, origins)
        except ConfigError as error:
            problems.append(str(error))
        entries.append(made)
    if problems:
        raise ConfigError("\n".join(problems))
    return {**raw, name: entries}


def _rewards(raw: Any, origins: Mapping[str, str], section: str = "reward") -> RewardsConfig:
    """Read the section `reward`: a mapping of settings, or of part numbers to the parts' settings."""
    numbers = [key for key in raw if key.isdigit()] if isinstance(raw, dict) else []
    if not numbers:
        if isinstance(raw, list):
            raise ConfigError(f"{section}: the list is empty{_at(origins, section)}: name at least one part")
        return RewardsConfig((_component(section, "rewards", {"name": "environment"} | dict(raw), origins),), False)
    wrong = [key for key in raw if key not in map(str, range(len(raw)))]
    if wrong:
        parts = ", ".join(f"{number} is {raw[number].get('name')}" for number in sorted(numbers) if number not in wrong)
        raise ConfigError(
            f"{section}.{wrong[0]}{_at(origins, f'{section}.{wrong[0]}')}: reward is a list here, so name the part, "
            f"as in {section}.0.weight=0.5; there is {parts or 'no part 0'}"
        )
    found: list[Component] = []
    problems: list[str] = []
    for number in map(str, range(len(raw))):
        try:
            found.append(_component(f"{section}.{number}", "rewards", raw[number], origins))
        except ConfigError as error:
            problems.append(str(error))
    names = [name_of(part) for part in found]
    if twice := {name for name in names if names.count(name) > 1}:
        numbered = ", ".join(f"{section}.{number}" for number, name in enumerate(names) if name in twice)
        problems.append(f"{numbered}: more than one part is called {min(twice)!r}; give each a name with `as: NAME`")
    if problems:
        raise ConfigError("\n".join(problems))
    return RewardsConfig(tuple(found), True)


def _installed(kind: str) -> str:
    return f"Installed: {', '.join(plugin.name for plugin in plugins.installed(kind))}"


def _explain(
    model: type[BaseModel], error: ValidationError, prefix: tuple[str, ...], origins: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(one line per problem that also tells the remedy, the problem's top-level section)."""
    for problem in error.errors():
        keys, known = _locate(model, [str(part) for part in problem["loc"]])
        path = ".".join((*prefix, *keys))
        where = _at(origins, path)
        if problem["type"] == "extra_forbidden":
            listed = ", ".join(known)
            line = f"{path}: no such setting{where}.{plugins.nearest(keys[-1], known)} Known here: {listed}"
            if (new := _renamed(path)) is not None:
                line = f"{path}: renamed to {new}{where}: write it there"
            elif keys[-1] in GONE:
                line = f"{path}: no such setting any more{where}: {GONE[keys[-1]]}"
        else:
            given = "" if problem["type"] == "missing" or not keys else f", got {problem['input']!r:.80}"
            line = f"{path}: {problem['msg']}{given}{where}".removeprefix(": ").replace("Value error, ", "", 1)
        yield line, next(iter((*prefix, *keys)), "")


def _renamed(path: str) -> str | None:
    """The present name of a setting that once had another; None if it had none."""
    number = next((key for key in path.split(".") if key.isdigit()), "N")
    new = RENAMED.get(".".join("N" if key.isdigit() else key for key in path.split(".")))
    return None if new is None else new.replace(".N.", f".{number}.")


def _locate(model: type[BaseModel], loc: Sequence[str]) -> tuple[list[str], list[str]]:
    """The path of a problem as it is written, without the tags of unions, and the field names of its section."""
    sections, keys = [model], []
    known: list[str] = []
    for key in loc:
        fields = [section.model_fields[key] for section in sections if key in section.model_fields]
        tagged = [section for section in sections if key in _tags(section)]
        known = list(dict.fromkeys(name for section in sections for name in section.model_fields))
        if fields or not tagged:
            keys.append(key)
        # A key that is neither a field nor a tag is a key of a mapping, whose value is the section.
        sections = [inner for f in fields for inner in _models(f.annotation)] if fields else tagged or sections
    return keys, known


def _tags(section: type[BaseModel]) -> set[Any]:
    """The literals that tell a section from the others of its union."""
    return {field.default for field in section.model_fields.values() if get_origin(field.annotation) is Literal}


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections in a type: the type itself, or those among its arguments."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _at(origins: Mapping[str, str], path: str) -> str:
    origin = origins.get(path) or next((o for key, o in origins.items() if key.startswith(f"{path}.")), None)
    return f" ({origin})" if origin else ""


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        yield from _leaves({str(number): inner for number, inner in enumerate(value)}, prefix)
    else:
        yield prefix, value
