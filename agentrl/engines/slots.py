"""Which request occupies which slot of the KV cache, and what finished requests left there.

A slot holds the KV of one token sequence. When a request finishes, its slot is *parked* with its
tokens. The next turn of the same episode extends exactly these tokens and takes over the slot, so
only its new tokens are computed. A request that states how much of its prompt is known finds its
slot by session, at a cost that grows only with its new tokens; any other request finds its slot by
its tokens. This module does only bookkeeping: it has no tensors.

A parked slot is held for a while for the request that will extend it: others may take it only after
that.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.tokens.arrays import GrowingInts, IntArray

Slot = int
PrefixHashes = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that its powers never vanish modulo 2**64
_MODULUS = 1 << 64
_TAIL = 32
"""How many tokens at the end of a known sequence are compared anyway."""


class SlotTokens(GrowingInts):
    """The tokens of a slot, with an incremental polynomial hash of a prefix."""

    __slots__ = ("_digest", "_hashed")

    def __init__(self, values: IntArray | None = None) -> None:
        super().__init__(values)
        self._digest = self._hashed = 0

    def digest(self, length: int) -> int:
        """The hash of the first `length` tokens. It continues from the last call, unless `length`
        is smaller now.
        """
        if length < self._hashed:
            self._digest = self._hashed = 0
        if length > self._hashed:
            of_new = int(prefix_hashes(self.values[self._hashed : length])[-1])
            self._digest = (self._digest + pow(_BASE, self._hashed, _MODULUS) * of_new) % _MODULUS
            self._hashed = length
        return self._digest


@dataclass(frozen=True, slots=True)
class Place:
    """A slot that holds the KV of the first `cached` tokens of a prompt; `tokens` is the whole
    prompt. None of that KV was computed under an older version than `oldest`.
    """

    slot: Slot
    cached: int
    tokens: SlotTokens
    oldest: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """Until when a slot is held, on any clock that only grows, but not against requests that are
    more urgent.
    """

    until: int = 0
    priority: int = 0


class Openings:
    """In which slot each prompt was computed last, so that a request with the same prompt can copy
    its KV.

    The members of a group have the same first prompt. A slot has one entry, so there are never more
    than slots.
    """

    def __init__(self) -> None:
        self._by_prompt: dict[bytes, tuple[Slot, SlotTokens]] = {}
        self._by_slot: dict[Slot, bytes] = {}

    def put(self, prompt: bytes, slot: Slot, tokens: SlotTokens) -> None:
        """These tokens, which are now in the slot, begin with the prompt."""
        before = self._by_slot.pop(slot, None)
        if before is not None:
            del self._by_prompt[before]
        elsewhere = self._by_prompt.pop(prompt, None)
        if elsewhere is not None:
            del self._by_slot[elsewhere[0]]
        self._by_slot[slot] = prompt
        self._by_prompt[prompt] = slot, tokens

    def get(self, prompt: bytes) -> tuple[Slot, SlotTokens] | None:
        """The slot, and the tokens that were in it: whether they still are is for the caller to
        check.
        """
        return self._by_prompt.get(prompt)


@dataclass(frozen=True, slots=True)
class _Parked:
    tokens: SlotTokens
    cached: int
    session: str
    key: tuple[int, int]
    hold: Hold
    oldest: int

    def is_held(self, against: Hold) -> bool:
        return self.hold.until > against.until and self.hold.priority <= against.priority


_NO_HOLD = Hold()


class SlotTable:
    """The slots 0 .. `size` - 1: in use, parked or empty."""

    def __init__(self, size: int) -> None:
        self._empty: list[Slot] = list(range(size - 1, -1, -1))  # the lowest is taken first
        self._parked: OrderedDict[Slot, _Parked] = OrderedDict()  # least recently parked first
        self._by_session: dict[str, Slot] = {}
        self._by_key: dict[tuple[int, int], list[Slot]] = {}
        self._lengths: dict[int, int] = {}
        self.parks = 0
        """How many slots have been parked so far: a prompt that extended none can extend one only
        after another.
        """

    @property
    def available(self) -> int:
        """How many slots a request can choose from."""
        return len(self._empty) + len(self._parked)

    def not_held(self, against: Hold) -> int:
        """How many slots are empty, or parked and no longer held against a request of this time and
        priority.
        """
        return len(self._empty) + sum(
            not parked.is_held(against) for parked in self._parked.values()
        )

    def known(self, prompt: IntArray, session: str, known: int) -> int:
        """`known` if the session's parked slot has exactly that many tokens and the prompt begins
        with them, else 0.
        """
        return known if self._known_slot(prompt, session, known) is not None else 0

    def take_known(self, prompt: IntArray, session: str, known: int) -> Place | None:
        """Take the slot that the last request of the session left, if the prompt extends it."""
        slot = self._known_slot(prompt, session, known)
        if slot is None:
            return None
        parked = self._unpark(slot)
        parked.tokens.append(prompt[known:])
        return Place(slot, parked.cached, parked.tokens, parked.oldest)

    def take_extended(
        self,
        prompt: IntArray,
        hashes: PrefixHashes | None = None,
        *,
        session: str = "",
        since: int = 0,
    ) -> Place | None:
        """Take the parked slot with the longest sequence that `prompt` extends: of this `session`,
        or of any if none of its KV is older than the version `since`.

        `hashes`: what `prefix_hashes` returns for the prompt, if it is known.
        """
        if not self._parked:
            return None
        prefixes = prefix_hashes(prompt) if hashes is None else hashes
        for length in sorted(self._lengths, reverse=True):
            if length >= len(prompt):  # at least one token must be computed, for its logits
                continue
            for slot in self._by_key.get((length, int(prefixes[length - 1])), ()):
                parked = self._parked[slot]
                is_allowed = parked.oldest >= since or (session and parked.session == session)
                if is_allowed and np.array_equal(parked.tokens.values[:length], prompt[:length]):
                    self._unpark(slot)
                    return Place(slot, length, SlotTokens(prompt), parked.oldest)
        return None

    def take_any(self, prompt: IntArray, against: Hold = _NO_HOLD) -> Place:
        """Take an empty slot, else the one parked longest ago, if possible one not held; its tokens
        are forgotten.
        """
        if self._empty:
            slot = self._empty.pop()
        else:
            free = (slot for slot, parked in self._parked.items() if not parked.is_held(against))
            slot = next(free, next(iter(self._parked)))
            self._unpark(slot)
        return Place(slot, 0, SlotTokens(prompt))

    def park(
        self,
        slot: Slot,
        tokens: SlotTokens,
        cached: int,
        session: str = "",
        hold: Hold = _NO_HOLD,
        *,
        oldest: int = 0,
    ) -> None:
        """Release a slot that holds the KV of the first `cached` of `tokens`, none of it older than
        the version `oldest`.
        """
        if not cached:
            self._empty.append(slot)
            return
        self.parks += 1
        key = (cached, tokens.digest(cached))
        parked = _Parked(tokens, cached, session, key, hold, oldest)
        self._parked[slot] = parked
        if session:
            self._by_session[session] = slot
        self._by_key.setdefault(parked.key, []).append(slot)
        self._lengths[cached] = self._lengths.get(cached, 0) + 1

    def forget_parked(self, before: int | None = None) -> None:
        """Empty the parked slots whose KV is, in part, of an older version than `before`; by
        default all.
        """
        outdated = [
            slot
            for slot, parked in self._parked.items()
            if before is None or parked.oldest < before
        ]
        for slot in sorted(outdated, reverse=True):
            self._unpark(slot)
            self._empty.append(slot)

    def parked(self, slot: Slot) -> Place | None:
        """The content of a parked slot; None if it is not parked."""
        found = self._parked.get(slot)
        return None if found is None else Place(slot, found.cached, found.tokens, found.oldest)

    def _known_slot(self, prompt: IntArray, session: str, known: int) -> Slot | None:
        slot = self._by_session.get(session)
        if slot is None or not known or known > len(prompt):
            return None
        parked = self._parked[slot]
        tail = slice(max(0, known - _TAIL), known)
        same = len(parked.tokens) == known and np.array_equal(
            parked.tokens.values[tail], prompt[tail]
        )
        return slot if same and parked.cached < len(prompt) else None

    def _unpark(self, slot: Slot) -> _Parked:
        parked = self._parked.pop(slot)
        if self._by_session.get(parked.session) == slot:
            del self._by_session[parked.session]
        self._by_key[parked.key].remove(slot)
        if not self._by_key[parked.key]:
            del self._by_key[parked.key]
        self._lengths[parked.cached] -= 1
        if not self._lengths[parked.cached]:
            del self._lengths[parked.cached]
        return parked


class _Powers:
    """B, B**2, B**3, ... modulo 2**64: as many as have been needed so far."""

    def __init__(self) -> None:
        self._values = np.full(1, _BASE, np.uint64)

    def first(self, count: int) -> npt.NDArray[np.uint64]:
        if len(self._values) < count:
            self._values = np.cumprod(np.full(2 * count, _BASE, np.uint64), dtype=np.uint64)
        return self._values[:count]


_powers = _Powers()


def prefix_hashes(tokens: IntArray) -> PrefixHashes:
    """A polynomial hash of every prefix in one pass, so that a lookup costs O(tokens), not O(tokens
    x slots).

    The hash of the first n tokens is the sum of (token_i + 1) * B**(i + 1) for i < n, modulo 2**64;
    the 1 lets a token 0 count.
    """
    values = tokens.astype(np.uint64) + np.uint64(1)
    return np.cumsum(values * _powers.first(len(tokens)), dtype=np.uint64)


__all__ = [
    "Hold",
    "Openings",
    "Place",
    "PrefixHashes",
    "Slot",
    "SlotTable",
    "SlotTokens",
    "prefix_hashes",
]
