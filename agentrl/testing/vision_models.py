"""Makes tiny, randomly initialised models that see, in the Hugging Face format."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from agentrl.errors import ConfigError
from agentrl.models.tiny import MAX_POSITIONS, train_tokenizer

VisionFamily = Literal["qwen2_5_vl", "qwen2_vl", "qwen3_vl"]
_HIDDEN = 64
_SPECIALS = (
    *("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_TEMPLATE = (  # as that of Qwen2.5-VL, without videos
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}"
    "{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def create_tiny_vision_model(
    folder: Path,
    family: VisionFamily = "qwen2_5_vl",
    *,
    corpus: Iterable[str] = (),
    seed: int = 0,
    most_tokens: int = 64,
) -> None:
    """Write a model that sees, its tokenizer, chat template and image processor into `folder`,
    float32.

    A picture is at most `most_tokens` tokens, and each stands for 28 x 28 pixels (32 x 32 in
    qwen3_vl). The same arguments give the same files; no global random state is touched.

    Raises:
        ConfigError: `folder` is not empty, or the family is unknown.
    """
    import torch
    from transformers import (
        AutoModelForImageTextToText,
        GenerationConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if family not in get_args(VisionFamily):
        raise ConfigError(f"no family {family!r}: write one of {', '.join(get_args(VisionFamily))}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder for the model")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(corpus, _SPECIALS),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*_SPECIALS[2:]],
        chat_template=_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    config = _config(family, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
    patch = config.vision_config.patch_size
    pixels = (2 * patch) ** 2
    Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        size={"shortest_edge": pixels, "longest_edge": most_tokens * pixels},
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(family: VisionFamily, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000.0}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": _HIDDEN // 4,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope,
        "initializer_range": _HIDDEN**-0.5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": _HIDDEN, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": _HIDDEN}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    if family == "qwen3_vl":
        vision |= {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


__all__ = ["VisionFamily", "create_tiny_vision_model"]
