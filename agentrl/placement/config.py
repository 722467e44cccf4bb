"""Settings of placement: which devices engine and trainer run on, by a mode or by lists.

placement: auto                    # or colocated, disaggregated, local
placement:
  engine: 0-5                      # or lists by role, numbered consecutively over all nodes
  trainer: 6,7
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from agentrl.settings.base import Settings

Mode = Literal["auto", "colocated", "disaggregated", "local", "listed"]

Role = Literal["engine", "trainer"]


def parse_devices(written: Any) -> tuple[int, ...]:
    """`"0-3,6"` (or a number, or a list) as device numbers, in ascending order.

    Raises:
        ValueError: it is not such a list, or names a device twice.
    """
    if isinstance(written, list | tuple):
        written = ",".join(str(part) for part in written)
    devices: list[int] = []
    for part in str(written).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise ValueError(
                f"{written!r} is no list of devices: write numbers and ranges, such as 0-3,6"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} goes down: write {last}-{first}")
        devices += range(first, last + 1)
    if len(set(devices)) < len(devices):
        twice = sorted({device for device in devices if devices.count(device) > 1})
        raise ValueError(f"{written!r} names device {twice[0]} twice")
    return tuple(sorted(devices))


def format_devices(devices: Sequence[int]) -> str:
    """Device numbers in the form that `parse_devices` reads."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and runs[-1][1] == device - 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


Devices = Annotated[
    tuple[int, ...],
    BeforeValidator(parse_devices),
    PlainSerializer(format_devices, return_type=str, when_used="json"),
]


class Assumptions(Settings):
    """Shares of a device's peak performance that real programs reach, and their overheads."""

    trainer_flops: float = Field(0.4, gt=0, le=1)
    """Share of FLOP/s in training: PaLM reports 46 % (Chowdhery et al. 2022, arXiv 2204.02311),
    Megatron about 50 %.
    """
    engine_flops: float = Field(0.5, gt=0, le=1)
    """Share of FLOP/s in prefilling: 40 to 70 % in Pope et al. 2022, arXiv 2211.05102."""
    engine_bandwidth: float = Field(0.7, gt=0, le=1)
    """Share of memory bandwidth in decoding."""
    links: float = Field(0.7, gt=0, le=1)
    """Share of the bandwidth of links between devices, nodes and hosts."""
    file_writing: float = Field(1.2e9, gt=0)
    """Bytes/s at which a process writes new weights into files in memory, and hashes them. Measured
    on CPUs: 0.6 to 2.3 GB/s to write, 8 GB/s to hash.
    """
    file_reading: float = Field(3e9, gt=0)
    """Bytes/s at which a process checks such files, or copies them to its device."""
    updates: float = Field(1.0, gt=0)
    """Speed of an update of the engines' weights, as a share of what these rates allow."""
    switches: float = Field(1.0, gt=0)
    """Speed of a switch between roles that take turns, as a share of what the links allow."""
    engine_step_seconds: float = Field(0.002, ge=0)
    """Overhead of an engine step on a GPU: scheduling and launches."""
    all_reduce_seconds: float = Field(1e-5, ge=0)
    """Overhead of a sum over the GPUs of one engine, besides the transfer of bytes; each layer has
    two sums.
    """
    fragmentation: float = Field(0.03, ge=0)
    """Share of a trainer's tensors on a GPU that is lost beside them, between the blocks of torch's
    allocator.
    """
    cuda_context_gib: float = Field(0.75, ge=0)
    """GiB of each process on a GPU: CUDA's context, kernels, and workspaces of libraries."""
    nccl_gib: float = Field(1.25, ge=0)
    """GiB of NCCL's buffers on each GPU in a process that computes together with others."""
    cuda_graphs_gib: float = Field(2.0, ge=0)
    """GiB of an engine's CUDA graphs on each GPU, which it keeps while it sleeps."""


class DeviceFigures(Settings):
    """Rates of the devices, where you know them better than the table of products and the estimate
    (`agentrl/placement/devices.py`). Memory is always what the devices say.
    """

    flops: float | None = Field(None, gt=0)
    """FLOP/s of dense matrix products in bfloat16."""
    flops_float32: float | None = Field(None, gt=0)
    """FLOP/s in float32."""
    bandwidth: float | None = Field(None, gt=0)
    """Bytes/s of a device's memory."""
    link: float | None = Field(None, gt=0)
    """Bytes/s to another device of the node, one way: of NVLink, or of PCIe."""
    network: float | None = Field(None, gt=0)
    """Bytes/s of each device to one of another node, one way."""
    host_link: float | None = Field(None, gt=0)
    """Bytes/s to the host's memory, one way."""

    @property
    def stated(self) -> dict[str, float]:
        """The rates that are given."""
        return self.model_dump(exclude_none=True)


class PlacementConfig(Settings):
    """The devices that engine and trainer run on."""

    name: Literal["auto", "colocated", "disaggregated", "local"] = "auto"
    """`auto`: the fastest placement that fits, or `local` if there is no GPU. `colocated`: both on
    all devices; `disaggregated`: each on its own devices; `local`: as their own settings say, on
    the first device."""
    engine: Devices | None = None
    """Devices of the engine, such as `0-5`; the trainer's must then be listed too."""
    trainer: Devices | None = None
    """Devices of the trainer, such as `6,7`."""
    switch_seconds: float = Field(120.0, gt=0)
    """Seconds that engine or trainer may take to go to sleep, or to wake, if they take turns."""
    device: DeviceFigures = DeviceFigures()
    """The rates of the devices, as far as you state them."""
    assume: Assumptions = Assumptions()
    """The assumptions of `auto` and `agentrl plan`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_split_list(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and any(re.fullmatch(r"[\d\s-]+", str(key)) for key in raw):
            raise ValueError(
                'YAML has cut a list of devices at its comma: quote it, {engine: "0-5", trainer:'
                ' "6,7"}'
            )
        return raw

    @model_validator(mode="after")
    def _check_mode_or_lists(self) -> Self:
        if self.lists and self.name != "auto":
            raise ValueError(
                f"the mode is {self.name}, but devices are listed too: write a mode or lists, not"
                " both"
            )
        return self

    @property
    def lists(self) -> dict[Role, tuple[int, ...]]:
        """The devices of each role that has a list."""
        devices_by_role: dict[Role, tuple[int, ...] | None] = {
            "engine": self.engine,
            "trainer": self.trainer,
        }
        return {role: devices for role, devices in devices_by_role.items() if devices is not None}
