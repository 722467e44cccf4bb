"""Curricula by config: they choose by outcomes, and the same outcomes give the same tasks."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.protocols import Curriculum
from agentrl.rollout.next_task import next_task
from agentrl.tasks.levels import Levels, RunningMean
from agentrl.tasks.pools import DifficultyPools
from agentrl.trajectory import Task

LEVELS = tuple({"level": level} for level in range(1, 6))
Outcome = Callable[[Task], list[float]]


def levels(rule: Any = "band", split: str = "train", **settings: Any) -> Levels:
    return Levels(
        Levels.Config(levels=LEVELS, rule=rule, **settings), "text_maze", 0, split, {"shared": 1}
    )


def pools(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> DifficultyPools:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(30)))
    return DifficultyPools(
        DifficultyPools.Config(data=str(path), held_out=0.0, **settings), "qa", 0
    )


def train(
    source: Curriculum, outcome: Outcome, first: int = 0, count: int = 200
) -> list[tuple[Task, list[float]]]:
    """Steps of four tasks, whose outcomes are observed after each."""
    played = []
    for step in range(first, first + count, 4):
        batch = [(index, source.task(index)) for index in range(step, step + 4)]
        for index, task in batch:
            played.append((task, outcome(task)))
            source.observe(index, task, played[-1][1])
    return played


def reaches(highest: int) -> Outcome:
    """A policy that solves all levels below `highest` always, that level half of the time, and none
    above.
    """
    return lambda task: [
        float(task.options["level"] < highest),
        float(task.options["level"] <= highest),
    ]


def share(played: list[tuple[Task, list[float]]], level: int) -> float:
    counts = Counter(task.options["level"] for task, _ in played)
    return counts[level] / counts.total()


@pytest.mark.parametrize("highest", [1, 2, 3, 4, 5])
def test_a_band_finds_the_level_that_is_neither_too_hard_nor_too_easy(highest: int) -> None:
    played = train(levels(), reaches(highest), count=400)
    assert share(played[200:], highest) > 0.75


def test_a_band_goes_up_when_a_level_has_been_learned_and_stays_at_the_last() -> None:
    source = levels(explore=0.0)
    train(source, reaches(2), count=100)
    assert share(train(source, reaches(9), 100, 400)[300:], 5) == 1.0


def test_a_band_stays_at_the_easiest_level_if_all_are_too_hard() -> None:
    assert share(train(levels(explore=0.0), lambda task: [0.0, 0.0]), 1) == 1.0


def test_progress_draws_levels_whose_success_changes_in_either_direction() -> None:
    source = levels("progress", memory=4)
    train(source, lambda task: [0.0], count=200)

    def changing(task: Task) -> list[float]:
        return [float(task.options["level"] == 3)]

    assert share(train(source, changing, 200, 60), 3) > 0.5


def test_held_out_tasks_have_all_levels_in_turn_and_no_seed_of_a_training_task() -> None:
    tasks = [levels(split="held-out").task(index) for index in range(10)]
    assert [task.options["level"] for task in tasks] == [1, 2, 3, 4, 5] * 2
    assert tasks[0].options == {"shared": 1, "level": 1}
    assert not {task.seed for task in tasks} & {levels().task(index).seed for index in range(200)}


def test_easy_and_hard_rows_are_drawn_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pools(tmp_path, monkeypatch, easy=0.1, hard=0.5)

    def outcome(task: Task) -> list[float]:
        return {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [0.0, 1.0]}[task.options["answer"] % 3]

    played = train(source, outcome, count=1600)[400:]
    drawn = Counter(task.options["answer"] % 3 for task, _ in played)
    assert drawn[0] / drawn[2] == pytest.approx(0.1, abs=0.05)
    assert drawn[1] / drawn[2] == pytest.approx(0.5, abs=0.1)
    assert source.metrics() == {"curriculum/easy": 1 / 3, "curriculum/hard": 1 / 3}


def test_a_row_leaves_its_pool_when_its_outcome_changes_and_all_easy_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pools(tmp_path, monkeypatch, easy=0.0)
    train(source, lambda task: [1.0], count=400)
    assert source.metrics()["curriculum/easy"] == 1.0
    source = pools(tmp_path, monkeypatch, easy=0.5)
    train(source, lambda task: [1.0], count=400)
    train(source, lambda task: [0.5], 400, 400)
    assert source.metrics() == {"curriculum/easy": 0.0, "curriculum/hard": 0.0}


@pytest.mark.parametrize("stopped_at", [4, 40, 100])
@pytest.mark.parametrize("kind", ["band", "progress", "pools"])
def test_a_replay_of_the_outcomes_gives_the_same_tasks(
    kind: str, stopped_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Curriculum:
        return pools(tmp_path, monkeypatch) if kind == "pools" else levels(kind)

    def outcome(task: Task) -> list[float]:
        return [float(task.seed % 3 > 0), float(task.seed % 5 > 2)]

    whole = train(make(), outcome, count=160)
    resumed = make()
    assert isinstance(resumed, Curriculum)
    for index, (task, rewards_G) in enumerate(whole[:stopped_at]):
        resumed.observe(index, task, rewards_G)
    assert train(resumed, outcome, stopped_at, 160 - stopped_at) == whole[stopped_at:]


def test_a_running_mean_counts_its_first_values_fully() -> None:
    mean = RunningMean(10)
    assert mean.value is None
    mean.add(1.0)
    assert mean.value == pytest.approx(1.0)
    mean.add(0.0)
    assert mean.value == pytest.approx(0.9 / 1.9)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="band is"):
        levels(band=(0.8, 0.2))
    with pytest.raises(ValidationError, match="hard_at"):
        DifficultyPools.Config(data="x.jsonl", hard_at=0.5, easy_at=0.5)


@pytest.mark.parametrize("returned", [None, {"env": "qa", "seed": 0}, "qa"])
def test_a_source_that_returns_something_else_than_a_task_is_refused_by_name(returned: Any) -> None:
    class Wrong:
        def task(self, index: int) -> Any:
            return returned

    with pytest.raises(
        ConfigError, match=r"the task source Wrong returned .* for the index 3, and not an"
    ):
        next_task(Wrong(), 3)


@pytest.mark.parametrize(
    ("seed", "name", "problem"),
    [
        (0.5, "t", r"seed is 0\.5: write an integer"),
        (True, "t", "seed is True: write an integer"),
        ("7", "t", "seed is '7': write an integer"),
        (7, 7, "id is 7: write text"),
        (7, "t\ud800", "id cannot be stored: .*half of a surrogate pair"),
    ],
)
def test_a_task_that_could_not_be_read_back_is_refused_before_it_is_played(
    seed: Any, name: Any, problem: str
) -> None:
    class Wrong:
        def task(self, index: int) -> Task:
            return Task("qa", seed, {}, name)

    with pytest.raises(
        ConfigError, match=f"source Wrong returned a task for the index 3 whose {problem}"
    ):
        next_task(Wrong(), 3)


def test_seeds_of_any_size_and_of_numpy_are_integers() -> None:
    class Source:
        def task(self, index: int) -> Task:
            seeds: list[Any] = [2**70, -1, np.int64(3)]
            return Task("qa", seeds[index], {}, "t")

    assert [next_task(Source(), index).seed for index in range(3)] == [2**70, -1, 3]
