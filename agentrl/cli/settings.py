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
from agentrl.config.loading import check_by_modules
from agentrl.config.run_config import RunConfig
from agentrl.protocols.component_settings import ClusterOffers, TrainerSettingsOffers
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


def resolved_dtype(config: RunConfig) -> tuple[str, str]:
    """The data type of an engine that follows the trainer, and its origin.

    It is known if the trainer's settings say it, or if everything runs on this machine.
    """
    trained = TrainerSettingsOffers.of(config.trainer.settings).dtype
    if trained is not None:
        return trained, "auto: trainer.dtype"
    if not ClusterOffers.of(config.cluster.factory).one_device:
        return "auto", "auto: as the trainer, bfloat16 on GPUs that have it"
    import torch

    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    return ("bfloat16" if has_bfloat16 else "float32"), "auto: as the trainer on this machine"


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
    check_by_modules(loaded.config)
    if as_yaml:
        sys.stdout.write(loaded.config.to_yaml())
        return
    began: Mapping[str, str] = RunFolder(config.name, config).origins() if is_run else {}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, value, written in loaded.rows():
        origin = written if written == "command line" else began.get(key, written)
        shown = in_yaml(value)
        if key == "engine.dtype" and value == "auto":
            shown, origin = resolved_dtype(loaded.config)
        style = "dim" if written == "default" else "bold"
        table.add_row(escape(key), escape(shown), escape(origin), style=style)
    console.print(table)
