"""Trainers of several ranks: the contract of a trainer over real process groups, and against one
process.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.algorithms import losses as of_tokens
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.engines.packed_model import PackedModel
from agentrl.models.facts import model_facts
from agentrl.models.weight_names import WeightNames
from agentrl.placement.footprint import trainer_footprint
from agentrl.placement.mesh import Mesh
from agentrl.testing.trainers import (
    LOSS,
    TrainerCase,
    check_equals_reference,
    check_refuses_non_finite,
    check_resume,
    check_trainer,
    random_batches,
)
from agentrl.trainers.batch_shards import shard_batch
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.spec import TrainerSpec
from agentrl.weights.bundle import weight_shapes
from tests.model_families import make_model
from tests.placement.live_bytes import LiveBytes
from tests.processes import open_to_others
from tests.trainers.shared_processes import Processes
from tests.trainers.test_balance import batch_for, folder_of, nothing

pytestmark = pytest.mark.slow
RANKS = 2
value_loss = partial(of_tokens.value_loss, clip=None)


@pytest.fixture(scope="module")
def alone(shallow_model_dir: Path) -> Any:
    """What twenty steps on one process come to, with adapters or without: made once for all that
    are held to it.
    """

    @cache
    def trained(adapters: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        make = make_trainer(LocalTrainer, {"device": "cpu", "lora": LORA if adapters else None})
        return asyncio.run(train(make, shallow_model_dir, random_batches(shallow_model_dir, 20)))

    return trained


KINDS: dict[str, tuple[type[GroupTrainer], dict[str, Any]]] = {
    "fsdp": (FsdpTrainer, {"world_size": RANKS}),
    "fsdp, whole": (
        FsdpTrainer,
        {"world_size": RANKS, "reshard_after_forward": False, "keep_gradients": True},
    ),
    "deepspeed, ZeRO 1": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 1}),
    "deepspeed, ZeRO 2": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 2}),
    "deepspeed, ZeRO 3": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 3}),
}
LORA = {"rank": 4, "alpha": 8.0}
OPTIONS: dict[str, tuple[type[GroupTrainer], dict[str, Any]]] = {
    "fsdp, offloaded": (
        FsdpTrainer,
        {"world_size": RANKS, "optimizer_offload": True, "activation_offload": True},
    ),
    "fsdp, recomputing": (
        FsdpTrainer,
        {"world_size": RANKS, "activation_checkpointing": "selective"},
    ),
    "fsdp, adapters": (FsdpTrainer, {"world_size": RANKS, "lora": LORA}),
    "ZeRO 2, offloaded": (
        DeepSpeedTrainer,
        {"world_size": RANKS, "zero_stage": 2, "offload": True},
    ),
    "ZeRO 2, adapters": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 2, "lora": LORA}),
    "ZeRO 3, offloaded, recomputing": (
        DeepSpeedTrainer,
        {"world_size": RANKS, "zero_stage": 3, "offload": True, "activation_checkpointing": "full"},
    ),
    "ZeRO 3, adapters": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 3, "lora": LORA}),
}


def make_trainer(kind: type[GroupTrainer], settings: dict[str, Any], **parts: Any) -> Any:
    def make(model: Path, case: TrainerCase) -> GroupTrainer:
        config = kind.Config(**{**case.settings, **settings})
        return kind(
            config, model, total_steps=case.total_steps, temperature=case.temperature, **parts
        )

    return make


def each_of(names: Iterable[str], *, long: Iterable[str]) -> pytest.MarkDecorator:
    """For the kinds of these names; nearly the code of another are those that take their time among
    the long tests.
    """
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=pytest.mark.long if name in long else ()) for name in names],
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU that torch can use"
)
@pytest.mark.parametrize("name", ["local", "fsdp", "deepspeed, ZeRO 2", "deepspeed, ZeRO 3"])
def test_on_gpus_a_trainer_keeps_the_contract(
    name: str, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    kind, settings = {**KINDS, "local": (LocalTrainer, {"device": "cuda"})}[name]
    if kind is not LocalTrainer:
        settings = {**settings, "world_size": min(RANKS, torch.cuda.device_count())}
    asyncio.run(
        check_trainer(make_trainer(kind, settings, start=processes), shallow_model_dir, tmp_path)
    )


@pytest.mark.long
@each_of(KINDS, long=[name for name in KINDS if name != "fsdp"])
def test_a_trainer_of_two_ranks_keeps_the_contract(
    name: str, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    asyncio.run(
        check_trainer(make_trainer(*KINDS[name], start=processes), shallow_model_dir, tmp_path)
    )


@pytest.mark.parametrize("name", ["fsdp", "deepspeed, ZeRO 2"])
def test_ranks_of_one_machine_listen_on_its_loopback_interface_only(
    name: str, processes: Processes, shallow_model_dir: Path
) -> None:
    async def main() -> None:
        make = make_trainer(*KINDS[name], start=processes)
        async with make(shallow_model_dir, TrainerCase()) as trainer:
            await trainer.free()
            ranks = psutil.Process().children(recursive=True)
            assert len(ranks) >= RANKS
            assert open_to_others(ranks) == []

    asyncio.run(main())


def test_deepspeed_keeps_what_of_the_contract_no_other_test_shows(
    processes: Processes, shallow_model_dir: Path
) -> None:
    make = make_trainer(*KINDS["deepspeed, ZeRO 3"], start=processes)
    asyncio.run(
        check_equals_reference(
            make, shallow_model_dir, TrainerCase(minibatches=3, entropy_bonus=0.1)
        )
    )
    asyncio.run(check_refuses_non_finite(make, shallow_model_dir))


@each_of(
    KINDS | OPTIONS,
    long=(
        *("fsdp, whole", "fsdp, offloaded", "fsdp, recomputing", "fsdp, adapters"),
        *("deepspeed, ZeRO 1", "deepspeed, ZeRO 2"),
        *("ZeRO 2, offloaded", "ZeRO 2, adapters", "ZeRO 3, offloaded, recomputing"),
        "ZeRO 3, adapters",
    ),
)
def test_twenty_steps_on_two_ranks_are_those_of_one_process(
    name: str, processes: Processes, shallow_model_dir: Path, alone: Any
) -> None:
    kind, settings = (KINDS | OPTIONS)[name]
    batches = random_batches(shallow_model_dir, 20)
    losses, weights = asyncio.run(
        train(make_trainer(kind, settings, start=processes), shallow_model_dir, batches)
    )
    expected_losses, expected = alone("lora" in settings)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixture"
    make_model("Qwen3-MoE", folder)
    return folder


@pytest.mark.parametrize(
    "name", ["fsdp", pytest.param("deepspeed, ZeRO 2", marks=pytest.mark.long)]
)
def test_a_mixture_of_experts_on_two_ranks_is_that_of_one_process_and_is_taken_up(
    name: str, processes: Processes, mixture_dir: Path, tmp_path: Path
) -> None:
    batches = random_batches(mixture_dir, 20)
    make = make_trainer(*KINDS[name], start=processes)
    losses, weights = asyncio.run(train(make, mixture_dir, batches))
    alone = make_trainer(LocalTrainer, {"device": "cpu"})
    expected_losses, expected = asyncio.run(train(alone, mixture_dir, batches))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    published = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert published == weight_shapes(mixture_dir)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in published
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], atol=1e-5, rtol=0)
    engine = PackedModel(mixture_dir, dtype=torch.float32, device=torch.device("cpu"), max_slots=1)
    engine.check_weights(weights)
    engine.load_weights(weights)
    own = WeightNames.of(engine._model).published(engine.weights)
    assert all(torch.equal(own[key], weight) for key, weight in weights.items())
    asyncio.run(check_resume(make, mixture_dir, tmp_path))


@each_of(KINDS, long=("fsdp", "fsdp, whole", "deepspeed, ZeRO 1", "deepspeed, ZeRO 2"))
def test_a_critic_on_two_ranks_learns_as_one_of_one_process_and_is_taken_up(
    name: str, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    batches = random_batches(shallow_model_dir, 6)

    async def learned(make: Any) -> tuple[list[float], list[Any]]:
        async with make(shallow_model_dir, TrainerCase(lr=1e-3)) as critic:
            values = [await critic.predict(batches[0])]
            losses = [(await critic.step(batch, value_loss, 20.0))["loss"] for batch in batches]
            values.append(await critic.predict(batches[0]))
            await critic.save(tmp_path / make.__name__ / "checkpoint")
        async with make(shallow_model_dir, TrainerCase(lr=1e-3)) as critic:
            await critic.load(tmp_path / make.__name__ / "checkpoint")
            return losses, [*values, await critic.predict(batches[0])]

    several = make_trainer(*KINDS[name], start=processes, role="critic", head="value")
    alone = make_trainer(LocalTrainer, {"device": "cpu"}, role="critic", head="value")
    several.__name__, alone.__name__ = "several", "alone"
    (losses, values), (expected_losses, expected) = (
        asyncio.run(learned(make)) for make in (several, alone)
    )
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert not values[0].any(), "a new critic expects nothing"
    assert values[1].any()
    for got, want in zip(values, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(values[1], values[2])


@each_of(["fsdp", "deepspeed, ZeRO 2", "deepspeed, ZeRO 3"], long=["deepspeed, ZeRO 2"])
def test_bfloat16_is_for_computing_and_float32_for_keeping(
    name: str, processes: Processes, shallow_model_dir: Path
) -> None:
    kind, settings = KINDS[name]
    batches = random_batches(shallow_model_dir, 3)
    coarse = {**settings, "dtype": "bfloat16"}
    losses, weights = asyncio.run(
        train(make_trainer(kind, coarse, start=processes), shallow_model_dir, batches)
    )
    fine, expected = asyncio.run(
        train(make_trainer(LocalTrainer, {"device": "cpu"}), shallow_model_dir, batches)
    )
    assert losses != fine
    assert losses == pytest.approx(fine, abs=0.02)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) < 3e-3
    assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())


@pytest.mark.parametrize(
    "name", ["fsdp, adapters", pytest.param("ZeRO 3, adapters", marks=pytest.mark.long)]
)
def test_adapters_on_two_ranks_are_saved_and_taken_up(
    name: str, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    kind, settings = OPTIONS[name]
    without = {key: value for key, value in settings.items() if key != "lora"}
    make = make_trainer(kind, without, start=processes)  # the case says which adapters
    asyncio.run(check_resume(make, shallow_model_dir, tmp_path, TrainerCase(lora=LORA)))


ONE: dict[str, tuple[type[GroupTrainer], dict[str, Any]]] = {
    "local": (LocalTrainer, {"device": "cpu"}),
    "fsdp, one rank": (FsdpTrainer, {"world_size": 1}),
}


@pytest.mark.parametrize(
    ("saved_by", "taken_up_by"),
    [
        pytest.param("fsdp, one rank", "fsdp", marks=pytest.mark.long),
        ("fsdp", "local"),
        ("deepspeed, ZeRO 2", "deepspeed, ZeRO 3"),
        pytest.param("local", "deepspeed, ZeRO 1", marks=pytest.mark.long),
        pytest.param("deepspeed, ZeRO 3", "fsdp", marks=pytest.mark.long),
        pytest.param("fsdp", "fsdp, one rank", marks=pytest.mark.long),
    ],
)
def test_a_trainer_takes_up_what_another_kind_or_number_of_ranks_has_saved(
    saved_by: str, taken_up_by: str, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    batches = random_batches(shallow_model_dir, 4)

    async def main() -> dict[str, torch.Tensor]:
        before, after = (
            make_trainer(
                *{**KINDS, **ONE}[name], **({} if name == "local" else {"start": processes})
            )
            for name in (saved_by, taken_up_by)
        )
        async with before(shallow_model_dir, TrainerCase(lr=1e-3)) as trainer:
            await steps(trainer, batches[:2])
            await trainer.save(tmp_path / "checkpoint")
        async with after(shallow_model_dir, TrainerCase(lr=1e-3)) as trainer:
            await trainer.load(tmp_path / "checkpoint")
            await steps(trainer, batches[2:])
            return {name: weight.clone() for name, weight in (await trainer.weights()).items()}

    alone = make_trainer(LocalTrainer, {"device": "cpu"})
    _, expected = asyncio.run(train(alone, shallow_model_dir, batches))
    for key, weight in asyncio.run(main()).items():
        torch.testing.assert_close(weight, expected[key], atol=1e-5, rtol=0)


@pytest.mark.long
def test_deepspeed_keeps_its_own_settings_when_it_takes_up_a_checkpoint(
    processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    (batch,) = random_batches(shallow_model_dir, 1)
    lasting = TrainerCase(lr=1e-3, weight_decay=0.0)
    of_two = make_trainer(DeepSpeedTrainer, {"world_size": 2}, start=processes)

    async def main() -> None:
        async with of_two(shallow_model_dir, TrainerCase(lr=1e-3, weight_decay=1.0)) as trainer:
            await steps(trainer, [batch])
            await trainer.save(tmp_path / "two")
        async with of_two(shallow_model_dir, lasting) as trainer:
            await trainer.load(tmp_path / "two")
            before = {name: weight.clone() for name, weight in (await trainer.weights()).items()}
            await trainer.step(replace(batch, advantages_N=0 * batch.advantages_N), LOSS, 1e9)
            after = await trainer.weights()
            norms = [float(after[name].norm() / before[name].norm()) for name in after]
            assert min(norms) > 0.9995, "the weights have decayed"

    asyncio.run(main())


async def steps(trainer: GroupTrainer, batches: list[TrainBatch]) -> list[float]:
    """The losses of one step on each batch."""
    return [
        (await trainer.step(batch, LOSS, float(batch.num_loss_tokens)))["loss"] for batch in batches
    ]


async def train(
    make: Any, model: Path, batches: list[TrainBatch]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of one step on each batch, and the weights after them."""
    async with make(model, TrainerCase(lr=1e-3)) as trainer:
        losses = await steps(trainer, batches)
        return losses, {name: weight.clone() for name, weight in (await trainer.weights()).items()}


BALANCED = {
    **{
        name: KINDS[name]
        for name in ("fsdp", "deepspeed, ZeRO 1", "deepspeed, ZeRO 2", "deepspeed, ZeRO 3")
    },
    **{name: OPTIONS[name] for name in ("fsdp, adapters", "ZeRO 2, adapters", "ZeRO 3, adapters")},
}


@each_of(BALANCED, long=[name for name in BALANCED if name != "deepspeed, ZeRO 3"])
def test_two_ranks_balance_the_experts_as_one_does(
    name: str, processes: Processes, tmp_path: Path
) -> None:
    folder, case = (
        folder_of("Qwen3-MoE", tmp_path / "model", says=True),
        TrainerCase(lr=1e-2, micro_batch_tokens=60),
    )
    batch = batch_for(folder)
    kind, settings = BALANCED[name]

    async def trained(
        kind: type[GroupTrainer], settings: dict[str, Any], **parts: Any
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        make = make_trainer(kind, {**settings, "router_aux_loss_coef": 0.5}, **parts)
        async with make(folder, case) as trainer:
            metrics = dict(await trainer.step(batch, nothing, 1.0))
            return metrics, {
                name: weight.clone() for name, weight in (await trainer.weights()).items()
            }

    alone = {"device": "cpu"} | ({"lora": LORA} if "lora" in settings else {})
    one, weights = asyncio.run(trained(LocalTrainer, alone))
    two, same = asyncio.run(trained(kind, settings, start=processes))
    assert one["router_aux_loss"] > 2
    assert one["grad_norm"] > 0
    assert two["router_aux_loss"] == pytest.approx(one["router_aux_loss"], rel=1e-6)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert weights.keys() == same.keys()
    for each, weight in weights.items():
        torch.testing.assert_close(same[each], weight, atol=1e-6, rtol=1e-5)


class Gathers(TorchDispatchMode):
    """Counts how often parameters are gathered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


class CountingRank(TrainerRank):
    """A rank that counts the bytes of its tensors, and what is gathered."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self._live, self._gathers = LiveBytes(), Gathers()

    def open(self, mesh: Mesh, address: str) -> None:
        with self._live:
            super().open(mesh, address)

    def step(self, *args: Any) -> Any:
        with self._live, self._gathers:
            return super().step(*args)

    def gathers(self) -> int:
        return self._gathers.count

    def peak(self) -> int:
        return self._live.peak


class CountingSpec(TrainerSpec):
    """The specification of such ranks."""

    def make_rank(self, rank: int) -> TrainerRank:
        return CountingRank(self, rank)


@pytest.mark.parametrize(
    ("dtype", "tokens", "vocab"),
    [
        pytest.param("bfloat16", 512, 512, marks=pytest.mark.long),
        pytest.param("bfloat16", 32, 4096, marks=pytest.mark.long),
        ("float32", 32, 512),
    ],
    ids=["in a layer", "outside of layers", "in float32"],
)
def test_ranks_of_fsdp_hold_the_bytes_that_were_counted_and_gather_the_head_once(
    dtype: Any, tokens: int, vocab: int, processes: Processes, tmp_path: Path
) -> None:
    """With the float32 buffer in which gradients are summed, at the point of the peak."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    model = AutoConfig.for_model("qwen3", vocab_size=vocab, **sizes, **heads)
    AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path)
    config = FsdpTrainer.Config(
        world_size=RANKS,
        dtype=dtype,
        micro_batch_tokens=tokens,
        activation_checkpointing="full",
    )
    is_answer, zeros = np.arange(tokens) >= tokens * 3 // 4, np.zeros(tokens)
    sample = TrainingSample(
        np.arange(tokens) % vocab,
        is_answer,
        zeros,
        np.ones(tokens),
        np.where(is_answer, 0, -1),
        zeros,
    )
    # Not prefixes of each other, two micro-batches for each rank.
    samples = [
        replace(sample, token_ids=sample.token_ids[::-1] + number) for number in range(-2, 2)
    ]
    batch = collate([replace(one, token_ids=one.token_ids % vocab) for one in samples])
    shards = shard_batch(batch, config, parts=RANKS)

    async def counts() -> tuple[list[int], list[int]]:
        spec = CountingSpec(FsdpTrainer.sharding, config, tmp_path, 2, 1.0)
        ranks = await processes("trainer", spec.make_rank, RANKS)
        await ranks.all("open", Mesh(shard=RANKS), await ranks.one("reserve", True))
        for _ in range(2):  # the first makes the moments
            args = (LOSS, 1.0, batch.num_loss_tokens)
            await ranks.scatter("step", [(shard, *args) for shard in shards])
        peaks, gathers = await ranks.all("peak"), await ranks.all("gathers")
        await ranks.stop()
        return list(peaks), list(gathers)

    parts = trainer_footprint(
        model_facts(tmp_path), config.layout(), RANKS, micro_batches=2, longest=tokens
    ).parts
    counted = sum(parts.values())
    peaks, gathers = asyncio.run(counts())
    # Of each step and micro-batch: a layer for each of its passes, the rest once for both.
    assert gathers == [2 * 2 * (2 * sizes["num_hidden_layers"] + 1)] * RANKS
    for peak in peaks:
        assert counted == pytest.approx(peak, rel=0.03)
        assert peak > counted - parts["reduce-scatter"] / 2
