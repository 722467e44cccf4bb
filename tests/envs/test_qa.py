"""Questions and answers: one answer ends the episode, a tool may come before it, and the reward
decides on success.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentrl.envs.qa import QuestionAnswer
from agentrl.errors import ConfigError
from agentrl.protocols import StepResult
from agentrl.testing import check_env
from agentrl.trajectory import (
    Completion,
    Score,
    Task,
    Terminated,
    ToolCall,
    Trajectory,
    Turn,
    succeeded,
)


def play(actions: Sequence[str], **options: Any) -> tuple[QuestionAnswer, str, list[StepResult]]:
    async def main() -> tuple[QuestionAnswer, str, list[StepResult]]:
        env = QuestionAnswer()
        try:
            begun = env.reset(seed=0, options=options)
            assert not isinstance(begun, tuple)
            observation, _ = await begun
            return env, observation, [await env.step(action) for action in actions]
        finally:
            await env.close()

    return asyncio.run(main())


@pytest.mark.parametrize("tool", ["none", "calculator"])
def test_it_keeps_the_contract(tool: str) -> None:
    check_env(
        QuestionAnswer,
        options={"prompt": "What is 2 + 2?", "answer": "4", "tool": tool, "level": "easy"},
    )


@pytest.mark.parametrize(
    ("answer", "message", "paid"),
    [
        ("Paris", " paris\n", 1.0),
        (["4", "four"], "Four", 1.0),
        (4, "4", 1.0),
        ("4", "5", 0.0),
        (None, "None", 0.0),
    ],
)
def test_one_answer_ends_the_episode_and_the_verdict_is_the_rewards(
    answer: Any, message: str, paid: float
) -> None:
    _, observation, [step] = play([message], prompt="Well?", answer=answer)
    assert observation == "Well?"
    assert step == ("", paid, True, False, {"success": None})


def test_a_chat_may_bring_its_own_system_message() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]
    env, observation, _ = play([], prompt=chat, system_prompt="Think.")
    assert (env.system_prompt, observation) == ("Be brief.", "Well?")
    env, _, _ = play([], prompt=chat[1:], system_prompt="Think.")
    assert env.system_prompt == "Think."
    with pytest.raises(ConfigError, match="a chat has a message of the user"):
        play([], prompt=chat[::-1])


def test_a_calculator_may_be_used_before_the_answer_and_not_without_the_option() -> None:
    def call(expression: str) -> str:
        return ToolCall("calculate", {"expression": expression}).render()

    env, _, steps = play(
        [call("(12 + 7.5) * -2 // 3"), "7"], prompt="?", answer="7", tool="calculator"
    )
    assert [tool["function"]["name"] for tool in env.tools] == ["calculate"]
    assert [(step[0], step[1], step[2]) for step in steps] == [
        ("-13.0", 0.0, False),
        ("", 1.0, True),
    ]
    env, _, [step] = play([call("1 + 1")], prompt="?", answer="2")
    assert not env.tools
    assert step[2]


@pytest.mark.parametrize(
    "expression", ["1 / 0", "2 ** 99", "9" * 99, "x", "(", "len('')", "(" * 5000]
)
def test_what_cannot_be_computed_costs_a_turn(expression: str) -> None:
    call = ToolCall("calculate", {"expression": expression}).render()
    _, _, [(observation, reward, terminated, *_)] = play(
        [call], prompt="?", answer="2", tool="calculator"
    )
    assert observation.startswith("Error: ")
    assert (reward, terminated) == (0.0, False)


@pytest.mark.slow
def test_programs_may_be_run_before_the_answer() -> None:
    call = ToolCall("python", {"code": "print(6 * 7)"}).render()
    _, _, steps = play([call, "42"], prompt="6 * 7?", answer="42", tool="python")
    assert steps[0][0] == "42"
    assert steps[1][1] == 1.0


@pytest.mark.parametrize(
    ("info", "value", "wins"), [({"success": None}, 0.3, True), ({"success": None}, 0.0, False)]
)
def test_a_score_above_zero_is_success_where_the_environment_leaves_it_to_the_reward(
    info: Mapping[str, Any], value: float, wins: bool
) -> None:
    answer = Completion((2,), (-1.0,), (0,), "stop")
    turn = Turn((1,), answer, 0.0, info)
    trajectory = Trajectory("x/0/0", Task("qa", 0), (turn,), Terminated())
    assert succeeded(trajectory, Score(value)) is wins
    known = Trajectory(
        "x/0/0", Task("qa", 0), (Turn((1,), answer, 0.0, {"success": not wins}),), Terminated()
    )
    assert succeeded(known, Score(value)) is not wins
