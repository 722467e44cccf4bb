"""The trainer of one process and one device: packed rows, exact accumulation, AdamW."""

from typing import ClassVar

from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.settings import TrainerSettings


class LocalTrainer(GroupTrainer):
    """Weights and optimizer on one device, by default of this process, in a thread of its own.

    The same batches give bitwise the same weights on the same machine, as far as the device's kernels are
    deterministic (those of a CPU are).
    """

    sharding: ClassVar[str] = "agentrl.trainers.one_device:open_sharding"

    class Config(TrainerSettings):
        """Everything a trainer has, and where it computes."""

        device: str = "auto"
        """A torch device, or "auto": the first GPU, else the CPU."""
