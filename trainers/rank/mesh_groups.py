"""The process groups of a rank along the axes of its `Mesh`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.placement.mesh import Mesh
from agentrl.trainers.compute.context import ContextGroup
from agentrl.trainers.compute.experts import ExpertGroup
from agentrl.trainers.compute.tensor import TensorGroup


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """The groups of a rank, as torch has them.

    `weights`: the grid for `fully_shard`: replicas and the shards of one, or its shards alone; of
    the ranks that have the same part of each matrix. `shards`: the ranks over which a replica's
    weights are divided, also those that compute parts of the same samples. `shard`, `replica`: this
    rank's places among these ranks and among the replicas. `context`: the ranks over which tokens
    are cut. `tensor`: those over which matrices are divided. `expert`: those over which experts are
    divided, and `experts`: the grid for the ranks that have the same ones, all of a replica if they
    are not divided.
    """

    mesh: Mesh
    weights: DeviceMesh
    shards: dist.ProcessGroup
    shard: int
    replica: int
    experts: DeviceMesh
    context: ContextGroup | None = None
    tensor: TensorGroup | None = None
    expert: ExpertGroup | None = None

    @staticmethod
    def of(mesh: Mesh, rank: int, device: torch.device) -> "MeshGroups":
        """Make the groups. All ranks have to call it at the same time."""
        place = mesh.coordinates(rank)
        weights = _grid(device, {"replicate": mesh.replicate, "shard": mesh.replica_size})
        experts, shards = weights, weights.get_group("shard")
        context = tensor = None
        if mesh.context > 1:
            group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                mesh.lines("context")
            )
            context = ContextGroup(group, place.context, mesh.context)
        if mesh.tensor > 1:
            sizes = {"shard": mesh.shard * mesh.context, "tensor": mesh.tensor}
            grid = _grid(device, {"replicate": mesh.replicate, **sizes})
            weights = grid["replicate", "shard"] if mesh.replicate > 1 else grid["shard"]
            tensor = TensorGroup(grid.get_group("tensor"), place.tensor, mesh.tensor)
        expert = None
        if mesh.expert > 1:
            sizes = {"shard": mesh.replica_size // mesh.expert, "expert": mesh.expert}
            grid = _grid(device, {"replicate": mesh.replicate, **sizes})
            experts = grid["replicate", "shard"] if mesh.replicate > 1 else grid["shard"]
            expert = ExpertGroup(
                grid.get_group("expert"), grid.get_local_rank("expert"), mesh.expert
            )
        return MeshGroups(
            mesh,
            weights,
            shards,
            dist.get_rank(shards),
            place.replicate,
            experts,
            context,
            tensor,
            expert,
        )


def _grid(device: torch.device, sizes: Mapping[str, int]) -> DeviceMesh:
    """All ranks on axes of these sizes, without `replicate` if there is a single replica."""
    present = {name: size for name, size in sizes.items() if name != "replicate" or size > 1}
    return init_device_mesh(device.type, tuple(present.values()), mesh_dim_names=tuple(present))
