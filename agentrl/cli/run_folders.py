"""The config and the checkpoints of a run that a command names."""

import os
from pathlib import Path

from agentrl import plugins
from agentrl.config.from_file import load_config
from agentrl.config.loading import LoadedConfig
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.files.durable import UNFINISHED
from agentrl.models.source import model_folder
from agentrl.models.tiny import SIZES
from agentrl.runs.checkpoint import Checkpoints


def run_config(folder: Path) -> Path:
    """The config of the run in a folder.

    Raises:
        ConfigError: there is no run in it.
    """
    path = folder.expanduser() / "config.yaml"  # the shell replaces no `~` in --resume=~/runs/lake
    if not path.exists():
        known = sorted(str(found.parent) for found in Path("runs").glob("*/config.yaml"))
        there = f"Runs: {', '.join(known)}" if known else "There are none in runs/ either"
        raise ConfigError(
            f"{str(folder)!r} holds no run.{plugins.nearest(str(folder), known)} {there}"
        )
    return path


OWN = {
    *(
        "config.yaml",
        "metrics.jsonl",
        "data.json",
        "ledger.sqlite",
        "timeline.jsonl",
        "warnings.jsonl",
        "origins.json",
        "changes.jsonl",
    ),
    *(
        "status.json",
        "launches.jsonl",
        "machine.jsonl",
        "live.json",
        "lock",
        "summary.json",
        "evaluation_log.json",
        "owed_evaluations.json",
    ),
    *(
        "model_commit",
        "overridden_model",
        "logs",
        "engines",
        "reward_curve.png",
        "trajectories",
        "profile",
        "untrained",
        "samples",
        "checkpoints",
        "model",
    ),
    *(
        "demonstrations",
        "reward_model",
        "sft",
        "dpo",
        "iterations",
        "opponents",
        "evaluation_weights",
        "evaluations",
    ),
    *("tensorboard", "trackers", "wandb", "comet", "tmp"),
}
"""The files of a run in its folder."""
_OWN_PREFIXES = ("config.", "ledger.sqlite", "lock.", "events.out.tfevents", UNFINISHED)


def output(path: Path, within: str | None = None, *, file: bool = False) -> Path:
    """The path of what a command writes, with `~` replaced. `within`: a folder of a run that it may
    write folders into. `file`: it writes a file.

    Raises:
        ConfigError: it is a file or a folder of a run's own, or lies in one; it is a folder, and
            the command writes a file; or nothing can be written there.
    """
    path = path.expanduser()
    _check_not_run_data(path, within)
    if file and path.is_dir():
        raise ConfigError(
            f"{path} is a folder, and this writes a file: name one, such as {path / 'FILE'}"
        )
    _check_writable(path)
    return path


def _check_writable(path: Path) -> None:
    """Check that a path can be made, before a command works for hours for what it writes there."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{path} cannot be written: {there} is read-only, for you or for all. Name another"
            " place for what this command writes"
        )


def _check_not_run_data(path: Path, within: str | None) -> None:
    real = path.resolve()
    run = next(
        (folder for folder in (real, *real.parents) if (folder / "config.yaml").is_file()), None
    )
    if run is None or not any(
        (run / name).exists() for name in ("ledger.sqlite", "metrics.jsonl", "origins.json")
    ):
        return
    inside = real.relative_to(run).parts
    if inside and inside[0] == within and len(inside) > 1 and not real.is_file():
        return
    if not inside or inside[0] in OWN or inside[0].startswith(_OWN_PREFIXES):
        raise ConfigError(
            f"{path} belongs to the run in {run}, and no command writes over what is a run's own:"
            " name another place"
        )


def checkpoint_of(run: Path, step: str) -> Path:
    """The folder of a run's checkpoint: the `latest`, the `best`, or the one after `step` steps."""
    from agentrl.runs.evaluation_log import EvaluationLog

    metric = load_config(run_config(run)).config.checkpoint.best or "eval/success"
    values = EvaluationLog.of_run(run).values(metric)
    return Checkpoints(run / "checkpoints").find(step, values)


def model_of_tokens(run: Path, config: RunConfig) -> Path:
    """A folder with the tokenizer of a run's model: a checkpoint, what the run has made, or the
    model that the config names.
    """
    from agentrl.viewer.folders import RunFolder

    found = RunFolder(run.name, run).tokenizer()
    if found is not None:
        return found.parent
    return model_folder(config.model.name, config.model.revision, config.model.hf_overrides)


def model_to_evaluate(run: Path, loaded: LoadedConfig, step: str) -> Path:
    """The folder of a run's checkpoint, or of the model that a config names.

    Raises:
        ConfigError: a config names a model that is made at a run's start, or a step is chosen of
        it.
    """
    if run.is_dir():
        return checkpoint_of(run, step)
    if step != "latest":
        raise ConfigError(
            f"{run} is a config, not a run, so there is no checkpoint to choose: leave out --step"
        )
    model = loaded.config.model
    if model.name in SIZES:
        raise ConfigError(
            f"model.name: {model.name!r} is made at a run's start; give a run, or model=FOLDER"
        )
    return model_folder(model.name, model.revision, model.hf_overrides)
