"""`Inventory`: the nodes of a run, and their devices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.placement.devices import GIB, DeviceKind


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, and the devices of it that a run may use."""

    devices: tuple[str, ...]
    """The name of each device, as `CUDA_VISIBLE_DEVICES` takes it: a number, or a UUID of a GPU or
    of a part of one (MIG)."""
    host_memory: int
    """Bytes of the machine's main memory."""
    cores: int = 1
    """CPU cores that a run may use."""
    name: str = ""
    """Its name for messages: the host's name and address."""
    id: str = ""
    """Ray's id of it; empty without Ray."""
    threads: str = ""
    """`OMP_NUM_THREADS` as the node's own environment sets it; empty if it does not."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The nodes of a run and their devices, all of one kind. Devices are numbered consecutively
    from the first of node 0 on; nodes may have different numbers of them.

    Example: with `nodes` of 8 and 4 devices, device 9 is the second of node 1.
    """

    kind: DeviceKind
    """The kind of all devices."""
    nodes: tuple[Node, ...]
    """The machines, each with one device or more."""

    @staticmethod
    def uniform(kind: DeviceKind, per_node: int = 1, nodes: int = 1) -> "Inventory":
        """`nodes` alike nodes with `per_node` devices each, whose hosts have the usual memory."""
        devices = tuple(str(number) for number in range(per_node))
        return Inventory(kind, (Node(devices, per_node * kind.host_memory),) * nodes)

    def with_rates(self, rates: Mapping[str, float]) -> "Inventory":
        """The same devices with other rates: fields of `DeviceKind` by name."""
        fields: dict[str, Any] = dict(rates)
        return replace(self, kind=replace(self.kind, **fields))

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of devices of each node."""
        return tuple(len(node.devices) for node in self.nodes)

    def node(self, device: int) -> int:
        """The number of a device's node."""
        for number, size in enumerate(self.sizes):
            if device < size:
                return number
            device -= size
        raise IndexError(f"there are {len(self)} devices: {self}")

    def first(self, node: int) -> int:
        """The first device of a node."""
        return sum(self.sizes[:node])

    def visible_name(self, device: int) -> str:
        """The name of a device on its node, as `CUDA_VISIBLE_DEVICES` takes it."""
        node = self.node(device)
        return self.nodes[node].devices[device - self.first(node)]

    def host_share(self, device: int) -> int:
        """Bytes of the host's memory for each device of this device's node."""
        node = self.nodes[self.node(device)]
        return node.host_memory // len(node.devices)

    @property
    def listed_nodes(self) -> str:
        """The devices of each node, for messages."""
        listed = []
        for number, node in enumerate(self.nodes):
            first = self.first(number)
            last = first + len(node.devices) - 1
            devices = f"device {first}" if first == last else f"devices {first}-{last}"
            listed.append(f"node {number}{f' ({node.name})' if node.name else ''} has {devices}")
        return ", ".join(listed)

    def __str__(self) -> str:
        if not self.kind.is_gpu:
            return f"{self.kind.name} with {self.kind.memory / GIB:.1f} GiB and no GPU"
        kind = f"{self.kind.name} with {self.kind.memory / GIB:.1f} GiB each"
        if len(set(self.sizes)) > 1:
            return f"{len(self)} x {kind} ({self.listed_nodes})"
        nodes = f"{len(self.nodes)} nodes of " if len(self.nodes) > 1 else ""
        return f"{nodes}{self.sizes[0]} x {kind}"
