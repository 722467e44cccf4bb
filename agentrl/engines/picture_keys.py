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
        """The tokens, or themselves without pictures."""
        if not images:
            return token_ids
        keyed = token_ids.copy()
        for placed in images:
            keyed[placed.start : placed.stop] = self._number_of(placed.image.digest)
        return ints(keyed)

    def _number_of(self, digest: str) -> int:
        number = self._numbers.pop(digest, None)
        if number is None:
            number, self._next = self._next, self._next - 1
        self._numbers[digest] = number
        if len(self._numbers) > _PICTURES:
            self._numbers.popitem(last=False)
        return number


__all__ = ["PictureKeys"]
