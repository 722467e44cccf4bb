"""The memory of the devices of a map: what each role holds at the peak, and what does not fit."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentrl.placement.device_map import DeviceMap
from agentrl.placement.devices import GIB
from agentrl.placement.footprint import (
    KEPT_ASLEEP,
    USABLE_HOST_SHARE,
    Footprint,
    engine_footprint,
    process_parts,
    tokens_cached,
    trainer_footprint,
    usable_bytes,
)
from agentrl.simulate.stages import Stages, Workload
from agentrl.weights.moved import BytesMoved

_AT_TRANSFER = {
    "engine": ("weights", "weight staging"),
    "trainer": ("weights", "optimizer", "reference", "critic", "fragmentation"),
}
"""Uses of each role's memory at a transfer of new weights, besides buckets. The trainer has dropped
its gradients and what it had gathered.
"""
_NAMED_TERMS = 4
"""Terms of a role's memory that a message names: the largest."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """The peak memory of a device, in bytes."""

    device: int
    """The number of the device."""
    awake: dict[str, Footprint]
    """The memory of each role on it while awake, by use."""
    peak: int
    """The most that is used simultaneously."""
    limit: int
    """The usable memory."""
    host_parts: Mapping[str, int]
    """The most of the host's memory that is used for this device, by use."""
    host_limit: int
    """The usable memory of the host for this device."""
    asleep: Mapping[str, int]
    """The bytes that each role keeps on the device while it sleeps, if roles take turns."""
    transfer: int | None = None
    """The bytes on the device while new weights go from an awake trainer to an engine of which only
    the weights are awake, if roles take turns."""

    @property
    def transfer_fits(self) -> bool:
        """Whether new weights can be sent so. Otherwise the trainer sleeps before."""
        return self.transfer is None or self.transfer <= self.limit

    @property
    def host(self) -> int:
        """The most of the host's memory that is used for this device, in bytes."""
        return sum(self.host_parts.values())


@dataclass(frozen=True, slots=True)
class Fit:
    """How a run fits a map of devices."""

    loads: tuple[DeviceLoad, ...]
    """The memory of each device that is used."""
    problems: tuple[str, ...]
    """The reasons why it does not fit, of which one names an overfull device and one an overfull
    host."""
    share: float
    """Memory use of the fullest device or host, as a share of its usable memory; also more than 1
    if memory suffices but something else does not fit."""


def fit_of(stages: Stages, work: Workload, devices: DeviceMap) -> Fit:
    """How a run fits this map."""
    device_loads = loads(stages, work, devices)
    shares = [
        *(load.peak / load.limit for load in device_loads),
        *_host_shares(device_loads, devices).values(),
    ]
    found = tuple(_problems(stages, work, devices, device_loads))
    return Fit(device_loads, found, max(*shares, 1.0 + 1e-9) if found else max(shares))


def _problems(
    stages: Stages, work: Workload, devices: DeviceMap, device_loads: Sequence[DeviceLoad]
) -> Iterator[str]:
    """See `Fit.problems`."""
    fullest = sorted(device_loads, key=lambda load: load.limit - load.peak)
    for load in fullest:
        if load.peak > load.limit:
            kind = devices.inventory.kind
            yield (
                f"{' and '.join(load.awake)} need {load.peak / GIB:.1f} GiB on device"
                f" {load.device}{_describe_roles(load)}, which has {kind.memory / GIB:.1f}"
                f" ({load.limit / GIB:.1f} usable). {_describe_largest(load)}"
            )
            break
    for node, share in _host_shares(fullest, devices).items():
        if share > 1:
            whole = USABLE_HOST_SHARE * devices.inventory.nodes[node].host_memory / GIB
            yield (
                f"the memory of node {node}'s host would hold {share * whole:.0f} GiB of its"
                f" devices' data and of checkpoints, but has only {whole:.0f} usable"
            )
            break
    if devices.time_shared and not stages.engine.sleeps:
        yield (
            "this engine cannot sleep while the trainer works (vllm can, with"
            " engine.sleep_mode=true)"
        )
    if devices.time_shared and not stages.trainer.sleeps:
        yield "this trainer cannot sleep while the engine works"
    yield from _undivided_heads(stages, devices)
    yield from _undivided_experts(stages)
    yield from _undivided_contexts(stages)
    yield from _undivided_matrices(stages)
    yield from _short_cache(stages, work, devices)


def _describe_roles(load: DeviceLoad) -> str:
    """The memory of each role of a device, if there are several."""
    if len(load.awake) == 1:
        return ""
    parts = " and ".join(f"{role} {size.total / GIB:.1f}" for role, size in load.awake.items())
    if not load.asleep:
        return f" ({parts})"
    kept = " and ".join(f"{role} {size / GIB:.1f}" for role, size in load.asleep.items())
    return f" ({parts}, in turns; asleep {kept})"


def _describe_largest(load: DeviceLoad) -> str:
    """The largest terms of the role that takes most of a device."""
    role, size = max(load.awake.items(), key=lambda entry: entry[1].total)
    largest = sorted(size.parts.items(), key=lambda entry: -entry[1])[:_NAMED_TERMS]
    terms = ", ".join(f"{use} {size / GIB:.1f}" for use, size in largest)
    return f"Most of the {role}'s memory: {terms}"


def fullest_host(loads: Sequence[DeviceLoad], devices: DeviceMap) -> tuple[Mapping[str, int], int]:
    """The bytes of device data on the fullest host, by use, and its usable memory."""
    parts_by_node: dict[int, Counter[str]] = {}
    for load in loads:
        node = devices.inventory.node(load.device)
        parts_by_node.setdefault(node, Counter()).update(load.host_parts)
    fullest = max(parts_by_node, key=lambda node: parts_by_node[node].total())
    limit = int(USABLE_HOST_SHARE * devices.inventory.nodes[fullest].host_memory)
    return parts_by_node[fullest], limit


def _host_shares(device_loads: Sequence[DeviceLoad], devices: DeviceMap) -> dict[int, float]:
    """Memory use of each node's host, as a share of what is usable for all of its devices."""
    shares: dict[int, float] = {}
    for load in device_loads:
        node = devices.inventory.node(load.device)
        limit = USABLE_HOST_SHARE * devices.inventory.nodes[node].host_memory
        shares[node] = shares.get(node, 0.0) + load.host / limit
    return shares


def _undivided_heads(stages: Stages, devices: DeviceMap) -> Iterator[str]:
    """Tensor parallelism gives each device equally many heads, or several devices the same head of
    keys.
    """
    heads, split = stages.facts.kv.heads, devices.tensor_parallel()
    if heads.queries % split or (heads.keys % split and split % heads.keys):
        yield (
            f"a copy of the model cannot be spread over {split} devices: it has {heads.queries}"
            f" attention heads and {heads.keys} heads of keys"
        )


def _undivided_experts(stages: Stages) -> Iterator[str]:
    """Expert parallelism of the trainer gives each rank equally many experts."""
    experts, parts = stages.facts.experts, stages.trainer.mesh.expert
    if parts > 1 and (not experts or experts % parts):
        yield (
            f"trainer.expert_parallel={parts} divides the experts of a layer, and the model has"
            f" {experts or 'none'}"
        )


def _undivided_contexts(stages: Stages) -> Iterator[str]:
    """Context parallelism of the trainer gives each rank equally many heads."""
    mesh, heads = stages.trainer.mesh, stages.facts.kv.heads.queries
    if heads % (mesh.context * mesh.tensor):
        each = f" of which each of {mesh.tensor} (tensor_parallel) has as many"
        yield (
            f"trainer.context_parallel={mesh.context} divides attention heads, and the model has"
            f" {heads}{',' + each if mesh.tensor > 1 else ''}"
        )


def _undivided_matrices(stages: Stages) -> Iterator[str]:
    """Tensor parallelism of the trainer gives each rank equally many heads and ids."""
    facts, parts = stages.facts, stages.trainer.mesh.tensor
    if parts > 1 and facts.gathered is None:
        yield (
            f"trainer.tensor_parallel={parts} divides matrices by transformers' plan, and for this"
            " model it has none, or one that is not built"
        )
    elif facts.kv.heads.keys % parts or facts.vocab % parts:
        yield (
            f"trainer.tensor_parallel={parts} divides heads of keys and the vocabulary, and the"
            f" model has {facts.kv.heads.keys} heads of keys and {facts.vocab} ids"
        )


def _short_cache(stages: Stages, work: Workload, devices: DeviceMap) -> Iterator[str]:
    facts, layout, kind = stages.facts, stages.engine, devices.inventory.kind
    if not devices.of("engine") or (layout.fraction is None and layout.kv_bytes is None):
        return
    split = devices.tensor_parallel()
    size = engine_footprint(
        facts, layout, split, kind, round(work.episode_tokens), assume=stages.assume
    )
    longest = min(layout.max_context or facts.max_positions, facts.max_positions)
    tokens = tokens_cached(facts, layout, split, size.parts["kv cache"], longest)
    if tokens < longest:
        taken = (size.total - size.parts["kv cache"]) / GIB
        yield (
            f"an engine's KV cache would hold {tokens} tokens beside {taken:.1f} GiB of weights and"
            f" all else, but one context has up to {longest}"
        )


def loads(stages: Stages, work: Workload, devices: DeviceMap) -> tuple[DeviceLoad, ...]:
    """The memory of each device that is used."""
    kind = devices.inventory.kind
    ranks = len(devices.of("trainer"))
    trainer = _trainer_process(stages, work, devices)
    engine = engine_footprint(
        stages.facts,
        stages.engine,
        devices.tensor_parallel(),
        kind,
        round(work.episode_tokens),
        assume=stages.assume,
    )
    moved = stages.update(devices) if devices.of("engine") and ranks else BytesMoved(0)
    published = _published_in_host(moved, devices)
    replicas: dict[int, Counter[str]] = {}
    for replica in devices.replicas:
        for device in replica.devices:
            replicas.setdefault(device, Counter())[replica.role] += 1
    device_loads = []
    for device in range(len(devices.inventory)):
        counts = replicas.get(device, Counter())
        # Frozen policies and a teacher have engines of their own, on the same devices.
        counts["engine"] *= 1 + stages.frozen
        awake = {
            role: _scaled(size, counts[role])
            for role, size in (("engine", engine), ("trainer", trainer))
            if counts[role]
        }
        if not awake:
            continue
        host_parts = Counter[str]()
        for size in awake.values():
            host_parts.update(size.host_parts)
        host_parts.update(published.get(device, {}))
        asleep, transfer, limit = {}, None, usable_bytes(kind)
        if devices.time_shared and len(awake) > 1 and kind.is_gpu:
            asleep = {role: size.asleep for role, size in awake.items()}
            transfer = _at_transfer(awake) + moved.held + moved.received
            host_parts.update(stages.asleep(devices, device))
        peak = _peak(awake, asleep)
        # A transfer that does not fit never happens: the trainer sleeps first.
        if transfer is not None and transfer <= limit:
            peak = max(peak, transfer)
        if not kind.is_gpu:  # a CPU's memory is the host's
            peak, host_parts = peak + host_parts.total(), Counter()
        device_loads.append(
            DeviceLoad(
                device,
                awake,
                peak,
                limit,
                dict(host_parts),
                int(USABLE_HOST_SHARE * devices.inventory.host_share(device)),
                asleep,
                transfer,
            )
        )
    return tuple(device_loads)


def _published_in_host(moved: BytesMoved, devices: DeviceMap) -> Mapping[int, Counter[str]]:
    """Bytes in the host's memory of new weights, by the device that they count with: what each rank
    on the machine of the first one holds while it writes files, and the files.
    """
    parts: dict[int, Counter[str]] = {}
    if not moved.stored:
        return parts
    ranks, on_way = devices.of("trainer"), moved.held + moved.kept
    for rank in ranks:
        if rank.node == ranks[0].node:
            parts.setdefault(rank.devices[0], Counter())["weights on their way"] += on_way
    parts[ranks[0].devices[0]]["published weights"] = moved.stored
    by_machine = {engine.node: engine for engine in reversed(devices.of("engine"))}
    for machine, engine in by_machine.items():
        if machine != ranks[0].node:
            parts.setdefault(engine.devices[0], Counter())["published weights"] = moved.copied
    return parts


def _peak(awake: Mapping[str, Footprint], asleep: Mapping[str, int]) -> int:
    """The most bytes on a device: of all roles together, or of each with what the others keep
    while they sleep.
    """
    if not asleep:
        return sum(size.total for size in awake.values())
    return max(size.total + sum(asleep.values()) - asleep[role] for role, size in awake.items())


def _at_transfer(awake: Mapping[str, Footprint]) -> int:
    """Bytes on a device while new weights go from one role to the other."""
    return sum(
        size.asleep + sum(size.parts.get(use, 0) for use in _AT_TRANSFER[role])
        for role, size in awake.items()
    )


def _trainer_process(stages: Stages, work: Workload, devices: DeviceMap) -> Footprint:
    """The trainer at its peak, with the memory that reference and critic hold meanwhile on the same
    device. Each is a process of its own.
    """
    longest, ranks = stages.longest(work), max(1, len(devices.of("trainer")))
    whole = trainer_footprint(
        stages.facts, stages.trainer, ranks, stages.micro_batches(work, ranks), longest
    )
    kind = devices.inventory.kind
    process = process_parts(kind, stages.assume, together=ranks > 1)
    parts = Counter({**whole.parts, **process})
    host_parts = Counter(whole.host_parts)
    for helper, layout, kept in (
        ("reference", stages.reference, {"weights"}),
        ("critic", stages.critic, {"weights", "gradients", "optimizer"}),
    ):
        if layout is not None:
            size = trainer_footprint(stages.facts, layout, ranks, longest=longest)
            parts[helper] = sum(bytes_ for part, bytes_ in size.parts.items() if part in kept)
            parts.update(process)
            host_parts.update(size.host_parts)
    if kind.is_gpu:
        tensors = sum(bytes_ for part, bytes_ in parts.items() if part not in KEPT_ASLEEP)
        parts["fragmentation"] = int(stages.assume.fragmentation * tensors)
    return Footprint(dict(parts), dict(host_parts))


def _scaled(size: Footprint, count: int) -> Footprint:
    return Footprint(
        {use: count * part for use, part in size.parts.items()},
        {use: count * part for use, part in size.host_parts.items()},
    )
