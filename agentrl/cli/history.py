"""`agentrl ledger` and `agentrl lineage`: what became of episodes, and how a model came to be."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from agentrl.cli.console import console
from agentrl.cli.run_folders import run_config
from agentrl.ledger import report as ledger_report
from agentrl.ledger.ledger import LedgerReader, read_ledger


def show_ledger(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="A task (train-000012, or 12) or an episode (train-000012/3/0)."
        ),
    ] = None,
) -> None:
    """Show what became of a run's tasks and episodes, or why the one named ID was or was not
    trained.
    """
    with read_ledger(run_config(run).parent / "ledger.sqlite") as ledger:
        if name is None:
            _print_overview(ledger)
            return
        explanation = ledger_report.explain(ledger, name)
    console.print(f"[bold]{escape(explanation.sentence)}[/bold]\n", highlight=False, soft_wrap=True)
    console.print(ledger_report.details_table(explanation))
    console.print()
    console.print(ledger_report.episodes_table(explanation))
    if explanation.segments:
        console.print("\nTrained on before they ended:\n")
        console.print(ledger_report.segments_table(explanation))


def _print_overview(ledger: LedgerReader) -> None:
    console.print(ledger_report.fates_table(ledger.tallies("tasks"), ledger.tallies("episodes")))
    tasks, episodes = ledger.reasons("tasks", limit=5), ledger.reasons("episodes", limit=10)
    if tasks or episodes:
        console.print("\nThe most common reasons why something was not trained:\n")
        console.print(ledger_report.reasons_table(tasks, episodes))
    if in_play := ledger.open_episodes(limit=20):
        console.print(f"\nOpen: {escape(', '.join(in_play))}", highlight=False)


def show_lineage(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN|ITERATION", help="A run of recipe=iterative_dpo, or a model."),
    ],
) -> None:
    """Show the models that a model descends from, after a comparison of all weights with what was
    recorded.
    """
    from agentrl.recipes.lineage import verified_lineage

    newest = max((folder / "iterations").glob("iteration_*"), default=folder)
    for one in verified_lineage(newest):
        how = (
            f"pairs: {one.lineage.pairs}, tasks: {len(one.lineage.tasks)}"
            if one.lineage
            else "the first model"
        )
        console.print(
            f"{one.sha256[:12]}  {escape(str(one.folder))}  {how}", highlight=False, soft_wrap=True
        )
