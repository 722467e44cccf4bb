"""Trajectories to training samples to packed batches.

Dimension suffixes: T tokens of a sample; in a packed batch B rows and T columns; S tokens of all samples end to end;
M samples. Arrays are numpy, so that a batch crosses a process boundary without a copy and this module loads no torch.

The tokens are the engine's own (`Turn.prompt_ids`, `Completion.token_ids`), laid end to end; nothing here ever sees
text. `loss_mask` is one exactly where the engine sampled the token.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from agentrl.trajectory import Trajectory, Turn

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One token sequence to train on; all fields are of equal length T.

    Where `loss_mask` is 0, `rollout_logprobs` and `advantages` are 0 and `policy_versions` is -1.
    `turn_ids` numbers the turn a token belongs to (its prompt's tokens too).

    Raises:
        ValueError: the lengths differ, there is no token, the first token carries loss (nothing predicts it), or a
            loss token's logprob or advantage is not a finite number.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    policy_versions: tuple[int, ...]
    turn_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(lengths.values())) != 1 or not self.token_ids:
            raise ValueError(f"a training sample needs one or more tokens and fields of equal length, got {lengths}")
        if self.loss_mask[0]:
            raise ValueError(
                "the first token of a training sample cannot carry loss, because no token stands before it to predict "
                "it from: give the first turn a prompt (a start token is enough)"
            )
        for name in ("rollout_logprobs", "advantages"):
            for position, (value, carries_loss) in enumerate(zip(getattr(self, name), self.loss_mask, strict=True)):
                if carries_loss and not math.isfinite(value):
                    raise ValueError(f"{name}[{position}] is {value}; every loss token needs a finite number")


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples packed into rows.

    `segment_ids_BT` numbers the samples from 1 over the whole batch (0 is padding); attention stays inside a segment.
    `position_ids_BT` restarts at 0 with each segment. A token is predicted from the token before it in its segment,
    so the first token of a segment never carries loss. `reference_logprobs_BT` are those of the model that the policy
    is kept near, where the run has one (`agentrl/learner.py`); until it was asked, the engine's.
    """

    tokens_BT: IntArray
    loss_mask_BT: IntArray
    rollout_logprobs_BT: FloatArray
    reference_logprobs_BT: FloatArray
    advantages_BT: FloatArray
    policy_versions_BT: IntArray
    position_ids_BT: IntArray
    segment_ids_BT: IntArray
    num_loss_tokens: int
    num_samples: int


def to_samples(trajectory: Trajectory, advantage: float, *, oldest_version: int = 0) -> list[TrainingSample]:
    """Lay a trajectory's turns end to end; each fork starts a new sample. Every sampled token gets `advantage`.

    `turn_ids` counts over the whole trajectory, so a sample after a fork starts with the forked turn's number. A token
    of a version before `oldest_version` is context like a prompt's: it carries no loss. A sample in which none does is
    left out.

    Raises:
        ValueError: as `TrainingSample`.
    """
    pieces: list[list[tuple[int, Turn]]] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.forked or not pieces:
            pieces.append([])
        pieces[-1].append((number, turn))
    samples = [_sample(piece, advantage, oldest_version) for piece in pieces]
    return [sample for sample in samples if any(sample.loss_mask)] if oldest_version > 0 else samples


def _sample(turns: Sequence[tuple[int, Turn]], advantage: float, oldest_version: int) -> TrainingSample:
    token_ids: list[int] = []
    loss_mask: list[int] = []
    rollout_logprobs: list[float] = []
    advantages: list[float] = []
    policy_versions: list[int] = []
    turn_ids: list[int] = []
    for number, turn in turns:
        shown, sampled = len(turn.prompt_ids), len(turn.completion.token_ids)
        fresh = [version >= oldest_version for version in turn.completion.policy_versions]
        token_ids += [*turn.prompt_ids, *turn.completion.token_ids]
        loss_mask += [0] * shown + [int(is_fresh) for is_fresh in fresh]
        rollout_logprobs += [0.0] * shown + [*turn.completion.logprobs]
        advantages += [0.0] * shown + [advantage if is_fresh else 0.0 for is_fresh in fresh]
        policy_versions += [-1] * shown + [*turn.completion.policy_versions]
        turn_ids += [number] * (shown + sampled)
    return TrainingSample(
        tuple(token_ids),
        tuple(loss_mask),
        tuple(rollout_logprobs),
        tuple(advantages),
        tuple(policy_versions),
        tuple(turn_ids),
    )


def collate(samples: Iterable[TrainingSample], *, row_tokens: int, pad_token_id: int = 0) -> TrainBatch:
    """Pack samples into rows of at most `row_tokens` tokens, deterministically, by best-fit decreasing.

    Sample i becomes segment i + 1, whole, in one row. A sample longer than `row_tokens` gets a row of its own, and
    all rows are padded to the longest: nothing is ever cut. Longer rows come first.

    Raises:
        ValueError: there is no sample, or `row_tokens` is below 1.
    """
    listed = list(samples)
    if not listed:
        raise ValueError("there is no sample to collate: a batch needs one trainable trajectory at least")
    if row_tokens < 1:
        raise ValueError(f"row_tokens must be 1 or more, got {row_tokens}")
    rollout_logprobs_S = np.concatenate([np.asarray(s.rollout_logprobs, np.float32) for s in listed])
    flat = _Flat(
        tokens_S=np.concatenate([np.asarray(s.token_ids, np.int64) for s in listed]),
        loss_mask_S=np.concatenate([np.asarray(s.loss_mask, np.int64) for s in listed]),
        rollout_logprobs_S=rollout_logprobs_S,
        reference_logprobs_S=rollout_logprobs_S,
        advantages_S=np.concatenate([np.asarray(s.advantages, np.float32) for s in listed]),
        policy_versions_S=np.concatenate([np.asarray(s.policy_versions, np.int64) for s in listed]),
        lengths_M=np.asarray([len(s.token_ids) for s in listed], np.int64),
    )
    return _lay(flat, row_tokens, pad_token_id)


def minibatches(batch: TrainBatch, count: int) -> list[TrainBatch]:
    """Deal the samples, in their order, into `count` batches of nearly equal numbers of samples, packed again.

    Neighbours stay together, so a group is split at most once per border. Segments are numbered from 1 in each part.
    With fewer samples than `count` there is one part per sample.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"a batch splits into 1 or more minibatches, got {count}")
    if count == 1:
        return [batch]
    flat = _flatten(batch)
    ends_M = np.cumsum(flat.lengths_M)
    parts = np.array_split(np.arange(batch.num_samples), min(count, batch.num_samples))
    return [
        _lay(flat.part(int(ends_M[p[0]] - flat.lengths_M[p[0]]), int(ends_M[p[-1]]), p), batch.tokens_BT.shape[1], 0)
        for p in parts
    ]


def micro_batches(batch: TrainBatch, tokens: int) -> list[TrainBatch]:
    """Cut a batch into runs of rows of at most `tokens` tokens each, padding included, or of one row.

    Padding columns that a run does not need are dropped. Segments keep their numbers.

    Raises:
        ValueError: `tokens` is below 1.
    """
    if tokens < 1:
        raise ValueError(f"micro-batches hold 1 or more tokens, got {tokens}")
    used_B = [int(n) for n in (batch.segment_ids_BT > 0).sum(axis=1)]
    runs: list[tuple[int, int]] = []
    start, longest = 0, 0
    for row, used in enumerate(used_B):
        if row > start and max(longest, used) * (row - start + 1) > tokens:
            runs.append((start, row))
            start, longest = row, 0
        longest = max(longest, used)
    runs.append((start, len(used_B)))
    return [_rows(batch, start, end, max(used_B[start:end])) for start, end in runs]


@dataclass(frozen=True, slots=True)
class _Flat:
    """All samples end to end, in their order."""

    tokens_S: IntArray
    loss_mask_S: IntArray
    rollout_logprobs_S: FloatArray
    reference_logprobs_S: FloatArray
    advantages_S: FloatArray
    policy_versions_S: IntArray
    lengths_M: IntArray

    def part(self, start: int, end: int, samples: IntArray) -> "_Flat":
        """The tokens from `start` to `end`, which are those of `samples`."""
        return _Flat(
            self.tokens_S[start:end],
            self.loss_mask_S[start:end],
            self.rollout_logprobs_S[start:end],
            self.reference_logprobs_S[start:end],
            self.advantages_S[start:end],
            self.policy_versions_S[start:end],
            self.lengths_M[samples],
        )


def _flatten(batch: TrainBatch) -> _Flat:
    """The samples of a batch, end to end: a row holds a segment in one piece, so a stable sort finds its tokens."""
    segments = batch.segment_ids_BT.ravel()
    order_S = np.argsort(segments, kind="stable")[int((segments == 0).sum()) :]
    return _Flat(
        batch.tokens_BT.ravel()[order_S],
        batch.loss_mask_BT.ravel()[order_S],
        batch.rollout_logprobs_BT.ravel()[order_S],
        batch.reference_logprobs_BT.ravel()[order_S],
        batch.advantages_BT.ravel()[order_S],
        batch.policy_versions_BT.ravel()[order_S],
        np.bincount(segments, minlength=batch.num_samples + 1)[1:].astype(np.int64),
    )


def _pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each item, longest first, goes into the fullest row that has room. Ties: the first row."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_rows, (lengths[item], -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
            rows[row].append(item)
        else:
            room, row = row_tokens, len(rows)
            rows.append([item])
        if room > lengths[item]:
            insort(open_rows, (room - lengths[item], row))
    filled = [sum(lengths[i] for i in row) for row in rows]
    return [rows[r] for r in sorted(range(len(rows)), key=lambda r: -filled[r])]


def _lay(flat: _Flat, row_tokens: int, pad_token_id: int) -> TrainBatch:
    """Pack, and copy every column through one index."""
    lengths = [int(n) for n in flat.lengths_M]
    starts = np.cumsum(flat.lengths_M) - flat.lengths_M
    rows = _pack(lengths, row_tokens)
    shape = (len(rows), max(sum(lengths[i] for i in row) for row in rows))
    index_BT, position_ids_BT, segment_ids_BT = (np.zeros(shape, np.int64) for _ in range(3))
    for b, row in enumerate(rows):
        at = 0
        for item in row:
            span = slice(at, at + lengths[item])
            position_ids_BT[b, span] = np.arange(lengths[item])
            segment_ids_BT[b, span] = item + 1
            index_BT[b, span] = starts[item] + position_ids_BT[b, span]
            at += lengths[item]
    padding_BT = segment_ids_BT == 0
    return TrainBatch(
        tokens_BT=np.where(padding_BT, pad_token_id, flat.tokens_S[index_BT]),
        loss_mask_BT=np.where(padding_BT, 0, flat.loss_mask_S[index_BT]),
        rollout_logprobs_BT=np.where(padding_BT, np.float32(0), flat.rollout_logprobs_S[index_BT]),
        reference_logprobs_BT=np.where(padding_BT, np.float32(0), flat.reference_logprobs_S[index_BT]),
        advantages_BT=np.where(padding_BT, np.float32(0), flat.advantages_S[index_BT]),
        policy_versions_BT=np.where(padding_BT, -1, flat.policy_versions_S[index_BT]),
        position_ids_BT=position_ids_BT,
        segment_ids_BT=segment_ids_BT,
        num_loss_tokens=int(flat.loss_mask_S.sum()),
        num_samples=len(lengths),
    )


def _rows(batch: TrainBatch, start: int, end: int, columns: int) -> TrainBatch:
    """Some rows of a batch, without the columns from `columns` on, which are padding."""
    window = (slice(start, end), slice(0, columns))
    segment_ids_BT = batch.segment_ids_BT[window]
    return TrainBatch(
        tokens_BT=batch.tokens_BT[window],
        loss_mask_BT=batch.loss_mask_BT[window],
        rollout_logprobs_BT=batch.rollout_logprobs_BT[window],
        reference_logprobs_BT=batch.reference_logprobs_BT[window],
        advantages_BT=batch.advantages_BT[window],
        policy_versions_BT=batch.policy_versions_BT[window],
        position_ids_BT=batch.position_ids_BT[window],
        segment_ids_BT=segment_ids_BT,
        num_loss_tokens=int(batch.loss_mask_BT[window].sum()),
        num_samples=len(np.unique(segment_ids_BT[segment_ids_BT > 0])),
    )


__all__ = ["TrainBatch", "TrainingSample", "collate", "micro_batches", "minibatches", "to_samples"]
