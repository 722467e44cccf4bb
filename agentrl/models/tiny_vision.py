"""The tiny model that sees: Qwen3-VL with a small tower, whose patches are the squares of boards.

A square of 28 x 28 pixels, which built-in boards draw for a cell, is one patch and one token. So a
board is as many tokens as it has cells, and the tower need not learn what a square is.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILY = "qwen3_vl"
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The tokens around a picture, its placeholder, and that of videos, of which there are none."""
TEMPLATE = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{%- if part.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""The compact template, in which contents may be lists of texts and pictures."""
_PATCH = 28
_SIDE = 16
"""Patches of a side of the pictures that the tower's positions are learned for; those of larger
pictures lie between them."""
_HIDDEN = 64


def vision_language_config(text: Mapping[str, Any], tokens: Sequence[str]) -> "PreTrainedConfig":
    """The config of a model that sees, of that of its language model. `tokens`: the special tokens
    of the vocabulary, from number 0 on.
    """
    from transformers import Qwen3VLConfig

    half = text["head_dim"] // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    rope = {**text["rope_parameters"], "mrope_section": sections, "mrope_interleaved": True}
    numbers = dict(zip(MARKS, map(tokens.index, MARKS), strict=True))
    return Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "num_heads": 4,
            "hidden_size": _HIDDEN,
            "intermediate_size": 2 * _HIDDEN,
            "out_hidden_size": text["hidden_size"],
            "patch_size": _PATCH,
            "spatial_merge_size": 1,
            "temporal_patch_size": 1,
            "num_position_embeddings": _SIDE**2,
            "deepstack_visual_indexes": [],
            "initializer_range": _HIDDEN**-0.5,
        },
        tie_word_embeddings=True,
        vision_start_token_id=numbers["<|vision_start|>"],
        vision_end_token_id=numbers["<|vision_end|>"],
        image_token_id=numbers["<|image_pad|>"],
        video_token_id=numbers["<|video_pad|>"],
        dtype="float32",
    )


def scale_tower(model: Any) -> None:
    """Draw the tower's first and last matrices again, so that a patch's pixels, its position and
    the features that the language model gets are all about as large.

    With transformers' scale the pixels are thirty times the positions, and where something is must
    be learned against them.
    """
    import torch

    tower = model.model.visual
    with torch.no_grad():
        pixels = tower.patch_embed.proj.weight
        pixels.normal_(0, pixels[0].numel() ** -0.5)
        tower.pos_embed.weight.normal_(0, 0.5)
        for name, parameter in tower.merger.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.normal_(0, 0.3 * parameter.shape[1] ** -0.5)


def image_processor() -> Any:
    """Its image processor: pictures of up to 16 x 16 patches stay as they are."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=_PATCH,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": _PATCH**2, "longest_edge": (_SIDE * _PATCH) ** 2},
    )


__all__ = [
    "FAMILY",
    "MARKS",
    "TEMPLATE",
    "image_processor",
    "scale_tower",
    "vision_language_config",
]
