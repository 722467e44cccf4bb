"""`EnvConfig`: the section `env` of a config, one environment or a list of them.

env: frozen_lake

env:
  - {name: sokoban, weight: 2, budget: {turns: 40}}
  - {name: qa, tasks: questions.jsonl, reward: math, group_size: 16}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    field_validator,
    model_validator,
)

from agentrl.errors import ConfigError
from agentrl.hosting.wrappers import wrapper
from agentrl.plugins import Component
from agentrl.protocols.env import Isolation
from agentrl.rollout.agents import AgentRoute
from agentrl.rollout.budget import OwnBudget
from agentrl.sandbox.config import AgentPlace
from agentrl.scoring.config import RewardsConfig
from agentrl.settings.base import NameText, Settings

ComponentField = Annotated[InstanceOf[Component], PlainSerializer(Component.dump)]
RewardsField = Annotated[InstanceOf[RewardsConfig], PlainSerializer(RewardsConfig.dump)]


def _wrapper(raw: Any) -> Component:
    try:
        return wrapper(raw)
    except ConfigError as error:
        raise ValueError(str(error)) from error


WrapperField = Annotated[ComponentField, BeforeValidator(_wrapper)]


class OneEnv(Settings):
    """One environment, and where it runs."""

    name: str
    """A registered name or `package.module:Name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to every `reset`."""
    isolation: Isolation | None = None
    """Its isolation: `inline` (on the event loop), `thread` or `process`; by default as the
    environment declares."""
    system_prompt: str | None = None
    """The system message, instead of the environment's own."""
    rules: str = ""
    """Text added at the end of the system message, such as the rules of a game that does not tell
    them.
    """
    wrappers: tuple[WrapperField, ...] = ()
    """Wrappers around it, each around those before: `time_limit`, `action_format`, or your own."""
    python: NameText | None = None
    """The Python that runs it, each episode in its own process: a path, or a name on the PATH; by
    default this one.
    """
    requires: tuple[NameText, ...] = ()
    """Packages for its own interpreter, in pip's syntax; installed once, into the cache folder."""

    @model_validator(mode="after")
    def _check_isolation(self) -> Self:
        if self.foreign and self.isolation not in (None, "process"):
            raise ValueError(
                "with python or requires it runs in a process; leave out isolation, which is"
                f" {self.isolation!r}"
            )
        return self

    @property
    def all_wrappers(self) -> tuple[Component, ...]:
        """Its wrappers; the innermost one says what `system_prompt` and `rules` add, if they do."""
        said = {"system_prompt": self.system_prompt} if self.system_prompt is not None else {}
        said |= {"rules": self.rules} if self.rules else {}
        return (
            (wrapper({"name": "instructions", **said}), *self.wrappers) if said else self.wrappers
        )

    @property
    def is_agent(self) -> bool:
        """True if it is a program that calls the model (`agent:...`)."""
        return self.name.startswith("agent:")

    @property
    def foreign(self) -> bool:
        """True if it runs in another interpreter; only that one can check whether the environment
        exists.
        """
        return self.python is not None or bool(self.requires)


class MixedEnv(OneEnv):
    """An environment of a mixture. What it leaves out is as the rest of the config says."""

    label: str | None = Field(None, pattern=r"^[^/\s]+$")
    """Its name in metrics and in the ledger, by default `name`. Two entries of one environment need
    different ones.
    """
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Its share of what is trained on, relative to the other weights."""
    tasks: ComponentField | None = None
    """The source of its tasks, as the section `tasks`, which is the default."""
    reward: RewardsField | None = None
    """Its reward, as the section `reward`, which it is by default."""
    algorithm: ComponentField | None = None
    """Settings of the run's algorithm that differ for the advantages of its groups. The loss is the
    same for all, and settings that only change the loss are refused."""
    group_size: int | None = Field(None, gt=0)
    """As `rollout.group_size`."""
    budget: OwnBudget = OwnBudget()
    """As `rollout.budget`, of which it may set some."""
    max_tokens: int | None = Field(None, gt=0)
    """As `rollout.sampling.max_tokens`."""
    max_failed_tasks: int | None = Field(None, ge=0)
    """As `rollout.max_failed_tasks`: each environment has a budget of its own."""

    @property
    def run_name(self) -> str:
        """Its name in the run."""
        return self.label or self.name


class EnvConfig(OneEnv):
    """The environment to train on. A list of environments stands for `mixture`."""

    name: str = ""
    """A registered name or `package.module:Name`."""
    agents: dict[str, AgentRoute] = Field(default_factory=dict)
    """The player of each agent of a multi-agent environment: `policy`, `frozen` or `scripted`
    (`agentrl/rollout/agents.py`); by default the policy plays all."""
    agent: AgentPlace = AgentPlace()
    """Of a program (`agent:...`): where it runs, and the sandboxes in which it does."""
    mixture: tuple[MixedEnv, ...] = ()
    """Several environments in one run, instead of `name`."""
    folder: Path | None = None
    """Of a program (`agent:...`): where its functions are found too, after all other places; by
    default the folder of the config file. Environments do not use it."""
    weights_count: Literal["groups", "tokens"] = "groups"
    """The total that the weights of a mixture divide: trained groups, or the sampled tokens in
    them."""
    exhausted: Literal["end", "others"] = "end"
    """The consequence when an environment of a mixture has spent its `max_failed_tasks`: the run
    ends, or it gets no more tasks and the others share its weight."""

    @field_validator("mixture")
    @classmethod
    def _check_names(cls, mixture: tuple[MixedEnv, ...]) -> tuple[MixedEnv, ...]:
        names = [one.run_name for one in mixture]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"more than one environment is called {min(twice)!r}: give each a `label`"
            )
        return mixture

    @model_validator(mode="after")
    def _check_one_or_several(self) -> Self:
        if bool(self.name) == bool(self.mixture):
            raise ValueError("write the name of one environment, or a list of several")
        own = {**dict.fromkeys(OneEnv.model_fields), "agents": None}
        if self.mixture and (given := [name for name in own if getattr(self, name)]):
            raise ValueError(
                f"{given[0]} belongs to one environment: write it in the entries of env.mixture"
            )
        return self

    @property
    def all(self) -> Mapping[str, OneEnv]:
        """The environments of the run, by their names in it."""
        return {one.run_name: one for one in self.mixture} or {self.name: self}
