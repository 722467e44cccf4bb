"""A check that a transformers model computes the same with another attention than its own.

`engine=local` and the trainers compute many sequences at once, through transformers' attention
interface. Not all models use it for all that mixes tokens: biases by distance, recurrent layers,
windows that only a mask has. Such a model would run, and its logprobs would be wrong. So some are
refused by their configs and classes, and each that is loaded is compared with itself: short
sequences computed together, and each alone with transformers' own attention.

Dimension suffixes: T tokens of a sequence, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.models.optional_fields import optional_field
from agentrl.models.vision import auto_class, check_family

if TYPE_CHECKING:
    import torch

KINDS = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers that do not mix sequences which are computed together."""
LENGTHS = (5, 7)
"""Of the sequences that are compared."""
_ALTERNATIVE = "or train a model of another family"
Windows = list[int | None]
"""The sliding window that each call of attention was given."""
States = Callable[[Sequence["torch.Tensor"], Windows], Sequence["torch.Tensor"]]
"""The last hidden states (T, H) of sequences (T) that are computed together."""


def check_kind(config: Any, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a model that is known not to be computable with another attention, by its config and
    its class.

    Raises:
        ConfigError: it is not a decoder alone, has layers of other kinds, does not use the
        attention interface, or sees pictures in a way that is not known here.
    """
    check_family(config)
    text, model_class = config.get_text_config(), _model_class(config, folder, trust_remote_code)
    name = model_class.__name__
    if optional_field(text, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name} is one half of an encoder and a decoder, which are not trained here: take a"
            " decoder"
        )
    if others := set(optional_field(text, "layer_types") or ()) - KINDS:
        raise ConfigError(
            f"{name} has layers of the kinds {', '.join(sorted(others))}, which would mix sequences"
            f" that are computed together; {' and '.join(sorted(KINDS))} are supported: evaluate it"
            f" with engine=vllm, {_ALTERNATIVE}"
        )
    if model_class._is_stateful:
        raise ConfigError(
            f"{name} has recurrent layers, which would mix sequences that are computed together:"
            f" evaluate it with engine=vllm, {_ALTERNATIVE}"
        )
    if not model_class._can_set_attn_implementation():
        raise ConfigError(
            f"{name} computes attention by itself, and not through transformers' attention"
            " interface, so sequences that are computed together would mix: evaluate it with"
            f" engine=vllm, {_ALTERNATIVE}"
        )


def _model_class(config: Any, folder: Path, trust_remote_code: bool) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    written = optional_field(config, "auto_map", {}).get("AutoModelForCausalLM")
    if written and trust_remote_code:
        try:
            return get_class_from_dynamic_module(written, folder, local_files_only=True)
        except (OSError, ImportError, AttributeError) as error:
            raise ConfigError(
                f"{folder}: the model's own code ({written}) cannot be loaded: {error}"
            ) from error
    known = auto_class(config)._model_mapping[type(config)]
    return known[0] if isinstance(known, tuple) else known


def rotations(config: Any) -> Sequence[Mapping[str, Any]]:
    """The rotations of the model's positions: of all layers, or of those of each kind."""
    given = optional_field(config.get_text_config(), "rope_parameters") or {}
    return [one for one in given.values() if isinstance(one, Mapping)] or [given]


def context_limit(config: Any) -> int | None:
    """The tokens from which on transformers changes the rotation of all positions of a call, where
    it does that at all.

    With `longrope` (Phi-3.5, Phi-4-mini) and `dynamic`, one long sequence would change the results
    of the shorter ones that are computed with it, and of its own tokens so far. vLLM changes the
    rotation by its limit of tokens instead.
    """
    text, limits = config.get_text_config(), []
    for rope in rotations(config):
        if rope.get("rope_type") == "longrope":
            limits.append(
                int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
            )
        elif rope.get("rope_type") == "dynamic":
            limits.append(int(text.max_position_embeddings))
    return min(limits, default=None)


def check_context(config: Any, tokens: int, setting: str) -> None:
    """Refuse sequences of so many tokens that their positions would be rotated in another way.

    Raises:
        ConfigError: they are longer than `context_limit`.
    """
    limit = context_limit(config)
    if limit is not None and tokens > limit:
        raise ConfigError(
            f"{setting}: the model rotates positions in another way if a sequence has more than"
            f" {limit} tokens (rope_parameters in its config.json), and also those of shorter"
            f" sequences that are computed with it; only {limit} tokens are exact: write"
            f" engine.max_context={limit}"
        )


def not_handed_on(attention: Any) -> ConfigError:
    """For a model whose layers call attention without the model's own arguments."""
    return ConfigError(
        f"{type(attention).__name__} of transformers does not hand on the arguments of the model's"
        " call to attention, which would know no borders between sequences: evaluate the model"
        f" with engine=vllm, {_ALTERNATIVE}"
    )


def check_attention(model: Any, together: States) -> None:
    """Compare the last hidden states of sequences that are computed `together` with those of each
    alone.

    Raises:
        ConfigError: they differ, or the model does not ask for the sliding windows that its config
        has.
    """
    import torch

    name, vocab = type(model).__name__, model.config.get_text_config().vocab_size
    rows_T = [
        (torch.arange(length, device=model.device) * 3 + length) % vocab for length in LENGTHS
    ]
    windows: Windows = []
    with torch.no_grad():
        found = together(rows_T, windows)
        with _eager_attention(model.config.get_text_config()):
            alone = [
                model.base_model(input_ids=row_T[None], use_cache=False).last_hidden_state[0]
                for row_T in rows_T
            ]
    for found_TH, alone_TH in zip(found, alone, strict=True):
        difference = float((found_TH.float() - alone_TH.float()).norm() / alone_TH.float().norm())
        # Wide in bfloat16, which rounds otherwise in other batches. (Not `>=`: NaN is refused.)
        if not difference < (1e-3 if alone_TH.dtype == torch.float32 else 0.2):
            raise ConfigError(
                f"{name} computes other hidden states for sequences that are computed together than"
                f" for each alone (they differ by {difference:.2g} of their size), so its logprobs"
                " would be wrong: its positions, biases or layers know no borders between"
                f" sequences. Evaluate it with engine=vllm, {_ALTERNATIVE}"
            )
    _check_windows(model.config.get_text_config(), windows, name)


def _check_windows(config: Any, windows: Windows, name: str) -> None:
    """Refuse a model whose sliding window is in its mask alone, which another attention does not
    get.
    """
    window, kinds = optional_field(config, "sliding_window"), optional_field(config, "layer_types")
    if not window or window >= config.max_position_embeddings:
        return
    expected = sum(kind == "sliding_attention" for kind in kinds) if kinds else len(windows)
    if sum(one is not None for one in windows) < expected:
        raise ConfigError(
            f"{name} has a sliding window of {window} tokens (sliding_window in its config.json),"
            " of which only its mask knows, so its logprobs would be wrong for longer sequences."
            " For shorter ones, write null there"
        )


@contextmanager
def _eager_attention(config: Any) -> "Iterator[None]":
    ours = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = ours


__all__ = [
    "KINDS",
    "States",
    "Windows",
    "check_attention",
    "check_context",
    "check_kind",
    "context_limit",
    "not_handed_on",
    "rotations",
]
