"""The samples that a step was trained on: a Parquet file per step with a row per training sample.

Each row says which turns of which episode the sample is. Samples of some groups also have what the
trainer computed for each of their loss tokens. Dimension suffixes: M samples of a batch, N loss
tokens.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.algorithms.samples import SampleOrigin
from agentrl.batch import TrainBatch
from agentrl.tokens.arrays import FloatArray

SAMPLES_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("sample", pa.int32()),
        ("episode", pa.string()),
        ("agent", pa.string()),
        ("task", pa.string()),
        ("first_turn", pa.int32()),
        ("last_turn", pa.int32()),
        ("tokens", pa.int32()),
        ("loss_tokens", pa.int32()),
        ("weight", pa.float32()),
        ("advantage", pa.float32()),
        ("positions", pa.list_(pa.int32())),
        ("turns", pa.list_(pa.int32())),
        ("old_logprobs", pa.list_(pa.float32())),
        ("logprobs", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
    ]
)
"""`weight` and `advantage` are means over the sample's loss tokens. The lists have one entry for
each of these: its `positions` in the sample, its turn, the trainer's logprob before the step and
that of its update, the entropy of the policy before it, and its advantage. They are null for the
groups that were not drawn, the logprobs also for a trainer that does not tell them, and the
entropies for a loss that does not use them (`algorithm.entropy_bonus`)."""


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """The batch of a step, the origins of its samples, and the trainer's numbers for its tokens, if
    the trainer reports them (`Trainer.token_logprobs`).
    """

    batch: TrainBatch
    origins: Sequence[SampleOrigin]
    told_3N: FloatArray | None


def write_samples(path: Path, step: int, trained: TrainedBatch, detailed: frozenset[int]) -> None:
    """Write the samples of a step, all or none; those of the groups with the numbers `detailed`
    with their tokens.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    rows = list(_rows(step, trained, detailed))
    pq.write_table(
        pa.Table.from_pylist(rows, schema=SAMPLES_SCHEMA), unfinished, compression="zstd"
    )
    unfinished.replace(path)


def drawn_groups(batch: TrainBatch, count: int, seed: int) -> frozenset[int]:
    """The numbers of `count` groups of a batch, or of all if it has fewer, drawn with a seed."""
    numbers = np.unique(batch.groups_M).tolist()
    return frozenset(random.Random(seed).sample(numbers, min(count, len(numbers))))


def _rows(
    step: int, trained: TrainedBatch, detailed: frozenset[int]
) -> Iterator[dict[str, object]]:
    batch = trained.batch
    # Of each sample, the end of its loss tokens in the columns of N, and of its tokens in those of
    # S.
    ends_N, ends_S = np.cumsum(batch.loss_tokens_M), np.cumsum(batch.lengths_M)
    for number, origin in enumerate(trained.origins):
        own_N = slice(ends_N[number] - batch.loss_tokens_M[number], ends_N[number])
        row: dict[str, object] = {
            "step": step,
            "sample": number,
            "episode": origin.episode,
            "agent": origin.agent,
            "task": origin.task,
            "first_turn": origin.first,
            "last_turn": origin.last,
            "tokens": int(batch.lengths_M[number]),
            "loss_tokens": own_N.stop - own_N.start,
            "weight": _mean(batch.weights_N[own_N]),
            "advantage": _mean(batch.advantages_N[own_N]),
        }
        if int(batch.groups_M[number]) in detailed:
            begin = ends_S[number] - batch.lengths_M[number]
            row["positions"] = np.flatnonzero(batch.loss_mask_S[begin : ends_S[number]])
            row["turns"] = batch.turns_N[own_N]
            row["advantages"] = batch.advantages_N[own_N]
            if trained.told_3N is not None:
                row["old_logprobs"], row["logprobs"], entropies_N = trained.told_3N[:, own_N]
                row["entropies"] = None if np.isnan(entropies_N).any() else entropies_N
        yield row


def _mean(values: FloatArray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0
