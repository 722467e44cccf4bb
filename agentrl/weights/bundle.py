"""Published weights: a folder of safetensors files, the buckets, that any process of the machine
can map.

A bundle is written bucket by bucket under a temporary name, hashed, and renamed when it is
complete. Each reader checks every byte before use, and gets tensors that are mapped from the files:
with files in shared memory, no copy is made between the writer and the model that loads them.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from agentrl.errors import ConfigError, WeightsError
from agentrl.settings.base import Settings
from agentrl.weights.check_record import was_checked
from agentrl.weights.low_rank import Factors, LowRank, weight_files
from agentrl.weights.shipment import Shipment
from agentrl.weights.tensor_header import tensor_header

if TYPE_CHECKING:
    from torch import Tensor

_MANIFEST = "manifest.json"


class Bucket(Settings):
    """One file: its size, the XXH3-128 of all its bytes, and the names of the tensors in it."""

    file: str
    size: int
    checksum: str
    names: tuple[str, ...]


class Update(Settings):
    """The files hold factors to be added to the weights in the folder `base`, each with a scale
    (`LowRank`).
    """

    base: Path
    scales: dict[str, float]


class Manifest(Settings):
    """The contents of a bundle. `checksum` covers all other fields."""

    version: int
    buckets: tuple[Bucket, ...]
    update: Update | None
    checksum: str = ""

    @property
    def size(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files of all buckets."""
        return tuple(bucket.file for bucket in self.buckets)

    def sealed(self) -> "Manifest":
        """A copy with the correct checksum."""
        import xxhash  # trainers import this module, and need no bundles to train

        payload = self.model_dump_json(exclude={"checksum"})
        return self.model_copy(update={"checksum": xxhash.xxh3_128_hexdigest(payload.encode())})


class WeightBundle(Shipment):
    """The weights of one version, by Hugging Face names, in files. Pickles as the folder's path and
    the manifest.

    Bundles are equal if they have the same folder and checksum. Tensors stay valid after the folder
    is removed. The weights of a low-rank update are merged on access, and are in no file.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder: Path = folder
        self.is_remote = True
        self.manifest = manifest
        self.checksum = manifest.checksum
        self._files = _Files(folder, manifest.buckets)

    @classmethod
    def open(cls, folder: Path) -> "WeightBundle":
        """The bundle in a folder, after every byte of it has been checked.

        Raises:
            WeightsError: there is none, or it is incomplete or damaged.
        """
        bundle = cls.at(folder)
        bundle.check()
        return bundle

    @classmethod
    def at(cls, folder: Path) -> "WeightBundle":
        """The bundle in a folder that was checked before.

        Raises:
            WeightsError: there is none.
        """
        try:
            manifest = Manifest.model_validate_json((folder / _MANIFEST).read_bytes())
        except (OSError, ValidationError) as error:
            raise WeightsError(f"no published weights in {folder}: {error}") from error
        return cls(folder, manifest)

    def check(self) -> None:
        """Check every byte against the manifest.

        Raises:
            WeightsError: something is missing or damaged.
        """
        if self.manifest.sealed() != self.manifest:
            raise WeightsError(f"the manifest of the weights in {self.folder} is damaged")
        if was_checked(self.folder, self.checksum, self.manifest.files):
            return
        for bucket in self.manifest.buckets:
            path = self.folder / bucket.file
            try:
                found = _file_checksum(path)
            except (OSError, ValueError) as error:
                raise WeightsError(f"published weights cannot be read, {path}: {error}") from error
            if found != bucket.checksum:
                raise WeightsError(
                    f"published weights are damaged: {path} has checksum {found} instead of"
                    f" {bucket.checksum}"
                )

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.manifest.size

    @property
    def unpacked(self) -> Mapping[str, "Tensor"]:
        """The weights, or the update of low rank, whose factors are in the files."""
        return self._weights

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights, without reading the weights.

        Raises:
            WeightsError: they are an update of a folder that cannot be read here.
        """
        update = self.manifest.update
        if update is None:
            return {name: self._files.shape(name) for name in self._files}
        try:
            return weight_shapes(update.base)
        except (OSError, ConfigError) as error:
            raise WeightsError(
                f"these weights are an update of {update.base}, which cannot be read: {error}"
            ) from error

    def __getitem__(self, name: str) -> "Tensor":
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightBundle) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[type["WeightBundle"], tuple[Path, Manifest]]:
        return WeightBundle, (self.folder, self.manifest)

    def __repr__(self) -> str:
        return (
            f"WeightBundle(version {self.manifest.version}, {self.manifest.checksum},"
            f" {self.folder})"
        )

    @property
    def _identity(self) -> tuple[Path, str]:
        return self.folder, self.manifest.checksum

    @cached_property
    def _weights(self) -> Mapping[str, "Tensor"]:
        update, files = self.manifest.update, self._files
        if update is None:
            return files
        return LowRank(
            update.base,
            {
                name: Factors(files[f"{name}/A"], files[f"{name}/B"], scale)
                for name, scale in update.scales.items()
            },
        )


class _Files(Mapping[str, "Tensor"]):
    """The tensors in the files, mapped on access."""

    def __init__(self, folder: Path, buckets: Iterable[Bucket]) -> None:
        self._paths = {name: folder / bucket.file for bucket in buckets for name in bucket.names}
        self._opened: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> "Tensor":
        tensor: Tensor = self._file_of(name).get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def _file_of(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self._paths[name]
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"published weights cannot be read, {path}: {error}") from error
        return self._opened[path]


@dataclass(frozen=True, slots=True)
class BundlePlace:
    """The place to write a version to, and the size of its buckets. It pickles, so another process
    may write there.

    As a context manager, it removes what was written if the block raises.
    """

    folder: Path
    version: int
    bucket_bytes: int

    def write(self, weights: Mapping[str, "Tensor"]) -> WeightBundle:
        """Write weights; the folder appears when it is complete.

        Weights are read one after another and released when written: if they are made on access,
        memory never holds more than a bucket of them. Tied weights are written under each of their
        names.

        Raises:
            OSError: they cannot be written.
        """
        shutil.rmtree(self._unfinished, ignore_errors=True)  # left by a process that died here
        update = None
        if isinstance(weights, LowRank):
            scales = {name: factors.scale for name, factors in weights.factors.items()}
            update = Update(base=weights.base.absolute(), scales=scales)
            weights = {
                f"{name}/{side}": getattr(factors, side)
                for name, factors in weights.factors.items()
                for side in "AB"
            }
        return self.finish(tuple(self._write_buckets(weights)), update)

    def is_here(self) -> bool:
        """True if this process can write there: it is on the right machine."""
        return self.folder.parent.is_dir()

    def write_bucket(self, number: int, weights: Mapping[str, "Tensor"]) -> Bucket:
        """Write one of the files; several processes may write different ones.

        Raises:
            OSError: it cannot be written.
        """
        self._unfinished.mkdir(exist_ok=True)
        batch = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        return _write_bucket(self._unfinished / f"bucket-{number:05}.safetensors", batch)

    def add(self, bucket: Bucket, content: memoryview, *, is_last: bool) -> None:
        """Add the next piece of one of the files of a bundle on another machine, and check the
        whole file after the last piece. When all files are there, call `finish`.

        Raises:
            OSError: it cannot be written.
            WeightsError: the file is damaged.
        """
        self._unfinished.mkdir(exist_ok=True)
        path = self._unfinished / bucket.file
        with path.open("ab") as file:
            file.write(content)
        if is_last and (found := _file_checksum(path)) != bucket.checksum:
            raise WeightsError(
                f"published weights were damaged on their way: {path} has checksum {found} instead"
                f" of {bucket.checksum}"
            )

    def finish(self, buckets: Sequence[Bucket], update: Update | None) -> WeightBundle:
        """Make a bundle of the files that are there: the folder appears. Each reader checks the
        files.
        """
        return self.finish_as(
            Manifest(version=self.version, buckets=tuple(buckets), update=update).sealed()
        )

    def finish_as(self, manifest: Manifest) -> WeightBundle:
        """The same, as a copy of a bundle of another machine, which had this manifest."""
        self._unfinished.mkdir(exist_ok=True)
        (self._unfinished / _MANIFEST).write_text(manifest.model_dump_json())
        self._unfinished.rename(self.folder)  # last: a folder of this name is complete
        return WeightBundle(self.folder, manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.remove()

    def remove(self) -> None:
        """Remove what was written."""
        for folder in (self._unfinished, self.folder):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _unfinished(self) -> Path:
        return unfinished(self.folder)

    def _write_buckets(self, weights: Mapping[str, "Tensor"]) -> Iterator[Bucket]:
        batch: dict[str, Tensor] = {}
        size = count = 0
        for name, weight in weights.items():
            batch[name] = weight
            size += weight.nbytes
            if size >= self.bucket_bytes:
                yield self.write_bucket(count, batch)
                batch, size, count = {}, 0, count + 1
        if batch:
            yield self.write_bucket(count, batch)


def unfinished(folder: Path) -> Path:
    """Where a bundle is written until it is complete."""
    return folder.with_name(f".{folder.name}")


def _write_bucket(path: Path, batch: Mapping[str, "Tensor"]) -> Bucket:
    """Write tensors from where they are: `save_file` would copy all of them first, and their bytes
    would have to be read again for the checksum.
    """
    import torch
    import xxhash

    # So each begins at a multiple of its element's size, as the format wants it.
    ordered = dict(sorted(batch.items(), key=lambda item: -item[1].itemsize))
    size = sum(tensor.nbytes for tensor in ordered.values())
    if shutil.disk_usage(path.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        written: Any = _header(ordered)
        digest.update(written)
        file.write(written)
        for tensor in ordered.values():
            written = tensor.reshape(-1).view(torch.uint8).numpy()
            digest.update(written)
            file.write(written)
    return Bucket(
        file=path.name,
        size=path.stat().st_size,
        checksum=digest.hexdigest(),
        names=tuple(batch),
    )


def _header(batch: Mapping[str, "Tensor"]) -> bytes:
    return tensor_header(
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.nbytes)
        for name, tensor in batch.items()
    )


def _file_checksum(path: Path) -> str:
    """XXH3-128, which takes a fifth of the time of CRC-32 and is as fast as reading memory."""
    import xxhash

    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Hugging Face folder's weights, from the headers of its files.

    Raises:
        ConfigError: there are none.
    """
    files = weight_files(folder)
    opened = _Files(
        folder,
        [
            Bucket(file=file.name, size=0, checksum="", names=(name,))
            for name, file in files.items()
        ],
    )
    return {name: opened.shape(name) for name in opened}


__all__ = [
    "Bucket",
    "BundlePlace",
    "Manifest",
    "Update",
    "WeightBundle",
    "unfinished",
    "weight_shapes",
]
