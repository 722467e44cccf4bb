"""Programs without HTTP, for tests of what lies behind the protocols."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import EnvError
from agentrl.gateway.call import AgentAnswer, ChatRequest, RequestOptions
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.refusal import CallRefusedError
from agentrl.gateway.session import AgentSession
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.budget import Budget
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Message

RENDERER = TemplateRenderer(ByteTokenizer())


@dataclass
class Scripted:
    """A program that is a function of its session."""

    play: Callable[[AgentSession], Awaitable[AgentOutcome]]
    registry: SessionRegistry
    sessions: list[AgentSession] = field(default_factory=list)

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        session = self.registry.session(assignment.api_key)
        self.sessions.append(session)
        try:
            return await self.play(session)
        except (KeyError, ValueError, CallRefusedError) as error:
            raise EnvError(f"the program crashed: {error!r}") from error


MANY_CALLS = Budget(turns=1000)


def runner_of(
    play: Callable[[AgentSession], Awaitable[AgentOutcome]],
    engine: ScriptedEngine,
    *,
    trained: bool = True,
    budget: Budget = MANY_CALLS,
    seconds: float = 1e6,
    config: GatewayConfig | None = None,
    needs_reward: bool = True,
) -> AgentEpisodeRunner:
    registry = SessionRegistry(config or GatewayConfig())
    sampling = SamplingParams(max_tokens=64, stop_token_ids=RENDERER.stop_token_ids)
    policy = EnginePolicy(engine, sampling, 1e5, trained)
    return AgentEpisodeRunner(
        policy,
        RENDERER,
        registry,
        Scripted(play, registry),
        budget,
        seconds,
        needs_reward=needs_reward,
    )


async def said(
    session: AgentSession, messages: Sequence[Message], **fields: object
) -> list[AgentAnswer]:
    """Ask, and receive the answers."""
    async with session.asking(ChatRequest(tuple(messages), **fields)) as call:
        call.delivered = True
        return list(call.answers)


async def abandoned(
    session: AgentSession, messages: Sequence[Message], seconds: float, **fields: object
) -> bool:
    """Ask, and go away after `seconds` without having read the answer. Whether it was there by
    then.
    """
    try:
        async with asyncio.timeout(seconds), session.asking(ChatRequest(tuple(messages), **fields)):
            return True
    except TimeoutError:
        return False


def user(text: str) -> Message:
    return Message("user", text)


__all__ = ["RENDERER", "RequestOptions", "Scripted", "abandoned", "runner_of", "said", "user"]
