"""Trajectories become samples, and samples become batches, without losing or inventing a token."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, TrainingSample, collate, columns, to_samples
from agentrl.tokens.arrays import Ragged
from agentrl.trajectory import Completion, Task, Terminated, Trajectory, Turn

logprobs = st.floats(-20, 0, width=32)
token_ids = st.integers(1, 999)


@st.composite
def turns(draw: st.DrawFn, first: bool) -> Turn:
    forked = draw(st.booleans())
    prompt = draw(st.lists(token_ids, min_size=1 if first or forked else 0, max_size=6))
    sampled = draw(st.lists(token_ids, max_size=6))
    n = len(sampled)
    return Turn(
        prompt_ids=tuple(prompt),
        completion=Completion(
            token_ids=tuple(sampled),
            logprobs=tuple(draw(st.lists(logprobs, min_size=n, max_size=n))),
            policy_versions=tuple(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))),
            finish_reason="stop",
        ),
        reward=0.0,
        info={},
        forked=forked,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    played = tuple(draw(turns(first=number == 0)) for number in range(draw(st.integers(1, 5))))
    return Trajectory("t", Task("env", 0), played, Terminated())


@st.composite
def samples(draw: st.DrawFn) -> TrainingSample:
    mask = (0, *draw(st.lists(st.integers(0, 1), max_size=11)))
    # The structure is hypothesis', the values a generator's: drawn one by one, they would take most
    # of the test's time.
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kept = [rng.integers(1, 1000, int(rng.integers(0, 4)) * m).tolist() for m in mask]
    return TrainingSample(
        token_ids=tuple(rng.integers(1, 1000, len(mask)).tolist()),
        loss_mask=mask,
        rollout_logprobs=tuple(float(np.float32(rng.uniform(-20, 0))) if m else 0.0 for m in mask),
        advantages=tuple(float(np.float32(rng.uniform(-3, 3))) if m else 0.0 for m in mask),
        policy_versions=tuple(int(rng.integers(0, 10)) if m else -1 for m in mask),
        turn_ids=(0,) * len(mask),
        support=Ragged.of(kept) if any(kept) else None,
    )


sample_lists = st.lists(samples(), min_size=1, max_size=12)


def samples_of(batch: TrainBatch) -> list[TrainingSample]:
    """Read the samples back out of a batch."""
    read = []
    support = batch.support_N
    kept_N = [support.take([slice(n, n + 1)]).values.tolist() for n in range(len(support))]
    loss = iter(
        zip(batch.rollout_logprobs_N.tolist(), batch.advantages_N.tolist(), kept_N, strict=True)
    )
    ends = np.cumsum(batch.lengths_M)
    for end, length in zip(ends.tolist(), batch.lengths_M.tolist(), strict=True):
        mask = batch.loss_mask_S[end - length : end]
        values = [next(loss) if carries else (0.0, 0.0, []) for carries in mask]
        logprobs, advantages, kept = zip(*values, strict=True)
        tokens = batch.tokens_S[end - length : end]
        support = Ragged.of(kept) if any(kept) else None
        read.append(
            TrainingSample(tokens, mask, logprobs, advantages, mask - 1, (0,) * length, support)
        )
    assert next(loss, None) is None, "a loss token is left over"
    return read


def without_versions(listed: list[TrainingSample]) -> list[TrainingSample]:
    """Samples as a batch has them: it does not keep who sampled a token."""
    return [replace(sample, policy_versions=sample.loss_mask - 1) for sample in listed]


@given(trajectories(), st.floats(-2, 2, width=32))
def test_samples_are_the_turns_laid_end_to_end_and_forks_split_them(
    trajectory: Trajectory, advantage: float
) -> None:
    laid = to_samples(trajectory, advantage)
    forks = sum(turn.forked for turn in trajectory.turns[1:])
    assert len(laid) == 1 + forks
    tokens = [
        t for turn in trajectory.turns for t in (*turn.prompt_ids, *turn.completion.token_ids)
    ]
    assert [t for sample in laid for t in sample.token_ids] == tokens
    for sample in laid:
        first = trajectory.turns[sample.turn_ids[0]]
        assert first is trajectory.turns[0] or first.forked


@given(trajectories(), st.floats(-2, 2, width=32))
def test_the_loss_mask_covers_exactly_the_sampled_tokens(
    trajectory: Trajectory, advantage: float
) -> None:
    rows = [
        row
        for s in to_samples(trajectory, advantage)
        for row in zip(
            s.token_ids,
            s.loss_mask,
            s.rollout_logprobs,
            s.advantages,
            s.policy_versions,
            s.turn_ids,
            strict=True,
        )
    ]
    expected: list[tuple[float, ...]] = []
    for number, turn in enumerate(trajectory.turns):
        expected += [(token, 0, 0.0, 0.0, -1, number) for token in turn.prompt_ids]
        sampled = turn.completion
        expected += [
            (token, 1, logprob, advantage, version, number)
            for token, logprob, version in zip(
                sampled.token_ids, sampled.logprobs, sampled.policy_versions, strict=True
            )
        ]
    assert rows == expected


def test_what_tokens_were_sampled_from_stays_beside_them() -> None:
    cut = Completion((5, 6), (-1.0, -1.0), (0, 0), "stop", Ragged.of([(5, 9), (6,)]))
    whole = Completion((7,), (-1.0,), (0,), "stop")
    turns = tuple(Turn((1, 2), completion, 0.0, {}) for completion in (cut, whole))
    (sample,) = to_samples(Trajectory("t", Task("env", 0), turns, Terminated()), 1.0)
    assert sample.support == Ragged.of([(), (), (5, 9), (6,), (), (), ()])
    assert collate([sample]).support_N == Ragged.of([(5, 9), (6,), ()])
    assert collate([sample]).support_N.padded(-1).tolist() == [[5, 9], [6, -1], [-1, -1]]
    with pytest.raises(
        ValueError, match=r"token 1 of a completion, 6, is outside of what it was sampled from"
    ):
        replace(cut, support=Ragged.of([(5,), (5, 9)]))
    with pytest.raises(ValueError, match="as many rows of support, got 1"):
        replace(cut, support=Ragged.of([(5,)]))


def played(*turns: tuple[int, float, bool], **more: Any) -> Trajectory:
    """A trajectory of turns with so many tokens, a reward, and whether they fork."""
    made = [
        Turn(
            (1, 2),
            Completion((5,) * count, (-1.0,) * count, (number,) * count, "stop"),
            reward,
            {},
            forked,
        )
        for number, (count, reward, forked) in enumerate(turns)
    ]
    return Trajectory("t", Task("env", 0), tuple(made), more.pop("status", Terminated()), **more)


def test_each_turn_may_have_its_own_advantage_and_reward() -> None:
    (sample,) = to_samples(
        played((2, 0.0, False), (1, 0.0, False)), [0.5, -1.0], turn_rewards=[3.0, 4.0]
    )
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -1.0]
    batch = collate([sample])
    assert batch.turns_N.tolist() == batch.versions_N.tolist() == [0, 0, 1]
    assert batch.rewards_N.tolist() == [0, 3.0, 4.0]
    assert batch.weights_N.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="has 2 turns, but 3 advantages and 2 rewards"):
        to_samples(played((2, 0.0, False), (1, 0.0, False)), [0.5, -1.0, 0.0])


def test_a_reward_belongs_to_the_last_loss_token_before_it_of_the_same_trajectory() -> None:
    trajectory = played((1, 0.0, False), (2, 0.0, False), (1, 0.0, True))
    rewards = [1.0, 2.0, 4.0]
    whole = collate(to_samples(trajectory, 1.0, turn_rewards=rewards))
    assert whole.rewards_N.tolist() == [1.0, 0.0, 2.0, 4.0]
    assert whole.trajectories_M.tolist() == [0, 0]  # the last turn forked
    assert whole.tokens_of_trajectories.tolist() == [4]
    stale = to_samples(trajectory, 1.0, turn_rewards=rewards, oldest_version=1)
    # Nothing that is trained on earned the first.
    assert collate(stale).rewards_N.tolist() == [
        0.0,
        2.0,
        4.0,
    ]
    masked = [replace(stale[0], loss_mask=np.arange(7) == 5), stale[1]]
    assert collate(masked).rewards_N.tolist() == [2.0, 4.0]
    two = collate(
        [
            *to_samples(trajectory, 1.0, turn_rewards=rewards),
            *to_samples(played((1, 0.0, False)), 1.0),
        ]
    )
    assert two.trajectories_M.tolist() == [0, 0, 1]


def test_what_a_stale_fork_earned_counts_for_the_turn_before_it() -> None:
    trajectory = played((1, 0.0, False), (1, 0.0, True), (1, 0.0, True))
    versions = [3, 1, 3]
    turns = tuple(
        replace(turn, completion=replace(turn.completion, policy_versions=(version,)))
        for turn, version in zip(trajectory.turns, versions, strict=True)
    )
    samples = to_samples(
        replace(trajectory, turns=turns), 1.0, turn_rewards=[1.0, 2.0, 4.0], oldest_version=2
    )
    assert [sample.continues for sample in samples] == [False, True]
    assert collate(samples).rewards_N.tolist() == [3.0, 4.0]


@given(sample_lists, st.integers(0, 99))
def test_other_tokens_may_carry_loss_and_what_is_known_of_those_that_stay_is_kept(
    listed: list[TrainingSample], seed: int
) -> None:
    batch = collate(listed)
    chosen_S = np.random.default_rng(seed).random(len(batch.tokens_S)) < 0.5
    other = batch.with_loss_on(chosen_S)
    both_S = batch.loss_mask_S & chosen_S
    kept_N, stay_N = chosen_S[batch.loss_mask_S], batch.loss_mask_S[chosen_S]
    assert (
        other.num_loss_tokens == len(other.support_N) == len(other.turns_N) == int(chosen_S.sum())
    )
    assert other.rollout_logprobs_N[stay_N].tolist() == batch.rollout_logprobs_N[kept_N].tolist()
    assert not other.rollout_logprobs_N[~stay_N].any()
    assert not other.weights_N[~stay_N].any()
    assert other.with_loss_on(both_S).support_N == batch.with_loss_on(both_S).support_N
    assert (
        batch.with_loss_on(batch.loss_mask_S).advantages_N.tolist() == batch.advantages_N.tolist()
    )


@given(sample_lists, sample_lists)
def test_joined_batches_have_all_samples_and_number_what_belongs_together_by_turns(
    first: list[TrainingSample], second: list[TrainingSample]
) -> None:
    second = [replace(sample, group=number) for number, sample in enumerate(second)]
    second = [replace(sample, continues=number % 2 == 1) for number, sample in enumerate(second)]
    joined = TrainBatch.joined([collate(first), collate(second)])
    whole = collate([*first, *(replace(sample, group=1 + sample.group) for sample in second)])
    for field in fields(TrainBatch):
        one, other = getattr(joined, field.name), getattr(whole, field.name)
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, (
            field.name
        )
        assert not isinstance(one, np.ndarray) or one.dtype == other.dtype, field.name


def test_a_sampled_token_that_nothing_predicts_is_refused() -> None:
    completion = Completion((5,), (-1.0,), (0,), "stop")
    trajectory = Trajectory("t", Task("env", 0), (Turn((), completion, 0.0, {}),), Terminated())
    with pytest.raises(ValueError, match="give the first turn a prompt"):
        to_samples(trajectory, 1.0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused_before_it_can_reach_a_loss(wrong: float) -> None:
    good = TrainingSample((1, 2), (0, 1), (0.0, -1.0), (0.0, 1.0), (-1, 0), (0, 0))
    with pytest.raises(ValueError, match=r"advantages\[1\]"):
        replace(good, advantages=(0.0, wrong))
    with pytest.raises(ValueError, match=r"rollout_logprobs\[1\]"):
        replace(good, rollout_logprobs=(0.0, -wrong))


def test_unequal_lengths_and_empty_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="equal length"):
        TrainingSample((1, 2), (0, 1), (0.0, 0.0), (0.0, 1.0), (-1, 0), (0,))
    with pytest.raises(ValueError, match="one or more tokens"):
        TrainingSample((), (), (), (), (), ())


@given(sample_lists)
def test_a_batch_holds_every_token_of_every_sample_in_order(listed: list[TrainingSample]) -> None:
    batch = collate(iter(listed))
    assert samples_of(batch) == without_versions(listed)
    assert batch.num_loss_tokens == sum(sum(s.loss_mask) for s in listed)
    assert batch.loss_tokens_M.tolist() == [sum(s.loss_mask) for s in listed]
    assert batch.num_samples == len(listed)
    assert batch.reference_logprobs_N is batch.rollout_logprobs_N, "no reference was asked yet"
    arrays = (batch.tokens_S, batch.loss_mask_S, batch.rollout_logprobs_N, batch.advantages_N)
    assert (
        sum(array.nbytes for array in arrays) == 5 * len(batch.tokens_S) + 8 * batch.num_loss_tokens
    )


@given(sample_lists)
def test_what_stands_under_the_loss_mask_never_reaches_a_batch(
    listed: list[TrainingSample],
) -> None:
    soiled = [
        replace(
            sample,
            rollout_logprobs=np.where(sample.loss_mask, sample.rollout_logprobs, np.nan),
            advantages=np.where(sample.loss_mask, sample.advantages, np.inf),
        )
        for sample in listed
    ]
    clean, dirty = collate(listed), collate(soiled)
    assert all(
        np.array_equal(getattr(clean, f.name), getattr(dirty, f.name)) for f in fields(TrainBatch)
    )


@given(sample_lists, st.data())
def test_samples_are_put_in_order_and_split_whole(
    listed: list[TrainingSample], data: st.DataObject
) -> None:
    batch, listed = collate(listed), without_versions(listed)
    order = data.draw(st.permutations(range(len(listed))))
    asked = replace(batch, reference_logprobs_N=batch.rollout_logprobs_N - 1)
    for given_batch in (batch, asked):
        ordered = given_batch.ordered(order)
        assert samples_of(ordered) == [listed[number] for number in order]
        borders = data.draw(st.lists(st.integers(1, len(listed)), unique=True).map(sorted))
        # where the last border is the end, the last part is empty, and so is the first, if drawn
        counts = [int(n) for n in np.diff([0, *borders, len(listed)])]
        counts = [0] * data.draw(st.integers(0, 1)) + counts
        parts = ordered.split(counts)
        assert [part.num_samples for part in parts] == counts
        assert [sample for part in parts for sample in samples_of(part)] == samples_of(ordered)
        assert not any(part.tokens_S.base is None for part in parts), "a part is a copy"
        assert batch.ordered([]).num_samples == 0
        for part in parts:
            gap_N = part.rollout_logprobs_N - part.reference_logprobs_N
            np.testing.assert_allclose(gap_N, float(given_batch is asked), atol=1e-5)


def test_nothing_to_collate_says_so() -> None:
    with pytest.raises(ValueError, match="no sample to collate"):
        collate([])


@given(trajectory=trajectories(), oldest=st.integers(0, 6))
def test_tokens_before_the_oldest_version_are_context_and_all_others_carry_loss(trajectory, oldest):
    kept = to_samples(trajectory, 2.0, oldest_version=oldest)
    everything = to_samples(trajectory, 2.0)
    fresh = [
        v
        for sample in everything
        for v, m in zip(sample.policy_versions, sample.loss_mask, strict=True)
        if m
    ]
    assert sum(sum(sample.loss_mask) for sample in kept) == sum(
        version >= oldest for version in fresh
    )
    assert all(any(sample.loss_mask) for sample in kept) or oldest == 0
    for sample in kept:
        for version, mask, advantage in zip(
            sample.policy_versions, sample.loss_mask, sample.advantages, strict=True
        ):
            assert mask == (version >= max(oldest, 0))
            assert advantage == 2.0 * mask


@given(sample_lists, st.integers(0, 99))
def test_every_column_follows_its_axis_when_samples_are_cut_joined_ordered_and_lengthened(
    listed: list[TrainingSample], seed: int
) -> None:
    batch = collate(listed)
    counts = {"S": len(batch.tokens_S), "M": batch.num_samples, "N": batch.num_loss_tokens}
    order = np.random.default_rng(seed).permutation(batch.num_samples).tolist()
    ordered, parts = batch.ordered(order), batch.split([1] * batch.num_samples)
    back = ordered.ordered(np.argsort(order).tolist())
    same = batch.with_loss_on(batch.loss_mask_S)
    longer = batch.lengthened(Ragged.of([[7]] * batch.num_samples))
    axes = columns("S", "M", "N")
    uncovered = {field.name for field in fields(TrainBatch)} - axes.keys()
    assert uncovered == {"credits", "members_J"}, "a field without an axis is in no part of a batch"
    joined = TrainBatch.joined(parts)
    for name, column in axes.items():
        values = getattr(batch, name)
        assert name.endswith(f"_{column.axis}")
        assert len(values) == counts[column.axis]
        assert sum(len(getattr(part, name)) for part in parts) == len(values)
        for other in (back, same):
            assert np.array_equal(_flat(getattr(other, name)), _flat(values)), name
        if name not in ("trajectories_M", "groups_M"):  # these are numbered anew
            assert np.array_equal(_flat(getattr(joined, name)), _flat(values)), name
        added = batch.num_samples if column.axis == "S" else 0
        assert len(getattr(longer, name)) == len(values) + added
    assert longer.loss_tokens_M.tolist() == batch.loss_tokens_M.tolist()
    assert longer.lengths_M.tolist() == (batch.lengths_M + 1).tolist()


def _flat(values: np.ndarray | Ragged) -> np.ndarray:
    """The values of a column, and the lengths of its rows if it has rows."""
    if isinstance(values, Ragged):
        return np.concatenate([values.values, values.lengths])
    return values
