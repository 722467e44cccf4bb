"""A trainer's weights as one of its ranks sends them."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from agentrl.protocols.weight_source import LowRankBase, WeightSource, WeightUnit
from agentrl.trainers.rank.sharding import Sharding


class RankWeights(WeightSource):
    """`WeightSource` of a sharding."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    @property
    def rank(self) -> int:
        """See `WeightSource`."""
        return self._sharding.rank

    @cached_property
    def units(self) -> Sequence[WeightUnit]:
        """See `WeightSource`."""
        return self._sharding.trainable.units

    @cached_property
    def update(self) -> LowRankBase | None:
        """See `WeightSource`."""
        return self._sharding.trainable.update

    @property
    def device(self) -> torch.device:
        """See `WeightSource`."""
        return self._sharding.device

    def gather(
        self, unit: WeightUnit, to: Collection[int], dtype: torch.dtype | None
    ) -> Mapping[str, Tensor]:
        """See `WeightSource`."""
        own = self._sharding.gather(unit.own, to, dtype if self.update is None else torch.float32)
        return self._sharding.trainable.published(own) if self.rank in to else {}

    def ranks_that(self, can: bool) -> Sequence[int]:
        """See `WeightSource`."""
        ranks = self._sharding.mesh.world_size
        answers = torch.zeros(ranks, device=self._sharding.device)
        answers[self.rank] = float(can)
        able = self._sharding.sum(answers).tolist()
        return [rank for rank in range(ranks) if able[rank]]
