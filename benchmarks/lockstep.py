"""How long ranks in step wait for each other, by how samples are packed into micro-batches.

    python benchmarks/lockstep.py [--samples 512] [--batches 5]

For batches of lengths that are drawn, the time of a step over that of a step in which each rank has
the same work at all times: packed by rows (`agentrl/placement/rows.py`), and packed best-fit
decreasing to the limit of tokens and then dealt, the costliest first, to the rank with the least
work. The time is the sum over micro-batches of the slowest rank's. Last, the seconds of packing.
"""

import argparse
import statistics
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from agentrl.placement.rows import lockstep_ratio, pack_rows
from agentrl.tokens.arrays import IntArray

LIMIT, LONGEST = 16_384, 131_072
ATTENTION = 589_824 / (2 * 6.946e9)
"""`attention_share` of Qwen3-8B."""
Draw = Callable[[np.random.Generator, int], IntArray]


def _lognormal(median: int, sigma: float) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> IntArray:
        drawn = rng.lognormal(np.log(median), sigma, count)
        return np.minimum(drawn, LONGEST).astype(np.int32)

    return draw


LENGTHS: dict[str, Draw] = {
    "uniform, 2k to 8k": lambda rng, count: rng.integers(2000, 8000, count, np.int32),
    "lognormal, median 8k, sigma 1.0, up to 128k": _lognormal(8000, 1.0),
    "lognormal, median 4k, sigma 1.3, up to 128k": _lognormal(4000, 1.3),
    "95 % of 4k, 5 % of 128k": lambda rng, count: np.where(
        rng.random(count) < 0.05, np.int32(LONGEST), np.int32(4096)
    ),
}


def cost(length: int) -> float:
    """The work of a sample, in tokens of a model without attention."""
    return length + ATTENTION / 2 * length**2


def by_rows(lengths: Sequence[int], ranks: int) -> list[list[float]]:
    """The costs of the micro-batches of each row."""
    costs = [cost(length) for length in lengths]
    rows = pack_rows(lengths, costs, LIMIT, ranks)
    return [[sum(costs[number] for number in one) for one in row] for row in rows]


def by_sums(lengths: Sequence[int], ranks: int) -> list[list[float]]:
    """The same, where the sum of each rank's costs is kept even, and not that of each row."""
    costs = [sum(cost(lengths[number]) for number in one) for one in best_fit(lengths)]
    shards: list[list[float]] = [[] for _ in range(ranks)]
    loads, most = [0.0] * ranks, -(-len(costs) // ranks)
    for one in sorted(costs, reverse=True):
        open_ones = [rank for rank in range(ranks) if len(shards[rank]) < most]
        rank = min(open_ones, key=loads.__getitem__)
        shards[rank].append(one)
        loads[rank] += one
    return [[shard[row] for shard in shards if row < len(shard)] for row in range(most)]


def best_fit(lengths: Sequence[int]) -> list[list[int]]:
    """Each sample, longest first, into the fullest micro-batch that has room."""
    packed: list[list[int]] = []
    open_ones: list[tuple[int, int]] = []  # room, and the micro-batch; sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_left(open_ones, (lengths[number], -1))
        room, place = open_ones.pop(at) if at < len(open_ones) else (LIMIT, len(packed))
        if place == len(packed):
            packed.append([])
        packed[place].append(number)
        if room > lengths[number]:
            insort(open_ones, (room - lengths[number], place))
    return packed


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--batches", type=int, default=5)
    given = parser.parse_args()
    table = Table(title=f"{given.samples} samples, {LIMIT:,} tokens in a micro-batch")
    for column in ("lengths", "ranks", "rows", "x ideal, by sums", "x ideal, by rows", "ms"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for name, draw in LENGTHS.items():
        for ranks in (8, 16):
            figures = []
            for seed in range(given.batches):
                lengths = draw(np.random.default_rng(seed), given.samples).tolist()
                begun = time.process_time()
                rows = by_rows(lengths, ranks)
                took = 1e3 * (time.process_time() - begun)
                before = lockstep_ratio(by_sums(lengths, ranks), ranks)
                figures.append((len(rows), before, lockstep_ratio(rows, ranks), took))
            count, before, now, took = (
                statistics.fmean(column) for column in zip(*figures, strict=True)
            )
            table.add_row(
                name, str(ranks), f"{count:.1f}", f"{before:.2f}", f"{now:.2f}", f"{took:.0f}"
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
