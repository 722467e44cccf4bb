"""The `agentrl` command. Errors in the input are printed in red on stderr, with exit status 2.

A module has the commands of one subject, as functions; here they get their names, in the order of
`agentrl --help`.
"""

import logging
import sys

import typer
from rich.markup import escape

from agentrl.cli import (
    doctor,
    engines,
    environments,
    evaluation,
    history,
    models,
    planning,
    replay,
    serving,
    settings,
    tasks,
    training,
    viewing,
)
from agentrl.cli.arguments import TakesSettings
from agentrl.cli.console import SafeConsole
from agentrl.errors import AgentRLError, ConfigError
from agentrl.files.caches import prepare_caches
from agentrl.files.disk_errors import storage_problem
from agentrl.files.output import open_standard_streams, print_every_character

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.callback()(settings.show_version)
model_app = typer.Typer(no_args_is_help=True, help="Make models.")
app.add_typer(model_app, name="model")
engines_app = typer.Typer(
    no_args_is_help=True, help="Add engines to a live run, or remove them, or list them."
)
app.add_typer(engines_app, name="engines")
app.command(cls=TakesSettings)(training.train)
app.command(cls=TakesSettings)(training.demo)
app.command("eval", cls=TakesSettings)(evaluation.evaluate)
app.command("compare")(evaluation.compare_runs)
app.command("rescore")(evaluation.rescore_run)
app.command("export")(models.export_model)
app.command("push-to-hub")(models.push_to_hub)
app.command("ledger")(history.show_ledger)
app.command("lineage")(history.show_lineage)
app.command(cls=TakesSettings)(planning.simulate)
app.command(cls=TakesSettings)(planning.plan)
app.command()(serving.serve)
app.command(cls=TakesSettings)(serving.gateway)
app.command()(viewing.view)
app.command("profile")(viewing.show_profile)
app.command()(viewing.report)
app.command("export-episodes")(viewing.export_run_episodes)
app.command("replay")(replay.replay_episode)
app.command(cls=TakesSettings)(doctor.doctor)
app.command()(environments.envs)
app.command("check-model")(models.check_model)
app.command("check-env")(environments.check_environment)
app.command("check-tasks")(environments.check_tasks)
app.command("new-env")(environments.new_env)
app.command()(environments.play)
app.command(cls=TakesSettings)(tasks.tasks)
app.command("config", cls=TakesSettings)(settings.show_config)
model_app.command("init")(models.model_init)
engines_app.command("add")(engines.add)
engines_app.command("remove")(engines.remove)
engines_app.command("list")(engines.list_engines)


def _with_notes(error: Exception) -> str:
    """The message of an error, and the notes that were added to it, a line each."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def main() -> None:
    """Run the command line; turn an error into one message and an exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    open_standard_streams()
    print_every_character()
    errors = SafeConsole(stderr=True)
    # As `python -m` does, so that `module:Name` finds a plug-in in the current folder.
    sys.path.insert(0, "")
    prepare_caches()
    try:
        app(prog_name="agentrl")
    except ConfigError as error:
        text = _with_notes(error)
        errors.print(f"[red]error:[/red] {escape(text)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except AgentRLError as error:
        text = _with_notes(error)
        errors.print(
            f"[red]{type(error).__name__}:[/red] {escape(text)}", highlight=False, soft_wrap=True
        )
        sys.exit(1)
    except Exception as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        errors.print(f"[red]StorageError:[/red] {escape(problem)}", highlight=False, soft_wrap=True)
        sys.exit(1)
