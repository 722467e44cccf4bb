"""Trainers learn from pictures: packed samples that show some, and frozen or trained towers."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.errors import ConfigError
from agentrl.models.facts import model_facts
from agentrl.models.vision import Vision, part_of
from agentrl.placement.mesh import ONE_RANK
from agentrl.testing.trainers import LOSS
from agentrl.tokens.arrays import floats, ints, mask
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trainers.compute.forward import to_device
from agentrl.trainers.compute.pictures import PictureReader
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.packing import micro_batches
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.settings import TrainerSettings
from agentrl.trainers.spec import TrainerSpec
from agentrl.weights.bundle import weight_shapes
from tests.trainers.shared_processes import Processes

IMAGE, BEGIN, END = 290, 292, 293
"""The placeholder, and the marks around a picture."""
SETTINGS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3, "dtype": "float32", "micro_batch_tokens": 60}
WHOLE: dict[str, Any] = {"train_tower": True, "train_projector": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Qwen2.5-VL with two layers and a tower of two blocks, with random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    text = {
        "vocab_size": 300,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=291,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    made = tmp_path_factory.mktemp("seeing")
    with torch.random.fork_rng():
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(made)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    """The same model as its family computes it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )


@pytest.fixture(scope="module")
def vision(own: Any, folder: Path) -> Vision:
    return Vision(own, folder)


def picture(seed: int, height: int = 28, width: int = 56) -> EncodedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return EncodedImage.of_pixels(pixels)


def sample(
    vision: Vision, images: Sequence[EncodedImage], *, seed: int = 0, loss: int = 6
) -> TrainingSample:
    """Pictures among text, and then so many sampled tokens."""
    random = np.random.default_rng(seed)
    tokens: list[int] = [*random.integers(3, 280, 4)]
    placed: list[PlacedImage] = []
    for image in images:
        with torch.no_grad():
            count = len(vision.features(vision.inputs([image])).rows_FH)
        placed.append(PlacedImage(len(tokens) + 1, count, image))
        tokens += [BEGIN, *[IMAGE] * count, END, *random.integers(3, 280, 2)]
    tokens += [*random.integers(3, 280, loss)]
    is_loss = np.arange(len(tokens)) >= len(tokens) - loss
    return TrainingSample(
        ints(tokens),
        mask(is_loss),
        floats(np.where(is_loss, -5.0, 0.0)),
        floats(np.where(is_loss, 1.0, 0.0)),
        ints(np.where(is_loss, 0, -1)),
        ints([0] * len(tokens)),
        images=tuple(placed),
    )


def alone(own: Any, vision: Vision, one: TrainingSample) -> Tensor:
    """The logprobs of a sample's loss tokens by the family's own forward pass."""
    shown: dict[str, Tensor] = {}
    if one.images:
        shown |= vision.inputs([image.image for image in one.images]).tensors
    ids_1T = torch.from_numpy(one.token_ids.astype(np.int64))[None]
    if one.images and hasattr(own.model, "get_rope_index"):
        shown["mm_token_type_ids"] = (ids_1T == IMAGE).int()
    if one.images and own.config.model_type == "gemma3":
        shown["token_type_ids"] = (ids_1T == IMAGE).int()
    if one.images and own.config.model_type == "gemma4":
        shown["mm_token_type_ids"] = (ids_1T == IMAGE).int()
    own.model.rope_deltas = None
    logprobs_TV = own(input_ids=ids_1T, **shown).logits[0].log_softmax(-1)
    before_N = torch.from_numpy(np.flatnonzero(one.loss_mask) - 1)
    return logprobs_TV[before_N].gather(1, ids_1T[0, before_N + 1][:, None])[:, 0]


def mixed(vision: Vision) -> list[TrainingSample]:
    """Samples with several pictures, with none, with the same beginning, with one that differs in a
    picture alone, and one of fifty pictures."""
    a, b, c = picture(1), picture(2, 60, 90), picture(3, 28, 56)
    return [
        sample(vision, [a, b], seed=1),
        sample(vision, [], seed=2, loss=30),
        sample(vision, [b, a, a], seed=3),
        sample(vision, [a, b], seed=1, loss=9),
        sample(vision, [c, b], seed=1),
        sample(vision, [picture(n, 28 + 14 * (n % 3)) for n in range(50)], seed=4),
    ]


def test_packed_samples_and_their_gradients_are_those_of_the_family_for_each_alone(
    folder: Path, own: Any, vision: Vision
) -> None:
    samples = mixed(vision)
    ((micro_batch,),) = micro_batches(collate(samples), 4096)
    assert micro_batch.computed_tokens < micro_batch.tokens, "no prefix was shared"
    config = LocalTrainer.Config(device="cpu", **SETTINGS, **WHOLE)
    rank = TrainerRank(TrainerSpec(LocalTrainer.sharding, config, folder, 1, 1.0), 0)
    rank.open(ONE_RANK, "")
    device = torch.device("cpu")
    reader = PictureReader(Vision(rank.sharding.trainable.model, folder))
    read = to_device(micro_batch, device, reader=reader)
    found_N = rank.sharding.predict(read)
    order = micro_batch.numbers_M.tolist()
    expected_N = torch.cat([alone(own, vision, samples[number]) for number in order])
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=1e-5)
    found_N.sum().backward()  # type: ignore[no-untyped-call]
    expected_N.sum().backward()  # type: ignore[no-untyped-call]
    model, seen = rank.sharding.trainable.model, set()
    for (name, parameter), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        assert expected.grad is not None
        scale = float(expected.grad.abs().max())
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=1e-5 * (1 + scale))
        seen.add(part_of(name))
    assert seen == {"language", "tower", "projector"}


async def trained(
    trainer: GroupTrainer, batches: Sequence[TrainBatch], into: Path | None = None
) -> tuple[list[float], dict[str, Tensor], set[str]]:
    """The losses and gradient norms of some steps, the weights after them, and those that are
    sent.
    """
    found: list[float] = []
    async with trainer:
        for batch in batches:
            metrics = await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
            found += [metrics["loss"], metrics["grad_norm"]]
        weights = {name: one.clone() for name, one in (await trainer.weights()).items()}
        sent = (await trainer.send_weights(names_sent))[0]
        if into is not None:
            await trainer.save(into)
    return found, weights, sent


def names_sent(source: Any) -> set[str]:
    return {name for unit in source.units for name in unit.shapes}


def test_a_frozen_tower_takes_no_moments_and_is_not_sent_and_adapters_leave_it_alone(
    folder: Path, vision: Vision, tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    batch = collate(mixed(vision)[:3])
    before = weight_shapes(folder)
    for name, settings in {"frozen": {}, "adapters": {"lora": {"rank": 2}}}.items():
        trainer = LocalTrainer(
            LocalTrainer.Config(device="cpu", **SETTINGS, **settings), folder, total_steps=2
        )
        _, weights, sent = asyncio.run(trained(trainer, [batch], tmp_path / name))
        assert weights.keys() == before.keys()
        assert sent, "nothing is sent"
        assert not any("visual" in one for one in sent)
        loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / name)
        assert AutoImageProcessor.from_pretrained(tmp_path / name, backend="pil")
        first = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for one, tensor in loaded.state_dict().items():
            same = torch.equal(tensor, first[one])
            assert same if part_of(one) != "language" else True, one
            assert not (same and one.endswith("q_proj.weight")), f"{one} was not trained"


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {**WHOLE, "minibatches": 2},
        {"train_projector": True, "activation_checkpointing": "full", "keep_gradients": True},
        {"lora": {"rank": 2}},
    ],
    ids=["whole", "projector", "adapters"],
)
def test_ranks_of_which_one_has_pictures_are_one_process_and_are_taken_up(
    folder: Path, vision: Vision, tmp_path: Path, processes: Processes, settings: dict[str, Any]
) -> None:
    all_of = mixed(vision)
    # Of each row of two micro-batches, only one shows pictures.
    batches = [collate([all_of[0], all_of[1]]), collate(all_of[:5])]
    of_ranks = dict(settings)
    of_one = {name: one for name, one in settings.items() if name != "keep_gradients"}
    one = LocalTrainer(
        LocalTrainer.Config(device="cpu", **SETTINGS, **of_one), folder, total_steps=4
    )
    two = partial(
        FsdpTrainer,
        FsdpTrainer.Config(world_size=2, **SETTINGS, **of_ranks),
        folder,
        total_steps=4,
        start=processes,
    )
    expected, weights, _ = asyncio.run(trained(one, [*batches, batches[0]]))
    found, of_two, _ = asyncio.run(trained(two(), batches, tmp_path / "saved"))

    async def resumed() -> tuple[list[float], dict[str, Tensor]]:
        async with two() as trainer:
            await trainer.load(tmp_path / "saved")
            metrics = await trainer.step(batches[0], LOSS, float(batches[0].num_loss_tokens))
            return [metrics["loss"], metrics["grad_norm"]], dict(await trainer.weights())

    rest, of_two = asyncio.run(resumed())
    np.testing.assert_allclose([*found, *rest], expected, rtol=0, atol=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(of_two[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("trainer", "settings", "head", "words"),
    [
        (LocalTrainer, {}, "value", "a critic"),
        (DeepSpeedTrainer, {}, "policy", "deepspeed"),
        (FsdpTrainer, {"world_size": 2, "context_parallel": 2}, "policy", "context_parallel"),
        (FsdpTrainer, {"world_size": 2, "tensor_parallel": 2}, "policy", "tensor_parallel"),
        (FsdpTrainer, {"world_size": 2, "expert_parallel": 2}, "policy", "expert_parallel"),
        (LocalTrainer, {"lora": {}, "train_tower": True}, "policy", "train_tower"),
        (LocalTrainer, {"lora": {"targets": ["qkv"]}}, "policy", "qkv is in the tower"),
        (LocalTrainer, {"routing": "replay"}, "policy", "routing"),
    ],
)
def test_what_is_not_computed_for_models_that_see_is_refused_by_name(
    folder: Path, trainer: type[GroupTrainer], settings: dict[str, Any], head: Any, words: str
) -> None:
    from agentrl.trainers.rank.model import make_model

    config = trainer.Config(**settings)
    with pytest.raises(ConfigError, match=words):
        make_model(TrainerSpec(trainer.sharding, config, folder, 1, 1.0, head))


def test_a_model_without_a_tower_trains_none(tiny_model_dir: Path) -> None:
    from agentrl.trainers.rank.model import make_model

    config = TrainerSettings(train_tower=True)
    with pytest.raises(ConfigError, match=r"trainer\.train_tower: the family qwen3 has no tower"):
        make_model(TrainerSpec(LocalTrainer.sharding, config, tiny_model_dir, 1, 1.0))


def test_the_planner_counts_the_tower_apart(folder: Path, own: Any) -> None:
    facts = model_facts(folder)
    sizes = {name: one.numel() for name, one in own.named_parameters()}
    assert facts.parameters == sum(sizes.values())
    assert facts.tower == sum(n for name, n in sizes.items() if part_of(name) != "language")
    assert facts.layers == 2
