"""`EventLog`: a sequence of events as one hash."""

import hashlib

from agentrl.flow.clock import now


class EventLog:
    """A running SHA-256 over (loop time, event, subject) lines.

    Two runs under virtual time with the same seed have the same digest; any differing decision
    changes it. Only the hash and the count are kept, so that a million events cost no memory.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.count = 0

    def record(self, event: str, subject: str) -> None:
        """Add one event at the loop's current time."""
        self._hash.update(f"{now():.6f} {event} {subject}\n".encode())
        self.count += 1

    def digest(self) -> str:
        """The hash so far, in hex."""
        return self._hash.hexdigest()
