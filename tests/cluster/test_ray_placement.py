"""Device maps on Ray, with GPUs that are not there."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.assembly import open_cluster
from agentrl.cluster import ray_cluster, ray_placement
from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.ray_placement import PlacementGroup, Unplaced, gpus_of_ray, reserved
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.placement.device_map import DeviceMap, Replica
from agentrl.placement.devices import GIB, gpu_named
from agentrl.placement.inventory import Inventory, Node
from tests.cluster.fake_gpus import Seeing, probe_fakes
from tests.cluster.shared_ray import join_shared_ray

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")


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
    eight = gpus_of_ray(probe_fakes)
    assert eight is not None
    devices = DeviceMap("colocated", eight, (*engines, *trainers), time_shared=True)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ray_placement, "_RESERVE_SECONDS", 2.0)

    async def main() -> None:
        async with reserved(devices) as placement, AsyncExitStack() as stack:
            seen = {}
            for role, count in (("engine", 4), ("trainer", 2)):
                group = await RayWorkers(placement)(role, Seeing, count)
                stack.push_async_callback(group.stop)
                seen[role] = await group.all("variable", "CUDA_VISIBLE_DEVICES")
                assert await group.all("variable", "OMP_NUM_THREADS") == ["6"] * count
            assert seen == {
                "engine": ["8,9", "10,11", "12,13", "14,15"],
                "trainer": ["14", "15"],
            }
            with pytest.raises(ConfigError, match=r"8 x H100 .* were not free within 2 s"):
                await reserved(devices).__aenter__()
        async with reserved(devices):
            pass  # they are free again

    asyncio.run(main())


@pytest.mark.long
def test_a_cluster_with_gpus_gives_them_out_as_the_plan_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_cluster, "probe_machine", probe_fakes)
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config(Path("examples/colocated_8gpu.yaml")).config

    async def main() -> None:
        async with open_cluster(config) as placed:
            assert placed.config.trainer.settings.model_dump()["world_size"] == 8
            assert placed.plan is not None
            assert placed.plan.devices.time_shared
            (node,) = placed.plan.devices.inventory.nodes
            assert node.devices == ("8", "9", "10", "11", "12", "13", "14", "15")
            assert node.host_memory == 2048 * GIB
            tensor_parallel = placed.config.engine.settings.model_dump()["tensor_parallel"]
            makes = placed.cluster.engines(placed.config.engine, Path("nowhere"))
            assert len(makes) * tensor_parallel == 8

    asyncio.run(main())


@pytest.mark.long
def test_another_engine_gets_what_the_plan_has_for_it_or_free_gpus_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The plan has three engines on six of the node's eight GPUs.
    node = gpus_of_ray(probe_fakes)
    assert node is not None
    six = Inventory(node.kind, (replace(node.nodes[0], devices=node.nodes[0].devices[:6]),))
    engines = tuple(Replica("engine", rank, (2 * rank, 2 * rank + 1), 0) for rank in range(3))
    devices = DeviceMap("disaggregated", six, engines)
    monkeypatch.setattr(ray_placement, "_FREE_SECONDS", 2.0)

    async def main() -> None:
        async with reserved(devices) as placement:
            async with placement.another("engine", 2) as planned:  # it was removed before
                assert planned.options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == "12,13"
                assert planned.node == "bundle 0"
            async with placement.another("engine", 3) as free, AsyncExitStack() as stack:
                remote: Any = ray.remote
                actor = remote(Seeing).options(**free.options).remote(3)
                stack.callback(ray.kill, actor)
                devices_of_it = await actor.variable.remote("CUDA_VISIBLE_DEVICES")
                assert set(devices_of_it.split(",")) == {"14", "15"}
                assert await actor.variable.remote("OMP_NUM_THREADS") == "1"
                assert free.node == placement.devices.inventory.nodes[0].id
                with pytest.raises(
                    ConfigError,
                    match=r"needs 2 free GPUs of one machine: 0 of the 8 GPUs .* free.*6 x H100",
                ):
                    await placement.another("engine", 4).__aenter__()
            async with placement.another("engine", 4):
                pass  # they are free again

    asyncio.run(main())


def test_a_node_that_has_not_what_ray_counts_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"counts 8 GPUs on .* at 127\.0\.0\.1, .* sees 0 \(CUDA"):
        gpus_of_ray()


def test_actors_are_placed_on_the_nodes_of_their_devices_with_their_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    nodes = (
        Node(("GPU-a", "GPU-b"), 512 * GIB, 64, "first", "11" * 28),
        Node(("4", "5", "6", "7"), 1024 * GIB, 64, "second", "22" * 28, threads="3"),
    )
    inventory = Inventory(gpu_named("H100"), nodes)
    ranks = tuple(Replica("trainer", n, (n,), inventory.node(n)) for n in range(6))
    placement = PlacementGroup(DeviceMap("colocated", inventory, ranks), None)
    seen = [placement.options("reference", rank, 6) for rank in range(6)]
    variables = [options["runtime_env"]["env_vars"] for options in seen]
    names = [each["CUDA_VISIBLE_DEVICES"] for each in variables]
    assert names == ["GPU-a", "GPU-b", "4", "5", "6", "7"]
    bundles = [options["scheduling_strategy"].placement_group_bundle_index for options in seen]
    assert bundles == [0, 0, 1, 1, 1, 1]
    assert [each["OMP_NUM_THREADS"] for each in variables] == ["32"] * 2 + ["3"] * 4
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    (chosen,) = {
        placement.options("trainer", rank, 6)["runtime_env"]["env_vars"]["OMP_NUM_THREADS"]
        for rank in range(6)
    }
    assert chosen == "5"


def test_ranks_without_gpus_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    nodes = [{"NodeID": c * 56, "Alive": True, "Resources": {"CPU": 64.0}} for c in "ab"]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ranks = Unplaced(inherits=True).options("trainer", 0, 8)
    assert ranks["runtime_env"] == {"env_vars": {"OMP_NUM_THREADS": "16"}}
    assert "runtime_env" not in Unplaced().options("env", 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "runtime_env" not in Unplaced(inherits=True).options("trainer", 0, 8)
    there = Unplaced().options("trainer", 0, 8)
    assert there["runtime_env"] == {"env_vars": {"OMP_NUM_THREADS": "5"}}


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


def test_the_trainer_begins_on_the_node_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    own: str = ray.get_runtime_context().get_node_id()
    nodes = [{"NodeID": name, "Alive": True} for name in ("00" * 28, own, "ee" * 28)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    placement = Unplaced()
    places = [
        placement.options(role, rank)["scheduling_strategy"].node_id
        for role, rank in (("engine", 0), ("engine", 1), ("trainer", 0), ("trainer", 1))
    ]
    assert places == ["00" * 28, "ee" * 28, own, "00" * 28]
