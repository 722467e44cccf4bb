"""The ways by which a bucket gets from a rank's memory into that of the readers: a group of
torch.distributed, or memory that both have open.
"""

import base64
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import WeightsError
from agentrl.net.interfaces import LOOPBACK, own_address
from agentrl.weights.meeting import Meeting, Roll

BUFFERS = 2
"""Buckets that a sender holds at once."""
_CONNECT_SECONDS = 60.0
"""How long those on a roll may take to connect, as one of them may have died since."""
_LOOK_SECONDS = 0.2
_LONGEST_PAUSE = 0.005


def broadcast_group(meeting: Meeting, roll: Roll, sender: int, place: int, seconds: float) -> Any:
    """The group in which the rank `sender`, as the first, sends to all readers of a roll.

    NCCL, if all of them are on GPUs; else gloo, in main memory.
    """
    prefix = f"group {roll.group}/{sender}"
    store = dist.PrefixStore(prefix, meeting.store)  # type: ignore[attr-defined]
    patience, size = timedelta(seconds=seconds), 1 + len(roll.readers)
    if is_on_gpus(roll):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        return dist.ProcessGroupNCCL(store, place, size, options)
    here = LOOPBACK if meeting.address.startswith(LOOPBACK) else own_address()
    gloo: Any = dist.ProcessGroupGloo
    settings = gloo._Options()
    # Else it would be the interface that the process has for its other groups.
    settings._devices = [gloo.create_device(hostname=here)]
    settings._timeout = timedelta(seconds=min(seconds, _CONNECT_SECONDS))
    made = gloo(store, place, size, settings)
    made._set_default_timeout(patience)
    return made


def is_on_gpus(roll: Roll) -> bool:
    """True if all readers, and so the ranks too, are on GPUs."""
    return all(reader.device.startswith("cuda") for reader in roll.readers)


def device_of_group(roll: Roll, own: torch.device) -> torch.device:
    """Where a member of the group of a roll has its buffers."""
    return own if is_on_gpus(roll) else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Audience:
    """Who reads what a rank sends of a version."""

    meeting: Meeting
    key: str
    """The prefix of the keys by which they talk to each other."""
    readers: Sequence[str]
    """Their names."""
    lease: float
    """For how many seconds one may give no sign of life."""

    def break_off(self) -> None:
        """Tell them that there will be no more."""
        with suppress(WeightsError):  # rank 0 is gone: they notice that
            self.meeting.put(_broken_key(self.key), "")


def _broken_key(key: str) -> str:
    return f"{key}/broken"


class GroupSending:
    """`SendingLane` that broadcasts to an audience. If one of them is gone, all are left. `make`:
    makes a buffer.
    """

    def __init__(self, group: Any, audience: Audience, make: Callable[[], Tensor]) -> None:
        self._group = group
        self._audience = audience
        self._watch = audience.meeting.watch(audience.readers, audience.lease)
        self._buffers = [make() for _ in range(BUFFERS)]
        self._works: list[Any] = [None] * BUFFERS

    def buffer(self, number: int) -> Tensor:
        """See `SendingLane`."""
        # The broadcast that still reads a buffer has to end before it is filled again.
        if (work := self._works[number % BUFFERS]) is not None:
            _wait_for(work, self._check)
            self._works[number % BUFFERS] = None
        return self._buffers[number % BUFFERS]

    def send(self, number: int, bucket: int, size: int) -> None:
        """See `SendingLane`."""
        sent = self._buffers[number % BUFFERS][:size]
        self._works[number % BUFFERS] = self._group.broadcast([sent], dist.BroadcastOptions())

    def finish(self) -> None:
        """See `SendingLane`."""
        for number in range(BUFFERS):
            self.buffer(number)

    def break_off(self) -> None:
        """See `SendingLane`. Those that live are told, since what they wait for may hang."""
        self._audience.break_off()
        _abandon(self._group, [work for work in self._works if work is not None])
        self._group = None
        self._works.clear()

    def _check(self) -> None:
        if gone := self._watch.gone():
            raise WeightsError(
                f"{len(gone)} of {len(self._audience.readers)} processes that load them are gone"
            )


class GroupReading:
    """`ReadingLane` of the groups of all senders, of which bucket i comes from the (i mod n)th."""

    def __init__(
        self, groups: Sequence[Any], device: torch.device, meeting: Meeting, key: str
    ) -> None:
        self._groups = groups
        self._device = device
        self._meeting = meeting
        self._key = key

    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See `ReadingLane`. The next bucket arrives while one is read."""

        def begin(number: int) -> tuple[Any, Any, Tensor]:
            group = self._groups[number % len(self._groups)]
            arriving = torch.empty(sizes[number], dtype=torch.uint8, device=self._device)
            return group, group.broadcast([arriving], dist.BroadcastOptions()), arriving

        group, work, arriving = begin(0)
        try:
            for number in range(len(sizes)):
                _wait_for(work, self._check)
                arrived = arriving
                if number + 1 < len(sizes):
                    group, work, arriving = begin(number + 1)
                yield arrived
                del arrived  # else it would stay until the next one is there
        finally:
            if not work.is_completed():
                _abandon(group, [work])

    def _check(self) -> None:
        if self._meeting.is_set(_broken_key(self._key)):
            raise WeightsError("the sender has broken off")


def _wait_for(work: Any, check: Callable[[], None]) -> None:
    """Wait until something that a group does has ended. `check` is called repeatedly, and may
    raise.
    """
    pause, next_look = _LONGEST_PAUSE / 64, time.monotonic() + _LOOK_SECONDS
    while not work.is_completed():
        if time.monotonic() >= next_look:
            check()
            next_look = time.monotonic() + _LOOK_SECONDS
        threading.Event().wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    work.wait()  # raises its error


def _abandon(group: Any, works: Sequence[Any]) -> None:
    """Drop a group in which an operation may hang. Dropping the last reference to it would wait
    for that operation, so a thread keeps one until it ends. Then the group's connections close.
    """

    def wait(group: Any) -> None:
        group.abort()  # NCCL's; gloo cannot
        for work in works:
            with suppress(RuntimeError):
                work.wait()

    if works:
        threading.Thread(target=wait, args=(group,), name="weights-end", daemon=True).start()


@dataclass(frozen=True)
class SharedMemory:
    """Main memory that other processes of this machine can open by its path."""

    path: Path
    bytes: Tensor

    @staticmethod
    def make(path: Path, size: int) -> "SharedMemory":
        """New memory. Who has what was at the path before keeps that.

        Raises:
            OSError: there is not enough.
        """
        path.unlink(missing_ok=True)  # who reads a file that is cut off is killed (SIGBUS)
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        return SharedMemory(path, _map_file(path))


def memory(
    device: torch.device, folder: Path, rank: int, size: int, number: int
) -> Tensor | SharedMemory:
    """A buffer of a rank that the readers on its device can open."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    # A rank that was started again takes the place of the one that died.
    return SharedMemory.make(folder / f"bucket-{rank}-{number}", size)


def _map_file(path: Path) -> Tensor:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=torch.uint8)


def handle_of(memory: Tensor | SharedMemory) -> bytes:
    """The handle by which another process opens memory: the path of main memory, or the CUDA IPC
    handle of a GPU's.
    """
    if isinstance(memory, SharedMemory):
        return pickle.dumps(str(memory.path))
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps(reduce_tensor(memory))  # type: ignore[no-untyped-call]


def open_handle(handle: bytes) -> Tensor:
    """The memory of a handle of a process of the same run."""
    what = pickle.loads(handle)
    if isinstance(what, str):
        return _map_file(Path(what))
    rebuild, arguments = what
    memory: Tensor = rebuild(*arguments)
    return memory


class HandleSending:
    """`SendingLane` into memory that an audience opens, of whom each goes its own way: one that is
    gone is not waited for. `make`: makes a buffer.
    """

    def __init__(self, audience: Audience, make: Callable[[int], Tensor | SharedMemory]) -> None:
        self._audience = audience
        self._readers = list(audience.readers)
        self._memory = [make(number) for number in range(BUFFERS)]
        self._handles = [base64.b64encode(handle_of(memory)).decode() for memory in self._memory]
        self._sent: list[int | None] = [None] * BUFFERS

    def buffer(self, number: int) -> Tensor:
        """See `SendingLane`."""
        bucket, self._sent[number % BUFFERS] = self._sent[number % BUFFERS], None
        if bucket is not None:
            to = self._audience
            read = f"{to.key}/read/{bucket}"
            self._readers = to.meeting.wait_for(read, self._readers, to.lease)
        memory = self._memory[number % BUFFERS]
        return memory.bytes if isinstance(memory, SharedMemory) else memory

    def send(self, number: int, bucket: int, size: int) -> None:
        """See `SendingLane`."""
        filled = self._memory[number % BUFFERS]
        # What fills it runs beside this thread, and a reader's process does not wait for that.
        if isinstance(filled, Tensor) and filled.device.type == "cuda":
            torch.cuda.synchronize(filled.device)
        self._sent[number % BUFFERS] = bucket
        to = self._audience
        to.meeting.put(f"{to.key}/bucket/{bucket}", self._handles[number % BUFFERS])

    def finish(self) -> None:
        """See `SendingLane`."""
        for number in range(BUFFERS):
            self.buffer(number)

    def break_off(self) -> None:
        """See `SendingLane`."""
        self._audience.break_off()


class HandleReading:
    """`ReadingLane` of memory on the reader's own device."""

    def __init__(self, meeting: Meeting, key: str, name: str) -> None:
        self._meeting = meeting
        self._key = key
        self._name = name
        self._opened: dict[str, Tensor] = {}

    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See `ReadingLane`. Each is copied, so that the sender can fill its buffer again."""
        for number, size in enumerate(sizes):
            handle = self._meeting.get(
                f"{self._key}/bucket/{number}", unless=_broken_key(self._key)
            )
            if handle not in self._opened:
                self._opened[handle] = open_handle(base64.b64decode(handle))
            memory = self._opened[handle]
            if memory.numel() < size:
                raise WeightsError(f"bucket {number} has {memory.numel()} bytes instead of {size}")
            arrived = memory[:size].clone()
            if memory.device.type == "cuda":  # the sender must not fill it before it is copied
                torch.cuda.synchronize(memory.device)
            self._meeting.put(f"{self._key}/read/{number}/{self._name}", "")
            yield arrived
            del arrived


SendingLane = GroupSending | HandleSending
"""One rank's end of a lane, whose buffers are filled in turns.

- `buffer(number)`: the buffer for the bucket `number` of those that this rank sends, once the
  readers no longer need what was in it.
- `send(number, bucket, size)`: begin to send the first `size` bytes of that buffer, as the bucket
  `bucket`.
- `finish()`: wait until the readers have everything.
- `break_off()`: leave the readers, which notice it.
"""

ReadingLane = GroupReading | HandleReading
"""A reader's end of all lanes. `buckets(sizes)` yields the buckets in order; `sizes` are in bytes.
No process writes to a bucket afterwards, because vLLM keeps weights until it has a whole layer."""
