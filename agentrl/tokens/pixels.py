"""Arrays of pixels, as simulators have them.

| shape | what it is |
|---|---|
| (height, width), each at least 8 | one in grey |
| (height, width, 1), (1, height, width) | one in grey |
| (height, width, 3), (3, height, width) | one in colours, RGB |
| (height, width, 4) | one in colours with opacity, RGBA |
| (4, height, width) | four in grey, the oldest first: the usual stack of frames |

A last axis of 1, 3 or 4 comes before a first axis of these.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentrl.tokens.encoded_image import EncodedImage

_COLOURS = (1, 3, 4)


def is_of_pixels(shape: Sequence[int]) -> bool:
    """True if bytes in an array of this shape are pictures."""
    if len(shape) == 2:
        return min(shape) >= 8
    return len(shape) == 3 and (shape[-1] in _COLOURS or shape[0] in _COLOURS)


def pictures_of(pixels: npt.NDArray[np.uint8]) -> list[EncodedImage]:
    """The pictures in an array of pixels.

    Raises:
        ImageError: they are too large.
    """
    if pixels.ndim == 2 or pixels.shape[-1] in (3, 4):
        return [EncodedImage.of_pixels(pixels)]
    if pixels.shape[-1] == 1:
        return [EncodedImage.of_pixels(pixels[..., 0])]
    if pixels.shape[0] == 3:
        return [EncodedImage.of_pixels(pixels.transpose(1, 2, 0))]
    return [EncodedImage.of_pixels(frame) for frame in pixels]


__all__ = ["is_of_pixels", "pictures_of"]
