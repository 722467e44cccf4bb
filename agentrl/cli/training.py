"""`agentrl train` and `agentrl demo`."""

import json
import math
import os
import re
import shlex
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from agentrl.cli.arguments import Overrides
from agentrl.cli.console import console
from agentrl.cli.run_folders import run_config
from agentrl.cli.stopping import Stopping
from agentrl.config.from_file import load_config
from agentrl.config.loading import LoadedConfig
from agentrl.errors import AgentRLError, ConfigError, StorageError
from agentrl.files.disk_errors import storage_problem
from agentrl.files.output import lossy_output
from agentrl.flow import run_steadily
from agentrl.observe.ending import how_to_go_on
from agentrl.runs.checkpoint import Checkpoints
from agentrl.settings.yaml_values import in_yaml

_DEMO_OVERRIDE = "batch_processing.keep_variance=0.999"
"""GRPO learns nothing from groups in which all episodes cross the lake, or none does, so the demo
leaves them out. The config keeps them, because a critic learns from them."""


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|auto",
            help="Resume the run in this folder; auto: resume the run of CONFIG if it has begun.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Resume from the checkpoint after N steps; later ones are set aside."
        ),
    ] = None,
    change: Annotated[
        bool,
        typer.Option(
            "--change",
            help="Resume with another model, seed, environment or other tasks than before.",
        ),
    ] = False,
) -> None:
    """Train an agent: [bold]agentrl train examples/frozen_lake.yaml trainer.lr=1e-3[/bold]."""
    if step is not None and resume is None:
        raise ConfigError("--step chooses a checkpoint of a run to resume: add --resume RUN")
    if change and resume is None:
        raise ConfigError("--change is for a run to resume: add --resume RUN, or leave it out")
    if resume in (None, "auto"):
        if config is None:
            raise ConfigError("which run? Give a CONFIG file, or --resume RUN")
        loaded = load_config(config, overrides or [])
    else:
        # Without a CONFIG, the first free argument is an override of the run's own config.
        given = [*([str(config)] if config is not None else []), *(overrides or [])]
        if elsewhere := [one for one in given if one.startswith("run_dir=")]:
            raise ConfigError(
                f"{elsewhere[0]}: a run that is resumed stays in its folder, {resume}: leave"
                " run_dir out, or copy the folder and resume the copy"
            )
        loaded = load_config(run_config(Path(resume)), [*given, f"run_dir={in_yaml(resume)}"])
    resumes = resume is not None
    if resume == "auto":
        from agentrl.runs.preflight import was_begun

        resumes = was_begun(loaded, change=change)
    with lossy_output():
        summary = _run(loaded, resume=resumes, step=step, change=change)
        if summary is not None:
            _print_summary(loaded.config.run_dir, summary)


def demo(overrides: Overrides = None) -> None:
    """Train the demo: a tiny model learns to cross FrozenLake maps, in about three minutes on two
    CPU cores.
    """
    from agentrl import __file__ as package

    folder = f"run_dir=runs/demo-{datetime.now():%Y%m%d-%H%M%S}"
    train(Path(package).with_name("demo.yaml"), [folder, _DEMO_OVERRIDE, *(overrides or [])])


def _run(
    loaded: LoadedConfig, *, resume: bool, step: int | None, change: bool
) -> dict[str, Any] | None:
    from agentrl.runs.run import Run

    folder, stopping = loaded.config.run_dir, Stopping()
    try:
        with stopping, Run(loaded, console, resume=resume, step=step, change=change) as run:
            try:
                run_steadily(stopping.watch(loaded.config.recipe.call(run)))
            except KeyboardInterrupt:
                name = stopping.by.name
                # The run records the text as the reason why it ended.
                raise KeyboardInterrupt("Ctrl-C" if name == "SIGINT" else name) from None
    except KeyboardInterrupt:
        # A second Ctrl-C ends what is left at once, without a traceback: all is written.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        console.print(f"\nstopped; {escape(_resume_hint(folder))}", soft_wrap=True)
        raise typer.Exit(128 + stopping.by) from None
    except AgentRLError:
        raise
    except Exception as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        raise StorageError(
            f"the run in {folder} cannot be read or written: {problem}. Mend this; then"
            f" {_resume_hint(folder)}"
        ) from error
    path = folder / "summary.json"
    summary: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    # Other recipes have said what they have made.
    return summary if summary and summary["tasks"]["total"] else None


def _resume_hint(folder: Path) -> str:
    """The saved steps of a run that has ended, and the command that continues it."""
    with suppress(OSError):
        if newest := Checkpoints(folder / "checkpoints").latest():
            return how_to_go_on(folder, newest[0])
    if (folder / "config.yaml").exists():
        return how_to_go_on(folder, None)
    return "start it again, since nothing was saved"


def _interval(interval: list[float | None] | None) -> str:
    low, high = interval or (None, None)
    if low is None or high is None or math.isnan(low):
        return ""
    return f" (95 % interval {low:.1%} to {high:.1%})"


def _print_summary(folder: Path, summary: dict[str, Any]) -> None:
    shown, quoted = escape(str(folder)), escape(shlex.quote(str(folder)))
    if (
        summary["success_before_interval"] is not None
        or summary["success_after_interval"] is not None
    ):
        console.print(f"\n{before_and_after(summary)}", highlight=False)
    console.print(
        f"{_suite_lines(summary)}largest staleness {summary['largest_staleness']:.0f} (bound"
        f" {summary['max_staleness']}); {summary['tasks']['trained']} of"
        f" {summary['tasks']['total']} tasks trained, {summary['tasks']['masked']} in batches"
        f" without a loss, {summary['tasks']['failed']} failed\n\nWhere to look next, in"
        f" {shown}:\n  reward_curve.png   the curve\n  summary.json       this, and the fates of"
        " all episodes\n  metrics.jsonl      every step;  tensorboard --logdir "
        f"{quoted}\n"
        "  trajectories/      every episode, as text and as tokens (Parquet)\n"
        f"  checkpoints/       the trained model;  agentrl eval {quoted}",
        highlight=False,
        soft_wrap=True,
    )


def before_and_after(summary: dict[str, Any]) -> str:
    """The success on held-out tasks before and after training, in a line with colours of rich."""
    before = f"[bold]{_share(summary['success_before'])}[/bold] before reinforcement learning"
    interval_before = _interval(summary["success_before_interval"])
    failed_before = _failed_note(summary.get("failed_before"))
    after = f"[bold green]{_share(summary['success_after'])}[/bold green]"
    interval_after = _interval(summary["success_after_interval"])
    failed_after = _failed_note(summary.get("failed_after"))
    return (
        f"held-out success {before}{interval_before}{failed_before}, "
        f"{after} after {summary['steps']} steps{interval_after}{failed_after}"
    )


def _failed_note(episodes: float | None) -> str:
    """The number of episodes that an evaluation's figures leave out, in words."""
    return f" ({episodes:.0f} episodes failed and do not count)" if episodes else ""


def _share(value: float | None) -> str:
    """A share; unknown where all episodes failed, or their success is unknown."""
    return "unknown" if value is None or math.isnan(value) else f"{value:.1%}"


def _suite_lines(summary: dict[str, Any]) -> str:
    """A line for each suite: success before and after."""
    lines = []
    for name, ends in summary.get("suites", {}).items():
        if ends:
            before, after = ends.get("before", {}), ends.get("after", {})
            interval = _interval([after.get("success_low"), after.get("success_high")])
            passes = "".join(
                f", {key} {_share(after[key])}" for key in after if re.fullmatch(r"pass@\d+", key)
            )
            at_first = f"{_share(before.get('success'))}{_failed_note(before.get('failed'))}"
            change = f"{at_first} before, {_share(after.get('success'))} after"
            lines.append(
                f"{name}: success {change}{interval}{passes}{_failed_note(after.get('failed'))}\n"
            )
    return "".join(lines)
