"""The plan of a run before it starts: devices, memory, and the time of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.models.facts import ModelFacts
from agentrl.placement.device_map import DeviceMap
from agentrl.planner.memory import DeviceLoad
from agentrl.planner.meshes import MeshChoice, MeshOption
from agentrl.simulate.stages import Workload
from agentrl.weights.moved import BytesMoved


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Predicted seconds of a step by stage, as means: waiting for groups, training, switching, new
    weights.
    """

    rollout: float
    train: float
    switch: float
    weights: float
    tokens_per_second: float
    staleness: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.rollout + self.train + self.switch + self.weights


@dataclass(frozen=True, slots=True)
class Candidate:
    """A map that was considered: why it does not fit, or how long a step takes; `rough` is not
    simulated. `filled`: memory use of the fullest device, as a share of its usable memory.
    """

    devices: DeviceMap
    filled: float
    problems: tuple[str, ...] = ()
    rough: float = 0.0
    step: StepEstimate | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """Another mesh of the trainer's ranks that makes a step faster, and the map for it."""

    devices: DeviceMap
    mesh: MeshOption
    step: StepEstimate


@dataclass(frozen=True, slots=True)
class Plan:
    """The map of a run's devices that was chosen."""

    facts: ModelFacts
    """The shape of the model."""
    work: Workload
    """The episodes of a step."""
    devices: DeviceMap
    """The chosen map."""
    loads: tuple[DeviceLoad, ...]
    """The memory of each device that is used."""
    step: StepEstimate
    """The seconds of a step."""
    transport: str
    """The transport of new weights."""
    update: BytesMoved
    """What an update of the engines' weights moves."""
    reason: str
    """The reason for this map."""
    considered: tuple[Candidate, ...]
    """All maps that were considered."""
    meshes: MeshChoice | None = None
    """The meshes that the trainer's ranks could have on this map; None if it has one rank."""
    advice: Advice | None = None
    """What makes a step faster than this map and the mesh of the config; None if nothing does."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """The settings that follow from the model and the devices, by their dotted names."""

    @property
    def tight(self) -> DeviceLoad | None:
        """The load of a device on which new weights cannot be sent while the trainer is awake, as
        roles that take turns do it where they can; None if they can everywhere.
        """
        return next((load for load in self.loads if not load.transfer_fits), None)
