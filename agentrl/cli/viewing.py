"""Commands that look at runs: `view`, `profile`, `report`, `export-episodes`."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from agentrl.cli.console import console
from agentrl.cli.run_folders import output, run_config
from agentrl.errors import ConfigError
from agentrl.net.credentials import secret_in


def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN|FOLDER ...]", help="Runs, or folders with runs in them."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8801,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but a loopback address needs a token.")
    ] = "127.0.0.1",
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that the page asks for.")
    ] = "AGENTRL_VIEW_TOKEN",
) -> None:
    """Show runs in a browser, also while they go on, or before the first one begins: curves,
    episodes, tokens, fates, time.
    """
    from agentrl.viewer.folders import find_runs
    from agentrl.viewer.server import PageServer

    token, places = secret_in(token_env) or None, runs or [Path("runs")]

    def said(url: str) -> None:
        console.print(f"{url}  (Ctrl-C ends it)", highlight=False, soft_wrap=True)
        for place in places:
            if not place.is_dir():
                console.print(
                    f"there is no folder {escape(repr(str(place)))} yet",
                    highlight=False,
                    soft_wrap=True,
                )
        if not find_runs(place for place in places if place.is_dir()):
            console.print(
                "there is no run yet; one that begins is shown by itself",
                highlight=False,
                soft_wrap=True,
            )

    PageServer(places, host=host, port=port, token=token, on_start=said).run()


def show_profile(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST", help="Only these steps, counted from 0; by default all."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write what episodes did, for https://ui.perfetto.dev."
        ),
    ] = None,
    live: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=1.0, help="First record a trace of the running run for so long."
        ),
    ] = None,
) -> None:
    """Show where a run's time went: by set of resources that were busy at the same time, and what
    follows.
    """
    from agentrl.viewer.live_profile import record_live
    from agentrl.viewer.profile import profile

    folder, chosen = run_config(run).parent, _parse_range(steps)
    trace = output(trace, file=True) if trace is not None else None
    if live is not None:
        if steps is not None or trace is not None:
            raise ConfigError(
                "--live shows what happens from now on: leave out --steps and --trace"
            )
        console.print(f"recording for {live:g} s, or until the run ends", highlight=False)
        asyncio.run(record_live(folder, live))
    profile(folder, console, chosen, trace)


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")
    ],
    into: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where to write it; by default RUN.html here."
        ),
    ] = None,
) -> None:
    """Write a run as one HTML file to send to a colleague: curves, evaluations, warnings, time,
    episodes, config.
    """
    from agentrl.viewer.report import write_report

    folder = run_config(run).parent
    path = output(into or Path(f"{folder.resolve().name}.html"), file=True)
    write_report(folder, path)
    console.print(f"wrote {escape(str(path))}", highlight=False, soft_wrap=True)


def export_run_episodes(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, which may still be running.")
    ],
    into: Annotated[
        Path,
        typer.Argument(
            metavar="INTO", help="A new folder (ATIF), or a new .jsonl or .parquet file."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only the episodes of this step.")
    ] = None,
    layout: Annotated[
        Literal["verifiers", "openenv"] | None,
        typer.Option(
            "--format",
            help="What each line of a .jsonl file is: a rollout as verifiers saves it, or a"
            " training trace of OpenEnv. By default all that is known of an episode.",
        ),
    ] = None,
) -> None:
    """Write the trained episodes of a run for other programs: as ATIF, Harbor's format, JSON lines,
    a data set, rollouts of verifiers or training traces of OpenEnv.
    """
    from agentrl.viewer.episode_export import export_episodes

    count = export_episodes(run_config(run).parent, output(into), step, layout)
    console.print(
        f"wrote {count:,} episodes to {escape(str(into))}", highlight=False, soft_wrap=True
    )


def _parse_range(steps: str | None) -> tuple[int, int] | None:
    if steps is None:
        return None
    first, _, last = steps.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise ConfigError(
            f"--steps {steps!r} is no range of steps: write FIRST:LAST, such as 10:19, or a single"
            " step"
        )
    return int(first), int(last or first)
