"""The memory of the devices of a map: what each role holds at the peak, and what does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.placement.device_map import DeviceMap
from agentrl.placement.devices import GIB
from agentrl.placement.footprint import (
    USABLE_SHARE,
    Footprint,
    engine_footprint,
    tokens_cached,
    trained_parameters,
    trainer_footprint,
)
from agentrl.simulate.stages import Stages, Workload

ASLEEP = GIB
"""Bytes that a sleeping process keeps on a GPU: its context, and buffers of its libraries."""


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
    host: int
    """The most of the host's memory that is used for this device."""
    host_limit: int
    """The usable memory of the host for this device."""


def problems(stages: Stages, work: Workload, devices: DeviceMap) -> Iterator[str]:
    """The reasons why a map does not fit. Names only one overfull device and one overfull host."""
    fullest = sorted(loads(stages, work, devices), key=lambda load: load.limit - load.peak)
    for load in fullest:
        if load.peak > load.limit:
            parts = " and ".join(
                f"{role} {size.total / GIB:.1f}" for role, size in load.awake.items()
            )
            turns = ", in turns" if devices.time_shared else ""
            kind = devices.inventory.kind
            yield (
                f"{' and '.join(load.awake)} need {load.peak / GIB:.1f} GiB on device"
                f" {load.device}{f' ({parts}{turns})' if len(load.awake) > 1 else ''}, which has"
                f" {kind.memory / GIB:.1f} ({load.limit / GIB:.1f} usable)"
            )
            break
    for node, share in _host_shares(fullest, devices).items():
        if share > 1:
            whole = USABLE_SHARE * devices.inventory.nodes[node].host_memory / GIB
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
    yield from _short_cache(stages, work, devices)


def overfull(stages: Stages, work: Workload, devices: DeviceMap) -> float:
    """Memory use of the fullest device or host, as a share of its usable memory; also more than 1
    if memory suffices but something else does not fit.
    """
    device_loads = loads(stages, work, devices)
    shares = [
        *(load.peak / load.limit for load in device_loads),
        *_host_shares(device_loads, devices).values(),
    ]
    return max(*shares, 1.0 + 1e-9) if any(problems(stages, work, devices)) else max(shares)


def fullest_host(loads: Sequence[DeviceLoad], devices: DeviceMap) -> tuple[int, int]:
    """The bytes of device data on the fullest host, and its usable memory."""
    bytes_by_node: dict[int, int] = {}
    for load in loads:
        node = devices.inventory.node(load.device)
        bytes_by_node[node] = bytes_by_node.get(node, 0) + load.host
    fullest = max(bytes_by_node, key=lambda node: bytes_by_node[node])
    limit = int(USABLE_SHARE * devices.inventory.nodes[fullest].host_memory)
    return bytes_by_node[fullest], limit


def _host_shares(device_loads: Sequence[DeviceLoad], devices: DeviceMap) -> dict[int, float]:
    """Memory use of each node's host, as a share of what is usable for all of its devices."""
    shares: dict[int, float] = {}
    for load in device_loads:
        node = devices.inventory.node(load.device)
        limit = USABLE_SHARE * devices.inventory.nodes[node].host_memory
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


def _short_cache(stages: Stages, work: Workload, devices: DeviceMap) -> Iterator[str]:
    facts, layout, kind = stages.facts, stages.engine, devices.inventory.kind
    if not devices.of("engine") or (layout.fraction is None and layout.kv_bytes is None):
        return
    split = devices.tensor_parallel()
    size = engine_footprint(facts, layout, split, kind, round(work.episode_tokens))
    longest = min(layout.max_context or facts.max_positions, facts.max_positions)
    tokens = tokens_cached(facts, layout, split, size.parts["kv cache"], longest)
    if tokens < longest:
        taken = (size.total - size.parts["kv cache"]) / GIB
        yield (
            f"an engine's KV cache would hold {tokens} tokens beside {taken:.1f} GiB of weights and"
            f" workspace, but one context has up to {longest}"
        )


def loads(stages: Stages, work: Workload, devices: DeviceMap) -> tuple[DeviceLoad, ...]:
    """The memory of each device that is used."""
    kind = devices.inventory.kind
    ranks = len(devices.of("trainer"))
    trainer = _learners(stages, work, max(1, ranks))
    engine = engine_footprint(
        stages.facts, stages.engine, devices.tensor_parallel(), kind, round(work.episode_tokens)
    )
    found = []
    for device in range(len(devices.inventory)):
        counts = {
            role: sum(r.role == role for r in devices.on(device)) for role in ("engine", "trainer")
        }
        counts["engine"] *= 1 + stages.frozen
        awake = {
            role: _times(size, counts[role])
            for role, size in (("engine", engine), ("trainer", trainer))
            if counts[role]
        }
        if not awake:
            continue
        totals = [size.total for size in awake.values()]
        turns = devices.time_shared and len(awake) > 1
        host = sum(size.host for size in awake.values())
        gathers = ranks > 1 and any(
            r.role == "trainer" and r.number == 0 for r in devices.on(device)
        )
        # The first rank publishes what is trained.
        host += 4 * trained_parameters(stages.facts, stages.trainer) if gathers else 0
        if not kind.is_gpu:
            peak, host = sum(totals) + host, 0
        elif turns:
            peak = max(totals) + ASLEEP
            host += counts["engine"] * engine.parts["weights"] + sum(
                trainer.parts.get(part, 0)
                for part in ("weights", "gradients", "optimizer", "reference", "critic")
            )
        else:
            peak = sum(totals)
        found.append(
            DeviceLoad(
                device,
                awake,
                peak,
                int(USABLE_SHARE * kind.memory),
                host,
                int(USABLE_SHARE * devices.inventory.host_share(device)),
            )
        )
    return tuple(found)


def _learners(stages: Stages, work: Workload, ranks: int) -> Footprint:
    """The trainer at its peak, with the memory that reference and critic hold meanwhile on the same
    device.
    """
    longest = stages.longest(work)
    whole = trainer_footprint(
        stages.facts, stages.trainer, ranks, stages.micro_batches(work, ranks), longest
    )
    parts, host = dict(whole.parts), whole.host
    for helper, layout, kept in (
        ("reference", stages.reference, {"weights"}),
        ("critic", stages.critic, {"weights", "gradients", "optimizer"}),
    ):
        if layout is not None:
            size = trainer_footprint(stages.facts, layout, ranks, longest=longest)
            parts[helper] = sum(bytes_ for part, bytes_ in size.parts.items() if part in kept)
            host += size.host
    return Footprint(parts, host)


def _times(size: Footprint, count: int) -> Footprint:
    return Footprint({name: count * part for name, part in size.parts.items()}, count * size.host)
