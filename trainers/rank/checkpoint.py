"""A trainer's checkpoint: a Hugging Face folder that all ranks fill, and the moments of the
optimizer beside it.

    model.safetensors ...    the weights in float32; with adapters, merged
    adapter/                 the adapters, as peft writes them
    optimizer/exp_avg/ ...   the moments in float32, by parameter, whatever `trainer.moments` is
    trainer.pt               steps done, updates of each parameter

Each rank says what it has (`Snapshot.of`), copies it before its next update (`Snapshot.copy`), and
writes the copies (`Snapshot.write`), all while training goes on. An update that comes early helps
with the copies. Ranks need not talk to each other for that: the place of each element follows from
the shapes. Any number of ranks of any kind of trainer can read the files.
"""

import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.errors import CheckpointError
from agentrl.trainers.rank.tensor_files import (
    Part,
    Piece,
    Stored,
    TensorFiles,
    pieces,
    small_pieces,
)

if TYPE_CHECKING:
    from agentrl.trainers.rank.sharding import Sharding
    from agentrl.trainers.rank.trainable import TrainableParameters

STATE_FILE = "trainer.pt"
OPTIMIZER = "optimizer"
"""The folder in a checkpoint with a folder for each moment."""
FORMAT = 2
"""The version in the state file. Raise it when an older reader would misread the folder."""
_WAY_OUT = "resume from an older checkpoint, or start a new run from a model folder"


@contextmanager
def quiet(*, warnings: bool = True) -> Iterator[None]:
    """Silence transformers and DeepSpeed while a model is read or written.

    The progress bars of transformers would overwrite the run's own. Transformers also imports
    DeepSpeed, if it is installed, and DeepSpeed prints what it found. `warnings`: whether
    transformers may warn of missing weights.
    """
    from transformers.utils import logging as of_transformers

    shown = of_transformers.is_progress_bar_enabled()
    verbosity = of_transformers.get_verbosity()
    of_transformers.disable_progress_bar()
    if not warnings:
        of_transformers.set_verbosity_error()
    logging.getLogger("DeepSpeed").addFilter(_only_errors)
    try:
        yield
    finally:
        of_transformers.set_verbosity(verbosity)
        if shown:
            of_transformers.enable_progress_bar()


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of an optimizer, as a rank has them now.

    `parts`: by the name of the moment, such as exp_avg, and that of the parameter. `updates`: how
    many updates each parameter has had.
    """

    parts: Mapping[str, Mapping[str, Part]]
    updates: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Tensors of one folder of a checkpoint: their shapes by name, and the pieces of them that this
    rank writes.

    `lent`: pieces that the next update changes, and that are copied first; none of them is large.
    `copies`: those that nothing changes.
    """

    folder: str
    stem: str
    shapes: Mapping[str, torch.Size]
    lent: deque[Piece]
    copies: list[Piece]

    def copy(self) -> None:
        while self.lent:
            try:
                piece = self.lent.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self.copies.append(Piece(piece.name, piece.start, _copy(piece.values)))
            except BaseException:
                self.lent.append(piece)  # for the other thread, or a later attempt
                raise

    def write(self, checkpoint: Path, rank: int) -> None:
        folder = checkpoint / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        files = TensorFiles.planned(folder, self.shapes, self.stem)
        if rank == 0:
            files.write_headers(self.stem)
        for piece in self.copies:
            files.write(piece)
        files.to_disk()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of a checkpoint."""

    rank: int
    tensors: Sequence[_Tensors]
    rest: Callable[[Path], None]
    state: Mapping[str, Any]
    helping: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def of(sharding: "Sharding", trainable: "TrainableParameters", step: int) -> "Snapshot":
        """The state after `step` steps, to be copied before it changes. All ranks have to call it
        at the same time.
        """
        rank = sharding.rank

        def tensors(
            folder: str, stem: str, stored: Sequence[Stored], parts: Mapping[str, Part]
        ) -> _Tensors:
            own = {name: part.share() for name, part in parts.items()}
            lent: deque[Piece] = deque()
            copies: list[Piece] = []
            for one in stored:
                if one.of in own:
                    (copies if own[one.of].copied else lent).extend(small_pieces([one], own))
            return _Tensors(folder, stem, {one.name: one.shape for one in stored}, lent, copies)

        weights = sharding.local_parts(trainable.shapes)
        written = [tensors(trainable.weights_in, trainable.stem, trainable.stored, weights)]
        moments = sharding.moments()
        for moment, parts in moments.parts.items():
            stored = [
                Stored(name, shape, name)
                for name, shape in trainable.shapes.items()
                if name in moments.updates
            ]
            written.append(tensors(f"{OPTIMIZER}/{moment}", "model", stored, parts))
        state = {"step": step, "moments": sorted(moments.parts), "updates": dict(moments.updates)}
        return Snapshot(rank, written, trainable.rest(sharding), state)

    def copy(self) -> None:
        """Copy the next update's targets into host memory. Another thread may `help`."""
        for tensors in self.tensors:
            tensors.copy()

    def help(self) -> None:
        """Copy what the other thread has not begun to copy."""
        with self.helping:
            self.copy()

    def write(self, folder: Path) -> None:
        """Write what was copied into a folder that all ranks see. It is complete when all ranks
        have written.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        self.help()  # waits for a helper that has not finished
        folder.mkdir(parents=True, exist_ok=True)
        for tensors in self.tensors:
            tensors.write(folder, self.rank)
        self.rest(folder)
        if self.rank == 0:
            save_state(folder, self.state)


def _copy(values: Tensor) -> Tensor:
    copied = torch.empty(values.shape, dtype=torch.float32)
    return copied.copy_(values.detach())


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state beside the weights."""
    torch.save({"format": FORMAT, **state}, folder / STATE_FILE)


def load(sharding: "Sharding", trainable: "TrainableParameters", folder: Path) -> int:
    """Read this rank's part of a checkpoint; returns the number of steps done.

    Raises:
        CheckpointError: the folder is missing, incomplete, damaged or of another model.
    """
    state = read_state(folder)
    shapes = {one.name: one.shape for one in trainable.stored}
    weights = _open(folder / trainable.weights_in, shapes)
    files = {
        name: _open(folder / OPTIMIZER / name, trainable.shapes, some=True)
        for name in state["moments"]
    }
    _read(weights, trainable.stored, sharding.local_parts(trainable.shapes))
    sharding.after_load()
    if state["moments"]:
        moments = sharding.new_moments(state["moments"])
        for name, parts in moments.parts.items():
            stored = [
                Stored(one, shape, one) for one, shape in files[name].shapes.items() if one in parts
            ]
            _read(files[name], stored, parts)
        sharding.set_moments(replace(moments, updates=state["updates"]))
    return int(state["step"])


def read_state(folder: Path) -> Mapping[str, Any]:
    """The state of a checkpoint: `step`, `moments`, `updates`.

    Raises:
        CheckpointError: the folder is missing or incomplete, or of another version.
    """
    if not (folder / STATE_FILE).is_file():
        present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "nothing"
        raise CheckpointError(
            f"{folder} is no complete trainer checkpoint: no {STATE_FILE} in it ({present});"
            f" {_WAY_OUT}"
        )
    try:
        state: Mapping[str, Any] = torch.load(
            folder / STATE_FILE, map_location="cpu", weights_only=True
        )
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}; {_WAY_OUT}") from error
    written = state.get("format", 1)
    if written > FORMAT:
        raise CheckpointError(
            f"{folder} was written by a newer agentrl (format {written}; this one reads {FORMAT}):"
            f" install that one, or {_WAY_OUT}"
        )
    if written < FORMAT:
        raise CheckpointError(
            f"{folder} was written by an older agentrl (format {written}; this one reads {FORMAT}),"
            f" whose optimizer cannot be read: start a new run from its weights by model={folder}"
        )
    if not {"step", "moments", "updates"} <= state.keys():
        raise CheckpointError(
            f"{folder / STATE_FILE} lacks the step or the optimizer: it has {sorted(state)};"
            f" {_WAY_OUT}"
        )
    return state


def _open(folder: Path, shapes: Mapping[str, torch.Size], *, some: bool = False) -> TensorFiles:
    """The tensors in a folder: all of these, or some. What has had no update has no moments."""
    try:
        files = TensorFiles.open(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} is damaged: {error}; {_WAY_OUT}") from error
    saved = files.shapes
    differing = sorted(
        name for name in shapes if saved.get(name, shapes[name] if some else None) != shapes[name]
    )
    unknown = sorted(saved.keys() - shapes.keys())
    if differing or unknown:
        raise CheckpointError(
            f"{folder} does not fit the model: missing or of another shape: {differing[:5]},"
            f" unknown: {unknown[:5]}; give the run the model that the checkpoint was made from, or"
            f" {_WAY_OUT}"
        )
    return files


def _read(files: TensorFiles, stored: Sequence[Stored], parts: Mapping[str, Part]) -> None:
    try:
        for piece in pieces(stored, parts):
            files.read(piece)
    except OSError as error:
        raise CheckpointError(f"{files.folder} is damaged: {error}; {_WAY_OUT}") from error
