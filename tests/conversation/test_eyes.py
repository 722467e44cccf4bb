"""Pictures in prompts: the tokens of the family's own processor, and none that text forges."""

from collections.abc import Callable, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from agentrl.config import check_options, load_config
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.placing import Places, place_messages
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ImagesRefusedError
from agentrl.models.vision_families import FAMILIES
from agentrl.testing.vision_models import VisionFamily, create_tiny_vision_model
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
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    config = AutoConfig.from_pretrained(folder)
    placeholder = tokenizer.convert_ids_to_tokens(config.image_token_id)
    opened = [Image.open(BytesIO(image.data)).convert("RGB") for image in images]
    if config.model_type in ("idefics3", "smolvlm"):
        chat = [in_parts(message) for message in chat]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    asked = MARKS.get(config.model_type, placeholder)
    for one in opened:
        written = WRITTEN[config.model_type](processor, one, placeholder)
        text = text.replace(asked, written.replace(asked, "<|later|>"), 1)
    ids: list[int] = tokenizer(text.replace("<|later|>", asked))["input_ids"]
    return ids


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates of Idefics want it: they write no plain text."""
    said = message["content"]
    return message | {
        "content": [{"type": "text", "text": said}] if isinstance(said, str) else said
    }


def by_grid(processor: Any, image: Image.Image, placeholder: str) -> str:
    grid = processor(images=[image], return_tensors="np")["image_grid_thw"][0]
    return placeholder * int(grid.prod() // 4)


def by_tiles(processor: Any, image: Image.Image, placeholder: str) -> str:
    """The processor's own text, without making one, which needs torchvision."""
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    own: Any = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token=placeholder,
        image_seq_length=4,
    )
    made = processor(images=[image], return_tensors="np")
    assert made["num_patches"][0] == len(made["pixel_values"])
    return InternVLProcessor.replace_image_token(own, made, 0)


def by_rows(processor: Any, image: Image.Image, placeholder: str) -> str:
    """The same of Idefics 3, of which SmolVLM's is the same."""
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    own: Any = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token=placeholder,
        image_seq_len=4,
    )
    made = processor(images=[[image]], return_row_col_info=True, return_tensors="np")
    return Idefics3Processor.replace_image_token(own, made, 0)


def between_breaks(processor: Any, image: Image.Image, placeholder: str) -> str:
    """The same of Gemma 3."""
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    own: Any = SimpleNamespace(
        full_image_sequence=f"\n\n<start_of_image>{placeholder * 16}<end_of_image>\n\n"
    )
    made = processor(images=[image], return_tensors="np")
    return Gemma3Processor.replace_image_token(own, made, 0)


def by_pools(processor: Any, image: Image.Image, placeholder: str) -> str:
    """Gemma 4's text; its processor needs torchvision."""
    made = processor(images=[image], return_tensors="np")
    return f"<|image>{placeholder * int(made['num_soft_tokens_per_image'][0])}<image|>"


MARKS = {"gemma3": "<start_of_image>"}
"""What a template writes for a picture, if it is no placeholder."""
WRITTEN: Mapping[str, Callable[[Any, Image.Image, str], str]] = {
    "gemma3": between_breaks,
    "gemma4": by_pools,
    "idefics3": by_rows,
    "internvl": by_tiles,
    "qwen2_5_vl": by_grid,
    "qwen2_vl": by_grid,
    "qwen3_vl": by_grid,
    "smolvlm": by_rows,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[VisionFamily], Path]:
    """A model of each family, made when it is asked for."""

    @cache
    def made(family: VisionFamily) -> Path:
        folder = tmp_path_factory.mktemp("families") / family
        create_tiny_vision_model(folder, family)
        return folder

    return made


def test_every_family_is_tried() -> None:
    assert set(get_args(VisionFamily)) == set(FAMILIES) == set(WRITTEN)


def answered(renderer: TemplateRenderer, text: str) -> Completion:
    ids = renderer.answer_ids(text)
    return Completion(ids, floats(np.zeros(len(ids))), ints(np.zeros(len(ids))), "stop")


@pytest.mark.parametrize(
    ("family", "history"),
    [
        *((family, "extend") for family in FAMILIES),
        # Those of Idefics write a space before an answer, which forks if the model has written it.
        *((family, "template") for family in FAMILIES if WRITTEN[family] is not by_rows),
    ],
)
def test_a_conversation_has_the_tokens_of_the_familys_processor(
    models: Callable[[VisionFamily], Path], family: VisionFamily, history: Any
) -> None:
    folder = models(family)
    renderer = TemplateRenderer.of_model(folder, RendererConfig(history=history))
    conversation = renderer.conversation()
    prompt = conversation.prompt(FIRST)
    assert prompt.ids.tolist() == by_processor(folder, CHAT[:2], SMALL, WIDE)
    spaced = WRITTEN[family] is by_rows  # their templates write a space before answers
    conversation.answer(answered(renderer, " left" if spaced else "left"))
    later = conversation.prompt([Message("user", "P O .", images=(TALL,))])
    assert not later.forked
    assert later.ids.tolist() == by_processor(folder, CHAT, SMALL, WIDE, TALL)
    assert [placed.image for placed in later.images] == [SMALL, WIDE, TALL]
    assert later.images[:2] == prompt.images
    known = len(later.ids) - len(later.new_ids)
    assert later.images[2:] == shifted(later.new_images, known)
    placeholder = renderer.encode(eyes_of(renderer).placeholder)[0]
    spans = [later.ids[placed.start : placed.stop] for placed in later.images]
    assert all(span[0] == span[-1] == placeholder for span in spans)
    assert np.count_nonzero(np.concatenate(spans) == placeholder) == np.count_nonzero(
        later.ids == placeholder
    )


def eyes_of(renderer: TemplateRenderer) -> Any:
    assert renderer._eyes is not None
    return renderer._eyes


@pytest.mark.parametrize("family", FAMILIES)
@given(width=st.integers(8, 300), height=st.integers(8, 300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_size_alone_says_what_the_processor_makes_of_a_picture(
    models: Callable[[VisionFamily], Path], family: VisionFamily, width: int, height: int
) -> None:
    from transformers import AutoImageProcessor

    folder = models(family)
    eyes = eyes_of(renderer_in(folder))
    image = EncodedImage.of_pixels(np.zeros((height, width, 3), np.uint8))
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    opened = Image.open(BytesIO(image.data))
    expected = WRITTEN[family](processor, opened, eyes.placeholder)
    assert eyes.expanded(eyes.asked, [image]) == expected


@cache
def renderer_in(folder: Path) -> TemplateRenderer:
    return TemplateRenderer.of_model(folder)


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
