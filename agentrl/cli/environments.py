"""Commands about environments: `envs`, `check-env`, `check-tasks`, `new-env`, `play`."""

import asyncio
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from agentrl import plugins
from agentrl.cli.arguments import EnvPython, EnvRequires, env_options
from agentrl.cli.console import console
from agentrl.errors import AgentRLError, ConformanceError
from agentrl.flow import Flow


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


def check_environment(
    name: Annotated[
        str, typer.Argument(metavar="ENV", help="A registered name or package.module:Name.")
    ],
    options: Annotated[str, typer.Option(help="Options of reset, as YAML.")] = "{}",
    gold: Annotated[
        str,
        typer.Option(metavar="PACKAGE.MODULE:PLAYER", help="A scripted player that must succeed."),
    ] = "",
    python: EnvPython = None,
    requires: EnvRequires = None,
) -> None:
    """Check that an environment keeps the contract: API, determinism, no leaks, closing, reward for
    right answers.
    """
    from agentrl.hosting.factory import env_factory
    from agentrl.testing import check_env

    foreign = python is not None or bool(requires)
    # If this interpreter can run it, it is checked as an object of this process, whatever its
    # isolation.
    make = (
        env_factory(name, python=python, requires=requires or ())
        if foreign
        else plugins.load("envs", name)
    )
    player = plugins.load("players", gold) if gold else None
    if foreign and player:
        player = partial(_consult, player)
    try:
        # The first call in another interpreter also imports its packages; a full server is waited
        # for.
        patient = foreign or "://" in name
        remarks = check_env(
            make,
            options=env_options(options),
            gold=player,
            deadline=60.0 if patient else 5.0,
            address=None if foreign else name,
        )
    except ConformanceError as error:
        console.print(
            f"[red]{name} breaks the contract:[/red]\n{escape(str(error))}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    console.print(f"[green]{escape(name)} keeps the contract[/green]")
    for remark in remarks:
        console.print(escape(remark), highlight=False, soft_wrap=True)


def _consult(player: Any, env: Any, rng: Any) -> str:
    """Ask a player for its action in the process where the environment runs."""
    return str(env.consult(player, rng))


def check_tasks(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A task, or a folder of tasks.")],
    sandbox: Annotated[
        str, typer.Option(metavar="YAML", help="The provider of sandboxes and its settings.")
    ] = "{name: jail}",
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
) -> None:
    """Check tasks in Harbor's format: build each; its solution must earn 1, and doing nothing 0."""
    from agentrl.sandbox.harbor.check import TaskCheck, check_task
    from agentrl.sandbox.harbor.task import task_folders
    from agentrl.sandbox.harbor.trial import TrialSettings
    from agentrl.sandbox.providers import open_provider

    async def check_all() -> list[TaskCheck]:
        provider = await open_provider(env_options(sandbox))
        free = asyncio.Semaphore(jobs)

        async def check(one: Path) -> TaskCheck:
            async with free:
                return await check_task(one, provider, TrialSettings())

        try:
            async with Flow("tasks") as flow:
                checks = [flow.start(check(one), name=one.name) for one in folders]
                return [await each for each in checks]
        finally:
            await provider.close()

    folders = task_folders(folder)
    found = asyncio.run(check_all())
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("task", "solution", "nothing", "what is wrong"):
        table.add_column(column, overflow="fold")
    for one in found:
        rewards = (
            "-" if reward is None else f"{reward:g}" for reward in (one.solution, one.nothing)
        )
        table.add_row(one.name, *rewards, f"[red]{escape(one.why)}[/red]" if one.why else "")
    console.print(table)
    if any(one.why for one in found):
        raise typer.Exit(1)


def new_env(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the package and its folder, such as my_game."),
    ],
    parent: Annotated[
        Path, typer.Option("--in", metavar="FOLDER", help="Where to write it.")
    ] = Path(),
    tools: Annotated[
        bool, typer.Option("--tools", help="An environment with tools, instead of a game of text.")
    ] = False,
) -> None:
    """Write a package: an environment, a player, a test, an entry point, and a config by which a
    tiny model learns.
    """
    from agentrl.cli.new_env import class_name, write_env_package

    folder = write_env_package(name, parent, tools=tools)
    module = folder.name
    address = f"{module}:{class_name(module)}"
    shown, quoted = escape(str(folder)), escape(shlex.quote(str(folder)))
    console.print(
        f"wrote {shown}: an environment with a player, its test and its entry point, and a config"
        f" that trains a tiny model. Now:\n\n  cd {quoted}\n  agentrl check-env {address}\n "
        f" agentrl play {address}\n  agentrl play {address} --player {module}:player\n  agentrl"
        f" train {module}.yaml\n\nAfter `pip install -e .` there, its name is {module!r}"
        " everywhere.",
        highlight=False,
        soft_wrap=True,
    )


def play(  # noqa: PLR0917  typer calls it by name
    name: Annotated[
        str, typer.Argument(metavar="ENV", help="A registered name or package.module:Name.")
    ],
    seed: Annotated[int, typer.Option(help="Seed of the episode.")] = 0,
    options: Annotated[str, typer.Option(help="Options of reset, as YAML.")] = "{}",
    player: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A scripted player instead of you."),
    ] = None,
    person: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="AGENT", help="The agent you play, if --player plays the others."
        ),
    ] = None,
    max_turns: Annotated[int, typer.Option(help="Turns after which to stop.")] = 64,
    python: EnvPython = None,
    requires: EnvRequires = None,
) -> None:
    """Play an environment in the terminal; shows the system prompt, tools and observations the
    model would see.
    """
    from agentrl.cli.play import play as play_episode

    asyncio.run(
        play_episode(
            name,
            console,
            seed=seed,
            options=env_options(options),
            player=plugins.load("players", player) if player else None,
            person=person,
            max_turns=max_turns,
            python=python,
            requires=requires or (),
        )
    )
