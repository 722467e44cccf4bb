"""Intervals, pass@k and paired differences, with numbers worked out by hand; reports and their comparison."""

import math
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.observe.intervals import mean_over_tasks, paired_difference, pass_at_k, passes, share_over_tasks
from agentrl.observe.metrics import wilson_interval
from agentrl.observe.reports import EpisodeResult, EvaluationReport, compare, left_out, read_reports


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_success(answers: list[bool], k: int) -> None:
    if k > len(answers):
        with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples"):
            pass_at_k(sum(answers), len(answers), k)
        return
    chosen = [any(some) for some in combinations(answers, k)]
    assert pass_at_k(sum(answers), len(answers), k) == pytest.approx(sum(chosen) / len(chosen))


def test_an_interval_is_over_tasks_and_that_of_a_share_stays_in_bounds() -> None:
    found = mean_over_tasks([0.0, 0.5, 1.0])
    half = 1.959964 * 0.5 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert share_over_tasks([0.0, 0.5, 1.0]).low == 0.0
    assert share_over_tasks([1.0, 1.0, 0.0]).low == wilson_interval(2, 3)[0]
    assert math.isnan(mean_over_tasks([]).value)
    assert math.isnan(mean_over_tasks([1.0]).low)


def test_passes_are_of_powers_of_two_and_of_tasks_that_were_played_often_enough() -> None:
    found = passes({"a": [True, False, False, False], "b": [True, True]}, 5)
    assert list(found) == [1, 2, 4]
    assert found[1].value == pytest.approx((0.25 + 1) / 2)
    assert found[2].value == pytest.approx((0.5 + 1) / 2)
    assert found[4].value == 1.0


def test_a_paired_difference_is_exact_where_each_task_changes_alike() -> None:
    one = {"a": 0.1, "b": 0.5, "c": 0.9}
    count, found = paired_difference(one, {"a": 0.2, "b": 0.6, "c": 1.0, "d": 0.0})
    assert count == 3
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))


def report(name: str, step: int, results: dict[str, list[bool]]) -> EvaluationReport:
    episodes = tuple(EpisodeResult(task, one, float(one)) for task, own in results.items() for one in own)
    return EvaluationReport(name, step, {"eval/success": 0.5}, episodes)


def test_the_newest_reports_of_two_runs_are_compared_task_by_task(tmp_path: Path) -> None:
    report("hard", 10, {"a": [False]}).write(tmp_path / "one" / "evaluations")
    report("hard", 20, {"a": [False, True], "b": [False, False]}).write(tmp_path / "one" / "evaluations")
    report("other", 20, {"a": [False]}).write(tmp_path / "one" / "evaluations")
    report("hard", 30, {"a": [True, True], "b": [False, True], "c": [True, True]}).write(tmp_path / "two")
    [found] = compare(read_reports(tmp_path / "one"), read_reports(tmp_path / "two"))
    assert (found.name, found.steps, found.tasks) == ("hard", (20, 30), 2)
    assert (found.first, found.second, found.success.value) == (0.25, 0.75, 0.5)
    assert found.success.low == found.success.high == 0.5


def test_what_is_left_out_of_a_comparison_is_named_with_the_reason() -> None:
    first = {name: report(name, 1, {"a": [True]}) for name in ("hard", "held_out", "mine")}
    second = {"hard": first["hard"], "held_out": report("held_out", 1, {"b": [True]}), "yours": first["mine"]}
    assert left_out(first, second, compare(first, second)) == {
        "held_out": "the two have played no task in common; held-out tasks depend on the run's seed",
        "mine": "only the first has it",
        "yours": "only the second has it",
    }


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one, other = report("hard", 1, {"a": [True]}), report("hard", 1, {"b": [True]})
    with pytest.raises(ConfigError, match="no evaluated task in common"):
        compare({"hard": one}, {"hard": other})
    with pytest.raises(ConfigError, match="has no reports of evaluations"):
        read_reports(tmp_path)
    (tmp_path / "x_000001.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x_000001.json is no report of an evaluation"):
        read_reports(tmp_path)
