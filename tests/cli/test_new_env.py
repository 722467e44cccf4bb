"""`agentrl new-env` and `agentrl play`, as an author meets them."""

import json
import runpy
import sys
from importlib.util import spec_from_file_location
from statistics import fmean

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.cli.new_env import write_env_package
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.plugins import load


def play(*arguments: str, said: str = "") -> str:
    done = CliRunner().invoke(app, ["play", *arguments], input=said, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_new_environment_passes_check_env_and_its_own_test_at_once_and_is_short(
    agentrl, tmp_path, monkeypatch
):
    made = agentrl("new-env", "my-game", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "my_game"
    assert "agentrl check-env my_game:MyGame" in made.stdout
    # After `cd my_game`.
    assert "After `pip install -e .` there, its name is 'my_game' everywhere." in made.stdout
    monkeypatch.syspath_prepend(folder)
    checked = agentrl("check-env", "my_game:MyGame", cwd=folder)
    assert checked.returncode == 0, checked.stdout
    tests = runpy.run_path(str(folder / "test_my_game.py"))
    run = [function() for name, function in tests.items() if name.startswith("test_")]
    assert len(run) == 2
    source = (folder / "my_game.py").read_text().splitlines()
    assert len([line for line in source if line.strip()]) <= 35
    assert max(map(len, source)) <= 120


def test_a_new_environment_with_tools_passes_its_own_test_and_says_how_to_call(
    tmp_path, monkeypatch
):
    folder = write_env_package("my_safe", tmp_path, tools=True)
    monkeypatch.syspath_prepend(folder)
    tests = runpy.run_path(str(folder / "test_my_safe.py"))
    assert len([function() for name, function in tests.items() if name.startswith("test_")]) == 2
    config = load_config(folder / "my_safe.yaml").config
    assert (config.env.name, dict(config.env.options)) == ("my_safe:MySafe", {"short_calls": True})


def test_the_folder_of_an_installed_package_does_not_hide_it(tmp_path, monkeypatch):
    """The folder that holds `my_game/my_game.py` is the current one, and the module was installed
    editable.
    """
    folder = write_env_package("hidden_game", tmp_path)

    class Editable:
        def find_spec(self, name, path, target=None):
            return (
                spec_from_file_location(name, folder / "hidden_game.py")
                if name == "hidden_game"
                else None
            )

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
    monkeypatch.delitem(sys.modules, "hidden_game", raising=False)
    assert load("envs", "hidden_game:HiddenGame").__name__ == "HiddenGame"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["game", "tools"])
def test_a_tiny_model_learns_a_new_environment_by_its_config(agentrl, tmp_path, kind):
    folder = write_env_package(f"learned_{kind}", tmp_path, tools=kind == "tools")
    done = agentrl(
        "train",
        f"learned_{kind}.yaml",
        "steps=7",
        "seed=1",
        "evaluation.tasks=10",
        "recipe.demonstrations.episodes=768",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    metrics = (folder / "runs" / f"learned_{kind}" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.08, rewards


def test_its_config_is_valid_and_its_entry_point_names_its_class(tmp_path, monkeypatch):
    folder = write_env_package("card_table", tmp_path)
    monkeypatch.syspath_prepend(folder)
    assert load_config(folder / "card_table.yaml").config.env.name == "card_table:CardTable"
    assert 'card_table = "card_table:CardTable"' in (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "name",
    [
        *["random", "frozen_lake", "agentrl", "class", "9lives", "a.b", "../up", "_"],
        *["none", "true", "_1", "größe", "straße"],
    ],
)
def test_a_name_that_cannot_be_or_is_taken_is_refused_and_nothing_is_written(name, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be the name|choose another"):
        write_env_package(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_class_does_not_take_a_name_that_its_file_imports(tmp_path):
    with pytest.raises(ConfigError, match=r"'ToolResult', which .* is taken in its file"):
        write_env_package("tool-result", tmp_path, tools=True)
    assert write_env_package("tool-result", tmp_path).is_dir()


def test_a_link_to_nowhere_is_left_alone(tmp_path):
    (tmp_path / "my_game").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        write_env_package("my_game", tmp_path)


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "my_game").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        write_env_package("my_game", tmp_path)
    assert list((tmp_path / "my_game").iterdir()) == []


def test_a_person_sees_what_the_model_would_and_plays_to_the_end():
    output = play(
        "guess_number", "--seed", "1", said="no number\n" + "".join(f"{n}\n" for n in range(1, 9))
    )
    assert "system Guess the secret number" in output
    assert "user Guess a number from 1 to 16." in output
    assert "user Answer with one number" in output
    assert output.endswith("terminated after 6 turns, reward 1\n")


def test_a_person_who_leaves_is_told_where():
    output = play("frozen_lake", "--options", "{size: 6}", said="left\n")
    assert "left after 1 turns, reward 0" in output


def test_a_tool_environment_shows_its_schemas_and_a_call_to_copy():
    output = play("calculator")
    assert '"type": "function"' in output
    assert 'a call <tool_call>\n{"name":' in output or 'a call <tool_call>{"name":' in output


def test_a_scripted_player_plays_in_a_persons_place_and_always_the_same():
    arguments = (
        "frozen_lake",
        "--player",
        "agentrl.envs.frozen_lake:careful_player",
        "--max-turns",
        "5",
    )
    first = play(*arguments)
    assert first == play(*arguments)
    assert first.count("assistant ") == first.count("reward ") - 1
    assert "after" in first
