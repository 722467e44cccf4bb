"""`RunImages`: the pictures of a run's episodes, each a file that is named after its content."""

import base64
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, ImageError
from agentrl.files.durable import unfinished
from agentrl.tokens.encoded_image import EncodedImage

_NAME = re.compile(r"[0-9a-f]{64}\.(png|jpg)")


def named_images(message: Mapping[str, Any]) -> str:
    """The content of a message as trajectories' files have it, after the names of its pictures."""
    names = [f"[image: images/{name}]" for name in message.get("images") or ()]
    return "\n".join(filter(None, (*names, message["content"])))


class RunImages:
    """The folder `images` in the folder of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "images"

    def keep(self, images: Iterable[EncodedImage]) -> None:
        """Write the pictures that are not there yet. Each is complete or absent, even if the
        process is killed.
        """
        for image in images:
            path = self._folder / image.name
            if path.exists():
                continue
            self._folder.mkdir(parents=True, exist_ok=True)
            with unfinished(path).open("wb") as file:
                file.write(image.data)
                file.flush()
                os.fsync(file.fileno())
            unfinished(path).replace(path)

    def read(self, name: str) -> EncodedImage:
        """The picture of this name.

        Raises:
            ConfigError: it is missing, or not what its name says.
        """
        path = self.path(name)
        try:
            image = EncodedImage(path.read_bytes())
        except (OSError, ImageError) as error:
            raise ConfigError(f"the picture {path} cannot be read: {error}") from error
        if image.name != name:
            raise ConfigError(f"{path} is not the picture that its name says: restore it")
        return image

    def address(self, name: str) -> str:
        """The picture of this name as a `data:` address, for a page; "" if it is missing, or not
        what its name says: whatever else stands in the file is not handed to a browser.
        """
        try:
            image = self.read(name)
        except ConfigError:
            return ""
        return f"data:image/{image.format};base64,{base64.b64encode(image.data).decode()}"

    def path(self, name: str) -> Path:
        """The file of the picture of this name.

        Raises:
            ConfigError: it is no name of a picture.
        """
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{name!r:.80} is no name of a picture")
        return self._folder / name
