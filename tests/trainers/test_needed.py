"""The last layer's attention is computed for the needed tokens only, and is what it would be for
all of them.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tokens.arrays import ints
from agentrl.trainers.compute import needed
from agentrl.trainers.compute.attention import Segments, attend
from agentrl.trainers.compute.prefixes import find_shared
from tests.trainers.test_prefixes import rows_of

CPU = torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 4, 2, 8
rows = st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=24), min_size=1, max_size=6)


def packed(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@given(rows, st.data())
def test_the_needed_tokens_have_the_attention_and_gradients_that_all_tokens_have(listed, data):
    listed.sort(key=len, reverse=True)
    lengths, shared = [len(row) for row in listed], find_shared(rows_of(listed))
    tokens = sum(lengths) if shared is None else len(shared.computed_S)
    places_P = ints(sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1, max_size=6))))
    whole, few = Segments.of(lengths, CPU, shared), Segments.of(lengths, CPU, shared, places_P)
    results = []
    for segments in (whole, few):
        inputs = packed(tokens)
        out_SHD = attend(torch.nn.Module(), *inputs, None, segments=segments, needed_only=True)[0][
            0
        ]
        out_PHD = out_SHD[torch.from_numpy(places_P.astype(np.int64))]
        out_PHD.mul(
            torch.randn(out_PHD.shape, generator=torch.Generator().manual_seed(1))
        ).sum().backward()
        results.append([out_PHD, *(one.grad for one in inputs)])
    for wanted, found in zip(*results, strict=True):
        assert torch.allclose(wanted, found, atol=1e-5)


@pytest.mark.parametrize("lengths", [[300], [300, 280, 40], [90, 90, 90, 8]])
def test_few_needed_tokens_cost_as_many_queries(lengths, monkeypatch):
    queries: list[int] = []
    fused = needed.scaled_dot_product_attention

    def counted(query, *args, **options):
        queries.append(query.shape[0] * query.shape[2])
        return fused(query, *args, **options)

    ends = np.cumsum(lengths)
    segments = Segments.of(
        lengths, CPU, None, ints([end - before for end in ends for before in (3, 1)])
    )
    monkeypatch.setattr(needed, "scaled_dot_product_attention", counted)
    attend(torch.nn.Module(), *packed(sum(lengths)), None, segments=segments, needed_only=True)
    assert sum(queries) == 2 * len(lengths)


def test_the_masks_of_needed_tokens_are_linear_in_the_tokens():
    def numbers(tokens: int) -> int:
        places_P = ints(range(tokens - needed.MAX_NEEDED_PER_SEGMENT - 1, tokens - 1))
        found = Segments.of([tokens], CPU, None, places_P).needed
        assert found is not None
        return sum(one.seen_RQL.numel() for _, one in found.blocks)

    assert numbers(4096) == 2 * numbers(2048)
    assert (
        Segments.of([4096], CPU, None, ints(range(needed.MAX_NEEDED_PER_SEGMENT + 1))).needed
        is None
    )


def test_a_segment_of_which_most_is_needed_is_computed_whole():
    assert Segments.of([20], CPU, None, ints(range(5, 19))).needed is None
