"""`agentrl.EncodedImage`: bytes that are taken can be decoded, and nothing else is taken."""

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agentrl import EncodedImage
from agentrl.errors import ImageError
from agentrl.tokens.encoded_image import MOST_BYTES
from tests.properties import examples

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
PICTURE = Image.fromarray(PIXELS)


def saved(picture: Image.Image, kind: str, **how: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **how)
    return file.getvalue()


PNG, JPEG = saved(PICTURE, "png"), saved(PICTURE, "jpeg")
PAIR = {"save_all": True, "append_images": [PICTURE.rotate(90)]}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int, data: bytes = bytes(1000)) -> bytes:
    """A PNG that says to be so large, and holds `data` instead of its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + body


def with_chunk(kind: bytes, data: bytes) -> bytes:
    """A sound PNG with one more chunk after its head."""
    return PNG[:33] + chunk(kind, data) + PNG[33:]


def test_a_picture_is_known_by_its_bytes() -> None:
    png, jpeg = EncodedImage(PNG), EncodedImage(JPEG)
    assert (png.format, png.width, png.height) == ("png", 50, 40)
    assert (jpeg.format, jpeg.width, jpeg.height) == ("jpeg", 50, 40)
    assert png == EncodedImage(PNG) != jpeg
    assert png.name == f"{png.digest}.png"
    made = EncodedImage.of_pixels(PIXELS)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(made.data))), PIXELS)
    assert made.described == "[image: png, 50 x 40]"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (PNG[:-20], "the PNG is cut off"),
        (PNG[:200], "the PNG is cut off"),
        (PNG[:20], "the PNG is cut off"),
        (JPEG[:-300], "JPEG cannot be decoded: .*truncated"),
        (JPEG[:30], "the JPEG is cut off or damaged"),
        (PNG[:100] + b"xx" + PNG[102:], "PNG cannot be decoded: broken data"),
        (b"", "no picture"),
        ("https://example.org/a.png", "is an address, and pictures are never fetched"),
        ("data:image/png;base64,AA==", "is an address, and pictures are never fetched"),
        ("a.png", "is the bytes of a PNG or JPEG file, got str: .*from_file for a path"),
        (PIXELS, "got ndarray: use EncodedImage.of_pixels"),
        (saved(PICTURE, "gif"), "a GIF file"),
        (saved(PICTURE, "webp"), "a WebP file"),
        (saved(PICTURE, "bmp"), "a BMP file"),
        (b"<svg onload='alert(1)'></svg>", "a SVG file"),
        (saved(PICTURE, "png", **PAIR), "the PNG is animated"),
        (saved(PICTURE, "mpo", **PAIR), "holds several pictures"),
        (saved(PICTURE.convert("CMYK"), "jpeg"), "in CMYK, and .* convert it to RGB"),
        (saved(Image.new("I;16", (4, 4)), "png"), "in I;16, and .* convert it to RGB"),
        (PNG + bytes(MOST_BYTES), r"has 8,\d+,\d+ bytes, and at most 8,388,608"),
    ],
)
def test_bytes_that_are_no_still_picture_are_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(ImageError, match=said):
        EncodedImage(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (png_of_size(60_000, 60_000), "60,000 x 60,000 pixels, and at most 16,777,216"),
        (png_of_size(4_000, 4_000), "cannot be decoded: .*truncated"),
        (with_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20))), "MAX_TEXT_CHUNK"),
        (with_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(64 << 20))), "MAX_TEXT_CHUNK"),
        (JPEG.replace(struct.pack(">HH", 40, 50), b"\xff\xff\xff\xff", 1), "65,535 x 65,535"),
    ],
)
def test_a_bomb_is_refused_before_it_takes_memory(data: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=said):
            EncodedImage(data)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@examples(200)
@given(
    whole=st.sampled_from([PNG, JPEG]),
    at=st.integers(0, 5000),
    written=st.binary(min_size=1, max_size=8),
    end=st.integers(1, 9000),
)
def test_damaged_bytes_are_taken_as_a_picture_or_refused_and_nothing_else_happens(
    whole: bytes, at: int, written: bytes, end: int
) -> None:
    damaged = (whole[:at] + written + whole[at + len(written) :])[:end]
    try:
        image = EncodedImage(damaged)
    except ImageError:
        return
    with Image.open(io.BytesIO(image.data)) as opened:
        opened.load()
        assert opened.size == (image.width, image.height)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_camera_says(kind: str, orientation: int) -> None:
    quarters = np.zeros((16, 32, 3), np.uint8)
    quarters[:8, :16, 0] = quarters[8:, 16:, 1] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = EncodedImage(saved(Image.fromarray(quarters), kind, exif=exif, quality=100))
    turned = orientation >= 5
    assert (image.width, image.height) == ((16, 32) if turned else (32, 16))
    shown = np.asarray(image.decoded())
    assert shown.shape == (image.height, image.width, 3)
    # The corners that are red (0) and green (1), in reading order; black is 2.
    corners = [shown[y, x] for y in (2, -3) for x in (2, -3)]
    seen = "".join("r" if one[0] > 128 else "g" if one[1] > 128 else "-" for one in corners)
    assert seen == ["r--g", "-rg-", "g--r", "-gr-", "r--g", "-rg-", "g--r", "-gr-"][orientation - 1]


def test_a_picture_whose_turn_cannot_be_read_is_taken_as_it_is() -> None:
    plain = saved(Image.new("RGB", (32, 16)), "jpeg", exif=b"Exif\0\0" + b"\xff" * 40)
    image = EncodedImage(plain)
    assert (image.width, image.height) == image.decoded().size == (32, 16)


def test_a_file_is_what_its_name_says(tmp_path: Path) -> None:
    for name, data in (("a.png", PNG), ("b.JPG", JPEG), ("c.png", JPEG), ("d.gif", PNG)):
        (tmp_path / name).write_bytes(data)
    assert EncodedImage.from_file(tmp_path / "a.png") == EncodedImage(PNG)
    assert EncodedImage.from_file(tmp_path / "b.JPG") == EncodedImage(JPEG)
    with pytest.raises(ImageError, match=r"c\.png is a JPEG file: rename it"):
        EncodedImage.from_file(tmp_path / "c.png")
    with pytest.raises(ImageError, match=r"d\.gif does not end in one of \.png, \.jpg, \.jpeg"):
        EncodedImage.from_file(tmp_path / "d.gif")


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((3, 3), np.float32),
        np.zeros((3, 3, 2), np.uint8),
        np.zeros((0, 3), np.uint8),
        np.zeros((5000, 5000), np.uint8),
        np.zeros((1, 2, 3, 4), np.uint8),
    ],
)
def test_an_array_that_is_no_picture_is_refused(pixels: np.ndarray) -> None:
    with pytest.raises(ImageError, match=r"is no picture: write uint8|at most 16,777,216"):
        EncodedImage.of_pixels(pixels)
