"""Trajectories to training samples to packed batches.

Dimension suffixes: T tokens of a sample; in a packed batch B rows and T columns; S tokens of all samples end to end;
M samples. Arrays are numpy, so that a batch crosses a process boundary without a copy and this module loads no torch.

The tokens are the engine's own (`Turn.prompt_ids`, `Completion.token_ids`), laid end to end; nothing here ever sees
text. `loss_mask` is one exactly where the engine sampled the token.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.arrays import FloatArray, IntArray, MaskArray, floats, ints, mask, same_fields
from agentrl.trajectory import Trajectory, Turn

IndexArray = npt.NDArray[np.int64]
_N = TypeVar("_N", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One token sequence to train on: immutable arrays of equal length T (any sequences become such arrays).

    Where `loss_mask` is 0, `rollout_logprobs` and `advantages` are 0 and `policy_versions` is -1.
    `turn_ids` numbers the turn a token belongs to (its prompt's tokens too).

    Raises:
        ValueError: the lengths differ, there is no token, the first token carries loss (nothing predicts it), or a
            loss token's logprob or advantage is not a finite number.
    """

    token_ids: IntArray
    loss_mask: MaskArray
    rollout_logprobs: FloatArray
    advantages: FloatArray
    policy_versions: IntArray
    turn_ids: IntArray

    __eq__ = same_fields

    def __post_init__(self) -> None:
        for name in ("token_ids", "policy_versions", "turn_ids"):
            object.__setattr__(self, name, ints(getattr(self, name)))
        for name in ("rollout_logprobs", "advantages"):
            object.__setattr__(self, name, floats(getattr(self, name)))
        object.__setattr__(self, "loss_mask", mask(self.loss_mask))
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(lengths.values())) != 1 or not len(self.token_ids):
            raise ValueError(f"a training sample needs one or more tokens and fields of equal length, got {lengths}")
        if self.loss_mask[0]:
            raise ValueError(
                "the first token of a training sample cannot carry loss, because no token stands before it to predict "
                "it from: give the first turn a prompt (a start token is enough)"
            )
        for name in ("rollout_logprobs", "advantages"):
            values_T: FloatArray = getattr(self, name)
            broken = np.flatnonzero(self.loss_mask & ~np.isfinite(values_T))
            if len(broken):
                position = int(broken[0])
                raise ValueError(f"{name}[{position}] is {values_T[position]}; every loss token needs a finite number")


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples packed into rows.

    `segment_ids_BT` numbers the samples from 1 over the whole batch (0 is padding); attention stays inside a segment.
    `position_ids_BT` restarts at 0 with each segment. A token is predicted from the token before it in its segment,
    so the first token of a segment never carries loss. `reference_logprobs_BT` are those of the model that the policy
    is kept near, where the run has one (`agentrl/learner.py`); until it was asked, the engine's.
    """

    tokens_BT: IntArray
    loss_mask_BT: MaskArray
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
    return [sample for sample in samples if sample.loss_mask.any()] if oldest_version > 0 else samples


def _sample(turns: Sequence[tuple[int, Turn]], advantage: float, oldest_version: int) -> TrainingSample:
    length = sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for _, turn in turns)
    token_ids_T, turn_ids_T = np.empty(length, np.int32), np.empty(length, np.int32)
    policy_versions_T, rollout_logprobs_T = np.full(length, -1, np.int32), np.zeros(length, np.float32)
    end = 0
    for number, turn in turns:
        begin = end
        shown = slice(begin, begin + len(turn.prompt_ids))
        end = shown.stop + len(turn.completion.token_ids)
        sampled = slice(shown.stop, end)
        token_ids_T[shown] = turn.prompt_ids
        token_ids_T[sampled] = turn.completion.token_ids
        rollout_logprobs_T[sampled] = turn.completion.logprobs
        policy_versions_T[sampled] = turn.completion.policy_versions
        turn_ids_T[begin:end] = number
    loss_mask_T = policy_versions_T >= max(oldest_version, 0)
    return TrainingSample(
        token_ids_T,
        loss_mask_T,
        rollout_logprobs_T,
        np.where(loss_mask_T, np.float32(advantage), np.float32(0)),
        policy_versions_T,
        turn_ids_T,
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
    rollout_logprobs_S = np.concatenate([s.rollout_logprobs for s in listed])
    flat = _Flat(
        tokens_S=np.concatenate([s.token_ids for s in listed]),
        loss_mask_S=np.concatenate([s.loss_mask for s in listed]),
        rollout_logprobs_S=rollout_logprobs_S,
        reference_logprobs_S=rollout_logprobs_S,
        advantages_S=np.concatenate([s.advantages for s in listed]),
        policy_versions_S=np.concatenate([s.policy_versions for s in listed]),
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
    loss_mask_S: MaskArray
    rollout_logprobs_S: FloatArray
    reference_logprobs_S: FloatArray
    advantages_S: FloatArray
    policy_versions_S: IntArray
    lengths_M: IndexArray

    def part(self, start: int, end: int, samples: IndexArray) -> "_Flat":
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
    rollout_logprobs_S = batch.rollout_logprobs_BT.ravel()[order_S]
    asked = batch.reference_logprobs_BT is not batch.rollout_logprobs_BT
    return _Flat(
        batch.tokens_BT.ravel()[order_S],
        batch.loss_mask_BT.ravel()[order_S],
        rollout_logprobs_S,
        batch.reference_logprobs_BT.ravel()[order_S] if asked else rollout_logprobs_S,
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
    """Pack, and copy each sample to its place."""
    lengths = [int(n) for n in flat.lengths_M]
    starts = [int(n) for n in np.cumsum(flat.lengths_M) - flat.lengths_M]
    rows = _pack(lengths, row_tokens)
    shape = (len(rows), max(sum(lengths[i] for i in row) for row in rows))
    spans = [(b, at, item) for b, row in enumerate(rows) for at, item in _laid_end_to_end(row, lengths)]

    def laid(values_S: npt.NDArray[_N], padding: float) -> npt.NDArray[_N]:
        values_BT = np.full(shape, padding, values_S.dtype)
        for b, at, item in spans:
            values_BT[b, at : at + lengths[item]] = values_S[starts[item] : starts[item] + lengths[item]]
        return values_BT

    position_ids_BT, segment_ids_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for b, at, item in spans:
        position_ids_BT[b, at : at + lengths[item]] = np.arange(lengths[item])
        segment_ids_BT[b, at : at + lengths[item]] = item + 1
    rollout_logprobs_BT = laid(flat.rollout_logprobs_S, 0)
    asked = flat.reference_logprobs_S is not flat.rollout_logprobs_S
    return TrainBatch(
        tokens_BT=laid(flat.tokens_S, pad_token_id),
        loss_mask_BT=laid(flat.loss_mask_S, False),
        rollout_logprobs_BT=rollout_logprobs_BT,
        reference_logprobs_BT=laid(flat.reference_logprobs_S, 0) if asked else rollout_logprobs_BT,
        advantages_BT=laid(flat.advantages_S, 0),
        policy_versions_BT=laid(flat.policy_versions_S, -1),
        position_ids_BT=position_ids_BT,
        segment_ids_BT=segment_ids_BT,
        num_loss_tokens=int(flat.loss_mask_S.sum()),
        num_samples=len(lengths),
    )


def _laid_end_to_end(row: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each sample of a row begins in it, and the sample."""
    at = 0
    for item in row:
        yield at, item
        at += lengths[item]


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
