"""Chats in data: read into messages, and shown before a question without being trained on."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.batch import to_samples
from agentrl.conversation.chats import as_json, question_of, read_chat, written_chat
from agentrl.conversation.context import FULL, ContextPolicy, LastK
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.qa import QuestionAnswer
from agentrl.flow import run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.observe.trajectories import write_trajectories
from agentrl.protocols import GenerateRequest
from agentrl.rewards.rules.tags import Tags
from agentrl.rewards.rules.tool_use import ToolUse
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.engines import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Message, Score, Task, ToolCall, Trajectory
from agentrl.viewer.report_episodes import _pictures

RENDERER = TemplateRenderer(ByteTokenizer())
CALL = ToolCall("calculate", {"expression": "1 + 1"}, "c1")
CALLED = {"id": "c1", "function": {"name": "calculate", "arguments": '{"expression": "1 + 1"}'}}
FEW = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "<a>two</a>"},
    {"role": "user", "content": "2 + 2?"},
]


def played(*replies: str, context: ContextPolicy = FULL, **options: Any) -> Trajectory:
    async def main() -> Trajectory:
        def said(request: GenerateRequest) -> bytes:
            return replies[int(request.id.rpartition("/")[2])].encode()

        async with ScriptedEngine.replying(said, max_context=4096) as engine:
            policy = EnginePolicy(
                engine, SamplingParams(max_tokens=200, stop_token_ids=RENDERER.stop_token_ids), 60.0
            )
            host = EnvPool({"qa": QuestionAnswer}, EnvDeadlines())
            runner = EnvEpisodeRunner(policy, RENDERER, host, Budget(), 900.0, context)
            (trajectory,) = await runner.play(Assignment("e", Task("qa", 0, options), 0))
            await host.close()
        return trajectory

    return run_virtual(main)


def test_what_stands_before_the_question_is_shown_and_not_trained_on(tmp_path: Path) -> None:
    episode = played("4", prompt=FEW, answer="4")
    roles = [message.role for message in episode.messages]
    assert roles == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    [turn] = episode.turns
    shown = RENDERER.decode(turn.prompt_ids)
    assert [
        shown.count(text) for text in ("Be brief.", "1 + 1?", "calculate", "two", "2 + 2?")
    ] == [1, 1, 1, 1, 1]
    [sample] = to_samples(episode, 1.0)
    assert int(sum(sample.loss_mask)) == len(turn.completion.token_ids)
    assert [message.content for message in episode.messages if message.is_answer] == ["4"]
    assert turn.reward == 1.0
    write_trajectories(tmp_path / "step.parquet", [(episode, Score(1.0))])
    [row] = pq.read_table(tmp_path / "step.parquet").to_pylist()
    assert [message["given"] for message in row["messages"]] == [
        False,
        True,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_what_was_given_is_no_answer_of_the_models_to_rewards_and_pictures() -> None:
    episode = played("<a>4</a>", prompt=FEW)
    assert Tags(Tags.Config(tags=["a"])).content(episode) == ("<a>4</a>",)
    assert len(ToolUse(ToolUse.Config()).content(episode)) == 1
    messages = [{"role": one.role, "given": one.given} for one in episode.messages]
    assert _pictures({"turns": [{"picture": "drawn"}]}, messages)[5] == "drawn"


def test_a_context_policy_keeps_the_examples_with_the_opening() -> None:
    def call(text: str) -> str:
        return ToolCall("calculate", {"expression": text}).render()

    replies = (call("1"), call("2"), call("3"), "4")
    episode = played(*replies, context=LastK(turns=1), prompt=FEW, answer="4", tool="calculator")
    last = RENDERER.decode(episode.turns[-1].prompt_ids)
    assert episode.turns[-1].forked
    assert [text in last for text in ("Be brief.", "two", "2 + 2?", call("2"), call("3"))] == [
        True
    ] * 3 + [False, True]


def test_a_history_that_is_no_chat_fails_the_episode_with_the_reason() -> None:
    class Odd(QuestionAnswer):
        async def reset(self, *, seed: int, options: Any) -> Any:
            return "x", {"history": [{"role": "narrator", "content": "x"}]}

    async def main() -> Trajectory:
        async with ScriptedEngine.replying(lambda request: b"x", max_context=4096) as engine:
            host = EnvPool({"qa": Odd}, EnvDeadlines())
            policy = EnginePolicy(engine, SamplingParams(max_tokens=8), 60.0)
            (trajectory,) = await EnvEpisodeRunner(policy, RENDERER, host, Budget(), 9.0).play(
                Assignment("e", Task("qa", 0), 0)
            )
            return trajectory

    assert "message 1 has the role 'narrator'" in str(run_virtual(main).status)


SAME = (Message("system", "Be brief."), Message("user", "2 + 2?"))


ASKED = {"role": "user", "content": "2 + 2?"}


def in_parts(kind: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": kind, "text": "2 + "}, {"type": kind, "text": "2?"}],
    }


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "system", "content": "Be brief."}, ASKED | {"name": None, "tool_calls": None}],
        [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "2 + 2?", "weight": None},
        ],
        [[{"role": "developer", "content": "Be brief."}, in_parts("text")]],
        [{"role": "SYSTEM", "content": ["Be ", "brief."]}, in_parts("input_text")],
        [
            {"role": "system", "parts": [{"text": "Be brief."}]},
            {"role": "user", "parts": [{"text": "2 + 2?"}]},
        ],
    ],
)
def test_forms_of_one_chat_are_the_same_messages(chat: list[Any]) -> None:
    assert read_chat(chat) == SAME
    assert read_chat([as_json(message) for message in read_chat(chat)]) == SAME


def test_calls_are_read_in_each_form_and_written_so_that_they_are_read_again() -> None:
    given = {"name": "calculate", "arguments": {"expression": "1 + 1", "unit": None}}
    forms = [
        FEW[2],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": given}],
        },
        {"role": "assistant", "tool_calls": [given | {"id": "c1"}]},
    ]
    for form in forms:
        [message] = read_chat([form])
        assert (message.tool_calls, message.content, message.said) == ((CALL,), CALL.render(), "")
        assert read_chat([as_json(message)]) == (message,)
    older = {
        "from": "function_call",
        "value": json.dumps({"name": "calculate", "arguments": {"expression": "1 + 1"}}),
    }
    assert read_chat([older])[0].tool_calls == (ToolCall("calculate", {"expression": "1 + 1"}),)


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        (
            [{"role": "narrator", "content": "x"}],
            "message 1 has the role 'narrator': write system, user",
        ),
        (
            [{"role": "user", "content": "x"}, {"content": "y"}],
            "message 2 has no role, but content",
        ),
        (
            [{"role": "user", "content": "x"}, "y"],
            "message 2 is 'y', not an object with role and content",
        ),
        ([{"role": "user", "content": None}], r"message 1 \(user\) has no content, but role"),
        ([{"role": "user", "content": 3}], "message 1 .* has the content 3: write a text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "a part of type 'image_url', and texts alone are read here",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "has a call that is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"arguments": "{}"}]}],
            "write an object with name and arguments",
        ),
        ([[{"role": "user", "content": "x"}]] * 2, "it has 2 turns with messages of their own"),
    ],
)
def test_a_chat_is_refused_for_the_true_reason(chat: list[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_chat(chat)


def test_the_last_message_of_the_user_is_the_question_and_what_follows_the_answer() -> None:
    chat = read_chat([*FEW, {"role": "assistant", "content": "4"}])
    assert question_of(chat) == (chat[:-1], "4")
    assert question_of(chat[:-1]) == (chat[:-1], None)
    with pytest.raises(
        ValueError, match="a chat has a message of the user, and this one is of system"
    ):
        question_of(chat[:1])
    with pytest.raises(ValueError, match="ends with a system message"):
        question_of([*chat[1:2], chat[0]])


def test_a_chat_that_is_written_as_text_is_read_or_refused() -> None:
    chat = [{"role": "user", "content": "It's 2 + 2?"}]
    assert written_chat(json.dumps(chat)) == written_chat(f" {chat!r}") == chat
    assert written_chat("[{1}]") is None
    assert written_chat("What is [{'a': 1}]?") is None
    with pytest.raises(ValueError, match="begins like a chat"):
        written_chat("[{'role': 'user', 'content': array(['x'], dtype=object)}]")
