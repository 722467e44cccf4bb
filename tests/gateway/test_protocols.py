"""OpenAI's and Anthropic's protocols, spoken by the vendors' clients to an engine with a script."""

from datetime import UTC, datetime

import anthropic
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentrl.conversation.config import RendererConfig
from agentrl.conversation.family import find_family
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.testing import ScriptedEngine
from agentrl.trajectory import Message, Terminated, ToolCall, Truncated
from tests.chat_templates import tokenizer_of
from tests.gateway.served import CALL, RENDERER, TOOL, loads, saying, served
from tests.processes import PATIENCE_SECONDS


def client_of(assignment, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=assignment.base_url, api_key=assignment.api_key, **options)


def answers_of(trajectory) -> list[str]:
    return [RENDERER.answer_text(turn.completion.token_ids) for turn in trajectory.turns]


def test_chat_completions_with_tools_extend_one_conversation():
    async def play(assignment):
        async with client_of(assignment) as client:
            messages = [
                {"role": "system", "content": "You add."},
                {"role": "user", "content": "2 + 3?"},
            ]
            first = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert message.content == "Let me see."
            (call,) = message.tool_calls
            assert call.function.name == "add"
            arguments = loads(call.function.arguments)
            result = {
                "role": "tool",
                "tool_call_id": call.id,
                "content": str(arguments["a"] + arguments["b"]),
            }
            messages += [message.model_dump(exclude_none=True), result]
            second = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
            assert (
                second.usage.prompt_tokens
                > first.usage.prompt_tokens + first.usage.completion_tokens
            )
            return float(second.choices[0].message.content == "5")

    trajectory, session = served(play, saying(f"Let me see.\n{CALL}", "5"))
    assert trajectory.status == Terminated()
    assert trajectory.env_return == 1.0
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]
    assert not any(turn.forked for turn in trajectory.turns)
    assert answers_of(trajectory) == [f"Let me see.\n{CALL}", "5"]
    assert trajectory.messages[3].tool_call_id == trajectory.messages[2].tool_calls[0].id


def test_parallel_calls_of_tools_have_ids_of_their_own_in_the_whole_episode():
    seen = []

    async def play(assignment):
        async with client_of(assignment) as client:
            messages = [{"role": "user", "content": "2 + 3, twice"}]
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL]
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    seen.append(call.id)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        return 1.0

    trajectory, session = served(play, saying(f"{CALL}\n{CALL}"))
    assert len(set(seen)) == len(seen) == 4
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]
    assert len(trajectory.turns) == 2


def unreadable(value: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>'


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "value",
    ["1e400", "NaN", '"\\ud800"', "[" * 300 + "]" * 300],
    ids=["inf", "nan", "half", "deep"],
)
def test_a_call_that_no_reader_of_json_can_read_stays_text(value, streams):
    paths = {
        "/chat/completions": {"messages": [{"role": "user", "content": "1"}], "tools": [TOOL]},
        "/responses": {"input": "2", "tools": [RESPONSES_TOOL]},
        "/messages": {
            "messages": [{"role": "user", "content": "3"}],
            "tools": [ANTHROPIC_TOOL],
            "max_tokens": 4000,
        },
    }

    async def play(assignment):
        async with client_of(assignment, max_retries=0) as client:
            for path, body in paths.items():
                asked = {"model": "policy", "stream": streams, **body}
                answer = await client.post(path, body=asked, cast_to=httpx.Response)
                assert "add" in answer.text
                assert "call_" not in answer.text.replace("tool_call", "")
        return 1.0

    trajectory, _ = served(play, saying(unreadable(value)))
    assert trajectory.status == Terminated()
    assert len(trajectory.turns) == 3


def test_what_a_library_writes_with_its_nulls_is_read_as_without():
    async def play(assignment):
        async with client_of(assignment, max_retries=0) as client:
            messages = [{"role": "user", "content": "1"}]
            asked = {"model": "policy", "tools": [TOOL]}
            message = (
                (await client.chat.completions.create(messages=messages, **asked))
                .choices[0]
                .message
            )
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
            messages += [
                message.model_dump() | {"tool_calls": [message.tool_calls[0].model_dump()]},
                result,
            ]
            message = (
                (await client.chat.completions.create(messages=messages, **asked))
                .choices[0]
                .message
            )
            messages += [message.model_dump(), {"role": "user", "content": "and now?"}]
            assert message.tool_calls is None
            nulls = dict.fromkeys(
                ("tools", "tool_choice", "n", "stream", "response_format", "functions")
            )
            await client.chat.completions.create(
                messages=messages, model="policy", extra_body=nulls
            )
            asked = {"model": "policy", "tools": [RESPONSES_TOOL]}
            items = [{"role": "user", "content": "2"}]
            output = (await client.responses.create(input=items, **asked)).output
            assert [item.type for item in output] == ["message", "function_call"]
            items += [item.model_dump() for item in output]
            items.append(
                {"type": "function_call_output", "call_id": output[1].call_id, "output": "5"}
            )
            await client.responses.create(input=items, **asked)
        return 1.0

    trajectory, session = served(play, saying(CALL, "5", "so", f"Hm.\n{CALL}", "5"))
    assert trajectory.status == Terminated()
    kinds = [call.kind for call in session.tree.calls]
    # The third is told no tools.
    assert kinds == [
        "start",
        "extension",
        "subagent",
        "subagent",
        "extension",
    ]


@pytest.mark.parametrize("text", [f"Let me see.\n{CALL}", "a longer text " * 20, ""])
def test_a_stream_says_what_the_whole_answer_says(text):
    async def play(assignment):
        async with client_of(assignment) as client:
            asked = {
                "model": "policy",
                "messages": [{"role": "user", "content": "2 + 3?"}],
                "tools": [TOOL],
            }
            whole = await client.chat.completions.create(**asked)
            content, calls, finish, usage = "", {}, None, None
            stream = await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    finish = choice.finish_reason or finish
                    for part in choice.delta.tool_calls or ():
                        name, arguments = calls.get(part.index, ("", ""))
                        calls[part.index] = (
                            name + (part.function.name or ""),
                            arguments + part.function.arguments,
                        )
            choice = whole.choices[0]
            assert content == (choice.message.content or "")
            assert finish == choice.finish_reason
            assert usage.completion_tokens == whole.usage.completion_tokens
            said = [
                (call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
            ]
            assert list(calls.values()) == said
        return 1.0

    trajectory, session = served(play, saying(text))
    assert [call.kind for call in session.tree.calls] == ["start", "retry"]
    assert not trajectory.dropped


@pytest.mark.parametrize("streams", [False, True])
def test_a_token_that_is_a_part_of_a_character_has_no_bytes_in_its_logprob(streams):
    async def play(assignment):
        async with client_of(assignment) as client:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "count"}]}
            if streams:
                stream = await client.chat.completions.create(**asked, logprobs=True, stream=True)
                choices = [chunk.choices[0] async for chunk in stream]
            else:
                answer = await client.chat.completions.create(**asked, logprobs=True)
                choices = answer.choices
            tokens = choices[-1].logprobs.content[:4]  # and the end of the turn
            assert [token.bytes for token in tokens] == [[ord("a")], None, None, [ord("b")]]
        return 1.0

    assert served(play, saying("aéb"))[0].status == Terminated()


def test_several_answers_logprobs_and_a_stop_text():
    engine = saying("one, two")

    async def play(assignment):
        async with client_of(assignment) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "count"}], n=2, logprobs=True
            )
            assert [choice.message.content for choice in answer.choices] == ["one, two"] * 2
            tokens = answer.choices[0].logprobs.content
            assert "".join(token.token for token in tokens).startswith("one, two")
            assert all(token.logprob == 0.0 for token in tokens)
        return 1.0

    trajectory, _ = served(play, engine)
    assert [turn.forked for turn in trajectory.turns] == [False, True]
    assert len({request.seed for request in engine.requests}) == 2


def test_a_prompt_beyond_the_context_is_refused_as_openai_does_it():
    async def play(assignment):
        async with client_of(assignment, max_retries=0) as client:
            asked = [{"role": "user", "content": "hi"}]
            await client.chat.completions.create(model="policy", messages=asked)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "x" * 300}]
                )
            assert refused.value.code == "context_length_exceeded"
            raise openai.OpenAIError("the program gives up")

    async def guarded(assignment):
        try:
            return await play(assignment)
        except openai.OpenAIError:
            return None

    trajectory, _ = served(guarded, saying("hi", max_context=200))
    assert trajectory.status == Truncated("context")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"extra_body": {"guided_choice": ["a"]}}, "guided_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "image_url",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "last message",
        ),
        ({"messages": []}, "no message"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "a", "arguments": ""}}]},
            "function_call",
        ),
        ({"stop": [str(number) for number in range(99)]}, "stop"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(fields, named):
    async def play(assignment):
        async with client_of(assignment, max_retries=0) as client:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            with pytest.raises(openai.BadRequestError, match=named):
                await client.chat.completions.create(**(asked | fields))
            ignored = {
                "user": "me",
                "metadata": {"a": "b"},
                "reasoning_effort": "low",
                "frequency_penalty": 0,
            }
            await client.chat.completions.create(**asked, **ignored)
        return 1.0

    trajectory, _ = served(play, saying("hi"))
    assert trajectory.status == Terminated()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize("wanted", ["a schema", "any object"])
def test_an_answer_has_the_format_that_a_program_asks_for(wanted):
    """The engine is told it; what it then does is in `tests/engines/test_contract.py`."""
    schema = wanted == "a schema"

    async def play(assignment):
        async with client_of(assignment) as client:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            chosen = JSON_SCHEMA if schema else {"type": "json_object"}
            said = await client.chat.completions.create(**asked, response_format=chosen)
            assert loads(said.choices[0].message.content) == {"a": 1}
            flat = (
                {"type": "json_schema", "name": "answer", "schema": SCHEMA}
                if schema
                else {"type": "json_object"}
            )
            response = await client.responses.create(
                model="policy", input="hi", text={"format": flat}
            )
            assert loads(response.output_text) == {"a": 1}
            free = await client.chat.completions.create(
                **asked, response_format={"type": "text"}, tools=[TOOL]
            )
            assert free.choices[0].message.content == "hello"
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await client.chat.completions.create(**asked, response_format=chosen, tools=[TOOL])
        return 1.0

    def reply(request):
        return list(b'{"a": 1}' if request.format else b"hello")

    engine = ScriptedEngine.replying(reply, max_context=1000, formats=True)
    served(play, engine, trained=False, formats=True)
    told = [request.format and loads(request.format.schema or "{}") for request in engine.requests]
    assert told == [SCHEMA if schema else {}, SCHEMA if schema else {}, None]


@pytest.mark.parametrize(
    ("trained", "formats", "named"),
    [
        (True, True, "policy that is trained"),
        (False, False, "structured_outputs=true"),
        (False, True, "this engine"),
    ],
    ids=["in training", "by another engine", "a format that the engine cannot make"],
)
def test_a_format_is_refused_with_the_reason(trained, formats, named):
    async def play(assignment):
        async with client_of(assignment, max_retries=0) as client:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            with pytest.raises(openai.BadRequestError, match=named):
                await client.chat.completions.create(**asked, response_format=JSON_SCHEMA)
            await client.chat.completions.create(**asked)
        return 1.0

    trajectory, _ = served(play, saying("hi"), trained=trained, formats=formats)
    assert trajectory.status == Terminated()


def test_a_wrong_key_is_refused():
    async def play(assignment):
        async with openai.AsyncOpenAI(
            base_url=assignment.base_url, api_key="guessed", max_retries=0
        ) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(assignment) as client:
            (model,) = (await client.models.list()).data
            assert model.id == "policy"
            await client.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": "hi"}]
            )
        return 1.0

    assert served(play, saying("hi"))[0].status == Terminated()


ANTHROPIC_TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": TOOL["function"]["parameters"],
}


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_messages_with_tools_extend_one_conversation(streams):
    async def play(assignment):
        async with anthropic.AsyncAnthropic(
            base_url=assignment.url, api_key=assignment.api_key
        ) as client:
            asked = {
                "model": "policy",
                "max_tokens": 1000,
                "system": "You add.",
                "tools": [ANTHROPIC_TOOL],
            }
            messages = [{"role": "user", "content": "2 + 3?"}]

            async def answer():
                if not streams:
                    return await client.messages.create(**asked, messages=messages)
                async with client.messages.stream(**asked, messages=messages) as stream:
                    return await stream.get_final_message()

            first = await answer()
            # And the end of its turn.
            assert first.usage.output_tokens == len(f"Let me see.\n{CALL}") + 1
            counted = await client.messages.count_tokens(
                model="policy", system="You add.", tools=[ANTHROPIC_TOOL], messages=messages
            )
            assert first.usage.input_tokens == counted.input_tokens
            assert first.stop_reason == "tool_use"
            text, call = first.content
            assert text.text == "Let me see."
            assert call.input == {"a": 2, "b": 3}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
            messages += [
                {
                    "role": "assistant",
                    "content": [block.model_dump(exclude_none=True) for block in first.content],
                },
                {"role": "user", "content": [result]},
            ]
            second = await answer()
            assert second.stop_reason == "end_turn"
            return {"reward": float(second.content[0].text == "5"), "success": True}

    trajectory, session = served(play, saying(f"Let me see.\n{CALL}", "5"))
    assert trajectory.env_return == 1.0
    assert trajectory.success
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]


def test_anthropics_client_gets_errors_in_its_form():
    async def play(assignment):
        async with anthropic.AsyncAnthropic(
            base_url=assignment.url, api_key=assignment.api_key, max_retries=0
        ) as client:
            asked = {
                "model": "policy",
                "max_tokens": 10,
                "messages": [{"role": "user", "content": "hi"}],
            }
            await client.messages.create(**asked)
            bash = {"type": "bash_20250124", "name": "bash"}
            with pytest.raises(anthropic.BadRequestError, match="bash_20250124"):
                await client.messages.create(**asked, tools=[bash])
        return 1.0

    assert served(play, saying("hi"))[0].status == Terminated()


RESPONSES_TOOL = {"type": "function", **TOOL["function"]}


def test_a_reference_to_an_item_of_an_answer_stands_for_the_item():
    """Vercel's AI SDK sends those."""

    async def play(assignment):
        async with client_of(assignment, max_retries=0) as client:
            asked = {"model": "policy", "tools": [RESPONSES_TOOL]}
            items = [{"role": "user", "content": "2 + 3?"}]
            output = (await client.responses.create(**asked, input=items)).output
            items += [{"type": "item_reference", "id": item.id} for item in output]
            items.append(
                {"type": "function_call_output", "call_id": output[1].call_id, "output": "5"}
            )
            await client.responses.create(**asked, input=items)
            for wrong in ("msg_of_another", "", 5, None, [1]):
                with pytest.raises(openai.BadRequestError, match="input"):
                    await client.responses.create(
                        **asked, input=[{"type": "item_reference", "id": wrong}, *items]
                    )
        return 1.0

    trajectory, session = served(play, saying(f"Let me see.\n{CALL}", "5"))
    assert trajectory.status == Terminated()
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]


def test_an_answer_sent_back_without_the_ids_of_its_items_extends_the_conversation():
    """OpenAI's server takes it like that, and Codex sends it so where nothing is stored."""

    async def play(assignment):
        async with client_of(assignment) as client:
            items = [{"role": "user", "content": "Which way?"}]
            answer = await client.responses.create(model="policy", input=items)
            said = {"type": "output_text", "text": answer.output_text}
            items += [
                {"type": "reasoning", "encrypted_content": "none of ours"},
                {"role": "assistant", "content": [said]},
                {"role": "user", "content": [{"type": "input_text", "text": "And then?"}]},
            ]
            await client.responses.create(model="policy", input=items)
        return 1.0

    trajectory, session = served(play, saying("left", "right"))
    assert trajectory.status == Terminated()
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_responses_with_tools_extend_one_conversation(streams):
    async def play(assignment):
        async with client_of(assignment) as client:
            asked = {"model": "policy", "instructions": "You add.", "tools": [RESPONSES_TOOL]}
            items = [{"role": "user", "content": "2 + 3?"}]

            async def answer():
                if not streams:
                    return await client.responses.create(**asked, input=items)
                async with client.responses.stream(**asked, input=items) as stream:
                    return await stream.get_final_response()

            first = await answer()
            message, call = first.output
            assert first.output_text == message.content[0].text == "Let me see."
            assert loads(call.arguments) == {"a": 2, "b": 3}
            sent = [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
                for item in first.output
            ]
            items += [
                *sent,
                {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
            ]
            return float((await answer()).output_text == "5")

    trajectory, session = served(play, saying(f"Let me see.\n{CALL}", "5"))
    assert trajectory.env_return == 1.0
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]


def test_a_reward_may_be_posted_for_the_episode_and_for_a_call():
    async def play(assignment):
        async with client_of(assignment) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hi"}]
            )
            await client.post("/rewards", body={"reward": 0.5, "call": answer.id}, cast_to=object)
            await client.post("/rewards", body={"reward": 2.0, "success": True}, cast_to=object)
            other = answer.id[:-3] + "f_0" if answer.id[-3] != "f" else answer.id[:-3] + "0_0"
            for unknown in (
                answer.id[:-1] + "9",
                other,
                "9",
                f"call_{answer.id[9:]}",
                f"{answer.id}_0",
                "",
            ):
                with pytest.raises(openai.NotFoundError, match="no answer"):
                    await client.post(
                        "/rewards", body={"reward": 2.0, "call": unknown}, cast_to=object
                    )

    trajectory, _ = served(play, saying("hi"))
    assert trajectory.env_return == 2.5
    assert trajectory.success


def test_no_two_episodes_name_their_answers_alike_and_each_protocol_tells_the_time():
    now, ids = datetime.now(UTC).timestamp(), []

    async def play(assignment):
        async with client_of(assignment) as client:
            chat = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "2 + 3?"}], tools=[TOOL]
            )
            response = await client.responses.create(
                model="policy", input="4 + 5?", tools=[RESPONSES_TOOL]
            )
            ids.extend(
                [
                    chat.id,
                    chat.choices[0].message.tool_calls[0].id,
                    response.id,
                    response.output[0].id,
                ]
            )
            assert min(chat.created, response.created_at) >= int(now)
            for one in (chat, response):
                await client.post("/rewards", body={"reward": 0.25, "call": one.id}, cast_to=object)
        async with anthropic.AsyncAnthropic(
            base_url=assignment.url, api_key=assignment.api_key
        ) as client:
            asked = {
                "model": "policy",
                "max_tokens": 100,
                "messages": [{"role": "user", "content": "6 + 7?"}],
            }
            ids.append((await client.messages.create(**asked)).id)

    for episode in ("e", "f"):
        trajectory, _ = served(play, saying(CALL), episode=episode)
        assert [turn.reward for turn in trajectory.turns] == [0.25, 0.25, 0.0]
    assert len(set(ids)) == len(ids) == 10


def test_the_length_of_a_prompt_is_counted_without_an_answer():
    async def play(assignment):
        async with anthropic.AsyncAnthropic(
            base_url=assignment.url, api_key=assignment.api_key
        ) as client:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "Which way?"}]}
            counted = await client.messages.count_tokens(**asked)
            answer = await client.messages.create(**asked, max_tokens=16)
            assert counted.input_tokens == answer.usage.input_tokens
            said = {"role": "assistant", "content": answer.content[0].text}
            asked["messages"] += [said, {"role": "user", "content": "And then?"}]
            counted = await client.messages.count_tokens(**asked)
            answer = await client.messages.create(**asked, max_tokens=16)
            assert counted.input_tokens == answer.usage.input_tokens
        return 1.0

    trajectory, session = served(play, saying("left", "right"))
    assert len(trajectory.turns) == len(session.tree.calls) == 2


NULLS = {
    "/v1/chat/completions": {"content", "refusal", "logprobs", "finish_reason"},
    "/v1/responses": {
        "error",
        "incomplete_details",
        "instructions",
        "metadata",
        "temperature",
        "top_p",
    },
    "/v1/messages": {"stop_reason", "stop_sequence"},
}
"""What the vendors' own servers write as null. Some libraries refuse the answer if anything else
is.
"""
WHOLE = {
    "/v1/chat/completions": TypeAdapter(ChatCompletion),
    "/v1/responses": TypeAdapter(Response),
    "/v1/messages": TypeAdapter(anthropic.types.Message),
}
PARTS = {
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
    "/v1/responses": TypeAdapter(ResponseStreamEvent),
    "/v1/messages": TypeAdapter(anthropic.types.RawMessageStreamEvent),
}


def nulls_in(value, name="") -> set[str]:
    """The names of the fields that are null, at any depth."""
    if value is None:
        return {name}
    inner = (
        value.items()
        if isinstance(value, dict)
        else [(name, one) for one in value]
        if isinstance(value, list)
        else ()
    )
    return {null for key, one in inner for null in nulls_in(one, key)}


@pytest.mark.parametrize("path", NULLS)
def test_answers_keep_their_vendors_schemas_and_have_no_other_nulls_than_theirs(path):
    renderer, answers = model("qwen3_5_think"), []
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    described = {
        "/v1/chat/completions": {"type": "function", "function": tool},
        "/v1/responses": {"type": "function", **tool},
        "/v1/messages": {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}},
    }[path]
    written = renderer.template.call(ToolCall("add", {}))[1] or CALL
    texts = ("Hm.</think>It is 5.", f"Hm.</think>I add.{written}", "")

    async def play(assignment):
        async with httpx.AsyncClient(base_url=assignment.url, timeout=PATIENCE_SECONDS) as client:
            for number, streams in (
                (n, streams) for n in range(len(texts)) for streams in (False, True)
            ):
                said = [{"role": "user", "content": f"{number} {streams}"}]
                body = {"model": "policy", "stream": streams, "tools": [described]}
                body |= (
                    {"input": said}
                    if path == "/v1/responses"
                    else {"messages": said, "max_tokens": 500}
                )
                headers = {"authorization": f"Bearer {assignment.api_key}"}
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                answers.append(answer.text)
        return 1.0

    served(
        play, answering(renderer, *(text for text in texts for _ in range(2))), renderer=renderer
    )
    assert len(answers) == 6
    for whole, stream in zip(answers[::2], answers[1::2], strict=True):
        WHOLE[path].validate_json(whole)
        events = [
            line.removeprefix("data: ")
            for line in stream.splitlines()
            if line.startswith("data: {")
        ]
        for event in events:
            PARTS[path].validate_json(event)
        assert nulls_in([loads(one) for one in (whole, *events)]) <= NULLS[path]


def test_what_other_models_are_asked_beside_the_policy_is_answered_and_not_trained_on():
    async def play(assignment):
        async with client_of(assignment) as client:

            async def ask(name, *messages):
                answer = await client.chat.completions.create(model=name, messages=list(messages))
                return {"role": "assistant", "content": answer.choices[0].message.content}

            begin, title = (
                {"role": "user", "content": "begin"},
                {"role": "user", "content": "Write a title."},
            )
            assert (await ask("small", title, begin))["content"] == "zero"
            first = await ask("openai/policy", begin)
            assert (await ask("small", begin, first, title))["content"] == "two"
            await ask("policy", begin, first, {"role": "user", "content": "go on"})
        return 1.0

    trajectory, session = served(play, saying("zero", "one", "two", "three"))
    assert answers_of(trajectory) == ["one", "three"]
    assert not any(turn.forked for turn in trajectory.turns)
    assert trajectory.dropped == {"other_model": (2, len("zero") + len("two") + 2)}
    assert [call.kind for call in session.tree.calls] == [
        "start",
        "subagent",
        "extension",
        "extension",
    ]


def test_the_policy_answers_to_any_name():
    async def play(assignment):
        async with client_of(assignment) as client:
            assert (await client.models.retrieve("gpt-something")).id == "gpt-something"
            assert [model.id async for model in await client.models.list()] == ["policy"]
            await client.chat.completions.create(
                model="gpt-something", messages=[{"role": "user", "content": "hi"}]
            )
        return 1.0

    assert served(play, saying("left"))[0].status == Terminated()


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 2}, 2),
        ({"max_tokens": "2"}, 2),
        ({"max_tokens": 2, "max_completion_tokens": None}, 2),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 3),
        ({}, 4096),
    ],
)
def test_a_program_may_lower_the_length_of_an_answer(fields, most):
    engine = saying("left")

    async def play(assignment):
        async with client_of(assignment) as client:
            messages = [{"role": "user", "content": "hi"}]
            await client.chat.completions.create(
                model="policy", messages=messages, extra_body=fields
            )
        return 1.0

    served(play, engine)
    assert [request.sampling.max_tokens for request in engine.requests] == [most]


def model(name: str) -> TemplateRenderer:
    """The renderer of a family whose template refuses, or leaves out, what chat APIs take."""
    tokenizer = tokenizer_of(name)
    return TemplateRenderer(tokenizer, RendererConfig(), (), find_family(tokenizer, {}, {}))


def answering(renderer: TemplateRenderer, *texts: str) -> ScriptedEngine:
    """An engine of that model that answers call n with text n."""

    def reply(request):
        return renderer.answer_ids(texts[int(request.id.rpartition("/")[2])]).tolist()

    return ScriptedEngine.replying(reply, max_context=100_000)


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "gemma", "cohere2"])
def test_system_messages_of_any_number_and_place_are_shown_to_every_family(name):
    renderer = model(name)

    async def play(assignment):
        async with client_of(assignment) as client:
            messages = [
                {"role": "system", "content": "You play."},
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "Begin."},
            ]
            for late in ("system", "developer"):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages += [
                    {"role": late, "content": f"A late {late}."},
                    {"role": "user", "content": "Go on."},
                ]
            await client.chat.completions.create(model="policy", messages=messages)
            return 1.0

    trajectory, session = served(
        play, answering(renderer, "left", "right", "up"), renderer=renderer
    )
    assert trajectory.status == Terminated()
    assert [call.kind for call in session.tree.calls] == ["start", "extension", "extension"]
    text = renderer.decode(session.tree.calls[-1].prompt_ids)
    for said in ("You play.", "Be brief.", "Begin.", "A late system.", "A late developer."):
        assert text.count(said) == 1


@pytest.mark.parametrize("name", ["qwen3_5_think", "glm4moe", "gptoss", "cohere2"])
def test_a_result_and_a_text_in_one_message_of_anthropic_go_on_after_a_call(name):
    renderer = model(name)
    written = renderer.template.call(ToolCall("add", {"a": 2, "b": 3}))[1] or CALL
    for stop in renderer.template.stops:
        written = written.removesuffix(stop)
    if (
        renderer.decode(renderer.whole([Message("user", "2 + 3?")], ()))
        .rstrip()
        .endswith("<think>")
    ):
        written = "</think>" + written.partition("</think>")[2]
    described = {
        "name": "add",
        "description": "Adds.",
        "input_schema": TOOL["function"]["parameters"],
    }

    async def play(assignment):
        async with anthropic.AsyncAnthropic(
            base_url=assignment.url, api_key=assignment.api_key
        ) as client:
            fields = {"model": "policy", "max_tokens": 200, "tools": [described]}
            messages = [{"role": "user", "content": "2 + 3?"}]
            first = await client.messages.create(messages=messages, **fields)
            call = next(block for block in first.content if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is 5."}
            blocks = [
                block.model_dump(exclude_none=True)
                for block in first.content
                if block.type != "thinking"
            ]
            messages += [
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": [result, {"type": "text", "text": "Hurry up."}]},
            ]
            await client.messages.create(messages=messages, **fields)
            return 1.0

    trajectory, session = served(play, answering(renderer, written, "5"), renderer=renderer)
    assert trajectory.status == Terminated()
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]
    text = renderer.decode(session.tree.calls[-1].new_ids)
    assert text.index("It is 5.") < text.index("Hurry up.")
