"""The pictures that an environment shows, which go the way of its infos.

An environment returns an `Observation`, and whatever carries its replies knows texts and infos in
types that JSON has. So where the environment runs, `as_result` makes the pictures a part of the
info, in base64. They cross every transport there, and pass through every wrapper. Where an episode
is played, `images_taken` takes them out again, and looks at what came.
"""

import base64
from collections.abc import Mapping
from typing import Any

from agentrl.errors import EnvError, ImageError
from agentrl.protocols.env import Observation
from agentrl.tokens.encoded_image import EncodedImage

IMAGES = "observation_images"
"""The key of an info with the pictures of the observation, as a list of base64. An environment may
also fill it in itself.
"""
MOST_IMAGES = 64
"""The most pictures of one observation."""


def as_result(reply: Any) -> Any:
    """A reply of `reset` or `step` with a text for an `Observation`. One that is malformed is left
    for the host to refuse.

    Raises:
        EnvError: the observation is made of something else than a text and pictures.
    """
    if not isinstance(reply, tuple) or not reply or not isinstance(reply[0], Observation):
        return reply
    seen, info = reply[0], reply[-1]
    if not isinstance(info, Mapping):
        return (seen.text, *reply[1:])
    if isinstance(seen.images, EncodedImage) or not all(
        isinstance(image, EncodedImage) for image in seen.images
    ):
        raise EnvError(
            f"an Observation has the images {seen.images!r:.200}: write a list of EncodedImage"
            " (EncodedImage.of_pixels makes one of an array)"
        )
    images = [base64.b64encode(image.data).decode() for image in seen.images]
    return (seen.text, *reply[1:-1], {**info, IMAGES: images} if images else info)


def images_taken(
    where: str, info: dict[str, Any]
) -> tuple[tuple[EncodedImage, ...], dict[str, Any]]:
    """The pictures of an info, and the info without them. `where` is for messages.

    Raises:
        EnvError: they are none, or too many; says why.
    """
    if IMAGES not in info:
        return (), info
    written = info[IMAGES]
    if not isinstance(written, list) or len(written) > MOST_IMAGES:
        raise EnvError(
            f"{where} gave info[{IMAGES!r}] as {written!r:.80}: write a list of at most"
            f" {MOST_IMAGES} pictures in base64"
        )
    images = []
    for number, one in enumerate(written):
        try:
            images.append(EncodedImage.from_base64(one))
        except ImageError as error:
            raise EnvError(f"{where}: picture {number}: {error}") from error
    return tuple(images), {key: value for key, value in info.items() if key != IMAGES}
