"""Files of tensors in the safetensors format, of which each rank reads and writes its part.

The elements of a tensor lie in its file in order, so a range of elements is a range of bytes. No
rank has to hold a whole tensor, and several ranks fill the same file.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentrl.models.source import weight_files
from agentrl.weights.tensor_header import FORMATS, tensor_header

_DTYPES = {name: getattr(torch, ours) for ours, name in FORMATS.items()}
_LARGEST_FILE = 4 << 30
"""Bytes of tensors in one of several files, unless a single tensor has more."""
_CHUNK = 16 << 20
"""Bytes that are read or written at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of a tensor that a rank has: `values`, in the rank's own memory, from element
    `start` of the whole.

    `shape` is that of the whole tensor. `copies`: the number of ranks that have the same elements,
    of which this is number `copy`. `copied`: nothing else uses the values. With a `run`, so many
    elements lie together in the whole, and the next ones `stride` after these: some columns of
    rows.

    Example: the right half of a tensor of 2 rows and 6 columns has `start` 3, `run` 3 and `stride`
    6: the elements 3 to 5 and 9 to 11.
    """

    shape: torch.Size
    start: int
    values: Tensor
    copy: int = 0
    copies: int = 1
    copied: bool = False
    run: int | None = None
    stride: int = 1

    @property
    def runs(self) -> Iterator[tuple[int, Tensor]]:
        """Elements that lie together in the whole, with the first one's place there; flat."""
        values = self.values.view(-1)
        if self.run is None:
            yield self.start, values
        else:
            for number, one in enumerate(torch.split(values, self.run) if len(values) else ()):
                yield self.start + number * self.stride, one

    def share(self) -> "Part":
        """The part that this rank writes: all, or an equal share if other ranks have the same."""
        if self.copies == 1:
            return self
        run = self.run or 1
        size = -(-self.values.numel() // run // self.copies)
        first = min(self.copy * size, self.values.numel() // run)
        own = self.values.view(-1)[first * run : (first + size) * run]
        start = self.start + first * self.stride
        return replace(self, start=start, values=own, copy=0, copies=1)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file, by `name`: the elements of the model's tensor `of` from `start` on, with
    a shape of its own.

    A model may hold several tensors of its files as one, such as the weights of all experts.
    """

    name: str
    shape: torch.Size
    of: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of the tensor `name` of a file, from `start` on; flat."""

    name: str
    start: int
    values: Tensor


def pieces(stored: Sequence[Stored], parts: Mapping[str, Part]) -> Iterator[Piece]:
    """The parts as they lie in files: views of their values."""
    for one in stored:
        for start, values in parts[one.of].runs:
            first = max(one.start, start)
            last = min(one.start + one.shape.numel(), start + len(values))
            if first < last:
                yield Piece(one.name, first - one.start, values[first - start : last - start])


def small_pieces(stored: Sequence[Stored], parts: Mapping[str, Part]) -> Iterator[Piece]:
    """The same, where a piece has no more elements than are written at once."""
    size = _CHUNK // 4
    for piece in pieces(stored, parts):
        for first in range(0, piece.values.numel(), size):
            yield Piece(piece.name, piece.start + first, piece.values[first : first + size])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: from the byte `offset` of the file on."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class TensorFiles:
    """The tensors in the files of a folder."""

    folder: Path
    places: Mapping[str, _Place]

    @staticmethod
    def open(folder: Path) -> "TensorFiles":
        """The files of a folder's model.

        Raises:
            OSError: there are none, or one is missing or damaged.
        """
        places: dict[str, _Place] = {}
        for file in weight_files(folder):
            places |= _read_header(file)
        if not places:
            raise OSError(f"there are no *.safetensors in {folder}")
        return TensorFiles(folder, places)

    @staticmethod
    def planned(
        folder: Path, shapes: Mapping[str, torch.Size], stem: str = "model"
    ) -> "TensorFiles":
        """Files for float32 tensors of these shapes, the same on every rank. `write_headers` makes
        them readable.
        """
        groups: list[dict[str, torch.Size]] = [{}]
        size = 0
        for name, shape in shapes.items():
            if groups[-1] and size + 4 * shape.numel() > _LARGEST_FILE:
                groups.append({})
                size = 0
            groups[-1][name] = shape
            size += 4 * shape.numel()
        places: dict[str, _Place] = {}
        for number, group in enumerate(groups, 1):
            many = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
            header = _header(group)
            starts = accumulate(
                (4 * shape.numel() for shape in group.values()), initial=len(header)
            )
            for (name, shape), start in zip(group.items(), starts, strict=False):
                places[name] = _Place(f"{stem}{many}.safetensors", start, torch.float32, shape)
        return TensorFiles(folder, places)

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The shape of each tensor."""
        return {name: place.shape for name, place in self.places.items()}

    def write_headers(self, stem: str = "model") -> None:
        """Write what makes the files readable. Only one rank has to do so, at any time."""
        for file, shapes in self._by_file.items():
            with _open_file(self.folder / file, os.O_WRONLY | os.O_CREAT) as descriptor:
                os.pwrite(descriptor, _header(shapes), 0)
                size = sum(4 * shape.numel() for shape in shapes.values())
                os.truncate(descriptor, len(_header(shapes)) + size)  # a last tensor may be empty
        if len(self._by_file) > 1:
            weight_map = {name: place.file for name, place in self.places.items()}
            total = 4 * sum(place.shape.numel() for place in self.places.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / f"{stem}.safetensors.index.json").write_text(
                json.dumps(index, indent=2) + "\n"
            )

    def write(self, piece: Piece) -> None:
        """Write elements of a tensor; they are in this machine's memory. They may not be on the
        disk yet.
        """
        place = self.places[piece.name]
        content = piece.values.to(place.dtype).contiguous().view(torch.uint8).numpy().data
        offset = place.offset + piece.start * place.dtype.itemsize
        with _open_file(self.folder / place.file, os.O_WRONLY | os.O_CREAT) as descriptor:
            done = 0
            while done < len(content):
                done += os.pwrite(descriptor, content[done : done + _CHUNK], offset + done)

    def read(self, piece: Piece) -> None:
        """Fill `piece.values` with elements of a tensor, converted to its type and device.

        Raises:
            OSError: the file is missing or too short.
        """
        place, values = self.places[piece.name], piece.values
        size = place.dtype.itemsize
        step = _CHUNK // size
        buffer = np.empty(min(_CHUNK, values.numel() * size), np.uint8)
        with _open_file(self.folder / place.file, os.O_RDONLY) as descriptor, torch.no_grad():
            for first in range(0, values.numel(), step):
                target = values[first : first + step]
                room = buffer[: target.numel() * size]
                _read_exactly(
                    descriptor, room.data, place.offset + (piece.start + first) * size, place.file
                )
                target.copy_(torch.from_numpy(room).view(place.dtype))

    def to_disk(self) -> None:
        """Flush to the disk what this machine has written."""
        for file in self._by_file:
            with _open_file(self.folder / file, os.O_WRONLY | os.O_CREAT) as descriptor:
                os.fsync(descriptor)

    @cached_property
    def _by_file(self) -> Mapping[str, Mapping[str, torch.Size]]:
        found: dict[str, dict[str, torch.Size]] = {}
        for name, place in self.places.items():
            found.setdefault(place.file, {})[name] = place.shape
        return found


def _header(shapes: Mapping[str, torch.Size]) -> bytes:
    """The header of a file of these tensors in float32."""
    return tensor_header(
        ((name, "float32", shape, 4 * shape.numel()) for name, shape in shapes.items()),
        {"format": "pt"},
    )


def _read_header(path: Path) -> dict[str, _Place]:
    with path.open("rb") as file:
        length = file.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        content = file.read(size) if 0 < size < 100 << 20 else b""  # about the format's limit
        whole = os.fstat(file.fileno()).st_size
    try:
        entries = json.loads(content)
        entries.pop("__metadata__", None)
        places = {
            name: _Place(
                path.name,
                8 + size + one["data_offsets"][0],
                _DTYPES[one["dtype"]],
                torch.Size(one["shape"]),
            )
            for name, one in entries.items()
        }
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise OSError(f"{path} is no safetensors file that can be read here: {error}") from error
    for name, place in places.items():
        if place.offset + prod(place.shape) * place.dtype.itemsize > whole:
            raise OSError(f"{path} ends within the tensor {name}")
    return places


def _read_exactly(descriptor: int, room: memoryview, offset: int, file: str) -> None:
    done = 0
    while done < len(room):
        count = os.preadv(descriptor, [room[done:]], offset + done)
        if count == 0:
            raise OSError(f"{file} ends at byte {offset + done}")
        done += count


@contextmanager
def _open_file(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
