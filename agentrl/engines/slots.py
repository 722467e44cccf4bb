"""Which request sits in which slot of the KV cache, and what finished requests left there.

A slot holds the KV of one token sequence. When a request finishes, its slot is *parked* with the tokens it holds; the
next turn of the same episode extends exactly these tokens and takes the slot over, so only what is new is computed.
This module is bookkeeping only: no tensors.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.arrays import IntArray

Slot = int

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers never vanish modulo 2**64


@dataclass(frozen=True, slots=True)
class _Parked:
    tokens: IntArray
    key: tuple[int, int]


class SlotTable:
    """The slots 0 .. `size` - 1: in use, parked or empty."""

    def __init__(self, size: int) -> None:
        self._empty: list[Slot] = list(range(size - 1, -1, -1))  # the lowest is taken first
        self._parked: OrderedDict[Slot, _Parked] = OrderedDict()  # least recently parked first
        self._by_key: dict[tuple[int, int], list[Slot]] = {}
        self._lengths: dict[int, int] = {}
        self._powers = np.full(1, _BASE)

    @property
    def available(self) -> int:
        """Slots that a request may take."""
        return len(self._empty) + len(self._parked)

    def take_extended(self, prompt: IntArray) -> tuple[Slot, int] | None:
        """Take the parked slot with the longest sequence that `prompt` extends: the slot and that length."""
        if not self._parked:
            return None
        prefix_hashes = self._prefix_hashes(prompt)
        for length in sorted(self._lengths, reverse=True):
            if length >= len(prompt):  # at least one token must be computed: its logits are what is asked for
                continue
            for slot in self._by_key.get((length, int(prefix_hashes[length - 1])), ()):
                if np.array_equal(self._parked[slot].tokens, prompt[:length]):
                    self._unpark(slot)
                    return slot, length
        return None

    def take_any(self) -> Slot:
        """Take an empty slot, else the one parked longest ago, whose tokens are forgotten."""
        if self._empty:
            return self._empty.pop()
        slot = next(iter(self._parked))
        self._unpark(slot)
        return slot

    def park(self, slot: Slot, tokens: IntArray) -> None:
        """Give a slot back that holds the KV of `tokens`."""
        if not len(tokens):
            self._empty.append(slot)
            return
        parked = _Parked(tokens, (len(tokens), int(self._prefix_hashes(tokens)[-1])))
        self._parked[slot] = parked
        self._by_key.setdefault(parked.key, []).append(slot)
        self._lengths[len(tokens)] = self._lengths.get(len(tokens), 0) + 1

    def forget_parked(self) -> None:
        """Empty all parked slots: what they hold is of no use any more."""
        self._empty.extend(sorted(self._parked, reverse=True))
        self._parked.clear()
        self._by_key.clear()
        self._lengths.clear()

    def _unpark(self, slot: Slot) -> None:
        key = self._parked.pop(slot).key
        self._by_key[key].remove(slot)
        if not self._by_key[key]:
            del self._by_key[key]
        self._lengths[key[0]] -= 1
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]

    def _prefix_hashes(self, tokens: IntArray) -> npt.NDArray[np.uint64]:
        """A polynomial hash of every prefix in one pass, so that a lookup costs O(tokens), not O(tokens x slots)."""
        if len(self._powers) < len(tokens):
            self._powers = np.cumprod(np.full(2 * len(tokens), _BASE), dtype=np.uint64)
        values = tokens.astype(np.uint64) + np.uint64(1)
        return np.cumsum(values * self._powers[: len(tokens)], dtype=np.uint64)


__all__ = ["Slot", "SlotTable"]
