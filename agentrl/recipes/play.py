"""`agentrl play`: a person or a scripted player in the model's place, at a terminal."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from agentrl.protocols import ScriptedPlayer
from agentrl.recipes.workers import env_factory
from agentrl.rollout.env_host import Deadlines, EnvHost, LiveEnv
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.tools import ToolCall


async def play(
    name: str,
    console: Console,
    *,
    seed: int,
    options: Mapping[str, Any],
    player: ScriptedPlayer | None,
    max_turns: int,
    python: str | None = None,
    requires: Sequence[str] = (),
) -> None:
    """Play one episode of the environment `name`, and show all that the model would be shown.

    Without a `player` the actions are read from the terminal, one a line, until the episode or the input ends.
    """
    envs = EnvHost({name: env_factory(name, python=python, requires=requires)}, Deadlines())
    env = envs.take(name)
    try:
        await _episode(env, console, seed=seed, options=options, player=player, max_turns=max_turns)
    finally:
        await envs.give_back(name, env)
        await envs.close()


async def _episode(
    env: LiveEnv,
    console: Console,
    *,
    seed: int,
    options: Mapping[str, Any],
    player: ScriptedPlayer | None,
    max_turns: int,
) -> None:
    observation, _ = await env.reset(seed, options)
    if env.system_prompt:
        _say(console, "system", env.system_prompt)
    if env.tools:
        _show_tools(console, env.tools)
    _say(console, "user", observation)
    total = 0.0
    for turn in range(max_turns):
        action = await _action(env, console, player, random.Random(derive_seed(seed, turn)))
        if action is None:
            console.print(f"\nleft after {turn} turns, reward {total:g}", highlight=False)
            return
        observation, reward, terminated, truncated, info = await env.step(action)
        total += float(reward)
        _say(console, "tool" if env.tools else "user", observation)
        console.print(f"[dim]reward {float(reward):g}, info {escape(str(info))}[/dim]", highlight=False)
        if terminated or truncated:
            how = "terminated" if terminated else "truncated"
            console.print(f"\n{how} after {turn + 1} turns, reward {total:g}", highlight=False)
            return
    console.print(f"\nstopped after {max_turns} turns (--max-turns), reward {total:g}", highlight=False)


async def _action(env: LiveEnv, console: Console, player: ScriptedPlayer | None, rng: random.Random) -> str | None:
    """The next message, or `None` where the person has left."""
    if player is not None:
        action = await env.consult(player, rng)
        _say(console, "assistant", action)
        return action
    try:
        return console.input("[bold green]assistant[/bold green] ")
    except EOFError:
        return None


def _say(console: Console, role: str, text: str) -> None:
    console.print(f"[bold cyan]{role}[/bold cyan] {escape(text)}", highlight=False, soft_wrap=True)


def _show_tools(console: Console, tools: Sequence[Mapping[str, Any]]) -> None:
    for tool in tools:
        _say(console, "tools", json.dumps(tool, ensure_ascii=False))
    function = tools[0]["function"]
    arguments = dict.fromkeys(function.get("parameters", {}).get("properties", {}), "...")
    _say(console, "a call", ToolCall(str(function["name"]), arguments).render())
