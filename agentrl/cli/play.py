"""`agentrl play`: a person or a scripted player in the model's place, at a terminal."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from agentrl.errors import ConfigError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.observations import images_taken
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import ScriptedPlayer
from agentrl.rollout.agents import SINGLE_AGENT, agents_in, earnings, next_agent, system_prompt_in
from agentrl.rollout.seeds import derive_seed
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message, ToolCall


async def play(
    name: str,
    console: Console,
    *,
    seed: int,
    options: Mapping[str, Any],
    player: ScriptedPlayer | None,
    max_turns: int,
    person: str | None = None,
    python: str | None = None,
    requires: Sequence[str] = (),
) -> None:
    """Play one episode of the environment `name`, and show everything that the model would see.

    Without a `player` the actions are read from the terminal, one per line, until the episode or
    the input ends. With several agents, `person` is the agent whose actions are read. Only its
    messages are shown, and `player` plays the others.

    Raises:
        ConfigError: there is no agent `person`, or no player for the others.
    """
    if person is not None and player is None:
        raise ConfigError(f"--as {person} needs a --player for the other agents")
    envs = EnvPool({name: env_factory(name, python=python, requires=requires)}, EnvDeadlines())
    env = envs.acquire(name)
    try:
        await _play_episode(
            env, _Session(console, person, player), seed=seed, options=options, max_turns=max_turns
        )
    finally:
        await envs.release(name, env)
        await envs.close()


@dataclass(frozen=True, slots=True)
class _Session:
    """The terminal, the agent that its user plays (`None`: `player`, if any, plays all), and the
    others' player.
    """

    console: Console
    person: str | None
    player: ScriptedPlayer | None

    def show(self, role: str, text: str, images: Sequence[EncodedImage], agent: str) -> None:
        """Print what the environment shows, if the user may see it; of its pictures, the sizes."""
        self.say(role, Message("user", text, images=tuple(images)).described, agent)

    def say(self, role: str, text: str, agent: str = "") -> None:
        """Print a message to or from an agent, if the user may see it."""
        if self.person in (None, agent):
            _say(self.console, f"{role} ({agent})" if agent else role, text)

    async def action(self, env: LiveEnv, agent: str, rng: random.Random) -> str | None:
        """The agent's next message, or `None` if the user has ended the input."""
        if self.player is not None and (self.person is None or self.person != agent):
            action = await env.consult(self.player, rng)
            self.say("assistant", action, agent)
            return action
        try:
            return self.console.input(
                f"[bold green]{f'assistant ({agent})' if agent else 'assistant'}[/bold green] "
            )
        except EOFError:
            return None


async def _play_episode(
    env: LiveEnv, session: _Session, *, seed: int, options: Mapping[str, Any], max_turns: int
) -> None:
    console = session.console
    observation, info = await env.reset(seed, options)
    agents = agents_in(info)
    if session.person not in (None, *agents):
        raise ConfigError(
            f"--as {session.person}: there is no such agent; there are"
            f" {', '.join(agents) or 'none'}"
        )
    for agent in agents:
        if prompt := system_prompt_in(info, agent, env.system_prompt):
            session.say("system", prompt, agent)
    if env.tools:
        _show_tools(console, env.tools)
    agent, totals = next_agent(info, agents), dict.fromkeys(agents, 0.0)
    for message in info.get("history") or ():
        session.say(message["role"], message["content"], agent)
    images, info = images_taken("reset", info)
    session.show("user", observation, images, agent)
    for turn in range(max_turns):
        action = await session.action(env, agent, random.Random(derive_seed(seed, turn)))
        if action is None:
            console.print(
                f"\nleft after {turn} turns, reward {_format_totals(totals)}", highlight=False
            )
            return
        observation, reward, terminated, truncated, info = await env.step(action)
        images, info = images_taken("step", info)
        paid = (
            {"": float(reward)} if agents is SINGLE_AGENT else earnings(info, agent, reward, agents)
        )
        totals = {name: total + paid.get(name, 0.0) for name, total in totals.items()}
        is_over = terminated or truncated
        agent = agent if is_over else next_agent(info, agents)
        session.show("tool" if env.tools else "user", observation, images, agent)
        console.print(
            f"[dim]reward {float(reward):g}, info {escape(str(info))}[/dim]", highlight=False
        )
        if is_over:
            how = "terminated" if terminated else "truncated"
            console.print(
                f"\n{how} after {turn + 1} turns, reward {_format_totals(totals)}", highlight=False
            )
            return
    console.print(
        f"\nstopped after {max_turns} turns (--max-turns), reward {_format_totals(totals)}",
        highlight=False,
    )


def _format_totals(totals: Mapping[str, float]) -> str:
    return ", ".join(f"{agent} {total:g}".strip() for agent, total in totals.items())


def _say(console: Console, role: str, text: str) -> None:
    console.print(f"[bold cyan]{role}[/bold cyan] {escape(text)}", highlight=False, soft_wrap=True)


def _show_tools(console: Console, tools: Sequence[Mapping[str, Any]]) -> None:
    for tool in tools:
        _say(console, "tools", json.dumps(tool, ensure_ascii=False))
    function = tools[0]["function"]
    arguments = dict.fromkeys(function.get("parameters", {}).get("properties", {}), "...")
    _say(console, "a call", ToolCall(str(function["name"]), arguments).render())
