"""Snapshots of the policy on disk: a folder for each of its last versions, for opponents that play
as it once did.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.files.durable import finish_folder, new_unfinished, remove_folder
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.shipment import shipment_of
from agentrl.weights.store import BUCKET_BYTES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshots of a run: versions divisible by `every`, of which the last `size` are needed at
    each version.

    Each is complete or absent, also after a crash of the machine.
    """

    folder: Path
    every: int
    size: int

    def needed(self, version: int) -> Sequence[int]:
        """The versions of the snapshots that there are to play against at this version, oldest
        first.
        """
        return range(0, version, self.every)[-self.size :]

    def write(self, version: int, weights: Mapping[str, "Tensor"]) -> None:
        """Keep weights as the snapshot of this version, unless there is one.

        Raises:
            OSError: they cannot be written.
        """
        final = self._place(version)
        if final.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        shipment = shipment_of(weights)
        if shipment.folder is not None:
            shutil.copytree(shipment.folder, new_unfinished(final))
        else:
            BundlePlace(new_unfinished(final), version, BUCKET_BYTES).write(shipment.unpacked)
        finish_folder(final)

    def open(self, version: int) -> WeightBundle:
        """The snapshot of this version. Engines check its bytes.

        Raises:
            WeightsError: there is none.
        """
        return WeightBundle.at(self._place(version))

    def thin_out(self, version: int, resumable: Iterable[int], used: Iterable[int] = ()) -> None:
        """Remove the snapshots that are needed neither at this version, nor at those that the run
        may resume from (`resumable`), nor later. Those in `used` stay.
        """
        kept = {*used}
        for start in (version, *resumable):
            # Also the version itself, which later ones may need.
            kept |= {*self.needed(start), start}
        self._keep(lambda there: there in kept)

    def go_back_to(self, version: int) -> None:
        """Remove the snapshots of later versions, which a resumed run will train again; and version
        0, which refers to the run's folder where it was then.
        """
        self._keep(lambda there: 0 < there <= version)

    def _keep(self, which: Callable[[int], bool]) -> None:
        for there in self.versions():
            if not which(there):
                remove_folder(self._place(there))

    def remove(self, version: int) -> None:
        """Remove the snapshot of this version, if there is one."""
        self._keep(lambda there: there != version)

    def versions(self) -> list[int]:
        """The versions that there are snapshots of."""
        paths = self.folder.glob("version_*")
        return [
            int(match[1]) for path in paths if (match := re.fullmatch(r"version_(\d+)", path.name))
        ]

    def _place(self, version: int) -> Path:
        return self.folder / f"version_{version:06d}"
