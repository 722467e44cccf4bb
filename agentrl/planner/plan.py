"""The plan of a run before it starts: devices, memory, and the time of a step."""

from dataclasses import dataclass

from agentrl.models.facts import ModelFacts
from agentrl.placement.device_map import DeviceMap
from agentrl.planner.memory import DeviceLoad
from agentrl.simulate.stages import Workload


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
class Plan:
    """The chosen map, the memory of its devices, its step, the reason, and all maps that were
    considered.
    """

    facts: ModelFacts
    work: Workload
    devices: DeviceMap
    loads: tuple[DeviceLoad, ...]
    step: StepEstimate
    reason: str
    considered: tuple[Candidate, ...]
