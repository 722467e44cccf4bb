"""`agentrl replay`: plays a recorded episode again in the terminal, at its own pace or faster."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from agentrl.errors import ConfigError
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex
from agentrl.viewer.folders import RunFolder

_LONGEST = 3.0


async def replay(folder: Path, name: str, console: Console, *, agent: str = "", speed: float = 1.0) -> None:
    """Print an episode message by message, each answer after as long as the model took, and what became of it.

    No wait is longer than 3 seconds. `speed`: how many times as fast; 0: without waiting.

    Raises:
        ConfigError: there is no such episode, or only its fate was kept.
    """
    run = RunFolder(folder.name, folder)
    episode = EpisodeReader(run, EpisodeIndex(run)).episode(name, agent)
    played = episode["trajectory"]
    if played is None:
        raise ConfigError(f"only the fate of {name} was kept: {episode['fate']}")
    turns = iter(played["turns"])
    for message in played["messages"]:
        turn = next(turns, None) if message["role"] == "assistant" else None
        if turn is not None and speed > 0:
            await asyncio.sleep(min(turn["generate_seconds"] / speed, _LONGEST))
        style = "green" if message["role"] == "assistant" else "cyan"
        if message["reasoning"]:
            console.print(f"[dim]{escape(_printable(message['reasoning']))}[/dim]", highlight=False, soft_wrap=True)
        text = escape(_printable(message["content"] or ""))
        console.print(f"[bold {style}]{message['role']}[/bold {style}] {text}", highlight=False, soft_wrap=True)
        if turn is not None and speed > 0:
            await asyncio.sleep(min(turn["env_seconds"] / speed, _LONGEST))
    row = episode["row"]
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    console.print(f"\n{row['status']}, {score}", highlight=False)
    console.print(escape(_printable(episode["fate"])), highlight=False, soft_wrap=True)


def _printable(text: str) -> str:
    """The text without characters that would command the terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)
