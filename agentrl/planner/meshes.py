"""How the ranks of a trainer may lie (`Mesh`): which meshes fit, and how long a step takes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from pydantic import ValidationError

from agentrl.config.run_config import RunConfig
from agentrl.models.facts import ModelFacts
from agentrl.placement.device_map import DeviceMap
from agentrl.planner.memory import fit_of
from agentrl.planner.run_facts import stages_of
from agentrl.simulate.stages import TrainSeconds, Workload

AXES = ("replicas", "context_parallel", "tensor_parallel", "expert_parallel")
"""The settings of a trainer that say how its ranks lie, where it has them."""
GAIN = 0.05
"""The share of its time that another mesh must save to be advised: estimates are no more exact."""

ALIKE = 0.02
"""How much longer a mesh may take than the fastest one, and be taken for it if it is simpler."""


@dataclass(frozen=True, slots=True)
class MeshOption:
    """A mesh of the trainer's ranks on the devices of a map."""

    settings: Mapping[str, int]
    """The axes that have more than one rank, by the name of their setting; the rest of the ranks
    shard the model."""
    memory: int
    """The most bytes of the trainer on a device, while it is awake."""
    train: TrainSeconds
    """The seconds of a training step."""
    problems: tuple[str, ...]
    """Why it does not fit."""

    @property
    def name(self) -> str:
        """As overrides; `shards only` where no axis has more than one rank."""
        return " ".join(f"trainer.{axis}={n}" for axis, n in self.settings.items()) or "shards only"


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """The mesh that a config has, among those that its trainer's ranks could have."""

    ranks: int
    """The ranks of the trainer."""
    written: MeshOption
    """The mesh of the config."""
    others: tuple[MeshOption, ...]
    """All others: those that fit first, then by seconds of a training step."""

    @property
    def advised(self) -> MeshOption | None:
        """A mesh that fits and trains a step in clearly less time: of those that are about as fast,
        the one of fewest axes. None if there is none.
        """
        fitting = [option for option in self.others if not option.problems]
        least = min((option.train.total for option in fitting), default=math.inf)
        if least > (1 - GAIN) * self.written.train.total:
            return None
        alike = [option for option in fitting if option.train.total <= (1 + ALIKE) * least]
        return min(alike, key=lambda option: (len(option.settings), option.train.total))


def mesh_choice(
    config: RunConfig, facts: ModelFacts, work: Workload, devices: DeviceMap
) -> MeshChoice | None:
    """The meshes of the trainer's ranks on a map; None if the trainer has one rank, or no such
    settings.
    """
    ranks = len(devices.of("trainer"))
    axes = [axis for axis in AXES if axis in type(config.trainer.settings).model_fields]
    if ranks < 2 or not axes:
        return None
    written = {axis: getattr(config.trainer.settings, axis) for axis in axes}
    options = {
        tuple(sizes.values()): option
        for sizes in (written, *_sizes(axes, ranks, facts))
        if (option := _mesh_option(config, facts, work, devices, sizes)) is not None
    }
    own = options.pop(tuple(written.values()))
    others = sorted(options.values(), key=lambda one: (bool(one.problems), one.train.total))
    return MeshChoice(ranks, own, tuple(others))


def with_mesh(config: RunConfig, settings: Mapping[str, int], ranks: int) -> RunConfig | None:
    """The config with a trainer of so many ranks that lie so; None if its settings refuse it."""
    component = config.trainer
    own = set(AXES) & type(component.settings).model_fields.keys()
    values = component.settings.model_dump() | dict.fromkeys(own, 1) | dict(settings)
    try:
        chosen = type(component.settings).model_validate(values | {"world_size": ranks})
    except ValidationError:
        return None
    return config.model_copy(update={"trainer": replace(component, settings=chosen)})


def _sizes(axes: list[str], ranks: int, facts: ModelFacts) -> Iterator[Mapping[str, int]]:
    """All sizes of the axes that divide so many ranks. Experts lie on the same ranks again."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for numbers in product(divisors, repeat=len(axes)):
        sizes = dict(zip(axes, numbers, strict=True))
        if ranks % math.prod(n for axis, n in sizes.items() if axis != "expert_parallel"):
            continue
        if sizes.get("expert_parallel", 1) > 1 and not facts.experts:
            continue
        yield sizes


def _mesh_option(
    config: RunConfig,
    facts: ModelFacts,
    work: Workload,
    devices: DeviceMap,
    sizes: Mapping[str, int],
) -> MeshOption | None:
    """The mesh of these sizes; None if the trainer's settings refuse it."""
    changed = with_mesh(config, sizes, len(devices.of("trainer")))
    if changed is None:
        return None
    stages = stages_of(changed, facts)
    fit = fit_of(stages, work, devices)
    awake = [load.awake["trainer"] for load in fit.loads if "trainer" in load.awake]
    return MeshOption(
        {axis: n for axis, n in sizes.items() if n > 1},
        max(size.total for size in awake),
        stages.train(work, devices),
        fit.problems,
    )


__all__ = ["ALIKE", "AXES", "GAIN", "MeshChoice", "MeshOption", "mesh_choice", "with_mesh"]
