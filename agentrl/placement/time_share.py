"""Time-sharing: roles that share devices take turns, one asleep while the other works.

        share.training():        engine.sleep()   memory?   trainer.wake()
     generating ─────────────────────────────────────────────────────────▶ training
                ◀─────────────────────────────────────────────────────────
        at its end:              engine.wake()    memory?   trainer.sleep()

Both are never awake at once. A failed switch is undone. If a role misses its deadline, or can
neither sleep nor wake, its state is unknown: the sharing is `lost`, and every later switch is
refused.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from agentrl.errors import DeadlineError, TimeShareError
from agentrl.flow import Flow, deadline

State = Literal["generating", "training", "switching", "lost"]
Free = Callable[[], Awaitable[int]]
"""Returns how many bytes are free on the fullest of the shared devices."""


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
    """

    async def sleep(self) -> None:
        """Release all memory that can be released. If this raises, the object is awake as before.

        Raises:
            ConfigError: it has no way to sleep here.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again; when this returns, the object works. If this raises, it is
        asleep as before.
        """
        ...


class DeviceSharing(Protocol):
    """The sharing of devices by engine and trainer."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """The trainer is awake inside; outside, the engine is."""
        ...


class NoSharing:
    """The `DeviceSharing` of roles that have their own devices, or share devices with enough memory
    for both.
    """

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Changes nothing."""
        yield


@dataclass(frozen=True, slots=True)
class Tenant:
    """One side of a share: all its replicas, and the bytes that must be free on each device before
    it wakes.
    """

    name: str
    sleepers: Sequence[Sleeper]
    needs: int


class TimeSharing:
    """The `DeviceSharing` of an engine and a trainer that take turns; at first the engine is awake,
    the trainer asleep.

    `seconds`: the deadline of each side's part in a switch. Switches must not overlap.
    """

    def __init__(self, engine: Tenant, trainer: Tenant, free: Free, seconds: float) -> None:
        self._engine = engine
        self._trainer = trainer
        self._free = free
        self._seconds = seconds
        self.state: State = "generating"

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer is awake inside; afterwards the engine is awake again, also if the block
        failed.

        Raises:
            TimeShareError: a switch failed; says which state they are in.
        """
        await self._switch(self._engine, self._trainer, "generating", "training")
        try:
            yield
        finally:
            await self._switch(self._trainer, self._engine, "training", "generating")

    async def _switch(self, tired: Tenant, rested: Tenant, before: State, after: State) -> None:
        if self.state != before:
            raise TimeShareError(f"cannot go from {before} to {after}: the state is {self.state}")
        self.state = "switching"
        try:
            await self._call(tired, "sleep")
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

    async def _check_memory(self, turn: Tenant) -> None:
        free = await self._free()
        if free < turn.needs:
            raise TimeShareError(
                f"the {turn.name} needs {turn.needs / 2**30:.2f} GiB to wake, and"
                f" {free / 2**30:.2f} are free on a device that it shares: another process uses it,"
                " or the sleeping side keeps more than planned. Lower engine.memory_fraction, or"
                " give them devices of their own (placement=disaggregated)"
            )

    async def _call(self, turn: Tenant, method: Literal["sleep", "wake"]) -> None:
        """Call `method` on all replicas at the same time.

        Raises:
            TimeShareError: a replica failed, or did not answer in time; in the latter case the
            sharing is lost.
        """
        try:
            with deadline("engine", f"{turn.name}.{method}", self._seconds):
                async with Flow(f"{turn.name}.{method}") as flow:
                    for number, sleeper in enumerate(turn.sleepers):
                        flow.start(getattr(sleeper, method)(), name=str(number))
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
