"""An engine that takes time but computes nothing: slots, a batch that slows down as it grows, a KV
cache, versions.

All running requests advance together on one *token clock*. For each second of the event loop, it
advances by

    1 / (1 + slowdown * max(0, running - knee) / knee)        seconds.

On that clock, a request needs `prefill_seconds_per_token` for each prompt token that is not cached,
and then `seconds_per_token` for each token it samples. So the only events are arrivals, ends,
updates and a full KV cache. There are no events per token, and a single timer serves all requests.
The clock gives what a request has sampled by now.
"""

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np

from agentrl.engines.admission import effective_kv_on_update, max_new_tokens
from agentrl.engines.kv_chains import goes_on
from agentrl.errors import EngineDeadError, EngineError
from agentrl.protocols import Engine, EngineStats, GenerateRequest
from agentrl.simulate.config import SimulatedEngineConfig
from agentrl.simulate.latency import Latency
from agentrl.tokens.arrays import floats
from agentrl.trajectory import Completion, FinishReason

if TYPE_CHECKING:
    from torch import Tensor

LengthOf = Callable[[GenerateRequest], int]
"""The number of tokens in the answer to a request, including the stop token."""

FILLER, END = 1, 0
"""The token that answers consist of, and their last token if the request names no stop token."""

_EARLY = 1e-5
"""Seconds. A timer may fire early, by the clock's resolution, and must still handle what is due."""
_POPULATION = 1 << 14
"""Answer lengths drawn in advance: seeding a generator per request would cost more than the rest.
"""
_SESSIONS = 1 << 16
"""Finished sessions whose prefix is remembered when the cache has no limit, to bound memory."""


@dataclass(slots=True, eq=False)
class _Live:
    """One live request. `origin` is the time of its token number 0 on the token clock."""

    request: GenerateRequest
    prompt: int
    wanted: int  # tokens of the answer without the limit `max_tokens`
    length: int
    reason: FinishReason
    arrival: int
    done: "asyncio.Future[Completion]"
    state: Literal["waiting", "running", "lost", "ended"] = "waiting"
    origin: float = 0.0
    finish: float = 0.0
    made: int = 0  # tokens sampled up to the last update or preemption
    kv_version: int = 0  # the oldest that its KV is of
    compared: int = 0  # tokens whose version has been compared with that
    # (tokens sampled by then, version of the last ones).
    splits: list[tuple[int, int]] = field(default_factory=list)

    @property
    def urgency(self) -> tuple[int, int]:
        return self.request.priority, self.arrival


class _Cached(NamedTuple):
    """The KV that a session has left in the cache: so many tokens, none older than the version."""

    tokens: int
    version: int


class SimulatedEngine(Engine):
    """An `Engine` on any loop's clock, cheap enough for millions of requests.

    Ends, interruptions, updates and cancellations take effect immediately; a token that is due at
    the moment of an update is sampled before it. A finished request leaves its KV for the next one
    of its session, until the space is needed (least recently used first) or the weights change
    (with `kv_on_update: reuse`, until they have changed too often).

    Args:
        config: The settings.
        length_of: The length of each answer; by default drawn from `answer_tokens` by the request's
            seed. So an episode that is played again, or under another scheduler, gets the same
            lengths.
    """

    def __init__(
        self, config: SimulatedEngineConfig | None = None, length_of: LengthOf | None = None
    ) -> None:
        self._config = config or SimulatedEngineConfig()
        self._length_of = length_of or _draw_by_seed(self._config)
        self._kv_on_update = effective_kv_on_update(
            self._config.kv_on_update, self._config.kv_max_staleness
        )
        self._instant = (
            self._config.seconds_per_token == self._config.prefill_seconds_per_token == 0
        )
        self._version = 0
        self._clock = 0.0  # the token clock, as of `_at`
        self._at = 0.0
        self._rate = 1.0
        self._arrivals = 0
        self._live: dict[str, _Live] = {}
        self._resumed: dict[str, int] = {}  # tokens left of interrupted requests
        self._running: dict[_Live, None] = {}
        self._num_waiting = 0
        # Two heaps. Entries of requests that have ended stay until they come to the top.
        self._waiting: list[tuple[int, int, _Live]] = []
        self._finishing: list[tuple[float, int, _Live]] = []
        # Sums over running requests, which give their KV without a loop: see `_held`.
        self._prompts = 0
        self._origins = 0.0
        self._cached: OrderedDict[str, _Cached] = OrderedDict()
        self._cached_sum = 0
        self._timer: asyncio.TimerHandle | None = None
        self._troubles: list[asyncio.TimerHandle] = []
        self._state: Literal["new", "alive", "asleep", "hung", "dead"] = "new"
        self._generated = self._prefilled = self._from_cache = self._preemptions = 0
        self._over_older_kv = 0
        self._slot_seconds = 0.0
        self.cancelled_tokens = 0
        """Tokens sampled for requests that were cancelled, or that died with the engine: in no
        completion.
        """

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        return self._version

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens."""
        return self._config.max_context

    @property
    def slot_seconds(self) -> float:
        """Seconds that slots were occupied so far, summed over slots. Divided by `slots` times
        time: utilisation.
        """
        self._advance()
        return self._slot_seconds

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._state = "alive"
        for when, happen in (
            (self._config.hangs_at, self._hang),
            (self._config.dies_at, self._die),
        ):
            if when is not None:
                self._troubles.append(self._loop.call_at(when, happen))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for timer in self._troubles:
            timer.cancel()
        self._die()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        self._check_alive()
        max_new = max_new_tokens(
            request, max_context=self.max_context, vocab_size=None, live_ids=self._live
        )
        length = self._resumed.pop(request.id, 0) or max(1, self._length_of(request))
        reason: FinishReason = "stop" if length <= max_new else "length"
        lost = self._config.lost > 0 and Random(request.seed).random() < self._config.lost
        if self._instant and self._state == "alive" and not lost:
            self._generated += (tokens := min(length, max_new))
            self._prefilled += len(request.prompt_ids)
            return _constant(tokens, _last_token(request, reason), self._version, reason)
        self._arrivals += 1
        live = _Live(
            request,
            len(request.prompt_ids),
            length,
            min(length, max_new),
            reason,
            self._arrivals,
            self._loop.create_future(),
        )
        self._live[request.id] = live
        if lost:
            live.state = "lost"
        else:
            self._queue(live)
            if len(self._running) < self._config.slots:
                self._settle()
        try:
            return await live.done
        except asyncio.CancelledError:
            self._withdraw(live)
            raise
        finally:
            del self._live[request.id]

    async def interrupt(self) -> None:
        """See `Engine.interrupt`. A request that is sent again under its id gets the rest of its
        answer.
        """
        await self._reach()
        self._settle()
        for live in self._live.values():
            if live.state != "ended":
                made = self._made(live)
                self._resumed[live.request.id] = live.wanted - made
                self._end(live, made, "abort")
        self._settle()
        # The callers, which are ahead of us in the loop's queue, take their answers.
        await asyncio.sleep(0)

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.update_weights`: takes effect at once; `weights` is ignored."""
        await self._reach()
        if version <= self._version:
            raise EngineError(
                f"weights of version {version} after version {self._version}: versions only grow"
            )
        self._settle()
        for live in self._live.values():
            made = self._made(live)
            if made and live.state != "ended":
                self._compare_with_kv(live, made)
                live.splits.append((made, self._version))
                live.made = made
        self._version = version
        oldest = self._oldest_reusable
        for session in [name for name, kept in self._cached.items() if kept.version < oldest]:
            self._cached_sum -= self._cached.pop(session).tokens
        if self._kv_on_update != "keep" and self._state != "asleep":
            self._recompute(oldest)
            self._settle()

    @property
    def _oldest_reusable(self) -> int:
        """The oldest version whose KV a later turn may use."""
        reuses = self._kv_on_update == "reuse"
        return self._version - (self._config.kv_max_staleness if reuses else 0)

    async def sleep(self) -> None:
        """See `Engine.sleep`: the token clock stops."""
        await self._reach()
        self._settle()
        self._state, self._rate = "asleep", 0.0
        self._arm()

    async def wake(self) -> None:
        """See `Engine.sleep`: all KV is lost."""
        await self._reach()
        self._advance()
        self._state = "alive"
        self._cached.clear()
        self._cached_sum = 0
        self._recompute(self._version + 1)
        self._settle()

    def stats(self) -> EngineStats:
        """The engine's present state. A prefill is counted when it begins."""
        self._advance()
        capacity = self._config.kv_tokens
        return EngineStats(
            running=len(self._running),
            waiting=self._num_waiting,
            generated_tokens=self._generated
            + sum(self._made(live) for live in self._live.values()),
            prefilled_tokens=self._prefilled,
            cached_tokens=self._from_cache,
            kv_use=min(1.0, max(0.0, self._held() / capacity)) if capacity else 0.0,
            preemptions=self._preemptions,
            older_kv_tokens=self._over_older_kv
            + sum(
                self._made(live) - live.compared
                for live in self._running
                if live.kv_version < self._version
            ),
            kv_tokens=capacity or 0,
        )

    def _check_alive(self) -> None:
        if self._state in ("new", "dead"):
            raise EngineDeadError(
                "the engine is not running: enter it with `async with`, or it died as configured"
            )

    async def _reach(self) -> None:
        self._check_alive()
        if self._state == "hung":
            await self._loop.create_future()

    # Time: the token clock is advanced to now before every decision, and a single timer is set for
    # the next event.

    def _advance(self) -> None:
        if self._state in ("new", "dead"):
            return
        now = self._loop.time()
        self._clock += (now - self._at) * self._rate
        self._slot_seconds += (now - self._at) * len(self._running)
        self._at = now

    def _settle(self) -> None:
        """Handle everything that is due now, fill free slots, and set the timer."""
        self._advance()
        while self._finishing and self._finishing[0][0] <= self._clock + _EARLY:
            live = heapq.heappop(self._finishing)[2]
            if live.state == "running":
                self._end(live, live.length, live.reason)
        while self._overflow_at() <= self._clock + _EARLY and len(self._running) > 1:
            self._preempt(max(self._running, key=lambda live: live.urgency))
        self._fill()
        self._arm()

    def _arm(self) -> None:
        """Set the speed of the token clock, and the timer for its next event."""
        config = self._config
        if not self._running or self._state != "alive":
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        crowd = max(0, len(self._running) - config.knee) / config.knee
        self._rate = 1.0 / (1.0 + config.slowdown * crowd)
        due = self._finishing[0][0]
        if config.kv_tokens is not None and len(self._running) > 1:
            due = min(due, self._overflow_at())
        when = self._at + (due - self._clock) / self._rate
        # A timer that fires too early sets a new one; that is cheaper than setting it again at each
        # change.
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._settle()

    def _hang(self) -> None:
        self._settle()
        self._rate = 0.0
        self._state = "hung"
        self._arm()

    def _die(self) -> None:
        self._advance()
        self._state = "dead"
        for live in self._live.values():
            if live.state == "ended":
                continue
            self._leave(live, self._made(live))
            # Else it was cancelled at this moment, and `_withdraw` will count it.
            if not live.done.done():
                self.cancelled_tokens += live.made
                live.done.set_exception(EngineDeadError("the engine died, or was closed"))
        if self._timer is not None:
            self._timer.cancel()

    # The life of a request: queued, started, perhaps preempted and queued again, ended.

    def _queue(self, live: _Live) -> None:
        live.state = "waiting"
        self._num_waiting += 1
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if entry[2].state == "waiting"]
            heapq.heapify(self._waiting)
        heapq.heappush(self._waiting, (*live.urgency, live))

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._config.slots and self._state == "alive":
            live = self._waiting[0][2]
            if live.state == "waiting":
                if not self._fits(live):
                    return
                self._start(live)
            heapq.heappop(self._waiting)

    def _start(self, live: _Live) -> None:
        config = self._config
        self._num_waiting -= 1
        live.kv_version = self._version
        cached = self._take_cached(live)
        context = live.prompt + live.made
        self._from_cache += cached
        self._prefilled += context - cached
        live.state = "running"
        prefilled = self._clock + (context - cached) * config.prefill_seconds_per_token
        live.origin = prefilled - live.made * config.seconds_per_token
        self._running[live] = None
        self._prompts += live.prompt
        self._origins += live.origin
        live.finish = live.origin + live.length * config.seconds_per_token
        if len(self._finishing) > 2 * len(self._running) + 64:
            self._sort_by_finish()
        heapq.heappush(self._finishing, (live.finish, live.arrival, live))

    def _preempt(self, live: _Live) -> None:
        self._preemptions += 1
        live.made = self._made(live)
        self._compare_with_kv(live, live.made)
        self._stop(live)
        self._queue(live)
        self._sort_by_finish()  # removes its entry: it will get a new one

    def _end(self, live: _Live, tokens: int, reason: FinishReason) -> None:
        """Answer a request with the tokens it has."""
        was_running = live.state == "running"
        self._leave(live, tokens)
        if was_running:
            self._keep_cached(live, tokens)
        if live.done.done():
            return  # it was cancelled at this moment, and `_withdraw` will count it
        last = _last_token(live.request, reason)
        if not live.splits:
            completion = _constant(tokens, last, self._version, reason)
        else:
            completion = _with_versions(
                tokens, last, (*live.splits, (tokens, self._version)), reason
            )
        live.done.set_result(completion)

    def _withdraw(self, live: _Live) -> None:
        """Remove a request whose caller was cancelled. If it ended at the same moment, its answer
        was lost.
        """
        if live.state == "ended":
            if live.done.cancelled() or live.done.exception() is None:
                self.cancelled_tokens += live.made
            return
        self._advance()
        made = self._made(live)
        self.cancelled_tokens += made
        self._leave(live, made)
        self._settle()

    def _leave(self, live: _Live, tokens: int) -> None:
        if live.state == "running":
            self._stop(live)
        elif live.state == "waiting":
            self._num_waiting -= 1
        self._compare_with_kv(live, tokens)
        live.state = "ended"
        live.made = tokens
        self._generated += tokens

    def _stop(self, live: _Live) -> None:
        # Before its KV is subtracted: evictions that were due while it held the space are made up.
        self._evict()
        del self._running[live]
        self._prompts -= live.prompt
        self._origins = self._origins - live.origin if self._running else 0.0

    def _made(self, live: _Live) -> int:
        """Tokens that a request has sampled by now; 0 if it has ended, as its tokens are counted
        already.
        """
        if live.state == "ended":
            return 0
        if live.state != "running":
            return live.made
        passed = self._clock - live.origin + _EARLY
        if self._config.seconds_per_token == 0:
            return live.length if passed >= 0 else live.made
        return min(live.length, max(live.made, int(passed / self._config.seconds_per_token)))

    def _compare_with_kv(self, live: _Live, made: int) -> None:
        """Count the tokens since the last call if they were sampled over older KV."""
        if live.kv_version < self._version:
            self._over_older_kv += made - live.compared
        live.compared = made

    def _sort_by_finish(self) -> None:
        self._finishing = [(live.finish, live.arrival, live) for live in self._running]
        heapq.heapify(self._finishing)

    # The KV cache. A running request holds its prompt and its sampled tokens; during its prefill,
    # it holds less, by the tokens that could be sampled in the rest of the prefill. So the sum
    # grows linearly and is known without a loop.

    def _held(self) -> float:
        if not self._running or self._config.seconds_per_token == 0:
            return float(self._prompts)
        return (
            self._prompts
            + (len(self._running) * self._clock - self._origins) / self._config.seconds_per_token
        )

    def _overflow_at(self) -> float:
        """The time on the token clock at which the running requests will fill the cache."""
        capacity = self._config.kv_tokens
        if capacity is None or not self._running:
            return float("inf")
        return ((capacity - self._prompts) * self._config.seconds_per_token + self._origins) / len(
            self._running
        )

    def _fits(self, live: _Live) -> bool:
        """True if there is room for the request and one more token per request: else it would be
        preempted at once.
        """
        capacity = self._config.kv_tokens
        if capacity is None or not self._running:
            return True
        return self._held() + live.prompt + live.made + len(self._running) + 1 <= capacity

    def _take_cached(self, live: _Live) -> int:
        """Tokens of its context that the session left in the cache. From now on, that part belongs
        to the request.
        """
        session = live.request.session
        if not session or session not in self._cached:
            return 0
        self._evict()
        kept = self._cached.pop(session, _Cached(0, self._version))
        self._cached_sum -= kept.tokens
        if kept.version < self._version and not goes_on(live.request):
            return 0
        live.kv_version = kept.version
        # The last token of a prompt is computed: its output is the next token.
        return min(kept.tokens, live.prompt - 1)

    def _keep_cached(self, live: _Live, tokens: int) -> None:
        session = live.request.session
        if not session or live.kv_version < self._oldest_reusable:
            return
        before = self._cached.pop(session, None)
        self._cached_sum += live.prompt + tokens - (before.tokens if before else 0)
        self._cached[session] = _Cached(live.prompt + tokens, live.kv_version)
        self._evict()

    def _evict(self) -> None:
        capacity = self._config.kv_tokens
        while self._cached and (
            len(self._cached) > _SESSIONS
            or (capacity is not None and self._held() + self._cached_sum > capacity)
        ):
            self._cached_sum -= self._cached.popitem(last=False)[1].tokens

    def _recompute(self, before: int) -> None:
        """Drop the KV of running requests that is of an older version than `before`; each continues
        from the same token when its KV is computed again.
        """
        config = self._config
        for live in self._running:
            if live.kv_version >= before:
                continue
            context = live.prompt + live.made
            sampled = live.made * config.seconds_per_token
            ready = (
                min(live.origin + sampled, self._clock) + context * config.prefill_seconds_per_token
            )
            self._compare_with_kv(live, self._made(live))
            self._origins += ready - sampled - live.origin
            live.origin = ready - sampled
            live.finish = live.origin + live.length * config.seconds_per_token
            live.kv_version = self._version
            self._prefilled += context
        self._sort_by_finish()


def _draw_by_seed(config: SimulatedEngineConfig) -> LengthOf:
    lengths = _population(config.answer_tokens, config.seed)
    return lambda request: lengths[request.seed % _POPULATION]


@lru_cache(maxsize=64)
def _population(answer_tokens: Latency, seed: int) -> list[int]:
    rng = Random(seed)
    return [max(1, round(answer_tokens.sample(rng))) for _ in range(_POPULATION)]


def _last_token(request: GenerateRequest, reason: FinishReason) -> int:
    if reason != "stop":
        return FILLER
    stop = request.sampling.stop_token_ids
    return stop[0] if stop else END


@lru_cache(maxsize=1024)
def _constant(tokens: int, last: int, version: int, reason: FinishReason) -> Completion:
    """A cached completion: most are equal, and because they are frozen, they can be shared."""
    return _with_versions(tokens, last, ((tokens, version),), reason)


def _with_versions(
    tokens: int, last: int, splits: tuple[tuple[int, int], ...], reason: FinishReason
) -> Completion:
    """A completion whose tokens up to each split have the split's version."""
    token_ids, versions = np.full(tokens, FILLER, np.int32), np.empty(tokens, np.int32)
    token_ids[-1:] = last
    begin = 0
    for upto, version in splits:
        versions[begin:upto] = version
        begin = upto
    return Completion(token_ids, floats(np.zeros(tokens)), versions, reason)


__all__ = ["END", "FILLER", "LengthOf", "SimulatedEngine"]
