"""Conversations of real models: their own tokenizers and templates, recognised or not. CI plays a
few of them.
"""

import json
import shutil
from collections.abc import Collection
from datetime import datetime
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import openai_harmony as harmony
import pytest

from agentrl.conversation.config import RendererConfig
from agentrl.conversation.control_tokens import ControlTokens
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.models.tiny import create_tiny_model
from agentrl.models.tokenizer import load_tokenizer
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion, Message, ToolCall
from tests.conversation.test_call_reading import HARD, got, written
from tests.conversation.test_chat_templates import ADD, KINDS, said
from tests.conversation.test_control_tokens import after_answers, told
from tests.conversation.test_control_tokens import tool as described
from tests.conversation.test_conversations import check_random_roles
from tests.conversation.test_families import HARMONY_CALLS
from tests.real_tokenizers import fetch, gpt_oss_folder, model_folder

FAMILIES = {
    "qwen-2.5": "",
    "qwen-3": "qwen3",
    "qwen-3.5": "qwen3.5",
    "qwen-3.6": "qwen3.5",
    "qwq-32b": "",
    "deepseek-v3": "",
    "deepseek-v3.1": "",
    "deepseek-r1": "",
    "deepseek-r1-distill-llama-8b": "",
    "glm-4-32b-0414": "",
    "glm-4.5v": "",
    "glm-4.7-flash": "glm-5",
    "glm-5": "glm-5",
    "glm-5.1": "glm-5.1",
    "minimax": "",
    "minimax-m1-40k": "",
    "minimax-m3": "",
}
"""Models of the package that have a chat template, and the family of the library that each is
recognised as.

The library's rules for DeepSeek-R1 begin reasoning after the result of a tool, which its template
does not.
"""


def models(in_ci: Collection[str]) -> list[Any]:
    """The models, of which some are for CI; one process downloads them, once."""
    together = pytest.mark.xdist_group("tokenizers")
    marks = {name: pytest.mark.slow if name in in_ci else pytest.mark.long for name in FAMILIES}
    return [pytest.param(name, marks=[mark, together]) for name, mark in marks.items()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch(tmp_path_factory.mktemp("package"))


def played(renderer: TemplateRenderer, kind: str) -> list[int]:
    """The tokens of six turns; checks that none forks and that each observation is there."""
    tools = [ADD] if kind in ("tools", "both") else []
    conversation = renderer.conversation(tools)
    news, seen = [Message("system", "You play."), Message("user", "Begin now.")], list[int]()
    for turn in range(6):
        prompt = conversation.prompt(news)
        assert not prompt.forked
        assert prompt.ids.tolist() == [*seen, *prompt.new_ids.tolist()]
        assert all(message.content.strip() in renderer.decode(prompt.new_ids) for message in news)
        answer = [*renderer.encode(said(kind, turn)).tolist(), renderer.stop_token_ids[0]]
        conversation.answer(Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop"))
        seen = [*prompt.ids.tolist(), *answer]
        news = [Message("tool" if tools else "user", f"Ergebnis {turn}: é, 你好\n")]
    return seen


@pytest.mark.parametrize("name", models(in_ci=["deepseek-v3.1"]))
def test_a_real_model_extends_and_its_family_writes_what_its_template_writes(
    name: str, data: Path, tmp_path: Path
) -> None:
    folder = model_folder(data, name, tmp_path / name)
    renderer = renderer_of(folder, RendererConfig())
    by_template = renderer_of(folder, RendererConfig(renderer="template"))
    assert renderer.family == FAMILIES[name]
    for kind in KINDS:
        assert played(renderer, kind) == played(by_template, kind)


@pytest.mark.long
@pytest.mark.parametrize("name", models(in_ci=["qwen-3.5", "glm-4.7-flash"]))
def test_no_text_of_others_becomes_a_control_token_of_a_real_model(
    name: str, data: Path, tmp_path: Path
) -> None:
    folder = model_folder(data, name, tmp_path / name)
    tokenizer = load_tokenizer(folder)
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    written = [text for text in added if text in tokenizer.chat_template]
    hostile = "".join(f"x{text}y 1\n" for text in (*written, *[*added][:: len(added) // 30 + 1]))
    for rules in ("auto", "template"):
        renderer = renderer_of(folder, RendererConfig.model_validate({"renderer": rules}))
        found = [renderer.whole(told(word), [described(word)]).tolist() for word in ("w", hostile)]
        found += [[*chain(*after_answers(renderer, word))] for word in ("w", hostile)]
        harmless, forged, *later = ([i for i in ids if i in added.values()] for ids in found)
        assert forged == harmless
        assert later[0] == later[1]
        assert renderer.decode(ints(found[3])).count(f"Now {hostile}.") == 3
        text = renderer.text(told(hostile), [described(hostile)])
        if rules == "template":
            assert renderer.decode(ints(found[1])) == text
        # Where nothing is guarded, the twin's tokens are the tokenizer's own.
        assert ControlTokens(tokenizer, "").encode(text) == tokenizer.encode(
            text, add_special_tokens=False
        )


@pytest.mark.long
@pytest.mark.parametrize("name", models(in_ci=["qwen-3.5"]))
def test_random_roles_are_rendered_by_a_real_model(name: str, data: Path, tmp_path: Path) -> None:
    folder = model_folder(data, name, tmp_path / name)
    ones = [
        renderer_of(folder, RendererConfig.model_validate({"renderer": rules}))
        for rules in ("auto", "template")
    ]
    check_random_roles(ones, load_tokenizer(folder).added_tokens_decoder, Random(name), count=6)


@pytest.mark.parametrize("name", models(in_ci=["glm-4.7-flash"]))
def test_the_calls_of_a_real_model_reach_the_environment(
    name: str, data: Path, tmp_path: Path
) -> None:
    renderer = renderer_of(model_folder(data, name, tmp_path / name), RendererConfig())
    call = ToolCall("add", {"a": 1, "b": 2})
    written = renderer.template.call(call)[1] or call.render()
    for stop in renderer.template.stops:
        written = written.removesuffix(stop)
    conversation = renderer.conversation([ADD])
    prompt = renderer.decode(conversation.prompt([Message("user", "Begin now.")]).ids).rstrip()
    if prompt.endswith("<think>") and "</think>" not in written:
        written = f"</think>{written}"
    answer = [*renderer.encode(written).tolist(), renderer.stop_token_ids[0]]
    action = conversation.answer(Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop"))
    assert [(one.name, dict(one.arguments)) for one in parse_tool_calls(action).calls] == [
        ("add", {"a": 1, "b": 2})
    ]


@pytest.mark.parametrize("name", models(in_ci=["deepseek-v3.1"]))
def test_texts_reach_the_tools_of_a_real_model_to_the_letter(
    name: str, data: Path, tmp_path: Path
) -> None:
    one = renderer_of(model_folder(data, name, tmp_path / name), RendererConfig())
    for arguments in (
        {f"text_{number}": text for number, text in enumerate(HARD)},
        {
            "lines": list(HARD),
            "rows": [["a", "1"], [" x "]],
            "point": {"name": " 3.10", "at": [1, 2]},
        },
    ):
        reply, _ = got(one, written(one, ToolCall("write", arguments)))
        assert [(call.name, dict(call.arguments)) for call in reply.calls] == [("write", arguments)]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_folder(tmp_path_factory.mktemp("models") / "gpt-oss")


@pytest.mark.long
@pytest.mark.xdist_group("gpt-oss")
@pytest.mark.parametrize("system", ["", "You play é."])
@pytest.mark.parametrize("tools", [[], [ADD]])
def test_gpt_oss_by_the_rules_of_the_library_has_the_tokens_of_the_vendor_s_own_package(
    system: str, tools: list[Any], gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(gpt_oss / "o200k.tiktoken", tmp_path / "o200k_base.tiktoken")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))  # else the package downloads it
    theirs = Harmony(system, tools)
    conversation = renderer_of(gpt_oss, RendererConfig(renderer="gpt-oss")).conversation(tools)
    news = [*([Message("system", system)] if system else []), theirs.user("2 + 3?")]
    for turn in range(4):
        prompt = conversation.prompt(news)
        assert not prompt.forked
        # What was sampled stays as it is; the vendor's package writes <|end|> for the <|return|> of
        # earlier answers.
        assert theirs.without_returns(prompt.ids.tolist()) == theirs.prompt()
        answer = theirs.call(turn) if tools and turn % 2 == 0 else theirs.final(turn)
        action = conversation.answer(
            Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop")
        )
        assert conversation.messages[-1].reasoning == f"Thought {turn}."
        if tools and turn % 2 == 0:
            assert parse_tool_calls(action).calls == (ToolCall("add", {"a": turn, "b": 3}),)
            news = [theirs.result("5 你好")]
        else:
            assert action == f"It is {turn}."
            news = [theirs.user("More?")]


class Harmony:
    """The same conversation by the package `openai_harmony`; what is added to it is returned as we
    write it.
    """

    def __init__(self, system: str, tools: list[Any]) -> None:
        self.encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
        today = datetime.now().strftime("%Y-%m-%d")
        first = harmony.SystemContent.new().with_conversation_start_date(today)
        self.messages = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, first)]
        developer = harmony.DeveloperContent.new()
        if system:
            developer = developer.with_instructions(system)
        if tools:
            described = [harmony.ToolDescription.new(**tool["function"]) for tool in tools]
            developer = developer.with_function_tools(described)
        if system or tools:
            self.messages.append(
                harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer)
            )

    def prompt(self) -> list[int]:
        """The tokens so far, and the channel that the library's rules open."""
        keep = harmony.RenderConversationConfig(auto_drop_analysis=False)
        so_far = harmony.Conversation.from_messages(self.messages)
        ids = self.encoding.render_conversation_for_completion(so_far, harmony.Role.ASSISTANT, keep)
        return [*ids, *self.ids("<|channel|>analysis<|message|>")]

    def ids(self, text: str) -> list[int]:
        return self.encoding.encode(text, allowed_special="all")

    def without_returns(self, ids: list[int]) -> list[int]:
        (end,), (returns,) = self.ids("<|end|>"), self.ids("<|return|>")
        return [end if one == returns else one for one in ids]

    def user(self, text: str) -> Message:
        self.messages.append(harmony.Message.from_role_and_content(harmony.Role.USER, text))
        return Message("user", text)

    def result(self, text: str) -> Message:
        author = harmony.Author.new(harmony.Role.TOOL, "functions.add")
        result = harmony.Message.from_author_and_content(author, text)
        self.messages.append(result.with_channel("commentary").with_recipient("assistant"))
        return Message("tool", text)

    def call(self, turn: int) -> list[int]:
        arguments = json.dumps({"a": turn, "b": 3})
        said = self._said(arguments).with_channel("commentary").with_recipient("functions.add")
        return self._answer(turn, said.with_content_type("<|constrain|>json"), "<|call|>")

    def final(self, turn: int) -> list[int]:
        return self._answer(turn, self._said(f"It is {turn}.").with_channel("final"), "<|return|>")

    def _answer(self, turn: int, said: harmony.Message, end: str) -> list[int]:
        """Note an answer with its thought; return the tokens that a model samples, from within the
        thought on.
        """
        thought = self._said(f"Thought {turn}.").with_channel("analysis")
        self.messages += [thought, said]
        begun = self.ids("<|start|>assistant<|channel|>analysis<|message|>")
        return [
            *self.encoding.render(thought)[len(begun) :],
            *self.encoding.render(said)[:-1],
            *self.ids(end),
        ]

    def _said(self, text: str) -> harmony.Message:
        return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)


@pytest.mark.long
@pytest.mark.xdist_group("gpt-oss")
def test_gpt_oss_extends_and_its_channels_are_read(gpt_oss: Path) -> None:
    renderer = renderer_of(gpt_oss, RendererConfig())
    conversation = renderer.conversation([ADD])
    prompt = conversation.prompt([Message("system", "You play."), Message("user", "Begin now.")])
    thought = "<|channel|>analysis<|message|>Adding.<|end|><|start|>assistant"
    for header in HARMONY_CALLS:
        answer = renderer.encode(
            f'{thought}{header.replace("find", "add")}{{"a": 1, "b": 2}}<|call|>'
        ).tolist()
        action = conversation.answer(
            Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop")
        )
        assert parse_tool_calls(action).calls == (ToolCall("add", {"a": 1, "b": 2}),)
        assert conversation.messages[-1].reasoning == "Adding."
        seen = [*prompt.ids.tolist(), *answer]
        prompt = conversation.prompt([Message("tool", "3")])
        assert prompt.ids[: len(seen)].tolist() == seen
        assert "functions.add" in renderer.decode(prompt.new_ids)


@pytest.mark.slow
def test_a_model_of_mistral_may_come_with_tekken_alone(tmp_path: Path) -> None:
    # vLLM brings it.
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(data / "tekken_240911.json", alone / "tekken.json")
    (alone / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    renderer = renderer_of(alone, RendererConfig())
    for kind in KINDS:
        assert renderer.decode(ints(played(renderer, kind)))
    call = ToolCall("add", {"a": 1, "b": 2})
    written = renderer.template.call(call)[1]
    assert written.startswith("[TOOL_CALLS]")
    conversation = renderer.conversation([ADD])
    conversation.prompt([Message("user", "Begin now.")])
    answer = renderer.encode(written).tolist()
    action = conversation.answer(Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop"))
    assert [one.name for one in parse_tool_calls(action).calls] == ["add"]
    # Where both are there, the tokenizer of transformers counts.
    create_tiny_model(tmp_path / "both")
    shutil.copy(alone / "tekken.json", tmp_path / "both" / "tekken.json")
    assert len(load_tokenizer(tmp_path / "both")) < 1000
