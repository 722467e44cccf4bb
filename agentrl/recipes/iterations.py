"""`Iterations`: the folders that the iterations of a run leave, and the lineage of their models."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from agentrl.recipes.lineage import Lineage, ModelRecord, read_lineage, rewards_of, weights_sha256
from agentrl.runs.checkpoint import export, set_aside
from agentrl.runs.run import Run


class Iterations:
    """The models of a run: the first one, and that of each iteration in
    `iterations/iteration_000001` and so on.

    The model of an iteration is a copy of its checkpoint, without the optimizer: it is made after
    the checkpoint, and once more if the run was killed between both. `by_first`: the reference of
    all is the first model, else the parent.

    Raises:
        CheckpointError: the first model, or a model that the reward uses, has no weights.
    """

    def __init__(self, run: Run, first: Path, *, by_first: bool) -> None:
        self._run = run
        self._by_first = by_first
        self._first = self._record(first, weights_sha256(first))
        self._reward = rewards_of(run.config.reward.parts)
        self._config_sha256 = hashlib.sha256(run.config.to_yaml().encode()).hexdigest()

    def latest_by_updates(self) -> tuple[int, Path] | None:
        """(updates of the optimizer, folder) of the newest checkpoint: what a restarted trainer
        continues from.
        """
        newest = self._run.checkpoints.latest()
        return None if newest is None else (read_lineage(newest[1]).updates, newest[1])

    def continue_after(self, iteration: int) -> None:
        """Set aside the folders of later iterations, which are repeated, and make that of this one
        if it is missing.

        Raises:
            CheckpointError: this iteration has no checkpoint.
        """
        for path in self._folder(0).parent.glob("iteration_*"):
            if path.name > self._folder(iteration).name:
                set_aside(path, "left")
        if iteration and not self._folder(iteration).exists():
            self.add(iteration)

    def lineage(self, iteration: int, tasks: Sequence[str], *, pairs: int, updates: int) -> Lineage:
        """The lineage of an iteration's model, after this number of updates. The checksum of its
        weights is left out.
        """
        parent, before = self._first, 0
        if iteration > 1:
            last = read_lineage(self._folder(iteration - 1))
            parent, before = self._record(self._folder(iteration - 1), last.sha256), last.updates
        return Lineage(
            iteration=iteration,
            sha256="",
            parent=parent,
            reference=self._first if self._by_first else parent,
            reward=self._reward,
            tasks=tuple(tasks),
            pairs=pairs,
            updates=before + updates,
            seed=self._run.config.seed,
            config_sha256=self._config_sha256,
        )

    def add(self, iteration: int) -> None:
        """Make the folder of an iteration from its checkpoint."""
        export(self._run.checkpoints.all()[iteration], self._folder(iteration))

    def _record(self, model: Path, sha256: str) -> ModelRecord:
        """A model as a file names it that lies two folders below the run's, which may be moved."""
        folder, run = model.resolve(), self._run.folder.resolve()
        inside = folder.is_relative_to(run)
        return ModelRecord(
            folder=Path("../..") / folder.relative_to(run) if inside else folder, sha256=sha256
        )

    def _folder(self, iteration: int) -> Path:
        return self._run.folder / "iterations" / f"iteration_{iteration:06d}"
