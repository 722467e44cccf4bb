"""Random tiny models of each family's own class in transformers, with its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from agentrl.envs.base import ToolEnv
from agentrl.settings.base import Settings
from agentrl.trajectory import Score, Trajectory
from tests.chat_templates import byte_tokenizer, templates

TABLE = Path(__file__).parent.parent / "docs" / "model-families.md"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # As published, because vLLM for CPUs computes with no others:
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
}
KEYS_OF_OTHERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
}
"""Layers that attend to the keys of earlier ones, and have embeddings of their own."""
ROUTED = {"n_routed_experts": 4, "first_k_dense_replace": 1}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "rope_theta": 1.5e5,
    "original_max_position_embeddings": 64,
}
"""As gpt-oss has it. vLLM serves it with no other."""


def _plain_template(turn: str, opening: str) -> str:
    """A template that writes `turn` for each message and `opening` before an answer; both are Jinja
    expressions.
    """
    turns = "{%- for message in messages %}{{- " + turn + " }}{%- endfor %}"
    return turns + "{%- if add_generation_prompt %}{{- " + opening + " }}{%- endif %}"


_MISTRAL = (
    "{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST] ' + message.content"
    " + '[/INST]' }}{%- else %}{{- ' ' + message.content + '</s>' }}{%- endif %}{%- endfor %}"
)
_GRANITE = _plain_template(
    "'<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content +"
    " '<|end_of_text|>\\n'",
    "'<|start_of_role|>assistant<|end_of_role|>'",
)
_CHATML = _plain_template(
    "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n'",
    "'<|im_start|>assistant\\n'",
)
_OLMO = _plain_template(
    "'<|' + message.role + '|>\\n' + message.content + ('<|endoftext|>' if message.role =="
    " 'assistant' else '\\n')",
    "'<|assistant|>\\n'",
)
_EXAONE = _plain_template(
    "'[|' + message.role + '|]\n' + message.content + ('[|endofturn|]\n' if message.role != 'user'"
    " else '\n')",
    "'[|assistant|]\n'",
)
"""Plain templates in the format of families of which none is at hand: they know no tools."""


@dataclass(frozen=True)
class Family:
    """A family's class in transformers, by its config; what distinguishes its models; and its
    template.
    """

    config: str
    template: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapters: bool = True
    """Whether its layers can have them."""

    @property
    def plain(self) -> bool:
        """Whether the template is one of those above."""
        return self.template not in templates()

    @property
    def mixture(self) -> bool:
        """Whether its models are mixtures of experts."""
        return "num_experts_per_tok" in self.settings


FAMILIES: Mapping[str, Family] = {
    "Llama 3": Family(
        "LlamaConfig", "llama3_1", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    ),
    "Qwen2.5": Family("Qwen2Config", "qwen2_5", {"tie_word_embeddings": True}),
    "Qwen3": Family("Qwen3Config", "qwen3", {"tie_word_embeddings": True}),
    "Qwen3-MoE": Family(
        "Qwen3MoeConfig", "qwen3", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}
    ),
    "Mistral": Family("MistralConfig", _MISTRAL, {"sliding_window": 48}),
    "Gemma 2": Family("Gemma2Config", "gemma", {**WINDOWS, "tie_word_embeddings": True}),
    "Gemma 3": Family("Gemma3TextConfig", "gemma3", {**WINDOWS, "tie_word_embeddings": True}),
    "Phi-3, Phi-4": Family("Phi3Config", "phi3_5", {"sliding_window": 48}),
    "gpt-oss": Family(
        "GptOssConfig",
        "gptoss",
        {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        "deepseekv3",
        {
            **EXPERTS,
            **ROUTED,
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": 2,
            # read by vLLM; transformers knows no others
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "GLM-4 MoE": Family(
        "Glm4MoeConfig",
        "glm4moe",
        {**EXPERTS, **ROUTED, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    ),
    "Granite": Family(
        "GraniteConfig", _GRANITE, {"logits_scaling": 4.0, "embedding_multiplier": 2.0}
    ),
    "SmolLM3": Family(
        "SmolLM3Config", _CHATML, {"no_rope_layers": [1, 0], "tie_word_embeddings": True}
    ),
    "OLMo 2": Family("Olmo2Config", _OLMO),
    "OLMo 3": Family("Olmo3Config", _CHATML, WINDOWS),
    "OLMoE": Family("OlmoeConfig", _OLMO, {**EXPERTS, "num_experts": 4}),
    "Mixtral": Family(
        "MixtralConfig", _MISTRAL, {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Ministral 3": Family(
        "Ministral3Config", _MISTRAL, {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}
    ),
    "Qwen2-MoE": Family(
        "Qwen2MoeConfig",
        "qwen2_5",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "Command R": Family(
        "CohereConfig", "cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}
    ),
    "Command R7B, A": Family(
        "Cohere2Config", "cohere2", {**WINDOWS, "logit_scale": 0.25, "tie_word_embeddings": True}
    ),
    "Gemma 3n": Family(
        "Gemma3nTextConfig",
        "gemma3",
        {
            **WINDOWS,
            **KEYS_OF_OTHERS,
            "tie_word_embeddings": True,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "laurel_rank": 8,
            "intermediate_size": [96] * 4,
        },
    ),
    "Gemma 4": Family(
        "Gemma4TextConfig",
        "gemma4",
        {**WINDOWS, **KEYS_OF_OTHERS, "tie_word_embeddings": True, "global_head_dim": 32},
    ),
    "GLM-4": Family("Glm4Config", "glm4moe"),
    "EXAONE 4": Family("Exaone4Config", _EXAONE, WINDOWS),
    "Seed-OSS": Family("SeedOssConfig", _CHATML),
    "ERNIE 4.5": Family("Ernie4_5Config", _CHATML, {"tie_word_embeddings": True}),
    "ERNIE 4.5 MoE": Family(
        "Ernie4_5_MoeConfig",
        _CHATML,
        {
            **EXPERTS,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "Hunyuan": Family("HunYuanDenseV1Config", _CHATML, {"tie_word_embeddings": True}),
    "MiniMax-M2": Family(
        "MiniMaxM2Config",
        _CHATML,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16},
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2Config",
        "deepseekv3",
        {
            **EXPERTS,
            **ROUTED,
            **LATENT,
            "num_key_value_heads": 2,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
    "dots.llm1": Family(
        "Dots1Config",
        _CHATML,
        {**EXPERTS, **ROUTED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "Granite MoE": Family(
        "GraniteMoeConfig",
        _GRANITE,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    ),
    "Apertus": Family(
        "ApertusConfig", _CHATML, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    ),
    "StarCoder2": Family("Starcoder2Config", _CHATML, {"sliding_window": 48}),
    "Phi-1, Phi-2": Family("PhiConfig", _CHATML, {"partial_rotary_factor": 0.5}),
    "GPT-2": Family(
        "GPT2Config",
        _CHATML,
        {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 4096, "tie_word_embeddings": True},
        adapters=False,
    ),
    "GPT-NeoX": Family("GPTNeoXConfig", _CHATML),
    "OPT": Family("OPTConfig", _CHATML, {"ffn_dim": 96, "word_embed_proj_dim": 32, "dropout": 0.0}),
}
"""The families of the table in the docs."""


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's special tokens and its template."""
    return byte_tokenizer(family.template if family.plain else templates()[family.template])


def make_model(name: str, folder: Path) -> None:
    """Write a random model of the family: its weights, as they are published, its tokenizer and its
    template.
    """
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "bos_token_id": None}
    settings = {"vocab_size": len(tokenizer), **SMALL, **family.settings, **ends}
    if "hidden_size_per_layer_input" in settings:
        settings["vocab_size_per_layer_input"] = len(tokenizer)
    config = getattr(transformers, family.config)(**settings)
    save_random(config, folder, eos_token_id=[tokenizer.eos_token_id, len(tokenizer) - 1])
    tokenizer.save_pretrained(folder)


def save_random(config: Any, folder: Path, **generation: Any) -> None:
    """Write random weights for a config: of biases, norms and sinks too."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model.generation_config.update(**generation)
    model.save_pretrained(folder)


class Parrot(ToolEnv):
    """Asks for a word, in few tokens. It is never satisfied."""

    system_prompt = "Use the tool."
    isolation = "inline"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        return "Say it."

    def say(self, word: str) -> str:
        """Say a word."""
        return f"You said {word}."


class EvenLetters:
    """A reward that a random model's answers differ in: the share of even tokens."""

    class Config(Settings):
        """It has none."""

    def __init__(self, config: Config) -> None:
        pass

    async def score(self, trajectory: Trajectory) -> Score:
        tokens = [int(token) for turn in trajectory.turns for token in turn.completion.token_ids]
        return Score(sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)))


def row_of(name: str) -> list[str]:
    """What the docs' table says of a family: trains, extends, tools, reasoning, LoRA, vLLM."""
    rows = (
        line.strip("| \n").split(" | ")
        for line in TABLE.read_text().splitlines()
        if line.startswith("| ")
    )
    return next(cells[1:] for cells in rows if cells[0] == name)
