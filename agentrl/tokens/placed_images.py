"""`PlacedImage`: a picture among the tokens of a context."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.tokens.encoded_image import EncodedImage


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture among the tokens of a context.

    Its placeholder tokens, which the model reads the picture's features instead of, are `start` to
    `start + tokens - 1`. Marks that a family writes around them, such as the beginning of a
    picture, do not count. Where the placeholders of one picture lie in several pieces, as those of
    tiles, they and all that is between them count.
    """

    start: int
    """The position of its first placeholder."""
    tokens: int
    """The number of its tokens."""
    image: "EncodedImage"

    @property
    def stop(self) -> int:
        """The position after its last placeholder."""
        return self.start + self.tokens

    @property
    def key(self) -> tuple[int, int, str]:
        """What tells it from others at this place: start, tokens and the picture's digest."""
        return self.start, self.tokens, self.image.digest


def shifted(images: Iterable[PlacedImage], by: int) -> tuple[PlacedImage, ...]:
    """The same pictures, so many tokens later; earlier, if `by` is negative."""
    return tuple(replace(image, start=image.start + by) for image in images) if by else (*images,)


def images_until(images: Iterable[PlacedImage], stop: int) -> tuple[PlacedImage, ...]:
    """The pictures that end at the token `stop`, which is not included, or before."""
    return tuple(image for image in images if image.stop <= stop)


def images_from(images: Iterable[PlacedImage], start: int) -> tuple[PlacedImage, ...]:
    """The pictures that begin at the token `start` or later, at the same positions."""
    return tuple(image for image in images if image.start >= start)


def whole_pictures(images: Iterable[PlacedImage], start: int, stop: int) -> int:
    """The end nearest to `stop` of tokens from `start` on that is inside of no picture: before the
    picture there, or after it, if the tokens would begin with it.
    """
    for image in images:
        if image.start < stop < image.stop:
            return image.start if image.start > start else image.stop
    return stop


def shared_length(one: tuple[PlacedImage, ...], other: tuple[PlacedImage, ...], length: int) -> int:
    """The number of tokens that two contexts have in common, whose first `length` tokens are equal.

    Placeholders look the same whichever picture they stand for, so the contexts part at the first
    picture that only one of them has there. A picture is shared as a whole or not at all.
    """
    if not one and not other:
        return length
    known = {image.key for image in other} & {image.key for image in one}
    for image in (*one, *other):
        if image.start < length and (image.key not in known or image.stop > length):
            length = image.start
    return length


def check_placed(images: tuple[PlacedImage, ...], length: int, what: str) -> None:
    """Check that pictures lie among the tokens of something with `length` of them, in order.

    Raises:
        ValueError: one does not, or two overlap.
    """
    end = 0
    for image in images:
        if image.tokens < 1 or image.start < end or image.stop > length:
            raise ValueError(
                f"the picture at the tokens {image.start} to {image.stop - 1} of {what} cannot be"
                f" there: pictures lie in order, the one before ends at {end}, and there are"
                f" {length} tokens"
            )
        end = image.stop
