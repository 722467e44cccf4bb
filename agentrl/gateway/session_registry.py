"""The open episodes, by the keys that their programs hold."""

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.refusal import CallRefusedError
from agentrl.gateway.session import AgentSession


def _not_served(listener: socket.socket) -> AbstractAsyncContextManager[None]:
    raise RuntimeError("the gateway is not being served: write `async with serving(registry)`")


@dataclass(eq=False, slots=True)
class SessionRegistry:
    """All open episodes. A key opens one of them and nothing else, and only as long as the episode
    lasts.

    Keys are looked up by a salted hash, so the time that this takes tells nothing about them.
    """

    config: GatewayConfig = field(default_factory=GatewayConfig)
    url: str = ""
    """The address that programs are given; known when the server has started."""
    accepting: Callable[[socket.socket], AbstractAsyncContextManager[None]] = _not_served
    """Inside the block, requests on a further listening socket are answered too; set when the
    server has started.
    """
    _sessions: dict[bytes, AgentSession] = field(default_factory=dict)
    _salt: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def __len__(self) -> int:
        return len(self._sessions)

    @contextmanager
    def opened(self, session: AgentSession) -> Iterator[str]:
        """Inside the block, the key that it yields leads to this episode."""
        key = f"agentrl-{secrets.token_urlsafe(32)}"
        place = self._place(key)
        self._sessions[place] = session
        try:
            yield key
        finally:
            session.closed = True
            del self._sessions[place]

    def session(self, key: str) -> AgentSession:
        """The episode of a key.

        Raises:
            CallRefusedError: there is none, or it is over.
        """
        session = self._sessions.get(self._place(key))
        if session is None:
            raise CallRefusedError(401, "invalid_api_key", "the API key belongs to no open episode")
        return session

    def open_session(self, key: str) -> AgentSession:
        """The episode of a key, which must be under way: a key that may begin an episode does not
        do so here.

        Raises:
            CallRefusedError: there is none, or it is over.
        """
        return self.session(key)

    def _place(self, key: str) -> bytes:
        return blake2b(key.encode(), key=self._salt, digest_size=32).digest()
