"""Lineage: the model, pairs and reward that a model was trained from, back to the first model.

iterations/iteration_000002/        a Hugging Face folder, and beside the model:
  pairs.jsonl                       its training pairs (`recipe.preferences.path` reads them)
  lineage.json                      a `Lineage`
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.errors import CheckpointError
from agentrl.plugins import Component

LINEAGE = "lineage.json"
PAIRS = "pairs.jsonl"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class ModelRecord(_Record):
    """A model: its folder, relative to that of the file, and its `weights_sha256`."""

    folder: Path
    sha256: str


class RewardRecord(_Record):
    """A part of the reward: its settings, and those of them that are folders of models."""

    name: str
    settings: dict[str, Any]
    models: dict[str, ModelRecord]


class Lineage(_Record):
    """The lineage of a model. `sha256` is that of its own weights, `parent` the model that played
    and was trained on.

    `reference` is DPO's. `tasks` are the ids of all tasks that were played, `pairs` is the number
    of pairs, `updates` that of the optimizer's updates since the run began. `config_sha256` is the
    SHA-256 of the run's config as YAML.
    """

    iteration: int
    sha256: str
    parent: ModelRecord
    reference: ModelRecord
    reward: tuple[RewardRecord, ...]
    tasks: tuple[str, ...]
    pairs: int
    updates: int
    seed: int
    config_sha256: str


@dataclass(frozen=True, slots=True)
class Generation:
    """A model of a lineage: its folder, the checksum of its weights, and its `Lineage`; the first
    model has none.
    """

    folder: Path
    sha256: str
    lineage: Lineage | None


def verified_lineage(folder: Path) -> list[Generation]:
    """The model in a folder, its parent, and so on: the last one is the first model.

    All weights are read, those of references and reward models too, and compared with what was
    recorded.

    Raises:
        CheckpointError: a folder or its weights are missing, weights are not those that were
            recorded, or a `lineage.json` cannot be read.
    """
    found, checksum = list[Generation](), cache(weights_sha256)
    folder = folder.resolve()
    while True:
        lineage = read_lineage(folder) if (folder / LINEAGE).exists() or not found else None
        found.append(Generation(folder, checksum(folder), lineage))
        if lineage is None:
            return found
        if lineage.sha256 != checksum(folder):
            raise CheckpointError(
                f"the weights in {folder} are not those that were trained there: their SHA-256 is"
                f" {checksum(folder)}, and its {LINEAGE} has {lineage.sha256}. Restore the folder"
                " from a copy"
            )
        for role, model in _models(lineage):
            _check_model(folder, role, model, checksum)
        folder = (folder / lineage.parent.folder).resolve()
        if any(folder == generation.folder for generation in found):
            raise CheckpointError(
                f"the lineage of {found[0].folder} goes in a circle: {folder} descends from itself"
            )


def read_lineage(folder: Path) -> Lineage:
    """The `Lineage` in a folder, without looking at any weights.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        return Lineage.model_validate_json((folder / LINEAGE).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {LINEAGE}: name a folder iterations/iteration_... of a run of"
            " recipe=iterative_dpo"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(
            f"{folder / LINEAGE} cannot be read: {where}: {first['msg']}"
        ) from error


def weights_sha256(folder: Path) -> str:
    """SHA-256 over names and bytes of a model's weight files, in order of names, in hex.

    Raises:
        CheckpointError: there are none.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no weights (no *.safetensors in it): restore it from a copy"
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def rewards_of(parts: tuple[Component, ...]) -> tuple[RewardRecord, ...]:
    """The record of a run's reward."""
    return tuple(
        RewardRecord(
            name=part.name,
            settings=part.settings.model_dump(mode="json"),
            models={
                name: ModelRecord(folder=value.resolve(), sha256=weights_sha256(value))
                for name, value in part.settings
                if isinstance(value, Path) and (value / "config.json").exists()
            },
        )
        for part in parts
    )


def _models(lineage: Lineage) -> Iterator[tuple[str, ModelRecord]]:
    yield "parent", lineage.parent
    yield "reference", lineage.reference
    for part in lineage.reward:
        for setting, model in part.models.items():
            yield f"{setting} of the reward {part.name}", model


def _check_model(
    folder: Path, role: str, model: ModelRecord, checksum: Callable[[Path], str]
) -> None:
    named = (folder / model.folder).resolve()
    if not named.is_dir():
        raise CheckpointError(
            f"{folder / LINEAGE} names {named} as the {role}, and there is no such folder:"
            " restore it"
        )
    if checksum(named) != model.sha256:
        raise CheckpointError(
            f"the weights in {named} are not those with which {folder} was trained, as the {role}:"
            f" their SHA-256 is {checksum(named)}, and {LINEAGE} has {model.sha256}. Restore the"
            " folder from a copy"
        )
