"""A million rows of JSON lines: the first start, later starts, memory, and the order after ten
kills.

    python benchmarks/dataset.py --rows 1000000

Each start is a process of its own, which opens the tasks and checks their answers as a run does,
and draws 10,000 of them. Ten processes are killed (SIGKILL) while they draw; each next one goes on
at the first index that the one before has not written, as a ledger would have it.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def start(data: str, first: int, count: int, written: str) -> None:
    """Open the tasks, draw `count` of them from `first` on, and append their rows to a file."""
    from agentrl.rewards.rules.exact import Exact
    from agentrl.tasks.dataset import DatasetTasks

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.monotonic(), time.process_time()
    config = DatasetTasks.Config(data=data)
    held_out = DatasetTasks(config, "qa", 0, "held-out")
    tasks = DatasetTasks(config, "qa", 0, "train")
    tasks.check([Exact(Exact.Config()).check_task], "exact")
    opened, cpu = time.monotonic() - began, time.process_time() - cpu
    with open(written, "a", buffering=1) as file:
        for index in range(first, first + count):
            file.write(tasks.task(index).options["prompt"] + "\n")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    drawn = (time.monotonic() - began - opened) / max(1, count) * 1e6
    print(
        json.dumps(
            {
                "seconds": opened,
                "cpu": cpu,
                "mib": grown / 1024,
                "micros_a_task": drawn,
                "sizes": [len(tasks), len(held_out)],
            }
        )
    )


def launch(data: Path, cache: Path, first: int, count: int, written: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--start", str(data), str(first), str(count), str(written)]
    return subprocess.Popen(
        command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.PIPE, text=True
    )


def lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1]


def killed_ten_times(data: Path, cache: Path, folder: Path, count: int) -> list[str]:
    """The tasks of a run that is killed at ten points."""
    written, rng = folder / "killed", random.Random(0)
    written.touch()
    for stop_at in sorted(rng.sample(range(1, count), 10)):
        process = launch(data, cache, len(lines(written)), count, written)
        while len(lines(written)) < stop_at:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        written.write_text("".join(f"{line}\n" for line in lines(written)))  # a half line is lost
    launch(data, cache, len(lines(written)), count - len(lines(written)), written).communicate()
    return lines(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--start", nargs=4, metavar=("DATA", "FIRST", "COUNT", "WRITTEN"))
    arguments = parser.parse_args()
    if arguments.start:
        data, first, count, written = arguments.start
        start(data, int(first), int(count), written)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, cache = folder / "data.jsonl", folder / "cache"
        with data.open("w") as file:
            for number in range(arguments.rows):
                file.write(
                    json.dumps(
                        {"prompt": f"{number:09d}: {'what is it? ' * 12}", "answer": str(number)}
                    )
                    + "\n"
                )
        print(f"{arguments.rows:,} rows, {data.stat().st_size / 2**20:.0f} MiB")
        for which in ("first start", "later start", "later start"):
            out, _ = launch(data, cache, 0, 10_000, folder / which).communicate()
            got = json.loads(out)
            print(
                f"{which}: {got['seconds']:.2f} s ({got['cpu']:.1f} s of CPU time),"
                f" {got['mib']:.0f} MiB more memory, {got['micros_a_task']:.0f} microseconds a"
                f" task; {got['sizes'][0]:,} to train on, {got['sizes'][1]:,} held out"
            )
        whole, killed = lines(folder / "first start"), killed_ten_times(data, cache, folder, 10_000)
        print(
            f"killed at 10 points: same order {killed == whole}, same multiset"
            f" {Counter(killed) == Counter(whole)}"
        )


if __name__ == "__main__":
    main()
