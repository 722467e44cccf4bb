"""An environment's own settings of the algorithm in a mixture: each changes its advantages, or is
refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentrl import plugins
from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.policy_loss import PolicyLoss
from agentrl.algorithms.rae import RoleAdvantage
from agentrl.algorithms.samples import traced_batch_of
from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError
from agentrl.settings.base import Settings
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Group, Score, Task

OTHER: Mapping[str, Any] = {
    "clip_low": 0.11,
    "clip_high": 0.9,
    "dual_clip": 3.0,
    "importance_cap": 5.0,
    "importance": "mask",
    "importance_floor": 0.5,
    "importance_level": "sequence",
    "entropy_bonus": 0.01,
    "kl": 0.1,
    "kl_reward": 0.1,
    "normalizer": 7.0,
}
"""A value of each setting of the loss that is not its default in any algorithm."""
BY_GROUP = (
    "grpo",
    "rloo",
    "gspo",
    "cispo",
    "sapo",
    "gigpo",
    "reinforce",
    "reinforce_pp",
    "rebn",
    "rae",
)


def mixed(tmp_path: Path, algorithm: Mapping[str, Any], own: Mapping[str, Any]) -> RunConfig:
    path = tmp_path / "run.yaml"
    entry = {"name": "guess_number", "label": "big", "algorithm": own}
    path.write_text(
        json.dumps({"env": {"mixture": [{"name": "frozen_lake"}, entry]}, "algorithm": algorithm})
    )
    return load_config(path).config


@pytest.mark.parametrize(
    "name",
    [BY_GROUP[0], *(pytest.param(name, marks=pytest.mark.long) for name in BY_GROUP[1:])],
)
def test_a_setting_that_only_the_loss_reads_is_refused_by_its_name(
    tmp_path: Path, name: str
) -> None:
    settings = plugins.load("algorithms", name).Config.model_fields
    of_surrogate = {"surrogate", "temperature_positive", "temperature_negative"}
    of_loss = [
        setting
        for setting in PolicyLoss.model_fields
        if setting in settings and setting not in of_surrogate
    ]
    assert len(of_loss) > 5
    for setting in of_loss:
        with pytest.raises(ConfigError, match=rf"big sets algorithm\.{setting} of its own"):
            mixed(tmp_path, {"name": name}, {setting: OTHER[setting]})
    both = {setting: OTHER[setting] for setting in of_loss[:2]}
    with pytest.raises(ConfigError, match=r"clip_low and algorithm\.clip_high"):
        mixed(tmp_path, {"name": name}, both)
    mixed(tmp_path, {"name": name, **both}, both)  # as for the whole run


def test_the_surrogate_is_one_for_the_whole_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"big sets algorithm\.surrogate"):
        mixed(tmp_path, {"name": "rloo"}, {"surrogate": "cispo"})
    shared = {"name": "rloo", "surrogate": "cispo"}
    mixture = mixed(tmp_path, shared, {"gamma": 0.5}).env.mixture
    assert mixture[1].algorithm is not None
    assert dict(mixture[1].algorithm.settings)["surrogate"] == "cispo"


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        ({"name": "grpo"}, {"advantage": "group_mean"}),
        ({"name": "grpo"}, {"gamma": 0.5}),
        ({"name": "grpo"}, {"reward_to_go": True, "baseline": "turn"}),
        ({"name": "gigpo"}, {"step_weight": 2.0}),
        ({"name": "gigpo"}, {"step_gamma": 0.5}),
        ({"name": "reinforce"}, {"reward_to_go": False}),
        ({"name": "reinforce_pp"}, {"group_baseline": True}),
        ({"name": "rae"}, {"decay": 0.5}),
        ({"name": "rae"}, {"roles": False}),
    ],
)
def test_a_setting_of_the_advantages_may_be_an_environments_own(
    tmp_path: Path, algorithm: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    _, big = mixed(tmp_path, algorithm, own).env.mixture
    assert big.algorithm is not None
    assert {name: getattr(big.algorithm.settings, name) for name in own} == own


def test_a_setting_that_others_make_idle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"big sets algorithm\.baseline of its own"):
        mixed(tmp_path, {"name": "grpo"}, {"baseline": "turn"})


class Copied(Grpo):
    """A user's algorithm, which copies its settings when it is made."""

    class Config(Settings):
        """Its settings."""

        scale: Annotated[float, Field(gt=0)] = 1.0
        """Of the advantages."""
        sharpness: Annotated[float, Field(gt=0)] = 1.0
        """Of the loss."""

    def __init__(self, config: Config) -> None:  # type: ignore[override]
        super().__init__()
        self.scale, self.sharpness = config.scale, config.sharpness

    def advantages(self, group: Group) -> Sequence[float]:
        """Scaled rewards."""
        return [self.scale * reward for reward in group.rewards_G]


def test_an_algorithm_that_copies_its_settings_is_asked_what_they_change(tmp_path: Path) -> None:
    name = {"name": f"{__name__}:Copied"}
    mixed(tmp_path, name, {"scale": 2.0})
    with pytest.raises(ConfigError, match=r"big sets algorithm\.sharpness of its own"):
        mixed(tmp_path, name, {"scale": 2.0, "sharpness": 3.0})


def group(env: str, *rewards: float) -> Group:
    task = Task(env, 0, {}, env)
    played = tuple(replace(trajectory("x", rewards=[reward]), task=task) for reward in rewards)
    return Group(task, played, tuple(map(Score, rewards)))


class Run:
    """A mixture of `a`, with the run's decay, and `b`, with its own."""

    def __init__(self) -> None:
        self.shared = RoleAdvantage(RoleAdvantage.Config(decay=0.9))
        self.own = {"b": RoleAdvantage(RoleAdvantage.Config(decay=0.5))}
        self.processing = BatchProcessing(BatchProcessingConfig(), self.shared, self.own)

    def advantages(self, *groups: Group) -> list[float]:
        batch = traced_batch_of(list(groups), self.shared, self.processing, 0, self.own).batch
        return [
            float(batch.advantages_N[batch.trajectories_N == number][0])
            for number in range(2 * len(groups))
        ]


def test_the_baseline_of_an_environment_with_a_decay_of_its_own_is_learned() -> None:
    run, groups = Run(), (group("a", 1.0, 0.0), group("b", 4.0, 2.0))
    assert run.advantages(*groups) == [1.0, 0.0, 4.0, 2.0]
    metrics = run.processing.update(list(groups))
    low, high = (1 - 0.9**2) * 0.5, (1 - 0.5**2) * 3.0
    assert metrics == {"baseline/a": pytest.approx(low), "envs/b/baseline/b": pytest.approx(high)}
    assert run.advantages(*groups) == pytest.approx([1 - low, -low, 4 - high, 2 - high])


def test_a_resumed_mixture_goes_on_with_each_baseline() -> None:
    batches = [[group("a", 0.1 * n, 1 / (n + 3)), group("b", 0.7, 0.2 * n)] for n in range(4)]
    whole, first = Run(), Run()
    rows = [whole.processing.update(batch) for batch in batches]
    for batch in batches[:2]:
        first.processing.update(batch)
    second = Run()
    second.processing.restore(json.loads(json.dumps(first.processing.state())))
    assert [second.processing.update(batch) for batch in batches[2:]] == rows[2:]
