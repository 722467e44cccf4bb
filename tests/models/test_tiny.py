"""A tiny model is complete, deterministic, and its tokens are the ones its tasks need."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from agentrl import Message, Observation
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.frozen_lake import FrozenLake
from agentrl.errors import ConfigError
from agentrl.models.tiny import MAX_VOCAB_SIZE, create_tiny_model
from tests.properties import examples


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_the_folder_loads_as_a_causal_model_with_its_tokenizer_s_vocabulary(
    tiny_model_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 2e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer) <= MAX_VOCAB_SIZE
    assert (
        model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@given(st.text())
@examples(200)
def test_any_text_comes_back_unchanged(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_grid_costs_one_token_per_cell_and_newline(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer("P . . O\n. O . .\n").input_ids]
    assert pieces == ["P", " .", " .", " O", "\n", ".", " O", " .", " .", "\n"]


@pytest.mark.parametrize("word", ["left", "right", "up", "down", " left", " right", " up", " down"])
def test_a_move_is_one_token_at_the_start_of_a_message(
    tokenizer: PreTrainedTokenizerFast, word: str
) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "P"}, {"role": "assistant", "content": word}],
        return_dict=False,
    )
    assert [tokenizer.decode([i]) for i in ids] == [
        "<|user|>",
        "P",
        "<|end|>",
        "<|assistant|>",
        word,
        "<|end|>",
    ]


def test_the_corpus_s_words_become_single_tokens_and_the_core_words_stay(tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "m", corpus=["zanzibar quuxly " * 3] * 500 + ["frobnicate"] * 50)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    for word in ("zanzibar", " quuxly", "frobnicate", "left", "right", " ."):
        assert len(tokenizer(word).input_ids) == 1, word


@pytest.mark.parametrize("template", ["compact", "chatml"])
@pytest.mark.parametrize("tools", [None, [{"name": "add"}]])
def test_each_prompt_extends_the_last(
    tmp_path: Path, template: str, tools: list[dict[str, str]] | None
) -> None:
    create_tiny_model(tmp_path / "m", template=template)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    messages = [{"role": role, "content": f"{role} says {i}."} for i, role in enumerate(roles)]
    texts = [
        tokenizer.apply_chat_template(
            messages[:n], tools=tools, add_generation_prompt=n in (2, 4), tokenize=False
        )
        for n in range(2, 7)
    ]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)
    assert all(message["content"] in texts[-1] for message in messages)
    assert ("add" in texts[0]) == (tools is not None)


def test_chatml_is_qwen_s_own_shape(tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "m", template="chatml")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_same_seed_gives_the_same_files_and_no_global_random_state_moves(
    tmp_path: Path,
) -> None:
    before = torch.get_rng_state(), random.getstate()
    create_tiny_model(tmp_path / "a", corpus=["some text"], seed=3)
    create_tiny_model(tmp_path / "b", corpus=["some text"], seed=3)
    create_tiny_model(tmp_path / "c", corpus=["some text"], seed=4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == files
    assert (tmp_path / "c" / "model.safetensors").read_bytes() != files["model.safetensors"]


def test_a_folder_in_use_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        create_tiny_model(tiny_model_dir)


def test_a_tiny_model_that_sees_has_a_token_for_each_square_of_a_board(tmp_path: Path) -> None:
    from agentrl.models.vision import sees

    create_tiny_model(tmp_path / "one", size="tiny_vision", seed=3)
    create_tiny_model(tmp_path / "same", size="tiny_vision", seed=3)
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        one, same = ((tmp_path / of / name).read_bytes() for of in ("one", "same"))
        assert one == same, name
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "one")
    assert sees(model.config)
    assert 9e5 <= sum(p.numel() for p in model.parameters()) <= 1.2e6
    renderer = TemplateRenderer.of_model(tmp_path / "one")
    for size, sight, cells in ((4, None, 16), (6, None, 36), (4, 1, 9)):
        lake = FrozenLake()
        options = {"view": "picture", "size": size, "sight": sight}
        shown = lake.start(1, options)
        assert isinstance(shown, Observation)
        prompt = renderer.conversation().prompt([Message("user", "", images=(*shown.images,))])
        (placed,) = prompt.images
        assert placed.tokens == cells
        assert renderer.decode(prompt.ids[: placed.start]) == "<|user|><|vision_start|>"
        assert renderer.decode(prompt.ids[placed.stop :]) == "<|vision_end|><|end|><|assistant|>"
