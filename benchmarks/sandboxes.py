"""The cost of sandboxes with a shell, by provider, in turns within one run.

    python benchmarks/sandboxes.py [--rounds 9] [--many 50] [--image IMAGE] [--host unix://...]

    start          until the first command of a new sandbox has answered
    exec           a command that does nothing
    write, read    a file of 1 MiB
    download       the working folder, of 100 files and 1 MiB
    snapshot       keep the files of that folder
    restore        until the first command of a sandbox that starts from them has answered
    close          until its processes and files are gone
    MiB            of main memory that the machine has less of, for each of `--many` that are live
    starts/s       of those, eight at a time

Milliseconds are medians. A process of this machine that does nothing is the unit to compare with.
Without `--image`, only jails are measured.
"""

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable
from typing import TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from agentrl.protocols import Command, Sandbox, SandboxProvider, SandboxSpec
from agentrl.sandbox.archive import archive_of
from agentrl.sandbox.providers import open_provider

T = TypeVar("T")
MIB = 1 << 20
NOTHING = Command(["true"])
FILES = {f"folder/{number}": bytes(MIB // 100) for number in range(100)}
AT_A_TIME = 8


class Clock:
    """The milliseconds of each kind of call."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)

    async def time(self, kind: str, call: Awaitable[T]) -> T:
        """The result of a call, whose time is kept."""
        begun = time.perf_counter()
        result = await call
        self.taken[kind].append(1000 * (time.perf_counter() - begun))
        return result


async def started(provider: SandboxProvider, spec: SandboxSpec) -> Sandbox:
    """A sandbox that has answered a command."""
    sandbox = await provider.start(spec)
    assert (await sandbox.run(NOTHING)).exit == 0
    return sandbox


async def one_round(provider: SandboxProvider, clock: Clock) -> None:
    """Each call once."""
    sandbox = await clock.time("start", started(provider, SandboxSpec()))
    await clock.time("exec", sandbox.run(NOTHING))
    await clock.time("write", sandbox.write("file", bytes(MIB)))
    await clock.time("read", sandbox.read("file", most=2 * MIB))
    await sandbox.upload(archive_of(FILES))
    await clock.time("download", sandbox.download("folder"))
    snapshot = await clock.time("snapshot", sandbox.snapshot())
    again = await clock.time("restore", started(provider, SandboxSpec(snapshot)))
    await clock.time("close", again.close())
    await clock.time("close", sandbox.close())
    await provider.remove(snapshot)


async def plain(clock: Clock) -> None:
    """A process without a sandbox."""

    async def run() -> None:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()

    await clock.time("exec", run())


async def settled_memory() -> int:
    """Bytes of free memory, once it has stopped changing: what ends lets go of it later."""
    before, now = 0, psutil.virtual_memory().available
    while abs(now - before) > 4 * MIB:
        await asyncio.sleep(1)
        before, now = now, psutil.virtual_memory().available
    return now


async def many_live(provider: SandboxProvider, count: int) -> tuple[float, float]:
    """MiB for each of so many live sandboxes, and how many are started in a second."""
    slots, live = asyncio.Semaphore(AT_A_TIME), list[Sandbox]()

    async def start() -> None:
        async with slots:
            live.append(await started(provider, SandboxSpec()))

    before, begun = await settled_memory(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(start())
    seconds = time.perf_counter() - begun
    taken = before - await settled_memory()
    async with asyncio.TaskGroup() as group:
        for sandbox in live:
            group.create_task(sandbox.close())
    return taken / count / MIB, count / seconds


async def measure(choices: list[dict[str, str]], rounds: int, many: int) -> Table:
    """A column for each provider."""
    kinds = ("start", "exec", "write", "read", "download", "snapshot", "restore", "close")
    table = Table("", *(choice["name"] for choice in choices), title="milliseconds")
    providers = [await open_provider(choice) for choice in choices]
    clocks, unit = [Clock() for _ in providers], Clock()
    for _ in range(rounds):
        for provider, clock in zip(providers, clocks, strict=True):
            await one_round(provider, clock)
        await plain(unit)
    for kind in kinds:
        table.add_row(kind, *(f"{statistics.median(clock.taken[kind]):.0f}" for clock in clocks))
    process = statistics.median(unit.taken["exec"])
    table.add_row("a plain process", *[f"{process:.1f}"] * len(choices))
    for provider in providers:  # the first ones also start what all share
        await many_live(provider, AT_A_TIME)
    crowds = [await many_live(provider, many) for provider in providers]
    table.add_row("MiB", *(f"{memory:.1f}" for memory, _ in crowds))
    table.add_row("starts/s", *(f"{rate:.1f}" for _, rate in crowds))
    for provider in providers:
        await provider.close()
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--many", type=int, default=50)
    parser.add_argument("--image", default="")
    parser.add_argument("--host", default="")
    args = parser.parse_args()
    choices = [{"name": "jail"}]
    if args.image:
        host = {"host": args.host} if args.host else {}
        choices.append({"name": "docker", "image": args.image, **host})
    Console().print(asyncio.run(measure(choices, args.rounds, args.many)))


if __name__ == "__main__":
    main()
