"""`JudgeEndpoint`: verdicts of a language model behind any OpenAI-compatible `/chat/completions`, over HTTP.

A verdict is an answer that fits a schema. Whatever else comes back is a failure, asked again within a budget, and at
last a `RewardError`; no verdict is ever made up.

    question ──▶ cache ──▶ a free client ──▶ pace ──▶ POST ──▶ schema ──▶ cache ──▶ verdict
                              ▲                                  │
                              └──────── pause with jitter ◀──── failure

httpx looks through all connections and all waiting requests at each step, so one client with many is slow. Here each
client has one connection and one request, and the free clients are the limit of concurrency.
"""

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrl.errors import AgentRLError, ConfigError, RewardError
from agentrl.protocols import Settings
from agentrl.rewards.judge_cache import VerdictCache, question_key
from agentrl.rewards.judge_prompt import JudgePrompt
from agentrl.rewards.judge_tally import JudgeTally, Trouble

T = TypeVar("T")
V = TypeVar("V", bound=BaseModel)
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""The server, or what stands before it, may answer when it is asked again."""
_NEVER = (401, 404)
"""The key or the address is wrong, for every question alike."""
_LONGEST_PAUSE = 30.0


class JudgeSettings(Settings):
    """Which judge, how hard it may be asked, and what it costs."""

    url: str
    """The endpoint, up to what stands before `/chat/completions`; without a path, `/v1` is meant."""
    model: str | None = None
    """Name of the judging model; the first that the endpoint lists when not given."""
    api_key_env: str | None = None
    """Environment variable that holds the bearer key. The key itself is written nowhere."""
    temperature: float | None = Field(default=0.0, ge=0)
    """Sampling temperature; null sends none, for endpoints that refuse it."""
    max_tokens: int | None = Field(default=1024, gt=0)
    """Longest answer, in tokens; null sends none. An answer that is cut is a failure."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields of each request, such as `reasoning_effort`."""
    response_format: Literal["json_schema", "json_object"] = "json_schema"
    """`json_object` is for endpoints that cannot be held to a schema; the prompt names it either way."""
    concurrency: int = Field(default=64, gt=0)
    """Requests under way at once; the others wait here."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests, retries included, are sent no denser than this, evenly spaced."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds for one request."""
    budget: float = Field(default=50.0, gt=0)
    """Seconds from the first request for a verdict to the last that may begin. `rollout.deadlines.reward`, which cuts
    all of a trajectory's (or group's) verdicts, has to be longer."""
    retries: int = Field(default=8, ge=0)
    """How often a verdict is asked for again within the budget."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before the first retry; doubled for each further one, less a random share of up to one half."""
    cache: Path | None = Path("runs/judge_cache.sqlite")
    """Where verdicts are kept, for later runs as well; null keeps them in memory."""
    prompt_price: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, in any currency."""
    completion_price: float = Field(default=0.0, ge=0)
    """Price of a million completion tokens."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("write an address such as http://localhost:8000 or https://api.openai.com/v1")
        if parts.username or parts.password or parts.query:
            raise ValueError("no secrets in the address, it is written into config.yaml: name a variable, api_key_env")
        return url


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(BaseModel):
    choices: tuple[_Choice, ...] = Field(min_length=1)
    usage: _Usage | None = None


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: tuple[_Model, ...]


class Verdict(BaseModel):
    """Base of the answers that a judge may give: these fields, of these types, and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _NoVerdictError(AgentRLError):
    """A request that gave no verdict and may be sent again, after `pause` seconds at the earliest."""

    def __init__(self, kind: Trouble, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.kind, self.pause = kind, pause


class JudgeEndpoint:
    """Asks for verdicts. An async context manager.

    Raises:
        ConfigError: on entering: there is no such environment variable or model, the key is refused, the endpoint does
            not answer within the budget, or the cache cannot be opened.
    """

    def __init__(self, config: JudgeSettings) -> None:
        self._config = config
        url = config.url.rstrip("/")
        self._url = url if urlsplit(url).path else f"{url}/v1"
        self._model = config.model or ""
        self._key = ""
        self._free: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()
        self._cache = VerdictCache(config.cache)
        self._asked_now: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._next_request = 0.0
        self._jitter = Random(config.url)
        self._open = AsyncExitStack()
        self.tally = JudgeTally(config.prompt_price / 1e6, config.completion_price / 1e6)

    async def __aenter__(self) -> Self:
        self._key = self._read_key()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # Made once: it takes as long as twenty clients.
        trusted = ssl.create_default_context() if self._url.startswith("https:") else False
        async with AsyncExitStack() as opened:
            opened.enter_context(self._cache)
            for _ in range(self._config.concurrency):
                client = httpx.AsyncClient(
                    headers=headers, verify=trusted, timeout=None, limits=httpx.Limits(max_connections=1)
                )
                self._free.put_nowait(await opened.enter_async_context(client))
            self._model = await self._ask_what_is_served()
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._free = asyncio.LifoQueue()
        await self._open.aclose()

    async def ask(self, prompt: JudgePrompt, verdict: type[V]) -> V:
        """The judge's verdict, from the cache where the same was asked before, under whatever key.

        The same question asked twice at once is sent once.

        Raises:
            RewardError: there was none within the budget, or the endpoint refuses the question.
            ConfigError: the endpoint refuses the key or the model.
        """
        schema = _schema_of(verdict)
        question = question_key(self._url, self._body(prompt.messages(schema, key="0"), schema))
        turn = self._asked_now.setdefault(question, asyncio.Lock())
        async with turn:
            if (known := self._cache.get(question)) is not None:
                with suppress(ValidationError):  # damaged: ask again
                    answer = verdict.model_validate_json(known)
                    self.tally.cached += 1
                    return answer
            answer = await self._insist(lambda client: self._judge(client, prompt, verdict))
            self._cache.put(question, answer.model_dump_json(by_alias=True))
            return answer

    async def _insist(self, once: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        """Do `once` with a free client, until it succeeds or the budget is spent, and pause between."""
        clock = asyncio.get_running_loop()
        begun: float | None = None
        for asked in count(1):
            client = await self._free.get()
            begun = clock.time() if begun is None else begun
            try:
                await self._pace()
                return await once(client)
            except _NoVerdictError as error:
                failure = error
            finally:
                self._free.put_nowait(client)
            self.tally.failures[failure.kind] += 1
            pause, spent = max(failure.pause, self._pause(asked)), clock.time() - begun
            if asked > self._config.retries or spent + pause > self._config.budget:
                raise RewardError(
                    f"the judge at {self._url} gave no verdict: asked {asked} times in {spent:.1f} s (retries="
                    f"{self._config.retries}, budget={self._config.budget:g} s), at last {failure}"
                )
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _judge(self, client: httpx.AsyncClient, prompt: JudgePrompt, verdict: type[V]) -> V:
        """What the model answers now, asked under a new key."""
        clock = asyncio.get_running_loop()
        sent = clock.time()
        schema = _schema_of(verdict)
        body = self._body(prompt.messages(schema), schema)
        answer = _parse(_Answer, await self._request(client, "POST", "/chat/completions", body))
        usage, choice = answer.usage or _Usage(), answer.choices[0]
        self.tally.answered(usage.prompt_tokens, usage.completion_tokens, clock.time() - sent)
        if choice.message.refusal:
            raise _NoVerdictError("unreadable", f"a refusal: {choice.message.refusal:.200}")
        if choice.finish_reason == "length":
            raise _NoVerdictError(
                "unreadable", f"an answer cut after {usage.completion_tokens} tokens: raise max_tokens"
            )
        return _parse(verdict, choice.message.content or "")

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> bytes:
        try:
            async with asyncio.timeout(self._config.timeout):
                response = await client.request(method, f"{self._url}{path}", json=body)
        except TimeoutError:
            raise _NoVerdictError("unreachable", f"no answer within timeout={self._config.timeout:g} s") from None
        except httpx.RequestError as error:
            raise _NoVerdictError("unreachable", f"{type(error).__name__}: {error}") from error
        if response.status_code == 200:
            return response.content
        said = f"{response.status_code}: {self._without_key(response.text)[:300]}"
        if response.status_code in _BUSY:
            raise _NoVerdictError("busy", said, _retry_after(response))
        if response.status_code in _NEVER:
            raise ConfigError(
                f"{self._url}{path} refuses the judge's key or model (api_key_env, model, url) with {said}"
            )
        raise RewardError(f"{self._url}{path} refuses the question with {said}")

    def _body(self, messages: list[dict[str, str]], schema: Mapping[str, Any]) -> dict[str, Any]:
        config = self._config
        named = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        return {
            "model": self._model,
            "messages": messages,
            "response_format": named if config.response_format == "json_schema" else {"type": "json_object"},
            **{name: value for name, value in sampling.items() if value is not None},
            **config.extra_body,
        }

    async def _ask_what_is_served(self) -> str:
        """The name of the model to ask; finds that the endpoint cannot work before anything else starts."""
        try:
            listed = await self._insist(self._list_models)
        except RewardError as error:
            raise ConfigError(str(error)) from error
        served = [model.id for model in listed.data]
        wanted = self._config.model
        if wanted is None and served:
            return served[0]
        if wanted is None or not any(name == wanted or name.endswith(f"/{wanted}") for name in served):
            raise ConfigError(f"model={wanted}, but {self._url} serves {', '.join(served[:20]) or 'none'}")
        return wanted

    async def _list_models(self, client: httpx.AsyncClient) -> _Models:
        return _parse(_Models, await self._request(client, "GET", "/models"))

    async def _pace(self) -> None:
        """Wait for this request's place in `requests_per_minute`."""
        if self._config.requests_per_minute is None:
            return
        now = asyncio.get_running_loop().time()
        mine = max(now, self._next_request)
        self._next_request = mine + 60.0 / self._config.requests_per_minute
        await asyncio.sleep(mine - now)

    def _pause(self, failures: int) -> float:
        """Seconds after the n-th failure in a row: doubled each time, and never the same for two who fail at once."""
        longest = min(self._config.backoff * 2.0 ** min(failures - 1, 20), _LONGEST_PAUSE)
        return longest * self._jitter.uniform(0.5, 1.0)

    def _read_key(self) -> str:
        variable = self._config.api_key_env
        if variable is not None and not os.environ.get(variable):
            raise ConfigError(f"the judge's api_key_env={variable}, but no such environment variable is set")
        return os.environ[variable] if variable is not None else ""

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


@cache  # making it takes longer than all else that is done for a verdict
def _schema_of(verdict: type[BaseModel]) -> Mapping[str, Any]:
    return verdict.model_json_schema()


def _parse(model: type[V], answer: bytes | str) -> V:
    try:
        return model.model_validate_json(answer)
    except ValidationError as error:
        raise _NoVerdictError(
            "unreadable", f"something that is no {model.__name__.strip('_')}: {_short(error)}"
        ) from error


def _short(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.200}"


def _retry_after(response: httpx.Response) -> float:
    """Seconds until the server wants to be asked again (RFC 9110, 10.2.3): a number of them, or a date."""
    said = response.headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(said))
    with suppress(ValueError):
        return max(0.0, (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds())
    return 0.0
