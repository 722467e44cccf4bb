"""Immutable arrays of tokens, logprobs, policy versions and masks, used from the engine to the
batch.

A slice is a view of the same memory, so its cost does not depend on its length.

Equality of computed numbers. 0.1 + 0.2 is not 0.3 for a computer, so rewards, returns and
advantages that are equal in truth may differ in their last digits. Code that compares them (is
there anything to learn from this group? is this episode the better one?) calls `constant`, `above`
or `at_least`. The tolerance is relative to the scale of the numbers: the largest of them, or of the
terms that they are sums of, by size, since a sum of n numbers is off by about n times 1e-16 of
that. Rewards near a million may truly differ by 1e-3: 1e-9 of the scale is always seen. Where a sum
comes to nothing, `settled` makes it an exact zero. Numbers computed in single precision, such as
the scores of a model, are off by 1e-7 of their scale and count as different; round them in the
reward if that matters.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

N = TypeVar("N", bound=np.generic)

IntArray = npt.NDArray[np.int32]
"""Token ids, policy versions, positions, numbers of turns and segments."""
FloatArray = npt.NDArray[np.float32]
"""Logprobs, in nats, and advantages."""
MaskArray = npt.NDArray[np.bool_]


def ints(values: npt.ArrayLike) -> IntArray:
    """Convert to an immutable int32 array: a view if `values` is an int32 array already, else a
    copy.
    """
    return _frozen(values, np.int32)


def floats(values: npt.ArrayLike) -> FloatArray:
    """Convert to an immutable float32 array, as `ints` does."""
    return _frozen(values, np.float32)


def mask(values: npt.ArrayLike) -> MaskArray:
    """Convert to an immutable boolean array, as `ints` does."""
    return _frozen(values, np.bool_)


def _frozen(values: npt.ArrayLike, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray) and values.dtype == kind and not values.flags.writeable:
        return values
    array = np.asarray(values, kind)
    if array is values and array.flags.writeable:
        array = array.view()  # a view, so that its owner can still write to it
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of integers that differ in length: `values` end to end, and the length of each row.
    Immutable.
    """

    values: IntArray
    lengths: IntArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", ints(self.values))
        object.__setattr__(self, "lengths", ints(self.lengths))
        if int(self.lengths.sum()) != len(self.values) or (self.lengths < 0).any():
            raise ValueError(
                f"rows of {int(self.lengths.sum())} values in total cannot hold {len(self.values)}"
                " values"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, rows: Iterable[npt.ArrayLike]) -> "Ragged":
        """Lay rows end to end."""
        arrays = [ints(row) for row in rows]
        return cls(np.concatenate([ints(()), *arrays]), ints([len(array) for array in arrays]))

    @classmethod
    def empty(cls, count: int) -> "Ragged":
        """`count` rows without a value."""
        return cls(ints(()), ints(np.zeros(count)))

    @classmethod
    def joined(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The rows of several, one after another."""
        nothing = ints(())
        return cls(
            np.concatenate([nothing, *(part.values for part in parts)]),
            np.concatenate([nothing, *(part.lengths for part in parts)]),
        )

    def take(self, pieces: Sequence[slice]) -> "Ragged":
        """The rows of several slices (each with a start and a stop), one slice after another."""
        ends = np.concatenate([ints((0,)), np.cumsum(self.lengths)])
        return Ragged(
            np.concatenate(
                [ints(()), *(self.values[ends[piece.start] : ends[piece.stop]] for piece in pieces)]
            ),
            np.concatenate([ints(()), *(self.lengths[piece] for piece in pieces)]),
        )

    def spread(self, chosen: MaskArray) -> "Ragged":
        """As many rows as `chosen` has entries: these ones where it is true, and empty ones
        elsewhere.
        """
        lengths = np.zeros(len(chosen), np.int32)
        lengths[chosen] = self.lengths
        return Ragged(self.values, ints(lengths))

    def padded(self, filler: int) -> IntArray:
        """The rows as a matrix, as wide as the longest, filled up with `filler`."""
        matrix = np.full((len(self), int(self.lengths.max(initial=0))), filler, np.int32)
        matrix[np.arange(matrix.shape[1]) < self.lengths[:, None]] = self.values
        return matrix

    def row_of_value(self) -> IntArray:
        """The row that each value belongs to."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)


class Growing(Generic[N]):
    """An append-only array: appending n values costs O(n) in all, for any reads of `values`."""

    __slots__ = ("_length", "_memory")

    def __init__(self, kind: type[N]) -> None:
        self._memory = np.empty(64, kind)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> N | None:
        """The last value, or `None`."""
        return self._memory[self._length - 1] if self._length else None

    def append(self, values: npt.NDArray[N]) -> None:
        """Add values at the end."""
        length = self._length + len(values)
        if length > len(self._memory):
            grown = np.empty(2 * length, self._memory.dtype)
            grown[: self._length] = self._memory[: self._length]
            self._memory = grown
        self._memory[self._length : length] = values
        self._length = length

    @property
    def values(self) -> npt.NDArray[N]:
        """All values so far, as an immutable view that later appends do not change."""
        view = self._memory[: self._length]
        view.flags.writeable = False
        return view


class GrowingInts(Growing[np.int32]):
    """`Growing` token ids."""

    __slots__ = ()

    def __init__(self, values: IntArray | None = None) -> None:
        super().__init__(np.int32)
        if values is not None:
            self.append(values)


def same_fields(one: Any, other: Any) -> bool:
    """`__eq__` for a dataclass with array fields: true for the same class and equal values."""
    if type(one) is not type(other):
        return False
    pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


ROUNDING = 1e-11
"""Differences up to this share of the scale are rounding: a hundred thousand additions in double
precision.
"""
ROUNDING_OF_SINGLES = 5e-7
"""The same of arrays in single precision, which hold seven digits."""


def scale_of(numbers: Iterable[float]) -> float:
    """The largest of the numbers by size, without its sign; 0 if there are none."""
    return max(map(abs, numbers), default=0.0)


def constant(numbers: Sequence[float], scale: float = 0.0, rounding: float = ROUNDING) -> bool:
    """True if all numbers are equal up to rounding, as none at all and a single one are.

    Args:
        scale: the size of the terms that the numbers are sums of, if larger than the numbers
    """
    if not numbers:
        return True
    low, high = min(numbers), max(numbers)
    return low == high or high - low < rounding * max(scale, -low, high)


def settled(total: float, scale: float) -> float:
    """A sum of numbers of this scale; 0 if what is left of them is no more than rounding."""
    return 0.0 if abs(total) < ROUNDING * scale else total


def above(number: float, other: float, scale: float = 0.0) -> bool:
    """True if a number is larger than another one by more than rounding."""
    return number > other and not constant((number, other), scale)


def at_least(number: float, bound: float, scale: float = 0.0) -> bool:
    """True if a number reaches a bound, up to rounding. NaN reaches none."""
    return number >= bound or constant((number, bound), scale)


def dimensions_of(value: object) -> int | None:
    """The number of dimensions of an array of NumPy, torch or another library; else None."""
    dimensions: int | None = getattr(value, "ndim", None)
    return dimensions


def read_number(value: Any) -> float | None:
    """A number of any library as a float, also a truth value, and an array that holds one number;
    else None.
    """
    if isinstance(value, Real | Decimal):
        try:
            return float(value)
        except (OverflowError, ValueError):
            return math.inf
    if dimensions_of(value) == 0:  # a scalar of NumPy or torch
        return read_number(value.item())
    return None


__all__ = [
    "ROUNDING",
    "ROUNDING_OF_SINGLES",
    "FloatArray",
    "Growing",
    "GrowingInts",
    "IntArray",
    "MaskArray",
    "Ragged",
    "above",
    "at_least",
    "constant",
    "dimensions_of",
    "floats",
    "ints",
    "mask",
    "read_number",
    "same_fields",
    "scale_of",
    "settled",
]
