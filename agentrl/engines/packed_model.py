"""A transformers causal language model, run on packed tokens with a slotted KV cache.

Dimension suffixes: N packed tokens of a step, S slots, R rows of an attention block, T new tokens
of a row, L cached tokens, H query heads, K key/value heads, D head size, V vocabulary; of
pictures, I tokens that stand for them, and E the size of hidden states.

The tokens of all rows, whether one each (decoding) or many (prefill), go through the linear layers
as one sequence without padding. Only attention distinguishes rows, through transformers' own
attention interface: it writes the new keys and values into their slots, and computes attention in
blocks of rows of similar size.

Of a model that sees, the language model is called with embeddings, in which the features of
pictures stand in place of their placeholders. Its positions may have three axes (M-RoPE), and are
then not the places of the tokens in the cache. In families whose pictures are seen in both
directions (Gemma 3, Gemma 4), a step has to reach the end of each picture that it computes tokens
of.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.engines.plain_layers import Heads, PlainLayers
from agentrl.engines.sampling import Sampler, Truncation, noise_keys
from agentrl.engines.seen_pictures import SeenPictures
from agentrl.errors import EngineError
from agentrl.models.attention_check import (
    LENGTHS,
    Windows,
    check_attention,
    check_kind,
    context_limit,
    not_handed_on,
)
from agentrl.models.facts import longest_context
from agentrl.models.last_layer import compute_only_needed
from agentrl.models.routing import Routing
from agentrl.models.vision import (
    Vision,
    attention_of,
    auto_class,
    has_axes,
    language_model,
    logit_cap,
    part_of,
    sees,
)
from agentrl.models.weight_names import WeightNames
from agentrl.protocols import ScoreRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import FloatArray, IntArray, floats, ints
from agentrl.tokens.expert_choices import ChosenExperts
from agentrl.tokens.placed_images import PlacedImage
from agentrl.weights.low_rank import LowRank, low_rank_of
from agentrl.weights.shipment import shipment_of

_ATTENTION = "agentrl_slots"
_PIECE = 256
"""Queries whose scores are computed at once in layers with a soft cap or sinks."""
_SCORED_TOKENS = 4096
_SCORED_LOGITS = 1 << 27
"""Most tokens and logits that are computed at once to score tokens: half a GiB of logits."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's share of a step: `token_ids` are computed into `slot` from position `start` on.

    If `sample` is set, one token is drawn from the logits of the last one, as `sampling` says.
    `position` is the number of tokens that the request has sampled so far. `keep_support`: return
    what it was drawn from. `copied_from`: a slot whose first `start` tokens are the same, and whose
    KV of them is copied; they may be computed in the same step.

    `images` are the pictures of the prompt, `prompt_ids`. `positions_3T`: the positions of the
    tokens by time, height and width; None if they are the tokens' places.
    """

    slot: int
    start: int
    token_ids: IntArray
    sample: bool
    sampling: SamplingParams
    seed: int
    position: int
    keep_support: bool = False
    copied_from: int | None = None
    images: Sequence[PlacedImage] = ()
    prompt_ids: IntArray | None = None
    positions_3T: IntArray | None = None

    @property
    def stop(self) -> int:
        """Cached tokens after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token. `support`: the ids it was drawn from, if they were to be kept; empty: the
    whole vocabulary.
    """

    token: int
    logprob: float
    support: IntArray


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows whose attention is computed together: tokens `first` to `stop` of the packed sequence.

    `rows` are their slots, as a slice if the slots are adjacent, which saves a copy of their KV.
    Rows of unequal size are padded by `pad_RT` (indices into the packed tokens) and unpadded by
    `unpad_N` (indices into R x T). `positions_RT`: the places of the tokens in the cache.
    `last_RT`: the last place that each of them sees, where some see more than what is before them;
    `only_windows`: they do so in layers with a window alone.
    """

    first: int
    stop: int
    rows: slice | Tensor
    shape_RT: tuple[int, int]
    length: int
    positions_RT: Tensor
    last_RT: Tensor | None
    only_windows: bool
    pad_RT: Tensor | None
    unpad_N: Tensor | None
    masks: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)

    def mask_R1TL(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 for the cached tokens that a new one sees in a layer with this window: those up to
        itself or the end of its picture, without those that are `window` or more tokens before
        itself; else -inf.
        """
        whole = self.last_RT is not None and (window is not None or not self.only_windows)
        window = window if window is not None and window < self.length else None
        if (window, whole) not in self.masks:
            last_RT = self.last_RT if whole and self.last_RT is not None else self.positions_RT
            places_L = torch.arange(self.length, device=self.positions_RT.device)
            hidden_RTL = places_L > last_RT[..., None]
            if window is not None:
                hidden_RTL |= places_L <= self.positions_RT[..., None] - window
            mask_RTL = torch.zeros(hidden_RTL.shape, dtype=dtype, device=hidden_RTL.device)
            self.masks[window, whole] = mask_RTL.masked_fill_(hidden_RTL, float("-inf"))[:, None]
        return self.masks[window, whole]


@dataclass(frozen=True, slots=True)
class _Copy:
    """The KV of the first `length` tokens of a slot, for other slots."""

    source: int
    slots: Tensor
    length: int


class _SlotKv:
    """Keys and values of all slots of one layer, (S, K, L, D); grows on demand."""

    def __init__(self) -> None:
        self.keys_SKLD = torch.empty(0)
        self.values_SKLD = torch.empty(0)

    def copy(self, copy: _Copy) -> None:
        for kv_SKLD in (self.keys_SKLD, self.values_SKLD):
            kv_SKLD[copy.slots, :, : copy.length] = kv_SKLD[copy.source, :, : copy.length]

    def reserve(
        self, like_key_NKD: Tensor, like_value_NKD: Tensor, slots: int, length: int
    ) -> None:
        self.keys_SKLD = _grow(self.keys_SKLD, like_key_NKD, slots, length)
        self.values_SKLD = _grow(self.values_SKLD, like_value_NKD, slots, length)


def _grow(old: Tensor, like_NKD: Tensor, slots: int, length: int) -> Tensor:
    if old.dim() == 4 and old.shape[0] >= slots and old.shape[2] >= length:
        return old
    # zeros, not empty: a masked key's probability is 0, and 0 times a stray NaN would still be NaN
    new = torch.zeros(
        slots,
        like_NKD.shape[1],
        length,
        like_NKD.shape[2],
        dtype=like_NKD.dtype,
        device=like_NKD.device,
    )
    if old.dim() == 4:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new


@dataclass(frozen=True, slots=True)
class _Plan:
    """The data that attention needs for a step, passed through the model's keyword arguments."""

    layers: list[_SlotKv]
    slots_N: Tensor
    positions_N: Tensor
    blocks: list[_Block]
    capacity: tuple[int, int]
    copies: list[_Copy]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: _Plan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    windows: Windows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, N, D) in, (1, N, H, D) out."""
    if plan is None:
        raise not_handed_on(module)
    if windows is not None:
        windows.append(sliding_window)
    layer_index: Any = module.layer_idx
    kind = _LayerKind(
        query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux
    )
    query_NHD, key_NKD, value_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_NHD = _attend_in_layer(plan, layer_index, (query_NHD, key_NKD, value_NKD), kind)
    return out_NHD[None], None


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """The options of a layer's attention. `sinks_H`: logits that take a share of it and return
    nothing.
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


def _attend_in_layer(plan: _Plan, layer_index: int, heads: Heads, kind: _LayerKind) -> Tensor:
    """Attention of the new tokens to those of their slots, (N, H, D), once the layer's cache has
    their keys and values.
    """
    query_NHD, key_NKD, value_NKD = heads
    layer = plan.layers[layer_index]
    layer.reserve(key_NKD, value_NKD, *plan.capacity)
    layer.keys_SKLD[plan.slots_N, :, plan.positions_N] = key_NKD
    layer.values_SKLD[plan.slots_N, :, plan.positions_N] = value_NKD
    # After the new tokens are there: a source may have been computed in this very step.
    for copy in plan.copies:
        layer.copy(copy)
    outputs = [_attend_block(block, layer, query_NHD, kind) for block in plan.blocks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _run_plain_layers(plain: PlainLayers, inputs: Mapping[str, Any], kept_R: Tensor) -> Tensor:
    """The last hidden states of the tokens `kept_R`, for what a model is called with."""
    plan: _Plan = inputs["plan"]

    def attend(layer_index: int, heads: Heads, scale: float, window: int | None) -> Tensor:
        kind = _LayerKind(scale, window, softcap=None, sinks_H=None)
        return _attend_in_layer(plan, layer_index, heads, kind)

    return plain(inputs["input_ids"][0], plan.positions_N, kept_R, attend)


def _attend_block(block: _Block, layer: _SlotKv, query_NHD: Tensor, kind: _LayerKind) -> Tensor:
    heads, size = query_NHD.shape[1:]
    own_THD = (
        query_NHD[block.first : block.stop]
        if block.pad_RT is None
        else query_NHD.index_select(0, block.pad_RT)
    )
    query_RHTD = own_THD.reshape(*block.shape_RT, heads, size).transpose(1, 2)
    keys_RKLD = layer.keys_SKLD[:, :, : block.length]
    values_RKLD = layer.values_SKLD[:, :, : block.length]
    if isinstance(block.rows, slice):
        keys_RKLD, values_RKLD = keys_RKLD[block.rows], values_RKLD[block.rows]
    else:
        keys_RKLD, values_RKLD = (
            keys_RKLD.index_select(0, block.rows),
            values_RKLD.index_select(0, block.rows),
        )
    mask_R1TL = block.mask_R1TL(kind.window, query_NHD.dtype)
    if kind.softcap is None and kind.sinks_H is None:
        # Heads that share keys see the same ones where there is one new token. As tokens of one
        # head they read them once, in half the time.
        is_shared = block.shape_RT[1] == 1
        out_RHTD = scaled_dot_product_attention(
            query_RHTD.reshape(*keys_RKLD.shape[:2], -1, size) if is_shared else query_RHTD,
            keys_RKLD,
            values_RKLD,
            attn_mask=mask_R1TL,
            scale=kind.scale,
            enable_gqa=not is_shared,
        ).reshape(*query_RHTD.shape[:3], -1)
    else:
        pieces = zip(
            torch.split(query_RHTD, _PIECE, 2), torch.split(mask_R1TL, _PIECE, 2), strict=True
        )
        out_RHTD = torch.cat(
            [_attend_piece(own, keys_RKLD, values_RKLD, kind, mask) for own, mask in pieces], 2
        )
    out_THD = out_RHTD.transpose(1, 2).reshape(-1, heads, values_RKLD.shape[-1])
    return out_THD if block.unpad_N is None else out_THD.index_select(0, block.unpad_N)


def _attend_piece(
    query_RHTD: Tensor, keys_RKLD: Tensor, values_RKLD: Tensor, kind: _LayerKind, mask_R1TL: Tensor
) -> Tensor:
    """Attention with a soft cap of the scores (Gemma 2) or sinks (gpt-oss), as the trainer computes
    it.
    """
    rows, heads, tokens, size = query_RHTD.shape
    groups = heads // keys_RKLD.shape[1]
    query_RKGTD = query_RHTD.reshape(rows, -1, groups, tokens, size)
    scores = kind.scale * query_RKGTD.float() @ keys_RKLD.float().transpose(2, 3)[:, :, None]
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores + mask_R1TL[:, None]
    if kind.sinks_H is None:
        shares = scores.softmax(-1)
    else:
        sinks = kind.sinks_H.float().reshape(1, -1, groups, 1, 1).expand(rows, -1, -1, tokens, 1)
        shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    out = shares.to(values_RKLD.dtype) @ values_RKLD[:, :, None]
    return out.reshape(rows, heads, tokens, -1)


class PackedModel:
    """A model loaded from a Hugging Face folder: computes steps, and loads new weights in place."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the weights.

        Raises:
            ConfigError: the model needs a kind of attention that this engine does not support.
        """
        self._model = _load(folder, dtype, device, trust_remote_code)
        self.device = device
        self._dtype = dtype
        self._max_slots = max_slots
        self._names = WeightNames.of(self._model)
        self._folder = folder
        self._base: Path | None = folder
        self._adapted: frozenset[str] = frozenset()
        config = self._model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = context_limit(config) or longest_context(config)
        self._layers = [_SlotKv() for _ in range(config.num_hidden_layers)]
        self._sampler = Sampler(self.vocab_size, device)
        self._routing = Routing(self._model)
        self._vision = Vision(self._model, folder) if sees(self._model.config) else None
        self._seen = None if self._vision is None else SeenPictures(self._vision, device)
        self._has_axes = has_axes(self._model)
        self._logit_cap = logit_cap(self._model)
        self._order: Sequence[StepRow] = ()
        self._kept_R = torch.zeros(0, dtype=torch.long, device=device)
        self._capacity = (0, 0)
        self._plain: PlainLayers | None = None
        check_attention(self._model, self._states_in_two_steps)
        if PlainLayers.are_of(self._model):
            self._plain = self._if_equivalent(PlainLayers(self._model.base_model))

    @property
    def has_experts(self) -> bool:
        """True if it is a mixture of experts."""
        return self._routing.layers > 0

    @property
    def has_plain_layers(self) -> bool:
        """True if its layers are computed by `PlainLayers`."""
        return self._plain is not None

    @property
    def sees(self) -> bool:
        """True if it reads pictures."""
        return self._vision is not None

    @property
    def sees_both_ways(self) -> bool:
        """True if a picture's tokens see each other in both directions: a step computes all of
        them that are not cached, or none.
        """
        return self._vision is not None and self._vision.both_ways != "nowhere"

    def positions(self, prompt_ids: IntArray, images: Sequence[PlacedImage]) -> IntArray | None:
        """The positions of a prompt with pictures by time, height and width, shape (3, T); None if
        they are the places of its tokens. Each token after it is one further than the one before.

        Raises:
            EngineError: a picture is not as many tokens as the model makes of it.
        """
        if self._vision is None or self._seen is None or not images:
            return None
        grids = [self._seen.grid(placed.image) for placed in images]
        try:
            return self._vision.positions(prompt_ids, images, grids)
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"the {len(images)} pictures of a prompt are other numbers of tokens than this"
                f" model makes of them: render it with the model's own renderer ({error})"
            ) from error

    def step(self, rows: Sequence[StepRow]) -> list[Drawn]:
        """Compute the tokens of all rows; return what each row with `sample` drew, in the order of
        `rows`.
        """
        with torch.inference_mode():
            blocks = _blocks(rows)
            self._order = order = [row for block in blocks for row in block]
            sampled = [(index, row) for index, row in enumerate(order) if row.sample]
            ends = np.cumsum([len(row.token_ids) for row in order]) - 1
            self._kept_R = kept_R = self._tensor(ends[[index for index, _ in sampled]])
            logits_RV = self._forward(blocks, kept_R, self._layers, self._grow_capacity(order))
            if not sampled:
                return []
            drawn = self._sample(logits_RV, [row for _, row in sampled])
        # Drawn in the order of blocks, and wanted in that of `rows`.
        by_slot = {row.slot: one for (_, row), one in zip(sampled, drawn, strict=True)}
        return [by_slot[row.slot] for row in rows if row.sample]

    def chosen_experts(self) -> Mapping[int, ChosenExperts]:
        """The experts that the last step chose for the tokens of each row, by slot, shape (T, L,
        K). They are `UNKNOWN` in the last layer, where it need not compute a token.
        """
        counts = [len(row.token_ids) for row in self._order]
        chosen_NLK = self._routing.chosen_experts(sum(counts), self._kept_R)
        if chosen_NLK is None:
            return {}
        of_rows = np.split(chosen_NLK.cpu().numpy(), np.cumsum(counts)[:-1])
        return {row.slot: own for row, own in zip(self._order, of_rows, strict=True)}

    def score(self, requests: Sequence[ScoreRequest]) -> list[FloatArray]:
        """The logprobs that the requests ask for. The KV of their tokens is then dropped."""
        layers = [_SlotKv() for _ in self._layers]
        capacity = len(requests), max(len(request.token_ids) for request in requests)
        budget = min(_SCORED_TOKENS, max(64, _SCORED_LOGITS // self.vocab_size))
        found: list[list[FloatArray]] = [[] for _ in requests]
        with torch.inference_mode():
            # The chunks of a request follow one another: each attends to the KV of those before.
            for rows in _chunks(requests, budget):
                blocks = _blocks(rows)
                order = [row for block in blocks for row in block]
                scored = [_scored_tokens(row, requests[row.slot]) for row in order]
                firsts = np.cumsum([0, *(len(row.token_ids) for row in order)])[:-1]
                kept = np.concatenate(
                    [first + own for first, (own, _) in zip(firsts, scored, strict=True)]
                )
                temperatures = [requests[row.slot].temperature for row in order]
                counts = [len(targets) for _, targets in scored]
                scaled_RV = self._forward(blocks, self._tensor(kept), layers, capacity).float()
                scaled_RV /= self._tensor(np.repeat(np.asarray(temperatures, np.float32), counts))[
                    :, None
                ]
                targets_R = self._tensor(np.concatenate([targets for _, targets in scored]))
                logprobs_R = scaled_RV.gather(1, targets_R[:, None])[:, 0] - scaled_RV.logsumexp(1)
                for row, own_R in zip(
                    order, np.split(logprobs_R.cpu().numpy(), np.cumsum(counts)[:-1]), strict=True
                ):
                    found[row.slot].append(own_R)
        return [floats(np.concatenate(pieces)) for pieces in found]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's own tensors by their names, not copied; tied ones appear under each of their
        names.
        """
        return dict(self._model.state_dict(keep_vars=True))

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Check that these are all of this model's weights.

        Raises:
            EngineError: a name is unknown or missing (tied names may be), or a shape differs.
        """
        own, update = self.weights, low_rank_of(weights)
        expected = self._names.published_shapes(
            {name: tensor.shape for name, tensor in own.items()}
        )
        if update is not None and (wrong := update.misfits(expected)):
            raise EngineError(
                f"these adapters do not fit the engine's model: {wrong[:3]}; nothing was changed"
            )
        is_own = update is not None and update.is_of(self._folder)
        shapes = expected if is_own else shipment_of(weights).shapes()
        unknown = sorted(shapes.keys() - expected.keys())
        given = {name for tied in self._tied_names(own) if tied & shapes.keys() for name in tied}
        missing = sorted(
            name
            for name in expected.keys() - shapes.keys() - given
            # A frozen tower is not sent.
            if not sees(self._model.config) or part_of(name) == "language"
        )
        misshapen = sorted(
            name for name in shapes.keys() & expected.keys() if shapes[name] != expected[name]
        )
        if unknown or missing or misshapen:
            raise EngineError(
                f"these weights do not fit the engine's model: unknown {unknown[:3]}, missing"
                f" {missing[:3]}, wrong shape {misshapen[:3]}; nothing was changed"
            )

    def _tied_names(self, own: Mapping[str, Tensor]) -> list[set[str]]:
        """The published names of each tensor that has several."""
        names: dict[int, list[str]] = {}
        for name, tensor in own.items():
            names.setdefault(id(tensor), []).append(name)
        return [
            {new for one in tied for new in self._names.published_shapes({one: own[one].shape})}
            for tied in names.values()
            if len(tied) > 1
        ]

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy new weights in; they must have been checked. A failed copy leaves a mix of old and
        new weights.
        """
        own, update = self.weights, low_rank_of(weights)
        self._forget_pictures()
        with torch.no_grad():
            for name, tensor in self._changed_tensors(weights, update):
                own[name].copy_(tensor)
        self._base = None if update is None else update.base
        self._adapted = frozenset() if update is None else frozenset(update.factors)

    def _changed_tensors(
        self, weights: Mapping[str, Tensor], update: LowRank | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors that may differ from the present ones: of an update of low rank of
        the same folder, those adapted in it and in the last.
        """
        if (
            update is None
            or self._base is None
            or not update.is_of(self._base)
            or self._names.conversions  # which may make one tensor of several
        ):
            return self._names.own(weights)
        return ((name, update[name]) for name in self._adapted | update.factors.keys())

    def load_arrivals(self, arrivals: Iterable[tuple[str, Tensor]]) -> None:
        """The same with weights that arrive one after another."""
        own = self.weights
        self._forget_pictures()
        if not self._names.conversions:
            with torch.no_grad():
                for name, tensor in arrivals:
                    own[name].copy_(tensor)
            return
        shapes = {name: tensor.shape for name, tensor in own.items()}
        group_of: dict[str, int] = {}
        missing: list[set[str]] = []
        for number, (_, published) in enumerate(self._names.groups(shapes)):
            group_of |= dict.fromkeys(published, number)
            missing.append(set(published))
        waiting: dict[int, dict[str, Tensor]] = {}
        for name, tensor in arrivals:
            number = group_of[name]
            waiting.setdefault(number, {})[name] = tensor
            missing[number].discard(name)
            if not missing[number]:
                self.load_weights(waiting.pop(number))
        for incomplete in waiting.values():  # a tied weight has come under one of its names
            self.load_weights(incomplete)

    def sleep(self) -> int:
        """Free the KV cache, and move the weights to host memory; returns the bytes freed on the
        device.
        """
        on_gpu = self.device.type == "cuda"
        freed_bytes = self.kv_bytes
        if on_gpu:
            freed_bytes += sum(weight.nbytes for weight in self._model.parameters())
        self._layers = [_SlotKv() for _ in self._layers]
        self._capacity = (0, 0)
        self._forget_pictures()
        self._model.to("cpu")
        if on_gpu:
            torch.cuda.empty_cache()
        return freed_bytes

    def wake(self) -> int | None:
        """Move the weights back to the device; the KV cache grows again on demand. Returns the
        bytes that this took on a GPU, None if it took none.
        """
        moved_bytes = sum(
            weight.nbytes
            for weight in self._model.parameters()
            if weight.device.type != self.device.type
        )
        self._model.to(self.device)
        return moved_bytes or None

    def _forget_pictures(self) -> None:
        if self._seen is not None:
            self._seen.forget_features()

    @property
    def kv_bytes(self) -> int:
        """Device memory that the KV cache uses, in bytes."""
        return sum(layer.keys_SKLD.nbytes + layer.values_SKLD.nbytes for layer in self._layers)

    def _forward(
        self,
        blocks: Sequence[Sequence[StepRow]],
        kept_R: Tensor,
        layers: list[_SlotKv],
        capacity: tuple[int, int],
    ) -> Tensor:
        """The logits after the tokens `kept_R` of the packed ones; keys and values go into
        `layers`.
        """
        inputs = self._inputs(blocks, layers, capacity)
        if self._plain is not None:
            states_RE = _run_plain_layers(self._plain, inputs, kept_R)
            of_states: Tensor = self._model.get_output_embeddings()(states_RE)
            return of_states
        if self._seen is None:
            logits: Tensor = self._model(**inputs, logits_to_keep=kept_R, needed_P=kept_R).logits
            return logits[0]
        order = [row for block in blocks for row in block]
        if any(row.images for row in order):
            inputs |= self._embed_pictures(inputs.pop("input_ids"), order)
        states_1NE = language_model(self._model)(**inputs, needed_P=kept_R).last_hidden_state
        of_kept: Tensor = self._model.get_output_embeddings()(states_1NE[0, kept_R])
        cap = self._logit_cap
        return of_kept if cap is None else cap * torch.tanh(of_kept / cap)

    def _embed_pictures(self, tokens_1N: Tensor, order: Sequence[StepRow]) -> dict[str, Any]:
        """The arguments of the language model in place of tokens, among which pictures are."""
        assert self._vision is not None
        assert self._seen is not None
        places: list[IntArray] = []
        rows: list[Tensor] = []
        deeper: list[list[Tensor]] = []
        first = 0
        for row in order:
            for placed in row.images:
                assert row.prompt_ids is not None
                span_T = row.prompt_ids[placed.start : placed.stop]
                own = np.flatnonzero(span_T == self._vision.placeholder) + placed.start
                computed = (own >= row.start) & (own < row.stop)
                if not computed.any():
                    continue
                found = self._seen.features(placed.image)
                if len(found.rows_FH) != len(own):
                    raise EngineError(
                        f"a picture has {len(own)} tokens in a prompt and {len(found.rows_FH)} rows"
                        " of features: render the prompt with the model's own renderer"
                    )
                taken = self._tensor(np.flatnonzero(computed))
                places.append(ints(own[computed] - row.start + first))
                rows.append(found.rows_FH.index_select(0, taken))
                deeper.append([one.index_select(0, taken) for one in found.deeper])
            first += len(row.token_ids)
        if not places:
            return {"input_ids": tokens_1N}
        embedded_1NE = self._model.get_input_embeddings()(tokens_1N)
        places_I = self._tensor(np.concatenate(places).astype(np.int64))
        rows_IE = torch.cat(rows).to(embedded_1NE.dtype)
        arguments = self._vision.of_layers(tokens_1N, places_I)
        arguments["inputs_embeds"] = embedded_1NE.index_copy(1, places_I, rows_IE[None])
        if deeper[0]:
            shows_N = torch.zeros_like(tokens_1N[0], dtype=torch.bool)
            arguments["visual_pos_masks"] = shows_N.index_fill(0, places_I, True)[None]
            arguments["deepstack_visual_embeds"] = [
                torch.cat(of_layer) for of_layer in zip(*deeper, strict=True)
            ]
        return arguments

    def _inputs(
        self, blocks: Sequence[Sequence[StepRow]], layers: list[_SlotKv], capacity: tuple[int, int]
    ) -> dict[str, Any]:
        """The arguments of the model's call."""
        order = [row for block in blocks for row in block]
        tokens_N = self._tensor(
            np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in order])
        )
        positions = np.concatenate([np.arange(row.start, row.stop) for row in order])
        block_plans: list[_Block] = []
        for rows in blocks:
            block_plans.append(self._block_plan(rows, block_plans[-1].stop if block_plans else 0))
        plan = _Plan(
            layers,
            self._tensor(
                np.repeat([row.slot for row in order], [len(row.token_ids) for row in order])
            ),
            self._tensor(positions),
            block_plans,
            capacity,
            self._copies(order),
        )
        return {
            "input_ids": tokens_N[None],
            "position_ids": self._position_axes(order)
            if self._has_axes
            else plan.positions_N[None],
            "use_cache": False,
            "plan": plan,
        }

    def _position_axes(self, order: Sequence[StepRow]) -> Tensor:
        """The positions of the tokens by time, height and width, shape (3, 1, N)."""
        of_rows = [
            (
                np.broadcast_to(np.arange(row.start, row.stop), (3, len(row.token_ids)))
                if row.positions_3T is None
                else row.positions_3T
            )
            for row in order
        ]
        return self._tensor(np.concatenate(of_rows, axis=1).astype(np.int64))[:, None]

    def _if_equivalent(self, plain: PlainLayers) -> PlainLayers | None:
        """These layers, if they compute what transformers does, and otherwise None."""
        rows_T = [(torch.arange(length) * 3 + length) % self.vocab_size for length in LENGTHS]
        with torch.no_grad():
            states = zip(
                self._states_in_two_steps(rows_T, []),
                self._states_in_two_steps(rows_T, [], plain),
                strict=True,
            )
        same = [torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in states]
        return plain if all(same) else None

    def _states_in_two_steps(
        self, rows_T: Sequence[Tensor], windows: Windows, plain: PlainLayers | None = None
    ) -> list[Tensor]:
        """The last hidden states of sequences: of all their tokens but one in one step, and of the
        last in another. `plain`: the layers that compute them, if not transformers' own.
        """
        layers, states = [_SlotKv() for _ in self._layers], [list[Tensor]() for _ in rows_T]
        capacity = len(rows_T), max(len(row_T) for row_T in rows_T)
        for firsts, stops in ((0, -1), (-1, None)):
            rows = [
                StepRow(slot, firsts % len(ids), ids[firsts:stops], False, _UNUSED, 0, 0)
                for slot, ids in enumerate(ints(row_T.cpu().numpy()) for row_T in rows_T)
            ]
            blocks = _blocks(rows)
            called = self._inputs(blocks, layers, capacity)
            if plain is None:
                inside = language_model(self._model)
                states_NH = inside(**called, windows=windows).last_hidden_state[0]
            else:
                all_N = torch.arange(called["input_ids"].shape[1])
                states_NH = _run_plain_layers(plain, called, all_N)
            order = [row for block in blocks for row in block]
            for row, own in zip(
                order, states_NH.split([len(row.token_ids) for row in order]), strict=True
            ):
                states[row.slot].append(own)
        return [torch.cat(own) for own in states]

    def _copies(self, rows: Sequence[StepRow]) -> list[_Copy]:
        slots: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            if row.copied_from is not None:
                slots.setdefault((row.copied_from, row.start), []).append(row.slot)
        return [
            _Copy(source, self._tensor(np.asarray(own)), length)
            for (source, length), own in slots.items()
        ]

    def _block_plan(self, rows: Sequence[StepRow], first: int) -> _Block:
        """How rows, whose tokens begin at `first` of the packed ones, are computed together.

        Example: `first` 5 and rows of 3 and 1 new tokens. `pad_RT` is [5, 6, 7, 8, 8, 8], where the
        second row repeats its only token, and `unpad_N` [0, 1, 2, 3].
        """
        counts = np.asarray([len(row.token_ids) for row in rows])
        width, length = int(counts.max()), max(row.stop for row in rows)
        starts = np.asarray([row.start for row in rows])
        positions_RT = starts[:, None] + np.arange(width)
        last_RT = self._last_seen(rows, positions_RT)
        slots = np.asarray([row.slot for row in rows])
        neighbours = slots[-1] - slots[0] == len(rows) - 1 and bool((np.diff(slots) == 1).all())
        pad_RT, unpad_N = None, None
        if (counts != width).any():
            offsets = np.arange(width)
            row_firsts = first + np.cumsum(counts) - counts
            pad_RT = self._tensor(
                (row_firsts[:, None] + np.minimum(offsets, counts[:, None] - 1)).reshape(-1)
            )
            unpad_N = self._tensor(np.flatnonzero(offsets < counts[:, None]))
        return _Block(
            first,
            first + int(counts.sum()),
            slice(int(slots[0]), int(slots[-1]) + 1) if neighbours else self._tensor(slots),
            (len(rows), width),
            length,
            self._tensor(positions_RT),
            None if last_RT is None else self._tensor(last_RT),
            self._vision is not None and self._vision.both_ways == "windows",
            pad_RT,
            unpad_N,
        )

    def _last_seen(
        self, rows: Sequence[StepRow], positions_RT: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any] | None:
        """The last place that each token sees: its own, or the end of its picture; None if none
        sees more than what is before it.
        """
        if not (self.sees_both_ways and any(row.images for row in rows)):
            return None
        last_RT = positions_RT.copy()
        for row, last_T in zip(rows, last_RT, strict=True):
            for placed in row.images:
                if placed.start < row.stop:
                    assert placed.stop <= row.stop, "a step ends inside of a picture"
                    last_T[max(placed.start - row.start, 0) : max(placed.stop - row.start, 0)] = (
                        placed.stop - 1
                    )
        return last_RT

    def _grow_capacity(self, rows: Sequence[StepRow]) -> tuple[int, int]:
        """The slots and length that the cache must have. Both grow by doubling, so that growing is
        rare.
        """
        # The KV of a layer is copied each time, so doubling keeps that linear in what is computed.
        slots, length = self._capacity
        while slots < max(row.slot for row in rows) + 1:
            slots = min(max(2 * slots, 8), self._max_slots)
        while length < max(row.stop for row in rows):
            length = max(2 * length, 256)
        self._capacity = (slots, length)
        return self._capacity

    def _sample(self, logits_RV: Tensor, rows: Sequence[StepRow]) -> list[Drawn]:
        keys_R = None
        if any(row.sampling.temperature > 0 for row in rows):
            seeds = np.asarray([row.seed & (2**64 - 1) for row in rows], dtype=np.uint64)
            keys_R = self._tensor(
                noise_keys(seeds, np.asarray([row.position for row in rows], dtype=np.uint64))
            )
        temperature_R = torch.tensor(
            [row.sampling.temperature for row in rows], dtype=torch.float32, device=self.device
        )
        params = [row.sampling for row in rows]
        truncation = None
        if any(one.truncated for one in params):
            shares = [
                (one.top_k, one.top_p, one.min_p) if one.truncated else (0, 1.0, 0.0)
                for one in params
            ]
            truncation = Truncation.of(shares, self.device)
        tokens_R, logprobs_R, all_RV = self._sampler.sample(
            logits_RV, temperature_R, keys_R, truncation
        )
        supports = [_WHOLE_VOCABULARY] * len(rows)
        for index, row in enumerate(rows):
            if row.keep_support and row.sampling.truncated:
                kept_ids = all_RV[index].isfinite().nonzero()[:, 0]
                supports[index] = ints(kept_ids.int().cpu().numpy())
        drawn = zip(tokens_R.tolist(), logprobs_R.tolist(), supports, strict=True)
        return [Drawn(*one) for one in drawn]

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _blocks(rows: Sequence[StepRow]) -> list[list[StepRow]]:
    """Group rows by their new and their cached tokens, each rounded up to a power of two, so that
    padding is limited. Rows of one new token are never padded.

    Small sizes are grouped together, because attention over few tokens costs less than another
    block.
    """
    blocks: dict[tuple[int, int], list[StepRow]] = {}
    for row in sorted(rows, key=lambda row: row.slot):
        count = len(row.token_ids)
        new = 0 if count == 1 else max(4, (count - 1).bit_length())
        blocks.setdefault((new, max(8, (row.stop - 1).bit_length())), []).append(row)
    return [blocks[key] for key in sorted(blocks)]


def _chunks(requests: Sequence[ScoreRequest], budget: int) -> Iterator[list[StepRow]]:
    """The tokens of requests, in slots by number, in chunks of at most `budget` tokens."""
    rows: list[StepRow] = []
    room = budget
    for slot, request in enumerate(requests):
        start = 0
        while start < len(request.token_ids):
            ids = request.token_ids[start : start + room]
            rows.append(StepRow(slot, start, ids, False, _UNUSED, 0, 0))
            start, room = start + len(ids), room - len(ids)
            if not room:
                yield rows
                rows, room = [], budget
    if rows:
        yield rows


_WHOLE_VOCABULARY = ints(())
"""See `Drawn.support`."""
_UNUSED = SamplingParams()
"""Nothing is sampled from the rows that are scored."""


def _scored_tokens(row: StepRow, request: ScoreRequest) -> tuple[IntArray, IntArray]:
    """The tokens of a row that predict tokens to score, by their numbers in it, and these targets.

    Example: tokens 10, 11, 12, 13 are to be scored from `start` 2 on. A row with the first three of
    them has the predictors [1, 2] and the targets [12, 13].
    """
    first, stop = max(row.start, request.start - 1), min(row.stop, len(request.token_ids) - 1)
    predicting = np.arange(first, max(first, stop))
    return predicting - row.start, request.token_ids[predicting + 1].astype(np.int64)


def _load(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    from transformers import AttentionInterface, AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    check_kind(config, folder, trust_remote_code=trust_remote_code)
    AttentionInterface.register(_ATTENTION, _attend)
    with _no_progress_bars():
        model = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention_of(config, _ATTENTION),
            trust_remote_code=trust_remote_code,
        )
    compute_only_needed(model)
    return model.to(device).eval()


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


__all__ = ["Drawn", "PackedModel", "StepRow"]
