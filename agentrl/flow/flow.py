"""`Flow`: structured concurrency. Every task has an owner, and no task outlives its owner."""

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, Self, TypeVar

from agentrl.errors import AgentRLError
from agentrl.flow.channel import Channel, ChannelStats

T = TypeVar("T")


class Flow:
    """An owner of tasks and of the channels between them.

    Leaving the block waits for every task. When one fails, its siblings and the block are
    cancelled, and its exception is raised with its own traceback, not wrapped in a group (unless
    different exceptions came at once).

        async with Flow("rollouts") as flow:
            groups = flow.channel("groups", capacity=8)
            flow.start(produce(groups), name="producer")
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._group = asyncio.TaskGroup()
        self._tasks: list[
            asyncio.Task[Any]
        ] = []  # in order of start, so that cancelling is deterministic
        self._tidy_at = _MAX_ENDED_TASKS
        self._channels: list[Channel[Any]] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        failed_before = self._has_cancelled_its_owner
        try:
            await self._group.__aexit__(*exc)
        except BaseExceptionGroup as group:
            if self._has_cancelled_its_owner and not failed_before and sys.version_info < (3, 13):
                # A task failed while its owner waited here. Python before 3.13 cancels the owner
                # and does not revoke that, so the owner would stay marked as cancelled even after
                # the failure was caught.
                owner = asyncio.current_task()
                assert owner is not None
                owner.uncancel()
            sole = _sole(group)
            if sole is None:
                raise
            raise sole from sole.__cause__

    def start(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start `work` as a task beside the others."""
        task = self._group.create_task(work, name=f"{self.name}/{name}")
        self._tasks.append(task)
        # Rarely, as a callback for each ended task would cost more.
        if len(self._tasks) == self._tidy_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tidy_at = 2 * len(self._tasks) + _MAX_ENDED_TASKS
        return task

    def channel(self, name: str, capacity: int) -> Channel[Any]:
        """A channel whose state is part of this flow's snapshot."""
        channel: Channel[Any] = Channel(f"{self.name}/{name}", capacity)
        self._channels.append(channel)
        return channel

    def cancel(self) -> None:
        """Cancel every task that still runs; leaving the block then waits for them to end."""
        for task in self._tasks:
            task.cancel(f"flow {self.name!r} ended")

    @property
    def _has_cancelled_its_owner(self) -> bool:
        return bool(getattr(self._group, "_parent_cancel_requested", False))

    def __len__(self) -> int:
        return sum(not task.done() for task in self._tasks)

    def snapshot(self) -> list[ChannelStats]:
        """The states of the channels: the observed dataflow graph."""
        return [channel.snapshot() for channel in self._channels]


_MAX_ENDED_TASKS = 8
"""Ended tasks that are kept at most, besides as many as there are live ones."""


def _sole(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The only error in a nested group, or `None`; a hundred tasks with equal errors count as one
    error. So do those that agentrl raises itself: each names its remedy, and the first is enough.
    One of another kind is noted on it.
    """
    leaves = list(_leaves(group))
    if all(isinstance(leaf, AgentRLError) for leaf in leaves):
        for kind, other in {type(leaf): leaf for leaf in reversed(leaves)}.items():
            if kind is not type(leaves[0]):
                leaves[0].add_note(f"At the same time: {kind.__name__}: {other}")
        return leaves[0]
    return leaves[0] if len({(type(leaf), str(leaf)) for leaf in leaves}) == 1 else None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
