"""Trackers: TensorBoard, Weights & Biases, MLflow. Each is made with the run's folder and config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


class TensorBoard:
    """Event files in `RUN/tensorboard/`, read by `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class Wandb:
    """Weights & Biases; the project is `WANDB_PROJECT`, the run is named after its folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("trackers: wandb is not installed: pip install wandb") from error
        self._run = wandb.init(name=folder.name, dir=str(folder), config=dict(config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush."""
        self._run.finish()


class MLflow:
    """MLflow; the server is `MLFLOW_TRACKING_URI` or local files, the run is named after its folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError("trackers: mlflow is not installed: pip install mlflow") from error
        self._mlflow = mlflow
        mlflow.set_experiment("agentrl")
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """Flush."""
        self._mlflow.end_run()
