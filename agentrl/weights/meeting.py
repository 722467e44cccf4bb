"""Where the ranks of a trainer and the readers of its weights, the engines' processes, meet: a
store of keys that rank 0 serves.

A reader enrolls for a version when it stages it, and joins when it is about to load it. Rank 0 then
makes the roll: the readers that have joined. It waits for those that have enrolled as long as they
attend (`agentrl/weights/attendance.py`). Who is on the roll gets the version; the others raise an
error before they have changed anything.
"""

import json
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from agentrl.errors import WeightsError
from agentrl.weights.attendance import Attendance, Doorkeeper, Watch, left
from agentrl.weights.moved import LOOK_SECONDS
from agentrl.weights.shipment import Reader

_DOOR = "door"


@dataclass(frozen=True, slots=True)
class Roll:
    """Who takes part in sending a version."""

    group: int
    """The number of the group that they form: the same as long as they are the same."""
    readers: Sequence[Reader]
    """The readers in their order."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the readers."""
        return [reader.name for reader in self.readers]


class Meeting:
    """A connection to the store. Each thread that waits for a key needs its own.

    Raises:
        WeightsError: from all methods: rank 0 cannot be reached, or does not answer in time.
    """

    def __init__(self, store: Any, address: str, seconds: float) -> None:
        self.store = store
        self.address = address
        self._seconds = seconds

    @staticmethod
    def serve(host: str, seconds: float) -> "Meeting":
        """A new store in this process, which listens at `host` only."""
        listener = socket.socket()
        listener.bind((host, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            # A store that makes its socket itself listens on all interfaces.
            master_listen_fd=listener.detach(),
        )
        meeting = Meeting(store, f"{host}:{port}", seconds)
        # It notes what it sees in a thread of its own, which needs the store until it ends.
        door = Doorkeeper(host, Meeting.at(meeting.address, seconds).store, served=store)
        weakref.finalize(meeting, door.close)
        meeting.put(_DOOR, door.address)
        return meeting

    @staticmethod
    def at(address: str, seconds: float) -> "Meeting":
        """A connection to the store at an address.

        Raises:
            WeightsError: nobody is there. A store listens before anybody knows its address, so it
                is gone.
        """
        host, _, port = address.rpartition(":")
        with _as_weights_error(address):
            # torch would try again until the deadline.
            socket.create_connection((host, int(port)), timeout=seconds).close()
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                int(port),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )
        return Meeting(store, address, seconds)

    def attend(self, name: str) -> Attendance:
        """Begin to give signs of life of a reader."""
        with _as_weights_error(self.address):
            return Attendance(self.store.get(_DOOR).decode(), name, self._seconds)

    def watch(self, names: Sequence[str], lease: float) -> Watch:
        """A watch over readers, of which one that has given no sign of life for `lease` seconds is
        gone.
        """
        return Watch(self.store, names, lease)

    def enroll(self, key: str, reader: Reader, group: int | None) -> None:
        """Announce a reader for the version of this key. It must attend. `group`: the one that it
        is in (`Roll.group`); None if it is in none, or has left it.
        """
        with _as_weights_error(self.address):
            number = self.store.add(f"{key}/enrolled", 1) - 1
            self.store.set(f"{key}/reader/{number}", json.dumps([asdict(reader), group]))

    def join(self, key: str, name: str) -> Roll:
        """Tell rank 0 that a reader is about to load the version, and return the roll.

        Raises:
            WeightsError: the reader is not on it.
        """
        with _as_weights_error(self.address):
            self.store.set(f"{key}/joined/{name}", "")
        roll = self.roll(key)
        if name not in roll.names:
            raise WeightsError(
                "the trainer began to send these weights before this engine was ready for them"
            )
        return roll

    def roll(self, key: str) -> Roll:
        """The roll of a version; waits until rank 0 has made it."""
        with _as_weights_error(self.address):
            group, readers = json.loads(self.store.get(f"{key}/roll"))
            return Roll(group, [Reader(**reader) for reader in readers])

    def make_roll(self, key: str, last: Roll | None, lease: float, near: str) -> Roll:
        """Wait for the readers that have enrolled, and make the roll of those that have joined:
        first those at the place `near`, and others by their places. Gloo's readers hand weights on
        to each other, so between neighbours they do not cross the network.

        `last`: the roll of the group that can be used again. A reader that is gone (`watch`) is not
        waited for.
        """
        enrolled = self.store.add(f"{key}/enrolled", 0)
        # A reader whose engine was asked to stage the version again has enrolled twice.
        by_name: dict[str, Reader] = {}
        groups: dict[str, int | None] = {}
        for number in range(enrolled):
            reader, group_of = json.loads(self.store.get(f"{key}/reader/{number}"))
            by_name[reader["name"]], groups[reader["name"]] = Reader(**reader), group_of
        joined = self.wait_for(f"{key}/joined", list(by_name), lease)
        present = sorted(
            (by_name[name] for name in joined if not self.store.check([left(name)])),
            key=lambda reader: (reader.place != near, reader.place, reader.name),
        )
        same = last is not None and list(last.readers) == present
        # A reader that has left and come back waits for a new group.
        if last is not None and same and all(groups[name] == last.group for name in last.names):
            group = last.group
        else:
            group = self.store.add("groups", 1)
        self.store.set(f"{key}/roll", json.dumps([group, [asdict(reader) for reader in present]]))
        return Roll(group, present)

    def put(self, key: str, value: str) -> None:
        """Set a key."""
        with _as_weights_error(self.address):
            self.store.set(key, value)

    def get(self, key: str, *, unless: str) -> str:
        """The value of a key; waits until it has one, or until the key `unless` is set.

        Raises:
            WeightsError: the key `unless` is set.
        """
        limit = time.monotonic() + self._seconds
        with _as_weights_error(self.address):
            while not self.store.check([key]):
                if self.store.check([unless]):
                    raise WeightsError("the sender has broken off")
                if time.monotonic() > limit:
                    raise WeightsError(f"nothing was sent in {self._seconds:g} s")
                threading.Event().wait(LOOK_SECONDS)
            value: str = self.store.get(key).decode()
            return value

    def is_set(self, key: str) -> bool:
        """True if a key has a value."""
        with _as_weights_error(self.address):
            return bool(self.store.check([key]))

    def wait_for(self, key: str, names: Sequence[str], lease: float) -> list[str]:
        """Wait until each of the readers has set `key/NAME`; returns those that have. A reader that
        is gone (`watch`) is not waited for, and no reader for longer than anything may take.
        """
        present: set[str] = set()
        limit = time.monotonic() + self._seconds
        watch = self.watch(names, lease)
        with _as_weights_error(self.address):
            while True:
                gone = set(watch.gone())  # before their keys: what they have set by then counts
                waiting = [name for name in names if name not in present]
                present |= {name for name in waiting if self.store.check([f"{key}/{name}"])}
                if set(names) <= present | gone or time.monotonic() > limit:
                    return [name for name in names if name in present]
                threading.Event().wait(LOOK_SECONDS)


@contextmanager
def _as_weights_error(address: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # also DistStoreError, DistNetworkError
        raise WeightsError(
            f"the trainer's rank 0 cannot be reached at {address}: {error}"
        ) from error
