"""How fast `agentrl view` answers over a long run, and how much memory it takes.

    python benchmarks/viewer.py [--episodes 100000] [--turns 8] [--tokens 64] [--folder FOLDER]

A run is made up in the format of real ones: 1,000 episodes a step, in groups of 8, all with tokens
and texts of their own. Then the server is started in its own process and asked over HTTP. Printed
are seconds until the first page stands (process start, page, list of runs, metrics), of the first
table of episodes (which reads the whole index), of later tables with filters, of a search through
all texts, of single episodes drawn at random (the median and the slowest of 50), each with the CPU
time that the server took, and the server's largest resident memory.
"""

import argparse
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.ledger.ledger import Ledger
from agentrl.observe.metrics import MetricsFile
from agentrl.testing.made_up_run import STEP_SECONDS, MadeUpRun
from agentrl.trajectory import Task

GROUPS, MEMBERS = 125, 8
HELD_OUT = 200
"""Held-out tasks of each of ten evaluations."""


def main() -> None:
    """Make up a run unless it is there already, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of a turn")
    parser.add_argument("--folder", type=Path, help="keep the run here, and use it again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = (given.folder or Path(made)) / "long"
        if not (folder / "config.yaml").exists():
            make_run(folder, given.episodes // (GROUPS * MEMBERS), given.turns, given.tokens)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{given.episodes:,} episodes, {size / 2**20:,.0f} MiB on disk")
        measure(folder)


def make_run(folder: Path, steps: int, turns: int, tokens: int) -> None:
    """Write a run of so many steps. The first one is made up in full; the others have its tokens
    under other names.
    """
    run = MadeUpRun(
        folder,
        groups=GROUPS,
        members=MEMBERS,
        turns=turns,
        tokens=tokens,
        tools=("search", "submit"),
    )
    run.begin()
    run.step()
    for done in range(0, steps, max(1, steps // 10)):
        run._done = done
        run.evaluate([float((number + done) % 3 > 0) for number in range(HELD_OUT)])
    first = {
        kind: pq.read_table(folder / kind / "step_000000.parquet")
        for kind in ("trajectories", "samples")
    }
    metrics = MetricsFile(folder / "metrics.jsonl")
    row = metrics.rows()[0]
    with Ledger(folder / "ledger.sqlite") as ledger:
        for step in range(1, steps):
            _write_step(folder, step, first)
            for group in range(GROUPS):
                number = step * (GROUPS + 1) + group
                ledger.admit(number, Task("made_up", number, {}, f"train-{number:06d}"), step)
                for member in range(MEMBERS):
                    ledger.begin(number, member, 0)
            numbers = range(step * (GROUPS + 1), step * (GROUPS + 1) + GROUPS)
            ledger.trained(step, {number: [0.0] * MEMBERS for number in numbers})
            metrics.append({**row, "step": step, "reward": random.Random(step).random()})


def _write_step(folder: Path, step: int, first: dict[str, pa.Table]) -> None:
    played = _renamed(first["trajectories"], ("id", "task"), step * (GROUPS + 1))
    later = pc.add(played["started"], step * STEP_SECONDS)
    samples = _renamed(first["samples"], ("episode", "task"), step * (GROUPS + 1))
    steps = pa.array([step] * len(samples), pa.int32())
    for kind, table in (
        ("trajectories", _replaced(played, "started", later)),
        ("samples", _replaced(samples, "step", steps)),
    ):
        path = folder / kind / f"step_{step:06d}.parquet"
        pq.write_table(table, path, compression="zstd", row_group_size=64)


def _renamed(table: pa.Table, columns: tuple[str, ...], shift: int) -> pa.Table:
    """The table with other numbers of tasks in these columns."""
    for name in columns:
        texts = [
            re.sub(r"\d{6}", lambda found: f"{int(found[0]) + shift:06d}", text)
            for text in table[name].to_pylist()
        ]
        table = _replaced(table, name, pa.array(texts))
    return table


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def measure(folder: Path) -> None:
    """Start the server over the run, ask it, and print."""
    began = time.perf_counter()
    command = [
        sys.executable,
        "-c",
        "from agentrl.cli import main; main()",
        "view",
        str(folder),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            started = time.perf_counter() - began
            with httpx.Client(base_url=url, timeout=120) as client:
                _ask_all(client, psutil.Process(server.pid), started)
        finally:
            server.terminate()


def _ask_all(client: httpx.Client, process: psutil.Process, started: float) -> None:
    def seconds(path: str, **parameters: object) -> float:
        began = time.perf_counter()
        answer = client.get(path, params=parameters)  # type: ignore[arg-type]
        answer.raise_for_status()
        return time.perf_counter() - began

    most, used = process.memory_info().rss, 0.0

    def line(what: str, value: float) -> None:
        nonlocal most
        most = max(most, process.memory_info().rss)
        nonlocal used
        used, before = _cpu_seconds(process), used
        memory = process.memory_info().rss / 2**20
        print(
            f"{what:44} {1e3 * value:8,.0f} ms   CPU {1e3 * (used - before):7,.0f} ms   memory"
            f" {memory:4,.0f} MiB"
        )

    line("start of the process", started)
    page = (
        seconds("/")
        + seconds("/main.js")
        + seconds("/api/runs")
        + seconds("/api/metrics", run="long")
    )
    line("first page: page, runs, metrics", page)
    line("first table: reads the index", seconds("/api/episodes", run="long"))
    line(
        "a table, filtered and sorted",
        seconds("/api/episodes", run="long", low=0.4, sort="num_tokens"),
    )
    line("choices of the filters", seconds("/api/choices", run="long"))
    line("search for a text in all messages", seconds("/api/episodes", run="long", text="13 37"))
    found = {"run": "long", "fate": "trained", "limit": 1}
    total = client.get("/api/episodes", params=found).json()["total"]
    places = random.Random(0).sample(range(total), 50)
    names = [
        client.get("/api/episodes", params={**found, "offset": at}).json()["rows"][0]["id"]
        for at in places
    ]
    taken = [seconds("/api/episode", run="long", id=name) for name in names]
    line("an episode, median of 50 (CPU: of all)", statistics.median(taken))
    line("an episode, the slowest of 50", max(taken))
    line("tools of all steps", seconds("/api/tools", run="long"))
    line("episodes that called a tool", seconds("/api/episodes", run="long", tool="submit"))
    line("held-out tasks over all evaluations", seconds("/api/evaluations", run="long"))
    line("time of the last 8 steps", seconds("/api/time", run="long"))
    print(f"largest memory {most / 2**20:,.0f} MiB")


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
