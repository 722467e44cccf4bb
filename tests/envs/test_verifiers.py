"""Classic environments of verifiers, played in an interpreter of their own: MultiTurnEnv, ToolEnv,
SingleTurnEnv.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from agentrl import plugins
from agentrl.envs.callback import tenths
from agentrl.errors import ConfigError, EnvError, PluginError
from agentrl.hosting.factory import env_factory
from agentrl.protocols import Env
from agentrl.rollout.seeds import SPLITS, split_seed
from agentrl.testing import check_env
from agentrl.trajectory import ToolCall
from tests.processes import still_alive

QUESTS = '''
    """A package of the Environments Hub's shape: a module with load_environment."""
    import verifiers as vf
    from datasets import Dataset

    class Count(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["at"] = 0
            return state

        async def env_response(self, messages, state):
            match messages[-1].content.strip():
                case "boom":
                    raise vf.ToolCallError("boom")
                case "bang":
                    raise KeyError("bang")
                case word:
                    state["at"] = state["at"] + 1 if word == str(state["at"] + 1) else 0
            if str(state["at"]) == state["answer"]:
                state["final_env_response"] = [vf.UserMessage(content="Done.")]
                return state["final_env_response"]
            return [vf.UserMessage(content=f"You are at {state['at']}.")]

    class Forgetful(Count):
        async def get_prompt_messages(self, state):
            return (await super().get_prompt_messages(state))[-1:]

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def right(state, answer):
        return float(str(state["at"]) == answer)

    def failing(state, answer):
        raise ValueError("no idea")

    def best(states) -> list:
        return [1.0 for _ in states]

    def says(completion, answer):
        return float(answer in completion[-1].content)

    def rows(count, text="Count to {}."):
        goals = [2 + n % 3 for n in range(count)]
        return Dataset.from_list([{"question": text.format(n), "answer": str(n)} for n in goals])

    def load_environment(kind="count", count=20, own_eval=False):
        rubric = vf.Rubric({"failing": [failing], "group": [best]}.get(kind, [right]))
        if kind == "tools":
            sums = rows(count, "What is 1 + 1 + {}?")
            return vf.ToolEnv(tools=[add], dataset=sums, rubric=vf.Rubric([says]))
        if kind == "single":
            shots = [
                {"role": "user", "content": "Count to 2."}, {"role": "assistant", "content": "1 2"}
            ]
            return vf.SingleTurnEnv(
                dataset=rows(count), system_prompt="You count.", few_shot=shots,
                rubric=vf.Rubric([says], [0.5]),
            )
        env = Forgetful if kind == "forgetful" else Count
        eval_rows = rows(count, "In the exam, count to {}.") if own_eval else None
        return env(
            dataset=rows(count), eval_dataset=eval_rows, system_prompt="You count.", rubric=rubric,
            max_turns=6,
        )
'''


SUMS = '''
    """A taskset of verifiers 0.4, with a tool server."""
    from collections.abc import Iterable
    import verifiers.v1 as vf

    class Calculator(vf.Toolset[vf.ToolsetConfig]):
        @vf.tool
        async def add(self, a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

    class Sum(vf.TaskData):
        answer: str
        broken: bool

    class SumTask(vf.Task[Sum]):
        @vf.reward
        async def right(self, trace: vf.Trace) -> float:
            if self.data.broken:
                raise ValueError("no idea")
            return float(self.data.answer in (trace.assistant_messages[-1].content or ""))

        @classmethod
        def toolsets(cls, config) -> list[vf.Toolset]:
            return [Calculator(vf.ToolsetConfig())]

    class SumsConfig(vf.TasksetConfig):
        broken: bool = False

    class Sums(vf.Taskset[SumTask, SumsConfig]):
        def load(self) -> Iterable[SumTask]:
            for n in range(20):
                prompt, broken = f"What is {n} + 1?", self.config.broken
                data = Sum(prompt=prompt, system_prompt="Add.", answer=str(n + 1), broken=broken)
                yield SumTask(data, self.config.task)

    __all__ = ["Sums"]

    if __name__ == "__main__":
        Calculator.run()
'''


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The current folder has the modules above; installations go into a cache of the tests."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "quests.py").write_text(dedent(QUESTS))
    # Its tool server is a process of verifiers' own, which finds installed packages only.
    (folder / "my_tasks").mkdir()
    (folder / "my_tasks" / "sums.py").write_text(dedent(SUMS))
    (folder / "my_tasks" / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'sums'\nversion = '1'\n[tool.setuptools]\npy-modules = ['sums']\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "UV_CACHE_DIR", os.environ.get("UV_CACHE_DIR", str(Path("~/.cache/uv").expanduser()))
        )
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("HF_HOME", str(folder / "hf"))
        patch.chdir(folder)
        patch.syspath_prepend("")
        yield


@pytest.fixture(scope="module")
def make(hub: None) -> Callable[[], Env]:
    """The factory of the classic environments above, under verifiers 0.3.0."""
    return env_factory("verifiers:quests", requires=["verifiers==0.3.0"])


@pytest.fixture(scope="module")
def env(make: Callable[[], Env]) -> Iterator[Any]:
    env = make()
    yield env
    env.close()


def begin(env: Any, seed: int = 4, **args: Any) -> str:
    return str(env.reset(seed=seed, options={"args": args})[0])


@pytest.mark.long
def test_a_multi_turn_environment_plays_its_own_loop_and_pays_by_its_rubric(env):
    assert begin(env) == "Count to 3."
    assert env.system_prompt == "You count."
    assert env.tools == ()
    assert env.step("1") == ("You are at 1.", 0.0, False, False, {})
    assert env.step("2") == ("You are at 2.", 0.0, False, False, {})
    observation, reward, terminated, truncated, info = env.step("3")
    assert (observation, reward, terminated, truncated) == ("Done.", 1.0, True, False)
    assert info["success"]
    assert info["metrics"]["num_turns"] == 3.0
    with pytest.raises(EnvError, match="no episode is being played"):
        env.step("4")
    begin(env)
    last = [env.step("\ud800") for _ in range(6)][-1]
    assert last[:4] == ("", 0.0, False, True)
    assert last[4]["stop"] == "max_turns_reached"


@pytest.mark.long
def test_a_tool_environment_offers_its_tools_runs_the_calls_and_ends_with_the_answer(env):
    assert begin(env, kind="tools") == "What is 1 + 1 + 3?"
    (tool,) = env.tools
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    both = ToolCall("add", {"a": 1, "b": 1}).render() + ToolCall("add", {"a": 2, "b": 3}).render()
    assert env.step(both) == ("2\n5", 0.0, False, False, {})
    assert "subtract" in env.step(ToolCall("subtract", {}).render())[0]
    _, reward, terminated, _, info = env.step("It is 3.")
    assert (reward, terminated) == (1.0, True)
    assert info["metrics"]["add_calls"] == 2.0


@pytest.mark.slow
def test_a_single_turn_environment_shows_its_examples_and_weighs_its_rewards(env):
    assert begin(env, kind="single") == "user: Count to 2.\n\nassistant: 1 2\n\nuser: Count to 3."
    _, reward, terminated, truncated, info = env.step("1 2 3")
    assert (reward, terminated, truncated, info["success"]) == (0.5, False, True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "actions", "said"),
    [
        ("failing", ["1", "2", "3"], "the rubric failed: .*no idea"),
        ("count", ["boom"], "the environment failed: .*boom"),
        ("count", ["bang"], r"KeyError: 'bang' \(.*quests.py:\d+ in env_response\)"),
        ("forgetful", ["1"], "does not continue the model's conversation"),
    ],
)
def test_what_fails_over_there_is_a_failed_episode_and_never_a_reward(env, kind, actions, said):
    begin(env, kind=kind)
    *before, last = actions
    for action in before:
        env.step(action)
    with pytest.raises(EnvError, match=said):
        env.step(last)
    assert begin(env) == "Count to 3."


@pytest.mark.slow
def test_what_cannot_be_scored_alone_or_loaded_ends_the_run(env):
    with pytest.raises(ConfigError, match="compare the rollouts of a group"):
        begin(env, kind="group")
    with pytest.raises(
        ConfigError, match=r"unexpected keyword argument 'level'.* Correct options\['args'\]"
    ):
        begin(env, level=3)


@pytest.mark.slow
def test_held_out_seeds_draw_rows_that_no_training_seed_draws(env):
    train, held_out = ([split_seed(0, split, index) for index in range(12)] for split in SPLITS[:2])
    assert {begin(env, seed, count=3) for seed in train} == {"Count to 2.", "Count to 3."}
    assert {begin(env, seed, count=3) for seed in held_out} == {"Count to 4."}
    assert all(begin(env, seed, own_eval=True).startswith("In the exam") for seed in held_out[:3])
    assert not any(begin(env, seed, own_eval=True).startswith("In the exam") for seed in train[:3])


@pytest.mark.long
def test_it_keeps_the_contract(make):
    check_env(make, seeds=(0,), deadline=60.0)


@pytest.mark.long
def test_a_taskset_of_the_newer_verifiers_is_played_by_its_own_harness_and_paid_by_its_rewards(hub):
    env: Any = env_factory("verifiers:sums", requires=["verifiers==0.4.0", "uv", "./my_tasks"])()
    question = begin(env)
    number = int(question.split()[2])
    assert question == f"What is {number} + 1?"
    assert env.system_prompt == "Add."
    (tool,) = env.tools
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    observation, *rest = env.step(
        ToolCall(tool["function"]["name"], {"a": number, "b": 1}).render()
    )
    assert str(number + 1) in observation
    assert rest == [0.0, False, False, {}]
    _, reward, terminated, _, info = env.step(f"It is {number + 1}.")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert begin(env, broken=True) == question
    with pytest.raises(EnvError, match=r"the episode failed: .*no idea"):
        env.step("1")
    with pytest.raises(ConfigError, match="verifiers cannot load"):
        begin(env, level=3)
    family = psutil.Process(env.pid).children(recursive=True)
    env.close()
    assert still_alive(family, 10) == []


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 100])
def test_every_tenth_row_is_held_out(count):
    train, test = set(tenths(count, False)), set(tenths(count, True))
    assert train | test == set(range(count))
    if count > 1:
        assert not train & test
        assert len(test) == -(-count // 10)


def test_without_the_package_the_way_out_is_said():
    with pytest.raises(
        PluginError,
        match=r"'verifiers' is not installed. Give it an interpreter of its own: env\.req",
    ):
        plugins.load("envs", "verifiers:wordle")
