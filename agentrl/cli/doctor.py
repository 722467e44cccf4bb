"""`agentrl doctor`: one page about this machine and a config, each line with what to do."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from agentrl.cli.arguments import Overrides
from agentrl.cli.console import console
from agentrl.config.from_file import load_config
from agentrl.config.loading import LoadedConfig

if TYPE_CHECKING:
    from agentrl.doctor.diagnosis import Diagnosis


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="A YAML file; by default the demo's.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Start no engine, trainer or environment.")
    ] = False,
) -> None:
    """Check this machine for a config, in minutes: devices, versions, limits, model, reward; then
    engine and trainer on the same tokens, new weights, and a task that a sound installation learns.

    The exit status is 1 if something has to be mended. Nothing is written but temporary files.
    """
    from agentrl import __file__ as package

    loaded = load_config(config or Path(package).with_name("demo.yaml"), overrides or [])
    found = asyncio.run(_examine(loaded, quick=quick))
    wrong = sum(one.wrong for one in found)
    if wrong:
        console.print(f"\n[red]{wrong} of {len(found)} checks have to be mended[/red]")
        raise typer.Exit(1)
    console.print(f"\n[green]nothing has to be mended[/green], by {len(found)} checks")


async def _examine(loaded: LoadedConfig, *, quick: bool) -> list["Diagnosis"]:
    """The diagnoses, each printed as soon as it is known: some take minutes."""
    from agentrl.doctor.examination import examine

    found = []
    async with aclosing(examine(loaded, quick=quick)) as diagnoses:
        async for one in diagnoses:
            found.append(one)
            _print(one)
    return found


def _print(one: "Diagnosis") -> None:
    mark, style = "ok", "green"
    if one.wrong:
        mark, style = "!!", "red"
    elif one.skipped:
        mark, style = "--", "yellow"
    console.print(
        f"[{style}]{mark} {one.subject:16}[/{style}] {escape(one.words)}",
        highlight=False,
        soft_wrap=True,
    )
    if one.remedy:
        console.print(
            f"   {'':16} [bold]do:[/bold] {escape(one.remedy)}", highlight=False, soft_wrap=True
        )
