"""The cost of a token in the controller, from an engine's answer to a batch, and how long it blocks
the event loop.

    python benchmarks/tokens.py [--tokens 1000000 --tokens 10000000]

Episodes have 20 turns, each with 50 new prompt tokens and 100 sampled tokens, in groups of 8. The
output for each size:

- microseconds per token to make the turns (from the lists of an engine), to make the batch of them,
  and to cut it into shards for 8 ranks;
- bytes per token: the growth of the process while the groups and their batch exist;
- the longest gap of the event loop, in milliseconds, while other threads make and cut the batch and
  write the trajectories, and how long the gap would be if the loop itself did so.
"""

import argparse
import asyncio
import multiprocessing
import random
import tempfile
import time
from pathlib import Path

import psutil

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import batch_of
from agentrl.observe.metrics import rollout_metrics
from agentrl.observe.trajectories import write_trajectories
from agentrl.tokens.arrays import floats, ints
from agentrl.trainers.batch_shards import shard_batch
from agentrl.trainers.settings import TrainerSettings
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn

TURNS, PROMPT, SAMPLED, MEMBERS = 20, 50, 100, 8
PACKING = TrainerSettings(micro_batch_tokens=8192)
EPISODE = TURNS * (PROMPT + SAMPLED)


def group_of(number: int, rng: random.Random) -> Group:
    """A group as the scheduler would return it."""
    task = Task("benchmark", number)

    def turn() -> Turn:
        tokens = [rng.randrange(150_000) for _ in range(SAMPLED)]
        answer = Completion(
            ints(tokens), floats([-0.5] * SAMPLED), ints([number] * SAMPLED), "stop"
        )
        return Turn(ints(range(PROMPT)), answer, 0.0, {})

    members = [
        Trajectory(f"{number}/{m}", task, tuple(turn() for _ in range(TURNS)), Terminated())
        for m in range(MEMBERS)
    ]
    return Group(task, tuple(members), tuple(Score(float(m % 2)) for m in range(MEMBERS)))


async def longest_gap(work: object) -> float:
    """The longest gap of the loop, in milliseconds, while `work` runs in a thread."""
    longest, last = 0.0, time.perf_counter()
    running = asyncio.ensure_future(asyncio.to_thread(work))  # type: ignore[arg-type]
    while not running.done():
        await asyncio.sleep(0.002)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    await running
    return longest * 1e3


def measure(tokens: int) -> None:
    """Measure a size, and print its row."""
    process, rng = psutil.Process(), random.Random(0)
    algorithm, processing = Grpo(Grpo.Config()), BatchProcessing(BatchProcessingConfig())
    # Warm-up: imports and one-time allocations.
    batch_of([group_of(0, rng)], algorithm, processing, 0)
    before, begun = process.memory_info().rss, time.perf_counter()
    groups = [group_of(number, rng) for number in range(tokens // (EPISODE * MEMBERS))]
    made, count = time.perf_counter(), len(groups) * EPISODE * MEMBERS
    batch = batch_of(groups, algorithm, processing, 0)
    ended, after = time.perf_counter(), process.memory_info().rss
    shard_batch(batch, PACKING, parts=8)
    cut = time.perf_counter() - ended

    def make() -> None:
        shard_batch(batch_of(groups, algorithm, processing, 0), PACKING, parts=8)

    def record() -> None:
        with tempfile.TemporaryDirectory() as folder:
            pairs = [
                pair
                for group in groups
                for pair in zip(group.trajectories, group.scores, strict=True)
            ]
            write_trajectories(Path(folder) / "step.parquet", pairs)
            rollout_metrics(groups, 0)

    on_loop = time.perf_counter()
    record()
    on_loop = time.perf_counter() - on_loop
    gaps = [asyncio.run(longest_gap(work)) for work in (make, record)]
    per_token = [1e6 * seconds / count for seconds in (made - begun, ended - made, cut)]
    on_it = 1e3 * (ended - made + cut)
    figures = [f"{each:.3f}" for each in per_token] + [f"{(after - before) / count:.1f}"]
    figures += [f"{each:.0f}" for each in (gaps[0], on_it, gaps[1], 1e3 * on_loop)]
    print(" ".join(f"{figure:>12}" for figure in (f"{count:,}", *figures)), flush=True)
    assert batch.num_loss_tokens == count * SAMPLED // (PROMPT + SAMPLED)


def main() -> None:
    """Measure each size in its own process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, action="append")
    above = (
        "",
        "turns",
        "batch",
        "shards",
        "",
        "batch, ms",
        "of the loop",
        "files, ms",
        "of the loop",
    )
    below = (
        "tokens",
        "us/token",
        "us/token",
        "us/token",
        "B/token",
        "beside",
        "on it",
        "beside",
        "on it",
    )
    for names in (above, below):
        print(" ".join(f"{name:>12}" for name in names))
    for tokens in parser.parse_args().tokens or [1_000_000, 10_000_000]:
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(tokens,))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(
                f"the measurement of {tokens:,} tokens ended with exit code {process.exitcode}"
            )


if __name__ == "__main__":
    main()
