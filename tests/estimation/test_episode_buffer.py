"""What is kept of earlier steps, what is drawn from it, and that a resumed run draws the same."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.batch import TrainBatch, collate
from agentrl.errors import CheckpointError
from agentrl.estimation.episode_buffer import EpisodeBuffer
from agentrl.testing.trainers import random_samples


def batch_at(step: int) -> TrainBatch:
    """A batch of twelve trajectories in four groups, one of which has forked and one of which was
    truncated.
    """
    samples = [
        replace(sample, group=number // 3, rewards=np.full(len(sample.token_ids), step))
        for number, sample in enumerate(random_samples(50, seed=step, count=13))
    ]
    samples[5] = replace(samples[5], continues=True, group=samples[4].group)
    samples[7] = replace(samples[7], truncated=True, tail_ids=(3, 4))
    return collate(samples)


def tasks_at(step: int) -> list[str]:
    return [f"task-{step}-{group}" for group in range(5)]


Uses = list[tuple[int, list[str]]]


def filled(
    steps: int, *, kept: int = 3, per_new: float = 2.0, seed: int = 0
) -> tuple[EpisodeBuffer, Uses]:
    """A replay after so many steps, and what it has told the ledger."""
    uses: Uses = []
    replay = EpisodeBuffer(
        kept, per_new, seed=seed, reused=lambda step, ids: uses.append((step, list(ids)))
    )
    for step in range(steps):
        replay.keep(step, batch_at(step), tasks_at(step))
    return replay, uses


def equal(one: TrainBatch, other: TrainBatch) -> bool:
    pairs = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(TrainBatch))
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def test_the_first_step_has_nothing_earlier() -> None:
    replay, uses = filled(0)
    assert equal(replay.with_earlier(0, batch_at(0)), batch_at(0))
    assert uses == []


def trajectories(batch: TrainBatch) -> list[tuple[int, ...]]:
    """The tokens of each trajectory."""
    of_S = np.repeat(batch.trajectories_M, batch.lengths_M)
    return [
        tuple(batch.tokens_S[of_S == number].tolist())
        for number in range(int(batch.trajectories_M.max()) + 1)
    ]


def test_whole_trajectories_of_the_last_steps_follow_the_new_ones_and_their_tasks_are_told() -> (
    None
):
    replay, uses = filled(5)
    assert len(replay) == 3 * 12
    new = batch_at(5)
    both = replay.with_earlier(5, new)
    first, earlier = both.split([13, both.num_samples - 13])
    assert equal(first, new)
    assert new.weights_N.all()
    assert not earlier.weights_N.any()
    drawn = trajectories(both)[12:]
    kept = {
        tokens: (step, number)
        for step in (2, 3, 4)
        for number, tokens in enumerate(trajectories(batch_at(step)))
    }
    assert len(drawn) == len(set(drawn)) == 24
    assert set(drawn) <= set(kept)
    origins = [
        (step, int(batch_at(step).groups_of_trajectories[number]))
        for step, number in map(kept.get, drawn)
    ]
    assert uses == [(5, list(dict.fromkeys(f"task-{step}-{group}" for step, group in origins)))]


def test_what_is_drawn_keeps_what_a_critic_needs() -> None:
    replay, _ = filled(1, per_new=5.0)
    new, old = batch_at(1), batch_at(0)
    earlier = replay.with_earlier(1, new).split([13, 13])[1]  # no more is drawn than there is
    for name in ("tokens_S", "loss_mask_S", "lengths_M", "turns_N", "rewards_N", "truncated_M"):
        assert np.array_equal(getattr(earlier, name), getattr(old, name)), name
    assert earlier.tails_M == old.tails_M
    assert np.array_equal(earlier.trajectories_M - earlier.trajectories_M[0], old.trajectories_M)


def test_a_lesson_is_mixed_without_losing_a_sample() -> None:
    replay, batch = filled(0)[0], batch_at(0)
    mixed = replay.mix_in(3, batch)
    assert not equal(mixed, batch)
    assert sorted(mixed.tokens_S.tolist()) == sorted(batch.tokens_S.tolist())
    assert sorted(mixed.lengths_M.tolist()) == sorted(batch.lengths_M.tolist())
    assert equal(replay.mix_in(3, batch), mixed)


def test_what_is_drawn_depends_on_the_seed_and_the_step_alone() -> None:
    def drawn(seed: int, step: int) -> TrainBatch:
        return filled(4, seed=seed)[0].with_earlier(step, batch_at(9))

    assert equal(drawn(0, 4), drawn(0, 4))
    assert not equal(drawn(0, 4), drawn(1, 4))
    assert not equal(drawn(0, 4), drawn(0, 5))


def test_a_replay_is_saved_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    replay, _ = filled(5)
    replay.save(tmp_path)
    again, uses = filled(0)
    again.load(tmp_path)
    assert len(again) == len(replay)
    assert equal(again.with_earlier(5, batch_at(5)), replay.with_earlier(5, batch_at(5)))
    assert uses[0][1][0].startswith("task-2-")
    smaller = EpisodeBuffer(1, 2.0, seed=0)
    smaller.load(tmp_path)
    assert len(smaller) == 12
    empty = tmp_path / "empty"
    empty.mkdir()
    filled(0)[0].save(empty)
    again.load(empty)
    assert len(again) == 0


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="written by a recipe without a replay"):
        filled(0)[0].load(tmp_path)
