"""The model that a run began with, for the card of the one that it has trained: its name on the
hub, and its licence.

Only files that are on this machine are read: a card needs no network.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl.models.source import hub_name_of, is_hub_name
from agentrl.models.tiny import SIZES

CARD = "README.md"
"""The file of a model's card. It begins with its metadata as YAML, between two lines `---`."""
_LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that a run began with."""

    name: str | None = None
    """Its name on the hub; None if it has none, or none that is known here."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """What its own card says of its licence: `license`, and perhaps `license_name` and
    `license_link`. Empty if unknown."""
    random: bool = False
    """True if its weights were drawn at the run's start (`model: tiny`)."""


def base_model_of(name: str, commit: str | None = None) -> BaseModel:
    """The base model of a run: `model.name` of its config, and the commit that was taken from the
    hub.
    """
    if name in SIZES:
        return BaseModel(random=True)
    folder = Path(name).expanduser()
    if folder.is_dir():
        metadata = card_metadata(folder / CARD)
        known = hub_name_of(folder) or metadata.get("base_model")
        return BaseModel(known if isinstance(known, str) else None, _licence(metadata))
    if not is_hub_name(name):
        return BaseModel()
    return BaseModel(name, _licence(card_metadata(_cached_card(name, commit))))


def card_metadata(card: Path | None) -> dict[str, Any]:
    """The metadata of a model's card; empty if there is none, or none that can be read."""
    try:
        text = "" if card is None else card.read_text(encoding="utf-8")
        if not text.startswith("---\n"):
            return {}
        found = yaml.safe_load(text[4:].partition("\n---")[0])
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _licence(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {key: metadata[key] for key in _LICENCE_KEYS if isinstance(metadata.get(key), str)}
    return found if "license" in found else {}


def _cached_card(name: str, commit: str | None) -> Path | None:
    """The card of a model on the hub, if its cache here has it."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, CARD, revision=commit)
    return Path(found) if isinstance(found, str) else None


__all__ = ["CARD", "BaseModel", "base_model_of", "card_metadata"]
