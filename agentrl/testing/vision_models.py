"""Makes tiny, randomly initialised models that see, in the Hugging Face format."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from agentrl.errors import ConfigError
from agentrl.models.tiny import MAX_POSITIONS, train_tokenizer

VisionFamily = Literal[
    "gemma3", "gemma4", "idefics3", "internvl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"
]
_HIDDEN = 64
_HEAD = 32
"""The smallest head that vLLM computes on CPUs."""
_WINDOWS = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 12,
}
"""Layers of both kinds before the last one, in which nothing depends on the tokens of pictures."""


@dataclass(frozen=True, slots=True)
class _Dialect:
    """A chat template with the special tokens that it and the family's processor write; the first
    two are the padding and the end of a turn. `named`: those that the processor asks the tokenizer
    for, by its names for them.
    """

    template: str
    specials: Sequence[str]
    placeholder: str
    named: Mapping[str, str] = field(default_factory=dict)


_CHATML = (  # as that of Qwen2.5-VL, without videos
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "[picture]{% elif 'text' in content %}"
    "{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = _Dialect(
    _CHATML.replace("[picture]", "<|vision_start|><|image_pad|><|vision_end|>"),
    (
        *("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    ),
    "<|image_pad|>",
)
_INTERN = _Dialect(
    _CHATML.replace("[picture]", "<IMG_CONTEXT>\n"),
    (
        *("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    ),
    "<IMG_CONTEXT>",
    {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
_IDEFICS = _Dialect(
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    (
        *("<|im_end|>", "<end_of_utterance>", "<|im_start|>"),
        *("<fake_token_around_image>", "<global-img>", "<image>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ),
    "<image>",
)
_GEMMA = _Dialect(
    "<bos>{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% else %}"
    "{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set turns = messages[1:] %}{% else %}{% set first, turns = '', messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ first if loop.first }}{% if message['content'] is string %}"
    "{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<start_of_image>"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    (
        *("<pad>", "<end_of_turn>", "<start_of_turn>", "<bos>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ),
    "<image_soft_token>",
    {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
)
_GEMMA_4 = _Dialect(
    "<bos>{% for message in messages %}"
    "<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}<|image|>"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}",
    ("<pad>", "<turn|>", "<|turn>", "<bos>", "<|image>", "<image|>", "<|image|>"),
    "<|image|>",
    {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
)
_DIALECTS: Mapping[str, _Dialect] = {
    "gemma3": _GEMMA,
    "gemma4": _GEMMA_4,
    "idefics3": _IDEFICS,
    "internvl": _INTERN,
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
}


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

    Of Qwen, a picture is at most `most_tokens` tokens, and each stands for 28 x 28 pixels (32 x 32
    in qwen3_vl); of Gemma 3, it is sixteen tokens, and of Gemma 4 up to seventy, which are more
    than a window; of the others, it is up to four tiles of 28 x 28 and the whole one, each with
    four tokens. The same arguments give the same files; no global random state is touched.

    Raises:
        ConfigError: `folder` is not empty, or the family is unknown.
    """
    import torch
    from transformers import (
        AutoModelForImageTextToText,
        GenerationConfig,
        PreTrainedTokenizerFast,
    )

    if family not in get_args(VisionFamily):
        raise ConfigError(f"no family {family!r}: write one of {', '.join(get_args(VisionFamily))}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder for the model")
    dialect = _DIALECTS[family]
    pad, end, *others = dialect.specials
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(corpus, dialect.specials),
        eos_token=end,
        pad_token=pad,
        additional_special_tokens=others,
        extra_special_tokens=dict(dialect.named),
        chat_template=dialect.template,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    config = _make_config(family, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if family == "gemma3":  # whose projector would begin with zeros
            model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=32**-0.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
    _make_image_processor(family, config, most_tokens).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_image_processor(family: VisionFamily, config: Any, most_tokens: int) -> Any:
    """The family's own image processor, for pictures of a few tokens."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    if family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    if family == "gemma4":
        return Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    if family == "internvl":
        size = {"height": 28, "width": 28}
        return GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=4)
    if family in ("idefics3", "smolvlm"):
        kind = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
        return kind(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    patch = config.vision_config.patch_size
    pixels = (2 * patch) ** 2
    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        size={"shortest_edge": pixels, "longest_edge": most_tokens * pixels},
    )


def _make_config(family: VisionFamily, tokenizer: Any) -> Any:
    """The configuration of a model of a family, with two small layers for text and for pictures."""
    from transformers import AutoConfig

    number = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1000.0}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": _HIDDEN // _HEAD,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope,
        "initializer_range": _HIDDEN**-0.5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "gemma3":
        return _gemma_3_config(text, number)
    if family == "gemma4":
        return _gemma_4_config(text, number)
    common: dict[str, Any] = {
        "tie_word_embeddings": True,
        "image_token_id": number(_DIALECTS[family].placeholder),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if _DIALECTS[family] is not _QWEN:
        return AutoConfig.for_model(family, **_tiled_settings(family, text), **common)
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
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        **common,
    )


def _gemma_3_config(text: Mapping[str, Any], number: Callable[[str], int]) -> Any:
    from transformers import Gemma3Config

    own = {"query_pre_attn_scalar": 16, "rope_parameters": None, **_WINDOWS}
    return Gemma3Config(
        text_config={**text, **own},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": 56,
            "patch_size": 7,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        image_token_index=number(_GEMMA.placeholder),
        boi_token_index=number("<start_of_image>"),
        eoi_token_index=number("<end_of_image>"),
        tie_word_embeddings=True,
        eos_token_id=text["eos_token_id"],
        pad_token_id=text["pad_token_id"],
    )


def _gemma_4_config(text: Mapping[str, Any], number: Callable[[str], int]) -> Any:
    from transformers import Gemma4Config

    own = {
        **_WINDOWS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "rope_parameters": None,
        "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": text["vocab_size"],
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 5.0,
    }
    return Gemma4Config(
        text_config={**text, **own},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 128,
            "use_clipped_linears": True,
            "standardize": True,
            "default_output_length": 70,
        },
        image_token_id=number(_GEMMA_4.placeholder),
        boi_token_id=number("<|image>"),
        eoi_token_id=number("<image|>"),
        tie_word_embeddings=True,
        eos_token_id=text["eos_token_id"],
        pad_token_id=text["pad_token_id"],
    )


def _tiled_settings(family: VisionFamily, text: Mapping[str, Any]) -> dict[str, Any]:
    """What a config of the families that divide pictures into tiles has of its own."""
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    if family == "internvl":
        return {
            "text_config": {**text, "rope_parameters": plain, "model_type": "qwen2"},
            "vision_config": {**tower, "image_size": [28, 28], "patch_size": [7, 7]},
            "image_seq_length": 4,
        }
    return {
        "text_config": {**text, "rope_parameters": plain, "model_type": "llama"},
        "vision_config": {**tower, "image_size": 28, "patch_size": 7},
        "scale_factor": 2,
    }


__all__ = ["VisionFamily", "create_tiny_vision_model"]
