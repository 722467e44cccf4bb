"""Reads GGUF files, the format of llama.cpp: settings, and weights that are quantised in blocks.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only what published small
models need is read: numbers in float32 and float16, and the block formats Q4_1 and Q8_0.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import ConfigError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_BLOCK_NUMBERS = 32
"""Numbers of a block of the quantised formats."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _q4_1(blocks_NB: Bytes) -> Floats:
    """A block: scale d and minimum m in float16, 32 numbers q of 4 bits, the first 16 in the low
    ones: d q + m.
    """
    scales_N2 = blocks_NB[:, :4].copy().view(np.float16).astype(np.float32)
    packed_N16 = blocks_NB[:, 4:]
    numbers_NB = np.concatenate([packed_N16 & 15, packed_N16 >> 4], axis=1).astype(np.float32)
    decoded: Floats = scales_N2[:, :1] * numbers_NB + scales_N2[:, 1:]
    return decoded


def _q8_0(blocks_NB: Bytes) -> Floats:
    """A block: scale d in float16, 32 numbers q of 8 bits: d q."""
    return blocks_NB[:, :2].copy().view(np.float16).astype(np.float32) * blocks_NB[:, 2:].view(
        np.int8
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """A format of numbers: so many of them in so many bytes."""

    numbers: int
    bytes: int
    decode: Callable[[Bytes], Floats]


_KINDS = {
    0: _Kind(1, 4, lambda raw: raw.view(np.float32).astype(np.float32)),
    1: _Kind(1, 2, lambda raw: raw.view(np.float16).astype(np.float32)),
    3: _Kind(_BLOCK_NUMBERS, 20, _q4_1),
    8: _Kind(_BLOCK_NUMBERS, 34, _q8_0),
}


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor's numbers, in bytes from the beginning of the file."""

    kind: int
    shape: tuple[int, ...]
    start: int


class GgufFile:
    """An open GGUF file: `settings` by name, and tensors, decoded on access to float32."""

    def __init__(self, path: Path) -> None:
        """Read the head of the file.

        Raises:
            ConfigError: it is no GGUF file, or cut short.
        """
        with path.open("rb") as file:
            self._bytes = mmap(file.fileno(), 0, access=ACCESS_READ)
        self._path = path
        self._at = 0
        try:
            self.settings, self._places = self._head()
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is damaged, or a GGUF file of a kind that is not known here: {error!r}"
            ) from error

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._places)

    def tensor(self, name: str) -> Floats:
        """A tensor's numbers, in float32. The last dimension is that of a row, as in torch.

        Raises:
            ConfigError: it is in a format that is not read here, or the file is cut short.
        """
        place = self._places[name]
        if place.kind not in _KINDS:
            raise ConfigError(
                f"{self._path}: {name} is in the format {place.kind} of ggml; those read here are"
                f" {sorted(_KINDS)} (F32, F16, Q4_1, Q8_0)"
            )
        kind, count = _KINDS[place.kind], prod(place.shape)
        stop = place.start + count // kind.numbers * kind.bytes
        if stop > len(self._bytes):
            raise ConfigError(
                f"{self._path} is cut short: {name} ends at byte {stop} of {len(self._bytes)}"
            )
        raw = np.frombuffer(self._bytes[place.start : stop], np.uint8).reshape(-1, kind.bytes)
        return kind.decode(raw).reshape(place.shape)

    def _head(self) -> tuple[Mapping[str, Any], Mapping[str, _Place]]:
        if self._bytes[:4] != b"GGUF":
            raise ConfigError(f"{self._path} is no GGUF file: it begins with {self._bytes[:4]!r}")
        self._at = 4
        version, tensors, settings = self._read("I"), self._read("Q"), self._read("Q")
        if version not in (2, 3):
            raise ConfigError(
                f"{self._path} is GGUF of version {version}; versions 2 and 3 are read here"
            )
        found: dict[str, Any] = {}
        for _ in range(settings):
            name = self._text()
            found[name] = self._value(self._read("I"))
        listed: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            name = self._text()
            shape = tuple(self._read("Q") for _ in range(self._read("I")))[::-1]
            listed[name] = (self._read("I"), shape, self._read("Q"))
        step = int(found.get("general.alignment", 32))
        start = -(-self._at // step) * step
        return found, {
            name: _Place(kind, shape, start + offset)
            for name, (kind, shape, offset) in listed.items()
        }

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, count = self._read("I"), self._read("Q")
            return [self._value(inner) for _ in range(count)]
        return self._read(_SCALARS[kind])

    def _read(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _text(self) -> str:
        size = self._read("Q")
        text = self._bytes[self._at : self._at + size].decode()
        self._at += size
        return text


__all__ = ["GgufFile"]
