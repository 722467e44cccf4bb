"""Notices: what the work waits for outside this process. The progress display shows them, and long
ones are logged.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl.flow.clock import now

logger = logging.getLogger(__name__)

LOGGED_AFTER = 10.0
"""Seconds after which a notice that is posted again and again is logged. A pause as long ends it.
"""


@dataclass(slots=True)
class Notice:
    """Something that `count` episodes wait for."""

    text: str
    count: int = 0
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
        return self.count == 0 and now() - self._seen > LOGGED_AFTER

    def post(self) -> None:
        """One episode more waits."""
        if self.is_over:
            self._began, self._logged = now(), False
        self.count += 1
        self._seen = now()
        if not self._logged and now() - self._began >= LOGGED_AFTER:
            self._logged = True
            logger.warning("%s, for %.0f s so far", self, now() - self._began)

    def remove(self) -> None:
        """One episode fewer waits."""
        self.count -= 1
        self._seen = now()


_board: dict[str, Notice] = {}
"""By text. One for the process: the display reads it from its own thread."""


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Inside the block, one episode waits for what `text` says: "all servers of environments are
    full (http://...)".
    """
    posted = _board.get(text)
    if posted is None:
        for old in [old for old in _board.values() if old.is_over]:
            del _board[old.text]
        posted = _board[text] = Notice(text)
    posted.post()
    try:
        yield
    finally:
        posted.remove()


def notices() -> list[Notice]:
    """The present waits of all threads."""
    return [found for found in list(_board.values()) if found.count]
