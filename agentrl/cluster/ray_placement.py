"""A `DeviceMap` on Ray: its GPUs are reserved as a whole, and each replica sees the devices that
the map assigns to it.

Ray assigns a number of GPUs, or half a GPU, and only reveals afterwards which ones. A device map
names the GPUs of each role, and two roles may share one. So the run reserves all GPUs of its nodes
as a placement group, and itself sets the node and the visible devices of each actor.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.cluster.ray_node import RESUME
from agentrl.errors import ConfigError, NodeDiedError
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.devices import GPUS, DeviceKind, Inventory

_RESERVE_SECONDS = 60.0
"""How long to wait for the GPUs to become free."""


_LIVES_WITH = {"reference": "trainer", "critic": "trainer"}
"""Roles that a map does not name, and the role whose devices each of them shares."""


class Unplaced:
    """The placement of workers that need no GPU: the ranks of a role go to the live nodes in turn.

    The first role begins with the first node, the second role with the second, and so on; a
    replacement goes to the next node. Ray's own strategy "SPREAD" is not used: each node spreads
    only the actors requested from it, so that all actors of a run can end up on one node.
    """

    def __init__(self) -> None:
        self._roles: dict[str, int] = {}
        self._started: Counter[tuple[str, int]] = Counter()

    def options(self, role: str, rank: int) -> Mapping[str, Any]:
        """The Ray options of the actor of a rank."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        all_nodes: Any = ray.nodes  # it has no types
        alive = sorted(node["NodeID"] for node in all_nodes() if node["Alive"])
        if not alive:
            raise NodeDiedError(f"Ray's node died; {RESUME}: no node of the cluster is alive")
        turn = self._roles.setdefault(role, len(self._roles)) + rank + self._started[role, rank]
        self._started[role, rank] += 1
        # Soft: if the node is lost before the actor starts, Ray takes another.
        strategy = NodeAffinitySchedulingStrategy(alive[turn % len(alive)], soft=True)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}

    def count(self, role: str) -> int:
        """Replicas of a role to start: 0, as the settings decide."""
        return 0


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """The placement of a map, on the nodes of a placement group. A role that is not on the map runs
    anywhere.
    """

    devices: DeviceMap
    group: Any
    unplaced: Unplaced = field(default_factory=Unplaced)

    def options(self, role: str, rank: int) -> Mapping[str, Any]:
        """The Ray options of the actor of a rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = _LIVES_WITH.get(role, role), rank
        found = [
            replica for replica in self.devices.replicas if (replica.role, replica.number) == place
        ]
        if not found:
            return self.unplaced.options(role, rank)
        (replica,) = found
        first = replica.node * self.devices.inventory.per_node
        seen = ",".join(str(device - first) for device in replica.devices)
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=replica.node
        )
        # Without the second variable, Ray hides all GPUs from an actor that requests none.
        variables = {"CUDA_VISIBLE_DEVICES": seen, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": variables},
        }

    def count(self, role: str) -> int:
        """Replicas of a role to start; 0 if it is not on the map."""
        return sum(replica.role == role for replica in self.devices.replicas)


def node_of(options: Mapping[str, Any]) -> str:
    """The node of an actor with these options of a `RayPlacement`: equal for two that share one."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = options["scheduling_strategy"]
    if isinstance(strategy, PlacementGroupSchedulingStrategy):
        # A group has one bundle on each node.
        return f"bundle {strategy.placement_group_bundle_index}"
    return str(strategy.node_id)


RayPlacement = Unplaced | PlacementGroup
"""The places of a run's actors."""


@asynccontextmanager
async def reserved(devices: DeviceMap) -> AsyncIterator[PlacementGroup]:
    """Reserve the GPUs of a map while the block lasts.

    Raises:
        ConfigError: the cluster does not have them, or they are in use.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    inventory = devices.inventory
    group = placement_group(
        [{"GPU": inventory.per_node}] * inventory.nodes, strategy="STRICT_SPREAD"
    )
    try:
        async with asyncio.timeout(_RESERVE_SECONDS):
            await asyncio.wrap_future(group.ready().future())
    except TimeoutError as error:
        remove_placement_group(group)
        raise ConfigError(
            f"{inventory} were not free within {_RESERVE_SECONDS:g} s: `ray status` shows who uses"
            " them"
        ) from error
    try:
        yield PlacementGroup(devices, group)
    finally:
        remove_placement_group(group)


def gpus_of_ray() -> Inventory | None:
    """The GPUs of the cluster's nodes, or None if it has none. If nodes have different numbers, the
    smallest counts.

    Raises:
        ConfigError: the nodes have GPUs of different kinds.
    """
    import ray

    all_nodes: Any = ray.nodes  # it has no types
    nodes = [
        node["Resources"]
        for node in all_nodes()
        if node["Alive"] and node["Resources"].get("GPU", 0) >= 1
    ]
    if not nodes:
        return None
    kinds = {_kind_of(node) for node in nodes}
    if len(kinds) > 1:
        listed = ", ".join(sorted(kind.name for kind in kinds))
        raise ConfigError(
            f"the cluster has GPUs of several kinds ({listed}), but a run needs a single kind: join"
            " only nodes of one"
        )
    return Inventory(kinds.pop(), int(min(node["GPU"] for node in nodes)), len(nodes))


def _kind_of(resources: Mapping[str, float]) -> DeviceKind:
    """The kind that Ray names; the slowest in the table if Ray names none, or one that is not in
    the table.
    """
    named = [
        key.removeprefix("accelerator_type:")
        for key in resources
        if key.startswith("accelerator_type:")
    ]
    return next(
        (GPUS[name.split("-")[0]] for name in named if name.split("-")[0] in GPUS), GPUS["L4"]
    )
