"""Pictures in observations of OpenEnv servers: each form is taken, and shown over a real socket."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agentrl.errors import ConfigError, EnvError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.observations import IMAGES, images_taken
from agentrl.remote.openenv.client import OpenEnv
from agentrl.remote.openenv.pictures import taken_pictures
from agentrl.tokens.encoded_image import EncodedImage

PIXELS = np.random.default_rng(0).integers(0, 256, (10, 12, 3)).astype(np.uint8)
IMAGE = EncodedImage.of_pixels(PIXELS)
FILE = base64.b64encode(IMAGE.data).decode()


@pytest.mark.parametrize(
    ("observation", "rest", "count"),
    [
        ({"text": "go", "screenshot": FILE}, {"text": "go"}, 1),
        ({"screenshot": IMAGE.address}, {}, 1),
        ({"screenshot": PIXELS.tolist(), "url": "a.b"}, {"url": "a.b"}, 1),
        (
            {"screen": PIXELS.flatten().tolist(), "screen_shape": [10, 12, 3], "lives": 3},
            {"lives": 3},
            1,
        ),
        ({"views": {"left": PIXELS.tolist(), "score": 1}}, {"views": {"score": 1}}, 1),
        ({"frames": [FILE, FILE], "metadata": {"a": FILE}}, {"metadata": {"a": FILE}}, 2),
        (
            {
                "tool_name": "look",
                "result": {
                    "content": [
                        {"type": "text", "text": "here"},
                        {"type": "image", "data": FILE, "mimeType": "image/png"},
                    ]
                },
            },
            {"tool_name": "look", "result": {"content": [{"type": "text", "text": "here"}]}},
            1,
        ),
        # what only looks like one
        ({"board": [[0, 1], [1, 0]]}, {"board": [[0, 1], [1, 0]]}, 0),
        ({"grid": [[300] * 9] * 9}, {"grid": [[300] * 9] * 9}, 0),
        ({"ragged": [[1] * 9, [1] * 8] * 5}, {"ragged": [[1] * 9, [1] * 8] * 5}, 0),
        ({"x": [1, 2, 3], "x_shape": [3, 2]}, {"x": [1, 2, 3], "x_shape": [3, 2]}, 0),
        ({"x": [[1], [1, 2]], "x_shape": [2]}, {"x": [[1], [1, 2]], "x_shape": [2]}, 0),
        ({"x": [[[]]], "y": [[2**80] * 9] * 9}, {"x": [[[]]], "y": [[2**80] * 9] * 9}, 0),
        ({"icon": "data:image/svg+xml,<svg/>"}, {"icon": "data:image/svg+xml,<svg/>"}, 0),
        ({"x": [1, 2], "x_shape": "wide"}, {"x": [1, 2], "x_shape": "wide"}, 0),
        ({"weights": [[0.5] * 9] * 9}, {"weights": [[0.5] * 9] * 9}, 0),
    ],
)
def test_pictures_are_taken_out_of_observations_and_nothing_else(
    observation: dict[str, Any], rest: dict[str, Any], count: int
) -> None:
    left, found = taken_pictures(json.loads(json.dumps(observation)))
    assert left == rest
    images, _ = images_taken("reset", {IMAGES: found})
    assert [image.name for image in images] == [IMAGE.name] * count


def test_pixels_that_are_too_many_fail_the_episode_by_name() -> None:
    with pytest.raises(EnvError, match="the field 'screen' of an observation"):
        taken_pictures({"screen": [[0, 1, 2, 3, 4, 5, 6, 7] * 513] * 4097})


@asynccontextmanager
async def browser() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server that shows a screenshot, as BrowserGym's do, and the resets that it
    got.
    """
    resets: list[dict[str, Any]] = []

    async def schema(request: web.Request) -> web.Response:
        fields = {"action_str": {"type": "string"}}
        return web.json_response({"action": {"properties": fields, "required": ["action_str"]}})

    async def play(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for frame in socket:
            asked = json.loads(frame.data)
            if asked["type"] == "reset":
                resets.append(asked["data"])
            shown = {"text": "a page", "screenshot": PIXELS.tolist()}
            data = {"observation": shown, "reward": 0.5, "done": asked["type"] == "step"}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", play)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", resets
    finally:
        await runner.cleanup()


def test_a_server_shows_its_pictures_where_they_are_wanted() -> None:
    async def main() -> None:
        async with browser() as (url, resets):
            env = LiveEnv(OpenEnv([url]), EnvDeadlines())
            text, info = await env.reset(0, {"pictures": True, "task": "a"})
            images, _ = images_taken("reset", info)
            assert (text, images) == ("a page", (IMAGE,))
            text, reward, ended, _, info = await env.step("click(3)")
            images, _ = images_taken("step", info)
            assert (text, images, reward, ended) == ("a page", (IMAGE,), 0.5, True)
            text, info = await env.reset(1, {})
            assert "screenshot" in text
            assert images_taken("reset", info)[0] == ()
            assert resets == [{"task": "a", "seed": 0}, {"seed": 1}]
            with pytest.raises(ConfigError, match="the option pictures is 'yes'"):
                await env.reset(2, {"pictures": "yes"})
            await env.close()

    asyncio.run(main())
