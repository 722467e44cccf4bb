"""Mixtures: the tasks of several environments, in the shares that their weights ask for."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import LoadedConfig, load_config
from agentrl.errors import ConfigError
from agentrl.plugins import NoSettings
from agentrl.protocols import Curriculum
from agentrl.rollout.mixture import Mixture, Share
from agentrl.tasks.seeded import SeededTasks
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn


class Remembering(SeededTasks):
    """A curriculum that only remembers what it has observed."""

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        assert task == self.task(index)
        SEEN.append((self.env, index, tuple(rewards_G)))


SEEN: list[tuple[str, int, tuple[float, ...]]] = []


def mixture(
    count: Any = "groups", source: type[SeededTasks] = SeededTasks, **weights: float
) -> Mixture:
    return Mixture(
        [
            Share(name, f"{name}_env", weight, source(NoSettings(), f"{name}_env", 0), 2, 1)
            for name, weight in weights.items()
        ],
        count,
    )


def group(task: Task, tokens: int = 1) -> Group:
    completion = Completion([1] * tokens, [0.0] * tokens, [0] * tokens, "stop")
    return Group(
        task,
        (Trajectory("x", task, (Turn((1,), completion, 0.0, {}),), Terminated()),),
        (Score(0.0),),
    )


def test_each_environment_gets_the_tasks_of_its_own_source_in_order_and_in_its_share() -> None:
    mixed = mixture(a=2, b=1)
    assert isinstance(mixed, Curriculum)
    tasks = [mixed.task(number) for number in range(9)]
    assert [task.env for task in tasks] == ["a", "a", "b"] * 3
    assert [task.id for task in tasks if task.env == "b"] == [f"b-train-{n:06d}" for n in range(3)]
    assert [task.seed for task in tasks if task.env == "b"] == [
        SeededTasks(NoSettings(), "b_env", 0).task(n).seed for n in range(3)
    ]


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(0, 1000))
def test_the_shares_are_kept_to_less_than_a_group_whatever_is_lost(
    weights: list[int], seed: int
) -> None:
    mixed, rng = mixture(**{f"e{n}": weight for n, weight in enumerate(weights)}), Random(seed)
    trained: Counter[str] = Counter()
    for number in range(300):
        task = mixed.task(number)
        if task.env == "e0" and rng.random() < 0.5:
            mixed.lost(task)
        else:
            mixed.trained([group(task)])
            trained[task.env] += 1
    for n, weight in enumerate(weights):
        assert abs(trained[f"e{n}"] - trained.total() * weight / sum(weights)) < len(weights)


def test_weights_may_count_tokens() -> None:
    mixed, tokens = mixture("tokens", a=1, b=1), Counter[str]()
    for number in range(400):
        task = mixed.task(number)
        length = 30 if task.env == "a" else 10
        mixed.trained([group(task, length)])
        tokens[task.env] += length
    assert tokens["a"] / tokens.total() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("count", ["groups", "tokens"])
@pytest.mark.parametrize("stopped_at", range(3, 30, 3))
def test_a_resumed_mixture_goes_on_as_one_that_was_never_stopped(
    count: str, stopped_at: int
) -> None:
    whole, again = mixture(count, a=3, b=2), mixture(count, a=3, b=2)
    fates: list[tuple[int, str, Any]] = []
    for number in range(stopped_at):
        task = whole.task(number)
        if number % 4 == 1:
            whole.lost(task)
            fates.append((number, task.env, "failed"))
        elif number % 4 == 2:
            fates.append((number, task.env, None))
        else:
            whole.trained([group(task, 1 + number)])
            fates.append((number, task.env, "trained"))
    again.replay(fates, gives_up=False)
    again.restore(json.loads(json.dumps(whole.state())))
    numbers = range(stopped_at, stopped_at + 20)
    assert [again.task(number) for number in numbers] == [whole.task(number) for number in numbers]


def test_an_environment_that_is_given_up_gives_its_share_to_the_others_also_when_resumed() -> None:
    mixed = mixture(a=2, b=1, c=1)
    for number in range(8):
        mixed.task(number)
    assert mixed.give_up("a")
    assert [mixed.task(number).env for number in range(8, 12)] == ["b", "c", "b", "c"]
    assert mixed.give_up("b")
    assert not mixed.give_up("c")
    again = mixture(a=2, b=1, c=1)
    again.replay([(0, "a", "failed"), (1, "b", "failed"), (2, "a", "failed")], gives_up=True)
    assert again.task(3).env == "b"
    assert {again.task(number).env for number in range(4, 9)} == {"b", "c"}


def test_a_run_that_ended_as_all_had_spent_their_budgets_gets_them_again_when_resumed() -> None:
    again = mixture(a=1, b=1)
    again.replay([(n, "ab"[n % 2], "failed") for n in range(4)], gives_up=True)
    assert [again.task(number).env for number in range(4, 8)] == ["a", "b", "a", "b"]
    assert [again[env].failed_before for env in "ab"] == [0, 0]


def test_a_curriculum_observes_the_outcomes_of_its_own_tasks_also_when_resumed() -> None:
    SEEN.clear()
    mixed = mixture(source=Remembering, a=1, b=1)
    tasks = [mixed.task(number) for number in range(6)]
    mixed.observe(3, tasks[3], (1.0, 0.0))
    mixed.observe(4, tasks[4], (0.5, 0.0))
    again = mixture(source=Remembering, a=1, b=1)
    again.replay(
        [(number, task.env, "trained") for number, task in enumerate(tasks)], gives_up=False
    )
    again.observe(3, tasks[3], (1.0, 0.0))
    again.observe(4, tasks[4], (0.5, 0.0))
    assert SEEN == [("b_env", 1, (1.0, 0.0)), ("a_env", 2, (0.5, 0.0))] * 2


def loaded(tmp_path: Path, text: str, *overrides: str) -> LoadedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


LIST = """
env:
  - frozen_lake
  - name: guess_number
    label: big
    weight: 2
    options: {high: 100}
    reward: [environment, {name: length, free: 1, limit: 5, weight: 0.1}]
    algorithm: {advantage: group_mean}
  - {name: qa, tasks: x.jsonl, reward: exact}
algorithm: {clip_low: 0.1}
"""


def test_env_may_be_a_list_whose_entries_are_overridden_and_read_back(tmp_path: Path) -> None:
    first = loaded(
        tmp_path,
        LIST,
        "env.mixture.1.weight=3",
        "env.exhausted=others",
        "env.mixture.2.reward=math",
    )
    lake, big, qa = first.config.env.mixture
    assert (lake.run_name, big.run_name, qa.run_name) == ("frozen_lake", "big", "qa")
    assert (big.weight, first.config.env.exhausted) == (3, "others")
    assert big.algorithm is not None
    assert (big.algorithm.settings.advantage, big.algorithm.settings.clip_low) == (
        "group_mean",
        0.1,
    )  # type: ignore[attr-defined]
    assert qa.tasks is not None
    assert (qa.tasks.name, qa.tasks.settings.data) == ("dataset", "x.jsonl")  # type: ignore[attr-defined]
    assert qa.reward is not None
    assert [part.name for part in qa.reward.parts] == ["math"]
    assert first.origins["env.mixture.1.label"].endswith("run.yaml:5")
    assert loaded(tmp_path, first.config.to_yaml()).config == first.config


def test_a_list_on_the_command_line_replaces_the_list_or_the_environment_of_the_file(
    tmp_path: Path,
) -> None:
    mixed = loaded(
        tmp_path,
        LIST,
        "env.exhausted=others",
        "env=[{name: sokoban}, {name: frozen_lake, weight: 3}]",
    ).config
    assert [(one.name, one.weight, one.tasks) for one in mixed.env.mixture] == [
        ("sokoban", 1, None),
        ("frozen_lake", 3, None),
    ]
    assert mixed.env.exhausted == "others"
    assert loaded(tmp_path, LIST, "env=sokoban").config.env.name == "sokoban"
    text = "env: {name: sokoban, options: {level: 2}}\n"
    assert [
        one.name for one in loaded(tmp_path, text, "env=[search, shop]").config.env.mixture
    ] == ["search", "shop"]
    assert loaded(tmp_path, text, "env=sokoban").config.env.options == {"level": 2}
    rewards = loaded(tmp_path, LIST, "env.mixture.1.reward=math").config.env.mixture[1].reward
    assert rewards is not None
    assert [part.name for part in rewards.parts] == ["math"]
    text = "env: sokoban\nevaluation: {suites: [{name: a, tasks: 3}, {name: b}]}\n"
    assert [
        one.name
        for one in loaded(tmp_path, text, "evaluation.suites=[{name: c}]").config.evaluation.suites
    ] == ["c"]


def test_an_entry_that_has_had_tasks_must_stay() -> None:
    mixed = mixture(a=1, b=1)
    with pytest.raises(ConfigError, match=r"env.mixture has no entry called 'old' any more"):
        mixed.replay([(0, "a", "trained"), (1, "old", "trained")], gives_up=False)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (
            "env.mixture.0.label=qa",
            r"more than one environment is called 'qa': give each a `label`",
        ),
        ("env.options={size: 4}", r"options belongs to one environment"),
        ("env.name=frozen_lake", r"write the name of one environment, or a list of several"),
        ("env.mixture.1.reward.0.scael=3", r"env.mixture.1.reward.0.scael: no such setting"),
        (
            "env.mixture.2.tasks=nothing",
            r"env.mixture.2.tasks.name: no task source named 'nothing'",
        ),
        ("env.mixture.2.algorithm=ppo", r"qa names another algorithm"),
        ("env.mixture.0.group_size=1", r"group_size is 1"),
        (
            "env.mixture.1.wieght=2",
            r"env.mixture.1.wieght: no such setting .* Did you mean 'weight'",
        ),
        ("env.mixture.0.name=frozen_lak", r"no env named 'frozen_lak'"),
        ("algorithm=ppo", r"big has algorithm settings of its own"),
    ],
)
def test_a_wrong_mixture_is_refused(tmp_path: Path, override: str, why: str) -> None:
    text = (
        LIST.replace("{advantage: group_mean}", "{clip_low: 0.3}")
        if override == "algorithm=ppo"
        else LIST
    )
    with pytest.raises(ConfigError, match=why):
        loaded(tmp_path, text, override)
