"""A `DeviceMap` on Ray: its GPUs are reserved as a whole, and each replica sees the devices that
the map assigns to it.

Ray assigns a number of GPUs, or half a GPU, and only reveals afterwards which ones. A device map
names the GPUs of each role, and two roles may share one. So the run reserves all GPUs of its nodes
as a placement group, and itself sets the node and the visible devices of each actor.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.cluster.environment import THREADS, thread_variables
from agentrl.cluster.ray_node import RESUME
from agentrl.errors import ConfigError, NodeDiedError
from agentrl.placement.device_map import DeviceMap, Replica
from agentrl.placement.inventory import Inventory
from agentrl.placement.probe import Machine, NodeReport, Probe, inventory_of, probe_machine

_RESERVE_SECONDS = 60.0
"""How long to wait for the GPUs to become free."""
_FREE_SECONDS = 30.0
"""How long to wait for GPUs for one more engine."""
_PROBE_SECONDS = 300.0
"""How long a node may take to say which GPUs it has: a fresh process, torch from a shared disk."""
_NODE_LABEL = "ray.io/node-id"
"""Ray's own label of a node."""


_DEVICES_OF = {"reference": "trainer", "critic": "trainer"}
"""Roles that a map does not name, and the role whose devices each of them shares."""


_WRITER_ROLE = "trainer"
"""The role whose ranks write the weights."""


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """The place of an actor: its Ray options, and its node. Equal for two that share one."""

    options: Mapping[str, Any]
    node: str


class Unplaced:
    """The placement of workers that need no GPU: the ranks of a role go to the live nodes in
    turn.

    The trainer begins with this process's node, so that a rank of it can write the weights there;
    the first other role begins with the next node, and so on; a replacement goes to the next node.
    Ray's own strategy "SPREAD" is not used: each node spreads only the actors requested from it, so
    that all actors of a run can end up on one node.

    `inherits`: the nodes have this process's environment.
    """

    def __init__(self, *, inherits: bool = False) -> None:
        self._inherits = inherits
        self._roles: dict[str, int] = {}
        self._started: Counter[tuple[str, int]] = Counter()

    def options(self, role: str, rank: int, count: int = 0) -> Mapping[str, Any]:
        """The Ray options of the actor of a rank, of `count` ranks that compute; 0 if it is none of
        those.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        all_nodes: Any = ray.nodes  # it has no types
        cores = {
            node["NodeID"]: int(node.get("Resources", {}).get("CPU", 1))
            for node in all_nodes()
            if node["Alive"]
        }
        if not cores:
            raise NodeDiedError(f"Ray's node died; {RESUME}: no node of the cluster is alive")
        own = ray.get_runtime_context().get_node_id()
        alive = sorted(cores, key=lambda node: (node != own, node))
        first = 0 if role == _WRITER_ROLE else self._roles.setdefault(role, len(self._roles) + 1)
        turn = first + rank + self._started[role, rank]
        self._started[role, rank] += 1
        # Soft: if the node is lost before the actor starts, Ray takes another.
        node = alive[turn % len(alive)]
        strategy = NodeAffinitySchedulingStrategy(node, soft=True)
        options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}
        chosen = os.environ.get(THREADS, "")
        # An environment of its own costs an actor a fresh process.
        if not count or (chosen and self._inherits):
            return options
        variables = thread_variables(cores[node], math.ceil(count / len(alive)), chosen)
        return {**options, "runtime_env": {"env_vars": variables}}

    def count(self, role: str) -> int:
        """Replicas of a role to start; 0 if the settings decide."""
        return 0

    @asynccontextmanager
    async def another(self, role: str, rank: int) -> AsyncIterator[ActorPlace]:
        """A place for one more actor that computes, whose rank none has."""
        options = self.options(role, rank, rank + 1)
        yield ActorPlace(options, node_of(options))


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """The placement of a map, on the nodes of a placement group. A role that is not on the map
    runs anywhere.
    """

    devices: DeviceMap
    group: Any
    unplaced: Unplaced = field(default_factory=Unplaced)

    def options(self, role: str, rank: int, count: int = 0) -> Mapping[str, Any]:
        """The Ray options of the actor of a rank, of `count` ranks that compute; 0 if it is none of
        those.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = _DEVICES_OF.get(role, role), rank
        found = [
            replica for replica in self.devices.replicas if (replica.role, replica.number) == place
        ]
        if not found:
            return self.unplaced.options(role, rank, count)
        (replica,) = found
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=replica.node
        )
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": self._variables(replica)},
        }

    def _variables(self, replica: Replica) -> dict[str, str]:
        """The environment of an actor: its devices, and its share of the node's cores."""
        inventory = self.devices.inventory
        node = inventory.nodes[replica.node]
        names = [inventory.visible_name(device) for device in replica.devices]
        in_use = {
            device
            for other in self.devices.replicas
            if other.node == replica.node
            for device in other.devices
        }
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(names),
            # Without it, Ray hides all GPUs from an actor that requests none.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            **thread_variables(
                node.cores, len(in_use), os.environ.get(THREADS, "") or node.threads
            ),
        }

    def count(self, role: str) -> int:
        """Replicas of a role to start; 0 if the settings decide."""
        return sum(replica.role == role for replica in self.devices.replicas)

    @asynccontextmanager
    async def another(self, role: str, rank: int) -> AsyncIterator[ActorPlace]:
        """A place for one more actor, whose rank none has, while the block lasts: that of the map,
        if it has one of this rank, or as many free GPUs of a node as another actor of the role has.

        Raises:
            ConfigError: no node has them; says how many are free.
        """
        if rank < self.count(role):
            options = self.options(role, rank)
            yield ActorPlace(options, node_of(options))
            return
        size = max(
            len(replica.devices) for replica in self.devices.replicas if replica.role == role
        )
        async with _free_gpus(self.devices.inventory, role, size) as place:
            yield place


RayPlacement = Unplaced | PlacementGroup
"""The places of a run's actors."""


def node_of(options: Mapping[str, Any]) -> str:
    """The node of an actor with these options of a `RayPlacement`: equal for two that share one."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = options["scheduling_strategy"]
    if isinstance(strategy, PlacementGroupSchedulingStrategy):
        # A group has one bundle on each node.
        return f"bundle {strategy.placement_group_bundle_index}"
    return str(strategy.node_id)


@asynccontextmanager
async def reserved(devices: DeviceMap) -> AsyncIterator[PlacementGroup]:
    """Reserve the GPUs of a map while the block lasts.

    Raises:
        ConfigError: the cluster does not have them, or they are in use.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    inventory = devices.inventory
    group = placement_group(
        [{"GPU": len(node.devices)} for node in inventory.nodes],
        strategy="STRICT_SPREAD",
        # Each bundle goes to the node that was probed: nodes differ in size and in their devices'
        # names.
        bundle_label_selector=[{_NODE_LABEL: node.id} for node in inventory.nodes],
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


@asynccontextmanager
async def _free_gpus(planned: Inventory, role: str, size: int) -> AsyncIterator[ActorPlace]:
    """So many free GPUs of one node, beside those of a plan, while the block lasts.

    Raises:
        ConfigError: no node has them.
    """
    import ray
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"GPU": size}])
    try:
        try:
            async with asyncio.timeout(_FREE_SECONDS):
                await asyncio.wrap_future(group.ready().future())
        except TimeoutError as error:
            available: Any = ray.available_resources  # these have no types
            existing: Any = ray.cluster_resources
            free, all_gpus = (counted().get("GPU", 0) for counted in (available, existing))
            raise ConfigError(
                f"one more {role} needs {size} free GPU{'s' * (size > 1)} of one machine: {free:g}"
                f" of the {all_gpus:g} GPUs of the cluster are free, and the plan of this run,"
                f" which is not made again, has {planned}. Let another machine join the cluster,"
                " or free some (`ray status` shows who uses them)"
            ) from error
        node = placement_group_table(group)["bundles_to_node_id"][0]
        yield ActorPlace(
            {
                "num_cpus": 0,
                "num_gpus": size,  # Ray chooses which of the node's these are
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=0
                ),
                "runtime_env": {"env_vars": _thread_share(node, size)},
            },
            node,
        )
    finally:
        remove_placement_group(group)


def _thread_share(node_id: str, size: int) -> dict[str, str]:
    """The share of a node's cores that goes with so many of its GPUs."""
    import ray

    all_nodes: Any = ray.nodes  # it has no types
    found = [node["Resources"] for node in all_nodes() if node["NodeID"] == node_id]
    cores, gpus = (int(found[0].get(kind, 1)) if found else 1 for kind in ("CPU", "GPU"))
    return thread_variables(cores, max(1, gpus // size), os.environ.get(THREADS, ""))


def gpus_of_ray(probe: Probe = probe_machine) -> Inventory | None:
    """The GPUs of the cluster's nodes, as a probe on each node finds them; None if the cluster
    counts none.

    Raises:
        ConfigError: a node did not answer, has fewer GPUs than the cluster counts, or another kind.
    """
    import ray

    all_nodes: Any = ray.nodes  # it has no types
    nodes = [node for node in all_nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]
    if not nodes:
        return None
    return inventory_of(_probe_nodes(nodes, probe))


def _probe_nodes(nodes: Sequence[Mapping[str, Any]], probe: Probe) -> list[NodeReport]:
    """The answers of the nodes, which are asked at the same time."""
    import ray
    from ray.exceptions import GetTimeoutError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote
    answers = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_probe)
        answers.append(task.remote(probe))
    reports = []
    for node, answer in zip(nodes, answers, strict=True):
        address = node["NodeManagerAddress"]
        try:
            machine = ray.get(answer, timeout=_PROBE_SECONDS)
        except RayTaskError as error:
            raise error.cause from error  # the original error, not Ray's wrapper of it
        except (GetTimeoutError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"the node at {address} did not say within {_PROBE_SECONDS:g} s which GPUs it has"
                f" ({type(error).__name__}): `ray status` shows whether it is alive"
            ) from error
        counted = int(node["Resources"]["GPU"])
        reports.append(NodeReport(node["NodeID"], address, counted, machine))
    return reports


def _probe(probe: Probe) -> Machine:
    """Probe the machine of a node with the node's own environment, in a task there."""
    # Ray changes variables before a task begins; the kernel keeps what the process started with.
    started_with = Path("/proc/self/environ")
    if not started_with.exists():
        return probe(os.environ)
    entries = os.fsdecode(started_with.read_bytes()).split("\0")
    return probe(dict(entry.split("=", 1) for entry in entries if "=" in entry))
