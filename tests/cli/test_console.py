"""What the commands print to: a terminal's width, and whole rows in a pipe."""

import io

import pytest
from rich.table import Table

from agentrl.cli.console import SafeConsole


def table() -> Table:
    made = Table(box=None, show_header=False)
    made.add_row("recipe.demonstrations.episodes_per_step", "8", "a long origin " * 9)
    return made


def test_no_row_of_a_table_is_folded_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    console = SafeConsole(file=out)
    console.print(table())
    console.rule("a title")
    first, second = out.getvalue().splitlines()
    assert first.split()[:2] == ["recipe.demonstrations.episodes_per_step", "8"]
    assert first.rstrip().endswith("a long origin")
    assert second == "a title"


def test_the_width_of_a_terminal_and_that_of_the_environment_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = io.StringIO()
    SafeConsole(file=out).print(table())
    assert max(map(len, out.getvalue().splitlines())) <= 60

    monkeypatch.delenv("COLUMNS")
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, width=50, color_system=None).print(table())
    assert max(map(len, out.getvalue().splitlines())) <= 50
