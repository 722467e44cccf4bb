"""What is counted before a run is what there is in one: parameters, a trainer's tensors, activations, the KV cache."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.batch import TrainingSample, collate
from agentrl.engines.local import LocalEngine
from agentrl.errors import ConfigError
from agentrl.placement.devices import GIB, gpu_named
from agentrl.placement.footprint import (
    EngineLayout,
    ModelFacts,
    TrainerLayout,
    activation_bytes,
    engine_footprint,
    model_facts,
    trainer_footprint,
)
from agentrl.protocols import GenerateRequest, SamplingParams
from agentrl.testing.trainers import LOSS
from agentrl.trainers.attention import ATTENTION, Segments
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.forward import DeviceMicroBatch, compute_logprobs_in, token_logprobs
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.logprobs import Scaling
from agentrl.trainers.recomputation import recompute_blocks

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"


@pytest.fixture(scope="module")
def facts(tiny_model_dir: Path) -> ModelFacts:
    return model_facts(tiny_model_dir)


def test_parameters_are_counted_as_the_model_has_them(facts: ModelFacts, tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.blocks == sum(p.numel() for p in model.model.layers.parameters())
    assert facts.embedding == model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize(("shape", "parameters"), [("qwen3-1.7b", 1_720_574_976), ("qwen3-8b", 8_190_735_360)])
def test_shipped_shapes_have_the_parameters_of_the_models_they_are_named_after(shape: str, parameters: int) -> None:
    assert model_facts(SHAPES / shape).parameters == parameters


def test_what_is_no_model_or_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    with pytest.raises(ConfigError, match="mixture of experts"):
        model_facts(tmp_path)


def test_a_trainer_holds_the_bytes_that_were_counted(facts: ModelFacts, tiny_model_dir: Path) -> None:
    config = LocalTrainer.Config(device="cpu")
    size = 16
    sample = TrainingSample(
        tuple(range(size)), (0,) + (1,) * (size - 1), (0.0,) * size, (1.0,) * size, (0,) * size, (0,) * size
    )

    async def held() -> dict[str, int]:
        async with LocalTrainer(config, tiny_model_dir, total_steps=1) as trainer:
            await trainer.step(collate([sample]), LOSS, 1.0)
            assert trainer._ranks is not None
            worker: Any = trainer._ranks.workers[0]
            sharding = worker.made.sharding
            weights = list(sharding.model.parameters())
            moments = [m for state in sharding.optimizer.state.values() for m in state.values() if m.ndim]
            return {
                "weights": sum(w.nbytes for w in weights),
                "gradients": sum(w.grad.nbytes for w in weights if w.grad is not None),
                "optimizer": sum(m.nbytes for m in moments),
            }

    counted = trainer_footprint(facts, config.layout(), ranks=1).parts
    assert {name: counted[name] for name in ("weights", "gradients", "optimizer")} == asyncio.run(held())


def test_ranks_hold_their_part_of_what_is_sharded(facts: ModelFacts) -> None:
    def parts(layout: TrainerLayout, ranks: int) -> list[float]:
        counted, alone = (trainer_footprint(facts, layout, n).parts for n in (ranks, 1))
        return [round(counted[name] / alone[name], 3) for name in ("weights", "gradients", "optimizer")]

    assert parts(FsdpTrainer.Config().layout(), 2) == [0.5, 0.5, 0.5]
    zero = [parts(DeepSpeedTrainer.Config.model_validate({"zero_stage": stage}).layout(), 4) for stage in (1, 2, 3)]
    assert zero == [[1, 1, 0.25], [1, 0.25, 0.25], [0.25, 0.25, 0.25]]
    assert parts(LocalTrainer.Config().layout(), 1) == [1, 1, 1]


def test_what_is_offloaded_lies_in_the_hosts_memory(facts: ModelFacts) -> None:
    here = trainer_footprint(facts, FsdpTrainer.Config().layout(), 2)
    there = trainer_footprint(facts, FsdpTrainer.Config(cpu_offload=True).layout(), 2)
    assert there.host == 16 * facts.parameters // 2
    assert here.total - there.total == there.host


def test_gradients_that_are_summed_at_the_last_micro_batch_are_whole_until_then(facts: ModelFacts) -> None:
    layout = FsdpTrainer.Config(keep_gradients=True).layout()
    many, one = (trainer_footprint(facts, layout, 2, micro_batches=n).total for n in (3, 1))
    assert many - one == 4 * facts.parameters
    parts = FsdpTrainer.Config().layout()
    assert len({trainer_footprint(facts, parts, 2, micro_batches=n).total for n in (3, 1)}) == 1


@contextmanager
def saved(model: Any) -> Iterator[dict[int, Tensor]]:
    """By address: all tensors that are kept for the backward pass and are no weights, while this is open."""
    own = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def kept_bytes(folder: Path, layers: int, tokens: int, layout: TrainerLayout) -> int:
    """What autograd really keeps of a sample."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    dtype = torch.bfloat16 if layout.precision == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    if layout.recompute == "full":
        recompute_blocks(model, "full")
    segments = Segments.of([tokens], torch.device("cpu"))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=layout.precision == "autocast")
    with saved(model) as kept, autocast:
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False, segments=segments)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_layers_keep_the_activations_that_were_counted(
    facts: ModelFacts, tiny_model_dir: Path, precision: Any, recompute: Any
) -> None:
    """Two layers more, 128 tokens more: casts of weights and what is outside of layers fall out of the difference."""
    layout = TrainerLayout(precision, 128, 1, recompute)

    def of_layers(tokens: int) -> int:
        return kept_bytes(tiny_model_dir, 3, tokens, layout) - kept_bytes(tiny_model_dir, 1, tokens, layout)

    def counted(tokens: int) -> int:
        three, one = (activation_bytes(replace(facts, layers=n), layout, tokens) for n in (3, 1))
        return three - one

    assert counted(256) - counted(128) == pytest.approx(of_layers(256) - of_layers(128), rel=0.01)


class Bare(torch.nn.Module):
    """A model without layers: an embedding and a head."""

    def __init__(self, vocab: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, 8, dtype=dtype)
        self.head = torch.nn.Linear(8, vocab, bias=False, dtype=dtype)

    def base_model(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_logits_take_the_bytes_at_the_peak_that_were_counted(facts: ModelFacts, precision: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            logprobs_N = token_logprobs(model, samples)
        logprobs_N.sum().backward()
    changes = [event.nbytes() for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    layout = TrainerLayout(precision, tokens, 1, "none")
    counted = trainer_footprint(replace(facts, vocab=vocab), layout, 1).parts["logits"]
    assert max(accumulate(changes)) == pytest.approx(counted, rel=0.03)


def test_a_local_engine_holds_the_cache_that_was_counted(facts: ModelFacts, tiny_model_dir: Path) -> None:
    requests, length = 8, 256  # the cache grows by powers of two: these fill it
    config = LocalEngine.Config(max_batch=requests, device="cpu")

    async def held() -> int:
        async with LocalEngine(config, tiny_model_dir) as engine:
            async with asyncio.TaskGroup() as tasks:
                for number in range(requests):
                    request = GenerateRequest(str(number), (5,) * length, SamplingParams(max_tokens=1))
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
