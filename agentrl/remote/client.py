"""`RemoteEnv`: an environment that an `agentrl serve` somewhere else plays."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env, ResetResult, StepResult
from agentrl.remote.link import Link, UnreachableError, link_to
from agentrl.remote.protocol import TOKEN_VARIABLE, Began, Opened, ReplyFrame, Stepped, server_url

_Answer = TypeVar("_Answer", Opened, Began, Stepped)
_OPENED: TypeAdapter[Opened] = TypeAdapter(Opened)
_BEGAN: TypeAdapter[Began] = TypeAdapter(Began)
_STEPPED: TypeAdapter[Stepped] = TypeAdapter(Stepped)
_ADDRESS = "http://host:port, as `agentrl serve` says it"


class RemoteEnv:
    """An environment on one of the servers at `urls`: the one with the fewest sessions of this process.

    A session is opened by the first `reset`, and used for all episodes of this instance. Where it has lapsed, or its
    server drains, `reset` opens another. A server that is full is asked again until the caller's deadline.

    Raises:
        ConfigError: an address or the token is wrong.
    """

    isolation = "inline"

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._urls = tuple(server_url(url, _ADDRESS) for url in urls)
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        self._lease: _Lease | None = None

    async def servers(self) -> Sequence[str]:
        """Where a session can be opened now."""
        return self._urls

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode.

        Raises:
            EnvError: no server can be reached, or the environment failed.
            ConfigError: the environment does not take these options, or the server does not take the token.
        """
        if self._lease is not None:
            try:
                reply = await self._begin(self._lease, seed, options)
                if reply.status in (404, 503):
                    await self.close()
            except UnreachableError:
                await self.close()  # nothing of an episode is lost yet
        if self._lease is None:
            self._lease = await _open([link_to(url, self._token) for url in await self.servers()])
            reply = await self._begin(self._lease, seed, options)
        began = _read(_BEGAN, reply)
        self.system_prompt, self.tools = began.system_prompt, tuple(began.tools)
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
        reply = await lease.link.ask("step", session=lease.session, seq=lease.seq, action=action)
        stepped = _read(_STEPPED, reply)
        return stepped.observation, stepped.reward, stepped.terminated, stepped.truncated, stepped.info

    async def close(self) -> None:
        """Give the session back, without waiting for the server's answer."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.link.give_back(lease.session)

    @staticmethod
    async def _begin(lease: "_Lease", seed: int, options: Mapping[str, Any]) -> ReplyFrame:
        lease.seq += 1
        return await lease.link.ask("reset", session=lease.session, seq=lease.seq, seed=seed, options=dict(options))


@dataclass(frozen=True, slots=True)
class RemoteEnvs:
    """Makes environments on the servers at `urls`; it pickles as texts."""

    urls: tuple[str, ...]

    def __call__(self) -> Env:
        """The environment."""
        return RemoteEnv(self.urls)


def remote(rest: str) -> RemoteEnvs:
    """remote:http://one:8800,http://two:8800: an environment that `agentrl serve` plays, on any of these servers.

    Raises:
        ConfigError: that is no address.
    """
    return RemoteEnvs(tuple(server_url(url, _ADDRESS) for url in rest.split(",")))


def http(rest: str) -> RemoteEnvs:
    """http://localhost:8800: an environment that `agentrl serve` plays there."""
    return remote(f"http:{rest}")


def https(rest: str) -> RemoteEnvs:
    """https://games.example.org: an environment that `agentrl serve` plays there, behind a proxy that speaks TLS."""
    return remote(f"https:{rest}")


@dataclass(eq=False)
class _Lease:
    """A session, and the number of what was asked of it last."""

    link: Link
    session: str
    seq: int = 0


async def _open(links: Sequence[Link]) -> _Lease:
    """A session at the best of the servers that has room; waits where all that answer are full."""
    while True:
        wait: float | None = None
        problems = []
        for link in sorted(links, key=lambda link: link.load):
            link.sessions += 1  # at once, so that those who open now spread
            leased = False
            try:
                reply = await link.ask("open")
                if reply.status == 200:
                    opened: Opened = _read(_OPENED, reply)
                    link.max_bytes = opened.max_body_bytes
                    leased = True
                    return _Lease(link, opened.session)
            except EnvError as error:
                problems.append(str(error))
                continue
            finally:
                if not leased:
                    await link.release()
            if reply.status not in (429, 503):
                _read(_OPENED, reply)
            wait = min(reply.retry_after or 1.0, wait or 60.0)
        if wait is None:
            raise UnreachableError(f"no server can be used: {'; '.join(problems)}")
        await asyncio.sleep(wait)


def _read(shape: TypeAdapter[_Answer], reply: ReplyFrame) -> _Answer:
    if reply.status == 424:
        raise ConfigError(f"the remote environment: {reply.body.get('detail')}")
    if reply.status != 200:
        raise EnvError(f"the remote environment answered {reply.status}: {reply.body.get('detail')}")
    try:
        return shape.validate_python(reply.body)
    except ValidationError as error:
        raise EnvError(f"the remote environment answered what it should not have: {error}") from error
