"""How many workers are alive, as displays read it."""

from contextlib import ExitStack

from agentrl.cluster.worker_registry import (
    WorkerCount,
    register_workers,
    registered_workers,
    worker_metrics,
)
from agentrl.observe.meanings import meaning_of


def test_crews_of_one_role_count_as_one_and_leave_with_their_owner() -> None:
    before = registered_workers()
    first, second = WorkerCount("scout", 3, 4, 1), WorkerCount("scout", 2, 2, 5)
    with register_workers(lambda: WorkerCount("oracle", 1, 1)):
        with register_workers(lambda: first), register_workers(lambda: second):
            assert registered_workers() == [
                *before,
                WorkerCount("oracle", 1, 1),
                WorkerCount("scout", 5, 6, 6),
            ]
            first = WorkerCount("scout", 4, 4, 2)
            assert registered_workers()[-1] == WorkerCount("scout", 6, 6, 7)
        assert registered_workers() == [*before, WorkerCount("oracle", 1, 1)]
    assert registered_workers() == before


def test_workers_restarts_and_what_was_set_aside_are_metrics_by_role() -> None:
    crews = [
        WorkerCount("trainer", 1, 1),
        WorkerCount("frozen engine", 1, 2, 3, 1),
        WorkerCount("frozen engine", 1, 1, 2),
    ]
    with ExitStack() as stack:
        for crew in crews:
            stack.enter_context(register_workers(lambda crew=crew: crew))
        found = worker_metrics()
    expected = {
        "workers/frozen_engine": 2.0,
        "restarts/trainer": 0.0,
        "restarts/frozen_engine": 5.0,
        "set_aside/frozen_engine": 1.0,
    }
    assert expected.items() <= found.items()
    assert "set_aside/trainer" not in found
    assert all(meaning_of(name) for name in found)
