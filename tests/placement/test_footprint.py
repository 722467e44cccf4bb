"""What is counted before a run is what there is in one: parameters, a trainer's tensors,
activations, the KV cache.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from agentrl.batch import TrainingSample, collate
from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.errors import ConfigError
from agentrl.models.facts import PUBLISHED, ModelFacts, facts_of, model_facts
from agentrl.models.vision import Vision
from agentrl.models.vision_families import FAMILIES as VISION_FAMILIES
from agentrl.placement.config import Assumptions
from agentrl.placement.devices import GIB, gpu_named
from agentrl.placement.footprint import (
    QUERIES_AT_ONCE,
    EngineLayout,
    TrainerLayout,
    activation_bytes,
    dispatched,
    engine_footprint,
    exchanged,
    head_bytes,
    layer_bytes,
    summed,
    trainer_footprint,
)
from agentrl.placement.mesh import Mesh
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS
from agentrl.testing.vision_models import create_tiny_vision_model
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trainers.compute.attention import ATTENTION, PIECE, Segments
from agentrl.trainers.compute.forward import DeviceMicroBatch, compute_logprobs_in, token_logprobs
from agentrl.trainers.compute.logprobs import Scaling
from agentrl.trainers.compute.recomputation import recompute_blocks
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from tests.memory import peak_bytes
from tests.tiers import evenly_crossed, only


@pytest.fixture(scope="module")
def facts(tiny_model_dir: Path) -> ModelFacts:
    return model_facts(tiny_model_dir)


def test_parameters_are_counted_as_the_model_has_them(
    facts: ModelFacts, tiny_model_dir: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.blocks == sum(p.numel() for p in model.model.layers.parameters())
    assert facts.embedding == model.get_output_embeddings().weight.numel()


def test_what_is_no_model_or_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_facts(tmp_path)
    unknown = tiny_of("mixtral")
    unknown.num_experts_per_tok = 0
    with pytest.raises(ConfigError, match="does not say how many a token uses"):
        facts_of(unknown, "mixtral")


def test_a_trainer_holds_the_bytes_that_were_counted(
    facts: ModelFacts, tiny_model_dir: Path
) -> None:
    config = LocalTrainer.Config(device="cpu")
    size = 16
    sample = TrainingSample(
        tuple(range(size)),
        (0,) + (1,) * (size - 1),
        (0.0,) * size,
        (1.0,) * size,
        (0,) * size,
        (0,) * size,
    )

    async def held() -> dict[str, int]:
        async with LocalTrainer(config, tiny_model_dir, total_steps=1) as trainer:
            await trainer.step(collate([sample]), LOSS, 1.0)
            assert trainer._ranks is not None
            worker: Any = trainer._ranks.workers[0]
            sharding = worker.made.sharding
            weights = list(sharding.model.parameters())
            moments = [
                m for state in sharding.optimizer.state.values() for m in state.values() if m.ndim
            ]
            return {
                "weights": sum(w.nbytes for w in weights),
                "gradients": sum(w.grad.nbytes for w in weights if w.grad is not None),
                "optimizer": sum(m.nbytes for m in moments),
            }

    counted = trainer_footprint(facts, config.layout(), ranks=1).parts
    assert {name: counted[name] for name in ("weights", "gradients", "optimizer")} == asyncio.run(
        held()
    )


def test_ranks_hold_their_part_of_what_is_sharded(facts: ModelFacts) -> None:
    def parts(layout: TrainerLayout, ranks: int) -> list[float]:
        counted, alone = (trainer_footprint(facts, layout, n).parts for n in (ranks, 1))
        return [
            round(counted[name] / alone[name], 3) for name in ("weights", "gradients", "optimizer")
        ]

    assert parts(FsdpTrainer.Config().layout(), 2) == [0.5, 0.5, 0.5]
    assert parts(FsdpTrainer.Config(world_size=4, replicas=2).layout(), 4) == [0.5, 0.5, 0.5]
    zero = [
        parts(DeepSpeedTrainer.Config.model_validate({"zero_stage": stage}).layout(), 4)
        for stage in (1, 2, 3)
    ]
    assert zero == [[1, 1, 0.25], [1, 0.25, 0.25], [0.25, 0.25, 0.25]]
    moments_and_copy = trainer_footprint(facts, DeepSpeedTrainer.Config().layout(), ranks=1).parts[
        "optimizer"
    ]
    assert moments_and_copy == (4 + 4 + 4) * facts.parameters
    assert parts(LocalTrainer.Config().layout(), 1) == [1, 1, 1]


def test_the_ranks_of_a_context_have_their_share_of_the_activations_and_what_they_exchange() -> (
    None
):
    """Qwen3-8B: 32 heads of queries and 8 of keys, of 128 numbers."""
    config = FsdpTrainer.Config(world_size=16, dtype="bfloat16", micro_batch_tokens=1 << 16)
    whole, cut = (replace(config.layout(), mesh=mesh) for mesh in (Mesh(1, 16), Mesh(context=16)))
    parts, alone = (trainer_footprint(QWEN3_8B, one, 16).parts for one in (cut, whole))
    assert parts["weights"] == alone["weights"]
    assert parts["activations"] == pytest.approx(alone["activations"] / 16, rel=0.05)
    # Each of 16 ranks needs a head of keys, so that each of 8 is sent twice.
    assert exchanged(QWEN3_8B, Mesh(context=16)) == (32 + 16) * 2 * 128
    more = layer_bytes(QWEN3_8B, cut, 4096) - layer_bytes(QWEN3_8B, whole, 4096)
    assert more == 2 * 2 * (32 + 16) * 2 * 128 * 4096


def test_ranks_that_divide_experts_gather_their_own_and_send_tokens_once_to_each_rank() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of 48 layers, each three matrices of 2048 x 768."""
    facts = model_facts(PUBLISHED / "Qwen/Qwen3-30B-A3B")
    config = FsdpTrainer.Config(world_size=16, dtype="bfloat16", micro_batch_tokens=4096)
    whole, cut = (replace(config.layout(), mesh=Mesh(1, 16, expert=n)) for n in (1, 8))
    parts, alone = (trainer_footprint(facts, one, 16).parts for one in (cut, whole))
    assert parts["weights"] == alone["weights"]
    elsewhere = 128 * 7 // 8 * 3 * 2048 * 768
    assert alone["gathered"] - parts["gathered"] == pytest.approx(2 * 2 * elsewhere, rel=1e-3)
    assert alone["block gradients"] - parts["block gradients"] == pytest.approx(
        2 * elsewhere, rel=1e-3
    )
    # 8 choices of 8 ranks: each rank is left out with probability (7 / 8) ** 8
    assert dispatched(facts, cut.mesh) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    more = layer_bytes(facts, cut, 1000) - layer_bytes(facts, whole, 1000)
    assert more == pytest.approx(1000 * (2 * 2 * 2 + 4) * 2048 * 5.25, rel=1e-2)


def test_ranks_that_divide_matrices_gather_and_keep_their_part_of_a_layer() -> None:
    """Qwen3-8B: 36 layers of hidden size 4096."""
    config = FsdpTrainer.Config(
        world_size=16,
        dtype="bfloat16",
        micro_batch_tokens=4096,
        activation_checkpointing="selective",
    )
    whole, cut = (replace(config.layout(), mesh=Mesh(1, 16 // n, tensor=n)) for n in (1, 4))
    parts, alone = (trainer_footprint(QWEN3_8B, one, 16).parts for one in (cut, whole))
    assert parts["weights"] == alone["weights"]
    for name in ("gathered", "block gradients", "reduce-scatter"):
        assert parts.get(name, 0) <= alone[name] / 4 + 1
    # the residual stream is whole: inputs of layers, and what two matrices of each add to it
    stream = 2 * 3 * 36 * 4096 * 4096
    kept, all_kept = (activation_bytes(QWEN3_8B, one, 4096) for one in (cut, whole))
    assert kept - stream == pytest.approx((all_kept - stream) / 4, rel=1e-3)
    assert summed(QWEN3_8B, cut.mesh) == (2 * 36 + 1) * 4096
    assert exchanged(QWEN3_8B, Mesh(context=2, tensor=4)) == (8 + 2) * 2 * 128


def test_what_is_offloaded_lies_in_the_hosts_memory(facts: ModelFacts) -> None:
    here = trainer_footprint(facts, FsdpTrainer.Config().layout(), 2)
    there = trainer_footprint(facts, FsdpTrainer.Config(optimizer_offload=True).layout(), 2)
    assert here.host == 12 * facts.parameters // 2  # a checkpoint that is being written
    assert there.host - here.host == here.total - there.total == 16 * facts.parameters // 2


QWEN3_8B = model_facts(PUBLISHED / "Qwen/Qwen3-8B")


def test_fsdp_sums_a_block_s_gradients_in_a_float32_buffer_of_its_size() -> None:
    """Qwen3-8B, bfloat16, eight ranks: the numbers of its layer, embedding and head by hand."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    head = 151_936 * 4096
    outside = 2 * head + 4096
    layout = FsdpTrainer.Config(dtype="bfloat16", activation_checkpointing="full").layout()
    parts = trainer_footprint(QWEN3_8B, layout, 8).parts
    assert parts["reduce-scatter"] == 4 * layer
    assert parts["gathered"] == 2 * (2 * layer + outside)
    assert parts["block gradients"] == 2 * (layer + head)
    # With little else, the gradients of embedding and head are what is summed at the peak.
    parts = trainer_footprint(QWEN3_8B, replace(layout, micro_batch_tokens=2), 8).parts
    assert parts["reduce-scatter"] == 4 * outside + 4 * outside // 8
    assert parts["block gradients"] == 2 * outside
    # A single rank sums nothing, and adapters have small gradients.
    assert "reduce-scatter" not in trainer_footprint(QWEN3_8B, layout, 1).parts
    lora = trainer_footprint(QWEN3_8B, replace(layout, lora_rank=16), 8).parts
    assert lora["reduce-scatter"] == 4 * (16 * QWEN3_8B.ends_of() // 36)


def test_gradients_that_are_summed_at_the_last_micro_batch_are_whole_until_then(
    facts: ModelFacts,
) -> None:
    layout = FsdpTrainer.Config(keep_gradients=True).layout()
    many, one = (trainer_footprint(facts, layout, 2, micro_batches=n).total for n in (3, 1))
    assert many - one == 4 * facts.parameters
    parts = FsdpTrainer.Config().layout()
    assert len({trainer_footprint(facts, parts, 2, micro_batches=n).total for n in (3, 1)}) == 1


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma3_text": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 6},
    "mixtral": {**EXPERTS, "num_local_experts": 6},
    "gpt_oss": {**EXPERTS, "num_local_experts": 6},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 6, "first_k_dense_replace": 1},
    "deepseek_v3": {**EXPERTS, **LATENT, "n_routed_experts": 6, "first_k_dense_replace": 1},
}


def tiny_of(family: str, layers: int = 2) -> Any:
    """The config of a small model of a family."""
    return AutoConfig.for_model(
        family, **{**SIZES, **FAMILIES[family], "num_hidden_layers": layers}
    )


def model_of(config: Any, precision: str = "float32") -> Any:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION, dtype=dtype
    ).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_each_family_are_counted_to_the_last_one(family: str) -> None:
    config = tiny_of(family)
    model, facts = model_of(config), facts_of(config, family)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.blocks == sum(p.numel() for p in model.base_model.layers.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert facts.active == facts.blocks - experts // 2  # three of six


# As their makers publish them: the whole and what a token meets of it, of embedding and head both.
PUBLISHED_SIZES = {
    "Qwen/Qwen3-1.7B": (1_720_574_976, 1.72e9),
    "Qwen/Qwen3-8B": (8_190_735_360, 8.19e9),
    "Qwen/Qwen3-32B": (32_762_123_264, 32.8e9),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 3.3e9),
    "openai/gpt-oss-20b": (20_914_757_184, 4.2e9),
}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_published_models_have_the_parameters_of_those_they_are_named_after(name: str) -> None:
    facts = model_facts(PUBLISHED / name)
    parameters, active = PUBLISHED_SIZES[name]
    assert facts.parameters == parameters
    assert facts.active + facts.parameters - facts.blocks == pytest.approx(active, rel=0.03)


def test_a_cache_holds_heads_or_latents_and_of_sliding_layers_only_the_window() -> None:
    plain = facts_of(tiny_of("qwen3"), "qwen3").kv
    # Layers, tokens, heads of keys, both.
    assert plain.numbers(100, 1, compact=True) == 2 * 100 * 2 * (2 * 16)
    # A head is not divided.
    assert plain.numbers(100, 4, compact=True) == plain.numbers(100, 2, compact=True)
    latent = facts_of(tiny_of("deepseek_v3"), "deepseek_v3").kv
    assert latent.numbers(100, 2, compact=True) == 2 * 100 * (20 + 8)  # whole on each device
    assert latent.numbers(100, 1, compact=False) == 2 * 100 * 8 * (16 + 12)
    sliding = tiny_of("gpt_oss")
    sliding.sliding_window = 32
    kv = facts_of(sliding, "gpt_oss").kv
    assert kv.numbers(100, 1, compact=True) == (100 + 32) * 2 * (2 * 16)
    assert kv.numbers(100, 1, compact=False) == (100 + 100) * 2 * (2 * 16)
    assert kv.mean_attended(100) == (50 + 32) / 2


@contextmanager
def saved(model: Any) -> Iterator[dict[int, Tensor]]:
    """By address: all tensors that are kept for the backward pass and are no weights, while this is
    open.
    """
    own = {
        weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def bytes_saved(config: Any, tokens: int, layout: TrainerLayout) -> int:
    """What autograd really keeps of a sample between the passes."""
    model = model_of(config, layout.precision)
    recompute_blocks(model, layout.recompute)
    segments = Segments.of([tokens], torch.device("cpu"))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=layout.precision == "autocast")
    with saved(model) as kept, autocast:
        model.base_model(
            input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False, segments=segments
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def of_layers(family: str, layout: TrainerLayout, tokens: int = 1280) -> tuple[int, int]:
    """Bytes of a sample in the last layer, saved and counted: the difference that it makes."""
    configs = [tiny_of(family, layers) for layers in (3, 2)]
    more, less = (bytes_saved(config, tokens, layout) for config in configs)
    counted, of_fewer = (
        activation_bytes(facts_of(config, family), layout, tokens) for config in configs
    )
    return more - less, counted - of_fewer


@pytest.mark.parametrize(
    ("family", "precision"), evenly_crossed(9, FAMILIES, ["float32", "bfloat16"])
)
def test_layers_keep_the_activations_that_were_counted(family: str, precision: Any) -> None:
    kept, counted = of_layers(family, TrainerLayout(precision, 128, 1, "none"))
    assert counted == pytest.approx(kept, rel=0.04 if precision == "float32" else 0.08)


@pytest.mark.parametrize("tokens", [100, 129, 512, 1024])
def test_samples_whose_queries_ask_in_pieces_keep_no_more(tokens: int) -> None:
    kept, counted = of_layers("llama", TrainerLayout("float32", 128, 1, "none"), tokens)
    assert counted == pytest.approx(kept, rel=0.01)


def test_autocast_keeps_casts_beside_what_is_cast() -> None:
    kept, counted = of_layers("qwen3", TrainerLayout("autocast", 128, 1, "none"))
    # The casts of weights, which are counted elsewhere.
    counted += 2 * facts_of(tiny_of("qwen3"), "qwen3").block
    assert kept <= counted <= 1.15 * kept  # norms of heads keep less


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_full_recomputation_keeps_the_inputs_of_layers(precision: Any) -> None:
    kept, counted = of_layers("qwen3", TrainerLayout(precision, 128, 1, "full"))
    assert counted == kept


@pytest.mark.parametrize(
    ("family", "recompute"),
    only(
        [("qwen3", "none"), ("qwen3", "full"), ("qwen3_moe", "none"), ("qwen3_moe", "full")],
        ("qwen3", "full"),
        ("qwen3_moe", "none"),
    ),
)
def test_a_step_peaks_at_the_bytes_that_were_counted(family: str, recompute: Any) -> None:
    """Without the head: the difference of two lengths, so that gradients of weights fall out."""
    config, layout = tiny_of(family), TrainerLayout("float32", 1, 1, recompute)
    facts, model = facts_of(config, family), model_of(config)
    recompute_blocks(model, recompute)

    def peak(tokens: int) -> int:
        segments, ids_1T = (
            Segments.of([tokens], torch.device("cpu")),
            torch.zeros(1, tokens, dtype=torch.long),
        )

        def step() -> None:
            model.base_model(
                input_ids=ids_1T, use_cache=False, segments=segments
            ).last_hidden_state.sum().backward()

        return peak_bytes(step)

    def counted(tokens: int) -> int:
        hidden = head_bytes(replace(facts, vocab=0), layout, tokens)
        return activation_bytes(facts, layout, tokens) + max(
            layer_bytes(facts, layout, tokens), hidden
        )

    assert counted(2560) - counted(1280) == pytest.approx(peak(2560) - peak(1280), rel=0.08)


def test_pieces_of_attention_are_as_large_as_was_counted() -> None:
    assert PIECE == QUERIES_AT_ONCE


class Bare(torch.nn.Module):
    """A model without layers: an embedding and a head."""

    def __init__(self, vocab: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.embedding = torch.nn.Embedding(vocab, 8, dtype=dtype)
        self.head = torch.nn.Linear(8, vocab, bias=False, dtype=dtype)

    def base_model(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_logits_take_the_bytes_at_the_peak_that_were_counted(
    facts: ModelFacts, precision: Any
) -> None:
    tokens, vocab = 64, 30_000
    model = Bare(vocab, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    nothing_T = torch.zeros(tokens)
    index_T = torch.arange(tokens)
    samples = DeviceMicroBatch(
        index_T,
        index_T,
        Segments.of([tokens], torch.device("cpu")),
        index_T,
        index_T,
        nothing_T,
        nothing_T,
        nothing_T,
        index_T,
        weights_N=nothing_T,
        support_NS=None,
    )
    compute_logprobs_in(model.head, Scaling(0.8))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            logprobs_N = token_logprobs(model, samples)
        logprobs_N.sum().backward()

    layout = TrainerLayout(precision, tokens, 1, "none")
    counted = head_bytes(replace(facts, vocab=vocab, hidden=8), layout, tokens)
    assert peak_bytes(step) == pytest.approx(counted, rel=0.03)


def test_a_local_engine_holds_the_cache_that_was_counted(
    facts: ModelFacts, tiny_model_dir: Path
) -> None:
    requests, length = 8, 256  # the cache grows by powers of two: these fill it
    config = LocalEngine.Config(max_batch=requests, device="cpu")

    async def held() -> int:
        async with LocalEngine(config, tiny_model_dir) as engine:
            async with asyncio.TaskGroup() as tasks:
                for number in range(requests):
                    request = GenerateRequest(
                        str(number), (5,) * length, SamplingParams(max_tokens=1)
                    )
                    tasks.create_task(engine.generate(request))
            assert engine._model is not None
            return engine._model.kv_bytes

    counted = engine_footprint(facts, config.layout(), 1, gpu_named("H100"), length)
    assert counted.parts["kv cache"] == asyncio.run(held())


def test_an_engine_with_a_share_of_its_device_fills_it_with_cache(facts: ModelFacts) -> None:
    layout = EngineLayout(number=2, fraction=0.5)
    device = replace(gpu_named("H100"), memory=4 * GIB)
    assert engine_footprint(facts, layout, 1, device, 100).total == pytest.approx(2 * GIB, rel=1e-6)
    given = engine_footprint(facts, replace(layout, kv_bytes=GIB), 2, device, 100)
    assert given.parts["kv cache"] == GIB
    assert given.parts["weights"] == facts.parameters  # two bytes for each, on two devices


@pytest.mark.parametrize("devices", [1, 4])
def test_vllm_s_cache_is_what_its_share_leaves_beside_all_else(devices: int) -> None:
    device, layout = gpu_named("H100"), VllmEngine.Config(dtype="bfloat16").layout()
    assume = Assumptions(cuda_context_gib=0.5, nccl_gib=1.5, cuda_graphs_gib=3)
    size = engine_footprint(QWEN3_8B, layout, devices, device, 3000, assume=assume)
    assert size.asleep == (0.5 + 3 + (1.5 if devices > 1 else 0)) * GIB
    share = sum(bytes_ for use, bytes_ in size.parts.items() if use != "weight staging")
    assert share == pytest.approx(0.9 * device.memory, abs=1)
    assert size.parts["weight staging"] == 2 * 151_936 * 4096 // devices
    # What its sleep frees, and what it needs to wake.
    assert size.to_wake == size.parts["weights"] + size.parts["kv cache"]
    # A step of more tokens leaves less, and so do graphs.
    larger = replace(layout, prefill_tokens=2 * layout.prefill_tokens)
    more = engine_footprint(QWEN3_8B, larger, devices, device, 3000, assume=assume)
    token = 3 * 4096 + 3 * 12288 // devices
    assert more.parts["step activations"] - size.parts["step activations"] == pytest.approx(
        2 * layout.prefill_tokens * token
    )
    eager = VllmEngine.Config(dtype="bfloat16", enforce_eager=True).layout()
    without = engine_footprint(QWEN3_8B, eager, devices, device, 3000, assume=assume)
    assert without.parts["kv cache"] - size.parts["kv cache"] == 3 * GIB


@pytest.mark.parametrize(
    "config", ["GPT2Config", "GPTNeoXConfig", "OPTConfig", "Starcoder2Config", "PhiConfig"]
)
def test_a_norm_with_a_bias_is_counted_as_one_without(config: str) -> None:
    made = getattr(transformers, config)(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99
    )
    facts = facts_of(made, config)
    norms = 1 if config == "PhiConfig" else 2
    assert facts.largest.norms == norms * 64
    assert facts.parameters > facts.blocks > 0


def test_layers_with_other_heads_are_counted_by_their_own() -> None:
    config = transformers.Gemma4TextConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        vocab_size=99,
        vocab_size_per_layer_input=99,
    )
    facts = facts_of(config, "gemma")
    assert facts.attention == 2 * 2 * (16 + 16) * 2 + 2 * 2 * (32 + 32)
    assert facts.kv.heads.key_size == 32


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_trained_tower_keeps_the_numbers_that_were_counted(family: str, tmp_path: Path) -> None:
    create_tiny_vision_model(tmp_path / "model", family)  # type: ignore[arg-type]
    counted = model_facts(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    vision = Vision(model, tmp_path / "model")
    noise = np.random.default_rng(0).integers(0, 256, (224, 320, 3), dtype=np.uint8)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = vision.features(vision.inputs([EncodedImage.of_pixels(noise)]))
    held = sum(one.untyped_storage().nbytes() for one in kept.values())
    expected = 4 * counted.tower_kept * len(found.rows_FH)
    assert 0.9 * held <= expected <= 1.35 * held
    tokens = 1000
    frozen = LocalTrainer.Config(device="cpu").layout()
    trained = LocalTrainer.Config(device="cpu", train_tower=True).layout()
    more = activation_bytes(counted, trained, tokens) - activation_bytes(counted, frozen, tokens)
    assert more == trained.number * counted.tower_kept * tokens
