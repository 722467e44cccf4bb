"""Models that see: the language model inside, the tower and projector beside it, and what these
make of pictures.

transformers' own classes compute all of it. Pictures become pixel values by the family's image
processor, these become features by the tower and the projector, and features stand in place of
the embeddings of the placeholders. Each picture is computed by itself, so that one that several
contexts show is computed once, whatever is computed with it.

Dimension suffixes: T tokens of a context, F rows of features, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agentrl.errors import ConfigError
from agentrl.models.optional_fields import optional_field
from agentrl.models.vision_families import FAMILIES, BothWays, image_processor
from agentrl.tokens.arrays import IntArray
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage

if TYPE_CHECKING:
    from torch import Tensor

_REFUSED = {
    "paligemma": "lets the tokens of a prompt see each other in both directions, and not those of a"
    " picture alone"
}
"""Why others are not, where there is a reason."""
_LANGUAGE = ("language_model", "text_model")
_TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower", "embed_audio")
"""A tower that hears is never computed; it stays as it is, and counts as one that sees."""
_PROJECTORS = (
    "merger",
    "deepstack_merger_list",
    "multi_modal_projector",
    "connector",
    "embed_vision",
)
Part = Literal["language", "tower", "projector"]
"""A part of a model that sees. The projector turns the tower's features into those of the language
model's size; of some families it is a module of the tower."""


def sees(config: Any) -> bool:
    """True if a config is of a model that sees, loaded with its tower."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = type(config)
    # transformers loads some families with their towers as causal language models, too.
    is_text = known in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in FAMILIES
    return known in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not is_text


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model of a config: with its tower, if it sees."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def check_family(config: Any) -> None:
    """Refuse a model that sees in a way that is not known here.

    Raises:
        ConfigError: it does.
    """
    if not sees(config) or config.model_type in FAMILIES:
        return
    why = _REFUSED.get(config.model_type, "has not been tried")
    raise ConfigError(
        f"pictures of the family {config.model_type} cannot be computed: it {why}. Take a model of"
        f" {', '.join(FAMILIES)}, or evaluate it with engine=openai"
    )


def attention_of(config: Any, name: str) -> Any:
    """The `attn_implementation` with which a model is loaded, so that its language model computes
    attention by the interface `name`. A tower keeps torch's own attention.
    """
    if not sees(config):
        return name
    of_parts = dict.fromkeys(config.sub_configs, name)
    return {"": name, **of_parts, "vision_config": "sdpa"}


def language_model(model: Any) -> Any:
    """The decoder whose layers compute tokens: inside of a model that sees, else the whole model
    without its head.
    """
    inside = model.base_model
    found = [getattr(inside, name) for name in _LANGUAGE if hasattr(inside, name)]
    return found[0] if found and sees(model.config) else inside


def has_axes(model: Any) -> bool:
    """True if a model counts the positions of tokens by time, height and width."""
    return hasattr(model.base_model, "get_rope_index")


def logit_cap(model: Any) -> float | None:
    """The soft cap on the logits of a model that sees, if its class puts one on them."""
    family = FAMILIES.get(model.config.model_type)
    if family is None or not family.caps_logits:
        return None
    cap: float | None = optional_field(model.config.get_text_config(), "final_logit_softcapping")
    return cap


def part_of(name: str) -> Part:
    """The part of a model that a parameter belongs to, by its name."""
    within = name.split(".")
    if any(one in _PROJECTORS for one in within):
        return "projector"
    return "tower" if any(one in _TOWERS for one in within[:2]) else "language"


@dataclass(frozen=True, slots=True)
class PictureInputs:
    """Pictures as the tower takes them.

    `tensors`: the arguments of the family's `get_image_features`, of all of them. `grids`: of each
    of them, the rows of patches and the patches of a row by time, height and width; empty for
    families whose positions do not depend on them.
    """

    tensors: Mapping[str, "Tensor"]
    grids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class PictureFeatures:
    """Features of pictures, end to end, shape (F, H). `deeper`: those that are added to the hidden
    states after the first layers, in the families that do so.
    """

    rows_FH: "Tensor"
    deeper: Sequence["Tensor"] = ()


def picture_inputs(processor: Any, images: Sequence[EncodedImage]) -> PictureInputs:
    """Decode pictures, and make the tower's inputs of them, on the CPU. `processor`: the family's
    image processor.
    """
    import torch

    found: list[Mapping[str, Tensor]] = []
    for image in images:
        found.append(processor(images=[image.decoded()], return_tensors="pt"))
    names = [name for name in found[0] if name in _INPUTS]
    # Idefics and its relatives have an axis of contexts before that of tiles.
    of_tiles = found[0]["pixel_values"].ndim == 5
    tensors = {name: torch.cat([one[name] for one in found], int(of_tiles)) for name in names}
    grids = [one["image_grid_thw"][0].tolist() for one in found if "image_grid_thw" in one]
    return PictureInputs(tensors, grids)


class Vision:
    """What a model does with pictures. `folder` has the settings of its image processor.

    Raises:
        ConfigError: the family is not known here, or the folder has no image processor.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        check_family(model.config)
        self._model = model
        self._processor = image_processor(folder)
        self.both_ways: BothWays = FAMILIES[model.config.model_type].both_ways(model.config)
        """Where the tokens of a picture see each other in both directions."""
        self.placeholder: int = optional_field(model.config, "image_token_id")
        """The token that stands for a row of features."""

    def inputs(self, images: Sequence[EncodedImage]) -> PictureInputs:
        """See `picture_inputs`."""
        return picture_inputs(self._processor, images)

    def positions(
        self, tokens_T: IntArray, placed: Sequence[PlacedImage], grids: Sequence[Sequence[int]]
    ) -> IntArray | None:
        """The positions by time, height and width of a context's tokens, shape (3, T); None in
        families that count tokens alone. `grids`: of each of its pictures.
        """
        import torch

        if not has_axes(self._model):
            return None
        if not placed:
            return np.broadcast_to(np.arange(len(tokens_T), dtype=np.int32), (3, len(tokens_T)))
        kinds_T = np.zeros(len(tokens_T), np.int32)
        for image in placed:
            kinds_T[image.start : image.stop] = 1
        found, _ = self._model.base_model.get_rope_index(
            torch.from_numpy(tokens_T.astype(np.int64))[None],
            mm_token_type_ids=torch.from_numpy(kinds_T)[None],
            image_grid_thw=torch.tensor(grids),
        )
        positions_3T: IntArray = found[:, 0].numpy().astype(np.int32)
        return positions_3T

    def of_layers(self, tokens_1T: "Tensor", places_I: "Tensor") -> dict[str, Any]:
        """The arguments of a language model's call that makes inputs of each layer of the tokens
        (Gemma 4), besides their embeddings; empty in other families. At `places_I`, which stand for
        pictures, it takes padding, as the family's own call does.
        """
        config = self._model.config.get_text_config()
        if not optional_field(config, "hidden_size_per_layer_input"):
            return {}
        padded_1T = tokens_1T.index_fill(1, places_I, config.pad_token_id)
        inside = language_model(self._model)
        return {"per_layer_inputs": inside.get_per_layer_inputs(padded_1T, None)}

    def features(self, inputs: PictureInputs) -> PictureFeatures:
        """Compute the features of pictures, in the order of the inputs."""
        import torch

        found = self._model.base_model.get_image_features(**inputs.tensors, return_dict=True)
        deeper = getattr(found, "deepstack_features", None) or ()
        joined = [
            (torch.cat(list(one)) if isinstance(one, list | tuple) else one.flatten(0, -2))
            for one in (found.pooler_output, *deeper)
        ]
        return PictureFeatures(joined[0], joined[1:])


_INPUTS = frozenset(
    {"image_grid_thw", "image_position_ids", "pixel_attention_mask", "pixel_values"}
)


__all__ = [
    "Part",
    "PictureFeatures",
    "PictureInputs",
    "Vision",
    "attention_of",
    "auto_class",
    "check_family",
    "has_axes",
    "language_model",
    "logit_cap",
    "part_of",
    "picture_inputs",
    "sees",
]
