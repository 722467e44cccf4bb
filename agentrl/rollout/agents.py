"""Several agents in one environment: what it says about them, and who plays each.

The environment's infos name the agents, whose turn it is, and what each has earned (`agentrl.protocols.Env`). In a
config, `env.agents` says who plays which agent; the policy that is trained plays the others:

    agents:
      black: frozen                                      # the model that the run started with, as it was then
      red: {name: frozen, refresh: 10}                   # the policy, as it was at the last version divisible by 10
      blue: {name: scripted, player: my_game:careful}    # a function of the live environment
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Settings

ALONE = ("",)
"""The agents of an environment that names none."""


class PolicyRoute(Settings):
    """The policy that is trained."""

    name: Literal["policy"] = "policy"


class FrozenRoute(Settings):
    """A model with an engine of its own. Its tokens are never trained on."""

    name: Literal["frozen"] = "frozen"
    model: Path | None = None
    """The folder of a Hugging Face model (a checkpoint is one); by default the model that the run started with."""
    refresh: int = Field(0, ge=0)
    """Take up the trained weights at every version divisible by this number; 0 never does."""

    @model_validator(mode="after")
    def _trained_weights_fit_the_trained_model(self) -> Self:
        if self.model is not None and self.refresh:
            raise ValueError("refresh takes up the weights of the model that is trained: leave out model")
        return self


class ScriptedRoute(Settings):
    """A function that looks at the live environment, as for demonstrations."""

    name: Literal["scripted"] = "scripted"
    player: str
    """`package.module:function`, called with (environment, random.Random), answering the next action. It looks at the
    environment itself, so that has to run here, and not behind HTTP."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


AgentRoute = Annotated[PolicyRoute | FrozenRoute | ScriptedRoute, Field(discriminator="name"), BeforeValidator(_named)]
"""Who plays an agent: `policy`, `frozen` or `scripted`."""


def agents_in(info: Mapping[str, Any]) -> Sequence[str]:
    """The agents that the info of a reset names; `ALONE` where it names none.

    Raises:
        EnvError: they are no names.
    """
    agents = info.get("agents")
    if agents is None:
        return ALONE
    named = isinstance(agents, list | tuple) and all(isinstance(agent, str) and agent for agent in agents)
    if not named or not agents or len(set(agents)) != len(agents):
        raise EnvError(f'reset returned info["agents"] = {agents!r:.200}: write a list of different names')
    return tuple(agents)


def system_prompt_in(info: Mapping[str, Any], agent: str, shared: str) -> str:
    """The agent's own system prompt, where the info of a reset has one, else the one that all share.

    Raises:
        EnvError: it is no text.
    """
    prompts = info.get("system_prompts", {})
    prompt = prompts.get(agent, shared) if isinstance(prompts, Mapping) else None
    if not isinstance(prompt, str):
        raise EnvError(f'reset returned info["system_prompts"] = {prompts!r:.200}: write a text for each agent')
    return prompt


def next_agent(info: Mapping[str, Any], agents: Sequence[str]) -> str:
    """Whose turn it is.

    Raises:
        EnvError: the environment does not say, or names somebody else.
    """
    if agents is ALONE:
        return ""
    agent = info.get("agent")
    if agent not in agents:
        raise EnvError(f'info["agent"] = {agent!r:.80}: it must say who acts next, one of {", ".join(agents)}')
    return str(agent)


def earnings(info: Mapping[str, Any], actor: str, reward: float, agents: Sequence[str]) -> Mapping[str, float]:
    """What each agent earned in a step: `info["rewards"]`, and for the actor what the step returned.

    Raises:
        EnvError: `info["rewards"]` holds something that is not a number, names an unknown agent, or gives the actor
            another reward than the step returned.
    """
    rewards = info.get("rewards")
    if rewards is None:
        return {actor: reward}
    if not isinstance(rewards, Mapping) or not all(_is_pay(agent, paid, agents) for agent, paid in rewards.items()):
        raise EnvError(f'info["rewards"] = {rewards!r:.200}: write a number for each of {", ".join(agents)}')
    if rewards.get(actor, reward) != reward:
        raise EnvError(
            f'step returned the reward {reward:g} and info["rewards"] = {rewards!r:.200}: the reward of a step is that '
            f"of the agent who acted, {actor}"
        )
    return {actor: reward, **rewards}


def success_of(info: Mapping[str, Any], agent: str) -> bool | None:
    """Whether the agent has reached its goal, where the info says so: for all by one word, or by agent."""
    success = info.get("success")
    if isinstance(success, Mapping):
        success = success.get(agent)
    return None if success is None else bool(success)


def check_routes(routed: Mapping[str, object], agents: Sequence[str]) -> None:
    """Nothing, where each agent that is `routed` to another player plays, and the policy has one to play.

    Raises:
        ConfigError: there is no such agent, or none is left.
    """
    if unknown := sorted(routed.keys() - set(agents)):
        there = f"its agents are {', '.join(agents)}" if agents is not ALONE else "it has no agents with names"
        raise ConfigError(f"env.agents names {', '.join(unknown)}, whom the environment does not have: {there}")
    if len(routed) == len(agents):
        raise ConfigError(f"env.agents leaves no agent to the policy: one of {', '.join(agents)} has to be `policy`")


def _is_pay(agent: object, paid: object, agents: Sequence[str]) -> bool:
    return isinstance(paid, Real) and math.isfinite(paid) and agent in agents
