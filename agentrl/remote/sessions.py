"""The sessions of a server: each has an environment, its last answer and an expiry time."""

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import prometheus_client as prometheus
from pydantic import Field

from agentrl.cluster.worker_registry import WorkerCount
from agentrl.errors import ConfigError, DeadlineError, EnvError, LethalTaskError, OutageError
from agentrl.flow import deadline, made_in_thread, now
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.remote.protocol import (
    Began,
    Opened,
    Refusal,
    Reset,
    Restored,
    RestoreState,
    Saved,
    SaveState,
    Step,
    Stepped,
)
from agentrl.settings.base import Settings

Answer = TypeVar("Answer", Began, Stepped, Saved, Restored)


class ServerLimits(Settings):
    """The limits of a server."""

    max_sessions: int = Field(1024, ge=1)
    """Most sessions at once; further clients get status 429 and retry later."""
    max_processes: int = Field(64, ge=1)
    """The same limit when each session runs in its own process (`isolation = "process"`); the lower
    one applies.
    """
    idle_seconds: float = Field(900.0, gt=0)
    """A session without requests expires after this time."""
    reconnect_seconds: float = Field(60.0, gt=0)
    """The sessions of a client expire when its WebSocket has been gone for this time; clients
    reconnect meanwhile.
    """
    max_body_bytes: int = Field(1 << 20, ge=1024)
    """The longest request."""
    request_seconds: float = Field(30.0, gt=0)
    """Time for a client to write a request, in seconds; a connection that is idle this long is
    closed.
    """
    call_seconds: float = Field(60.0, gt=0)
    """Time for one reset or step of the environment, in seconds."""
    drain_seconds: float = Field(60.0, ge=0)
    """Time for running episodes to continue after the server receives a stop signal, in seconds."""
    retry_seconds: float = Field(1.0, gt=0)
    """Seconds after which a client that was refused should retry, because the server is full or
    draining."""


@dataclass(eq=False)
class _Session:
    id: str
    env: LiveEnv
    used: float
    client: str | None
    """The id of the WebSocket that it was used over last, if any."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    seq: int = 0
    asked: tuple[Any, ...] = ()
    answer: Any = None
    playing: bool = False
    gone: bool = False


class Metrics:
    """The metrics at `/metrics`, in a separate registry. `processes` counts those that the
    sessions are spread over.
    """

    def __init__(self, processes: Callable[[], WorkerCount] | None) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.sessions = prometheus.Gauge(
            "agentrl_env_sessions", "Sessions that are open", registry=self.registry
        )
        self.seconds = prometheus.Histogram(
            "agentrl_env_seconds", "Time in the environment", ["call"], registry=self.registry
        )
        self.repeated = prometheus.Counter(
            "agentrl_env_repeated", "Requests answered a second time", registry=self.registry
        )
        self.expired = prometheus.Counter(
            "agentrl_env_expired", "Sessions that expired", registry=self.registry
        )
        self.refused = prometheus.Counter(
            "agentrl_env_refused",
            "Requests not answered with 200",
            ["status"],
            registry=self.registry,
        )
        if processes is not None:
            prometheus.Gauge(
                "agentrl_env_processes", "Processes that serve", registry=self.registry
            ).set_function(lambda: processes().alive)
            prometheus.Gauge(
                "agentrl_env_restarts", "Processes started again", registry=self.registry
            ).set_function(lambda: processes().restarts)
        self.reset_seconds = self.seconds.labels("reset")
        self.step_seconds = self.seconds.labels("step")


class Sessions:
    """All sessions of a server, for the environment `name` of `host`. Every method raises
    `Refusal`.

    With `in_processes`, each session runs in its own process, so that a hang or a crash costs only
    its own episode. Such a session uses megabytes instead of kilobytes, so fewer are allowed
    (`ServerLimits.max_processes`). `processes` counts those that the environments of `host` are
    spread over, if they are: while none serves, no session is opened.
    """

    def __init__(
        self,
        host: EnvPool,
        name: str,
        limits: ServerLimits,
        *,
        in_processes: bool = False,
        processes: Callable[[], WorkerCount] | None = None,
    ) -> None:
        self._full = "no more are taken (--max-sessions)"
        if in_processes and limits.max_processes < limits.max_sessions:
            self._full = "each has a process of its own, and no more are started (--max-processes)"
            limits = limits.model_copy(update={"max_sessions": limits.max_processes})
        self.limits = limits
        self.metrics = Metrics(processes)
        self.processes = processes
        self.draining = False
        self._owed = 0
        self._host = host
        self._name = name
        self._sessions: dict[str, _Session] = {}
        self._opening = 0
        self._sockets: Counter[str] = Counter()
        self._seal = _Seal()
        self._gone_since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sessions) + self._opening

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def answers_at_once(self, session_id: str) -> bool:
        """True if a request to this session is answered without waiting."""
        session = self._sessions.get(session_id)
        return session is None or (session.env.answers_at_once and not session.lock.locked())

    @property
    def serving(self) -> bool:
        """True if a session can be opened, if there is room."""
        return not self.draining and (self.processes is None or self.processes().alive > 0)

    @property
    def busy(self) -> bool:
        """True if an episode or a call is running, or an answer of a WebSocket is not sent yet."""
        return self._owed > 0 or any(
            session.playing or session.lock.locked() for session in self._sessions.values()
        )

    def owe(self, answers: int) -> None:
        """Count answers over a WebSocket that a client waits for; a negative number has been
        sent.
        """
        self._owed += answers

    @contextmanager
    def connected(self, client: str) -> Iterator[None]:
        """Inside the block, a WebSocket of this client is open, so its sessions are kept."""
        self._sockets[client] += 1
        self._gone_since.pop(client, None)
        try:
            yield
        finally:
            self._sockets[client] -= 1
            if self._sockets[client] == 0:
                del self._sockets[client]
                self._gone_since[client] = now()

    async def open(self, client: str | None = None) -> Opened:
        """Open a session, over a WebSocket of `client` or by plain HTTP."""
        self._refuse_if_draining()
        if not self.serving:
            raise Refusal(503, "the server's processes start again", self.limits.retry_seconds)
        if len(self) >= self.limits.max_sessions:
            raise Refusal(
                429, f"{len(self)} sessions are open; {self._full}", self.limits.retry_seconds
            )
        self._opening += 1
        try:
            with deadline("environment", "reset", self.limits.call_seconds):
                # A constructor may load for seconds, which would block the other sessions. What it
                # makes too late is for the next session.
                env = await made_in_thread(
                    partial(self._host.acquire, self._name),
                    undo=partial(self._host.keep, self._name),
                )
        except DeadlineError:
            raise Refusal(
                504, f"making the environment took over {self.limits.call_seconds:g} s"
            ) from None
        except (EnvError, ConfigError) as error:
            raise Refusal(500, str(error)) from error
        finally:
            self._opening -= 1
        session = _Session(secrets.token_urlsafe(24), env, now(), client)
        self._note_client(session, client)
        self._sessions[session.id] = session
        self.metrics.sessions.set(len(self._sessions))
        limits = self.limits
        return Opened(
            session.id, limits.idle_seconds, limits.max_body_bytes, limits.reconnect_seconds
        )

    async def reset(self, session_id: str, request: Reset, client: str | None = None) -> Began:
        """Begin an episode; a repeated request gets the first answer."""

        async def begin(session: _Session) -> Began:
            self._refuse_if_draining()
            started = now()
            observation, info = await session.env.reset(request.seed, request.options)
            session.playing = True
            self.metrics.reset_seconds.observe(now() - started)
            return Began(
                observation=observation,
                info=info,
                system_prompt=session.env.system_prompt,
                tools=[dict(tool) for tool in session.env.tools],
                restorable=session.env.restorable,
            )

        return await self._answer_once(
            session_id, client, request.seq, ("reset", request.seed, request.options), begin
        )

    async def step(self, session_id: str, request: Step, client: str | None = None) -> Stepped:
        """Take a step with the model's message; a repeated request gets the first answer."""

        async def go_on(session: _Session) -> Stepped:
            if not session.playing:
                raise Refusal(409, "no episode is being played: reset the session first")
            started = now()
            observation, reward, terminated, truncated, info = await session.env.step(
                request.action
            )
            self.metrics.step_seconds.observe(now() - started)
            session.playing = not (terminated or truncated)
            return Stepped(
                observation=observation,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                info=info,
            )

        return await self._answer_once(
            session_id, client, request.seq, ("step", request.action), go_on
        )

    async def snapshot(
        self, session_id: str, request: SaveState, client: str | None = None
    ) -> Saved:
        """The state of the episode, sealed; a repeated request gets the first answer."""

        async def save(session: _Session) -> Saved:
            if not session.playing:
                raise Refusal(409, "no episode is being played: reset the session first")
            if not session.env.restorable:
                raise Refusal(409, "this environment cannot go back to its states")
            return Saved(self._seal.close(await session.env.snapshot()))

        return await self._answer_once(session_id, client, request.seq, ("snapshot",), save)

    async def restore(
        self, session_id: str, request: RestoreState, client: str | None = None
    ) -> Restored:
        """Go back to a state; a repeated request gets the first answer."""

        async def go_back(session: _Session) -> Restored:
            self._refuse_if_draining()
            await session.env.restore(self._seal.open(request.state))
            session.playing = True
            return Restored(session.env.system_prompt, [dict(tool) for tool in session.env.tools])

        return await self._answer_once(
            session_id, client, request.seq, ("restore", request.state), go_back
        )

    async def close(self, session_id: str) -> None:
        """End a session; its environment is reused by the next one."""
        await self._end(self._find_session(session_id))

    async def expire(self) -> None:
        """End the sessions that were idle too long or whose client is gone; while draining, also
        those without an episode.
        """
        for session in list(self._sessions.values()):
            if self._has_lapsed(session) and not session.lock.locked():
                self.metrics.expired.inc()
                await self._end(session)
        living = {session.client for session in self._sessions.values()}
        self._gone_since = {
            client: since for client, since in self._gone_since.items() if client in living
        }

    def _has_lapsed(self, session: _Session) -> bool:
        if session.used <= now() - self.limits.idle_seconds or (
            self.draining and not session.playing
        ):
            return True
        gone_since = self._gone_since.get(session.client or "")
        return (
            gone_since is not None
            and max(gone_since, session.used) <= now() - self.limits.reconnect_seconds
        )

    async def sweep(self) -> None:
        """Call `expire` regularly until cancelled."""
        while True:
            await asyncio.sleep(
                min(1.0, self.limits.idle_seconds / 4, self.limits.reconnect_seconds / 4)
            )
            await self.expire()

    async def end_all(self) -> None:
        """End every session, and close every environment."""
        for session in list(self._sessions.values()):
            await self._end(session)
        await self._host.close()

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Refusal(
                503, "the server is shutting down and begins nothing new", self.limits.retry_seconds
            )

    def _find_session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise Refusal(
                404,
                "no such session: it expired, was deleted, failed or never existed; open another",
            )
        return session

    async def _answer_once(
        self,
        session_id: str,
        client: str | None,
        seq: int,
        asked: tuple[Any, ...],
        work: Callable[[_Session], Awaitable[Answer]],
    ) -> Answer:
        """Do the work of request `seq`, or repeat its answer if it was done. A session runs one
        call at a time.
        """
        session = self._find_session(session_id)
        async with session.lock:
            if session.gone:
                self._find_session(session_id)  # raises 404
            session.used = now()
            self._note_client(session, client)
            if seq == session.seq and asked == session.asked:
                self.metrics.repeated.inc()
                answer: Answer = session.answer
                return answer
            if seq != session.seq + 1:
                what = "again with other content" if seq == session.seq else "out of order"
                raise Refusal(409, f"seq {seq} came {what}; the last was {session.seq}")
            try:
                answer = await work(session)
            except (EnvError, DeadlineError, ConfigError) as error:
                session.env.broken = True
                raise Refusal(_status_of(error), str(error)) from error
            except (TypeError, ValueError) as error:
                session.env.broken = True
                raise Refusal(
                    500, f"the environment returned an invalid result: {error}"
                ) from error
            finally:
                session.used = now()
                if session.env.broken:
                    await self._end(session)
            session.seq, session.asked, session.answer = seq, asked, answer
            return answer

    def _note_client(self, session: _Session, client: str | None) -> None:
        """Note whose session it is. The client may have gone while it waited for the answer."""
        session.client = client
        if client is not None and client not in self._sockets:
            self._gone_since.setdefault(client, now())

    async def _end(self, session: _Session) -> None:
        if session.gone:
            return
        session.gone = True
        del self._sessions[session.id]
        self.metrics.sessions.set(len(self._sessions))
        if session.lock.locked():
            # A call is running or has failed, so this instance must not be reused.
            session.env.broken = True
        await self._host.release(self._name, session.env)


class _Seal:
    """Authenticates the states that this server has given. Restoring one may run code in it (it may
    be a pickle), so a state of anybody else is refused.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def close(self, state: bytes) -> str:
        """The state with its mark, as text."""
        return base64.b64encode(self._sign(state) + state).decode()

    def open(self, text: str) -> bytes:
        """The state in a text that `close` has made.

        Raises:
            Refusal: it has not been made here.
        """
        try:
            whole = base64.b64decode(text, validate=True)
        except ValueError:
            whole = b""
        mark, state = whole[:32], whole[32:]
        if not hmac.compare_digest(mark, self._sign(state)):
            raise Refusal(422, "this state was not given by this server since it started")
        return state

    def _sign(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, hashlib.sha256)


def _status_of(error: Exception) -> int:
    if isinstance(error, DeadlineError):
        return 504
    if isinstance(error, LethalTaskError):
        return 410
    if isinstance(error, OutageError):
        return 502
    return 424 if isinstance(error, ConfigError) else 500
