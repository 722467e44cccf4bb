"""`agentrl config`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from agentrl import __version__
from agentrl.cli.arguments import Overrides
from agentrl.cli.console import console
from agentrl.cli.run_folders import run_config
from agentrl.config.from_file import load_config
from agentrl.settings.yaml_values import in_yaml


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"agentrl {__version__}")
        raise typer.Exit


def show_version(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning over many turns."""


def show_config(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN", help="A YAML file, or the folder of a run.")
    ],
    overrides: Overrides = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print a config file that has every setting.")
    ] = False,
) -> None:
    """Show the resolved config, or that of a run, and where each value came from."""
    from agentrl.viewer.folders import RunFolder

    is_run = config.is_dir()
    loaded = load_config(run_config(config) if is_run else config, overrides or [])
    if as_yaml:
        sys.stdout.write(loaded.config.to_yaml())
        return
    began: Mapping[str, str] = RunFolder(config.name, config).origins() if is_run else {}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, value, written in loaded.rows():
        origin = written if written == "command line" else began.get(key, written)
        style = "dim" if origin == "default" else "bold"
        table.add_row(escape(key), escape(in_yaml(value)), escape(origin), style=style)
    console.print(table)
