"""`KvChains`: how long the KV of each session may be kept over weight updates."""

from collections import OrderedDict
from dataclasses import dataclass

from agentrl.protocols import GenerateRequest

_SESSIONS = 1 << 16
"""Sessions whose origin is remembered; of one that is forgotten, a new chain begins."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The KV that a request attends to, by the versions of the weights that computed it."""

    origin: int
    """The version under which its chain began: the oldest that any of its KV can be of."""
    version: int
    """The version under which the request begins, so that of what it does not find cached."""


class KvChains:
    """The version under which the KV of each session began.

    The KV of a session is a *chain*: each turn computes its new tokens after all that stands before
    them. After an update, a chain is of several versions, and its later KV depends on its earlier
    one. So what counts is its *origin*, the version under which it began: none of its KV is older.
    A request goes on with the chain of its session if its prompt does, and if the origin is at most
    `max_staleness` versions old. Otherwise a chain begins with it, from the first token on.

    An engine whose cache is shared by all requests uses the origin as part of the cache's keys.
    Only chains of this origin have such keys, so whatever a request finds is no older than that.
    (Keys by epochs, `version // (max_staleness + 1)`, would keep the bound too, but at each border
    take the KV of episodes in the middle of their life.)
    """

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._origins: OrderedDict[str, int] = OrderedDict()
        self._empty_at = 0
        self.version = 0
        """The version of the weights."""

    def begin(self, request: GenerateRequest) -> Chain:
        """The chain that a request goes on with, or begins."""
        session, origin = request.session, self.version
        if goes_on(request):
            origin = self._origins.get(session, origin)
        if session and self._max_staleness:
            self._origins[session] = origin
            self._origins.move_to_end(session)
            if len(self._origins) > _SESSIONS:
                self._origins.popitem(last=False)
        return Chain(origin, self.version)

    def is_too_old(self, origin: int) -> bool:
        """True if a chain that began under this version may not be attended to any more."""
        return max(origin, self._empty_at) < self.version - self._max_staleness

    def oldest(self, chain: Chain, *, found_cached: bool) -> int:
        """The oldest version that the KV of a live request may be of. `found_cached`: it has found
        some in the cache.
        """
        return max(chain.origin if found_cached else chain.version, self._empty_at)

    def advance(self, version: int) -> None:
        """New weights."""
        self.version = version
        outdated = [name for name, origin in self._origins.items() if self.is_too_old(origin)]
        for session in outdated:
            del self._origins[session]

    def note_empty(self) -> None:
        """The cache has lost all its KV, so whatever is computed from now on is of this version."""
        self._empty_at = self.version


def goes_on(request: GenerateRequest) -> bool:
    """True if a request extends what its session has been asked before.

    An episode that is played again, or an evaluation, may have the name of an earlier session, and
    begins all the same.
    """
    return bool(request.session and (request.known or request.resumed))


__all__ = ["Chain", "KvChains", "goes_on"]
