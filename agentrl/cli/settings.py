"""`agentrl config`."""

from rich.markup import escape
from rich.table import Table

from agentrl.cli.arguments import ConfigPath, Overrides
from agentrl.cli.console import console
from agentrl.config import load_config


def show_config(config: ConfigPath, overrides: Overrides = None) -> None:
    """Show the resolved config, and where each value came from."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, value, origin in load_config(config, overrides or []).rows():
        style = "dim" if origin == "default" else "bold"
        table.add_row(key, escape(str(value)), escape(origin), style=style)
    console.print(table)
