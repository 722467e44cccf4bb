"""`agentrl replay`: plays a recorded episode again in the terminal, at its own pace or faster."""

import asyncio
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.errors import ConfigError
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import KINDS, EpisodeIndex, EpisodeQuery
from agentrl.viewer.folders import RunFolder

_LONGEST_PAUSE_SECONDS = 3.0
_MAX_LISTED_EPISODES = 20


def list_episodes(folder: Path, console: Console) -> None:
    """Print the newest episodes of the batches of a run, whose ids `replay` takes.

    Raises:
        ConfigError: no step has a batch yet.
    """
    run = RunFolder(folder.name, folder)
    found = EpisodeIndex(run).page(EpisodeQuery(kind=KINDS[0], limit=_MAX_LISTED_EPISODES))
    if not found["rows"]:
        raise ConfigError(f"{folder} has no episode in a batch yet")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("episode", "agent", "step", "environment", "ended", "score", "turns"):
        table.add_column(column)
    for row in found["rows"]:
        score = "" if row["score"] is None else f"{row['score']:g}"
        cells = (
            row["id"],
            row["agent"],
            row["step"],
            row["env"],
            row["status"],
            score,
            row["num_turns"],
        )
        table.add_row(*("" if cell is None else escape(str(cell)) for cell in cells))
    console.print(table)
    newest = found["rows"][0]["id"]
    console.print(
        f"\nthe newest of {found['total']:,} episodes in batches; `agentrl replay {folder}"
        f" {newest}` plays one again, `agentrl view {folder}` shows all",
        highlight=False,
        soft_wrap=True,
    )


async def replay(
    folder: Path, name: str, console: Console, *, agent: str = "", speed: float = 1.0
) -> None:
    """Print an episode message by message, each answer after as long as the model took, and what
    became of it.

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
        turn = (
            next(turns, None)
            if message["role"] == "assistant" and not message.get("given")
            else None
        )
        if turn is not None and speed > 0:
            await asyncio.sleep(min(turn["generate_seconds"] / speed, _LONGEST_PAUSE_SECONDS))
        style = "green" if message["role"] == "assistant" else "cyan"
        if message["reasoning"]:
            console.print(
                f"[dim]{escape(message['reasoning'])}[/dim]", highlight=False, soft_wrap=True
            )
        text = escape(message["content"] or "")
        console.print(
            f"[bold {style}]{message['role']}[/bold {style}] {text}",
            highlight=False,
            soft_wrap=True,
        )
        for call in json.loads(message["tool_calls"] or "[]"):
            called = f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"
            console.print(
                f"  [{style}]→[/{style}] {escape(called)}", highlight=False, soft_wrap=True
            )
        if turn is not None and speed > 0:
            await asyncio.sleep(min(turn["env_seconds"] / speed, _LONGEST_PAUSE_SECONDS))
    row = episode["row"]
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    console.print(f"\n{row['status']}, {score}", highlight=False)
    console.print(escape(episode["fate"]), highlight=False, soft_wrap=True)
