"""agentrl's dialect: the one connection between this process and a server carries many sessions.

A `Line` is a connection. Answers arrive in any order and go straight to their callers; an answer
whose caller has gone is dropped. Requests made during one iteration of the event loop are sent as
one frame at its end. A `Link` stands for a server: when its line breaks, it opens another and
resends.
"""

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from pydantic import FailFast, TypeAdapter, ValidationError
from pydantic_core import to_json
from websockets.exceptions import InvalidHandshake, InvalidStatus

from agentrl.errors import ConfigError, EnvError
from agentrl.flow import Flow, Suspect, Suspicion, now
from agentrl.net.http_client import proxy_note
from agentrl.remote.choice import REST_SECONDS, Loaded, UnreachableError
from agentrl.remote.connection import Connection, LostConnectionError, connect
from agentrl.remote.protocol import SOCKET_PATH, TOKEN_VARIABLE, ReplyFrame, packed

LARGEST_ANSWER_BYTES = 64 << 20
"""Most bytes in one frame from a server."""

_LEAST_FRAME_BYTES = 1024
"""Size that every server accepts; the answer to `open` states the server's actual limit."""

_REPLIES: TypeAdapter[list[ReplyFrame]] = TypeAdapter(Annotated[list[ReplyFrame], FailFast()])
"""Reads a frame of answers, up to the first that is none: a frame may hold millions."""


class Link(Loaded):
    """A server, and the line to it. `sessions` counts this process's sessions on it, `connections`
    the lines so far.

    The server keeps sessions for `reconnect_seconds` after a line broke. So while there are any, a
    new line is opened at once, and not at the next request: all episodes may be waiting for the
    model.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.sessions = 0
        self.connections = 0
        self.max_bytes = _LEAST_FRAME_BYTES
        self.reconnect_seconds = 0.0
        self._asking = 0  # requests that are not answered yet
        self._in_doubt = False  # whether the last request ended without an answer
        self._rests_until = 0.0
        self._token = token
        self._line: Line | None = None
        self._connecting = asyncio.Lock()
        self._opening: asyncio.Task[Line] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._has_ended = False
        self._name = secrets.token_urlsafe(16)
        self._at_work: dict[object, tuple[int, Suspect]] = {}
        self._died_at = 0  # the newest line that ended with its server
        self._numbers = itertools.count(1)

    @property
    def load(self) -> tuple[bool, int]:
        """Sort key: open a session at the server with the lowest load.

        A server in doubt ranks last until it has rested, and then while a request is waiting for
        its answer.
        """
        return self._in_doubt and (self._asking > 0 or now() < self._rests_until), self.sessions

    async def ask(self, op: str, **what: Any) -> ReplyFrame:
        """Send a request and wait for its answer; if the line breaks, open another and resend once.

        Raises:
            EnvError: the server cannot be reached, or the request is larger than it accepts.
            ConfigError: the server does not accept the token.
        """
        number = next(self._numbers)
        message = _encode_request(number, op, what)
        if len(message) + 2 > self.max_bytes:
            raise EnvError(
                f"{self.url} accepts messages of up to {self.max_bytes} bytes; this one has"
                f" {len(message)}"
            )
        answered, lost = False, ""
        self._asking += 1
        try:
            for _ in range(2):
                try:
                    reply = await (await self._get_line()).ask(number, message, self.max_bytes)
                except LostConnectionError as error:
                    lost = str(error)
                else:
                    answered = True
                    return reply
        finally:
            self._asking -= 1
            self._in_doubt = not answered
            if not answered:
                self._rests_until = now() + REST_SECONDS
        raise UnreachableError(f"{self.url} cannot be used: {lost}")

    def at_work(self, asker: object, suspect: Suspect) -> int:
        """Note that the server will work on a request about a task, and return the number of the
        line that carries it; 0 if there is none now, so that the end of one tells nothing of the
        request.
        """
        line = self.connections if self._line is not None and self._line.is_open else 0
        self._at_work[asker] = line, suspect
        return line

    def done(self, asker: object) -> None:
        """The server has answered, or it is known that it will not."""
        self._at_work.pop(asker, None)

    def server_died(self, line: int, suspicion: Suspicion, why: str) -> None:
        """The server died while it worked on what this line carried: count its death once."""
        if line > self._died_at:
            self._died_at = line
            carried = [suspect for number, suspect in self._at_work.values() if number == line]
            suspicion.died(carried, f"{self.url}: {why}")

    async def give_back(self, session: str) -> None:
        """Close a session, without waiting for the answer."""
        if self._line is not None and self._line.is_open:
            self._line.tell(
                _encode_request(next(self._numbers), "close", {"session": session}), self.max_bytes
            )
        await self.release()

    async def release(self) -> None:
        """Count one session fewer; close the line after the last one."""
        self.sessions -= 1
        if self.sessions == 0 and self._line is not None and not self._connecting.locked():
            await self._line.close()

    def end(self) -> None:
        """Treat the server as gone: pending and later calls fail immediately."""
        self._has_ended = True
        for task in (self._opening, self._reopening):
            if task is not None:
                task.cancel()
        if self._line is not None:
            self._line.abort()

    async def _get_line(self) -> "Line":
        if self._line is not None and self._line.is_open:
            return self._line
        async with self._connecting:
            if self._line is None or not self._line.is_open:  # another caller may have opened it
                self._line = await self._open_line()
            return self._line

    async def _open_line(self) -> "Line":
        if not self._has_ended:
            async with Flow("connection") as flow:
                self._opening = flow.start(
                    Line.open(self.url, self._token, self._name), name=self.url
                )
            if not self._opening.cancelled():
                line = self._opening.result()
                self.connections += 1
                line.connection.ended.add_done_callback(self._reopen)
                return line
        raise LostConnectionError("its server is gone")

    def _reopen(self, ended: asyncio.Future[None]) -> None:
        """Open another line in place of one that has ended, if there are sessions to keep."""
        if (
            self.sessions
            and not self._has_ended
            and (self._reopening is None or self._reopening.done())
        ):
            self._reopening = ended.get_loop().create_task(
                self._retry_line(), name=f"reopen {self.url}"
            )

    async def _retry_line(self) -> None:
        until, pause = now() + self.reconnect_seconds, 0.05
        while self.sessions and now() < until:
            try:
                await self._get_line()
                return
            except (LostConnectionError, ConfigError):
                # Nobody waits for this task: the next request tries again, and raises.
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)


_links: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None], Link]] = (
    WeakKeyDictionary()
)
"""The links of each event loop: one per server and token."""


def link_to(url: str, token: str | None) -> Link:
    """The link of this event loop to the server at `url`."""
    links = _links.setdefault(asyncio.get_running_loop(), {})
    return links.setdefault((url, token), Link(url, token))


def end_link(url: str, token: str | None) -> None:
    """End the link of this event loop to a server that is gone; a new server at this address gets a
    new link.
    """
    link = _links.get(asyncio.get_running_loop(), {}).pop((url, token), None)
    if link is not None:
        link.end()


def _encode_request(number: int, op: str, what: Mapping[str, Any]) -> bytes:
    return to_json({"id": number, "op": op, **what}, inf_nan_mode="constants")


class Line:
    """A connection to a server, and the requests that wait for their answers."""

    connection: Connection

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[ReplyFrame]] = {}
        self._outbox: list[bytes] = []

    @classmethod
    async def open(cls, url: str, token: str | None, client: str) -> "Line":
        """Connect. `client` is the name under which the server keeps this process's sessions.

        Raises:
            ConfigError: the server does not accept the token.
            LostConnectionError: there is no server, or it is not `agentrl serve`.
        """
        line = cls()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            await connect(
                f"{url}{SOCKET_PATH}?client={client}",
                line,
                headers=headers,
                max_bytes=LARGEST_ANSWER_BYTES,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403):
                raise ConfigError(
                    f"{url} rejects the token: set {TOKEN_VARIABLE} to the server's token; without"
                    " one, call it by its IP address or as localhost"
                ) from error
            raise LostConnectionError(
                f"it answers {status} where {SOCKET_PATH} should be: is it `agentrl serve`?"
            ) from error
        except InvalidHandshake as error:
            raise LostConnectionError(f"it has no WebSocket at {SOCKET_PATH}: {error}") from error
        except OSError as error:
            raise LostConnectionError(
                f"{error or type(error).__name__}{proxy_note(url, used=False)}"
            ) from error
        return line

    @property
    def is_open(self) -> bool:
        """True if messages can be sent."""
        return self.connection.is_open

    async def ask(self, number: int, message: bytes, max_bytes: int) -> ReplyFrame:
        """Send request `number` and return its answer.

        Raises:
            LostConnectionError: the line ends first.
        """
        if not self.is_open:  # it may have ended right after it opened
            raise self.connection.loss()
        future: asyncio.Future[ReplyFrame] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self.tell(message, max_bytes)
            return await future
        finally:
            del self._waiting[number]

    def tell(self, message: bytes, max_bytes: int) -> None:
        """Send a message, together with all others of this iteration of the event loop."""
        self._outbox.append(message)
        if len(self._outbox) == 1:
            self._loop.call_soon(self._flush, max_bytes)

    async def close(self) -> None:
        """Send the pending messages and close."""
        self._flush(LARGEST_ANSWER_BYTES)
        await self.connection.close()

    def abort(self) -> None:
        """Close the connection immediately."""
        self.connection.abort()

    def take(self, message: bytes) -> None:
        """Pass the answers of a frame to their callers."""
        try:
            replies = _REPLIES.validate_json(message)
        except ValidationError as error:
            self.connection.drop(LostConnectionError(f"its answer is no list of replies: {error}"))
            return
        for reply in replies:
            if reply.id is None:  # the server could not tell which request it answers
                said = f"it answered {reply.status}: {reply.body.get('detail')!s:.2000}"
                self.connection.drop(LostConnectionError(said))
                return
            future = self._waiting.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply)

    def lose(self, error: LostConnectionError) -> None:
        """Fail all pending requests."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: its waiter may be cancelled first

    def _flush(self, max_bytes: int) -> None:
        messages, self._outbox = self._outbox, []
        if messages:
            self.connection.send(packed(messages, max_bytes))
