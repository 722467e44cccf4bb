"""`agentrl engines`: the engines of a live run."""

import shlex
import time
from pathlib import Path
from threading import Event
from typing import Annotated

import typer
from rich.markup import escape

from agentrl.cli.console import console
from agentrl.cli.run_folders import run_config
from agentrl.config.from_file import load_config
from agentrl.config.run_config import unused_by
from agentrl.errors import ConfigError
from agentrl.observe.live_status import read_live_state
from agentrl.runs.engine_requests import AskedRun, EngineAnswer, EngineRequest, read_changes
from agentrl.viewer.folders import RunFolder

_LOOK_SECONDS = 0.25
_NOTICE_SECONDS = 15.0
"""After this time, the user is told that the run has not taken the request."""

_Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run that goes on, on this machine.")
]
_Count = Annotated[int, typer.Argument(metavar="[N]", min=1, help="How many.")]


def add(run: _Run, count: _Count = 1) -> None:
    """Add engines to a run that goes on. Each serves the newest weights before it gets requests.

    They are started where the run's cluster has room. The command ends when they serve.
    """
    _change(run, EngineRequest(change="add", count=count))


def remove(run: _Run, count: _Count = 1) -> None:
    """Remove engines from a run that goes on: those that do not serve at the moment, else the
    newest.

    What they sample continues on the others, from the same token. One engine stays.
    """
    _change(run, EngineRequest(change="remove", count=count))


def list_engines(run: _Run) -> None:
    """Show how many engines of a run serve, and the changes that it has had."""
    folder = run_config(run).parent
    state = read_live_state(folder) if RunFolder(folder.name, folder).status()["live"] else None
    counts = [] if state is None else [each for each in state.workers if "engine" in each.role]
    for each in counts:
        console.print(
            f"{each.role}: {each.alive} of {each.count} serve; {each.restarts} restarts",
            highlight=False,
        )
    if not counts:
        console.print("no engine runs on this machine at the moment", highlight=False)
    for change in read_changes(folder):
        step = "before the first step" if change.step is None else f"step {change.step}"
        console.print(f"{escape(f'{change.at[:19]} UTC, {step}: {change}')}", highlight=False)


def _change(run: Path, request: EngineRequest) -> None:
    """Ask a run for a change, wait until it is made, and show what has become of it."""
    folder = run_config(run).parent
    recipe = load_config(folder / "config.yaml").config.recipe
    if "engine" in unused_by(recipe):
        raise ConfigError(f"recipe={recipe.name} uses no engine: there is none to add or remove")
    live = RunFolder(folder.name, folder)
    if not live.status()["live"]:
        raise ConfigError(
            f"{folder} does not run on this machine, so its engines cannot be changed. Where it"
            f" does, write the same; or resume it with cluster.engines=N"
        )
    asked = AskedRun(folder, request)
    try:
        answer = _await_answer(live, asked)
    except KeyboardInterrupt:
        if asked.withdraw():
            console.print("\nwithdrawn: the run has not begun with it")
        else:
            command = f"agentrl engines list {shlex.quote(str(folder))}"
            console.print(f"\nthe run goes on with it; `{escape(command)}` shows it")
        raise typer.Exit(130) from None
    console.print(escape(answer.text), highlight=False, soft_wrap=True)
    if not answer.done:
        raise typer.Exit(1)


def _await_answer(live: RunFolder, asked: AskedRun) -> EngineAnswer:
    """Wait for the answer of a run.

    Raises:
        ConfigError: the run has ended before.
    """
    pause, begun, is_said = Event(), time.monotonic(), False
    while True:
        # Before the answer is looked for: a run may answer and then end.
        is_live = live.status()["live"]
        if (answer := asked.answer()) is not None:
            return answer
        if not is_live:
            asked.withdraw()
            raise ConfigError(f"the run in {live.path} ended before it had done this")
        if not is_said and not asked.is_taken and time.monotonic() - begun > _NOTICE_SECONDS:
            is_said = True
            console.print(
                "the run has not begun with it: it is starting, or ending. Ctrl-C takes it back",
                highlight=False,
            )
        pause.wait(_LOOK_SECONDS)
