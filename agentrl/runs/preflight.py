"""Preflight: checks of a run before anything starts, each with one sentence about what is wrong."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentrl.config.history import ConfigHistory, SettingChange, refuse_another_run
from agentrl.config.loading import LoadedConfig, check_installed, check_options
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import renderer_of
from agentrl.errors import ConfigError
from agentrl.estimation.advisors import CRITIC_FOLDER
from agentrl.files.durable import write_whole
from agentrl.ledger.ledger import check_ledger
from agentrl.models.source import (
    check_architecture,
    description_folder,
    model_folder,
    vocabulary_size,
)
from agentrl.models.tiny import SIZES
from agentrl.planner.check import check_placement
from agentrl.protocols import Renderer, TrainerSettingsOffers
from agentrl.rollout.agents import FrozenRoute
from agentrl.runs.checkpoint import Checkpoints
from agentrl.runs.task_sources import fingerprints
from agentrl.trajectory import Message
from agentrl.weights.fit import check_fit

MODEL_COMMIT = "model_commit"
"""The file of a run with the commit of its model on the hub."""
_ADAPTERS, _TRAINER_STATE = "adapter", "trainer.pt"
"""Written into a checkpoint by the built-in trainers: a folder of adapters if they train those, and
their state.
"""
_LONGEST_PATH = 504 - len("/ledger.sqlite")
"""Bytes: SQLite opens paths of at most 512, and adds as many as `-journal` has."""
_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""The entries of a model's config.json that decide the shapes of its weights."""


def check_folder(folder: Path, *, resumed: bool) -> None:
    """Check that the folder holds a run if and only if it is resumed.

    Raises:
        ConfigError: it does not.
    """
    started = (folder / "config.yaml").exists()
    if started and not resumed:
        raise ConfigError(
            f"{folder} holds a run already: resume it with `agentrl train --resume"
            f" {shlex.quote(str(folder))}`, or write run_dir=ANOTHER for a new one"
        )
    if resumed and not started:
        raise ConfigError(f"{folder} holds no run to resume (no config.yaml in it)")


def check_changes(loaded: LoadedConfig, *, change: bool) -> Sequence[SettingChange]:
    """The settings that a resumed run changes. Unless `change`, they may not define another run.

    Raises:
        ConfigError: they do.
    """
    folder = loaded.config.run_dir
    changes = ConfigHistory(folder).changes(loaded)
    if not change:
        refuse_another_run(changes, folder)
    return changes


def check_config(loaded: LoadedConfig, *, new_model: bool) -> Mapping[str, str]:
    """Check that a run can start with its config. Returns the digests of its tasks' data, by split.

    Raises:
        ConfigError: an extra, a model or data are missing, or the placement is not possible.
    """
    config = loaded.config
    check_installed(config)
    config.rollout.check_rule_trains()
    check_options(loaded)
    check_model(config, pinned=not new_model)
    check_placement(config)
    return fingerprints(config)


def make_folder(folder: Path) -> None:
    """Make the folder of a run.

    Raises:
        ConfigError: it cannot be made, its path is too long, or a file is in the place of one of
            its folders.
    """
    length = len(os.fsencode(folder.resolve()))
    if length > _LONGEST_PATH:
        raise ConfigError(
            f"run_dir: the path {folder} has {length} bytes from the root on, and SQLite, which"
            f" keeps the run's ledger, takes {_LONGEST_PATH} at most: write a shorter one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run_dir: the folder {folder} cannot be made: {error.strerror}"
        ) from error
    for path in (folder / "checkpoints", folder / "trajectories"):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file, where the run keeps a folder: move it away")


def check_checkpoint(
    checkpoints: Checkpoints,
    config: RunConfig,
    step: int | None,
    announce: Callable[[str], None],
    *,
    new_model: bool,
) -> None:
    """Check the checkpoint that a resumed run continues from: the newest sound one, or the one
    after `step` steps. Those that are damaged are set aside.

    Raises:
        CheckpointError: there is no sound one, or it is of another origin.
        ConfigError: it does not fit the config or the ledger, or there is none after `step` steps.
    """
    if not config.checkpoint.allow_foreign:
        checkpoints.check_origin()
    checkpoints.set_aside_damaged(announce)
    newest = checkpoints.latest()
    done = step if step is not None else newest[0] if newest else 0
    if done > config.steps:
        raise ConfigError(
            f"steps={config.steps}: the run in {config.run_dir} has made {done} steps "
            f"already: write a larger number to go on, `--step {config.steps}` to go "
            "back to that checkpoint if there is one, or run_dir=ANOTHER for a new run"
        )
    if step is not None or newest is not None:
        check_goes_on(checkpoints.find(str(done), {}), config, new_model=new_model)
        check_ledger(config.run_dir / "ledger.sqlite", done)


def check_data(folder: Path, data: Mapping[str, str], *, resumed: bool, change: bool) -> None:
    """Record the digests of the tasks' data, and refuse to resume with other data unless `change`.

    Raises:
        ConfigError: the data are not those that the run began with.
    """
    path = folder / "data.json"
    before = _read_digests(path) if resumed and path.exists() else {}
    changed = [split for split in data if before.get(split, data[split]) != data[split]]
    if changed and not change:
        raise ConfigError(
            f"tasks: the data of the split {changed[0]!r} are not those that the run in "
            f"{folder} began with: put them back, start a new run with run_dir=ANOTHER, "
            "or add --change to go on with them in this one"
        )
    if data:
        write_whole(path, json.dumps({**before, **data}, indent=2) + "\n")


def _read_digests(path: Path) -> dict[str, str]:
    """The digests of the data of an earlier launch, by split."""
    try:
        digests = json.loads(path.read_text())
    except ValueError:
        digests = None
    if not isinstance(digests, dict) or not all(
        isinstance(digest, str) for digest in digests.values()
    ):
        raise ConfigError(
            f"{path} cannot be read, which tells whether the tasks' data are those that the run "
            "began with: restore it from a copy, or remove it if you know that they are"
        )
    return digests


def check_model(config: RunConfig, *, pinned: bool = True) -> None:
    """Check that the model to start from exists and can be trained, and the model of each frozen
    agent.

    `pinned`: one on the hub is that of the commit which the run has begun with. A model on the hub
    is downloaded: first what describes it, and its weights when that has been checked.

    Raises:
        ConfigError: a model or a part of it is missing, or the model to start from is none that
        writes text.
    """
    model = config.model
    if model.name not in SIZES:
        revision = model_revision(config) if pinned else config.model.revision
        described = description_folder(model.name, revision, model.hf_overrides)
        check_architecture(described, trust_remote_code=model.trust_remote_code)
        check_vocabulary(renderer_of(described, model), described)
        check_fit(
            model_folder(model.name, revision, model.hf_overrides),
            model.name,
            trust_remote_code=model.trust_remote_code,
        )
    elif model.revision is not None or model.trust_remote_code or model.hf_overrides:
        written = "revision" if model.revision is not None else "trust_remote_code"
        written = "hf_overrides" if model.hf_overrides else written
        raise ConfigError(
            f"model.{written}: {model.name!r} is made here, and has none: leave it out, or name a "
            "model"
        )
    for agent, route in config.env.agents.items():
        if (
            isinstance(route, FrozenRoute)
            and route.model
            and not (route.model / "config.json").exists()
        ):
            raise ConfigError(
                f"env.agents.{agent}.model: {str(route.model)!r} is not the folder of a Hugging "
                "Face model (no config.json in it); a run's checkpoints are such folders"
            )


def check_goes_on(checkpoint: Path, config: RunConfig, *, new_model: bool) -> None:
    """Check that a run can go on from a checkpoint, which another config may have made.

    Raises:
        ConfigError: it has no critic where one is needed, adapters for weights or the other way
            round, or a model of another shape.
    """
    way_out = (
        "so the run cannot go on from it. Leave the change out, or start a new run from its "
        f"weights: model={checkpoint} run_dir=ANOTHER"
    )
    if config.critic is not None and not (checkpoint / CRITIC_FOLDER).is_dir():
        needs = f"{config.algorithm.name} needs a critic, and {checkpoint} has none"
        raise ConfigError(f"algorithm.name: {needs}, {way_out}")
    adapters = TrainerSettingsOffers.of(config.trainer.settings).lora is not None
    saved, ours = (checkpoint / _ADAPTERS).is_dir(), (checkpoint / _TRAINER_STATE).is_file()
    if ours and adapters != saved:
        asked, there = ("adapters", "whole weights") if adapters else ("whole weights", "adapters")
        raise ConfigError(
            f"trainer.lora: the run trains {asked}, and {checkpoint} is of {there}, {way_out}"
        )
    if new_model and not _same_shape(checkpoint, config):
        name = config.model.name
        raise ConfigError(
            f"model.name: {checkpoint} has other shapes than the model {name!r}, {way_out}"
        )


def _same_shape(checkpoint: Path, config: RunConfig) -> bool:
    """True if the configured model has weights of the same shapes as the different model of a
    checkpoint.
    """
    if config.model.name in SIZES:
        return False
    folders = checkpoint, description_folder(config.model.name, config.model.revision)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in folders)
    # Models that also read images have the entries of their language model one level below.
    old, new = ({**entries, **entries.get("text_config", {})} for entries in (old, new))
    return all(old.get(key) == new.get(key) for key in _SHAPE)


def check_vocabulary(renderer: Renderer, folder: Path) -> None:
    """Check that the model has embeddings of the tokens that its template writes.

    Raises:
        ConfigError: the template writes others.
    """
    vocab = vocabulary_size(folder)
    highest = int(renderer.conversation().prompt([Message("user", "Hello.")]).ids.max())
    if vocab is not None and highest >= vocab:
        raise ConfigError(
            f"model.name: the chat template in {folder} writes the token {highest}, and the model "
            f"has {vocab} tokens (vocab_size in its config.json): take tokenizer, template and "
            "weights from the same model, or enlarge the model with transformers' "
            "resize_token_embeddings"
        )


def model_revision(config: RunConfig) -> str | None:
    """The revision of a model on the hub: the run's first one, or the configured one."""
    pinned = config.run_dir / MODEL_COMMIT
    return pinned.read_text().strip() if pinned.exists() else config.model.revision


def was_begun(loaded: LoadedConfig, *, change: bool = False) -> bool:
    """True if the run of this config has begun already.

    Raises:
        ConfigError: its folder holds a run of another config, and `change` does not allow that.
            Only `steps` may differ, if that run had fewer.
    """
    folder = loaded.config.run_dir
    if not (folder / "config.yaml").exists():
        return False
    changes = [
        one
        for one in ConfigHistory(folder).changes(loaded)
        if one.key != "steps" or one.new < one.old
    ]
    if changes and not change:
        differing = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"{folder} holds a run of another config:\n{differing}\nWrite run_dir=ANOTHER for a "
            f"new run, or resume that one with `agentrl train --resume"
            f" {shlex.quote(str(folder))}`; add the "
            "settings to change, if any, to this command"
        )
    return True
