"""Who of the readers of weights is still there.

Each reader keeps a connection to rank 0 open, by which it gives signs of life. When its process
ends, the connection closes, and rank 0 notes at once in the store that the reader has left. A
process that is stopped, or cut off, closes nothing: its signs of life no longer come.
"""

import selectors
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_LONGEST_NAME = 200
_END_OF_NAME = b"\n"
_BEAT = b"."


def left(name: str) -> str:
    """The key that is set when a reader has left."""
    return f"left/{name}"


def _beats(name: str) -> str:
    """The key that counts the signs of life of a reader."""
    return f"beats/{name}"


class Attendance:
    """A reader's connection. A thread gives signs of life by it until `end`, or until the process
    ends.

    Raises:
        OSError: rank 0 does not answer.
    """

    def __init__(self, address: str, name: str, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=seconds)
        self._has_ended = threading.Event()
        self._connection.sendall(name.encode() + _END_OF_NAME)
        if not self._connection.recv(1):  # rank 0 has noted it
            raise OSError("rank 0 does not know this reader")
        threading.Thread(target=self._beat, name="weights-beat", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """True if it no longer gives signs of life."""
        return self._has_ended.is_set()

    def end(self) -> None:
        """Leave, which rank 0 notices at once."""
        self._has_ended.set()
        self._connection.close()

    def _beat(self) -> None:
        with suppress(OSError):  # rank 0 has ended, or `end` was called
            while not self._has_ended.wait(_BEAT_SECONDS):
                self._connection.sendall(_BEAT)
        self._has_ended.set()


@dataclass(slots=True)
class _Connection:
    connection: socket.socket
    name: str = ""
    heard: bytearray = field(default_factory=bytearray)
    """The beginning of its name."""


class Doorkeeper:
    """Rank 0's end of the connections, in a thread. It notes what it hears in `store`: a client of
    the store that is `served` here, for this thread alone.
    """

    def __init__(self, host: str, store: Any, served: Any) -> None:
        self._listener = socket.create_server((host, 0))
        self._store = store
        self._served = served
        self._present: dict[str, _Connection] = {}
        self._is_closed = threading.Event()
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, name="weights-door", daemon=True).start()

    def close(self) -> None:
        """End the thread, soon."""
        self._is_closed.set()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            with suppress(RuntimeError):  # the store has ended
                while not self._is_closed.is_set():
                    for key, _ in selector.select(_BEAT_SECONDS):
                        if key.data is None:
                            self._accept(selector)
                        elif not self._read_from(key.data):
                            selector.unregister(key.fileobj)
                            key.data.connection.close()
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    key.data.connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):  # it is gone already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, _Connection(connection))

    def _read_from(self, guest: _Connection) -> bool:
        """Read from a connection, first the reader's name and then its signs of life; False if it
        is closed.
        """
        try:
            received = guest.connection.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            received = b""
        if not received:
            # Only its own connection: a reader that came back has another one.
            if self._present.get(guest.name) is guest:
                del self._present[guest.name]
                self._store.set(left(guest.name), "")
            return False
        if guest.name:
            self._store.add(_beats(guest.name), len(received))
            return True
        guest.heard += received
        name, is_whole, _ = guest.heard.partition(_END_OF_NAME)
        if len(name) > _LONGEST_NAME:
            return False
        if is_whole:
            guest.name = name.decode(errors="replace")
            self._present[guest.name] = guest
            self._store.delete_key(left(guest.name))
            self._store.add(_beats(guest.name), 1)
            with suppress(OSError):
                guest.connection.sendall(_BEAT)  # `Attendance` waits for it
        return True


class Watch:
    """Looks which of some readers are gone: they have left, or have given no sign of life for
    `lease` seconds.
    """

    def __init__(self, store: Any, names: Collection[str], lease: float) -> None:
        self._store = store
        self._lease = lease
        self._heard = dict.fromkeys(names, (-1, time.monotonic()))
        self._gone: set[str] = set()
        self._next_look = 0.0

    def gone(self) -> Collection[str]:
        """Those that are gone, as of a moment ago.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._gone |= {name for name in self._heard.keys() - self._gone if self._is_lost(name)}
            self._next_look = time.monotonic() + _LOOK_SECONDS
        return self._gone

    def _is_lost(self, name: str) -> bool:
        if self._store.check([left(name)]):
            return True
        beats, since = self._heard[name]
        heard = self._store.add(_beats(name), 0)
        if heard != beats:
            self._heard[name] = heard, time.monotonic()
            return False
        return time.monotonic() - since > self._lease
