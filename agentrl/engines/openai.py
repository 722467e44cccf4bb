"""A model served elsewhere: any OpenAI-compatible HTTP server that accepts and returns token ids.

This uses `POST /v1/completions` with vLLM's extensions `return_token_ids`, `stop_token_ids`,
`ignore_eos` and `priority`. Completions take no pictures, so requests that have some use vLLM's
`POST /inference/v1/generate`. The server makes tokens of the pictures itself there; its answer has
those of the whole prompt, and one with others than the request's is refused.

Start a vLLM server with these options:

- `--logprobs-mode processed_logprobs`: without it, logprobs are not those of the sampling
  distribution;
- `--generation-config vllm`: without it, the model's folder changes the sampling parameters;
- `--scheduling-policy priority`: without it, the server rejects priorities, and `priorities` must
  be false;
- `--enable-scale-out`: without it, there is no `/inference/v1/generate`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import aiohttp
import numpy as np
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import to_json

from agentrl.conversation.eyes import Eyes, seeing_family
from agentrl.engines.admission import max_new_tokens
from agentrl.errors import ConfigError, EngineDeadError, EngineError, ImagesRefusedError
from agentrl.net.credentials import secret_in
from agentrl.net.http_client import proxy_note
from agentrl.net.openai_wire import CompletionAnswer, GeneratedAnswer, ServedModels
from agentrl.placement.footprint import EngineLayout
from agentrl.protocols import Engine, EngineOffers, EngineStats, GenerateRequest
from agentrl.settings.base import NameText, Settings
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=BaseModel)
_BUSY = (429, 502, 503, 504)
"""Statuses with which the server, or a proxy in front of it, asks the client to retry later."""

_MISSING = 404


class _NotFoundError(EngineError):
    """The server has nothing at an address."""


class OpenAIEngine(Engine):
    """The `Engine` over HTTP. It serves a single version, whose number only the config can state.

    The server's model counts. Of the `model` folder that other engines load, only a model that sees
    is looked at: how its family writes pictures.
    """

    offers: ClassVar[EngineOffers] = EngineOffers(reads_images=True)

    class Config(Settings):
        """Settings of `engine=openai`."""

        url: str = Field(pattern=r"^https?://")
        """Address of the server without `/v1`, such as `http://localhost:8000`."""
        model: NameText | None = None
        """Name of the served model; by default the first one that the server lists."""
        api_key_env: NameText | None = None
        """Environment variable that holds the bearer key."""
        max_context: int | None = Field(default=None, ge=2)
        """Largest prompt plus completion, in tokens; by default the `max_model_len` that the server
        states.
        """
        connections: int = Field(default=1024, ge=1)
        """Most concurrent requests; further ones wait on this side, in order of arrival."""
        priorities: bool = True
        """Tell the server the priority of each request."""
        retries: int = Field(default=5, ge=0)
        """How many times a request is retried when the server cannot be reached or is too busy."""
        backoff: float = Field(default=0.5, gt=0)
        """Seconds before the first retry, doubled for each further one; each pause is cut by a
        random share of up to one half."""
        policy_version: int = Field(default=0, ge=0)
        """The version that all tokens are stamped with."""

        def layout(self) -> EngineLayout:
            """The model runs elsewhere."""
            return EngineLayout(here=False)

    def __init__(self, config: Config, model: Path | None = None) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._closed = "it was not entered (`async with`)"
        self._model = config.model or ""
        self._max_context = config.max_context or 0
        self._url = config.url.rstrip("/")
        self._completions = f"{self._url}/v1/completions"
        self._tokens_in = f"{self._url}/inference/v1/generate"
        self._folder = model
        self._eyes: Eyes | None = None
        self._jitter = Random(config.url)
        self._live: set[str] = set()
        self._generated = self._prefilled = self._cached = 0

    @property
    def policy_version(self) -> int:
        """The one version that is served."""
        return self._config.policy_version

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens; known once the engine is entered."""
        return self._max_context

    async def __aenter__(self) -> Self:
        headers = {"Content-Type": "application/json"}
        if (variable := self._config.api_key_env) is not None:
            if not (key := secret_in(variable)):
                raise ConfigError(
                    f"engine.api_key_env={variable}, but no such environment variable is set"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._config.connections),
            # The caller sets the overall deadline.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            await self._read_served_models(self._session)
            if self._folder is not None and seeing_family(self._folder):
                self._eyes = await asyncio.to_thread(_load_eyes, self._folder)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        session, self._session = self._session, None
        self._closed = "it was closed"
        if session is not None:
            await session.close()  # ends the requests in flight; `generate` raises the reason

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. A completion that reaches `max_context` ends with finish reason
        "length".
        """
        session = self._entered()
        if request.keep_support:
            raise EngineError(
                "engine=openai cannot say which tokens top_k, top_p and min_p left to sample from:"
                " its protocol has no place for them, so the trainer's ratio would be wrong. Leave"
                " them out in training, or write engine=vllm or engine=local; an evaluation may use"
                " them"
            )
        max_new = max_new_tokens(
            request,
            max_context=self._max_context,
            vocab_size=None,
            live_ids=self._live,
            images=self._eyes is not None,
        )
        self._live.add(request.id)
        try:
            if self._eyes is not None and request.images:
                return await self._generate_with_pictures(session, request, max_new, self._eyes)
            answer = await self._ask(
                session, "POST", self._completions, to_json(self._body(request, max_new))
            )
        finally:
            self._live.discard(request.id)
        return self._completion(_parse(CompletionAnswer, answer))

    async def _generate_with_pictures(
        self, session: aiohttp.ClientSession, request: GenerateRequest, max_new: int, eyes: Eyes
    ) -> Completion:
        """Have a prompt with pictures answered."""
        body = to_json(self._body_with_pictures(request, max_new, eyes))
        try:
            answer = _parse(
                GeneratedAnswer, await self._ask(session, "POST", self._tokens_in, body)
            )
        except _NotFoundError as error:
            raise ImagesRefusedError(
                f"{request.id} has pictures, and {self._url} has no /inference/v1/generate, which"
                " takes them with tokens: start vLLM with --enable-scale-out, or write"
                " engine=local or engine=vllm"
            ) from error
        if (read := answer.prompt_token_ids) != (sent := tuple(request.prompt_ids.tolist())):
            raise EngineError(
                f"{self._url} has made {len(read)} tokens of the prompt of {request.id} with"
                f" {len(request.images)} pictures, and the model's own image processor"
                f" {len(sent)}{_first_difference(read, sent)}: serve the folder that this run reads"
                " (model), with its processor_config.json"
            )
        return self._completion(answer)

    async def interrupt(self) -> None:
        """Not possible: only the server has the tokens of an unfinished request.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "engine=openai cannot be interrupted: only the server has the tokens of unfinished"
            " requests"
        )

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Not possible: the server owns its weights.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            f"engine=openai cannot take new weights: {self._config.url} always serves version"
            f" {self.policy_version}. Train with engine=vllm or engine=local, and use engine=openai"
            " to evaluate"
        )

    def stats(self) -> EngineStats:
        """The client's view: `running` are the requests that have a connection, `waiting` those
        that wait for one.
        """
        running = min(len(self._live), self._config.connections)
        return EngineStats(
            running, len(self._live) - running, self._generated, self._prefilled, self._cached
        )

    def _entered(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineDeadError(f"the engine is not running: {self._closed}")
        return self._session

    async def _read_served_models(self, session: aiohttp.ClientSession) -> None:
        listed = _parse(
            ServedModels, await self._ask(session, "GET", f"{self._url}/v1/models")
        ).data
        names = [model.id for model in listed]
        if not names:
            raise ConfigError(f"{self._config.url} serves no model")
        self._model = self._config.model or names[0]
        if self._model not in names:
            raise ConfigError(
                f"engine.model={self._model}, but {self._config.url} serves {', '.join(names)}"
            )
        served = listed[names.index(self._model)].max_model_len
        self._max_context = self._config.max_context or served or 0
        if self._max_context == 0:
            raise ConfigError(
                f"{self._config.url} does not state its max_model_len: set engine.max_context"
            )
        if served is not None and served < self._max_context:
            raise ConfigError(
                f"engine.max_context={self._max_context}, but {self._model} is served with {served}"
            )

    def _body(self, request: GenerateRequest, max_new: int) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": max_new,
            "temperature": sampling.temperature,
            "stop_token_ids": sampling.stop_token_ids,
            **_sampling_options(sampling),
            "seed": request.seed & (2**63 - 1),
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # saves the server from decoding them to text
            "ignore_eos": True,  # only the request's stop tokens end it
            "add_special_tokens": False,
        }
        if request.priority and self._config.priorities:
            body["priority"] = request.priority
        if request.session:
            body["session_id"] = request.session
        return body

    def _body_with_pictures(
        self, request: GenerateRequest, max_new: int, eyes: Eyes
    ) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "token_ids": eyes.asked_for(request.prompt_ids, request.images),
            "content_parts": [
                {"type": "image_url", "url": placed.image.address} for placed in request.images
            ],
            "sampling_params": {
                "max_tokens": max_new,
                "temperature": sampling.temperature,
                "stop_token_ids": sampling.stop_token_ids,
                **_sampling_options(sampling),
                "seed": request.seed & (2**63 - 1),
                "logprobs": 0,
                "ignore_eos": True,
                "detokenize": bool(sampling.stop),
            },
            "return_token_ids": True,
        }
        if request.priority and self._config.priorities:
            body["priority"] = request.priority
        return body

    def _completion(self, parsed: CompletionAnswer | GeneratedAnswer) -> Completion:
        choice, usage = parsed.choices[0], parsed.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        self._generated += len(choice.token_ids)
        self._cached += cached
        self._prefilled += usage.prompt_tokens - cached
        versions = ints(np.full(len(choice.token_ids), self.policy_version))
        return Completion(
            ints(choice.token_ids),
            floats(choice.logprobs.of_tokens),
            versions,
            choice.finish_reason,
        )

    async def _ask(
        self, session: aiohttp.ClientSession, method: str, url: str, body: bytes | None = None
    ) -> bytes:
        """The server's answer. Retries while the server is unreachable or busy.

        A dropped connection is retried too: the request is then sampled twice, with the same seed.
        """
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(
                    self._config.backoff * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.0)
                )
                self._entered()
            try:
                async with session.request(method, url, data=body) as response:
                    answer, status = await response.read(), response.status
            except aiohttp.ClientError as error:
                self._entered()
                trouble = f"{type(error).__name__}: {error}{proxy_note(url, used=False)}"
                continue
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    # Nobody cancelled this task: closing the session cancels requests that wait for
                    # a connection.
                    self._entered()
                raise
            if status == 200:
                return answer
            trouble = f"{status}: {answer.decode(errors='replace')[:500]}"
            if status == _MISSING:
                raise _NotFoundError(f"{url} refused the request with {trouble}")
            if status not in _BUSY:
                raise EngineError(f"{url} refused the request with {trouble}")
        raise EngineDeadError(
            f"{url} failed {self._config.retries + 1} times, the last time with {trouble}"
        )


def _load_eyes(folder: Path) -> Eyes | None:
    """How the family of a model writes pictures."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Eyes.of_model(folder, tokenizer)


def _first_difference(read: Sequence[int], sent: Sequence[int]) -> str:
    """Where the tokens of two prompts of the same length differ first."""
    if len(read) != len(sent):
        return ""
    place = int(np.argmax(np.asarray(read) != np.asarray(sent)))
    return f", which first differ at {place}: {read[place]} and {sent[place]}"


def _sampling_options(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling options that differ from the defaults: not every server knows all of them."""
    body: dict[str, Any] = {
        name: getattr(sampling, name)
        for name, default in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
        if getattr(sampling, name) != default
    }
    if sampling.stop:
        body |= {"stop": sampling.stop, "include_stop_str_in_output": True}
    return body


def _parse(kind: type[T], answer: bytes) -> T:
    try:
        return kind.model_validate_json(answer)
    except ValidationError as error:
        raise EngineError(
            "the server's answer is not as expected (returning token ids takes a recent vLLM):"
            f" {error}"
        ) from error


__all__ = ["OpenAIEngine"]
