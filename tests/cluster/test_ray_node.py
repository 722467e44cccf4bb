"""The watch over Ray's node: its death ends what depends on it, with a sentence."""

import asyncio
import socket
from pathlib import Path

import pytest

from agentrl.cluster.ray_node import _listens, watched
from agentrl.errors import EngineError, NodeDiedError, WorkerDiedError
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
def test_what_fails_with_the_node_is_told_as_its_death_and_other_errors_as_they_are(dead: bool) -> None:
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


def test_a_socket_whose_process_is_gone_does_not_listen_though_its_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "raylet"
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(path))
        raylet.listen()
        assert _listens(str(path))
    assert path.exists()
    assert not _listens(str(path))
