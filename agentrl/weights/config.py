"""Settings of weight updates: how new weights go from the trainer to the engines."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from agentrl.settings.base import NameText, Settings

WeightUpdate = Literal["keep", "abort_resume", "drain"]

_SECONDS = 600.0

_SECONDS_PER_GB = 20.0
"""Files in bfloat16 may be sent in float32, so this is 100 MB/s: a slow disk."""


class WeightsConfig(Settings):
    """How weights go from the trainer to the engines."""

    update: WeightUpdate = "keep"
    """What happens to turns in flight when new weights arrive: they continue under the new weights
    (`keep`), are ended and sent again with their tokens so far (`abort_resume`), or finish before
    the update (`drain`)."""
    deadline: float | None = Field(default=None, gt=0)
    """Seconds that each phase of an update, staging and committing, may take on an engine; an
    engine that misses it is replaced. By default 600, and 20 for each GB of the model's files."""

    transport: NameText = "auto"
    """How weights go to the engines. In files: in this machine's shared memory (`shared_memory`),
    on the disk of `folder`, which all machines must see (`disk`), or in memory, and on the disk
    when memory is full (`files`). From memory to memory: over the network (`stream`), or through
    memory of a device that trainer and engines share (`handles`). `direct`: engines in this process
    get the tensors themselves. `auto`: on GPUs `handles` where trainer and engines share devices,
    else `stream`, or `files` if that does not work; on CPUs, and for adapters, `files`. Packages
    may add others (`agentrl.weight_transports`)."""
    host: NameText | None = None
    """The address at which the trainer's rank 0 meets the engines, for `stream` and `handles`. By
    default this machine's own, if the cluster has others, else the loopback interface."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The number format in which weights are sent. `auto` is the engine's (`engine.dtype`), which
    rounds them to it anyway: a model in bfloat16 is two bytes a parameter."""
    folder: Path | None = None
    """The folder for weights on disk; by default the one for temporary files."""
    bucket_mib: int = Field(default=64, ge=1)
    """MiB of each bucket that weights are sent in; a larger tensor has one of its own. A rank holds
    two at a time, and by `stream` and `handles` copies of those that it still writes into files."""
    attempts: int = Field(default=3, ge=1)
    """How many times writing and staging a version is tried before the run ends."""

    @property
    def seconds(self) -> float:
        """The deadline of each phase; `for_model` chooses it by the model."""
        return self.deadline or _SECONDS

    def in_format_of(self, engines: Iterable[str | None]) -> Self:
        """The same, in the number format that all of these engines have (`engine.dtype`), where the
        settings say nothing: float32 if one has that, or none that is known.
        """
        formats = {dtype or "float32" for dtype in engines}
        if self.dtype != "auto" or formats == {"auto"}:
            return self
        widest = "bfloat16" if formats == {"bfloat16"} else "float32"
        return self.model_copy(update={"dtype": widest})

    def over_machines(self, several: bool) -> Self:
        """The same, with the address at which the trainer meets the engines, where the settings
        have none: "" is that of rank 0's machine.
        """
        if self.host is not None:
            return self
        return self.model_copy(update={"host": "" if several else "127.0.0.1"})

    def for_model(self, folder: Path) -> Self:
        """The same, with more time for a large model where the settings say nothing."""
        files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
        size = sum(file.stat().st_size for file in files)
        return self.model_copy(
            update={"deadline": self.deadline or _SECONDS + _SECONDS_PER_GB * size / 1e9}
        )
