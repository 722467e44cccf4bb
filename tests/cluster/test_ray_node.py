"""The watch over Ray's node: its death ends what depends on it, with a sentence."""

import asyncio
import socket
import sys
import threading
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster import ray_cluster
from agentrl.cluster.ray_node import RayNode, _listens, watched
from agentrl.errors import EngineError, NodeDiedError, StallError, WorkerDiedError
from agentrl.flow import now, run_virtual

SENTENCE = r"Ray's node died; resume with `agentrl train --resume RUN`: it burned"


def test_a_node_that_dies_ends_the_block_at_once_however_long_that_would_wait() -> None:
    async def main() -> None:
        with pytest.raises(NodeDiedError, match=SENTENCE):
            async with watched(lambda: "it burned" if now() > 100 else None):
                await asyncio.sleep(1e9)
        assert now() < 102

    run_virtual(main)


@pytest.mark.parametrize("dead", [False, True])
def test_what_fails_with_the_node_is_told_as_its_death_and_other_errors_as_they_are(
    dead: bool,
) -> None:
    async def main() -> None:
        async with watched(lambda: "it burned" if dead and now() > 1 else None):
            await asyncio.sleep(1.1)  # the watch has not looked since
            raise WorkerDiedError("trainer", 0, "its node is gone")

    with pytest.raises(NodeDiedError if dead else WorkerDiedError) as raised:
        run_virtual(main)
    assert not dead or isinstance(raised.value.__cause__, WorkerDiedError)


def test_errors_on_the_way_out_do_not_hide_the_death() -> None:
    async def main() -> None:
        async with watched(lambda: "it burned" if now() > 1 else None):
            try:
                await asyncio.sleep(1e9)
            finally:
                raise EngineError("the actor is gone")

    with pytest.raises(NodeDiedError, match=SENTENCE):
        run_virtual(main)


def test_a_block_that_ends_by_itself_ends_the_watch() -> None:
    async def main() -> float:
        async with watched(lambda: None):
            await asyncio.sleep(10)
        return now()

    assert run_virtual(main) == pytest.approx(10)


def test_a_socket_whose_process_is_gone_does_not_listen_though_its_file_is_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "raylet"
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(path))
        raylet.listen()
        assert _listens(str(path))
    assert path.exists()
    assert not _listens(str(path))


@pytest.fixture
def asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.cluster.ray_node._ASK_SECONDS", 0.0)


@pytest.mark.usefixtures("asks_at_once")
def test_a_silent_head_is_dead_after_as_many_looks_and_not_because_this_process_was_stopped() -> (
    None
):
    answered, asked = threading.Semaphore(0), threading.Semaphore(0)

    def nodes() -> list[dict[str, Any]]:
        asked.release()
        assert answered.acquire(timeout=60)
        return [{"NodeID": "own", "Alive": True, "RayletSocketName": "/there/is/none"}]

    with RayNode(nodes, "own") as node:
        assert asked.acquire(timeout=60)
        answered.release()
        assert asked.acquire(timeout=60)  # the first answer has been read
        deaths = [node.death() for _ in range(42)]
        assert deaths[:41] == [None] * 41
        assert "gcs_server) has not answered for 20 s" in str(deaths[41])
        answered.release(100)


@pytest.mark.usefixtures("asks_at_once")
def test_a_node_that_ray_has_given_up_is_dead() -> None:
    asked = threading.Semaphore(0)

    def nodes() -> list[dict[str, Any]]:
        asked.release()
        return [
            {"NodeID": "own", "Alive": False, "RayletSocketName": ""},
            {"NodeID": "other", "Alive": True},
        ]

    with RayNode(nodes, "own") as node:
        for _ in range(2):
            assert asked.acquire(timeout=60)
        assert "Ray has given up this machine" in str(node.death())


def test_a_ray_that_does_not_come_up_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*arguments: Any, **options: Any) -> None:
        raise Exception("The current node timed out\nduring startup.")

    ray = types.SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "_on_loopback", nullcontext)
    with pytest.raises(
        StallError, match="Ray did not start on this machine: The current node timed out during"
    ):
        ray_cluster.join_ray()
