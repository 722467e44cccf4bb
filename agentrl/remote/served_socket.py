"""`ServedSocket`: the server's end of a WebSocket, for both dialects. Its client may be gone at any
moment.
"""

import asyncio
import contextlib

from fastapi import WebSocket, WebSocketDisconnect

_CLOSED = (RuntimeError, WebSocketDisconnect)
"""Raised when the client is gone; by Starlette also if this side has closed already."""


class ServedSocket:
    """A client's WebSocket."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def receive(self, seconds: float | None = None) -> str | bytes | None:
        """The next message; None if the client is gone, or was silent for `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                message = await self._websocket.receive()
        except TimeoutError:
            return None
        if message["type"] == "websocket.disconnect":
            return None
        return message.get("text") or message.get("bytes") or ""

    async def send(self, text: bytes) -> None:
        """Send a message, unless the client is gone."""
        with contextlib.suppress(*_CLOSED):
            await self._websocket.send_text(text.decode())

    async def close(self) -> None:
        """Close the connection, unless it is closed."""
        with contextlib.suppress(*_CLOSED):
            await self._websocket.close()
