"""`DirectReplicas`: in a rollout worker, the replicas of an engine that it asks itself."""

import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.cluster.engine_link import EngineClient, ReplicaAnswer
from agentrl.errors import EngineDeadError
from agentrl.net.link import Door, MessageLink, connect
from agentrl.rollout.session_homes import SessionHomes
from agentrl.rollout.workers.messages import AskedDirectly

if TYPE_CHECKING:
    from agentrl.cluster.engine_door import Doors
    from agentrl.protocols import GenerateRequest

logger = logging.getLogger(__name__)

Start = Callable[[Coroutine[Any, Any, None]], object]
"""Starts a task."""


@dataclass(eq=False, slots=True)
class _Replica:
    """A replica with an open link."""

    door: Door
    client: EngineClient
    link: MessageLink
    answers: int = 0
    """Answers that were not reported yet."""
    reported: int = 0
    """Requests under way by the last report."""


class DirectReplicas:
    """The replicas behind the doors that the controller tells of. A conversation stays with one of
    them. `start` owns the attempts to connect.
    """

    def __init__(self, rank: int, start: Start) -> None:
        self._rank = rank
        self._start = start
        self._doors: Doors = ()
        self._connecting: set[Door] = set()
        self._linked: dict[Door, _Replica] = {}
        self._usable: list[_Replica] = []
        self._homes = SessionHomes[_Replica]()

    def follow(self, doors: "Doors") -> None:
        """Ask the replicas behind these doors from now on, and no others. Requests that are in
        flight at another replica end there.
        """
        self._doors = doors
        for door in doors:
            if door not in self._linked and door not in self._connecting:
                self._connecting.add(door)
                self._start(self._connect(door))
        self._note_usable()

    async def ask(self, request: "GenerateRequest") -> ReplicaAnswer | None:
        """The answer of a replica; None if there is no replica, or if it dies meanwhile. The caller
        then asks the controller.

        Raises:
            EngineError: see `Engine.generate`.
        """
        # The experts that a mixture has chosen stay in the engine's object store, to which only the
        # controller has references.
        if not self._usable or request.keep_experts:
            return None
        replica = self._homes.choose(
            request.session, self._usable, lambda replica: replica.client.live
        )
        try:
            answer = await replica.client.generate(request)
        except EngineDeadError:
            self._give_up(replica)
            return None
        replica.answers += 1
        self._close_if_unused(replica)
        return answer

    def reports(self, engine: str) -> Iterator[AskedDirectly]:
        """What the controller does not know of the requests to an engine of this name."""
        for replica in self._linked.values():
            live = replica.client.live
            if replica.answers or live != replica.reported:
                yield AskedDirectly(engine, replica.door, live, replica.answers)
                replica.answers, replica.reported = 0, live

    def close(self) -> None:
        """End the connections."""
        self._doors = ()
        for replica in list(self._linked.values()):
            self._give_up(replica)

    async def _connect(self, door: Door) -> None:
        client = EngineClient(_raise_unconnected)
        try:
            link = await connect(door, self._rank, client.take)
        except OSError as error:
            # It may have died, which the controller finds.
            logger.info("%s:%d cannot be asked directly: %s", door.host, door.port, error)
            return
        finally:
            self._connecting.discard(door)
        client.send = link.send
        replica = self._linked[door] = _Replica(door, client, link)
        link.closed.add_done_callback(lambda _: self._give_up(replica))
        self._note_usable()

    def _give_up(self, replica: _Replica) -> None:
        """Ask a replica no more. Its requests are asked again elsewhere."""
        if self._linked.pop(replica.door, None) is None:
            return
        self._note_usable()
        replica.link.close()
        replica.client.lose(EngineDeadError("its connection has ended"))

    def _note_usable(self) -> None:
        at = [door for door in self._doors if door in self._linked]
        # Each worker begins at another replica: `SessionHomes` takes the first of equally busy
        # ones, and would send the first requests of all workers to the same.
        begin = self._rank % max(1, len(at))
        self._usable = [self._linked[door] for door in at[begin:] + at[:begin]]
        for replica in list(self._linked.values()):
            self._close_if_unused(replica)

    def _close_if_unused(self, replica: _Replica) -> None:
        if replica.door not in self._doors and not replica.client.live:
            self._give_up(replica)


def _raise_unconnected(message: Any) -> None:
    raise EngineDeadError("the rollout worker is not connected to this engine yet")


__all__ = ["DirectReplicas", "Start"]
