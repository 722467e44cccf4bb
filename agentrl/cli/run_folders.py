"""The config and the checkpoints of a run that a command names."""

from pathlib import Path

from agentrl import plugins
from agentrl.checkpoint import Checkpoints
from agentrl.config import LoadedConfig, load_config
from agentrl.errors import ConfigError
from agentrl.model_source import model_folder
from agentrl.tiny_model import SIZES


def run_config(folder: Path) -> Path:
    """The config of the run in a folder.

    Raises:
        ConfigError: there is no run in it.
    """
    path = folder.expanduser() / "config.yaml"  # the shell replaces no `~` in --resume=~/runs/lake
    if not path.exists():
        known = sorted(str(found.parent) for found in Path("runs").glob("*/config.yaml"))
        there = f"Runs: {', '.join(known)}" if known else "There are none in runs/ either"
        raise ConfigError(f"{str(folder)!r} holds no run.{plugins.nearest(str(folder), known)} {there}")
    return path


def checkpoint_of(run: Path, step: str) -> Path:
    """The folder of a run's checkpoint: the `latest`, the `best`, or the one after `step` steps."""
    from agentrl.observe.metrics import MetricsFile

    metric = load_config(run_config(run)).config.checkpoint.best or "eval/success"
    return Checkpoints(run / "checkpoints").find(step, MetricsFile(run / "metrics.jsonl").values(metric))


def model_to_evaluate(run: Path, loaded: LoadedConfig, step: str) -> Path:
    """The folder of a run's checkpoint, or of the model that a config names.

    Raises:
        ConfigError: a config names a model that is made at a run's start, or a step is chosen of it.
    """
    if run.is_dir():
        return checkpoint_of(run, step)
    if step != "latest":
        raise ConfigError(f"{run} is a config, not a run, so there is no checkpoint to choose: leave out --step")
    model = loaded.config.model
    if model.name in SIZES:
        raise ConfigError(f"model.name: {model.name!r} is made at a run's start; give a run, or model=FOLDER")
    return model_folder(model.name, model.revision)
