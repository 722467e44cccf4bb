"""A trainer's state as a folder: a Hugging Face model with its tokenizer, and the optimizer beside it."""

import logging
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from agentrl.errors import CheckpointError

STATE_FILE = "trainer.pt"
FORMAT = 1
"""The version in the state file. Raise it when an older reader would misread the folder."""
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "config.json", "generation_config.json")


def named_weights(model: Any) -> dict[str, Tensor]:
    """The model's weights by their Hugging Face names, not copied; tied weights only under their first name."""
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in seen or not weight.numel():
            weights[name] = weight
        seen.add(weight.data_ptr())
    return weights


@contextmanager
def quiet(*, warnings: bool = True) -> Iterator[None]:
    """Silence transformers and DeepSpeed while a model is read or written.

    The progress bars of transformers would overwrite the run's own. Transformers also imports DeepSpeed, if it is
    installed, and DeepSpeed prints what it found. `warnings`: whether transformers may warn of missing weights.
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


def save_model(folder: Path, model: Any, origin: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write weights (by default the model's own) and config, and `origin`'s other files: the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    for file in sorted(origin.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in _MODEL_FILES):
            shutil.copyfile(file, folder / file.name)


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state beside the weights. This comes last, since it marks the checkpoint as complete."""
    torch.save({"format": FORMAT, **state}, folder / STATE_FILE)


def read_checkpoint(
    folder: Path, shapes: Mapping[str, Sequence[int]], *, weights_in: str = "."
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Read the weights (from the folder `weights_in`) and the state of a checkpoint to the CPU; check the shapes.

    Raises:
        CheckpointError: the folder is missing, incomplete, damaged or of another model.
    """
    way_out = "resume from an older checkpoint, or start a new run from a model folder"
    if not (folder / STATE_FILE).is_file():
        present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "nothing"
        raise CheckpointError(
            f"{folder} is no complete trainer checkpoint: no {STATE_FILE} in it ({present}); {way_out}"
        )
    try:
        state: Mapping[str, Any] = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        saved: dict[str, Tensor] = {}
        for file in sorted((folder / weights_in).glob("*.safetensors")):
            saved |= load_file(file)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}; {way_out}") from error
    if (written := state.get("format", FORMAT)) > FORMAT:
        raise CheckpointError(
            f"{folder} was written by a newer agentrl (format {written}; this one reads up to {FORMAT}): install that "
            f"one, or {way_out}"
        )
    if not {"step", "optimizer"} <= state.keys():
        raise CheckpointError(
            f"{folder / STATE_FILE} lacks the step or the optimizer: it has {sorted(state)}; {way_out}"
        )
    differing = sorted(name for name in shapes if name not in saved or tuple(saved[name].shape) != tuple(shapes[name]))
    unknown = sorted(saved.keys() - shapes.keys())
    if differing or unknown:
        raise CheckpointError(
            f"{folder / weights_in} does not fit the model: missing or of another shape: {differing[:5]}, unknown: "
            f"{unknown[:5]}; give the run the model that the checkpoint was made from, or {way_out}"
        )
    return saved, state


def kept_by_another(folder: Path, trainer: str) -> CheckpointError:
    """The error for an optimizer state that another kind of trainer has saved."""
    return CheckpointError(
        f"the optimizer in {folder} was not saved by the trainer {trainer!r}: use the one that saved it, or "
        f"start a new run from these weights by model={folder}"
    )
