"""Environments by addresses that need no registration: `scheme:rest`."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
from typer.testing import CliRunner

from agentrl import plugins
from agentrl.cli import app
from agentrl.config import load_config
from agentrl.envs import gymnasium_text
from agentrl.envs.calculator import Calculator
from agentrl.errors import PluginError
from agentrl.testing import check_env
from tests.distributions import write_distribution

GAME = """
from agentrl.envs.base import TextEnv

class Echo(TextEnv):
    def start(self, seed, options):
        return f"say {{seed}}"

    def step(self, action):
        return action, {reward}, True, False, {{}}
"""


def write_game(path: Path, reward: float = 1.0) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(GAME.format(reward=reward))
    return path


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry_points: str,
    distribution: str = "installed",
    **modules: str,
) -> None:
    """A distribution of these modules and entry points, as pip would have left it."""
    write_distribution(folder, distribution, entry_points, **modules)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers with Gymnasium is gone afterwards."""
    before = dict(gymnasium.registry)
    gymnasium_text._register_installed.cache_clear()
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    gymnasium_text._register_installed.cache_clear()


def test_a_gymnasium_id_is_an_address_and_its_options_still_count() -> None:
    make = pickle.loads(pickle.dumps(plugins.load("envs", "gymnasium:FrozenLake-v1")))
    first, _ = make().reset(seed=0, options={"kwargs": {"is_slippery": False}})
    assert first.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    other, _ = make().reset(seed=0, options={"id": "Blackjack-v1"})
    assert "You have" in other


def test_a_config_takes_an_address(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("env: gymnasium:Taxi-v4\nmodel: tiny\n")
    assert load_config(config).config.env.name == "gymnasium:Taxi-v4"


def test_names_and_modules_are_found_as_before() -> None:
    assert plugins.load("envs", "calculator") is Calculator
    assert plugins.load("envs", "agentrl.envs.calculator:Calculator") is Calculator


def test_a_scheme_is_of_environments_alone() -> None:
    with pytest.raises(PluginError, match="'gymnasium' has no 'Taxi-v4'"):
        plugins.load("rewards", "gymnasium:Taxi-v4")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gymnasum:Taxi-v4", "Did you mean 'gymnasium'? Schemes: agent, file, gem, gymnasium"),
        ("gymnasium:Taxi-v9", "Did you mean 'Taxi-v4'"),
        ("gymnasium:no_such_package:Game-v0", "'no_such_package' cannot be imported"),
        ("file:no_such_folder/game.py:Echo", "there is no file"),
    ],
)
def test_a_wrong_address_says_the_way_out(address: str, said: str) -> None:
    with pytest.raises(PluginError) as error:
        plugins.load("envs", address)
    assert said in str(error.value)


def test_an_id_of_a_package_not_yet_imported_names_the_package(registry: None) -> None:
    # Any test of this process may have imported MiniGrid, which registers its ids.
    for env_id in [known for known in gymnasium.registry if known.startswith("MiniGrid-")]:
        del gymnasium.registry[env_id]
    with pytest.raises(PluginError, match="Did you mean 'minigrid:MiniGrid-Empty-5x5-v0'"):
        plugins.load("envs", "gymnasium:MiniGrid-Empty-5x5-v0")


@pytest.mark.parametrize(
    ("address", "package"),
    [
        ("rg:leg_counting", "reasoning_gym"),
        ("textarena:TicTacToe-v0", "textarena"),
        ("gem:game:x", "gem"),
    ],
)
def test_a_missing_package_says_what_to_install(
    address: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PluginError, match=r"pip install 'agentrl-train\[envs\]'"):
        plugins.load("envs", address)


def test_a_class_in_a_file_keeps_the_contract_and_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_game(tmp_path / "game.py")
    monkeypatch.chdir(tmp_path)
    make = plugins.load("envs", "file:game.py:Echo")
    check_env(make)
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(make)) == make
    assert make().reset(seed=7, options={}) == ("say 7", {})
    assert type(make()) is type(plugins.load("envs", f"file:{tmp_path / 'game.py'}:Echo")())


def test_two_files_of_one_name_are_two_games(tmp_path: Path) -> None:
    paths = [
        write_game(tmp_path / folder / "game.py", reward)
        for folder, reward in (("a", 1.0), ("b", 2.0))
    ]
    played = [plugins.load("envs", f"file:{path}:Echo")().step("x")[1] for path in paths]
    assert played == [1.0, 2.0]


def test_a_wrong_file_says_the_way_out(tmp_path: Path) -> None:
    game = write_game(tmp_path / "game.py")
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    for address, said in (
        (f"file:{tmp_path}/gam.py:Echo", "Did you mean 'game.py'"),
        (f"file:{game}:Eco", "Did you mean 'Echo'"),
        (f"file:{game}", "names no class"),
        (f"file:{tmp_path}/broken.py:Echo", "No module named 'no_such_package'"),
    ):
        with pytest.raises(PluginError) as error:
            plugins.load("envs", address)
        assert said in str(error.value)


def test_a_package_adds_a_scheme_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        monkeypatch,
        "[agentrl.env_schemes]\nechoes = installed_echoes:scheme\n",
        installed_echoes=GAME.format(reward=1.0)
        + '\ndef scheme(rest):\n    """echoes:twice: an echo."""\n    return lambda: Echo()\n',
    )
    check_env(plugins.load("envs", "echoes:twice"))
    listed = CliRunner().invoke(app, ["envs"], env={"COLUMNS": "200"}).output
    assert "echoes:twice" in listed
    assert "gymnasium:Taxi-v4" in listed


def test_packages_of_the_group_that_gymnasium_forgot_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None
) -> None:
    register = (
        "import gymnasium\ndef register():\n    gymnasium.register({id!r}, entry_point={point!r})\n"
    )
    lake = "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv"
    install(
        tmp_path,
        monkeypatch,
        "[gymnasium.envs]\nOld = installed_old:register\n__root__ = installed_root:register\nGone ="
        " installed_gone\n",
        installed_old=register.format(id="Lake-v0", point=lake),
        installed_root=register.format(id="RootLake-v0", point=lake),
    )
    check_env(plugins.load("envs", "gymnasium:Old/Lake-v0"), seeds=(0,))
    check_env(plugins.load("envs", "gymnasium:RootLake-v0"), seeds=(0,))
    with pytest.raises(PluginError, match="failed to register theirs: installed_gone"):
        plugins.load("envs", "gymnasium:Old/Sea-v0")


def test_what_an_old_checkout_lists_under_the_former_name_of_the_distribution_is_ignored(
    tmp_path, monkeypatch
):
    """`agentrl.egg-info`, with the addresses of its time."""
    points = (
        "[agentrl.envs]\ngone = agentrl.no_longer:Gone\nfrozen_lake ="
        " agentrl.no_longer:FrozenLake\n"
    )
    install(tmp_path, monkeypatch, points + "its_own = a_module:Env\n", "agentrl")
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(tmp_path)])  # the last one found would win
    names = {plugin.name for plugin in plugins.installed("envs")}
    assert "gone" not in names
    assert "its_own" in names
    assert plugins.load("envs", "frozen_lake").__name__ == "FrozenLake"
