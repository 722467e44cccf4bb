"""Rows of micro-batches, for ranks that compute in step.

The ranks of a sharded model meet in every layer of every micro-batch, to gather its weights. So
the first micro-batches of all of them take as long as the slowest one, and so do the second ones: a
step takes the sum over these rows. `pack_rows` cuts samples into rows for which that sum is small.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

Row = list[list[int]]
"""The micro-batches of a row, each with the numbers of what it holds; at most one for each rank."""

_TAKEN, _NO_BOUND = float("inf"), 1e300


def pack_rows(tokens: Sequence[int], costs: Sequence[float], limit: int, ranks: int) -> list[Row]:
    """Pack samples, which are never cut, into micro-batches, and these into rows.

    A row begins with the costliest sample that is left. Its micro-batches then take turns, the
    cheapest first, each with the longest sample for which it has room. They hold at most `limit`
    tokens; a sample that is longer is alone in its micro-batch, and the others of its row have room
    for as many tokens and as much cost as it has. So no rank needs more memory than the longest
    sample does, and little waits for it. The rows without such a sample are then made even, where
    that takes less time. With one rank, this is first-fit decreasing.

    `tokens`, `costs`: of each sample; a cost is work in any unit. Takes n log n steps, and depends
    on nothing else than its arguments.

    Example: samples of 9, 4, 3, 2 and 5 tokens, which cost as much, with the limit 8 and two ranks.
    The first row is (9) and (5, 4), since beside the long sample there is room for 9 tokens; the
    second is (3) and (2).

    Raises:
        ValueError: `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"micro-batches hold 1 or more tokens, got {limit}")
    by_length = sorted(range(len(tokens)), key=lambda number: (tokens[number], -number))
    lengths = [tokens[number] for number in by_length]
    left = _Remaining([costs[number] for number in by_length])
    by_cost = sorted(range(len(tokens)), key=lambda place: (-left.cost(place), -place))
    rows: list[Row] = []
    for head in by_cost:
        if left.cost(head) < _TAKEN:
            row = _fill_row(head, lengths, left, limit, ranks)
            rows.append([[by_length[place] for place in one] for one in row if one])
    # Rows with a sample beyond the limit stay as they are; the others may be made even.
    rows.sort(key=lambda row: tokens[row[0][0]] <= limit)
    long = sum(tokens[row[0][0]] > limit for row in rows)
    even = _spread_evenly(rows[long:], tokens, costs, limit, ranks) if ranks > 1 else None
    if even and time_of(even, costs) < time_of(rows[long:], costs):
        return [*rows[:long], *even]
    return rows


def _fill_row(head: int, lengths: Sequence[int], left: "_Remaining", limit: int, ranks: int) -> Row:
    """Take a row from what is left. Everything is named by its place in the order of lengths."""
    room = max(limit, lengths[head])
    most = left.cost(head) if lengths[head] > limit else _NO_BOUND
    row: Row = [[head], *([] for _ in range(ranks - 1))]
    # What each micro-batch costs and holds; the cheapest first.
    open_ones = [(0.0, 0, rank) for rank in range(1, ranks)]
    heappush(open_ones, (left.cost(head), lengths[head], 0))
    left.take(head)
    while open_ones:
        cost, used, rank = heappop(open_ones)
        place = left.longest(bisect_right(lengths, room - used), most - cost)
        if place is not None:
            row[rank].append(place)
            heappush(open_ones, (cost + left.cost(place), used + lengths[place], rank))
            left.take(place)
    return row


def _spread_evenly(
    rows: Sequence[Row], tokens: Sequence[int], costs: Sequence[float], limit: int, ranks: int
) -> list[Row] | None:
    """The same samples in as many rows, each sample, the costliest first, in the cheapest
    micro-batch; None if one has no room for it.
    """
    numbers = [number for row in rows for one in row for number in one]
    packed: Row = [[] for _ in range(len(rows) * ranks)]
    by_cost = [(0.0, 0, place) for place in range(len(packed))]
    for number in sorted(numbers, key=lambda number: (-costs[number], number)):
        cost, used, place = by_cost[0]
        if used + tokens[number] > limit:
            return None
        packed[place].append(number)
        heapreplace(by_cost, (cost + costs[number], used + tokens[number], place))
    packed = [packed[place] for _, _, place in sorted(by_cost, reverse=True) if packed[place]]
    return [packed[first : first + ranks] for first in range(0, len(packed), ranks)]


def time_of(rows: Sequence[Row], costs: Sequence[float]) -> float:
    """The time of rows, of which each takes as long as its costliest part."""
    slowest = []
    for row in rows:
        slowest.append(max(sum(map(costs.__getitem__, part)) for part in row))
    return sum(slowest)


def lockstep_ratio(costs: Sequence[Sequence[float]], ranks: int) -> float:
    """How many times as long ranks in step take as they would if each had the same work at all
    times: at least 1. `costs`: of the micro-batches of each row.
    """
    ideal = sum(sum(row) for row in costs) / ranks
    return max(1.0, sum(max(row) for row in costs) / ideal) if ideal else 1.0


class _Remaining:
    """The costs of samples in the order of their lengths, of which some are taken: a tree of
    minima.
    """

    def __init__(self, costs: Sequence[float]) -> None:
        self._leaves = 1 << len(costs).bit_length()  # more than there are samples
        empty = [_TAKEN] * (self._leaves - len(costs))
        self._least = [_TAKEN] * self._leaves + [*costs] + empty
        for node in reversed(range(1, self._leaves)):
            self._update(node)

    def cost(self, place: int) -> float:
        """The cost of a sample; infinite if it is taken."""
        return self._least[self._leaves + place]

    def take(self, place: int) -> None:
        """Take a sample."""
        node = self._leaves + place
        self._least[node] = _TAKEN
        while node := node // 2:
            self._update(node)

    def longest(self, stop: int, most: float) -> int | None:
        """The last sample before `stop` that costs at most so much."""
        # Up, to the nearest subtree on the left with something cheap enough; and down in it, to the
        # right wherever possible.
        least, node = self._least, self._leaves + stop
        while node > 1 and not (node % 2 and least[node - 1] <= most):
            node //= 2
        if node <= 1:
            return None
        node -= 1
        while node < self._leaves:
            node = 2 * node + (least[2 * node + 1] <= most)
        return node - self._leaves

    def _update(self, node: int) -> None:
        one, other = self._least[2 * node : 2 * node + 2]
        self._least[node] = min(one, other)
