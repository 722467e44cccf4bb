"""The section `reward` of a config: one reward, or parts with weights; strict in either form."""

from pathlib import Path

import pytest
import yaml

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.flow import Retries
from agentrl.scoring.build import build_pipeline
from agentrl.scoring.part import RewardPart
from agentrl.scoring.rule_pool import RulePool
from agentrl.trajectory import Trajectory

BASE = "env: frozen_lake\nsteps: 3\n"
LIST = (
    BASE + "reward:\n- environment\n- name: tests.scoring.test_config:brevity\n  weight: 0.5\n  as:"
    " short\n  limit: 7\n"
)


def brevity(trajectory: Trajectory, *, limit: int, softly: bool = False) -> float:
    """A function as a reward; its keyword-only parameters are settings."""
    return float(trajectory.num_tokens <= limit) if softly else -1.0


def two_arguments(trajectory, gold):
    return 0.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "lake.yaml"
    file.write_text(LIST)
    return file


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def parts(path: Path, *overrides: str) -> list[tuple[str, float]]:
    return [(part.name, part.weight) for part in made(path, *overrides)]


def made(path: Path, *overrides: str) -> tuple[RewardPart, ...]:
    return build_pipeline(
        load_config(path, overrides).config.reward, RulePool(), deadline=60.0, retries=Retries()
    ).parts


def test_a_list_of_parts_has_names_and_weights_and_overrides_by_number(path):
    assert parts(path) == [("environment", 1.0), ("short", 0.5)]
    assert parts(path, "reward.1.weight=0.25", "reward.0.as=lake") == [
        ("lake", 1.0),
        ("short", 0.25),
    ]
    assert parts(path, "reward.2={name: environment, as: again, weight: -1}")[2] == ("again", -1.0)
    reward = made(path, "reward.1.limit=9")[1].reward
    assert reward.keywords == {"limit": 9, "softly": False}


def test_one_reward_is_written_as_before_and_a_whole_one_replaces_what_the_file_says(path):
    assert parts(path, "reward=environment") == [("environment", 1.0)]
    assert parts(path, "reward=[{name: environment, as: a}, {name: environment, as: b}]") == [
        ("a", 1.0),
        ("b", 1.0),
    ]
    path.write_text(BASE + "reward:\n  scale: 2\n")
    config = load_config(path, ["reward.weight=3", "reward=environment"]).config.reward
    assert (config.listed, config.parts[0].settings.scale, config.parts[0].settings.weight) == (
        False,
        2.0,
        3.0,
    )


def test_every_setting_of_a_part_says_where_it_came_from(path):
    rows = {
        key: (value, origin)
        for key, value, origin in load_config(path, ["reward.1.weight=0.3"]).rows()
    }
    assert rows["reward.1.weight"] == (0.3, "command line")
    assert rows["reward.1.limit"][0] == 7
    assert rows["reward.1.limit"][1].endswith("lake.yaml:8")
    assert rows["reward.0.name"][1].endswith("lake.yaml:4")
    assert rows["reward.0.weight"] == (1.0, "default")


def test_a_wrong_setting_of_a_part_names_the_nearest_right_one_and_its_line(path):
    assert "reward.1.wieght: no such setting (command line). Did you mean 'weight'?" in problem(
        path, "reward.1.wieght=1"
    )
    path.write_text(LIST.replace("limit", "limitt"))
    said = problem(path)
    assert "reward.1.limitt: no such setting" in said
    assert "lake.yaml:8). Did you mean 'limit'?" in said
    assert "reward.1.limit: Field required" in said
    assert "reward.0.name: no reward named 'enviroment'. Did you mean 'environment'?" in problem(
        path, "reward.0=enviroment"
    )
    assert "got 'heavy' (command line)" in problem(path, "reward.0.weight=heavy")
    assert "reward.0.weight" in problem(path, "reward.0.weight=.nan")


def test_a_path_that_does_not_say_which_part_or_leaves_a_gap_is_refused(path):
    assert "reward is a list here, so name the part" in problem(path, "reward.weight=2")
    assert "0 is environment, 1 is tests.scoring.test_config:brevity" in problem(
        path, "reward.7.weight=2"
    )
    assert "reward.2.name: missing (command line)" in problem(path, "reward.2.weight=2")
    assert "the list is empty" in problem(path, "reward=[]")


def test_two_parts_of_one_name_are_told_apart_or_refused(path):
    said = problem(path, "reward=[environment, environment]")
    assert "more than one part is called 'environment'; give each a name with `as: NAME`" in said


def test_a_function_of_two_arguments_is_no_reward_and_the_error_says_how_to_write_one(path):
    said = problem(path, "reward=tests.scoring.test_config:two_arguments")
    assert "write f(trajectory) -> float" in said
    assert "Installed" not in said
    assert "it must be a class or a function" in problem(
        path, "reward=tests.scoring.test_config:BASE"
    )


def test_the_resolved_list_reads_back_to_itself(path, tmp_path):
    config = load_config(path).config
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again).config == config
    assert yaml.safe_load(config.to_yaml())["reward"][1] == {
        "name": "tests.scoring.test_config:brevity",
        "limit": 7,
        "softly": False,
        "weight": 0.5,
        "as": "short",
        "isolation": None,
    }


def test_what_is_quoted_in_the_file_stays_a_text(path):
    path.write_text(
        BASE
        + "reward:\n- {name: regex, pattern: '[0-9]'}\n- {name: exact, gold: '1e3'}\nmodel: '7'\n"
    )
    config = load_config(path).config
    settings = [part.settings for part in config.reward.parts]
    assert (settings[0].pattern, settings[1].gold, config.model.name) == ("[0-9]", "1e3", "7")
