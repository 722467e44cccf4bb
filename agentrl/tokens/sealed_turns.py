"""`SealedTurns`: the turns and messages of an episode that has ended, as arrays and bytes.

    rollout worker   turns, messages ─▶ TurnColumns, and the rest pickled
    controller       counts, rewards, samples ◀─ TurnColumns
                     a turn or a message ◀─ the bytes, opened

A worker sends its episodes like this. What the controller does with every episode needs the columns
alone, which cost it the same for 4 turns as for 64; Python's objects of a turn cost it 0.04 ms. Who
reads a turn, such as a judge or a tracker, gets it as ever: the bytes are opened then.

Dimension suffixes: K turns; P the tokens that were sampled in all of them, end to end; T all tokens
end to end, of each turn the new ones of the prompt and then the answer.
"""

import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from agentrl.tokens.arrays import (
    FloatArray,
    IntArray,
    MaskArray,
    Ragged,
    floats,
    ints,
    mask,
    same_fields,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TurnColumns:
    """The numbers of a trajectory's turns, end to end."""

    tokens_T: IntArray
    """[T] Token ids."""
    logprobs_P: FloatArray
    """[P] See `Completion.logprobs`."""
    versions_P: IntArray
    """[P] See `Completion.policy_versions`."""
    shown_K: IntArray
    """[K] New tokens of each prompt."""
    sampled_K: IntArray
    """[K] Tokens of each answer."""
    rewards_K: npt.NDArray[np.float64]
    """[K] What the environment paid."""
    env_seconds_K: npt.NDArray[np.float64]
    """[K] See `Turn.env_seconds`."""
    forked_K: MaskArray
    """[K] See `Turn.forked`."""
    trained_K: MaskArray
    """[K] See `Turn.trained`."""
    cut_K: MaskArray
    """[K] The answer has reached its limit of tokens."""
    support_P: Ragged | None
    """[P] See `Completion.support`; None if no answer has any."""
    has_experts: bool
    """Some answer has `Completion.experts`, which are among what is pickled."""
    has_images: bool
    """Some prompt has pictures (`Turn.images`), which are among what is pickled."""
    success: bool | None
    """See `Trajectory.success`."""

    __eq__ = same_fields

    def __post_init__(self) -> None:
        for name in ("tokens_T", "versions_P", "shown_K", "sampled_K"):
            object.__setattr__(self, name, ints(getattr(self, name)))
        object.__setattr__(self, "logprobs_P", floats(self.logprobs_P))
        for name in ("forked_K", "trained_K", "cut_K"):
            object.__setattr__(self, name, mask(getattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:  # so that what is unpickled is immutable too
        return TurnColumns, tuple(getattr(self, one.name) for one in fields(self))

    def __len__(self) -> int:
        return len(self.shown_K)

    @property
    def sampled_T(self) -> MaskArray:
        """[T] Whether a token was sampled."""
        parts_2K = np.stack([self.shown_K, self.sampled_K], axis=1).reshape(-1)
        return np.repeat(np.arange(len(parts_2K)) % 2 == 1, parts_2K)

    def answers(self) -> list[IntArray]:
        """The tokens of each answer."""
        tokens_P = self.tokens_T[self.sampled_T]
        return np.split(tokens_P, np.cumsum(self.sampled_K)[:-1]) if len(self) else []

    def versions_from(self, turn: int) -> IntArray:
        """The versions of the tokens that were sampled from the turn of this number on."""
        return self.versions_P[int(self.sampled_K[:turn].sum()) :]


MakeTurns = Callable[[TurnColumns, Any], Sequence[T]]
"""Makes turns of the columns, and of what was pickled beside them."""


class Seal:
    """What is pickled of an episode: the rest of its turns, and its messages."""

    def __init__(self, pickled: bytes | memoryview) -> None:
        self.pickled = pickled

    @cached_property
    def opened(self) -> tuple[Any, Sequence[Any]]:
        """Both, unpickled once."""
        opened: tuple[Any, Sequence[Any]] = pickle.loads(self.pickled)
        return opened

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # Between processes of a machine, it is copied in shared memory (`Parcel`).
        large = operator.index(protocol) >= 5
        return Seal, (pickle.PickleBuffer(self.pickled) if large else bytes(self.pickled),)


class _Sealed(Sequence[T], Generic[T]):
    """A sequence that is made when an item of it is read, and equals any sequence of its items."""

    def __init__(self, seal: Seal) -> None:
        self.seal = seal

    @cached_property
    def _items(self) -> tuple[T, ...]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        return self._items[place]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items)


class SealedMessages(_Sealed[T]):
    """The messages of an episode. `count`: how many there are."""

    def __init__(self, seal: Seal, count: int) -> None:
        super().__init__(seal)
        self._count = count

    @cached_property
    def _items(self) -> tuple[T, ...]:
        return tuple(self.seal.opened[1])

    def __len__(self) -> int:
        return self._count

    def unshared(self, seal: Seal) -> "SealedMessages[T]":
        """The same under another seal, which shares nothing with this one."""
        return SealedMessages(seal, self._count)

    def __reduce__(self) -> tuple[Any, ...]:
        return SealedMessages, (self.seal, self._count)


class SealedTurns(_Sealed[T]):
    """The turns of an episode, which `make` makes."""

    def __init__(self, seal: Seal, columns: TurnColumns, make: MakeTurns[T]) -> None:
        super().__init__(seal)
        self.columns = columns
        self._make = make

    @cached_property
    def _items(self) -> tuple[T, ...]:
        return tuple(self._make(self.columns, self.seal.opened[0]))

    def __len__(self) -> int:
        return len(self.columns)

    def unshared(self, seal: Seal) -> "SealedTurns[T]":
        """The same under another seal, which shares nothing that can be changed with this one, and
        without experts.
        """
        return SealedTurns(seal, replace(self.columns, has_experts=False), self._make)

    def __reduce__(self) -> tuple[Any, ...]:
        return SealedTurns, (self.seal, self.columns, self._make)


__all__ = ["MakeTurns", "Seal", "SealedMessages", "SealedTurns", "TurnColumns"]
