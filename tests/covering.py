"""Rows that try every pair (or triple) of choices, few of them: covering arrays, made greedily from
a seed.

    coverage = Coverage({"engine": ["local", "vllm"], "cluster": ["local", "ray"], ...}, seed=1)
    while (row := coverage.row()) is not None:
        if works(row):
            coverage.accept(row)
        else:
            coverage.refuse({"engine": "vllm", "cluster": "ray"})

A row that is refused has shown nothing of its other pairs, so only what the refusal is about is
settled by it: the others come again in later rows, none of which has what was refused.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random

Row = Mapping[str, Hashable]
"""The chosen value of each factor, or of some."""
Combination = frozenset[tuple[str, Hashable]]


class Coverage:
    """Which combinations of `strength` choices no row has settled yet, and rows that settle many of
    them.

    `only`: which are wanted, by default all. `open`: these, in the order in which they are taken
    up; `impossible`: those that no row can have, because of what was refused.
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[Hashable]],
        *,
        seed: int,
        strength: int = 2,
        only: Callable[[Combination], bool] = lambda combination: True,
    ) -> None:
        self.factors = {name: list(values) for name, values in factors.items()}
        self.strength = strength
        self.refused: list[Combination] = []
        self.impossible: list[Combination] = []
        self._with: dict[tuple[str, Hashable], list[Combination]] = {}
        self._rng = Random(seed)
        wanted = [one for one in _combinations(self.factors, strength) if only(one)]
        self._rng.shuffle(wanted)
        self.open: dict[Combination, None] = dict.fromkeys(wanted)

    def row(self, candidates: int = 8) -> dict[str, Hashable] | None:
        """The best of some rows for the first open combination; None when none is open."""
        while self.open:
            first = next(iter(self.open))
            made = [
                row for _ in range(candidates) if (row := self._filled(dict(first))) is not None
            ]
            if made:
                return max(made, key=lambda row: len(self._open_in(row)))
            self.impossible.append(first)
            del self.open[first]
        return None

    def accept(self, row: Row) -> list[Combination]:
        """The row works: its combinations are settled. Returns those that were open."""
        settled = self._open_in(row)
        for combination in settled:
            del self.open[combination]
        return settled

    def refuse(self, choices: Row) -> None:
        """These choices do not go together: no later row has them all, and combinations that do are
        settled.
        """
        refused = frozenset(choices.items())
        self.refused.append(refused)
        for choice in refused:
            self._with.setdefault(choice, []).append(refused - {choice})
        for combination in [one for one in self.open if refused <= one]:
            del self.open[combination]

    def _open_in(self, row: Row) -> list[Combination]:
        return [
            one
            for one in map(frozenset, combinations(row.items(), self.strength))
            if one in self.open
        ]

    def _filled(self, row: dict[str, Hashable]) -> dict[str, Hashable] | None:
        """The row with a value of every factor: each time the one that settles most, if the rest
        can be filled.

        What was refused decides on the order: first come the factors that have few values left,
        last those that it does not name, with which no row can fail.
        """
        if not all(self._allowed(row, *choice) for choice in row.items()):
            return None
        named = {name for refused in self.refused for name, _ in refused}
        found = self._rest(row, named)
        return None if found is None else {name: found[name] for name in self.factors}

    def _rest(self, row: dict[str, Hashable], named: set[str]) -> dict[str, Hashable] | None:
        missing = [name for name in self.factors if name not in row]
        if not missing:
            return row
        left = {
            name: self._values(row, name)
            for name in [name for name in missing if name in named] or missing
        }
        fewest = min(map(len, left.values()))
        name = self._rng.choice([name for name, values in left.items() if len(values) == fewest])
        values = self._rng.sample(left[name], fewest)
        for value in sorted(values, key=lambda value: -self._gain(row, name, value)):
            if (filled := self._rest({**row, name: value}, named)) is not None:
                return filled
        return None

    def _values(self, row: Row, name: str) -> list[Hashable]:
        return [value for value in self.factors[name] if self._allowed(row, name, value)]

    def _gain(self, row: Row, name: str, value: Hashable) -> int:
        others = combinations(row.items(), self.strength - 1)
        return sum(frozenset((*chosen, (name, value))) in self.open for chosen in others)

    def _allowed(self, row: Row, name: str, value: Hashable) -> bool:
        """Whether nothing refused is in the row with this choice."""
        chosen = row.items()
        return not any(others <= chosen for others in self._with.get((name, value), ()))


def covering_rows(
    factors: Mapping[str, Sequence[Hashable]],
    *,
    seed: int,
    strength: int = 2,
    refused: Sequence[Row] = (),
) -> list[dict[str, Hashable]]:
    """Rows in which every combination of `strength` choices occurs that can occur without what is
    refused.
    """
    coverage = Coverage(factors, seed=seed, strength=strength)
    for choices in refused:
        coverage.refuse(choices)
    rows = []
    while (row := coverage.row()) is not None:
        coverage.accept(row)
        rows.append(row)
    return rows


def _combinations(
    factors: Mapping[str, Sequence[Hashable]], strength: int
) -> Iterator[Combination]:
    for names in combinations(factors, strength):
        for values in product(*(factors[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))
