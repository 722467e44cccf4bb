"""Pictures in the requests of `engine=vllm`.

vLLM gets the tokens as they are, with their placeholders, and beside them the pixel values that
the trainer computes, too: its own processors, which would make other tokens or pixels, make nothing
of a request. They only say in which form a family's model takes its tensors.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.conversation.eyes import Eyes
from agentrl.errors import EngineError
from agentrl.models.vision import picture_inputs
from agentrl.models.vision_families import FAMILIES, image_processor
from agentrl.protocols import GenerateRequest
from agentrl.tokens.encoded_image import EncodedImage

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.inputs.engine import MultiModalInput
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.engine.async_llm import AsyncLLM

_ALONE = ("idefics3", "smolvlm")
"""The families that vLLM computes without torchvision."""
_TILED = {"idefics3": "num_patches", "smolvlm": "num_patches", "internvl": "image_num_patches"}
"""vLLM's name of the number of tiles of a picture."""
_BYTES = 1 << 28
"""Pixel values that are kept for the next turns of their episodes."""


def why_blind(config: Any, arguments: Mapping[str, Any], *, on_cpu: bool) -> str:
    """Why a vLLM with these arguments (`engine.args`) reads no pictures with a model that sees;
    empty if it does.
    """
    limits = arguments.get("limit_mm_per_prompt") or {}
    if arguments.get("language_model_only") or not limits.get("image", 1):
        return (
            "engine.args (language_model_only, limit_mm_per_prompt) lets vLLM read text alone:"
            " leave it out"
        )
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"the family {config.model_type} is not known: take {', '.join(FAMILIES)}"
    if on_cpu and family.both_ways(config) != "nowhere":
        return (
            f"pictures of {config.model_type} are seen in both directions, which vLLM for CPUs does"
            " not compute: use engine=local"
        )
    return why_not_started(config.model_type)


def why_not_started(family: str) -> str:
    """Why vLLM cannot start a model of a family that sees in this environment; empty if it can."""
    if family not in FAMILIES or family in _ALONE or find_spec("torchvision") is not None:
        return ""
    return (
        f"vLLM's code for the family {family} imports torchvision, which is not installed: install"
        " the build that fits your torch (pip install torchvision; for CPUs with --index-url"
        f" https://download.pytorch.org/whl/cpu), take a model of {' or '.join(_ALONE)}, or use"
        " engine=local"
    )


def picture_arguments(*, shown: bool, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for a model that sees: if it is `shown` pictures, or reads text alone."""
    if not shown:
        return {"language_model_only": True}
    return {
        # Its dummy inputs of other kinds would be larger than any picture.
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        # The room for the KV cache of a CPU is a setting, so that nothing is to be measured.
        "skip_mm_profiling": on_cpu,
        # The pixel values that it gets are normalised.
        "mm_device_do_normalize": False,
        # Each request brings its pixel values, whatever vLLM was sent before.
        "mm_processor_cache_gb": 0,
    }


def picture_overrides(config: Any) -> dict[str, Any]:
    """Overrides for the config of a model that is shown pictures, as vLLM needs it.

    SmolVLM is computed as Idefics 3, whose class vLLM's own inherits everything from: its processor
    would need packages for videos. Axes of positions are interleaved in any Qwen3-VL, and in vLLM
    if the config says so.
    """
    if config.model_type == "smolvlm":
        return {"architectures": ["Idefics3ForConditionalGeneration"]}
    if config.model_type == "qwen3_vl":
        rope = {**config.get_text_config().rope_parameters, "mrope_interleaved": True}
        return {"text_config": {"rope_parameters": rope}}
    return {}


def widen_encoder_budget(config: Any) -> None:
    """Let one step compute the pictures of all prompts that it computes. `config`: vLLM's.

    On CPUs vLLM dies when it cuts the prompt of a request with a seed (`VllmStart`), and it cuts
    one before a picture that exceeds the tokens of a step, which are counted for each picture as
    a whole, also if the prefix cache has a part of it. Each of `max_num_seqs` requests may begin
    inside of one.
    """
    scheduler = config.scheduler_config
    longest = config.model_config.max_model_len
    room = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * longest
    scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = room


class VllmPictures:
    """Makes vLLM's prompts of requests with pictures."""

    def __init__(self, llm: "AsyncLLM", folder: Path) -> None:
        self._config = llm.model_config.hf_config
        self._fields = llm.renderer.get_mm_processor()
        self._processor = image_processor(folder)
        eyes = Eyes.of_model(folder, llm.renderer.get_tokenizer())
        assert eyes is not None
        self._eyes = eyes
        self._made: OrderedDict[str, MultiModalKwargsItem] = OrderedDict()
        self._bytes = 0

    async def prepare(self, request: GenerateRequest) -> dict[str, "MultiModalKwargsItem"]:
        """The tensors of a request's pictures by their digests, computed in a thread."""
        found = {
            placed.image.digest: self._made.get(placed.image.digest) for placed in request.images
        }
        new = [placed.image for placed in request.images if found[placed.image.digest] is None]
        if new:
            computed = await asyncio.to_thread(
                lambda: {image.digest: self._compute_item(image) for image in new}
            )
            self._remember(computed)
            found |= computed
        return {digest: item for digest, item in found.items() if item is not None}

    def prompt(
        self, request: GenerateRequest, items: Mapping[str, "MultiModalKwargsItem"], salt: str
    ) -> "MultiModalInput":
        """A request's prompt. Pictures are known to vLLM's caches by `salt` and digest.

        Raises:
            EngineError: a picture is another number of tokens than the model makes of it, which
                would end vLLM.
        """
        import torch
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids, ranges = torch.from_numpy(request.prompt_ids.copy()), []
        for placed in request.images:
            shows = ids[placed.start : placed.stop] == self._config.image_token_id
            found, expected = int(shows.sum()), self._eyes.placeholders(placed.image)
            if found != expected:
                raise EngineError(
                    f"the picture at token {placed.start} of {request.id} has {found} placeholders,"
                    f" and the model makes {expected} rows of features of it: render it with the"
                    " model's own renderer"
                )
            ranges.append(PlaceholderRange(placed.start, placed.tokens, shows))
        digests = [placed.image.digest for placed in request.images]
        return mm_input(
            request.prompt_ids.tolist(),
            MultiModalKwargsItems({"image": [items[digest] for digest in digests]}),
            {"image": [f"{salt}-{digest}" for digest in digests]},
            {"image": ranges},
            cache_salt=salt,
        )

    def _compute_item(self, image: EncodedImage) -> "MultiModalKwargsItem":
        """A picture's tensors, in the form that vLLM's model takes."""
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        inputs = BatchFeature(
            self._with_vllm_names(picture_inputs(self._processor, [image]).tensors)
        )
        fields = self._fields._get_mm_fields_config(inputs, {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
        return item

    def _with_vllm_names(self, tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
        """Tensors by vLLM's names, with the number of tiles in families that divide pictures."""
        import torch

        family = self._config.model_type
        named = dict(tensors)
        if family == "gemma4":
            named["pixel_position_ids"] = named.pop("image_position_ids")
        if named["pixel_values"].ndim == 5:  # of Idefics, by context and tile
            named = {name: tensor[0] for name, tensor in named.items()}
        if family == "gemma3" or family in _TILED:
            name = _TILED.get(family, "num_patches")
            named[name] = torch.tensor([len(named["pixel_values"])])
        if family == "internvl":
            named["image_token_id"] = torch.tensor(self._config.image_token_id)
        return named

    def _remember(self, computed: Mapping[str, "MultiModalKwargsItem"]) -> None:
        for digest, item in computed.items():
            if digest not in self._made:
                self._bytes += _bytes_of(item)
            self._made[digest] = item
        while self._bytes > _BYTES:
            _, dropped = self._made.popitem(last=False)
            self._bytes -= _bytes_of(dropped)


def _bytes_of(item: "MultiModalKwargsItem") -> int:
    return sum(int(tensor.nbytes) for tensor in item.get_data().values())


__all__ = [
    "VllmPictures",
    "picture_arguments",
    "picture_overrides",
    "why_blind",
    "why_not_started",
    "widen_encoder_budget",
]
