"""`SeededTasks`: one environment, and a new seed for each task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.plugins import NoSettings
from agentrl.rollout.seeds import split_seed
from agentrl.trajectory import Task


@dataclass(frozen=True, slots=True)
class SeededTasks:
    """`TaskSource`: one environment, with a different seed for each index.

    The same run seed gives the same tasks in every launch, and no two splits share a seed.
    """

    settings: NoSettings
    env: str
    seed: int
    split: str = "train"
    options: Mapping[str, Any] = field(default_factory=dict)

    def task(self, index: int) -> Task:
        """The task of this index."""
        return Task(
            self.env,
            split_seed(self.seed, self.split, index),
            self.options,
            f"{self.split}-{index:06d}",
        )
