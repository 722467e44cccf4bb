"""A transformers model in this process, with continuous batching and a KV cache over turns.

Steps run inline on the event loop, one after the other, and between two of them callers get their turn. Nothing here
depends on timing, so the same callers give the same batches in every run, and weights change only between steps.
"""

import asyncio
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from agentrl.arrays import floats, ints
from agentrl.engines.admission import KvOnUpdate, max_new_tokens
from agentrl.engines.slots import Place, SlotTable, SlotTokens
from agentrl.errors import ConfigError, EngineDeadError, EngineError
from agentrl.flow import computes_by_design
from agentrl.placement.footprint import EngineLayout
from agentrl.protocols import EngineStats, GenerateRequest, Settings
from agentrl.trajectory import Completion, FinishReason
from agentrl.weights.bundle import WeightBundle

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.engines.packed_model import PackedModel, StepRow

_STEP_TOKENS = 4096
"""New tokens computed in one step at most: bounds its memory and how long callers wait; longer prompts take several."""
_QUIET_YIELDS = 4
_MAX_YIELDS = 64


@dataclass(eq=False, slots=True)
class _Live:
    """A request under way. In a `slot`, `tokens` are prompt and sampled ones; the first `cached` have their KV there.

    `stale`: some of that KV is of older weights, and no other request may ever use it.
    """

    request: GenerateRequest
    arrival: int
    future: asyncio.Future[Completion]
    max_new: int
    tokens: SlotTokens = field(default_factory=SlotTokens)
    slot: int = -1
    cached: int = 0
    stale: bool = False
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __lt__(self, other: "_Live") -> bool:
        return (self.request.priority, self.arrival) < (other.request.priority, other.arrival)

    def take(self, place: Place) -> None:
        """Sit down in a slot."""
        self.slot, self.cached, self.tokens = place.slot, place.cached, place.tokens

    def completion(self, finish_reason: FinishReason) -> Completion:
        sampled = self.tokens.values[len(self.request.prompt_ids) :].copy()  # of the whole, a view would keep it all
        return Completion(ints(sampled), floats(self.logprobs), ints(self.versions), finish_reason)


class LocalEngine:
    """The `Engine` for laptops and tests: no server, no other process.

    The token at position i of a request depends on its seed, i and the logits alone, not on the rest of the batch.
    """

    class Config(Settings):
        """Settings of `engine=local`."""

        max_batch: int = Field(default=128, ge=1)
        """Requests that are decoded together; also the slots of the KV cache."""
        dtype: Literal["float32", "bfloat16"] = "float32"
        """Of weights and KV cache. Logprobs are always computed in float32."""
        max_context: int | None = Field(default=None, ge=2)
        """Largest prompt plus completion, in tokens; the model's own limit when not given."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """`auto` takes a GPU where there is one."""
        prefix_cache: bool = True
        """Keep the KV of finished requests, so that the next turn computes only what is new."""
        kv_on_update: KvOnUpdate = "recompute"
        """What new weights do to the KV of requests in flight: recompute it, or keep the old one and go on."""

        def layout(self) -> EngineLayout:
            """How it lies on its device, for those who count memory and time before it runs."""
            return EngineLayout(
                number=4 if self.dtype == "float32" else 2,
                max_batch=self.max_batch,
                max_context=self.max_context,
                prefill_tokens=_STEP_TOKENS,
            )

    def __init__(self, config: Config, model: Path) -> None:
        self._config = config
        self._folder = model
        self._tasks = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None
        self._model: PackedModel | None = None
        self._max_context = config.max_context or 0
        self._closed: str | None = "it was not entered (`async with`)"
        self._version = 0
        self._staged: WeightBundle | None = None
        self._waiting: list[_Live] = []
        self._running: dict[int, _Live] = {}
        self._live_ids: set[str] = set()
        self._slots = SlotTable(config.max_batch)
        self._wake = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._arrivals = 0
        self._generated = self._prefilled = self._cached = 0

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        return self._version

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens; known once the engine is entered."""
        return self._max_context

    async def __aenter__(self) -> Self:
        self._model = self._load()
        limit = self._model.max_positions
        if self._config.max_context is not None and self._config.max_context > limit:
            raise ConfigError(f"engine.max_context={self._config.max_context}, but the model ends at {limit} tokens")
        self._max_context = self._config.max_context or limit
        await self._tasks.__aenter__()
        self._task = self._tasks.create_task(self._run(self._model), name="engine")
        self._closed = None
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._fail_all(EngineDeadError("the engine was closed"))
        self._closed = self._closed or "it was closed"
        self._model = None
        if self._task is not None:
            self._task.cancel()
            # The task ends on its own terms; our caller's exception is not the group's to wrap.
            await self._tasks.__aexit__(None, None, None)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. A completion that meets `max_context` ends there with finish reason "length"."""
        model = self._entered()
        max_new = max_new_tokens(
            request,
            max_context=self._max_context,
            vocab_size=model.vocab_size,
            live_ids=self._live_ids,
            checked=self._slots.known(request.prompt_ids, request.session, request.known),
        )
        live = _Live(request, self._arrivals, asyncio.get_running_loop().create_future(), max_new)
        self._arrivals += 1
        self._live_ids.add(request.id)
        heapq.heappush(self._waiting, live)
        self._wake.set()
        try:
            return await live.future
        finally:
            self._live_ids.discard(request.id)
            self._withdraw(live)

    async def interrupt(self) -> None:
        """See `Engine.interrupt`. Steps run inline, so a caller always runs between two of them."""
        self._entered()
        for live in [*self._waiting, *self._running.values()]:
            if not live.future.done():
                live.future.set_result(live.completion("abort"))
        self._waiting.clear()
        for live in list(self._running.values()):
            self._release(live)

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `SupportsStageWeights`. A bundle is read in a thread, and requests go on meanwhile."""
        self._check_newer(version)
        if isinstance(weights, WeightBundle):
            await asyncio.to_thread(weights.verify)
        self._entered().check_weights(weights)
        self._staged = weights if isinstance(weights, WeightBundle) else None

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.update_weights`. Steps run inline, so a caller always runs between two of them."""
        if not isinstance(weights, WeightBundle) or weights != self._staged:
            await self.stage_weights(weights, version)
        self._staged = None
        self._check_newer(version)
        try:
            self._entered().load_weights(weights)
        except Exception as error:  # some are new now and some are old
            raise self._die(error) from error
        self._version = version
        self._slots.forget_parked()
        for live in self._running.values():
            if self._config.kv_on_update == "keep":
                live.stale = live.cached > 0
            else:
                live.cached = 0  # all its tokens are recomputed before the next is sampled

    @property
    def weights(self) -> Mapping[str, "Tensor"]:
        """What it samples from, by Hugging Face names; not copied, so they change with the next version."""
        return self._entered().weights

    async def sleep(self) -> None:
        """See `Sleeper` (agentrl/placement/time_share.py). Steps run inline, so no step is under way."""
        model = self._entered()
        self._awake.clear()
        self._slots.forget_parked()
        for live in self._running.values():
            live.cached, live.stale = 0, False  # all its tokens are recomputed
        model.sleep()

    async def wake(self) -> None:
        """See `Sleeper`."""
        self._entered().wake()
        self._awake.set()

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        running = len(self._running)
        return EngineStats(
            running,
            len(self._waiting),
            self._generated,
            self._prefilled,
            self._cached,
            kv_use=running / self._config.max_batch,  # of its slots: each holds a whole context
        )

    def _load(self) -> "PackedModel":
        import torch

        from agentrl.engines.packed_model import PackedModel

        device = self._config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.float32 if self._config.dtype == "float32" else torch.bfloat16
        return PackedModel(self._folder, dtype=dtype, device=torch.device(device), max_slots=self._config.max_batch)

    def _entered(self) -> "PackedModel":
        if self._closed is not None or self._model is None:
            raise EngineDeadError(f"the engine is not running: {self._closed}")
        return self._model

    async def _run(self, model: "PackedModel") -> None:
        """The engine's task: admit, step, let callers answer; wait when there is nothing to do."""
        finished = 0
        try:
            while True:
                await self._awake.wait()
                if not self._running and not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                await self._let_callers_answer(finished)
                if not self._awake.is_set():
                    continue
                self._admit()
                finished = self._step(model) if self._running else 0
        except Exception as error:
            self._die(error)

    async def _let_callers_answer(self, finished: int) -> None:
        """Yield until the callers whose requests just finished have come back with the next turn.

        An answer reaches its caller in the loop's next iteration; a caller that can act at once is back in the same
        one, a new episode needs a few more. A step begun before would run half empty, and the rest would run half
        empty after it. So: go on while requests arrive, until all are back or a few iterations brought none. This
        counts iterations, never time, so the batches are the same in every run.
        """
        expected = self._arrivals + finished
        if not finished and self._running:
            await asyncio.sleep(0)
            return
        quiet = 0
        for _ in range(_MAX_YIELDS):
            arrivals = self._arrivals
            await asyncio.sleep(0)
            quiet = 0 if self._arrivals > arrivals else quiet + 1
            if quiet == _QUIET_YIELDS or (finished and self._arrivals >= expected):
                return

    def _admit(self) -> None:
        """Give slots to the waiting, by priority and arrival; each first to whom it fits, then the oldest parked."""
        for live in [live for live in self._running.values() if live.future.done()]:
            self._release(live)  # cancelled; its caller has not run since
        admitted: list[_Live] = []
        while self._waiting and len(admitted) < self._slots.available:
            live = heapq.heappop(self._waiting)
            if not live.future.done():
                admitted.append(live)
        strangers = []
        for live in admitted:
            request = live.request
            place = self._slots.take_known(request.prompt_ids, request.session, request.known)
            place = place or self._slots.take_extended(request.prompt_ids)
            if place is None:
                strangers.append(live)
            else:
                live.take(place)
                self._cached += live.cached
        for live in strangers:
            live.take(self._slots.take_any(live.request.prompt_ids))
        for live in admitted:
            self._running[live.slot] = live

    def _step(self, model: "PackedModel") -> int:
        """Compute what has no KV yet, sample a token where that reaches the end; returns how many requests ended."""
        computes_by_design()
        rows = self._schedule()
        sampled = iter(model.step(list(rows.values())))
        finished = 0
        for live, row in rows.items():
            live.cached = row.stop
            if len(row.token_ids) > 1:
                self._prefilled += len(row.token_ids)
            if row.sample:
                finished += self._append(live, *next(sampled))
        return finished

    def _schedule(self) -> "dict[_Live, StepRow]":
        """Everyone's tokens without KV. Who only decodes goes first; then prefills, by priority, within the budget."""
        from agentrl.engines.packed_model import StepRow

        pending = {live: len(live.tokens) - live.cached for live in self._running.values()}
        order = [live for live, count in pending.items() if count == 1]
        order += sorted(live for live, count in pending.items() if count > 1)
        budget = max(_STEP_TOKENS, len(order))
        rows: dict[_Live, StepRow] = {}
        for live in order:
            start = live.cached
            stop = min(start + budget, len(live.tokens))
            if start == stop:
                break
            budget -= stop - start
            request = live.request
            rows[live] = StepRow(
                live.slot,
                start,
                live.tokens.values[start:stop],
                stop == len(live.tokens),
                request.sampling.temperature,
                request.seed,
                len(live.versions),
            )
        return rows

    def _append(self, live: _Live, token: int, logprob: float) -> bool:
        live.tokens.append(ints([token]))
        live.logprobs.append(logprob)
        live.versions.append(self._version)
        self._generated += 1
        if token in live.request.sampling.stop_token_ids:
            live.future.set_result(live.completion("stop"))
        elif len(live.versions) == live.max_new:
            live.future.set_result(live.completion("length"))
        else:
            return False
        self._release(live)
        return True

    def _withdraw(self, live: _Live) -> None:
        """Take a request out that its caller gave up on; one that ended is out already."""
        if self._running.get(live.slot) is live:
            self._release(live)
        elif live.slot < 0 and live in self._waiting:
            self._waiting.remove(live)
            heapq.heapify(self._waiting)

    def _release(self, live: _Live) -> None:
        del self._running[live.slot]
        reusable = self._config.prefix_cache and not live.stale
        self._slots.park(live.slot, live.tokens, live.cached if reusable else 0, live.request.session)

    def _check_newer(self, version: int) -> None:
        self._entered()
        if version <= self._version:
            raise EngineError(f"weights of version {version} after version {self._version}: versions only grow")

    def _die(self, error: Exception) -> EngineDeadError:
        """Mark the engine dead: all waiting and later requests fail with this error."""
        self._closed = f"it died of {type(error).__name__}: {error}"
        death = EngineDeadError(f"the engine died of {type(error).__name__}: {error}")
        death.__cause__ = error
        self._fail_all(death)
        return death

    def _fail_all(self, error: EngineError) -> None:
        for live in [*self._waiting, *self._running.values()]:
            if not live.future.done():
                live.future.set_exception(error)
        self._waiting.clear()
        self._running.clear()


__all__ = ["LocalEngine"]
