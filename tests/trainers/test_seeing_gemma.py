"""Gemma, whose pictures are seen in both directions, by all that a trainer can do with layers."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.errors import TrainingError
from agentrl.models.vision import Vision, attention_of, part_of
from agentrl.placement.mesh import ONE_RANK
from agentrl.testing.vision_models import create_tiny_vision_model
from agentrl.tokens.arrays import ints
from agentrl.trainers.compute.forward import to_device
from agentrl.trainers.compute.pictures import PictureReader
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.packing import micro_batches
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.spec import TrainerSpec
from tests.trainers.shared_processes import Processes
from tests.trainers.test_seeing import SETTINGS, WHOLE, picture, sample, trained


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma") / "model"
    create_tiny_vision_model(made, request.param)
    return made


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    eager = attention_of(AutoConfig.from_pretrained(folder), "eager")
    return AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation=eager, dtype=torch.float32
    )


@pytest.fixture(scope="module")
def samples(own: Any, folder: Path) -> list[TrainingSample]:
    """Samples with several pictures, with none, with the same beginning, and one of twenty."""
    vision, (a, b, c) = Vision(own, folder), map(picture, (1, 2, 3))
    drawn = [
        sample(vision, [a, b], seed=1),
        sample(vision, [], seed=2, loss=30),
        sample(vision, [b, a, a], seed=3),
        sample(vision, [a, b], seed=1, loss=9),
        sample(vision, [a, c], seed=1),
        sample(vision, [picture(n) for n in range(20)], seed=4),
    ]
    return [with_marks(one, own.config) for one in drawn]


def with_marks(one: TrainingSample, config: Any) -> TrainingSample:
    """A sample in the tokens of this model."""
    tokens = one.token_ids % config.text_config.vocab_size
    tokens[np.isin(tokens, [config.image_token_id])] += 1
    for placed in one.images:
        tokens[placed.start - 1] = config.boi_token_id
        tokens[placed.start : placed.stop] = config.image_token_id
        tokens[placed.stop] = config.eoi_token_id
    return replace(one, token_ids=ints(tokens))


def alone(own: Any, vision: Vision, one: TrainingSample) -> Tensor:
    """The logprobs of a sample's loss tokens by the family's own forward pass."""
    ids_1T = torch.from_numpy(one.token_ids.astype(np.int64))[None]
    shown: dict[str, Tensor] = {}
    if one.images:
        shown |= vision.inputs([image.image for image in one.images]).tensors
        name = "token_type_ids" if own.config.model_type == "gemma3" else "mm_token_type_ids"
        shown[name] = (ids_1T == own.config.image_token_id).int()
    logprobs_TV = own(input_ids=ids_1T, **shown).logits[0].log_softmax(-1)
    before_N = torch.from_numpy(np.flatnonzero(one.loss_mask) - 1)
    return logprobs_TV[before_N].gather(1, ids_1T[0, before_N + 1][:, None])[:, 0]


@pytest.mark.parametrize(
    "settings",
    [
        WHOLE,
        *(
            pytest.param({**WHOLE, "activation_checkpointing": kind}, marks=pytest.mark.long)
            for kind in ("full", "selective")
        ),
        pytest.param({"lora": {"rank": 2}}, marks=pytest.mark.long),
    ],
    ids=["plain", "full", "selective", "adapters"],
)
def test_packed_samples_are_those_of_the_family_for_each_alone(
    folder: Path, own: Any, samples: list[TrainingSample], settings: dict[str, Any]
) -> None:
    ((micro_batch,),) = micro_batches(collate(samples), 4096)
    assert micro_batch.shared is not None
    config = LocalTrainer.Config(device="cpu", **SETTINGS, **settings)
    rank = TrainerRank(TrainerSpec(LocalTrainer.sharding, config, folder, 1, 1.0), 0)
    rank.open(ONE_RANK, "")
    model = rank.sharding.trainable.model
    vision = Vision(model, folder)
    read = to_device(micro_batch, torch.device("cpu"), reader=PictureReader(vision))
    found_N = rank.sharding.predict(read)
    order = micro_batch.numbers_M.tolist()
    expected_N = torch.cat([alone(own, vision, samples[number]) for number in order])
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=1e-5)
    if "lora" in settings:
        return
    own.zero_grad()
    found_N.sum().backward()  # type: ignore[no-untyped-call]
    expected_N.sum().backward()  # type: ignore[no-untyped-call]
    seen = set()
    for (name, parameter), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        assert expected.grad is not None, name
        # Against float64, both round gradients of Gemma 4 by up to 3e-5 of their size.
        close = 1e-5 if own.config.model_type == "gemma3" else 5e-5
        atol = close * (1 + float(expected.grad.abs().max()))
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=atol)
        seen.add(part_of(name))
    assert seen == {"language", "tower", "projector"}


def test_a_frozen_tower_is_not_sent_and_texts_alone_leave_a_trained_one_as_it_is(
    folder: Path, own: Any, samples: list[TrainingSample]
) -> None:
    batch = collate([samples[1]])
    for settings in ({}, WHOLE):
        config = LocalTrainer.Config(device="cpu", **SETTINGS, **settings)
        trainer = LocalTrainer(config, folder, total_steps=2)
        _, weights, sent = asyncio.run(trained(trainer, [batch, batch]))
        towers = {name for name in weights if part_of(name) != "language"}
        assert towers & sent == (towers if settings else set())
        assert sent - towers == weights.keys() - towers
        before = type(own).from_pretrained(folder).state_dict()
        of_own = {name.removeprefix("model."): one for name, one in before.items()}
        for name in towers:
            torch.testing.assert_close(
                weights[name], of_own[name.removeprefix("model.")], rtol=0, atol=0
            )


def test_a_sample_that_ends_inside_of_a_picture_is_refused(
    folder: Path, own: Any, samples: list[TrainingSample]
) -> None:
    one = samples[0]
    cut = slice(one.images[1].start + 2)
    names = ("token_ids", "loss_mask", "rollout_logprobs", "advantages", "policy_versions")
    own_of_cut = {name: getattr(one, name)[cut] for name in (*names, "turn_ids")}
    own_of_cut["loss_mask"] = np.arange(cut.stop) == 2
    ended = replace(one, **own_of_cut, truncated=True, tail_ids=one.token_ids[cut.stop :])
    reader = PictureReader(Vision(own, folder))
    ((micro_batch,),) = micro_batches(collate([ended]), 4096)
    with pytest.raises(TrainingError, match="ends inside of a picture"):
        to_device(micro_batch, torch.device("cpu"), reader=reader)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(WHOLE, marks=pytest.mark.slow),
        pytest.param({"lora": {"rank": 2}}, marks=pytest.mark.long),
    ],
    ids=["whole", "adapters"],
)
def test_ranks_of_which_one_has_pictures_are_one_process(
    folder: Path, samples: list[TrainingSample], processes: Processes, settings: dict[str, Any]
) -> None:
    batches: list[TrainBatch] = [collate(samples[:2]), collate(samples[:5])]
    one = LocalTrainer.Config(device="cpu", **SETTINGS, **settings)
    two = FsdpTrainer.Config(world_size=2, **SETTINGS, **settings)
    expected, weights, _ = asyncio.run(trained(LocalTrainer(one, folder, total_steps=4), batches))
    make = partial(FsdpTrainer, two, folder, total_steps=4, start=processes)
    found, of_two, _ = asyncio.run(trained(make(), batches))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(of_two[name], tensor, rtol=0, atol=1e-5)
