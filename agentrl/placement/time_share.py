"""Time-sharing: roles that share devices take turns, one asleep while the other works.

        share.training():        engine.sleep()   memory?   trainer.wake()
     generating ─────────────────────────────────────────────────────────▶ training
                                                                              │
        share.updating():        trainer.free_step_memory()   memory?         │
                                 engine.wake_weights()                        ▼
     generating ◀──────────────────────────────────────────────────────── updating
        at its end:              trainer.sleep()   memory?   engine.wake()

Both are never awake at once, except that in `updating` the weights of both are there: they go from
device to device, and no request is computed under old weights in between. Where there is no room
for that, `updating` wakes the engine and lets the trainer sleep before the weights go. Without an
update, the end of `training` is as that of `updating`. A failed switch is undone. If a role misses
its deadline, or can neither sleep nor wake, its state is unknown: the sharing is `lost`, and every
later switch is refused.

A role needs the memory that its sleep has freed, as it measured it itself: what it keeps while it
sleeps (its CUDA context, NCCL's buffers, CUDA graphs) is there already. Until it has slept, the
plan's figure counts.

A role that dies asleep is started again when it has to wake, never while the other is awake. So a
trainer that is asked for something after its death needs a turn of its own: it enters `training`,
as the driver does. If it dies while new weights are on their way, the engine sleeps for that turn,
and its weights wake again after it.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import DeadlineError, TimeShareError
from agentrl.flow import Flow, deadline
from agentrl.protocols import Engine, Trainer

logger = logging.getLogger(__name__)

State = Literal["generating", "training", "updating", "switching", "lost"]
_Method = Literal["sleep", "wake", "wake_weights", "free_step_memory"]
Free = Callable[[], Awaitable[int | None]]
"""Returns how many bytes are free on the fullest of the shared devices; None if those are dead
which could tell.
"""
Measured = Callable[[], Awaitable[int | None]]
"""Returns the bytes of its own that it has freed, or taken, on the device where that is most; None
if it cannot tell, or has changed nothing."""


async def free_on_cpu() -> int:
    """The `Free` of this machine's main memory."""
    memory = Path("/proc/meminfo").read_text()  # noqa: ASYNC240  no disk
    match = re.search(r"MemAvailable:\s+(\d+) kB", memory)
    return int(match[1]) * 1024 if match else 0


async def free_on_gpus() -> int:
    """The `Free` of the GPUs that this process may use."""
    import torch

    return min(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))


async def _do_nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Sleeper:
    """The calls by which an engine or a trainer releases its memory for a while. Repeating one
    changes nothing, and one that raises leaves the object as it was.

    A sleeping engine answers no requests: new ones wait, and those in flight continue when it
    wakes, from the same token, with their KV recomputed. A sleeping trainer can still provide its
    weights.

    A dead part of it is started again at `wake` at the earliest. One that is just starting is
    waited for in `sleep`, outside of deadlines.
    """

    sleep: Measured
    """Releases all memory that can be released."""
    wake: Measured
    """Allocates the memory again; when this returns, the object works."""
    wake_weights: Measured = _do_nothing
    """Allocates the weights of an engine again, so that it can take new ones."""
    free_step_memory: Measured = _do_nothing
    """Releases what only a step of a trainer needs."""

    @staticmethod
    def of_engine(engine: Engine) -> "Sleeper":
        """The calls of an engine."""
        return Sleeper(engine.sleep, engine.wake, wake_weights=engine.wake_weights)

    @staticmethod
    def of_trainer(trainer: Trainer) -> "Sleeper":
        """The calls of a trainer."""
        return Sleeper(trainer.sleep, trainer.wake, free_step_memory=trainer.free_step_memory)


class NoSharing:
    """The sharing of roles that have their own devices, or share devices with enough memory for
    both.
    """

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Change nothing: engine and trainer are awake."""
        yield

    updating = starting = training


@dataclass(frozen=True, slots=True)
class Tenant:
    """One side of a share."""

    name: str
    """Its role."""
    sleepers: Sequence[Sleeper]
    """Its parts, each on all of its devices."""
    planned: int
    """Bytes that must be free on each device before it wakes, as planned: they count until its
    sleep has been measured."""
    planned_weights: int = 0
    """Those of them that its weights take, for an engine."""


class TimeSharing:
    """The sharing of an engine and a trainer that take turns; at first the engine is awake, the
    trainer asleep.

    `seconds`: the deadline of each side's part in a switch. `weights_fit`: whether the engine's
    weights have room beside the trainer when that does not step.
    """

    def __init__(
        self,
        engine: Tenant,
        trainer: Tenant,
        free: Free,
        seconds: float,
        *,
        weights_fit: bool = True,
    ) -> None:
        self._engine = engine
        self._trainer = trainer
        self._free = free
        self._seconds = seconds
        self._weights_fit = weights_fit
        self._freed: dict[str, int] = {}
        self._weight_bytes: int | None = None  # bytes of what the engine's sleep has freed
        self._step_bytes = 0  # bytes that the trainer has freed before it sleeps
        self._turns: set[object] = set()  # blocks of `training` that are open
        self._updates: set[object] = set()  # and of `updating`
        self._one_switch = asyncio.Lock()
        self.state: State = "generating"

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """The engine is asleep inside, where the trainer starts and goes to sleep; afterwards the
        engine is awake. If the block fails, the engine stays asleep.

        Raises:
            TimeShareError: the engine cannot sleep, or cannot wake beside the sleeping trainer.
        """
        self.state = "switching"
        await self._fall_asleep(self._engine)
        yield
        await self._check_memory(self._engine)
        await self._call(self._engine, "wake")
        self.state = "generating"

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer is awake inside and the engine asleep; afterwards the engine is awake again,
        also if the block failed otherwise than by a switch. Of blocks that overlap, the first to
        begin and the last to end switch. A block of `updating` inside of others ends their turn.

        Raises:
            TimeShareError: a switch failed; says which state they are in.
        """
        turn = object()
        async with self._one_switch:
            if self.state == "updating":
                await self._interrupt_update()
            elif self.state != "training":
                await self._switch(self._engine, self._trainer, "generating", "training")
                self._step_bytes = 0
            self._turns.add(turn)
        async with self._open_block(self._turns, turn):
            yield

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """New weights may go from the trainer to the engine inside. Afterwards the engine is awake
        and the trainer asleep, also if the block failed otherwise than by a switch.

        Inside, the trainer is awake, and of the engine its weights alone. Where these do not fit
        beside the trainer, the engine is awake and the trainer asleep.

        Raises:
            TimeShareError: a switch failed; says which state they are in.
        """
        async with AsyncExitStack() as own_turn:
            if self._weights_fit:
                await own_turn.enter_async_context(self.training())
            async with self._one_switch:
                if self.state != "generating":
                    await self._begin_update()
                # The turns around this block end here: nothing may train on while weights go.
                self._turns.clear()
                self._updates.add(own_turn)
            async with self._open_block(self._updates, own_turn):
                yield

    @asynccontextmanager
    async def _open_block(self, blocks: set[object], block: object) -> AsyncIterator[None]:
        """After it, remove a block from those that are open, and go where the others want to be.
        A switch inside that has failed, and was undone, is not tried again.
        """
        is_switch_failed = False
        try:
            yield
        except TimeShareError:
            is_switch_failed = True
            raise
        finally:
            blocks.discard(block)
            async with self._one_switch:
                if not is_switch_failed:
                    await self._go_where_blocks_want()

    async def _go_where_blocks_want(self) -> None:
        """Go to the state that the open blocks want."""
        if self._turns or self.state == "generating":
            return
        if not self._updates:
            await self._to_generating()
        elif self.state == "training":  # the block that ends has interrupted the update
            await self._begin_update()

    async def _begin_update(self) -> None:
        if self.state != "training":
            raise TimeShareError(f"cannot begin an update: the state is {self.state}")
        await (self._to_updating() if self._weights_fit else self._to_generating())

    async def _to_generating(self) -> None:
        """Put the trainer to sleep, and wake the engine, or the rest of it."""
        if self.state not in ("training", "updating"):
            raise TimeShareError(f"cannot go to generating: the state is {self.state}")
        await self._switch(self._trainer, self._engine, self.state, "generating")

    async def _to_updating(self) -> None:
        """Wake the engine's weights beside the trainer, or wake the engine instead of it."""
        self.state = "switching"
        try:
            freed = _sum(await self._call(self._trainer, "free_step_memory"))
            self._step_bytes = max(self._step_bytes, freed or 0)  # more, if it was not interrupted
            missing = await self._missing(self._engine, self._needs_for_weights)
            if missing is None:
                self._weight_bytes = _sum(await self._call(self._engine, "wake_weights"))
        except TimeShareError as error:
            await self._undo("training", (self._engine, "sleep"), (self._trainer, "wake"))
            raise self._with_state(error) from error
        except BaseException:
            self.state = "lost"
            raise
        if missing is None:
            self.state = "updating"
            return
        logger.warning(
            "from now on, the trainer sleeps and the engine wakes before new weights are sent:"
            " the engine's weights have no room beside the trainer: %s",
            missing,
        )
        self._weights_fit = False
        self.state = "training"
        await self._to_generating()

    async def _interrupt_update(self) -> None:
        """Put the engine's weights to sleep again, and wake the trainer, of which a part may be
        dead: it starts again, with nothing beside it.
        """
        self.state = "switching"
        try:
            await self._call(self._engine, "sleep")
        except TimeShareError as error:
            await self._undo("updating", (self._engine, "wake_weights"))
            raise self._with_state(error) from error
        try:
            await self._call(self._trainer, "wake")
        except TimeShareError as error:
            await self._undo("updating", (self._engine, "wake_weights"))
            raise self._with_state(error) from error
        self.state = "training"

    async def _switch(self, tired: Tenant, rested: Tenant, before: State, after: State) -> None:
        if self.state != before:
            raise TimeShareError(f"cannot go from {before} to {after}: the state is {self.state}")
        self.state = "switching"
        try:
            await self._fall_asleep(tired)
        except TimeShareError as error:
            await self._undo(before, (tired, "wake"))
            raise self._with_state(error) from error
        try:
            await self._check_memory(rested, weights_are_there=before == "updating")
            await self._call(rested, "wake")
        except TimeShareError as error:
            # Of an engine, also the weights sleep then.
            state: State = "training" if before == "updating" else before
            await self._undo(state, (rested, "sleep"), (tired, "wake"))
            raise self._with_state(error) from error
        except BaseException:
            self.state = "lost"  # cancelled in between, so the outcome is unknown
            raise
        self.state = after

    async def _undo(self, before: State, *calls: tuple[Tenant, _Method]) -> None:
        """Restore the state before the switch; if that fails too, the sharing is lost."""
        try:
            for turn, method in calls:
                if not self._is_lost:
                    await self._call(turn, method)
        except TimeShareError:
            self.state = "lost"
        if not self._is_lost:
            self.state = before

    def _with_state(self, error: TimeShareError) -> TimeShareError:
        return TimeShareError(f"{error}. The state is {self.state} now")

    @property
    def _is_lost(self) -> bool:
        return self.state == "lost"

    async def _fall_asleep(self, turn: Tenant) -> None:
        """Put a side to sleep, and note how much memory that has freed."""
        freed = _sum(await self._call(turn, "sleep"))
        if freed is not None:
            before = self._step_bytes if turn is self._trainer else 0
            self._freed[turn.name] = freed + before

    @property
    def _needs_for_weights(self) -> int:
        measured = self._weight_bytes
        return self._engine.planned_weights if measured is None else measured

    async def _check_memory(self, turn: Tenant, *, weights_are_there: bool = False) -> None:
        """Raise an error if a side has no room to wake; of an engine's weights, it may need no
        more.
        """
        measured = self._freed.get(turn.name)
        needs = turn.planned if measured is None else measured
        if weights_are_there:
            needs = max(0, needs - self._needs_for_weights)
        missing = await self._missing(turn, needs)
        if missing is not None:
            origin = "planned" if measured is None else "measured when it slept"
            raise TimeShareError(
                f"{missing} (its need was {origin}): another process uses it, or the sleeping side"
                " keeps more than planned. Lower engine.memory_fraction, or give them devices of"
                " their own (placement=disaggregated)"
            )

    async def _missing(self, turn: Tenant, needs: int) -> str | None:
        """The memory that is missing for this; None if there is enough, or if that is unknown."""
        free = await self._free()
        if free is None or free >= needs:
            return None
        return (
            f"the {turn.name} needs {needs / 2**30:.2f} GiB to wake, and {free / 2**30:.2f} are"
            " free on a device that it shares"
        )

    async def _call(self, turn: Tenant, method: _Method) -> list[int | None]:
        """Call `method` on all parts at the same time, each under a deadline of its own, which it
        may pause; returns their answers.

        Raises:
            TimeShareError: a part failed, or did not answer in time; in the latter case the
            sharing is lost.
        """

        async def call(sleeper: Sleeper) -> int | None:
            with deadline("engine", f"{turn.name}.{method}", self._seconds):
                ask: Measured = getattr(sleeper, method)
                return await ask()

        what = method.replace("_", " ")
        try:
            async with Flow(f"{turn.name}.{method}") as flow:
                calls = [
                    flow.start(call(sleeper), name=str(number))
                    for number, sleeper in enumerate(turn.sleepers)
                ]
            return [part.result() for part in calls]
        except DeadlineError as error:
            self.state = "lost"
            raise TimeShareError(
                f"the {turn.name} did not {what} within {self._seconds:g} s"
                " (placement.switch_seconds): its GPU memory use is unknown"
            ) from error
        except Exception as error:
            raise TimeShareError(
                f"the {turn.name} could not {what}: {type(error).__name__}: {error}"
            ) from error
        except BaseException:
            self.state = "lost"  # cancelled, so the outcome is unknown
            raise


def _sum(measured: Sequence[int | None]) -> int | None:
    """The bytes of all parts; None unless all have measured them."""
    known = [each for each in measured if each is not None]
    return sum(known) if known and len(known) == len(measured) else None


DeviceSharing = NoSharing | TimeSharing
"""The sharing of devices by engine and trainer: inside `training()`, the trainer is awake; inside
`updating()`, the engine takes new weights; outside, it is awake."""
