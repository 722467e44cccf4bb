"""`agentrl check-model`: what a model's folder can do, and what would go wrong in a run, found by
trying.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.model_check import findings
from agentrl.conversation import renderer as renderer_module
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.family import find_family
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.conversation.template_check import Finding, template_findings
from tests.chat_templates import tokenizer_of


@pytest.fixture(autouse=True, scope="module")
def _without_vllm() -> Iterator[None]:
    """Importing its parsers takes seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(renderer_module, "slow_call_reader", lambda *_: None)
        yield


def found(name: str, **config: Any) -> dict[str, list[Finding]]:
    tokenizer = tokenizer_of(name)
    chosen = RendererConfig(**config)
    family = find_family(tokenizer, {}, {}) if chosen.tool_format == "auto" else None
    by_subject: dict[str, list[Finding]] = {}
    for one in template_findings(TemplateRenderer(tokenizer, chosen, (), family)):
        by_subject.setdefault(one.subject, []).append(one)
    return by_subject


@pytest.mark.parametrize(
    ("name", "family", "reasoning", "call", "reader"),
    [
        (
            "qwen3",
            "qwen3",
            "<think> ... </think>, begun by the model",
            '{"name": "find_it"',
            "the canonical parser",
        ),
        (
            "gptoss",
            "none is recognised",
            "as its family writes it",
            " to=functions.find_it",
            "the family gpt-oss",
        ),
        (
            "llama3_1",
            "none is recognised",
            "none",
            '{"name": "find_it", "parameters"',
            "the canonical parser",
        ),
        (
            "glm4moe",
            "",
            "<think> ... </think>, begun by the model",
            "<tool_call>find_it",
            "the family glm-4.5",
        ),
    ],
)
def test_the_family_and_what_reads_calls_and_reasoning_are_named(
    name: str, family: str, reasoning: str, call: str, reader: str
) -> None:
    told = found(name)
    assert all(one.right for ones in told.values() for one in ones), told
    assert told["family"][0].words.startswith(family)
    assert told["reasoning"][0].words == reasoning
    assert call in told["calls of tools"][0].words
    assert f"read by {reader}" in told["calls of tools"][0].words
    assert [one.words for one in told["round trip"]] == [
        "a call: to the letter",
        "texts, numbers and lists in a call: to the letter",
    ]
    assert "that text of others never becomes: " in told["control tokens"][0].words
    assert told["turns"][0].words.startswith("each extends the one before, token for token")


def test_a_template_that_strips_earlier_reasoning_is_told() -> None:
    forks = (
        ", where the template would write earlier turns differently (model.history=template forks)"
    )
    assert [found(name)["turns"][0].words.endswith(forks) for name in ("qwen3", "qwen2_5")] == [
        True,
        False,
    ]


def test_calls_that_nothing_reads_are_told_with_the_setting_to_write() -> None:
    told = found("lfm2_v2")  # vLLM has a parser for it, which is left out here
    assert told["calls of tools"][0].words.endswith("read by nothing")
    assert [one.right for one in told["round trip"]] == [False, False]
    assert told["round trip"][0].words.endswith("and read as []. Write model.tool_format=canonical")
    assert all(one.right for one in found("lfm2_v2", tool_format="canonical")["round trip"])


@pytest.fixture
def described(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model without its weights."""
    for file in tiny_model_dir.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    return tmp_path


def changed(folder: Path, **config: Any) -> list[Finding]:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return [one for one in findings(folder, RendererConfig()) if not one.right]


def test_a_folder_of_a_config_and_a_tokenizer_is_enough(agentrl: Any, described: Path) -> None:
    done = agentrl("check-model", str(described))
    assert done.returncode == 0
    rows = json.loads((described / "config.json").read_text())["vocab_size"]
    for text in (
        "4 layers of 128",
        "2,048 tokens",
        "none: this is enough for prompts",
        f"{rows} tokens, {rows} rows",
    ):
        assert text in done.stdout
    (described / "tokenizer.json").unlink()
    done = agentrl("check-model", str(described))
    assert done.returncode == 2
    assert "copy tokenizer.json" in done.stderr


def test_what_would_go_wrong_in_a_run_is_told_and_the_exit_status_is_1(
    agentrl: Any, described: Path
) -> None:
    rows = json.loads((described / "config.json").read_text())["vocab_size"]
    [small] = changed(described, vocab_size=rows - 9)
    assert f"the tokenizer has the token {rows - 1}, and the model {rows - 9} rows" in small.words
    assert agentrl("check-model", str(described)).returncode == 1
    [quantised] = changed(described, vocab_size=rows, quantization_config={"quant_method": "fp8"})
    assert "are quantised (fp8)" in quantised.words
    (described / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert any("pointer of Git LFS" in one.words for one in changed(described))
