"""Signs of health, each with numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import traced_batch_of
from agentrl.observe.health import (
    batch_health,
    correlation,
    disagreement,
    episode_health,
    repetition,
)
from agentrl.observe.samples import TrainedBatch
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn


def group(*scored: tuple[int, Score]) -> Group:
    """A member of so many sampled tokens for each score."""
    task = Task("lake", 0, id="t")
    members = []
    for number, (tokens, _) in enumerate(scored):
        completion = Completion([5] * tokens, [-1.0] * tokens, [0] * tokens, "stop")
        members.append(
            Trajectory(f"t/{number}/0", task, (Turn([1], completion, 0.0, {}),), Terminated())
        )
    return Group(task, tuple(members), tuple(score for _, score in scored))


def trained(old_ratios: list[float], update_ratios: list[float]) -> TrainedBatch:
    """Two members of as many tokens as each list has numbers in its half."""
    half = len(old_ratios) // 2
    played = group((half, Score(1.0)), (half, Score(0.0)))
    made = traced_batch_of([played], Grpo(), BatchProcessing(BatchProcessingConfig()), 0)
    batch, origins = made.batch, made.origins
    old_N = batch.rollout_logprobs_N + np.log(old_ratios)
    return TrainedBatch(
        batch, origins, floats(np.stack([old_N, old_N + np.log(update_ratios), old_N]))
    )


def test_the_effective_sample_size_is_the_share_of_tokens_that_count():
    assert batch_health(trained([1, 1, 1, 1], [1] * 4), 0)[
        "health/effective_sample_size"
    ] == pytest.approx(1)
    assert batch_health(trained([2, 2, 2, 2], [1] * 4), 0)[
        "health/effective_sample_size"
    ] == pytest.approx(1)
    # (1 + 1 + 1 + 3)^2 / (4 (1 + 1 + 1 + 9))
    assert batch_health(trained([1, 1, 1, 3], [1] * 4), 0)[
        "health/effective_sample_size"
    ] == pytest.approx(36 / 48)


def test_the_reward_by_length_is_the_mean_of_each_quarter_from_the_shortest_on():
    played = group(*((length, Score(float(length))) for length in (8, 1, 2, 7, 3, 6, 4, 5)))
    found = episode_health([played])
    assert [found[f"health/reward_by_length/{quarter}"] for quarter in (1, 2, 3, 4)] == [
        1.5,
        3.5,
        5.5,
        7.5,
    ]
    alike = group(*((3, Score(float(score))) for score in range(8)))
    assert not any(name.startswith("health/reward_by_length") for name in episode_health([alike]))


def test_ratios_are_those_of_the_update_and_not_of_the_engine():
    found = batch_health(trained([1.5] * 200, [0.5] * 100 + [2.0] * 100), 0)
    assert found["health/ratio_p1"] == pytest.approx(0.5)
    assert found["health/ratio_p99"] == pytest.approx(2.0)


def test_the_gap_to_the_engine_is_told_by_the_age_of_the_tokens():
    """Ratios of e: the engine gives the two tokens of version 0, now two versions old, logprobs
    that are a nat lower, and the newest ones the trainer's own, but for those that carry no weight.
    """
    made = trained([math.e] * 2 + [1, math.e], [1] * 4)
    batch = replace(made.batch, versions_N=ints([0, 0, 2, 2]), weights_N=floats([1, 1, 1, 0]))
    found = batch_health(replace(made, batch=batch), 2)
    gaps = {name: gap for name, gap in found.items() if name.startswith("health/logprob_gap")}
    assert gaps == pytest.approx({"health/logprob_gap/0": 0.0, "health/logprob_gap/2": 1.0})


def test_advantages_are_of_the_loss_tokens():
    found = batch_health(trained([1] * 4, [1] * 4), 0)
    assert found["health/advantage_positive"] == 0.5
    assert found["health/advantage_std"] > 0


def test_a_trainer_that_tells_nothing_leaves_out_what_needs_its_logprobs():
    known = trained([1] * 4, [1] * 4)
    found = batch_health(TrainedBatch(known.batch, known.origins, None), 0)
    assert set(found) == {"health/advantage_std", "health/advantage_positive"}


def test_repetition_counts_the_passages_that_stood_in_the_same_answer_before():
    assert repetition([ints(range(100))]) == 0
    assert repetition([ints([3] * 27)]) == pytest.approx(19 / 20)  # 20 passages, all the same
    assert repetition([ints([*range(16), *range(16)])]) == pytest.approx(9 / 25)
    assert repetition([ints(range(16)), ints(range(16))]) == 0  # in another answer
    assert repetition([ints([3] * 15)]) is None
    short = [ints(range(15))] * 20
    assert repetition([*short, ints([3] * 27)]) is None, "one odd answer among many short ones"


@given(st.lists(st.integers(0, 3), min_size=16, max_size=60))
def test_repetition_equals_a_count_of_tuples(tokens):
    passages = [tuple(tokens[at : at + 8]) for at in range(len(tokens) - 7)]
    assert repetition([ints(tokens)]) == pytest.approx(1 - len(set(passages)) / len(passages))


def test_parts_disagree_where_they_order_members_differently():
    def of(*parts: tuple[float, float]) -> Group:
        return group(
            *((1, Score(0.0, {"judge": a, "tests": b, "judge/clear": -a})) for a, b in parts)
        )

    assert disagreement([of((0, 0), (1, 1), (2, 2))]) == 0
    assert disagreement([of((0, 2), (1, 1), (2, 0))]) == 1
    assert disagreement([of((0, 0), (1, 2), (2, 1))]) == pytest.approx(1 / 3)
    assert disagreement([of((0, 0), (1, 0), (2, 0))]) is None  # the tests tell none apart
    # Members of different groups are not compared.
    assert disagreement([of((0, 0), (1, 1)), of((5, 9), (6, 8))]) == 0.5


def test_a_score_that_follows_length_shows_as_a_correlation():
    longer = [group(*((tokens, Score(tokens / 10)) for tokens in (1, 2, 3)))]
    assert episode_health(longer)["health/length_correlation"] == pytest.approx(1)
    same = [group((2, Score(0.0)), (2, Score(1.0)))]
    assert "health/length_correlation" not in episode_health(same)
    assert correlation([0.0, 1.0, 0.0], [1.0, 0.0, 1.0]) == pytest.approx(-1)
