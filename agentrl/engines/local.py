"""A transformers model in this process, with continuous batching and a KV cache that is reused
across turns.

Steps run inline on the event loop, and callers run between steps. Nothing depends on timing, so the
same callers get the same batches in every run. Weights change only between steps.
"""

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from agentrl.engines.admission import (
    KvOnUpdate,
    check_score,
    effective_kv_on_update,
    max_new_tokens,
)
from agentrl.engines.kv_chains import goes_on
from agentrl.engines.picture_keys import PictureKeys
from agentrl.engines.slot_experts import SlotExperts
from agentrl.engines.slots import (
    Hold,
    Openings,
    Place,
    PrefixHashes,
    SlotTable,
    SlotTokens,
    prefix_hashes,
)
from agentrl.engines.stop_texts import FolderTokenizer, StopTexts
from agentrl.errors import ConfigError, EngineDeadError, EngineError
from agentrl.flow import expect_long_callback, run_to_completion
from agentrl.models.source import here
from agentrl.placement.devices import DeviceKind
from agentrl.placement.footprint import EngineLayout
from agentrl.protocols import (
    Engine,
    EngineOffers,
    EngineStats,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from agentrl.settings.base import Settings
from agentrl.settings.precision import EngineDtype, resolve_dtype
from agentrl.tokens.arrays import IntArray, Ragged, floats, ints
from agentrl.tokens.expert_choices import ExpertChoices
from agentrl.tokens.placed_images import whole_pictures
from agentrl.trajectory import Completion, FinishReason
from agentrl.weights.shipment import Reader, Shipment, shipment_of

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.engines.packed_model import Drawn, PackedModel, StepRow

_STEP_TOKENS = 4096
"""Most new tokens per step: bounds its memory and how long callers wait. A longer prompt takes
several steps.
"""
_QUIET_YIELDS = 4
_MAX_YIELDS = 64
_PREFILL_SHARE = 8
"""A decoding step costs a slot about as much as so many tokens of a prefill."""
_TURN_AVERAGE_REQUESTS = 256
"""How many requests the share of later turns is averaged over, roughly."""


@dataclass(eq=False, slots=True)
class _Live:
    """A live request. Once it has a `slot`, `tokens` are its prompt and sampled tokens.

    `prompt` are the tokens of the prompt with numbers of their own for pictures (`PictureKeys`),
    which `tokens` have too. `positions_3T`: those of the prompt, if they are not the places of its
    tokens.

    `cached`: how many of them, from the first on, have their KV in the slot.
    `oldest`: the oldest version of the weights that computed some of that KV.
    `earlier`: the experts of what has been computed, and is computed again under new weights: they
    are those that its tokens were sampled with.
    """

    request: GenerateRequest
    arrival: int
    future: asyncio.Future[Completion]
    max_new: int
    tokens: SlotTokens = field(default_factory=SlotTokens)
    slot: int = -1
    cached: int = 0
    oldest: int = 0
    logprobs: list[float] = field(default_factory=list)
    supports: list[IntArray] = field(default_factory=list)
    earlier: ExpertChoices | None = None
    prompt: IntArray = field(default_factory=lambda: ints(()))
    positions_3T: IntArray | None = None
    versions: list[int] = field(default_factory=list)
    stops: StopTexts | None = None
    hashes: PrefixHashes | None = None
    parks_seen: int = -1

    def order(self) -> tuple[int, int]:
        """Which request comes first: by priority, then by arrival."""
        return self.request.priority, self.arrival

    def take(self, place: Place) -> None:
        """Occupy a slot."""
        self.slot, self.cached, self.tokens = place.slot, place.cached, place.tokens
        self.oldest = place.oldest

    def token_ids(self, start: int, stop: int) -> IntArray:
        """The tokens from `start` to `stop` as the model has them."""
        if not self.request.images:
            return self.tokens.values[start:stop]
        given = self.request.prompt_ids[start:stop]
        return ints(np.concatenate([given, self.tokens.values[start + len(given) : stop]]))

    def positions(self, start: int, stop: int) -> IntArray | None:
        """The positions of these tokens by time, height and width, shape (3, T)."""
        known = self.positions_3T
        if known is None:
            return None
        given = known[:, start:stop]
        count = known.shape[1]
        after = np.arange(max(start, count), max(stop, count)) - count + int(known.max()) + 1
        later = np.broadcast_to(after, (3, len(after)))
        return ints(np.concatenate([given, later], axis=1))

    def completion(
        self, finish_reason: FinishReason, experts: ExpertChoices | None = None
    ) -> Completion:
        sampled = self.tokens.values[
            len(self.request.prompt_ids) :
        ].copy()  # a view would keep the whole sequence
        support = Ragged.of(self.supports) if self.request.keep_support else None
        return Completion(
            ints(sampled),
            floats(self.logprobs),
            ints(self.versions),
            finish_reason,
            support,
            experts,
        )


class LocalEngine(Engine):
    """The `Engine` for laptops and tests: no server, no other process.

    The token at position i of a request depends only on its seed, i and the logits, not on the rest
    of the batch.
    """

    offers: ClassVar[EngineOffers] = EngineOffers(
        reports_experts=True, reads_arrivals=True, reads_images=True
    )

    class Config(Settings):
        """Settings of `engine=local`."""

        max_batch: int = Field(default=128, ge=1)
        """Most requests decoded together; also the number of slots of the KV cache."""
        dtype: EngineDtype = "auto"
        """Data type of weights and KV cache. Logprobs are always computed in float32. `auto` is the
        trainer's (`trainer.dtype`): bfloat16 on GPUs that have it and float32 on CPUs, unless the
        trainer has another."""
        max_context: int | None = Field(default=None, ge=2)
        """Largest prompt plus completion, in tokens; by default the model's limit."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """`auto` uses a GPU if there is one."""
        prefix_cache: bool = True
        """Keep the KV of finished requests, so that the next turn computes only its new tokens."""
        kv_on_update: KvOnUpdate = "recompute"
        """What a weight update does to the KV that the old weights computed: drop it, and recompute
        that of requests in flight (`recompute`); keep it for these (`keep`); or keep that of each
        session, in flight and between turns, within `rollout.max_staleness` (`reuse`,
        [architecture.md](architecture.md#kv-over-a-weight-update)).
        """
        kv_max_staleness: int = Field(default=0, ge=0)
        """How many versions older than the weights the KV may be that `reuse` keeps; in a run,
        `rollout.max_staleness` sets it.
        """
        trust_remote_code: bool = False
        """Run the code that comes with the model; `model.trust_remote_code` sets it for all parts
        of a run.
        """

        def chosen(self, *, kind: DeviceKind, context: int, trainer_dtype: str | None) -> Self:
            """The same, with the data type that follows from the devices and the trainer."""
            dtype = resolve_dtype(self.dtype, trainer_dtype, gpu=kind.is_gpu)
            return self.model_copy(update={"dtype": dtype})

        def layout(self) -> EngineLayout:
            """The engine's layout on its device, to estimate memory and time before it runs."""
            return EngineLayout(
                number=2 if self.dtype == "bfloat16" else 4,
                max_batch=self.max_batch,
                max_context=self.max_context,
                prefill_tokens=_STEP_TOKENS,
            )

    def __init__(self, config: Config, model: Path) -> None:
        self._config = config
        self._folder = model
        self._tokenizer = FolderTokenizer(model)
        self._tasks = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None
        self._model: PackedModel | None = None
        self._max_context = config.max_context or 0
        self._closed: str | None = "it was not entered (`async with`)"
        self._version = 0
        self._staged: Shipment | None = None
        self._waiting: list[_Live] = []
        self._scoring: list[tuple[ScoreRequest, asyncio.Future[Scores]]] = []
        self._running: dict[int, _Live] = {}
        self._live_ids: set[str] = set()
        self._slots = SlotTable(config.max_batch)
        self._picture_keys = PictureKeys()
        self._sees_both_ways = False
        self._experts = SlotExperts()
        self._keeps_experts = False
        self._openings = Openings()
        self._wake = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._received = asyncio.Event()
        self._received.set()
        self._reader: Reader | None = None
        self._arrivals = self._steps = 0
        self._later_turns = 0.0  # share of requests that are not the first turn of their session
        self._kv_on_update = effective_kv_on_update(config.kv_on_update, config.kv_max_staleness)
        self._generated = self._prefilled = self._cached = self._over_older_kv = 0

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
        self._sees_both_ways = self._model.sees_both_ways
        limit = self._model.max_positions
        if self._config.max_context is not None and self._config.max_context > limit:
            raise ConfigError(
                f"engine.max_context={self._config.max_context}, but the model's limit is {limit}"
                " tokens"
            )
        self._max_context = self._config.max_context or limit
        await self._tasks.__aenter__()
        self._task = self._tasks.create_task(self._run(self._model), name="engine")
        self._closed = None
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._fail_all(EngineDeadError("the engine was closed"))
        self._closed = self._closed or "it was closed"
        self._model = None
        if self._staged is not None and self._reader is not None:
            self._staged.leave(self._reader)
        if self._task is not None:
            self._task.cancel()
            # The caller's exception is not passed on, because the task group would wrap it.
            await self._tasks.__aexit__(None, None, None)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. A completion that reaches `max_context` ends with finish reason
        "length".
        """
        model = self._entered()
        prompt = self._picture_keys.keyed(request.prompt_ids, request.images)
        max_new = max_new_tokens(
            request,
            max_context=self._max_context,
            vocab_size=model.vocab_size,
            live_ids=self._live_ids,
            checked=self._slots.known(prompt, request.session, request.known),
            images=model.sees,
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        live = _Live(
            request,
            self._arrivals,
            future,
            max_new,
            prompt=prompt,
            positions_3T=model.positions(request.prompt_ids, request.images),
            stops=self._tokenizer.stop_texts(request),
        )
        self._arrivals += 1
        # A running mean: of all requests so far, later of about the last so many.
        self._later_turns += ((request.known > 0) - self._later_turns) / min(
            self._arrivals, _TURN_AVERAGE_REQUESTS
        )
        self._live_ids.add(request.id)
        self._keeps_experts |= request.keep_experts and model.has_experts
        self._waiting.append(live)
        self._wake.set()
        try:
            return await live.future
        finally:
            self._live_ids.discard(request.id)
            self._withdraw(live)

    async def score(self, request: ScoreRequest) -> Scores:
        """See `Engine.score`. Its tokens are computed between two steps, beside the KV cache."""
        model = self._entered()
        check_score(request, max_context=self._max_context, vocab_size=model.vocab_size)
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        self._scoring.append((request, future))
        self._wake.set()
        return await future

    async def interrupt(self) -> None:
        """See `Engine.interrupt`. Steps run inline, so no step is in progress."""
        self._entered()
        for live in [*self._waiting, *self._running.values()]:
            if not live.future.done():
                live.future.set_result(self._completion(live, "abort"))
        self._waiting.clear()
        for live in list(self._running.values()):
            self._release(live)

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.stage_weights`. Files are checked in a thread while requests continue."""
        self._check_newer(version)
        shipment = shipment_of(weights)
        await asyncio.to_thread(shipment.check)
        model = self._entered()
        model.check_weights(shipment)
        if shipment.is_live:
            await asyncio.to_thread(shipment.enroll, self._own_reader(model))
        self._staged = shipment

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.update_weights`. Steps run inline, so no step is in progress; none begins
        while weights arrive.
        """
        shipment = shipment_of(weights)
        if shipment != self._staged:
            await self.stage_weights(shipment, version)
        self._staged = None
        self._check_newer(version)
        model = self._entered()
        if shipment.is_live:
            try:
                await asyncio.to_thread(shipment.join, self._own_reader(model))
            except BaseException:
                shipment.leave(self._own_reader(model))
                self._reader = None  # the ranks may still have connections to this one
                raise
            # A cancellation comes when it is known which weights there are.
            await run_to_completion(self._receive(model, shipment, version))
        else:
            try:
                model.load_weights(shipment)
            except Exception as error:  # the model now has a mix of old and new weights
                raise self._die(error) from error
            self._note_version(version)

    async def _receive(self, model: "PackedModel", shipment: Shipment, version: int) -> None:
        """Load weights that are being sent, in a thread, between two steps."""
        self._received.clear()
        try:
            # Else the error would keep it, and the sender would wait for more to be read.
            with closing(shipment.arrivals(self._own_reader(model))) as arrivals:
                await asyncio.to_thread(model.load_arrivals, arrivals)
            self._note_version(version)
        except Exception as error:  # see `update_weights`
            raise self._die(error) from error
        finally:
            self._received.set()

    def _note_version(self, version: int) -> None:
        """Sample from weights that have just been loaded."""
        self._version = version
        self._slots.forget_parked(self._oldest_reusable)
        for live in self._running.values():
            if self._kv_on_update != "keep" and live.oldest < self._oldest_reusable:
                self._compute_again(live)

    def _compute_again(self, live: _Live) -> None:
        """Have all tokens of a request recomputed before the next one is sampled."""
        live.earlier = self._experts_of(live)
        live.cached = 0

    def _own_reader(self, model: "PackedModel") -> Reader:
        self._reader = self._reader or Reader.on(str(model.device))
        return self._reader

    @property
    def _oldest_reusable(self) -> int:
        """The oldest version whose KV a later turn may use."""
        return self._version - (
            self._config.kv_max_staleness if self._kv_on_update == "reuse" else 0
        )

    @property
    def weights(self) -> Mapping[str, "Tensor"]:
        """The current weights, by Hugging Face names. They are not copied, so the next update
        changes them.
        """
        return self._entered().weights

    async def sleep(self) -> int | None:
        """See `Engine.sleep`. Steps run inline, so no step is in progress."""
        model = self._entered()
        was_awake = self._awake.is_set()
        self._awake.clear()
        self._slots.forget_parked()
        for live in self._running.values():
            self._compute_again(live)
        freed_bytes = model.sleep()
        return freed_bytes if was_awake else None

    async def wake_weights(self) -> int | None:
        """See `Engine.wake_weights`."""
        return self._entered().wake()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._entered().wake()
        self._awake.set()

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        running = len(self._running)
        return EngineStats(
            running,
            len(self._waiting) + len(self._scoring),
            self._generated,
            self._prefilled,
            self._cached,
            kv_use=running
            # the share of slots in use: each has room for a whole context
            / self._config.max_batch,
            older_kv_tokens=self._over_older_kv,
            kv_tokens=self._config.max_batch * self.max_context,
        )

    def _load(self) -> "PackedModel":
        import torch

        from agentrl.engines.packed_model import PackedModel

        device = self._config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        has_bfloat16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = resolve_dtype(self._config.dtype, None, gpu=has_bfloat16)
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        return PackedModel(
            here(self._folder),
            dtype=dtype,
            device=torch.device(device),
            max_slots=self._config.max_batch,
            trust_remote_code=self._config.trust_remote_code,
        )

    def _entered(self) -> "PackedModel":
        if self._closed is not None or self._model is None:
            raise EngineDeadError(f"the engine is not running: {self._closed}")
        return self._model

    async def _run(self, model: "PackedModel") -> None:
        """The engine's loop: let callers respond, admit requests, run a step; wait when there is
        nothing to do.
        """
        finished = 0
        try:
            while True:
                await self._awake.wait()
                await self._received.wait()
                if not (self._running or self._waiting or self._scoring):
                    self._wake.clear()
                    await self._wake.wait()
                await self._let_callers_answer(finished)
                if not (self._awake.is_set() and self._received.is_set()):
                    continue
                finished = self._score(model) if self._scoring else 0
                self._admit()
                finished += self._step(model) if self._running else 0
        except Exception as error:
            self._die(error)

    async def _let_callers_answer(self, finished: int) -> None:
        """Yield until the callers whose requests just finished have sent their next turns.

        A completion reaches its caller in the next iteration of the event loop. A caller that
        responds at once sends its next request in that same iteration; a new episode needs a few
        more. A step started earlier would run half empty, and so would the step after it. So this
        yields while requests arrive, until all callers are back or a few iterations brought no
        request. It counts iterations, never time, so batches are the same in every run.
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
        """Give slots to waiting requests, by priority; among equals, first to those that extend a
        parked slot.

        The others take an empty slot, or else, by arrival, the slot parked longest ago that is no
        longer held. So with more episodes than slots, some episodes play to their end, instead of
        all evicting each other at every turn.
        """
        for live in [live for live in self._running.values() if live.future.done()]:
            self._release(live)  # cancelled, but its caller has not run since
        if not self._slots.available:
            return
        waiting = sorted(
            (live for live in self._waiting if not live.future.done()), key=_Live.order
        )
        for priority, equals in groupby(waiting, lambda live: live.request.priority):
            if not self._slots.available:
                break
            now = Hold(self._steps, priority)
            strangers = [live for live in equals if not self._extend_parked(live)]
            room = self._slots.not_held(now)
            if not room and not self._running:
                room = 1  # a slot is held for a request that may never come
            for live in strangers[:room]:
                live.take(self._slots.take_any(live.prompt, now))
                self._running[live.slot] = live
        self._waiting = [live for live in waiting if live.slot < 0]

    def _extend_parked(self, live: _Live) -> bool:
        """Let a request take the parked slot that it extends, if there is one."""
        request = live.request
        place = self._slots.take_known(live.prompt, request.session, request.known)
        if place is None and live.parks_seen < self._slots.parks:
            live.parks_seen = self._slots.parks
            if live.hashes is None:
                live.hashes = prefix_hashes(live.prompt)
            place = self._slots.take_extended(
                live.prompt,
                live.hashes,
                session=request.session if goes_on(request) else "",
                since=self._version,
            )
        if place is None:
            return False
        live.take(place)
        live.hashes = None
        self._cached += live.cached
        self._running[live.slot] = live
        return True

    def _step(self, model: "PackedModel") -> int:
        """Compute tokens without KV, sample where a sequence is complete, and return how many
        requests ended.
        """
        expect_long_callback()
        self._steps += 1
        rows = self._schedule()
        sampled = iter(model.step(list(rows.values())))
        if self._keeps_experts:
            self._note_experts(model, rows)
        finished = 0
        for live, row in rows.items():
            if not live.cached:
                live.oldest = self._version
            live.cached = row.stop
            # A single token without a copy is decoding: all others are prompts, or computed again.
            if len(row.token_ids) > 1 or row.copied_from is not None:
                self._prefilled += len(row.token_ids)
            if row.copied_from is not None:
                self._cached += row.start
            if row.sample:
                finished += self._append_drawn(live, next(sampled))
        return finished

    def _note_experts(self, model: "PackedModel", rows: "Mapping[_Live, StepRow]") -> None:
        """Keep the experts that a step chose for the tokens of its rows."""
        chosen = model.chosen_experts()
        for row in rows.values():
            if row.copied_from is not None:
                self._experts.copy(row.copied_from, row.slot, row.start)
            if row.slot in chosen:
                self._experts.write(row.slot, row.start, chosen[row.slot])

    def _completion(self, live: _Live, finish_reason: FinishReason) -> Completion:
        """The completion of a request as far as it has sampled, with the experts of its tokens."""
        return live.completion(finish_reason, self._experts_of(live))

    def _experts_of(self, live: _Live) -> ExpertChoices | None:
        """The experts that a request's tokens were sampled with, if they are to be kept and any are
        known.
        """
        if not live.request.keep_experts or live.slot < 0:
            return None
        earlier = live.earlier
        start = live.request.experts_from if earlier is None else earlier.spans[-1].stop
        chosen_TLK = self._experts.read(live.slot, start, live.cached)
        later = None if chosen_TLK is None else ExpertChoices.of(start, chosen_TLK)
        return ExpertChoices.joined([earlier, later])

    def _score(self, model: "PackedModel") -> int:
        """Score the first waiting requests: as many as a step may have tokens, with padding, but at
        least one.
        """
        expect_long_callback()
        self._scoring = [
            (request, future) for request, future in self._scoring if not future.done()
        ]
        count = longest = 0
        for request, _ in self._scoring:
            longest = max(longest, len(request.token_ids))
            if count and (count + 1) * longest > _STEP_TOKENS:
                break
            count += 1
        if count:
            taken = self._scoring[:count]
            for (_, future), logprobs in zip(
                taken, model.score([request for request, _ in taken]), strict=True
            ):
                future.set_result(Scores(logprobs, self._version))
            self._prefilled += sum(len(request.token_ids) for request, _ in taken)
            del self._scoring[:count]
        return count

    def _schedule(self) -> "dict[_Live, StepRow]":
        """The tokens without KV to compute: decoding requests first, then prefills by priority,
        within the budget.
        """
        from agentrl.engines.packed_model import StepRow

        pending = {live: len(live.tokens) - live.cached for live in self._running.values()}
        order = [live for live, count in pending.items() if count == 1]
        order += sorted((live for live, count in pending.items() if count > 1), key=_Live.order)
        budget = max(_STEP_TOKENS, len(order))
        rows: dict[_Live, StepRow] = {}
        for live in order:
            source = self._copy_source(live, rows)
            start = live.cached if source is None else len(live.request.prompt_ids) - 1
            stop = min(start + budget, len(live.tokens))
            if start >= stop:
                break
            if self._sees_both_ways:
                stop = whole_pictures(live.request.images, start, stop)
            budget -= stop - start  # below 0 if a picture reached beyond it: the next row ends this
            request = live.request
            rows[live] = StepRow(
                live.slot,
                start,
                live.token_ids(start, stop),
                stop == len(live.tokens),
                request.sampling,
                request.seed,
                len(live.versions),
                request.keep_support,
                source,
                request.images,
                request.prompt_ids,
                live.positions(start, stop),
            )
        return rows

    def _copy_source(self, live: _Live, rows: "Mapping[_Live, StepRow]") -> int | None:
        """The slot that has the KV of a request's prompt, now or after this step's `rows`, if the
        request has none.

        Of its prompt, only the last token is then computed, for its logits.
        """
        if live.cached or not self._config.prefix_cache or len(live.request.prompt_ids) == 1:
            return None
        prompt = live.prompt.tobytes()
        found = self._openings.get(prompt)
        computed = None if found is None else self._cached_after_step(*found, rows)
        if found is None or computed is None:
            # The first of its kind: those with the same prompt that come after it copy its KV.
            self._openings.put(prompt, live.slot, live.tokens)
            return None
        source, has_prompt = found[0], computed >= len(live.request.prompt_ids) - 1
        return source if has_prompt and source != live.slot else None

    def _cached_after_step(
        self, slot: int, tokens: SlotTokens, rows: "Mapping[_Live, StepRow]"
    ) -> int | None:
        """Of how many of these tokens the slot has the KV after this step's `rows`; None if it may
        not be copied.
        """
        live = self._running.get(slot)
        if live is not None:
            after = rows[live].stop if live in rows else live.cached
            is_older = live.cached > 0 and live.oldest < self._version
            return None if live.tokens is not tokens or is_older else after
        held = self._slots.parked(slot)
        if held is None or held.tokens is not tokens or held.oldest < self._version:
            return None
        return held.cached

    def _append_drawn(self, live: _Live, drawn: "Drawn") -> bool:
        live.tokens.append(ints([drawn.token]))
        live.logprobs.append(drawn.logprob)
        live.supports.append(drawn.support)
        live.versions.append(self._version)
        self._generated += 1
        self._over_older_kv += live.oldest < self._version
        if drawn.token in live.request.sampling.stop_token_ids or (
            live.stops and live.stops.ends(drawn.token)
        ):
            live.future.set_result(self._completion(live, "stop"))
        elif len(live.versions) == live.max_new:
            live.future.set_result(self._completion(live, "length"))
        else:
            return False
        self._release(live)
        return True

    def _withdraw(self, live: _Live) -> None:
        """Remove a request that its caller gave up on. One that ended is already removed."""
        if self._running.get(live.slot) is live:
            self._release(live)
        elif live.slot < 0 and live in self._waiting:
            self._waiting.remove(live)

    def _release(self, live: _Live) -> None:
        del self._running[live.slot]
        reusable = self._config.prefix_cache and live.oldest >= self._oldest_reusable
        # Held until that has cost, at most, what computing its prefix again would (the ski rental
        # rule), and less if requests rarely have a next turn.
        steps = round(self._later_turns * live.cached / _PREFILL_SHARE)
        hold = Hold(self._steps + steps, live.request.priority)
        self._slots.park(
            live.slot,
            live.tokens,
            live.cached if reusable else 0,
            live.request.session,
            hold,
            oldest=live.oldest,
        )

    def _check_newer(self, version: int) -> None:
        self._entered()
        if version <= self._version:
            raise EngineError(
                f"weights of version {version} after version {self._version}: versions only grow"
            )

    def _die(self, error: Exception) -> EngineDeadError:
        """Mark the engine dead: all current and later requests fail with this error."""
        self._closed = f"it died of {type(error).__name__}: {error}"
        death = EngineDeadError(f"the engine died of {type(error).__name__}: {error}")
        death.__cause__ = error
        self._fail_all(death)
        return death

    def _fail_all(self, error: EngineError) -> None:
        for live in [*self._waiting, *self._running.values()]:
            if not live.future.done():
                live.future.set_exception(error)
        for _, future in self._scoring:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
        self._running.clear()
        self._scoring.clear()


__all__ = ["LocalEngine"]
