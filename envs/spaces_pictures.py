"""Gymnasium's pictures: arrays of pixels in observations and from `render()`, as `EncodedImage`.

A `Box` of bytes from 0 to 255 is pictures if it has the shape of pixels
(`agentrl/tokens/pixels.py`). All pictures of an observation are shown in the order of its space,
before the text, in which the rest of the observation is written.
"""

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from agentrl.envs.spaces_text import format_observation, is_image, parts_of
from agentrl.errors import EnvError
from agentrl.protocols import Observation
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.pixels import pictures_of

_TAKEN = object()
"""Marks a part of an observation that was a picture, and was taken out."""


def holds_pictures(space: Space[Any] | None) -> bool:
    """True if observations of a space hold pictures."""
    if isinstance(space, spaces.Box):
        return is_image(space)
    return any(map(holds_pictures, (parts_of(space) or {}).values()))


def without_pictures(space: Space[Any]) -> Space[Any] | None:
    """A space without the parts of it that are pictures; None if nothing is left."""
    if isinstance(space, spaces.Box):
        return None if is_image(space) else space
    if not (inner := parts_of(space)):
        return space
    kept = {key: left for key, one in inner.items() if (left := without_pictures(one)) is not None}
    if not kept:
        return None
    return spaces.Dict(kept) if isinstance(space, spaces.Dict) else spaces.Tuple([*kept.values()])


def shown_of(space: Space[Any], observation: Any) -> Observation:
    """An observation with its pictures, and the rest of it as text."""
    images: list[EncodedImage] = []
    rest = _take_pictures(space, observation, images)
    return Observation("" if rest is _TAKEN else format_observation(rest), images)


def rendered(env: Any) -> EncodedImage:
    """The picture that `render()` draws of an environment's state.

    Raises:
        EnvError: it draws something else.
    """
    pixels = env.render()
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise EnvError(
            f"render() of {env} gave {type(pixels).__name__}, and no array of uint8 with height,"
            " width and colours: choose another options['view']"
        )
    return EncodedImage.of_pixels(pixels)


def _take_pictures(space: Space[Any], observation: Any, images: list[EncodedImage]) -> Any:
    """An observation without its pictures, which are appended to `images`."""
    if isinstance(space, spaces.Box) and is_image(space):
        images += pictures_of(np.asarray(observation, np.uint8))
        return _TAKEN
    if not (inner := parts_of(space)):
        return observation
    rest = {key: _take_pictures(one, observation[key], images) for key, one in inner.items()}
    kept = {key: one for key, one in rest.items() if one is not _TAKEN}
    if not kept:
        return _TAKEN
    return kept if isinstance(space, spaces.Dict) else tuple(kept.values())


__all__ = ["holds_pictures", "rendered", "shown_of", "without_pictures"]
