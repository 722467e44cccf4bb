"""`agentrl simulate` and `agentrl plan`: a run before it is paid for."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.arguments import ConfigPath, Overrides
from agentrl.cli.console import console
from agentrl.config.from_file import load_config


def simulate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run the config's scheduler on models of engine, environments and trainer, under a virtual
    clock.

    Predicts throughput, utilisation, staleness and bias within seconds, without a language model.
    The config's section `simulation` sets the models: [bold]agentrl simulate CONFIG
    simulation.env.hung=0.01[/bold].
    """
    from agentrl.simulate.report import print_report
    from agentrl.simulate.world import World

    loaded = load_config(config, overrides or []).config
    world = World(
        loaded.rollout,
        loaded.simulation,
        loaded.steps,
        loaded.seed,
        weight_update=loaded.weights.update,
    )
    print_report(world.run(), loaded.rollout.max_staleness, console)


def plan(  # noqa: PLR0917  typer calls it by name
    config: ConfigPath,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of each node; 0: the CPU of this machine.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    device: Annotated[
        str, typer.Option(help="Which GPU, such as B200, H100, A100-40GB or L40S.")
    ] = "H100",
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Take episodes and speeds from this run's metrics."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Predict the devices of a run, their memory use and the time of a step, with the reasons.

    No GPU is needed and no weights are loaded. Without --gpus the plan is for this machine.
    """
    from agentrl.placement.devices import gpu_named, host
    from agentrl.placement.inventory import Inventory
    from agentrl.placement.probe import visible
    from agentrl.planner import measured, report
    from agentrl.planner.run_facts import model_of
    from agentrl.planner.search import make_plan

    loaded = load_config(config, overrides or []).config
    inventory = (
        visible()
        if gpus is None
        else Inventory.uniform(gpu_named(device), gpus, nodes)
        if gpus
        else Inventory.uniform(host())
    )
    if run is not None:
        loaded = measured.with_measured(loaded, measured.read_measurements(run), inventory)
    made = make_plan(loaded, inventory, model_of(loaded))
    if as_json:
        console.print_json(data=report.as_json(made))
    else:
        report.print_plan(made, console)
