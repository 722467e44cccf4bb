"""A replay buffer: episodes of earlier steps, which a critic learns from again.

batch ──▶ with_earlier ──▶ the batch, and after it some earlier episodes ──▶ critic
  └─────▶ keep ──▶ the last steps' batches ──▶ a checkpoint's folder `replay`
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.batch import TrainBatch, columns, filled_column
from agentrl.errors import CheckpointError, TrainingError
from agentrl.tokens.arrays import Ragged

REPLAY_FOLDER = "replay"
"""The folder of a checkpoint that has the kept episodes."""
_FILE = "episodes.npz"
_KEPT = (
    "tokens_S",
    "loss_mask_S",
    "lengths_M",
    "turns_N",
    "rewards_N",
    "trajectories_M",
    "truncated_M",
    "groups_M",
)
"""The columns of a batch that a critic needs, besides `tails_M`. Logprobs, advantages and supports
are the policy's.
"""


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """The batch of a step, as far as a critic needs it. `tasks` are the ids of its groups' tasks,
    by group number.
    """

    step: int
    batch: TrainBatch
    tasks: tuple[str, ...]


class EpisodeBuffer:
    """The episodes of the last `steps` steps. Each update of a critic draws `per_new` of them for
    each new one.

    What is drawn depends on `seed`, the step, the update's number and what is kept, so a resumed
    run draws what it would have drawn without the stop. `reused` is called with the step and the
    ids of the tasks of what is drawn (`Ledger.reused`).
    """

    def __init__(
        self,
        steps: int,
        per_new: float,
        *,
        seed: int,
        reused: Callable[[int, Sequence[str]], None] = lambda step, task_ids: None,
    ) -> None:
        self._kept: deque[PlayedStep] = deque(maxlen=steps)
        self._per_new = per_new
        self._seed = seed
        self._reused = reused

    def __len__(self) -> int:
        """The number of trajectories that are kept."""
        return sum(_trajectories_in(played.batch) for played in self._kept)

    def keep(self, step: int, batch: TrainBatch, tasks: Sequence[str]) -> None:
        """Keep the batch of a step; the oldest batch is dropped if there are too many.

        Raises:
            TrainingError: it has pictures, which are not kept.
        """
        if any(batch.images_M):
            raise TrainingError(
                "a critic cannot learn again from episodes with pictures: set"
                " recipe.replay to 0, or choose what the environment says in words"
            )
        kept = _rebuild_batch({name: getattr(batch, name) for name in _KEPT}, batch.tails_M)
        self._kept.append(PlayedStep(step, kept, tuple(tasks)))

    def with_earlier(self, step: int, batch: TrainBatch, update: int = 0) -> TrainBatch:
        """The batch of a step, and after it whole trajectories of earlier steps, drawn evenly
        without repetition.

        The weight of their tokens is 0, as the policy does not learn from them.
        """
        wanted = min(len(self), round(self._per_new * _trajectories_in(batch)))
        if not wanted:
            return batch
        # Trajectories have numbers over all kept steps: those of a step are from `first` on.
        drawn = np.sort(self._generator(step, update).choice(len(self), wanted, replace=False))
        parts, task_ids, first = [batch], list[str](), 0
        for played in self._kept:
            last = first + _trajectories_in(played.batch)
            chosen = drawn[(drawn >= first) & (drawn < last)] - first
            first = last
            if len(chosen):
                samples = np.flatnonzero(np.isin(played.batch.trajectories_M, chosen)).tolist()
                parts.append(played.batch.ordered(samples))
                task_ids += [played.tasks[group] for group in np.unique(parts[-1].groups_M)]
        self._reused(step, list(dict.fromkeys(task_ids)))
        return TrainBatch.joined(parts)

    def mix_in(self, step: int, batch: TrainBatch, update: int = 0) -> TrainBatch:
        """The samples of a batch in a random order, so that each of a critic's minibatches has new
        and earlier ones.
        """
        return batch.ordered(self._generator(step, update).permutation(batch.num_samples).tolist())

    def _generator(self, step: int, update: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, step, update])

    def save(self, folder: Path) -> None:
        """Write all that is kept into a checkpoint."""
        arrays: dict[str, Any] = {
            "tasks": np.array(json.dumps([(one.step, one.tasks) for one in self._kept]))
        }
        for played in self._kept:
            tails = {
                "tails": played.batch.tails_M.values,
                "tail_lengths": played.batch.tails_M.lengths,
            }
            fields = {name: getattr(played.batch, name) for name in _KEPT}
            arrays |= {
                f"{played.step}/{name}": array for name, array in {**fields, **tails}.items()
            }
        (folder / REPLAY_FOLDER).mkdir(parents=True)
        np.savez(folder / REPLAY_FOLDER / _FILE, **arrays)

    def load(self, folder: Path) -> None:
        """Replace all that is kept by what a checkpoint has.

        Raises:
            CheckpointError: it has nothing, as it is of a run without a replay.
        """
        path = folder / REPLAY_FOLDER / _FILE
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: the checkpoint was written by a recipe without a replay."
                " Resume the run with that recipe, or start another one with run_dir=ANOTHER"
            )
        self._kept.clear()
        with np.load(path, allow_pickle=False) as arrays:
            for step, tasks in json.loads(str(arrays["tasks"])):
                tails = Ragged(arrays[f"{step}/tails"], arrays[f"{step}/tail_lengths"])
                batch = _rebuild_batch({name: arrays[f"{step}/{name}"] for name in _KEPT}, tails)
                self._kept.append(PlayedStep(step, batch, tuple(tasks)))


def _rebuild_batch(kept: Mapping[str, Any], tails_M: Ragged) -> TrainBatch:
    # The columns that are not kept are empty: a critic does not read them.
    blank = {name: column.zeros(len(kept["turns_N"])) for name, column in columns("N").items()}
    blank["experts_M"] = np.full(len(kept["lengths_M"]), None)
    blank["images_M"] = filled_column(np.object_, [()] * len(kept["lengths_M"]))
    return TrainBatch(**{**blank, **kept, "tails_M": tails_M})


def _trajectories_in(batch: TrainBatch) -> int:
    return int(batch.trajectories_M.max()) + 1
