"""The cost of the sandbox: a cold start, a run in a warm jail, and runs per second.

    python benchmarks/sandbox.py [--seconds 3] [--rounds 3] [--size 2]

"plain" is a new Python for each program, without isolation: the obvious first solution. "numpy" is
a program that imports numpy, in a warm jail that has not imported it yet, and in one that has
(`preload`). The table shows the best round.
"""

import argparse
import asyncio
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

from agentrl.flow import Flow
from agentrl.sandbox.outcome import Ran
from agentrl.sandbox.pool import BACKENDS, ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig

SQUARE = "print(int(input()) ** 2)"
NUMPY = "import numpy; print(int(numpy.arange(13).sum()))"
Run = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds to the first answer and of a run alone; runs per second; CPU ms per run; MiB per
    jail.
    """

    name: str
    cold: float
    alone: float
    rate: float
    cpu: float
    memory: float


async def plain() -> None:
    """A new interpreter."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SQUARE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert (await process.communicate(b"12"))[0] == b"144\n"


async def measure(name: str, run: Run, begun: float, seconds: float, size: int) -> Row:
    """Measure `run`. `begun`: when the thing that it uses was started."""
    await run()
    cold = time.perf_counter() - begun
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds / 3:
        await run()
        count += 1
    alone = (time.perf_counter() - begun) / count
    runs, used, begun = 0, cpu(), time.perf_counter()

    async def work() -> None:
        nonlocal runs
        while time.perf_counter() - begun < seconds:
            await run()
            runs += 1

    async with Flow("benchmark") as flow:
        for number in range(size):
            flow.start(work(), name=str(number))
    rate = runs / (time.perf_counter() - begun)
    return Row(name, 1000 * cold, 1000 * alone, rate, 1000 * (cpu() - used) / runs, memory(size))


def cpu() -> float:
    """CPU seconds so far of this process and all its descendants."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(
        sum(each.user + each.system + each.children_user + each.children_system for each in times)
    )


def memory(jails: int) -> float:
    """MiB per jail: its own memory, and its share of the shared memory."""
    used = 0
    for process in psutil.Process().children(recursive=True):
        used += process.memory_full_info().pss
    return used / jails / 2**20


async def sandboxed(name: str, config: SandboxConfig, program: str, seconds: float) -> Row:
    """The row of a sandbox."""
    begun = time.perf_counter()
    async with ProgramSandbox(config) as sandbox:

        async def run() -> None:
            outcome = await sandbox.run(program, "12")
            assert isinstance(outcome, Ran), outcome
            assert outcome.exit == 0, outcome

        return await measure(name, run, begun, seconds, config.size)


async def rows(seconds: float, size: int) -> list[Row]:
    """One round."""
    found = [await measure("plain", plain, time.perf_counter(), seconds, size)]
    for backend in BACKENDS:
        found.append(
            await sandboxed(backend, SandboxConfig(backend=backend, size=size), SQUARE, seconds)
        )
    packages = (sysconfig.get_path("purelib"),)
    for name, preload in (("numpy", ()), ("numpy, preloaded", ("numpy",))):
        config = SandboxConfig(size=size, paths=packages, preload=preload)
        found.append(await sandboxed(name, config, NUMPY, seconds))
    return found


def best(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The best of each figure of a row: other work on the machine only makes it worse."""
    return [
        Row(
            same[0].name,
            *(min(getattr(row, key) for row in same) for key in ("cold", "alone")),
            max(row.rate for row in same),
            *(min(getattr(row, key) for row in same) for key in ("cpu", "memory")),
        )
        for same in zip(*rounds, strict=True)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=2)
    arguments = parser.parse_args()
    rounds = [asyncio.run(rows(arguments.seconds, arguments.size)) for _ in range(arguments.rounds)]
    table = Table(
        "",
        "cold start, ms",
        "a run, ms",
        f"runs/s, {arguments.size} at a time",
        "CPU ms a run",
        "MiB a jail",
    )
    for row in best(rounds):
        table.add_row(
            row.name,
            f"{row.cold:.0f}",
            f"{row.alone:.1f}",
            f"{row.rate:.0f}",
            f"{row.cpu:.1f}",
            f"{row.memory:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
