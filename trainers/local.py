"""The trainer of one process and one device: packed rows, exact accumulation, AdamW."""

from typing import ClassVar

from agentrl.settings.base import NameText
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.settings import TrainerSettings


class LocalTrainer(GroupTrainer):
    """Weights and optimizer on one device, by default in a thread of this process.

    On the same machine the same batches give bitwise the same weights, if the device's kernels are
    deterministic (those of a CPU are).
    """

    sharding: ClassVar[str] = "agentrl.trainers.rank.one_device:open_sharding"

    class Config(TrainerSettings):
        """The settings of every trainer, and the device."""

        device: NameText = "auto"
        """A torch device, or "auto": the first GPU, else the CPU."""
