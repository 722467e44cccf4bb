"""What only an engine over HTTP has: keys, busy and missing servers, answers that are not as they
should be.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from agentrl.conversation.eyes import Eyes
from agentrl.engines.local import LocalEngine
from agentrl.engines.openai import OpenAIEngine
from agentrl.errors import ConfigError, EngineDeadError, EngineError
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.openai_server import serve_engine
from agentrl.testing.vision_models import create_tiny_vision_model
from agentrl.tokens.arrays import ints
from agentrl.tokens.encoded_image import EncodedImage
from tests.processes import PATIENCE_SECONDS

END = 0


def request(name: str, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        name, (5, 6), SamplingParams(max_tokens=8, temperature=0.7, stop_token_ids=(END,)), **more
    )


def engine_of(url: str, **settings: Any) -> OpenAIEngine:
    return OpenAIEngine(OpenAIEngine.Config(**{"url": url, "backoff": 0.001, **settings}))


@asynccontextmanager
async def scripted_server(
    *, api_key: str | None = None, **settings: Any
) -> AsyncIterator[tuple[ScriptedEngine, str]]:
    scripted = ScriptedEngine.replying(lambda request: [7, 8], **settings)
    async with scripted, serve_engine(scripted, api_key=api_key) as url:
        yield scripted, url


@asynccontextmanager
async def server_saying(answer: Any) -> AsyncIterator[str]:
    """A server whose completions are all the same."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a"}, {"id": "b", "max_model_len": 64}]})

    async def completions(request: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def test_a_request_arrives_as_it_was_sent_and_the_answer_comes_back() -> None:
    async def main() -> None:
        async with (
            scripted_server(max_context=99) as (scripted, url),
            engine_of(f"{url}/", policy_version=4) as engine,
        ):
            sent = request("a", seed=2**63 + 5, priority=3, session="episode-1")
            completion = await engine.generate(sent)
            assert completion.token_ids.tolist() == [7, 8, END]
            assert completion.logprobs.tolist() == [0.0] * 3
            assert completion.policy_versions.tolist() == [4] * 3
            assert completion.finish_reason == "stop"
            assert engine.max_context == 99
            (received,) = scripted.requests
            assert (received.prompt_ids.tolist(), received.sampling) == (
                sent.prompt_ids.tolist(),
                sent.sampling,
            )
            assert (received.seed, received.priority, received.session) == (5, 3, "episode-1")

    asyncio.run(main())


def test_a_server_without_priorities_is_not_told_any() -> None:
    async def main() -> None:
        async with scripted_server() as (scripted, url), engine_of(url, priorities=False) as engine:
            await engine.generate(request("a", priority=3))
            assert scripted.requests[0].priority == 0

    asyncio.run(main())


def test_a_busy_server_is_asked_again_and_one_that_stays_away_is_dead() -> None:
    starting = iter([EngineDeadError("starting"), EngineDeadError("starting"), None])
    server = scripted_server(fail=lambda request: next(starting, EngineDeadError("gone")))

    async def main() -> None:
        async with server as (_, url), engine_of(url, retries=2) as engine:
            assert (await engine.generate(request("a"))).token_ids.tolist() == [7, 8, END]
            with pytest.raises(EngineDeadError, match=r"3 times.*503.*gone"):
                await engine.generate(request("b"))
        async with asyncio.timeout(10):
            with pytest.raises(EngineDeadError, match=r"3 times.*Connect"):
                await engine_of(url, retries=2).__aenter__()

    asyncio.run(main())


def test_a_server_that_dies_under_a_request_is_dead() -> None:
    async def told(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineDeadError, match="2 times"):
            await engine.generate(request("a"))

    async def main() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            server = scripted_server(hang=lambda request: True)
            scripted, url = await server.__aenter__()
            async with engine_of(url, retries=1) as engine:
                waiting = tasks.create_task(told(engine))
                while not scripted.requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await server.__aexit__(None, None, None)
                await waiting

    asyncio.run(main())


def test_a_refused_request_is_refused_in_the_server_s_words_and_once() -> None:
    async def main() -> None:
        refusal = EngineError("too hot in here")
        async with (
            scripted_server(fail=lambda request: refusal) as (scripted, url),
            engine_of(url) as engine,
        ):
            with pytest.raises(EngineError, match=r"400.*too hot in here") as raised:
                await engine.generate(request("a"))
            assert not isinstance(raised.value, EngineDeadError)
            assert len(scripted.requests) == 1

    asyncio.run(main())


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with scripted_server(api_key="sesame") as (_, url):
            with pytest.raises(ConfigError, match="AGENTRL_TEST_KEY"):
                await engine_of(url, api_key_env="AGENTRL_TEST_KEY").__aenter__()
            monkeypatch.setenv("AGENTRL_TEST_KEY", "sesame")
            async with engine_of(url, api_key_env="AGENTRL_TEST_KEY") as engine:
                await engine.generate(request("a"))
            with pytest.raises(EngineError, match="401"):
                await engine_of(url).__aenter__()

    asyncio.run(main())


def test_what_is_served_is_asked_for_and_what_is_not_is_a_config_error() -> None:
    async def main() -> None:
        async with server_saying({}) as url:
            async with engine_of(url, model="b") as engine:
                assert engine.max_context == 64
            async with engine_of(url, max_context=32) as engine:
                assert engine.max_context == 32
            with pytest.raises(ConfigError, match="serves a, b"):
                await engine_of(url, model="c").__aenter__()
            with pytest.raises(ConfigError, match="set engine"):
                await engine_of(url).__aenter__()
            with pytest.raises(ConfigError, match="served with 64"):
                await engine_of(url, model="b", max_context=65).__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {
            "choices": [
                {"text": "hello", "finish_reason": "stop", "logprobs": {"token_logprobs": [0.0]}}
            ]
        },
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": None}]},
    ],
)
def test_an_answer_without_token_ids_and_logprobs_is_refused(
    answer: dict[str, Sequence[Any]],
) -> None:
    async def main() -> None:
        async with server_saying(answer) as url, engine_of(url, model="b") as engine:
            with pytest.raises(EngineError, match="not as expected"):
                await engine.generate(request("a"))

    asyncio.run(main())


def test_weights_and_interrupts_are_refused_with_the_reason() -> None:
    async def main() -> None:
        async with scripted_server() as (_, url), engine_of(url) as engine:
            with pytest.raises(EngineError, match="always serves version 0"):
                await engine.update_weights({}, 1)
            with pytest.raises(EngineError, match="cannot be interrupted"):
                await engine.interrupt()

    asyncio.run(main())


def test_leaving_ends_who_has_a_connection_and_who_waits_for_one() -> None:
    async def told(engine: OpenAIEngine, name: str) -> None:
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.generate(request(name))

    async def main() -> None:
        async with (
            asyncio.timeout(10),
            scripted_server(hang=lambda request: True) as (scripted, url),
        ):
            async with asyncio.TaskGroup() as tasks:
                engine = engine_of(url, connections=2)
                with pytest.raises(EngineDeadError, match="not entered"):
                    await engine.generate(request("early"))
                async with engine:
                    for number in range(5):
                        tasks.create_task(told(engine, f"{number}"))
                    while len(scripted.requests) < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                    assert (engine.stats().running, engine.stats().waiting) == (2, 3)
            await told(engine, "late")
            assert len(scripted.requests) == 2

    asyncio.run(main())


@contextmanager
def vllm_server(folder: Path, max_context: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of vLLM's own, which starts: its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        f"--port {port} --host 127.0.0.1 --enforce-eager --dtype float32"
        f" --max-model-len {max_context} --generation-config vllm"
        " --logprobs-mode processed_logprobs --scheduling-policy priority"
        " --enable-prompt-tokens-details --enable-scale-out"
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    quiet = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    quiet["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process fewer to start
    server = subprocess.Popen(
        [*map(str, command), *options.split()], env=quiet, stdout=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.terminate()
        server.wait(PATIENCE_SECONDS)


@asynccontextmanager
async def vllm_over_http(folder: Path, max_context: int) -> AsyncIterator[OpenAIEngine]:
    """An engine that is connected to a server of vLLM's own."""
    with vllm_server(folder, max_context) as (url, server):
        engine = OpenAIEngine(OpenAIEngine.Config(url=url, retries=0, model=str(folder)), folder)
        while True:
            try:
                await engine.__aenter__()
                break
            except EngineDeadError:  # it is starting
                assert server.poll() is None
                await asyncio.sleep(1)
        try:
            yield engine
        finally:
            await engine.__aexit__()


@pytest.mark.vllm
@pytest.mark.long
def test_a_server_of_vllm_gives_what_the_local_engine_gives(tiny_model_dir: Path) -> None:
    async def main() -> None:
        prompt = tuple(range(10, 150))
        first = GenerateRequest(
            "a",
            prompt,
            SamplingParams(max_tokens=24, temperature=0.0),
            priority=2,
            session="episode-1",
        )
        async with (
            vllm_over_http(tiny_model_dir, 256) as engine,
            LocalEngine(LocalEngine.Config(), tiny_model_dir) as local,
        ):
            assert engine.max_context == 256
            answers = [await engine.generate(first), await local.generate(first)]
            assert answers[0].token_ids.tolist() == answers[1].token_ids.tolist()
            stop = replace(
                first,
                sampling=SamplingParams(
                    max_tokens=24, temperature=0.0, stop_token_ids=(answers[0].token_ids[5],)
                ),
            )
            stopped = await engine.generate(stop)
            assert stopped.finish_reason == "stop"
            assert stopped.token_ids.tolist() == (await local.generate(stop)).token_ids.tolist()
            assert engine.stats().cached_tokens > 0
            for answer, other in zip(*(each.logprobs for each in answers), strict=True):
                assert abs(answer - other) < 1e-3
            with pytest.raises(EngineError, match="400"):
                await engine.generate(replace(first, prompt_ids=(10**6,)))

    asyncio.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_a_server_of_vllm_reads_pictures_as_the_local_engine_does(tmp_path: Path) -> None:
    create_tiny_vision_model(tmp_path, "idefics3")
    config = json.loads((tmp_path / "config.json").read_text())
    side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
    # A folder of the hub has it; nothing else tells vLLM how many tokens a tile is.
    processor = {
        "processor_class": "Idefics3Processor",
        "image_seq_len": side**2 // config["scale_factor"] ** 2,
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    eyes = Eyes.of_model(tmp_path, tokenizer)
    assert eyes is not None
    pixels = np.random.default_rng(1).integers(0, 256, (100, 70, 3), dtype=np.uint8)
    pictures = [EncodedImage.of_pixels(pixels), EncodedImage.of_pixels(pixels[:64, :64])]
    asked = tokenizer.convert_tokens_to_ids(eyes.asked)
    token_ids = eyes.written_for(ints((10, asked, 12, asked, 13)), pictures)
    request = GenerateRequest(
        "a",
        token_ids,
        SamplingParams(max_tokens=8, temperature=0.0, stop=("no such text",)),
        priority=2,
        images=eyes.placed(token_ids, pictures),
    )

    async def main() -> None:
        async with (
            vllm_over_http(tmp_path, 512) as engine,
            LocalEngine(LocalEngine.Config(), tmp_path) as local,
        ):
            found, wanted = await engine.generate(request), await local.generate(request)
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            assert np.allclose(found.logprobs, wanted.logprobs, atol=1e-4)

    asyncio.run(main())
