"""Runs whose tasks come from files, and from a curriculum that their config names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.envs.guess_number import weak_player
from agentrl.errors import ConfigError
from agentrl.ledger.ledger import read_ledger
from agentrl.plugins import NoSettings
from agentrl.settings.base import Settings
from agentrl.tasks.seeded import SeededTasks
from agentrl.trajectory import Score, Task, Trajectory
from tests.recipes.renaming import rename_metrics
from tests.tasks.test_backplay import config_of, play, save

pytestmark = pytest.mark.slow

CONFIG = """
env: guess_number
steps: 2
tasks: {{name: "{module}:Widening", high: 4}}
rollout: {{groups_per_step: 2, group_size: 2, budget: {{turns: 3}}, sampling: {{max_tokens: 4}}}}
evaluation: {{tasks: 2}}
trackers: []
"""

QUESTIONS = """
env: qa
steps: 2
tasks: {data}
reward: {{name: length, free: 1, limit: 9}}
rollout: {{groups_per_step: 4, group_size: 2, sampling: {{max_tokens: 4}}}}
evaluation: {{tasks: 9}}
trackers: []
"""

MIXED = """
env:
  - {{name: guess_number, weight: 2, options: {{high: 4}}, budget: {{turns: 2}}}}
  - {{name: qa, tasks: {data}, reward: {{name: length, free: 1, limit: 9}}, group_size: 3,
     max_tokens: 2}}
steps: 2
rollout: {{groups_per_step: 3, group_size: 2, budget: {{turns: 3}}, sampling: {{max_tokens: 4}}}}
evaluation: {{tasks: 2}}
trackers: []
"""


class Widening:
    """The range of numbers grows by one with each task that was trained on."""

    class Config(Settings):
        """Where it begins."""

        high: int

    observed: Sequence[tuple[str, int, str]] = []
    """(split, index, id of the task) of all outcomes in this process."""

    def __init__(
        self, config: Config, env: str, seed: int, split: str, options: Mapping[str, Any]
    ) -> None:
        self.high, self.split = config.high, split
        self.seeded = SeededTasks(config, env, seed, split, options)

    def task(self, index: int) -> Task:
        task = self.seeded.task(index)
        return Task(task.env, task.seed, {"high": self.high}, task.id)

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        assert len(rewards_G) == 2
        self.high += 1
        Widening.observed = [*Widening.observed, (self.split, index, task.id)]


def test_a_curriculum_is_named_by_the_config_and_learns_the_same_outcomes_again_when_resumed(
    tmp_path: Path, agentrl: Any, tiny_model_dir: Path
) -> None:
    path = tmp_path / "widening.yaml"
    path.write_text(
        CONFIG.format(module=__name__) + f"model: {tiny_model_dir}\nrun_dir: {tmp_path / 'run'}\n"
    )
    Widening.observed = []
    done = agentrl("train", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [("train", index, f"train-{index:06d}") for index in range(8)]
    assert Widening.observed == expected[:4]
    Widening.observed = []
    done = agentrl("train", "--resume", str(tmp_path / "run"), "steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert Widening.observed == expected
    fates = json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]
    assert (fates["trained"], fates["total"]) == (8, 8)


FILTERED = """
env: guess_number
steps: 3
tasks: "{module}:Drawing"
reward: {{name: "{module}:EveryOther"}}
rollout:
  groups_per_step: 2
  group_size: 2
  max_live_episodes: 2
  filter_zero_variance: true
  budget: {{turns: 2}}
  sampling: {{max_tokens: 4}}
evaluation: {{tasks: 0}}
checkpoint: {{every: 1}}
trackers: []
"""


class EveryOther:
    """A reward that tells the members of every other task apart."""

    async def score(self, trajectory: Trajectory) -> Score:
        _, number, member, _ = trajectory.id.replace("-", "/").split("/")
        return Score(float(int(number) % 2 and int(member)))


class Drawing:
    """A curriculum that knows which outcomes it had observed when it drew each task."""

    class Config(Settings):
        """It has none."""

    drawn: ClassVar[dict[int, tuple[int, ...]]] = {}
    fails_at: ClassVar[int | None] = None
    """The task whose draw ends the run."""

    def __init__(
        self, config: Config, env: str, seed: int, split: str, options: Mapping[str, Any]
    ) -> None:
        self.seeded = SeededTasks(NoSettings(), env, seed, split, options)
        self.observed: tuple[int, ...] = ()

    def task(self, index: int) -> Task:
        if self.seeded.split == "train":
            if index == Drawing.fails_at:
                raise ConfigError("the run ends here")
            Drawing.drawn[index] = self.observed
        return self.seeded.task(index)

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        self.observed += (index,)


@pytest.mark.parametrize("stopped_at", [6, 7])
def test_a_run_stopped_after_it_filtered_draws_its_tasks_by_the_same_outcomes(
    stopped_at: int,
    tmp_path: Path,
    agentrl: Any,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = {}
    for name, fails_at in {"whole": None, "stopped": stopped_at}.items():
        monkeypatch.setattr(Drawing, "drawn", {})
        monkeypatch.setattr(Drawing, "fails_at", fails_at)
        run, path = tmp_path / name, tmp_path / f"{name}.yaml"
        path.write_text(
            FILTERED.format(module=__name__) + f"model: {tiny_model_dir}\nrun_dir: {run}\n"
        )
        done = agentrl("train", str(path))
        if fails_at is not None:
            assert done.returncode == 2, done.stdout + done.stderr
            monkeypatch.setattr(Drawing, "fails_at", None)
            done = agentrl("train", "--resume", str(run))
        assert done.returncode == 0, done.stdout + done.stderr
        drawn[name] = Drawing.drawn
    assert drawn["stopped"] == drawn["whole"]


def test_a_file_of_questions_is_trained_on_once_an_epoch_and_a_run_does_not_go_on_with_another_file(
    tmp_path: Path, agentrl: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, run = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text(
        "".join(json.dumps({"prompt": f"{n}?", "answer": n, "id": n}) + "\n" for n in range(17))
    )
    path = tmp_path / "questions.yaml"
    path.write_text(QUESTIONS.format(data=data) + f"model: {tiny_model_dir}\nrun_dir: {run}\n")
    done = agentrl("train", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    done = agentrl("train", "--resume", str(run), "steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    with read_ledger(run / "ledger.sqlite") as ledger:
        played = [task.options["prompt"] for _, task, _ in ledger.outcomes()]
    assert len(played) == len(set(played)) == 16  # one of 17 is held out
    [row] = [
        row
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if row["step"] == 4
    ]
    assert row["eval/episodes"] == 1
    data.write_text(data.read_text().replace("3?", "33?"))
    done = agentrl("train", "--resume", str(run), "steps=5")
    assert done.returncode == 2
    assert "are not those that the run in" in done.stderr


@pytest.mark.long
def test_a_mixture_trains_each_environment_in_its_own_way_and_goes_on_with_the_same_tasks(
    tmp_path: Path, agentrl: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(30)))
    tasks = {}
    for name, launches in {"whole": [4], "resumed": [2, 4]}.items():
        run, path = tmp_path / name, tmp_path / f"{name}.yaml"
        path.write_text(MIXED.format(data=data) + f"model: {tiny_model_dir}\nrun_dir: {run}\n")
        for number, steps in enumerate(launches):
            done = agentrl(
                "train", *(["--resume", str(run)] if number else [str(path)]), f"steps={steps}"
            )
            assert done.returncode == 0, done.stdout + done.stderr
        with read_ledger(run / "ledger.sqlite") as ledger:
            outcomes = list(ledger.outcomes())
        tasks[name] = [task for _, task, _ in outcomes]
        assert {len(rewards) for _, task, rewards in outcomes if task.env == "qa"} == {3}
    assert tasks["whole"] == tasks["resumed"]
    assert [task.env for task in tasks["whole"]] == ["guess_number", "guess_number", "qa"] * 4
    rows = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    step = next(row for row in rows if "loss" in row)
    assert (step["envs/qa/groups"], step["envs/qa/episodes"], step["envs/guess_number/groups"]) == (
        1,
        3,
        2,
    )
    assert step["envs/qa/tokens"] <= 6
    assert step["envs/guess_number/turns"] <= 2
    [held_out] = [row for row in rows if row["step"] == 4 and "eval/success" in row]
    assert (held_out["eval/episodes"], held_out["eval/envs/qa/episodes"]) == (4, 2)


LEVELS = """
env: guess_number
steps: 4
tasks: {{name: levels, levels: [{{high: 2}}, {{high: 3}}, {{high: 90}}], memory: 2, explore: 0.3}}
reward: {{name: length, free: 1, limit: 9}}
rollout: {{groups_per_step: 3, group_size: 2, budget: {{turns: 2}}, sampling: {{max_tokens: 4}}}}
evaluation: {{tasks: 0}}
checkpoint: {{every: 1}}
trackers: []
"""


BACKPLAY = """
env: guess_number
steps: 4
tasks: {{name: backplay, path: {recorded}, success_at: -0.5, groups: 1, held_out: 0}}
reward: {{name: length, free: 1, limit: 9}}
rollout: {{groups_per_step: 3, group_size: 2, budget: {{turns: 3}}, sampling: {{max_tokens: 4}}}}
evaluation: {{tasks: 0}}
checkpoint: {{every: 1}}
trackers: []
"""


@pytest.fixture
def recorded(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A folder of episodes that have found their number in three to eight turns."""
    config = config_of(tmp_path, tiny_model_dir, "guess_number")
    tasks = [Task("guess_number", seed, {}, f"train-{seed:06d}") for seed in range(6)]
    episodes = [play(config, tiny_model_dir, task, weak_player) for task in tasks]
    return save(tmp_path / "recorded", *[one for one in episodes if 3 <= len(one.turns) <= 8])


@pytest.mark.long
@pytest.mark.parametrize("curriculum", [LEVELS, BACKPLAY], ids=["levels", "backplay"])
def test_a_curriculum_run_that_was_resumed_equals_one_that_was_not(
    curriculum: str, tmp_path: Path, agentrl: Any, tiny_model_dir: Path, recorded: Path
) -> None:
    ends = {}
    for name, launches in {"whole": [4], "resumed": [2, 4]}.items():
        run, path = tmp_path / name, tmp_path / f"{name}.yaml"
        written = curriculum.format(recorded=recorded)
        path.write_text(f"{written}model: {tiny_model_dir}\nrun_dir: {run}\n")
        for number, steps in enumerate(launches):
            if number:
                rename_metrics(run)
            done = agentrl(
                "train", *(["--resume", str(run)] if number else [str(path)]), f"steps={steps}"
            )
            assert done.returncode == 0, done.stdout + done.stderr
        with read_ledger(run / "ledger.sqlite") as ledger:
            outcomes = list(ledger.outcomes())
        ends[name] = outcomes, json.loads((run / "summary.json").read_text())["weights_sha256"]
    assert ends["whole"] == ends["resumed"]
    tasks = [task for _, task, _ in ends["whole"][0]]
    # What the curriculum chooses has changed: the range of numbers, or where episodes begin.
    chosen = {task.options.get("high") or task.id.rpartition("-")[2] for task in tasks}
    assert len(chosen) > 1


STATEFUL = """
env:
  mixture:
    - {{name: guess_number, options: {{high: 4}}, budget: {{turns: 2}}}}
    - {{name: qa, tasks: {data}, max_tokens: 9}}
  weights_count: tokens
steps: 4
algorithm: rae
reward: {{name: length, free: 1, limit: 9}}
batch_processing: {{constraints: [{{part: length, at_most: 0.1, initial: 0.5}}]}}
rollout: {{groups_per_step: 3, group_size: 2, sampling: {{max_tokens: 4}}}}
evaluation: {{tasks: 2, every: 1}}
checkpoint: {{every: 1, best: eval/reward, keep: 1, keep_best: 1}}
trackers: []
"""


@pytest.mark.long
def test_a_resumed_run_depends_on_no_name_of_a_metric(
    tmp_path: Path, agentrl: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(30)))
    ends, states = [], []
    for name, launches in {"whole": [4], "resumed": [3, 4]}.items():
        run, path = tmp_path / name, tmp_path / f"{name}.yaml"
        path.write_text(STATEFUL.format(data=data) + f"model: {tiny_model_dir}\nrun_dir: {run}\n")
        for number, steps in enumerate(launches):
            if number:
                rename_metrics(run)
            done = agentrl(
                "train", *(["--resume", str(run)] if number else [str(path)]), f"steps={steps}"
            )
            assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((run / "summary.json").read_text())
        kept = sorted(checkpoint.name for checkpoint in (run / "checkpoints").iterdir())
        ends.append((summary["weights_sha256"], kept))
        states.append(json.loads((run / "checkpoints" / "step_000004" / "state.json").read_text()))
    assert ends[0] == ends[1]
    assert states[0] == states[1]
    assert states[0]["batch_processing"]["learners"][""]["baselines"].keys() == {
        "guess_number",
        "qa",
    }
    assert states[0]["batch_processing"]["multipliers"]["length"] not in (0.0, 0.5)
    assert all(states[0]["tasks"]["tokens"].values())
