"""Pictures in requests of programs: their bytes stand in the request, and none is ever fetched.

Each protocol writes a picture in its own way: as a `data:` address in base64, or as base64 with a
media type. What is said of a picture must be true of its bytes. In a message, pictures come before
the text, as in what environments show, wherever the program has put them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ImageError
from agentrl.gateway.refusal import CallRefusedError, unsupported
from agentrl.hosting.observations import MOST_IMAGES
from agentrl.tokens.encoded_image import DATA_ADDRESS, MEDIA_TYPES, EncodedImage

PartReader = Callable[[Mapping[str, Any], str], EncodedImage]
"""Reads a part of a message that is a picture. The text says where it stands, for messages."""

_WAY_OUT = (
    "pictures are never fetched: send the bytes of a PNG or JPEG file in base64, as"
    " data:image/png;base64,... or as the protocol has it"
)


@dataclass(frozen=True, slots=True)
class Said:
    """What a message says: its text, and its pictures, which stand before that."""

    text: str
    images: tuple[EncodedImage, ...] = ()


def said_of(
    parts: Iterable[Mapping[str, Any]],
    where: str,
    texts: Sequence[str],
    readers: Mapping[str, PartReader],
) -> Said:
    """The parts of a message. `texts` and `readers`: the types of parts that are texts, and that
    are pictures.

    Raises:
        CallRefusedError: one is of another type, or a picture that is not taken.
    """
    found: list[str] = []
    images: list[EncodedImage] = []
    for part in parts:
        kind = part.get("type")
        if reader := readers.get(str(kind)):
            images.append(reader(part, f"{where}: picture {len(images)}"))
        elif kind in texts:
            found.append(str(part.get("text") or part.get("refusal") or ""))
        else:
            raise unsupported(f"{where}: content of type {kind!r}", "write text or pictures")
    if len(images) > MOST_IMAGES:
        raise _invalid_image(f"{where} has {len(images)} pictures, and {MOST_IMAGES} are the most")
    return Said("".join(found), tuple(images))


def read_address(address: Any, where: str) -> EncodedImage:
    """The picture of a `data:` address in base64.

    Raises:
        CallRefusedError: it is another address, or no picture that is taken.
    """
    found = DATA_ADDRESS.match(address) if isinstance(address, str) else None
    if found is None:
        raise unsupported(f"{where}, the address {address!r:.80} as an image_url", _WAY_OUT)
    if found["more"].lower().rpartition(";")[2] != "base64":
        raise _invalid_image(f"{where} is a data: address without base64: write {_WAY_OUT}")
    return read_base64(address[found.end() :], found["type"], where)


def read_base64(data: Any, media_type: Any, where: str) -> EncodedImage:
    """The picture of bytes in base64, of which `media_type` says what they are.

    Raises:
        CallRefusedError: they are no picture that is taken, or another than is said.
    """
    if str(media_type).lower() not in MEDIA_TYPES:
        raise unsupported(f"{where} of type {media_type!r:.80}", "write image/png or image/jpeg")
    try:
        return EncodedImage.from_base64(data, media_type)
    except ImageError as error:
        raise _invalid_image(f"{where}: {error}") from error


def _invalid_image(detail: str) -> CallRefusedError:
    return CallRefusedError(400, "invalid_image", detail)


__all__ = ["PartReader", "Said", "read_address", "read_base64", "said_of"]
