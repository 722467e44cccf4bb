"""`Eyes`: how a model that sees has pictures written in its prompts.

A chat template writes one placeholder for each picture, or, in some families, the mark of its
beginning. The family's processor puts as many placeholders there as the picture has rows of
features, in some families with marks around and between them, and those are the tokens of the
prompt. The text of others holds neither, since they are guarded like all control tokens
(`agentrl.conversation.control_tokens`), so those of a rendered text are the pictures of its
messages, in order.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import ImagesRefusedError
from agentrl.models.vision_families import FAMILIES, FamilyFiles, image_processor
from agentrl.tokens.arrays import IntArray, ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage


class Eyes:
    """The placeholders of a model's family. `folder` has the settings of its image processor.

    Raises:
        ConfigError: the folder has no image processor that can be read.
    """

    def __init__(self, folder: Path, config: Any, tokenizer: Any) -> None:
        self._id: int = config.image_token_id
        self.placeholder: str = tokenizer.convert_ids_to_tokens(self._id)
        """The text of the token that stands for a row of features."""
        family = FAMILIES[config.model_type]
        files = FamilyFiles(config, tokenizer, image_processor(folder), self.placeholder)
        self.asked = family.asked(files)
        """What a template writes for each picture: the placeholder, in most families."""
        self._write = family.written(files)
        self._tokenizer = tokenizer
        self._asked_id: int = tokenizer.convert_tokens_to_ids(self.asked)
        self._written = lru_cache(maxsize=256)(self._write_placeholders)
        self._count = lru_cache(maxsize=4096)(self._count_placeholders)

    @classmethod
    def of_model(cls, folder: Path, tokenizer: Any) -> "Eyes | None":
        """The eyes of the model in a folder; None if it has none, or of a family that is not known.

        Raises:
            ConfigError: as `Eyes`.
        """
        found = seeing_family(folder)
        if found not in FAMILIES:
            return None
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return cls(folder, config, tokenizer)

    def expanded(self, text: str, images: Sequence[EncodedImage]) -> str:
        """A rendered text with what the family writes for each picture, where the template has
        asked for it.

        Raises:
            ImagesRefusedError: the template has not written one for each picture, or the model's
                image processor takes no picture of this shape.
        """
        pieces = text.split(self.asked)
        if len(pieces) != len(images) + 1:
            raise ImagesRefusedError(
                f"the chat template writes {self.asked} {len(pieces) - 1} times for {len(images)}"
                " pictures: name a template of the model's family in model.chat_template"
            )
        written = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            written += [self._written(image.height, image.width), piece]
        return "".join(written)

    def placed(
        self, token_ids: IntArray, images: Sequence[EncodedImage]
    ) -> tuple[PlacedImage, ...]:
        """Where pictures are in the tokens of a text that was expanded with them."""
        if not images:
            return ()
        places = iter(np.flatnonzero(token_ids == self._id).tolist())
        found: list[PlacedImage] = []
        # Other tokens may stand between the placeholders of one picture (ends of rows), so each
        # picture takes as many placeholders as its size has, from the first to the last.
        for image in images:
            own = [*islice(places, self.placeholders(image))]
            found.append(PlacedImage(own[0], own[-1] + 1 - own[0], image))
        return tuple(found)

    def asked_for(self, token_ids: IntArray, images: Sequence[PlacedImage]) -> list[int]:
        """The tokens of a prompt as its template asked for pictures: what the family has written
        for each is the one token of `asked` again.

        Raises:
            ImagesRefusedError: what stands around the placeholders of a picture is not what the
                family writes, since its text has merged with what is beside it.
        """
        tokens: list[int] = []
        read = 0
        for placed in images:
            written = self._ids_of(placed.image)
            begin = placed.start - int((written == self._id).argmax())
            own = token_ids[max(begin, 0) : begin + len(written)]
            if begin < read or not np.array_equal(own, written):
                raise ImagesRefusedError(
                    f"the tokens of the picture at {placed.start} are not those that its family"
                    " writes for it alone, so that no server can be asked to write them: use"
                    " engine=local or engine=vllm"
                )
            tokens += [*token_ids[read:begin].tolist(), self._asked_id]
            read = begin + len(written)
        return [*tokens, *token_ids[read:].tolist()]

    def written_for(self, token_ids: IntArray, images: Sequence[EncodedImage]) -> IntArray:
        """The tokens of a prompt with what the family writes for each picture, where the template
        has asked for it: `asked_for` backwards.

        Raises:
            ImagesRefusedError: it has not asked for each picture, or as `expanded`.
        """
        places = np.flatnonzero(token_ids == self._asked_id)
        if len(places) != len(images):
            raise ImagesRefusedError(
                f"the tokens ask {len(places)} times for {len(images)} pictures ({self.asked})"
            )
        parts = [token_ids[: places[0]]] if len(images) else [token_ids]
        ends = [*places[1:].tolist(), len(token_ids)]
        for image, place, end in zip(images, places.tolist(), ends, strict=False):
            parts += [self._ids_of(image), token_ids[place + 1 : end]]
        return ints(np.concatenate(parts))

    def _ids_of(self, image: EncodedImage) -> IntArray:
        """The tokens of what the family writes for a picture."""
        text = self._written(image.height, image.width)
        return ints(self._tokenizer.encode(text, add_special_tokens=False))

    def placeholders(self, image: EncodedImage) -> int:
        """The number of tokens that stand for a row of a picture's features."""
        return self._count(image.height, image.width)

    def _write_placeholders(self, height: int, width: int) -> str:
        """The text of a picture of this size, by the family's own image processor."""
        try:
            return self._write(height, width)
        except (ValueError, ZeroDivisionError) as error:
            raise ImagesRefusedError(
                f"the model takes no picture of {width} x {height} pixels: {error}"
            ) from error

    def _count_placeholders(self, height: int, width: int) -> int:
        """The number of placeholders in the text of a picture of this size."""
        return self._written(height, width).count(self.placeholder)


def seeing_family(folder: Path) -> str:
    """The family of a model that sees, by the `model_type` of its config; "" if it has no tower, or
    there is no config.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type", "")) if "vision_config" in config else ""


__all__ = ["Eyes", "seeing_family"]
