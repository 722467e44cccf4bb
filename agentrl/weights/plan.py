"""How weights are cut into buckets, and how a bucket lies in memory while it is sent."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from agentrl.protocols.weight_source import WeightUnit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGNMENT = 16
_SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a weight in its bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A bucket: its units, and where their weights lie in it. A sum follows them."""

    units: tuple[WeightUnit, ...]
    slots: tuple[Slot, ...]
    weight_bytes: int
    """Bytes of the weights, filled up to a multiple of eight."""

    @property
    def size(self) -> int:
        """Bytes of the bucket."""
        return self.weight_bytes + _SUM_BYTES


@dataclass(frozen=True)
class SendingPlan:
    """All buckets of a model, in the order in which they are sent. All weights have the number
    format `dtype`.
    """

    buckets: tuple[BucketPlan, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.size for bucket in self.buckets)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all weights."""
        return {slot.name: slot.shape for bucket in self.buckets for slot in bucket.slots}

    @staticmethod
    def of(units: Sequence[WeightUnit], bytes_each: int, dtype: "torch.dtype") -> "SendingPlan":
        """The plan for these units, in buckets of about `bytes_each`."""
        buckets = buckets_of(units, bytes_each, dtype.itemsize)
        return SendingPlan(
            tuple(_lay_out(bucket, dtype.itemsize) for bucket in buckets),
            str(dtype).removeprefix("torch."),
        )


def buckets_of(
    units: Sequence[WeightUnit], bytes_each: int, itemsize: int
) -> Iterator[Sequence[WeightUnit]]:
    """The units in their order, in buckets of about `bytes_each`; a larger unit has its own."""
    bucket: list[WeightUnit] = []
    size = 0
    for unit in units:
        more = unit.numel * itemsize
        if bucket and size + more > bytes_each:
            yield bucket
            bucket, size = [], 0
        bucket.append(unit)
        size += more
    if bucket:
        yield bucket


def pack(
    weights: Mapping[str, "Tensor"], bucket: BucketPlan, dtype: "torch.dtype", buffer: "Tensor"
) -> None:
    """Copy those weights of a bucket that are there into a buffer of bytes."""
    for slot in bucket.slots:
        if slot.name in weights:
            _slot_view(buffer, slot, dtype).copy_(weights[slot.name])


def seal(bucket: BucketPlan, buffer: "Tensor", label: str) -> None:
    """Write the sum of a bucket whose weights are all in the buffer after them.

    `label`: says which bucket of which version it is, and is part of the sum.
    """
    _sum_place(bucket, buffer).copy_(_sum(bucket, buffer, label))


def sum_in(bucket: BucketPlan, buffer: "Tensor") -> int:
    """The sum of a bucket that has been sealed, in the host's memory."""
    return int(_sum_place(bucket, buffer).item())


def weights_in(
    buffer: "Tensor", bucket: BucketPlan, dtype: "torch.dtype"
) -> Iterator[tuple[str, "Tensor"]]:
    """The weights of a bucket, as views of its buffer."""
    for slot in bucket.slots:
        yield slot.name, _slot_view(buffer, slot, dtype)


def is_intact(buffer: "Tensor", bucket: BucketPlan, label: str) -> bool:
    """True if the sum of a bucket is that of its weights, and it is the one of this label: a buffer
    that was filled again meanwhile has the sum of another one.
    """
    return bool((_sum_place(bucket, buffer) == _sum(bucket, buffer, label)).all())


def _lay_out(units: Sequence[WeightUnit], itemsize: int) -> BucketPlan:
    """The places of the weights of units in one bucket, each at a multiple of 16 bytes.

    Example: float32 weights of 3 and 5 numbers lie at 0 and 16 and end at 48, where the sum of the
    bucket follows.
    """
    slots: list[Slot] = []
    end = 0
    for unit in units:
        for name, shape in unit.shapes.items():
            slots.append(Slot(name, shape, end))
            size = math.prod(shape) * itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return BucketPlan(tuple(units), tuple(slots), end)


def _slot_view(buffer: "Tensor", slot: Slot, dtype: "torch.dtype") -> "Tensor":
    size = math.prod(slot.shape) * dtype.itemsize
    return buffer[slot.offset : slot.offset + size].view(dtype).view(slot.shape)


def _sum(bucket: BucketPlan, buffer: "Tensor", label: str) -> "Tensor":
    """The sum of the bytes, and of a digest of the label, as numbers of 64 bits, modulo 2**64."""
    import torch

    # With the label, equal weights of two versions have different sums.
    digest = hashlib.blake2b(label.encode(), digest_size=_SUM_BYTES).digest()
    own = int.from_bytes(digest, "little", signed=True)
    return buffer[: bucket.weight_bytes].view(torch.int64).sum(0, keepdim=True).add_(own)


def _sum_place(bucket: BucketPlan, buffer: "Tensor") -> "Tensor":
    import torch

    return buffer[bucket.weight_bytes : bucket.size].view(torch.int64)
