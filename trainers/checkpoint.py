"""A trainer's state as a folder: a Hugging Face model with its tokenizer, and the optimizer beside it."""

import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from agentrl.errors import CheckpointError

STATE_FILE = "trainer.pt"
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "config.json", "generation_config.json")


def named_weights(model: Any) -> dict[str, Tensor]:
    """The model's weights by their Hugging Face names, not copied; of tied weights the first name only."""
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in seen or not weight.numel():
            weights[name] = weight
        seen.add(weight.data_ptr())
    return weights


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing over the run's own progress while it reads or writes a model."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_checkpoint(folder: Path, model: Any, state: Mapping[str, Any], origin: Path) -> None:
    """Write weights and config, `origin`'s other files (the tokenizer), and `state` into `folder`, the state last."""
    folder.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(folder)
    for file in sorted(origin.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in _MODEL_FILES):
            shutil.copyfile(file, folder / file.name)
    torch.save(dict(state), folder / STATE_FILE)


def load_checkpoint(folder: Path, model: Any) -> Mapping[str, Any]:
    """Copy a checkpoint's weights into the model and return its state. Nothing is changed when this raises.

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
        for file in sorted(folder.glob("*.safetensors")):
            saved |= load_file(file)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}; {way_out}") from error
    if not {"step", "optimizer"} <= state.keys():
        raise CheckpointError(
            f"{folder / STATE_FILE} lacks the step or the optimizer: it has {sorted(state)}; {way_out}"
        )
    weights = named_weights(model)
    differing = sorted(name for name in weights if name not in saved or saved[name].shape != weights[name].shape)
    unknown = sorted(saved.keys() - model.state_dict().keys())
    if differing or unknown:
        raise CheckpointError(
            f"{folder} does not fit the model: missing or of another shape: {differing[:5]}, unknown: {unknown[:5]}; "
            f"give the run the model that the checkpoint was made from, or {way_out}"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])
    return state
