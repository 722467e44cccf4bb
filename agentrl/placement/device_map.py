"""Placement: which devices the replicas of each role run on.

    placement: auto            # or colocated, disaggregated, local
    placement:
      engine: 0-5              # or lists by role; devices are numbered consecutively over all nodes
      trainer: 6,7

Roles on the same devices share them: both stay awake if memory holds both, else they take turns
(`agentrl/placement/time_share.py`). Everything here is pure; `agentrl/placement/footprint.py`
counts memory, and `agentrl/planner` chooses a map.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError
from agentrl.placement.config import Mode, PlacementConfig, Role, format_devices
from agentrl.placement.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of an engine, or one rank of a trainer. Its devices are all on its node."""

    role: Role
    number: int
    devices: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """The request of a replica to a cluster: `gpus` counts a fraction for each device that it
    shares.
    """

    role: Role
    replica: int
    gpus: float
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The devices of each replica. `time_shared`: roles on one device take turns; one sleeps while
    the other works.
    """

    mode: Mode
    inventory: Inventory
    replicas: tuple[Replica, ...]
    time_shared: bool = False
    data_parallel: int = 1
    """Copies of the attention layers in each engine."""

    def of(self, role: Role) -> tuple[Replica, ...]:
        """The replicas of a role."""
        return tuple(replica for replica in self.replicas if replica.role == role)

    def devices(self, role: Role) -> tuple[int, ...]:
        """All devices of a role."""
        return tuple(sorted({device for replica in self.of(role) for device in replica.devices}))

    def on(self, device: int) -> tuple[Replica, ...]:
        """The replicas that run on a device."""
        return tuple(replica for replica in self.replicas if device in replica.devices)

    @property
    def shared(self) -> tuple[int, ...]:
        """The devices of more than one role."""
        shared = []
        for device in range(len(self.inventory)):
            roles = {replica.role for replica in self.on(device)}
            if len(roles) > 1:
                shared.append(device)
        return tuple(shared)

    def tensor_parallel(self) -> int:
        """The number of devices that each copy of the attention layers is spread over."""
        engines = self.of("engine")
        return len(engines[0].devices) // self.data_parallel if engines else 1

    def bundles(self) -> list[Bundle]:
        """The requests to a cluster for each replica; nothing if there are no GPUs."""
        if not self.inventory.kind.is_gpu:
            return []
        bundles = []
        for replica in self.replicas:
            # A device that two replicas share counts a half for each.
            gpus = sum(1 / len(self.on(device)) for device in replica.devices)
            bundles.append(
                Bundle(replica.role, replica.number, gpus, replica.node, replica.devices)
            )
        return bundles

    def settings(self) -> dict[str, int]:
        """The settings of the components that the map implies."""
        engines = {
            "cluster.engines": len(self.of("engine")),
            "engine.tensor_parallel": self.tensor_parallel(),
        }
        trainer = {"trainer.world_size": len(self.of("trainer"))}
        known = {
            **(engines if self.of("engine") else {}),
            **(trainer if self.of("trainer") else {}),
        }
        return {key: value for key, value in known.items() if value > 1}

    def __str__(self) -> str:
        parts = []
        for role in ("engine", "trainer"):
            if replicas := self.of(role):
                each = (
                    f" of {len(replicas[0].devices)} devices"
                    if len(replicas[0].devices) > 1
                    else ""
                )
                parts.append(f"{role} {format_devices(self.devices(role))} ({len(replicas)}{each})")
        turns = ", in turns" if self.time_shared else ""
        return f"{self.mode}: {'; '.join(parts)}{turns}"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The requests of the components' settings; 1 leaves a number to the placement."""

    engines: int = 1
    """Replicas of the engine."""
    tensor_parallel: int = 1
    """Devices of each copy of the attention layers in a replica."""
    data_parallel: int = 1
    """Copies of the attention layers in a replica."""
    ranks: int = 1
    """Ranks of the trainer."""
    has_engine: bool = True
    """False if the engine runs elsewhere."""
    trainer_grows: bool = True
    """True if the trainer can have several ranks."""
    splits: tuple[int, ...] = (1,)
    """The numbers of devices over which a copy of the engine may be spread."""

    @property
    def replica_devices(self) -> int:
        """Devices of each replica of the engine."""
        return self.tensor_parallel * self.data_parallel


def device_maps(
    config: PlacementConfig, request: PlacementRequest, inventory: Inventory
) -> list[DeviceMap]:
    """All maps that a config allows, whether they fit into memory or not.

    Raises:
        ConfigError: there is none; says why.
    """
    maps = _maps_of_mode(config, request, inventory)
    return [replace(devices, data_parallel=request.data_parallel) for devices in maps]


def _maps_of_mode(
    config: PlacementConfig, request: PlacementRequest, inventory: Inventory
) -> list[DeviceMap]:
    if config.lists:
        return _with_time_sharing(_listed_map(config.lists, request, inventory))
    if not inventory.kind.is_gpu and config.name in ("auto", "local"):
        return [_local(request, inventory)]
    if not inventory.kind.is_gpu:
        raise ConfigError(
            f"placement: {config.name} needs GPUs, but there are none: write placement=local"
        )
    if config.name == "local" or len(inventory) == 1:
        local = _local(request, inventory)
        return _with_time_sharing(local) if config.name != "local" else [local]
    if not request.has_engine:
        return [_colocated_map(request, inventory, 1)]
    maps = []
    if config.name in ("auto", "colocated"):
        for tensor_parallel in _replica_sizes(request, inventory):
            colocated = _colocated_map(request, inventory, tensor_parallel)
            maps += _with_time_sharing(colocated)
    if config.name in ("auto", "disaggregated"):
        maps += _disaggregated_maps(request, inventory)
    if not maps:
        uneven = (
            ". An engine's devices must divide those of every node; lists (placement.engine,"
            " placement.trainer) may leave some out"
        )
        raise ConfigError(
            f"placement: {config.name} has no way to lay out {_describe_request(request)} on "
            f"{inventory}: take more devices, or leave engine.tensor_parallel, cluster.engines and"
            " trainer.world_size to the placement"
            f"{uneven if len(set(inventory.sizes)) > 1 else ''}"
        )
    return maps


def _describe_request(request: PlacementRequest) -> str:
    copies = f" engine.data_parallel={request.data_parallel}," if request.data_parallel > 1 else ""
    return (
        f"cluster.engines={request.engines},{copies}"
        f" engine.tensor_parallel={request.tensor_parallel} and "
        f"trainer.world_size={request.ranks}"
    )


def _with_time_sharing(devices: DeviceMap) -> list[DeviceMap]:
    """The map with all roles awake, and the one with roles in turns if devices are shared."""
    turns = replace(devices, time_shared=True)
    return [devices, turns] if devices.shared else [devices]


def _local(request: PlacementRequest, inventory: Inventory) -> DeviceMap:
    """All replicas of all roles on device 0, unless a role requests several GPUs."""
    several = max(request.tensor_parallel, request.data_parallel, request.ranks) > 1
    if inventory.kind.is_gpu and several:
        raise ConfigError(
            f"placement: local is one device, but {_describe_request(request)} request more: "
            "write placement=auto, or leave them at 1"
        )
    engines = request.engines if request.has_engine else 0
    replicas = [Replica("engine", number, (0,), 0) for number in range(engines)]
    replicas += [Replica("trainer", number, (0,), 0) for number in range(request.ranks)]
    return DeviceMap("local", inventory, tuple(replicas))


def _replica_sizes(request: PlacementRequest, inventory: Inventory) -> list[int]:
    """The numbers of devices that a replica of the engine may have."""
    if request.tensor_parallel > 1:
        candidates: Sequence[int] = [request.tensor_parallel]
    else:
        candidates = request.splits
    candidates = [n * request.data_parallel for n in candidates]
    # A number that divides the devices of every node: then no replica is on two nodes, and no
    # device is left over.
    return [n for n in candidates if all(size % n == 0 for size in inventory.sizes)]


def _colocated_map(
    request: PlacementRequest, inventory: Inventory, tensor_parallel: int
) -> DeviceMap:
    replicas = request.engines if request.engines > 1 else len(inventory) // tensor_parallel
    ranks = request.ranks if request.ranks > 1 or not request.trainer_grows else len(inventory)
    engine = _chunks("engine", range(replicas * tensor_parallel), tensor_parallel, inventory)
    trainer = _chunks("trainer", range(ranks), 1, inventory)
    return DeviceMap("colocated", inventory, (*(engine if request.has_engine else ()), *trainer))


def _disaggregated_maps(request: PlacementRequest, inventory: Inventory) -> Iterator[DeviceMap]:
    """The trainer on the last devices, the engine on those before."""
    total = len(inventory)
    step = max(1, total // 16)  # finer splits differ by less than the prediction's error
    ranks = (
        [request.ranks]
        if request.ranks > 1 or not request.trainer_grows
        else range(step, total, step)
    )
    for trainers in ranks:
        for tensor_parallel in _replica_sizes(request, inventory):
            rest = total - trainers
            replicas = request.engines if request.engines > 1 else rest // tensor_parallel
            if replicas < 1 or replicas * tensor_parallel > rest:
                continue
            if request.engines == 1 and rest % tensor_parallel:
                continue
            engine = _chunks(
                "engine", range(replicas * tensor_parallel), tensor_parallel, inventory
            )
            trainer = _chunks("trainer", range(rest, total), 1, inventory)
            yield DeviceMap("disaggregated", inventory, (*engine, *trainer))


def _listed_map(
    lists: Mapping[Role, tuple[int, ...]], request: PlacementRequest, inventory: Inventory
) -> DeviceMap:
    needed: list[Role] = ["engine", "trainer"] if request.has_engine else ["trainer"]
    if missing := [role for role in needed if role not in lists]:
        raise ConfigError(
            f"placement lists no devices of the {missing[0]}: write placement.{missing[0]}=0 or so"
        )
    if not request.has_engine and "engine" in lists:
        raise ConfigError(
            "placement.engine lists devices, but this engine runs elsewhere: leave them out"
        )
    engine = _chunks("engine", lists.get("engine", ()), request.replica_devices, inventory)
    trainer = _chunks("trainer", lists["trainer"], 1, inventory)
    for setting, wish, replicas in (
        ("cluster.engines", request.engines, engine),
        ("trainer.world_size", request.ranks, trainer),
    ):
        if wish not in (1, len(replicas)) and replicas:
            raise ConfigError(
                f"placement lists devices of {len(replicas)} replicas, but {setting}={wish}: leave"
                " one out"
            )
    if len(trainer) > 1 and not request.trainer_grows:
        raise ConfigError(
            f"placement.trainer lists {len(trainer)} devices, and this trainer has one: take"
            " another"
        )
    return DeviceMap("listed", inventory, (*engine, *trainer))


def _chunks(
    role: Role, devices: Sequence[int], each: int, inventory: Inventory
) -> tuple[Replica, ...]:
    """Replicas of `each` devices, in the order listed.

    Raises:
        ConfigError: a device does not exist, the devices make no whole replicas, or a replica is on
        two nodes.
    """
    if beyond := [device for device in devices if device >= len(inventory)]:
        raise ConfigError(
            f"the {role} would run on device {beyond[0]}, and there are {len(inventory)}:"
            f" {inventory}"
        )
    if len(devices) % each:
        raise ConfigError(
            f"{len(devices)} devices make no whole replicas of {each}:"
            " engine.tensor_parallel x engine.data_parallel"
        )
    replicas = []
    for number, first in enumerate(range(0, len(devices), each)):
        replica_devices = tuple(devices[first : first + each])
        nodes = {inventory.node(device) for device in replica_devices}
        if len(nodes) > 1:
            raise ConfigError(
                f"{role} {number} would run on the devices {format_devices(replica_devices)} of "
                f"{len(nodes)} nodes, but a replica must be on one: {inventory.listed_nodes}"
            )
        replicas.append(Replica(role, number, replica_devices, min(nodes)))
    return tuple(replicas)
