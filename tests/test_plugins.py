"""Plug-ins of other packages: those that fail, share a name, or have a wrong shape."""

import copy
import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl import plugins
from agentrl.cli import environments
from agentrl.config.from_file import load_config
from agentrl.config.loading import check_options
from agentrl.conversation.tool_formats import known_marks
from agentrl.errors import ConfigError, PluginError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.protocols.env import isolation_of, preload_of
from agentrl.rollout.rule_registry import load_rule
from tests.distributions import write_distribution

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package of these entry points, with modules of this code."""
    monkeypatch.syspath_prepend(tmp_path)
    return partial(write_distribution, tmp_path)


def config_with(tmp_path: Path, *overrides: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text("env: frozen_lake\nmodel: tiny\n")
    return load_config(path, overrides)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = 1\nclass Game(:\n", r"raised SyntaxError: invalid syntax \(.*broken_game.py:2\)$"),
        ("x = {}\nx['board']\n", r"raised KeyError: 'board' \(.*broken_game.py:2 in <module>\)$"),
        (
            "\nimport no_such_library\n",
            r"ModuleNotFoundError: No module named 'no_such_library'"
            r" \(.*broken_game.py:2 in <module>\)$",
        ),
        (
            "from json import nothing\n",
            r"cannot import name .* \(.*broken_game.py:1 in <module>\)$",
        ),
        (
            "def __getattr__(name):\n    raise OSError('no board')\n",
            r"'Game' of 'broken_game' raised OSError: no board \(.*broken_game.py:2 in __getattr__",
        ),
    ],
    ids=["syntax", "error", "library", "name", "lazy"],
)
def test_a_plug_in_that_cannot_be_imported_is_named_with_its_own_line(
    install: Install, code: str, why: str
) -> None:
    install("broken", "[agentrl.envs]\nbroken = broken_game:Game\n", broken_game=code)
    for name in ("broken", "broken_game:Game"):
        with pytest.raises(PluginError, match=why):
            plugins.load("envs", name)


def test_an_address_without_a_name_in_it_is_answered_with_those_that_there_are(
    install: Install,
) -> None:
    install("games", "[agentrl.envs]\nno_class = some_games\n", some_games="class Chess: ...\n")
    for name in ("no_class", "some_games:"):
        with pytest.raises(PluginError, match="write 'some_games:Name' with one of Chess"):
            plugins.load("envs", name)
    for name in (":Chess", ".some_games:Chess"):
        with pytest.raises(PluginError, match=r"names no module: write 'package.module:Name'"):
            plugins.load("envs", name)


def test_extras_and_spaces_of_an_entry_point_are_no_part_of_its_address(install: Install) -> None:
    points = "[agentrl.envs]\nextra = more_games:Chess [boards]\nspaced = more_games : Chess\n"
    install("games", points, more_games="class Chess: ...\n")
    assert plugins.load("envs", "extra") is plugins.load("envs", "spaced")
    mine = [one for one in plugins.installed("envs") if one.origin == "games 1.0"]
    assert [(one.name, one.address) for one in mine] == [
        ("extra", "more_games:Chess"),
        ("spaced", "more_games:Chess"),
    ]


def test_a_name_that_several_packages_register_is_refused_and_each_has_its_address(
    install: Install,
) -> None:
    point = "[agentrl.envs]\n{0} = twin_games:{1}\nshared = twin_games:Both\n"
    code = "class One: ...\nclass Two: ...\nclass Both: ...\n"
    install("first", point.format("twin", "One"), twin_games=code)
    install("second", point.format("twin", "Two"))
    with pytest.raises(
        PluginError,
        match=r"'twin' is registered by (first|second) 1.0 \(twin_games:\w+\) and"
        r" (first|second) 1.0 \(twin_games:\w+\): uninstall all but one, or write the address",
    ):
        plugins.load("envs", "twin")
    assert plugins.load("envs", "twin_games:Two").__name__ == "Two"
    assert plugins.load("envs", "shared").__name__ == "Both"  # of both, and the same
    assert plugins.load("envs", "frozen_lake").__name__ == "FrozenLake"
    twins = [one.origin for one in plugins.installed("envs") if one.name == "twin"]
    assert sorted(twins) == ["first 1.0", "second 1.0"]


def test_a_broken_plug_in_that_nothing_uses_is_left_out_with_a_warning(
    install: Install,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    agentrl: Any,
) -> None:
    # A narrow table breaks the line that is looked for.
    monkeypatch.setattr(environments, "console", Console(width=1000))
    kinds = ("envs", "tool_formats", "staleness_rules", "trainers")
    points = "".join(f"[agentrl.{kind}]\nunused = unused_parts:Part\n" for kind in kinds)
    install("unused", points, unused_parts="raise RuntimeError('not today')\n")
    with caplog.at_level(logging.WARNING):
        assert known_marks()
    assert "the tool format 'unused' is left out: importing 'unused_parts'" in caplog.text
    with pytest.raises(PluginError, match=r"no staleness rule 'nome'.* There is deadline_first"):
        load_rule("nome")
    assert "unused" not in [name for name, _ in plugins.usable("trainers")]
    listed = agentrl("envs")
    assert listed.returncode == 0
    assert "not today" in listed.stdout
    assert "FrozenLake" in listed.stdout


PARTS = """
from pydantic import model_validator
from agentrl import Settings

VALUE = 7

class Strange:
    class Config(Settings):
        size: int = 1

        @model_validator(mode="after")
        def check(self):
            return {}["size"]

    def __init__(self, settings): ...

class Plain:
    class Config:
        size = 1

class Bare:
    def __init__(self): ...

class NoSteps:
    async def reset(self, *, seed, options): ...
    async def close(self): ...

class Delegates:
    def __getattr__(self, name):
        return lambda *given, **named: None
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm=odd_parts:VALUE", "algorithm.name: the algorithm 'odd_parts:VALUE' is 7; it"),
        ("engine=odd_parts:VALUE", "engine.name: the engine 'odd_parts:VALUE' is 7; it must be a"),
        ("recipe=odd_parts:VALUE", "recipe.name: the recipe 'odd_parts:VALUE' is 7; it must be a"),
        ("env=odd_parts:VALUE", "the env 'odd_parts:VALUE' is 7; it must be a class or a function"),
        ("env=odd_parts:NoSteps", "the environment 'odd_parts:NoSteps' has no method `step`: "),
        ("reward=odd_parts:Plain", "reward.name: the settings of .* write a subclass of agentrl.S"),
        (
            "reward=odd_parts:Strange",
            r"reward: a check of Strange.Config raised KeyError: 'size' \(.*odd_parts.py:13 in c",
        ),
        ("env.wrappers=[odd_parts:Plain]", "env.wrappers.0: the settings of .* write a subclass"),
        ("algorithm=odd_parts:Bare", "algorithm.name: making 'odd_parts:Bare' .* raised TypeError"),
    ],
)
def test_a_plug_in_of_a_wrong_shape_is_refused_with_the_config(
    install: Install, tmp_path: Path, override: str, said: str
) -> None:
    install("odd", odd_parts=PARTS)
    with pytest.raises(ConfigError, match=said):
        config_with(tmp_path, override)


def test_an_instance_tells_which_methods_an_environment_has(
    install: Install, tmp_path: Path
) -> None:
    install("odd", odd_parts=PARTS)
    config_with(tmp_path, "env=odd_parts:Delegates")
    made = {name: plugins.load("envs", f"odd_parts:{name}") for name in ("Delegates", "NoSteps")}
    pool = EnvPool(made, EnvDeadlines())
    assert pool.acquire("Delegates")
    with pytest.raises(PluginError, match="the environment 'NoSteps' has no method `step`"):
        pool.acquire("NoSteps")


GAME = """
from agentrl import Settings

class Game:
    isolation = "process"
    preload = ("json",)

    class Options(Settings):
        size: int = 1

    def reset(self, *, seed, options): return "", {}
    def step(self, action): return "", 0.0, True, False, {}
    def close(self): ...

class NoGame: ...

value = 7
"""


def test_an_environment_in_a_file_states_what_its_class_does(tmp_path: Path) -> None:
    game = tmp_path / "ü" / "my game.py"
    game.parent.mkdir()
    game.write_text(GAME)
    factory = pickle.loads(pickle.dumps(plugins.load("envs", f"file:{game}:Game")))
    assert copy.deepcopy(factory) == factory
    assert isolation_of(factory) == "process"
    assert preload_of(factory) == ("json",)
    assert isinstance(env_factory(f"file:{game}:Game")(), ProcessEnv)
    check_options(config_with(tmp_path, f"env=file:{game}:Game", "env.options.size=2"))
    loaded = config_with(tmp_path, f"env=file:{game}:Game", "env.options.sise=2")
    with pytest.raises(ConfigError, match=r"env.options.sise: no such setting .* mean 'size'"):
        check_options(loaded)
    with pytest.raises(ConfigError, match=r"NoGame' has no method `reset`, `step`, `close`"):
        config_with(tmp_path, f"env=file:{game}:NoGame")
    with pytest.raises(ConfigError, match=r"the env 'file:.*value' is 7; it must be a class"):
        config_with(tmp_path, f"env=file:{game}:value")
    for name in (f"file:{game}", f"file:{game}:"):
        with pytest.raises(PluginError, match=r"my game.py:Name' with one of Settings, Game, NoG"):
            plugins.load("envs", name)
