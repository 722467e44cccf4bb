"""An HTTP server that knows its address: the base of all servers that people start by a command."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

import uvicorn

from agentrl.errors import ConfigError
from agentrl.flow.stop_signals import handle_stop_signals

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""The hosts that only programs on this machine can reach."""


class HttpServer(uvicorn.Server):
    """Uvicorn, which calls `on_start` with its address when it listens."""

    def __init__(
        self, config: uvicorn.Config, on_start: Callable[[str], None] = lambda url: None
    ) -> None:
        super().__init__(config)
        self._on_start = on_start

    @property
    def url(self) -> str:
        """The address it listens on, once it has started."""
        return url_of(self.servers[0].sockets[0])

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Let all stop signals end the server, as `handle_exit` does it. What a signal has ended
        exits with 0.
        """
        return handle_stop_signals(self.handle_exit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call `on_start` with the address."""
        await super().startup(sockets)
        if self.servers:
            self._on_start(self.url)


def url_of(listener: socket.socket) -> str:
    """The address of a listening socket. One that listens on all addresses is named by the loopback
    address.
    """
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_reach(setting: str, host: str, token: str | None, way_out: str) -> None:
    """Check that only programs on this machine can reach a server without a token.

    `setting` is the option that names the host, `way_out` says how to give a token.

    Raises:
        ConfigError: others can.
    """
    if not token and host not in LOOPBACK:
        raise ConfigError(
            f"other machines can reach {setting} {host}: {way_out}, or listen on 127.0.0.1"
        )
