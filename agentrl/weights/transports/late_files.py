"""The files of a version that the ranks have sent from memory to memory: each rank copies its
buckets into main memory, and a thread writes them while the next step goes on.

When a rank has written all, it tells the meeting, where the controller looks for it.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from agentrl.errors import WeightsError
from agentrl.settings.base import Settings
from agentrl.weights.attendance import left
from agentrl.weights.bundle import Bucket, BundlePlace
from agentrl.weights.plan import BucketPlan, sum_in, weights_in
from agentrl.weights.transports.files import write_and_let_go

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from agentrl.weights.attendance import Attendance
    from agentrl.weights.meeting import Meeting


class RankFiles(Settings):
    """The files of a version that one rank has written, or why it could not."""

    buckets: tuple[Bucket, ...] = ()
    error: str = ""


class LateFiles:
    """A rank's files of one version. Their bytes are in main memory until they are written."""

    def __init__(self, place: BundlePlace, dtype: "torch.dtype") -> None:
        self._place = place
        self._dtype = dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._writing: list[Future[Bucket]] = []
        self.sums: dict[int, int] = {}
        """The sum of each bucket, by its number."""

    def add(self, number: int, bucket: BucketPlan, buffer: "Tensor") -> None:
        """Copy a sealed bucket out of the buffer, and begin to write it."""
        import torch

        on_gpu = buffer.device.type == "cuda"
        kept = torch.empty(bucket.size, dtype=torch.uint8, pin_memory=on_gpu)
        kept.copy_(buffer[: bucket.size])
        self.sums[number] = sum_in(bucket, kept)
        weights = dict(weights_in(kept, bucket, self._dtype))
        self._writing.append(self._thread.submit(write_and_let_go, self._place, number, weights))

    def written(self) -> RankFiles:
        """Wait until all are written."""
        try:
            return RankFiles(buckets=tuple(future.result() for future in self._writing))
        except OSError as error:
            return RankFiles(error=str(error))

    def tell(self, meeting: "Meeting", key: str) -> "Future[None]":
        """Tell the meeting as soon as all are written; there are no more. Until then, it knows that
        this process lives. The connection is not used for anything else.

        Raises:
            WeightsError, OSError: the meeting is gone.
        """
        attendance = meeting.attend(key)
        told = self._thread.submit(self._tell, meeting, attendance, key)
        self._thread.shutdown(wait=False)
        return told

    def close(self) -> None:
        """Write no more."""
        self._thread.shutdown(cancel_futures=True)

    def _tell(self, meeting: "Meeting", attendance: "Attendance", key: str) -> None:
        try:
            meeting.put(key, self.written().model_dump_json())
        finally:
            attendance.end()


def told_by(meeting: "Meeting", keys: Sequence[str]) -> list[RankFiles] | None:
    """The reports that the ranks have left in the meeting under these keys; None if one is missing.

    Raises:
        WeightsError: one of them has died, or all have, and the meeting with them.
    """
    found: list[RankFiles] = []
    for key in keys:
        is_gone = meeting.is_set(left(key))  # before its key: what it has told by then counts
        if meeting.is_set(key):
            found.append(RankFiles.model_validate_json(meeting.get(key, unless=left(key))))
        elif is_gone:
            raise WeightsError("a rank of the trainer died while it wrote new weights")
    return found if len(found) == len(keys) else None


__all__ = ["LateFiles", "RankFiles", "told_by"]
