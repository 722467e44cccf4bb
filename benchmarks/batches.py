"""What a batch costs the controller, which lays it out, cuts it and sends it to the ranks.

    python benchmarks/batches.py [--episodes 256] [--tokens 31600] [--ranks 8]

Episodes have a third more or fewer tokens than `--tokens`, of which an engine has sampled three in
ten; the default is the mean of NeMo RL's agentic run. CPU seconds are of the faster of two rounds,
bytes of all that is sent.
"""

import argparse
import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from agentrl.batch import TrainingSample, collate
from agentrl.trainers.batch_shards import BatchShard, shard_batch
from agentrl.trainers.fsdp import FsdpTrainer

Result = TypeVar("Result")
VOCABULARY = 150_000
GROUP = 8
MICRO_BATCH_TOKENS = 131_072


def sample(tokens: int, number: int, rng: np.random.Generator) -> TrainingSample:
    """An episode of one turn of version 3."""
    length = int(tokens * rng.uniform(2 / 3, 4 / 3))
    sampled_T = rng.random(length) < 0.3
    sampled_T[0] = False
    none_T = np.zeros(length, np.float32)
    return TrainingSample(
        rng.integers(0, VOCABULARY, length, dtype=np.int32),
        sampled_T,
        none_T,
        none_T,
        np.where(sampled_T, 3, -1).astype(np.int32),
        np.zeros(length, np.int32),
        group=number // GROUP,
    )


def sent_bytes(shards: list[BatchShard]) -> int:
    """The bytes that go to the ranks: a pickle for each, and the arrays beside it."""
    total = 0
    for shard in shards:
        arrays: list[pickle.PickleBuffer] = []
        total += len(pickle.dumps(shard, protocol=5, buffer_callback=arrays.append))
        total += sum(one.raw().nbytes for one in arrays)
    return total


def cpu_seconds(work: Callable[[], Result]) -> tuple[float, Result]:
    """The CPU time of the faster of two rounds, and what the last one returned."""
    taken = []
    for _ in range(2):
        began = time.process_time()
        result = work()
        taken.append(time.process_time() - began)
    return min(taken), result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=31_600)
    parser.add_argument("--ranks", type=int, default=8)
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    samples = [sample(chosen.tokens, number, rng) for number in range(chosen.episodes)]
    settings: Any = FsdpTrainer.Config(micro_batch_tokens=MICRO_BATCH_TOKENS)
    laid, batch = cpu_seconds(lambda: collate(samples))
    cut, shards = cpu_seconds(lambda: shard_batch(batch, settings, parts=chosen.ranks))
    sent, size = cpu_seconds(lambda: sent_bytes(shards))
    table = Table("tokens", "laid out, CPU-s", "cut", "pickled", "sent, MB")
    table.add_row(
        f"{len(batch.tokens_S):,}", f"{laid:.2f}", f"{cut:.2f}", f"{sent:.3f}", f"{size / 1e6:.0f}"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
