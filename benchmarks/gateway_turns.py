"""What a turn of the gateway costs the server, beside the least that a server of the same protocol
can do.

    python benchmarks/overhead.py --gateway

256 programs live at a time, in another process. Each asks 8 times for a chat completion, with the
whole conversation, a tool, and an answer of 32 tokens that comes at once. *The gateway* records
exact tokens and their lineage. *The echo* is a FastAPI application that checks each request by the
same types of the package `openai`, and answers with the same type. Both run on uvicorn in this
process, with the same settings; the CPU time is that of all of its threads.
"""

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import Flow, freeze_gc
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.server import GatewayServer, serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.protocols import Engine
from agentrl.remote.gate import idle_timeout
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.settings.sampling import SamplingParams
from agentrl.trajectory import Task

LIVE, TURNS = 256, 8
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Says what is to be seen there.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string"}},
            "required": ["where"],
        },
    },
}


@dataclass
class Waiting:
    """Programs that are played elsewhere, until `played`."""

    keys: list[str] = field(default_factory=list)
    all_live: asyncio.Event = field(default_factory=asyncio.Event)
    played: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        self.keys.append(assignment.api_key)
        if len(self.keys) == LIVE:
            self.all_live.set()
        await self.played.wait()
        return AgentOutcome(1.0)


async def of_gateway(engine: Engine, renderer: TemplateRenderer) -> float:
    """CPU-ms of the gateway for a turn."""
    registry, programs = SessionRegistry(GatewayConfig()), Waiting()
    sampling = SamplingParams(max_tokens=64, stop_token_ids=renderer.stop_token_ids)
    policy = EnginePolicy(engine, sampling, 60.0)
    runner = AgentEpisodeRunner(policy, renderer, registry, programs, Budget(turns=TURNS), 600.0)
    async with serving(registry), Flow("episodes") as flow:
        episodes = [
            flow.start(runner.play(Assignment(f"e{n}", Task("agent", n), n)), name=str(n))
            for n in range(LIVE)
        ]
        await programs.all_live.wait()
        spent = await played_by_others(f"{registry.url}/v1", programs.keys)
        programs.played.set()
    turns = [len(trajectory.turns) for episode in episodes for trajectory in episode.result()]
    assert turns == [TURNS] * LIVE, "the gateway has lost a turn"
    return spent


async def of_echo() -> float:
    """CPU-ms of the echo for a turn."""
    async with echoing() as url:
        return await played_by_others(f"{url}/v1", [f"key-{number}" for number in range(LIVE)])


@asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """The echo's address, inside the block."""
    parser = idle_timeout(GatewayConfig().request_seconds)
    config = uvicorn.Config(
        echo_app(),
        port=0,
        http=parser,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )
    parser = idle_timeout(GatewayConfig().request_seconds)
    config = uvicorn.Config(
        echo_app(),
        port=0,
        http=parser,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        access_log=False,
        log_level="warning",
    )
    server = GatewayServer(config)
    async with Flow("echo") as flow:
        serving_it = flow.start(server.serve(), name="server")
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        await asyncio.wait({serving_it})


def echo_app() -> FastAPI:
    """Says the last message again, by the types of the package `openai`."""
    from openai.types.chat import ChatCompletion, ChatCompletionMessage
    from openai.types.chat.chat_completion import Choice
    from openai.types.chat.completion_create_params import CompletionCreateParams
    from openai.types.completion_usage import CompletionUsage

    app, adapter = FastAPI(), TypeAdapter[Any](CompletionCreateParams)

    @app.post("/v1/chat/completions")
    async def echo(request: Request) -> Response:
        checked = adapter.validate_python(await request.json())
        # Sequences are checked as they are read.
        last, _ = (
            [*checked["messages"]][-1],
            [*checked["tools"]],
        )
        message = ChatCompletionMessage(role="assistant", content=last["content"])
        answer = ChatCompletion(
            id="chatcmpl-1",
            object="chat.completion",
            created=0,
            model=checked["model"],
            choices=[Choice(index=0, message=message, finish_reason="stop", logprobs=None)],
            usage=CompletionUsage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
        )
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    return app


async def played_by_others(url: str, keys: Sequence[str]) -> float:
    """CPU-ms that a turn costs this process, while another one plays an episode with each key."""
    pipe = asyncio.subprocess.PIPE
    programs = await asyncio.create_subprocess_exec(
        sys.executable, __file__, url, *keys, stdin=pipe, stdout=pipe
    )
    assert programs.stdin is not None and programs.stdout is not None  # noqa: PT018
    await programs.stdout.readline()  # they are ready
    gc.unfreeze()  # so that neither is measured while it collects what the other has left
    freeze_gc()  # as a run does
    cpu = time.process_time()
    programs.stdin.write(b"go\n")
    assert await programs.wait() == 0, "a program has failed"
    return 1000 * (time.process_time() - cpu) / (len(keys) * TURNS)


async def play_all(url: str, keys: Sequence[str]) -> None:
    """The other process: all programs at the same time."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        async with asyncio.TaskGroup() as tasks:
            for number, key in enumerate(keys):
                tasks.create_task(_play(client, url, key, number))


async def _play(client: aiohttp.ClientSession, url: str, key: str, number: int) -> None:
    messages: list[Mapping[str, Any]] = [
        {"role": "system", "content": "You play. Answer with what you want to do."},
        {
            "role": "user",
            "content": f"Game {number} begins. You see {number % 97} doors. What do you do?",
        },
    ]
    for turn in range(TURNS):
        body = {"model": "policy", "messages": messages, "tools": [TOOL], "temperature": 1.0}
        async with client.post(
            f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ) as answer:
            answer.raise_for_status()
            said = (await answer.json())["choices"][0]["message"]
        messages = [
            *messages,
            {"role": "assistant", "content": said["content"]},
            {
                "role": "user",
                "content": (
                    f"Turn {turn}. You see {(number * turn) % 89} at {turn % 7}. What do you do?"
                ),
            },
        ]


async def benchmark(
    engine: Engine, renderer: TemplateRenderer, repeats: int, console: Console
) -> None:
    """Both, taking turns."""
    spent: dict[str, list[float]] = {"the gateway": [], "the echo": []}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for name, cost in zip(
            spent, (await of_gateway(engine, renderer), await of_echo()), strict=True
        ):
            spent[name] += [cost] if repeat else []
    table = Table(
        "", "CPU-ms per turn", "ratio", title=f"{LIVE} live programs x {TURNS} turns over HTTP"
    )
    echo = statistics.median(spent["the echo"])
    for name, costs in spent.items():
        table.add_row(
            name, f"{statistics.median(costs):.2f}", f"{statistics.median(costs) / echo:.2f}"
        )
    console.print(table)


if __name__ == "__main__":
    asyncio.run(play_all(sys.argv[1], sys.argv[2:]))
