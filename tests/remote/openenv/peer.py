"""The other side of tests/remote/openenv/test_versions.py, run by the Python that has a version of
OpenEnv.

It serves three environments written for OpenEnv, says where, plays two of agentrl's with OpenEnv's
own clients, says what they saw, and ends with its standard input. What it says are lines of JSON.
"""

import asyncio
import json
import sys
import threading
import time
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.cli.__main__ import app as command_line
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
from typer.testing import CliRunner


class Move(Action):
    direction: Literal["up", "down"]
    by: int


class Counted(Observation):
    count: int
    note: str | None = None


class Counter(Environment):
    """Typed: counts up and down to 100. By 13 it raises, by 99 it takes its time."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int = 0, episode_id: str | None = None, start: int = 0) -> Counted:
        self.count, self.steps = start + seed, 0
        return Counted(count=self.count)

    def step(self, action: Move, timeout_s: float | None = None, **more: Any) -> Counted:
        if action.by == 13:
            raise RuntimeError("unlucky")
        if action.by == 99:
            time.sleep(0.5)
        self.count += action.by if action.direction == "up" else -action.by
        self.steps += 1
        return Counted(
            count=self.count,
            reward=float(action.by),
            done=self.count >= 100,
            metadata={"steps": self.steps},
        )

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Say(Action):
    message: str


class Echoed(Observation):
    echoed_message: str


class Echo(Environment):
    """One text in, one text out."""

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Echoed:
        return Echoed(echoed_message="ready")

    def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Echoed:
        return Echoed(echoed_message=action.message, reward=0.1, done=action.message == "bye")

    @property
    def state(self) -> State:
        return State()


class Adder(MCPEnvironment):
    """Tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("adder")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Compute a + b."""
            return a + b

        @tools.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("out of order")

        super().__init__(tools)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(
        self, action: Action, timeout_s: float | None = None, **more: Any
    ) -> Observation:
        return Observation(done=False, metadata={"error": "no such action"})

    @property
    def state(self) -> State:
        return State()


def serve() -> str:
    app = FastAPI()
    app.mount("/typed", create_fastapi_app(Counter, Move, Counted, max_concurrent_envs=2))
    app.mount("/echo", create_fastapi_app(Echo, Say, Echoed))
    app.mount(
        "/tools",
        create_fastapi_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=8),
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def played(url: str, seed: int, actions: list[str]) -> list[Any]:
    told: list[Any] = []
    async with GenericEnvClient(base_url=url) as env:
        told.append((await env.reset(seed=seed)).observation["message"])
        for action in actions:
            result = await env.step({"message": action})
            told.append([result.observation["message"], result.reward, result.done])
            if result.done:
                break
    return told


async def refused(url: str, *frames: Any) -> str:
    async with GenericEnvClient(base_url=url) as env:
        try:
            for frame in frames:
                await (env.reset(**frame["reset"]) if "reset" in frame else env.step(frame))
        except RuntimeError as error:
            return str(error)
    return "taken"


async def called(url: str, *, production: bool) -> list[Any]:
    client = MCPToolClient(base_url=url)
    client.use_production_mode = production
    async with client as env:
        names = [tool.name for tool in await env.list_tools()]
        problem = (await env.reset(seed=5)).observation.metadata["message"]
        total = await env.call_tool("add", a=2, b=3)
        last = await env.step(CallToolAction(tool_name="submit", arguments={"answer": 1}))
        return [names, problem, total, last.observation.result["data"], last.reward, last.done]


EVERY_KIND: list[dict[str, Any]] = [
    {"message": "I do not know yet."},
    {"type": "list_tools"},
    {"type": "call_tool", "tool_name": "add", "arguments": {"a": 2, "b": 3}},
    {"type": "call_tool", "tool_name": "no_such_tool", "arguments": {}},
    {"type": "call_tool", "tool_name": "submit", "arguments": {"answer": 1}},
]


def graded(url: str, moves: list[dict[str, Any]]) -> dict[str, str]:
    """0.10's own graders of a running environment."""
    from openenv.validation.graders.runtime import basic
    from openenv.validation.runtime.collector import collect_runtime_evidence
    from openenv.validation.runtime.contracts import RuntimePlan

    reset = {"episode_id": "graded", "seed": 3, "options": {}}
    plan = RuntimePlan.model_validate(
        {"plan_schema_version": "1", "reset": reset, "actions": moves}
    )
    evidence = collect_runtime_evidence(url, plan, episode_timeout_s=20)
    manifest = SimpleNamespace(reward=SimpleNamespace(range=(0.0, 1.0)))
    subject = SimpleNamespace(runtime_evidence=evidence, manifest=manifest)
    graders = (
        basic.RewardWellFormedGrader(),
        basic.ObservationSchemaGrader(),
        basic.StateContractGrader(),
    )
    return {grader.check_id: grader.run(subject).status.value for grader in graders}


async def play(guess: str, calculator: str, actions: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "played": {
            seed: await played(guess, int(seed), messages) for seed, messages in actions.items()
        },
        "unfit": await refused(guess, {"reset": {"seed": 1}}, {"massage": "1"}),
        "early": await refused(guess, {"message": "1"}),
        "options": await refused(guess, {"reset": {"hihg": 1}}),
        "called": await called(calculator, production=False),
        "in production": await called(calculator, production=True),
    }


def main() -> None:
    ours = json.loads(sys.argv[1])
    print(json.dumps({"url": serve()}), flush=True)
    told = asyncio.run(play(ours["guess"], ours["calculator"], ours["actions"]))
    validated = {
        name: CliRunner().invoke(command_line, ["validate", "--url", ours[name]])
        for name in ("guess", "calculator")
    }
    told["validated"] = {
        name: [result.exit_code, result.output] for name, result in validated.items()
    }
    told["version"] = version(ours["package"])
    told["graded"] = {}
    if ours["graders"]:
        guesses = [{"message": action} for action in ours["actions"]["3"]]
        told["graded"] = {
            "guess": graded(ours["guess"], guesses),
            "calculator": graded(ours["calculator"], EVERY_KIND),
        }
    print(json.dumps(told), flush=True)
    sys.stdin.read()


main()
