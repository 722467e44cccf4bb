"""Ranks on each mesh against one process: losses and weights, checkpoints, publishing."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.algorithms import losses as of_tokens
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.cluster.workers import WorkerGroup
from agentrl.testing.trainers import LOSS, TrainerCase, check_trainer, random_batches
from agentrl.trainers.batch_shards import shard_batch
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.spec import TrainerSpec
from agentrl.weights.bundle import BundlePlace
from agentrl.weights.transports.files import WriteBuckets
from tests.model_families import SMALL
from tests.trainers.sent_bytes import SentBytes
from tests.trainers.shared_processes import Processes
from tests.trainers.test_ranks import LORA, make_trainer, steps

pytestmark = pytest.mark.slow
value_loss = partial(of_tokens.value_loss, clip=None)

HEADS = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WINDOWED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("Qwen3Config", {"tie_word_embeddings": True}),
    "windowed, capped": ("Gemma2Config", WINDOWED),
    "mixture": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mixture with sinks": (
        "GptOssConfig",
        {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""Models of two layers, by what their attention or their layers are like."""
MESHES: Mapping[str, Mapping[str, int]] = {
    "2 replicas x 2 shards": {"world_size": 4, "replicas": 2},
    "3 replicas": {"world_size": 3, "replicas": 3},
}
"""Settings of the ranks."""
SOON = {("2 replicas x 2 shards", "windowed, capped")}
"""Cases whose first steps are checked among the tests that are slow, and not only long."""
ALONE: dict[str, Any] = {"device": "cpu"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of each of `MODELS`."""

    @cache
    def folder_of(kind: str) -> Path:
        import transformers

        config, settings = MODELS[kind]
        folder = tmp_path_factory.mktemp("models") / kind.replace(" ", "_")
        made = getattr(transformers, config)(**{**HEADS, "vocab_size": 320, **settings})
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
        return folder

    return folder_of


def batches_of(model: Path, count: int) -> list[TrainBatch]:
    """Batches of ragged samples, some of which begin alike; every third is a single sample."""
    return [
        batch if number % 3 < 2 else batch.split([1, batch.num_samples - 1])[0]
        for number, batch in enumerate(random_batches(model, count))
    ]


def batch_of_lengths(lengths: Sequence[int], vocab: int = 320) -> TrainBatch:
    """Samples of these lengths, no two of which begin alike; the second half of each has loss."""
    samples = []
    for number, length in enumerate(lengths):
        is_answer, zeros = np.arange(length) >= length // 2, np.zeros(length)
        tokens = (np.arange(length) * 7 + number) % vocab
        versions = np.where(is_answer, 0, -1)
        samples.append(TrainingSample(tokens, is_answer, zeros, np.ones(length), versions, zeros))
    return collate(samples)


async def trained(
    make: Any, model: Path, batches: list[TrainBatch]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of one step on each batch, and the weights after them."""
    async with make(model, TrainerCase(lr=1e-3, minibatches=2)) as trainer:
        losses = await steps(trainer, batches)
        return losses, {name: weight.clone() for name, weight in (await trainer.weights()).items()}


@pytest.mark.parametrize(
    ("mesh", "kind", "count"),
    [
        *(pytest.param(*case, 4) for case in sorted(SOON)),
        *(
            pytest.param(mesh, kind, 20, marks=pytest.mark.long)
            for mesh in MESHES
            for kind in MODELS
        ),
    ],
)
def test_steps_on_a_mesh_are_those_of_one_process(
    mesh: str, kind: str, count: int, processes: Processes, model_of: Any
) -> None:
    model = model_of(kind)
    batches = batches_of(model, count)
    one = asyncio.run(trained(make_trainer(LocalTrainer, ALONE), model, batches))
    several = make_trainer(FsdpTrainer, dict(MESHES[mesh]), start=processes)
    check_equal(asyncio.run(trained(several, model, batches)), one)


def check_equal(got: Any, expected: Any) -> None:
    """Losses and weights are equal within 1e-5."""
    assert got[0] == pytest.approx(expected[0], abs=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, weight in got[1].items():
        torch.testing.assert_close(weight, expected[1][name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_a_trainer_on_a_mesh_keeps_the_contract(
    mesh: str, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    make = make_trainer(FsdpTrainer, dict(MESHES[mesh]), start=processes)
    asyncio.run(check_trainer(make, shallow_model_dir, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_adapters_on_a_mesh_are_those_of_one_process(
    mesh: str, processes: Processes, model_of: Any
) -> None:
    model = model_of("dense")
    batches = batches_of(model, 20)
    one = asyncio.run(trained(make_trainer(LocalTrainer, {**ALONE, "lora": LORA}), model, batches))
    several = make_trainer(FsdpTrainer, {**MESHES[mesh], "lora": LORA}, start=processes)
    check_equal(asyncio.run(trained(several, model, batches)), one)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_a_critic_and_a_reference_on_a_mesh_are_those_of_one_process(
    mesh: str, processes: Processes, model_of: Any
) -> None:
    model = model_of("dense")
    batches = batches_of(model, 6)

    async def learned(make_critic: Any, make_reference: Any) -> list[Any]:
        async with make_critic(model, TrainerCase(lr=1e-3)) as critic:
            found: list[Any] = [
                (await critic.step(batch, value_loss, 20.0))["loss"] for batch in batches
            ]
            found.append(await critic.predict(batches[0]))
        async with make_reference(model, TrainerCase()) as reference:
            return [
                *found,
                await reference.predict(batches[0]),
                await reference.predict(batches[2]),
            ]

    several, alone = (
        asyncio.run(
            learned(
                make_trainer(kind, settings, role="critic", head="value", **parts),
                make_trainer(kind, settings, role="reference", **parts),
            )
        )
        for kind, settings, parts in (
            (FsdpTrainer, dict(MESHES[mesh]), {"start": processes}),
            (LocalTrainer, ALONE, {}),
        )
    )
    for got, want in zip(several, alone, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


CHECKPOINTED: Mapping[str, Mapping[str, int]] = {
    **MESHES,
    "1": {"world_size": 1},
    "2": {"world_size": 2},
    "4": {"world_size": 4},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "meshes",
    [
        *(("2 replicas x 2 shards", name) for name in ("1", "2", "4", "3 replicas")),
        ("1", "2 replicas x 2 shards"),
        ("3 replicas", "2 replicas x 2 shards"),
    ],
    ids=" to ".join,
)
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_a_mesh_takes_up_what_another_has_saved(
    meshes: tuple[str, str],
    lora: Any,
    processes: Processes,
    model_of: Any,
    tmp_path: Path,
) -> None:
    model = model_of("dense")
    batches = batches_of(model, 6)
    case = TrainerCase(lr=1e-3, lora=lora)

    async def main() -> None:
        before, after = (
            make_trainer(FsdpTrainer, dict(CHECKPOINTED[name]), start=processes) for name in meshes
        )
        async with before(model, case) as trainer:
            await steps(trainer, batches[:3])
            await trainer.save(tmp_path / "saved")
            saved = {name: one.clone() for name, one in (await trainer.weights()).items()}
            unbroken = await steps(trainer, batches[3:]), await trainer.weights()
        async with after(model, case) as trainer:
            await trainer.load(tmp_path / "saved")
            for name, weight in (await trainer.weights()).items():
                torch.testing.assert_close(weight, saved[name], atol=0, rtol=0)
            check_equal((await steps(trainer, batches[3:]), await trainer.weights()), unbroken)

    asyncio.run(main())


class CountingRank(TrainerRank):
    """A rank that counts the bytes that it sends."""

    def sent(self, call: str, *args: Any) -> Counter[tuple[str, tuple[int, ...]]]:
        with SentBytes() as counting:
            getattr(self, call)(*args)
        return counting.sent


class CountingSpec(TrainerSpec):
    """The specification of such ranks."""

    def make_rank(self, rank: int) -> TrainerRank:
        return CountingRank(self, rank)


@asynccontextmanager
async def counting_ranks(
    config: FsdpTrainer.Config, model: Path, processes: Processes
) -> AsyncIterator[WorkerGroup]:
    """The ranks of a trainer, open."""
    spec = CountingSpec(FsdpTrainer.sharding, config, model, 2, 1.0)
    ranks = await processes("trainer", spec.make_rank, config.mesh.world_size)
    await ranks.all("open", config.mesh, await ranks.one("reserve", True))
    try:
        yield ranks
    finally:
        await ranks.stop()


def test_replicas_exchange_their_part_of_the_gradients_once_for_an_update_and_no_weights(
    processes: Processes, model_of: Any, tmp_path: Path
) -> None:
    model, passes, number = model_of("dense"), 3, 4
    config = FsdpTrainer.Config(world_size=4, replicas=2, micro_batch_tokens=8, dtype="float32")
    batch = batch_of_lengths([8] * 4 * passes)
    shards = shard_batch(batch, config, parts=4)
    assert [len(shard[0]) for shard in shards] == [passes] * 4

    async def main() -> tuple[Any, Any]:
        async with counting_ranks(config, model, processes) as ranks:
            args = (LOSS, 1.0, batch.num_loss_tokens)
            step = await ranks.scatter("sent", [("step", shard, *args) for shard in shards])
            place = BundlePlace(tmp_path, 1, 1 << 20)
            return step, await ranks.all("sent", "send_weights", WriteBuckets(place, "float32"))

    of_step, of_publishing = asyncio.run(main())
    whole = number * sum(
        weight.numel() for weight in load_file(model / "model.safetensors").values()
    )
    sent, shard, replica, everyone = of_step[0], (0, 1), (0, 2), (0, 1, 2, 3)
    # (n - 1) / n of the weights for each of two gatherings, of the gradients for their sum
    assert sent["allgather_base", shard] == 2 * passes * whole / 2
    assert sent["reduce_scatter_base", shard] == passes * whole / 2
    # twice (n - 1) / n of a shard of the gradients, whatever the passes
    assert sent["allreduce", replica] == whole / 2
    assert {ranks for _, ranks in sent} == {shard, replica, everyone}
    assert sum(sent[name, ranks] for name, ranks in sent if ranks == everyone) < 4096
    for rank, sent in enumerate(of_publishing):
        for _, ranks in sent:
            assert ranks == everyone or set(ranks) == {rank // 2 * 2, rank // 2 * 2 + 1}


def test_ranks_that_do_not_divide_into_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 ranks .* 2 replicas: write world_size: 4"):
        FsdpTrainer.Config(world_size=3, replicas=2)
