"""OpenEnv's dialect on the server: a client's session wraps one of the server, and adds the state
that OpenEnv expects.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from agentrl.remote.openenv.protocol import (
    Action,
    Answer,
    CallToolAction,
    ListToolsAction,
    ResetRequest,
    State,
)
from agentrl.remote.protocol import Began, Refusal, Reset, Step, Stepped
from agentrl.remote.sessions import Sessions
from agentrl.trajectory import ToolCall


class OpenEnvSession:
    """A client's session and the state of its episode. It sends one request at a time to the
    server's session.

    The server's session is opened when it is first needed, and reopened by a `reset` after it
    expired or failed.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.id = secrets.token_urlsafe(24)
        self.state = State()
        self.attached = False
        self._sessions = sessions
        self._session = ""
        self._seq = 0
        self._began: Began | None = None
        self._lock = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._session in self._sessions

    async def open(self) -> None:
        """Open the session, unless it is open.

        Raises:
            Refusal: the server has no room, or the environment cannot be made.
        """
        if not self.is_open:
            self._session, self._seq = (await self._sessions.open()).session, 0

    async def reset(self, episode: ResetRequest) -> Answer:
        """Begin an episode."""
        seed = secrets.randbelow(1 << 31) if episode.seed is None else episode.seed
        async with self._lock:
            began = await self._begin(seed, episode)
        # OpenEnv has no field for the system prompt, and its tool client drops a text beside the
        # metadata.
        extra = {"seed": seed, "system_prompt": began.system_prompt}
        metadata = {
            **began.info,
            **extra,
            **({"message": began.observation} if began.tools else {}),
        }
        return _answer_of({"message": began.observation}, metadata)

    async def look(self) -> Began:
        """The environment's description of itself. It comes with an episode, so without one, that
        of seed 0 begins.
        """
        async with self._lock:
            return self._began or await self._begin(0, ResetRequest())

    async def act(self, action: Action) -> Answer:
        """Take a step: list the tools, call one, or send a message."""
        if isinstance(action, ListToolsAction):
            tools = [tool_entry(tool, "input_schema") for tool in (await self.look()).tools]
            self._count_step()
            return _answer_of({"tools": tools}, {}, 0.0)
        if isinstance(action, CallToolAction):
            stepped = await self.call(action.tool_name, action.arguments)
            result = tool_result(stepped.observation, "is_error")
            observation = {"tool_name": action.tool_name, "result": result, "error": None}
        else:
            stepped = await self._step(action.message)
            observation = {"message": stepped.observation}
        metadata = {**stepped.info, **({"truncated": True} if stepped.truncated else {})}
        return _answer_of(
            observation, metadata, stepped.reward, stepped.terminated or stepped.truncated
        )

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Stepped:
        """Call a tool, written as a model would write the call."""
        try:
            message = ToolCall(tool, arguments).render()
        except (ValueError, RecursionError) as error:
            raise Refusal(422, f"the arguments of {tool[:64]!r} are not JSON: {error}") from error
        await self.look()
        return await self._step(message)

    async def close(self) -> None:
        """End the session."""
        with contextlib.suppress(Refusal):
            await self._sessions.close(self._session)

    async def _begin(self, seed: int, episode: ResetRequest) -> Began:
        await self.open()
        request = Reset(seq=self._seq + 1, seed=seed, options=episode.options)
        self._began = await self._sessions.reset(self._session, request)
        self._seq += 1
        self.state = State(episode_id=episode.episode_id or secrets.token_hex(16))
        return self._began

    async def _step(self, message: str) -> Stepped:
        async with self._lock:
            if self._began is None:
                raise Refusal(409, "no episode is being played: reset first")
            stepped = await self._sessions.step(
                self._session, Step(seq=self._seq + 1, action=message)
            )
            self._seq += 1
            self._count_step()
            return stepped

    def _count_step(self) -> None:
        """Count a step of the episode. OpenEnv counts every step message, also one that asks for
        the tools.
        """
        self.state = State(episode_id=self.state.episode_id, step_count=self.state.step_count + 1)


class OpenEnvSessions:
    """All sessions of a server. A session ends with its connection; one that JSON-RPC opened ends
    when it is closed.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._by_id: dict[str, OpenEnvSession] = {}
        self._about: Began | None = None
        self._asking = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def session(self, session_id: str | None = None) -> AsyncIterator[OpenEnvSession]:
        """A new session for the duration of the block, or the open session with this id."""
        if session_id is not None:
            yield self.find(session_id)
            return
        session = OpenEnvSession(self.sessions)
        self._by_id[session.id] = session
        try:
            yield session
        finally:
            await self.close(session.id)

    async def open(self) -> OpenEnvSession:
        """Open a session that lasts until it is closed or expires."""
        for lapsed in [
            key
            for key, session in self._by_id.items()
            if not session.attached and not session.is_open
        ]:
            del self._by_id[lapsed]
        session = OpenEnvSession(self.sessions)
        await session.open()
        self._by_id[session.id] = session
        return session

    def find(self, session_id: str) -> OpenEnvSession:
        """The session with this id.

        Raises:
            Refusal: there is no such session.
        """
        session = self._by_id.get(session_id)
        if session is None:
            raise Refusal(404, f"Unknown session_id: {session_id[:64]}")
        return session

    async def close(self, session_id: str) -> None:
        session = self._by_id.pop(session_id, None)
        if session is not None:
            await session.close()

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of open and of allowed sessions, in the form that a full server reports."""
        return {
            "active_sessions": len(self.sessions),
            "max_sessions": self.sessions.limits.max_sessions,
        }

    async def about(self) -> Began:
        """The environment's description of itself, requested once."""
        async with self._asking:
            if self._about is None:
                async with self.session() as session:
                    self._about = await session.look()
            return self._about


def tool_entry(tool: Mapping[str, Any], schema_key: str) -> dict[str, Any]:
    """The entry of a tool in a list of tools."""
    function = tool.get("function", tool)
    schema = function.get("parameters", {})
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        schema_key: schema,
    }


def tool_result(text: str, error_key: str) -> dict[str, Any]:
    """The result of a tool, as MCP writes it."""
    return {"content": [{"type": "text", "text": text}], error_key: False, "data": text}


def _answer_of(
    observation: dict[str, Any],
    metadata: dict[str, Any],
    reward: float | None = None,
    done: bool = False,
) -> Answer:
    """An answer with the metadata in both places: 0.3's clients read it in the observation, 0.10's
    beside it.
    """
    return Answer(
        observation={**observation, "metadata": metadata},
        reward=reward,
        done=done,
        metadata=metadata,
    )
