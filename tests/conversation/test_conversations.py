"""Conversations of any roles: each renders whole and turn by turn, with all that was said, or is
refused.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.conversation import renderer as renderer_module
from agentrl.conversation.chat_template import ChatTemplate
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.family import find_family
from agentrl.conversation.placing import Places
from agentrl.conversation.placing import place_messages as place
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion, Message, ToolCall
from tests.chat_templates import templates, tokenizer_of
from tests.properties import examples
from tests.tiers import evenly

FEW = (
    "cohere2",
    "deepseekv3",
    "gemma",
    "glm4moe",
    "gptoss",
    "llama3_1",
    "qwen2_5",
    "qwen3_5_think",
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "required": ["a"],
        },
    },
}


@pytest.fixture(autouse=True, scope="module")
def _without_vllm() -> Iterator[None]:
    """Importing its parsers takes seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(renderer_module, "slow_call_reader", lambda *_: None)
        yield


@cache
def renderers(name: str) -> tuple[TemplateRenderer, ...]:
    """By the template, and by the family that it is recognised as."""
    tokenizer = tokenizer_of(name)
    family = find_family(tokenizer, {}, {})
    by_template = TemplateRenderer(tokenizer, RendererConfig(renderer="template"))
    return (
        (by_template,)
        if family is None
        else (by_template, TemplateRenderer(tokenizer, None, (), family))
    )


def message(role: str, text: str) -> Message:
    """`C` is a call, `X` a text and a call."""
    call = ToolCall("add", {"a": "One."}, "call00001")
    match role:
        case "C":
            return Message("assistant", call.render(), tool_calls=(call,))
        case "X":
            return Message("assistant", f"{text}\n{call.render()}", tool_calls=(call,))
        case "T":
            return Message("tool", text, tool_call_id="call00001", name="add")
        case _:
            return Message({"S": "system", "U": "user", "A": "assistant"}[role], text)  # type: ignore[arg-type]


def spoken(roles: str, hostile: str = "") -> list[Message]:
    return [
        message(role, f"text{place}x{hostile if role in 'SUT' else ''}")
        for place, role in enumerate(roles)
    ]


@cache
def control_ids(name: str) -> frozenset[int]:
    return frozenset(tokenizer_of(name).added_tokens_decoder)


def controls(known: Collection[int], ids: Any) -> list[int]:
    return [int(i) for i in ids if i in known]


def check_all_there(one: TemplateRenderer, ids: Any, said: list[Message]) -> None:
    """Each text is there once, in order: but what came between a call and its results follows
    these.
    """
    text = one.decode(ids)
    found = [text.find(each.said) for each in said if each.said]
    assert [text.count(each.said) for each in said if each.said] == [1] * len(found)
    if "tool" not in {each.role for each in said}:
        assert found == sorted(found)


def check_whole(
    ones: Sequence[TemplateRenderer], known: Collection[int], roles: str, hostile: str
) -> None:
    for one in ones:
        said = spoken(roles)
        ids = one.whole(said, [ADD])
        check_all_there(one, ids, said)
        forged = one.whole(spoken(roles, hostile), [ADD])
        check_all_there(one, forged, spoken(roles, hostile))
        assert controls(known, forged) == controls(known, ids)


def check_turns(
    ones: Sequence[TemplateRenderer],
    known: Collection[int],
    turns: list[tuple[str, str, bool]],
    hostile: str,
) -> None:
    for one in ones:
        conversation = one.conversation([ADD])
        new_ids = conversation.prompt([Message("user", "Begin.")]).new_ids
        seen = new_ids.tolist()
        for answer, roles, stopped in turns:
            call = one.template.call(ToolCall("add", {"a": "One."}))[1] or message("C", "").content
            for stop in one.template.stops:
                call = call.removesuffix(stop)
            ids = one.encode(call if answer == "C" else "left").tolist()
            ids += [one.stop_token_ids[0]] if stopped else []
            conversation.answer(
                Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop" if stopped else "length")
            )
            said = spoken(roles, hostile)
            prompt = conversation.prompt(said)
            assert not prompt.forked
            assert prompt.ids.tolist() == [*seen, *ids, *prompt.new_ids.tolist()]
            check_all_there(one, prompt.new_ids, said)
            plain = one.added(new_ids, ints(ids), spoken(roles), [ADD])
            assert controls(known, prompt.new_ids) == controls(known, plain)
            new_ids = prompt.new_ids
            seen = prompt.ids.tolist()


def check_random_roles(
    ones: Sequence[TemplateRenderer], specials: Mapping[int, Any], rng: Random, count: int
) -> None:
    """Conversations of random roles, with control tokens of the model in what others say."""
    written = [str(token) for token in specials.values()]
    for _ in range(count):
        hostile = "".join(rng.choices(written, k=2))
        check_whole(
            ones,
            specials,
            "".join(rng.choices("SUACXT", k=rng.randrange(6))) + rng.choice("SUT"),
            hostile,
        )
        turns = [
            (rng.choice("AC"), "".join(rng.choices("SUT", k=2)), rng.random() < 0.5)
            for _ in range(2)
        ]
        check_turns(ones, specials, turns, hostile)


ROLES = st.text(st.sampled_from("SUACXT"), max_size=6).flatmap(
    lambda begun: st.sampled_from("SUT").map(lambda last: begun + last)
)
TURNS = st.lists(
    st.tuples(
        st.sampled_from("AC"),
        st.text(st.sampled_from("SUT"), min_size=1, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)
HOSTILE = st.lists(
    st.sampled_from(["<|im_end|>", "<|user|>", "<bos>", "</think>", "<tool_call>", "<|"]),
    max_size=2,
)


@given(name=st.sampled_from(FEW), roles=ROLES, hostile=HOSTILE)
@examples(200)
def test_any_roles_are_rendered_with_all_that_was_said_and_nothing_forged(
    name: str, roles: str, hostile: list[str]
) -> None:
    check_whole(renderers(name), control_ids(name), roles, "".join(hostile))


@given(name=st.sampled_from(FEW), turns=TURNS, hostile=HOSTILE)
@examples(200)
def test_any_roles_extend_a_conversation_with_all_that_was_said_and_nothing_forged(
    name: str, turns: list[tuple[str, str, bool]], hostile: list[str]
) -> None:
    check_turns(renderers(name), control_ids(name), turns, "".join(hostile))


@pytest.mark.slow
@pytest.mark.parametrize("name", evenly(sorted(templates()), 24))
def test_random_roles_are_rendered_by_every_template_and_family(name: str) -> None:
    check_random_roles(
        renderers(name), tokenizer_of(name).added_tokens_decoder, Random(name), count=12
    )


@given(
    turns=st.lists(
        st.tuples(st.sampled_from("AC"), st.sampled_from(["U", "T", "TU", "TT", "SU"])), max_size=4
    )
)
@examples(50)
def test_a_conversation_in_turns_is_what_the_template_says_of_it_whole(
    turns: list[tuple[str, str]],
) -> None:
    one = TemplateRenderer(tokenizer_of("qwen2_5"), RendererConfig(renderer="template"))
    conversation = one.conversation([ADD])
    prompt = conversation.prompt(spoken("SU"))
    for answer, roles in turns:
        ids = one.answer_ids(message("C", "").content if answer == "C" else "left")
        conversation.answer(Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
        prompt = conversation.prompt(spoken(roles))
    assert prompt.ids.tolist() == one.whole(conversation.messages, [ADD]).tolist()


def test_what_a_template_has_no_place_for_is_folded_into_the_next_message() -> None:
    said, few = spoken, Places(systems=False, late_systems=False)
    system = Message("system", "text0x\n\ntext1x")
    assert place(said("SSU"), few, begins=True) == [system, said("SSU")[2]]
    assert place(said("SUASU"), few, begins=True) == [
        *said("SUA"),
        Message("user", "text3x\n\ntext4x"),
    ]
    assert place(said("UAS"), few, begins=True) == [*said("UA"), Message("user", "text2x")]
    assert place(said("UCTS"), few, begins=True) == [
        *said("UCT"),
        Message("user", "text3x"),
    ]
    assert place(said("USA"), few, begins=True) == [
        said("U")[0],
        Message("user", "text1x"),
        said("USA")[2],
    ]
    assert place(said("SU"), Places(system=False), begins=True) == [
        Message("user", "text0x\n\ntext1x")
    ]
    told = said("UCTU")
    joined = Message("tool", "text2x\n\ntext3x", tool_call_id="call00001", name="add")
    assert place(told, Places(users_after_results=False), begins=True) == [
        *told[:2],
        joined,
    ]
    assert place(said("AU"), Places(any_beginning=False), begins=True) == [
        Message("user", ""),
        *said("AU"),
    ]
    between = said("UCST")
    assert place(between, Places(), begins=True) == [*between[:2], between[3], between[2]]
    stray = Message("user", "<tool_response>\ntext1x\n</tool_response>")
    assert place(said("UT"), Places(stray_results=False), begins=True) == [
        said("U")[0],
        stray,
    ]
    assert place(said("TU"), Places(stray_results=False), begins=False) == said("TU")
    (both,) = place(said("AX"), Places(repeated_answers=False), begins=True)
    assert (both.said, both.tool_calls) == ("text0x\n\ntext1x", said("AX")[1].tool_calls)
    for roles in ("SSUASUCTTUAU", "AUUTA"):
        assert place(said(roles), Places(), begins=True) == said(roles)


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "deepseek_r1_distill"])
def test_two_system_messages_are_both_there(name: str) -> None:
    for one in renderers(name):
        check_all_there(one, one.whole(spoken("SSU"), ()), spoken("SSU"))


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6"])
def test_a_result_and_a_message_of_the_user_go_on_after_a_call_whose_reasoning_the_template_strips(
    name: str,
) -> None:
    by_template, by_family = renderers(name)
    prompts = []
    for one in (by_template, by_family):
        conversation = one.conversation([ADD])
        conversation.prompt([Message("user", "Begin.")])
        written = (
            "Hm.\n</think>\n\n"
            + one.template.call(ToolCall("add", {"a": "x"}))[1].partition("</think>")[2].strip()
        )
        ids = one.answer_ids(written.removesuffix("<|im_end|>").rstrip())
        conversation.answer(Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
        prompts.append(one.decode(conversation.prompt(spoken("TU")).new_ids))
    assert prompts[0] == prompts[1]
    assert (
        "<tool_response>\ntext0x\n</tool_response><|im_end|>\n<|im_start|>user\ntext1x<|im_end|>"
        in prompts[0]
    )


def test_a_template_that_leaves_out_a_message_all_the_same_is_refused() -> None:
    def render(messages: list[Any], tools: Any, add: bool) -> str:
        told = [one for one in messages if one["content"] != "secret" or len(messages) < 3]
        return (
            "".join(f"[{one['role']}]{one['content']}<end>" for one in told[:8])
            + "[assistant]" * add
        )

    template = ChatTemplate(render, stops=["<end>"], specials=["<end>"])
    with pytest.raises(ConfigError, match=r"leaves out message 9 \(user\) of user, .*: 'text8x'"):
        template.text(spoken("UAUAUAUAU"), ())


def test_a_switch_that_a_template_takes_out_of_a_text_is_no_reason_to_refuse_it() -> None:
    def render(messages: list[Any], tools: Any, add: bool) -> str:
        told = [
            f"[{one['role']}]{one['content'].replace('/no_think', '').strip()}<end>"
            for one in messages
        ]
        return "".join(told) + "[assistant]" * add

    template = ChatTemplate(render, stops=["<end>"], specials=["<end>"])
    assert template.text([Message("user", "Go. /no_think")], ()) == "[user]Go.<end>[assistant]"
