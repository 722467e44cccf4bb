"""Runs whose tasks come from a curriculum that their config names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.protocols import Settings
from agentrl.tasks.seeded import SeededTasks
from agentrl.trajectory import Task

pytestmark = pytest.mark.slow

CONFIG = """
env: guess_number
steps: 2
tasks: {{name: "{module}:Widening", high: 4}}
rollout: {{groups_per_step: 2, group_size: 2, max_turns: 3, sampling: {{max_tokens: 4}}}}
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

    def __init__(self, config: Config, env: str, seed: int, split: str, options: Mapping[str, Any]) -> None:
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
    path.write_text(CONFIG.format(module=__name__) + f"model: {tiny_model_dir}\nrun_dir: {tmp_path / 'run'}\n")
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
