"""The recipe `archer` as a user runs it: nothing is lost when it is killed, and later uses of a
task are counted.
"""

import json
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.ledger.ledger import read_ledger
from tests.recipes.test_runs import folder, kill_during, start, train

CONFIG = """
recipe: {name: archer, replay: 2, replayed: 1.5, critic_updates: 2, critic_warmup: 1}
algorithm: {name: archer, truncated: bootstrap}
steps: 4
env: guess_number
rollout: {groups_per_step: 2, group_size: 2, budget: {turns: 3}, sampling: {max_tokens: 4}}
trainer: {lr: 3e-3, minibatches: 2}
evaluation: {tasks: 0}
checkpoint: {every: 1}
trackers: []
"""
REWARD = (
    "def wordy(trajectory):\n    return sum(len(m.content) for m in trajectory.messages[2::2]) /"
    " 20\n"
)


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.name=turn_ppo", r"algorithm=turn_ppo has none: set algorithm=archer"),
        ("recipe.critic_warmup=4", r"the run has 4 steps, so the policy would never learn"),
        (
            "rollout.staleness_rule=segment",
            r"recipe=archer uses tasks again only when they have been trained on whole",
        ),
        ("recipe.replay=0", r"recipe.replay: .*greater than 0"),
        ("algorithm.kl_reward=0.1", r"algorithm.kl_reward"),
        ("batch_processing.normalize=batch", r"'archer' asks a critic: leave it out"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_starts(
    run_yaml: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(run_yaml, [override])


def rows(run: Path) -> list[dict[str, float]]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in steps if "reward" in row]


def uses(run: Path, tasks: int) -> list[tuple[str, int | None, int]]:
    """The fate of each task, the step that trained on it first, and how often it was used."""
    with read_ledger(run / "ledger.sqlite") as ledger:
        records = [ledger.task(number) for number in range(tasks)]
    return [
        (str(record.fate), record.step, record.uses) for record in records if record is not None
    ]


@pytest.mark.long
def test_a_run_that_is_killed_learns_what_one_that_was_not_learns(
    tmp_path: Path, run_yaml: Path
) -> None:
    for name in ("whole", "killed"):
        (folder(tmp_path, name) / "lengths.py").write_text(REWARD)
    whole_in, killed_in = tmp_path / "whole", tmp_path / "killed"
    settings = [str(run_yaml), "run_dir=run", "reward=lengths:wordy"]
    whole = train(*settings, cwd=whole_in)
    command = start(*settings, cwd=killed_in)
    kill_during(command, killed_in / "run", steps=2, extra=0.1)
    killed = train("--resume", "run", cwd=killed_in)
    assert killed["weights_sha256"] == whole["weights_sha256"]
    learned = [
        [
            (row["critic/loss"], row["critic/earlier_episodes"], row["loss"])
            for row in rows(name / "run")
        ]
        for name in (whole_in, killed_in)
    ]
    assert learned[0] == learned[1]
    losses, earlier, policy = zip(*learned[0], strict=True)
    assert all(loss > 0 for loss in losses)
    assert earlier == (0, 4, 6, 6)
    assert policy[0] == 0  # the critic learned alone
    assert all(policy[1:])
    counted = uses(whole_in / "run", 8)
    assert uses(killed_in / "run", 8) == counted
    assert [(fate, step) for fate, step, _ in counted] == [
        ("trained", number // 2) for number in range(8)
    ]
    used = [times for _, _, times in counted]
    # Both updates of the second step draw both, and the third's may.
    assert all(3 <= times <= 5 for times in used[:2])
    assert all(times <= 5 for times in used)
    assert used[-2:] == [1, 1]


DOORS = """
from agentrl.envs.base import TextEnv


class Doors(TextEnv):
    \"\"\"Two doors. Only who has chosen the right colour at both gets the prize, at the end.\"\"\"

    system_prompt = "Choose a colour: red green blue"
    isolation = "inline"

    def start(self, seed, options):
        self.chosen = []
        return "first door"

    def step(self, action):
        self.chosen.append(action.strip())
        won = self.chosen == ["green", "blue"]
        return "second door", float(won), len(self.chosen) == 2, False, {"success": won}


def anything(env, rng):
    return rng.choice(("red", "green", "blue"))
"""
LEARNING = """
recipe:
  name: archer
  critic_warmup: 8
  demonstrations: {player: "doors:anything", episodes: 256, episodes_per_step: 16, lr: 3e-3}
algorithm: archer
steps: 50
env: doors:Doors
rollout: {groups_per_step: 32, group_size: 1, budget: {turns: 3}, sampling: {max_tokens: 3}}
trainer: {lr: 2e-4}
critic: {lr: 3e-3, minibatches: 4}
evaluation: {tasks: 50}
trackers: []
"""


@pytest.mark.long
def test_a_policy_learns_from_its_critic_what_a_first_answer_leads_to(tmp_path: Path) -> None:
    (tmp_path / "doors.py").write_text(DOORS)
    (tmp_path / "learning.yaml").write_text(LEARNING)
    summary = train("learning.yaml", "run_dir=run", cwd=tmp_path)
    assert summary["success_before"] < 0.3
    assert summary["success_after"] > 0.5
    assert max(row["critic/explained_variance"] for row in rows(tmp_path / "run")[:8]) > 0.4
