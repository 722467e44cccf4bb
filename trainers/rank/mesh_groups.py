"""The process groups of a rank along the axes of its `Mesh`."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.placement.mesh import Mesh


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """The groups of a rank, as torch has them.

    `weights`: the grid for `fully_shard`: replicas and the shards of one, or its shards alone.
    `shards`: the ranks over which a replica's weights are divided. `shard`, `replica`: this rank's
    places on the two.
    """

    mesh: Mesh
    weights: DeviceMesh
    shards: dist.ProcessGroup
    shard: int
    replica: int

    @staticmethod
    def of(mesh: Mesh, rank: int, device: torch.device) -> "MeshGroups":
        """Make the groups. All ranks have to call it at the same time."""
        place = mesh.coordinates(rank)
        sizes, names = (mesh.replicate, mesh.shard), ("replicate", "shard")
        weights = (
            init_device_mesh(device.type, sizes, mesh_dim_names=names)
            if mesh.replicate > 1
            else init_device_mesh(device.type, sizes[1:], mesh_dim_names=names[1:])
        )
        return MeshGroups(mesh, weights, weights.get_group("shard"), place.shard, place.replicate)
