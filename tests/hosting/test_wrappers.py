"""Wrappers: an environment around an environment, over every transport."""

import asyncio
import pickle
import random
from collections.abc import Mapping
from typing import Any

import pytest

from agentrl import plugins
from agentrl.assembly import env_host
from agentrl.config import load_config
from agentrl.envs.base import TextEnv
from agentrl.envs.guess_number import GuessNumber, weak_player
from agentrl.envs.kuhn_poker import KuhnPoker
from agentrl.errors import ConfigError, ConformanceError, PluginError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.wrappers import ActionFormat, TimeLimit, address, wrapper
from agentrl.protocols import StepResult
from agentrl.testing import check_env
from tests.remote.served import served

ACTION = {
    "name": "action_format",
    "pattern": "<action>(.*?)</action>",
    "hint": "Write <action>N</action>.",
    "penalty": 0.5,
}


class Patient(TextEnv):
    """An async environment that never ends and repeats what is said to it."""

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        await asyncio.sleep(0)
        return f"seed {seed}"

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        return f"you said {action}", 0.0, False, False, {}


def wrapped(name: str, *wrappers: Any) -> str:
    return address(name, [wrapper(raw) for raw in wrappers])


def told(make_env, actions, isolation=None, seed=1) -> list[Any]:
    """What an episode says through a `LiveEnv`: system prompt, observations, rewards, ends."""

    async def main() -> list[Any]:
        env = LiveEnv(make_env(), EnvDeadlines(), isolation=isolation)
        said: list[Any] = [await env.reset(seed, {})]
        said.append(env.system_prompt)
        said += [await env.step(action) for action in actions]
        await env.close()
        return said

    return asyncio.run(main())


GUESSES = [
    "I think <action>3</action>, no: <action>8</action>",
    "8",
    "<action>16</action>",
    "<action>2</action>",
]


def test_the_last_action_that_matches_is_taken_and_a_message_without_one_is_answered_by_the_hint():
    reset, prompt, first, hinted, *_ = told(env_factory(wrapped("guess_number", ACTION)), GUESSES)
    plain = told(GuessNumber, ["8"])
    assert (reset, first) == (plain[0], plain[2])
    assert prompt == f"{GuessNumber.system_prompt}\n\nWrite <action>N</action>."
    assert hinted == ("Write <action>N</action>.", -0.5, False, False, {})


@pytest.mark.parametrize("order", [0, 1])
def test_a_time_limit_truncates_and_each_wrapper_is_around_those_before_it(order):
    both = [ACTION, {"name": "time_limit", "turns": 2}]
    said = told(env_factory(wrapped("guess_number", *both[:: 1 - 2 * order])), GUESSES[:3])
    truncated = [truncated for _, _, _, truncated, _ in said[2:]]
    # Around the format, the limit counts the malformed message too; within it, only what reached
    # the game.
    assert truncated == ([False, True, True] if order == 0 else [False, False, True])


def test_an_end_of_the_game_is_no_truncation():
    env = TimeLimit(TimeLimit.Config(turns=1), GuessNumber())
    env.reset(seed=1, options={})
    assert env.step(str(env.unwrapped.secret))[2:4] == (True, False)
    assert env.secret == env.unwrapped.secret, "what is not the wrapper's is the inner one's"


@pytest.mark.parametrize("transport", ["inline", "thread", "process", "http", "around http"])
def test_a_wrapped_environment_plays_the_same_over_every_transport(transport):
    name = wrapped("guess_number", ACTION, {"name": "time_limit", "turns": 3})
    expected = told(env_factory(name), GUESSES[:3])
    if transport == "http":
        with served(plugins.load("envs", name)) as server:
            assert told(env_factory(server.url), GUESSES[:3]) == expected
    elif transport == "around http":
        with served(GuessNumber) as server:
            around = wrapped(server.url, ACTION, {"name": "time_limit", "turns": 3})
            assert told(env_factory(around), GUESSES[:3]) == expected
    else:
        make_env = env_factory(name, transport)
        assert (transport == "process") == isinstance(make_env(), ProcessEnv)
        assert told(make_env, GUESSES[:3], transport) == expected


def test_an_async_environment_is_wrapped_as_it_is():
    name = f"{__name__}:Patient"
    _, _, *steps = told(
        env_factory(
            wrapped(name, "tests.hosting.test_wrappers:Twice", {"name": "time_limit", "turns": 2})
        ),
        "ab",
    )
    assert steps == [("you said aa", 0.0, False, False, {}), ("you said bb", 0.0, False, True, {})]


class Twice(TimeLimit):
    """A wrapper of one's own."""

    class Config(TimeLimit.Config):
        turns: int = 99

    def step(self, action: str) -> Any:
        return super().step(2 * action)


def test_agents_hear_the_hint_and_who_spoke_badly_speaks_again():
    env = ActionFormat(wrapper(ACTION).settings, KuhnPoker())
    _, info = env.reset(seed=0, options={})
    assert info["agent"] == "north"
    assert env.step("bet") == ("Write <action>N</action>.", -0.5, False, False, {"agent": "north"})
    assert env.step("<action>bet</action>")[4] == {"agent": "south"}
    assert env.step("call")[4] == {"agent": "south"}


@pytest.mark.parametrize("name", ["calculator", "kuhn_poker", f"{__name__}:Patient"])
def test_wrapped_environments_keep_the_contract(name):
    make_env = plugins.load("envs", wrapped(name, ACTION, {"name": "time_limit", "turns": 4}))
    check_env(make_env, seeds=[0], max_turns=4)
    again = pickle.loads(pickle.dumps(make_env))
    assert told(again, ["x"]) == told(make_env, ["x"])


def test_a_scripted_player_looks_at_the_environment_itself():
    limited = plugins.load("envs", wrapped("guess_number", {"name": "time_limit", "turns": 4}))
    check_env(limited, actions=weak_player, seeds=[0])

    async def main(isolation: str) -> str:
        env = LiveEnv(
            env_factory(wrapped("guess_number", {"name": "time_limit", "turns": 4}), isolation)(),
            EnvDeadlines(),
        )
        await env.reset(0, {})
        said = await env.consult(weak_player, random.Random(0))
        await env.close()
        return said

    assert asyncio.run(main("inline")) == asyncio.run(main("process"))


def test_a_config_says_what_the_system_message_is_for_each_environment_of_a_mixture(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "env:\n  - {name: guess_number, rules: Halve the range., wrappers: [{name: action_format,"
        " pattern: x, hint: H.}]}\n  - {name: guess_number, label: terse, system_prompt: Guess.,"
        " rules: Be quick.}\n  - {name: guess_number, label: mute, system_prompt: ''}\n  - {name:"
        " guess_number, label: plain}\n"
    )
    loaded = load_config(config).config

    async def prompts() -> list[str]:
        said = []
        async with env_host(loaded) as host:
            for name in loaded.envs:
                env = host.acquire(name)
                await env.reset(0, {})
                said.append(env.system_prompt)
                await host.release(name, env)
        return said

    own = GuessNumber.system_prompt
    expected = [f"{own}\n\nHalve the range.\n\nH.", "Guess.\n\nBe quick.", "", own]
    assert asyncio.run(prompts()) == expected
    again = tmp_path / "again.yaml"
    again.write_text(loaded.to_yaml())
    assert load_config(again).config == loaded


class Roles(TextEnv):
    """Two agents, each with a system prompt of its own."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        return "Begin."

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        prompts = {"thief": "Steal.", "guard": "Watch."}
        return self.start(seed, options), {
            "agents": list(prompts),
            "agent": "thief",
            "system_prompts": prompts,
        }

    def step(self, action: str) -> StepResult:
        return "Caught.", 0.0, True, False, {}


def test_each_agent_hears_the_rules():
    told = wrapper({"name": "instructions", "rules": "No noise."}).make(Roles())
    assert told.reset(seed=0, options={})[1]["system_prompts"] == {
        "thief": "Steal.\n\nNo noise.",
        "guard": "Watch.\n\nNo noise.",
    }


def test_what_is_wrong_is_said_before_a_run_starts(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("env: guess_number\n")
    loaded = load_config(
        config, ["env.wrappers=[{name: time_limit, turns: 3}, tests.hosting.test_wrappers:Twice]"]
    ).config
    assert [each.settings.turns for each in loaded.env.wrappers] == [3, 99]
    again = tmp_path / "again.yaml"
    again.write_text(loaded.to_yaml())
    assert load_config(again).config == loaded
    for written, said in {
        "[time_limt]": "Did you mean 'time_limit'?",
        "[{name: time_limit, turn: 3}]": "Its settings are: turns",
        "[{name: action_format, pattern: '(('}]": "is not a regular expression",
        "[3]": "write a wrapper as {name: time_limit, turns: 20}",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(config, [f"env.wrappers={written}"])
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="Write 'wrapped:' and"):
        plugins.load("envs", "wrapped:nonsense")
    with pytest.raises(PluginError, match="Did you mean 'guess_number'"):
        plugins.load("envs", wrapped("guess_numbr", {"name": "time_limit", "turns": 3}))


def test_check_env_sees_through_a_wrapper():
    class Careless(Patient):
        async def step(self, action: str) -> Any:
            return "short"

    with pytest.raises(ConformanceError, match="step"):
        check_env(lambda: TimeLimit(TimeLimit.Config(turns=3), Careless()), seeds=[0])
