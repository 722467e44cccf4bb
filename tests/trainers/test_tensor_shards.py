"""What the ranks of a mesh have of each tensor, and which models' matrices can be divided."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.models.facts import facts_of
from agentrl.placement.footprint import of_rank
from agentrl.placement.mesh import Mesh
from agentrl.trainers.rank.origin import on_meta
from agentrl.trainers.rank.process_group import RowLayout
from agentrl.trainers.rank.tensor_files import Stored, pieces, small_pieces
from agentrl.trainers.rank.tensor_shards import check_matrices
from tests.model_families import SMALL


def rows_of(whole: Tensor, layout: RowLayout, rank: int) -> Tensor:
    """What a rank has of a tensor, as `fully_shard` leaves it of its part of the matrix."""
    place, number = divmod(rank, layout.neighbours)
    part = whole.chunk(layout.stacks)[number] if layout.stacks > 1 else whole
    part = part.chunk(layout.columns, dim=1)[number] if layout.columns > 1 else part
    return part[place * layout.most : (place + 1) * layout.most].contiguous()


@given(
    kind=st.sampled_from(["stacks", "columns", "copies"]),
    neighbours=st.integers(1, 3),
    places=st.integers(1, 4),
    rows=st.integers(1, 7),
    width=st.integers(1, 3),
    copies=st.integers(1, 2),
)
def test_the_parts_of_all_ranks_are_the_tensor_and_each_element_is_written_once(
    *, kind: str, neighbours: int, places: int, rows: int, width: int, copies: int
) -> None:
    sizes = (rows * neighbours if kind == "stacks" else rows, neighbours * width)
    whole = torch.arange(sizes[0] * sizes[1]).view(sizes)
    layout = RowLayout(whole.shape, places * neighbours, **{kind: neighbours})
    # A file has the first row as a tensor of its own.
    stored = [
        Stored("first", whole[0].shape, "it"),
        Stored("rest", whole[1:].shape, "it", sizes[1]),
    ]
    written: Mapping[str, list[int]] = {"first": [], "rest": []}
    gathered = torch.full((layout.ranks, layout.most, sizes[1] // layout.columns), -1)
    for rank in range(layout.ranks):
        own = rows_of(whole, layout, rank)
        gathered[layout.order[rank], : len(own)] = own
        filled = torch.full_like(own, -1)
        for piece in pieces(stored, {"it": layout.part(rank, filled)}):
            start = piece.start + (sizes[1] if piece.name == "rest" else 0)
            piece.values.copy_(whole.view(-1)[start : start + len(piece.values)])
        assert filled.equal(own)
        for copy in range(copies):
            share = layout.part(rank, own, copy, copies).share()
            for piece in small_pieces(stored, {"it": share}):
                start = piece.start + (sizes[1] if piece.name == "rest" else 0)
                assert piece.values.tolist() == list(range(start, start + len(piece.values)))
                written[piece.name] += piece.values.tolist()
    assert layout.joined(gathered).equal(whole)
    assert sorted(written["first"] + written["rest"]) == list(range(whole.numel()))


@pytest.mark.parametrize(
    ("kind", "settings", "ranks", "told"),
    [
        ("Qwen3Config", {}, 4, r"Qwen3ForCausalLM .* there are 2 heads of keys: write one of 1, 2"),
        ("Qwen3Config", {"vocab_size": 321}, 2, r"there are 321 ids in its vocabulary"),
        ("Qwen3Config", {"intermediate_size": 33}, 2, r"33 outputs of model.layers.0.mlp.gate"),
        ("GptOssConfig", {}, 2, r"GptOssForCausalLM .* has no plan \(base_model_tp_plan\)"),
        ("DeepseekV2Config", {"n_routed_experts": 4}, 2, r"kv_a_proj_with_mqa is mla_kv_a_proj"),
    ],
)
def test_a_model_whose_matrices_cannot_be_divided_is_refused_by_name(
    kind: str, settings: Mapping[str, Any], ranks: int, told: str
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = getattr(transformers, kind)(**{**SMALL, **sizes, "vocab_size": 320, **settings})
    with on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config)
    check_matrices(model, 1)
    with pytest.raises(ConfigError, match=rf"^trainer.tensor_parallel={ranks} .*{told}"):
        check_matrices(model, ranks)


def test_a_plan_of_memory_knows_what_ranks_gather_and_what_they_cannot_divide() -> None:
    def facts(kind: str, **settings: Any) -> Any:
        return facts_of(getattr(transformers, kind)(**{**SMALL, **settings}), kind)

    divided, fused = facts("Qwen3Config"), facts("Phi3Config", pad_token_id=0)
    assert divided.gathered == 0
    # of each of two layers, queries, keys and values, and twice the hidden units
    assert fused.gathered == sum(
        size - SMALL["hidden_size"] * 2
        for name, size in fused.linear_ends.items()
        if name in {"qkv_proj", "gate_up_proj"}
    )
    halved, whole = (
        of_rank(one.kept, one.layers, one, Mesh(tensor=2)).matrices / one.kept.matrices
        for one in (divided, fused)
    )
    assert halved < 0.8
    assert whole == 1
    assert facts("GptOssConfig").gathered is None
