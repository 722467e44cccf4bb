"""Slices of a sequence, and what a context changes in the settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.trainers.compute.context import ContextGroup, ContextSlice, check_heads
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import longest_sample
from agentrl.trainers.settings import MOST_TOKENS


def slices(tokens: int, ranks: int) -> list[ContextSlice]:
    """The slices of all ranks; nothing is sent."""
    group: Any = None
    return [ContextSlice(ContextGroup(group, rank, ranks), tokens) for rank in range(ranks)]


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_each_token_is_in_one_slice_and_slices_are_equally_long(
    tokens: int, ranks: int, data: st.DataObject
) -> None:
    values_S = np.arange(1, tokens + 1)
    cut = [one.cut(values_S) for one in slices(tokens, ranks)]
    assert len({len(one) for one in cut}) == 1
    joined = np.concatenate(cut)
    assert joined[:tokens].tolist() == values_S.tolist()
    assert not joined[tokens:].any()
    assert len(joined) < tokens + ranks
    places_N = np.asarray(data.draw(st.lists(st.integers(0, tokens - 1), min_size=1)))
    own = [one.own(places_N) for one in slices(tokens, ranks)]
    assert sorted(np.concatenate(own).tolist()) == list(range(len(places_N)))
    for one, own_O in zip(slices(tokens, ranks), own, strict=True):
        found_O = one.cut(values_S)[places_N[own_O] - one.start]
        assert found_O.tolist() == values_S[places_N[own_O]].tolist()


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 96}, 96),
        ({"max_position_embeddings": 96, "text_config": None}, 96),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({}, MOST_TOKENS),
    ],
)
def test_a_sample_is_as_long_as_the_config_of_its_model_has_positions(
    tmp_path: Path, config: Mapping[str, Any], tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_sample(tmp_path) == tokens


def test_a_micro_batch_has_room_for_the_tokens_of_all_ranks_that_compute_it() -> None:
    config = FsdpTrainer.Config(world_size=4, context_parallel=4)
    assert config.within(10**6).micro_batch_tokens == 4 * MOST_TOKENS
    assert config.within(1000).micro_batch_tokens == 1000
    given_tokens = FsdpTrainer.Config(context_parallel=1, micro_batch_tokens=77)
    assert given_tokens.within(10**6).micro_batch_tokens == 77


def test_ranks_that_make_no_mesh_are_refused_with_a_number_that_does() -> None:
    with pytest.raises(ValueError, match=r"6 ranks .* of groups of 2 .*: write world_size: 8"):
        FsdpTrainer.Config(world_size=6, replicas=2, context_parallel=2)
    mesh = FsdpTrainer.Config(world_size=12, replicas=2, context_parallel=2).mesh
    assert (mesh.replicate, mesh.shard, mesh.context) == (2, 3, 2)


def test_heads_that_cannot_be_divided_are_refused_with_numbers_that_can() -> None:
    check_heads(12, 4, "Tiny")
    with pytest.raises(
        ConfigError, match=r"context_parallel=5 .* Tiny .* 12: write one of 1, 2, 3, 4, 6, 12"
    ):
        check_heads(12, 5, "Tiny")
