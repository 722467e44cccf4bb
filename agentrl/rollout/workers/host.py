"""`RolloutWorker`: plays episodes in a process of its own, for a controller.

It has an event loop, renderer, tokenizer and environments of its own, and no ledger, slots, rewards
or weights: it gets assignments, asks the engines, and returns trajectories.
"""

import asyncio
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentrl.cluster.engine_link import portable
from agentrl.cluster.memory_pressure import prefer_to_kill
from agentrl.cluster.parcel import MemoryProbe, Parcel
from agentrl.flow import Flow, busy_seconds, elapsed, freeze_gc, note_played, run_steadily
from agentrl.net.link import Door, MessageLink, connect
from agentrl.net.pickled import Pickled
from agentrl.protocols import Engine
from agentrl.rollout.assignment import Assignment, MemberReport, Report, TokensSampled, TurnsPlayed
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.workers.messages import (
    Cancel,
    Cancelled,
    HavePlayed,
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
    Stop,
    Welcome,
)
from agentrl.rollout.workers.progress import ProgressSender
from agentrl.rollout.workers.remote_engine import RemoteEngines
from agentrl.trajectory import Trajectory

PULSE_SECONDS = 1.0
"""Between two signs of life of a worker's event loop, with reports of what was sampled and of what
engines were asked. They cost the controller by live episode, and by engine.
"""
_SAME_CLOCK_SECONDS = 1.0
"""Clocks that differ by less are those of one machine, seen through a message."""

_LEAST_SHARED_BYTES = 1 << 15
"""To map memory costs the controller as much as to read so many bytes from a socket."""

MakeRunner = Callable[[PlayedPolicy], EpisodeRunner]
"""Makes what plays the episodes of a policy."""
OpenParts = Callable[[Callable[[str], Engine]], AbstractAsyncContextManager[MakeRunner]]
"""Opens the parts of a worker, given the engines by name. It is pickled to the worker."""


class RolloutWorker:
    """The worker of a rank."""

    def __init__(self, parts: OpenParts, rank: int) -> None:
        self._parts = parts
        self._rank = rank

    def serve(self, door: Door) -> None:
        """Play for the controller behind the door, until it ends the connection.

        Raises:
            ConfigError: the parts cannot be made.
            OSError: the controller cannot be reached.
        """
        prefer_to_kill()
        run_steadily(self.play_for(door))

    async def play_for(self, door: Door) -> None:
        """`serve`, on the running event loop."""
        engines = RemoteEngines(self._rank)
        async with AsyncExitStack() as opened:
            # First, so that errors of the parts come before anything is asked of the controller.
            make_runner = await opened.enter_async_context(self._parts(engines.engine))
            playing = _Playing(self._rank, engines, make_runner)
            link = await connect(door, self._rank, playing.take)
            engines.send_with(link.send)
            freeze_gc()
            try:
                await playing.play_over(link)
                await opened.aclose()
            finally:
                link.close()  # the controller waits for this, when it ends the worker


@dataclass(eq=False, slots=True)
class _Playing:
    """The episodes that a worker plays."""

    rank: int
    engines: RemoteEngines
    make_runner: MakeRunner
    flow: Flow = field(default_factory=lambda: Flow("episodes"))
    link: MessageLink | None = None
    episodes: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    runners: dict[PlayedPolicy, EpisodeRunner] = field(default_factory=dict)
    sampled: dict[int, TokensSampled] = field(default_factory=dict)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    shares_memory: bool = False
    """The controller can open the memory of this process."""
    parcels: dict[int, Parcel] = field(default_factory=dict)
    """Those of episodes that have ended, which the controller has not opened yet."""
    ahead: float = 0.0
    """Seconds by which the clock of this machine is ahead of the controller's."""

    async def play_over(self, link: MessageLink) -> None:
        """Play for the controller until the link ends or it sends `Stop`; then cancel all episodes.

        Raises:
            Exception: what ended the link, if it was a defect of this side.
        """
        self.link = link
        link.closed.add_done_callback(lambda _: self.stopped.set())
        try:
            async with self.flow:
                link.send(Ready(MemoryProbe.of_this_process()))
                self.flow.start(self._send_pulses(), name="pulse")
                with self.engines.connecting(partial(self.flow.start, name="connect")):
                    await self.stopped.wait()
                self.flow.cancel()
        finally:
            while self.parcels:
                self.parcels.popitem()[1].close()

    def take(self, message: Any) -> None:
        """Take a message of the controller."""
        if self.engines.take(message):
            return
        match message:
            case Play(number, policy, assignment):
                playing = self._play(number, policy, assignment)
                self.episodes[number] = self.flow.start(playing, name=str(number))
            case Cancel(number):
                if number in self.episodes:
                    self.episodes[number].cancel()
            case Welcome(there):
                ahead = elapsed() - there
                self.ahead = ahead if abs(ahead) > _SAME_CLOCK_SECONDS else 0.0
            case HavePlayed():
                note_played()
            case MemoryShared():
                self.shares_memory = True
            case Received(number):
                # It may come while the worker ends, which has closed all of them.
                if number in self.parcels:
                    self.parcels.pop(number).close()
            case Stop():
                self.stopped.set()

    async def _play(self, number: int, policy: PlayedPolicy, pickled: bytes) -> None:
        """Play an episode, and send its end, whatever that is."""
        try:
            assignment: Assignment = pickle.loads(pickled)
            played = await self._runner(policy).play(assignment, self._reporter(number))
            if self.ahead:
                played = [_shift_clock(trajectory, self.ahead) for trajectory in played]
            self._send_sampled_of(number)
            sealed = tuple(trajectory.sealed() for trajectory in played)
            self._send(Played(number, self._pack(number, sealed)))
        except asyncio.CancelledError:
            self._send_sampled_of(number)
            self._send(Cancelled(number))
            raise
        except Exception as error:  # the controller raises it
            self._send(Raised(number, portable(error, f"rollout worker {self.rank}")))
        finally:
            self.episodes.pop(number, None)

    def _pack(self, number: int, played: tuple[Trajectory, ...]) -> Pickled | Parcel:
        """The trajectories of an episode, in shared memory if that costs the controller less."""
        pickled = Pickled.of(played)
        if not self.shares_memory or pickled.buffer_bytes < _LEAST_SHARED_BYTES:
            return pickled
        parcel = self.parcels[number] = Parcel.around(pickled)
        return parcel

    def _runner(self, policy: PlayedPolicy) -> EpisodeRunner:
        if policy not in self.runners:
            self.runners[policy] = self.make_runner(policy)
        return self.runners[policy]

    def _reporter(self, number: int) -> Report:
        progress = ProgressSender()

        def report(what: MemberReport) -> None:
            match what:
                case TokensSampled():
                    before = self.sampled.get(number)
                    self.sampled[number] = what if before is None else before + what
                case TurnsPlayed(segments):
                    self._send(Progress(number, pickle.dumps(progress.changes(segments))))

        return report

    async def _send_pulses(self) -> None:
        while True:
            if self.sampled:
                self._send(Sampled.of(self.sampled))
                self.sampled.clear()
            self._send(Pulse(time.process_time(), busy_seconds()))
            for report in self.engines.reports():
                self._send(report)
            await asyncio.sleep(PULSE_SECONDS)

    def _send_sampled_of(self, number: int) -> None:
        if (sampled := self.sampled.pop(number, None)) is not None:
            self._send(Sampled.of({number: sampled}))

    def _send(self, message: Any) -> None:
        assert self.link is not None
        self.link.send(message)


def _shift_clock(trajectory: Trajectory, seconds: float) -> Trajectory:
    """The trajectory with its times in a clock that is `seconds` behind this one."""
    turns = tuple(replace(turn, asked=turn.asked - seconds) for turn in trajectory.turns)
    return replace(trajectory, turns=turns, started=trajectory.started - seconds)
