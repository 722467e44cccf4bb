"""Requests to an engine in another process, over a link.

    EngineClient ── Ask, Withdrawn ─▶ EngineServer
                 ◀─ Answered, Refused, Resend ──

The client is in a rollout worker, the server in the controller or beside the engine itself.

Of a session's prompt, only the new tokens are sent.
"""

import asyncio
import pickle
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.cluster.ray_prompts import HeldPrompts, SentPrompts
from agentrl.errors import EngineDeadError
from agentrl.flow import Flow

if TYPE_CHECKING:
    from agentrl.net.link import MessageLink
    from agentrl.protocols import GenerateRequest
    from agentrl.trajectory import Completion


class Ask(NamedTuple):
    """A request."""

    call: int
    engine: str
    """The name of the engine, where several are served."""
    request: "GenerateRequest"
    is_cut: bool
    """Its prompt is without the tokens that the other side holds (`HeldPrompts`)."""


class Withdrawn(NamedTuple):
    """The caller of a request has been cancelled: its answer is not needed."""

    call: int


class ReplicaAnswer(NamedTuple):
    """The answer of an engine."""

    completion: "Completion"
    was_interrupted: bool = False
    """New weights, or the removal of the engine, ended it before its end."""


class Answered(NamedTuple):
    """The answer to a request."""

    call: int
    answer: ReplicaAnswer


class Refused(NamedTuple):
    """A request failed with this error."""

    call: int
    error: BaseException


class Resend(NamedTuple):
    """A request was sent without the tokens that the other side should hold, and it does not hold
    them.
    """

    call: int


class EngineClient:
    """The requests of this process over one link. `send` sends a message over it."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.send = send
        self._waiting: dict[int, asyncio.Future[ReplicaAnswer | None]] = {}
        self._numbers = count()
        self._prompts = defaultdict[str, SentPrompts](SentPrompts)

    @property
    def live(self) -> int:
        """Requests without an answer yet."""
        return len(self._waiting)

    async def generate(self, request: "GenerateRequest", engine: str = "") -> ReplicaAnswer:
        """The answer to a request.

        Raises:
            EngineError: see `Engine.generate`.
            EngineDeadError: the link has ended.
        """
        prompts = self._prompts[engine]
        cut = prompts.cut(request)
        answer = await self._ask(engine, cut or request, is_cut=cut is not None)
        if answer is None:  # the other side no longer holds the session's tokens
            answer = await self._ask(engine, request, is_cut=False)
        assert answer is not None
        prompts.answered(request, answer.completion)
        return answer

    async def _ask(
        self, engine: str, request: "GenerateRequest", *, is_cut: bool
    ) -> ReplicaAnswer | None:
        """The answer to a request; None if it must be sent with its whole prompt."""
        call = next(self._numbers)
        answer: asyncio.Future[ReplicaAnswer | None] = asyncio.get_running_loop().create_future()
        self._waiting[call] = answer
        self.send(Ask(call, engine, request, is_cut))
        try:
            return await answer
        except asyncio.CancelledError:
            self.send(Withdrawn(call))
            raise
        finally:
            del self._waiting[call]

    def take(self, message: Any) -> bool:
        """Take a message about requests; false if it is about something else."""
        match message:
            case Answered(call, answer):
                self._settle(call, answer)
            case Resend(call):
                self._settle(call, None)
            case Refused(call, error):
                waiting = self._waiting.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)
            case _:
                return False
        return True

    def lose(self, why: EngineDeadError) -> None:
        """The link has ended: all requests without an answer raise this."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(why)

    def _settle(self, call: int, answer: ReplicaAnswer | None) -> None:
        waiting = self._waiting.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class EngineServer:
    """Answers the requests of another process over `link`. `flow` owns them; `generate` asks the
    engine of a name; `prompts` are the tokens that are held of the sessions of each engine.
    `where`: what this process is called in errors.
    """

    def __init__(
        self,
        link: "MessageLink",
        flow: Flow,
        generate: "Callable[[str, GenerateRequest], Awaitable[ReplicaAnswer]]",
        prompts: MutableMapping[str, HeldPrompts],
        where: str,
    ) -> None:
        self._link = link
        self._flow = flow
        self._generate = generate
        self._prompts = prompts
        self._where = where
        self._calls: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Any) -> bool:
        """Take a message about requests; false if it is about something else."""
        match message:
            case Ask():
                self._calls[message.call] = self._flow.start(
                    self._answer(message), name=f"request {message.call}"
                )
            case Withdrawn(call):
                if call in self._calls:
                    self._calls[call].cancel()
            case _:
                return False
        return True

    def end(self) -> None:
        """Cancel all requests: the other side has gone."""
        for call in self._calls.values():
            call.cancel()

    async def _answer(self, ask: Ask) -> None:
        """Ask an engine, and send what it answers or raises."""
        prompts = self._prompts[ask.engine]
        request = prompts.whole(ask.request) if ask.is_cut else ask.request
        try:
            if request is None:
                self._link.send(Resend(ask.call))
                return
            answer = await self._generate(ask.engine, request)
            prompts.answered(request, answer.completion, was_cut=ask.is_cut)
            self._link.send(Answered(ask.call, answer))
        except Exception as error:  # the other side raises it
            self._link.send(Refused(ask.call, portable(error, self._where)))
        finally:
            self._calls.pop(ask.call, None)


def portable(error: BaseException, where: str) -> BaseException:
    """The error as another process can raise it, with a note of the frames that it came from there.

    One that cannot be pickled becomes a RuntimeError with its text.
    """
    frames = "".join(traceback.format_exception(error))
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # pickle raises whatever the error's own code raises
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"raised in {where}:\n{frames}")
    return copy


__all__ = [
    "Answered",
    "Ask",
    "EngineClient",
    "EngineServer",
    "Refused",
    "ReplicaAnswer",
    "Resend",
    "Withdrawn",
    "portable",
]
