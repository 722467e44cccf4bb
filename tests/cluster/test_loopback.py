"""Nothing of a run on one machine can be reached from another."""

import asyncio
import os

import psutil
import pytest

from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.ray_placement import Unplaced
from tests.cluster.shared_ray import join_shared_ray
from tests.processes import open_to_others

pytestmark = pytest.mark.slow


class Anything:
    """A worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.long
def test_a_ray_that_a_run_has_started_listens_on_the_loopback_interface_only() -> None:
    join_shared_ray()

    async def main() -> None:
        workers = await RayWorkers(Unplaced())("anything", Anything, 2)
        try:
            of_ray = psutil.Process().children(recursive=True)
            assert set(await workers.all("pid")) <= {process.pid for process in of_ray}
            assert open_to_others([psutil.Process(), *of_ray]) == []
        finally:
            await workers.stop()

    asyncio.run(main())
