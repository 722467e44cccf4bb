"""How much memory ranks take when they start, and what they can start from."""

import asyncio
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster.processes import start_local
from agentrl.errors import ConfigError
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank.origin import stored_tensors
from agentrl.weights.publisher import checksum

MIB = 1 << 20
SLACK = 40 * MIB
"""What torch's kernels, allocators and collectives take besides weights."""


@dataclass(frozen=True)
class Watched:
    """Makes a rank that can say by how much its resident memory grew at most since all had been
    imported.
    """

    make: Callable[[int], Any]

    def __call__(self, number: int) -> object:
        rank = self.make(number)
        importlib.import_module("transformers.models.qwen3.modeling_qwen3")
        importlib.import_module(rank._spec.sharding.partition(":")[0])
        # The largest resident size begins at the present one.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        type(rank).grown = lambda _: resident("VmHWM") - before
        return rank


def resident(which: str) -> int:
    """The resident memory of this process in bytes: at present (VmRSS), or at most (VmHWM)."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(which)
    ]
    return 1024 * int(line.split()[1])


def write_model(folder: Path, blocks: int) -> tuple[int, int]:
    """Write a random model in bfloat16, with blocks of 48 MiB in float32; returns the bytes of all
    of it, and of one block, in float32.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=blocks,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return 4 * model.num_parameters(), 4 * sum(
        p.numel() for p in model.model.layers[0].parameters()
    )


@pytest.mark.slow
# 400 and 1,300 MB.
@pytest.mark.long
@pytest.mark.parametrize("blocks", [8, pytest.param(26, marks=pytest.mark.long)])
def test_a_rank_takes_its_share_of_the_model_and_one_block_to_start(
    blocks: int, tmp_path: Path
) -> None:
    whole, block = write_model(tmp_path / "model", blocks)
    ranks: list[Any] = []

    async def start(role: str, make: Any, count: int) -> Any:
        ranks.append(await start_local(role, Watched(make), count))
        return ranks[-1]

    async def main() -> list[int]:
        config = FsdpTrainer.Config(world_size=2)
        async with FsdpTrainer(config, tmp_path / "model", total_steps=1, start=start):
            grown: list[int] = await ranks[0].all("grown")
            return grown

    grown = asyncio.run(main())
    print(f"\n{[size // MIB for size in grown]} MiB; block {block // MIB}, whole {whole // MIB}")
    assert max(grown) <= whole // 2 + block + SLACK


async def first_weights(folder: Path) -> str:
    async with LocalTrainer(LocalTrainer.Config(device="cpu"), folder, total_steps=1) as trainer:
        return checksum(await trainer.weights())


def test_weights_are_read_from_any_form_that_transformers_reads(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shallow_model_dir, dtype=torch.float32)
    expected = checksum(
        {name: w for name, w in model.state_dict().items() if name != "lm_head.weight"}
    )
    assert asyncio.run(first_weights(shallow_model_dir)) == expected
    model.save_pretrained(tmp_path / "split", max_shard_size="500KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    assert asyncio.run(first_weights(tmp_path / "split")) == expected
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_bytes(
        (shallow_model_dir / "config.json").read_bytes()
    )
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    assert asyncio.run(first_weights(tmp_path / "pickled")) == expected


def test_a_folder_that_lacks_weights_names_them(shallow_model_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((shallow_model_dir / "config.json").read_bytes())
    weights = load_file(shallow_model_dir / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights of the model .*\['model.norm.weight'\]"):
        asyncio.run(first_weights(tmp_path))


def test_experts_that_are_one_tensor_are_stored_one_by_one() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = Qwen3MoeForCausalLM(config)
    state = model.state_dict()
    published = revert_weight_conversion(model, dict(state))
    stored = stored_tensors(model)
    assert {one.name for one in stored} == published.keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in published
    for one in stored:
        elements = state[one.of].flatten()[one.start : one.start + one.shape.numel()]
        assert torch.equal(elements.view(one.shape), published[one.name]), one
