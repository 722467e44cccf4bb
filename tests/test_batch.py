"""Trajectories become samples, and samples become packed batches, without losing or inventing a token."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, TrainingSample, collate, micro_batches, minibatches, to_samples
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
    # The structure is hypothesis', the values a generator's: drawn one by one, they would take most of the test's time.
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return TrainingSample(
        token_ids=tuple(rng.integers(1, 1000, len(mask)).tolist()),
        loss_mask=mask,
        rollout_logprobs=tuple(float(np.float32(rng.uniform(-20, 0))) if m else 0.0 for m in mask),
        advantages=tuple(float(np.float32(rng.uniform(-3, 3))) if m else 0.0 for m in mask),
        policy_versions=tuple(int(rng.integers(0, 10)) if m else -1 for m in mask),
        turn_ids=(0,) * len(mask),
    )


sample_lists = st.lists(samples(), min_size=1, max_size=12)


def sample_of(batch: TrainBatch, segment: int) -> TrainingSample:
    """Read one segment back out of a batch."""
    rows, columns = np.nonzero(batch.segment_ids_BT == segment)
    assert len(set(rows)) == 1, "a sample crosses rows"
    assert list(columns) == list(range(columns[0], columns[-1] + 1)), "a sample is torn"
    assert list(batch.position_ids_BT[rows, columns]) == list(range(len(columns))), "positions restart at 0"
    return TrainingSample(
        token_ids=tuple(batch.tokens_BT[rows, columns].tolist()),
        loss_mask=tuple(batch.loss_mask_BT[rows, columns].tolist()),
        rollout_logprobs=tuple(batch.rollout_logprobs_BT[rows, columns].tolist()),
        advantages=tuple(batch.advantages_BT[rows, columns].tolist()),
        policy_versions=tuple(batch.policy_versions_BT[rows, columns].tolist()),
        turn_ids=(0,) * len(columns),
    )


def assert_holds(batch: TrainBatch, expected: list[TrainingSample], segments: list[int]) -> None:
    """The batch holds exactly these samples under these segment numbers, and inert padding."""
    assert sorted(set(batch.segment_ids_BT.ravel()) - {0}) == segments
    assert [sample_of(batch, segment) for segment in segments] == expected
    padding = batch.segment_ids_BT == 0
    assert padding.sum() == batch.tokens_BT.size - sum(len(s.token_ids) for s in expected)
    assert not batch.loss_mask_BT[padding].any()
    assert not batch.rollout_logprobs_BT[padding].any()
    assert not batch.advantages_BT[padding].any()
    assert (batch.policy_versions_BT[padding] == -1).all()
    assert batch.num_loss_tokens == sum(sum(s.loss_mask) for s in expected)
    assert batch.num_samples == len(expected)


@given(trajectories(), st.floats(-2, 2, width=32))
def test_samples_are_the_turns_laid_end_to_end_and_forks_split_them(trajectory: Trajectory, advantage: float) -> None:
    laid = to_samples(trajectory, advantage)
    forks = sum(turn.forked for turn in trajectory.turns[1:])
    assert len(laid) == 1 + forks
    tokens = [t for turn in trajectory.turns for t in (*turn.prompt_ids, *turn.completion.token_ids)]
    assert [t for sample in laid for t in sample.token_ids] == tokens
    for sample in laid:
        first = trajectory.turns[sample.turn_ids[0]]
        assert first is trajectory.turns[0] or first.forked


@given(trajectories(), st.floats(-2, 2, width=32))
def test_the_loss_mask_covers_exactly_the_sampled_tokens(trajectory: Trajectory, advantage: float) -> None:
    rows = [
        row
        for s in to_samples(trajectory, advantage)
        for row in zip(
            s.token_ids, s.loss_mask, s.rollout_logprobs, s.advantages, s.policy_versions, s.turn_ids, strict=True
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


@given(sample_lists, st.integers(1, 30))
def test_packing_keeps_every_token_of_every_sample_once_and_in_order(
    listed: list[TrainingSample], row_tokens: int
) -> None:
    batch = collate(listed, row_tokens=row_tokens, pad_token_id=7)
    assert_holds(batch, listed, list(range(1, len(listed) + 1)))
    assert (batch.tokens_BT[batch.segment_ids_BT == 0] == 7).all()
    for row in batch.segment_ids_BT:
        used = int((row > 0).sum())
        assert used <= row_tokens or len(set(row) - {0}) == 1
    longest = max(len(s.token_ids) for s in listed)
    assert batch.tokens_BT.shape[1] <= max(row_tokens, longest)


@given(sample_lists, st.integers(12, 40))
def test_packing_leaves_at_most_one_row_half_empty(listed: list[TrainingSample], row_tokens: int) -> None:
    batch = collate(listed, row_tokens=row_tokens)
    used = (batch.segment_ids_BT > 0).sum(axis=1)
    assert (2 * used <= row_tokens).sum() <= 1


@given(sample_lists, st.integers(1, 30))
def test_packing_is_deterministic(listed: list[TrainingSample], row_tokens: int) -> None:
    one, two = (collate(iter(listed), row_tokens=row_tokens) for _ in range(2))
    assert all(np.array_equal(getattr(one, f.name), getattr(two, f.name)) for f in fields(TrainBatch))


@given(sample_lists, st.integers(1, 30), st.integers(1, 14))
def test_minibatches_partition_the_samples_in_order(listed: list[TrainingSample], row_tokens: int, count: int) -> None:
    parts = minibatches(collate(listed, row_tokens=row_tokens), count)
    assert len(parts) == min(count, len(listed))
    sizes = [part.num_samples for part in parts]
    assert max(sizes) - min(sizes) <= 1
    at = 0
    for part in parts:
        assert_holds(part, listed[at : at + part.num_samples], list(range(1, part.num_samples + 1)))
        at += part.num_samples
    assert at == len(listed)


@given(sample_lists, st.integers(1, 30), st.integers(1, 60))
def test_micro_batches_are_all_rows_within_the_budget(
    listed: list[TrainingSample], row_tokens: int, tokens: int
) -> None:
    batch = collate(listed, row_tokens=row_tokens)
    parts = micro_batches(batch, tokens)
    assert sum(len(part.tokens_BT) for part in parts) == len(batch.tokens_BT)
    seen: list[int] = []
    for part in parts:
        segments = sorted(set(part.segment_ids_BT.ravel().tolist()) - {0})
        assert_holds(part, [listed[segment - 1] for segment in segments], segments)
        assert part.tokens_BT.size <= tokens or len(part.tokens_BT) == 1
        seen += segments
    assert sorted(seen) == list(range(1, len(listed) + 1))


def test_nothing_to_collate_and_impossible_budgets_say_so() -> None:
    batch = collate([TrainingSample((1, 2), (0, 1), (0.0, -1.0), (0.0, 1.0), (-1, 0), (0, 0))], row_tokens=4)
    with pytest.raises(ValueError, match="no sample to collate"):
        collate([], row_tokens=4)
    with pytest.raises(ValueError, match="row_tokens"):
        collate([sample_of(batch, 1)], row_tokens=0)
    with pytest.raises(ValueError, match="minibatches"):
        minibatches(batch, 0)
    with pytest.raises(ValueError, match="micro-batches"):
        micro_batches(batch, 0)


@given(trajectory=trajectories(), oldest=st.integers(0, 6))
def test_tokens_before_the_oldest_version_are_context_and_all_others_carry_loss(trajectory, oldest):
    kept = to_samples(trajectory, 2.0, oldest_version=oldest)
    everything = to_samples(trajectory, 2.0)
    fresh = [v for sample in everything for v, m in zip(sample.policy_versions, sample.loss_mask, strict=True) if m]
    assert sum(sum(sample.loss_mask) for sample in kept) == sum(version >= oldest for version in fresh)
    assert all(any(sample.loss_mask) for sample in kept) or oldest == 0
    for sample in kept:
        for version, mask, advantage in zip(sample.policy_versions, sample.loss_mask, sample.advantages, strict=True):
            assert mask == (version >= max(oldest, 0))
            assert advantage == 2.0 * mask
