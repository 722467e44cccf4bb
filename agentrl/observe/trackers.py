"""Trackers: TensorBoard, Weights & Biases, MLflow, Trackio, Comet.

Each is made with the run's folder, its config and the tracker's own settings, and works in a thread
of its own (`agentrl.observe.tracking`). Those with a server keep the id of their run in
`RUN/trackers/NAME`, so that a resumed run goes on there.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlparse
from uuid import uuid4

from agentrl.errors import ConfigError
from agentrl.package.distribution import install_command
from agentrl.protocols import EpisodeSample, HowEnded
from agentrl.settings.base import NameText, Settings

_COLUMNS = [field.name for field in fields(EpisodeSample)]
_DEFAULT_PROJECT = "agentrl"


class TrackerSettings(Settings):
    """The settings that all trackers with a server have.

    A run is tagged with `observe.tags`, too, in each tracker whose settings are of this class.
    """

    project: NameText | None = None
    """The project; by default that of the tracker's own files and variables, such as
    `WANDB_PROJECT` and `COMET_PROJECT_NAME`."""
    group: NameText | None = None
    """The group of runs."""
    tags: tuple[NameText, ...] = ()
    """Tags, beside those of the run (`observe.tags`)."""

    def tagged(self, tags: Iterable[str]) -> Self:
        """The settings with these tags before their own, each once."""
        return self.model_copy(update={"tags": tuple(dict.fromkeys((*tags, *self.tags)))})


class AccountSettings(TrackerSettings):
    """The same, for trackers whose projects belong to somebody."""

    entity: NameText | None = None
    """The user, team or workspace that owns the project; by default that of the tracker's own files
    and variables, such as `WANDB_ENTITY` and `COMET_WORKSPACE`, or your own."""


class TensorBoard:
    """Event files in `RUN/tensorboard/`, read by `tensorboard --logdir runs`. It knows no tags:
    those of a run (`observe.tags`) stand in the text `config`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text(
            "config", "\n".join(f"    {key}: {value}" for key, value in config.items())
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Record some episodes."""
        shown = (
            f"{one.episode}: {one.status}, score {one.score}\n\n{_indent(one.conversation)}"
            for one in samples
        )
        self._writer.add_text(f"samples/{name}", "\n\n".join(shown), step)

    def end(self, how: HowEnded, why: str) -> None:
        """Record how the run has ended, and flush."""
        self._writer.add_text("ended", _ending(how, why))
        self.close()

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class Wandb:
    """Weights & Biases. Whatever is not set here is what wandb takes from its own files and
    variables (`WANDB_...`).
    """

    class Config(AccountSettings):
        """Settings of the tracker `wandb`."""

        group: NameText | None = None
        """The group of runs; by default `WANDB_RUN_GROUP`."""
        tags: tuple[NameText, ...] = ()
        """Tags, beside those of the run (`observe.tags`) and of `WANDB_TAGS`."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], settings: Config | None = None
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("wandb") from error
        chosen = settings or self.Config()
        self._wandb = wandb
        self._kept = _KeptId(folder, "wandb")
        name = os.environ.get("WANDB_NAME") or folder.resolve().name
        found = self._kept.read()
        self._rows = int(found[1]) if len(found) > 1 else 0
        # What is given to `init` takes the place of the variable.
        tagged = chosen.tagged(filter(None, os.environ.get("WANDB_TAGS", "").split(",")))
        run_id = os.environ.get("WANDB_RUN_ID") or (found[0] if found else uuid4().hex[:8])
        try:
            self._run = wandb.init(
                id=run_id,
                name=name,
                dir=str(folder),
                config=dict(config),
                project=chosen.project,
                entity=chosen.entity,
                group=chosen.group,
                tags=list(tagged.tags) or None,
                resume="allow",
                allow_val_change=True,
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"trackers: wandb cannot begin: {error} (WANDB_MODE=offline writes to"
                f" {folder / 'wandb'}, for `wandb sync`)"
            ) from error
        self._id = run_id
        # W&B drops what is logged with a `step` in the past, as the results of late evaluations
        # are. So its own step only counts what is logged, and that of training is a metric, the x
        # axis of all others.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._log({**metrics, "step": step})

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Record some episodes as a table."""
        rows = [list(astuple(one)) for one in samples]
        self._log({f"samples/{name}": self._wandb.Table(columns=_COLUMNS, data=rows), "step": step})

    def _log(self, row: Mapping[str, Any]) -> None:
        # A resumed run that is offline does not know how much an earlier process has logged.
        number = max(self._rows, self._run.step)
        self._rows = number + 1
        self._kept.write(self._id, self._rows)
        self._run.log(dict(row), step=number, commit=True)

    def end(self, how: HowEnded, why: str) -> None:
        """Record how the run has ended, and flush."""
        self._run.summary["ended"] = _ending(how, why)
        # 255 is wandb's for Ctrl-C.
        self._run.finish(exit_code={"completed": 0, "failed": 1, "stopped": 255}[how])

    def close(self) -> None:
        """Flush."""
        self._run.finish()


class MLflow:
    """MLflow. The server, or the files, are those of `MLFLOW_TRACKING_URI`; a run is named after
    its folder.
    """

    class Config(TrackerSettings):
        """Settings of the tracker `mlflow`."""

        project: NameText | None = None
        """The experiment; by default that of `MLFLOW_EXPERIMENT_NAME` or `MLFLOW_EXPERIMENT_ID`, or
        `agentrl`.
        """
        group: NameText | None = None
        """The run's tag `group`."""
        tags: tuple[NameText, ...] = ()
        """Tags, beside those of the run (`observe.tags`): `name=value`, or `name` alone."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], settings: Config | None = None
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise _not_installed("mlflow") from error
        chosen = settings or self.Config()
        self._mlflow = mlflow
        # It would be drawn over the run's own.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        tags = {name: value for name, _, value in (tag.partition("=") for tag in chosen.tags)}
        if chosen.group is not None:
            tags["group"] = chosen.group
        kept = _KeptId(folder, "mlflow")
        given = os.environ.get("MLFLOW_RUN_ID")  # which MLflow reads itself, and deletes
        found = kept.read()
        # In a file store, `reward` is a file, and `reward/environment` would be one in a folder of
        # the same name.
        self._in_files = urlparse(mlflow.get_tracking_uri()).scheme in ("", "file")
        try:
            if given is None and found and _has_run(mlflow, found[0]):
                run = mlflow.start_run(run_id=found[0])
                mlflow.set_tags(tags)
            else:
                experiment = None if given is not None else _experiment_id(mlflow, chosen.project)
                run = mlflow.start_run(
                    run_name=folder.resolve().name, experiment_id=experiment, tags=tags
                )
        except mlflow.MlflowException as error:
            if not self._in_files:
                raise  # its server may be down, and come back
            raise ConfigError(f"trackers: mlflow cannot begin: {error}") from error
        kept.write(run.info.run_id)
        self._log_config(config, run.data.params)

    def _log_config(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log the config; of a resumed run, what has changed, as tags: a parameter of MLflow has
        one value for good.
        """
        cut = {key: str(value)[:500] for key, value in config.items()}
        new = [item for item in cut.items() if item[0] not in known]
        for begin in range(0, len(new), 100):  # as many as a server takes at once
            self._mlflow.log_params(dict(new[begin : begin + 100]))
        # A parameter that is logged again with another value is an error.
        if changed := {
            f"changed.{key}": value for key, value in cut.items() if known.get(key, value) != value
        }:
            self._mlflow.set_tags(changed)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._mlflow.log_metrics(
            {self._allowed_name(name): value for name, value in metrics.items()}, step=step
        )

    def _allowed_name(self, name: str) -> str:
        """A metric's name with the characters that MLflow allows: `pass_4` for `pass@4`."""
        allowed = re.sub(r"[^/\w.\- :]", "_", name)
        return allowed.replace("/", ".") if self._in_files else allowed

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Add some episodes to a table of the run."""
        rows = [(step, *astuple(one)) for one in samples]
        by_column = zip(["step", *_COLUMNS], zip(*rows, strict=True), strict=True)
        columns = {column: list(values) for column, values in by_column}
        self._mlflow.log_table(data=columns, artifact_file=f"samples/{name}.json")

    def end(self, how: HowEnded, why: str) -> None:
        """Record how the run has ended, and flush."""
        self._mlflow.set_tag("ended", _ending(how, why)[:5000])
        self._mlflow.end_run(
            {"completed": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[how]
        )

    def close(self) -> None:
        """Flush."""
        self._mlflow.end_run()


class Trackio:
    """Trackio: local by default (`trackio show`), or in a Space of Hugging Face
    (`TRACKIO_SPACE_ID`).

    It knows no tags of runs: they stand in the run's config there, as `tags`.
    """

    class Config(TrackerSettings):
        """Settings of the tracker `trackio`."""

        project: NameText | None = _DEFAULT_PROJECT
        """The project."""
        space: NameText | None = None
        """The Space to log to; by default `TRACKIO_SPACE_ID`, or none."""
        tags: tuple[NameText, ...] = ()
        """Tags, beside those of the run (`observe.tags`). Trackio knows none: they stand in the
        run's config there.
        """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], settings: Config | None = None
    ) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _not_installed("trackio") from error
        chosen = settings or self.Config()
        self._trackio = trackio
        kept = _KeptId(folder, "trackio")
        # Trackio finds a run to resume by its name, which another folder's run may have too.
        name = (kept.read() or [f"{folder.resolve().name}-{uuid4().hex[:6]}"])[0]
        self._run = trackio.init(
            chosen.project or _DEFAULT_PROJECT,
            name=name,
            group=chosen.group,
            space_id=chosen.space,
            config={**config, "tags": list(chosen.tags)} if chosen.tags else dict(config),
            resume="allow",
            embed=False,
        )
        kept.write(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Record some episodes as a table."""
        rows = [list(astuple(one)) for one in samples]
        self._run.log(
            {f"samples/{name}": self._trackio.Table(columns=_COLUMNS, data=rows)}, step=step
        )

    def end(self, how: HowEnded, why: str) -> None:
        """Record how the run has ended, and flush."""
        level = self._trackio.AlertLevel.ERROR if how == "failed" else self._trackio.AlertLevel.INFO
        self._run.alert(f"run {how}", why, level)
        self.close()

    def close(self) -> None:
        """Flush."""
        self._run.finish()


class Comet:
    """Comet. Whatever is not set here is what Comet takes from its own files and variables
    (`COMET_...`).
    """

    class Config(AccountSettings):
        """Settings of the tracker `comet`."""

        group: NameText | None = None
        """The value `group` of the experiment."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], settings: Config | None = None
    ) -> None:
        try:
            import comet_ml
        except ImportError as error:
            raise _not_installed("comet") from error
        chosen = settings or self.Config()
        kept = _KeptId(folder, "comet")
        key = os.environ.get("COMET_EXPERIMENT_KEY") or (kept.read() or [uuid4().hex])[0]
        offline = folder / "comet"
        offline.mkdir(parents=True, exist_ok=True)  # Comet makes none
        try:
            self._experiment = comet_ml.start(
                experiment_key=key,
                mode="get_or_create",
                workspace=chosen.entity,
                project_name=chosen.project,
                experiment_config=comet_ml.ExperimentConfig(
                    name=folder.resolve().name,
                    tags=list(chosen.tags) or None,
                    offline_directory=str(offline),
                    log_code=False,
                    parse_args=False,
                ),
            )
        except ValueError as error:  # there is no key of an account
            raise ConfigError(
                f"trackers: comet cannot begin: {error} (`comet login`, or COMET_API_KEY; with"
                f" COMET_START_ONLINE=0 it writes to {offline}, for `comet upload`)"
            ) from error
        kept.write(key)
        self._experiment.log_parameters(dict(config))
        if chosen.group is not None:
            self._experiment.log_other("group", chosen.group)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._experiment.log_metrics(dict(metrics), step=step)

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Record some episodes as a table."""
        rows = [list(astuple(one)) for one in samples]
        self._experiment.log_table(
            f"samples_{name}_{step:06d}.csv", tabular_data=rows, headers=_COLUMNS
        )

    def end(self, how: HowEnded, why: str) -> None:
        """Record how the run has ended, and flush."""
        self._experiment.log_other("ended", _ending(how, why))
        self._experiment.add_tag(how)
        self.close()

    def close(self) -> None:
        """Flush."""
        self._experiment.end()


class _KeptId:
    """The id of a tracker's run, and what else must outlive the process, in a line of
    `RUN/trackers/NAME`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / "trackers" / name

    def read(self) -> list[str]:
        """The words of the line; none if there is none."""
        return self._path.read_text().split() if self._path.exists() else []

    def write(self, *words: object) -> None:
        """Replace the line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f".{self._path.name}")
        unfinished.write_text(" ".join(map(str, words)) + "\n")
        unfinished.replace(self._path)


def _experiment_id(mlflow: Any, project: str | None) -> str | None:
    """The experiment of this name, which is made if there is none; None where MLflow's variables
    name one.
    """
    if project is None and (
        os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID")
    ):
        return None
    name = project or _DEFAULT_PROJECT
    found = mlflow.get_experiment_by_name(name)
    if found is None:
        try:
            return str(mlflow.create_experiment(name))
        except mlflow.MlflowException:  # another run has just made it
            found = mlflow.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _has_run(mlflow: Any, run_id: str) -> bool:
    """True if there is such a run still: somebody may have deleted it."""
    try:
        return bool(mlflow.get_run(run_id).info.lifecycle_stage == "active")
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def _ending(how: HowEnded, why: str) -> str:
    """The end of a run and its reason, in a line."""
    return why if why.startswith(how) else f"{how}: {why}"


def _indent(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _not_installed(tracker: str) -> ConfigError:
    return ConfigError(f"trackers: {tracker} is not installed: {install_command(tracker)}")
