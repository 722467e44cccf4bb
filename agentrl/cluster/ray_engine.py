"""`RayEngine`: an engine that runs in a Ray actor."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentrl.cluster.engine_door import EngineDoor
from agentrl.cluster.ray_choices import with_held_choices
from agentrl.cluster.ray_errors import errors_of_actor
from agentrl.cluster.ray_process import RayProcess, Surroundings, end
from agentrl.cluster.ray_prompts import HeldPrompts, SentPrompts
from agentrl.cluster.ray_receivers import RayReceivers
from agentrl.cluster.workers import PLACE_SECONDS
from agentrl.errors import EngineDeadError, EngineError
from agentrl.net.interfaces import LOOPBACK, own_address
from agentrl.net.link import Door, RemoteDoor
from agentrl.plugins import Component
from agentrl.protocols import (
    Engine,
    EngineOffers,
    EngineStats,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from agentrl.trajectory import Completion
from agentrl.weights.bundle import WeightBundle
from agentrl.weights.shipment import shipment_of

if TYPE_CHECKING:
    from torch import Tensor

_CALLS = 100_000
"""Most concurrent requests of an actor. Ray requires a number; the engine has a limit of its own.
"""
_BESIDE = "beside"
"""The actor's calls that run in another thread than its engine. It has an event loop of its own."""
_BESIDE_CALLS = 100
"""Most concurrent ones of these."""


@dataclass(frozen=True, slots=True)
class _Report:
    """The state of an engine when it answered."""

    policy_version: int
    stats: EngineStats


class _EngineHost:
    """The actor: an engine on the event loop of its process, which stands still while an engine
    computes there. Most answers include the engine's state.
    """

    async def begin(self, surroundings: Surroundings) -> RayProcess:
        surroundings.settle()
        return RayProcess.own()

    async def open(self, chosen: Component, model: Path) -> tuple[int, _Report]:
        self._prompts = HeldPrompts()
        self._begun: set[int] = set()
        self._one_begins = asyncio.Condition()
        self._engine: Engine = chosen.make(model)
        self._door = EngineDoor(self._engine)
        await self._engine.__aenter__()
        return self._engine.max_context, self._report()

    async def generate(
        self, sent: GenerateRequest, is_cut: bool, number: int, oldest: int
    ) -> tuple[Completion | None, _Report]:
        """The completion, or None if the request must be sent whole: then it has not begun."""
        request = self._prompts.whole(sent) if is_cut else sent
        if request is None:
            return None, self._report()
        await self.begins(number, oldest)
        completion = await self._engine.generate(request)
        self._prompts.answered(request, completion, was_cut=is_cut)
        return with_held_choices(completion), self._report()

    async def score(self, request: ScoreRequest) -> tuple[Scores, _Report]:
        if not EngineOffers.of(self._engine).scores:
            raise EngineError(
                f"{type(self._engine).__name__} has no method `score`: it cannot score given tokens"
            )
        scores = await self._engine.score(request)
        return scores, self._report()

    async def begins(self, number: int, oldest: int) -> None:
        """Stop interrupts from waiting for this request: it begins, or was withdrawn and may never
        begin.
        """
        self._begun.add(number)
        if len(self._begun) > _CALLS:
            self._begun = {begun for begun in self._begun if begun >= oldest}
        async with self._one_begins:
            self._one_begins.notify_all()

    async def interrupt(self, asked: frozenset[int]) -> _Report:
        async with self._one_begins:  # Ray lets calls overtake each other
            await self._one_begins.wait_for(lambda: asked <= self._begun)
        await self._engine.interrupt()
        return self._report()

    async def misses(self, bundle: WeightBundle) -> bool:
        """True if this machine cannot read the bundle where it lies."""
        return not bundle.folder.is_dir()

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> _Report:
        if EngineOffers.of(self._engine).stages_weights:
            await self._engine.stage_weights(weights, version)
        return self._report()

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> _Report:
        await self._engine.update_weights(weights, version)
        return self._report()

    async def sleep(self) -> int | None:
        return await self._engine.sleep()

    async def wake_weights(self) -> int | None:
        return await self._engine.wake_weights()

    async def wake(self) -> None:
        await self._engine.wake()

    async def beat(self) -> None:
        """Return as a sign of life of the actor, and of its engine's own processes."""
        if EngineOffers.of(self._engine).probes_while_busy:
            await self._engine.probe()

    async def report(self) -> _Report:
        offers = EngineOffers.of(self._engine)
        if offers.probes and not offers.probes_while_busy:
            await self._engine.probe()
        return self._report()

    async def open_door(self, spans_machines: bool) -> Door:
        return await self._door.open(own_address() if spans_machines else LOOPBACK)

    async def hold_door(self) -> None:
        self._door.hold()

    async def drain_door(self) -> None:
        await self._door.drained()

    async def release_door(self) -> None:
        self._door.release()

    async def close(self) -> None:
        await self._door.close()
        await self._engine.__aexit__(None, None, None)

    def _report(self) -> _Report:
        return _Report(self._engine.policy_version, self._engine.stats())


class RayEngine(Engine):
    """`Engine` whose model is in a Ray actor; `options` are the actor's Ray options. `receivers`
    bring bundles to the machines that cannot read them where they lie. `spans_machines`: its door
    (`EngineOffers.remote_door`) is to be reached from other machines.

    `stats` are those of the last answer; requests sent since then are counted as waiting.
    """

    def __init__(
        self,
        chosen: Component,
        model: Path,
        options: Mapping[str, Any],
        receivers: RayReceivers,
        *,
        spans_machines: bool = False,
    ) -> None:
        self._receivers = receivers
        self._spans_machines = spans_machines
        self._chosen = chosen
        self._model = model
        self._options = options
        self._actor: Any = None
        self._process: RayProcess | None = None
        self._max_context = 0
        self._latest = _Report(0, EngineStats(0, 0, 0, 0, 0))
        self._prompts = SentPrompts()
        self._numbers = count()
        self._asked: set[int] = set()
        self._reporting: asyncio.Future[_Report] | None = None

    @property
    def offers(self) -> EngineOffers:
        """The signs of life are those of the actor, and of an engine that has processes itself."""
        inner = EngineOffers.of(self._chosen.factory)
        door = RemoteDoor(
            open=partial(self._call, "open_door", self._spans_machines),
            hold=partial(self._call, "hold_door"),
            drain=partial(self._call, "drain_door"),
            release=partial(self._call, "release_door"),
        )
        return EngineOffers(
            probes_while_busy=inner.probes_while_busy or not inner.probes, remote_door=door
        )

    @property
    def policy_version(self) -> int:
        """See `Engine`."""
        return self._latest.policy_version

    @property
    def max_context(self) -> int:
        """See `Engine`."""
        return self._max_context

    async def __aenter__(self) -> Self:
        import ray

        named = type("engine", (_EngineHost,), {})
        remote: Any = ray.remote
        host = remote(concurrency_groups={_BESIDE: _BESIDE_CALLS})(named)
        self._actor = host.options(**self._options, max_concurrency=_CALLS).remote()
        try:
            self._process = await self._start_actor()
            self._max_context, self._latest = await _answer_of(
                self._actor.open.remote(self._chosen, self._model)
            )
        except BaseException:
            await self._kill()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Ask the engine to close, then kill its actor in any case."""
        self._receivers.forget(self)
        if self._actor is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await _answer_of(self._actor.close.remote())
        except (EngineDeadError, TimeoutError):
            pass  # it is killed anyway
        finally:
            await self._kill()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine`."""
        import ray

        actor, number = self._running, next(self._numbers)
        self._asked.add(number)
        oldest = min(self._asked)
        cut = self._prompts.cut(request)
        answer = actor.generate.remote(cut or request, cut is not None, number, oldest)
        try:
            completion, self._latest = await _answer_of(answer)
            if completion is None:  # the actor no longer holds the session's tokens
                answer = actor.generate.remote(request, False, number, oldest)
                completion, self._latest = await _answer_of(answer)
        except asyncio.CancelledError:
            ray.cancel(answer)
            actor.begins.remote(number, oldest)  # an interrupt may be waiting for it
            raise
        finally:
            self._asked.discard(number)
        self._prompts.answered(request, completion)
        answered: Completion = completion
        return answered

    async def score(self, request: ScoreRequest) -> Scores:
        """See `Engine.score`."""
        import ray

        answer = self._running.score.remote(request)
        try:
            scores, self._latest = await _answer_of(answer)
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        answered: Scores = scores
        return answered

    async def interrupt(self) -> None:
        """See `Engine`."""
        self._latest = await _answer_of(self._running.interrupt.remote(frozenset(self._asked)))

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.stage_weights`. Of a bundle, only the path is sent."""
        readable = await self._readable(weights)
        await self._send_weights(self._running.stage_weights, readable, version)

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine`."""
        readable = await self._readable(weights)
        await self._send_weights(self._running.update_weights, readable, version)
        await self._receivers.keep_only(shipment_of(weights).checksum, self)

    async def _readable(self, weights: Mapping[str, "Tensor"]) -> Mapping[str, "Tensor"]:
        """The weights where the actor's machine can read them: a copy there, if they are a bundle
        whose folder it does not see.
        """
        if not isinstance(weights, WeightBundle) or not await self._call("misses", weights):
            return weights
        assert self._process is not None
        return await self._receivers.bring(weights, self._process.node, self)

    async def _send_weights(
        self, method: Any, weights: Mapping[str, "Tensor"], version: int
    ) -> None:
        # Tensors are pickled where the method is called, and may be gigabytes.
        answer = await asyncio.to_thread(method.remote, weights, version)
        self._latest = await _answer_of(answer)

    async def sleep(self) -> int | None:
        """See `Engine.sleep`."""
        freed_bytes: int | None = await _answer_of(self._running.sleep.remote())
        return freed_bytes

    async def wake_weights(self) -> int | None:
        """See `Engine.wake_weights`."""
        taken_bytes: int | None = await _answer_of(self._running.wake_weights.remote())
        return taken_bytes

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await _answer_of(self._running.wake.remote())

    async def probe(self) -> None:
        """See `Engine.probe`. A thread of the actor answers, and the engine's state follows as soon
        as the engine has time.
        """
        await _answer_of(self._running.beat.options(concurrency_group=_BESIDE).remote())
        if not self.offers.probes_while_busy:
            self._latest = await _answer_of(self._running.report.remote())
        elif self._reporting is None or self._reporting.done():
            self._reporting = asyncio.wrap_future(self._running.report.remote().future())
            self._reporting.add_done_callback(self._take_report)

    def _take_report(self, reporting: "asyncio.Future[_Report]") -> None:
        # Calls that wait for an answer tell of a death.
        if not reporting.cancelled() and reporting.exception() is None:
            self._latest = reporting.result()

    def stats(self) -> EngineStats:
        """See `Engine`."""
        seen = self._latest.stats
        unseen = max(0, len(self._asked) - seen.running - seen.waiting)
        return replace(seen, waiting=seen.waiting + unseen)

    async def _call(self, method: str, *args: Any) -> Any:
        return await _answer_of(getattr(self._running, method).remote(*args))

    @property
    def _running(self) -> Any:
        if self._actor is None:
            raise EngineDeadError("the engine is not running: use it inside `async with engine:`")
        return self._actor

    async def _start_actor(self) -> RayProcess:
        """Wait until Ray has started the actor.

        Raises:
            EngineDeadError: Ray finds no place for it.
        """
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                process: RayProcess = await _answer_of(self._actor.begin.remote(Surroundings.own()))
                return process
        except TimeoutError as error:
            raise EngineDeadError(
                f"Ray found no place for it in {PLACE_SECONDS:g} s; `ray status` shows what is free"
            ) from error

    async def _kill(self) -> None:
        actor, self._actor = self._actor, None
        await end(actor, self._process)
        self._process = None


_CLOSE_SECONDS = 10.0
"""How long an engine may take to close by itself."""


async def _answer_of(reference: Any) -> Any:
    """Wait for the value of a Ray reference.

    Raises:
        EngineDeadError: the actor is gone.
    """
    from ray.exceptions import TaskCancelledError

    with errors_of_actor(lambda why: EngineDeadError(f"the engine's actor is gone: {why}")):
        try:
            return await asyncio.wrap_future(reference.future())
        except TaskCancelledError as error:
            raise EngineDeadError("the request was cancelled in the engine's actor") from error
