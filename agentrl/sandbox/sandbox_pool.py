"""A provider in front of another one: it starts sandboxes ahead of their use, and few at a time."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from agentrl.errors import ConfigError, SandboxError
from agentrl.flow import Flow, now
from agentrl.protocols import Sandbox, SandboxOffers, SandboxProvider, SandboxSnapshot, SandboxSpec

logger = logging.getLogger(__name__)

STARTS_AT_ONCE = 8
"""Sandboxes that start at a time: more of them start no sooner, and an engine's calls time out."""


@dataclass(eq=False)
class _Stock:
    """Sandboxes of one kind that wait for their use."""

    size: int
    waiting: "deque[tuple[float, Sandbox]]" = field(default_factory=deque)
    starting: int = 0


class SandboxPool:
    """A `SandboxProvider`, and an async context manager, which is needed for `keep_ahead` only."""

    def __init__(self, provider: SandboxProvider, starts_at_once: int = STARTS_AT_ONCE) -> None:
        self.provider = provider
        self._starts = asyncio.Semaphore(starts_at_once)
        self._stocks: list[tuple[SandboxSpec, _Stock]] = []
        self._flow: Flow | None = None

    async def __aenter__(self) -> Self:
        self._flow = Flow("sandboxes")
        await self._flow.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            flow.cancel()
            await flow.__aexit__(*exc)
        await self.close()

    @property
    def offers(self) -> SandboxOffers:
        """See `SandboxProvider`."""
        return self.provider.offers

    def keep_ahead(self, spec: SandboxSpec, size: int) -> None:
        """Keep so many sandboxes of this kind started and unused."""
        if self._flow is None:
            raise RuntimeError("write `async with SandboxPool(provider) as pool` to start ahead")
        stock = _Stock(size)
        self._stocks.append((spec, stock))
        self._refill(spec, stock)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """See `SandboxProvider`. What was started ahead has half of its lease or more."""
        stock = next((stock for kind, stock in self._stocks if kind == spec), None)
        while stock is not None and stock.waiting:
            since, sandbox = stock.waiting.popleft()
            self._refill(spec, stock)
            if now() - since < spec.lease / 2:
                return sandbox
            await sandbox.close()
        return await self._start(spec)

    async def remove(self, snapshot: SandboxSnapshot) -> None:
        """See `SandboxProvider`."""
        await self.provider.remove(snapshot)

    async def close(self) -> None:
        """See `SandboxProvider`."""
        for _, stock in self._stocks:
            while stock.waiting:
                await stock.waiting.popleft()[1].close()
        await self.provider.close()

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        async with self._starts:
            return await self.provider.start(spec)

    def _refill(self, spec: SandboxSpec, stock: _Stock) -> None:
        if self._flow is None:
            return
        for _ in range(stock.size - len(stock.waiting) - stock.starting):
            stock.starting += 1
            self._flow.start(self._start_ahead(spec, stock), name="ahead")

    async def _start_ahead(self, spec: SandboxSpec, stock: _Stock) -> None:
        try:
            sandbox = await self._start(spec)
        except (SandboxError, ConfigError) as error:
            # Who needs one will start one, and is told then.
            logger.warning("no sandbox was started ahead: %s", error)
        else:
            stock.waiting.append((now(), sandbox))
        finally:
            stock.starting -= 1
