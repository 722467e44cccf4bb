"""Weights from the trainer to the engines, by version."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.flow import deadline
from agentrl.protocols import Engine, Trainer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightPublisher:
    """Brings the engine to the trainer's weights; returns when it samples under the new version.

    Each of `followers` is an engine that takes up only the versions divisible by its number.
    """

    engine: Engine
    deadline: float
    followers: tuple[tuple[Engine, int], ...] = ()

    async def publish(self, trainer: Trainer, version: int) -> None:
        """Publish the trainer's weights as `version`.

        Raises:
            DeadlineError: an engine did not take them in time.
        """
        weights = await trainer.weights()
        for engine in (self.engine, *(follower for follower, every in self.followers if version % every == 0)):
            with deadline("engine", "update_weights", self.deadline):
                await engine.update_weights(weights, version)


def checksum(weights: Mapping[str, "Tensor"]) -> str:
    """SHA-256 over names and bytes of all weights, in order of names, in hex."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        raw = weights[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + b"\0" + raw.numpy().tobytes())
    return digest.hexdigest()
