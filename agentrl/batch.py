"""Turns trajectories into training samples, and samples into batches.

Dimension suffixes: T tokens of a sample. In a batch: M samples, S tokens of all samples end to end, N loss tokens among
these. Arrays are NumPy's, so that a batch crosses a process boundary without a copy and this module loads no torch.

The tokens are the engine's own (`Turn.prompt_ids`, `Completion.token_ids`), laid end to end; this module never handles
text. `loss_mask` is 1 exactly for the tokens that the engine sampled, except those that `to_samples` finds too old.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.arrays import FloatArray, Growing, IntArray, MaskArray, Ragged, floats, ints, mask, same_fields
from agentrl.trajectory import Trajectory, Turn

N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One token sequence to train on. All fields become immutable arrays of equal length T.

    Where `loss_mask` is 0, `advantages` is 0. For prompt tokens `rollout_logprobs` is 0 and `policy_versions` is -1.
    `turn_ids` is the number of a token's turn; prompt tokens belong to the turn that answers them. `support`: the ids
    that each token was sampled from (`Completion.support`); by default the whole vocabulary.

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
    support: Ragged | None = None

    __eq__ = same_fields

    def __post_init__(self) -> None:
        for name in ("token_ids", "policy_versions", "turn_ids"):
            object.__setattr__(self, name, ints(getattr(self, name)))
        for name in ("rollout_logprobs", "advantages"):
            object.__setattr__(self, name, floats(getattr(self, name)))
        object.__setattr__(self, "loss_mask", mask(self.loss_mask))
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self) if field.name != "support"}
        if self.support is not None:
            lengths["support"] = len(self.support)
        if len(set(lengths.values())) != 1 or not len(self.token_ids):
            raise ValueError(f"a training sample needs one or more tokens and fields of equal length, got {lengths}")
        if self.loss_mask[0]:
            raise ValueError(
                "the first token of a training sample cannot carry loss, because no token before it predicts it: "
                "give the first turn a prompt (a start token is enough)"
            )
        for name in ("rollout_logprobs", "advantages"):
            values_T: FloatArray = getattr(self, name)
            broken = np.flatnonzero(self.loss_mask & ~np.isfinite(values_T))
            if len(broken):
                position = int(broken[0])
                raise ValueError(f"{name}[{position}] is {values_T[position]}; every loss token needs a finite number")


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Samples laid end to end. A trainer packs them into rows (`agentrl/trainers/packing.py`).

    `lengths_M` is the number of tokens of each sample. Logprobs and advantages cover only the loss tokens, in order.
    `support_N` are the ids that each loss token was sampled from; an empty row is the whole vocabulary.
    `reference_logprobs_N` are the engine's until the run's reference, if any, has computed its own
    (`agentrl/advisors.py`).
    """

    tokens_S: IntArray
    loss_mask_S: MaskArray
    lengths_M: IntArray
    rollout_logprobs_N: FloatArray
    reference_logprobs_N: FloatArray
    advantages_N: FloatArray
    support_N: Ragged

    @property
    def num_samples(self) -> int:
        """The number of samples, M."""
        return len(self.lengths_M)

    @property
    def num_loss_tokens(self) -> int:
        """The number of loss tokens, N."""
        return len(self.rollout_logprobs_N)

    @property
    def loss_tokens_M(self) -> IntArray:
        """The number of loss tokens of each sample."""
        starts_M = np.cumsum(self.lengths_M) - self.lengths_M
        return np.add.reduceat(self.loss_mask_S, starts_M, dtype=np.int32)

    def ordered(self, samples: Sequence[int]) -> "TrainBatch":
        """The same samples in another order, given by their indices."""
        return self._taken(
            _pieces(self.lengths_M, samples),
            self.lengths_M[list(samples)],
            _pieces(self.loss_tokens_M, samples),
        )

    def split(self, counts: Sequence[int]) -> list["TrainBatch"]:
        """Split into parts of `counts` consecutive samples; the parts are views of the same memory."""
        lasts = np.cumsum(counts)
        ends_S, ends_N = np.cumsum(self.lengths_M)[lasts - 1], np.cumsum(self.loss_tokens_M)[lasts - 1]
        return [
            self._taken([slice(*of_S)], self.lengths_M[first:last], [slice(*of_N)])
            for (first, last), of_S, of_N in zip(_borders(lasts), _borders(ends_S), _borders(ends_N), strict=True)
        ]

    def _taken(self, of_S: Sequence[slice], lengths_M: IntArray, of_N: Sequence[slice]) -> "TrainBatch":
        rollout_logprobs_N = _take(self.rollout_logprobs_N, of_N)
        asked = self.reference_logprobs_N is not self.rollout_logprobs_N
        return TrainBatch(
            tokens_S=_take(self.tokens_S, of_S),
            loss_mask_S=_take(self.loss_mask_S, of_S),
            lengths_M=lengths_M,
            rollout_logprobs_N=rollout_logprobs_N,
            reference_logprobs_N=_take(self.reference_logprobs_N, of_N) if asked else rollout_logprobs_N,
            advantages_N=_take(self.advantages_N, of_N),
            support_N=self.support_N.take(of_N),
        )


def equal_parts(loss_tokens_M: Sequence[int] | IntArray, count: int) -> list[int]:
    """Split samples, in order, into at most `count` parts of nearly equal numbers of loss tokens; the parts' sizes.

    A part has at least one sample. Each border is the one nearest to where an exact split would be.
    """
    ends_M = np.cumsum(loss_tokens_M)
    count = min(count, len(ends_M))
    borders = [0]
    for part in range(1, count):
        wanted = ends_M[-1] * part / count
        after = int(np.searchsorted(ends_M, wanted)) + 1
        nearest = min((after - 1, after), key=lambda border: abs((ends_M[border - 1] if border else 0) - wanted))
        borders.append(min(max(nearest, borders[-1] + 1), len(ends_M) - (count - part)))
    return [last - first for first, last in pairwise([*borders, len(ends_M)])]


def to_samples(trajectory: Trajectory, advantage: float, *, oldest_version: int = 0) -> list[TrainingSample]:
    """Lay a trajectory's turns end to end; each fork starts a new sample. Every sampled token gets `advantage`.

    `turn_ids` counts over the whole trajectory, so a sample after a fork starts with the forked turn's number. Tokens
    sampled by a version before `oldest_version` carry no loss, like prompt tokens. If `oldest_version` is above 0,
    samples without a loss token are left out.

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
    supports: list[Ragged] = []
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
        supports += [Ragged.empty(len(turn.prompt_ids)), turn.completion.support_of_each]
    loss_mask_T = policy_versions_T >= max(oldest_version, 0)
    return TrainingSample(
        token_ids_T,
        loss_mask_T,
        rollout_logprobs_T,
        np.where(loss_mask_T, np.float32(advantage), np.float32(0)),
        policy_versions_T,
        turn_ids_T,
        Ragged.joined(supports) if any(len(support.values) for support in supports) else None,
    )


def collate(samples: Iterable[TrainingSample]) -> TrainBatch:
    """Lay samples end to end, in their order.

    Raises:
        ValueError: `samples` is empty.
    """
    tokens_S, loss_mask_S, lengths_M = Growing(np.int32), Growing(np.bool_), []
    rollout_logprobs_N, advantages_N = Growing(np.float32), Growing(np.float32)
    support_ids, support_lengths_N = Growing(np.int32), Growing(np.int32)
    for sample in samples:  # one at a time: a step's samples are larger than its batch
        tokens_S.append(sample.token_ids)
        loss_mask_S.append(sample.loss_mask)
        rollout_logprobs_N.append(sample.rollout_logprobs[sample.loss_mask])
        advantages_N.append(sample.advantages[sample.loss_mask])
        support = _support_of_loss_tokens(sample)
        support_ids.append(support.values)
        support_lengths_N.append(support.lengths)
        lengths_M.append(len(sample.token_ids))
    if not lengths_M:
        raise ValueError("there is no sample to collate: a batch needs at least one trainable trajectory")
    logprobs_N = rollout_logprobs_N.values
    return TrainBatch(
        tokens_S.values,
        loss_mask_S.values,
        ints(lengths_M),
        logprobs_N,
        logprobs_N,
        advantages_N.values,
        Ragged(support_ids.values, support_lengths_N.values),
    )


def _support_of_loss_tokens(sample: TrainingSample) -> Ragged:
    if sample.support is None:
        return Ragged.empty(int(sample.loss_mask.sum()))
    kept = sample.loss_mask[sample.support.row_of_value()]
    return Ragged(sample.support.values[kept], sample.support.lengths[sample.loss_mask])


def _take(values: npt.NDArray[N], pieces: Sequence[slice]) -> npt.NDArray[N]:
    """The values of several slices, one after another: a view if there is one."""
    return values[pieces[0]] if len(pieces) == 1 else np.concatenate([values[piece] for piece in pieces])


def _pieces(lengths_M: IntArray, samples: Sequence[int]) -> list[slice]:
    """The slices of `samples` in values that lie end to end, `lengths_M` of them per sample."""
    ends_M = np.cumsum(lengths_M).tolist()
    return [slice(ends_M[m] - int(lengths_M[m]), ends_M[m]) for m in samples]


def _borders(ends: IntArray) -> Iterator[tuple[int, int]]:
    """(begin, end) of each of several consecutive parts, from their ends."""
    return pairwise([0, *ends.tolist()])


__all__ = ["TrainBatch", "TrainingSample", "collate", "to_samples"]
