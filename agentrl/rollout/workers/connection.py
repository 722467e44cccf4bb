"""`WorkerConnection`: the controller's side of one rollout worker."""

import asyncio
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from agentrl.cluster.engine_link import EngineServer, ReplicaAnswer
from agentrl.cluster.parcel import Parcel
from agentrl.cluster.ray_prompts import HeldPrompts
from agentrl.errors import WorkerDiedError, as_exception
from agentrl.flow import Flow, Suspect, elapsed, now
from agentrl.net.link import MessageLink
from agentrl.net.pickled import Pickled
from agentrl.protocols import GenerateRequest
from agentrl.rollout.assignment import Assignment, Report, TokensSampled, TurnsPlayed
from agentrl.rollout.workers.messages import (
    AskedDirectly,
    Cancel,
    Cancelled,
    MemoryShared,
    Play,
    Played,
    PlayedPolicy,
    Progress,
    Pulse,
    Raised,
    Ready,
    Received,
    Sampled,
    Welcome,
)
from agentrl.rollout.workers.progress import ProgressReader
from agentrl.rollout.workers.served_engines import ServedEngines
from agentrl.trajectory import Trajectory

ROLE = "rollout"
"""The role of rollout workers, in displays and in the names of their processes."""
_CANCEL_SECONDS = 30.0
"""How long a worker may take to end a cancelled episode. Its slot is taken meanwhile."""


@dataclass(eq=False, slots=True)
class _Episode:
    """An episode that the worker plays."""

    report: Report
    suspect: Suspect
    """What the worker may die of."""
    ended: asyncio.Future[Pickled]
    """Its pickled trajectories."""
    progress: ProgressReader = field(default_factory=ProgressReader)


class WorkerConnection:
    """A worker that is connected by a link. `flow` owns the requests that it makes of the engines.
    `became_ready` is called when it plays.
    """

    def __init__(
        self,
        rank: int,
        link: MessageLink,
        engines: ServedEngines,
        flow: Flow,
        became_ready: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.link = link
        self.is_ready = False
        self.last_pulse = now()
        """When its event loop gave a sign of life, in seconds of loop time."""
        self.cpu_seconds = 0.0
        """CPU time of its process so far."""
        self.busy_seconds = 0.0
        """Seconds in which its event loop was busy so far."""
        self._engines = engines
        prompts = defaultdict[str, HeldPrompts](HeldPrompts)
        self._requests = EngineServer(link, flow, self._generate, prompts, "the controller")
        self._became_ready = became_ready
        self._episodes: dict[int, _Episode] = {}
        self._numbers = count()
        link.send(Welcome(elapsed()))
        for facts in engines.introduce():
            link.send(facts)

    @property
    def plays(self) -> bool:
        """True if it can be given an episode."""
        return self.is_ready and self.link.is_open

    @property
    def live(self) -> int:
        """Episodes that it plays."""
        return len(self._episodes)

    async def play(
        self, policy: PlayedPolicy, assignment: Assignment, report: Report, suspect: Suspect
    ) -> tuple[Trajectory, ...]:
        """Have the worker play an episode, of which it may die. If this is cancelled, it returns
        when the worker has ended the episode.

        Raises:
            WorkerDiedError: the worker has died, or does not end the episode.
            Exception: what the episode has raised, except for failures of a rollout.
        """
        number = next(self._numbers)
        ended: asyncio.Future[Pickled] = asyncio.get_running_loop().create_future()
        self._episodes[number] = _Episode(report, suspect, ended)
        self.link.send(Play(number, policy, pickle.dumps(assignment)))
        try:
            # Waited for and not awaited: a cancelled caller waits for the same end.
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            self.link.send(Cancel(number))
            await asyncio.wait({ended}, timeout=_CANCEL_SECONDS)
            if ended.done() and not ended.cancelled():
                ended.exception()  # so that asyncio does not report it as never retrieved
            raise
        finally:
            del self._episodes[number]
        if ended.cancelled():
            raise WorkerDiedError(ROLE, self.rank, "it has given the episode up")
        played: tuple[Trajectory, ...] = ended.result().open()
        return played

    def lose(self, why: WorkerDiedError) -> list[Suspect]:
        """End the connection: the episodes of the worker raise `why`. Returns their suspects."""
        self.link.close()
        self._requests.end()
        self._engines.forget_worker(self.rank)
        lost = [episode for episode in self._episodes.values() if not episode.ended.done()]
        for episode in lost:
            episode.ended.set_exception(why)
        return [episode.suspect for episode in lost]

    def take(self, message: Any) -> None:
        """Take a message of the worker."""
        if self._requests.take(message):
            return
        match message:
            case AskedDirectly():
                self._engines.note_direct(self.rank, message)
            case Pulse(cpu_seconds, busy_seconds):
                self.last_pulse = now()
                self.cpu_seconds, self.busy_seconds = cpu_seconds, busy_seconds
            case Ready(probe):
                self.is_ready, self.last_pulse = True, now()
                if probe.is_reachable():
                    self.link.send(MemoryShared())
                self._became_ready()
            case Sampled(answers):
                for number, sampled in answers.items():
                    if (episode := self._episodes.get(number)) is not None:
                        episode.report(TokensSampled(*sampled))
            case Played(number, Parcel() as parcel):
                self._take_parcel(number, parcel)
            case Progress() | Played() | Raised() | Cancelled():
                # A cancelled episode is no longer among them.
                if (episode := self._episodes.get(message.number)) is not None:
                    _apply(episode, message)

    def _take_parcel(self, number: int, parcel: Parcel) -> None:
        """Map the trajectories of an episode immediately: they would be lost if the worker died
        before they are read.
        """
        message: Played | Raised
        try:
            message = Played(number, parcel.mapped())
        except OSError as error:
            why = f"what it has played cannot be read: {error}"
            message = Raised(number, WorkerDiedError(ROLE, self.rank, why))
        self.link.send(Received(number))
        self.take(message)

    async def _generate(self, engine: str, request: GenerateRequest) -> ReplicaAnswer:
        return ReplicaAnswer(await self._engines[engine].generate(request))


def _apply(episode: _Episode, message: Progress | Played | Raised | Cancelled) -> None:
    """Apply a worker's message to its episode."""
    ended = episode.ended
    match message:
        case Progress(_, changes):
            segments = episode.progress.segments(pickle.loads(changes))
            episode.report(TurnsPlayed(segments))
        case Played(_, Pickled() as trajectories) if not ended.done():
            ended.set_result(trajectories)
        case Raised(_, error) if not ended.done():
            ended.set_exception(as_exception(error))
        case Cancelled():
            ended.cancel()
