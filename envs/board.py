"""Boards drawn as SVG, for environments that show pictures of their states (`render_html`)."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_CELL_PIXELS = 26
_PLAIN_COLOUR = "#eef1f4"
_INK_COLOUR = "#22303c"


def board_html(
    rows: Sequence[str], colours: Mapping[str, str], signs: Mapping[str, str] | None = None
) -> str:
    """A board as HTML: a square for each letter of the rows, in the colour of the letter.

    `signs` is what stands in a square, by letter; letters that have none there stand for
    themselves, and a space for nothing.
    """
    signs = signs or {}
    width, height = _CELL_PIXELS * max(map(len, rows), default=0), _CELL_PIXELS * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0'
        f' {width} {height}" font-family="sans-serif" font-size="15"'
        f' text-anchor="middle">{"".join(_squares(rows, colours, signs))}</svg>'
    )


def _squares(
    rows: Sequence[str], colours: Mapping[str, str], signs: Mapping[str, str]
) -> Iterable[str]:
    for row, cells in enumerate(rows):
        for column, letter in enumerate(cells):
            x, y = _CELL_PIXELS * column, _CELL_PIXELS * row
            side = _CELL_PIXELS - 2
            yield (
                f'<rect x="{x + 1}" y="{y + 1}" width="{side}" height="{side}" rx="3" '
                f'fill="{colours.get(letter, _PLAIN_COLOUR)}"/>'
            )
            if sign := signs.get(letter, letter).strip():
                middle = x + _CELL_PIXELS // 2
                yield (
                    f'<text x="{middle}" y="{y + 18}" fill="{_INK_COLOUR}">{escape(sign)}</text>'
                )
