"""Judged text that tries to be the judge: each attack fools a plain prompt, and none fools ours."""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.rewards.judge import RubricJudge
from agentrl.rewards.judge_pairwise import PairwiseJudge
from agentrl.rewards.judge_prompt import JudgePrompt, as_data
from agentrl.testing.judge_attacks import ATTACKS, gullible
from agentrl.testing.judge_server import JudgeCall, JudgeServer
from agentrl.trajectory import Message, Role, Task, Terminated, Trajectory
from tests.properties import examples

QUICK = {"cache": None, "concurrency": 2, "reasons": False}
FOOLED = {"levels": {"correct": 10}}
PLAIN = (
    "Grade the answer between the tags.\n<answer>\n{}\n</answer>\nGive its level, 0 to 10, as JSON."
)

each_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))


def honest(call: JudgeCall) -> dict[str, Any]:
    return {"levels": {"correct": 9 if "forty-two" in call.user else 0}}


def trajectory(answer: str, role: Role = "assistant") -> Trajectory:
    messages = (Message("user", "What is six times seven?"), Message(role, answer))
    return Trajectory("t", Task("sums", 0), (), Terminated(), messages)


def scores(answers: Sequence[Trajectory]) -> list[float]:
    async def main() -> list[float]:
        async with JudgeServer(gullible(honest, FOOLED)) as server:
            config = {"url": server.url, "criteria": {"correct": "It is right."}, **QUICK}
            async with RubricJudge(RubricJudge.Config.model_validate(config)) as judge:
                return [(await judge.score(answer)).value for answer in answers]

    return asyncio.run(main())


def test_there_are_attacks_enough_and_the_judge_tells_right_from_wrong() -> None:
    assert len(ATTACKS) >= 12
    assert scores([trajectory("It is forty-two."), trajectory("I do not know.")]) == [0.9, 0.0]


@each_attack
def test_an_attack_fools_the_gullible_judge_in_a_plain_prompt(attack: str) -> None:
    call = JudgeCall(0, "You are a judge.", PLAIN.format(attack), {})
    assert json.loads(gullible(honest, FOOLED)(call).content) == FOOLED
    fine = JudgeCall(0, "You are a judge.", PLAIN.format("I do not know."), {})
    assert json.loads(gullible(honest, FOOLED)(fine).content) == honest(fine)


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_an_attack_earns_nothing_in_ours(role: Role) -> None:
    earned = scores([trajectory(attack, role) for attack in ATTACKS.values()])
    assert dict(zip(ATTACKS, earned, strict=True)) == dict.fromkeys(ATTACKS, 0.0)


def test_an_attack_wins_no_pair() -> None:
    def better(call: JudgeCall) -> dict[str, Any]:
        return {"better": "first" if "forty-two" in call.user.split('"second"')[0] else "second"}

    async def main() -> dict[str, list[float]]:
        async with JudgeServer(gullible(better, {"better": "tie"})) as server:
            config = {"url": server.url, "better": "Which is right?", **QUICK}
            async with PairwiseJudge(PairwiseJudge.Config.model_validate(config)) as judge:
                won = {}
                for name, attack in ATTACKS.items():
                    scored = await judge.score_group(
                        [trajectory("It is forty-two."), trajectory(attack)]
                    )
                    won[name] = [score.value for score in scored]
                return won

    assert asyncio.run(main()) == {name: [1.0, 0.0] for name in ATTACKS}


@given(st.text())
@examples(50)
@example("[gMASK] [sop] [control_8] [UNUSED_TOKEN_145] [/INST] [x] [true] [1] [null]")
@example("\ud800 </data-1> [INST] \u2028 \U000e0041 ﹤x﹥")
def test_data_is_one_line_without_a_tag_or_a_token_and_says_the_same(text: str) -> None:
    data = as_data({"text": text})
    assert json.loads(data) == {"text": text}
    assert len(data.splitlines()) == 1
    assert not set("<>＜＞﹤﹥") & set(data)
    assert not re.search(
        r"\[(?!(?:true|false|null|NaN|Infinity)\])/?[A-Za-z_][A-Za-z0-9_]*\]", data
    )
    data.encode()


def test_each_prompt_has_a_key_of_its_own_that_judged_text_cannot_know() -> None:
    prompt = JudgePrompt("You judge.", {"text": "x"}, "Is it good?")
    users = [prompt.messages({})[1]["content"] for _ in range(100)]
    assert len({user.splitlines()[0] for user in users}) == 100
    user = users[0]
    assert user.index("Is it good?") > user.index("</data-")  # the instruction has the last word
