"""`PictureKeys`: the tokens of contexts with pictures, as numbers that tell the pictures apart."""

from collections import OrderedDict
from collections.abc import Sequence

from agentrl.tokens.arrays import IntArray, ints
from agentrl.tokens.placed_images import PlacedImage

_PICTURES = 1 << 16
"""Pictures whose numbers are remembered; one that is forgotten gets another, and nothing cached of
it is found.
"""


class PictureKeys:
    """Replaces the tokens that stand for a picture by a negative number that only it has.

    Placeholders are the same tokens whichever picture they stand for. Whatever compares prefixes
    compares these numbers instead, and needs no rule for pictures.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._next = -2

    def keyed(self, token_ids: IntArray, images: Sequence[PlacedImage]) -> IntArray:
        """The tokens with those numbers; the same array if there are no pictures.

        Example: with the placeholder 9, (5, 9, 9, 7) becomes (5, -2, -2, 7).
        """
        if not images:
            return token_ids
        keyed = token_ids.copy()
        for placed in images:
            number = self._numbers.pop(placed.image.digest, None)
            if number is None:
                number, self._next = self._next, self._next - 1
            self._numbers[placed.image.digest] = number  # now the last to be forgotten
            if len(self._numbers) > _PICTURES:
                self._numbers.popitem(last=False)
            keyed[placed.start : placed.stop] = number
        return ints(keyed)


__all__ = ["PictureKeys"]
