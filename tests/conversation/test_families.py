"""Model families that the library `renderers` knows, and what is read of answers: reasoning and
calls.
"""

import json
import re
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentrl import plugins
from agentrl.conversation import renderer as renderer_module
from agentrl.conversation.chat_template import ChatTemplate
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.family import family_named, find_family
from agentrl.conversation.reading import (
    MARKS,
    Marks,
    Reading,
    as_declared,
    call_of,
    without_reasoning,
)
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.errors import ConfigError, PluginError
from agentrl.models.tiny import create_tiny_model
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion, Message, ToolCall
from tests.chat_templates import templates, tokenizer_of
from tests.properties import examples
from tests.tiers import evenly

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["text"],
        },
    },
}
RECOGNISED = {
    "glm4moe": "glm-4.5",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.5",
    "qwen3_8": "qwen3.8",
    "qwen3_instruct_2507": "qwen3",
}


def renderer(name: str, **settings: Any) -> TemplateRenderer:
    tokenizer = tokenizer_of(name)
    family = find_family(tokenizer, {}, {}) if settings.get("renderer", "auto") == "auto" else None
    return TemplateRenderer(tokenizer, RendererConfig.model_validate(settings), family=family)


def answered(
    renderer: TemplateRenderer, text: str, tools: list[Any], stopped: bool = True
) -> tuple[str, Message]:
    """What the environment gets of an answer, and the message that is kept of it."""
    conversation = renderer.conversation(tools)
    conversation.prompt([Message("user", "Begin.")])
    ids = [*renderer.encode(text).tolist(), *([renderer.stop_token_ids[0]] if stopped else [])]
    action = conversation.answer(
        Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop" if stopped else "length")
    )
    return action, conversation.messages[-1]


def test_only_a_tokenizer_with_the_tokens_of_gpt_oss_waits_for_its_files(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import renderers.gpt_oss

    asked = []
    monkeypatch.setattr(
        renderers.gpt_oss, "load_harmony_encoding", lambda *given: asked.append(given)
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    find_family(tokenizer, {}, {})
    assert not asked
    tokenizer.add_tokens(["<|channel|>"], special_tokens=True)
    find_family(tokenizer, {}, {})
    assert asked


def test_without_the_vocabulary_of_gpt_oss_its_answers_are_read_and_its_rules_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import renderers.gpt_oss
    from openai_harmony import HarmonyError

    def load(*_: Any) -> None:
        raise HarmonyError("failed to download or load vocab file")

    monkeypatch.setattr(renderers.gpt_oss, "load_harmony_encoding", load)
    tokenizer = tokenizer_of("gptoss")
    assert find_family(tokenizer, {}, {}) is None
    (warning,) = caplog.messages
    assert re.search(r"written by its chat template: failed to download.* oss-harmony", warning)
    with pytest.raises(ConfigError, match=r"gpt-oss cannot be used: .* TIKTOKEN_ENCODINGS_BASE"):
        family_named("gpt-oss", tokenizer, {})
    assert renderer("gptoss", renderer="template").calls_read_by == "the family gpt-oss"
    assert len(caplog.messages) == 1  # reading needs no vocabulary


def test_families_are_recognised_by_what_their_templates_write() -> None:
    found = {name: find_family(tokenizer_of(name), {}, {}) for name in RECOGNISED}
    assert {name: family and family.name for name, family in found.items()} == RECOGNISED
    assert find_family(tokenizer_of("gemma"), {}, {}) is None
    # A changed template is no longer that of the family.
    changed = {
        "chat_template": templates()["qwen3"].replace("<|im_start|>user", "<|im_start|>human")
    }
    assert find_family(tokenizer_of("qwen3"), {}, changed) is None


@pytest.mark.parametrize(
    ("name", "stopped"),
    # The family's rules end a GLM's answer with <|endoftext|> if it was cut short, which its
    # template does not know.
    [
        (name, stopped)
        for name in RECOGNISED
        for stopped in (True, False)
        if stopped or name != "glm4moe"
    ],
)
def test_the_rules_of_a_family_extend_a_conversation_as_the_template_does(
    name: str, stopped: bool
) -> None:
    tools = [FIND]

    def played(**settings: Any) -> list[int]:
        one = renderer(name, **settings)
        assert bool(one.family) == (settings.get("renderer") != "template")
        conversation = one.conversation(tools)
        news = [Message("system", "You play."), Message("user", "Begin.")]
        ids: list[int] = []
        for turn in range(4):
            prompt = conversation.prompt(news)
            assert not prompt.forked
            # A call that was cut short cannot be answered, so only one that was not has a result.
            call = (
                one.template.call(ToolCall("find", {"text": f"a b {turn}"}))[1]
                if turn % 2
                else "I look"
            )
            text = call if stopped else "I look"
            answer = (
                one.encode(text.removesuffix("<|im_end|>")).tolist()
                + [one.stop_token_ids[0]] * stopped
            )
            conversation.answer(Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop"))
            ids = [*prompt.ids.tolist(), *answer]
            news = [Message("tool" if turn % 2 and stopped else "user", f"result {turn}")]
        return ids

    assert played() == played(renderer="template")


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen2_5",
        "qwen3_5_think",
        "qwen3_8",
        "glm4moe",
        "glm4moe_training",
        "deepseekv3",
        "gemma4",
        "gemma4_v5",
        "llama3_1",
        "nemotron_3_super",
        "gemma",
        "phi3",
    ],
)
def test_an_environment_gets_the_calls_of_every_family_in_the_canonical_form(name: str) -> None:
    one = renderer(name)
    call = ToolCall("find", {"text": "12", "count": 3})
    written = one.template.call(call)[1] or call.render()
    for stop in one.template.stops:
        written = written.removesuffix(stop)
    prompt = one.decode(one.conversation([FIND]).prompt([Message("user", "Begin.")]).ids)
    if prompt.rstrip().endswith("<think>") and "</think>" not in written:
        written = f"</think>{written}"
    action, message = answered(one, written, [FIND])
    read = parse_tool_calls(action)
    assert not read.errors
    assert [(one.name, dict(one.arguments)) for one in read.calls] == [
        ("find", {"text": "12", "count": 3})
    ]
    assert message.content == action
    # In the next turn, the result names the call.
    conversation = one.conversation([FIND])
    conversation.prompt([Message("user", "Begin.")])
    ids = one.answer_ids(written)
    conversation.answer(Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    assert "found it" in one.decode(conversation.prompt([Message("tool", "found it")]).new_ids)


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "nemotron_3_nano", "deepseek_r1_distill"])
def test_reasoning_is_kept_apart_from_what_the_environment_gets(name: str) -> None:
    one = renderer(name)
    begun = (
        one.decode(one.conversation().prompt([Message("user", "Begin.")]).ids)
        .rstrip()
        .endswith("<think>")
    )
    opened = "" if begun else "<think>"
    action, message = answered(one, f"{opened}\nLeft or right?\n</think>\n\nleft", [])
    assert (action, message.content) == ("left", "left")
    assert message.reasoning.strip() == "Left or right?"
    assert message.reasoning_tokens == len(one.encode(message.reasoning))
    action, message = answered(one, f"{opened}\nLeft or", [], stopped=False)
    assert action == message.content == ""
    assert message.reasoning.strip() == "Left or"
    shown = renderer(name, show_reasoning=True)
    action, message = answered(shown, f"{opened}\nLeft?\n</think>\n\nleft", [])
    assert action == message.content == f"{opened}\nLeft?\n</think>\n\nleft"


def test_without_reasoning_in_its_template_a_model_s_tags_are_its_answer() -> None:
    action, message = answered(renderer("gemma"), "<think>hm</think>left", [])
    assert action == "<think>hm</think>left"
    assert message.reasoning == ""


@given(
    text=st.text(st.sampled_from("ab<>/think \n"), max_size=30),
    begun=st.booleans(),
    marks=st.sampled_from(MARKS),
)
@examples(50)
def test_reasoning_and_answer_together_are_what_was_written(
    text: str, begun: bool, marks: Marks
) -> None:
    for whole in (text, f"{marks.begin}{text}", f"{marks.begin}{text}{marks.end}{text}"):
        read = without_reasoning(whole, marks, f"<assistant>{marks.begin if begun else ''}")
        assert read.cut <= (not read.content)
        for part in (read.content, read.reasoning):
            assert part in whole
        if not read.reasoning and not read.cut and marks.end not in whole:
            assert read.content == whole


def test_a_call_that_cannot_be_read_is_told_to_the_environment() -> None:
    one = renderer("qwen3_5_think")
    action, message = answered(
        one, "</think>\n\n<tool_call>\n<function>\nnothing\n</tool_call>", [FIND]
    )
    assert parse_tool_calls(action).errors
    assert message.tool_calls == ()
    action, _ = answered(renderer("qwen3"), '<tool_call>\n{"name": "find", \n</tool_call>', [FIND])
    assert parse_tool_calls(action).errors


@given(
    ids=st.lists(st.integers(0, 255), max_size=40),
    name=st.sampled_from(["qwen3", "qwen3_5_think", "glm4moe", "gemma4"]),
)
@examples(50)
def test_any_tokens_at_all_are_read_without_an_exception(ids: list[int], name: str) -> None:
    one = renderer(name)
    marks = one.encode("<tool_call><think></think></tool_call><arg_key>").tolist()
    tokens = [marks[i % len(marks)] if i % 3 == 0 else i for i in ids]
    assert isinstance(one.read(ints(()), ints(tokens), [FIND]), Reading)


def test_a_parser_that_fails_leaves_an_answer_without_a_call_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = renderer("qwen3")

    def fails(*_: object) -> Reading:
        raise IndexError("nothing there")

    monkeypatch.setattr(one._family, "read", fails)
    assert answered(one, "left", [FIND])[0] == "left"
    for called in ("<tool_call>\n{half", 'find("a")', '{"name": "look"}'):
        reply = parse_tool_calls(answered(one, called, [FIND])[0])
        assert (reply.calls, len(reply.errors)) == ((), 1)
        assert "nothing there" in reply.errors[0]


def test_texts_between_tags_are_texts_where_the_tool_declares_them() -> None:
    call = as_declared(ToolCall("find", {"text": 12, "count": 3, "more": True}, "x"), [FIND])
    assert call == ToolCall("find", {"text": "12", "count": 3, "more": True}, "x")
    assert as_declared(ToolCall("other", {"text": 12}), [FIND]) == ToolCall("other", {"text": 12})
    assert call_of("find", '{"text": "a"}', 3) == ToolCall("find", {"text": "a"}, "call00003")
    assert call_of("find", "{", 0) is None
    assert call_of("find", [1], 0) is None


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["lfm2_v2", "muse_glimmer"])
def test_the_parsers_of_vllm_read_what_no_other_does(name: str) -> None:
    one = renderer(name)
    call = ToolCall("find", {"text": "12", "count": 3})
    written = one.template.call(call)[1]
    for stop in one.template.stops:
        written = written.removesuffix(stop)
    action, _ = answered(one, written, [FIND])
    assert [(one.name, dict(one.arguments)) for one in parse_tool_calls(action).calls] == [
        (call.name, call.arguments)
    ]
    named = renderer(
        name, tool_format="lfm2" if name == "lfm2_v2" else "muse_glimmer", renderer="template"
    )
    assert answered(named, written, [FIND])[0] == action
    with pytest.raises(
        ConfigError, match=r"no format 'xml'. Formats: auto, canonical, .*qwen3_coder"
    ):
        renderer(name, tool_format="xml")


def test_a_syntax_that_nothing_reads_is_told_once_with_what_to_write(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer_module, "slow_call_reader", lambda *_: None)
    one = renderer("lfm2_v2")
    for _ in range(2):
        one.conversation([FIND])
    (record,) = caplog.records
    assert "find_it(text='a b', count=3)" in record.getMessage()
    assert "model.tool_format=canonical" in record.getMessage()
    caplog.clear()
    canonical = renderer("lfm2_v2", tool_format="canonical")
    text = canonical.text([Message("user", "Begin.")], [FIND])
    assert "You may call these functions" in text
    action, _ = answered(canonical, ToolCall("find", {"text": "a"}).render(), [FIND])
    assert parse_tool_calls(action).calls == (ToolCall("find", {"text": "a"}),)
    assert not caplog.records


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "m"
    create_tiny_model(folder)
    return folder


def mine(folder: Path, config: RendererConfig) -> TemplateRenderer:
    return TemplateRenderer.of_model(folder, RendererConfig(show_reasoning=True))


def test_a_renderer_is_chosen_by_name(model: Path) -> None:
    assert renderer_of(model, RendererConfig()).family == ""
    assert renderer_of(model, RendererConfig(renderer="template")).family == ""
    own = renderer_of(model, RendererConfig(renderer="tests.conversation.test_families:mine"))
    assert own.config.show_reasoning
    with pytest.raises(
        ConfigError, match=r"renderer=gpt-oss does not fit this model: .*Write model.renderer=auto"
    ):
        renderer_of(model, RendererConfig(renderer="gpt-oss"))
    with pytest.raises(PluginError, match="qwen4"):
        renderer_of(model, RendererConfig(renderer="qwen4"))
    assert any(plugin.name == "template" for plugin in plugins.installed("renderers"))


def test_all_eos_tokens_of_a_model_end_its_answers(tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "m")
    before = TemplateRenderer.of_model(tmp_path / "m").stop_token_ids
    (tmp_path / "m" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [*before, 7, 9]})
    )
    assert TemplateRenderer.of_model(tmp_path / "m").stop_token_ids == (*before, 7, 9)


def test_one_package_installs_the_module_that_both_vllm_and_the_family_gpt_oss_use() -> None:
    assert len(set(packages_distributions()["openai_harmony"])) == 1
    from renderers.gpt_oss import GptOssRenderer

    assert GptOssRenderer is not None


HARMONY_CALLS = [
    "<|channel|>commentary to=functions.find <|constrain|>json<|message|>",
    " to=functions.find<|channel|>commentary json<|message|>",
]


@pytest.mark.parametrize(
    "thought", ["", "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"]
)
@pytest.mark.parametrize("header", evenly(HARMONY_CALLS, 1))
def test_gpt_oss_is_read_though_its_template_ends_prompts_before_the_channel(
    thought: str, header: str
) -> None:
    action, message = answered(
        renderer("gptoss"), f'{thought}{header}{{"text": "a"}}<|call|>', [FIND]
    )
    assert parse_tool_calls(action).calls == (ToolCall("find", {"text": "a"}),)
    assert message.reasoning == ("I think." if thought else "")
    action, message = answered(renderer("gptoss"), f"{thought}<|channel|>final<|message|>done", [])
    assert (action, message.reasoning) == ("done", "I think." if thought else "")


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one() -> None:
    def render(messages: list[Any], tools: list[Any] | None, add: bool) -> str:
        assert tools is not None, "'NoneType' object is not iterable"
        named = "".join(tool["function"]["name"] for tool in tools)
        return (
            named
            + "".join(f"[{one['role']}]{one['content']}<end>" for one in messages)
            + "[assistant]" * add
        )

    template = ChatTemplate(render, stops=["<end>"], specials=["<end>"])
    assert template.text([Message("user", "Go.")], []) == "[user]Go.<end>[assistant]"
    assert template.text([Message("user", "Go.")], [FIND]).startswith("find[user]")
    assert template.added([Message("user", "More.")]).endswith("[user]More.<end>[assistant]")


@pytest.mark.vllm
def test_vllm_finds_the_module_that_the_family_gpt_oss_uses_too() -> None:
    from vllm.entrypoints.openai.parser import harmony_utils

    assert harmony_utils.get_encoding is not None
