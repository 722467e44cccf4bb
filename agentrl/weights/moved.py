"""What an update of weights moves and holds. Each transport counts it for itself
(`Transport.bytes_moved`), so a plan knows it before anything runs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Way = Literal["link", "network", "memory", "writing", "reading"]
"""How bytes get from one place to another: between the devices of a machine; between machines;
within the memory of a device; from a device into files; from files to a device."""

LOOK_SECONDS = 0.005
"""Seconds between two looks of ranks and readers for each other's signs."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the trainer and the engines of a run are."""

    on_gpus: bool
    shares_devices: bool
    """Trainer and engines are on the same devices."""
    reads_arrivals: bool
    """All engines can read live shipments (`EngineOffers`)."""
    low_rank: bool
    """The trainer sends adapters alone."""

    @property
    def transport(self) -> str:
        """The name of the transport that `auto` stands for.

        On CPUs, files in shared memory are what engines map without a copy, so there is no way with
        fewer bytes; and adapters are small.
        """
        if self.low_rank or not self.on_gpus or not self.reads_arrivals:
            return "files"
        return "handles" if self.shares_devices else "stream"


@dataclass(frozen=True, slots=True)
class Parties:
    """Who sends a version to whom."""

    size: int
    """Bytes of all weights that are sent, or of all adapters."""
    unit: int
    """Bytes of the largest unit (`WeightUnit`)."""
    bucket: int
    """Bytes of a bucket; a larger unit is a bucket of its own."""
    buckets: int
    """About how many buckets there are."""
    ranks: Sequence[int]
    """The machine of each rank of the trainer."""
    parts: int
    """Ranks over which each weight is divided, those of a replica: the first ones, and the next; 1
    if every rank has it whole."""
    engines: Sequence[int]
    """The machine of each engine."""
    readers: int
    """Processes of each engine that read the weights."""
    slices: int
    """How many of these share a copy of the model: each loads only its part of a weight."""
    places: Sequence[int]
    """The number of ranks on each device that has readers, too."""
    low_rank: bool = False
    """Only adapters are sent."""
    base: int = 0
    """Bytes of the model's folder that each reader merges adapters into, if it serves none."""

    @property
    def writers(self) -> int:
        """The ranks that write files: those on the machine of the first one."""
        return Counter(self.ranks)[self.ranks[0]]

    @property
    def copies(self) -> int:
        """The processes that read."""
        return len(self.engines) * self.readers

    def elsewhere(self, machine: int) -> int:
        """The number of other machines with engines."""
        return len({*self.engines} - {machine})


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes that several processes move at the same time."""

    name: str
    """The work that moves them, for tables."""
    way: Way
    total: int
    """The bytes of all of them."""
    largest: int
    """The bytes of the one that moves most."""


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """The bytes that an update moves and holds."""

    size: int
    """Bytes of all weights. The metric `weights/bytes` counts them too, with the headers of files
    or the sums of buckets."""
    phases: Sequence[Sequence[Move]] = ()
    """One after another; the moves of a phase overlap, so its slowest counts."""
    waiting: float = 0.0
    """Seconds in which processes wait for each other's signs, however many bytes there are."""
    held: int = 0
    """Bytes that a rank that sends holds beside its own weights."""
    received: int = 0
    """Bytes that a reader holds beside the weights of its model."""
    stored: int = 0
    """Bytes of files in the memory of the machine of the first rank."""
    copied: int = 0
    """The same on each other machine with engines."""
    beside: Sequence[Move] = ()
    """Moves beside the next step, which does not wait for them."""
    kept: int = 0
    """Bytes that a rank has in the host's memory for that, until they are written."""


def gather_moves(parties: Parties, *, everywhere: bool = False) -> list[Move]:
    """The moves that make each weight whole on the rank that sends it; ranks on the machine of the
    first one do so in turns. `everywhere`: on all ranks.
    """
    if parties.parts == 1:
        return []
    # Ranks of a replica do not ask those of others.
    first, replica = parties.ranks[0], Counter(parties.ranks[: parties.parts])
    copies = len(parties.ranks) if everywhere else 1
    each = parties.size if everywhere else parties.size // parties.writers
    missing = (parties.parts - 1) / parties.parts
    moves = [
        Move("gather", "link", int(copies * parties.size * missing), int(each * missing)),
    ]
    if len(replica) > 1:
        far = 1 - replica[first] / parties.parts
        replicas = len(parties.ranks) // parties.parts
        receiving = len(replica) * replicas if everywhere else 1
        # The devices of a machine receive from others side by side, each by its own card.
        moves.append(
            Move(
                "gather from other machines",
                "network",
                int(receiving * parties.size * far),
                int(parties.size * far / parties.writers),
            )
        )
    return moves


def write_move(parties: Parties) -> Move:
    """The move of the ranks that write the buckets into files, in turns."""
    return Move("write", "writing", parties.size, parties.size // parties.writers)


def two_buckets_and_a_unit(parties: Parties) -> int:
    """Bytes that a rank holds while it sends."""
    return min(2 * parties.size, 2 * max(parties.bucket, parties.unit)) + parties.unit


__all__ = [
    "LOOK_SECONDS",
    "BytesMoved",
    "Move",
    "Parties",
    "Way",
    "gather_moves",
    "two_buckets_and_a_unit",
    "write_move",
]
