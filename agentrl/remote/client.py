"""`RemoteEnv`: an environment that runs on an `agentrl serve` server."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from agentrl.errors import ConfigError, EnvError, LethalTaskError
from agentrl.flow import Suspect, Suspicion
from agentrl.hosting.calls import calls_taken
from agentrl.net.credentials import secret_in
from agentrl.protocols.env import Env, ResetResult, StepResult
from agentrl.remote.choice import FullError, LostError, UnreachableError, open_at_any
from agentrl.remote.link import Link, link_to
from agentrl.remote.protocol import (
    STATUSES,
    TOKEN_VARIABLE,
    Began,
    Opened,
    ReplyFrame,
    Restored,
    Saved,
    Stepped,
    server_url,
)
from agentrl.trajectory import MadeCall

_Answer = TypeVar("_Answer", Opened, Began, Stepped, Saved, Restored)
_OPENED: TypeAdapter[Opened] = TypeAdapter(Opened)
_BEGAN: TypeAdapter[Began] = TypeAdapter(Began)
_STEPPED: TypeAdapter[Stepped] = TypeAdapter(Stepped)
_SAVED: TypeAdapter[Saved] = TypeAdapter(Saved)
_RESTORED: TypeAdapter[Restored] = TypeAdapter(Restored)
_FAILURES = {410: LethalTaskError, 502: UnreachableError}
"""By status, what has failed there as it would in this process; anything else is an `EnvError`."""
_ADDRESS = "http://host:port, as `agentrl serve` prints it"


_suspicions: WeakKeyDictionary[asyncio.AbstractEventLoop, Suspicion] = WeakKeyDictionary()
"""By event loop, and gone with it. Factories of environments pickle as plain addresses, so the
environments of a run have no common owner but its loop."""


def suspicion() -> Suspicion:
    """The tasks that servers may have died of, for all environments of this event loop: a task that
    kills one server would kill the next one too.
    """
    return _suspicions.setdefault(
        asyncio.get_running_loop(), Suspicion(LethalTaskError, "servers of the environment")
    )


class RemoteEnv:
    """An environment on one of the servers at `urls`: the one with the fewest sessions of this
    process.

    The first `reset` opens a session, which serves all episodes of this instance. If the session
    has expired, its server is draining, or another server has fewer sessions (it has come back),
    `reset` opens another. If all servers are full, `reset` retries for `choice.FULL_SECONDS`.

    Raises:
        ConfigError: an address or the token is wrong.
    """

    isolation = "inline"

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.calls_made: Sequence[MadeCall] | None = None
        self.restorable = False
        """The environment can go back to its states; known after `reset`."""
        self._urls = tuple(server_url(url, _ADDRESS) for url in urls)
        self._token = token if token is not None else secret_in(TOKEN_VARIABLE) or None
        self._lease: _Lease | None = None
        self._suspect = Suspect("no episode", bytes)
        """The task that is being played, of which a server may die."""

    @property
    def server(self) -> str:
        """The server of the episode; empty if there is none."""
        return self._lease.link.url if self._lease is not None else ""

    async def servers(self) -> Sequence[str]:
        """The servers that a session can be opened on now."""
        return self._urls

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode.

        Raises:
            EnvError: no server can be reached, or the environment failed.
            LethalTaskError: servers have died of this task.
            ConfigError: the environment does not accept these options, or the server does not
            accept the token.
        """
        self._suspect = suspicion().suspect(
            f"the task of seed {seed} with the options {dict(options)!r:.200}",
            partial(to_json, [seed, options], fallback=repr),
        )
        suspicion().check(self._suspect)
        if self._lease is not None:
            try:
                await self._move_to_less_loaded(self._lease.link)
                reply = await self._begin(self._lease, seed, options)
                if reply.status in (404, 503):
                    await self.close()
            except UnreachableError:
                await self.close()  # no episode has begun, so another server can be tried
        if self._lease is None:
            self._lease = await open_at_any(
                await self._links(),
                _open,
                kind="server",
                kind_when_full="servers of the environment",
            )
            reply = await self._begin(self._lease, seed, options)
        began = _read(_BEGAN, reply)
        self.system_prompt, self.tools = began.system_prompt, tuple(began.tools)
        self.restorable = began.restorable
        return began.observation, began.info

    async def step(self, action: str) -> StepResult:
        """Send the model's message.

        Raises:
            EnvError: the server or the environment failed, or no episode is being played.
        """
        lease = self._lease
        if lease is None:
            raise EnvError("no episode is being played; call reset first")
        lease.seq += 1
        action = action.encode(errors="replace").decode()  # half of a surrogate pair cannot be sent
        reply = await self._ask(lease, "step", action=action)
        # A restarted server has lost its sessions: an outage, and no failure of the environment.
        if reply.status == 404 and lease.link.connections > lease.connections:
            raise UnreachableError(
                f"{lease.link.url} was gone for a while, and has lost the sessions of before"
            )
        stepped = _read(_STEPPED, reply)
        if stepped.terminated or stepped.truncated:
            suspicion().ended(self._suspect)
        self.calls_made, info = calls_taken(stepped.info)
        return stepped.observation, stepped.reward, stepped.terminated, stepped.truncated, info

    async def snapshot(self) -> bytes:
        """The state of the episode, and the server that can go back to it.

        Raises:
            EnvError: the server or the environment failed, or no episode is being played.
        """
        lease = self._lease
        if lease is None:
            raise EnvError("no episode is being played; call reset first")
        lease.seq += 1
        saved = _read(_SAVED, await self._ask(lease, "snapshot"))
        return to_json({"server": lease.link.url, "state": saved.state})

    async def restore(self, state: bytes) -> None:
        """Go back to a state, at the server that has given it.

        Raises:
            EnvError: the server or the environment failed, or the server has been started again.
        """
        then = from_json(state)
        if self._lease is not None and self._lease.link.url != then["server"]:
            await self.close()
        if self._lease is None:
            self._lease = await open_at_any(
                [link_to(then["server"], self._token)],
                _open,
                kind="server",
                kind_when_full="servers of the environment",
            )
        self._lease.seq += 1
        reply = await self._ask(self._lease, "restore", state=then["state"])
        restored = _read(_RESTORED, reply)
        self.system_prompt, self.tools = restored.system_prompt, tuple(restored.tools)
        self.restorable = True

    async def close(self) -> None:
        """Close the session, without waiting for the server's answer."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.link.give_back(lease.session)

    async def _links(self) -> Sequence[Link]:
        return [link_to(url, self._token) for url in await self.servers()]

    async def _move_to_less_loaded(self, now_at: Link) -> None:
        """Between episodes: open a session elsewhere in place of this one, if that evens the load.
        A server that was away begins without sessions.
        """
        best = min(await self._links(), key=lambda link: link.load)
        if best.load < now_at.load and best.sessions + 1 < now_at.sessions:
            with suppress(FullError, LostError):
                moved = await _open(best)
                await self.close()
                self._lease = moved

    async def _begin(self, lease: "_Lease", seed: int, options: Mapping[str, Any]) -> ReplyFrame:
        lease.seq += 1
        return await self._ask(lease, "reset", seed=seed, options=dict(options))

    async def _ask(self, lease: "_Lease", op: str, **what: Any) -> ReplyFrame:
        """Send a request of the session. If the server dies meanwhile, the task is suspect."""
        link = lease.link
        line = link.at_work(self, self._suspect)
        try:
            reply = await link.ask(op, session=lease.session, seq=lease.seq, **what)
            if reply.status == 404 and line < link.connections:
                link.server_died(line, suspicion(), "it has lost the sessions of before")
        except UnreachableError as error:
            link.server_died(line, suspicion(), str(error))
            suspicion().check(self._suspect)
            raise
        finally:
            link.done(self)
        return reply


@dataclass(frozen=True, slots=True)
class RemoteEnvs:
    """Makes environments on the servers at `urls`; it pickles as plain strings."""

    urls: tuple[str, ...]

    def __call__(self) -> Env:
        """Make an environment."""
        return RemoteEnv(self.urls)


def remote(rest: str) -> RemoteEnvs:
    """remote:http://one:8800,http://two:8800: an environment that `agentrl serve` runs on any of
    these servers.

    Raises:
        ConfigError: one of them is not an address.
    """
    return RemoteEnvs(tuple(server_url(url, _ADDRESS) for url in rest.split(",")))


def http(rest: str) -> RemoteEnvs:
    """http://localhost:8800: an environment that `agentrl serve` runs there."""
    return remote(f"http:{rest}")


def https(rest: str) -> RemoteEnvs:
    """https://games.example.org: an environment that `agentrl serve` runs there, behind a TLS
    proxy.
    """
    return remote(f"https:{rest}")


@dataclass(eq=False)
class _Lease:
    """A session, and the number of its last request."""

    link: Link
    session: str
    connections: int
    """`Link.connections` when the session was opened."""
    seq: int = 0


async def _open(link: Link) -> _Lease:
    """Open a session at a server.

    Raises:
        LostError: it cannot be used.
        FullError: it has no room, or is draining.
    """
    # Counted now, so that sessions opened at the same time spread over the servers.
    link.sessions += 1
    leased = False
    try:
        reply = await link.ask("open")
        if reply.status == 200:
            opened: Opened = _read(_OPENED, reply)
            link.max_bytes = opened.max_body_bytes
            link.reconnect_seconds = opened.reconnect_seconds
            leased = True
            return _Lease(link, opened.session, link.connections)
    except EnvError as error:
        raise LostError(str(error)) from error
    finally:
        if not leased:
            await link.release()
    if reply.status not in (429, 503):
        _read(_OPENED, reply)
    full = FullError(f"{link.url} is full")
    full.retry_seconds = reply.retry_after
    raise full


def _read(shape: TypeAdapter[_Answer], reply: ReplyFrame) -> _Answer:
    if reply.status == 424:
        raise ConfigError(f"the remote environment: {reply.body.get('detail')!s:.2000}")
    if reply.status != 200:
        said = f"the remote environment answered {reply.status}: {reply.body.get('detail')!s:.2000}"
        failure = _FAILURES.get(reply.status)
        if failure is not None:
            raise failure(f"{said} ({STATUSES[reply.status]})")
        raise EnvError(said)
    try:
        return shape.validate_python(reply.body)
    except ValidationError as error:
        raise EnvError(
            f"the remote environment sent an answer that it should not have: {error}"
        ) from error
