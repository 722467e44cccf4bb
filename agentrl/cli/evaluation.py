"""`agentrl eval`, `agentrl compare` and `agentrl rescore`."""

import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from agentrl.cli.arguments import Overrides, Step
from agentrl.cli.console import console
from agentrl.cli.run_folders import model_to_evaluate, output, run_config
from agentrl.cli.stopping import run_or_stop
from agentrl.config.from_file import load_config
from agentrl.errors import ConfigError
from agentrl.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.observe.reports import Comparison
    from agentrl.recipes.rescore import Changes, Rescored


def evaluate(  # noqa: PLR0917  typer calls it by name
    run: Annotated[
        Path, typer.Argument(metavar="RUN|CONFIG", help="The folder of a run, or a YAML file.")
    ],
    overrides: Overrides = None,
    tasks: Annotated[
        int | None, typer.Option(help="Held-out tasks to play; by default the config's number.")
    ] = None,
    show: Annotated[int, typer.Option(help="Episodes to print.")] = 1,
    step: Step = "latest",
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Play only this suite; repeatable. held_out: no suite."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to save the report; by default in the run."),
    ] = None,
) -> None:
    """Play held-out tasks and suites with one of a run's checkpoints, or with a config's model or
    endpoint.
    """
    from agentrl.assembly.policy import assemble_rollouts
    from agentrl.recipes.evaluate import evaluate_all, report_of

    loaded = load_config(run_config(run) if run.is_dir() else run, overrides or [])
    model = model_to_evaluate(run, loaded, step)
    steps = int(model.name.removeprefix("step_")) if run.is_dir() else 0
    if report is None and run.is_dir():
        report = run / "evaluations" / f"eval-{datetime.now():%Y%m%d-%H%M%S-%f}"
    report = output(report, within="evaluations") if report is not None else None

    async def play() -> Any:
        async with assemble_rollouts(loaded.config, model) as rollouts:
            return await evaluate_all(rollouts, tasks, suite or ())

    for name, evaluation in run_or_stop(play()).items():
        _print_evaluation(name, evaluation, show)
        if report is not None:
            path = report_of(steps, evaluation, loaded.config).write(report)
            console.print(f"saved in {escape(str(path))}", highlight=False, soft_wrap=True)
    if report is None:
        console.print(
            "not saved: --report FOLDER saves what `agentrl compare` reads",
            highlight=False,
            soft_wrap=True,
        )


def _print_evaluation(suite: str, evaluation: Any, show: int) -> None:
    """Print the first episodes of an evaluation, and its metrics."""
    for trajectory, score in evaluation.scored[:show]:
        console.rule(f"{_name_of(trajectory)}: {trajectory.status.name}, score {score.value:g}")
        for message in trajectory.messages:
            console.print(
                f"[bold cyan]{message.role}[/bold cyan] {escape(message.described)}",
                highlight=False,
            )
    console.rule(escape(suite))
    for name, value in evaluation.metrics().items():
        shown = name.removeprefix("eval/").removeprefix(f"{suite}/")
        console.print(f"{shown:10} {value:.4g}", highlight=False)
    for trajectory in evaluation.failed[:5]:
        console.print(
            f"[red]{_name_of(trajectory)}[/red] {escape(str(trajectory.status))}", highlight=False
        )


def compare_runs(
    first: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or of a report.")
    ],
    second: Annotated[
        Path, typer.Argument(metavar="RUN", help="Another one, evaluated on the same tasks.")
    ],
) -> None:
    """Compare the newest evaluations of two runs, task by task, with paired 95 % intervals."""
    from agentrl.observe.reports import compare, left_out, read_reports

    reports = read_reports(first), read_reports(second)
    compared = compare(*reports)
    for one in compared:
        for line in _describe_comparison(one):
            console.print(line, highlight=False, soft_wrap=True)
    for name, why in left_out(*reports, compared).items():
        console.print(
            f"[bold]{escape(name)}[/bold] is not compared: {escape(why)}",
            highlight=False,
            soft_wrap=True,
        )


def rescore_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    reward: Annotated[
        str,
        typer.Option(help="The section reward of a config, as YAML: numeric, or {name: numeric}."),
    ],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only the episodes of this step.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Most changed episodes to list.")] = 5,
    into: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="A new .jsonl file for all scores."),
    ] = None,
) -> None:
    """Score the saved episodes of a run again, with another reward, and show what changes. The run
    is not touched.
    """
    from agentrl.recipes.rescore import changes, rescore, write_scores

    config = load_config(run_config(run), [f"reward={reward}", "batch_processing.constraints=[]"])
    into = output(into) if into is not None else None
    if into is not None and into.exists():
        raise ConfigError(f"{into} is there already: name a new file")
    rescored = run_or_stop(rescore(config.config, run_config(run).parent, step))
    for line in _describe_changes(changes(rescored)):
        console.print(line, highlight=False, soft_wrap=True)
    known = [one for one in rescored if abs(one.change) > 0]
    if known and show:
        console.print(_changes_table(sorted(known, key=lambda one: -abs(one.change))[:show]))
    errors = [one for one in rescored if math.isnan(one.after)]
    if errors:
        console.print(
            f"[red]{escape(_name_of(errors[0].trajectory))}[/red]"
            f" {escape(str(errors[0].score.status))}",
            highlight=False,
            soft_wrap=True,
        )
    if into is not None:
        write_scores(into, rescored)
        console.print(f"wrote {escape(str(into))}", highlight=False, soft_wrap=True)


def _describe_changes(figures: "Changes") -> Iterator[str]:
    yield (
        f"{figures.episodes:,} episodes in {figures.groups:,} groups: {figures.changed:,} scores"
        f" change; {figures.failed:,} cannot be scored, {figures.unknown:,} had no score"
    )
    yield f"mean score {figures.means[0]:.4g} -> {figures.means[1]:.4g}"
    yield f"success {figures.successes[0]:.1%} -> {figures.successes[1]:.1%}"
    yield f"groups whose scores differ {figures.mixed[0]:,} -> {figures.mixed[1]:,}"
    if not math.isnan(figures.reordered):
        yield f"pairs of a group that change places: {figures.reordered:.1%}"


def _changes_table(found: "list[Rescored]") -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("episode", "step", "before", "after", "the model said last"):
        table.add_column(column, overflow="fold")
    for one in found:
        said = [message.said for message in one.trajectory.messages if message.is_answer]
        last = said[-1] if said else ""
        shown = last if len(last) <= 60 else f"{last[:57]}..."
        table.add_row(
            escape(_name_of(one.trajectory)),
            str(one.step),
            f"{one.before:.4g}",
            f"{one.after:.4g}",
            escape(shown.replace("\n", " ")),
        )
    return table


def _describe_comparison(one: "Comparison") -> Iterator[str]:
    """The figures of a comparison, and the episodes and tasks that they leave out."""
    success, score = one.success, one.score
    successes = (
        "success unknown"
        if math.isnan(one.first)
        else (
            f"success {one.first:.1%} and {one.second:.1%}, difference {success.value:+.1%} "
            f"(95 % interval {success.low:+.1%} to {success.high:+.1%})"
        )
    )
    interval = (
        "all are equal" if math.isnan(score.low) else f"{score.low:+.3g} to {score.high:+.3g}"
    )
    yield (
        f"[bold]{escape(one.name)}[/bold] ({one.tasks} tasks; after {one.steps[0]} and"
        f" {one.steps[1]} steps; {one.failed[0]} and {one.failed[1]} episodes failed): {successes};"
        f" score {score.value:+.3g} ({interval})"
    )
    if any(one.failed):
        yield "  episodes that failed are in none of these figures"
    if any(one.alone):
        why = f": {one.why_alone}" if one.why_alone else ""
        only = (
            f"{one.alone[0]} tasks that only the first has, and {one.alone[1]} that only the"
            " second has"
        )
        yield f"  not compared: {only}{escape(why)}"
    if one.rewards_differ:
        yield "  the two were scored by different rewards (the section reward of their configs)"
    yield f"  {escape(' and '.join(str(file) for file in one.files))}"


def _name_of(trajectory: Trajectory) -> str:
    return f"{trajectory.id} ({trajectory.agent})" if trajectory.agent else trajectory.id
