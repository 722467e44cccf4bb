"""A model with another config: entries of its config.json that a user has replaced, as for YaRN.

All parts of a run read the model's folder. A changed config is therefore a folder too, with links
to the model's files: engines, trainers and checkpoints get the same rotations.
"""

import difflib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.files.caches import cache_folder

SETTING = "model.hf_overrides"
_ROPE = ("rope_parameters", "rope_scaling")
"""The names of the rotation of positions: that of transformers 5, and the former one."""


def overridden_folder(folder: Path, overrides: Mapping[str, Any], into: Path | None = None) -> Path:
    """The model of a folder with other entries in its config.json, as a folder with links to its
    files. `into`: the new folder; by default one in the cache.

    Raises:
        ConfigError: the config has no such entries.
    """
    if not overrides:
        return folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check_names(config, overrides)
    changed = _merge(config, overrides)
    text = json.dumps(changed, indent=2, sort_keys=True)
    # Not resolved: the path of a snapshot names its model and commit.
    origin = Path(os.path.abspath(folder))
    if into is None:
        digest = hashlib.sha256(f"{origin}\n{text}".encode()).hexdigest()[:16]
        into = cache_folder() / "models" / digest
    if _is_current(into, origin, text):
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=into.parent))
    for file in origin.iterdir():
        if file.name != "config.json":
            (made / file.name).symlink_to(file)
    (made / "config.json").write_text(text, encoding="utf-8")
    if into.exists():
        shutil.rmtree(into)
    made.rename(into)
    return into


def origin_of(folder: Path) -> Path | None:
    """The folder that the files of an overridden one are in; None of another folder."""
    links = (Path(os.readlink(file)) for file in folder.iterdir() if file.is_symlink())
    return next((link.parent for link in links if link.is_absolute()), None)


def _is_current(into: Path, origin: Path, text: str) -> bool:
    config = into / "config.json"
    if not config.is_file() or config.read_text(encoding="utf-8") != text:
        return False
    names = {file.name for file in origin.iterdir()}
    return names == {file.name for file in into.iterdir()} and origin_of(into) in (origin, None)


def _check_names(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    from transformers import AutoConfig

    known = {*config, *_ROPE}
    with suppress(ValueError, KeyError):  # of a model with code of its own
        known |= AutoConfig.for_model(config.get("model_type", "")).to_dict().keys()
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{SETTING}.{name}: the model's config.json has no such entry.{hint}")


def _yarn_positions(config: Mapping[str, Any], rotation: Mapping[str, Any]) -> dict[str, int]:
    """The positions that YaRN stretches a model to. vLLM and transformers take
    `max_position_embeddings` as those after the stretching.
    """
    known = config.get("max_position_embeddings")
    if rotation.get("rope_type") != "yarn" or "factor" not in rotation or known is None:
        return {}
    original = rotation.get("original_max_position_embeddings") or known
    return {"max_position_embeddings": max(known, int(rotation["factor"] * original))}


def _merge(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these entries; mappings are merged."""
    merged = dict(config)
    for name, value in overrides.items():
        if name in _ROPE:
            rotation = dict(merged.get(_ROPE[0]) or merged.get(_ROPE[1]) or {})
            rotation |= value
            if "rope_theta" in config:
                rotation.setdefault("rope_theta", config["rope_theta"])
            merged = {key: old for key, old in merged.items() if key not in _ROPE}
            merged[_ROPE[0]] = rotation
            if "max_position_embeddings" not in overrides:
                merged |= _yarn_positions(merged, rotation)
        elif isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merge(merged[name], value)
        else:
            merged[name] = value
    return merged
