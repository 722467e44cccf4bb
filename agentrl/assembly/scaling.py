"""`EngineScaling`: adds engines to a live run, and removes them, as `agentrl engines` asks.

Only the policy's engines: those of opponents, teachers, frozen agents and evaluations stay as they
are. A new engine serves the newest published weights before it gets requests
(`agentrl/engines/router.py`), and the number of live episodes follows
(`agentrl/rollout/concurrency.py`). The plan of the devices is not made again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

from rich.markup import escape

from agentrl.assembly.placed import PlacedCluster
from agentrl.cluster.engine_logs import with_log_of
from agentrl.engines.router import Router
from agentrl.errors import AgentRLError, EngineDeadError, EngineError
from agentrl.flow import Flow, now
from agentrl.runs.engine_requests import EngineAnswer, EngineChange, EngineRequest, EngineRequests
from agentrl.runs.run import Run

_LOOK_SECONDS = 1.0
"""How often the run looks for requests."""


class EngineScaling:
    """The places of the policy's engines, by number. An async context manager, which is left after
    the engines: it releases the places of those that were added.
    """

    def __init__(self, placed: PlacedCluster, model: Path) -> None:
        self._placed = placed
        self._model = model
        self._engine = with_log_of(placed.config.engine, role="engine")
        self._places: dict[int, AsyncExitStack] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for number in list(self._places):
            await self._release(number)

    @asynccontextmanager
    async def handling_requests(self, run: Run, router: Router) -> AsyncIterator[None]:
        """While the block lasts, requests in the run's folder add engines to the router, and remove
        them.
        """
        self.begin(router)
        async with Flow("engine requests") as flow:
            flow.start(_RequestHandler(self, run, router, flow).watch(), name="watch")
            try:
                yield
            finally:
                flow.cancel()

    def begin(self, router: Router) -> None:
        """Note the engines that the router has begun with."""
        count = router.worker_count().count
        self._places = {number: AsyncExitStack() for number in range(count)}

    async def add(
        self, router: Router, lost: Callable[[int, EngineDeadError], Awaitable[None]]
    ) -> int:
        """Add an engine; returns its number when it serves. `lost` is called if it has died and
        cannot be started again.

        Raises:
            EngineError: it did not start, or engines and trainer take turns.
            ConfigError: there is no place for it.
        """
        plan = self._placed.plan
        if plan is not None and plan.devices.time_shared:
            raise EngineError(
                "engines and trainer take turns on their devices here (placement="
                f"{self._placed.config.placement.name}), so that all of them are planned: resume"
                " the run with another cluster.engines, or give each side devices of its own"
                " (placement=disaggregated)"
            )
        # The lowest free number, so that numbers stay small when engines come and go.
        number = next(n for n in range(len(self._places) + 1) if n not in self._places)
        place = self._places[number] = AsyncExitStack()

        async def release(why: EngineDeadError) -> None:
            await self._release(number)
            await lost(number, why)

        try:
            factory = await place.enter_async_context(
                self._placed.cluster.another_engine(self._engine, self._model, number)
            )
            await router.add(number, factory, factory.node, release)
        except BaseException:
            await self._release(number)
            raise
        return number

    async def remove(self, router: Router) -> int:
        """Remove an engine; returns its number when it is closed.

        Raises:
            EngineError: it is the last one.
        """
        number = await router.remove()
        await self._release(number)
        return number

    async def _release(self, number: int) -> None:
        if (place := self._places.pop(number, None)) is not None:
            await place.aclose()


class _RequestHandler:
    """Handles the requests in the folder of a run."""

    def __init__(self, scaling: EngineScaling, run: Run, router: Router, flow: Flow) -> None:
        self._scaling = scaling
        self._run = run
        self._router = router
        self._flow = flow
        self._requests = EngineRequests(run.folder)

    async def watch(self) -> None:
        """Take requests, each in a task of its own: engines take minutes to start."""
        while True:
            for name, request in await asyncio.to_thread(self._requests.take):
                self._flow.start(self._answer(name, request), name=name)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _answer(self, name: str, request: EngineRequest) -> None:
        change = self._add if request.change == "add" else self._remove
        doing = "adding" if request.change == "add" else "removing"
        self._run.display.say(f"{doing} {request.count} of the engines, as asked")
        try:
            self._check(request)
            async with Flow(name) as flow:
                tasks = [
                    flow.start(_result_or_error(change), name=str(each))
                    for each in range(request.count)
                ]
            outcomes = [task.result() for task in tasks]
        except EngineError as error:
            outcomes = [error]
        text = "\n".join(map(str, outcomes))
        failed = any(isinstance(outcome, AgentRLError) for outcome in outcomes)
        if failed:
            self._run.display.say(f"[yellow]{escape(text)}[/yellow]")
        answer = EngineAnswer(text=text, done=not failed)
        await asyncio.to_thread(self._requests.answer, name, answer)

    def _check(self, request: EngineRequest) -> None:
        """Refuse what would leave no engine, before any is removed.

        Raises:
            EngineError: it would.
        """
        count = self._router.worker_count().count
        if request.change == "remove" and request.count >= count:
            raise EngineError(
                "a run needs an engine, and this one has one"
                if count == 1
                else f"a run needs an engine: of its {count}, at most {count - 1} can be removed"
            )

    async def _add(self) -> EngineChange:
        began = now()
        number = await self._scaling.add(self._router, self._note_loss)
        return await self._record("added", number, now() - began)

    async def _remove(self) -> EngineChange:
        began = now()
        number = await self._scaling.remove(self._router)
        return await self._record("removed", number, now() - began)

    async def _note_loss(self, number: int, why: EngineDeadError) -> None:
        text = f"engine {number}, which was added, is lost, and the others carry on: {why}"
        self._run.recorder.note(self._run.status.step or 0, text, "workers/engine")
        await self._record("lost", number, 0.0, str(why))

    async def _record(
        self,
        change: Literal["added", "removed", "lost"],
        number: int,
        seconds: float,
        why: str = "",
    ) -> EngineChange:
        recorded = EngineChange(
            datetime.now(UTC).isoformat(),
            self._run.status.step,
            change,
            number,
            round(seconds, 3),
            self._router.worker_count().alive,
            why,
        )
        await asyncio.to_thread(self._requests.record, recorded)
        if change != "lost":
            self._run.display.say(str(recorded))
        return recorded


async def _result_or_error(
    change: Callable[[], Awaitable[EngineChange]],
) -> EngineChange | AgentRLError:
    """The result of a change, or its failure, so that one failure does not cancel the others."""
    try:
        return await change()
    except AgentRLError as error:
        return error
