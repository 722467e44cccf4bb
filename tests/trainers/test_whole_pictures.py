"""Tokens of pictures see all of their picture, in packed segments with shared prefixes."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.tokens.arrays import ints
from agentrl.trainers.compute.attention import Segments, attend
from agentrl.trainers.compute.prefixes import SharedPrefixes, find_shared
from agentrl.trainers.compute.whole_pictures import PictureSpan, PictureSpans
from tests.properties import examples
from tests.trainers.test_needed import HEADS, SIZE, packed
from tests.trainers.test_prefixes import rows_of

CPU = torch.device("cpu")
TOKENS = {-1: 3, -2: 5}
"""Of the pictures with these numbers."""
parts = st.sampled_from([0, 1, -1, -2])
lists = st.lists(st.lists(parts, min_size=1, max_size=8), min_size=1, max_size=4)


def written(rows: list[list[int]]) -> tuple[list[list[int]], list[PictureSpan]]:
    """Rows with as many tokens for each picture as it has, the longest first; and the pictures."""
    listed = [[part for part in row for _ in range(TOKENS.get(part, 1))] for row in rows]
    order = sorted(range(len(rows)), key=lambda number: -len(listed[number]))
    spans, first = [], 0
    for number in order:
        start = first
        for part in rows[number]:
            if part < 0:
                spans.append(PictureSpan(first, start, start + TOKENS[part]))
            start += TOKENS.get(part, 1)
        first = start
    return [listed[number] for number in order], spans


def by_masks(
    inputs: list[Tensor],
    lengths: list[int],
    shared: SharedPrefixes | None,
    spans: list[PictureSpan],
    **kind: Any,
) -> Tensor:
    """The same by a mask over all tokens, (S, H, D)."""
    total = sum(lengths)
    places = np.arange(total) if shared is None else shared.places_T
    query, key, value = (one[0][:, torch.from_numpy(places).long()] for one in inputs)
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places_T = torch.arange(total)
    seen_TT = places_T[:, None] >= places_T
    for span in spans:
        seen_TT[span.start : span.stop, span.start : span.stop] = True
    seen_TT &= segment_T[:, None] == segment_T
    if kind["sliding_window"] is not None:
        seen_TT &= places_T > places_T[:, None] - kind["sliding_window"]
    key, value = (one.repeat_interleave(HEADS // one.shape[0], 0) for one in (key, value))
    scores = query @ key.transpose(1, 2) * SIZE**-0.5
    if kind["softcap"] is not None:
        scores = kind["softcap"] * torch.tanh(scores / kind["softcap"])
    scores = scores.masked_fill(~seen_TT, float("-inf"))
    if kind["s_aux"] is not None:
        sinks = kind["s_aux"][:, None, None].expand(-1, total, 1)
        scores = torch.cat([scores, sinks], -1)
    out_THD = (scores.softmax(-1)[..., :total] @ value).transpose(0, 1)
    return out_THD if shared is None else out_THD[torch.from_numpy(shared.computed_S).long()]


@given(
    rows=lists,
    window=st.sampled_from([None, 1, 2, 4, 9]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    only_windows=st.booleans(),
    data=st.data(),
)
@examples(300)
def test_tokens_of_pictures_see_what_a_mask_of_all_tokens_says(
    *,
    rows: list[list[int]],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    only_windows: bool,
    data: Any,
) -> None:
    listed, spans = written(rows)
    pictures = PictureSpans(spans, only_windows)
    lengths, shared = [len(row) for row in listed], find_shared(rows_of(listed))
    tokens = sum(lengths) if shared is None else len(shared.computed_S)
    few = data.draw(st.booleans())
    chosen = st.sets(st.integers(0, tokens - 1), min_size=1, max_size=4)
    needed_P = ints(sorted(data.draw(chosen)) if few else range(tokens))
    kind: dict[str, Any] = {
        "sliding_window": window,
        "softcap": softcap,
        "s_aux": torch.arange(HEADS) / 4 if sinks else None,
    }
    segments = Segments.of(lengths, CPU, shared, needed_P if few else None, pictures=pictures)
    results = []
    for own in (True, False):
        inputs = packed(tokens)
        if own:
            query, key, value = inputs
            options: dict[str, Any] = {"segments": segments, "needed_only": few, **kind}
            out_SHD = attend(torch.nn.Module(), query, key, value, None, **options)[0][0]
        else:
            seen = spans if window is not None or not only_windows else []
            out_SHD = by_masks(inputs, lengths, shared, seen, **kind)
        out_PHD = out_SHD[torch.from_numpy(needed_P.astype(np.int64))]
        weights = torch.randn(out_PHD.shape, generator=torch.Generator().manual_seed(1))
        out_PHD.mul(weights).sum().backward()  # type: ignore[no-untyped-call]
        results.append([out_PHD, *(one.grad for one in inputs)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_picture_is_computed_once_and_not_at_all_where_none_of_its_results_is_needed() -> None:
    listed, spans = written([[1, -1, 0, 1], [1, -1, 1], [0, -1, 1]])
    lengths, shared = [len(row) for row in listed], find_shared(rows_of(listed))
    assert shared is not None
    last_P = ints([len(shared.computed_S) - 1])
    pictures = Segments.of(lengths, CPU, shared, last_P, pictures=PictureSpans(spans)).pictures
    assert pictures is not None
    assert len(pictures.spans) == 2
    assert not pictures.needed
    assert Segments.of(lengths, CPU, shared, last_P).pictures is None
    within_P = ints([int(pictures.places_I[0])])
    seen = Segments.of(lengths, CPU, shared, within_P, pictures=PictureSpans(spans)).pictures
    assert seen is not None
    assert seen.needed
