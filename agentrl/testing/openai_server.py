"""An OpenAI-compatible server over any `Engine`: the public fake for `engine=openai`, and a way to
share an engine.

It implements the part of vLLM's `/v1/completions` that is about token ids, and for prompts with
pictures `/inference/v1/generate`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from agentrl.conversation.eyes import Eyes
from agentrl.errors import EngineDeadError, EngineError
from agentrl.protocols import Engine, GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Completion

MODEL = "served"
"""The name of the only model."""


class _Body(BaseModel):
    """The fields that are read of a request; others are ignored."""

    prompt: tuple[int, ...]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    priority: int = 0
    session_id: str = ""


class _ImagePart(BaseModel):
    """A picture of a request."""

    url: str


class _GenerateBody(BaseModel):
    """The fields that are read of a request with pictures."""

    token_ids: tuple[int, ...]
    content_parts: tuple[_ImagePart, ...]
    sampling_params: dict[str, Any]
    priority: int = 0


@asynccontextmanager
async def serve_engine(
    engine: Engine, *, port: int = 0, api_key: str | None = None, eyes: Eyes | None = None
) -> AsyncIterator[str]:
    """Serve an entered `engine` on this machine, and yield the URL. Port 0 takes a free port. With
    the `eyes` of its model, prompts may have pictures.

    A client that disconnects cancels its request, as in vLLM.
    """
    # The end does not wait for requests under way (for aiohttp, 0 seconds mean no limit).
    runner = web.AppRunner(
        openai_app(engine, api_key, eyes),
        handler_cancellation=True,
        shutdown_timeout=0.01,
        access_log=None,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def openai_app(
    engine: Engine, api_key: str | None = None, eyes: Eyes | None = None
) -> web.Application:
    """The application: `/v1/models` and `/v1/completions`, and with `eyes`
    `/inference/v1/generate`.
    """
    numbers = count()

    @web.middleware
    async def errors(request: web.Request, handler: Any) -> web.StreamResponse:
        if api_key is not None and request.headers.get("Authorization") != f"Bearer {api_key}":
            return _error(401, "Unauthorized")
        try:
            response: web.StreamResponse = await handler(request)
        except EngineDeadError as error:
            return _error(503, str(error))
        except (EngineError, ValidationError) as error:
            return _error(400, str(error))
        return response

    async def models(request: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [{"id": MODEL, "max_model_len": engine.max_context}]}
        )

    async def completions(request: web.Request) -> web.Response:
        body = _Body.model_validate_json(await request.read())
        chosen = {name: getattr(body, name) for name in SamplingParams.model_fields}
        sampling = SamplingParams.model_validate(chosen)
        name = f"cmpl-{next(numbers)}"
        completion = await engine.generate(
            GenerateRequest(
                name, ints(body.prompt), sampling, body.seed, body.priority, body.session_id
            )
        )
        return _json(_completions_body(name, len(body.prompt), completion))

    async def generate(request: web.Request) -> web.Response:
        assert eyes is not None
        body = _GenerateBody.model_validate_json(await request.read())
        chosen = {k: v for k, v in body.sampling_params.items() if k in SamplingParams.model_fields}
        images = [EncodedImage.from_address(part.url) for part in body.content_parts]
        token_ids = eyes.written_for(ints(body.token_ids), images)
        completion = await engine.generate(
            GenerateRequest(
                f"generate-tokens-{next(numbers)}",
                token_ids,
                SamplingParams.model_validate(chosen),
                body.sampling_params.get("seed", 0),
                body.priority,
                images=eyes.placed(token_ids, images),
            )
        )
        return _json(_generate_body(token_ids.tolist(), completion))

    app = web.Application(middlewares=[errors], client_max_size=2**26)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    if eyes is not None:
        app.router.add_post("/inference/v1/generate", generate)
    return app


def _completions_body(name: str, prompt_tokens: int, completion: Completion) -> dict[str, Any]:
    """The answer of `/v1/completions`."""
    tokens = [f"token_id:{token}" for token in completion.token_ids]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": completion.logprobs.tolist(),
        "top_logprobs": [
            {token: logprob}
            for token, logprob in zip(tokens, completion.logprobs.tolist(), strict=True)
        ],
        "text_offset": [0] * len(tokens),
    }
    choice = {
        "index": 0,
        "text": "",
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids.tolist(),
    }
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(tokens)}
    return {
        "id": name,
        "object": "text_completion",
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }


def _generate_body(prompt_ids: list[int], completion: Completion) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`."""
    token_ids = completion.token_ids.tolist()
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1}
        for token, logprob in zip(token_ids, completion.logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": completion.finish_reason,
        "token_ids": token_ids,
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}
    return {"model": MODEL, "prompt_token_ids": prompt_ids, "choices": [choice], "usage": usage}


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "code": status}}, status)


__all__ = ["MODEL", "openai_app", "serve_engine"]
