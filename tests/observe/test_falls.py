"""What a history shows is told in time and with the right advice; healthy histories are quiet."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe.evaluation import Evaluation
from agentrl.observe.metrics import rollout_metrics
from agentrl.observe.silence import Silence, conditions
from agentrl.rollout.budget import Budget
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Group, Score

GOOD = {"grad_norm": 0.4, "mixed_groups": 0.6, "reward": 0.5, "success": 0.5, "same_answers": 0.1}


def told(rows: list[dict[str, Any]]) -> list[str]:
    reader = Silence(conditions(max_tokens=64, budget=Budget(turns=8), compares_groups=True))
    return [
        alarm.text
        for step, row in enumerate(rows)
        for alarm in reader.read({"step": step, **GOOD, **row})
    ]


def test_a_gradient_a_thousand_times_its_median_is_told_at_once_and_once() -> None:
    norms = [0.39, 0.5, 0.0, 0.3, 0.45, 0.4, 29_447.0, 30_000.0, 0.4]
    (text,) = told([{"grad_norm": norm} for norm in norms])
    assert text.startswith("in step 6: the norm of the gradient is 2.94e+04")
    assert "lower trainer.lr" in text
    assert told([{"grad_norm": norm} for norm in [0.39, 0.5, 0.3, 0.45, 0.4, 300.0]]) == []


@pytest.mark.parametrize("successes", [[1, 1, 1, 0.5, 0, 0, 0, 0], [0.9, 1, 1, 1, 0, 0, 0, 0, 0]])
def test_success_that_is_lost_is_told_and_not_blamed_on_the_tasks(successes: list[float]) -> None:
    rows = [
        {
            "success": one,
            "reward": one,
            "mixed_groups": 0.5 * (0 < one < 1),
            "grad_norm": 1.0 * (0 < one < 1),
        }
        for one in successes
    ]
    texts = told(rows)
    (text,) = [text for text in texts if "up to step" not in text]
    of_tasks = [text for text in texts if "up to step" in text]  # while all was solved
    assert all(
        int(re.findall(r"up to step (\d+)", one)[0]) < successes.index(0) for one in of_tasks
    )
    assert "to 0% within a few steps" in text
    assert "Go back to an earlier checkpoint" in text
    assert "too easy" not in text
    assert text.startswith(f"in step {successes.index(0) + 1}:")


def test_success_that_is_lost_again_after_it_was_back_is_told_again() -> None:
    lost = [{"success": one} for one in (1, 1, 1, 1, 1, 0, 0)]
    assert len(told([*lost, *lost])) == 2


def test_a_reward_that_rises_without_a_success_is_told() -> None:
    rows = [
        {"success": 0.0, "reward": 0.1 + 0.03 * step, "mixed_groups": 0.9} for step in range(20)
    ]
    (text,) = told(rows)
    assert "the reward rose from" in text
    assert "not one episode succeeded" in text
    assert told([{**row, "success": 0.01} for row in rows]) == []
    assert told([{"reward": row["reward"], "success": float("nan")} for row in rows]) == []


def test_a_constant_answer_is_told_in_training_and_in_evaluations() -> None:
    (text,) = told([{"same_answers": 0.99}] * 5)
    assert "99.0% of the episodes have the same answer to different tasks" in text
    evaluated = {
        "eval/success": 0.5,
        "eval/success_low": 0.4,
        "eval/success_high": 0.6,
        "eval/same_answers": 0.995,
    }
    (text,) = told([evaluated, evaluated])
    assert "99.5% of the held-out episodes" in text
    assert "no constant answer is paid for more often" in text
    assert told([{"same_answers": 1.0, "success": 1.0}] * 5) == [], (
        "where the same is right for all"
    )
    assert told([{**evaluated, "eval/success": 0.99}]) == []


def test_a_constant_answer_on_a_suite_is_told_and_its_rows_end_no_condition_of_steps() -> None:
    reader = Silence(conditions(max_tokens=64, budget=Budget(turns=8), compares_groups=True))
    suite = {"eval/hard/success": 0.5, "eval/hard/same_answers": 1.0}
    rows: list[dict[str, Any]] = [
        {**GOOD, "grad_norm": 0.0},
        suite,
        {**GOOD, "grad_norm": 0.0},
        suite,
    ]
    rows.append({**GOOD, "grad_norm": 0.0})
    texts = [
        alarm.text for step, row in enumerate(rows) for alarm in reader.read({"step": step, **row})
    ]
    assert ["of hard" in text for text in texts] == [True, False]
    assert "the gradient was zero" in texts[1]


def test_the_share_of_same_answers_is_counted_over_different_tasks() -> None:
    said = ["Yes"] * 7 + ["No"]
    members = [trajectory(text, id=f"task-{number}/0/0") for number, text in enumerate(said)]
    groups = [Group(one.task, (one,), (Score(0.0),)) for one in members]
    assert rollout_metrics(groups, 0)["same_answers"] == 7 / 8
    scored = tuple((one, Score(1.0, {"right": 1.0})) for one in members)
    assert Evaluation(scored, ()).metrics()["eval/same_answers"] == 7 / 8
    alone = [trajectory("Yes", id=f"task/{number}/0") for number in range(8)]
    group = Group(alone[0].task, tuple(alone), (Score(0.0),) * 8)
    assert "same_answers" not in rollout_metrics([group], 0), "members of one group may well agree"


@given(st.integers(0, 2**32), st.sampled_from(["rising", "noisy", "solved", "hard"]))
def test_healthy_histories_are_quiet(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    steps = np.arange(60)
    chance = {
        "rising": 0.1 + 0.8 * steps / 60,
        "noisy": np.full(60, 0.5),
        "solved": np.minimum(0.97, 0.5 + steps / 40),
        "hard": np.full(60, 0.05),
    }[kind]
    success = rng.binomial(64, chance) / 64
    norms = rng.lognormal(-1, 1, 60)
    same = rng.uniform(0.05, 0.6, 60)
    rows = [
        {
            "success": float(one),
            "reward": float(one),
            "grad_norm": float(norm),
            "same_answers": float(share),
        }
        for one, norm, share in zip(success, norms, same, strict=True)
    ]
    assert told(rows) == []


@given(st.integers(0, 2**32))
def test_a_shaped_reward_that_only_varies_is_quiet_without_success(seed: int) -> None:
    rewards = np.random.default_rng(seed).normal(0.3, 0.05, 40)
    assert told([{"success": 0.0, "reward": float(reward)} for reward in rewards]) == []
