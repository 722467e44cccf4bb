"""Turns trajectories into training samples, and samples into batches.

Dimension suffixes: T tokens of a sample. In a batch: M samples, S tokens of all samples end to end,
N loss tokens among these. Arrays are NumPy's, so that a batch crosses a process boundary without a
copy and this module loads no torch.

The tokens are the engine's own (`Turn.prompt_ids`, `Completion.token_ids`), laid end to end; this
module never handles text. `loss_mask` is 1 exactly for the tokens that the engine sampled, except
those that `to_samples` finds too old or trained on before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.arrays import (
    FloatArray,
    Growing,
    IntArray,
    MaskArray,
    Ragged,
    floats,
    ints,
    mask,
    same_fields,
)
from agentrl.trajectory import Trajectory, Truncated, Turn

N = TypeVar("N", bound=np.generic)


class Credits(Protocol):
    """What the advantages of a batch come from: its groups, and the algorithm that compares their
    members.

    A batch has it where its tokens cost something that is known only later, such as the distance
    from a reference, and that has to be taken off the rewards before these are compared.
    """

    def advantages(self, costs: Mapping[int, Sequence[float]]) -> Sequence[float | Sequence[float]]:
        """The advantages of all members of all groups, by their number, when their turns have cost
        so much.

        `costs`: of each turn of a member, by its number; others cost nothing.
        """
        ...


_BY_TOKEN = (
    "token_ids",
    "loss_mask",
    "rollout_logprobs",
    "advantages",
    "policy_versions",
    "turn_ids",
)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One token sequence to train on. All fields become immutable arrays of equal length T.

    Where `loss_mask` is 0, `advantages` is 0. For prompt tokens `rollout_logprobs` is 0 and
    `policy_versions` is -1. `turn_ids` is the number of a token's turn; prompt tokens belong to the
    turn that answers them. `support`: the ids that each token was sampled from
    (`Completion.support`); by default the whole vocabulary. `experts`: those that the engine chose
    for each token (`Completion.experts`); by default unknown.

    `rewards`: what was earned right after a token, such as a turn's reward at its last token; by
    default nothing. `tail_ids`: the tokens that follow the last one of a truncated trajectory
    (`Trajectory.tail_ids`). If `continues`, the sample goes on with the trajectory of the sample
    before it, which forked. `group` is the number of its group. `credits`: what its advantages come
    from, if its tokens cost something; its trajectory is number `member` there.

    Raises:
        ValueError: the lengths differ, there is no token, the first token carries loss (nothing
            predicts it), or a loss token's logprob or advantage is not a finite number.
    """

    token_ids: IntArray
    loss_mask: MaskArray
    rollout_logprobs: FloatArray
    advantages: FloatArray
    policy_versions: IntArray
    turn_ids: IntArray
    support: Ragged | None = None
    experts: Ragged | None = None
    rewards: FloatArray | None = None
    truncated: bool = False
    tail_ids: IntArray = field(default_factory=lambda: ints(()))
    continues: bool = False
    group: int = 0
    credits: Credits | None = None
    member: int = 0

    __eq__ = same_fields

    def __post_init__(self) -> None:
        for name in ("token_ids", "policy_versions", "turn_ids", "tail_ids"):
            object.__setattr__(self, name, ints(getattr(self, name)))
        for name in ("rollout_logprobs", "advantages"):
            object.__setattr__(self, name, floats(getattr(self, name)))
        object.__setattr__(self, "loss_mask", mask(self.loss_mask))
        if self.rewards is not None:
            object.__setattr__(self, "rewards", floats(self.rewards))
        by_token = {
            name: getattr(self, name) for name in (*_BY_TOKEN, "support", "experts", "rewards")
        }
        lengths = {name: len(values) for name, values in by_token.items() if values is not None}
        if len(set(lengths.values())) != 1 or not len(self.token_ids):
            raise ValueError(
                "a training sample needs one or more tokens and fields of equal length, got"
                f" {lengths}"
            )
        if self.loss_mask[0]:
            raise ValueError(
                "the first token of a training sample cannot carry loss, because no token before it"
                " predicts it: give the first turn a prompt (a start token is enough)"
            )
        for name in ("rollout_logprobs", "advantages"):
            values_T: FloatArray = getattr(self, name)
            broken = np.flatnonzero(self.loss_mask & ~np.isfinite(values_T))
            if len(broken):
                position = int(broken[0])
                raise ValueError(
                    f"{name}[{position}] is {values_T[position]}; every loss token needs a finite"
                    " number"
                )


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Samples laid end to end. A trainer packs them into micro-batches
    (`agentrl/trainers/packing.py`).

    `lengths_M` is the number of tokens of each sample. Logprobs and advantages cover only the loss
    tokens, in order. `support_N` are the ids that each loss token was sampled from; an empty row is
    the whole vocabulary. `experts_N` are the experts that the engine chose for it; an empty row
    where they are unknown.

    `weights_N`: the trainer multiplies each token's loss with it; 1 unless an algorithm says
    otherwise, and 0 for what only a critic learns from again
    (`agentrl/estimation/episode_buffer.py`). `turns_N` is the number of each token's turn in its
    trajectory, and `rewards_N` what was earned between it and the next loss token. `trajectories_M`
    numbers the trajectories: samples of one have the same number, and lie in order. `truncated_M`:
    whether a sample is the last one of a truncated trajectory; `tails_M` are the tokens after its
    end. `groups_M` are the numbers of the samples' groups. `reference_logprobs_N` are the engine's
    until the run's reference, if any, has computed its own (`agentrl/estimation/advisors.py`).
    `credits` is what the advantages come from, where tokens cost something; `members_J` are the
    numbers of the trajectories there. Parts of a batch, and batches that are joined or ordered,
    have none.
    """

    tokens_S: IntArray
    loss_mask_S: MaskArray
    lengths_M: IntArray
    rollout_logprobs_N: FloatArray
    reference_logprobs_N: FloatArray
    advantages_N: FloatArray
    support_N: Ragged
    experts_N: Ragged
    weights_N: FloatArray
    turns_N: IntArray
    rewards_N: FloatArray
    trajectories_M: IntArray
    truncated_M: MaskArray
    tails_M: Ragged
    groups_M: IntArray
    credits: Credits | None = None
    members_J: IntArray = field(default_factory=lambda: ints(()))

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

    @property
    def trajectories_N(self) -> IntArray:
        """The number of each loss token's trajectory."""
        return np.repeat(self.trajectories_M, self.loss_tokens_M)

    @property
    def groups_of_trajectories(self) -> IntArray:
        """The number of each trajectory's group, by its number."""
        first_M = np.flatnonzero(np.diff(self.trajectories_M, prepend=-1))
        return self.groups_M[first_M]

    @property
    def tokens_of_trajectories(self) -> IntArray:
        """The number of loss tokens of each trajectory, by its number."""
        return np.bincount(
            self.trajectories_N, minlength=int(self.trajectories_M.max()) + 1
        ).astype(np.int32)

    def charged(self, cost_N: FloatArray) -> "TrainBatch":
        """The batch with the advantages that its trajectories have when each loss token has cost so
        much.

        What a turn's tokens cost is taken off its reward, before rewards are compared or
        normalised.

        Raises:
            ValueError: it is not known what the advantages come from.
        """
        if self.credits is None:
            raise ValueError(
                "what tokens cost (algorithm.kl_reward) is taken off the rewards before advantages"
                " are computed, and this batch was made without its groups: collate what"
                " `samples_of` gives for the algorithm, as a whole"
            )
        width, count = int(self.turns_N.max()) + 1, len(self.members_J)
        places_N = self.trajectories_N * width + self.turns_N
        costs_JK = np.bincount(places_N, weights=cost_N, minlength=count * width).reshape(
            count, width
        )
        members = self.members_J.tolist()
        found = self.credits.advantages(dict(zip(members, costs_JK.tolist(), strict=True)))
        advantages_JK = np.zeros((count, width))
        for row, advantage in zip(
            advantages_JK, (found[member] for member in members), strict=True
        ):
            if isinstance(advantage, float | int):
                row[:] = advantage
            else:
                row[: len(advantage)] = advantage[:width]
        return replace(self, advantages_N=floats(advantages_JK.reshape(-1)[places_N])).uncredited()

    def uncredited(self) -> "TrainBatch":
        """The batch without what its advantages come from, which would cross to other processes
        with it.
        """
        return replace(self, credits=None, members_J=ints(()))

    def lengthened(self, tokens_M: Ragged) -> "TrainBatch":
        """The batch with more tokens at the ends of its samples. They carry no loss."""
        at_S = np.repeat(np.cumsum(self.lengths_M), tokens_M.lengths)
        return replace(
            self,
            tokens_S=np.insert(self.tokens_S, at_S, tokens_M.values),
            loss_mask_S=np.insert(self.loss_mask_S, at_S, np.False_),
            lengths_M=self.lengths_M + tokens_M.lengths,
        )

    def with_loss_on(self, loss_mask_S: MaskArray) -> "TrainBatch":
        """The same tokens, of which others carry loss. What is known of those that stay is kept.

        Of new ones nothing is known, so their numbers are 0. They belong to the turn of the loss
        token before them.
        """
        stay_N, kept_N = self.loss_mask_S[loss_mask_S], loss_mask_S[self.loss_mask_S]
        before_N = np.cumsum(self.loss_mask_S)[loss_mask_S] - 1

        def moved(values_N: npt.NDArray[N]) -> npt.NDArray[N]:
            found_N = np.zeros(len(stay_N), values_N.dtype)
            found_N[stay_N] = values_N[kept_N]
            return found_N

        def moved_rows(rows_N: Ragged) -> Ragged:
            return Ragged(rows_N.values[kept_N[rows_N.row_of_value()]], moved(rows_N.lengths))

        rollout_logprobs_N = moved(self.rollout_logprobs_N)
        asked = self.reference_logprobs_N is not self.rollout_logprobs_N
        return replace(
            self,
            loss_mask_S=loss_mask_S,
            rollout_logprobs_N=rollout_logprobs_N,
            reference_logprobs_N=moved(self.reference_logprobs_N) if asked else rollout_logprobs_N,
            advantages_N=moved(self.advantages_N),
            support_N=moved_rows(self.support_N),
            experts_N=moved_rows(self.experts_N),
            weights_N=moved(self.weights_N),
            turns_N=np.append(self.turns_N, np.int32(0))[before_N],
            rewards_N=moved(self.rewards_N),
        )

    @classmethod
    def joined(cls, parts: Sequence["TrainBatch"]) -> "TrainBatch":
        """Several batches as one. Their trajectories and groups are numbered one after another."""
        firsts = np.cumsum(
            [0, *(int(part.groups_M.max()) + 1 for part in parts[:-1])], dtype=np.int32
        )
        trajectories_M = np.concatenate([part.trajectories_M for part in parts])
        begins_M = np.append(False, np.diff(trajectories_M) != 0)
        begins_M[np.cumsum([part.num_samples for part in parts])[:-1]] = True

        def laid(values: Callable[["TrainBatch"], npt.NDArray[N]]) -> npt.NDArray[N]:
            return np.concatenate([values(part) for part in parts])

        return cls(
            tokens_S=laid(lambda part: part.tokens_S),
            loss_mask_S=laid(lambda part: part.loss_mask_S),
            lengths_M=laid(lambda part: part.lengths_M),
            rollout_logprobs_N=laid(lambda part: part.rollout_logprobs_N),
            reference_logprobs_N=laid(lambda part: part.reference_logprobs_N),
            advantages_N=laid(lambda part: part.advantages_N),
            support_N=Ragged.joined([part.support_N for part in parts]),
            experts_N=Ragged.joined([part.experts_N for part in parts]),
            weights_N=laid(lambda part: part.weights_N),
            turns_N=laid(lambda part: part.turns_N),
            rewards_N=laid(lambda part: part.rewards_N),
            trajectories_M=np.cumsum(begins_M, dtype=np.int32),
            truncated_M=laid(lambda part: part.truncated_M),
            tails_M=Ragged.joined([part.tails_M for part in parts]),
            groups_M=np.concatenate(
                [part.groups_M + first for part, first in zip(parts, firsts, strict=True)]
            ),
        )

    def ordered(self, samples: Sequence[int]) -> "TrainBatch":
        """The same samples in another order, given by their indices."""
        of_M = [slice(number, number + 1) for number in samples]
        return self._taken(
            _pieces(self.lengths_M, samples), of_M, _pieces(self.loss_tokens_M, samples)
        )

    def split(self, counts: Sequence[int]) -> list["TrainBatch"]:
        """Split into parts of `counts` consecutive samples, which are views of the same memory."""
        lasts = np.cumsum(counts)
        ends_S, ends_N = (
            np.cumsum(self.lengths_M)[lasts - 1],
            np.cumsum(self.loss_tokens_M)[lasts - 1],
        )
        return [
            self._taken([slice(*of_S)], [slice(first, last)], [slice(*of_N)])
            for (first, last), of_S, of_N in zip(
                _borders(lasts), _borders(ends_S), _borders(ends_N), strict=True
            )
        ]

    def _taken(
        self, of_S: Sequence[slice], of_M: Sequence[slice], of_N: Sequence[slice]
    ) -> "TrainBatch":
        rollout_logprobs_N = _take(self.rollout_logprobs_N, of_N)
        asked = self.reference_logprobs_N is not self.rollout_logprobs_N
        return TrainBatch(
            tokens_S=_take(self.tokens_S, of_S),
            loss_mask_S=_take(self.loss_mask_S, of_S),
            lengths_M=_take(self.lengths_M, of_M),
            rollout_logprobs_N=rollout_logprobs_N,
            reference_logprobs_N=(
                _take(self.reference_logprobs_N, of_N) if asked else rollout_logprobs_N
            ),
            advantages_N=_take(self.advantages_N, of_N),
            support_N=self.support_N.take(of_N),
            experts_N=self.experts_N.take(of_N),
            weights_N=_take(self.weights_N, of_N),
            turns_N=_take(self.turns_N, of_N),
            rewards_N=_take(self.rewards_N, of_N),
            trajectories_M=_take(self.trajectories_M, of_M),
            truncated_M=_take(self.truncated_M, of_M),
            tails_M=self.tails_M.take(of_M),
            groups_M=_take(self.groups_M, of_M),
        )


def equal_parts(loss_tokens_M: Sequence[int] | IntArray, count: int) -> list[int]:
    """Split samples, in order, into at most `count` parts of nearly equal numbers of loss tokens;
    the parts' sizes.

    A part has at least one sample. Each border is the one nearest to where an exact split would be.
    """
    ends_M = np.cumsum(loss_tokens_M)
    count = min(count, len(ends_M))
    borders = [0]
    for part in range(1, count):
        wanted = ends_M[-1] * part / count
        after = int(np.searchsorted(ends_M, wanted)) + 1
        nearest = min(
            (after - 1, after),
            key=lambda border: abs((ends_M[border - 1] if border else 0) - wanted),
        )
        borders.append(min(max(nearest, borders[-1] + 1), len(ends_M) - (count - part)))
    return [last - first for first, last in pairwise([*borders, len(ends_M)])]


def to_samples(
    trajectory: Trajectory,
    advantage: float | Sequence[float],
    *,
    turn_rewards: Sequence[float] = (),
    oldest_version: int = 0,
) -> list[TrainingSample]:
    """Lay a trajectory's turns end to end; each fork starts a new sample.

    Every sampled token gets `advantage`, or that of its turn. `turn_rewards` are those of the
    turns, if there are any.

    `turn_ids` counts over the whole trajectory, so a sample after a fork starts with the forked
    turn's number. Tokens sampled by a version before `oldest_version`, and those of turns that have
    been trained on before, carry no loss, like prompt tokens. Samples that are left without a loss
    token by that are left out.

    Raises:
        ValueError: as `TrainingSample`; or there is not one advantage, or one for each turn.
    """
    count = len(trajectory.turns)
    advantages = (
        [float(advantage)] * count if isinstance(advantage, int | float) else list(advantage)
    )
    rewards = list(turn_rewards) or [0.0] * count
    if not len(advantages) == len(rewards) == count:
        raise ValueError(
            f"trajectory {trajectory.id!r} has {count} turns, but {len(advantages)} advantages and"
            f" {len(rewards)} rewards: give one advantage, or one for each turn"
        )
    pieces: list[list[_Played]] = []
    for number, played in enumerate(zip(trajectory.turns, advantages, rewards, strict=True)):
        if played[0].forked or not pieces:
            pieces.append([])
        pieces[-1].append(_Played(number, *played))
    samples = [_sample(piece, oldest_version, trajectory.trained_turns) for piece in pieces]
    if oldest_version > 0 or trajectory.trained_turns:
        samples = _without_lossless(samples)
    samples = [replace(sample, continues=number > 0) for number, sample in enumerate(samples)]
    if samples and isinstance(trajectory.status, Truncated):
        samples[-1] = replace(samples[-1], truncated=True, tail_ids=trajectory.tail_ids)
    return samples


def _without_lossless(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Those with a loss token. What the others earned counts for the last token before them."""
    kept: list[TrainingSample] = []
    for sample in samples:
        if sample.loss_mask.any():
            kept.append(sample)
        elif kept and sample.rewards is not None and kept[-1].rewards is not None:
            rewards_T = kept[-1].rewards.copy()
            rewards_T[-1] += sample.rewards.sum()
            kept[-1] = replace(kept[-1], rewards=rewards_T)
    return kept


class _Played(NamedTuple):
    """A turn with its number, and what its tokens are trained with."""

    number: int
    turn: Turn
    advantage: float
    reward: float


def _sample(piece: Sequence[_Played], oldest_version: int, first_turn: int) -> TrainingSample:
    length = sum(len(one.turn.prompt_ids) + len(one.turn.completion.token_ids) for one in piece)
    supports: list[Ragged] = []
    experts: list[Ragged] = []
    token_ids_T, turn_ids_T = np.empty(length, np.int32), np.empty(length, np.int32)
    policy_versions_T, rollout_logprobs_T = (
        np.full(length, -1, np.int32),
        np.zeros(length, np.float32),
    )
    advantages_T, rewards_T = np.zeros(length, np.float32), np.zeros(length, np.float32)
    end = 0
    for number, turn, advantage, reward in piece:
        begin = end
        shown = slice(begin, begin + len(turn.prompt_ids))
        end = shown.stop + len(turn.completion.token_ids)
        sampled = slice(shown.stop, end)
        token_ids_T[shown] = turn.prompt_ids
        token_ids_T[sampled] = turn.completion.token_ids
        rollout_logprobs_T[sampled] = turn.completion.logprobs
        policy_versions_T[sampled] = turn.completion.policy_versions
        advantages_T[sampled] = advantage
        turn_ids_T[begin:end] = number
        rewards_T[end - 1] += reward if number >= first_turn else 0.0
        supports += [Ragged.empty(len(turn.prompt_ids)), turn.completion.support_of_each]
        experts += [Ragged.empty(len(turn.prompt_ids)), turn.completion.experts_of_each]
    loss_mask_T = (policy_versions_T >= max(oldest_version, 0)) & (turn_ids_T >= first_turn)
    return TrainingSample(
        token_ids_T,
        loss_mask_T,
        rollout_logprobs_T,
        np.where(loss_mask_T, advantages_T, np.float32(0)),
        policy_versions_T,
        turn_ids_T,
        Ragged.joined(supports) if any(len(support.values) for support in supports) else None,
        Ragged.joined(experts) if any(len(chosen.values) for chosen in experts) else None,
        rewards_T,
    )


def collate(samples: Iterable[TrainingSample]) -> TrainBatch:
    """Lay samples end to end, in their order.

    Raises:
        ValueError: `samples` is empty.
    """
    tokens_S, loss_mask_S, rewards_S = Growing(np.int32), Growing(np.bool_), Growing(np.float32)
    rollout_logprobs_N, advantages_N, turns_N = (
        Growing(np.float32),
        Growing(np.float32),
        Growing(np.int32),
    )
    supports, experts = _GrowingRows(), _GrowingRows()
    lengths_M, begins_M, truncated_M, tails_M, groups_M, members_M = [], [], [], [], [], []
    credits_: Credits | None = None
    for sample in samples:  # one at a time: a step's samples are larger than its batch
        tokens_S.append(sample.token_ids)
        loss_mask_S.append(sample.loss_mask)
        rewards_S.append(
            np.zeros(len(sample.token_ids), np.float32)
            if sample.rewards is None
            else sample.rewards
        )
        rollout_logprobs_N.append(sample.rollout_logprobs[sample.loss_mask])
        advantages_N.append(sample.advantages[sample.loss_mask])
        turns_N.append(sample.turn_ids[sample.loss_mask])
        supports.append(_of_loss_tokens(sample.support, sample.loss_mask))
        experts.append(_of_loss_tokens(sample.experts, sample.loss_mask))
        lengths_M.append(len(sample.token_ids))
        begins_M.append(not sample.continues)
        truncated_M.append(sample.truncated)
        tails_M.append(sample.tail_ids)
        groups_M.append(sample.group)
        members_M.append(sample.member)
        credits_ = sample.credits
    if not lengths_M:
        raise ValueError(
            "there is no sample to collate: a batch needs at least one trainable trajectory"
        )
    logprobs_N, trajectories_M = (
        rollout_logprobs_N.values,
        np.cumsum([True, *begins_M[1:]], dtype=np.int32) - 1,
    )
    firsts_M = zip(members_M, [True, *begins_M[1:]], strict=True)
    members_J = [member for member, begins in firsts_M if begins and credits_ is not None]
    return TrainBatch(
        tokens_S.values,
        loss_mask_S.values,
        ints(lengths_M),
        logprobs_N,
        logprobs_N,
        advantages_N.values,
        supports.rows,
        experts.rows,
        floats(np.ones(len(logprobs_N))),
        turns_N.values,
        _after_loss_tokens(
            rewards_S.values, loss_mask_S.values, np.repeat(trajectories_M, lengths_M)
        ),
        ints(trajectories_M),
        mask(truncated_M),
        Ragged.of(tails_M),
        ints(groups_M),
        credits_,
        ints(members_J),
    )


def _after_loss_tokens(
    rewards_S: FloatArray, loss_mask_S: MaskArray, trajectories_S: IntArray
) -> FloatArray:
    """Rewards by loss token: each belongs to the last loss token up to it in its trajectory, whose
    choice earned it.

    What was earned before the first one is left out.
    """
    earned_S = np.flatnonzero(rewards_S)
    before_S = np.cumsum(loss_mask_S)[earned_S] - 1
    rewards_N = np.zeros(int(loss_mask_S.sum()), np.float32)
    known = before_S >= 0
    known[known] = trajectories_S[loss_mask_S][before_S[known]] == trajectories_S[earned_S[known]]
    np.add.at(rewards_N, before_S[known], rewards_S[earned_S[known]])
    return rewards_N


class _GrowingRows:
    """Rows that are collected a sample at a time."""

    def __init__(self) -> None:
        self._values, self._lengths = Growing(np.int32), Growing(np.int32)

    def append(self, rows: Ragged) -> None:
        self._values.append(rows.values)
        self._lengths.append(rows.lengths)

    @property
    def rows(self) -> Ragged:
        return Ragged(self._values.values, self._lengths.values)


def _of_loss_tokens(rows_T: Ragged | None, loss_mask_T: MaskArray) -> Ragged:
    if rows_T is None:
        return Ragged.empty(int(loss_mask_T.sum()))
    kept = loss_mask_T[rows_T.row_of_value()]
    return Ragged(rows_T.values[kept], rows_T.lengths[loss_mask_T])


def _take(values: npt.NDArray[N], pieces: Sequence[slice]) -> npt.NDArray[N]:
    """The values of several slices, one after another: a view if there is one."""
    return (
        values[pieces[0]]
        if len(pieces) == 1
        else np.concatenate([values[piece] for piece in pieces])
    )


def _pieces(lengths_M: IntArray, samples: Sequence[int]) -> list[slice]:
    """The slices of `samples` in values that lie end to end, `lengths_M` of them per sample."""
    ends_M = np.cumsum(lengths_M).tolist()
    return [slice(ends_M[m] - int(lengths_M[m]), ends_M[m]) for m in samples]


def _borders(ends: IntArray) -> Iterator[tuple[int, int]]:
    """(begin, end) of each of several consecutive parts, from their ends."""
    return pairwise([0, *ends.tolist()])


__all__ = ["TrainBatch", "TrainingSample", "collate", "to_samples"]
