"""The process groups of a rank along the axes of its `Mesh`."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.placement.mesh import Mesh
from agentrl.trainers.compute.context import ContextGroup


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """The groups of a rank, as torch has them.

    `weights`: the grid for `fully_shard`: replicas and the shards of one, or its shards alone.
    `shards`: the ranks over which a replica's weights are divided, also those that compute parts of
    the same samples. `shard`, `replica`: this rank's places on the two. `context`: the ranks over
    which tokens are cut.
    """

    mesh: Mesh
    weights: DeviceMesh
    shards: dist.ProcessGroup
    shard: int
    replica: int
    context: ContextGroup | None = None

    @staticmethod
    def of(mesh: Mesh, rank: int, device: torch.device) -> "MeshGroups":
        """Make the groups. All ranks have to call it at the same time."""
        place = mesh.coordinates(rank)
        sizes, names = (mesh.replicate, mesh.shard * mesh.context), ("replicate", "shard")
        weights = (
            init_device_mesh(device.type, sizes, mesh_dim_names=names)
            if mesh.replicate > 1
            else init_device_mesh(device.type, sizes[1:], mesh_dim_names=names[1:])
        )
        context = None
        if mesh.context > 1:
            group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                mesh.lines("context")
            )
            context = ContextGroup(group, place.context, mesh.context)
        shards = weights.get_group("shard")
        return MeshGroups(mesh, weights, shards, dist.get_rank(shards), place.replicate, context)
