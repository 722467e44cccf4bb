"""The memory that a model takes on a device, in bytes, by the settings of trainer and engine, before anything runs.

c is the bytes of a number in computations (4 in float32, 2 in bfloat16). Trainers and engines describe themselves by
the method `layout()` of their `Config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.placement.devices import DeviceKind

Precision = Literal["float32", "bfloat16", "autocast"]
"""What a trainer computes in: `autocast` keeps float32 weights and casts them for each product."""

Recompute = Literal["none", "selective", "full"]
"""Which activations a trainer computes again in the backward pass: none; all of a layer except the products of its
matrices and its attention; or all."""

USABLE = 0.95
"""Usable share of a device's memory: the rest is the driver's, or lost between blocks of the allocator."""

_SAVED = {"float32": (24, 20, 8, 16), "bfloat16": (16, 12, 6, 8), "autocast": (26, 12, 6, 8)}
"""Bytes kept for the backward pass for each token, per hidden size, query size, key size and size of the MLP: counted
from what autograd saves for a layer of transformers' Qwen3 (a test recounts it). Compare 34 bytes per hidden size of a
GPT layer: Korthikanti et al. 2022, arXiv 2205.05198, section 4."""
_SAVED_OF_HEADS = 8, 4, 8
"""The same per query head, per key head, and per layer: statistics of softmax and norms."""
LOGITS_AT_ONCE = 1 << 25
"""Logits that a trainer computes at a time (`agentrl/trainers/logprobs.py`)."""
_HEAD_BYTES = {"float32": 8.5, "bfloat16": 10.5, "autocast": 10.5}
"""Bytes for each of these at the peak. Measured from torch's allocator (a test measures it again)."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The shape of a dense decoder. `parameters` counts a tied weight once; `embedding` is one row of `hidden` for each
    of `vocab` tokens; `blocks` counts the parameters of all layers, `block` those of the largest layer.
    """

    name: str
    parameters: int
    blocks: int
    block: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    max_positions: int

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and multiplications of the output head for each token."""
        return self.vocab * self.hidden

    def kv_bytes(self, number: int) -> int:
        """Bytes of KV cache for each token, with `number` bytes for each number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * number


def model_facts(folder: Path) -> ModelFacts:
    """The shape of the model in a Hugging Face folder. Only `config.json` is read; no weights are allocated.

    Raises:
        ConfigError: there is no such model, or models of its kind cannot be counted here.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.name: {str(folder)!r} is no Hugging Face model folder: no config.json in it")
    return facts_of(AutoConfig.from_pretrained(folder, local_files_only=True), str(folder))


def facts_of(config: Any, name: str) -> ModelFacts:
    """The shape of the model of a Hugging Face config.

    Raises:
        ConfigError: models of its kind cannot be counted here.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        raise ConfigError(f"{name} is a mixture of experts; only dense models can be planned for")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kinds = set(model._no_split_modules or ())
    blocks = [_count(module) for module in model.modules() if type(module).__name__ in kinds] or [_count(model)]
    heads = config.num_attention_heads
    return ModelFacts(
        name,
        _count(model),
        sum(blocks),
        max(blocks),
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.intermediate_size,
        config.vocab_size,
        config.max_position_embeddings,
    )


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """How a trainer is laid out over its ranks.

    `shards`: what is sharded over the ranks, as in ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054): 1 the optimizer, 2
    gradients too, 3 weights too. `keeps_gathered`: weights are whole from the first pass to the last.
    `accumulates_whole`: gradients of all weights are kept whole until the last micro-batch. `offload`: gradients and
    optimizer, and sharded weights, are in the host's memory. `grows`: whether there can be several ranks. `lora_rank`:
    the rank of low-rank updates, if only those are trained. `recompute`: which activations are computed twice instead
    of kept. `activation_offload`: the inputs of layers are kept in the host's memory. `moment_bytes`: the bytes of each
    of AdamW's two moments of a parameter. `sleeps`: whether it can release its memory on a GPU.
    """

    precision: Precision
    micro_batch_tokens: int
    minibatches: int
    recompute: Recompute
    ranks: int = 1
    grows: bool = False
    shards: int = 0
    keeps_gathered: bool = False
    accumulates_whole: bool = False
    offload: bool = False
    lora_rank: int = 0
    activation_offload: bool = False
    moment_bytes: int = 4
    sleeps: bool = True

    @property
    def number(self) -> int:
        """Bytes of a number in computations."""
        return 4 if self.precision == "float32" else 2


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How an engine is laid out over its devices.

    `number`: bytes of each weight and each number of the KV cache. `fraction`: share of a device that it takes
    regardless of need, or None if it takes what it needs. `kv_bytes`: the size of its cache, if set. `splits`: over how
    many devices a copy may be spread. `here`: false if another machine runs the engine. `sleeps`: as for a trainer.
    """

    number: int = 4
    max_batch: int = 128
    max_context: int | None = None
    tensor_parallel: int = 1
    splits: tuple[int, ...] = (1,)
    fraction: float | None = None
    kv_bytes: int | None = None
    kv_bytes_on_cpu: int | None = None
    prefill_tokens: int = 4096
    here: bool = True
    sleeps: bool = True


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device, by use; and bytes in its host's memory."""

    parts: Mapping[str, int] = field(default_factory=dict)
    host: int = 0

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self.parts.values())


def trainer_footprint(
    facts: ModelFacts, layout: TrainerLayout, ranks: int, micro_batches: float = 1, longest: int = 0
) -> Footprint:
    """The peak memory of one rank of `ranks` while it trains on episodes of at most `longest` tokens.

    Weights and gradients are float32: 4 + 4 bytes for each trained parameter, and `moment_bytes` for each of AdamW's
    two moments; each is divided by the ranks if it is sharded.
    """
    trained = _trained(facts, layout)
    part = {stage: ranks if layout.shards >= stage else 1 for stage in (1, 2, 3)}
    whole = layout.accumulates_whole and micro_batches > 1 and ranks > 1
    weights, gradients = 4 * facts.parameters // part[3], 4 * trained // part[2]
    optimizer = 2 * layout.moment_bytes * trained // part[1]
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": _gathered(facts, layout) + (4 * trained if whole else 0),
        "activations": activation_bytes(facts, layout, max(layout.micro_batch_tokens, longest)),
        "logits": int(_HEAD_BYTES[layout.precision] * min(LOGITS_AT_ONCE, layout.micro_batch_tokens * facts.vocab)),
    }
    if not layout.offload:
        return Footprint(parts)
    away = {"gradients", "optimizer", *(["weights"] if layout.shards == 3 else [])}
    kept = {name: size for name, size in parts.items() if name not in away}
    return Footprint(kept, sum(parts[name] for name in away))


def _trained(facts: ModelFacts, layout: TrainerLayout) -> int:
    """Parameters with a gradient. Low-rank updates of all linear layers of a block have r (inputs + outputs) each."""
    if not layout.lora_rank:
        return facts.parameters
    query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    attention = 2 * (facts.hidden + query) + 2 * (facts.hidden + key)
    return layout.lora_rank * facts.layers * (attention + 3 * (facts.hidden + facts.mlp))


def _gathered(facts: ModelFacts, layout: TrainerLayout) -> int:
    """Weights for the products, besides those that a rank holds: casts and, if weights are sharded, the weights of two
    blocks (one in use, the next on its way) and of the parts outside blocks, with a block's gradient.
    """
    casts = 2 * facts.parameters if layout.precision == "autocast" else 0  # torch keeps them for the backward pass
    if layout.shards < 3:
        return casts
    outside = facts.parameters - facts.blocks
    gathered = facts.parameters if layout.keeps_gathered else min(facts.parameters, 2 * facts.block + outside)
    gradient = min(facts.parameters, facts.block + outside)
    number = 4 if casts else layout.number
    return casts + number * (gathered + gradient)


def activation_bytes(facts: ModelFacts, layout: TrainerLayout, tokens: int) -> int:
    """Bytes that a micro-batch of so many tokens keeps for the backward pass: linear in the sizes (`_SAVED`).

    With full recomputation, only the input of each layer is kept, plus everything of one layer at a time.
    """
    hidden, query, key, mlp = _SAVED[layout.precision]
    heads, kv_heads, norms = _SAVED_OF_HEADS
    token = (
        hidden * facts.hidden
        + (query * facts.head_dim + heads) * facts.heads
        + (key * facts.head_dim + kv_heads) * facts.kv_heads
        + mlp * facts.mlp
        + norms
    )
    if layout.recompute != "full":
        return facts.layers * token * tokens
    kept = 4 if layout.precision == "autocast" else layout.number
    return (facts.layers * kept * facts.hidden + token) * tokens


def engine_footprint(
    facts: ModelFacts, layout: EngineLayout, devices: int, kind: DeviceKind, episode_tokens: int
) -> Footprint:
    """The memory of one replica on each of its `devices` when its cache is full.

    An engine that takes a `fraction` fills it with cache; one that takes what it needs has a cache of `max_batch`
    contexts of `episode_tokens`.
    """
    weights = layout.number * facts.parameters // devices
    # The MLP's two inner values in a prefill, and the logits of a batch, which exist as computed and in float32.
    workspace = 2 * layout.number * layout.prefill_tokens * facts.mlp // devices
    workspace += (layout.number + 4) * layout.max_batch * facts.vocab
    token = kv_bytes_per_token(facts, layout, devices)
    given = layout.kv_bytes or (None if kind.is_gpu else layout.kv_bytes_on_cpu)
    if given is not None:
        cache = given
    elif layout.fraction is not None and kind.is_gpu:
        cache = max(0, int(layout.fraction * kind.memory) - weights - workspace)
    else:
        cache = layout.max_batch * episode_tokens * token
    return Footprint({"weights": weights, "kv cache": cache, "workspace": workspace})


def kv_bytes_per_token(facts: ModelFacts, layout: EngineLayout, devices: int) -> int:
    """Bytes of cache for each token on each device: key heads are split over the devices, at least one for each."""
    heads = -(-facts.kv_heads // devices)
    return facts.kv_bytes(layout.number) // facts.kv_heads * heads
