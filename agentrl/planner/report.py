"""A plan, for the terminal and as JSON."""

from dataclasses import asdict, astuple
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.placement.config import Role, format_devices
from agentrl.placement.devices import GIB
from agentrl.placement.footprint import KEPT_ASLEEP, Footprint
from agentrl.planner.memory import DeviceLoad, fullest_host
from agentrl.planner.meshes import MeshChoice, MeshOption
from agentrl.planner.plan import Advice, Candidate, Plan

_MAX_SHOWN_CANDIDATES = 8
"""Most candidates to show in the table."""
_MAX_SHOWN_MESHES = 4
"""Most meshes to show beside that of the config."""


def print_plan(plan: Plan, console: Console) -> None:
    """Print the map, the memory of its devices, the step by stage, the reason, and the other
    candidates.
    """
    facts, work = plan.facts, plan.work
    console.print(
        f"[bold]{facts.name}[/bold]: {facts.parameters / 1e6:,.1f} million parameters, on"
        f" {plan.devices.inventory}\na step trains on {work.episodes} episodes of {work.turns:.1f}"
        f" turns, {work.episode_tokens:,.0f} tokens each ({work.sampled:,.0f} sampled)\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_map_table(plan))
    console.print(_memory_table(plan))
    console.print(_step_table(plan))
    console.print(_update_table(plan))
    if plan.meshes is not None and plan.meshes.others:
        console.print(_mesh_table(plan.meshes))
    if plan.advice is not None:
        console.print(_advice(plan.advice), highlight=False, soft_wrap=True)
    console.print(f"[bold]why[/bold]  {plan.reason}\n", highlight=False, soft_wrap=True)
    if len(plan.considered) > 1:
        console.print(_candidates_table(plan.considered))
    if plan.chosen:
        chosen = " ".join(f"{key}={value}" for key, value in plan.chosen.items())
        console.print(f"chosen       {chosen}", highlight=False, soft_wrap=True)
    if settings := plan.devices.settings():
        written = " ".join(f"{key}={value}" for key, value in settings.items())
        console.print(f"as settings  {written}", highlight=False, soft_wrap=True)


def _table(*columns: str, title: str) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold"
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _map_table(plan: Plan) -> Table:
    table = _table("role", "replicas", "devices", "nodes", title=f"map: {plan.devices.mode}")
    roles: tuple[Role, ...] = ("engine", "trainer")
    for role in roles:
        if replicas := plan.devices.of(role):
            each = len(replicas[0].devices)
            table.add_row(
                role,
                f"{len(replicas)}{f' of {each} devices' if each > 1 else ''}",
                format_devices(plan.devices.devices(role)),
                format_devices(sorted({replica.node for replica in replicas})),
            )
    if plan.devices.shared:
        turns = "take turns" if plan.devices.time_shared else "are both awake"
        table.add_row("shared", turns, format_devices(plan.devices.shared), "")
    return table


def _memory_table(plan: Plan) -> Table:
    """Devices grouped by equal load: what each role holds while it is awake, and the peak."""
    table = _table("devices", "role", "GiB", "of which", title="\nmemory of each device")
    same: dict[tuple[int, ...], list[DeviceLoad]] = {}
    for load in plan.loads:
        same.setdefault((load.peak, *(size.total for size in load.awake.values())), []).append(load)
    for alike in same.values():
        load, devices = alike[0], format_devices([load.device for load in alike])
        for role, footprint in load.awake.items():
            table.add_row(devices, role, f"{footprint.total / GIB:.2f}", _parts(footprint))
        for role, kept in load.asleep.items():
            kept_parts = {use: load.awake[role].parts.get(use, 0) for use in KEPT_ASLEEP}
            table.add_row(
                devices, f"{role} asleep", f"{kept / GIB:.2f}", _parts(Footprint(kept_parts))
            )
        if load.transfer is not None:
            how = "both awake" if load.transfer_fits else "too much: the trainer sleeps first"
            table.add_row(devices, "new weights", f"{load.transfer / GIB:.2f}", how)
        table.add_row(
            devices, "at the peak", f"{load.peak / GIB:.2f}", f"of {load.limit / GIB:.2f} usable"
        )
    host_parts, usable = fullest_host(plan.loads, plan.devices)
    if host := sum(host_parts.values()):
        table.add_row(
            "",
            "in the host",
            f"{host / GIB:.2f}",
            f"of {usable / GIB:.2f} usable, for all of its devices: "
            f"{_parts(Footprint(host_parts))}",
        )
    return table


def _parts(footprint: Footprint) -> str:
    return ", ".join(
        f"{name} {size / GIB:.2f}" for name, size in footprint.parts.items() if size >= GIB / 200
    )


def _step_table(plan: Plan) -> Table:
    step = plan.step
    table = _table("stage", "seconds", "share", title="\npredicted step")
    stages = (("rollout (waiting)", step.rollout), ("train", step.train), ("switch", step.switch))
    for name, seconds in (*stages, ("weights", step.weights), ("step", step.seconds)):
        table.add_row(name, f"{seconds:,.2f}", f"{seconds / step.seconds:.0%}")
    table.add_row("sampled", f"{step.tokens_per_second:,.0f}", "tokens/s")
    table.add_row("staleness", f"{step.staleness}", "at most")
    return table


def _update_table(plan: Plan) -> Table:
    """The moves of an update of the engines' weights, in the order in which they happen."""
    size, seconds = plan.update.size / GIB, plan.step.weights
    title = f"\nnew weights: {size:,.2f} GiB by {plan.transport}, {seconds:,.2f} s"
    table = _table("at the same time", "GiB", "in the busiest process", title=title)
    for number, phase in enumerate(plan.update.phases, 1):
        for move in phase:
            table.add_row(
                f"{number}. {move.name}", f"{move.total / GIB:,.2f}", f"{move.largest / GIB:,.2f}"
            )
    for move in plan.update.beside:
        table.add_row(
            f"beside the next step: {move.name}",
            f"{move.total / GIB:,.2f}",
            f"{move.largest / GIB:,.2f}",
        )
    return table


def _mesh_table(choice: MeshChoice) -> Table:
    """The mesh of the config, and the best others."""
    title = f"\nmesh of the trainer's {choice.ranks} ranks"
    table = _table(
        "settings", "seconds to train", "compute", "communication", "optimizer", "GiB of a rank",
        title=title,
    )  # fmt: skip
    for option in (choice.written, *choice.others[:_MAX_SHOWN_MESHES]):
        role = ", as it is" if option is choice.written else ""
        parts = (option.train.total, *astuple(option.train))
        table.add_row(
            f"{option.name}{role}",
            *(f"{seconds:,.2f}" for seconds in parts),
            f"{option.memory / GIB:.2f}{': too much' if option.problems else ''}",
        )
    return table


def _advice(advice: Advice) -> str:
    written = advice.devices.settings() | {
        f"trainer.{axis}": n for axis, n in advice.mesh.settings.items()
    }
    settings = " ".join(f"{key}={value}" for key, value in written.items())
    return (
        f"[bold]faster[/bold]  {settings}: {advice.step.seconds:,.1f} s a step on {advice.devices},"
        f" with {advice.step.train:,.1f} of training"
    )


def _candidates_table(considered: tuple[Candidate, ...]) -> Table:
    table = _table("map", "seconds a step", title="considered")
    for candidate in considered[:_MAX_SHOWN_CANDIDATES]:
        table.add_row(str(candidate.devices), _verdict(candidate))
    if len(considered) > _MAX_SHOWN_CANDIDATES:
        table.add_row(f"and {len(considered) - _MAX_SHOWN_CANDIDATES} more", "")
    return table


def _verdict(candidate: Candidate) -> str:
    if candidate.step:
        return f"{candidate.step.seconds:,.2f}"
    return "; ".join(candidate.problems) or f"about {candidate.rough:,.2f}, not simulated"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: bytes, seconds, device numbers."""
    step = plan.step
    return {
        "model": {"name": plan.facts.name, "parameters": plan.facts.parameters},
        "devices": {
            "kind": plan.devices.inventory.kind.name,
            "nodes": list(plan.devices.inventory.sizes),
        },
        "mode": plan.devices.mode,
        "time_shared": plan.devices.time_shared,
        "replicas": [
            {"role": r.role, "number": r.number, "devices": list(r.devices), "node": r.node}
            for r in plan.devices.replicas
        ],
        "settings": plan.devices.settings(),
        "memory": [
            {
                "device": load.device,
                "peak": load.peak,
                "limit": load.limit,
                "host": load.host,
                "host_parts": dict(load.host_parts),
                "awake": {role: dict(size.parts) for role, size in load.awake.items()},
                "asleep": dict(load.asleep),
                "transfer": load.transfer,
                "transfer_fits": load.transfer_fits,
            }
            for load in plan.loads
        ],
        "step": {
            "seconds": step.seconds,
            "rollout": step.rollout,
            "train": step.train,
            "switch": step.switch,
            "weights": step.weights,
            "tokens_per_second": step.tokens_per_second,
            "staleness": step.staleness,
        },
        "update": {
            "transport": plan.transport,
            "bytes": plan.update.size,
            "seconds": step.weights,
            "waiting": plan.update.waiting,
            "held": plan.update.held,
            "kept": plan.update.kept,
            "phases": [[asdict(move) for move in phase] for phase in plan.update.phases],
            "beside": [asdict(move) for move in plan.update.beside],
        },
        "meshes": _meshes_as_json(plan.meshes),
        "faster": None if plan.advice is None else _advice_as_json(plan.advice),
        "reason": plan.reason,
        "considered": [
            {
                "map": str(candidate.devices),
                "problems": list(candidate.problems),
                "seconds": candidate.step.seconds if candidate.step else None,
            }
            for candidate in plan.considered
        ],
    }


def _meshes_as_json(choice: MeshChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None

    def as_data(option: MeshOption) -> dict[str, Any]:
        return {
            "settings": dict(option.settings),
            "memory": option.memory,
            "seconds": option.train.total,
            "train": asdict(option.train),
            "problems": list(option.problems),
        }

    return {
        "ranks": choice.ranks,
        "written": as_data(choice.written),
        "others": [as_data(option) for option in choice.others],
    }


def _advice_as_json(advice: Advice) -> dict[str, Any]:
    return {
        "map": str(advice.devices),
        "settings": advice.devices.settings()
        | {f"trainer.{axis}": n for axis, n in advice.mesh.settings.items()},
        "seconds": advice.step.seconds,
        "train": advice.step.train,
    }
