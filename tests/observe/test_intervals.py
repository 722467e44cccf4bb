"""Intervals, pass@k and paired differences, with numbers worked out by hand; reports and their
comparison.
"""

import json
import math
import os
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.cli.training import before_and_after
from agentrl.errors import ConfigError
from agentrl.observe.intervals import (
    mean_over_tasks,
    paired_difference,
    pass_at_k,
    passes,
    share_over_tasks,
    wilson_interval,
)
from agentrl.observe.reports import (
    Conditions,
    EpisodeResult,
    EvaluationReport,
    PlayedTask,
    compare,
    left_out,
    read_reports,
)
from agentrl.trajectory import Message, Task, Terminated, Trajectory


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


def test_tasks_that_are_all_alike_give_no_certainty() -> None:
    assert share_over_tasks([1.0] * 8).low == wilson_interval(8, 8)[0] < 0.7
    # With two of 0 and two of 1.
    half = 1.959964 * math.sqrt((8 * 0.25 + 2) / 12 - 0.25) / math.sqrt(12)
    found = share_over_tasks([0.5] * 8)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    same = mean_over_tasks([3.0] * 8)
    assert same.value == 3.0
    assert math.isnan(same.low)
    assert math.isnan(same.high)


def test_passes_are_of_powers_of_two_and_all_of_the_same_tasks() -> None:
    count, found = passes({"a": [[True, False, False, False]], "b": [[True, True]]}, 5)
    assert (count, list(found)) == (1, [1, 2, 4])
    assert [found[k].value for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])


@given(st.lists(st.lists(st.booleans(), max_size=4), max_size=6))
def test_more_answers_never_pass_less(answers: list[list[bool]]) -> None:
    count, found = passes({str(task): [own] for task, own in enumerate(answers)}, 4)
    assert count == sum(len(own) == 4 for own in answers)
    values = [found[k].value for k in (1, 2, 4)]
    assert values == sorted(values) if count else all(map(math.isnan, values))


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)])
def test_eight_of_eight_are_no_certainty_of_a_difference(before: float, after: float) -> None:
    tasks = [str(number) for number in range(8)]
    count, found = paired_difference(dict.fromkeys(tasks, before), dict.fromkeys(tasks, after), 1.0)
    change = after - before
    mean = 8 * change / 10  # of the eight, and of one that rises and one that falls
    half = 1.959964 * math.sqrt((8 * change**2 + 2) / 10 - mean**2) / math.sqrt(10)
    assert (count, found.value) == (8, change)
    assert (found.low, found.high) == pytest.approx((max(-1, mean - half), min(1, mean + half)))
    assert found.high - found.low > 0.5


def test_the_scores_of_few_tasks_that_change_alike_are_no_certainty_either() -> None:
    one = {"a": 0.1, "b": 0.5, "c": 0.9}
    count, found = paired_difference(one, {"a": 0.2, "b": 0.6, "c": 1.0, "d": 0.0})
    every = [0.1, 0.1, 0.1, 0.9, -0.9]  # all scores lie within 0.9 of each other
    error = 1.959964 * math.sqrt(sum((value - 0.06) ** 2 for value in every) / 5) / math.sqrt(5)
    assert count == 3
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.06 - error, 0.06 + error))
    _, same = paired_difference({"a": 2.0, "b": 2.0}, {"a": 2.0, "b": 2.0})
    assert same.value == 0.0
    assert math.isnan(same.low)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_the_interval_of_a_difference_holds_it_and_stays_in_bounds(
    pairs: list[tuple[bool, bool]],
) -> None:
    one, other = ({str(n): float(pair[which]) for n, pair in enumerate(pairs)} for which in (0, 1))
    _, found = paired_difference(one, other, 1.0)
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high


def report(name: str, step: int, results: dict[str, list[bool]]) -> EvaluationReport:
    episodes = tuple(
        EpisodeResult(task, one, float(one)) for task, own in results.items() for one in own
    )
    return EvaluationReport(name, step, {"eval/success": 0.5}, episodes)


def test_the_newest_reports_of_two_runs_are_compared_task_by_task(tmp_path: Path) -> None:
    report("hard", 10, {"a": [False]}).write(tmp_path / "one" / "evaluations")
    report("hard", 20, {"a": [False, True], "b": [False, False]}).write(
        tmp_path / "one" / "evaluations"
    )
    report("other", 20, {"a": [False]}).write(tmp_path / "one" / "evaluations")
    report("hard", 30, {"a": [True, True], "b": [False, True], "c": [True, True]}).write(
        tmp_path / "two"
    )
    [found] = compare(read_reports(tmp_path / "one"), read_reports(tmp_path / "two"))
    assert (found.name, found.steps, found.tasks) == ("hard", (20, 30), 2)
    assert (found.first, found.second, found.success.value) == (0.25, 0.75, 0.5)
    assert found.success.low < 0.5 < found.success.high
    assert found.alone == (0, 1)


def played(
    environment: str, seed: int, *, options: str = "", prompt: str = "p", success: bool = True
) -> EpisodeResult:
    name = f"held-out-{seed:06d} seed {seed}"
    return EpisodeResult(
        name, success, float(success), PlayedTask(environment, seed, options, prompt)
    )


def of(
    *episodes: EpisodeResult, environment: str = "lake", **more: Any
) -> dict[str, EvaluationReport]:
    conditions = Conditions(
        {environment: more.pop("options", {})}, {"temperature": more.pop("temperature", 1.0)}, ["r"]
    )
    metrics = {"eval/failed": more.pop("failed", 0)}
    return {"held_out": EvaluationReport("held_out", 10, metrics, episodes, conditions)}


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (
            of(played("sql", 1), environment="sql"),
            r"their environments differ \(lake: {} and none, sql: none and {}\)",
        ),
        (
            of(played("lake", 1, options="x"), options={"size": 8}),
            r"environments differ \(lake: {} and {'size': 8}\)",
        ),
        (of(played("lake", 1, options="x")), "the options of their tasks differ"),
        (of(played("lake", 1, prompt="q")), "the prompts of their tasks differ"),
        (
            of(played("lake", 1), temperature=0.5),
            r"sampled differently \(temperature: 1.0 and 0.5\)",
        ),
        (of(played("lake", 2)), "no task in common; held-out tasks depend on the run's seed"),
    ],
)
def test_tasks_with_equal_names_and_seeds_are_not_compared_if_they_are_others_and_it_is_said_how(
    second, why
) -> None:
    first = of(played("lake", 1))
    with pytest.raises(ConfigError, match=f"no evaluated task in common.*held_out: .*{why}"):
        compare(first, second)
    assert re.search(why, left_out(first, second, [])["held_out"])


def test_a_comparison_says_how_many_episodes_failed_and_which_tasks_it_leaves_out() -> None:
    first = of(played("lake", 1, success=False), played("lake", 2), played("lake", 3), failed=5)
    [found] = compare(
        first, of(played("lake", 1), played("lake", 2), played("lake", 4, prompt="q"), failed=2)
    )
    assert (found.tasks, found.failed, found.alone, found.why_alone) == (2, (5, 2), (1, 1), "")
    assert (found.first, found.second) == (0.5, 1.0)


def test_the_same_problem_is_compared_whatever_its_name_is() -> None:
    other = replace(played("lake", 1, success=False), task="suite-7 seed 1")
    [found] = compare(of(played("lake", 1)), of(other))
    assert found.success.value == -1.0


@pytest.mark.parametrize("says_when", [True, False])  # those of earlier versions do not
def test_the_newest_report_counts_wherever_it_lies_in_the_run(
    tmp_path: Path, says_when: bool
) -> None:
    places = ["evaluations", "evaluations/eval-20261125-140000", "evaluations/mine", "."]
    for number, place in enumerate(places):
        path = report("hard", 40 - number, {"a": [True]}).write(tmp_path / place)
        if says_when:
            os.utime(path, (1_000_000 - number, 1_000_000 - number))  # a copy is of any time
        else:
            row = json.loads(path.read_text())
            del row["at"]
            path.write_text(json.dumps(row))
            os.utime(path, (1_000_000 + number, 1_000_000 + number))
    for place in reversed(places):
        newest = read_reports(tmp_path)["hard"]
        assert newest.file == tmp_path / place / f"hard_{newest.step:06d}.json"
        assert newest.step == 40 - places.index(place)
        newest.file.unlink()


def test_what_was_played_is_told_by_environment_options_seed_and_prompt() -> None:
    def of_task(answer: str = "left", prompt: str = "P . O", **more: Any) -> PlayedTask:
        messages = (
            Message("system", "Go."),
            Message("user", prompt),
            Message("assistant", answer),
            Message("user", answer),
        )
        task = Task(
            "lake",
            more.get("seed", 7),
            {"size": more.get("size", 4), "map": [1, 2]},
            more.get("id", "t/0"),
        )
        return PlayedTask.of(
            Trajectory("t/0/0", task, (), Terminated(), messages), more.get("environment", "lake")
        )

    assert of_task() == of_task("right", id="u/3")
    others = [
        of_task(prompt="P O ."),
        of_task(seed=8),
        of_task(size=5),
        of_task(environment="wrapped:lake"),
    ]
    assert len({of_task(), *others}) == 5


def test_reports_that_do_not_say_what_was_played_are_refused(tmp_path: Path) -> None:
    row = {
        "name": "hard",
        "step": 1,
        "metrics": {},
        "episodes": [{"task": "a seed 1", "success": True, "score": 1.0}],
    }
    (tmp_path / "hard_000001.json").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=r"written by an earlier version.*evaluate again"):
        read_reports(tmp_path)


def test_what_is_left_out_of_a_comparison_is_named_with_the_reason() -> None:
    first = {name: report(name, 1, {"a": [True]}) for name in ("hard", "held_out", "mine")}
    second = {
        "hard": first["hard"],
        "held_out": report("held_out", 1, {"b": [True]}),
        "yours": first["mine"],
    }
    assert left_out(first, second, compare(first, second)) == {
        "held_out": (
            "the two have played no task in common; held-out tasks depend on the run's seed"
        ),
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


def test_compare_prints_failures_what_is_left_out_and_which_reports_it_has_read(
    tmp_path: Path,
) -> None:
    first = of(played("lake", 1, success=False), played("lake", 2), played("lake", 3), failed=5)[
        "held_out"
    ]
    second = of(played("lake", 1), played("lake", 2), failed=2)["held_out"]
    first.write(tmp_path / "one" / "evaluations")
    replace(second, conditions=replace(second.conditions, reward=["math"])).write(tmp_path / "two")
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "one"), str(tmp_path / "two")])
    assert done.exit_code == 0, done.output
    for said in (
        (
            "held_out (2 tasks; after 10 and 10 steps; 5 and 2 episodes failed): success 50.0% and"
            " 100.0%"
        ),
        "episodes that failed are in none of these figures",
        "not compared: 1 tasks that only the first has, and 0 that only the second has",
        "scored by different rewards",
        str(tmp_path / "one" / "evaluations" / "held_out_000010.json"),
    ):
        assert said in done.output
    of(played("sql", 1), environment="sql")["held_out"].write(tmp_path / "three")
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "one"), str(tmp_path / "three")])
    assert isinstance(done.exception, ConfigError)
    assert "their environments differ (lake: {} and none, sql: none and {})" in str(done.exception)


def test_the_success_before_and_after_says_how_many_episodes_it_leaves_out() -> None:
    row = {
        "success_before": 1.0,
        "success_before_interval": [0.2, 1.0],
        "success_after": None,
        "steps": 3,
    }
    row |= {"success_after_interval": None, "failed_before": 3.0, "failed_after": 4.0}
    line = before_and_after(row)
    assert "(95 % interval 20.0% to 100.0%) (3 episodes failed and do not count)" in line
    assert line.endswith("after 3 steps (4 episodes failed and do not count)")
    assert "failed" not in before_and_after({**row, "failed_before": 0.0, "failed_after": None})
