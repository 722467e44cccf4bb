"""What a trainer is restarted from: a checkpoint, and the steps since.

step ─▶ log ─▶ a rank dies ─▶ new ranks ─▶ newest checkpoint ─▶ the steps of the log since, again
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agentrl.batch import TrainBatch
from agentrl.errors import AgentRLError
from agentrl.protocols import LatestCheckpoint, Loss


class TrainingStep(NamedTuple):
    """The inputs of one step."""

    batch: TrainBatch
    loss: Loss
    normalizer: float


@dataclass(slots=True)
class ReplayLog:
    """The steps that a restart may have to repeat."""

    latest: LatestCheckpoint
    done: int = 0
    """Steps that the trainer has done, including those of its checkpoint."""
    _loaded: tuple[int, Path] | None = None
    _steps: dict[int, TrainingStep] = field(default_factory=dict)  # by number

    def record(self, step: TrainingStep) -> None:
        """Record a step that has been done."""
        self._steps[self.done] = step
        self.done += 1

    def drop_saved(self) -> None:
        """Drop the steps that the newest checkpoint includes."""
        newest = self.latest()
        saved = newest[0] if newest else 0
        self._steps = {number: step for number, step in self._steps.items() if number >= saved}

    def checked(self, folder: Path) -> tuple[int, Path]:
        """The checkpoint in a folder, with its number of steps done.

        Raises:
            ValueError: it is not the run's newest, the only one that a restart would find.
        """
        newest = self.latest()
        if newest is not None and newest[1] != folder:
            raise ValueError(f"{folder} is not the newest checkpoint of the run, which is {newest}")
        return newest or (0, folder)

    def begin_at(self, checkpoint: tuple[int, Path]) -> None:
        """Record that the trainer has loaded a checkpoint."""
        self._loaded = checkpoint
        self.done = checkpoint[0]

    def checkpoint(self) -> tuple[int, Path] | None:
        """The checkpoint that new ranks load, with its steps done: the run's newest if it has done
        steps, else the loaded one.
        """
        return (self.latest() if self.done else None) or self._loaded

    def since(self, number: int) -> Iterator[TrainingStep]:
        """The steps from this number on.

        Raises:
            AgentRLError: one of them is missing.
        """
        for missing in range(number, self.done):
            if missing not in self._steps:
                raise AgentRLError(
                    f"step {missing} is neither in the checkpoint of {number} steps nor in the log"
                )
            yield self._steps[missing]
