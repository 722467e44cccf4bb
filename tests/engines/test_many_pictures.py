"""Episodes of many pictures: engine and trainer agree over fifty, and memory does not grow."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from agentrl import EncodedImage
from agentrl.batch import collate, to_samples
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.engines import seen_pictures
from agentrl.engines.local import LocalEngine
from agentrl.engines.seen_pictures import SeenPictures
from agentrl.models.tiny import create_tiny_model
from agentrl.models.vision import Vision
from agentrl.placement.mesh import ONE_RANK
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.vision_models import create_tiny_vision_model
from agentrl.trainers.compute.forward import to_device
from agentrl.trainers.compute.pictures import PictureReader
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.packing import micro_batches
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.spec import TrainerSpec
from agentrl.trajectory import Message, Task, Terminated, Trajectory, Turn
from tests.tiers import only

TURNS = 50
GEMMA: tuple[Literal["gemma3", "gemma4"], ...] = ("gemma3", "gemma4")
"""Families whose pictures are seen in both directions."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny_vision"
    create_tiny_model(made, size="tiny_vision")
    return made


def picture(seed: int, side: int = 56) -> EncodedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return EncodedImage.of_pixels(pixels)


async def played(folder: Path) -> Trajectory:
    """An episode that shows a new picture in each turn."""
    renderer = TemplateRenderer.of_model(folder)
    conversation = renderer.conversation()
    turns: list[Turn] = []
    sampling = SamplingParams(max_tokens=3, stop_token_ids=renderer.stop_token_ids)
    async with LocalEngine(LocalEngine.Config(dtype="float32"), folder) as engine:
        for number in range(TURNS):
            prompt = conversation.prompt([Message("user", "U", images=(picture(number),))])
            request = GenerateRequest(
                f"r/{number}",
                prompt.ids,
                sampling,
                seed=number,
                session="e",
                known=len(prompt.ids) - len(prompt.new_ids),
                images=prompt.images,
            )
            completion = await engine.generate(request)
            conversation.answer(completion)
            turns.append(Turn(prompt.new_ids, completion, 0.0, {}, images=prompt.new_images))
        # Each turn has computed what is new, and its pictures once.
        new = sum(len(turn.prompt_ids) for turn in turns)
        assert engine.stats().prefilled_tokens < new + 2 * TURNS
    task = Task("screens", 0)
    return Trajectory("e", task, tuple(turns), Terminated(), conversation.messages, 1.0)


@pytest.mark.parametrize("name", only(["tiny_vision", *GEMMA], "tiny_vision"))
def test_a_row_of_fifty_pictures_has_the_engines_logprobs_in_the_trainer(
    name: Literal["tiny_vision", "gemma3", "gemma4"], folder: Path, tmp_path: Path
) -> None:
    if name != "tiny_vision":
        folder = tmp_path / name
        create_tiny_vision_model(folder, name)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 8192
        (folder / "config.json").write_text(json.dumps(config))
    trajectory = asyncio.run(played(folder))
    (sample,) = to_samples(trajectory, 1.0)
    assert [placed.image for placed in sample.images] == [picture(n) for n in range(TURNS)]
    ((micro_batch,),) = micro_batches(collate([sample]), 1 << 20)
    settings = LocalTrainer.Config(device="cpu", dtype="float32")
    rank = TrainerRank(TrainerSpec(LocalTrainer.sharding, settings, folder, 1, 1.0), 0)
    rank.open(ONE_RANK, "")
    model = rank.sharding.trainable.model
    reader = PictureReader(Vision(model, folder))
    with torch.no_grad():
        found_N = rank.sharding.predict(to_device(micro_batch, torch.device("cpu"), reader=reader))
    expected_N = np.concatenate([turn.completion.logprobs for turn in trajectory.turns])
    atol = 2e-5 if name == "gemma4" else 1e-5  # over 4,000 tokens, and not 1,500
    np.testing.assert_allclose(found_N.numpy(), expected_N, rtol=0, atol=atol)


def bytes_alive() -> int:
    gc.collect()
    return sum(
        one.untyped_storage().nbytes() for one in gc.get_objects() if isinstance(one, torch.Tensor)
    )


def test_what_is_kept_of_pictures_does_not_grow_with_the_turns_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    monkeypatch.setattr(seen_pictures, "_ROWS", 64)
    monkeypatch.setattr(seen_pictures, "_INPUTS", 8)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    seen = SeenPictures(Vision(model, folder), torch.device("cpu"))
    alive = []
    with torch.inference_mode():
        for number in range(90):
            seen.grid(picture(number))  # of a prompt that is never computed
            assert len(seen.features(picture(1000 + number)).rows_FH) == 4
            if number in (29, 89):
                alive.append(bytes_alive())
    assert alive[0] == alive[1]
