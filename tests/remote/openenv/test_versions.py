"""OpenEnv's own servers and clients of both versions, each in its own interpreter: they play ours,
and ours theirs.
"""

import asyncio
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.calculator import Calculator
from agentrl.envs.guess_number import GuessNumber
from agentrl.errors import DeadlineError, EnvError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.interpreter import environment, find_interpreter
from agentrl.hosting.live_env import LiveEnv
from agentrl.remote.openenv.client import openenv
from agentrl.trajectory import ToolCall
from tests.remote.served import served
from tests.tiers import only

pytestmark = pytest.mark.slow

PEER = Path(__file__).with_name("peer.py")
REQUIRES = {"0.3": "openenv-core==0.3.0", "0.10": "openenv==0.10.0"}
GUESSES = {
    str(seed): list(map(str, random.Random(seed).choices(range(1, 17), k=8))) for seed in (3, 4)
}


class Peer:
    """A process with a version of OpenEnv: where its servers are, and, at its end, what its clients
    saw of ours.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.stdout = process.stdout
        self.url: str = json.loads(self.stdout.readline())["url"]
        self._told: dict[str, Any] | None = None

    @property
    def told(self) -> dict[str, Any]:
        if self._told is None:
            self._told = json.loads(self.stdout.readline())
        assert self._told is not None
        return self._told


@pytest.fixture(scope="module", params=only(REQUIRES, "0.10"))
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A process with a version, installed where it is not."""
    requirement = REQUIRES[request.param]
    python = find_interpreter(None, [requirement])
    with (
        served(GuessNumber) as guess,
        served(Calculator) as calculator,
        subprocess.Popen(
            [python, PEER, ours(guess.url, calculator.url, requirement)],
            env=environment(python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            yield Peer(process)
        finally:
            process.kill()


def ours(guess: str, calculator: str, requirement: str) -> str:
    """For the process: where our servers are, and what its clients shall do there."""
    package, version = requirement.split("==")
    return json.dumps(
        {
            "guess": guess,
            "calculator": calculator,
            "actions": GUESSES,
            "package": package,
            "graders": version != "0.3.0",
        }
    )


@pytest.mark.long
def test_a_typed_environment_of_openenvs_plays_here(peer):
    async def main() -> None:
        env = openenv(f"{peer.url}/typed")()
        began, _ = await env.reset(seed=3, options={"start": 10})
        assert began == '{"count": 13}'
        assert '"direction"' in env.system_prompt
        said, reward, over, _, info = await env.step(
            'I go ```json\n{"direction": "up", "by": 5}\n```'
        )
        assert (said, reward, over) == ('{"count": 18}', 5.0, False)
        assert info == ({"steps": 1} if peer.told["version"] == "0.10.0" else {})
        for unfit, wrong in {
            "up": "no JSON object",
            '{"direction": "left", "by": 5}': "'up' or 'down'",
            '{"direction": "up"}': "by: Field required",
            '{"direction": "up", "by": 1, "x": 2}': "x: Extra inputs",
        }.items():
            said, reward, over, _, _ = await env.step(unfit)
            assert wrong in said
            assert (reward, over) == (0.0, False)
        assert (await env.step('{"direction": "up", "by": 90}'))[:3] == (
            '{"count": 108}',
            90.0,
            True,
        )
        await env.close()

    asyncio.run(main())


@pytest.mark.long
def test_a_step_that_raises_or_hangs_there_fails_and_the_next_answers_are_right(peer):
    async def main() -> None:
        env = openenv(f"{peer.url}/typed")()
        await env.reset(seed=3, options={})
        with pytest.raises(EnvError, match="unlucky"):
            await env.step('{"direction": "up", "by": 13}')
        live = LiveEnv(env, EnvDeadlines(step=0.1))
        await live.reset(5, {})
        with pytest.raises(DeadlineError):
            await live.step('{"direction": "up", "by": 99}')
        assert (await env.reset(seed=7, options={}))[0] == '{"count": 7}'
        await asyncio.sleep(0.6)  # the late answer has come, to nobody
        assert (await env.step('{"direction": "up", "by": 1}'))[0] == '{"count": 8}'
        await env.close()

    asyncio.run(main())


def test_episodes_wait_for_room_on_a_server_of_openenvs(peer):
    async def main() -> None:
        async def play(seed: int) -> None:
            env = openenv(f"{peer.url}/typed")()
            assert (await env.reset(seed=seed, options={}))[0] == f'{{"count": {seed}}}'
            assert (await env.step('{"direction": "up", "by": 90}'))[
                0
            ] == f'{{"count": {90 + seed}}}'
            assert (await env.step('{"direction": "up", "by": 90}'))[2]
            await env.close()

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for seed in range(5):  # it takes two at once
                group.create_task(play(seed))

    asyncio.run(main())


def test_an_environment_of_one_text_is_played_as_it_is(peer):
    async def main() -> None:
        env = openenv(f"{peer.url}/echo")()
        assert await env.reset(seed=3, options={}) == ("ready", {})
        assert env.system_prompt == ""
        assert (await env.step('{"message": "é"} '))[:3] == ('{"message": "é"} ', 0.1, False)
        assert (await env.step("bye"))[2]
        await env.close()

    asyncio.run(main())


def test_a_tool_environment_of_openenvs_plays_here(peer):
    async def main() -> None:
        env = openenv(f"{peer.url}/tools")()
        await env.reset(seed=3, options={})
        (add, fail) = (tool["function"] for tool in env.tools)
        assert (add["name"], add["description"], fail["name"]) == ("add", "Compute a + b.", "fail")
        assert add["parameters"]["required"] == ["a", "b"]
        call = ToolCall("add", {"a": 2, "b": 3})
        assert (await env.step(call.render()))[0] == "5"
        assert (await env.step(call.render() + ToolCall("add", {"a": 1, "b": 1}).render()))[
            0
        ] == "add: 5\nadd: 2"
        for wrong, told in (
            (ToolCall("add", {"a": 2, "b": "x"}), "valid integer"),
            (ToolCall("ad", {}), "Unknown tool"),
            (ToolCall("fail", {}), "out of order"),
        ):
            said, reward, over, _, _ = await env.step(wrong.render())
            assert said.startswith("Error: ")
            assert told in said
            assert (reward, over) == (0.0, False)
        assert "Call a tool (add, fail)" in (await env.step("hello"))[0]
        await env.close()

    asyncio.run(main())


def test_openenvs_own_clients_play_our_environments_as_they_play_here(peer):
    for seed, actions in GUESSES.items():
        env = GuessNumber()
        here: list[Any] = [env.reset(seed=int(seed), options={})[0]]
        for action in actions:
            said, reward, terminated, truncated, _ = env.step(action)
            here.append([said, reward, terminated or truncated])
            if terminated or truncated:
                break
        assert peer.told["played"][seed] == here
    assert "VALIDATION_ERROR" in peer.told["unfit"]
    assert "EXECUTION_ERROR" in peer.told["early"]
    assert "hihg" in peer.told["options"]
    problem, _ = Calculator().reset(seed=5, options={})
    expected = [
        ["add", "subtract", "multiply", "divide", "submit"],
        problem,
        "5",
        "wrong",
        0.0,
        True,
    ]
    assert peer.told["called"] == peer.told["in production"] == expected


def test_openenv_validate_passes(peer):
    for code, output in peer.told["validated"].values():
        assert code == 0, output
        assert "FAIL" not in output
    graded = peer.told["graded"]
    assert set(graded) == ({"guess", "calculator"} if peer.told["version"] == "0.10.0" else set())
    for name, verdicts in graded.items():
        assert list(verdicts.values()) == ["pass"] * 3, name
