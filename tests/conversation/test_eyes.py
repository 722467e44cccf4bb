"""Pictures in prompts: the tokens of the family's own processor, and none that text forges."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl.config import check_options, load_config
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.placing import Places, place_messages
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ImagesRefusedError
from agentrl.tokens.arrays import floats, ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import shifted
from agentrl.trajectory import Completion, Message

SMALL, WIDE, TALL = (
    EncodedImage.of_pixels(np.full((*size, 3), 50, np.uint8))
    for size in ((64, 64), (60, 120), (200, 31))
)
FIRST = [Message("system", "Play."), Message("user", "P . O", images=(SMALL, WIDE))]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Play."},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "P . O"}],
    },
    {"role": "assistant", "content": "left"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "P O ."}]},
]


@pytest.fixture(scope="module")
def renderer(seeing_model_dir: Path) -> TemplateRenderer:
    return TemplateRenderer.of_model(seeing_model_dir)


def by_processor(folder: Path, chat: list[dict[str, Any]], *images: EncodedImage) -> list[int]:
    """The tokens that the family's processor makes, whose class needs torchvision for videos."""
    from transformers import AutoImageProcessor, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    opened = [Image.open(BytesIO(image.data)) for image in images]
    grids = processor(images=opened, return_tensors="np")["image_grid_thw"]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for grid in grids:
        text = text.replace("<|image_pad|>", "<|later|>" * (grid.prod() // 4), 1)
    ids: list[int] = tokenizer(text.replace("<|later|>", "<|image_pad|>"))["input_ids"]
    return ids


def answered(renderer: TemplateRenderer, text: str) -> Completion:
    ids = renderer.answer_ids(text)
    return Completion(ids, floats(np.zeros(len(ids))), ints(np.zeros(len(ids))), "stop")


@pytest.mark.parametrize("history", ["extend", "template"])
def test_a_conversation_has_the_tokens_of_the_familys_processor(
    seeing_model_dir: Path, history: Any
) -> None:
    renderer = TemplateRenderer.of_model(seeing_model_dir, RendererConfig(history=history))
    conversation = renderer.conversation()
    prompt = conversation.prompt(FIRST)
    assert prompt.ids.tolist() == by_processor(seeing_model_dir, CHAT[:2], SMALL, WIDE)
    conversation.answer(answered(renderer, "left"))
    later = conversation.prompt([Message("user", "P O .", images=(TALL,))])
    assert not later.forked
    assert later.ids.tolist() == by_processor(seeing_model_dir, CHAT, SMALL, WIDE, TALL)
    assert [placed.image for placed in later.images] == [SMALL, WIDE, TALL]
    assert later.images[:2] == prompt.images
    known = len(later.ids) - len(later.new_ids)
    assert later.images[2:] == shifted(later.new_images, known)
    placeholder = renderer.control_tokens["<|image_pad|>"]
    spans = [later.ids[placed.start : placed.stop].tolist() for placed in later.images]
    assert spans == [[placeholder] * placed.tokens for placed in later.images]
    assert sum(map(len, spans)) == later.ids.tolist().count(placeholder)


def test_a_text_forges_no_picture(renderer: TemplateRenderer) -> None:
    conversation = renderer.conversation()
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = conversation.prompt([Message("user", text, images=(SMALL,))])
    (placed,) = prompt.images
    placeholder = renderer.control_tokens["<|image_pad|>"]
    assert prompt.ids.tolist().count(placeholder) == placed.tokens == 4
    assert text in renderer.decode(prompt.ids)


def test_other_pictures_in_what_is_shown_make_a_fork(seeing_model_dir: Path) -> None:
    renderer = TemplateRenderer.of_model(seeing_model_dir, RendererConfig(history="template"))
    other = EncodedImage.of_pixels(np.full((64, 64, 3), 200, np.uint8))
    for shown, forks in ((SMALL, False), (other, True)):
        conversation = renderer.conversation()
        conversation.prompt([Message("user", "U", images=(SMALL,))])
        conversation.answer(answered(renderer, "left"))
        conversation.show([Message("user", "U", images=(shown,)), Message("assistant", "left")])
        assert conversation.prompt([Message("user", "V")]).forked == forks


def test_messages_that_become_one_keep_all_pictures() -> None:
    can = Places(system=False, repeated_users=False, results=False)
    placed = place_messages(
        [
            Message("system", "S", images=(SMALL,)),
            Message("user", "U", images=(WIDE,)),
            Message("tool", "T", images=(TALL,)),
        ],
        can,
        begins=True,
    )
    assert [message.role for message in placed] == ["user"]
    assert placed[0].images == (SMALL, WIDE, TALL)


def test_a_shape_that_the_model_cannot_take_is_refused(renderer: TemplateRenderer) -> None:
    line = EncodedImage.of_pixels(np.zeros((2, 500), np.uint8))
    with pytest.raises(ImagesRefusedError, match="no picture of 500 x 2 pixels"):
        renderer.conversation().prompt([Message("user", "", images=(line,))])


def test_a_run_of_a_model_that_sees_may_show_pictures(
    seeing_model_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "env: {name: frozen_lake, options: {view: picture}}\nsteps: 1\nengine: local\n"
        f"model: {seeing_model_dir}\n"
    )
    check_options(load_config(config, []))
