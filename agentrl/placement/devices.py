"""Devices: the capabilities of each kind, and how many of which kind there are on how many nodes.

Figures of GPUs are those of their makers' data sheets: dense matrix products in bfloat16 (half the
printed figure if the sheet counts 2:4 sparsity), memory bandwidth, and the link to a neighbour, one
way.
"""

import os
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError
from agentrl.plugins import nearest

GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind of device. Rates of links are for each direction."""

    name: str
    """Its name."""
    memory: int
    """Bytes."""
    flops: float
    """FLOP/s in bfloat16."""
    flops_float32: float
    """FLOP/s in float32."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to another device of the node."""
    network: float
    """Bytes/s to a device of another node."""
    host_link: float
    """Bytes/s to the host's memory."""
    host_memory: int
    """Bytes, its share of the host's memory."""
    is_gpu: bool = True
    """False for a CPU."""


_GPUS = (
    # NVIDIA H200 and H100 SXM5, as in a DGX: 8 GPUs with NVLink 4, PCIe 5.0 x16 and 400 Gb/s each,
    # and 2 TB of memory
    DeviceKind("H200", int(139.8 * GIB), 989e12, 67e12, 4800e9, 450e9, 50e9, 64e9, 256 * GIB),
    DeviceKind("H100", int(79.1 * GIB), 989e12, 67e12, 3350e9, 450e9, 50e9, 64e9, 256 * GIB),
    # NVIDIA A100 SXM4 80 GB, as in a DGX: 8 GPUs with NVLink 3, PCIe 4.0 x16 and 200 Gb/s each, and
    # 2 TB of memory
    DeviceKind("A100", int(79.2 * GIB), 312e12, 19.5e12, 2039e9, 300e9, 25e9, 32e9, 256 * GIB),
    # NVIDIA L4, as in Google's g2-standard-96: 8 GPUs on PCIe 4.0 x16 with 100 Gb/s and 384 GB of
    # memory together
    DeviceKind("L4", int(22.0 * GIB), 121e12, 30.3e12, 300e9, 32e9, 1.6e9, 32e9, 44 * GIB),
)
GPUS = {kind.name: kind for kind in _GPUS}

_CORE_FLOPS, _CORE_BANDWIDTH = 40e9, 8e9
"""FLOP/s in float32 and bytes/s of one CPU core, measured with torch on an AMD EPYC (a product of
1024 x 1024, and a sum of 256 MiB)."""


def gpu_named(name: str) -> DeviceKind:
    """The kind of GPU with this name, in upper or lower case.

    Raises:
        ConfigError: it is not in the table.
    """
    if name.upper() in GPUS:
        return GPUS[name.upper()]
    raise ConfigError(f"no device {name!r}.{nearest(name.upper(), GPUS)} Known: {', '.join(GPUS)}")


def host(cores: int | None = None, memory: int | None = None) -> DeviceKind:
    """The CPU of a machine as one device; by default that of this machine, with all cores and all
    memory.
    """
    cores = cores or len(os.sched_getaffinity(0))
    memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bandwidth = cores * _CORE_BANDWIDTH
    flops = cores * _CORE_FLOPS
    return DeviceKind(
        f"CPU x{cores}",
        memory,
        flops,
        flops,
        bandwidth,
        bandwidth,
        1e9,
        bandwidth,
        memory,
        is_gpu=False,
    )


@dataclass(frozen=True, slots=True)
class Inventory:
    """`nodes` nodes with `per_node` devices of one kind each; devices are numbered consecutively
    from node 0 on.
    """

    kind: DeviceKind
    per_node: int = 1
    nodes: int = 1

    def __len__(self) -> int:
        return self.per_node * self.nodes

    def node(self, device: int) -> int:
        """The node of a device."""
        return device // self.per_node

    def __str__(self) -> str:
        if not self.kind.is_gpu:
            return f"{self.kind.name} with {self.kind.memory / GIB:.1f} GiB and no GPU"
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return (
            f"{nodes}{self.per_node} x {self.kind.name} with {self.kind.memory / GIB:.1f} GiB each"
        )


def visible() -> Inventory:
    """The GPUs of this machine that this process may use, or its CPU if there are none.

    Memory is as the GPUs report it. A GPU that is not in the table gets the speed of the slowest
    one in the table.
    """
    import torch

    if not torch.cuda.is_available():
        return Inventory(host())
    called = torch.cuda.get_device_name(0)
    known = next((kind for kind in _GPUS if kind.name in called.split("-")[0].split()), _GPUS[-1])
    memory = min(
        torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())
    )
    count = torch.cuda.device_count()
    kind = replace(known, name=called, memory=memory, host_memory=host().memory // count)
    return Inventory(kind, count)
