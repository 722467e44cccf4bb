"""MCP servers as tools: real servers of the `mcp` package over stdio and HTTP, and one by hand that
misbehaves.
"""

import asyncio
import base64
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from agentrl import EncodedImage, plugins
from agentrl.envs.base import ToolResult
from agentrl.envs.mcp import McpEnv, McpToolEnv
from agentrl.errors import ConfigError, DeadlineError, EnvError, PluginError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.observations import images_taken
from agentrl.testing import check_env
from agentrl.trajectory import ToolCall
from tests.processes import still_alive, title
from tests.tokens.test_encoded_image import PNG, png_of_size

SAFE = '''
    """A safe whose code follows from the seed."""
    import os, sys
    from typing import Any, TypedDict
    from mcp.server import MCPServer

    class Verdict(TypedDict):
        said: str
        reward: float
        terminated: bool
        success: bool

    server = MCPServer("safe", log_level="ERROR")
    code: dict[str, int] = {}

    @server.tool()
    def begin(seed: int) -> str:
        code["is"] = seed * 7919 % 100
        return "The safe is closed."

    @server.tool()
    def compare(number: int) -> str:
        """Say whether the code is higher."""
        return "higher" if code["is"] > number else "lower or equal"

    @server.tool()
    def open(number: int) -> Verdict:
        right = number == code["is"]
        said = "open" if right else "locked"
        return Verdict(said=said, reward=float(right), terminated=True, success=right)

    @server.tool()
    def grade(answer: str) -> float:
        return float(answer.strip() == str(code["is"]))

    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
'''

ODD = '''
    """A server by hand, of an older protocol, that does what its tool is asked."""
    import json, subprocess, sys, time

    def answer(method, params):
        match method:
            case "initialize":
                return {"protocolVersion": "2025-03-26", "capabilities": {"tools": {}},
                        "serverInfo": {"name": "odd", "version": "1"}}
            case "tools/list":
                first = "cursor" not in params
                tool = {"name": "do" if first else "undo", "inputSchema": {"type": "object"}}
                return {"tools": [tool], **({"nextCursor": "2"} if first else {})}
            case "tools/call":
                match params["arguments"].get("what"):
                    case "die":
                        print("I die", file=sys.stderr, flush=True); sys.exit(3)
                    case "hang":
                        time.sleep(1000)
                    case "child":
                        child = subprocess.Popen(
                            ["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                        )
                        return {"content": [{"type": "text", "text": str(child.pid)}]}
                    case "reward":
                        return {"content": [], "structuredContent": {"reward": "much"}}
                    case "picture":
                        picture = {"data": "", "mimeType": "image/png"}
                        picture.update(params["arguments"].get("of", {}))
                        return {"content": [
                            {"type": "text", "text": "seen"}, {"type": "image", **picture}
                        ]}
                    case "refuse":
                        return {"content": [{"type": "text", "text": "not today"}], "isError": True}
                    case "shape":
                        return {"contents": 5}
                return {"content": [{"type": "text", "text": "done"}]}

    if sys.argv[1:] == ["dumb"]:
        time.sleep(1000)
    if sys.argv[1:] == ["dead"]:
        sys.exit("no licence")
    for line in sys.stdin:
        asked = json.loads(line)
        if sys.argv[1:] == ["talks"]:
            print("INFO asked for", asked["method"], flush=True)
        if "id" in asked:
            result = answer(asked["method"], asked.get("params") or {})
            error = {"code": -32601, "message": "no such method"}
            about = {"result": result} if result else {"error": error}
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **about}), flush=True)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("servers")
    (path / "safe.py").write_text(dedent(SAFE))
    (path / "odd.py").write_text(dedent(ODD))
    return path


def odd(folder: Path, *arguments: str) -> str:
    return " ".join(["mcp:stdio:" + sys.executable, str(folder / "odd.py"), *arguments])


def call(name: str, **arguments: Any) -> str:
    return ToolCall(name, arguments).render()


def live(address: str, **deadlines: float) -> LiveEnv:
    return LiveEnv(plugins.load("envs", address)(), EnvDeadlines(**deadlines))


def children() -> list[psutil.Process]:
    """The servers that run; one that was killed and is not yet reaped does not."""
    return [
        child for child in psutil.Process().children(recursive=True) if "odd.py" in title(child)
    ]


def test_the_tools_of_a_server_are_listed_called_and_misused(folder):
    async def main() -> None:
        env = live(odd(folder))
        assert await env.reset(0, {"task": "Do it.", "system_prompt": "You do."}) == ("Do it.", {})
        assert env.system_prompt == "You do."
        assert [tool["function"]["name"] for tool in env.tools] == ["do", "undo"]
        assert env.tools[0]["function"]["parameters"] == {"type": "object"}
        said = [
            (call("do"), "done"),
            (call("do") + call("undo"), "do: done\nundo: done"),
            (call("und"), "Error: there is no tool 'und'; did you mean 'undo'? Tools: do, undo"),
            (call("do", what="refuse"), "Error: not today"),
            (call("do", what="picture"), "seen\n[image image/png]"),
            (
                '<tool_call>{"name": "do", "arguments": {"what": "\\ud800"}}</tool_call>',
                "Error: the tool call is not usable",
            ),
            ("<tool_call>{", "Error: the tool call is not valid JSON"),
        ]
        for action, expected in said:
            observation, *rest = await env.step(action)
            assert observation.startswith(expected)
            assert rest == [0.0, False, False, {}]
        assert await env.step("I am done.") == ("", 0.0, True, False, {})
        await env.close()
        assert children() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("die", r"(?s)Connection closed.*it last wrote:\n  I die"),
        ("reward", "finite number"),
        ("shape", "validation"),
    ],
)
def test_a_server_that_breaks_costs_its_episode_and_the_next_has_another(folder, what, said):
    async def main() -> None:
        env = McpEnv(odd(folder))
        await env.reset(seed=0, options={"task": "Do it."})
        with pytest.raises(EnvError, match=said):
            await env.step(call("do", what=what))
        await env.reset(seed=0, options={"task": "Do it."})
        assert (await env.step(call("do")))[0] == "done"
        await env.close()
        await env.close()
        assert children() == []

    asyncio.run(main())


def test_logs_on_stdout_are_skipped_told_once_and_quoted_when_the_server_breaks(folder, caplog):
    async def main() -> None:
        env = McpEnv(odd(folder, "talks"))
        await env.reset(seed=0, options={"task": "Do it."})
        assert (await env.step(call("do")))[0] == "done"
        with pytest.raises(
            EnvError, match=r"(?s)logs belong on stderr.*\n  INFO asked for tools/call"
        ):
            await env.step(call("do", what="die"))
        await env.close()

    asyncio.run(main())
    (warning,) = caplog.records
    assert re.search(
        r"odd.py talks: on stdout, .* such as 'INFO asked for \S+'. They are skipped",
        warning.getMessage(),
    )


@pytest.mark.slow
def test_a_deadline_drops_the_connection_and_kills_the_server_with_its_children(folder):
    async def main() -> None:
        env = live(odd(folder), tool=0.3)
        await env.reset(0, {"task": "Do it."})
        child = int((await env.step(call("do", what="child")))[0])
        with pytest.raises(DeadlineError):
            await env.step(call("do", what="hang"))
        await env.close()
        assert await asyncio.to_thread(still_alive, [child], 5) == []
        assert children() == []

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_that_does_not_start_is_said_with_its_last_words_or_given_up_at_the_deadline(
    folder,
):
    async def main() -> None:
        env = live(odd(folder, "dead"))
        with pytest.raises(EnvError, match=r"(?s)Connection closed.*no licence"):
            await env.reset(0, {"task": "Do it."})
        await env.close()
        env = live(odd(folder, "dumb"), reset=0.5)
        with pytest.raises(DeadlineError):
            await env.reset(0, {"task": "Do it."})
        await env.close()
        env = live("mcp:http://127.0.0.1:9/mcp")
        with pytest.raises(EnvError, match=r"mcp:http://127\.0\.0\.1:9/mcp: ConnectError"):
            await env.reset(0, {"task": "Do it."})
        await env.close()
        assert children() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mcp:stdio:no-such-command --x", "no command 'no-such-command'"),
        ("mcp:stdio:", "write mcp:stdio:COMMAND"),
        ("mcp:http:localhost", "write mcp:stdio:COMMAND"),
        ("mcp:stdio:a 'b", "cannot be read"),
        ("mcp:ftp://x/y", "write mcp:stdio:COMMAND"),
    ],
)
def test_a_wrong_address_is_found_before_anything_starts(address, said):
    with pytest.raises(PluginError, match=said):
        plugins.load("envs", address)


def test_options_that_leave_no_task_or_name_no_tool_end_the_run(folder):
    async def main() -> None:
        env = McpEnv(odd(folder))
        for options, said in (
            ({}, r"Write options: \{task: ...\}"),
            ({"taks": "x"}, "did you mean 'task'"),
            ({"task": "x", "judge": "grade"}, "has no tool grade to hide; its tools: do, undo"),
        ):
            with pytest.raises(ConfigError, match=said):
                await env.reset(seed=0, options=options)
        await env.close()

    asyncio.run(main())


class Own(McpToolEnv):
    """Tools of the server beside one of its own; the last message is the answer."""

    hidden = ("undo",)

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.seed = seed
        return "Begin."

    def double(self, number: int) -> int:
        """Twice a number."""
        return 2 * number

    def reply(self, text: str) -> ToolResult:
        right = text == str(self.seed)
        return ToolResult("", reward=float(right), terminated=True, success=right)


def test_a_class_has_the_tools_of_a_server_beside_its_own_and_rewards_what_it_likes(folder):
    class Clash(Own):
        server = odd(folder)

        def do(self) -> str:
            return ""

    async def main() -> None:
        Own.server = odd(folder)
        env = LiveEnv(Own(), EnvDeadlines())
        assert (await env.reset(7, {}))[0] == "Begin."
        assert [tool["function"]["name"] for tool in env.tools] == ["double", "do"]
        assert (await env.step(call("double", number=4) + call("do")))[0] == "double: 8\ndo: done"
        assert (await env.step(call("undo")))[0].startswith("Error: there is no tool 'undo'")
        assert await env.step("7") == ("", 1.0, True, False, {"success": True})
        await env.close()
        clash = LiveEnv(Clash(), EnvDeadlines())
        with pytest.raises(ConfigError, match="both have a tool do: rename the method"):
            await clash.reset(0, {})
        await clash.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def http_server(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(folder / "safe.py"), str(port)]) as process:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            psutil.cpu_percent(0.1)
        yield f"mcp:http://127.0.0.1:{port}/mcp"
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stdio", "http"])
def test_an_episode_with_a_real_server_is_set_up_by_its_seed_and_paid_by_its_results(
    way, folder, request
):
    address = (
        request.getfixturevalue("http_server")
        if way == "http"
        else f"mcp:stdio:{sys.executable} {folder / 'safe.py'}"
    )

    async def main() -> None:
        env = live(address)
        assert (await env.reset(5, {"setup": "begin"}))[0] == "The safe is closed."
        assert [tool["function"]["name"] for tool in env.tools] == ["compare", "open", "grade"]
        assert (await env.step(call("compare", number=94)))[0] == "higher"
        assert (await env.step(call("compare", number="many")))[0].startswith("Error: ")
        observation, *rest = await env.step(call("open", number=95))
        assert json.loads(observation)["said"] == "open"
        assert rest == [1.0, True, False, {"success": True}]
        if way == "http":
            for answer, reward in (("95", 1.0), ("94", 0.0)):
                await env.reset(5, {"setup": "begin", "judge": "grade"})
                assert [tool["function"]["name"] for tool in env.tools] == ["compare", "open"]
                assert await env.step(answer) == ("", reward, True, False, {})
        await env.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_over_http_keeps_the_contract(http_server):
    options = {"setup": "begin", "judge": "grade"}
    check_env(plugins.load("envs", http_server), options=options, seeds=(0,), deadline=20.0)


def coded(data: bytes, kind: str = "image/png") -> dict[str, str]:
    return {"data": base64.b64encode(data).decode(), "mimeType": kind}


def test_pictures_of_results_are_shown_if_the_options_say_so(folder):
    async def main() -> None:
        env = live(odd(folder))
        await env.reset(0, {"task": "Look.", "pictures": True})
        looked = call("do", what="picture", of=coded(PNG)) + call("do")
        text, *_, info = await env.step(looked)
        images, _ = images_taken("step", info)
        assert (text, images) == ("do: seen\ndo: done", (EncodedImage(PNG),))
        await env.close()

    asyncio.run(main())
    options = McpEnv.Options.model_validate({"pictures": True})
    assert options.shows_images


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (coded(PNG[:-20]), "the PNG is cut off"),
        (coded(png_of_size(60_000, 60_000)), "60,000 x 60,000 pixels"),
        (coded(b"<svg onload='alert(1)'/>"), "a SVG file"),
        (coded(PNG, "image/jpeg"), "is a PNG file, and not 'image/jpeg'"),
        (coded(PNG, ""), "is a PNG file, and not ''"),
        ({"data": "%%%%"}, "a picture of do is not taken"),
    ],
)
def test_a_hostile_picture_of_a_server_fails_its_episode_by_name(folder, sent, said):
    async def main() -> None:
        env = live(odd(folder))
        await env.reset(0, {"task": "Look.", "pictures": True})
        with pytest.raises(EnvError, match=said):
            await env.step(call("do", what="picture", of=sent))
        await env.close()

    asyncio.run(main())
