"""`agentrl serve` and `agentrl gateway`."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from agentrl.cli.arguments import EnvPython, EnvRequires, Overrides, Step, env_options
from agentrl.cli.console import console
from agentrl.cli.run_folders import model_to_evaluate, output, run_config
from agentrl.config.from_file import load_config
from agentrl.flow import run_steadily
from agentrl.flow.stop_signals import handle_stop_signals
from agentrl.net.credentials import secret_in
from agentrl.protocols import Isolation

if TYPE_CHECKING:
    from agentrl.cluster.workers import Cluster


def serve(  # noqa: PLR0917  typer calls it by name
    name: Annotated[
        str,
        typer.Argument(metavar="ENV", help="A registered name, an address or package.module:Name."),
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8800,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but a loopback address needs a token.")
    ] = ("127.0.0.1"),
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that clients must send.")
    ] = "AGENTRL_REMOTE_TOKEN",
    processes: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that the sessions are spread over; one that dies is replaced."
        ),
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The Ray cluster whose nodes run the processes: auto, or host:port of its head.",
        ),
    ] = None,
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Sessions at once; further clients are asked to wait.")
    ] = 1024,
    max_processes: Annotated[
        int, typer.Option(min=1, help="The same, if each has its own process.")
    ] = 64,
    isolation: Annotated[
        Isolation | None,
        typer.Option(help="Where each session's environment runs; by default where it declares."),
    ] = None,
    idle_seconds: Annotated[
        float, typer.Option(min=0.1, help="When a session without requests expires.")
    ] = 900.0,
    reconnect_seconds: Annotated[
        float,
        typer.Option(
            min=0.1, help="When the sessions of a client whose connection is gone expire."
        ),
    ] = 60.0,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="The longest message accepted.")] = 1
    << 20,
    request_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a client may take for a request.")
    ] = 30.0,
    call_seconds: Annotated[float, typer.Option(min=0.1, help="The longest reset or step.")] = 60.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long episodes may continue after a stop signal.")
    ] = 60.0,
    options: Annotated[
        str,
        typer.Option(
            help="Options of every episode, as YAML; clients cannot choose others for these."
        ),
    ] = "{}",
    allow_options: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Options that clients may set although they can choose code."
        ),
    ] = "",
    pictures: Annotated[
        bool, typer.Option(help="Send the environment's pictures of its states too.")
    ] = False,
    python: EnvPython = None,
    requires: EnvRequires = None,
) -> None:
    """Serve an environment over HTTP to runs elsewhere, which set
    [bold]env=http://HOST:PORT[/bold].
    """
    from agentrl.hosting.client_options import ClientOptions
    from agentrl.hosting.factory import env_factory
    from agentrl.remote.openenv.server import add_openenv
    from agentrl.remote.server import EnvServer
    from agentrl.remote.sessions import ServerLimits
    from agentrl.remote.spread_server import SpreadServer

    make = partial(env_factory, name, isolation, python, tuple(requires or ()))
    if processes == 1 and ray is None:
        server: Callable[..., EnvServer] = partial(EnvServer, make())
    else:
        from agentrl.cluster.local import LocalCluster
        from agentrl.cluster.ray_cluster import RayCluster

        cluster: Cluster
        if ray is None:
            cluster = LocalCluster(LocalCluster.Config())
        else:
            cluster = RayCluster(RayCluster.Config(address=ray))
        server = partial(SpreadServer, cluster, processes, make)
    server(
        name=name,
        isolation=isolation,
        pictures=pictures,
        host=host,
        port=port,
        token=secret_in(token_env) or None,
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
        on_start=lambda url: console.print(
            f"{escape(name)} at {url}", highlight=False, soft_wrap=True
        ),
        protocols=(add_openenv,),
        options=ClientOptions.Config(
            fixed=env_options(options),
            allowed=tuple(name.strip() for name in allow_options.split(",") if name.strip()),
        ),
    ).run()


def gateway(  # noqa: PLR0917  typer calls it by name
    run: Annotated[
        Path, typer.Argument(metavar="RUN|CONFIG", help="The folder of a run, or a YAML file.")
    ],
    overrides: Overrides = None,
    record: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Where what is said is recorded; `recipe: dpo` reads it."
        ),
    ] = Path("recordings"),
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that API keys begin with.")
    ] = "AGENTRL_GATEWAY_TOKEN",
    step: Step = "latest",
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port to listen on, instead of gateway.port; 0: any free one."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, instead of gateway.host.")
    ] = None,
) -> None:
    """Serve a run's checkpoint, or a config's model, to any client of a chat API, and record what
    is said.
    """

    from agentrl.gateway.server import check_packages
    from agentrl.recipes.serve_policy import serve_policy
    from agentrl.remote.http_server import check_reach

    check_packages()  # before the model is loaded
    record = output(record)
    given = {"gateway.port": port, "gateway.host": host}
    chosen = [
        *(overrides or []),
        *(f"{name}={value}" for name, value in given.items() if value is not None),
    ]
    loaded = load_config(run_config(run) if run.is_dir() else run, chosen)
    model, token = model_to_evaluate(run, loaded, step), secret_in(token_env)
    check_reach(
        "gateway.host",
        loaded.config.gateway.host,
        token,
        f"set a token in the environment variable {token_env}",
    )

    def said(url: str) -> None:
        key = f"${token_env}:NAME" if token else "NAME"
        console.print(
            f"{url}/v1  (API key {key}, a name for each episode; Ctrl-C ends it)",
            highlight=False,
            soft_wrap=True,
        )

    async def serve_until_stopped() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop(number: int, frame: object) -> None:
            loop.call_soon_threadsafe(stopped.set)  # which wakes the loop

        with handle_stop_signals(stop):
            await serve_policy(
                loaded.config, model, record, token=token, on_start=said, stopped=stopped
            )

    run_steadily(serve_until_stopped())
