"""Settings of weight updates: how new weights go from the trainer to the engines."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from agentrl.settings.base import Settings

WeightUpdate = Literal["keep", "abort_resume", "drain"]

_SECONDS = 600.0

_SECONDS_PER_GB = 20.0
"""Files in bfloat16 are published in float32, so this is 100 MB/s: a slow disk."""


class WeightsConfig(Settings):
    """How weights go from the trainer to the engines."""

    update: WeightUpdate = "keep"
    """What happens to turns in flight when new weights arrive: they continue under the new weights
    (`keep`), are ended and sent again with their tokens so far (`abort_resume`), or finish before
    the update (`drain`)."""
    deadline: float | None = Field(default=None, gt=0)
    """Seconds that each phase of an update, staging and committing, may take on an engine; an
    engine that misses it is replaced. By default 600, and 20 for each GB of the model's files."""

    transport: str = "auto"
    """Where weights are stored on the way: in this machine's shared memory, or on the disk of
    `folder`, which all machines must see. `auto`: in memory, or on the disk when memory is full.
    `direct`: nowhere, because engines in this process get the tensors themselves. Packages
    may add others (`agentrl.weight_transports`)."""
    folder: Path | None = None
    """The folder for weights on disk; by default the one for temporary files."""
    bucket_mib: int = Field(default=64, ge=1)
    """MiB of each file that weights are split into. At most one of them is copied at a time."""
    attempts: int = Field(default=3, ge=1)
    """How many times writing and staging a version is tried before the run ends."""

    @property
    def seconds(self) -> float:
        """The deadline of each phase; `for_model` chooses it by the model."""
        return self.deadline or _SECONDS

    def for_model(self, folder: Path) -> Self:
        """The same, with more time for a large model where the settings say nothing."""
        files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
        size = sum(file.stat().st_size for file in files)
        return self.model_copy(
            update={"deadline": self.deadline or _SECONDS + _SECONDS_PER_GB * size / 1e9}
        )
