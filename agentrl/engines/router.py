"""`Router`: several replicas of an engine as one `Engine`.

An episode stays on one replica, which caches the prefix of its next turn, unless that replica is
far busier than the least busy one. A replica that dies, or gives no sign of life, is replaced; its
replacement loads the current weights before it gets requests. While a replica starts, or takes new
weights, it may be too busy for a sign of life: then the deadline of the start or of the update
counts. Requests of a dead replica are sent to another one, or wait for the replacement; one that
two replicas have died of is set aside (`agentrl/flow/suspicion.py`). While the router sleeps, no
replica is started: a dead one is replaced when it wakes.

Replicas may be added and removed while requests are answered. A new one gets requests when it
serves the published weights. One that is removed gets none any more, and its turns continue on the
others, with the tokens that they have.

New weights go to all replicas in one of three ways:

- `keep`: at once; turns in flight continue under the new weights.
- `abort_resume`: turns in flight are interrupted, and continued from their tokens under the new
  weights.
- `drain`: new turns wait until those in flight have ended.

With `keep` and `abort_resume`, no token is sampled twice, except tokens lost with a dead replica.

Rollout workers may ask replicas in other processes themselves (`follow_doors`); the router tells
them which, and holds their requests around new weights as it does its own
(`agentrl/engines/direct.py`).

The router's clock stands still while no answer can be expected: while it sleeps, stages or commits
weights, and while all replicas are being restarted.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentrl.cluster.engine_door import Doors
from agentrl.cluster.supervised import RESTARTS, START_SECONDS, STARTS_PER_NODE, Supervised
from agentrl.cluster.worker_registry import WorkerCount
from agentrl.engines.direct import DirectAccess
from agentrl.errors import (
    EngineDeadError,
    EngineError,
    LethalRequestError,
    StallError,
    WeightsError,
    describe,
)
from agentrl.flow import (
    Flow,
    PausableClock,
    Suspect,
    Suspicion,
    now,
    pause_deadlines,
    span,
    waiting_for,
)
from agentrl.net.link import Door, RemoteDoor
from agentrl.protocols import (
    Engine,
    EngineOffers,
    EngineStats,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from agentrl.rollout.config import context_seconds
from agentrl.rollout.continuation import joined, rest_of
from agentrl.rollout.session_homes import SessionHomes
from agentrl.trajectory import Completion
from agentrl.weights.config import WeightUpdate
from agentrl.weights.shipment import shipment_of

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PROBE_SECONDS = 1.0
"""Longest pause between two probes of an engine."""
_ATTEMPTS = 3
"""How many times in a row a replica may fail to restart, or die of new weights, before the run ends
with its error.
"""
_CLOSE_SECONDS = 30.0
"""How long a dead engine may take to free its resources."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call to an engine."""

    request: Suspect | None = None
    """The content of the call, if the engine may die of that."""
    death: EngineDeadError | None = None
    """The engine's death, if `_evict` cancelled the call for it."""


@dataclass(eq=False, slots=True)
class _Replica:
    """One engine."""

    number: int
    """Its number among the replicas, from 0."""
    engine: Engine
    """The engine, or its last replacement."""
    supervised: Supervised
    """Its restarts."""
    make: Callable[[], Engine] | None = None
    """Makes a replacement, if dead replicas are replaced."""
    node: str = ""
    """The machine that it runs on."""
    lost: Callable[[EngineDeadError], Awaitable[None]] | None = None
    """Called if it cannot be restarted, after which the others carry on; without it, the run
    ends."""
    start: asyncio.Task[Any] | None = None
    """Its start or its restart, while that goes on."""
    watch: asyncio.Task[None] | None = None
    """The watch over it."""
    door: Door | None = None
    """Where rollout workers may ask it, if it has been opened."""
    leaving: bool = False
    """It is being removed: it gets no more requests, and is not replaced."""
    calls: dict[asyncio.Task[Any], _Call] = field(default_factory=dict)
    """The calls of the tasks that wait for its answers."""
    dead: EngineDeadError | None = None
    """The reason why it gets no more requests."""
    answers: int = 0
    """Answers to requests so far."""
    seen: tuple[int, int] = (-1, -1)
    """Generated tokens and answers when `evict_unresponsive` last looked."""
    progress: tuple[int, int, int] = (-1, -1, -1)
    """Answers, generated and prefilled tokens when it was last watched."""
    progress_at: float = 0.0
    """When these last grew, or it had no requests, in seconds of loop time."""
    is_starting: bool = False
    """A replacement takes memory, but no requests yet."""
    occupations: int = 0
    """Present calls that change the whole engine: new weights, sleep, wake, interrupt."""
    free_since: float = 0.0
    """When the last of these ended, in seconds of loop time."""

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Inside the block, a call changes the whole engine."""
        self.occupations += 1
        try:
            yield
        finally:
            self.occupations -= 1
            self.free_since = now()
            self.seen = (-1, -1)  # `evict_unresponsive` starts over

    def was_free(self, since: float) -> bool:
        """True if no such call has been there since then."""
        return not self.occupations and self.free_since <= since


class Router(Engine):
    """See the module. Entering and leaving the router enters and leaves its replicas.

    `escape`: an episode leaves its replica if that has more than `escape` times the requests of the
    least busy one, and over eight more. `factory` makes the replacement of a dead engine; without
    it, the other replicas carry on. `lease`: seconds that a replica with a method `probe`
    may go without a sign of life. `restarts`: how often in a row a replica may be replaced without
    an answer in between. `start_seconds`: how long a replica may take to start. `update_seconds`:
    how long it may take to stage weights, and to commit them; then it is evicted. Without it, the
    caller's deadline counts. `answer_seconds`: how long a replica with a method `probe` may have
    requests without any progress; each token of the engine's context adds
    `seconds_per_context_token` (`rollout.deadlines`). `nodes`: the machine of each replica, by
    default the same. At most `starts_per_node` replicas start there at the same time.

    Raises:
        EngineDeadError: while the router is open: a dead replica could not be replaced, or its
            replacements died too often.
        StallError: a replica did not start in time.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        update: WeightUpdate = "keep",
        escape: float = 2.0,
        factory: Callable[[int], Engine] | None = None,
        lease: float | None = None,
        restarts: int = RESTARTS,
        start_seconds: float = START_SECONDS,
        update_seconds: float | None = None,
        answer_seconds: float = math.inf,
        seconds_per_context_token: float = 0.0,
        nodes: Sequence[str] = (),
        starts_per_node: int = STARTS_PER_NODE,
    ) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._supervision = partial(
            Supervised, work="an answer", allowed=restarts, start_seconds=start_seconds
        )
        self._replicas = [
            _Replica(
                number,
                engine,
                self._supervision(f"engine {number}"),
                None if factory is None else partial(factory, number),
                nodes[number] if nodes else "",
            )
            for number, engine in enumerate(engines)
        ]
        self._suspicion = Suspicion(LethalRequestError, "engines")
        self._update = update
        self._homes = SessionHomes[_Replica](escape)
        self._direct = DirectAccess(self._suspicion)
        self._interruptions = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._settling = asyncio.Event()
        self._entered: list[_Replica] = []
        self._alive = self._replicas
        self._replaces = factory is not None
        self._lease = lease
        self._update_seconds = update_seconds
        self._answer_seconds = answer_seconds
        self._seconds_per_context_token = seconds_per_context_token
        self._starts = defaultdict[str, asyncio.Semaphore](
            lambda: asyncio.Semaphore(starts_per_node)
        )
        self._revived = asyncio.Event()
        self._max_context = 0
        self._published: tuple[Mapping[str, Tensor], int] | None = None
        self._one_change = asyncio.Lock()
        self._removed = _NO_STATS
        self._restarts_of_removed = 0
        self._clock = PausableClock()
        self._flow = Flow("engines")

    @property
    def policy_version(self) -> int:
        """The oldest version that a live replica samples from."""
        if not self._alive and self._replaces:
            return 0 if self._published is None else self._published[1]
        return min([replica.engine.policy_version for replica in self._require_alive()])

    @property
    def max_context(self) -> int:
        """The smallest `max_context` of all replicas."""
        return self._max_context

    @property
    def clock(self) -> PausableClock:
        """See `Engine.clock`."""
        return self._clock

    def worker_count(self, role: str = "engine") -> WorkerCount:
        """How many replicas serve. Any thread may ask."""
        staying = [replica for replica in self._replicas if not replica.leaving]
        entered = list(self._entered)
        serving = [replica for replica in staying if replica.dead is None and replica in entered]
        restarts = sum(replica.supervised.restarts for replica in self._replicas)
        return WorkerCount(
            role,
            len(serving),
            len(staying),
            restarts + self._restarts_of_removed,
            self._suspicion.set_aside,
        )

    async def __aenter__(self) -> Self:
        await self._flow.__aenter__()
        try:
            async with Flow("starting engines") as flow:
                for replica in self._replicas:
                    flow.start(self._start_initial(replica), name=str(replica.number))
            self._max_context = min(replica.engine.max_context for replica in self._replicas)
        except BaseException:
            await self.__aexit__()
            raise
        for replica in self._replicas:
            self._begin_watch(replica)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            self._flow.cancel()
            await self._flow.__aexit__(*(exc or (None, None, None)))
        finally:
            while self._entered:
                await self._entered.pop().engine.__aexit__(None, None, None)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. Succeeds if a replica is alive or being restarted.

        Raises:
            LethalRequestError: replicas have died of it, or of one with the same prompt and seed.
        """
        shown = "".join(placed.image.digest for placed in request.images)
        suspect = Suspect(
            f"request {request.id} ({len(request.prompt_ids)} tokens)",
            # Others may sample otherwise.
            lambda: request.prompt_ids.tobytes() + f"{request.seed}{shown}".encode(),
        )
        done: Completion | None = None
        interruptions = self._interruptions

        def ask(engine: Engine) -> Awaitable[Completion]:
            nonlocal interruptions
            interruptions = self._interruptions
            return engine.generate(rest_of(request, done) if done else request)

        while True:
            completion = await self._ask_any(suspect, "generate", ask, request.session)
            completion = joined(done, completion) if done else completion
            if completion.finish_reason != "abort" or interruptions == self._interruptions:
                return completion
            # A weight update interrupted it: it continues from here, or begins again if the engine
            # keeps its format.
            done = completion if request.format is None else None

    def follow_doors(self, told: Callable[[Doors], None]) -> None:
        """See `OffersDoors`. Call this once, while the router is open."""
        self._direct.follow(told)
        for replica in self._alive:
            self._open_door(replica)

    def note_direct(self, rank: int, door: Door, live: int, answers: int) -> None:
        """See `OffersDoors`."""
        replica = next((replica for replica in self._replicas if replica.door == door), None)
        if replica is None:  # it has died since
            return
        self._direct.note(rank, door, live)
        if answers:
            replica.answers += answers
            replica.supervised.progress()

    def forget_worker(self, rank: int) -> None:
        """See `OffersDoors`."""
        self._direct.forget_worker(rank)

    async def score(self, request: ScoreRequest) -> Scores:
        """See `Engine.score`. Any replica answers; if it dies, another one does, or its
        replacement.

        Raises:
            EngineError: the engines cannot score tokens.
            LethalRequestError: replicas have died of these tokens.
        """

        def ask(engine: Engine) -> Awaitable[Scores]:
            if not EngineOffers.of(engine).scores:
                raise EngineError(
                    f"{type(engine).__name__} has no method `score`: it cannot score given tokens"
                )
            return engine.score(request)

        named = f"the score of {request.id} ({len(request.token_ids)} tokens)"
        return await self._ask_any(Suspect(named, request.token_ids.tobytes), "score", ask)

    async def _ask_any(
        self,
        suspect: Suspect,
        method: str,
        ask: Callable[[Engine], Awaitable[T]],
        session: str = "",
    ) -> T:
        """The answer of a replica; if that dies, of another one, or of its replacement."""
        try:
            while True:
                self._suspicion.check(suspect)
                # After a death, requests that may have caused it are tried one after another.
                async with self._suspicion.turn(suspect):
                    await self._until_served()
                    # The one that has the session's prefix in its cache, or the least busy one.
                    replica = self._homes.choose(session, self._require_alive(), self._load)
                    engine = replica.engine
                    try:
                        with span("engine", method, replica.number):
                            answer = await self._ask(replica, ask(engine), suspect)
                    except EngineDeadError as error:
                        self._mark_dead(replica, engine, error, suspect)
                        continue
                    replica.answers += 1
                    replica.supervised.progress()
                    return answer
        finally:
            self._suspicion.ended(suspect)

    async def interrupt(self) -> None:
        """See `Engine.interrupt`."""
        await self._on_all_until_one_lives("interrupt", lambda engine: engine.interrupt())

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.stage_weights`. Replicas that cannot stage weights are skipped. When this
        returns, all live replicas have staged them.

        Raises:
            EngineDeadError: replicas, and their replacements, died each time.
        """
        staged: list[Engine] = []

        def has_staged(engine: Engine) -> bool:
            return any(engine is other for other in staged)

        async def stage(engine: Engine) -> None:
            if not has_staged(engine) and EngineOffers.of(engine).stages_weights:
                await engine.stage_weights(weights, version)
            staged.append(engine)

        with self._clock.held():
            for _ in range(_ATTEMPTS):
                await self._on_all_until_one_lives("stage", stage, self._update_seconds)
                if all(has_staged(replica.engine) for replica in self._alive):
                    return
                # The replacements of replicas that died meanwhile stage them too.
        raise EngineDeadError(
            f"engines died in each of {_ATTEMPTS} attempts to stage version {version} of the"
            " weights; the log says why each was restarted"
        )

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.update_weights`. A replica that fails it is dropped, or replaced by one with
        these weights.

        `weights` must stay readable until the next update.
        """
        async with self._exclusive_change():
            published, self._published = self._published, (weights, version)
            try:
                if self._update == "keep":
                    await self._commit(weights, version)
                else:
                    await self._update_between_turns(weights, version)
            except (EngineError, WeightsError) as error:
                behind = [
                    replica for replica in self._alive if replica.engine.policy_version != version
                ]
                if len(behind) == len(self._alive):  # no replica took them: all go on as before
                    self._published = published
                    raise
                for replica in behind:  # it must not serve beside replicas that took them
                    self._evict(
                        replica,
                        EngineDeadError(f"it did not take version {version}: {error}"),
                        suspects=False,
                    )

    async def _update_between_turns(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        self._open.clear()
        try:
            await self._at_doors("hold", lambda door: door.hold())
            if self._update == "abort_resume":
                self._interruptions += 1
                with self._clock.held():
                    await self._on_all_until_one_lives(
                        "interrupt", lambda engine: engine.interrupt(), self._update_seconds
                    )
            else:
                await self._drain_calls()
            await self._commit(weights, version)
        finally:
            self._open.set()
            await self._at_doors("release", lambda door: door.release())

    async def _commit(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        with self._clock.held():
            await self._on_all_until_one_lives(
                "update",
                lambda engine: engine.update_weights(weights, version),
                self._update_seconds,
            )

    async def add(
        self,
        number: int,
        make: Callable[[], Engine],
        node: str = "",
        lost: Callable[[EngineDeadError], Awaitable[None]] | None = None,
    ) -> None:
        """Start one more replica, with a number that none has; when this returns, it serves the
        published weights. While the router sleeps, this waits. `make` makes its engine, and its
        replacements. `node`: its machine. `lost` is called if it has died and cannot be replaced:
        the others carry on without it.

        Raises:
            EngineError: it did not start, or was removed meanwhile. Nothing is left of it.
        """
        if not self._replaces or any(replica.number == number for replica in self._replicas):
            raise ValueError(f"no engine {number} can be added here")
        if self._published is not None:
            # Before anything starts: weights that only live engines had cannot be given to it.
            try:
                await shipment_of(self._published[0]).at_rest()
            except WeightsError as gone:
                raise EngineError(str(gone)) from gone
        named = self._supervision(f"engine {number}")
        replica = _Replica(number, make(), named, make, node, lost)
        replica.dead = EngineDeadError(f"engine {number} has not started yet")
        self._replicas = [*self._replicas, replica]
        starting = self._flow.start(self._start_added(replica), name=f"add {number}")
        replica.start = starting
        try:
            await asyncio.wait({starting})
        finally:
            starting.cancel("nobody waits for its engine any more")
        if replica.leaving or starting.cancelled():
            raise EngineError(f"engine {number} was removed before it served")
        if (error := starting.result()) is not None:
            replica.leaving = True
            await self._discard(replica)
            raise error

    async def _start_added(self, replica: _Replica) -> EngineError | None:
        """Start a replica that was added. Returns an error that prevents it: that is the error of
        whoever has added it, and all others carry on.
        """
        try:
            await self._bring_up(replica, "started")
            if replica.engine.max_context < self._max_context:
                raise EngineError(
                    f"engine {replica.number} takes only {replica.engine.max_context} tokens, and"
                    f" the others {self._max_context}: set engine.max_context to what all can take"
                )
        except EngineError as error:
            return error
        except Exception as error:
            return EngineError(f"engine {replica.number} did not start: {describe(error)}")
        self._begin_watch(replica)
        self._note_serving(replica)
        return None

    async def remove(self) -> int:
        """Remove a replica without loss; returns its number when its engine is closed. It is one
        that does not serve at the moment, else the one with the highest number. While the router
        sleeps, this waits.

        Turns that it samples are interrupted at a token boundary, and continue on the others. With
        `drain`, which interrupts none, they end first.

        Raises:
            EngineError: it is the last one.
        """
        await self._until_awake()
        staying = [replica for replica in self._replicas if not replica.leaving]
        if len(staying) == 1:
            raise EngineError(
                f"engine {staying[0].number} is the last one, and a run needs an engine: stop the"
                " run instead"
            )
        replica = max(staying, key=lambda one: (one.dead is not None, one.number))
        replica.leaving = True
        self._note_alive()
        if replica.start is not None:
            replica.start.cancel("its engine is removed")
            await asyncio.wait({replica.start})
        await self._move_calls(replica)
        await self._discard(replica)
        return replica.number

    async def _move_calls(self, replica: _Replica) -> None:
        """Wait until a replica that is leaving works on nothing any more: its turns are
        interrupted, and continue elsewhere. Those that it does not interrupt end first.
        """
        # No turn moves to a replica that has older weights than the tokens of the turn.
        async with self._exclusive_change():
            await self._at_doors("hold", lambda door: door.hold(), replica)
            if self._update != "drain" and replica.dead is None:
                self._interruptions += 1
                await self._on(
                    replica, "interrupt", lambda engine: engine.interrupt(), self._update_seconds
                )
        await self._drain_door(replica)
        while replica.calls:
            self._idle.clear()
            await self._idle.wait()

    async def _discard(self, replica: _Replica) -> None:
        """Close a replica that is leaving, and forget it."""
        if replica.watch is not None:
            replica.watch.cancel()
        if replica.dead is None:
            # Its counts stay in the sums of `stats`, so that rates do not fall below zero.
            done = replica.engine.stats()
            replica.dead = EngineDeadError(f"engine {replica.number} was removed")
            self._removed = _sum_of(
                [self._removed, replace(done, running=0, waiting=0, kv_use=0.0, kv_tokens=0)]
            )
        await self._close(replica)
        self._restarts_of_removed += replica.supervised.restarts
        self._replicas = [other for other in self._replicas if other is not replica]
        self._note_alive()
        self._settling.set()

    @asynccontextmanager
    async def _exclusive_change(self) -> AsyncIterator[None]:
        """Inside the block, neither weights are committed nor turns moved by anybody else."""
        with pause_deadlines():
            await self._one_change.acquire()
        try:
            yield
        finally:
            self._one_change.release()

    async def sleep(self) -> int | None:
        """See `Engine.sleep`. Applies to all live replicas; one that is starting is waited for, and
        so is the end of a dead one.
        """
        freed_bytes: list[int | None] = []

        async def sleep(engine: Engine) -> None:
            freed_bytes.append(await engine.sleep())

        if self._awake.is_set():
            self._awake.clear()
            self._clock.hold()
        try:
            await self._until_settled()
            await self._on_all("sleep", sleep)
            await self._until_settled()
        except BaseException:
            self._note_awake()
            raise
        return max((freed for freed in freed_bytes if freed is not None), default=None)

    async def wake_weights(self) -> int | None:
        """See `Engine.wake_weights`. Applies to all live replicas; dead ones are not started: they
        load their weights when they are, after `wake`.
        """
        taken_bytes: list[int | None] = []

        async def wake_weights(engine: Engine) -> None:
            taken_bytes.append(await engine.wake_weights())

        await self._on_all("wake the weights", wake_weights)
        return max((taken for taken in taken_bytes if taken is not None), default=None)

    async def wake(self) -> None:
        """See `Engine.wake`. Replicas that have died meanwhile are started afterwards."""
        await self._on_all("wake", lambda engine: engine.wake())
        self._note_awake()

    def _note_awake(self) -> None:
        if not self._awake.is_set():
            self._awake.set()
            self._clock.release()

    def stats(self) -> EngineStats:
        """Sums over all live replicas, and over what removed ones have done; `kv_use` is that of
        the fullest KV cache.
        """
        working = [replica for replica in self._replicas if replica.dead is None]
        return _sum_of([self._removed, *(replica.engine.stats() for replica in working)])

    def evict_unresponsive(self) -> bool:
        """Evict replicas that have requests but made no progress since the last call; return
        whether there was one, or one that has something else to do first.

        A replica that starts, sleeps or takes new weights has the deadline of that. If dead
        replicas are not replaced, the last live one is kept, because no other could take its
        requests.
        """
        helped = False
        for replica in self._replicas:
            if replica.dead is not None:
                helped |= self._replaces
                continue
            if not self._awake.is_set() or replica.occupations:
                helped = True
                continue
            now_seen = (replica.answers, replica.engine.stats().generated_tokens)
            silent = self._load(replica) and replica.seen == now_seen
            replica.seen = now_seen
            if silent and (self._replaces or len(self._require_alive()) > 1):
                helped = True
                self._evict(replica, EngineDeadError(f"engine {replica.number} stopped answering"))
        return helped

    async def _until_served(self) -> None:
        """Wait while an update holds requests back, or no replica is alive."""
        if not self._open.is_set():
            # With `drain`, those in flight have their deadlines, and those that wait for them none.
            with pause_deadlines() if self._update == "drain" else nullcontext():
                await self._open.wait()
        if not self._alive:
            await self._wait_for_a_replica()

    async def _ask(
        self, replica: _Replica, answer: Awaitable[T], request: Suspect | None = None
    ) -> T:
        """The answer of a replica. Raises the replica's death if it is evicted meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        call = replica.calls[task] = _Call(request)
        try:
            return await answer
        except asyncio.CancelledError:
            if call.death is not None and task.uncancel() <= cancelling:
                raise call.death from None  # only `_evict` cancelled it
            raise
        finally:
            del replica.calls[task]
            if not replica.calls:
                self._idle.set()

    def _load(self, replica: _Replica) -> int:
        return len(replica.calls) + self._direct.live(replica.door)

    def _require_alive(self) -> list[_Replica]:
        if not self._alive:
            raise EngineDeadError(
                f"no engine is left: {self._replicas[-1].dead}"
            ) from self._replicas[-1].dead
        return self._alive

    async def _wait_for_a_replica(self) -> None:
        """Wait until a replica is alive, if one is being restarted: outside of deadlines, since
        that may take longer than an answer.
        """
        while not self._alive and self._replaces:
            self._revived.clear()
            with pause_deadlines(), waiting_for("all engines are being restarted"):
                await self._revived.wait()
        self._require_alive()  # raises if none is alive and none will be

    def _mark_dead(
        self,
        replica: _Replica,
        engine: Engine,
        why: EngineDeadError,
        request: Suspect | None = None,
    ) -> None:
        """Note a death, of which all that the replica worked on is suspect if `request` is: what
        noticed the death.
        """
        # Already known, and perhaps replaced.
        if replica.dead is not None or replica.engine is not engine:
            return
        replica.dead = why
        unknown, replica.door = self._direct.died(replica.door), None
        if request is not None and not unknown:
            self._suspicion.died({request, *_requests(replica)}, why)
        self._note_alive()
        if self._direct.is_followed:
            self._flow.start(self._offer_doors_when_calm(), name="doors")
        if self._replaces and not replica.leaving:
            replica.start = self._flow.start(self._replace(replica), name=f"renew {replica.number}")

    def _note_alive(self) -> None:
        had_some = bool(self._alive)
        self._alive = [
            replica for replica in self._replicas if replica.dead is None and not replica.leaving
        ]
        if self._replaces and had_some != bool(self._alive):
            (self._clock.hold if had_some else self._clock.release)()
        self._offer_doors()

    def _offer_doors(self) -> None:
        self._direct.offer(tuple(one.door for one in self._alive if one.door is not None))

    async def _offer_doors_when_calm(self) -> None:
        await self._direct.until_calm()
        self._offer_doors()

    def _open_door(self, replica: _Replica) -> None:
        remote_door = EngineOffers.of(replica.engine).remote_door
        if self._direct.is_followed and remote_door is not None:
            self._flow.start(
                self._offer_door_of(replica, replica.engine, remote_door),
                name=f"door {replica.number}",
            )

    async def _offer_door_of(
        self, replica: _Replica, engine: Engine, remote_door: RemoteDoor
    ) -> None:
        """Open the door of a replica, and offer it."""
        try:
            door = await remote_door.open()
        except EngineDeadError as error:
            self._mark_dead(replica, engine, error)
        except OSError as error:
            logger.warning(
                "engine %d cannot be asked by rollout workers, so all its requests pass the"
                " controller: %s",
                replica.number,
                error,
            )
        else:
            if replica.engine is engine and replica.dead is None:
                replica.door = door
                self._offer_doors()

    def _note_serving(self, replica: _Replica) -> None:
        replica.dead, replica.seen = None, (-1, -1)
        self._note_alive()
        self._open_door(replica)
        self._revived.set()

    def _begin_watch(self, replica: _Replica) -> None:
        if self._lease is not None:
            replica.watch = self._flow.start(
                self._watch(replica, self._lease), name=f"watch {replica.number}"
            )

    def _evict(self, replica: _Replica, why: EngineDeadError, *, suspects: bool = True) -> None:
        """Stop sending requests to a replica, and move the requests that it has to the others.
        `suspects`: whether it may have died of one of these.
        """
        known = next(iter(_requests(replica)), None) if suspects else None
        self._mark_dead(replica, replica.engine, why, known)
        # `_ask` turns this cancellation into the death, and the call goes to another replica.
        for task, call in replica.calls.items():
            call.death = why
            task.cancel()

    async def _watch(self, replica: _Replica, lease: float) -> None:
        """Probe a replica repeatedly, and evict it when it is dead or does not answer."""
        while True:
            await asyncio.sleep(min(_PROBE_SECONDS, lease / 3))
            engine, asked = replica.engine, now()
            offers = EngineOffers.of(engine)
            if replica.dead is not None or not offers.probes:
                continue
            death: EngineDeadError | None = None
            try:
                async with asyncio.timeout(lease):
                    await engine.probe()
            except EngineDeadError as error:
                death = error
            except TimeoutError:
                # The probe may have waited behind new weights, which have a deadline of their own.
                is_free = replica.was_free(asked) and self._awake.is_set()
                if not is_free and not offers.probes_while_busy:
                    continue
                death = EngineDeadError(f"it gave no sign of life for {lease:g} s (cluster.lease)")
            more = context_seconds(self._max_context, self._seconds_per_context_token)
            longest = self._answer_seconds + more
            if death is None and self._stalled_seconds(replica) > longest:
                # Its processes live, and their work hangs: new requests would all go there.
                death = EngineDeadError(
                    f"it has requests, and sampled nothing for {longest:g} s (rollout.deadlines)"
                )
            if death is not None and replica.engine is engine:
                self._evict(replica, death)

    def _stalled_seconds(self, replica: _Replica) -> float:
        """For how long a replica has made no progress, although it has requests."""
        stats = replica.engine.stats()
        progress = replica.answers, stats.generated_tokens, stats.prefilled_tokens
        asked = _requests(replica) or self._direct.live(replica.door)
        is_at_work = asked and not replica.occupations and self._awake.is_set()
        if progress != replica.progress or not is_at_work:
            replica.progress, replica.progress_at = progress, now()
        return now() - replica.progress_at

    async def _replace(self, replica: _Replica) -> None:
        """Replace a dead engine by a new one with the latest published weights."""
        try:
            await self._restart(replica)
        except (EngineDeadError, StallError) as error:
            others = [other for other in self._replicas if other is not replica]
            if replica.lost is None or all(other.leaving for other in others):
                raise
            replica.leaving = True
            await self._discard(replica)
            await replica.lost(EngineDeadError(str(error)))
            return
        replica.start = None
        self._note_serving(replica)

    async def _restart(self, replica: _Replica) -> None:
        await self._close(replica)
        await replica.supervised.recover(
            replica.dead or EngineDeadError("it is gone"),
            lambda reason: EngineDeadError(
                f"engine {replica.number} keeps dying: it was {reason}; the last time:"
                f" {replica.dead}"
            ),
        )
        try:
            await replica.supervised.start_again(
                partial(self._start_replacement, replica), EngineDeadError, _ATTEMPTS
            )
        except EngineDeadError as error:
            raise EngineDeadError(f"{error} ({_ATTEMPTS} times in a row)") from error

    async def _start_replacement(self, replica: _Replica) -> None:
        """Start another engine in the place of one that is dead, or that did not start."""
        await self._close(replica)
        assert replica.make is not None
        await self._until_awake()
        replica.engine = replica.make()
        await self._bring_up(replica, "restarted")

    async def _bring_up(self, replica: _Replica, how: str) -> None:
        """Start the engine of a replica as soon as the router is awake, and give it the published
        weights.
        """
        await self._until_awake()
        replica.is_starting = True
        try:
            await self._start(replica)
            await self._catch_up(replica)
        except (EngineError, WeightsError) as error:
            replica.dead = EngineDeadError(f"engine {replica.number} could not be {how}: {error}")
            raise replica.dead from error
        finally:
            replica.is_starting = False
            self._settling.set()

    async def _until_awake(self) -> None:
        # A loop: the router may have fallen asleep again before this task gets its turn.
        while not self._awake.is_set():
            await self._awake.wait()

    async def _until_settled(self) -> None:
        """Wait until no replica is starting, and none that is dead or leaving has memory: outside
        of deadlines, since a start takes longer than falling asleep.
        """
        while any(
            replica.is_starting
            or (replica.leaving and replica in self._entered)
            or (replica.dead and replica in self._entered and self._replaces)
            for replica in self._replicas
        ):
            self._settling.clear()
            with pause_deadlines():
                await self._settling.wait()

    async def _start_initial(self, replica: _Replica) -> None:
        """Start a replica beside the others; its error ends their start, and names it."""
        try:
            await self._start(replica)
        except Exception as error:
            if len(self._replicas) == 1:
                raise
            which = f"engine {replica.number} of {len(self._replicas)} did not start"
            if type(error) in (EngineError, EngineDeadError):
                raise type(error)(f"{which}: {error}") from error
            error.add_note(which)
            raise

    async def _start(self, replica: _Replica) -> None:
        """Enter a replica's engine, when few enough others start on its machine.

        Raises:
            StallError: it takes too long.
        """
        async with self._starts[replica.node], replica.supervised.starting():
            await replica.engine.__aenter__()
        self._entered.append(replica)

    async def _catch_up(self, replica: _Replica) -> None:
        """Give a new engine the published weights, which may change meanwhile.

        Raises:
            EngineError: it did not take them.
        """
        engine = replica.engine
        while self._published is not None and engine.policy_version != self._published[1]:
            weights, version = self._published
            try:
                async with _limit("update", self._update_seconds):
                    at_rest = await shipment_of(weights).at_rest()
                    await engine.update_weights(at_rest, version)
            except WeightsError as error:
                # Those of a version are gone when all others serve a newer one, which is next.
                if self._published == (weights, version):
                    raise EngineError(
                        f"it could not load version {version} of the weights: {error}"
                    ) from error

    async def _close(self, replica: _Replica) -> None:
        """Let a dead engine free its resources. A failure to do so is only logged."""
        if replica not in self._entered:
            return
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await replica.engine.__aexit__(None, None, None)
        except (EngineError, TimeoutError, OSError) as error:
            logger.warning(
                "engine %d did not close: %s", replica.number, error or type(error).__name__
            )
        finally:
            self._entered.remove(replica)
            self._settling.set()

    async def _on_all_until_one_lives(
        self, what: str, act: Callable[[Engine], Awaitable[None]], seconds: float | None = None
    ) -> None:
        """`_on_all`, and wait until a replica is alive, unless the router sleeps: then none is
        started.
        """
        await self._on_all(what, act, seconds)
        if self._awake.is_set():
            await self._wait_for_a_replica()

    async def _on_all(
        self, what: str, act: Callable[[Engine], Awaitable[None]], seconds: float | None = None
    ) -> None:
        """Run `act` to its end on all live replicas, then raise the first error that is not a
        death. A replica on which it takes longer than `seconds` is dead.
        """
        # Each replica has this deadline, so the caller's would only end what some can do.
        with nullcontext() if seconds is None else pause_deadlines():
            async with Flow(what) as flow:
                calls = [
                    flow.start(self._on(replica, what, act, seconds), name=str(replica.number))
                    for replica in self._alive
                ]
        for call in calls:
            if (refused := call.result()) is not None:
                raise refused

    async def _on(
        self,
        replica: _Replica,
        what: str,
        act: Callable[[Engine], Awaitable[None]],
        seconds: float | None,
    ) -> EngineError | WeightsError | None:
        """Run `act` to its end on a live replica; returns an error that is not its death. If it
        takes longer than `seconds`, the replica is dead.
        """
        engine = replica.engine
        try:
            with replica.occupied():
                async with _limit(what, seconds):
                    await self._ask(replica, act(engine))
        except _TooLateError as error:
            if replica.engine is engine:
                self._evict(replica, error, suspects=False)
        except EngineDeadError as error:
            self._mark_dead(replica, engine, error)
        except (EngineError, WeightsError) as error:
            return type(error)(
                f"{what} on engine {replica.number} of {len(self._replicas)}: {error}"
            )
        return None

    async def _drain_calls(self) -> None:
        async with Flow("drain") as flow:
            for replica in self._alive:
                flow.start(self._drain_door(replica), name=str(replica.number))
        while any(replica.calls for replica in self._alive):
            self._idle.clear()
            await self._idle.wait()

    async def _at_doors(
        self,
        what: str,
        act: Callable[[RemoteDoor], Awaitable[None]],
        replica: _Replica | None = None,
    ) -> None:
        """Run `act` on all live replicas with a door, or on this one."""

        async def at_door(engine: Engine) -> None:
            remote_door = EngineOffers.of(engine).remote_door
            if remote_door is not None:
                await act(remote_door)

        if not self._direct.is_followed:
            return
        if replica is None:
            await self._on_all(what, at_door, self._update_seconds)
        elif replica.dead is None:
            await self._on(replica, what, at_door, self._update_seconds)

    async def _drain_door(self, replica: _Replica) -> None:
        """Wait until a replica works on nothing that workers have asked it themselves."""
        engine = replica.engine
        remote_door = EngineOffers.of(engine).remote_door
        if replica.door is None or remote_door is None:
            return
        try:
            await self._ask(replica, remote_door.drain())
        except EngineDeadError as error:
            self._mark_dead(replica, engine, error)


class _TooLateError(EngineDeadError):
    """An engine did not take weights in time. It may still work on the requests that it has."""


@asynccontextmanager
async def _limit(what: str, seconds: float | None) -> AsyncIterator[None]:
    """The deadline of a call that changes a whole engine.

    Raises:
        EngineDeadError: it takes longer than `seconds`.
    """
    try:
        async with asyncio.timeout(seconds) as clock:
            yield
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise _TooLateError(
            f"it took longer than {seconds:g} s to {what} (weights.deadline)"
        ) from error


_NO_STATS = EngineStats(0, 0, 0, 0, 0)


def _sum_of(stats: Sequence[EngineStats]) -> EngineStats:
    """The sums of all; `kv_use` is the largest."""
    return EngineStats(
        sum(s.running for s in stats),
        sum(s.waiting for s in stats),
        sum(s.generated_tokens for s in stats),
        sum(s.prefilled_tokens for s in stats),
        sum(s.cached_tokens for s in stats),
        max(s.kv_use for s in stats),
        sum(s.preemptions for s in stats),
        sum(s.proposed_tokens for s in stats),
        sum(s.accepted_tokens for s in stats),
        sum(s.older_kv_tokens for s in stats),
        sum(s.kv_tokens for s in stats),
    )


def _requests(replica: _Replica) -> set[Suspect]:
    """The requests that a replica works on."""
    return {call.request for call in replica.calls.values() if call.request is not None}
