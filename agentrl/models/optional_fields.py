"""Fields that only some models have in their config."""

from typing import Any, Literal

OptionalField = Literal[
    "attn_logit_softcapping",
    "auto_map",
    "final_logit_softcapping",
    "head_dim",
    "hidden_size_per_layer_input",
    "image_token_id",
    "is_encoder_decoder",
    "kv_lora_rank",
    "layer_types",
    "llama_4_scaling",
    "logit_scale",
    "logits_scaling",
    "max_position_embeddings",
    "num_experts_per_tok",
    "num_key_value_heads",
    "output_router_logits",
    "quantization_config",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
]
"""The names that are asked for: a type checker refuses a mistyped one."""


def optional_field(config: Any, name: OptionalField, default: Any = None) -> Any:
    """A field of a transformers config; `default` if the config's class has none."""
    return getattr(config, name, default)
