"""Episodes whose program calls over HTTP, with the real clients, for tests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.gateway.outcome import AgentOutcome, outcome_of
from agentrl.gateway.program import AgentProgram, ProgramAssignment
from agentrl.gateway.server import serving
from agentrl.gateway.session import AgentSession
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.protocols import Engine
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Task, ToolCall, Trajectory
from tests.processes import PATIENCE_SECONDS

RENDERER = TemplateRenderer(ByteTokenizer(), RendererConfig(tool_format="canonical"))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
CALL = ToolCall("add", {"a": 2, "b": 3}).render()


@dataclass
class Calling:
    """A program that is a function of its assignment."""

    play: Callable[[ProgramAssignment], Awaitable[Any]]
    registry: SessionRegistry
    sessions: list[AgentSession] = field(default_factory=list)

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        self.sessions.append(self.registry.session(assignment.api_key))
        return outcome_of(await self.play(assignment), "play")


def saying(*texts: str, **fields: Any) -> ScriptedEngine:
    """An engine that answers call n with text n (the last one again and again)."""

    def reply(request: Any) -> list[int]:
        number = int(request.id.rpartition("/")[2])
        return list(texts[min(number, len(texts) - 1)].encode())

    return ScriptedEngine.replying(reply, max_context=fields.pop("max_context", 100_000), **fields)


def runner_on(
    registry: SessionRegistry,
    engine: Engine,
    program: AgentProgram,
    seconds: float,
    *,
    trained: bool = True,
    formats: bool = False,
    renderer: TemplateRenderer = RENDERER,
) -> AgentEpisodeRunner:
    """Plays a program's episodes, of up to 100 calls."""
    sampling = SamplingParams(max_tokens=4096, stop_token_ids=renderer.stop_token_ids)
    policy = EnginePolicy(engine, sampling, 60.0, trained, formats=formats)
    return AgentEpisodeRunner(policy, renderer, registry, program, Budget(turns=100), seconds)


def served(
    play: Callable[[ProgramAssignment], Awaitable[Any]],
    engine: Engine,
    *,
    config: GatewayConfig | None = None,
    seconds: float = 60.0,
    trained: bool = True,
    formats: bool = False,
    episode: str = "e",
    renderer: TemplateRenderer = RENDERER,
) -> tuple[Trajectory, AgentSession]:
    """Play one episode of a program behind a server."""

    async def main() -> tuple[Trajectory, AgentSession]:
        registry = SessionRegistry(config or GatewayConfig())
        program = Calling(play, registry)
        runner = runner_on(
            registry, engine, program, seconds, trained=trained, formats=formats, renderer=renderer
        )
        async with engine, serving(registry):
            (trajectory,) = await runner.play(Assignment(episode, Task("agent", 0), 0))
        return trajectory, program.sessions[0]

    return asyncio.run(main())


def loads(text: str) -> Any:
    return json.loads(text)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something outside, with patience."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
