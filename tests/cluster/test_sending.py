"""What is sent to workers in other processes is pickled beside the loop, and copied once."""

import asyncio
import os
import pickle
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from agentrl.cluster.call_sender import CallSender
from agentrl.cluster.parcel import Parcel
from agentrl.cluster.ray_actors import RayWorker
from agentrl.cluster.ray_engine import RayEngine
from agentrl.cluster.ray_receivers import RayReceivers
from agentrl.errors import WorkerDiedError

LEASE = 30.0


class Needy:
    """Can be pickled only while the event loop runs: what pickles it waits for the loop."""

    _version = 0  # as a tensor has it

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.loop_ran = threading.Event()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self.asked.set()
        if not self.loop_ran.wait(10):
            raise RuntimeError("it is pickled on the event loop")
        return str, ("pickled",)

    async def serve(self) -> None:
        """What the loop does meanwhile."""
        while not self.asked.is_set():  # noqa: ASYNC110  a thread sets it
            await asyncio.sleep(0.001)
        self.loop_ran.set()


class Actor:
    """As a Ray actor, it pickles arguments where it is called. It answers with all calls so far."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    @property
    def call(self) -> Any:
        return self

    update_weights = call

    def remote(self, *args: Any) -> Any:
        self.received.append(pickle.loads(pickle.dumps(args)))
        answer: Future[Any] = Future()
        answer.set_result(list(self.received))
        self.answer = answer
        return self

    def future(self) -> Future[Any]:
        return self.answer


def test_arguments_for_an_actor_are_pickled_beside_the_loop_in_the_order_of_the_calls() -> None:
    pytest.importorskip("ray")
    needy = Needy()

    async def main() -> Any:
        worker = RayWorker("trainer", 0, Actor(), LEASE)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.call("step", needy))
            later = group.create_task(worker.call("saved"))
            group.create_task(needy.serve())
        worker.calls.stop()
        return later.result()

    assert asyncio.run(main()) == [("step", "pickled"), ("saved",)]


def test_tensors_for_an_engine_are_pickled_beside_the_loop(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    needy, actor = Needy(), Actor()
    engine = RayEngine(cast(Any, None), tmp_path, {}, RayReceivers())
    engine._actor = actor

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.update_weights(cast(Any, {"head": needy}), 1))
            group.create_task(needy.serve())

    asyncio.run(main())
    assert actor.received == [({"head": "pickled"}, 1)]


def test_a_cancelled_caller_does_not_take_back_what_other_ranks_have() -> None:
    sent: list[str] = []

    async def main() -> None:
        calls, let = CallSender("trainer", 1), threading.Event()

        def slowly(text: str) -> None:
            let.wait(10)
            sent.append(text)

        callers = [asyncio.create_task(calls.send(slowly, text)) for text in ("first", "second")]
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        assert all(caller.cancelled() for caller in callers)
        let.set()
        await calls.send(slowly, "third")
        calls.stop()
        with pytest.raises(WorkerDiedError, match="trainer 1 died: it was stopped"):
            await calls.send(slowly, "fourth")

    asyncio.run(main())
    assert sent == ["first", "second", "third"]


def test_a_call_that_waits_behind_another_one_fails_when_its_worker_is_stopped() -> None:
    async def main() -> None:
        calls, let = CallSender("trainer", 1), threading.Event()
        first, second, third = (
            asyncio.create_task(calls.send(work, 10)) for work in (let.wait, time.sleep, time.sleep)
        )
        await asyncio.sleep(0)
        calls.stop()
        third.cancel()
        let.set()
        assert await first
        # Not a cancellation, which would end the caller as if the run had been stopped.
        with pytest.raises(WorkerDiedError, match="trainer 1 died: it was stopped"):
            await second
        with pytest.raises(asyncio.CancelledError):
            await third

    asyncio.run(main())


def test_the_arrays_of_a_parcel_are_in_memory_that_both_sides_map() -> None:
    numbers, few = np.arange(100_003, dtype=np.int32), np.arange(3)
    whole = np.ones((1000, 7)).T
    parcel = Parcel.of({"numbers": numbers, "few": few, "whole": [whole], "text": "a"})
    passed = pickle.dumps(parcel)
    assert len(passed) < 2000
    opened = pickle.loads(passed).open()
    parcel.close()
    assert not Path(f"/proc/{os.getpid()}/fd/{parcel.memory}").exists()
    assert opened["text"] == "a"
    assert opened["few"].tolist() == few.tolist()
    assert np.array_equal(opened["numbers"], numbers)
    assert opened["numbers"].flags.aligned
    assert not opened["numbers"].flags.writeable
    assert np.array_equal(opened["whole"][0], whole)


def test_a_parcel_without_arrays_has_no_memory() -> None:
    parcel = Parcel.of(("saved", np.zeros(0), cast(Any, None)))
    assert parcel.memory == -1
    parcel.close()
    assert parcel.open()[0] == "saved"
