"""The families of models that see: how each writes pictures, and what their tokens stand for.

One table for prompts, engines, trainers and plans. transformers' image processors say by the size
of a picture what is made of it, so that nothing is decoded where prompts are made; the tokens
around placeholders are those of the family's own processor, whose classes would make text, tokens
and pixels at once, and need packages for videos.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import ConfigError

Written = Callable[[int, int], str]
"""The text of a picture of a height and a width, with its placeholders."""
BothWays = Literal["nowhere", "windows", "everywhere"]
"""In which layers, of all or of those with a window, the tokens of a picture see each other in both
directions: besides what is before it, each sees all of its picture that its layer's window reaches.
"""


@dataclass(frozen=True, slots=True)
class FamilyFiles:
    """What is known of a model without its weights. `placeholder`: the text of the token that
    stands for a row of features.
    """

    config: Any
    tokenizer: Any
    processor: Any
    placeholder: str


def _merged_squares(files: FamilyFiles) -> Written:
    """Qwen: a placeholder for each square of merged patches. The template has the marks."""
    merged: int = files.processor.merge_size**2

    def written(height: int, width: int) -> str:
        patches: int = files.processor.get_number_of_image_patches(height, width, {})
        return files.placeholder * (patches // merged)

    return written


def _tiles_in_a_row(files: FamilyFiles) -> Written:
    """InternVL: the tiles of a picture one after another, between two marks."""
    begin = getattr(files.tokenizer, "start_image_token", "<img>")
    end = getattr(files.tokenizer, "end_image_token", "</img>")
    of_tile: int = files.config.image_seq_length

    def written(height: int, width: int) -> str:
        tiles: int = files.processor.get_number_of_image_patches(height, width, {})
        return f"{begin}{files.placeholder * (of_tile * tiles)}{end}"

    return written


def _tiles_in_rows(files: FamilyFiles) -> Written:
    """Idefics 3 and SmolVLM: each tile with its row and column, and the whole picture at last."""
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    vision = files.config.vision_config
    of_tile = int((vision.image_size // vision.patch_size) ** 2 / files.config.scale_factor**2)
    around = getattr(files.tokenizer, "fake_image_token", "<fake_token_around_image>")
    whole = getattr(files.tokenizer, "global_image_token", "<global-img>")

    def written(height: int, width: int) -> str:
        _, rows, columns = files.processor.get_number_of_image_patches(height, width, {})
        text: str = get_image_prompt_string(
            rows, columns, of_tile, around, files.placeholder, whole
        )
        return text

    return written


def _between_breaks(files: FamilyFiles) -> Written:
    """Gemma 3: as many for each picture, between two marks and empty lines."""
    begin, end = files.tokenizer.convert_ids_to_tokens(
        [files.config.boi_token_id, files.config.eoi_token_id]
    )
    text = f"\n\n{begin}{files.placeholder * files.config.mm_tokens_per_image}{end}\n\n"
    return lambda height, width: text


def _pooled_by_size(files: FamilyFiles) -> Written:
    """Gemma 4: one for each square of pooled patches, between two marks."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    begin, end = files.tokenizer.convert_ids_to_tokens(
        [files.config.boi_token_id, files.config.eoi_token_id]
    )
    made = files.processor
    pooled: int = made.pooling_kernel_size**2

    def written(height: int, width: int) -> str:
        sides = get_aspect_ratio_preserving_size(
            height,
            width,
            made.patch_size,
            made.max_soft_tokens * pooled,
            made.pooling_kernel_size,
        )
        patches = (sides[0] // made.patch_size) * (sides[1] // made.patch_size)
        return f"{begin}{files.placeholder * (patches // pooled)}{end}"

    return written


def _patches_of_internvl(config: Any) -> float:
    height, width = config.vision_config.image_size
    patch_height, patch_width = config.vision_config.patch_size
    patches = (height // patch_height) * (width // patch_width)
    return float(patches / config.image_seq_length)


def _patches_of_gemma3(config: Any) -> float:
    side = config.vision_config.image_size // config.vision_config.patch_size
    return float(side**2 / config.mm_tokens_per_image)


def _both_ways_of_gemma4(config: Any) -> BothWays:
    is_vision = config.get_text_config().use_bidirectional_attention == "vision"
    return "windows" if is_vision else "nowhere"


@dataclass(frozen=True, slots=True)
class SeeingFamily:
    """A family. `written`: how it writes pictures. `patches`: how many patches of the tower a token
    stands for, by the model's config. `asked`: what a chat template writes for a picture, which is
    replaced by that. `both_ways`: where the tokens of a picture see each other in both directions,
    by the model's config. `caps_logits`: its class puts the soft cap of its config on logits.
    """

    written: Callable[[FamilyFiles], Written]
    patches: Callable[[Any], float]
    asked: Callable[[FamilyFiles], str] = lambda files: files.placeholder
    both_ways: Callable[[Any], BothWays] = lambda config: "nowhere"
    caps_logits: bool = False


_QWEN = SeeingFamily(
    _merged_squares, patches=lambda config: float(config.vision_config.spatial_merge_size**2)
)
_IDEFICS = SeeingFamily(_tiles_in_rows, patches=lambda config: float(config.scale_factor**2))
FAMILIES: Mapping[str, SeeingFamily] = {
    "gemma3": SeeingFamily(
        _between_breaks,
        patches=_patches_of_gemma3,
        # Its template writes the mark that begins a picture, and not the placeholder.
        asked=lambda files: str(files.tokenizer.convert_ids_to_tokens(files.config.boi_token_id)),
        both_ways=lambda config: "everywhere",
    ),
    "gemma4": SeeingFamily(
        _pooled_by_size,
        patches=lambda config: float(config.vision_config.pooling_kernel_size**2),
        both_ways=_both_ways_of_gemma4,
        caps_logits=True,
    ),
    "idefics3": _IDEFICS,
    "internvl": SeeingFamily(_tiles_in_a_row, patches=_patches_of_internvl),
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
}
"""By `model_type` of their configs."""


def image_processor(folder: Path) -> Any:
    """The image processor of the model in a folder.

    Raises:
        ConfigError: the folder has none that can be read, or one that cuts crops out of pictures.
    """
    from transformers import AutoImageProcessor

    try:
        # Pillow's everywhere: torchvision would make other pixels on machines that have it.
        found = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"{folder} has no image processor that transformers can read"
            f" (preprocessor_config.json): {error}. Copy the file from the model's own folder"
        ) from error
    if getattr(found, "do_pan_and_scan", None):  # Gemma's own processor asks for none, either
        raise ConfigError(
            f"{folder}/preprocessor_config.json: do_pan_and_scan adds crops to a picture, which are"
            " not written here: write false"
        )
    return found


__all__ = [
    "FAMILIES",
    "BothWays",
    "FamilyFiles",
    "SeeingFamily",
    "Written",
    "image_processor",
]
