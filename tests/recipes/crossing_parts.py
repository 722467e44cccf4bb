"""Plug-ins of the runs in `test_crossings.py`, copied beside their configs as `parts.py`:
environments of each kind, a program, a player, rewards and a tracker. What a model says by chance
is worth something here half of the time.
"""

import asyncio
import json
import os
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from agentrl.envs.base import TextEnv, ToolEnv, ToolResult


def worth(text: str) -> float:
    """1 or 0, equally often for texts at random."""
    return float(sum(text.encode()) % 2)


def place() -> dict[str, Any]:
    """Where this is called: what `env.isolation` decides."""
    return {"process": os.getpid(), "main": threading.current_thread() is threading.main_thread()}


class Words(TextEnv):
    """Say anything, three times."""

    system_prompt = "Say something."
    isolation = "inline"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.turn = 0
        return f"Say something about {self.rng.randrange(100)}."

    def step(self, action: str) -> Any:
        self.turn += 1
        over, won = self.turn == 3, worth(action)
        return (
            f"You said {len(action)} letters.",
            won,
            over,
            False,
            {"success": bool(won), **place()},
        )


class Tools(ToolEnv):
    """Look, and answer."""

    system_prompt = "Look, then answer."

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.replies = 0
        return f"The box has the number {self.rng.randrange(100)}."

    def look(self, at: str) -> str:
        """Look at something.

        Args:
            at: what to look at
        """
        return f"There is {at}."

    def reply(self, text: str) -> ToolResult:
        self.replies += 1
        return ToolResult(
            "Go on.", worth(text), terminated=self.replies == 2, success=bool(worth(text))
        )


class Duel(TextEnv):
    """Two agents speak in turn; the one whose words are worth more wins."""

    system_prompt = "Speak."

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.said = list[str]()
        return f"Say something about {self.rng.randrange(100)}."

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        self.rng = Random(seed)
        return self.start(seed, options), {"agents": ["north", "south"], "agent": "north"}

    def step(self, action: str) -> Any:
        self.said.append(action)
        info = {**place(), "agent": ("north", "south")[len(self.said) % 2]}
        if len(self.said) < 4:
            return f"You hear {len(action)} letters.", 0.0, False, False, info
        lead = sum(worth(said) * (-1) ** number for number, said in enumerate(self.said))
        info |= {
            "rewards": {"north": lead, "south": -lead},
            "success": {"north": lead > 0, "south": lead < 0},
        }
        return "It is over.", -lead, True, False, info


async def program(task: Any, base_url: str, api_key: str) -> float:
    """Asks twice."""
    messages = [
        {"role": "user", "content": f"Say something about {Random(task.seed).randrange(100)}."}
    ]
    for _ in range(2):
        said = await asyncio.to_thread(_answer, base_url, api_key, messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    return worth(said)


def _answer(base_url: str, api_key: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    ) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"] or ""
    return said


def player(shown: Any, rng: Random) -> str:
    """Says a word, whatever the environment or the prompt."""
    return rng.choice(("left", "right", "up", "down"))


def odd(trajectory: Any) -> float:
    """A reward of one's own."""
    return worth(
        "".join(message.content for message in trajectory.messages if message.role == "assistant")
    )


class Tracker:
    """Writes what it is told."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.file = folder / "tracked.jsonl"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, "metrics": sorted(metrics)}) + "\n")

    def close(self) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"closed": True}) + "\n")
