"""Boards drawn: as SVG for people (`render_html`), and as PNG for models that see."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape

import numpy as np
import numpy.typing as npt

from agentrl.tokens.encoded_image import EncodedImage

_CELL_PIXELS = 26
CELL_OF_IMAGE = 28
"""Pixels per side of a square in `board_image`: many models that see read squares of 28 x 28."""
_PLAIN_COLOUR = "#eef1f4"
_INK_COLOUR = "#22303c"


def board_html(
    rows: Sequence[str], colours: Mapping[str, str], signs: Mapping[str, str] | None = None
) -> str:
    """A board as HTML: a square for each letter of the rows, in the colour of the letter.

    `signs`: the text in a square, by letter. A letter without a sign is shown itself, and a space
    leaves the square empty.
    """
    signs = signs or {}
    squares = []
    side = _CELL_PIXELS - 2
    for row, cells in enumerate(rows):
        for column, letter in enumerate(cells):
            x, y = _CELL_PIXELS * column, _CELL_PIXELS * row
            squares.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{side}" height="{side}" rx="3" '
                f'fill="{colours.get(letter, _PLAIN_COLOUR)}"/>'
            )
            if sign := signs.get(letter, letter).strip():
                middle = x + _CELL_PIXELS // 2
                squares.append(
                    f'<text x="{middle}" y="{y + 18}" fill="{_INK_COLOUR}">{escape(sign)}</text>'
                )
    width, height = _CELL_PIXELS * max(map(len, rows), default=0), _CELL_PIXELS * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0'
        f' {width} {height}" font-family="sans-serif" font-size="15"'
        f' text-anchor="middle">{"".join(squares)}</svg>'
    )


def board_image(
    rows: Sequence[str], colours: Mapping[str, str], signs: Mapping[str, str] | None = None
) -> EncodedImage:
    """The same board as a picture of `CELL_OF_IMAGE` pixels per square. Only the signs of `_MASKS`
    can be drawn: letters would look different on every machine.
    """
    signs = signs or {}
    squares = [
        [
            _draw_square(colours.get(letter, _PLAIN_COLOUR), signs.get(letter, ""))
            for letter in row.ljust(max(map(len, rows)))
        ]
        for row in rows
    ]
    return EncodedImage.of_pixels(np.block([[[square] for square in row] for row in squares]))


@lru_cache(maxsize=256)
def _draw_square(colour: str, sign: str) -> npt.NDArray[np.uint8]:
    """A square in its colour, with a light edge and a sign: [height, width, 3]."""
    pixels = np.full((CELL_OF_IMAGE, CELL_OF_IMAGE, 3), 255, np.uint8)
    pixels[1:-1, 1:-1] = _rgb(colour)
    if sign:
        pixels[_MASKS[sign]] = _rgb(_INK_COLOUR)
    return pixels


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


_ACROSS, _DOWN = np.meshgrid(*[np.abs(np.arange(CELL_OF_IMAGE) - (CELL_OF_IMAGE - 1) / 2)] * 2)
_MASKS: Mapping[str, npt.NDArray[np.bool_]] = {
    "●": _ACROSS**2 + _DOWN**2 < 8**2,
    "·": _ACROSS**2 + _DOWN**2 < 3**2,
    "■": np.maximum(_ACROSS, _DOWN) < 8,
    "★": _ACROSS + _DOWN < 10,
}
"""The pixels of each sign: a disc, a dot, a square, and a square on its corner."""
