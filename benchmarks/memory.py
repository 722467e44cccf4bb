"""The planner's count of memory for the examples of real size, by term, as a table in Markdown.

    python benchmarks/memory.py
    python benchmarks/memory.py examples/qwen3_8b.yaml trainer.moments=bfloat16

Engine and trainer take turns on all devices (H100 with 80 GB, 8 and 16 of them). The engine is
spread over as few devices of a node as hold it and one context.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.config import RunConfig, load_config
from agentrl.placement.device_map import device_maps
from agentrl.placement.devices import GIB, gpu_named
from agentrl.placement.inventory import Inventory
from agentrl.planner.memory import DeviceLoad, fit_of
from agentrl.planner.run_facts import model_of, placement_request_of, stages_of, with_defaults
from agentrl.simulate.stages import workload

EXAMPLES = sorted(Path(__file__).parents[1].glob("examples/qwen3_*.yaml"))
DEVICES = (Inventory.uniform(gpu_named("H100"), 8), Inventory.uniform(gpu_named("H100"), 8, 2))


def in_turns(config: RunConfig, inventory: Inventory) -> tuple[DeviceLoad, list[str]]:
    """The fullest device where both roles take turns on all devices, and why that does not fit."""
    facts = model_of(config)
    config = with_defaults(config, facts, inventory.kind)
    stages, work = stages_of(config, facts), workload(config.rollout, config.simulation)
    placement = config.placement.model_copy(update={"name": "colocated"})
    maps = device_maps(placement, placement_request_of(config), inventory)
    shared = [devices for devices in maps if devices.time_shared]
    fits = {devices.tensor_parallel(): fit_of(stages, work, devices) for devices in shared}
    split = min((n for n, fit in fits.items() if not fit.problems), default=max(fits))
    fullest = max(fits[split].loads, key=lambda load: (load.peak, load.host))
    return fullest, list(fits[split].problems)


def rows(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    """Each term with its GiB on 8 and on 16 devices."""
    found = [in_turns(config, inventory)[0] for inventory in DEVICES]
    for role in ("trainer", "engine"):
        uses = dict.fromkeys(use for load in found for use in load.awake[role].parts)
        for use in uses:
            yield f"{role}: {use}", [_gib(load.awake[role].parts.get(use, 0)) for load in found]
        yield f"**{role}**", [_gib(load.awake[role].total) for load in found]
        yield f"{role} asleep", [_gib(load.asleep[role]) for load in found]
    yield "**peak**", [_gib(load.peak) for load in found]
    for use in dict.fromkeys(use for load in found for use in load.host_parts):
        yield f"host: {use}", [_gib(load.host_parts.get(use, 0)) for load in found]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def main() -> None:
    """Print a table of all examples, or of the one that is named, with overrides."""
    paths = [Path(sys.argv[1])] if len(sys.argv) > 1 else EXAMPLES
    configs = [load_config(path, tuple(sys.argv[2:])).config for path in paths]
    columns: dict[str, list[str]] = {}
    for number, config in enumerate(configs):
        for name, cells in rows(config):
            empty = [""] * len(DEVICES) * len(configs)
            row = columns.setdefault(name, empty)
            row[len(DEVICES) * number : len(DEVICES) * (number + 1)] = cells
    heads = [f"{path.stem}, {len(inventory)}" for path in paths for inventory in DEVICES]
    print(f"| GiB on each device | {' | '.join(heads)} |")
    print("|---" * (1 + len(heads)) + "|")
    for name, row in columns.items():
        print(f"| {name} | {' | '.join(row)} |")
    for path, config in zip(paths, configs, strict=True):
        for inventory in DEVICES:
            for fault in in_turns(config, inventory)[1]:
                print(f"\n{path.stem} on {inventory} does not fit: {fault}.")


if __name__ == "__main__":
    main()
