"""Pictures in requests of programs: exact tokens in each dialect, and nothing hostile in them."""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from agentrl import EncodedImage
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.hosting.observations import MOST_IMAGES
from agentrl.testing import ScriptedEngine
from agentrl.trajectory import Terminated
from tests.conversation.test_eyes import CHAT, SMALL, TALL, WIDE, by_processor
from tests.gateway.served import saying, served
from tests.processes import PATIENCE_SECONDS
from tests.tokens.test_encoded_image import JPEG, PAIR, PICTURE, PNG, png_of_size, saved

Part = str | tuple[str, bytes]
"""A text, or a media type with bytes."""


def data_url(media: str, data: bytes) -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


class Chat:
    path = "/v1/chat/completions"

    def part(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return {"type": "image_url", "image_url": {"url": data_url(*part)}}

    def linked(self, url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    def user(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"role": "user", "content": [*parts]}

    def said(self, text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def body(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        told = {"role": "system", "content": "Play."}
        return {"model": "policy", "messages": [told, *messages]}


class Responses(Chat):
    path = "/v1/responses"

    def part(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "input_text", "text": part}
        return {"type": "input_image", "detail": "auto", "image_url": data_url(*part)}

    def linked(self, url: str) -> dict[str, Any]:
        return {"type": "input_image", "detail": "auto", "image_url": url}

    def body(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"model": "policy", "instructions": "Play.", "input": [*messages]}


class Anthropic(Chat):
    path = "/v1/messages"

    def part(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        source = {"media_type": part[0], "data": base64.b64encode(part[1]).decode()}
        return {"type": "image", "source": {"type": "base64", **source}}

    def linked(self, url: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "url", "url": url}}

    def body(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"model": "m", "max_tokens": 50, "system": "Play.", "messages": [*messages]}


class Google(Chat):
    path = "/v1beta/models/policy:generateContent"

    def part(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"text": part}
        data = base64.b64encode(part[1]).decode()
        return {"inlineData": {"mimeType": part[0], "data": data}}

    def linked(self, url: str) -> dict[str, Any]:
        return {"fileData": {"mimeType": "image/png", "fileUri": url}}

    def user(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"role": "user", "parts": [*parts]}

    def said(self, text: str) -> dict[str, Any]:
        return {"role": "model", "parts": [{"text": text}]}

    def body(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        told = {"parts": [{"text": "Play."}]}
        return {"systemInstruction": told, "contents": [*messages]}


DIALECTS = (Chat(), Responses(), Anthropic(), Google())
each_dialect = pytest.mark.parametrize("wire", DIALECTS, ids=lambda one: type(one).__name__)


@pytest.fixture(scope="module")
def renderer(seeing_model_dir: Path) -> TemplateRenderer:
    return TemplateRenderer.of_model(seeing_model_dir)


def saying_left(renderer: TemplateRenderer, **fields: Any) -> ScriptedEngine:
    answer = renderer.answer_ids("left").tolist()
    fields = {"max_context": 100_000, "images": True, **fields}
    return ScriptedEngine.replying(lambda request: answer, **fields)


def talk(assignment: Any) -> httpx.AsyncClient:
    keys = {"authorization": f"Bearer {assignment.api_key}"}
    keys |= {"x-api-key": assignment.api_key, "x-goog-api-key": assignment.api_key}
    return httpx.AsyncClient(base_url=assignment.url, headers=keys, timeout=PATIENCE_SECONDS)


def png(*images: EncodedImage) -> list[Part]:
    return [("image/png", image.data) for image in images]


@each_dialect
def test_a_programs_pictures_have_the_tokens_of_the_familys_processor(
    wire: Chat, renderer: TemplateRenderer, seeing_model_dir: Path
) -> None:
    first = wire.user([*map(wire.part, [*png(SMALL), "P . O", *png(WIDE)])])
    later = wire.user([*map(wire.part, ["P O .", *png(TALL)])])

    async def play(assignment: Any) -> float:
        async with talk(assignment) as client:
            for messages in ([first], [first, wire.said("left"), later]):
                answer = await client.post(wire.path, json=wire.body(messages))
                assert answer.status_code == 200, answer.text
        return 1.0

    engine = saying_left(renderer)
    trajectory, session = served(play, engine, renderer=renderer)
    assert trajectory.status == Terminated()
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]
    asked = engine.requests[1]
    assert asked.prompt_ids.tolist() == by_processor(seeing_model_dir, CHAT, SMALL, WIDE, TALL)
    assert [placed.image for placed in asked.images] == [SMALL, WIDE, TALL]
    placeholder = renderer.control_tokens["<|image_pad|>"]
    for placed in asked.images:
        assert set(asked.prompt_ids[placed.start : placed.stop].tolist()) == {placeholder}
    begun, went_on = trajectory.turns
    assert [placed.image for placed in begun.images] == [SMALL, WIDE]
    assert [placed.image for placed in went_on.images] == [TALL]
    assert not went_on.forked
    shown = [message.images for message in trajectory.messages if message.role == "user"]
    assert shown == [(SMALL, WIDE), (TALL,)]


@each_dialect
def test_other_pictures_are_another_conversation(wire: Chat, renderer: TemplateRenderer) -> None:
    async def play(assignment: Any) -> float:
        async with talk(assignment) as client:
            for image in (SMALL, WIDE):
                begun = wire.user([*map(wire.part, [*png(image), "U"])])
                later = [begun, wire.said("left"), wire.user([wire.part("V")])]
                for messages in ([begun], later) if image is SMALL else (later,):
                    answer = await client.post(wire.path, json=wire.body(messages))
                    assert answer.status_code == 200, answer.text
        return 1.0

    engine = saying_left(renderer)
    trajectory, session = served(play, engine, renderer=renderer)
    assert [call.kind for call in session.tree.calls][:2] == ["start", "extension"]
    other = session.tree.calls[2]
    assert other.parent is None
    assert [placed.image for placed in engine.requests[2].images] == [WIDE]
    assert trajectory.turns[2].forked
    assert [placed.image for placed in trajectory.turns[2].images] == [WIDE]


RESULTS: dict[str, Any] = {
    "Responses": [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [
                {"type": "input_text", "text": "seen"},
                Responses().part(png(SMALL)[0]),
            ],
        },
    ],
    "Anthropic": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [*map(Anthropic().part, ["seen", *png(SMALL)])],
                }
            ],
        },
    ],
    "Google": [
        {"role": "user", "parts": [{"text": "Look."}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
        {
            "role": "user",
            "parts": [
                {
                    "functionResponse": {
                        "name": "look",
                        "response": {"output": "seen"},
                        "parts": [Google().part(png(SMALL)[0])],
                    }
                }
            ],
        },
    ],
}


@pytest.mark.parametrize("wire", DIALECTS[1:], ids=lambda one: type(one).__name__)
def test_the_result_of_a_tool_may_be_a_picture(wire: Chat, renderer: TemplateRenderer) -> None:
    async def play(assignment: Any) -> float:
        async with talk(assignment) as client:
            body = wire.body(RESULTS[type(wire).__name__])
            answer = await client.post(wire.path, json=body)
            assert answer.status_code == 200, answer.text
        return 1.0

    engine = saying_left(renderer)
    trajectory, _ = served(play, engine, renderer=renderer)
    (result,) = [message for message in trajectory.messages if message.role == "tool"]
    assert (result.content, result.images) == ("seen", (SMALL,))
    (asked,) = engine.requests
    assert [placed.image for placed in asked.images] == [SMALL]


BOMB = png_of_size(60_000, 60_000)
CMYK = saved(PICTURE.convert("CMYK"), "jpeg")
HOSTILE: dict[str, tuple[list[Part], str]] = {
    "cut off": ([("image/png", PNG[:-20])], "PNG is cut off"),
    "cut off late": ([("image/jpeg", JPEG[:-300])], "JPEG cannot be decoded"),
    "animated": ([("image/png", saved(PICTURE, "png", **PAIR))], "animated"),
    "a GIF": ([("image/png", saved(PICTURE, "gif"))], "a GIF file"),
    "a script": ([("image/png", b"<svg onload='alert(1)'/>")], "a SVG file"),
    "another type": ([("image/svg+xml", b"<svg/>")], "image/png"),
    "CMYK": ([("image/jpeg", CMYK)], "CMYK"),
    "named wrongly": ([("image/png", JPEG)], "is a JPEG file, and not 'image/png'"),
    "a bomb": ([("image/png", BOMB)], "60,000 x 60,000 pixels"),
    "too many": (png(SMALL) * (MOST_IMAGES + 1), f"{MOST_IMAGES} are the most"),
    "beyond the context": (png(SMALL) * 60, "context holds 200"),
    "no shape of the model's": (
        png(EncodedImage.of_pixels(np.zeros((2, 500), np.uint8))),
        "no picture of 500 x 2 pixels",
    ),
}


@each_dialect
def test_a_hostile_picture_is_refused_by_name_and_the_episode_goes_on(
    wire: Chat, renderer: TemplateRenderer
) -> None:
    async def play(assignment: Any) -> float:
        async with talk(assignment) as client:
            for parts, said in HOSTILE.values():
                body = wire.body([wire.user([*map(wire.part, parts)])])
                answer = await client.post(wire.path, json=body)
                assert (answer.status_code, said in answer.text) == (400, True), answer.text
            garbled = json.dumps(wire.body([wire.user([wire.part(png(SMALL)[0])])]))
            coded = base64.b64encode(SMALL.data).decode()
            answer = await client.post(wire.path, content=garbled.replace(coded, "%%%%"))
            assert (answer.status_code, "is no base64" in answer.text) == (400, True), answer.text
            fine = wire.body([wire.user([*map(wire.part, ["U", *png(SMALL)])])])
            assert (await client.post(wire.path, json=fine)).status_code == 200
        return 1.0

    engine = saying_left(renderer, max_context=200)
    trajectory, _ = served(play, engine, renderer=renderer)
    assert trajectory.status == Terminated()
    assert len(engine.requests) == len(trajectory.turns) == 1


@each_dialect
def test_nothing_is_fetched(wire: Chat, renderer: TemplateRenderer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    reached: list[object] = []

    async def play(assignment: Any) -> float:
        server = await asyncio.start_server(lambda *pair: reached.append(pair), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, talk(assignment) as client:
            for url in (
                f"http://127.0.0.1:{port}/a.png",
                f"HTTPS://127.0.0.1:{port}/a.png",
                (tmp_path / "a.png").as_uri(),
                str(tmp_path / "a.png"),
            ):
                answer = await client.post(
                    wire.path, json=wire.body([wire.user([wire.linked(url)])])
                )
                assert answer.status_code == 400, answer.text
                named = "fetched" in answer.text or "fileData" in answer.text
                assert named, answer.text
        return 1.0

    engine = saying_left(renderer)
    served(play, engine, renderer=renderer)
    assert (reached, engine.requests) == ([], [])


@each_dialect
def test_a_model_without_eyes_refuses_pictures(wire: Chat) -> None:
    async def play(assignment: Any) -> float:
        async with talk(assignment) as client:
            body = wire.body([wire.user([*map(wire.part, png(SMALL))])])
            answer = await client.post(wire.path, json=body)
            assert (answer.status_code, "reads text alone" in answer.text) == (400, True)
            body = wire.body([wire.user([wire.part("U")])])
            assert (await client.post(wire.path, json=body)).status_code == 200
        return 1.0

    assert served(play, saying("left"))[0].status == Terminated()


@each_dialect
def test_an_engine_that_reads_none_refuses_pictures_and_has_not_failed(
    wire: Chat, renderer: TemplateRenderer
) -> None:

    async def play(assignment: Any) -> float:
        async with talk(assignment) as client:
            body = wire.body([wire.user([*map(wire.part, png(SMALL))])])
            answer = await client.post(wire.path, json=body)
            assert (answer.status_code, "reads text alone" in answer.text) == (400, True)
            body = wire.body([wire.user([wire.part("U")])])
            assert (await client.post(wire.path, json=body)).status_code == 200
        return 1.0

    engine = saying_left(renderer, images=False)
    assert served(play, engine, renderer=renderer)[0].status == Terminated()


def test_a_large_picture_is_read_beside_the_event_loop(renderer: TemplateRenderer) -> None:
    """And a request with it is as good as any other."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    large = saved(Image.fromarray(noise), "png")
    assert len(large) > 64 << 10

    async def play(assignment: Any) -> float:
        async with talk(assignment) as client:
            wire, parts = DIALECTS[0], ("U", ("image/png", large))
            body = wire.body([wire.user([wire.part(part) for part in parts])])
            assert (await client.post(wire.path, json=body)).status_code == 200
        return 1.0

    engine = saying_left(renderer)
    served(play, engine, renderer=renderer)
    assert engine.requests[0].images[0].image.data == large
