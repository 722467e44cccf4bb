"""Ranks on each mesh against one process: losses and weights, checkpoints, publishing."""

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from agentrl.algorithms import losses as of_tokens
from agentrl.algorithms.grpo import Grpo
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.cluster.processes import start_local
from agentrl.cluster.workers import InOwnProcess, WorkerGroup
from agentrl.errors import ConfigError
from agentrl.protocols.weight_source import WeightSource
from agentrl.testing.trainers import LOSS, TrainerCase, check_trainer, random_batches
from agentrl.tokens.arrays import floats, ints, mask
from agentrl.tokens.expert_choices import ExpertChoices
from agentrl.trainers.batch_shards import BatchShard, shard_batch
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank import fsdp as rank_fsdp
from agentrl.trainers.rank.model import make_model
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.spec import RankInfo, TrainerSpec
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
    "biased": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3, "num_key_value_heads": 4},
    ),
    "fused": ("Phi3Config", {"pad_token_id": 0}),
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
    "context 2": {"world_size": 2, "context_parallel": 2},
    "context 4": {"world_size": 4, "context_parallel": 4},
    "2 shards x context 2": {"world_size": 4, "context_parallel": 2},
    "2 replicas x context 2": {"world_size": 4, "replicas": 2, "context_parallel": 2},
    "tensor 2": {"world_size": 2, "tensor_parallel": 2},
    "2 shards x tensor 2": {"world_size": 4, "tensor_parallel": 2},
    "2 replicas x tensor 2": {"world_size": 4, "replicas": 2, "tensor_parallel": 2},
    "context 2 x tensor 2": {"world_size": 4, "context_parallel": 2, "tensor_parallel": 2},
    "tensor 2, expert 2": {"world_size": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "2 shards x tensor 2, expert 4": {
        "world_size": 4,
        "tensor_parallel": 2,
        "expert_parallel": 4,
    },
    "expert 2": {"world_size": 2, "expert_parallel": 2},
    "2 shards x expert 2": {"world_size": 4, "expert_parallel": 2},
    "2 replicas x expert 2": {"world_size": 4, "replicas": 2, "expert_parallel": 2},
    "context 2, expert 2": {"world_size": 2, "context_parallel": 2, "expert_parallel": 2},
}
"""Settings of the ranks."""


def kinds_on(mesh: str) -> list[str]:
    """The models that a mesh can compute: those with experts alone, if it divides these; if it
    divides matrices, those with biases and fused ones too, and none for which transformers has no
    plan.
    """
    biased = ["biased", "fused"] if "tensor" in mesh else []
    dense = [] if "expert" in mesh else ["dense", "windowed, capped", *biased]
    return [*dense, "mixture", *([] if "tensor" in mesh else ["mixture with sinks"])]


SOON = {
    ("context 2", "mixture with sinks"),
    ("expert 2", "mixture with sinks"),
    ("tensor 2", "mixture"),
}
"""Cases whose first steps are checked among the tests that are slow, and not only long."""
ALONE: dict[str, Any] = {"device": "cpu"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of each of `MODELS`."""

    @cache
    def folder_of(kind: str) -> Path:
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
        is_answer, none = np.arange(length) >= length // 2, np.zeros(length)
        samples.append(
            TrainingSample(
                token_ids=ints((np.arange(length) * 7 + number) % vocab),
                loss_mask=mask(is_answer),
                rollout_logprobs=floats(none),
                advantages=floats(none + 1),
                policy_versions=ints(np.where(is_answer, 0, -1)),
                turn_ids=ints(none),
            )
        )
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
            for kind in kinds_on(mesh)
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
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if "expert" not in mesh])
def test_a_trainer_on_a_mesh_keeps_the_contract(
    mesh: str, processes: Processes, shallow_model_dir: Path, model_of: Any, tmp_path: Path
) -> None:
    make = make_trainer(FsdpTrainer, dict(MESHES[mesh]), start=processes)
    # The shallow model's vocabulary is odd.
    model = model_of("dense") if "tensor" in mesh else shallow_model_dir
    asyncio.run(check_trainer(make, model, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "kind", "recompute"),
    [("expert 2", "mixture", "full"), ("tensor 2", "dense", "selective")],
)
def test_divided_layers_that_are_computed_again_have_the_same_gradients(
    mesh: str, kind: str, recompute: str, processes: Processes, model_of: Any
) -> None:
    model = model_of(kind)
    batches = batches_of(model, 3)
    one = asyncio.run(trained(make_trainer(LocalTrainer, ALONE), model, batches))
    settings = {"activation_checkpointing": recompute, "keep_gradients": True}
    several = make_trainer(FsdpTrainer, {**MESHES[mesh], **settings}, start=processes)
    check_equal(asyncio.run(trained(several, model, batches)), one)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "kind"),
    [("2 shards x tensor 2", "dense"), ("2 shards x expert 2", "mixture"), ("context 2", "dense")],
)
def test_a_mesh_whose_optimizer_is_in_main_memory_makes_the_steps_of_one_process(
    mesh: str, kind: str, processes: Processes, model_of: Any
) -> None:
    model = model_of(kind)
    batches = batches_of(model, 5)
    one = asyncio.run(trained(make_trainer(LocalTrainer, ALONE), model, batches))
    settings = {**MESHES[mesh], "optimizer_offload": True}
    several = make_trainer(FsdpTrainer, settings, start=processes)
    check_equal(asyncio.run(trained(several, model, batches)), one)


@pytest.mark.parametrize(
    ("mesh", "kind", "count"),
    [
        ("tensor 2", "biased", 4),
        pytest.param("tensor 2", "fused", 20, marks=pytest.mark.long),
        *(pytest.param(mesh, kinds_on(mesh)[0], 20, marks=pytest.mark.long) for mesh in MESHES),
    ],
)
def test_adapters_on_a_mesh_are_those_of_one_process(
    mesh: str, kind: str, count: int, processes: Processes, model_of: Any
) -> None:
    model = model_of(kind)
    batches = batches_of(model, count)
    one = asyncio.run(trained(make_trainer(LocalTrainer, {**ALONE, "lora": LORA}), model, batches))
    several = make_trainer(FsdpTrainer, {**MESHES[mesh], "lora": LORA}, start=processes)
    check_equal(asyncio.run(trained(several, model, batches)), one)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_a_critic_and_a_reference_on_a_mesh_are_those_of_one_process(
    mesh: str, processes: Processes, model_of: Any
) -> None:
    model = model_of(kinds_on(mesh)[0])
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
        ("context 2", "2"),
        ("2", "2 shards x expert 2"),
        ("2 shards x expert 2", "context 2"),
        ("expert 2", "3 replicas"),
        ("2 shards x tensor 2", "3 replicas"),
        ("2", "2 replicas x tensor 2"),
        ("2 replicas x tensor 2", "context 2 x tensor 2"),
        ("2 shards x tensor 2, expert 4", "tensor 2, expert 2"),
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
    model = model_of("mixture" if "expert" in "".join(meshes) else "dense")
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


def chosen_experts(batch: TrainBatch, layers: int) -> TrainBatch:
    """A batch whose engine has chosen two of four experts in each layer: the same for a token that
    samples share.
    """
    known = [
        ExpertChoices.of(0, choices_of(tokens, layers))
        for tokens in np.split(batch.tokens_S, np.cumsum(batch.lengths_M)[:-1])
    ]
    return replace(batch, experts_M=np.array(known, np.object_))


def choices_of(tokens: Any, layers: int) -> Any:
    """Two of four experts for each token of a sample in each layer, shape (T, L, 2)."""
    pairs = np.array(list(combinations(range(4), 2)))
    kinds = 7 * tokens + np.arange(len(tokens))
    return np.stack([pairs[(kinds + 5 * layer) % len(pairs)] for layer in range(layers)], axis=1)


@pytest.mark.parametrize(
    "mesh",
    [
        "context 2",
        pytest.param("expert 2", marks=pytest.mark.long),
        pytest.param("2 shards x expert 2", marks=pytest.mark.long),
        pytest.param("context 2, expert 2", marks=pytest.mark.long),
        pytest.param("2 replicas x 2 shards", marks=pytest.mark.long),
        pytest.param("context 4", marks=pytest.mark.long),
        pytest.param("2 shards x context 2", marks=pytest.mark.long),
        "tensor 2",
        pytest.param("context 2 x tensor 2", marks=pytest.mark.long),
        pytest.param("tensor 2, expert 2", marks=pytest.mark.long),
    ],
)
def test_a_loss_of_whole_samples_and_all_metrics_are_those_of_one_process(
    mesh: str, processes: Processes, model_of: Any
) -> None:
    """With a loss whose ratio is that of a sample, and experts that are balanced and replayed."""
    is_mixture = "tensor" not in mesh or "expert" in mesh
    model, loss = (
        model_of("mixture" if is_mixture else "biased"),
        Grpo(Grpo.Config(surrogate="gspo", entropy_bonus=0.1, importance_level="sequence")).loss,
    )
    batches = [chosen_experts(one, 2) if is_mixture else one for one in batches_of(model, 3)]

    async def told(make: Any) -> tuple[list[dict[str, float]], Any]:
        case = TrainerCase(lr=1e-3, minibatches=2)
        async with make(model, case) as trainer:
            metrics = [
                dict(await trainer.step(batch, loss, float(batch.num_loss_tokens)))
                for batch in batches
            ]
            return metrics, await trainer.token_logprobs()

    balanced = {"router_aux_loss_coef": 0.5, "routing": "replay"} if is_mixture else {}
    several, alone = (
        asyncio.run(told(make_trainer(kind, {**settings, **balanced}, **parts)))
        for kind, settings, parts in (
            (FsdpTrainer, MESHES[mesh], {"start": processes}),
            (LocalTrainer, ALONE, {}),
        )
    )
    for got, want in zip(several[0], alone[0], strict=True):
        # one rank waits for no other
        assert got.keys() - {"lockstep_ratio"} == want.keys()
        for name in want:
            # parts of a batch are packed on their own
            if not name.startswith("seconds") and name != "tokens_computed":
                assert got[name] == pytest.approx(want[name], abs=1e-5, rel=1e-5), name
        if is_mixture:
            assert want["routing_difference"] > 0.1
            assert want["router_aux_loss"] > 1
    np.testing.assert_allclose(several[1], alone[1], atol=1e-5, rtol=0)


class CountingRank(TrainerRank):
    """A rank that counts the bytes that it sends, and those that it keeps for a backward pass."""

    def kept(self, shard: BatchShard) -> int:
        """Bytes of what autograd keeps of the first micro-batch for its backward pass."""
        saved: list[weakref.ref[torch.Tensor]] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(weakref.ref(tensor))
            return tensor

        samples = self._on_device(shard[0][0])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = self.sharding.predict(samples)
        # What was given back during the forward pass does not count: another tensor may have got
        # its address since.
        kept: dict[int, int] = {}
        for reference in saved:
            if (tensor := reference()) is not None:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
        self.sharding.backward(found.sum(), last=True)
        self.sharding.clear()
        return sum(kept.values())

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
    sizes = {
        name: number * weight.numel()
        for name, weight in load_file(model / "model.safetensors").items()
    }
    whole = sum(sizes.values())
    root = sum(size for name, size in sizes.items() if ".layers." not in name)
    sent, shard, replica, everyone = of_step[0], (0, 1), (0, 2), (0, 1, 2, 3)
    # (n - 1) / n of the weights for each of two gatherings, of the gradients for their sum; what is
    # outside of the blocks stays gathered between the passes
    assert sent["allgather_base", shard] == passes * (2 * whole - root) / 2
    assert sent["reduce_scatter_base", shard] == passes * whole / 2
    # twice (n - 1) / n of a shard of the gradients, whatever the passes
    assert sent["allreduce", replica] == whole / 2
    assert {ranks for _, ranks in sent} == {shard, replica, everyone}
    assert sum(sent[name, ranks] for name, ranks in sent if ranks == everyone) < 4096
    for rank, sent in enumerate(of_publishing):
        for _, ranks in sent:
            assert ranks == everyone or set(ranks) == {rank // 2 * 2, rank // 2 * 2 + 1}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_of_a_context_keep_their_share_of_the_activations(
    ranks: int, processes: Processes, tmp_path: Path
) -> None:
    made = transformers.Qwen3Config(**{**HEADS, "vocab_size": 320, "num_key_value_heads": 4})
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)

    async def kept_bytes(ranks: int) -> list[int]:
        """What 256 more tokens leave in memory on each rank."""
        config = FsdpTrainer.Config(
            world_size=ranks, context_parallel=ranks, micro_batch_tokens=10**4, dtype="float32"
        )
        found = []
        async with counting_ranks(config, tmp_path, processes) as group:
            for count in (8, 16):
                (shard,) = shard_batch(batch_of_lengths([32] * count), config, parts=1)
                found.append(await group.all("kept", shard))
        return [more - few for few, more in zip(*found, strict=True)]

    (alone,), cut = (asyncio.run(kept_bytes(n)) for n in (1, ranks))
    assert alone > 256 * 4 * HEADS["hidden_size"]
    for one in cut:
        assert one == pytest.approx(alone / ranks, rel=0.1)


@pytest.mark.parametrize(
    "mesh",
    [
        "2 shards x context 2",
        pytest.param("context 4", marks=pytest.mark.long),
    ],
)
def test_ranks_of_a_context_send_each_head_of_their_tokens_once_for_each_attention(
    mesh: str, processes: Processes, model_of: Any
) -> None:
    model, passes, tokens = model_of("dense"), 3, 16
    config = FsdpTrainer.Config(**MESHES[mesh], micro_batch_tokens=tokens, dtype="float32")
    parts, ranks = config.mesh.data_parallel_size, config.context_parallel
    batch = batch_of_lengths([tokens] * parts * passes)
    shards = shard_batch(batch, config, parts=parts)
    args = (LOSS, 1.0, batch.num_loss_tokens)
    given = [
        ("step", shards[config.mesh.data_parallel_rank(rank)], *args)
        for rank in range(config.world_size)
    ]

    async def main() -> Any:
        async with counting_ranks(config, model, processes) as group:
            return (await group.scatter("sent", given))[0]

    sent, context = asyncio.run(main()), tuple(range(ranks))
    # queries and results, keys and values (repeated for as many heads as ranks), there and back
    heads, keys = HEADS["num_attention_heads"], max(HEADS["num_key_value_heads"], ranks)
    each = 4 * HEADS["head_dim"] * (2 * heads + 2 * keys)
    times = 2 * passes * HEADS["num_hidden_layers"]
    assert sent["alltoall_base", context] == times * each * tokens // ranks * (ranks - 1) // ranks
    # a logprob of each loss token, for the loss
    assert sent["allreduce", context] >= passes * 4 * tokens // 2 * 2 * (ranks - 1) // ranks


def gather_everywhere(source: WeightSource) -> dict[str, torch.Tensor]:
    """All weights by their published names, on each of four ranks."""
    whole: dict[str, torch.Tensor] = {}
    for unit in source.units:
        whole |= source.gather(unit, range(4), None)
    return whole


@pytest.mark.long
def test_ranks_that_divide_experts_send_a_token_once_to_each_rank_that_it_asks(
    processes: Processes, model_of: Any
) -> None:
    model, passes, tokens, layers = model_of("mixture"), 3, 16, 2
    config = FsdpTrainer.Config(
        **MESHES["2 shards x expert 2"],
        micro_batch_tokens=tokens,
        dtype="float32",
        routing="replay",
    )
    batch = chosen_experts(batch_of_lengths([tokens] * 4 * passes), layers)
    shards = shard_batch(batch, config, parts=4)
    args = (LOSS, 1.0, batch.num_loss_tokens)

    async def main() -> Any:
        async with counting_ranks(config, model, processes) as ranks:
            weights = await ranks.all("send_weights", gather_everywhere)
            return weights, await ranks.scatter(
                "sent", [("step", shard, *args) for shard in shards]
            )

    of_ranks, found = asyncio.run(main())
    published = load_file(model / "model.safetensors")
    for weights in of_ranks:
        assert weights.keys() == published.keys()
        assert all(weights[name].equal(published[name]) for name in published)
    asked = 0
    for rank in (0, 1):
        for micro_batch in shards[rank][0]:
            chosen = choices_of(micro_batch.samples.tokens_S, layers)
            is_sent = (chosen // 2 != rank).any(2)
            # the last layer computes the tokens before loss tokens
            asked += int(is_sent[:, 0].sum() + is_sent[tokens // 2 - 1 : -1, 1].sum())
    hidden, chosen_bytes = 4 * HEADS["hidden_size"], 2 * (8 + 4 + 4)
    # states and results, their gradients; numbers and weights of experts, the weights' gradients;
    # from both ranks, how many tokens come
    expected = asked * (4 * hidden + chosen_bytes) + 2 * 8 * passes * layers
    assert sum(found[rank]["alltoall_base", (0, 1)] for rank in (0, 1)) == expected
    sizes = {name: 4 * weight.numel() for name, weight in published.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    # half of a rank's half of the experts, for each of two passes; of the gradients, for their sum
    assert found[0]["allgather_base", (0, 2)] == passes * experts / 2
    assert found[0]["reduce_scatter_base", (0, 2)] == passes * experts / 4
    rest = sum(sizes.values()) - experts
    assert found[0]["reduce_scatter_base", (0, 1, 2, 3)] == passes * rest * 3 / 4


def test_ranks_that_divide_matrices_sum_hidden_states_and_no_logits(
    processes: Processes, model_of: Any
) -> None:
    model, passes, tokens = model_of("dense"), 3, 16
    config = FsdpTrainer.Config(
        **MESHES["2 shards x tensor 2"], micro_batch_tokens=tokens, dtype="float32"
    )
    batch = batch_of_lengths([tokens] * 2 * passes)
    shards = shard_batch(batch, config, parts=2)
    args = (LOSS, 1.0, batch.num_loss_tokens)
    given = [("step", shards[config.mesh.data_parallel_rank(rank)], *args) for rank in range(4)]

    async def main() -> Any:
        async with counting_ranks(config, model, processes) as ranks:
            weights = await ranks.all("send_weights", gather_everywhere)
            return weights, (await ranks.scatter("sent", given))[0]

    of_ranks, sent = asyncio.run(main())
    published = load_file(model / "model.safetensors")
    for weights in of_ranks:
        assert weights.keys() == published.keys()
        assert all(weights[name].equal(published[name]) for name in published)
    sizes = {name: 4 * weight.numel() for name, weight in published.items()}
    copies = sum(size for name, size in sizes.items() if "norm" in name)
    tensor, shard, loss_tokens = (0, 1), (0, 2), tokens // 2
    # of states, twice (n - 1) / n for a sum: of the embedding and after attention and the hidden
    # units of each layer, in both passes; the last units are of the tokens before loss tokens.
    # Once for each update, a shard of the gradients of what is not divided
    summed = 4 * HEADS["hidden_size"] * (4 * tokens + loss_tokens)
    assert sent["allreduce", tensor] == 2 * passes * summed + copies // 2
    # of each loss token the target's logit, an entropy and the sum over the ids
    assert sent["allgather_base", tensor] == passes * 4 * 3 * loss_tokens
    # half of what a rank has of the gradients: half of all that is divided, and copies
    own = (sum(sizes.values()) - copies) // 2 + copies
    assert sent["reduce_scatter_base", shard] == passes * own // 2
    root = sizes["model.embed_tokens.weight"] // 2 + sizes["model.norm.weight"]
    assert sent["allgather_base", shard] == passes * (2 * own - root) // 2


LEAKING = f"{__name__}:open_leaking"


@pytest.mark.parametrize(
    ("sharding", "kind", "mesh", "match"),
    [
        pytest.param(
            *(LEAKING, "dense", {"context_parallel": 2}, "computes other outputs .* are cut"),
            marks=pytest.mark.long,
        ),
        (
            *("fsdp", "mixture with sinks", {"tensor_parallel": 2}),
            "GptOssForCausalLM .* has no plan",
        ),
        pytest.param(
            *("fsdp", "dense", {"context_parallel": 3}, "heads .* there are 4: .* 1, 2, 4"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("fsdp", "dense", {"expert_parallel": 2}, "Qwen3ForCausalLM has none"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("fsdp", "mixture", {"expert_parallel": 3}, "has 4: write one of 1, 2, 4"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    model_of: Any, sharding: str, kind: str, mesh: dict[str, int], match: str
) -> None:
    (ranks,) = mesh.values()
    config = FsdpTrainer.Config(world_size=ranks, **mesh, dtype="float32")  # type: ignore[arg-type]
    sharding = FsdpTrainer.sharding if sharding == "fsdp" else sharding

    async def opened() -> None:
        make: Any = TrainerSpec(sharding, config, model_of(kind), 2, 1.0).make_rank
        group = await start_local("trainer", InOwnProcess(make), config.world_size)
        try:
            await group.all("open", config.mesh, await group.one("reserve", True))
        finally:
            await group.stop()

    with pytest.raises(ConfigError, match=match):
        asyncio.run(opened())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"world_size": 6, "context_parallel": 2, "tensor_parallel": 2},
            r"groups of 4 .* tensor_parallel\): write world_size: 8",
        ),
        (
            {"world_size": 8, "replicas": 2, "expert_parallel": 3},
            r"4 ranks of a replica .*\(expert_parallel\).* 1, 2, 4",
        ),
        (
            {"world_size": 2, "expert_parallel": 2, "activation_checkpointing": "selective"},
            r"selective .*: write full or none",
        ),
    ],
)
def test_settings_that_make_no_mesh_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FsdpTrainer.Config(**settings)


def open_leaking(spec: TrainerSpec, rank_info: RankInfo) -> Any:
    """A sharding of a model whose last norm adds the state of the token before, as a convolution
    would.
    """

    def make_leaking(*args: Any, **kwargs: Any) -> Any:
        made = make_model(*args, **kwargs)
        made[0].model.base_model.norm.register_forward_pre_hook(
            lambda module, args: (args[0] + args[0].roll(1, 1),)
        )
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_fsdp, "make_model", make_leaking)
        return rank_fsdp.open_sharding(spec, rank_info)
