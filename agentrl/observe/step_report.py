"""`StepReport`: the results of one training step, from all parts of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.protocols.metrics import Metrics, merge_metrics
from agentrl.trajectory import Group, Score, Trajectory


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of a training step. Each part of the run has a field for its metrics.

    Example: `StepReport(0, groups, seconds={"rollout": 1.5}, trainer={"loss": 0.2}).metrics()` is
    `{"loss": 0.2, "seconds": 1.5, "seconds/rollout": 1.5}`.
    """

    step: int
    """The step, counted from 0."""
    groups: Sequence[Group]
    """The groups that were trained on."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    untrained: Sequence[tuple[Trajectory, Score]] = ()
    """Episodes that were played meanwhile and not trained on."""
    trainer: Metrics = field(default_factory=dict)
    """Of the update, with those that the loss reports."""
    samples: Metrics = field(default_factory=dict)
    """Of the batch that was trained on: masked shares and health."""
    advisors: Metrics = field(default_factory=dict)
    """Of the critic's update."""
    exact: Metrics = field(default_factory=dict)
    """Exact metrics, if the environment can be enumerated."""
    weights: Metrics = field(default_factory=dict)
    """Of the publication of the new weights."""
    rollouts: Metrics = field(default_factory=dict)
    """Of the scheduler, the rewards, the opponents and the curriculum."""
    batch_processing: Metrics = field(default_factory=dict)
    """Of constraints, and of algorithms that learn from batches."""
    event_loop: Metrics = field(default_factory=dict)
    """Longest gaps of the event loop."""

    def metrics(self, **recorded: Metrics) -> dict[str, float]:
        """The metrics of all parts, and of `recorded`, what the record adds, by part.

        Raises:
            MetricNameError: two parts have a metric of the same name.
        """
        phases = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        return merge_metrics(
            {
                **recorded,
                "trainer": self.trainer,
                "samples": self.samples,
                "advisors": self.advisors,
                "exact": self.exact,
                "weights": self.weights,
                "rollouts": self.rollouts,
                "batch_processing": self.batch_processing,
                "event_loop": self.event_loop,
                "timing": {"seconds": sum(self.seconds.values()), **phases},
            }
        )
