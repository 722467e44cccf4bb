"""The chat templates of model families: every conversation extends as the family renders."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.conversation import renderer as renderer_module
from agentrl.conversation.chat_template import ChatTemplate, describe
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.errors import ConfigError
from agentrl.testing.tokenizer import END, ByteTokenizer
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion, Message, ToolCall
from tests.chat_templates import byte_tokenizer, templates, tokenizer_of

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
KINDS = ("plain", "tools", "reasoning", "both")
NOT_FORKING = {"plain": 38, "tools": 33, "reasoning": 34, "both": 32}
"""How many of the 72 templates render a whole conversation of eight turns as it was seen and
written, by its kind.
"""
TURNS = 8


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing its parsers takes seconds."""
    monkeypatch.setattr(renderer_module, "slow_call_reader", lambda *_: None)


def said(kind: str, turn: int) -> str:
    thought = f"<think>\nTurn {turn}.\n</think>\n\n" if kind in ("reasoning", "both") else ""
    call = ToolCall("add", {"a": turn, "b": 2}).render()
    return thought + (call if kind in ("tools", "both") else f"answer {turn}")


def played(name: str, kind: str, history: str) -> tuple[list[int], int]:
    """The tokens of a conversation and how often it forked; checks that each prompt extends the
    last if it must.
    """
    renderer = TemplateRenderer(
        tokenizer_of(name), RendererConfig.model_validate({"history": history})
    )
    tools = [ADD] if kind in ("tools", "both") else []
    conversation = renderer.conversation(tools)
    seen: list[int] = []
    forks = 0
    news = [Message("system", "You play a game."), Message("user", "Begin now.")]
    for turn in range(TURNS):
        prompt = conversation.prompt(news)
        forks += prompt.forked
        if history == "extend":
            assert prompt.ids.tolist() == [*seen, *prompt.new_ids.tolist()]
            new_text = renderer.decode(prompt.new_ids)
            assert all(message.content in new_text for message in news), name
            assert not tools or turn or "Adds two numbers." in new_text, name
        answer = [*renderer.encode(said(kind, turn)).tolist(), renderer.stop_token_ids[0]]
        conversation.answer(Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop"))
        seen = [*prompt.ids.tolist(), *answer]
        news = [Message("tool" if tools else "user", f"result {turn}, seen")]
    return seen, forks


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "both" else pytest.mark.long) for kind in KINDS]
)
def test_no_conversation_of_any_family_forks_and_each_observation_is_where_the_family_has_it(
    kind: str,
) -> None:
    same = []
    assert len(templates()) == 72
    for name in templates():
        extended, forks = played(name, kind, "extend")
        assert forks == 0, name
        try:
            whole, forks = played(name, kind, "template")
        except ConfigError:  # it refuses to render the whole conversation as text
            continue
        if not forks and extended == whole:
            same.append(name)
    assert len(same) >= NOT_FORKING[kind], sorted(set(templates()) - set(same))


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gptoss", "gemma"])
def test_a_late_turn_renders_and_tokenises_as_much_as_an_early_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: Counter[str] = Counter()
    renderer = TemplateRenderer(tokenizer_of(name))
    template: Any = renderer.template
    render, encode = template._render, renderer.encode

    def counted_render(messages: list[Any], *rest: Any) -> str:
        work["messages"] += len(messages)
        text: str = render(messages, *rest)
        work["text"] += len(text)
        return text

    def counted_encode(text: str) -> Any:
        work["tokens"] += len(text)
        return encode(text)

    monkeypatch.setattr(template, "_render", counted_render)
    monkeypatch.setattr(renderer, "encode", counted_encode)
    conversation = renderer.conversation()
    costs = []
    for turn in range(80):
        work.clear()
        conversation.prompt([Message("user", f"Turn {turn:02}.")])
        costs.append(dict(work))
        answer = renderer.answer_ids("go")
        conversation.answer(Completion(answer, [0.0] * len(answer), [0] * len(answer), "stop"))
    assert costs[5] == costs[79]


def test_an_answer_that_was_cut_short_has_its_end_of_turn_added() -> None:
    renderer = TemplateRenderer(tokenizer_of("qwen3"))
    for stopped in (True, False):
        conversation = renderer.conversation()
        conversation.prompt([Message("user", "a")])
        ids = renderer.answer_ids("b") if stopped else renderer.encode("b")
        conversation.answer(
            Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop" if stopped else "length")
        )
        prompt = conversation.prompt([Message("user", "c")])
        text = "assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        assert renderer.decode(prompt.ids).endswith(text)


def test_the_header_of_the_next_message_ends_an_answer_where_the_family_has_no_other_end() -> None:
    renderer = TemplateRenderer(tokenizer_of("glm4moe"))
    ends = [renderer.decode(ints([token])) for token in renderer.stop_token_ids]
    assert set(ends) == {"<|user|>", "<|observation|>"}


def test_what_a_family_ends_calls_with_ends_an_answer_though_it_is_no_eos_token() -> None:
    renderer = TemplateRenderer(tokenizer_of("gptoss"))
    assert renderer.template.stops == ["<|return|>", "<|call|>"]


def test_a_family_without_a_system_role_or_tools_gets_both_as_text_of_the_user() -> None:
    renderer = TemplateRenderer(tokenizer_of("gemma"))
    assert not renderer.template.abilities.system
    text = renderer.text([Message("system", "You play."), Message("user", "Begin.")], [ADD])
    assert (
        text == "<bos><start_of_turn>user\nYou"
        f" play.\n\n{describe([ADD])}\n\nBegin.<end_of_turn>\n<start_of_turn>model\n"
    )
    call = Message("assistant", "I add.", tool_calls=(ToolCall("add", {"a": 1, "b": 2}),))
    told = renderer.text([Message("user", "Begin."), call, Message("tool", "3")], ())
    assert "I add.\n<tool_call>\n{" in told
    assert "user\n<tool_response>\n3\n</tool_response><end_of_turn>" in told


def test_structured_calls_reasoning_and_results_reach_templates_that_have_a_place_for_them() -> (
    None
):
    call = ToolCall("add", {"a": 1, "b": 2}, "call00007")
    talk = [
        Message("user", "Begin."),
        Message("assistant", "", reasoning="One and two.", tool_calls=(call,)),
        Message("tool", "3", tool_call_id="call00007", name="add"),
    ]
    assert "<think>\nOne and two.\n</think>" in TemplateRenderer(tokenizer_of("qwen3")).text(
        talk, [ADD]
    )
    glm = TemplateRenderer(tokenizer_of("glm4moe")).text(talk, [ADD])
    assert "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>" in glm
    assert "<|observation|>\n<tool_response>\n3\n</tool_response>" in glm


def test_the_result_of_a_tool_names_the_call_that_it_answers() -> None:
    """gpt-oss writes the tool's name into the header of its result, and takes it from the call."""
    renderer = TemplateRenderer(tokenizer_of("gptoss"))
    added = renderer.template.added([Message("tool", "3", tool_call_id="call00001", name="add")])
    assert added.startswith("<|start|>functions.add to=assistant<|channel|>commentary<|message|>")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no') }}", "cannot render a user's message: no"),
        ("Hello.", "cannot render a user's message: it leaves it out"),
        (
            "{{ messages[0].content }}",
            "cannot go on after an answer with a message of the user: it leaves out one",
        ),
        ("{% for m in messages %}{{ m.content }", "cannot render a user's message"),
    ],
    ids=["refuses", "ignores", "first message only", "no template"],
)
def test_a_broken_template_is_refused_when_it_is_loaded(
    tmp_path: Path, template: str, says: str
) -> None:
    (tmp_path / "broken.jinja").write_text(template)
    config = RendererConfig(chat_template=tmp_path / "broken.jinja")
    with pytest.raises(ConfigError, match=says) as refused:
        TemplateRenderer(tokenizer_of("qwen3"), config)
    assert "model.chat_template" in str(refused.value)


def test_a_template_in_a_file_and_its_variables_are_used(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ tone"
        " }}[assistant]"
    )
    config = RendererConfig(
        chat_template=tmp_path / "mine.jinja", chat_template_kwargs={"tone": "!"}
    )
    renderer = TemplateRenderer(tokenizer_of("qwen3"), config)
    assert renderer.text([Message("user", "a")], ()) == "[user]a<|im_end|>![assistant]"
    with pytest.raises(ConfigError, match=r"model.chat_template: .*nothing.jinja cannot be read"):
        TemplateRenderer(
            tokenizer_of("qwen3"), RendererConfig(chat_template=tmp_path / "nothing.jinja")
        )


def test_a_template_that_writes_the_time_is_read_again_when_it_has_changed() -> None:
    hours = iter(range(100))
    hour = ["0"]

    def render(messages: list[dict[str, Any]], tools: object, begin: bool) -> str:
        return ByteTokenizer().apply_chat_template(
            [{"role": "system", "content": f"{hour[0]}:00"}, *messages], add_generation_prompt=begin
        )

    template = ChatTemplate(render, stops=[END])
    for _ in range(3):
        hour[0] = str(next(hours))
        assert template.added([Message("user", "a")]) == f"user:a{END}assistant:"


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


def named_folder(into: Path, **named: str) -> Path:
    """A folder with the tokenizer of qwen3_5 and chat templates by name, as Hermes and Command R
    have them.
    """
    tokenizer = byte_tokenizer(templates()["qwen3_5_nothink"])
    tokenizer.chat_template = named
    tokenizer.save_pretrained(into)
    return into


@pytest.mark.parametrize("history", ["extend", "template"])
def test_a_template_of_its_own_for_tools_writes_all_of_a_conversation_with_tools(
    tmp_path: Path, history: str
) -> None:
    tools = templates()["qwen3_5_nothink"]
    config = RendererConfig.model_validate({"history": history})
    one = renderer_of(named_folder(tmp_path, default=PLAIN, tool_use=tools), config)
    for template, described in ((tools, [ADD]), (PLAIN, [])):
        tokenizer = byte_tokenizer(tools)
        tokenizer.chat_template = template
        alone = TemplateRenderer(tokenizer, config)
        news = [Message("system", "You play."), Message("user", "Begin.")]
        both = one.conversation(described), alone.conversation(described)
        for turn in range(3):
            prompts = [each.prompt(news).ids.tolist() for each in both]
            assert prompts[0] == prompts[1]
            calls = [ToolCall("add", {"a": turn, "b": 2})] if described else []
            text = alone.template.calls(calls) if calls else f"answer {turn}"
            ids = alone.answer_ids(text)
            sampled = Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")
            assert both[0].answer(sampled) == both[1].answer(sampled)
            assert both[0].messages == both[1].messages
            assert [each.name for each in both[0].messages[-1].tool_calls] == ["add"] * len(calls)
            news = [Message("tool" if described else "user", f"result {turn}")]
        messages = both[0].messages
        assert one.whole(messages, described).tolist() == alone.whole(messages, described).tolist()
        assert one.text(messages, described) == alone.text(messages, described)


def test_templates_by_name_are_chosen_as_the_settings_say_or_refused(tmp_path: Path) -> None:
    tools = templates()["qwen3_5_nothink"]
    folder = named_folder(tmp_path / "none", tool_use=tools, rag=PLAIN)
    with pytest.raises(ConfigError, match=r"none of them is the default: rag, tool_use"):
        renderer_of(folder, RendererConfig())
    for asked in ("rag", PLAIN):
        config = RendererConfig(chat_template_kwargs={"chat_template": asked})
        one = renderer_of(folder, config)
        assert one.for_tools([ADD]) is one
        assert one.text([Message("user", "a")], ()).startswith("<|im_start|>user: a<|im_end|>")
    refused = named_folder(tmp_path / "bad", default=PLAIN, tool_use="{{ raise_exception('x') }}")
    one = renderer_of(refused, RendererConfig())
    assert one.conversation().prompt([Message("user", "a")]).ids.size
    with pytest.raises(ConfigError, match=r"for tools \(tool_use\): the chat template cannot"):
        one.conversation([ADD])
    canonical = renderer_of(refused, RendererConfig(tool_format="canonical"))
    assert canonical.conversation([ADD]).prompt([Message("user", "a")]).ids.size


ENDS_LATE = (
    "{# <|begin_system|> <|begin_user|> <|begin_tool|> #}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|begin_assistant|>\n{{ m.content }}"
    "{% if m.tool_calls %}<tool_calls>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
    '{% if not loop.last or messages[-1].role == "tool" %}, "id": "{{ c.id }}"{% endif %}}'
    "{% endfor %}]</tool_calls>{% endif %}"
    "{% if not loop.last %}{{ '\n<|end|>\n' }}{% endif %}"
    "{% else %}<|begin_{{ m.role }}|>\n{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|begin_assistant|>\n{% endif %}"
)
"""Ends an answer only where a message follows it, as Apriel's does."""


@pytest.mark.parametrize("role", ["user", "tool"])
def test_an_answer_that_the_template_ends_only_before_a_message_is_ended_once(role: str) -> None:
    one = TemplateRenderer(byte_tokenizer(ENDS_LATE), RendererConfig())
    call = ToolCall("add", {"a": 1}, "call00001")
    for text, cut in (("left", False), (one.template.calls([call]), False), ("lef", True)):
        conversation = one.conversation([ADD])
        prompt = conversation.prompt([Message("user", "Begin.")])
        ids = one.encode(text) if cut else one.answer_ids(text)
        assert one.decode(ids) == (text if cut else f"{text}\n<|end|>")
        reason = "length" if cut else "stop"
        conversation.answer(Completion(ids, [0.0] * len(ids), [0] * len(ids), reason))
        new = conversation.prompt([Message("tool" if role == "tool" else "user", "seen")]).new_ids
        written = one.decode(ids) + one.decode(new)
        assert written == f"{text}\n<|end|>\n<|begin_{role}|>\nseen\n<|begin_assistant|>\n"
        assert one.decode(prompt.ids).count("<|end|>") == 0


def test_results_after_answers_without_calls_have_a_place_where_roles_must_alternate() -> None:
    """As in the template of Mistral-Nemo, which skips results when it looks for a next answer."""
    alternating = (
        "{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role != 'tool' %}"
        "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
        "{% set ns.turn = ns.turn + 1 %}{% endif %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}"
    )
    one = TemplateRenderer(byte_tokenizer(alternating), RendererConfig())
    messages = [
        Message("user", "Begin."),
        *[Message("assistant", "a"), Message("tool", "seen")] * 3,
    ]
    assert one.text(messages, [ADD]).count("seen") == 3
