"""Nodes of Ray with GPUs that are not there."""

import os
from collections.abc import Mapping

from agentrl.cluster.ray_cluster import RayCluster
from agentrl.cluster.ray_placement import gpus_of_ray
from agentrl.placement.devices import GIB, Gpu
from agentrl.placement.inventory import Inventory
from agentrl.placement.probe import Machine

H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.1 * GIB), (9, 0))


def probe_fakes(environ: Mapping[str, str]) -> Machine:
    """A machine with as many GPUs as the environment of the node's processes lists."""
    names = tuple(environ["CUDA_VISIBLE_DEVICES"].split(","))
    return Machine("fake", (H100,) * len(names), names, cores=48, memory=2048 * GIB)


class RayOnFakes(RayCluster):
    """`cluster=ray` whose nodes say that they have the GPUs that they list."""

    def gpus(self) -> Inventory | None:
        return gpus_of_ray(probe_fakes)


class Seeing:
    """Says what its environment is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def variable(self, name: str) -> str:
        return os.environ.get(name, "")
