"""The shape of a model, from its config: parameters, what a token meets of them, and what it leaves
in memory.

The model is made on torch's meta device, where tensors have shapes and no memory. Parameters are
therefore counted, not estimated, and the same walk over its modules counts the numbers that
training keeps.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.models.layer_facts import Heads, Kept, Layer, config_of_layer
from agentrl.models.optional_fields import optional_field
from agentrl.models.tower_facts import kept_of_tower
from agentrl.models.vision import auto_class, language_model, part_of, sees

PUBLISHED = Path(__file__).parent / "published"
"""The configs of some published models, by their names on the Hugging Face hub: they are enough for
a plan.
"""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV cache of a model."""

    layers: int
    """Layers with a cache."""
    heads: Heads
    """The heads of a layer; the largest, where they differ."""
    sliding: int = 0
    """The layers that see only the last `window` tokens."""
    window: int = 0
    """Tokens that a sliding layer sees."""

    def numbers(self, context: int, devices: int, *, compact: bool) -> int:
        """Numbers that a context has on each of so many devices, at least one head of keys on each.

        `compact`: the engine keeps the latent, which each device has whole, and of sliding layers
        only the window.
        """
        heads = self.heads
        token = -(-heads.keys // devices) * (heads.key_size + heads.value_size)
        if compact and heads.latent:
            token = heads.latent
        seen = min(context, self.window) if compact else context
        return token * ((self.layers - self.sliding) * context + self.sliding * seen)

    def mean_attended(self, context: float) -> float:
        """The mean number of tokens before that a token of a context sees in a layer."""
        full, sliding = context / 2, min(context / 2, self.window)
        return ((self.layers - self.sliding) * full + self.sliding * sliding) / self.layers


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The shape of a decoder. Counts are of parameters unless stated otherwise."""

    name: str
    """The model's name, for messages."""
    parameters: int
    """All parameters; a tied weight counts once."""
    blocks: int
    """Parameters of all layers."""
    block: int
    """Parameters of the largest layer."""
    active: int
    """Parameters of the layers that a token goes through; fewer than `blocks` in a mixture of
    experts."""
    layers: int
    """The number of layers."""
    hidden: int
    """The size of the residual stream."""
    vocab: int
    """The number of tokens."""
    max_positions: int
    """Tokens of the longest context."""
    attention: int
    """FLOP that a token takes for each token before it."""
    inner: int
    """The most numbers of a token inside of an MLP."""
    linear_ends: Mapping[str, int]
    """Inputs and outputs of all linear layers that can have adapters, by the ends of their
    names."""
    kv: KvShape
    """The KV cache."""
    kept: Kept
    """The numbers of a token that autograd keeps, of all layers."""
    largest: Kept
    """Those of the layer that keeps most."""
    experts: int = 0
    """Experts of a layer in a mixture of experts, else 0."""
    chosen: int = 0
    """Experts that a token uses."""
    pieced_heads: int = 0
    """Heads of a layer whose attention has sinks or a soft cap, which fused kernels do not
    compute."""
    tied: bool = False
    """The embedding is also the output layer."""
    tower: int = 0
    """Parameters of the tower and the projector of a model that sees."""
    tower_kept: int = 0
    """The numbers that autograd keeps of them for each token of a picture, if they are trained."""
    gathered: int | None = 0
    """Numbers of a token that ranks gather in all layers, if they divide the model's matrices, and
    so have whole; None if these cannot be divided."""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and multiplications of the output head for each token."""
        return self.vocab * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts that tokens choose from."""
        if not self.experts:
            return 0
        return round((self.blocks - self.active) / (1 - self.chosen / self.experts))

    def ends_of(self, targets: Collection[str] = ()) -> int:
        """Inputs and outputs of the linear layers whose names end so; of all if none is named."""
        ends = {target.rpartition(".")[2] for target in targets} or self.linear_ends.keys()
        return sum(size for name, size in self.linear_ends.items() if name in ends)

    def read(self, tokens: float) -> float:
        """Parameters that a decoding step of so many tokens reads: of experts, those that at least
        one token chooses, if all are as likely.
        """
        if not self.experts:
            return self.parameters
        missed: float = (1 - self.chosen / self.experts) ** tokens
        return self.parameters - missed * self.expert_parameters


def model_facts(folder: Path) -> ModelFacts:
    """The shape of the model in a Hugging Face folder. Only `config.json` is read; no weights are
    allocated.

    Raises:
        ConfigError: there is no such model, or models of its kind cannot be counted here.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.name: {str(folder)!r} is no Hugging Face model folder: no config.json in it"
        )
    return facts_of(AutoConfig.from_pretrained(folder, local_files_only=True), str(folder))


def facts_of(config: Any, name: str) -> ModelFacts:
    """The shape of the model of a Hugging Face config.

    Raises:
        ConfigError: models of its kind cannot be counted here.
    """
    import torch

    from agentrl.models.tensor_plan import gathered_numbers

    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    language = language_model(model)
    beside = sees(config)
    config = config.get_text_config()
    kinds = set(model._no_split_modules or ())
    made: dict[Any, Layer] = {}  # of equal layers, only one is read
    layers: list[Layer] = []
    for module in language.modules():
        if type(module).__name__ in kinds:
            shapes = tuple(
                (name, tuple(parameter.shape)) for name, parameter in module.named_parameters()
            )
            if shapes not in made:
                made[shapes] = Layer(module, config_of_layer(config, len(layers)))
            layers.append(made[shapes])
    if not layers:
        raise ConfigError(
            f"{name}: {type(model).__name__} does not say which of its modules are layers, so its "
            "memory cannot be planned for"
        )
    experts = max(layer.experts for layer in layers)
    declared = next((getattr(config, key) for key in _EXPERTS if getattr(config, key, None)), 0)
    if declared and not experts:
        raise ConfigError(
            f"{name}: {type(model).__name__} keeps its experts in a form that is not known here, "
            "so its memory cannot be planned for"
        )
    kept = [layer.kept for layer in layers]
    heads = [Heads.of(config_of_layer(config, number)) for number in range(len(layers))]
    return ModelFacts(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=sum(layer.parameters for layer in layers),
        block=max(layer.parameters for layer in layers),
        active=sum(layer.active for layer in layers),
        layers=len(layers),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        max_positions=longest_context(config),
        attention=sum(2 * one.queries * (one.key_size + one.value_size) for one in heads),
        inner=max(layer.inner for layer in layers),
        linear_ends=sum((layer.linear_ends for layer in layers), Counter()),
        kv=_kv_shape(config, heads),
        kept=sum(kept, Kept()),
        largest=max(kept, key=lambda one: one.matrices + one.norms),
        experts=experts,
        chosen=max(layer.chosen for layer in layers),
        pieced_heads=heads[0].queries if _is_pieced(model, config) else 0,
        tied=bool(optional_field(config, "tie_word_embeddings", model.config.tie_word_embeddings)),
        tower=sum(p.numel() for name, p in model.named_parameters() if part_of(name) != "language")
        if beside
        else 0,
        tower_kept=kept_of_tower(model) if beside else 0,
        gathered=gathered_numbers(model),
    )


def longest_context(config: Any) -> int:
    """The longest context: YaRN's factor may extend that of the training beyond what the config
    states.
    """
    rope = optional_field(config, "rope_parameters") or {}
    stated = int(config.max_position_embeddings)
    if rope.get("rope_type") != "yarn":
        return stated
    return max(
        stated, int(rope["factor"] * (rope.get("original_max_position_embeddings") or stated))
    )


def _is_pieced(model: Any, config: Any) -> bool:
    """True if attention has sinks or a soft cap."""
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    return sinks or optional_field(config, "attn_logit_softcapping") is not None


def _kv_shape(config: Any, heads: Sequence[Heads]) -> KvShape:
    layers = len(heads)
    largest = max(heads, key=lambda one: one.keys * (one.key_size + one.value_size))
    window = int(optional_field(config, "sliding_window") or 0)
    kinds = optional_field(config, "layer_types")
    sliding = sum(kind == "sliding_attention" for kind in kinds) if kinds else layers
    return KvShape(layers, largest, sliding if window else 0, window)
