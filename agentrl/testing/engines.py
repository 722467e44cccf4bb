"""A scripted engine: the public fake behind the `Engine` seam, for tests of everything above it.

It needs no torch and no model, waits only through the running loop's clock (so it works under a virtual one), and
fails, hangs and dawdles on request.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import numpy as np

from agentrl.engines.admission import max_new_tokens
from agentrl.errors import EngineError
from agentrl.protocols import EngineStats, GenerateRequest
from agentrl.trajectory import Completion

if TYPE_CHECKING:
    from torch import Tensor

NextLogits = Callable[[Sequence[int]], Sequence[float]]
"""The whole model: token ids so far to the logits of the next one."""
Reply = Callable[[GenerateRequest], Sequence[int]]
"""What to answer to a request, as tokens."""
NextToken = Callable[[GenerateRequest, Sequence[int]], tuple[int, float]]
"""A request and what was sampled for it so far, to the next token and its logprob."""


class ScriptedEngine:
    """An `Engine` whose model is a function.

    `ScriptedEngine(next_logits)` samples from the function's logits as a real engine would: temperature, seeds, stop
    tokens, limits, versions. `ScriptedEngine.replying(reply)` answers with given tokens, each of logprob 0.

    Args:
        next_logits: The model.
        max_context: Largest prompt plus completion, in tokens.
        max_batch: Requests served at once; the others wait by (priority, arrival).
        on_weights: Called by `update_weights`; what it returns, if anything, is the model from then on.
        prefill_seconds: Seconds of loop time before a request's first token.
        seconds_per_token: Seconds of loop time for each token, asked anew for each.
        fail: The error to raise for a request instead of sampling, or None.
        hang: Whether a request never gets an answer. It keeps its place until it is cancelled.
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
    ) -> None:
        self._next_token = _sampling_from(next_logits)
        self._max_context = max_context
        self._max_batch = max_batch
        self._on_weights = on_weights
        self._prefill_seconds = prefill_seconds
        self._seconds_per_token = seconds_per_token
        self._fail = fail
        self._hang = hang
        self._version = 0
        self._entered = False
        self._live_ids: set[str] = set()
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
    ) -> Self:
        """An engine that answers `reply(request)`, followed by the request's first stop token."""
        engine = cls(
            lambda tokens: (),
            max_context=max_context,
            max_batch=max_batch,
            prefill_seconds=prefill_seconds,
            seconds_per_token=seconds_per_token,
            fail=fail,
            hang=hang,
        )
        engine._next_token = _reciting(reply)
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
        self._entered = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._entered = False
        for _, _, place in self._waiting:
            if not place.done():
                place.set_exception(EngineError("the engine was closed"))
        self._waiting.clear()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        self._check_entered()
        max_new = max_new_tokens(request, max_context=self._max_context, vocab_size=None, live_ids=self._live_ids)
        self.requests.append(request)
        self._live_ids.add(request.id)
        try:
            async with self._place(request.priority):
                return await self._answer(request, max_new)
        finally:
            self._live_ids.discard(request.id)

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.update_weights`: takes effect between two tokens."""
        self._check_entered()
        if version <= self._version:
            raise EngineError(f"weights of version {version} after version {self._version}: versions only grow")
        model = self._on_weights(weights, version) if self._on_weights else None
        if model is not None:
            self._next_token = _sampling_from(model)
        self._version = version

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        return EngineStats(self._running, len(self._waiting), self._generated, self._prefilled, 0)

    def _check_entered(self) -> None:
        if not self._entered:
            raise EngineError("the engine is not running: enter it with `async with`")

    @asynccontextmanager
    async def _place(self, priority: int) -> AsyncIterator[None]:
        """One of `max_batch` places, by (priority, arrival)."""
        if self._running < self._max_batch:
            self._running += 1
        else:
            self._arrivals += 1
            entry = (priority, self._arrivals, asyncio.get_running_loop().create_future())
            heapq.heappush(self._waiting, entry)
            try:
                await entry[2]
            except BaseException:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                    heapq.heapify(self._waiting)
                elif not entry[2].cancelled() and entry[2].exception() is None:
                    self._pass_on()  # the place was given to us in the moment we were cancelled
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Hand a place to whoever is next; it never stands free while somebody waits."""
        while self._waiting:
            _, _, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._running -= 1

    async def _answer(self, request: GenerateRequest, max_new: int) -> Completion:
        error = self._fail(request)
        if error is not None:
            raise error
        if self._hang(request):
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._prefill_seconds(request))
        self._prefilled += len(request.prompt_ids)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        while len(tokens) < max_new:
            await asyncio.sleep(self._seconds_per_token(request))
            self._check_entered()
            token, logprob = self._next_token(request, tokens)
            tokens.append(token)
            logprobs.append(logprob)
            versions.append(self._version)
            self._generated += 1
            if token in request.sampling.stop_token_ids:
                return Completion(tuple(tokens), tuple(logprobs), tuple(versions), "stop")
        return Completion(tuple(tokens), tuple(logprobs), tuple(versions), "length")


def _sampling_from(next_logits: NextLogits) -> NextToken:
    def next_token(request: GenerateRequest, sampled: Sequence[int]) -> tuple[int, float]:
        temperature = request.sampling.temperature
        logits_V = np.asarray(next_logits([*request.prompt_ids, *sampled]), dtype=np.float64) / (temperature or 1.0)
        shifted_V = logits_V - logits_V.max()
        logprobs_V = shifted_V - np.log(np.exp(shifted_V).sum())
        noise_V = np.zeros_like(logprobs_V)
        if temperature > 0:  # Gumbel-max; the noise is a function of seed and position alone
            noise_V = np.random.default_rng((request.seed & (2**64 - 1), len(sampled))).gumbel(size=len(logprobs_V))
        token = int(np.argmax(logprobs_V + noise_V))
        return token, float(logprobs_V[token])

    return next_token


def _reciting(reply: Reply) -> NextToken:
    def next_token(request: GenerateRequest, sampled: Sequence[int]) -> tuple[int, float]:
        words = (*reply(request), *request.sampling.stop_token_ids[:1])
        if len(sampled) == len(words):
            raise EngineError(f"the reply to {request.id} is used up, and the request has no stop token to end with")
        return words[len(sampled)], 0.0

    return next_token


__all__ = ["NextLogits", "Reply", "ScriptedEngine"]
