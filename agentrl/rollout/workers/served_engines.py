"""`ServedEngines`: the controller's engines, by the names under which workers ask them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from agentrl.cluster.engine_door import Doors, OffersDoors
from agentrl.flow import PausableClock
from agentrl.protocols import Engine, clock_of
from agentrl.rollout.workers.messages import (
    AskedDirectly,
    ClockHeld,
    ClockReleased,
    Serves,
    ServesDirectly,
)


class ServedEngines:
    """Engines with names. `broadcast` sends a message to all workers."""

    def __init__(self, broadcast: Callable[[Any], None]) -> None:
        self._broadcast = broadcast
        self._engines: dict[str, Engine] = {}
        self._signals: dict[str, _ClockSignal] = {}
        self._doors: dict[str, Doors] = {}
        self._following = ExitStack()

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def name_of(self, engine: Engine, name: str = "") -> str:
        """The name of an engine, which is served from now on. `name`: the one that a new engine
        gets, by default one that no other has. The engine must be entered.
        """
        for known, other in self._engines.items():
            if other is engine:
                return known
        name = name or f"engine {len(self._engines)}"
        signal = _ClockSignal(name, self._broadcast)
        self._engines[name], self._signals[name] = engine, signal
        self._following.enter_context(signal.following(clock_of(engine)))
        self._broadcast(self._facts(name))
        if isinstance(engine, OffersDoors):
            engine.follow_doors(partial(self._open_doors, name))
        return name

    def introduce(self) -> Iterator[Serves | ServesDirectly]:
        """What a new worker needs to know of the engines."""
        yield from map(self._facts, self._engines)
        for name, doors in self._doors.items():
            yield ServesDirectly(name, doors)

    def note_direct(self, rank: int, asked: AskedDirectly) -> None:
        """Take what the worker of this rank tells of its requests past the controller."""
        engine = self._engines[asked.engine]
        if isinstance(engine, OffersDoors):
            engine.note_direct(rank, asked.door, asked.live, asked.answers)

    def forget_worker(self, rank: int) -> None:
        """The worker of this rank is gone, and its requests with it."""
        for engine in self._engines.values():
            if isinstance(engine, OffersDoors):
                engine.forget_worker(rank)

    def _open_doors(self, name: str, doors: Doors) -> None:
        self._doors[name] = doors
        self._broadcast(ServesDirectly(name, doors))

    def close(self) -> None:
        """Follow the engines' clocks no longer."""
        self._following.close()

    def _facts(self, name: str) -> Serves:
        return Serves(name, self._engines[name].max_context, self._signals[name].is_held)


class _ClockSignal(PausableClock):
    """Follows the clock of an engine, and tells the workers when that stands still and goes on."""

    __slots__ = ("_broadcast", "_name")

    def __init__(self, name: str, broadcast: Callable[[Any], None]) -> None:
        super().__init__()
        self._name = name
        self._broadcast = broadcast

    def hold(self) -> None:
        super().hold()
        self._broadcast(ClockHeld(self._name))

    def release(self) -> None:
        super().release()
        self._broadcast(ClockReleased(self._name))
