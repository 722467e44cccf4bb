"""Curves of characters: each braille character is a grid of two by four dots."""

from collections.abc import Sequence

import numpy as np

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot, by row and column (Unicode's chart of U+2800)."""


def braille_curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """The curve of some values as `height` lines of `width` characters, from the least to the
    greatest value.

    It is as wide as the lines: neighbouring values are averaged where there are more than 2 *
    width, and fewer are joined by lines. Missing values (NaN) are left out, as gaps where there are
    many.
    """
    columns, rows = 2 * width, 4 * height
    points = np.asarray(values, np.float64)
    if len(points) > columns:
        pieces = [piece[np.isfinite(piece)] for piece in np.array_split(points, columns)]
        points = np.array([piece.mean() if len(piece) else np.nan for piece in pieces])
    elif (known := np.isfinite(points)).any():
        places = np.linspace(0, columns - 1, len(points))
        points = np.interp(np.arange(columns), places[known], points[known])
    cells = np.zeros((height, width), np.int64)
    known = np.isfinite(points)
    if known.any():
        low = points[known].min()
        above = np.where(known, points, low) / 2 - low / 2  # halves, whose difference is finite
        span = above.max()
        heights = above / span if span > 0 else above
        levels = np.where(known, (rows - 1) - np.round(heights * (rows - 1)), -1).astype(int)
        before = -1
        for column, level in enumerate(levels):
            if level >= 0:
                # From the value before, so that jumps are seen; its own row has its dot in the
                # column before.
                first = (
                    level
                    if before < 0 or before == level
                    else before + (1 if before < level else -1)
                )
                for row in range(min(first, level), max(first, level) + 1):
                    cells[row // 4, column // 2] |= _DOTS[row % 4][column % 2]
            before = level
    return ["".join(chr(_BLANK + cell) for cell in line) for line in cells.tolist()]
