"""Clients of a served environment choose its options, but never what code runs."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest

from agentrl import plugins
from agentrl.envs.base import TextEnv, read_options
from agentrl.errors import ConfigError
from agentrl.hosting.client_options import SAFE_OPTIONS, ClientOptions, for_clients, names_code
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.live_env import LiveEnv
from agentrl.protocols import OwnerOnly, StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.remote.openenv.client import OpenEnv
from agentrl.settings.base import Settings
from tests.remote.served import served


class Loads(TextEnv):
    """Tells its options; `plug` would be code."""

    class Options(Settings):
        """What `reset(options=...)` takes."""

        level: int = 1
        note: str = ""
        plug: Annotated[str, OwnerOnly()] = "none"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        chosen = read_options(self.Options, options)
        return f"{chosen.level} {chosen.note} {chosen.plug}"

    def step(self, action: str) -> StepResult:
        return "", 0.0, True, False, {}


class Undescribed(TextEnv):
    """Takes whatever options come."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        return str(dict(options))

    def step(self, action: str) -> StepResult:
        return "", 0.0, True, False, {}


def reset(url: str, options: Mapping[str, Any], client=RemoteEnv) -> str:
    async def main() -> str:
        env = client([url])
        try:
            observation, _ = await env.reset(seed=1, options=options)
            return observation
        finally:
            await env.close()

    return asyncio.run(main())


@pytest.mark.parametrize("client", [RemoteEnv, OpenEnv])
def test_what_is_marked_is_for_the_owner_of_the_server_only(client) -> None:
    with served(Loads) as server:
        assert "3 hello none" in reset(server.url, {"level": 3, "note": "hello"}, client)
        with pytest.raises(ConfigError, match=r"'plug'.*--allow-options plug"):
            reset(server.url, {"plug": "none"}, client)


@pytest.mark.parametrize("env", [Loads, Undescribed])
def test_a_text_that_names_code_is_refused_though_nothing_is_marked(env) -> None:
    with served(env) as server:
        for evil in ("evilmod:X-v0", "os.path:join", "file:/tmp/x.py:f"):
            with pytest.raises(ConfigError, match="can decide what code runs"):
                reset(server.url, {"note": evil})
        with pytest.raises(ConfigError, match="can decide what code runs"):
            reset(server.url, {"note": {"deep": ["evilmod:X-v0"]}})
        assert "at 12:30: buy milk" in reset(server.url, {"note": "at 12:30: buy milk"})


def test_the_owner_fixes_options_and_allows_others() -> None:
    chosen = ClientOptions.Config(fixed={"level": 2}, allowed=("plug",))
    with served(Loads, options=chosen) as server:
        assert reset(server.url, {"plug": "package:name"}) == "2  package:name"
        assert reset(server.url, {"level": 2}) == "2  none"
        with pytest.raises(ConfigError, match="fixed the option 'level'"):
            reset(server.url, {"level": 3})
        with pytest.raises(ConfigError, match="did you mean 'level'"):
            reset(server.url, {"levle": 3})


def test_in_a_process_the_options_are_checked_too() -> None:
    async def main() -> None:
        make = for_clients(
            env_factory("tests.remote.test_client_options:Loads", "process"),
            ClientOptions.Config(fixed={"level": 2}),
        )
        env = LiveEnv(make(), EnvDeadlines())
        assert (await env.reset(1, {}))[0] == "2  none"
        await env.close()
        env = LiveEnv(make(), EnvDeadlines())
        with pytest.raises(ConfigError, match="'plug' can decide"):
            await env.reset(1, {"plug": "x"})
        await env.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("gymnasium:FrozenLake-v1", {"id": "evilmod:X-v0"}),
        ("gymnasium:FrozenLake-v1", {"kwargs": {"map_name": "4x4"}}),
        ("textarena:TicTacToe-v0", {"opponent": "evilmod:f"}),
        ("shop", {"user": "evilmod:f"}),
        ("python_tool", {"allow_unsafe": True}),
        ("python_tool", {"limits": {"wall": 1e9}}),
    ],
)
def test_no_environment_of_ours_lets_a_client_choose_code(
    env: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(env.partition(":")[0] if ":" in env else "agentrl")
    (tmp_path / "evilmod.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))

    made = for_clients(plugins.load("envs", env), SAFE_OPTIONS)()
    with pytest.raises(ConfigError, match="only the server's owner may set it"):
        made.reset(seed=1, options=options)
    assert "evilmod" not in sys.modules


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("a.b:c", True),
        ("evil-mod:X-v0", True),
        ("12:30", False),
        ("http://games.example/x", False),
        ("a: b", False),
        ("random", False),
        (7, False),
        ({"x": ["a:b"]}, True),
    ],
)
def test_addresses_of_code_are_told_from_other_texts(value: Any, named: bool) -> None:
    assert names_code(value) is named
