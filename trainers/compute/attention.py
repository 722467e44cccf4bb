"""Causal attention inside the segments of a packed sequence: no token sees another sample, and no
mask is built.

The samples of a micro-batch lie end to end in one sequence. On GPUs, FlashAttention (Dao 2023,
arXiv:2307.08691) takes them as they are, in the precisions that it has. Elsewhere, segments of
similar length are padded at their ends into a block, for one call of torch's fused attention. Its
causal order keeps the padding out of sight, so memory is linear in the tokens; on CPUs, short
segments ask in pieces (`short_segments`). Layers with a sliding window, a soft cap or sinks are
computed in pieces of a few hundred queries, which are computed again in the backward pass; on GPUs,
those with a cap or sinks by one kernel (`flex`).

If samples share a prefix, the sequence has its tokens once, and the segments of all of these
samples take them. Tokens of pictures may see all of their picture (`whole_pictures`).

transformers calls `attend` in every attention layer of a model that was loaded with
`attn_implementation=ATTENTION`. Dimension suffixes: S tokens of the sequence, T of all segments, H
query heads, K key heads, D head size; R segments and L tokens of a block; Q queries of a piece, C
columns that they see.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from agentrl.models.attention_check import Windows, not_handed_on
from agentrl.tokens.arrays import IntArray
from agentrl.trainers.compute import flex
from agentrl.trainers.compute.context import ContextSlice, check_heads
from agentrl.trainers.compute.needed import Needed
from agentrl.trainers.compute.prefixes import SharedPrefixes
from agentrl.trainers.compute.short_segments import attend_in_pieces, is_in_pieces
from agentrl.trainers.compute.whole_pictures import PictureSpans, WholePictures

ATTENTION = "agentrl_segments"
SIMILAR = 0.75
"""A segment joins a block if it has at least this share of the length of the block's longest one.
"""
PIECE = 256
"""Queries of a piece."""
FLASH_DEVICE = "cuda"
FLASH_PRECISIONS = (torch.bfloat16, torch.float16)
"""Where FlashAttention runs, and in what. `flex` takes the same."""


@dataclass(frozen=True, slots=True)
class Block:
    """Segments that are computed together: the tokens `first` to `stop` of all segments.

    `padded_RL`: the token of the sequence at each place of the block; padding repeats the first
    one. `kept_N`: the places that are tokens, flat. Both are None for a single segment, if its
    tokens lie together in the sequence. `repeated`: of each segment, how many of its first tokens
    are computed in another one, so that their results here are not used.
    """

    first: int
    stop: int
    padded_RL: Tensor | None
    kept_N: Tensor | None
    repeated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Segments:
    """The blocks of a sequence, in its order; where each segment begins, and the last one ends
    (int32); the longest.

    If tokens are in several segments, `places_T` is where the sequence has each token of the
    segments, and `computed_S` where the segments have each token of the sequence. `needed`: the
    tokens whose results the last layer needs, if they are few. `context`: this rank's slice of the
    sequence, if its tokens are cut over several ranks; the segments are those of all of it.
    `pictures`: those whose tokens see each other in both directions.
    """

    blocks: tuple[Block, ...]
    borders: Tensor
    longest: int
    places_T: Tensor | None = None
    computed_S: Tensor | None = None
    needed: Needed | None = None
    context: ContextSlice | None = None
    pictures: WholePictures | None = None
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict, compare=False)
    """Masks for `flex` that layers have asked for, by their window."""

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device,
        shared: SharedPrefixes | None = None,
        needed_P: IntArray | None = None,
        context: ContextSlice | None = None,
        *,
        pictures: PictureSpans | None = None,
    ) -> "Segments":
        """The segments of these lengths, end to end. They make the fewest blocks if sorted by
        length.

        `needed_P`: the places in the sequence of the tokens that the last layer needs; by default
        all. `pictures`: those whose tokens see each other in both directions.
        """
        whole = None if pictures is None else WholePictures.of(pictures, device, shared, needed_P)
        if whole is not None and whole.needed:
            needed_P = None
        places_T = None if shared is None else torch.from_numpy(shared.places_T).long()
        blocks = tuple(
            _block(first, run, shared, device) for first, run in _similar_neighbours(lengths)
        )
        borders = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        needed = None if needed_P is None else Needed.of(needed_P, lengths, blocks, device, shared)
        found = Segments(
            blocks, borders, max(lengths), needed=needed, context=context, pictures=whole
        )
        if shared is None or places_T is None:
            return found
        computed_S = torch.from_numpy(shared.computed_S).long()
        return replace(found, places_T=places_T.to(device), computed_S=computed_S.to(device))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    needed_only: bool = False,
    windows: Windows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, S, D) in, (1, S, H, D) out.

    With `needed_only`, the results of tokens that are not `segments.needed` may be 0. To `windows`
    is added what the layer asked for.

    Raises:
        ConfigError: the model does not hand on what it is called with.
    """
    if segments is None:
        raise not_handed_on(module)
    if windows is not None:
        windows.append(sliding_window)
    options: dict[str, Any] = {
        "scaling": scaling,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "needed_only": needed_only,
    }
    if (context := segments.context) is not None:
        check_heads(query.shape[1], context.group.ranks, type(module).__name__)
        # From all heads of this rank's tokens to all tokens of its heads; then nothing is cut.
        query, key, value = (context.to_heads(one) for one in (query, key, value))
        options |= {
            "segments": replace(segments, context=None),
            "s_aux": None if s_aux is None else context.own_heads(s_aux),
        }
        out, _ = attend(module, query, key, value, attention_mask, **options)
        return context.to_tokens(out), None
    size = value.shape[-1]
    # DeepSeek's values are smaller than its keys. torch's fused kernels take one size, and torch
    # would build all scores instead.
    if query.shape[-1] > size:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))
    inputs = (query, key, value)
    out_1SHD = _attend_causal(inputs, segments=segments, s_aux=s_aux, **options)
    pictures = segments.pictures
    if pictures is not None and pictures.are_seen(sliding_window, needed_only=needed_only):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        whole = partial(_attend_picture, _LayerKind(scale, None, softcap), s_aux)
        out_1SHD = pictures.seen(out_1SHD, inputs, segments.places_T, sliding_window, whole)
    return (out_1SHD if size == query.shape[-1] else out_1SHD[..., :size]), None


def _attend_picture(
    kind: "_LayerKind",
    s_aux: Tensor | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    seen_QC: Tensor | None,
) -> Tensor:
    """See `whole_pictures.Attention`."""
    query, key, value = (x.to(_precision(x)) for x in inputs)
    if kind.softcap is None and s_aux is None:
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen_QC, scale=kind.scale, enable_gqa=gqa
        )
    if seen_QC is None:
        seen_QC = key.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
    out: Tensor = checkpoint(
        _attend_masked, query, key, value, seen_QC, kind=kind, s_aux=s_aux, use_reentrant=False
    )
    return out


def _attend_causal(
    inputs: tuple[Tensor, Tensor, Tensor],
    *,
    segments: Segments,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    needed_only: bool,
) -> Tensor:
    """Attention of each token to its segment up to itself, (1, S, H, D).

    By the fastest kernel that the layer and the device allow: FlashAttention, `flex` (soft caps and
    sinks), the few needed tokens alone, or else block by block.
    """
    query, key, value = inputs
    flash = _flash_for(query) if softcap is None and s_aux is None else None
    if flash is not None:
        return _in_sequence_order(
            segments, _attend_flash(flash, inputs, segments, scaling, sliding_window)
        )
    if softcap is not None or s_aux is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if (kernel := _flex_for(query)) is not None:
            kind = _LayerKind(scale, sliding_window, softcap)
            return _in_sequence_order(segments, _attend_flex(kernel, inputs, segments, kind, s_aux))
    if (
        needed_only
        and segments.needed
        and sliding_window is None
        and softcap is None
        and s_aux is None
    ):
        return _attend_needed(segments.needed, inputs, segments, scaling)[None]
    outputs = []
    for block in segments.blocks:
        query_RHLD, key_RKLD, value_RKLD = (_block_tokens(block, x) for x in (query, key, value))
        window = sliding_window
        if window is not None and window >= query_RHLD.shape[2]:
            window = None  # it hides nothing, and the fused kernel is faster
        if window is None and softcap is None and s_aux is None:
            out_RHLD = _attend_fused(query_RHLD, key_RKLD, value_RKLD, scaling, block.repeated)
        else:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            out_RHLD = _attend_in_pieces(
                query_RHLD, key_RKLD, value_RKLD, _LayerKind(scale, window, softcap), s_aux
            )
        out_NHD = out_RHLD.transpose(1, 2).flatten(0, 1)
        outputs.append(out_NHD if block.kept_N is None else out_NHD.index_select(0, block.kept_N))
    return _in_sequence_order(segments, outputs[0] if len(outputs) == 1 else torch.cat(outputs))


AttentionInterface.register(ATTENTION, attend)


def _in_sequence_order(segments: Segments, out_THD: Tensor) -> Tensor:
    """(T, H, D) to (1, S, H, D): each token of the sequence once."""
    return (
        out_THD if segments.computed_S is None else out_THD.index_select(0, segments.computed_S)
    )[None]


def _attend_needed(
    needed: Needed, inputs: tuple[Tensor, Tensor, Tensor], segments: Segments, scaling: float | None
) -> Tensor:
    """(S, H, D), with 0 for the tokens that are not needed."""
    query, key, value = inputs
    outputs = []
    for number, own in needed.blocks:
        block = segments.blocks[number]
        outputs.append(
            own.attend(query, _block_tokens(block, key), _block_tokens(block, value), scaling)
        )
    return needed.spread(outputs[0] if len(outputs) == 1 else torch.cat(outputs), query.shape[2])


def _flash_for(query: Tensor) -> Callable[..., Any] | None:
    """The kernel for such queries; None if there is none."""
    size = query.shape[-1]
    if (
        query.device.type != FLASH_DEVICE
        or _precision(query) not in FLASH_PRECISIONS
        or size % 8
        or size > 256
    ):
        return None
    return _flash_kernel(query.device)


@lru_cache
def _flash_kernel(device: torch.device) -> Callable[..., Any] | None:
    """torch's, if the device can run it."""
    return _varlen_kernel() if torch.cuda.get_device_capability(device) >= (8, 0) else None


def _flex_for(query: Tensor) -> flex.Kernel | None:
    """The kernel for layers with a soft cap or sinks; None if there is none for such queries."""
    if (
        query.device.type != FLASH_DEVICE
        or _precision(query) not in FLASH_PRECISIONS
        or query.shape[-1] < flex.SMALLEST_HEAD
    ):
        return None
    return flex.flex_kernel(query.device)


def _attend_flex(
    kernel: flex.Kernel,
    inputs: tuple[Tensor, Tensor, Tensor],
    segments: Segments,
    kind: "_LayerKind",
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of all segments in one call, (T, H, D)."""
    query, key, value = (x.to(_precision(x)) for x in inputs)
    if (places_T := segments.places_T) is not None:
        query, key, value = (x.index_select(2, places_T) for x in (query, key, value))
    masks, window = segments.block_masks, kind.window
    if window not in masks:
        masks[window] = flex.block_mask(segments.borders, query.shape[2], window)
    return flex.attend_by_blocks(
        kernel,
        (query, key, value),
        masks[window],
        scale=kind.scale,
        softcap=kind.softcap,
        sinks_H=sinks_H,
    )


def _varlen_kernel() -> Callable[..., Any] | None:
    """torch's, if it has one that takes windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = signature(varlen_attn).parameters.keys()
    if not {"scale", "window_size"} <= known:
        return None
    return varlen_attn if "enable_gqa" in known else partial(_with_equal_heads, varlen_attn)


def _with_equal_heads(
    kernel: Callable[..., Any],
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    *where: Any,
    enable_gqa: bool,
    **options: Any,
) -> Any:
    """The kernel of torch 2.11, which promises nothing for fewer heads of keys than of queries: it
    gets each head of keys as often as queries share it.
    """
    if enable_gqa:
        times = query_THD.shape[1] // key_TKD.shape[1]
        key_TKD, value_TKD = (x.repeat_interleave(times, dim=1) for x in (key_TKD, value_TKD))
    return kernel(query_THD, key_TKD, value_TKD, *where, **options)


def _precision(query: Tensor) -> torch.dtype:
    """The data type that attention is computed in. A norm of queries returns float32 in autocast,
    which torch's own kernels cast.
    """
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _attend_flash(
    flash: Callable[..., Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of all segments in one call, (T, H, D). A window counts the token itself, and the
    kernel's does not.
    """
    kind, places_T = _precision(inputs[0]), segments.places_T
    by_token = [x[0].transpose(0, 1).to(kind) for x in inputs]
    query_THD, key_TKD, value_TKD = (
        by_token if places_T is None else [x.index_select(0, places_T) for x in by_token]
    )
    out_THD: Tensor = flash(
        query_THD,
        key_TKD,
        value_TKD,
        segments.borders,
        segments.borders,
        segments.longest,
        segments.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    return out_THD


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """The options of a layer's attention, besides sinks. The first query is the column
    `offset`.
    """

    scale: float
    window: int | None
    softcap: float | None
    offset: int = 0


def _similar_neighbours(lengths: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Neighbouring segments of similar length, with the place of their first token.

    Example: lengths (10, 9, 8, 4, 4) make the runs (0, [10, 9, 8]) and (27, [4, 4]).
    """
    start = first = 0
    for end in range(1, len(lengths) + 1):
        longest = max(lengths[start:end])
        if end == len(lengths) or min(*lengths[start : end + 1], longest) < SIMILAR * max(
            longest, lengths[end]
        ):
            yield first, lengths[start:end]
            first += sum(lengths[start:end])
            start = end


def _block(
    first: int, lengths: Sequence[int], shared: SharedPrefixes | None, device: torch.device
) -> Block:
    """Segments of these lengths as a block.

    Example: `first` 4 and lengths (3, 2) give `padded_RL` [[4, 5, 6], [7, 8, 7]], whose last place
    is padding, and `kept_N` [0, 1, 2, 3, 4].
    """
    stop = first + sum(lengths)
    places_T, repeated = None, tuple[int, ...]()
    if shared is not None:
        places_T = torch.from_numpy(shared.places_T).long()
        borders = np.cumsum([first, *lengths])
        # A segment's tokens that are not computed in it are its first ones: a prefix.
        computed = np.diff(np.searchsorted(shared.computed_S, borders))
        repeated = tuple((np.asarray(lengths) - computed).tolist())
    if len(lengths) == 1:
        own_1L = None if places_T is None else places_T[None, first:stop].to(device)
        return Block(first, stop, own_1L, None, repeated)
    lengths_R = torch.tensor(lengths)
    starts_R = first + lengths_R.cumsum(0) - lengths_R
    places_L = torch.arange(max(lengths))
    is_token_RL = places_L[None] < lengths_R[:, None]
    padded_RL = torch.where(is_token_RL, starts_R[:, None] + places_L[None], starts_R[:, None])
    padded_RL = padded_RL if places_T is None else places_T[padded_RL]
    kept_N = is_token_RL.flatten().nonzero()[:, 0]
    return Block(first, stop, padded_RL.to(device), kept_N.to(device), repeated)


def _block_tokens(block: Block, packed: Tensor) -> Tensor:
    """(1, H, S, D) to (R, H, L, D)."""
    if block.padded_RL is None:
        return packed[:, :, block.first : block.stop]
    _, heads, _, size = packed.shape
    # Of a model's queries and keys, all heads of a token lie together in memory.
    taken_NHD = packed[0].transpose(0, 1).index_select(0, block.padded_RL.flatten())
    return taken_NHD.reshape(*block.padded_RL.shape, heads, size).transpose(1, 2)


def _attend_fused(
    query_RHLD: Tensor,
    key_RKLD: Tensor,
    value_RKLD: Tensor,
    scaling: float | None,
    repeated: Sequence[int] = (),
) -> Tensor:
    """torch's fused attention; in a part of a segment that is `repeated`, results may be 0."""
    if is_in_pieces(query_RHLD, key_RKLD, value_RKLD):
        query, key, value = (x.to(_precision(x)) for x in (query_RHLD, key_RKLD, value_RKLD))
        return attend_in_pieces(query, key, value, scaling, repeated)
    gqa = query_RHLD.shape[1] != key_RKLD.shape[1]
    return scaled_dot_product_attention(
        query_RHLD, key_RKLD, value_RKLD, is_causal=True, scale=scaling, enable_gqa=gqa
    )


def _attend_in_pieces(
    query_RHLD: Tensor, key_RKLD: Tensor, value_RKLD: Tensor, kind: _LayerKind, s_aux: Tensor | None
) -> Tensor:
    pieces = []
    for start in range(0, query_RHLD.shape[2], PIECE):
        stop = min(start + PIECE, query_RHLD.shape[2])
        first = 0 if kind.window is None else max(0, start - kind.window + 1)
        parts = (
            query_RHLD[:, :, start:stop],
            key_RKLD[:, :, first:stop],
            value_RKLD[:, :, first:stop],
        )
        # Scores of a piece are Q x C: they are computed again, and not kept for all pieces.
        pieces.append(
            checkpoint(
                _attend_piece,
                *parts,
                replace(kind, offset=start - first),
                s_aux,
                use_reentrant=False,
            )
        )
    return torch.cat(pieces, dim=2)


def _attend_piece(
    query_RHQD: Tensor, key_RKCD: Tensor, value_RKCD: Tensor, kind: _LayerKind, s_aux: Tensor | None
) -> Tensor:
    """Attention of queries to the columns up to themselves."""
    behind_QC = kind.offset + torch.arange(query_RHQD.shape[2], device=query_RHQD.device)[:, None]
    behind_QC = behind_QC - torch.arange(key_RKCD.shape[2], device=query_RHQD.device)[None]
    seen_QC = (
        behind_QC >= 0 if kind.window is None else (behind_QC >= 0) & (behind_QC < kind.window)
    )
    return _attend_masked(query_RHQD, key_RKCD, value_RKCD, seen_QC, kind=kind, s_aux=s_aux)


def _attend_masked(
    query_RHQD: Tensor,
    key_RKCD: Tensor,
    value_RKCD: Tensor,
    seen_QC: Tensor,
    *,
    kind: _LayerKind,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of queries to the columns that each sees."""
    rows, heads, queries, size = query_RHQD.shape
    groups = heads // key_RKCD.shape[1]
    query_RKGQD = query_RHQD.reshape(rows, -1, groups, queries, size)
    scores = kind.scale * query_RKGQD.float() @ key_RKCD.float().transpose(2, 3)[:, :, None]
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~seen_QC, float("-inf"))
    if s_aux is None:
        shares = scores.softmax(-1)
    else:  # a sink takes a share of the attention and returns nothing (arXiv:2309.17453; gpt-oss)
        sink = s_aux.float().reshape(1, -1, groups, 1, 1).expand(rows, -1, -1, queries, 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    out = shares.to(value_RKCD.dtype) @ value_RKCD[:, :, None]
    return out.reshape(rows, heads, queries, -1)
