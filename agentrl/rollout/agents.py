"""Several agents in one environment: the agents that its infos name, and the player of each.

The environment's infos name the agents, the agent whose turn it is, and each agent's reward
(`agentrl.Env`). In a config, `env.agents` assigns players to agents; the trained policy plays all
others:

    agents:
      black: frozen                                    # the run's first model, unchanged
      red: {name: frozen, refresh: 10}                 # the policy at its last tenth version
      blue: {name: scripted, player: my_game:careful}  # a function of the live environment
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agentrl.errors import ConfigError, EnvError
from agentrl.settings.base import NameText, Settings

SINGLE_AGENT = ("",)
"""The agents of an environment that names none: a single one without a name."""


class PolicyRoute(Settings):
    """The trained policy."""

    name: Literal["policy"] = "policy"


class FrozenRoute(Settings):
    """A model with an engine of its own. Its tokens are never trained on."""

    name: Literal["frozen"] = "frozen"
    model: Path | None = None
    """The folder of a Hugging Face model (such as a checkpoint); by default the model that the run
    started with."""
    refresh: int = Field(0, ge=0)
    """Load the trained weights at every version divisible by this number; 0 means never."""

    @model_validator(mode="after")
    def _trained_weights_fit_the_trained_model(self) -> Self:
        if self.model is not None and self.refresh:
            raise ValueError("refresh loads the weights of the trained model: leave out model")
        return self


class ScriptedRoute(Settings):
    """A function that reads the live environment, as for demonstrations."""

    name: Literal["scripted"] = "scripted"
    player: NameText
    """`package.module:function`, called with (environment, random.Random), returning the next
    action. It reads the environment object itself, so the environment must run locally, not behind
    HTTP."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


AgentRoute = Annotated[
    PolicyRoute | FrozenRoute | ScriptedRoute, Field(discriminator="name"), BeforeValidator(_named)
]
"""The player of an agent: `policy`, `frozen` or `scripted`."""


def agents_in(info: Mapping[str, Any]) -> Sequence[str]:
    """The agents that the info of a reset names; `SINGLE_AGENT` if it names none.

    Raises:
        EnvError: `info["agents"]` is not a list of different names.
    """
    agents = info.get("agents")
    if agents is None:
        return SINGLE_AGENT
    named = isinstance(agents, list | tuple) and all(
        isinstance(agent, str) and agent for agent in agents
    )
    if not named or not agents or len(set(agents)) != len(agents):
        raise EnvError(
            f'reset returned info["agents"] = {agents!r:.200}: write a list of different names'
        )
    return tuple(agents)


def system_prompt_in(info: Mapping[str, Any], agent: str, shared: str) -> str:
    """The agent's own system prompt if the info of a reset has one, else the shared one.

    Raises:
        EnvError: the prompt is not a text.
    """
    prompts = info.get("system_prompts", {})
    prompt = prompts.get(agent, shared) if isinstance(prompts, Mapping) else None
    if not isinstance(prompt, str):
        raise EnvError(
            f'reset returned info["system_prompts"] = {prompts!r:.200}: write a text for each agent'
        )
    return prompt


def next_agent(info: Mapping[str, Any], agents: Sequence[str]) -> str:
    """The agent whose turn it is.

    Raises:
        EnvError: the environment names no agent, or an unknown one.
    """
    if agents is SINGLE_AGENT:
        return ""
    agent = info.get("agent")
    if agent not in agents:
        raise EnvError(
            f'info["agent"] = {agent!r:.80}: it must say who acts next, one of {", ".join(agents)}'
        )
    return str(agent)


def earnings(
    info: Mapping[str, Any], actor: str, reward: float, agents: Sequence[str]
) -> Mapping[str, float]:
    """The reward of each agent in a step: `info["rewards"]`, and for the actor the reward that the
    step returned.

    Raises:
        EnvError: `info["rewards"]` holds something that is not a number, names an unknown agent, or
            gives the actor another reward than the step returned.
    """
    rewards = info.get("rewards")
    if rewards is None:
        return {actor: reward}
    if not isinstance(rewards, Mapping) or not all(
        agent in agents and isinstance(earned, Real) and math.isfinite(earned)
        for agent, earned in rewards.items()
    ):
        raise EnvError(
            f'info["rewards"] = {rewards!r:.200}: write a number for each of {", ".join(agents)}'
        )
    if rewards.get(actor, reward) != reward:
        raise EnvError(
            f'step returned the reward {reward:g} and info["rewards"] = {rewards!r:.200}: the'
            f" reward of a step is that of the agent who acted, {actor}"
        )
    return {actor: reward, **rewards}


def success_of(info: Mapping[str, Any], agent: str) -> bool | None:
    """True if the agent reached its goal: `info["success"]`, one value for all or one per agent;
    None if missing.
    """
    success = info.get("success")
    if isinstance(success, Mapping):
        success = success.get(agent)
    return None if success is None else bool(success)


def check_routes(routed: Mapping[str, object], agents: Sequence[str]) -> None:
    """Check that every agent in `routed` exists, and that at least one agent is left to the policy.

    Raises:
        ConfigError: an agent does not exist, or none is left.
    """
    if unknown := sorted(routed.keys() - set(agents)):
        there = (
            f"its agents are {', '.join(agents)}"
            if agents is not SINGLE_AGENT
            else "it has no agents with names"
        )
        raise ConfigError(
            f"env.agents names {', '.join(unknown)}, which the environment does not have: {there}"
        )
    if len(routed) == len(agents):
        raise ConfigError(
            f"env.agents leaves no agent to the policy: one of {', '.join(agents)} must be `policy`"
        )
