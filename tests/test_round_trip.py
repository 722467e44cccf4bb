"""A run's options reach its environments, programs, ledger and readers as written."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.cli.arguments import env_options
from agentrl.config import load_config
from agentrl.envs.base import TextEnv
from agentrl.errors import ConfigError
from agentrl.gateway.command_agent import _make_environment
from agentrl.gateway.program import ProgramAssignment
from agentrl.hosting.client_options import ClientOptions
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.live_env import LiveEnv
from agentrl.ledger.ledger import Ledger
from agentrl.protocols import StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.remote.openenv.client import OpenEnv
from agentrl.runs.task_sources import task_source
from agentrl.settings.yaml_values import in_yaml, to_yaml
from agentrl.trajectory import Task
from agentrl.viewer.folders import RunFolder
from tests.remote.served import served
from tests.settings.test_yaml_values import WRITTEN, same


class Tells(TextEnv):
    """Tells its options, with their types: `repr` is read back by Python."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        return repr(dict(options))

    def step(self, action: str) -> StepResult:
        return "", 0.0, True, False, {}


EXPECTED = {f"k{number}": value for number, (_, value) in enumerate(WRITTEN)}
ADDRESS = f"{__name__}:Tells"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The first task of a run, resumed from the config that it saved."""
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    lines = "".join(f"    k{number}: {text}\n" for number, (text, _) in enumerate(WRITTEN))
    path.write_text(f"env:\n  name: '{ADDRESS}'\n  options:\n{lines}", encoding="utf-8")
    saved = path.with_name("config.yaml")
    saved.write_text(load_config(path).config.to_yaml())
    return task_source(load_config(saved).config, "train").task(0)


async def told(env: Any, task: Task) -> Any:
    try:
        observation, _ = await env.reset(seed=task.seed, options=task.options)
        return eval(observation)
    finally:
        await env.close()


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_an_environment_gets_them_wherever_it_runs(task: Task, isolation: Any) -> None:
    async def main() -> Any:
        live = LiveEnv(env_factory(ADDRESS, isolation)(), EnvDeadlines(), isolation=isolation)
        try:
            return eval((await live.reset(task.seed, task.options))[0])
        finally:
            await live.close()

    assert same(asyncio.run(main()), EXPECTED)


@pytest.mark.parametrize("client", [RemoteEnv, OpenEnv])
def test_a_remote_environment_gets_them_from_the_run_and_from_its_owner(
    task: Task, client: Any
) -> None:
    with served(Tells) as server:
        assert same(asyncio.run(told(client([server.url]), task)), EXPECTED)
    owners = ClientOptions.Config(fixed=env_options(in_yaml(dict(task.options))))
    with served(Tells, options=owners) as server:
        empty = Task(task.env, task.seed)
        assert same(asyncio.run(told(client([server.url]), empty)), EXPECTED)


def test_a_program_gets_them(task: Task, tmp_path: Path) -> None:
    variables = _make_environment(ProgramAssignment(task, "http://localhost:1", "key"), tmp_path)
    assert same(json.loads(variables["AGENTRL_TASK"])["options"], EXPECTED)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_server_refuses_what_a_config_cannot_hold(number: str) -> None:
    with served(Tells) as server, httpx.Client(base_url=server.url) as http:
        session = http.post("/sessions").json()["session"]
        body = f'{{"seq": 1, "seed": 1, "options": {{"a": [{number}]}}}}'
        for path, sent in (
            (f"/sessions/{session}/reset", body),
            ("/reset", f'{{"seed": 1, "a": [{number}]}}'),
        ):
            refused = http.post(path, content=sent, headers={"content-type": "application/json"})
            assert refused.status_code == 422
            assert "is not a finite number" in refused.json()["detail"]


def test_an_option_that_openenv_has_a_field_of_its_own_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="the option 'seed' is a field of OpenEnv's own resets"):
        asyncio.run(told(OpenEnv(["http://localhost:1"]), Task("x", 1, {"seed": 3})))


def test_the_ledger_gives_them_back_to_a_resumed_run(task: Task, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.admit(0, task, 0)
        ledger.flush()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ((_, again),) = ledger.rewind(0)
    assert same(dict(again.options), EXPECTED)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), (1, 2), {1: "a"}, b"x", "\ud800"])
def test_the_ledger_refuses_options_that_it_could_not_give_back(wrong: Any, tmp_path: Path) -> None:
    with (
        Ledger(tmp_path / "ledger.sqlite") as ledger,
        pytest.raises(ConfigError, match="of task t cannot be stored"),
    ):
        ledger.admit(0, Task("env", 1, {"a": [wrong]}, "t"), 0)


def test_the_page_of_a_run_shows_them(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = tmp_path / "values.yaml"
    path.write_text(to_yaml({"env": {"name": ADDRESS, "options": dict(task.options)}}))
    (folder / "config.yaml").write_text(load_config(path).config.to_yaml())
    settings = RunFolder("run", folder).settings()
    for key, value in EXPECTED.items():
        if not isinstance(value, dict | list):  # these are shown setting by setting
            assert same(settings[f"env.options.{key}"], value), key
