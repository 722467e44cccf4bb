"""`EncodedImage`: a picture as the bytes of a PNG or JPEG file, which have been checked.

Pictures come from environments, data and agents, so their bytes may be anything. Those of an
`EncodedImage` are known to decode, to a known size, and in little memory.
"""

import base64
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from agentrl.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ImageFormat = Literal["png", "jpeg"]

MOST_BYTES = 8 << 20
"""The longest file."""
MOST_PIXELS = 1 << 24
"""The most pixels: 4096 x 4096."""
SUFFIXES: dict[str, ImageFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
"""The endings of the names of files, in small letters, with the format of each."""
MEDIA_TYPES: dict[str, ImageFormat] = {
    "image/png": "png",
    "image/jpeg": "jpeg",
    "image/jpg": "jpeg",
}
"""The media types that protocols write, with the format of each."""
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Pillow's names of the colours that are taken."""
_OTHERS = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"<svg": "SVG",
    b"<?xml": "SVG",
    b"%PDF": "PDF",
}
"""The beginnings of other formats that one may well try."""
_ADDRESS = re.compile(r"\s*(https?|ftp|file|data):", re.IGNORECASE)
DATA_ADDRESS = re.compile(r"data:(?P<type>[\w/+.-]*)(?P<more>[^,]*),", re.IGNORECASE)
"""The beginning of an address that has the bytes themselves."""
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"


class _ImageFacts(NamedTuple):
    """Format and size of a picture, as found in its bytes."""

    format: ImageFormat
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A still picture as the bytes of a PNG or JPEG file.

    Making one decodes it, after its size has been read from its first bytes, so one that exists can
    be decoded. Nothing is ever fetched: an address is refused. Two are equal if their bytes are.

    Cameras write rows as their sensor lies, and beside them how to turn these (EXIF). Width and
    height are those of the picture as people see it.

    Raises:
        ImageError: the bytes are no PNG or JPEG, are cut off or damaged, are more than `MOST_BYTES`
            or `MOST_PIXELS`, hold several frames, or colours that screens do not have (CMYK).
    """

    data: bytes = field(repr=False, compare=False)
    """The file."""
    digest: str = field(init=False)
    """SHA-256 of the file, in hexadecimal."""
    format: ImageFormat = field(init=False)
    width: int = field(init=False)
    """In pixels."""
    height: int = field(init=False)
    """In pixels."""

    def __post_init__(self) -> None:
        data: Any = self.data
        if isinstance(data, str) and _ADDRESS.match(data):
            raise ImageError(
                f"{data!r:.80} is an address, and pictures are never fetched: read the bytes where"
                " they are, and pass these"
            )
        if not isinstance(data, bytes):
            raise ImageError(
                f"a picture is the bytes of a PNG or JPEG file, got {type(data).__name__}: use"
                " EncodedImage.of_pixels for an array, EncodedImage.from_file for a path"
            )
        if len(data) > MOST_BYTES:
            raise ImageError(
                f"the picture has {len(data):,} bytes, and at most {MOST_BYTES:,} are taken: make"
                " it smaller"
            )
        digest = sha256(data).hexdigest()
        facts = _inspect(_Bytes(data, digest))
        for name, value in (("digest", digest), *facts._asdict().items()):
            object.__setattr__(self, name, value)

    @classmethod
    def of_pixels(cls, pixels: npt.NDArray[np.uint8]) -> Self:
        """The PNG of pixels: bytes from 0 to 255, [height, width] for grey, or with 3 colours (RGB)
        or 4 (RGBA) as a third axis.

        Raises:
            ImageError: the array is none of these, or too large.
        """
        colours = {2: (0,), 3: pixels.shape[2:]}.get(pixels.ndim)
        if pixels.dtype != np.uint8 or colours not in ((0,), (3,), (4,)) or 0 in pixels.shape:
            raise ImageError(
                f"an array of {pixels.shape} in {pixels.dtype} is no picture: write uint8, and"
                " (height, width), (height, width, 3) or (height, width, 4)"
            )
        _check_size(pixels.shape[1], pixels.shape[0])
        from PIL import Image

        file = BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "png")
        return cls(file.getvalue())

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The picture in a file, whose name says what it is.

        Raises:
            ImageError: it is none, or not of the format that its name says.
            OSError: the file cannot be read.
        """
        named = SUFFIXES.get(path.suffix.lower())
        if named is None:
            raise ImageError(f"{path.name} does not end in one of {', '.join(SUFFIXES)}")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        image = cls(data)
        if image.format != named:
            raise ImageError(f"{path.name} is a {image.format.upper()} file: rename it")
        return image

    @classmethod
    def from_base64(cls, text: Any, media_type: str | None = None) -> Self:
        """The picture whose bytes are written in base64. `media_type`: what it is said to be, if
        anything is.

        Raises:
            ImageError: it is none, or not what it is said to be.
        """
        try:
            data = base64.b64decode(text, validate=True)
        except (TypeError, ValueError) as error:
            raise ImageError(
                f"{text!r:.80} is no base64, and pictures are never fetched: send the bytes of a"
                " PNG or JPEG file"
            ) from error
        image = cls(data)
        if media_type is not None and MEDIA_TYPES.get(media_type.lower()) != image.format:
            raise ImageError(f"it is a {image.format.upper()} file, and not {media_type!r:.80}")
        return image

    @staticmethod
    def is_address(text: str) -> bool:
        """True if a text is an address of any kind, and not a path."""
        return _ADDRESS.match(text) is not None

    @classmethod
    def from_address(cls, text: str) -> Self:
        """The picture in an address that has its bytes: `data:image/png;base64,iVBO...`.

        Raises:
            ImageError: it is another address, or no picture.
        """
        found = DATA_ADDRESS.match(text)
        if found is None:
            raise ImageError(
                f"{text!r:.80} is an address, and pictures are never fetched: pass the bytes"
            )
        if found["more"].lower().rpartition(";")[2] != "base64":
            raise ImageError(f"{text!r:.40} is a data: address without base64")
        return cls.from_base64(text[found.end() :], found["type"])

    def decoded(self) -> "Picture":
        """The picture in RGB, as people see it."""
        from PIL import Image

        with Image.open(BytesIO(self.data)) as opened:
            _turn_upright(opened)
            return opened.convert("RGB")

    @property
    def address(self) -> str:
        """An address that has the bytes, which `from_address` reads."""
        return f"data:image/{self.format};base64,{base64.b64encode(self.data).decode()}"

    @property
    def name(self) -> str:
        """The name of its file in a run, by its content: the digest, and an ending."""
        return f"{self.digest}.{'png' if self.format == 'png' else 'jpg'}"

    @property
    def described(self) -> str:
        """A short text in its place, for readers that see none."""
        return f"[image: {self.format}, {self.width} x {self.height}]"


class _Bytes:
    """The bytes of a picture, compared by their digest."""

    __slots__ = ("data", "digest")

    def __init__(self, data: bytes, digest: str) -> None:
        self.data: bytes | None = data
        self.digest = digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and self.digest == other.digest


@lru_cache(maxsize=4096)
def _inspect(file: _Bytes) -> _ImageFacts:
    """Check the bytes. Those that have been checked lately are not decoded again."""
    assert file.data is not None
    data, file.data = file.data, None  # the cache keeps only the digest
    if data.startswith(_PNG):
        facts = _ImageFacts("png", *_png_size(data))
    elif data.startswith(_JPEG):
        facts = _ImageFacts("jpeg", *_jpeg_size(data))
    else:
        other = "WebP" if data[8:12] == b"WEBP" else None
        other = next((what for sign, what in _OTHERS.items() if data.startswith(sign)), other)
        raise ImageError(
            f"the bytes are {f'a {other} file' if other else 'no picture'} (they begin with"
            f" {data[:12]!r}): write PNG or JPEG"
        )
    width, height = _check_decodes(data, facts)
    return facts._replace(width=width, height=height)


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise ImageError(
            f"the picture is {width:,} x {height:,} pixels, and at most {MOST_PIXELS:,} in all are"
            " taken: make it smaller"
        )


def _png_size(data: bytes) -> tuple[int, int]:
    """The width and height of a PNG, by its chunks alone, of which none is decompressed."""
    chunks = dict(_png_chunks(data))
    if b"IEND" not in chunks or len(chunks.get(b"IHDR", b"")) != 13:
        raise ImageError("the PNG is cut off: its last part is missing")
    if b"acTL" in chunks:
        raise ImageError("the PNG is animated: write one of its frames")
    width, height = (int.from_bytes(chunks[b"IHDR"][at : at + 4]) for at in (0, 4))
    _check_size(width, height)
    return width, height


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The kind of each chunk of a PNG that is there as a whole, and its beginning."""
    at = len(_PNG)
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        if end > len(data):
            return
        # A chunk: length (4 bytes), kind (4), content, checksum (4). 13 bytes of content are enough
        # for the size, in IHDR.
        yield data[at + 4 : at + 8], data[at + 8 : min(end - 4, at + 21)]
        at = end


_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""The markers of a JPEG after which its size stands."""


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """The width and height of a JPEG, by the segments of its head alone."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _FRAMES:
            height, width = (int.from_bytes(data[place : place + 2]) for place in (at + 5, at + 7))
            _check_size(width, height)
            return width, height
        # Some markers have no length after them, and bytes 0xFF may be repeated to fill.
        alone = marker == 0x01 or 0xD0 <= marker <= 0xD7
        at += 1 if marker == 0xFF else 2 if alone else 2 + int.from_bytes(data[at + 2 : at + 4])
    raise ImageError("the JPEG is cut off or damaged: its size is missing")


def _turn_upright(image: "Picture") -> None:
    """Turn a picture as its EXIF says; it stays as it is if that cannot be read."""
    from PIL import ImageOps

    with suppress(Exception):  # Pillow raises what the bytes make it stumble over
        ImageOps.exif_transpose(image, in_place=True)


def _check_decodes(data: bytes, facts: _ImageFacts) -> tuple[int, int]:
    """Decode a picture once, as its readers will do, and return its width and height, upright."""
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=(facts.format.upper(),)) as image:
            if image.size != (facts.width, facts.height) or image.mode not in _MODES:
                raise ImageError(
                    f"the picture is {image.width} x {image.height} in {image.mode}, and"
                    f" {', '.join(_MODES)} are taken: convert it to RGB"
                )
            if image.format != facts.format.upper() or getattr(image, "n_frames", 1) != 1:
                raise ImageError(f"the file ({image.format}) holds several pictures: write one")
            image.load()
            _turn_upright(image)
            return image.size
    except ImageError:
        raise
    except Exception as error:  # Pillow raises what the bytes make it stumble over
        raise ImageError(
            f"the {facts.format.upper()} cannot be decoded: {error} ({type(error).__name__})"
        ) from error
