"""The cost of the ledger for its caller, compared with writing each row at once, for the same
operations in one run.

    python benchmarks/ledger.py [--episodes 1000000] [--each 100000] [--rounds 8]

Tasks of 8 episodes are admitted, begun and trained, 64 tasks at a time. In the first table the
caller does nothing else, so the ledger's thread cannot keep up, and the caller waits for the full
queue: the worst case. CPU time is of all threads. "nothing" calls a ledger that does nothing, so
its time is the benchmark's own.

In the second table the caller begins an episode every 50 µs, faster than a scheduler does, and
computes in between. It "stood still" between two readings of the clock, which it reads after each
call and many times in between. "a thread" does nothing either, but runs a thread that computes for
a millisecond after every 512 episodes without holding the interpreter lock: with few cores, that
alone stops the caller. The ways take turns, in rounds of a second. Other work on the machine only
adds time, so the best round says the most.
"""

import argparse
import hashlib
import json
import resource
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from agentrl.ledger.ledger import Ledger
from agentrl.trajectory import Task

GROUP, BATCH = 8, 64
OPTIONS = {"size": 4, "slippery": False}


class Writes(Protocol):
    """The methods of a ledger that are measured."""

    def admit(self, number: int, task: Task, version: int) -> None: ...
    def begin(self, number: int, member: int, attempt: int) -> None: ...
    def trained(self, step: int, outcomes: Mapping[int, Sequence[float]]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Nothing:
    """Accepts every operation and does nothing."""

    def admit(self, number: int, task: Task, version: int) -> None: ...
    def begin(self, number: int, member: int, attempt: int) -> None: ...
    def trained(self, step: int, outcomes: Mapping[int, Sequence[float]]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Thread(Nothing):
    """Does nothing either, but a thread computes without the interpreter lock, for as long as the
    ledger writes.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def begin(self, number: int, member: int, attempt: int) -> None:
        self._begun += 1
        if self._begun % 512 == 0:
            self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        data = bytes(2**20)
        while not self._closing:
            self._wake.wait()
            self._wake.clear()
            hashlib.sha256(data).digest()


class RowByRow:
    """The caller writes each row in its own transaction, as the ledger did at first."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;CREATE TABLE tasks (number INTEGER"
            " PRIMARY KEY, id TEXT UNIQUE, env TEXT, seed INTEGER, options TEXT, admitted_version"
            " INTEGER, fate TEXT, step INTEGER, why TEXT, rewards TEXT);CREATE TABLE episodes"
            " (launch INTEGER, id TEXT, task INTEGER, fate TEXT, step INTEGER, why TEXT, PRIMARY"
            " KEY (launch, id));CREATE INDEX episodes_of_task ON episodes (task, fate);"
        )

    def admit(self, number: int, task: Task, version: int) -> None:
        self._db.execute(
            "INSERT INTO tasks (number, id, env, seed, options, admitted_version) VALUES (?, ?, ?,"
            " ?, ?, ?)",
            (number, task.id, task.env, task.seed, json.dumps(dict(task.options)), version),
        )

    def begin(self, number: int, member: int, attempt: int) -> None:
        name = f"train-{number:06d}/{member}/{attempt}"
        self._db.execute("INSERT INTO episodes (launch, id, task) VALUES (0, ?, ?)", (name, number))

    def trained(self, step: int, outcomes: Mapping[int, Sequence[float]]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            for number, rewards in outcomes.items():
                self._db.execute(
                    "UPDATE tasks SET fate = 'trained', step = ?, rewards = ? WHERE number = ?",
                    (step, json.dumps(rewards), number),
                )
                self._db.execute(
                    "UPDATE episodes SET fate = 'trained', step = ? WHERE task = ?", (step, number)
                )

    def flush(self) -> None: ...

    def close(self) -> None:
        self._db.close()


@dataclass(frozen=True)
class Cost:
    """The cost of one way, in seconds. `grown`: growth in resident bytes from the first tenth to
    the end.
    """

    wall: float
    cpu: float
    caller_cpu: float
    longest: float
    stops: int
    grown: int


class Stopwatch:
    """How long its caller stood still: the longest time between two readings, and how often it was
    over 3 ms.
    """

    def __init__(self) -> None:
        self.last, self.longest, self.stops = time.perf_counter(), 0.0, 0

    def look(self) -> float:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self.last)
        self.stops += now - self.last > 3e-3
        self.last = now
        return now


def measure(ledger: Writes, episodes: int, pause: float) -> Cost:
    """Time `episodes` episodes; compute until `pause` seconds have passed for each."""
    start, caller, first, early, paused = (
        time.perf_counter(),
        time.thread_time(),
        cpu_seconds(),
        0,
        0.0,
    )
    tasks, watch, due = episodes // GROUP, Stopwatch(), start
    for step, begin in enumerate(range(0, tasks, BATCH)):
        numbers = range(begin, min(begin + BATCH, tasks))
        for number in numbers:
            ledger.admit(
                number, Task("frozen_lake", number * 7919, OPTIONS, f"train-{number:06d}"), step
            )
            watch.look()
        for number in numbers:
            for member in range(GROUP):
                ledger.begin(number, member, 0)
                watch.look()
            due += pause * GROUP
            before = time.thread_time()
            while pause and watch.look() < due:
                pass
            paused += time.thread_time() - before
        ledger.trained(step, {number: [1.0, 0.0] * (GROUP // 2) for number in numbers})
        watch.look()
        early = early or (resident() if begin > tasks // 10 else 0)
    used = time.thread_time() - caller - paused
    ledger.flush()
    wall, cpu = time.perf_counter() - start, cpu_seconds() - first - paused
    return Cost(wall, cpu, used, watch.longest, watch.stops, resident() - early)


def cpu_seconds() -> float:
    """User and system CPU time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident() -> int:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cost_table(folder: Path, episodes: int, each: int) -> Table:
    """The cost of each way at full speed."""
    table = Table(
        "way",
        "episodes",
        "ops/s",
        "CPU µs/episode",
        "the caller's",
        "stood still ms",
        "file MB",
        "grown MB",
    )
    spent: dict[str, float] = {}
    ways: list[tuple[str, Writes, int]] = [
        ("nothing", Nothing(), each),
        ("row by row", RowByRow(folder / "row by row"), each),
        ("ledger", Ledger(folder / "ledger"), episodes),
    ]
    for name, ledger, count in ways:
        cost = measure(ledger, count, pause=0.0)
        ledger.close()
        file = folder / name
        spent[name] = cost.cpu / count
        table.add_row(
            name,
            f"{count:,}",
            f"{(count + count // GROUP * 2) / cost.wall:,.0f}",
            f"{cost.cpu / count * 1e6:.2f}",
            f"{cost.caller_cpu / count * 1e6:.2f}",
            f"{cost.longest * 1e3:.1f}",
            f"{file.stat().st_size / 1e6:.1f}" if file.exists() else "",
            f"{cost.grown / 1e6:.1f}",
        )
    table.caption = f"CPU of row by row / ledger: {spent['row by row'] / spent['ledger']:.1f}"
    return table


def stops_table(folder: Path, rounds: int) -> Table:
    """How long a paced caller stood still with each way."""
    table = Table("way", "best round: longest ms", "median round", "median round: times over 3 ms")
    costs: dict[str, list[Cost]] = {"nothing": [], "a thread": [], "row by row": [], "ledger": []}
    for number in range(rounds):
        ways: list[Writes] = [
            Nothing(),
            Thread(),
            RowByRow(folder / f"rows {number}"),
            Ledger(folder / f"ledger {number}"),
        ]
        for name, ledger in zip(costs, ways, strict=True):
            costs[name].append(measure(ledger, 20_000, pause=50e-6))
            ledger.close()
    for name, measured in costs.items():
        longest = [cost.longest * 1e3 for cost in measured]
        stops = statistics.median(cost.stops for cost in measured)
        table.add_row(
            name, f"{min(longest):.1f}", f"{statistics.median(longest):.1f}", f"{stops:g}"
        )
    return table


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--episodes", type=int, default=1_000_000, help="episodes of the ledger at full speed"
    )
    arguments.add_argument("--each", type=int, default=100_000, help="episodes of the other ways")
    arguments.add_argument("--rounds", type=int, default=8, help="rounds of the second table")
    options = arguments.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        console.print(cost_table(Path(folder), options.episodes, options.each))
        console.print(stops_table(Path(folder), options.rounds))


if __name__ == "__main__":
    main()
