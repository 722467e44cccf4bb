"""`SessionHomes`: which of several engines has the prefix of a conversation in its cache."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
_SESSIONS = 1 << 16
"""Sessions whose home is remembered; the least recently used is forgotten first."""


class SessionHomes(Generic[T]):
    """A session stays at its home unless that has more than `escape` times the requests of the
    least busy place, and over eight more.
    """

    def __init__(self, escape: float = 2.0) -> None:
        self._escape = escape
        self._homes: OrderedDict[str, T] = OrderedDict()

    def choose(self, session: str, places: Sequence[T], load: Callable[[T], int]) -> T:
        """The home of a session, or where it moves to: the least busy one of `places`. `load`: the
        requests of a place.
        """
        if len(places) == 1:
            return places[0]
        least = min(places, key=load)
        home = self._homes.get(session)
        fewest = load(least)
        if (
            home is None
            or home not in places
            or load(home) > max(self._escape * fewest, fewest + 8)
        ):
            home = least
        if session:
            self._homes[session] = home
            self._homes.move_to_end(session)
            if len(self._homes) > _SESSIONS:
                self._homes.popitem(last=False)
        return home


__all__ = ["SessionHomes"]
