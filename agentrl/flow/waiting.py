"""The reasons for which episodes wait outside this process. The progress display shows them, and
long waits are logged.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl.flow.clock import now

logger = logging.getLogger(__name__)

LOGGED_AFTER_SECONDS = 10.0
"""A wait that goes on for this long is logged. A pause as long ends it."""


@dataclass(slots=True)
class WaitReason:
    """Something that episodes wait for."""

    text: str
    """The reason in words."""
    count: int = 0
    """Episodes that wait now."""
    _began: float = math.inf
    _seen: float = -math.inf
    _logged: bool = False

    def __str__(self) -> str:
        return (
            f"{self.text}: {self.count} {'episode waits' if self.count == 1 else 'episodes wait'}"
        )

    @property
    def is_over(self) -> bool:
        """True if nothing has waited for this for some time."""
        return self.count == 0 and now() - self._seen > LOGGED_AFTER_SECONDS

    def add(self) -> None:
        """One episode more waits."""
        if self.is_over:
            self._began, self._logged = now(), False
        self.count += 1
        self._seen = now()
        if not self._logged and now() - self._began >= LOGGED_AFTER_SECONDS:
            self._logged = True
            logger.warning("%s, for %.0f s so far", self, now() - self._began)

    def remove(self) -> None:
        """One episode fewer waits."""
        self.count -= 1
        self._seen = now()


_reasons: dict[str, WaitReason] = {}
"""By text. One mapping for the process, not a contextvar or a field of the run: environments and
rewards in any task or thread add to it, and the display reads it from a thread of its own."""


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """Inside the block, one episode waits for what `text` says: "all servers of environments are
    full (http://...)".
    """
    reason = _reasons.get(text)
    if reason is None:
        for old in [old for old in _reasons.values() if old.is_over]:
            del _reasons[old.text]
        reason = _reasons[text] = WaitReason(text)
    reason.add()
    try:
        yield
    finally:
        reason.remove()


def wait_reasons() -> list[WaitReason]:
    """The present waits of all threads."""
    return [reason for reason in list(_reasons.values()) if reason.count]
