"""`agentrl replay`: shows a recorded episode in the terminal, at its own pace or faster, or
continues it from one of its turns with other answers.
"""

import asyncio
import json
import math
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.cli.arguments import Step
from agentrl.cli.console import console
from agentrl.cli.run_folders import checkpoint_of, model_of_tokens, run_config
from agentrl.cli.stopping import run_or_stop
from agentrl.config.from_file import load_config
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.models.source import model_folder
from agentrl.trajectory import Message

if TYPE_CHECKING:
    from agentrl.recipes.continuation import Departure

_LONGEST_PAUSE_SECONDS = 3.0
_MAX_LISTED_EPISODES = 20


def replay_episode(  # noqa: PLR0917  typer calls it by name
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    episode: Annotated[
        str | None,
        typer.Argument(
            metavar="[EPISODE]",
            help="Its id, such as train-000012/3/0; without it, the newest are listed.",
        ),
    ] = None,
    agent: Annotated[
        str, typer.Option(help="From the view of this agent, if there are several.")
    ] = "",
    speed: Annotated[
        float, typer.Option(min=0, help="How many times as fast as it was played; 0: at once.")
    ] = 1.0,
    turn: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Go on from this turn, counted from 0, in another way."
        ),
    ] = None,
    by: Annotated[
        Literal["model", "hand"],
        typer.Option(help="With --turn: who answers; hand: you, a line each time."),
    ] = "model",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="With --turn: a folder or a name; by default the run's model."
        ),
    ] = None,
    step: Step = "latest",
    seed: Annotated[int, typer.Option(help="With --turn: another one samples other answers.")] = 0,
) -> None:
    """Play a recorded episode again in the terminal, go on from one of its turns, or list the
    newest ones.
    """
    folder = run_config(run).parent
    if turn is None and (by != "model" or model is not None):
        raise ConfigError(
            "--by and --model say who goes on from a turn: add --turn N, counted from 0"
        )
    if by == "hand" and model is not None:
        raise ConfigError("--by hand and --model exclude each other: leave one of both out")
    if episode is None:
        list_episodes(folder, console)
    elif turn is None:
        asyncio.run(replay(folder, episode, console, agent=agent, speed=speed))
    else:
        row, departure = saved_turn(folder, episode, turn)
        # A single episode is played, by this process.
        own = ["rollout.workers=0", *([] if model is None else [f"model.name={model}"])]
        config = load_config(run_config(run), own).config
        if by == "hand":
            served = model_of_tokens(folder, config)
        elif model is not None:
            served = model_folder(model, config.model.revision, config.model.hf_overrides)
        else:
            served = checkpoint_of(folder, step)
        continuing = go_on(
            row, departure, console, config=config, model=served, by_hand=by == "hand", seed=seed
        )
        # A steady loop would warn of a person who thinks.
        if by == "hand":
            asyncio.run(continuing)
        else:
            run_or_stop(continuing)


def list_episodes(folder: Path, console: Console) -> None:
    """Print the newest episodes of the batches of a run, whose ids `replay` takes.

    Raises:
        ConfigError: no step has a batch yet.
    """
    from agentrl.viewer.episodes import KINDS, EpisodeIndex, EpisodeQuery
    from agentrl.viewer.folders import RunFolder

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
    newest, quoted = found["rows"][0]["id"], escape(shlex.quote(str(folder)))
    console.print(
        f"\nthe newest of {found['total']:,} episodes in batches; `agentrl replay {quoted}"
        f" {newest}` plays one again, `agentrl view {quoted}` shows all",
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
    from agentrl.observe.run_images import RunImages
    from agentrl.recipes.recordings import message_of

    episode = _read_episode(folder, name, agent)
    played = episode["trajectory"]
    turns, images = iter(played["turns"]), RunImages(folder)
    for row in played["messages"]:
        message = message_of(row, images)
        turn = next(turns, None) if message.is_answer else None
        if turn is not None and speed > 0:
            await asyncio.sleep(min(turn["generate_seconds"] / speed, _LONGEST_PAUSE_SECONDS))
        _show(console, message)
        if turn is not None and speed > 0:
            await asyncio.sleep(min(turn["env_seconds"] / speed, _LONGEST_PAUSE_SECONDS))
    row = episode["row"]
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    console.print(f"\n{row['status']}, {score}", highlight=False)
    console.print(escape(episode["fate"]), highlight=False, soft_wrap=True)


def saved_turn(folder: Path, name: str, turn: int) -> "tuple[dict[str, Any], Departure]":
    """The row of a saved episode of a run, and the turn from which it goes on.

    Raises:
        ConfigError: there is no such episode or turn, or only its fate was kept.
    """
    from agentrl.observe.run_images import RunImages
    from agentrl.recipes.continuation import Departure
    from agentrl.recipes.recordings import played_in

    episode = _read_episode(folder, name)
    return episode["row"], Departure(played_in(episode["trajectory"], RunImages(folder)), turn)


def _read_episode(folder: Path, name: str, agent: str = "") -> dict[str, Any]:
    """A saved episode, whose trajectory was kept."""
    from agentrl.viewer.episode import EpisodeReader
    from agentrl.viewer.episodes import EpisodeIndex
    from agentrl.viewer.folders import RunFolder

    run = RunFolder(folder.name, folder)
    episode = EpisodeReader(run, EpisodeIndex(run)).episode(name, agent)
    if episode["trajectory"] is None:
        raise ConfigError(f"only the fate of {name} was kept: {episode['fate']}")
    return episode


async def go_on(
    row: Mapping[str, Any],
    departure: "Departure",
    console: Console,
    *,
    config: RunConfig,
    model: Path,
    by_hand: bool = False,
    seed: int = 0,
) -> None:
    """Bring the environment to a turn of a saved episode, let a model or a person answer from there
    on, and print what happens and how both ended. `row`: of the saved one (`saved_turn`).

    Raises:
        ConfigError: the environment does not come to the recorded turn again.
    """
    from agentrl.recipes.continuation import continue_by_hand, continue_by_model

    printed = 0

    def show(message: Message, again: bool) -> None:
        nonlocal printed
        printed += 1
        if again or not (by_hand and message.is_answer):  # which they have just written
            _show(console, message)
        if printed == len(departure.before):
            who = "your answers, each a line" if by_hand else f"the answers of {model}"
            console.print(
                f"[dim]turn {departure.turn}, and on with {escape(who)}[/dim]",
                highlight=False,
                soft_wrap=True,
            )

    try:
        if by_hand:
            ask = partial(console.input, "[bold green]assistant[/bold green] ")
            played = await continue_by_hand(config, model, departure, show, ask)
        else:
            played = await continue_by_model(config, model, departure, show, seed=seed)
    except EOFError:
        console.print("\nleft before its end", highlight=False)
        return
    now = played.trajectories[0]
    for message in now.messages[printed:]:
        _show(console, message)
    score = played.scores[0].value if played.scores else None
    recorded = _describe_ending(row["status"], row["num_turns"], row["score"])
    console.print(f"\nrecorded: {recorded}", highlight=False)
    ending = _describe_ending(now.status.name, len(now.turns), score)
    console.print(f"now: {ending}", highlight=False)
    if played.failure is not None:
        console.print(escape(str(played.failure)), highlight=False, soft_wrap=True)


def _describe_ending(status: str, turns: int, score: float | None) -> str:
    scored = "no score" if score is None or math.isnan(score) else f"score {score:g}"
    return f"{status} after {turns} turn{'' if turns == 1 else 's'}, {scored}"


def _show(console: Console, message: Message) -> None:
    style = "green" if message.role == "assistant" else "cyan"
    if message.reasoning:
        console.print(f"[dim]{escape(message.reasoning)}[/dim]", highlight=False, soft_wrap=True)
    console.print(
        f"[bold {style}]{message.role}[/bold {style}] {escape(message.described)}",
        highlight=False,
        soft_wrap=True,
    )
    for call in message.tool_calls:
        called = f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"
        console.print(f"  [{style}]→[/{style}] {escape(called)}", highlight=False, soft_wrap=True)
