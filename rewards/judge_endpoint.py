"""`JudgeEndpoint`: verdicts of a language model behind any OpenAI-compatible `/chat/completions`,
over HTTP.

A verdict is an answer that fits a schema. Everything else is a failure: it is retried within a
budget and ends as a `RewardError`. No verdict is ever made up.

    question ──▶ cache ──▶ a slot ──▶ pace ──▶ POST ──▶ schema ──▶ cache ──▶ verdict
                              ▲                           │
                              └──── pause with jitter ◀── failure
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from itertools import count
from random import Random
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.errors import AgentRLError, ConfigError, RewardError
from agentrl.net.credentials import secret_in
from agentrl.net.http_client import http_client, proxy_note
from agentrl.net.openai_wire import ChatAnswer, ServedModels
from agentrl.rewards.judge_cache import VerdictCache, question_key
from agentrl.rewards.judge_prompt import JudgePrompt
from agentrl.rewards.judge_settings import JudgeSettings
from agentrl.rewards.judge_tally import JudgeTally, Trouble

T = TypeVar("T")
V = TypeVar("V", bound=BaseModel)
LARGEST_ANSWER = 8 << 20
"""Most bytes of an answer; a longer one is not read to its end."""
_BUSY_CODES = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""The server, or what stands before it, may answer when it is asked again."""
_NEVER_CODES = (401, 404)
"""The key or the address is wrong, for every question alike."""
_LONGEST_PAUSE = 30.0


class Verdict(BaseModel):
    """Base of the answers that a judge may give: these fields, of these types, and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _NoVerdictError(AgentRLError):
    """A request without a verdict that may be retried after at least `pause` seconds."""

    def __init__(self, kind: Trouble, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.kind, self.pause = kind, pause


class _NoListError(AgentRLError):
    """The endpoint does not say what it serves."""


class JudgeEndpoint:
    """Asks for verdicts. An async context manager.

    `client` sends the requests; its owner closes it. Without one, the endpoint has a client of its
    own.

    Raises:
        ConfigError: on entering: there is no such environment variable or model, the key is
            refused, the endpoint does not answer within the budget, or the cache cannot be opened.
    """

    def __init__(self, config: JudgeSettings, client: httpx.AsyncClient | None = None) -> None:
        self._config = config
        url = config.url.rstrip("/")
        self._url = url if urlsplit(url).path else f"{url}/v1"
        self._model = config.model or ""
        self._key = ""
        self._places = asyncio.Semaphore(config.concurrency)
        self._given_client = client
        self._client: httpx.AsyncClient | None = None
        self._cache = VerdictCache(config.cache)
        self._asked_now: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._next_request = 0.0
        self._has_answered = False
        self._jitter = Random(config.url)
        self._open = AsyncExitStack()
        self.tally = JudgeTally(config.prompt_price / 1e6, config.completion_price / 1e6)

    async def __aenter__(self) -> Self:
        self._key = self._read_key()
        async with AsyncExitStack() as opened:
            self._client = self._given_client or await opened.enter_async_context(http_client())
            opened.enter_context(self._cache)
            self._model = await self._find_model()
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    async def ask(self, prompt: JudgePrompt, verdict: type[V]) -> V:
        """The judge's verdict, from the cache where the same was asked before, under whatever key.

        The same question asked twice at once is sent once.

        Raises:
            RewardError: there was none within the budget, or the endpoint refuses the question.
            ConfigError: the endpoint refuses the key or the model.
        """
        schema = _schema_of(verdict)
        # With a fixed key in the place of the random one, or no question would be asked twice.
        question = question_key(self._url, self._body(prompt.messages(schema, key="0"), schema))
        turn = self._asked_now.setdefault(question, asyncio.Lock())
        async with turn:
            if (known := self._cache.get(question)) is not None:
                with suppress(ValidationError):  # damaged: ask again
                    answer = verdict.model_validate_json(known)
                    self.tally.cached += 1
                    return answer
            answer = await self._retry(lambda: self._ask_anew(prompt, verdict))
            self._cache.put(question, answer.model_dump_json(by_alias=True))
            return answer

    async def _retry(self, once: Callable[[], Awaitable[T]]) -> T:
        """Do `once`, in a place, until it succeeds or the budget is spent, and pause between."""
        clock = asyncio.get_running_loop()
        begun: float | None = None
        for asked in count(1):
            async with self._places:
                # The wait for the first place is not in the budget: other questions cause it.
                begun = clock.time() if begun is None else begun
                try:
                    await self._wait_for_turn()
                    return await once()
                except _NoVerdictError as error:
                    failure = error
            self.tally.failures[failure.kind] += 1
            pause, spent = max(failure.pause, self._next_pause(asked)), clock.time() - begun
            if asked > self._config.retries or spent + pause > self._config.budget:
                raise RewardError(
                    f"the judge at {self._url} gave no verdict: asked {asked} times in {spent:.1f}"
                    f" s (retries={self._config.retries}, budget={self._config.budget:g} s), at"
                    f" last {failure}"
                )
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _ask_anew(self, prompt: JudgePrompt, verdict: type[V]) -> V:
        """The model's answer to a new request, under a new key."""
        clock = asyncio.get_running_loop()
        sent = clock.time()
        schema = _schema_of(verdict)
        body = self._body(prompt.messages(schema), schema)
        answer = _parse(ChatAnswer, await self._send("POST", "/chat/completions", body))
        self._has_answered = True
        usage, choice = answer.usage, answer.choices[0]
        self.tally.count_answer(usage.prompt_tokens, usage.completion_tokens, clock.time() - sent)
        if choice.message.refusal:
            raise _NoVerdictError("unreadable", f"a refusal: {choice.message.refusal:.200}")
        if choice.finish_reason == "content_filter":
            raise _NoVerdictError("unreadable", "an answer that the endpoint's filter has changed")
        if choice.finish_reason == "length":
            raise _NoVerdictError(
                "unreadable",
                f"an answer cut after {usage.completion_tokens} tokens: raise max_tokens",
            )
        content = choice.message.content or ""
        # Readers of JSON keep the last of two values, and the judge may have meant the first.
        if (key := _repeated_key(content)) is not None:
            raise _NoVerdictError(
                "unreadable", f"two values of {key!r:.80}, of which either could be meant"
            )
        return _parse(verdict, content)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The endpoint's body with status 200; all other answers are failures of three kinds."""
        if self._client is None:
            raise ConfigError("the judge is not running: use it inside `async with judge:`")
        url = f"{self._url}{path}"
        # ASCII: half of a surrogate pair is no UTF-8.
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with asyncio.timeout(self._config.timeout):
                async with self._client.stream(
                    method,
                    url,
                    content=content,
                    headers=headers,
                    follow_redirects=False,
                    timeout=None,
                ) as response:
                    answer = await _read_body(response)
        except TimeoutError:
            raise _NoVerdictError(
                "unreachable", f"no answer within timeout={self._config.timeout:g} s"
            ) from None
        except httpx.HTTPError as error:
            why = f"{error or type(error).__name__}{proxy_note(url, used=True)}"
            raise _NoVerdictError("unreachable", why) from error
        if response.status_code == 200:
            return answer
        # Some servers repeat the key that they refuse, and errors go into logs.
        said = answer.decode(errors="replace")
        said = said.replace(self._key, "***") if self._key else said
        detail = f"{response.status_code}: {said[:300]}"
        if response.status_code in _BUSY_CODES:
            raise _NoVerdictError(
                "busy", detail, _retry_after(response.headers.get("Retry-After", ""))
            )
        if response.status_code == 404 and method == "GET":
            raise _NoListError(f"{url}: {detail}")
        # It has answered before, so it is being restarted.
        if response.status_code == 404 and self._has_answered:
            raise _NoVerdictError("unreachable", detail)
        if response.status_code in _NEVER_CODES:
            raise ConfigError(
                f"{url} refuses the judge's key or model (api_key_env, model, url) with {detail}"
            )
        raise RewardError(f"{url} refuses the question with {detail}")

    def _body(self, messages: list[dict[str, str]], schema: Mapping[str, Any]) -> dict[str, Any]:
        config = self._config
        named = {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": schema},
        }
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        return {
            "model": self._model,
            "messages": messages,
            "response_format": (
                named if config.response_format == "json_schema" else {"type": "json_object"}
            ),
            **{name: value for name, value in sampling.items() if value is not None},
            **config.extra_body,
        }

    async def _find_model(self) -> str:
        """The name of the model to ask; finds that the endpoint cannot work before anything else
        starts.
        """
        wanted = self._config.model

        async def list_models() -> ServedModels:
            return _parse(ServedModels, await self._send("GET", "/models"))

        try:
            listed = await self._retry(list_models)
        except _NoListError as error:
            if wanted is None:
                raise ConfigError(
                    f"{error}; where an endpoint has no list of models, name one with `model`"
                ) from error
            return wanted
        except RewardError as error:
            raise ConfigError(str(error)) from error
        served = [model.id for model in listed.data]
        if wanted is None and served:
            return served[0]
        if wanted is None or not any(
            name == wanted or name.endswith(f"/{wanted}") for name in served
        ):
            raise ConfigError(
                f"model={wanted}, but {self._url} serves {', '.join(served[:20]) or 'none'}"
            )
        return wanted

    async def _wait_for_turn(self) -> None:
        """Wait for this request's place in `requests_per_minute`."""
        if self._config.requests_per_minute is None:
            return
        now = asyncio.get_running_loop().time()
        mine = max(now, self._next_request)
        self._next_request = mine + 60.0 / self._config.requests_per_minute
        await asyncio.sleep(mine - now)

    def _next_pause(self, failures: int) -> float:
        """Seconds after the n-th failure in a row: doubled each time, and never the same for two
        who fail at once.
        """
        longest = min(self._config.backoff * 2.0 ** min(failures - 1, 20), _LONGEST_PAUSE)
        return longest * self._jitter.uniform(0.5, 1.0)

    def _read_key(self) -> str:
        """The API key; empty if there is none to send."""
        variable = self._config.api_key_env
        if variable is None:
            return ""
        if not (key := secret_in(variable)):
            raise ConfigError(
                f"the judge's api_key_env={variable}, but no such environment variable is set"
            )
        return key


@cache  # making it takes longer than all else that is done for a verdict
def _schema_of(verdict: type[BaseModel]) -> Mapping[str, Any]:
    return verdict.model_json_schema()


def _parse(model: type[V], answer: bytes | str) -> V:
    try:
        return model.model_validate_json(answer)
    except ValidationError as error:
        raise _NoVerdictError(
            "unreadable", f"something that is no {model.__name__}: {_first_problem(error)}"
        ) from error


async def _read_body(response: httpx.Response) -> bytes:
    """The body of an answer, if it is not too long."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > LARGEST_ANSWER:
            raise _NoVerdictError(
                "unreadable", f"an answer of more than {LARGEST_ANSWER >> 20} MiB"
            )
    return bytes(body)


def _repeated_key(text: str) -> str | None:
    """A key that an object in this JSON text has twice, or None."""
    found: list[str] = []

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        read_pairs = dict(pairs)
        if len(read_pairs) < len(pairs):
            names = [name for name, _ in pairs]
            found.append(next(name for name in names if names.count(name) > 1))
        return read_pairs

    with suppress(ValueError, RecursionError):  # which the verdict's shape says better
        json.loads(text, object_pairs_hook=read)
    return found[0] if found else None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.200}"


def _retry_after(detail: str) -> float:
    """Seconds until the server wants to be asked again (RFC 9110, 10.2.3): a number of them, or a
    date.
    """
    with suppress(ValueError):
        return max(0.0, float(detail))
    with suppress(ValueError, OverflowError):  # the latter for a zone beyond all numbers
        date = parsedate_to_datetime(detail)
        # The zone -0000 says nothing about a place.
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    return 0.0
