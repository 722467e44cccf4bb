"""`Mesh`: the grid of a trainer's ranks."""

from dataclasses import asdict, dataclass
from math import prod
from typing import NamedTuple


class Coordinates(NamedTuple):
    """The place of a rank on each axis of a `Mesh`, counted from 0."""

    replicate: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """The sizes of the four axes on which a trainer's ranks lie, and of the groups over which
    they divide experts.

    Ranks are numbered along the last axis first: those that differ on it alone are neighbours, and
    so, as far as they fit, on one machine. Ranks that differ on `replicate` or `shard` compute
    different samples: they are the data-parallel ranks. The others compute parts of the same
    samples.

    Example: in `Mesh(replicate=2, shard=2, tensor=2)`, rank 5 of 8 is at
    `Coordinates(replicate=1, shard=0, tensor=1)`, and its data-parallel rank is 2 of 4.

    Raises:
        ValueError: a size is below 1, or experts cannot be divided over the ranks of a replica.
    """

    replicate: int = 1
    """Copies of the sharded model, each of which computes other samples."""
    shard: int = 1
    """Parts that weights, gradients or optimizer are cut into; their ranks compute different
    samples."""
    context: int = 1
    """Parts that the tokens of a sample are cut into."""
    tensor: int = 1
    """Parts that each matrix is cut into."""
    expert: int = 1
    """Parts that the experts of a layer are divided into: neighbouring ranks of a replica, on
    whatever axis. Each computes its experts for the tokens of all of them."""

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"the axis {axis!r} of a mesh has 1 or more ranks, got {size}")
        if self.replica_size % self.expert:
            raise ValueError(
                f"{self.replica_size} ranks of a replica cannot be divided into groups of"
                f" {self.expert} that divide experts"
            )

    @property
    def _sizes(self) -> Coordinates:
        return Coordinates(self.replicate, self.shard, self.context, self.tensor)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self._sizes)

    @property
    def replica_size(self) -> int:
        """The number of ranks over which a copy of the model is divided."""
        return self.shard * self.context * self.tensor

    @property
    def sample_size(self) -> int:
        """The number of ranks that compute parts of the same samples."""
        return self.context * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """The number of parts into which a batch is cut."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"a mesh of {self.world_size} ranks has no rank {rank}")
        places = []
        for size in reversed(self._sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return Coordinates(*reversed(places))

    def rank_of(self, place: Coordinates) -> int:
        """The rank at a place: the inverse of `coordinates`.

        Raises:
            ValueError: the place is not on the mesh.
        """
        rank = 0
        for axis, size, number in zip(place._fields, self._sizes, place, strict=True):
            if not 0 <= number < size:
                raise ValueError(f"the axis {axis!r} of the mesh has {size} ranks, and no {number}")
            rank = rank * size + number
        return rank

    def lines(self, axis: str) -> list[list[int]]:
        """The ranks that differ on an axis alone, in its order; all of these lines."""
        found: dict[Coordinates, list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            found.setdefault(place._replace(**{axis: 0}), []).append(rank)
        return list(found.values())

    def data_parallel_rank(self, rank: int) -> int:
        """The number of the part of a batch that a rank computes.

        Raises:
            ValueError: there is no such rank.
        """
        place = self.coordinates(rank)
        return place.replicate * self.shard + place.shard

    @property
    def data_parallel_leaders(self) -> tuple[int, ...]:
        """The first rank of each part of a batch: those whose answers are read."""
        places = (
            Coordinates(replicate, shard)
            for replicate in range(self.replicate)
            for shard in range(self.shard)
        )
        return tuple(self.rank_of(place) for place in places)


ONE_RANK = Mesh()
"""The mesh of a trainer with a single rank."""
