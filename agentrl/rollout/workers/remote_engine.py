"""`RemoteEngine`: in a rollout worker, an engine of the controller."""

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.cluster.engine_link import EngineClient, ReplicaAnswer
from agentrl.errors import EngineDeadError, EngineError
from agentrl.flow import PausableClock
from agentrl.protocols import Engine, EngineStats, GenerateRequest
from agentrl.rollout.continuation import joined, rest_of
from agentrl.rollout.workers.direct_replicas import DirectReplicas, Start
from agentrl.rollout.workers.messages import (
    AskedDirectly,
    ClockHeld,
    ClockReleased,
    Serves,
    ServesDirectly,
)
from agentrl.trajectory import Completion

if TYPE_CHECKING:
    from torch import Tensor


class RemoteEngine(Engine):
    """`Engine` that is in the controller's process, or that the controller talks to. It is entered
    there.

    Replicas in other processes are asked directly, as long as the controller says so. All other
    requests, and those that such a replica has died of, go through the controller: when new weights
    come, what happens when a replica dies, and what a request may wait for is its business
    (`Router`). This side has the requests, and the clock by which their deadlines run.
    """

    def __init__(self, name: str, controller: EngineClient, direct: DirectReplicas) -> None:
        self._name = name
        self._controller = controller
        self._max_context = 0
        self._clock = PausableClock()
        self.direct = direct
        """The replicas that are asked directly."""

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
        if held and not self._clock.is_held:
            self._clock.hold()
        elif self._clock.is_held and not held:
            self._clock.release()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        done: Completion | None = None
        while True:
            answer = await self._ask(rest_of(request, done) if done else request)
            completion = joined(done, answer.completion) if done else answer.completion
            if not answer.was_interrupted:
                return completion
            # As in the router: an answer of a format begins again if the engine keeps its place.
            done = completion if request.format is None else None

    async def _ask(self, request: GenerateRequest) -> ReplicaAnswer:
        answer = await self.direct.ask(request)
        return answer or await self._controller.generate(request, self._name)

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


class RemoteEngines:
    """The engines of the controller by name, for the worker of a rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._start: Start | None = None
        self._engines: dict[str, RemoteEngine] = {}
        self._controller = EngineClient(_raise_unconnected)

    @contextmanager
    def connecting(self, start: Start) -> Iterator[None]:
        """Inside the block, replicas are connected to by tasks that `start` starts."""
        self._start = start
        try:
            yield
        finally:
            self._start = None
            for engine in self._engines.values():
                engine.direct.close()

    def send_with(self, send: Callable[[Any], None]) -> None:
        """Send messages to the controller in this way from now on."""
        self._controller.send = send

    def engine(self, name: str) -> RemoteEngine:
        """The engine of this name."""
        if name not in self._engines:
            direct = DirectReplicas(self._rank, self._begin)
            self._engines[name] = RemoteEngine(name, self._controller, direct)
        return self._engines[name]

    def take(self, message: Any) -> bool:
        """Take a message about engines; false if it is about something else."""
        match message:
            case Serves(engine, max_context, held):
                self.engine(engine).serves(max_context, held=held)
            case ServesDirectly(engine, doors):
                self.engine(engine).direct.follow(doors)
            case ClockHeld(engine):
                self.engine(engine).clock.hold()
            case ClockReleased(engine):
                self.engine(engine).clock.release()
            case _:
                return self._controller.take(message)
        return True

    def reports(self) -> Iterator[AskedDirectly]:
        """What the controller does not know of the requests to replicas."""
        for name, engine in self._engines.items():
            yield from engine.direct.reports(name)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._start is None:  # the worker is ending
            work.close()
        else:
            self._start(work)


def _raise_unconnected(message: Any) -> None:
    raise EngineDeadError("the rollout worker is not connected to its controller yet")


__all__ = ["RemoteEngine", "RemoteEngines"]
