"""Turns trajectories into training samples, and samples into batches.

Dimension suffixes: T tokens of a sample. In a batch: M samples, S tokens of all samples end to end,
N loss tokens among these. Arrays are NumPy's, so that a batch crosses a process boundary without a
copy and this module loads no torch.

The tokens are the engine's own (`Turn.prompt_ids`, `Completion.token_ids`), laid end to end; this
module never handles text. `loss_mask` is 1 exactly for the tokens that the engine sampled, except
those that `to_samples` finds too old, masked or trained on before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.tokens.arrays import (
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
from agentrl.tokens.expert_choices import ExpertChoices
from agentrl.tokens.placed_images import PlacedImage, check_placed, shared_length, shifted
from agentrl.trajectory import Trajectory, Truncated, Turn, columns_of

N = TypeVar("N", bound=np.generic)


Credits = Callable[[Mapping[int, Sequence[float]]], Sequence[float | Sequence[float]]]
"""The source of a batch's advantages: its groups, and the algorithm that compares their members.
Returns the advantages of all members of all groups, by their number, for these costs of turns: of
each turn of a member, by its number; others cost nothing.

A batch has it where its tokens cost something that is known only later, such as the distance from a
reference, and that has to be taken off the rewards before these are compared."""


_PER_TOKEN = {"axis": "T"}
"""Metadata of the fields of `TrainingSample` with an entry per token."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One token sequence to train on. All per-token fields become immutable arrays of length T.

    Example: the prompt `[5, 6]`, the answer `[7, 2]` with the logprobs -0.1 and -0.4 by version 3,
    and the advantage 0.5:

        token_ids          [ 5,  6,    7,    2]
        loss_mask          [ 0,  0,    1,    1]
        rollout_logprobs   [ 0,  0, -0.1, -0.4]
        advantages         [ 0,  0,  0.5,  0.5]
        policy_versions    [-1, -1,    3,    3]
        turn_ids           [ 0,  0,    0,    0]

    Raises:
        ValueError: the lengths differ, there is no token, the first token carries loss (nothing
            predicts it), or a loss token's logprob or advantage is not a finite number.
    """

    token_ids: IntArray = field(metadata=_PER_TOKEN)
    """[T] Prompts, answers and the environment's replies."""
    loss_mask: MaskArray = field(metadata=_PER_TOKEN)
    """[T] Whether a token carries loss."""
    rollout_logprobs: FloatArray = field(metadata=_PER_TOKEN)
    """[T] The engine's logprobs, in nats; 0 for tokens that it has not sampled."""
    advantages: FloatArray = field(metadata=_PER_TOKEN)
    """[T] Advantages, in units of the reward as the algorithm scales it; 0 without loss."""
    policy_versions: IntArray = field(metadata=_PER_TOKEN)
    """[T] The version of the weights that sampled a token; -1 for tokens of a prompt."""
    turn_ids: IntArray = field(metadata=_PER_TOKEN)
    """[T] The number of a token's turn in its trajectory. A prompt belongs to the turn that answers
    it.
    """
    support: Ragged | None = field(default=None, metadata=_PER_TOKEN)
    """[T] The ids that each token was sampled from (`Completion.support`); None or an empty row for
    the whole vocabulary.
    """
    rewards: FloatArray | None = field(default=None, metadata=_PER_TOKEN)
    """[T] Rewards earned right after a token, such as a turn's at its last token; None for none."""
    truncated: bool = False
    """True if it ends a truncated trajectory."""
    tail_ids: IntArray = field(default_factory=lambda: ints(()))
    """The tokens after the end of a truncated trajectory (`Trajectory.tail_ids`)."""
    experts: ExpertChoices | None = None
    """The experts that engines chose for its tokens (`Completion.experts`), as far as they are
    known."""
    continues: bool = False
    """True if it continues the trajectory of the sample before it, which forked."""
    group: int = 0
    """The number of its group in the batch."""
    credits: Credits | None = None
    """The source of its advantages, if its tokens cost something."""
    member: int = 0
    """The number of its trajectory in `credits`."""
    images: tuple[PlacedImage, ...] = ()
    """The pictures in its tokens, and in `tail_ids` after these."""

    __eq__ = same_fields

    def __post_init__(self) -> None:
        for name in ("token_ids", "policy_versions", "turn_ids", "tail_ids"):
            object.__setattr__(self, name, ints(getattr(self, name)))
        for name in ("rollout_logprobs", "advantages"):
            object.__setattr__(self, name, floats(getattr(self, name)))
        object.__setattr__(self, "loss_mask", mask(self.loss_mask))
        if self.rewards is not None:
            object.__setattr__(self, "rewards", floats(self.rewards))
        lengths: dict[str, int] = {}
        for of_class in fields(self):
            values = getattr(self, of_class.name)
            if of_class.metadata == _PER_TOKEN and values is not None:
                lengths[of_class.name] = len(values)
        if len(set(lengths.values())) != 1 or not len(self.token_ids):
            raise ValueError(
                "a training sample needs one or more tokens and fields of equal length, got"
                f" {lengths}"
            )
        whole = len(self.token_ids) + len(self.tail_ids)
        check_placed(self.images, whole, "a training sample")
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


@dataclass(frozen=True, slots=True)
class Column:
    """The layout of a column of `TrainBatch`. Whatever takes, joins, inserts or collects columns
    reads it, so a new per-token number costs one field there.
    """

    axis: Literal["S", "N", "M", "J"]
    """The dimension that the entries run over."""
    dtype: type[np.generic] = np.int32
    """The type of an entry, or of the values in a row."""
    ragged: bool = False
    """True if the entries are rows of different lengths."""
    source: str = ""
    """The field of `TrainingSample` that it is collected from; "" if it is computed."""
    inherits: bool = False
    """True if a new loss token has the entry of the loss token before it, rather than 0."""

    def zeros(self, count: int) -> Any:
        """`count` entries of which nothing is known."""
        return Ragged.empty(count) if self.ragged else np.zeros(count, self.dtype)


def _column(column: Column) -> dict[str, Column]:
    """The metadata of a field that is a column."""
    return {"column": column}


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Samples laid end to end. A trainer packs them into micro-batches
    (`agentrl/trainers/packing.py`).

    Numbers that only matter for the loss have an entry per loss token, in order. Parts of a batch,
    and batches that are joined or ordered, have no `credits`.

    Example: the sample of `TrainingSample` twice, as two members of a group:

        tokens_S             [5, 6, 7, 2, 5, 6, 7, 2]
        loss_mask_S          [0, 0, 1, 1, 0, 0, 1, 1]
        lengths_M            [4, 4]
        rollout_logprobs_N   [-0.1, -0.4, -0.1, -0.4]
        trajectories_M       [0, 1]
        groups_M             [0, 0]
    """

    tokens_S: IntArray = field(metadata=_column(Column("S", source="token_ids")))
    """[S] Token ids of all samples."""
    loss_mask_S: MaskArray = field(metadata=_column(Column("S", np.bool_, source="loss_mask")))
    """[S] Whether a token carries loss."""
    lengths_M: IntArray = field(metadata=_column(Column("M")))
    """[M] Tokens of each sample."""
    rollout_logprobs_N: FloatArray = field(
        metadata=_column(Column("N", np.float32, source="rollout_logprobs"))
    )
    """[N] The engine's logprobs, in nats."""
    reference_logprobs_N: FloatArray = field(metadata=_column(Column("N", np.float32)))
    """[N] The reference's logprobs, in nats. The engine's, as the same array, until the run's
    reference has computed its own (`agentrl/estimation/advisors.py`).
    """
    advantages_N: FloatArray = field(metadata=_column(Column("N", np.float32, source="advantages")))
    """[N] Advantages, in units of the reward as the algorithm scales it."""
    support_N: Ragged = field(metadata=_column(Column("N", ragged=True, source="support")))
    """[N] The ids that each token was sampled from; an empty row is the whole vocabulary."""
    weights_N: FloatArray = field(metadata=_column(Column("N", np.float32)))
    """[N] Factors of the tokens' losses: 1 unless an algorithm sets others, and 0 for tokens that
    only a critic learns from again (`agentrl/estimation/episode_buffer.py`).
    """
    turns_N: IntArray = field(metadata=_column(Column("N", source="turn_ids", inherits=True)))
    """[N] The number of each token's turn in its trajectory."""
    versions_N: IntArray = field(
        metadata=_column(Column("N", source="policy_versions", inherits=True))
    )
    """[N] The version of the weights that sampled each token."""
    rewards_N: FloatArray = field(metadata=_column(Column("N", np.float32)))
    """[N] Rewards earned between a loss token and the next one of its trajectory."""
    trajectories_M: IntArray = field(metadata=_column(Column("M")))
    """[M] Numbers of the samples' trajectories. Samples of one trajectory lie in order."""
    truncated_M: MaskArray = field(metadata=_column(Column("M", np.bool_, source="truncated")))
    """[M] Whether a sample ends a truncated trajectory."""
    tails_M: Ragged = field(metadata=_column(Column("M", ragged=True, source="tail_ids")))
    """[M] The tokens after the end of a truncated trajectory."""
    groups_M: IntArray = field(metadata=_column(Column("M", source="group")))
    """[M] Numbers of the samples' groups."""
    experts_M: npt.NDArray[np.object_] = field(
        metadata=_column(Column("M", np.object_, source="experts"))
    )
    """[M] The experts that engines chose for the tokens of each sample, an `ExpertChoices`; None if
    nothing is known of them. Nothing is copied from one batch to another, and ranks read them."""
    images_M: npt.NDArray[np.object_] = field(
        metadata=_column(Column("M", np.object_, source="images"))
    )
    """[M] The pictures in the tokens of each sample, and in its tail after these: a tuple of
    `PlacedImage`, at positions in the sample."""
    credits: Credits | None = None
    """The source of the advantages, where tokens cost something."""
    members_J: IntArray = field(default_factory=lambda: ints(()), metadata=_column(Column("J")))
    """[J] The numbers of the trajectories in `credits`; empty without."""

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
        found = self.credits(dict(zip(members, costs_JK.tolist(), strict=True)))
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

    def without_experts(self) -> "TrainBatch":
        """The batch without what is known of its tokens' experts, for those who do not ask."""
        return replace(self, experts_M=np.full(self.num_samples, None))

    def lengthened(self, tokens_M: Ragged) -> "TrainBatch":
        """The batch with more tokens at the ends of its samples. They carry no loss."""
        at_S = np.repeat(np.cumsum(self.lengths_M), tokens_M.lengths)
        inserted: dict[str, Any] = {}
        for name, column in columns("S").items():
            new = tokens_M.values if name == "tokens_S" else column.zeros(len(at_S))
            inserted[name] = np.insert(getattr(self, name), at_S, new)
        return replace(self, **inserted, lengths_M=self.lengths_M + tokens_M.lengths)

    def with_loss_on(self, loss_mask_S: MaskArray) -> "TrainBatch":
        """The same tokens, of which others carry loss. The numbers of those that stay are kept.

        The numbers of new ones are 0, and they belong to the turn of the loss token before them.
        """
        stay_N, kept_N = self.loss_mask_S[loss_mask_S], loss_mask_S[self.loss_mask_S]
        before_N = np.cumsum(self.loss_mask_S)[loss_mask_S] - 1

        def move(column: Column, values_N: Any) -> Any:
            if column.ragged:
                kept = kept_N[values_N.row_of_value()]
                return Ragged(values_N.values[kept], move(Column("N"), values_N.lengths))
            if column.inherits:
                # Before the first loss token the index is -1: the 0 that is appended.
                return np.append(values_N, column.dtype(0))[before_N]
            moved_N = column.zeros(len(stay_N))
            moved_N[stay_N] = values_N[kept_N]
            return moved_N

        moved = self._map("N", move)
        return replace(self, loss_mask_S=loss_mask_S, **moved)

    @classmethod
    def joined(cls, parts: Sequence["TrainBatch"]) -> "TrainBatch":
        """Several batches as one. Their trajectories and groups are numbered one after another."""
        firsts = np.cumsum(
            [0, *(int(part.groups_M.max()) + 1 for part in parts[:-1])], dtype=np.int32
        )
        trajectories_M = np.concatenate([part.trajectories_M for part in parts])
        begins_M = np.append(False, np.diff(trajectories_M) != 0)
        begins_M[np.cumsum([part.num_samples for part in parts])[:-1]] = True

        laid: dict[str, Any] = {}
        for name, column in columns("S", "N", "M").items():
            of_parts = [getattr(part, name) for part in parts]
            laid[name] = Ragged.joined(of_parts) if column.ragged else np.concatenate(of_parts)
        laid["trajectories_M"] = np.cumsum(begins_M, dtype=np.int32)
        laid["groups_M"] = laid["groups_M"] + np.repeat(
            firsts, [part.num_samples for part in parts]
        )
        return cls(**laid)

    def ordered(self, samples: Sequence[int]) -> "TrainBatch":
        """The same samples in another order, given by their indices."""
        pieces = {
            "S": _pieces(self.lengths_M, samples),
            "M": [slice(number, number + 1) for number in samples],
            "N": _pieces(self.loss_tokens_M, samples),
        }
        return self._take(pieces)

    def split(self, counts: Sequence[int]) -> list["TrainBatch"]:
        """Split into parts of `counts` consecutive samples, which are views of the same memory."""
        lasts = np.cumsum(counts, dtype=np.int64)
        ends_S, ends_N = _ends(self.lengths_M)[lasts], _ends(self.loss_tokens_M)[lasts]
        return [
            self._take({"S": [slice(*of_S)], "M": [slice(first, last)], "N": [slice(*of_N)]})
            for (first, last), of_S, of_N in zip(
                _borders(lasts), _borders(ends_S), _borders(ends_N), strict=True
            )
        ]

    def _take(self, pieces: Mapping[str, Sequence[slice]]) -> "TrainBatch":
        """The entries of several slices of each axis, one slice after another."""

        def take(column: Column, values: Any) -> Any:
            if column.ragged:
                return values.take(pieces[column.axis])
            return _take(values, pieces[column.axis])

        return TrainBatch(**self._map("S", take), **self._map("M", take), **self._map("N", take))

    def _map(self, axis: str, change: Callable[[Column, Any], Any]) -> dict[str, Any]:
        """The changed columns of an axis, by name. Columns that are the same array stay so: as long
        as no reference was asked, its logprobs cost nothing.
        """
        changed: dict[str, Any] = {}
        by_array: dict[int, Any] = {}
        for name, column in columns(axis).items():
            values = getattr(self, name)
            if id(values) not in by_array:
                by_array[id(values)] = change(column, values)
            changed[name] = by_array[id(values)]
        return changed


@cache
def columns(*axes: str) -> Mapping[str, Column]:
    """The columns of `TrainBatch` that run over these axes, by name."""
    by_name: dict[str, Column] = {}
    for of_class in fields(TrainBatch):
        column = of_class.metadata.get("column")
        if column is not None and column.axis in axes:
            by_name[of_class.name] = column
    return by_name


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
    turn's number. Tokens sampled by a version before `oldest_version`, those of turns that have
    been trained on before, and those of turns that are not trained (`Turn.trained`) carry no loss,
    like prompt tokens. Samples that are left without a loss token by that are left out.

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
    samples: list[TrainingSample] = []
    for sample in _lay_turns(trajectory, floats(advantages), floats(rewards), oldest_version):
        samples.append(_inherit_experts(samples, sample))
    masked = not columns_of(trajectory.turns).trained_K.all()
    if oldest_version > 0 or trajectory.trained_turns or masked:
        samples = _drop_lossless(samples)
    samples = [replace(sample, continues=number > 0) for number, sample in enumerate(samples)]
    if samples and isinstance(trajectory.status, Truncated):
        # A critic reads the value of the end after the tokens that would have come next.
        last = samples[-1]
        images = (*last.images, *shifted(trajectory.tail_images, len(last.token_ids)))
        samples[-1] = replace(last, truncated=True, tail_ids=trajectory.tail_ids, images=images)
    return samples


def _inherit_experts(before: Sequence[TrainingSample], sample: TrainingSample) -> TrainingSample:
    """The sample with the experts of its beginning, if the engine had that in its prefix cache:
    they were chosen when it computed the samples before.
    """
    if sample.experts is None or not sample.experts.known_from:
        return sample
    begun = [
        other.experts.until(_shared_tokens(other, sample))
        for other in before
        if other.experts is not None
    ]
    return replace(sample, experts=ExpertChoices.joined([sample.experts, *begun]))


def _shared_tokens(one: TrainingSample, other: TrainingSample) -> int:
    length = min(len(one.token_ids), len(other.token_ids))
    differs = one.token_ids[:length] != other.token_ids[:length]
    length = int(differs.argmax()) if differs.any() else length
    return shared_length(one.images, other.images, length)


def _drop_lossless(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with a loss token. Rewards of the others go to the last token before them."""
    kept: list[TrainingSample] = []
    for sample in samples:
        if sample.loss_mask.any():
            kept.append(sample)
        elif kept and sample.rewards is not None and kept[-1].rewards is not None:
            rewards_T = kept[-1].rewards.copy()
            rewards_T[-1] += sample.rewards.sum()
            kept[-1] = replace(kept[-1], rewards=rewards_T)
    return kept


def _lay_turns(
    trajectory: Trajectory, advantages_K: FloatArray, rewards_K: FloatArray, oldest_version: int
) -> Iterator[TrainingSample]:
    """A sample from each fork to the next one. `K`: turns; `P`: sampled tokens; here, `T` are the
    tokens of all samples.
    """
    columns = columns_of(trajectory.turns)
    if not len(columns):
        return
    numbers_K = np.arange(len(columns), dtype=np.int32)
    new_K = numbers_K >= trajectory.trained_turns
    lengths_K = columns.shown_K + columns.sampled_K
    ends_K = np.cumsum(lengths_K)
    sampled_T = columns.sampled_T
    versions_T = np.full(len(sampled_T), -1, np.int32)
    versions_T[sampled_T] = columns.versions_P
    logprobs_T = np.zeros(len(sampled_T), np.float32)
    logprobs_T[sampled_T] = columns.logprobs_P
    # Tokens of prompts have the version -1, so they carry no loss either.
    loss_mask_T = versions_T >= max(oldest_version, 0)
    loss_mask_T &= np.repeat(columns.trained_K & new_K, lengths_K)
    advantages_T = np.where(loss_mask_T, np.repeat(advantages_K, lengths_K), np.float32(0))
    rewards_T = np.zeros(len(sampled_T), np.float32)
    np.add.at(rewards_T, ends_K - 1, np.where(new_K, rewards_K, np.float32(0)))
    turn_ids_T = np.repeat(numbers_K, lengths_K)
    support_T = None if columns.support_P is None else columns.support_P.spread(sampled_T)
    # A sample from each fork to the next; the first turn begins one in any case.
    begins_K = np.flatnonzero(columns.forked_K)
    starts = [0, *begins_K[begins_K > 0].tolist()]
    for first, stop in pairwise([*starts, len(columns)]):
        span = slice(int(ends_K[first] - lengths_K[first]), int(ends_K[stop - 1]))
        support = None if support_T is None else support_T.take([span])
        yield TrainingSample(
            columns.tokens_T[span],
            loss_mask_T[span],
            logprobs_T[span],
            advantages_T[span],
            versions_T[span],
            turn_ids_T[span],
            support if support is not None and len(support.values) else None,
            rewards_T[span],
            experts=ExpertChoices.joined(
                [turn.completion.experts for turn in trajectory.turns[first:stop]]
            )
            if columns.has_experts
            else None,
            images=_images_of(trajectory.turns[first:stop]) if columns.has_images else (),
        )


def _images_of(turns: Sequence[Turn]) -> tuple[PlacedImage, ...]:
    """The pictures of turns that lie end to end."""
    images: list[PlacedImage] = []
    end = 0
    for turn in turns:
        images += shifted(turn.images, end)
        end += len(turn.prompt_ids) + len(turn.completion.token_ids)
    return tuple(images)


def collate(samples: Iterable[TrainingSample]) -> TrainBatch:
    """Lay samples end to end, in their order.

    Raises:
        ValueError: `samples` is empty.
    """
    sourced = {name: each for name, each in columns("S", "N", "M").items() if each.source}
    collected: dict[str, Any] = {name: _collector(column) for name, column in sourced.items()}
    rewards_S = Growing(np.float32)
    lengths_M: list[int] = []
    begins_M: list[bool] = []
    members_M: list[int] = []
    credits_: Credits | None = None
    for sample in samples:  # one at a time: a step's samples are larger than its batch
        for name, column in sourced.items():
            values = getattr(sample, column.source)
            if column.axis == "N":
                values = _at_loss_tokens(values, sample.loss_mask)
            collected[name].append(values)
        zeros_T = np.zeros(len(sample.token_ids), np.float32)
        rewards_S.append(zeros_T if sample.rewards is None else sample.rewards)
        lengths_M.append(len(sample.token_ids))
        begins_M.append(not sample.continues)
        members_M.append(sample.member)
        credits_ = sample.credits
    if not lengths_M:
        raise ValueError(
            "there is no sample to collate: a batch needs at least one trainable trajectory"
        )
    begins_M[0] = True
    trajectories_M = np.cumsum(begins_M, dtype=np.int32) - 1
    members_J: list[int] = []
    if credits_ is not None:
        members_J = [member for member, begins in zip(members_M, begins_M, strict=True) if begins]
    laid = {name: _collected(column, collected[name]) for name, column in sourced.items()}
    trajectories_S = np.repeat(trajectories_M, lengths_M)
    return TrainBatch(
        **laid,
        lengths_M=ints(lengths_M),
        reference_logprobs_N=laid["rollout_logprobs_N"],
        weights_N=floats(np.ones(len(laid["rollout_logprobs_N"]))),
        rewards_N=_after_loss_tokens(rewards_S.values, laid["loss_mask_S"], trajectories_S),
        trajectories_M=ints(trajectories_M),
        credits=credits_,
        members_J=ints(members_J),
    )


def _collector(column: Column) -> Any:
    """An empty container that the values of a column are appended to, a sample at a time."""
    if column.axis == "M":
        return []
    return _GrowingRows() if column.ragged else Growing(column.dtype)


def _collected(column: Column, collector: Any) -> Any:
    """The column, of all that its collector has."""
    if column.axis != "M":
        return collector.values
    if column.ragged:
        return Ragged.of(collector)
    return filled_column(column.dtype, collector)


def filled_column(kind: type[np.generic], values: Sequence[Any]) -> npt.NDArray[Any]:
    """An immutable array with an entry per value, also where the values are sequences."""
    array = np.empty(len(values), kind)
    for place, value in enumerate(values):  # numpy would make a matrix of tuples
        array[place] = value
    array.flags.writeable = False
    return array


def _after_loss_tokens(
    rewards_S: FloatArray, loss_mask_S: MaskArray, trajectories_S: IntArray
) -> FloatArray:
    """Rewards by loss token: each belongs to the last loss token up to it in its trajectory, whose
    choice earned it.

    What was earned before the first one is left out.
    """
    earned_S = np.flatnonzero(rewards_S)
    # The index of the last loss token up to each reward, over the batch; -1 before the first. It
    # may belong to an earlier trajectory, which did not earn it.
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
    def values(self) -> Ragged:
        return Ragged(self._values.values, self._lengths.values)


def _at_loss_tokens(values_T: Any, loss_mask_T: MaskArray) -> Any:
    """The entries of the loss tokens; of rows that are None, empty ones."""
    if values_T is None:
        return Ragged.empty(int(loss_mask_T.sum()))
    if isinstance(values_T, Ragged):
        kept = loss_mask_T[values_T.row_of_value()]
        return Ragged(values_T.values[kept], values_T.lengths[loss_mask_T])
    return values_T[loss_mask_T]


def _take(values: npt.NDArray[N], pieces: Sequence[slice]) -> npt.NDArray[N]:
    """The values of several slices, one after another: a view if there is one."""
    if len(pieces) <= 1:
        return values[pieces[0]] if pieces else values[:0]
    return np.concatenate([values[piece] for piece in pieces])


def _ends(lengths_M: IntArray) -> npt.NDArray[np.int64]:
    """Where the first k samples end, for each k from 0 on."""
    return np.concatenate([[0], np.cumsum(lengths_M, dtype=np.int64)])


def _pieces(lengths_M: IntArray, samples: Sequence[int]) -> list[slice]:
    """The slices of `samples` in values that lie end to end, `lengths_M` of them per sample."""
    ends_M = np.cumsum(lengths_M).tolist()
    return [slice(ends_M[m] - int(lengths_M[m]), ends_M[m]) for m in samples]


def _borders(ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(begin, end) of each of several consecutive parts, from their ends."""
    return pairwise([0, *ends.tolist()])


__all__ = ["TrainBatch", "TrainingSample", "collate", "to_samples"]
