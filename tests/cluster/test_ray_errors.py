"""The errors of Ray's actors: who calls one sees its own errors, or that it is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cluster.ray_errors import errors_of_actor

exceptions = pytest.importorskip("ray.exceptions")

# Ray kills what runs on a node of which more than a hundredth of the memory is taken.
SCRIPT = """
import asyncio
import os

os.environ |= {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}

from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.ray_cluster import join_ray
from agentrl.errors import WorkerDiedError


class Waiting:
    async def wait(self):
        await asyncio.sleep(3600)


async def main():
    try:
        group = await RayWorkers(lease=600)("env", lambda rank: Waiting(), 1)
        await group.all("wait")
    except WorkerDiedError as error:
        print(error)


join_ray(num_cpus=1)
asyncio.run(main())
"""


class GoneError(Exception):
    """No answer will come."""


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ActorDiedError(),
        exceptions.ActorUnavailableError("it does not answer", None),
        exceptions.NodeDiedError("the node died"),
        exceptions.OutOfDiskError("the disk is full"),
        exceptions.OutOfMemoryError("killed due to low memory\nand more"),
        exceptions.WorkerCrashedError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_actor_that_ray_has_lost_or_killed_for_memory_is_gone(error: Exception) -> None:
    with pytest.raises(GoneError) as raised, errors_of_actor(GoneError):
        raise error
    assert str(raised.value) == str(error).strip().splitlines()[0]


def test_what_an_actor_raises_is_raised_unchanged() -> None:
    own = ValueError("no such tile")
    with pytest.raises(ValueError, match="no such tile") as raised, errors_of_actor(GoneError):
        raise exceptions.RayTaskError("step", "its traceback", own)
    assert raised.value is own


@pytest.mark.long
def test_a_worker_that_ray_kills_when_memory_is_short_has_died(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("env 0 died: ")
    assert "memory" in done.stdout
