"""`RolloutWorkers`: the processes that play episodes for the controller.

    Member ─▶ WorkerRunner ─▶ RolloutWorkers ──Play──▶ worker: environments, renderer, tokenizer
                                    ▲                    │
                        engines ◀───┴────── requests ────┘  and at the end, trajectories

An episode is played by one worker from its beginning to its end. The worker with the fewest
episodes gets the next one. Which one that is changes nothing, because all seeds of an episode are
in its assignment. A worker that dies, or gives no sign of life, is replaced; its episodes fail, and
are played again as after any failure (`agentrl/rollout/attempts.py`). A task that has killed two
workers is set aside (`agentrl/flow/suspicion.py`). With a scaling, the number of workers follows
the load: a worker that leaves plays its episodes to their ends, and gets no others.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

from pydantic_core import to_json

from agentrl.cluster.supervised import RESTARTS, Supervised
from agentrl.cluster.worker_registry import WorkerCount, register_workers
from agentrl.cluster.workers import LEASE_SECONDS, Forked, StartWorker, Worker
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import LethalTaskError, WorkerDiedError
from agentrl.flow import Flow, Suspect, Suspicion, elapsed, now, waiting_for
from agentrl.net.interfaces import LOOPBACK
from agentrl.net.link import Door, MessageLink, open_door
from agentrl.protocols import Engine
from agentrl.rollout.assignment import Assignment, Report, ignore_reports
from agentrl.rollout.workers.connection import ROLE, WorkerConnection
from agentrl.rollout.workers.host import OpenParts, RolloutWorker
from agentrl.rollout.workers.messages import HavePlayed, PlayedPolicy, Stop
from agentrl.rollout.workers.scaling import WorkerScaling
from agentrl.rollout.workers.served_engines import ServedEngines
from agentrl.settings.sampling import SamplingParams
from agentrl.trajectory import Failed, Task, Trajectory

STOP_SECONDS = 10.0
"""How long a worker may take to close its environments before it is killed."""
_FIRST_ATTEMPTS = 3
"""The run fails when this many workers of a rank die before any episode has been played."""


logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Place:
    """The worker of a rank, and those that replace it."""

    supervised: Supervised
    is_leaving: bool = False
    """It gets no more episodes, and ends with its last one."""
    keeping: asyncio.Task[None] | None = None
    """Keeps it running."""


class _Load(NamedTuple):
    """The work of all workers up to a moment, all in seconds."""

    at: float = 0.0
    cpu: float = 0.0
    busy: float = 0.0

    def since(self, before: "_Load") -> tuple[float, float]:
        """The average number of cores in use, and of busy event loops, since `before`."""
        seconds = max(1e-9, self.at - before.at)
        cpu, busy = max(0.0, self.cpu - before.cpu), max(0.0, self.busy - before.busy)
        return cpu / seconds, busy / seconds


class RolloutWorkers:
    """The rollout workers of a run. An async context manager: entering it starts them, and returns
    when all can play; leaving it ends them.

    `start` starts a worker's process, and `parts` are opened there. `count` workers are started;
    `scaling` decides how many there are afterwards. `host`: the address of this
    machine at which workers reach it. `silence`: after so many seconds in which its event loop
    stands still, a worker is given up. `restarts`: how often in a row the worker of a rank may be
    replaced with no episode played in between. `imports`: modules that all workers need and that
    take long to import.

    Raises:
        ConfigError: the parts of a worker cannot be opened.
        WorkerDiedError: the workers of a rank keep dying.
    """

    def __init__(
        self,
        start: StartWorker,
        parts: OpenParts,
        count: int,
        *,
        scaling: WorkerScaling | None = None,
        host: str = LOOPBACK,
        silence: float = LEASE_SECONDS,
        restarts: int = RESTARTS,
        imports: Sequence[str] = (),
    ) -> None:
        self._start = start
        self._make = Forked(partial(RolloutWorker, parts), tuple(imports))
        self._host = host
        self._silence = silence
        self._count = count
        self._scaling = scaling
        self._restarts = restarts
        self._places: dict[int, _Place] = {}
        self._ended_restarts = 0
        self._connections: dict[int, WorkerConnection] = {}
        self.engines = ServedEngines(self._broadcast)
        """The engines that the workers may ask."""
        self._changed = asyncio.Event()
        self._suspicion = Suspicion(LethalTaskError, "rollout workers")
        self._has_played = False
        self._has_ended_well = False
        self._num_ended = 0
        self._lost = 0
        self._ended_cpu_seconds = 0.0
        self._ended_busy_seconds = 0.0
        self._measured = _Load()
        self._open = AsyncExitStack()
        self._flow = Flow("rollout workers")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            opened.callback(self.engines.close)
            opened.enter_context(register_workers(self.worker_count))
            door = await opened.enter_async_context(open_door(self._host, self._admit))
            opened.push_async_exit(self._end_all)
            await self._flow.__aenter__()
            self._resize(self._count, door)
            while sum(one.plays for one in self._connections.values()) < self._count:
                self._changed.clear()
                await self._changed.wait()
            self._measured = self._load()
            if self._scaling is not None:
                self._flow.start(self._scale(self._scaling, door), name="scale")
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._open.__aexit__(*exc)

    async def _end_all(self, *exc: Any) -> None:
        self._flow.cancel()
        await self._flow.__aexit__(*exc)

    def worker_count(self) -> WorkerCount:
        """The number of workers that play. Any thread may ask."""
        alive = len(self._ready())
        places = list(self._places.values())
        count = sum(not place.is_leaving for place in places)
        restarts = self._ended_restarts + sum(place.supervised.restarts for place in places)
        return WorkerCount(ROLE, alive, count, restarts, self._suspicion.set_aside)

    async def play(
        self, policy: PlayedPolicy, assignment: Assignment, report: Report
    ) -> tuple[Trajectory, ...]:
        """Have an episode played. It has failed if its worker dies, and finally so if workers keep
        dying of its task.
        """
        began = elapsed()
        suspect = self._suspicion.suspect(*_identity(assignment.task))
        died = False
        try:
            self._suspicion.check(suspect)
            async with self._suspicion.turn(suspect):
                self._suspicion.check(suspect)
                worker = await self._least_busy()
                place = self._places[worker.rank]
                try:
                    played = await worker.play(policy, assignment, report, suspect)
                finally:
                    self._num_ended += 1
                    self._end_if_left(worker.rank, place)
        except WorkerDiedError as error:
            died = True
            return _failed(assignment, Failed("environment", str(error)), began)
        except LethalTaskError as error:
            return _failed(assignment, Failed.by(error), began)
        finally:
            if not died:
                self._suspicion.ended(suspect)
        self._has_played = True
        if not self._has_ended_well and not any(isinstance(one.status, Failed) for one in played):
            self._has_ended_well = True
            self._broadcast(HavePlayed())
        place.supervised.progress()
        return played

    def metrics(self) -> dict[str, float]:
        """Of the time since the last call."""
        before, self._measured = self._measured, self._load()
        cores, busy = self._measured.since(before)
        lost, self._lost = self._lost, 0
        live = [one.live for one in self._connections.values()] or [0]
        return {
            "rollout_workers/cores": cores,
            "rollout_workers/busy": busy / max(1, len(live)),
            "rollout_workers/lost_episodes": float(lost),
            "rollout_workers/most_live": float(max(live)),
        }

    def _load(self) -> _Load:
        """The work of all workers so far."""
        connected = self._connections.values()
        return _Load(
            elapsed(),
            self._ended_cpu_seconds + sum(one.cpu_seconds for one in connected),
            self._ended_busy_seconds + sum(one.busy_seconds for one in connected),
        )

    def _ready(self) -> list[WorkerConnection]:
        """The workers that can be given episodes."""
        leaving = {rank for rank, place in list(self._places.items()) if place.is_leaving}
        connected = list(self._connections.values())
        return [one for one in connected if one.plays and one.rank not in leaving]

    async def _least_busy(self) -> WorkerConnection:
        """The worker with the fewest episodes; waits while none can play."""
        while True:
            if ready := self._ready():
                return min(ready, key=lambda one: (one.live, one.rank))
            self._changed.clear()
            with waiting_for("all rollout workers are being started again"):
                await self._changed.wait()

    def _broadcast(self, message: Any) -> None:
        for connection in self._connections.values():
            connection.link.send(message)

    def _admit(self, rank: int, link: MessageLink) -> Callable[[Any], None]:
        """Take a worker that has connected, in the place of the last one of its rank."""
        connection = WorkerConnection(rank, link, self.engines, self._flow, self._changed.set)
        self._connections[rank] = connection
        if self._has_ended_well:
            link.send(HavePlayed())
        return connection.take

    async def _scale(self, scaling: WorkerScaling, door: Door) -> None:
        """Change the number of workers with their load. Nothing is decided while none plays."""
        before, ended = self._load(), self._num_ended
        while True:
            await asyncio.sleep(scaling.period)
            load = self._load()
            _, busy = load.since(before)
            have_played = self._num_ended > ended or any(
                one.live for one in self._connections.values()
            )
            before, ended = load, self._num_ended
            if have_played:
                self._resize(scaling.decide(self.worker_count().count, busy), door)

    def _resize(self, count: int, door: Door) -> None:
        """Change the number of workers. The highest ranks leave first; workers that are about to
        leave are kept before new ones are started.
        """
        staying = [rank for rank, place in self._places.items() if not place.is_leaving]
        if count == len(staying):
            return
        if self._places:
            logger.info("%d rollout workers from now on, instead of %d", count, len(staying))
        for rank in sorted(staying)[count:]:
            self._places[rank].is_leaving = True
            self._end_if_left(rank, self._places[rank])
        for _ in range(count - len(staying)):
            self._add(door)

    def _add(self, door: Door) -> None:
        """Keep a worker that is about to leave, or start another."""
        for place in self._places.values():
            if place.is_leaving and place.keeping and not place.keeping.cancelling():
                place.is_leaving = False
                self._changed.set()
                return
        rank = next(rank for rank in itertools.count() if rank not in self._places)
        name = f"rollout worker {rank}"
        place = _Place(Supervised(name, "an episode played", allowed=self._restarts))
        self._places[rank] = place
        place.keeping = self._flow.start(self._keep(rank, place, door), name=str(rank))

    def _end_if_left(self, rank: int, place: _Place) -> None:
        """End the worker of this place if it is leaving and plays nothing."""
        connection = self._connections.get(rank)
        if place.is_leaving and place.keeping and not (connection and connection.live):
            place.keeping.cancel()

    async def _keep(self, rank: int, place: _Place, door: Door) -> None:
        """Keep a worker in this place running, until it leaves."""
        try:
            await self._restart(rank, place, door)
        finally:
            self._ended_restarts += place.supervised.restarts
            del self._places[rank]

    async def _restart(self, rank: int, place: _Place, door: Door) -> None:
        """Start a worker, and another whenever it dies."""
        start = partial(self._start, ROLE, self._make, rank)
        supervised = place.supervised
        while not place.is_leaving:
            try:
                if self._has_played:
                    worker = await supervised.start_again(start, WorkerDiedError)
                else:
                    worker = await start()
                try:
                    await self._serve(worker, rank, door)
                finally:
                    await worker.stop()
            except WorkerDiedError as error:
                if not self._has_played and supervised.restarts == _FIRST_ATTEMPTS - 1:
                    raise
                await supervised.recover(error, partial(_give_up, rank, error))

    async def _serve(self, worker: Worker, rank: int, door: Door) -> None:
        """Let a worker play until it dies, or until the run ends.

        Raises:
            WorkerDiedError: it has died.
            ConfigError: it cannot open its parts.
        """
        try:
            async with Flow(f"rollout worker {rank}") as flow:
                flow.start(_serve_until_closed(worker, rank, door), name="serve")
                flow.start(self._watch(rank), name="watch")
        except WorkerDiedError as error:
            self._suspicion.died(self._lose(rank, error), error)
            raise
        except asyncio.CancelledError:
            if (connection := self._connections.get(rank)) is not None:
                # Let it close its environments before it is stopped.
                connection.link.send(Stop())
                await asyncio.wait({connection.link.closed}, timeout=STOP_SECONDS)
            raise
        finally:
            self._lose(rank, WorkerDiedError(ROLE, rank, "its run has ended"))

    async def _watch(self, rank: int) -> None:
        """Watch whether the event loop of a worker moves.

        Raises:
            WorkerDiedError: it has stood still for too long: an environment blocks it.
        """
        while True:
            await asyncio.sleep(self._silence / 4)
            connection = self._connections.get(rank)
            if connection is not None and now() - connection.last_pulse > self._silence:
                raise WorkerDiedError(
                    ROLE,
                    rank,
                    f"its event loop stood still for {self._silence:.0f} s: an environment blocks"
                    " it (`isolation: process` gives it a process of its own)",
                )

    def _lose(self, rank: int, why: WorkerDiedError) -> list[Suspect]:
        """Give up the connection of a worker, and return what it worked on."""
        if (connection := self._connections.pop(rank, None)) is None:
            return []
        self._ended_cpu_seconds += connection.cpu_seconds
        self._ended_busy_seconds += connection.busy_seconds
        lost = connection.lose(why)
        self._lost += len(lost)
        return lost


def _identity(task: Task) -> tuple[str, Callable[[], bytes]]:
    """The name of a task in messages, and its key among suspects: not its id, which differs when
    the same task comes again.
    """
    name = f"the task of seed {task.seed} with the options {dict(task.options)!r:.200}"
    return name, lambda: to_json([task.env, task.seed, dict(task.options)], fallback=repr)


def _failed(assignment: Assignment, status: Failed, began: float) -> tuple[Trajectory]:
    """An episode that failed and left no turns."""
    seconds = elapsed() - began
    return (Trajectory(assignment.id, assignment.task, (), status, (), seconds, started=began),)


async def _serve_until_closed(worker: Worker, rank: int, door: Door) -> None:
    await worker.call("serve", door)
    raise WorkerDiedError(ROLE, rank, "its connection to the controller ended")


def _give_up(rank: int, error: WorkerDiedError, reason: str) -> WorkerDiedError:
    return WorkerDiedError(ROLE, rank, f"{error.why}; it was {reason}")


@dataclass(frozen=True, slots=True)
class WorkerRunner:
    """`EpisodeRunner` whose episodes are played by rollout workers, with this policy."""

    workers: RolloutWorkers
    policy: PlayedPolicy
    renderer: TemplateRenderer
    """The model's, as the workers have it."""

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> Sequence[Trajectory]:
        """See `EpisodeRunner`."""
        return await self.workers.play(self.policy, assignment, report)

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the workers since the last call."""
        return self.workers.metrics()

    def asking(self, engine: Engine, sampling: SamplingParams) -> "WorkerRunner":
        """The same runner for episodes that are not trained on, which asks this engine."""
        name = self.workers.engines.name_of(engine)
        return replace(self, policy=PlayedPolicy(name, sampling, trained=False))

    def against(self, opponent: Engine, agents: Collection[str]) -> "WorkerRunner":
        """The same runner for episodes in which another engine plays these agents."""
        name, opposing = self.workers.engines.name_of(opponent), tuple(sorted(agents))
        return replace(self, policy=replace(self.policy, opponent=name, opposing=opposing))
