"""`RemoteEngine`: in a rollout worker, an engine of the controller."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from agentrl.cluster.ray_prompts import SentPrompts
from agentrl.errors import EngineDeadError, EngineError
from agentrl.flow import PausableClock
from agentrl.protocols import Engine, EngineStats, GenerateRequest
from agentrl.rollout.workers.messages import (
    Answered,
    Ask,
    ClockHeld,
    ClockReleased,
    Refused,
    Resend,
    Serves,
    Withdrawn,
)
from agentrl.trajectory import Completion

if TYPE_CHECKING:
    from torch import Tensor


class RemoteEngine(Engine):
    """`Engine` that is in the controller's process, or that the controller talks to. It is entered
    there.

    Which replica answers, when new weights come and what happens when one dies is the controller's
    business (`Router`); this side has the requests, and the clock by which their deadlines run.
    """

    def __init__(self, name: str, calls: "EngineCalls") -> None:
        self._name = name
        self._calls = calls
        self._max_context = 0
        self._clock = PausableClock()
        self._prompts = SentPrompts()

    @property
    def policy_version(self) -> int:
        """Not known here: each token of an answer has its own."""
        return 0

    @property
    def max_context(self) -> int:
        """See `Engine`."""
        return self._max_context

    @property
    def clock(self) -> PausableClock:
        """See `Engine.clock`. It follows that of the engine."""
        return self._clock

    def serves(self, max_context: int, *, held: bool) -> None:
        """Take the facts about the engine."""
        self._max_context = max_context
        if held != self._clock.is_held:
            (self._clock.hold if held else self._clock.release)()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. Of a session's prompt, only the new tokens are sent."""
        cut = self._prompts.cut(request)
        completion = await self._calls.ask(self._name, cut or request, is_cut=cut is not None)
        if completion is None:
            completion = await self._calls.ask(self._name, request, is_cut=False)
        assert completion is not None
        self._prompts.answered(request, completion)
        return completion

    async def interrupt(self) -> None:
        """The controller does this.

        Raises:
            EngineError: always.
        """
        raise EngineError("a rollout worker does not interrupt engines: its controller does")

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """The controller does this.

        Raises:
            EngineError: always.
        """
        raise EngineError("a rollout worker does not update engines: its controller does")

    def stats(self) -> EngineStats:
        """Not known here."""
        return EngineStats(0, 0, 0, 0, 0)


class EngineCalls:
    """The engines of the controller by name, and the requests that are under way."""

    def __init__(self) -> None:
        self._engines: dict[str, RemoteEngine] = {}
        self._waiting: dict[int, asyncio.Future[Completion | None]] = {}
        self._numbers = count()
        self.send: Callable[[Any], None] = _unsent
        """Sends a message to the controller."""

    def engine(self, name: str) -> RemoteEngine:
        """The engine of this name."""
        if name not in self._engines:
            self._engines[name] = RemoteEngine(name, self)
        return self._engines[name]

    async def ask(
        self, engine: str, request: GenerateRequest, *, is_cut: bool
    ) -> Completion | None:
        """The answer to a request; None if it must be sent with its whole prompt.

        Raises:
            EngineError: see `Engine.generate`.
        """
        call = next(self._numbers)
        answer: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()
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
        """Take a message about engines; false if it is about something else."""
        match message:
            case Answered(call, completion):
                self._settle(call, completion)
            case Resend(call):
                self._settle(call, None)
            case Refused(call, error):
                waiting = self._waiting.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)
            case Serves(engine, max_context, held):
                self.engine(engine).serves(max_context, held=held)
            case ClockHeld(engine):
                self.engine(engine).clock.hold()
            case ClockReleased(engine):
                self.engine(engine).clock.release()
            case _:
                return False
        return True

    def _settle(self, call: int, answer: Completion | None) -> None:
        waiting = self._waiting.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


def _unsent(message: Any) -> None:
    raise EngineDeadError("the rollout worker is not connected to its controller yet")
