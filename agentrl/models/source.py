"""The source of a model: a folder, or a snapshot of a model on the Hugging Face hub in the hub's
own cache.

An existing folder wins. Everything else that is written `owner/name` is a model on the hub. The
cache is that of the library huggingface_hub (`HF_HOME`), and so is its offline mode
(`HF_HUB_OFFLINE=1`). From then on, a model is a folder: engines, trainers and renderers get its
path.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError
from agentrl.models.attention_check import check_kind
from agentrl.models.optional_fields import optional_field
from agentrl.models.overrides import origin_of, overridden_folder
from agentrl.models.vision import sees

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<revision>[^/]+)")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md")
"""The files that describe a model: config, tokenizer, template, code, and the card with its
licence. A few MB, so it is fetched and checked first."""
_WEIGHTS_PATTERN = "*.safetensors"
_COPIES = ["*/*", "consolidated*"]
"""Copies of the weights in other formats."""
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
"""The config of a model as it is."""
_INDEX_FILE = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_LOW_LEVEL = re.compile(r"\(Request ID[^)]*\)|\s+")


def description_folder(
    name: str,
    revision: str | None = None,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
    *,
    setting: str = "model.name",
) -> Path:
    """The folder with a model's config, tokenizer and template; of a model on the hub, its weights
    may be missing. `overrides`: entries of the config that are replaced.

    Raises:
        ConfigError: there is no such folder, nor such a model on the hub or in its cache.
    """
    return overridden_folder(_find_folder(name, revision, _SMALL_FILES, setting), overrides)


def model_folder(
    name: str,
    revision: str | None = None,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
    *,
    setting: str = "model.name",
) -> Path:
    """The folder of a whole model. One on the hub is downloaded, unless the cache has it.
    `overrides`: entries of its config that are replaced.

    Raises:
        ConfigError: there is no such model, or files of it are missing.
    """
    found = _find_folder(name, revision, (*_SMALL_FILES, _WEIGHTS_PATTERN), setting)
    check_weights(found, name, setting=setting)
    return overridden_folder(found, overrides)


def check_weights(folder: Path, name: str, *, setting: str = "model.name") -> None:
    """Check that a model's folder has all files of its weights.

    Raises:
        ConfigError: it has none, or some are missing.
    """
    listed = _files_of_index(folder / _INDEX_FILE)
    if missing := sorted(file for file in listed if not (folder / file).is_file()):
        raise ConfigError(
            f"{setting}: {name!r} lacks {len(missing)} of its {len(listed)} files of weights, such"
            f" as {missing[0]} (in {folder}): copy or download them again"
        )
    if not any(
        file.suffix in (".safetensors", ".bin") and file.exists() for file in folder.iterdir()
    ):
        raise ConfigError(
            f"{setting}: {name!r} has the config of a model and no weights (no {_WEIGHTS_PATTERN} "
            f"in {folder}): it is enough for `agentrl plan`; to train, give the folder of the "
            "model itself"
        )
    for file in weight_files(folder):
        _check_header(file, name, setting)


def _check_header(file: Path, name: str, setting: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
        why = (
            "it is a pointer of Git LFS, whose content was not fetched: run `git lfs pull` there"
            if is_pointer
            else (f"it is damaged or incomplete ({error}): copy or download it again")
        )
        raise ConfigError(f"{setting}: {name!r}: {file} cannot be read: {why}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's model: those that its index names, or the one of
    transformers' name, or all.

    Beside these, some models have their weights once more, in files and under names of another
    program.
    """
    if listed := _files_of_index(folder / _INDEX_FILE):
        return [folder / file for file in listed]
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob(_WEIGHTS_PATTERN))


def check_architecture(
    folder: Path, *, trust_remote_code: bool = False, setting: str = "model.name"
) -> None:
    """Check that transformers knows the model's architecture, and that it writes text from left to
    right.

    Raises:
        ConfigError: it does not, or the model comes with code that may not be run.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"{setting}: transformers cannot read {folder / 'config.json'}: {_explain(error)}"
        ) from error
    if quantised := optional_field(config, "quantization_config"):
        raise ConfigError(
            f"{setting}: the weights in {folder} are quantised"
            f" ({quantised.get('quant_method', 'unknown')}), and only plain ones can be trained:"
            " take the model's bfloat16 version, or load it with transformers, dequantised, and"
            " save it again by save_pretrained"
        )
    has_code = trust_remote_code and "AutoModelForCausalLM" in optional_field(
        config, "auto_map", {}
    )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not sees(config) and not has_code:
        raise ConfigError(
            f"{setting}: {folder} is {', '.join(config.architectures or [config.model_type])},"
            " which is no causal language model that transformers knows: take one whose class ends"
            " with ForCausalLM, one that sees, or a newer transformers"
        )
    check_kind(config, folder, trust_remote_code=trust_remote_code)


def _explain(error: Exception) -> str:
    text = _LOW_LEVEL.sub(" ", str(error)).strip()
    if "trust_remote_code" in text:
        return (
            "the model comes with code of its own. If you trust it, write"
            " model.trust_remote_code=true"
        )
    return text[:300]


def here(folder: Path) -> Path:
    """The folder of a model on this machine: a snapshot of the hub that only another machine has is
    downloaded here.

    All machines need the same `HF_HOME`, so that the snapshot has one path. A folder that the user
    has named must be on a disk that all machines share.

    Raises:
        ConfigError: it cannot be had here.
    """
    if folder.exists():
        origin = origin_of(folder)
        if origin is not None and not origin.exists():
            here(origin)  # its files are links to these
        return folder
    if not (match := _SNAPSHOT.search(folder.as_posix())):
        return folder
    name = f"{match['owner']}/{match['name']}"
    found = model_folder(name, match["revision"])
    if found.absolute() != folder.absolute():
        raise ConfigError(
            f"this machine keeps the model {name} in {found}, and the one that started the run in"
            f" {folder}: set HF_HOME to the same path on all machines"
        )
    return found


def vocabulary_size(folder: Path) -> int | None:
    """The number of rows of the model's embeddings, by its config.json: ids of tokens are below it;
    None if unknown.

    Padding counts: a model may sample a row that its tokenizer has no token for.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(rows) if rows else None


def commit_of(folder: Path) -> str | None:
    """The commit of a snapshot of the hub; None if the folder is not one."""
    match = _SNAPSHOT.search(folder.as_posix())
    return match["revision"] if match else None


def is_hub_name(name: str) -> bool:
    """True if a name is written as those of models on the hub are: owner/name."""
    return _HUB_ID.fullmatch(name) is not None


def hub_name_of(folder: Path) -> str | None:
    """The name on the hub of the model in a snapshot of its cache; None if it is not one."""
    match = _SNAPSHOT.search(folder.as_posix())
    return f"{match['owner']}/{match['name']}" if match else None


def _files_of_index(index: Path) -> Sequence[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read ({error}): copy or download it again") from error


def _find_folder(name: str, revision: str | None, patterns: Sequence[str], setting: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ConfigError(
            f"{setting}: {name!r} is a file, and a model is a folder with config.json, tokenizer"
            " and *.safetensors: name the folder"
        )
    if folder.is_dir():
        return _check_folder(folder, revision, setting)
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"{setting}: {name!r} is neither the folder of a Hugging Face model (there is no folder"
            f" {folder.absolute()}) nor a model on the hub, which is written owner/name"
        )
    found = _download(name, revision, patterns, setting)
    if not (found / "config.json").is_file():
        raise ConfigError(
            f"{setting}: {name!r} on the hub has no config.json, so it is not a model for"
            f" transformers (its snapshot is {found}); a repository of GGUF files or adapters"
            " cannot be trained: name the model that it was made from"
        )
    return found


def _check_folder(folder: Path, revision: str | None, setting: str) -> Path:
    if not (folder / "config.json").is_file():
        if held := _describe_other_content(folder):
            raise ConfigError(f"{setting}: {str(folder)!r} {held}")
        raise ConfigError(
            f"{setting}: {str(folder)!r} is neither the folder of a Hugging Face model (no"
            f" config.json in {folder.absolute()}) nor taken from the hub, since a folder of that"
            " name exists: complete it, or rename it"
        )
    if revision is not None:
        raise ConfigError(
            f"model.revision={revision}: {str(folder)!r} is a folder here, and only models on the"
            " hub have revisions: leave it out, or rename the folder to take the model from"
            " the hub"
        )
    return folder


def _describe_other_content(folder: Path) -> str:
    """The content of a folder without a config, if that is known."""
    if (folder / "adapter_config.json").is_file():
        try:
            base = json.loads((folder / "adapter_config.json").read_text()).get(
                "base_model_name_or_path"
            )
        except (OSError, ValueError, AttributeError):
            base = None
        return (
            f"holds adapters only, of {base or 'a model that is not named'}: merge them into it"
            " with peft's merge_and_unload, save that by save_pretrained, and name its folder"
        )
    if found := sorted(folder.glob("*.gguf")):
        return (
            f"holds GGUF files only, such as {found[0].name}: name the folder of the model that"
            " they were made from; transformers writes one with from_pretrained(...,"
            " gguf_file=...) and save_pretrained"
        )
    return ""


def _download(name: str, revision: str | None, patterns: Sequence[str], setting: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at the revision {revision!r}" if revision else ""
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=_COPIES
            )
        )
    except GatedRepoError as error:
        why = (
            "its owner lets only some accounts in: ask for access on its page, and log in with `hf"
            " auth login`"
        )
        raise _not_found(name, at, why, setting) from error
    except RevisionNotFoundError as error:
        raise _not_found(name, at, "the hub has the model and no such revision", setting) from error
    except LocalEntryNotFoundError as error:
        why = (
            "the hub cannot be reached, or offline mode is on (HF_HUB_OFFLINE), and the cache"
            f" {constants.HF_HUB_CACHE} lacks it"
        )
        raise _not_found(name, at, why, setting) from error
    except (OSError, ValueError) as error:
        raise _not_found(
            name, at, _LOW_LEVEL.sub(" ", str(error))[:200].strip(), setting
        ) from error


def _not_found(name: str, at: str, why: str, setting: str) -> ConfigError:
    return ConfigError(
        f"{setting}: {name!r} is neither the folder of a Hugging Face model (there is no folder "
        f"{Path(name).absolute()}) nor a model that can be taken from the hub{at}: {why}"
    )


__all__ = [
    "check_architecture",
    "check_weights",
    "commit_of",
    "description_folder",
    "here",
    "hub_name_of",
    "is_hub_name",
    "model_folder",
    "weight_files",
]
