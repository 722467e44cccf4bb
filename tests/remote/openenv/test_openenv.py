"""OpenEnv both ways: its protocol from `agentrl serve`, and `openenv:` addresses, over real
sockets.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import plugins
from agentrl.conversation.tools import ToolError
from agentrl.envs.base import TextEnv
from agentrl.envs.calculator import Calculator
from agentrl.envs.guess_number import GuessNumber
from agentrl.errors import ConfigError, DeadlineError, EnvError, LethalTaskError, OutageError
from agentrl.flow import run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.net.http_client import http_client
from agentrl.protocols import Env, StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.remote.openenv.adapter import OpenEnvSessions
from agentrl.remote.openenv.client import OpenEnv, openenv
from agentrl.remote.openenv.protocol import ResetRequest
from agentrl.remote.openenv.socket import LostError, ServerObservation
from agentrl.remote.openenv.text import (
    action_from,
    how_to_act,
    text_from,
    tools_from,
    what_is_wrong,
)
from agentrl.remote.protocol import Refusal
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import ServerLimits, Sessions
from agentrl.trajectory import ToolCall
from tests.properties import examples
from tests.remote.served import served

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "content", "text", "x"]), inner)
    ),
    max_leaves=8,
)


class Counting(TextEnv):
    """Says how many steps there were; `sleep S` takes S seconds, `raise` raises, `end` and `cut`
    end the episode.
    """

    isolation = "thread"
    system_prompt = "Count."

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.count = 0
        return f"seed {seed}"

    def step(self, action: str) -> StepResult:
        self.count += 1
        if action.startswith("sleep"):
            time.sleep(float(action.split()[1]))
        if action == "raise":
            raise RuntimeError("broken game")
        return (
            f"{action} {self.count}",
            0.5,
            action == "end",
            action == "cut",
            {"count": self.count},
        )


@pytest.fixture(scope="module")
def counting() -> Iterator[EnvServer]:
    with served(Counting, name="counting") as server:
        yield server


@pytest.fixture(scope="module")
def calculator() -> Iterator[EnvServer]:
    with served(Calculator) as server:
        yield server


class Socket:
    """Frames as OpenEnv's clients send them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def raw(self, text: str) -> Any:
        await self.socket.send_str(text)
        return await self.socket.receive_json(timeout=5)

    async def __call__(self, kind: str, **data: Any) -> Any:
        reply = await self.raw(
            json.dumps(
                {"type": kind, **({"data": data} if data or kind in ("reset", "step") else {})}
            )
        )
        return reply["data"]


def talk(url: str, work: Callable[[Socket], Awaitable[None]], path: str = "/ws") -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as http, http.ws_connect(url + path) as socket:
            await work(Socket(socket))

    asyncio.run(main())


async def _http(url: str, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
    async with http_client() as http:
        answer = await http.request(method, url + path, json=body, **more)
        return answer.status_code, answer.json()


# What `agentrl serve` says.


def test_frames_are_answered_as_openenv_servers_do(counting):
    async def work(ask: Socket) -> None:
        began = await ask("reset", seed=7, episode_id="seven")
        assert began["observation"]["message"] == "seed 7"
        assert (began["reward"], began["done"]) == (None, False)
        assert (
            began["metadata"]
            == {"seed": 7, "system_prompt": "Count."}
            == began["observation"]["metadata"]
        )
        stepped = await ask("step", message="a")
        assert stepped["observation"] == {"message": "a 1", "metadata": {"count": 1}}
        assert (stepped["reward"], stepped["done"]) == (0.5, False)
        assert await ask("state") == {"episode_id": "seven", "step_count": 1}
        assert (await ask("step", message="cut"))["metadata"] == {"count": 2, "truncated": True}
        over = await ask("step", message="b")
        assert (over["code"], "no episode" in over["message"]) == ("EXECUTION_ERROR", True)
        assert (await ask("reset"))["metadata"]["seed"] >= 0
        await ask.socket.send_str('{"type": "close"}')
        assert (await ask.socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE

    talk(counting.url, work)


def test_frames_that_are_wrong_get_openenvs_codes_and_end_nothing(counting):
    async def work(ask: Socket) -> None:
        assert (await ask("step", message="early"))["code"] == "EXECUTION_ERROR"
        await ask("reset", seed=7)
        for text, code in {
            "{": "INVALID_JSON",
            "[]": "VALIDATION_ERROR",
            "7": "VALIDATION_ERROR",
            '{"type": "dance"}': "UNKNOWN_TYPE",
            '{"type": "step"}': "VALIDATION_ERROR",
            '{"type": "step", "data": {"massage": "a"}}': "VALIDATION_ERROR",
            '{"type": "step", "data": {"message": "a"}, "id": 5}': "VALIDATION_ERROR",
            '{"type": "step", "data": {"type": "call_tool"}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"seed": -1}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"seed": "x"}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"seed": true}}': "VALIDATION_ERROR",
            '{"type": "step", "data": '
            '{"type": "call_tool", "tool_name": "a", "arguments": {"x": NaN}}}': (
                "VALIDATION_ERROR"
            ),
        }.items():
            reply = await ask.raw(text)
            assert (reply["type"], reply["data"]["code"]) == ("error", code)
        assert (await ask("step", message="a"))["observation"]["message"] == "a 1"
        assert (await ask("step", message="raise"))["code"] == "EXECUTION_ERROR"
        assert (await ask("step", message="a"))[
            "code"
        ] == "EXECUTION_ERROR"  # what failed has ended
        assert (await ask("reset", seed=8))["observation"]["message"] == "seed 8"

    talk(counting.url, work)


def test_options_that_the_environment_does_not_take_are_a_validation_error():
    async def work(ask: Socket) -> None:
        assert "high" in (await ask("reset", seed=7, hihg=5))["message"]
        assert (await ask("reset", seed=7, high=5))["observation"][
            "message"
        ] == "Guess a number from 1 to 5."

    with served(GuessNumber) as server:
        talk(server.url, work)


def test_tools_are_listed_before_any_reset_and_called_one_by_one(calculator):
    async def work(ask: Socket) -> None:
        tools = (await ask("step", type="list_tools"))["observation"]["tools"]
        assert [tool["name"] for tool in tools] == [
            "add",
            "subtract",
            "multiply",
            "divide",
            "submit",
        ]
        assert set(tools[0]) == {"name", "description", "input_schema"}
        began = await ask("reset", seed=5)
        # For 0.3's tool client.
        assert began["observation"]["metadata"]["message"] == began["observation"]["message"]
        said = (await ask("step", type="call_tool", tool_name="add", arguments={"a": 2, "b": 3}))[
            "observation"
        ]
        assert (said["tool_name"], said["result"]["data"], said["error"]) == ("add", "5", None)
        unknown = (await ask("step", type="call_tool", tool_name="ad"))["observation"]["result"][
            "data"
        ]
        assert unknown.startswith("Error: there is no tool 'ad'; did you mean 'add'?")
        last = await ask("step", type="call_tool", tool_name="submit", arguments={"answer": 1})
        assert (last["done"], last["reward"]) == (True, 0.0)

    talk(calculator.url, work)


def test_json_rpc_has_sessions_that_a_socket_can_attach_to(calculator):
    async def rpc(method: str, **params: Any) -> Any:
        body = {"jsonrpc": "2.0", "id": 4, "method": method, "params": params}
        status, answer = await _http(calculator.url, "POST", "/mcp", body)
        assert (status, answer["jsonrpc"], answer["id"]) == (200, "2.0", 4)
        return answer.get("result") or answer["error"]["code"]

    async def main() -> None:
        assert "inputSchema" in (await rpc("tools/list"))["tools"][0]
        assert (await rpc("tools/call", name="add", arguments={"a": 1, "b": 2}))["data"] == "3"
        session = (await rpc("openenv/session/create"))["session_id"]
        async with aiohttp.ClientSession() as http:
            async with http.ws_connect(f"{calculator.url}/ws?session_id={session}") as socket:
                ask = Socket(socket)
                await ask("reset", seed=5)
                await rpc("tools/call", name="add", arguments={"a": 1, "b": 2}, session_id=session)
                assert (await ask("state"))["step_count"] == 1
                both = await ask("mcp", jsonrpc="2.0", id=9, method="tools/list")
                assert (both["id"], len(both["result"]["tools"])) == (9, 5)
                async with http.ws_connect(f"{calculator.url}/ws?session_id={session}") as second:
                    assert (await second.receive_json(timeout=5))["data"]["code"] == "SESSION_ERROR"
            async with http.ws_connect(f"{calculator.url}/ws?session_id=guess") as socket:
                assert (await socket.receive_json(timeout=5))["data"]["code"] == "SESSION_ERROR"
            async with http.ws_connect(f"{calculator.url}/mcp") as socket:
                reply = await Socket(socket).raw(
                    '{"jsonrpc": "2.0", "method": "tools/list", "id": "a"}'
                )
                assert (reply["id"], len(reply["result"]["tools"])) == ("a", 5)
        assert (await rpc("openenv/session/close", session_id=session))["closed"] is True
        assert await rpc("openenv/session/close", session_id=session) == -32602
        assert await rpc("tools/call", name="add", session_id=session) == -32602
        assert await rpc("tools/call", arguments={}) == -32602
        assert await rpc("initialize") == -32601
        assert (await _http(calculator.url, "POST", "/mcp", {}))[1]["error"]["code"] == -32600
        assert (await _http(calculator.url, "POST", "/mcp", content=b"{"))[1]["error"][
            "code"
        ] == -32700
        # Nothing is left behind, by the tests before either.
        await _until(lambda: len(calculator.sessions) == 0)

    asyncio.run(main())


def test_what_openenv_validates_is_there(counting, calculator):
    async def main() -> None:
        assert (await _http(counting.url, "GET", "/health"))[1]["status"] == "healthy"
        assert (await _http(counting.url, "GET", "/metadata"))[1].items() >= {
            "name": "counting",
            "description": "Count.",
        }.items()
        schemas = (await _http(counting.url, "GET", "/schema"))[1]
        assert schemas["action"]["required"] == ["message"]
        assert set(schemas) == {"action", "observation", "reset_observation", "state"}
        assert (await _http(calculator.url, "GET", "/schema"))[1]["action"][
            "title"
        ] == "CallToolAction"
        paths = (await _http(counting.url, "GET", "/openapi.json"))[1]["paths"]
        assert {"/reset", "/step", "/state", "/mcp", "/schema", "/metadata"} <= set(paths)
        assert (await _http(counting.url, "GET", "/state"))[1] == {
            "episode_id": None,
            "step_count": 0,
        }
        assert (await _http(counting.url, "GET", "/list_environments"))[1] == ["counting"]
        assert (await _http(counting.url, "POST", "/reset", {"seed": 3}))[1]["observation"][
            "message"
        ] == "seed 3"
        assert (await _http(counting.url, "POST", "/reset"))[0] == 200
        step = {"action": {"message": "a"}, "timeout_s": 5}
        assert (await _http(counting.url, "POST", "/step", step))[1]["observation"][
            "message"
        ] == "a 1"
        assert (await _http(counting.url, "POST", "/step", {"action": {"massage": "a"}}))[0] == 422

    asyncio.run(main())


_frames = st.fixed_dictionaries(
    {"type": st.sampled_from(["reset", "step", "state", "mcp", "other"]) | st.integers()},
    optional={
        "data": st.dictionaries(
            st.sampled_from(["seed", "type", "message", "tool_name", "arguments", "method", "x"]),
            _json,
        )
    },
)


# Which ends the session, and is in the sources.
_noise = st.text().filter(lambda text: "close" not in text)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        _frames.map(json.dumps) | _noise | _noise.map(str.encode) | st.binary(max_size=4),
        max_size=8,
    )
)
def test_whatever_frames_come_each_is_answered_and_the_session_goes_on(counting, frames):
    async def work(ask: Socket) -> None:
        for frame in frames:
            await (ask.socket.send_bytes if isinstance(frame, bytes) else ask.socket.send_str)(
                frame
            )
            assert (await ask.socket.receive_json(timeout=5))["type"] in (
                "error",
                "observation",
                "state",
                "mcp",
            )
        assert (await ask("reset", seed=8))["observation"]["message"] == "seed 8"

    talk(counting.url, work)


def test_seats_that_ended_or_lapsed_are_forgotten():
    async def main() -> None:
        sessions = Sessions(
            EnvPool({"counting": Counting}, EnvDeadlines()), "counting", ServerLimits()
        )
        openenv_sessions = OpenEnvSessions(sessions)
        async with openenv_sessions.session() as session:
            await session.reset(ResetRequest(seed=1))
        left = [await openenv_sessions.open() for _ in range(3)]
        await sessions.end_all()  # as the sweep ends what is idle
        kept = await openenv_sessions.open()
        assert openenv_sessions.find(kept.id) is kept
        for session in left:
            with pytest.raises(Refusal, match="Unknown session_id"):
                openenv_sessions.find(session.id)
        await openenv_sessions.close(kept.id)
        assert len(sessions) == 0

    asyncio.run(main())


def test_a_full_server_says_so_closes_the_socket_and_has_room_when_another_goes():
    async def main(url: str) -> None:
        async with aiohttp.ClientSession() as http:
            async with (
                http.ws_connect(f"{url}/ws") as first,
                http.ws_connect(f"{url}/ws") as second,
            ):
                await Socket(first)("reset", seed=1)
                full = await Socket(second)("reset", seed=2)
                assert (full["code"], full["active_sessions"], full["max_sessions"]) == (
                    "CAPACITY_REACHED",
                    1,
                    1,
                )
                assert (await second.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
            async with http.ws_connect(f"{url}/ws") as third:
                assert (await Socket(third)("reset", seed=3))["observation"]["message"] == "seed 3"

    with served(Counting, max_sessions=1) as server:
        asyncio.run(main(server.url))


def test_a_socket_that_says_nothing_is_closed_and_a_vanished_one_gives_its_session_back():
    async def main(server: EnvServer) -> None:
        async with aiohttp.ClientSession() as http:
            silent = await http.ws_connect(f"{server.url}/ws")
            vanished = await http.ws_connect(f"{server.url}/ws")
            await Socket(vanished)("reset", seed=1)
            assert len(server.sessions) == 1
            assert (await silent.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
        await _until(lambda: len(server.sessions) == 0)

    with served(Counting, idle_seconds=0.3) as server:
        asyncio.run(main(server))


def test_a_client_of_the_callers_own_asks_for_the_schema_and_stays_open(counting):
    asked: list[str] = []

    async def note(request: httpx.Request) -> None:
        asked.append(request.url.path)

    async def main() -> None:
        async with httpx.AsyncClient(event_hooks={"request": [note]}) as client:
            env = OpenEnv([counting.url], client=client)
            await env.reset(seed=1, options={})
            await env.close()
            assert asked == ["/schema"]
            assert not client.is_closed

    asyncio.run(main())


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  what it waits for is in another thread
            await asyncio.sleep(0.01)


# What a message means, and what the model reads.

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}


def _action(required: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "title": "Move",
        "properties": {"metadata": {"type": "object"}, **fields},
        "required": required.split(),
    }


@pytest.mark.parametrize(
    ("schema", "message", "data"),
    [
        (_action("say", say=_TEXT), ' {"say": 1} ', {"say": ' {"say": 1} '}),
        (_action("", say={"anyOf": [_TEXT, {"type": "null"}]}), "hi", {"say": "hi"}),
        (_action("say", say=_TEXT, loud={"type": "boolean"}), "hi", {"say": "hi"}),
        (
            _action("say", say=_TEXT, loud={"type": "boolean"}),
            '{"say": "hi", "loud": true}',
            {"say": "hi", "loud": True},
        ),
        (
            _action("say", say=_TEXT, loud={"type": "boolean"}),
            'f(x) = {"x": 1}',
            {"say": 'f(x) = {"x": 1}'},
        ),
        (_action("move", move=_NUMBER), " 3\n", {"move": 3}),
        (_action("move", move=_NUMBER), '{"move": 3}', {"move": 3}),
        (_action("move", move=_NUMBER), "left", {"move": "left"}),
        (_action("move", move={"enum": ["up", "down"], "type": "string"}), " up\n", {"move": "up"}),
        (_action("place", place={"type": "object"}), '{"x": 1}', {"place": {"x": 1}}),
        (
            _action("x y", x=_NUMBER, y=_NUMBER),
            'I go ```json\n{"x": 1, "y": 2}\n``` now',
            {"x": 1, "y": 2},
        ),
        (_action(), "anything", {}),
    ],
)
def test_a_message_becomes_the_action_that_the_schema_asks_for(schema, message, data):
    assert action_from(message, schema) == data


@pytest.mark.parametrize("message", ["left", "{", "[1, 2]", '{"x": NaN}', '{"a":' * 100_000, "}{"])
def test_a_message_that_is_no_action_is_answered_by_what_to_write(message):
    with pytest.raises(ToolError, match=r"JSON object.*x, y"):
        action_from(message, _action("x y", x=_NUMBER, y=_NUMBER))


@examples(50)
@given(
    st.text() | st.builds(json.dumps, _json),
    st.sampled_from([_action("x", x=_TEXT, y=_NUMBER), _action("x y", x=_TEXT, y=_NUMBER)]),
)
def test_whatever_a_model_writes_is_an_action_or_told_back(message, schema):
    with contextlib.suppress(ToolError):
        assert set(action_from(message, schema)) >= set()


@examples(50)
@given(
    st.dictionaries(st.sampled_from(["tool_name", "result", "error", "metadata", "message"]), _json)
)
def test_whatever_a_server_observes_is_a_text(observation):
    observation["metadata"] = {}
    assert isinstance(text_from(observation), str)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"message": "hi", "metadata": {"a": 1}, "note": None}, "hi"),
        ({"count": 3, "metadata": {}}, '{"count": 3}'),
        ({"prompt": "é", "board": [1]}, '{"prompt": "é", "board": [1]}'),
        ({"metadata": {"status": "ready"}}, "ready"),
        ({"metadata": {}}, ""),
        ({"tool_name": "add", "result": {"content": [], "data": 5}}, "5"),
        (
            {
                "tool_name": "add",
                "result": {"content": [{"type": "text", "text": "five"}], "data": None},
            },
            "five",
        ),
        (
            {"tool_name": "add", "result": {"content": [{"text": "no"}], "is_error": True}},
            "Error: no",
        ),
        ({"tool_name": "add", "result": [1, "a"]}, '[1, "a"]'),
        ({"tool_name": "add", "result": None}, ""),
        (
            {
                "tool_name": "add",
                "error": {"error_type": "timeout", "message": "slow"},
                "result": None,
            },
            "Error: slow",
        ),
    ],
)
def test_an_observation_is_read_by_the_rule_that_is_written_down(observation, text):
    assert text_from(observation) == text


def test_tools_are_read_in_both_spellings_and_what_is_wrong_names_the_field():
    schema = {"type": "object", "properties": {"a": _NUMBER}}
    for key in ("input_schema", "inputSchema"):
        (tool,) = tools_from([{"name": "add", "description": "Add.", key: schema}])
        assert tool == {
            "type": "function",
            "function": {"name": "add", "description": "Add.", "parameters": schema},
        }
    error = {
        "message": "Invalid message",
        "errors": [{"loc": ["by"], "msg": "Field required", "input": {}}],
    }
    told = what_is_wrong(error, _action("way by", way=_TEXT, by=_NUMBER))
    assert (
        told == "Error: the action does not fit: by: Field required, got {}. Its fields are way, by"
    )
    assert '"by"' in how_to_act(_action("way by", way=_TEXT, by=_NUMBER))
    assert how_to_act(_action("say", say=_TEXT)) == ""


# What `openenv:` plays, on our servers.


async def _played(env: Env, actions: list[str], seed: int) -> list[Any]:
    live = LiveEnv(env, EnvDeadlines())
    observation, info = await live.reset(seed, {})
    told: list[Any] = [observation, live.system_prompt, list(live.tools)]
    for action in actions:
        observation, reward, terminated, truncated, info = await live.step(action)
        told.append((observation, reward, terminated, truncated, info.get("success")))
        if terminated or truncated:
            break
    await live.close()
    return told


def _calls(rng: random.Random) -> list[str]:
    pair = {"a": rng.randrange(99), "b": rng.randrange(9)}
    add, submit = ToolCall("add", pair).render(), ToolCall("submit", {"answer": pair["a"]}).render()
    return [
        add,
        "I think",
        add + ToolCall("divide", pair).render(),
        ToolCall("ad", {}).render(),
        "<tool_call>{",
        submit,
    ]


@pytest.mark.parametrize("factory", [GuessNumber, Calculator])
def test_an_environment_plays_alike_here_over_http_and_by_openenvs_protocol(factory):
    async def main(url: str) -> None:
        rng = random.Random(3)
        for seed in range(4):
            actions = (
                _calls(rng)
                if factory is Calculator
                else [str(rng.randrange(1, 17)) for _ in range(8)]
            )
            here = await _played(factory(), actions, seed)
            for address in (url, f"openenv:{url}"):
                assert await _played(plugins.load("envs", address)(), actions, seed) == here

    with served(factory) as server:
        asyncio.run(main(server.url))


def test_half_of_a_surrogate_pair_costs_no_episode(counting):
    async def main() -> None:
        env = OpenEnv([counting.url])
        await env.reset(seed=1, options={})
        assert (await env.step("\ud800 é"))[0] == "? é 1"
        await env.close()

    asyncio.run(main())


def test_wrong_options_addresses_and_tokens_are_errors_of_the_config(monkeypatch):
    async def main(url: str) -> None:
        with pytest.raises(ConfigError, match="AGENTRL_OPENENV_TOKEN"):
            await OpenEnv([url], token="wrong").reset(seed=1, options={})
        monkeypatch.setenv("AGENTRL_OPENENV_TOKEN", "secret")
        env = OpenEnv([url])
        with pytest.raises(ConfigError, match="hihg"):
            await env.reset(seed=1, options={"hihg": 4})
        assert (await env.reset(seed=1, options={"high": 4}))[0] == "Guess a number from 1 to 4."
        await env.close()
        with pytest.raises(ConfigError, match="is it an OpenEnv server"):
            await OpenEnv([f"{url}/nowhere"]).reset(seed=1, options={})
        with pytest.raises(EnvError, match=r"127\.0\.0\.1:9"):
            await OpenEnv(["http://127.0.0.1:9"]).reset(seed=1, options={})

    with served(GuessNumber, token="secret") as server:
        asyncio.run(main(server.url))
    with pytest.raises(ConfigError, match="openenv:http://host:port"):
        openenv("localhost:8000")


def test_a_server_of_the_first_version_is_refused_by_what_it_lacks():
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200 if request.url.path == "/health" else 404, json={"status": "healthy"}
        )

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            with pytest.raises(
                ConfigError,
                match=r"http://old:8000 has no /schema, as servers of OpenEnv 0\.1.*0\.3",
            ):
                await OpenEnv(["http://old:8000"], client=client).reset(seed=1, options={})

    asyncio.run(main())


def test_an_unreachable_server_behind_a_proxy_is_told_with_the_proxy(monkeypatch):
    async def main() -> None:
        for make in (OpenEnv, RemoteEnv):
            with pytest.raises(
                EnvError,
                match="HTTP_PROXY is set, and is not used here: the server has to be reached",
            ):
                await make(["http://127.0.0.1:9"]).reset(seed=1, options={})

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    asyncio.run(main())


def test_episodes_wait_for_room_and_get_it_when_another_has_ended(caplog):
    async def main(url: str) -> None:
        envs = [OpenEnv([url]) for _ in range(4)]

        async def play(env: OpenEnv, seed: int) -> None:
            assert (await env.reset(seed=seed, options={}))[0] == f"seed {seed}"
            await env.step("a")
            assert (await env.step("end"))[2]

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for seed, env in enumerate(envs):
                group.create_task(play(env, seed))
        for env in envs:
            await env.close()

    with served(Counting, max_sessions=2) as server:
        asyncio.run(main(server.url))
    (warning,) = (
        record.message
        for record in caplog.records
        if record.name == "agentrl.remote.openenv.socket"
    )
    assert "rollout.max_live_episodes" in warning


def test_a_pool_shares_the_load_and_goes_on_without_a_server_that_went_away():
    async def main(first: EnvServer, second: EnvServer) -> None:
        envs = [openenv(f"{first.url},{second.url}")() for _ in range(6)]
        async with asyncio.TaskGroup() as group:
            for seed, env in enumerate(envs):
                group.create_task(env.reset(seed=seed, options={}))
        assert (len(first.sessions), len(second.sessions)) == (3, 3)
        first.force_exit = first.should_exit = True
        await _until(lambda: not first.started or len(first.sessions) == 0)
        lost = 0
        for env in envs:
            try:
                assert (await env.step("a"))[0] == "a 1"
            except EnvError:
                lost += 1
        assert lost == 3
        for seed, env in enumerate(envs):
            assert (await env.reset(seed=seed, options={}))[0] == f"seed {seed}"
            assert (await env.step("a"))[0] == "a 1"
            await env.close()

    with served(Counting) as first, served(Counting) as second:
        asyncio.run(main(first, second))


# What `openenv:` does when the other side, or time, goes wrong.


class Faulty:
    """An OpenEnv server that does what the action says. Each observation says which action it
    answers.
    """

    def __init__(self, heartbeat: float | None = None) -> None:
        self.heartbeat = heartbeat
        self.open = self.opened = 0

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": _action("message", message=_TEXT)})

    async def play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=self.heartbeat)
        await socket.prepare(request)
        self.open += 1
        self.opened += 1
        try:
            async for frame in socket:
                await self.answer(socket, json.loads(frame.data))
        finally:
            self.open -= 1
        return socket

    async def answer(self, socket: web.WebSocketResponse, frame: Any) -> None:
        said = (
            frame["data"].get("message", f"seed {frame['data'].get('seed')}")
            if "data" in frame
            else ""
        )
        good = {
            "type": "observation",
            "data": {"observation": {"message": said}, "reward": 0.0, "done": False},
        }
        if said.startswith("sleep"):
            await asyncio.sleep(float(said.split()[1]))
        if frame["type"] == "close" or said in ("close", "seed 666"):
            await socket.close()
        elif said == "garbage":
            await socket.send_str("{")
        elif said == "nan":
            await socket.send_str(
                json.dumps({**good, "data": {**good["data"], "reward": float("nan")}})
            )
        elif said.startswith("pays "):
            reward = json.loads(said.removeprefix("pays "))
            await socket.send_json({**good, "data": {**good["data"], "reward": reward}})
        elif said == "state":
            await socket.send_json({"type": "state", "data": {}})
        elif said == "error":
            await socket.send_json(
                {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "broken game"}}
            )
        elif said == "misfit":
            await socket.send_json(
                {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no such move"}}
            )
        elif not socket.closed:
            await socket.send_json(good)


@contextlib.asynccontextmanager
async def faulty(heartbeat: float | None = None) -> AsyncIterator[tuple[Faulty, str]]:
    server, app = Faulty(heartbeat), web.Application()
    app.add_routes([web.get("/schema", server.schema), web.get("/ws", server.play)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("fault", ["sleep 0.2", "close", "garbage", "nan", "state", "error"])
def test_after_a_step_without_its_answer_the_socket_is_never_asked_again(fault):
    async def main() -> None:
        async with faulty() as (server, url):
            env = OpenEnv([url])
            live = LiveEnv(env, EnvDeadlines(step=0.05))
            await live.reset(1, {})
            with pytest.raises(DeadlineError if fault.startswith("sleep") else EnvError):
                await live.step(fault)
            with pytest.raises(EnvError, match="no episode"):
                await env.step("a")
            assert (await env.reset(seed=2, options={}))[0] == "seed 2"
            # The late answer has come, to nobody.
            await asyncio.sleep(0.25 if fault.startswith("sleep") else 0)
            assert (await env.step("b"))[0] == "b"
            assert server.opened == 2
            await env.close()
            await _until(lambda: server.open == 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reward", "paid"), [("1", 1.0), ("0.25", 0.25), ("true", 1.0), ("false", 0.0), ("null", 0.0)]
)
def test_rewards_of_openenvs_own_types_are_paid_as_numbers(reward, paid):
    async def main() -> None:
        async with faulty() as (_, url):
            env = OpenEnv([url])
            await env.reset(seed=1, options={})
            assert repr((await env.step(f"pays {reward}"))[1]) == repr(paid)
            with pytest.raises(EnvError, match="reward"):
                await env.step('pays "1"')
            await env.close()

    asyncio.run(main())


def test_a_reset_without_its_answer_drops_the_socket_too():
    async def main() -> None:
        async with faulty() as (server, url):
            env = OpenEnv([url])
            await env.reset(seed=1, options={})
            with pytest.raises(EnvError, match="closed the connection"):
                await env.reset(seed=666, options={})
            with pytest.raises(EnvError, match="no episode"):
                await env.step("a")
            assert (await env.reset(seed=3, options={}))[0] == "seed 3"
            await env.close()
            await _until(lambda: server.open == 0)

    asyncio.run(main())


def test_an_action_that_does_not_fit_is_told_to_the_model_on_the_same_socket():
    async def main() -> None:
        async with faulty() as (server, url):
            env = OpenEnv([url])
            await env.reset(seed=1, options={})
            observation, reward, terminated, truncated, _ = await env.step("misfit")
            assert observation.startswith("Error: the action does not fit: no such move")
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert (await env.step("a"))[0] == "a"
            assert server.opened == 1
            await env.close()

    asyncio.run(main())


def test_steps_cancelled_at_any_moment_never_shift_the_answers():
    async def one(url: str, number: int, rng: random.Random) -> int:
        env, cancelled = OpenEnv([url]), 0
        for turn in range(25):
            try:
                async with asyncio.timeout(rng.choice([0.0, 0.001, 0.003, 0.01, 5.0])):
                    if turn % 5 == 0 or env._socket is None or not env._socket.usable:
                        assert (await env.reset(seed=turn, options={}))[0] == f"seed {turn}"
                    said = rng.choice([f"sleep 0.002 {number} {turn}", f"a {number} {turn}"])
                    assert (await env.step(said))[0] == said
            except TimeoutError:
                cancelled += 1
        await env.close()
        return cancelled

    async def main() -> None:
        rng = random.Random(0)
        async with faulty() as (server, url), asyncio.timeout(20):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(url, number, rng)) for number in range(12)]
            assert sum(task.result() for task in tasks) > 50
            await _until(lambda: server.open == 0)

    asyncio.run(main())


def test_the_servers_pings_are_answered_while_nobody_asks():
    async def main() -> None:
        async with faulty(heartbeat=0.05) as (_, url):
            env = OpenEnv([url])
            await env.reset(seed=1, options={})
            # The model thinks; the server gives up a socket that is silent for 0.075 s.
            await asyncio.sleep(0.4)
            assert (await env.step("a"))[0] == "a"
            await env.close()

    asyncio.run(main())


def test_a_socket_that_lapsed_between_episodes_is_replaced_without_a_word():
    async def main(server: EnvServer) -> None:
        env = OpenEnv([server.url])
        await env.reset(seed=1, options={})
        await env.step("end")
        await _until(lambda: len(server.sessions) == 0)
        assert (await env.reset(seed=2, options={}))[0] == "seed 2"
        assert (await env.step("a"))[0] == "a 1"
        await env.close()

    with served(Counting, idle_seconds=0.2) as server:
        asyncio.run(main(server))


class Frail:
    """A connection to a server that dies of the reset with seed 13 and of steps in the episodes of
    seed 14, and that ends connections in the episodes of seed 15, as one does that drains.
    """

    tools = ()
    action_schema: Mapping[str, Any] = {"properties": {"message": {"type": "string"}}}
    usable = True

    def __init__(self, server: Any, asked: list[int]) -> None:
        self.server = server
        self.asked = asked

    async def ask(self, kind: str, data: Mapping[str, Any]) -> ServerObservation:
        self.seed = data.get("seed", getattr(self, "seed", 0))
        self.asked.append(self.seed)
        await asyncio.sleep(1)
        if self.seed == 13 or (kind == "step" and self.seed in (14, 15)):
            self.usable = False
            error = LostError("the connection ended")
            error.lives = self.seed == 15
            raise error
        return ServerObservation(observation={"text": "begun"})

    async def close(self) -> None:
        """There is nothing to close."""


def test_a_reset_that_servers_die_of_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def opened(server: Any, client: Any) -> Frail:
        return Frail(server, asked)

    monkeypatch.setattr("agentrl.remote.openenv.client.Socket.open", opened)

    async def main() -> None:
        with pytest.raises(OutageError, match="the connection ended"):
            await OpenEnv(["http://here:1"]).reset(seed=13, options={})
        await OpenEnv(["http://here:1"]).reset(seed=14, options={})
        await asyncio.sleep(10)  # the server is started again
        for _ in range(3):
            with pytest.raises(
                LethalTaskError, match=r"died 2 times while they .* the reset with {'seed': 13}"
            ):
                await OpenEnv(["http://here:1"]).reset(seed=13, options={})

    run_virtual(main)
    assert asked == [13, 14, 13]


def test_a_task_in_whose_steps_servers_die_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def opened(server: Any, client: Any) -> Frail:
        return Frail(server, asked)

    monkeypatch.setattr("agentrl.remote.openenv.client.Socket.open", opened)

    async def main() -> None:
        for seed, failures in ((14, [LostError, LethalTaskError]), (15, [LostError] * 4)):
            for failure in failures:
                env = OpenEnv(["http://here:1"])
                await env.reset(seed=seed, options={})
                with pytest.raises(failure):
                    await env.step("left")
                await asyncio.sleep(10)  # the server is started again
        with pytest.raises(
            LethalTaskError, match=r"died 2 times while they .* the reset with {'seed': 14}"
        ):
            await OpenEnv(["http://here:1"]).reset(seed=14, options={})
        env = OpenEnv(["http://here:1"])
        await env.reset(seed=16, options={})
        assert (await env.step("left"))[0] == "begun"

    run_virtual(main)
    assert asked == [14] * 4 + [15] * 8 + [16] * 2
