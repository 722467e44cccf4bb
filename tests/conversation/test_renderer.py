"""The renderer: each prompt extends the last token for token, or forks and says so."""

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.models.tiny import create_tiny_model
from agentrl.testing.tokenizer import END, ByteTokenizer
from agentrl.trajectory import Completion, Message

texts = st.text(st.characters(exclude_characters=END, exclude_categories=["Cs"]), max_size=20)


def said(ids, *, stopped: bool) -> Completion:
    return Completion(
        tuple(ids), (0.0,) * len(ids), (0,) * len(ids), "stop" if stopped else "length"
    )


@given(turns=st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=5), system=texts)
def test_each_prompt_extends_the_last_one_and_its_answer_token_for_token(turns, system):
    tokenizer = ByteTokenizer()
    conversation = TemplateRenderer(tokenizer).conversation()
    history: list[int] = []
    waiting = [Message("system", system)]
    for observation, answer, stopped in turns:
        prompt = conversation.prompt([*waiting, Message("user", observation)])
        assert not prompt.forked
        assert prompt.ids.tolist() == [*history, *prompt.new_ids]
        ids = tokenizer.encode(answer + (END if stopped else ""))
        assert conversation.answer(said(ids, stopped=stopped)) == answer
        history = [*prompt.ids.tolist(), *ids]
        waiting = []
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in conversation.messages]
    )
    whole = tuple(tokenizer.encode(text.removesuffix("assistant:")))
    assert list(whole[: len(history)]) == history


def test_as_the_template_has_it_a_conversation_forks_where_earlier_thoughts_are_dropped():
    tokenizer = ByteTokenizer(forgets_thoughts=True)
    conversation = TemplateRenderer(tokenizer, RendererConfig(history="template")).conversation()
    conversation.prompt([Message("user", "a")])
    conversation.answer(said(tokenizer.encode("<think>hm</think>b" + END), stopped=True))
    prompt = conversation.prompt([Message("user", "c")])
    assert prompt.forked
    assert (
        prompt.new_ids.tolist()
        == prompt.ids.tolist()
        == list(tokenizer.encode(f"user:a{END}assistant:b{END}user:c{END}assistant:"))
    )
    conversation.answer(said(tokenizer.encode("d" + END), stopped=True))
    assert not conversation.prompt([Message("user", "e")]).forked


def test_broken_bytes_that_a_model_samples_stay_the_tokens_they_are():
    conversation = TemplateRenderer(ByteTokenizer()).conversation()
    first = conversation.prompt([Message("user", "a")])
    assert conversation.answer(said([0xC3, 3], stopped=True)) == "\ufffd"
    second = conversation.prompt([Message("user", "b")])
    assert not second.forked
    assert second.ids.tolist() == [*first.ids, 0xC3, 3, *second.new_ids]


@pytest.mark.parametrize("template", ["compact", "chatml"])
def test_a_real_template_is_extended_exactly(tmp_path, template):
    create_tiny_model(tmp_path / "m", template=template)
    renderer = TemplateRenderer.of_model(tmp_path / "m")
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    conversation = renderer.conversation(tools)
    ids: list[int] = []
    opening = [Message("system", "You play.")]
    for i in range(4):
        prompt = conversation.prompt(
            [*opening, Message("tool" if i else "user", f"grid {i}\nP . O")]
        )
        assert not prompt.forked
        assert prompt.ids[: len(ids)].tolist() == ids
        answer = renderer.answer_ids("left") if i % 2 else renderer.encode("cut short")
        conversation.answer(said(answer, stopped=i % 2 == 1))
        ids = [*prompt.ids.tolist(), *answer.tolist()]
        opening = []
    rendered = renderer.encode(renderer.text(conversation.messages, tools))
    assert ids == rendered[: len(ids)].tolist()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "m"
    create_tiny_model(folder)
    asks_for_both = AutoTokenizer.from_pretrained(folder)
    asks_for_both.backend_tokenizer.enable_truncation(4)
    asks_for_both.backend_tokenizer.enable_padding(length=9)
    asks_for_both.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return TemplateRenderer.of_model(folder), AutoTokenizer.from_pretrained(folder)


@given(text=st.text(max_size=40), special=st.sampled_from(["", "<|end|>", "<|user|>"]))
def test_the_core_of_a_tokenizer_says_what_the_tokenizer_says(tokenizers, text, special):
    renderer, tokenizer = tokenizers
    text = text.encode(errors="replace").decode() + special + "P . . O\n"
    ids = renderer.encode(text)
    assert (
        ids.tolist()
        == renderer.encode(text).tolist()
        == tokenizer.encode(text, add_special_tokens=False)
    )
    assert renderer.decode(ids[:-1]) == tokenizer.decode(ids[:-1])


def tokenizer_with_spaces(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes a space as a letter of its own, as those of Llama 2, Mistral and
    Phi-3 do.

    `first`: it puts one before the first text. `each`: before each text that follows a control
    token. `taking`: control tokens take up the white space that follows them, too.
    """
    letters = ["\u2581", *string.ascii_letters, *string.digits, *string.punctuation, "\n"]
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    if kind == "first":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        spaced = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        core.normalizer = normalizers.Sequence(spaced)
    core.decoder = decoders.Metaspace()
    marks = ["<|user|>", "<|assistant|>", "<|end|>"]
    core.add_special_tokens([AddedToken(mark, rstrip=kind == "taking") for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["first", "each", "taking"])
@pytest.mark.parametrize("history", ["extend", "template"])
def test_spaces_that_a_tokenizer_adds_or_drops_are_those_of_the_whole_conversation(
    tmp_path, kind, history
):
    tokenizer_with_spaces(kind).save_pretrained(tmp_path)
    renderer = TemplateRenderer.of_model(tmp_path, RendererConfig(history=history))
    conversation = renderer.conversation()
    said_so_far: list[dict[str, Any]] = []
    for turn in range(3):
        said_so_far.append({"role": "user", "content": f"grid {turn}"})
        prompt = conversation.prompt([Message("user", f"grid {turn}")])
        assert not prompt.forked
        text = renderer._whole_tokenizer.apply_chat_template(
            said_so_far, tokenize=False, add_generation_prompt=True
        )
        assert prompt.ids.tolist() == renderer.encode(text).tolist()
        conversation.answer(said(renderer.answer_ids(f"left {turn}"), stopped=True))
        said_so_far.append({"role": "assistant", "content": f"left {turn}"})


@pytest.mark.parametrize("kind", ["first", "each", "taking"])
@given(text=st.text(st.sampled_from("ab \n"), max_size=5))
def test_a_demonstrated_answer_loses_none_of_its_white_space(kind, text):
    renderer = TemplateRenderer(tokenizer_with_spaces(kind))
    shown = renderer.decode(renderer.answer_ids(f"x{text}"))
    assert shown.strip(" ") == f"x{text}<|end|>"
    spaces = renderer.answer_ids(text)[:-1]
    assert len(spaces) >= len(text)


def test_an_end_of_answers_that_the_tokenizer_lacks_is_told_and_left_out(tmp_path, caplog):
    create_tiny_model(tmp_path / "m", template="chatml")
    end = TemplateRenderer.of_model(tmp_path / "m").stop_token_ids[0]
    for named in (-1, 10**9, 2**70, [end, 10**9]):
        _write_ends(tmp_path / "m", named)
        caplog.clear()
        renderer = TemplateRenderer.of_model(tmp_path / "m")
        assert renderer.stop_token_ids == (end,)
        assert "" not in renderer.template.stops
        assert "so they end no answer" in caplog.text
    for named in ("2", 2.5, {}, [None], True):
        _write_ends(tmp_path / "m", named)
        with pytest.raises(ConfigError, match="write the number of a token"):
            TemplateRenderer.of_model(tmp_path / "m")


def test_the_mark_of_an_encoding_at_the_beginning_of_a_template_is_no_part_of_prompts(tmp_path):
    create_tiny_model(tmp_path / "m", template="chatml")
    plain = TemplateRenderer.of_model(tmp_path / "m")
    file = tmp_path / "template.jinja"
    file.write_text(plain._tokenizer.chat_template, encoding="utf-8-sig")
    marked = TemplateRenderer.of_model(tmp_path / "m", RendererConfig(chat_template=file))
    said = [Message("user", "a")]
    assert marked.whole(said, ()).tolist() == plain.whole(said, ()).tolist()


def _write_ends(folder, named):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ""
    with pytest.raises(ConfigError, match="no chat template"):
        TemplateRenderer(tokenizer)


@pytest.mark.parametrize(
    ("header", "begins"),
    [("{{ m.role }} {{ loop.index }}", "assistant"), ("{{ m.role }}", "{{ messages | length }}")],
    ids=["each message has its number", "an answer begins with the number of messages"],
)
def test_a_template_that_numbers_turns_is_refused_unless_it_renders_all_of_them(
    tmp_path, header, begins
):
    create_tiny_model(tmp_path / "m", template="chatml")
    template = tmp_path / "numbered.jinja"
    template.write_text(
        f"{{% for m in messages %}}<|im_start|>{header}\n{{{{ m.content }}}}<|im_end|>\n"
        f"{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>{begins}\n{{% endif %}}"
    )
    with pytest.raises(ConfigError, match=r"by how many came before it.*model\.history=template"):
        TemplateRenderer.of_model(tmp_path / "m", RendererConfig(chat_template=template))
    config = RendererConfig(chat_template=template, history="template")
    conversation = (renderer := TemplateRenderer.of_model(tmp_path / "m", config)).conversation()
    for turn in range(4):
        prompt = conversation.prompt([Message("user", f"grid {turn}")])
        text = renderer.text(conversation.messages, ())
        assert prompt.ids.tolist() == renderer.encode(text).tolist()
        conversation.answer(said(renderer.answer_ids("left"), stopped=True))
