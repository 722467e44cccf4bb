"""Time-sharing: roles that share devices take turns, one asleep while the other works.

        share.training():        engine.sleep()   memory?   trainer.wake()
     generating ─────────────────────────────────────────────────────────▶ training
                ◀─────────────────────────────────────────────────────────
        at its end:              engine.wake()    memory?   trainer.sleep()

Both are never awake at once. A failed switch is undone. If a role misses its deadline, or can
neither sleep nor wake, its state is unknown: the sharing is `lost`, and every later switch is
refused.

A role needs the memory that its sleep has freed, as it measured it itself: what it keeps while it
sleeps (its CUDA context, NCCL's buffers, CUDA graphs) is there already. Until it has slept, the
plan's figure counts.

A role that dies asleep is started again when it has to wake, never while the other is awake. So a
trainer that is asked for something after its death needs a turn of its own: it enters `training`,
as the driver does.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from agentrl.errors import DeadlineError, TimeShareError
from agentrl.flow import Flow, deadline

State = Literal["generating", "training", "switching", "lost"]
Free = Callable[[], Awaitable[int | None]]
"""Returns how many bytes are free on the fullest of the shared devices; None if those are dead
which could tell.
"""


async def free_on_cpu() -> int:
    """The `Free` of this machine's main memory."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())  # noqa: ASYNC240  no disk
    return int(match[1]) * 1024 if match else 0


async def free_on_gpus() -> int:
    """The `Free` of the GPUs that this process may use."""
    import torch

    return min(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))


class Sleeper(Protocol):
    """An object that can release its memory for a while. Repeating either call changes nothing.

    A sleeping engine answers no requests: new ones wait, and those in flight continue when it
    wakes, from the same token, with their KV recomputed. It accepts new weights meanwhile. A
    sleeping trainer can still provide its weights.

    A dead part of it is started again at `wake` at the earliest. One that is just starting is
    waited for in `sleep`, outside of deadlines.
    """

    async def sleep(self) -> int | None:
        """Release all memory that can be released. If this raises, the object is awake as before.

        Returns the bytes of its own that this freed, on the device where it freed most; None if it
        cannot tell, or was asleep already.

        Raises:
            ConfigError: it has no way to sleep here.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again; when this returns, the object works. If this raises, it is
        asleep as before.
        """
        ...


class NoSharing:
    """The sharing of roles that have their own devices, or share devices with enough memory for
    both.
    """

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Change nothing: engine and trainer are awake."""
        yield

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Changes nothing."""
        yield


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


class TimeSharing:
    """The sharing of an engine and a trainer that take turns; at first the engine is awake, the
    trainer asleep.

    `seconds`: the deadline of each side's part in a switch.
    """

    def __init__(self, engine: Tenant, trainer: Tenant, free: Free, seconds: float) -> None:
        self._engine = engine
        self._trainer = trainer
        self._free = free
        self._seconds = seconds
        self._freed: dict[str, int] = {}
        self._blocks = 0  # of `training`, that are open
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
        """The trainer is awake inside; afterwards the engine is awake again, also if the block
        failed. Of blocks that overlap, the first to begin and the last to end switch.

        Raises:
            TimeShareError: a switch failed; says which state they are in.
        """
        async with self._one_switch:
            if self.state != "training":
                await self._switch(self._engine, self._trainer, "generating", "training")
            self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            async with self._one_switch:
                # Another block may have begun meanwhile, or have ended after this one.
                if not self._blocks and self.state != "generating":
                    await self._switch(self._trainer, self._engine, "training", "generating")

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
            await self._check_memory(rested)
            await self._call(rested, "wake")
        except TimeShareError as error:
            await self._undo(before, (rested, "sleep"), (tired, "wake"))
            raise self._with_state(error) from error
        except BaseException:
            self.state = "lost"  # cancelled in between, so the outcome is unknown
            raise
        self.state = after

    async def _undo(self, before: State, *calls: tuple[Tenant, Literal["sleep", "wake"]]) -> None:
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
        freed_bytes = await self._call(turn, "sleep")
        measured = [freed for freed in freed_bytes if freed is not None]
        if measured and len(measured) == len(freed_bytes):
            self._freed[turn.name] = sum(measured)

    async def _check_memory(self, turn: Tenant) -> None:
        free = await self._free()
        measured = self._freed.get(turn.name)
        needs = turn.planned if measured is None else measured
        if free is not None and free < needs:
            origin = "planned" if measured is None else "measured when it slept"
            raise TimeShareError(
                f"the {turn.name} needs {needs / 2**30:.2f} GiB to wake, and {free / 2**30:.2f} are"
                f" free on a device that it shares (its need was {origin}): another process uses"
                " it, or the sleeping side keeps more than planned. Lower engine.memory_fraction,"
                " or give them devices of their own (placement=disaggregated)"
            )

    async def _call(self, turn: Tenant, method: Literal["sleep", "wake"]) -> list[int | None]:
        """Call `method` on all parts at the same time, each under a deadline of its own, which it
        may pause; returns their answers.

        Raises:
            TimeShareError: a part failed, or did not answer in time; in the latter case the
            sharing is lost.
        """

        async def call(sleeper: Sleeper) -> int | None:
            with deadline("engine", f"{turn.name}.{method}", self._seconds):
                return await (sleeper.sleep() if method == "sleep" else sleeper.wake())

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
                f"the {turn.name} did not {method} within {self._seconds:g} s"
                " (placement.switch_seconds): its GPU memory use is unknown"
            ) from error
        except Exception as error:
            raise TimeShareError(
                f"the {turn.name} could not {method}: {type(error).__name__}: {error}"
            ) from error
        except BaseException:
            self.state = "lost"  # cancelled, so the outcome is unknown
            raise


DeviceSharing = NoSharing | TimeSharing
"""The sharing of devices by engine and trainer: inside `training()`, the trainer is awake; outside,
the engine is."""
