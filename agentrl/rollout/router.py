"""`Router`: several replicas of an engine as one `Engine`.

An episode stays with one replica, where the prefix of its next turn is cached, unless that one is far busier than the
least busy one. A request whose replica dies is sent to a survivor. New weights go to all of them, in one of three ways:

- `keep`: at once; turns in flight go on under the new weights.
- `abort_resume`: turns in flight are interrupted, and sent again with the tokens they have, under the new weights.
- `drain`: new turns are held back until those in flight have ended.

No token is sampled twice in `keep` and `abort_resume`, but those that died with a replica.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from agentrl.errors import EngineDeadError
from agentrl.flow import Flow
from agentrl.protocols import Engine, EngineStats, GenerateRequest
from agentrl.rollout.seeds import derive_seed
from agentrl.trajectory import Completion

if TYPE_CHECKING:
    from torch import Tensor

WeightUpdate = Literal["keep", "abort_resume", "drain"]
_SESSIONS = 1 << 16
"""Episodes whose replica is remembered; the longest unused is forgotten first."""


@dataclass(eq=False, slots=True)
class _Replica:
    """One engine. `calls` are the tasks that wait for an answer of it, and whether they were cancelled because of
    its death; `dead` says why it gets no more requests."""

    number: int
    engine: Engine
    calls: dict[asyncio.Task[Any], bool] = field(default_factory=dict)
    dead: EngineDeadError | None = None
    answers: int = 0
    seen: tuple[int, int] = (-1, -1)


class Router:
    """See the module. Enters and leaves its replicas with itself.

    `escape`: an episode leaves its replica when that has more than `escape` times the requests of the least busy one,
    and at least eight more.
    """

    def __init__(self, engines: Sequence[Engine], *, update: WeightUpdate = "keep", escape: float = 2.0) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._replicas = [_Replica(number, engine) for number, engine in enumerate(engines)]
        self._update = update
        self._escape = escape
        self._homes: OrderedDict[str, _Replica] = OrderedDict()
        self._interruptions = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._entered: list[Engine] = []
        self._alive = self._replicas

    @property
    def policy_version(self) -> int:
        """The oldest version that a living replica samples from."""
        return min([replica.engine.policy_version for replica in self._living()])

    @property
    def max_context(self) -> int:
        """What fits into every replica."""
        return min(replica.engine.max_context for replica in self._living())

    async def __aenter__(self) -> Self:
        try:
            for replica in self._replicas:
                await replica.engine.__aenter__()
                self._entered.append(replica.engine)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        while self._entered:
            await self._entered.pop().__aexit__(None, None, None)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`; a request is answered as long as one replica lives."""
        done: Completion | None = None
        while True:
            if not self._open.is_set():
                await self._open.wait()
            interruptions = self._interruptions
            replica = self._home(request.session)
            try:
                completion = await self._ask(replica, _rest_of(request, done) if done else request)
            except EngineDeadError as error:
                self._strike_off(replica, error)
                continue
            completion = _joined(done, completion) if done else completion
            if completion.finish_reason != "abort" or interruptions == self._interruptions:
                return completion
            done = completion  # new weights have interrupted it: it goes on from here

    async def interrupt(self) -> None:
        """See `Engine.interrupt`."""
        await self._everywhere("interrupt", lambda engine: engine.interrupt())

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.update_weights`; a replica that dies of it is left behind."""
        if self._update == "keep":
            await self._everywhere("update", lambda engine: engine.update_weights(weights, version))
            return
        self._open.clear()
        try:
            if self._update == "abort_resume":
                self._interruptions += 1
                await self.interrupt()
            else:
                await self._no_calls()
            await self._everywhere("update", lambda engine: engine.update_weights(weights, version))
        finally:
            self._open.set()

    def stats(self) -> EngineStats:
        """Of all living replicas: sums, and the fullest KV cache."""
        stats = [replica.engine.stats() for replica in self._alive]
        return EngineStats(
            sum(s.running for s in stats),
            sum(s.waiting for s in stats),
            sum(s.generated_tokens for s in stats),
            sum(s.prefilled_tokens for s in stats),
            sum(s.cached_tokens for s in stats),
            max((s.kv_use for s in stats), default=0.0),
            sum(s.preemptions for s in stats),
        )

    def abandon_silent(self) -> bool:
        """Give up replicas that have requests and did nothing since this was asked before; whether there was one.

        The last living one is not given up: nobody could take its requests.
        """
        found = False
        for replica in self._replicas:
            now_seen = (replica.answers, replica.engine.stats().generated_tokens)
            silent = replica.calls and replica.seen == now_seen and replica.dead is None
            replica.seen = now_seen
            if silent and len(self._living()) > 1:
                found = True
                self._bury(replica, EngineDeadError(f"engine {replica.number} did not answer any more"))
        return found

    async def _ask(self, replica: _Replica, request: GenerateRequest) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        replica.calls[task] = False
        try:
            completion = await replica.engine.generate(request)
        except asyncio.CancelledError:
            if replica.calls[task] and task.uncancel() <= cancelling and replica.dead is not None:
                raise replica.dead from None  # cancelled by `_bury`, and by nobody else
            raise
        finally:
            del replica.calls[task]
            if not replica.calls:
                self._idle.set()
        replica.answers += 1
        return completion

    def _home(self, session: str) -> _Replica:
        """The replica that has the session's prefix in its cache, or the least busy one."""
        living = self._living()
        if len(living) == 1:
            return living[0]
        least = min(living, key=lambda replica: len(replica.calls))
        home = self._homes.get(session)
        if home is None or home.dead or len(home.calls) > max(self._escape * len(least.calls), len(least.calls) + 8):
            home = least
        if session:
            self._homes[session] = home
            self._homes.move_to_end(session)
            if len(self._homes) > _SESSIONS:
                self._homes.popitem(last=False)
        return home

    def _living(self) -> list[_Replica]:
        if not self._alive:
            raise EngineDeadError(f"no engine is left: {self._replicas[-1].dead}") from self._replicas[-1].dead
        return self._alive

    def _strike_off(self, replica: _Replica, why: EngineDeadError) -> None:
        replica.dead = replica.dead or why
        self._alive = [replica for replica in self._alive if replica.dead is None]

    def _bury(self, replica: _Replica, why: EngineDeadError) -> None:
        """Send no more requests to it, and those that it has to the others."""
        self._strike_off(replica, why)
        for task in replica.calls:
            replica.calls[task] = True
            task.cancel()

    async def _everywhere(self, what: str, act: Callable[[Engine], Awaitable[None]]) -> None:
        async def on(replica: _Replica) -> None:
            try:
                await act(replica.engine)
            except EngineDeadError as error:
                self._strike_off(replica, error)

        async with Flow(what) as flow:
            for replica in self._living():
                flow.start(on(replica), name=str(replica.number))
        self._living()  # raises when the last one has died

    async def _no_calls(self) -> None:
        while any(replica.calls for replica in self._replicas):
            self._idle.clear()
            await self._idle.wait()


def _rest_of(request: GenerateRequest, done: Completion) -> GenerateRequest:
    """What is left to sample after `done`. Its noise is new, as the positions are; it derives from the same seed."""
    sampled = len(done.token_ids)
    return replace(
        request,
        id=f"{request.id}+{sampled}",
        prompt_ids=request.prompt_ids + done.token_ids,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - sampled),
        seed=derive_seed(request.seed, "rest", sampled) if sampled else request.seed,
    )


def _joined(first: Completion, rest: Completion) -> Completion:
    return Completion(
        first.token_ids + rest.token_ids,
        first.logprobs + rest.logprobs,
        first.policy_versions + rest.policy_versions,
        rest.finish_reason,
    )
