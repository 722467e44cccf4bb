"""`BundleReceiver`: a machine's copies of bundles that lie on another machine.

All engines of the machine read the same copy. It arrives in pieces, each of which is written to a
file before the one after the next is asked for, so memory never holds more than two of them.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import WeightsError
from agentrl.flow import run_to_completion
from agentrl.weights.bundle import Bucket, BundlePlace, WeightBundle
from agentrl.weights.check_record import record_check
from agentrl.weights.store import WeightStore, default_parent

PIECE_BYTES = 64 << 20
"""Most bytes that are asked for at once."""
_IN_FLIGHT = 2
"""Most pieces that have been asked for and are not written yet."""

ReadPiece = Callable[[Path, int, int], Awaitable[Any]]
"""Begins to read a piece of a file on the machine where the bundle lies, given the offset and the
size in bytes; the answer is a buffer. Raises WeightsError if it cannot be read.
"""


class BundleReceiver:
    """The copies of one machine, in `parent`: by default in shared memory. Close it at the end."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._store: WeightStore | None = None
        self._copies: dict[str, WeightBundle] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def receive(self, bundle: WeightBundle, read: ReadPiece) -> WeightBundle:
        """This machine's copy of a bundle, every byte of which has been checked. The first call
        fetches it, and those that come meanwhile wait for that.

        Raises:
            WeightsError: it cannot be read where it lies, has arrived damaged, or cannot be written
            here.
        """
        checksum = bundle.checksum
        async with self._turns.setdefault(checksum, asyncio.Lock()):
            copy = self._copies.get(checksum)
            if copy is None or not await _is_whole(copy):
                copy = await self._fetch(bundle, read)
                self._copies[checksum] = copy
            return copy

    async def keep_only(self, checksums: Iterable[str]) -> None:
        """Remove the copies of all bundles but those with these checksums. One that is just
        arriving stays.
        """
        kept = set(checksums)
        self._copies = {key: copy for key, copy in self._copies.items() if key in kept}
        self._turns = {key: turn for key, turn in self._turns.items() if turn.locked()}
        if self._store is not None and not self._turns:
            await self._store.keep_only(self._copies.values())

    def close(self) -> None:
        """Remove all copies."""
        if self._store is not None:
            self._store.close()

    async def _fetch(self, bundle: WeightBundle, read: ReadPiece) -> WeightBundle:
        if self._store is None:
            self._store = WeightStore.open(self._parent or default_parent())
        try:
            with self._store.place(bundle.manifest.version) as place:
                await _copy(bundle, place, read)
                return await run_to_completion(asyncio.to_thread(_finish_and_record, place, bundle))
        except OSError as error:
            raise WeightsError(
                f"{bundle} could not be copied into {self._store.folder}: {error}. Make room there"
            ) from error


def _finish_and_record(place: BundlePlace, bundle: WeightBundle) -> WeightBundle:
    copy = place.finish_as(bundle.manifest)
    record_check(copy.folder, copy.checksum, copy.manifest.files)
    return copy


async def _is_whole(copy: WeightBundle) -> bool:
    try:
        await asyncio.to_thread(copy.check)
    except WeightsError:
        return False
    return True


async def _copy(bundle: WeightBundle, place: BundlePlace, read: ReadPiece) -> None:
    """Fetch the files of a bundle into a place, a few pieces at a time."""
    in_flight: deque[tuple[Bucket, bool, Awaitable[Any]]] = deque()

    async def write_oldest() -> None:
        bucket, is_last, coming = in_flight.popleft()
        content = memoryview(await coming)
        await run_to_completion(asyncio.to_thread(place.add, bucket, content, is_last=is_last))

    for bucket, offset, size in _pieces(bundle):
        if len(in_flight) == _IN_FLIGHT:
            await write_oldest()  # in order: the pieces of a file are appended
        is_last = offset + size == bucket.size
        in_flight.append((bucket, is_last, read(bundle.folder / bucket.file, offset, size)))
    while in_flight:
        await write_oldest()


def _pieces(bundle: WeightBundle) -> Iterator[tuple[Bucket, int, int]]:
    """The pieces of a bundle's files: where each begins, and its bytes."""
    for bucket in bundle.manifest.buckets:
        for offset in range(0, bucket.size, PIECE_BYTES):
            yield bucket, offset, min(PIECE_BYTES, bucket.size - offset)
