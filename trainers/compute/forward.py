"""Runs packed samples through a Hugging Face model, for the logprobs or the values of the loss
tokens only.

Dimension suffixes: S tokens of the micro-batch, end to end; N loss tokens among these; T tokens of
its samples, of which several may be the same one of S; P tokens before loss tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError, TrainingError
from agentrl.models.attention_check import Windows
from agentrl.models.optional_fields import optional_field
from agentrl.models.routing import TokenRouting, choices_are_taken, without_router_logits
from agentrl.models.vision import language_model
from agentrl.tokens.arrays import FloatArray, ints
from agentrl.tokens.expert_choices import UNKNOWN, read_choices
from agentrl.trainers.compute.attention import Segments
from agentrl.trainers.compute.context import ContextGroup, ContextSlice, OwnTokens
from agentrl.trainers.compute.logprobs import Scaling, linear_logprobs
from agentrl.trainers.compute.pictures import PictureReader, Pictures
from agentrl.trainers.compute.tensor import TensorGroup, VocabularyPart
from agentrl.trainers.compute.whole_pictures import PictureSpans
from agentrl.trainers.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class DeviceMicroBatch:
    """The samples of a micro-batch as tensors on the device, end to end in one sequence, with
    shared prefixes once.

    `positions_S` restart at 0 with each sample, and attention stays inside of it (`segments`).
    `predictors_N`: for each loss token, the place of the token before it. `samples_N`: the number
    of its sample in the batch. `support_NS`: for each loss token, the ids that it was sampled from,
    filled up with -1. A row of -1 is the whole vocabulary; `None` means that for all. `needed_P`:
    the tokens whose last hidden states are used; `None` for all. `routing`: the experts that
    engines chose for them, if they are asked for and some are known. `times_S`: of how many tokens
    of samples with loss tokens each one is the only copy, where the balance of experts is asked
    for; the last layer then computes all tokens. `pictures`: those among the tokens. `axes_3S`: the
    positions by time, height and width of a family that has them, where there are pictures.

    If the tokens are cut over several ranks, those of `tokens_S`, `positions_S`, `needed_P`,
    `routing` and `times_S` are this rank's slice, and `predictors_N`, `targets_N` and `support_NS`
    are of the loss tokens that it predicts, its `own`.
    """

    tokens_S: Tensor
    positions_S: Tensor
    segments: Segments
    predictors_N: Tensor
    targets_N: Tensor
    rollout_logprobs_N: Tensor
    reference_logprobs_N: Tensor
    advantages_N: Tensor
    samples_N: Tensor
    weights_N: Tensor
    support_NS: Tensor | None
    needed_P: Tensor | None = None
    routing: TokenRouting | None = None
    times_S: Tensor | None = None
    own: OwnTokens | None = None
    pictures: Pictures | None = None
    axes_3S: Tensor | None = None

    @property
    def position_ids(self) -> Tensor:
        """The positions of the tokens in the form of the model's call: (1, S), or (4, 1, S) with
        three axes after those that tell samples apart.
        """
        if self.axes_3S is None:
            return self.positions_S[None]
        return torch.cat([self.positions_S[None], self.axes_3S])[:, None]


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """Which of a model's layers have experts, by their numbers, of how many layers; and whether
    they take the engine's choices (`trainer.routing`).
    """

    numbers: tuple[int, ...]
    layers: int
    replays: bool

    def of(self, micro_batch: MicroBatch) -> npt.NDArray[np.int16] | None:
        """The experts that engines chose for the tokens that are computed, shape (S, L, K); None if
        none are known.

        Raises:
            TrainingError: they are of another model.
        """
        samples, shared = micro_batch.samples, micro_batch.shared
        try:
            chosen_TLK = read_choices(samples.experts_M.tolist(), samples.lengths_M.tolist())
        except ValueError as error:
            raise TrainingError(str(error)) from error
        if chosen_TLK is None:
            return None
        if chosen_TLK.shape[1] == self.layers:  # vLLM reports all layers, those without experts too
            chosen_TLK = chosen_TLK[:, list(self.numbers)]
        if chosen_TLK.shape[1] != len(self.numbers):
            raise TrainingError(
                f"the engine reports the experts of {chosen_TLK.shape[1]} layers, and the trainer's"
                f" model has experts in {len(self.numbers)} of {self.layers}: they are different"
                " models, or write trainer.routing=off"
            )
        if shared is None:
            return chosen_TLK
        # Of tokens that are computed once, the first one whose experts are known counts.
        known_T, known_L = (found[::-1] for found in (chosen_TLK != UNKNOWN).any(2).nonzero())
        chosen_SLK = np.full((len(shared.computed_S), *chosen_TLK.shape[1:]), UNKNOWN, np.int16)
        chosen_SLK[shared.places_T[known_T], known_L] = chosen_TLK[known_T, known_L]
        return chosen_SLK


def to_device(
    micro_batch: MicroBatch,
    device: torch.device,
    *,
    balance: bool = False,
    context: ContextGroup | None = None,
    routed: RoutedLayers | None = None,
    reader: PictureReader | None = None,
) -> DeviceMicroBatch:
    """Move a micro-batch to a device. `balance`: the experts' balance is wanted (`times_S`).
    `context`: the ranks over which its tokens are cut. `routed`: the engine's choices of experts
    are wanted (`routing`). `reader`: reads its pictures.
    """

    def move(array: Any) -> Tensor:
        # A copy; torch indexes with int64.
        wide = array.astype(np.int64 if array.dtype == np.int32 else array.dtype)
        return torch.from_numpy(wide).to(device, non_blocking=True)

    samples, lengths_M, shared = (
        micro_batch.samples,
        micro_batch.samples.lengths_M,
        micro_batch.shared,
    )
    starts_M = np.cumsum(lengths_M) - lengths_M
    positions_T = np.arange(len(samples.tokens_S)) - np.repeat(starts_M, lengths_M)
    before_N = samples.loss_mask_S.nonzero()[0] - 1
    predictors_N = before_N if shared is None else shared.places_T[before_N]
    needed_P = None if balance else ints(np.unique(predictors_N))
    computed = slice(None) if shared is None else shared.computed_S
    part = None if context is None else ContextSlice(context, micro_batch.computed_tokens)
    seen = reader if reader and micro_batch.sees else None
    spans = PictureSpans() if seen is None else seen.both_ways(samples)
    segments = Segments.of(lengths_M.tolist(), device, shared, needed_P, part, pictures=spans)
    own_N: Any = slice(None)
    own = None
    # With a slice, what follows is of the loss tokens whose predecessors lie in it; `segments` stay
    # those of the whole sequence, since attention sees all of it.
    if part is not None:
        own_N = part.own(predictors_N)
        own = OwnTokens(part.group, move(own_N), len(predictors_N))
        predictors_N = predictors_N[own_N] - part.start
        needed_P = None if balance else ints(np.unique(predictors_N))
    chosen_SLK = None if routed is None else routed.of(micro_batch)
    routing = None
    if routed is not None and chosen_SLK is not None:
        of_slice_SLK = chosen_SLK if part is None else part.cut(chosen_SLK, UNKNOWN)
        routing = TokenRouting(
            torch.from_numpy(of_slice_SLK).to(device, non_blocking=True),
            move(predictors_N),
            None if needed_P is None else move(needed_P),
            replays=routed.replays,
        )

    def slice_of(values_S: Any) -> Tensor:
        return move(values_S if part is None else part.cut(values_S))

    pictures, axes_3S = (None, None) if seen is None else seen.read(micro_batch, device)
    return DeviceMicroBatch(
        tokens_S=slice_of(samples.tokens_S[computed]),
        positions_S=slice_of(positions_T[computed]),
        segments=segments,
        predictors_N=move(predictors_N),
        targets_N=move(samples.tokens_S[samples.loss_mask_S][own_N]),
        rollout_logprobs_N=move(samples.rollout_logprobs_N),
        reference_logprobs_N=move(samples.reference_logprobs_N),
        advantages_N=move(samples.advantages_N),
        samples_N=move(np.repeat(micro_batch.numbers_M, samples.loss_tokens_M)),
        weights_N=move(samples.weights_N),
        support_NS=move(samples.support_N.padded(-1)[own_N])
        if len(samples.support_N.values)
        else None,
        needed_P=None if needed_P is None else move(needed_P),
        routing=routing,
        times_S=slice_of(_copies_of_tokens(micro_batch)) if balance else None,
        own=own,
        pictures=pictures,
        axes_3S=axes_3S,
    )


def _copies_of_tokens(micro_batch: MicroBatch) -> FloatArray:
    """See `DeviceMicroBatch.times_S`."""
    samples, shared = micro_batch.samples, micro_batch.shared
    trained_T = np.repeat(samples.loss_tokens_M > 0, samples.lengths_M)
    if shared is None:
        return trained_T.astype(np.float32)
    return np.bincount(shared.places_T, trained_T, len(shared.computed_S)).astype(np.float32)


def compute_logprobs_in(
    head: nn.Module, scaling: Scaling, part: VocabularyPart | None = None
) -> None:
    """Let an output head compute logprobs of given tokens, and not logits. `part`: what it has of
    the vocabulary, if not all.

    The head stays the module that it is, so that a sharding gathers its weights once for the call.
    """
    head.forward = partial(_head_logprobs, head, scaling, part=part)


def _head_logprobs(
    head: Any,
    scaling: Scaling,
    hidden_NH: Tensor,
    targets_N: Tensor,
    support_NS: Tensor | None,
    *,
    entropy: bool,
    part: VocabularyPart | None,
) -> Tensor:
    bias_V = getattr(head, "bias", None)
    return linear_logprobs(
        hidden_NH,
        head.weight,
        targets_N,
        scaling,
        bias_V=bias_V,
        support_NS=support_NS,
        entropy=entropy,
        part=part,
    )


def token_logprobs(model: Any, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
    """log softmax(logits / temperature) of each loss token, float32, shape N, over the ids that it
    was sampled from.

    The output head (see `compute_logprobs_in`) runs only at the N positions that predict a loss
    token. A token that was sampled from a part of the vocabulary is normalised over the same part
    ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556), so that its ratio to the engine's
    probability is exact. With `entropy`, the shape is 2N: the logprobs, and the entropies of the
    distributions that they are of, from the same pass.
    """
    hidden_NH = _predicting_states(model, samples)
    logprobs_N: Tensor = model.get_output_embeddings()(
        hidden_NH, samples.targets_N, samples.support_NS, entropy=entropy
    )
    return _gather_own(logprobs_N, samples)


def token_values(
    model: Any, samples: DeviceMicroBatch, tensor: TensorGroup | None = None
) -> Tensor:
    """The output of the model's value head before each loss token, float32, shape N. `tensor`: the
    ranks over which the matrices of layers are divided; each has the value head.
    """
    values_N: Tensor = model.score(_predicting_states(model, samples)).float()[:, 0]
    return _gather_own(values_N if tensor is None else tensor.alike(values_N), samples)


def _gather_own(values: Tensor, samples: DeviceMicroBatch) -> Tensor:
    """The values of all loss tokens, from those of the loss tokens that this rank predicts."""
    return values if samples.own is None else samples.own.gathered(values)


def _predicting_states(model: Any, samples: DeviceMicroBatch) -> Tensor:
    """The last hidden states of the tokens before the loss tokens, shape (N, H)."""
    tokens: dict[str, Any] = (
        {"input_ids": samples.tokens_S[None]}
        if samples.pictures is None
        else samples.pictures.embedded(model, samples.tokens_S)
    )
    hidden_1SH: Tensor = language_model(model)(
        **tokens,
        position_ids=samples.position_ids,
        use_cache=False,
        segments=samples.segments,
        needed_P=samples.needed_P,
        **({} if samples.routing is None else {"token_routing": samples.routing}),
        **without_router_logits(model.config),
    ).last_hidden_state
    return hidden_1SH[0].index_select(0, samples.predictors_N)


def states_together(model: Any, rows_T: Sequence[Tensor], windows: Windows) -> Sequence[Tensor]:
    """The last hidden states (T, H) of sequences, computed as the samples of a micro-batch are."""
    lengths = [len(row_T) for row_T in rows_T]
    states_SH: Tensor = model.base_model(
        input_ids=torch.cat(list(rows_T))[None],
        position_ids=torch.cat([torch.arange(length, device=model.device) for length in lengths])[
            None
        ],
        use_cache=False,
        segments=Segments.of(lengths, model.device),
        windows=windows,
        **without_router_logits(model.config),
    ).last_hidden_state[0]
    return torch.split(states_SH, lengths)


@contextmanager
def _without_layers(config: Any) -> Iterator[None]:
    """Let a model leave out its layers, as most do that count them by their config: none has to be
    gathered then.
    """
    layers = config.num_hidden_layers
    config.num_hidden_layers = 0
    try:
        yield
    finally:
        config.num_hidden_layers = layers


def scaling_of(model: Any, temperature: float) -> Scaling:
    """The scaling of the outputs of a model's head, checked on a few tokens: without layers, where
    that is possible.

    Raises:
        ConfigError: it does something else to it.
    """
    config = model.config.get_text_config()
    cap = optional_field(config, "final_logit_softcapping")
    factor = optional_field(config, "logit_scale") or 1 / (
        optional_field(config, "logits_scaling") or 1.0
    )
    scaling = Scaling(factor=float(factor), cap=cap)
    # Gemma 3n and 4 make inputs of each layer.
    of_layers = optional_field(config, "hidden_size_per_layer_input")
    with nullcontext() if of_layers else _without_layers(config):
        holds = _scaling_holds(model, scaling)
    if not holds:
        raise ConfigError(
            f"the logits of {type(model).__name__} are not its output embedding over its last"
            " hidden state, scaled or capped as its config says, so the trainer would compute"
            " other logprobs than the engine; such models need a trainer of their own"
        )
    return Scaling(temperature, scaling.factor, scaling.cap)


def check_choices(model: Any) -> None:
    """Check on a few tokens that the layers compute with experts that are given.

    Raises:
        ConfigError: they do not.
    """
    tokens_S = torch.arange(8, device=model.device) % model.config.get_text_config().vocab_size
    call = partial(
        model.base_model,
        input_ids=tokens_S[None],
        use_cache=False,
        segments=Segments.of([8], model.device),
        **without_router_logits(model.config),
    )
    with torch.no_grad():
        taken = choices_are_taken(model, lambda routing: call(token_routing=routing), 8)
    if not taken:
        raise ConfigError(
            f"trainer.routing: the routers of {type(model).__name__} do not choose their experts by"
            " `topk` over the scores of all, so the engine's choices cannot be compared or"
            " replayed. Write trainer.routing=off"
        )


def _scaling_holds(model: Any, scaling: Scaling) -> bool:
    """True if the logits of a few tokens are the head's outputs with this scaling."""
    tokens_S = torch.arange(8, device=model.device) % model.config.get_text_config().vocab_size
    segments, rest = Segments.of([8], model.device), without_router_logits(model.config)
    with torch.no_grad():
        expected_SV = model(
            input_ids=tokens_S[None], use_cache=False, segments=segments, **rest
        ).logits[0]
        hidden = model.base_model(
            input_ids=tokens_S[None], use_cache=False, segments=segments
        ).last_hidden_state[0]
        got_SV = scaling.apply(model.get_output_embeddings()(hidden).clone())
    # The looser one is for weights that are gathered in bfloat16.
    tolerance = 1e-3 if expected_SV.dtype == torch.float32 else 5e-2
    return torch.allclose(expected_SV.float(), got_SV, rtol=tolerance, atol=tolerance)
