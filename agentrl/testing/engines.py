"""A scripted engine: the public fake of `Engine`, for tests of everything above it.

It needs no torch and no model, waits only by the running loop's clock (so it works under a virtual
one), and fails, hangs and slows down on request.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from agentrl.conversation.renderer import Tokenizer
from agentrl.engines.admission import check_score, max_new_tokens
from agentrl.engines.stop_texts import StopTexts
from agentrl.errors import EngineDeadError, EngineError
from agentrl.protocols import (
    Engine,
    EngineStats,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import IntArray, Ragged, floats, ints
from agentrl.trajectory import Completion, FinishReason

if TYPE_CHECKING:
    from torch import Tensor

NextLogits = Callable[[Sequence[int]], Sequence[float]]
"""The whole model: maps the token ids so far to the logits of the next one."""
Reply = Callable[[GenerateRequest], Sequence[int]]
"""Maps a request to the tokens of the answer."""
NextToken = Callable[[GenerateRequest, Sequence[int]], tuple[int, float, IntArray]]
"""Maps a request and the tokens sampled for it so far to the next token, its logprob, and the ids
that it was sampled from (none: the whole vocabulary)."""


class ScriptedEngine(Engine):
    """An `Engine` whose model is a function.

    `ScriptedEngine(next_logits)` samples from the function's logits as a real engine would:
    temperature, truncation, seeds, stop tokens and texts, limits, versions.
    `ScriptedEngine.replying(reply)` answers with given tokens, each of logprob 0.

    Args:
        next_logits: The model.
        max_context: Largest prompt plus completion, in tokens.
        max_batch: Requests served at once; the others wait by (priority, arrival).
        on_weights: Called by `update_weights`; what it returns, if anything, is the model from then
        on.
        prefill_seconds: Seconds of loop time before a request's first token.
        seconds_per_token: Seconds of loop time for each token; called for each.
        fail: The error to raise for a request instead of sampling, or None.
        tokenizer: Turns tokens into text; requests with stop texts take one.
        hang: Whether a request never gets an answer. It keeps its place until it is cancelled or
        interrupted.
        dies: Whether the engine dies of a request, with all that it works on, when that has been
        prefilled.
    """

    def __init__(
        self,
        next_logits: NextLogits,
        *,
        max_context: int = 2048,
        max_batch: int = 1_000_000,
        on_weights: Callable[[Mapping[str, "Tensor"], int], NextLogits | None] | None = None,
        prefill_seconds: Callable[[GenerateRequest], float] = lambda request: 0.0,
        seconds_per_token: Callable[[GenerateRequest], float] = lambda request: 0.0,
        fail: Callable[[GenerateRequest], Exception | None] = lambda request: None,
        hang: Callable[[GenerateRequest], bool] = lambda request: False,
        dies: Callable[[GenerateRequest], bool] = lambda request: False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._next_logits: NextLogits | None = next_logits
        self._next_token = _make_sampler(next_logits)
        self._max_context = max_context
        self._max_batch = max_batch
        self._on_weights = on_weights
        self._prefill_seconds = prefill_seconds
        self._seconds_per_token = seconds_per_token
        self._fail = fail
        self._hang = hang
        self._dies = dies
        self._tokenizer = tokenizer
        self._version = 0
        self._formats = self._images = False
        self._closed: str | None = "it was not entered (`async with`)"
        self._live: dict[str, _Live] = {}
        self._running = 0
        self._arrivals = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._generated = self._prefilled = 0
        self.requests: list[GenerateRequest] = []
        """Every request accepted so far, in order of arrival."""

    @classmethod
    def replying(
        cls,
        reply: Reply,
        *,
        max_context: int = 2048,
        max_batch: int = 1_000_000,
        prefill_seconds: Callable[[GenerateRequest], float] = lambda request: 0.0,
        seconds_per_token: Callable[[GenerateRequest], float] = lambda request: 0.0,
        fail: Callable[[GenerateRequest], Exception | None] = lambda request: None,
        hang: Callable[[GenerateRequest], bool] = lambda request: False,
        dies: Callable[[GenerateRequest], bool] = lambda request: False,
        formats: bool = False,
        images: bool = False,
    ) -> Self:
        """An engine that answers `reply(request)`, followed by the request's first stop token.

        With `formats`, requests may ask for a format, which the reply must have; with `images`,
        they may have pictures.
        """
        engine = cls(
            lambda tokens: (),
            max_context=max_context,
            max_batch=max_batch,
            prefill_seconds=prefill_seconds,
            seconds_per_token=seconds_per_token,
            fail=fail,
            hang=hang,
            dies=dies,
        )
        engine._next_logits, engine._next_token = None, _make_reciter(reply)
        engine._formats, engine._images = formats, images
        return engine

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        return self._version

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens."""
        return self._max_context

    async def __aenter__(self) -> Self:
        self._closed = None
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = "it was closed"
        self._end_all(lambda: EngineDeadError("the engine was closed"))

    async def generate(self, request: GenerateRequest) -> Completion:
        """Answer a request as scripted, one token at a time."""
        self._check_running()
        max_new = max_new_tokens(
            request,
            max_context=self._max_context,
            vocab_size=None,
            live_ids=self._live,
            formats=self._formats,
            images=self._images,
        )
        stops = None
        if request.sampling.stop:
            if self._tokenizer is None:
                raise EngineError(
                    f"{request.id} has stop texts: give the ScriptedEngine a tokenizer"
                )
            stops = StopTexts(self._tokenizer, request)
        self.requests.append(request)
        live = self._live[request.id] = _Live(request, max_new, stops)
        try:
            await self._take_place(live)
            try:
                return await self._answer(live)
            finally:
                self._give_place()
        except _InterruptedError:
            return live.completion("abort")
        finally:
            del self._live[request.id]

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the tokens of a request. Takes no time, and no place.

        Raises:
            EngineError: it answers with given tokens, so it has no logprobs.
        """
        await asyncio.sleep(0)  # others may run meanwhile, as with a real engine
        self._check_running()
        check_score(request, max_context=self._max_context, vocab_size=None)
        if self._next_logits is None:
            raise EngineError(
                "a ScriptedEngine of given replies has no logits to score tokens with"
            )
        tokens, logprobs = request.token_ids.tolist(), []
        for position in range(request.start, len(tokens)):
            logits_V = (
                np.asarray(self._next_logits(tokens[:position]), dtype=np.float64)
                / request.temperature
            )
            logprobs.append(_logprobs(logits_V)[tokens[position]])
        return Scores(floats(logprobs), self._version)

    async def interrupt(self) -> None:
        """End all requests early, also those that hang."""
        self._check_running()
        self._end_all(_InterruptedError)
        # Lets the callers, which come first in the loop's queue, get their answers.
        await asyncio.sleep(0)

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Serve another version of the weights, from between two tokens on."""
        self._check_running()
        if version <= self._version:
            raise EngineError(
                f"weights of version {version} after version {self._version}: versions only grow"
            )
        model = self._on_weights(weights, version) if self._on_weights else None
        if model is not None:
            self._next_logits, self._next_token = model, _make_sampler(model)
        self._version = version

    def stats(self) -> EngineStats:
        """The engine's present load. It has no KV cache: `kv_use` is the share of the places in
        use.
        """
        use = self._running / self._max_batch
        return EngineStats(
            self._running, len(self._waiting), self._generated, self._prefilled, 0, kv_use=use
        )

    def _check_running(self) -> None:
        if self._closed is not None:
            raise EngineDeadError(f"the engine is not running: {self._closed}")

    def _end_all(self, why: Callable[[], Exception]) -> None:
        """Raise `why()` in each live request, where it waits now or will wait next."""
        self._waiting.clear()
        for live in self._live.values():
            live.ended = why()
            if live.waits_for is not None and not live.waits_for.done():
                live.waits_for.set_exception(live.ended)

    async def _wait(self, live: "_Live", seconds: float) -> None:
        """Sleep. If the request has been ended, or is ended meanwhile, raise its error."""
        if seconds <= 0:
            await asyncio.sleep(0)
        elif live.ended is None:
            loop = asyncio.get_running_loop()
            live.waits_for = loop.create_future()
            timer = loop.call_later(seconds, _wake, live.waits_for) if seconds < math.inf else None
            try:
                await live.waits_for
            finally:
                if timer is not None:
                    timer.cancel()
        if live.ended is not None:
            raise live.ended

    async def _take_place(self, live: "_Live") -> None:
        """Wait for one of `max_batch` places, by (priority, arrival)."""
        if self._running < self._max_batch:
            self._running += 1
            return
        self._arrivals += 1
        place = live.waits_for = asyncio.get_running_loop().create_future()
        entry = (live.request.priority, self._arrivals, place)
        heapq.heappush(self._waiting, entry)
        try:
            await place
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            elif not place.cancelled() and place.exception() is None:
                self._give_place()  # we were given the place just as we were cancelled
            raise

    def _give_place(self) -> None:
        """Pass a place to the next waiting request; if there is none, free it."""
        while self._waiting:
            _, _, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._running -= 1

    async def _answer(self, live: "_Live") -> Completion:
        """Answer a request that has a place."""
        request = live.request
        error = self._fail(request)
        if error is not None:
            raise error
        if self._hang(request):
            await self._wait(live, math.inf)
        await self._wait(live, self._prefill_seconds(request))
        self._prefilled += len(request.prompt_ids)
        if self._dies(request):  # the next wait, this request's too, raises the error
            self._closed = f"it died of {request.id}"
            self._end_all(lambda: EngineDeadError(f"the engine is not running: {self._closed}"))
        while len(live.tokens) < live.max_new:
            await self._wait(live, self._seconds_per_token(request))
            token, logprob, support = self._next_token(request, live.tokens)
            live.tokens.append(token)
            live.logprobs.append(logprob)
            live.supports.append(support)
            live.versions.append(self._version)
            self._generated += 1
            if token in request.sampling.stop_token_ids or (live.stops and live.stops.ends(token)):
                return live.completion("stop")
        return live.completion("length")


@dataclass(eq=False, slots=True)
class _Live:
    """A request under way. `waits_for`: the future that it sleeps on. `ended`: the error that ends
    it.
    """

    request: GenerateRequest
    max_new: int
    stops: StopTexts | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[IntArray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    waits_for: asyncio.Future[None] | None = None
    ended: Exception | None = None

    def completion(self, finish_reason: FinishReason) -> Completion:
        support = Ragged.of(self.supports) if self.request.keep_support else None
        return Completion(
            ints(self.tokens), floats(self.logprobs), ints(self.versions), finish_reason, support
        )


class _InterruptedError(Exception):
    """The request was ended by `interrupt`."""


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


def _logprobs(logits_V: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted_V = logits_V - logits_V.max()
    logprobs_V: npt.NDArray[np.float64] = shifted_V - np.log(np.exp(shifted_V).sum())
    return logprobs_V


def _make_sampler(next_logits: NextLogits) -> NextToken:
    """A function that samples each token from the model's logits."""

    def next_token(request: GenerateRequest, sampled: Sequence[int]) -> tuple[int, float, IntArray]:
        temperature = request.sampling.temperature
        logits_V = np.asarray(
            next_logits([*request.prompt_ids.tolist(), *sampled]), dtype=np.float64
        ) / (temperature or 1.0)
        kept = (
            _truncated_ids(logits_V, request.sampling) if request.sampling.truncated else ints(())
        )
        if len(kept):
            logits_V = np.where(np.isin(np.arange(len(logits_V)), kept), logits_V, -np.inf)
        logprobs_V = _logprobs(logits_V)
        noise_V = np.zeros_like(logprobs_V)
        if temperature > 0:  # Gumbel-max; the noise is a function of seed and position alone
            noise_V = np.random.default_rng((request.seed & (2**64 - 1), len(sampled))).gumbel(
                size=len(logprobs_V)
            )
        token = int(np.argmax(logprobs_V + noise_V))
        return token, float(logprobs_V[token]), kept

    return next_token


def _truncated_ids(logits_V: npt.NDArray[np.float64], sampling: SamplingParams) -> IntArray:
    """The ids that `min_p`, `top_k` and `top_p` leave, in this order."""
    order = np.argsort(-logits_V, kind="stable")
    probabilities = np.exp(logits_V[order] - logits_V.max())
    count = int((probabilities >= sampling.min_p).sum())
    count = min(count, sampling.top_k) if sampling.top_k else count
    if sampling.top_p < 1:
        mass = np.cumsum(probabilities[:count]) / probabilities[:count].sum()
        count = int(np.searchsorted(mass, sampling.top_p)) + 1
    return ints(order[:count])


def _make_reciter(reply: Reply) -> NextToken:
    """A function that says the reply token by token, and then the first stop token."""

    def next_token(request: GenerateRequest, sampled: Sequence[int]) -> tuple[int, float, IntArray]:
        words = (*reply(request), *request.sampling.stop_token_ids[:1])
        if len(sampled) == len(words):
            raise EngineError(
                f"the reply to {request.id} is used up, and the request has no stop token to end"
                " with"
            )
        return words[len(sampled)], 0.0, ints(words[len(sampled) : len(sampled) + 1])

    return next_token


__all__ = ["NextLogits", "Reply", "ScriptedEngine"]
