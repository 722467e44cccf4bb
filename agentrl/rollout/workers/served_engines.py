"""`ServedEngines`: the controller's engines, by the names under which workers ask them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from agentrl.flow import PausableClock
from agentrl.protocols import Engine, clock_of
from agentrl.rollout.workers.messages import ClockHeld, ClockReleased, Serves


class ServedEngines:
    """Engines with names. `broadcast` sends a message to all workers."""

    def __init__(self, broadcast: Callable[[Any], None]) -> None:
        self._broadcast = broadcast
        self._engines: dict[str, Engine] = {}
        self._signals: dict[str, _ClockSignal] = {}
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
        return name

    def introduce(self) -> Iterator[Serves]:
        """What a new worker needs to know of the engines."""
        yield from map(self._facts, self._engines)

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
