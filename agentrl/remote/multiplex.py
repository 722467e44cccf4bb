"""The server's end of agentrl's dialect: frames of requests in, frames of answers out."""

import asyncio
import logging
import secrets
from typing import Any

from fastapi import WebSocket
from pydantic import ValidationError
from pydantic_core import to_json

from agentrl.flow import Flow
from agentrl.remote.protocol import (
    FRAMES,
    Began,
    CloseFrame,
    Frame,
    Opened,
    OpenFrame,
    Refusal,
    ResetFrame,
    Restored,
    RestoreFrame,
    Saved,
    SnapshotFrame,
    Stepped,
    packed,
)
from agentrl.remote.served_socket import ServedSocket
from agentrl.remote.sessions import Sessions

logger = logging.getLogger(__name__)

_FRAME_BYTES = 1 << 20
"""Size limit of a frame of answers; one answer that is longer exceeds it."""

_LONGEST_DETAIL = 2000
"""Characters of what is said about a frame that cannot be read: its text may repeat all of it."""


class Multiplexed:
    """One client's WebSocket.

    A call continues when its socket is lost, because the client will repeat the request. At most
    twice `ServerLimits.max_sessions` requests may be unanswered at a time; the server stops reading
    from a client that sends more, or that does not read its answers.
    """

    def __init__(self, client: WebSocket, sessions: Sessions, flow: Flow) -> None:
        self._websocket = client
        self._client = ServedSocket(client)
        self._name = client.query_params.get("client", "")[:64] or secrets.token_urlsafe(16)
        self._sessions = sessions
        self._flow = flow
        self._room = asyncio.Semaphore(2 * sessions.limits.max_sessions)
        self._answers: list[bytes] = []

    async def serve(self) -> None:
        """Answer requests until the client disconnects."""
        await self._websocket.accept()
        sessions = self._sessions
        with sessions.connected(self._name):
            while (message := await self._client.receive()) is not None:
                try:
                    frames = FRAMES.validate_json(message)
                except ValidationError as error:
                    refusal = Refusal(422, str(error)[:_LONGEST_DETAIL])
                    await self._admit()
                    self._send(self._refusal_frame(None, refusal))
                    continue
                for frame in frames:
                    await self._admit()
                    if not isinstance(frame, OpenFrame) and sessions.answers_at_once(frame.session):
                        await self._answer(frame)  # a task would cost more than the call
                    else:
                        self._flow.start(self._answer(frame), name=frame.op)

    async def _admit(self) -> None:
        await self._room.acquire()
        self._sessions.owe(1)

    async def _answer(self, frame: Frame) -> None:
        try:
            answer = to_json(
                {"id": frame.id, "status": 200, "body": await self._dispatch(frame)},
                inf_nan_mode="constants",
            )
        except Refusal as refusal:
            answer = self._refusal_frame(frame.id, refusal)
        except Exception as error:  # a bug must fail one request, not the server
            logger.exception("answering a frame")
            answer = self._refusal_frame(frame.id, Refusal(500, repr(error)))
        self._send(answer)

    async def _dispatch(
        self, frame: Frame
    ) -> Opened | Began | Stepped | Saved | Restored | dict[str, Any]:
        if isinstance(frame, OpenFrame):
            return await self._sessions.open(self._name)
        if isinstance(frame, CloseFrame):
            await self._sessions.close(frame.session)
            return {}
        if isinstance(frame, ResetFrame):
            return await self._sessions.reset(frame.session, frame, self._name)
        if isinstance(frame, SnapshotFrame):
            return await self._sessions.snapshot(frame.session, frame, self._name)
        if isinstance(frame, RestoreFrame):
            return await self._sessions.restore(frame.session, frame, self._name)
        return await self._sessions.step(frame.session, frame, self._name)

    def _refusal_frame(self, request: int | None, refusal: Refusal) -> bytes:
        self._sessions.metrics.refused.labels(refusal.status).inc()
        body = {"detail": refusal.detail}
        return to_json(
            {
                "id": request,
                "status": refusal.status,
                "body": body,
                "retry_after": refusal.retry_after,
            }
        )

    def _send(self, answer: bytes) -> None:
        self._answers.append(answer)
        if len(self._answers) == 1:
            self._flow.start(self._flush(), name="answers")

    async def _flush(self) -> None:
        """Send all answers that are ready when this task starts, which is after the running one
        yields.
        """
        answers, self._answers = self._answers, []
        try:
            for frame in packed(answers, _FRAME_BYTES):
                await self._client.send(frame)
        finally:
            self._sessions.owe(-len(answers))
            for _ in answers:
                self._room.release()
