"""Kinds of devices: what each can do.

The kind of a GPU follows from what the device says of itself (`Gpu`). Its memory is always its own.
Its rates are those of its maker's data sheet if the product is in the table: dense matrix products
in bfloat16 (half the printed figure if the sheet counts 2:4 sparsity), memory bandwidth, and the
link to a neighbour, one way. Of any other product they are estimated from its multiprocessors, its
clocks and the width of its memory bus; `placement.device` states what is known better.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

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
    """Bytes, its share of the memory of a usual host."""
    is_gpu: bool = True
    """False for a CPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU says of itself."""

    name: str
    """Its product, such as `NVIDIA A100-SXM4-40GB`."""
    memory: int
    """Bytes."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability; (0, 0) if it says none."""
    uuid: str = ""
    """Its name for `CUDA_VISIBLE_DEVICES`, such as `GPU-8c2f...`; empty if it says none."""
    multiprocessors: int = 0
    """Streaming multiprocessors, in a part of a GPU (MIG) those of the part."""
    clock: float = 0.0
    """Most Hz of a multiprocessor; 0 if it says none."""
    memory_clock: float = 0.0
    """Most Hz of its memory, which moves two bits for each line in a cycle; 0 if it says none."""
    bus_bits: int = 0
    """Lines of its memory bus; 0 if it says none."""

    @property
    def words(self) -> frozenset[str]:
        """The words of its name, in upper case."""
        return frozenset(re.split(r"[\s/_-]+", self.name.upper()))


_GPUS = (
    # NVIDIA B200, as in a DGX: 8 GPUs with NVLink 5, PCIe 5.0 x16 and 400 Gb/s each, and 2 TB of
    # memory
    DeviceKind("B200", int(178.3 * GIB), 2250e12, 75e12, 7700e9, 900e9, 50e9, 64e9, 256 * GIB),
    # NVIDIA H200 and H100 SXM5, as in a DGX: 8 GPUs with NVLink 4, PCIe 5.0 x16 and 400 Gb/s each,
    # and 2 TB of memory
    DeviceKind("H200", int(139.8 * GIB), 989e12, 67e12, 4800e9, 450e9, 50e9, 64e9, 256 * GIB),
    DeviceKind("H100", int(79.1 * GIB), 989e12, 67e12, 3350e9, 450e9, 50e9, 64e9, 256 * GIB),
    # NVIDIA H20: the memory and links of an H100 with a seventh of its products
    DeviceKind("H20", int(95.1 * GIB), 148e12, 44e12, 4000e9, 450e9, 50e9, 64e9, 256 * GIB),
    # NVIDIA A100 SXM4, as in a DGX: 8 GPUs with NVLink 3, PCIe 4.0 x16 and 200 Gb/s each, and 2 TB
    # of memory (1 TB with 40 GB each)
    DeviceKind("A100", int(79.2 * GIB), 312e12, 19.5e12, 2039e9, 300e9, 25e9, 32e9, 256 * GIB),
    DeviceKind("A100-40GB", int(39.4 * GIB), 312e12, 19.5e12, 1555e9, 300e9, 25e9, 32e9, 128 * GIB),
    # NVIDIA L4, as in Google's g2-standard-96: 8 GPUs on PCIe 4.0 x16 with 100 Gb/s and 384 GB of
    # memory together
    DeviceKind("L4", int(22.0 * GIB), 121e12, 30.3e12, 300e9, 32e9, 1.6e9, 32e9, 44 * GIB),
    # In servers with 100 Gb/s and 128 GiB for each GPU. They reach each other and the host by PCIe
    # alone: a bridge of NVLink between two is not counted, since most pairs have none.
    DeviceKind("H200-NVL", int(139.8 * GIB), 835e12, 60e12, 4800e9, 64e9, 12.5e9, 64e9, 128 * GIB),
    DeviceKind("H100-NVL", int(93.1 * GIB), 835e12, 60e12, 3900e9, 64e9, 12.5e9, 64e9, 128 * GIB),
    DeviceKind("H100-PCIE", int(79.2 * GIB), 756e12, 51e12, 2000e9, 64e9, 12.5e9, 64e9, 128 * GIB),
    DeviceKind(
        "A100-PCIE", int(79.2 * GIB), 312e12, 19.5e12, 1935e9, 32e9, 12.5e9, 32e9, 128 * GIB
    ),
    DeviceKind(
        "A100-PCIE-40GB", int(39.4 * GIB), 312e12, 19.5e12, 1555e9, 32e9, 12.5e9, 32e9, 128 * GIB
    ),
    DeviceKind("L40S", int(44.4 * GIB), 362e12, 91.6e12, 864e9, 32e9, 12.5e9, 32e9, 128 * GIB),
    DeviceKind("L40", int(44.4 * GIB), 181e12, 90.5e12, 864e9, 32e9, 12.5e9, 32e9, 128 * GIB),
    DeviceKind("A40", int(44.4 * GIB), 149.7e12, 37.4e12, 696e9, 32e9, 12.5e9, 32e9, 128 * GIB),
    DeviceKind("A30", int(23.5 * GIB), 165e12, 10.3e12, 933e9, 32e9, 12.5e9, 32e9, 128 * GIB),
    DeviceKind("A10G", int(22.1 * GIB), 70e12, 35e12, 600e9, 32e9, 12.5e9, 32e9, 128 * GIB),
    DeviceKind("A10", int(22.1 * GIB), 125e12, 31.2e12, 600e9, 32e9, 12.5e9, 32e9, 128 * GIB),
    DeviceKind(
        "RTX-A6000", int(47.4 * GIB), 154.8e12, 38.7e12, 768e9, 32e9, 12.5e9, 32e9, 128 * GIB
    ),
    # Of these the products that add in float32, as torch does: half of those in float16.
    DeviceKind(
        "RTX-5090", int(31.4 * GIB), 209.5e12, 104.8e12, 1792e9, 64e9, 12.5e9, 64e9, 128 * GIB
    ),
    DeviceKind(
        "RTX-4090", int(23.6 * GIB), 165.2e12, 82.6e12, 1008e9, 32e9, 12.5e9, 32e9, 128 * GIB
    ),
    DeviceKind("RTX-3090", int(23.6 * GIB), 71e12, 35.6e12, 936e9, 32e9, 12.5e9, 32e9, 128 * GIB),
)
GPUS = {kind.name: kind for kind in _GPUS}
OFFERED_KINDS = tuple(GPUS[name] for name in ("L4", "A100", "H100", "H200"))
"""The kinds that advice proposes where others do not suffice, from the smallest on."""

_BFLOAT16_PER_CLOCK = {
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 1024,
}
"""FLOP of dense products in 16 bits per multiprocessor and clock, by compute capability: the peaks
of NVIDIA's data sheets divided by multiprocessors and clock. GeForce has half of it from 7.5 on,
but for 8.0 to 10.0, of which there is none."""
_FLOAT32_PER_CLOCK = {(7, 0): 128, (8, 0): 128, (8, 6): 256}
"""The same in float32, on its ordinary units: two for each unit."""
_PCIE_4, _PCIE_5 = 32e9, 64e9
"""Bytes/s of 16 lanes, one way."""
_UNKNOWN_NETWORK = 12.5e9
"""Bytes/s to another node where nothing is known: 100 Gb/s."""


def kind_of(gpu: Gpu) -> DeviceKind:
    """The kind of a GPU: its own memory, and the rates of its product or an estimate of them,
    whichever is less: a variant for laptops carries the name of the larger product.

    A part of a GPU (MIG) has its share of the product's rates, by its share of the memory, and
    reaches other parts through the host.
    """
    estimate, product = _estimate(gpu), _product_of(gpu.words)
    is_part = "MIG" in gpu.words
    if product is None:
        slowest = GPUS["L4"]
        return replace(
            estimate,
            flops=estimate.flops or slowest.flops,
            flops_float32=estimate.flops_float32 or slowest.flops_float32,
            bandwidth=estimate.bandwidth or slowest.bandwidth,
        )
    share = min(1.0, gpu.memory / product.memory) if is_part else 1.0
    return replace(
        product,
        name=gpu.name if is_part else product.name,
        memory=gpu.memory,
        flops=_less(share * product.flops, estimate.flops),
        flops_float32=_less(share * product.flops_float32, estimate.flops_float32),
        bandwidth=_less(share * product.bandwidth, estimate.bandwidth),
        link=product.host_link if is_part else product.link,
    )


def _less(known: float, estimate: float) -> float:
    """The smaller of a known rate and an estimate, which is 0 where the device does not say it."""
    return min(known, estimate) if estimate else known


def _product_of(words: frozenset[str]) -> DeviceKind | None:
    """The product in the table whose words are all in a name; of several, the one with most."""
    # "NVIDIA H100 NVL" has the words of both H100 and H100-NVL.
    fitting = [kind for kind in _GPUS if set(kind.name.split("-")) <= words]
    return max(fitting, key=lambda kind: kind.name.count("-"), default=None)


def _estimate(gpu: Gpu) -> DeviceKind:
    """A kind from the units and clocks of a device; a rate is 0 if the device does not say them."""
    cycles = gpu.multiprocessors * gpu.clock
    is_halved = "GEFORCE" in gpu.words and gpu.capability not in ((8, 0), (9, 0), (10, 0))
    flops = cycles * _of_generation(_BFLOAT16_PER_CLOCK, gpu.capability)
    pcie = _PCIE_5 if gpu.capability >= (9, 0) else _PCIE_4
    return DeviceKind(
        gpu.name,
        gpu.memory,
        flops / 2 if is_halved else flops,
        cycles * _of_generation(_FLOAT32_PER_CLOCK, gpu.capability),
        2 * gpu.memory_clock * gpu.bus_bits / 8,
        pcie,
        _UNKNOWN_NETWORK,
        pcie,
        GPUS["L4"].host_memory,
    )


def _of_generation(figures: dict[tuple[int, int], int], capability: tuple[int, int]) -> int:
    """The figure of a compute capability, or of the last one before it; 0 if there is none."""
    known = [generation for generation in figures if generation <= capability]
    return figures[max(known)] if known else 0


_CORE_FLOPS, _CORE_BANDWIDTH = 40e9, 8e9
"""FLOP/s in float32 and bytes/s of one CPU core, measured with torch on an AMD EPYC (a product of
1024 x 1024, and a sum of 256 MiB)."""
_LOOPBACK = 0.7e9
"""Bytes/s of a process to another one of the machine by gloo, measured with two: from 0.35e9, where
they gather, to 2.5e9, where one sends."""


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
    cores = cores or usable_cores()
    memory = memory or usable_memory()
    bandwidth = cores * _CORE_BANDWIDTH
    flops = cores * _CORE_FLOPS
    return DeviceKind(
        f"CPU x{cores}",
        memory,
        flops,
        flops,
        bandwidth,
        _LOOPBACK,
        _LOOPBACK,
        bandwidth,
        memory,
        is_gpu=False,
    )


def usable_cores() -> int:
    """The CPU cores that this process may use: those that it is bound to, and no more than the
    quotas of its container or job.
    """
    cores = len(os.sched_getaffinity(0))
    for limit in _limits_of_groups("cpu.max"):
        quota, _, period = limit.partition(" ")
        if quota.isdigit():
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def usable_memory() -> int:
    """Bytes of main memory that this process may use: this machine's, and no more than the limits
    of its container or job.
    """
    limits = [int(limit) for limit in _limits_of_groups("memory.max") if limit.isdigit()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


_GROUPS = Path("/sys/fs/cgroup")
"""Linux: the control groups, version 2. In a container, its own is the root."""


def _limits_of_groups(name: str) -> list[str]:
    """The contents of a file of limits in this process's control group and those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    files = [folder / name for folder in (_GROUPS / own, *(_GROUPS / own).parents)]
    inside = [file for file in files if file.is_relative_to(_GROUPS) and file.is_file()]
    return [file.read_text().strip() for file in inside]
