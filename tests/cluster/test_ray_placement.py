"""Device maps on Ray, with GPUs that are not there."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentrl.assembly import open_cluster
from agentrl.cluster import ray_placement
from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.ray_placement import Unplaced, gpus_of_ray, reserved
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.placement.device_map import DeviceMap, Replica
from agentrl.placement.devices import Inventory, gpu_named
from tests.cluster.shared_ray import join_shared_ray

pytestmark = pytest.mark.slow
EIGHT = Inventory(gpu_named("H100"), per_node=8)


class Seeing:
    """Says which GPUs it is given."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def ray_with_gpus() -> None:
    join_shared_ray()


@pytest.mark.long
def test_each_replica_sees_the_devices_of_its_map_and_nobody_else_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = tuple(
        Replica("engine", number, (2 * number, 2 * number + 1), 0) for number in range(4)
    )
    # They share two with the last engine.
    trainers = tuple(Replica("trainer", rank, (6 + rank,), 0) for rank in range(2))
    devices = DeviceMap("colocated", EIGHT, (*engines, *trainers), time_shared=True)
    monkeypatch.setattr(ray_placement, "_RESERVE_SECONDS", 2.0)

    async def main() -> None:
        async with reserved(devices) as placement, AsyncExitStack() as stack:
            seen = {}
            for role, count in (("engine", 4), ("trainer", 2), ("env", 1)):
                group = await RayWorkers(placement)(role, Seeing, count)
                stack.push_async_callback(group.stop)
                seen[role] = await group.all("devices")
            assert seen == {
                "engine": ["0,1", "2,3", "4,5", "6,7"],
                "trainer": ["6", "7"],
                "env": [""],
            }
            with pytest.raises(ConfigError, match=r"8 x H100 .* were not free within 2 s"):
                await reserved(devices).__aenter__()
        async with reserved(devices):
            pass  # they are free again

    asyncio.run(main())


def test_a_cluster_with_gpus_gives_them_out_as_the_plan_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpus_of_ray() == EIGHT
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config(Path("examples/colocated_8gpu.yaml")).config

    async def main() -> None:
        async with open_cluster(config) as placed:
            assert placed.config.trainer.settings.model_dump()["world_size"] == 8
            assert placed.plan is not None
            assert placed.plan.devices.time_shared
            tensor_parallel = placed.config.engine.settings.model_dump()["tensor_parallel"]
            makes = placed.cluster.engines(placed.config.engine, Path("nowhere"))
            assert len(makes) * tensor_parallel == 8

    asyncio.run(main())


def test_the_ranks_of_a_role_are_spread_over_the_living_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    a, b, c = "aa" * 28, "bb" * 28, "cc" * 28
    nodes = [{"NodeID": name, "Alive": name != b} for name in (c, b, a)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    placement = Unplaced()

    def node_of(role: str, rank: int) -> str:
        strategy = placement.options(role, rank)["scheduling_strategy"]
        assert strategy.soft
        return str(strategy.node_id)

    assert [
        node_of(*worker) for worker in (("trainer", 0), ("env", 0), ("trainer", 1), ("env", 1))
    ] == [a, c, c, a]
    assert node_of("trainer", 1) == a, "a replacement goes to the next node"
    nodes[0]["Alive"] = False
    assert node_of("env", 0) == a
