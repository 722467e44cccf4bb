"""`DatasetTasks`: each row of a file, a folder or a dataset of the hub is a task.

    tasks: questions.jsonl        # short for {name: dataset, data: questions.jsonl}

The columns of a row become options of its task, on top of those of `env.options`. Three are
special: `id` ends the task's id, `seed` is its seed, and `options` is a mapping of more options.
Rewards read the options too: the right answer is the option `answer`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from agentrl import plugins
from agentrl.errors import ConfigError, PluginError
from agentrl.hosting.client_options import marked_options
from agentrl.protocols.env import options_class_of, shows_images
from agentrl.rollout.seeds import derive_seed, split_seed
from agentrl.settings.base import NameText, Settings
from agentrl.settings.faults import Fault, faults
from agentrl.tasks.columns import advice, answer_advice, format_names
from agentrl.tasks.permutation import Permutation
from agentrl.tasks.row_index import U64, RowIndex, folder_of, open_index
from agentrl.tasks.row_reader import RowReader, RowSettings
from agentrl.tasks.rows import BadRowError, RowSource, is_data, sources
from agentrl.trajectory import Task

_READING_VERSION = 2
"""The version of how rows are read. A new one makes remembered indexes be built again."""
TaskCheck = Callable[[Task], None]
"""Raises `ConfigError` for a task that cannot be scored."""


class DatasetSettings(RowSettings):
    """Settings of `tasks: dataset`. A path or a dataset `owner/name` alone stands for `{name:
    dataset, data: ...}`.
    """

    data: NameText
    """A file (`.jsonl`, `.json`, `.parquet`, `.csv`), a folder of such files or of
    `Dataset.save_to_disk`, or a dataset of the Hugging Face hub (`owner/name`, with the extra
    `data`; once read, it is remembered and needs no network)."""
    split: NameText = "train"
    """The split to train on: of a folder, the files in a folder of this name, or whose names (or
    parts of them between dots) begin or end with it.
    """
    subset: NameText | None = None
    """The configuration of a dataset of the hub."""
    revision: NameText | None = None
    """The version of a dataset of the hub: a branch, a tag or a commit."""
    held_out: float | str = 0.05
    """The rows that are evaluated and not trained on: a share of the rows (the same whatever the
    run's seed), another file or folder, or another split of `data`."""
    key: tuple[NameText, ...] = ()
    """Columns (by their new names) that tell tasks apart. Rows with equal ones are the same task,
    and are trained on or held out together. By default `prompt`, and in data without it all but
    `id`."""


@dataclass(frozen=True)
class DataRows:
    """The rows of one or several sources, one after another, by number. `only`: some of them, by
    default all.
    """

    parts: Sequence[RowIndex]
    only: U64 | None = None

    def __len__(self) -> int:
        return int(self._starts[-1]) if self.only is None else len(self.only)

    @cached_property
    def _starts(self) -> U64:
        return np.cumsum([0, *(part.size for part in self.parts)]).astype(np.uint64)

    @property
    def keys(self) -> U64:
        """The key of each row."""
        keys = np.concatenate([part.keys for part in self.parts])
        return keys if self.only is None else keys[self.only]

    @property
    def fingerprint(self) -> str:
        """A digest of the rows: equal for equal rows."""
        return " ".join(part.digest for part in self.parts)

    def row(self, place: int) -> tuple[int, Mapping[str, Any], Path | None]:
        """The number of a row in all its data, the row, and the folder of its pictures."""
        number, part, inside = self._locate(place)
        return number, part.row(inside), part.pictures

    def where(self, place: int) -> str:
        """The place of a row, for messages."""
        _, part, inside = self._locate(place)
        return part.where(inside)

    def divide(self, share: float) -> tuple["DataRows", "DataRows"]:
        """Two parts, the second with this share of the rows. Rows with equal keys are in the same
        part.
        """
        keys = self.keys
        if not share:
            return self, DataRows(())
        count = max(1, round(share * len(keys)))
        # Keys are hashes, so the rows with the `count` smallest are a random sample, and the same
        # one in every run. Rows with equal keys are on the same side of the threshold.
        second = keys <= np.partition(keys, count - 1)[count - 1]
        parts = (np.flatnonzero(mask).astype(np.uint64) for mask in (~second, second))
        return DataRows(self.parts, next(parts)), DataRows(self.parts, next(parts))

    def _locate(self, place: int) -> tuple[int, RowIndex, int]:
        number = place if self.only is None else int(self.only[place])
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return number, self.parts[part], number - int(self._starts[part])


class DatasetTasks:
    """`TaskSource`: the rows of data, each once in an epoch, in an order that the run's seed
    shuffles for each epoch.

    The task of an index is computed from the index alone, so a resumed run goes on exactly where it
    was. The rows to evaluate on come in the order of the data's own hash, which no seed changes.

    Raises:
        ConfigError: the data cannot be read, or has rows that cannot be tasks of this environment;
            or a task is both trained on and held out.
    """

    class Config(DatasetSettings):
        """The data, and the part of it to use."""

    def __init__(
        self,
        settings: DatasetSettings,
        env: str,
        seed: int,
        split: str = "train",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings, self._env, self._seed, self._split = settings, env, seed, split
        self._options = dict(options or {})
        self._reader = RowReader(settings, _options_of(env))
        self._rows = _rows(settings, env, json.dumps(self._options), split == "held-out")

    def __len__(self) -> int:
        """The number of different tasks."""
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """A digest of the data: equal for equal data."""
        return self._rows.fingerprint

    def check(
        self,
        checks: Sequence[TaskCheck],
        checked_as: str,
        of_first: Sequence[TaskCheck] = (),
        first: int = 8,
    ) -> None:
        """Check each row as a task; what was found good is remembered under `checked_as`, which
        names the checks.

        `of_first`: checks that take long, of the `first` rows of each source.

        Raises:
            ConfigError: a check raised it for some rows; names the first by file and line.
        """

        def check(folder: Path | None, number: int, row: Mapping[str, Any]) -> None:
            options = self._reader.read(row, folder).options
            task = Task(self._env, 0, {**self._options, **options})
            try:
                for one in (*checks, *(of_first if number <= first else ())):
                    one(replace(task))  # each gets options of its own, as when it scores
            except ConfigError as error:
                remedy = answer_advice(row) if task.options.get("answer") is None else ""
                raise ConfigError(
                    f"{error}. {remedy.capitalize()}" if remedy else str(error)
                ) from error

        for part in self._rows.parts:
            part.check(
                partial(check, part.pictures),
                json.dumps(
                    [checked_as, self._env, self._options, _reading_settings(self._settings)]
                ),
            )

    def task(self, index: int) -> Task:
        """The task of this index; with as many as there are rows, each has been used once."""
        return self._task_at(self._place(index), index)

    def where(self, index: int) -> str:
        """The place of the row of this index, for messages."""
        return self._rows.where(self._place(index))

    def _place(self, index: int) -> int:
        epoch, place = divmod(index, len(self._rows))
        seed = (
            0 if self._split == "held-out" else derive_seed(self._seed, "order", self._split, epoch)
        )
        return Permutation(len(self._rows), seed)[place]

    def _task_at(self, place: int, index: int, mark: str = "") -> Task:
        """The task of the row at `place`, for this index; `mark` ends its id."""
        number, row, folder = self._rows.row(place)
        options, named, own_seed = self._reader.read(row, folder)
        name = (
            f"{self._split}-{index:06d}"
            + (f"-{_id_text(named)}" if named is not None else "")
            + mark
        )
        # From the row's number and not from the index, so that its task is the same in each epoch.
        seed = split_seed(self._seed, self._split, number) if own_seed is None else own_seed
        return Task(self._env, seed, {**self._options, **options}, name)


def _rows(settings: DatasetSettings, env: str, options: str, held_out: bool) -> DataRows:
    """The rows to train on, or to evaluate on."""
    train = _open_rows(settings, settings.data, settings.split, env, options)
    other = settings.held_out
    if isinstance(other, str):
        data, split = (other, settings.split) if is_data(other) else (settings.data, other)
        if data == settings.data and Path(data).expanduser().is_file():
            raise ConfigError(
                f"tasks.held_out is {other!r}, and {data} is a single file, which has no splits:"
                " write another file, or a share of the rows such as 0.05"
            )
        measured = _open_rows(settings, data, split, env, options)
        if held_out:
            _check_disjoint(train, measured)
    else:
        if held_out and other == 0:
            raise ConfigError(
                "tasks.held_out is 0, so there is nothing to evaluate on: set evaluation.tasks to"
                " 0 too"
            )
        if not 0 <= other < 1:
            raise ConfigError(
                f"tasks.held_out is {other:g}: write a share of the rows below 1, a file, or a"
                " split"
            )
        train, measured = train.divide(other)
        if not len(train):
            raise ConfigError(
                f"tasks.held_out={other:g} leaves none of the {len(measured)} rows of"
                f" {settings.data} to train on, as equal tasks stay together (tasks.key): set"
                " tasks.held_out and evaluation.tasks to 0, or name another file to evaluate on"
            )
    return measured if held_out else train


def _open_rows(
    settings: DatasetSettings, data: str, split: str, env: str, options: str
) -> DataRows:
    found: list[RowSource] = sources(data, split, settings.subset, settings.revision)
    checked_as = json.dumps(
        [_READING_VERSION, _reading_settings(settings), settings.key, env, options]
    )
    check = _make_row_check(settings, env, json.loads(options))
    columns = RowReader(settings).columns
    parts = (
        open_index(source, partial(check, folder_of(source)), checked_as, columns)
        for source in found
    )
    rows = DataRows(tuple(parts))
    if not len(rows):
        raise ConfigError(f"{data} has no rows")
    return rows


def _make_row_check(
    settings: DatasetSettings, env: str, shared: Mapping[str, Any]
) -> Callable[[Path | None, Mapping[str, Any]], str]:
    """A check of a row, given the folder of its pictures: its columns, and its options if the
    environment says which it takes (a class `Options`).
    """
    shape = _options_of(env)
    trusted = marked_options(shape) - set(settings.columns) if shape is not None else set()
    reader = RowReader(settings, shape)

    def check(folder: Path | None, row: Mapping[str, Any]) -> str:
        options, named, _ = reader.read(row, folder)
        if trusted and (bold := trusted.intersection(options)):
            name = min(bold)
            raise BadRowError(
                f"{name} can decide what code runs: set it in env.options, or if you trust these"
                f" data, name it in tasks.columns ({{{name}: {name}, ...}})"
            )
        if named is not None and not _id_text(named):
            raise BadRowError(f"its id is {named!r}")
        if shape is not None:
            given = {**shared, **options}
            try:
                shape.model_validate(given)
            except ValidationError as error:
                raise BadRowError(_explain_fault(faults(error, given)[0], row, shape)) from error
        asked = [name for name in ("prompt", "images") if name in options]
        wanted = settings.key or tuple(asked if "prompt" in options else sorted(options))
        if missing := [column for column in wanted if column not in options]:
            raise BadRowError(
                f"no column {missing[0]!r}, which tasks.key names; there are {', '.join(options)}"
            )
        return json.dumps([options[column] for column in wanted], sort_keys=True)

    return check


def _options_of(env: str) -> type[Settings] | None:
    """The options that an environment's class declares, if it does."""
    try:
        return options_class_of(plugins.load("envs", env))
    except PluginError:
        return None  # of another interpreter; a wrong name has been refused before


def pay_check(env: str) -> TaskCheck | None:
    """The environment's check of its tasks where nothing else pays: `check_paid` of its options."""
    shape = _options_of(env)
    if shape is None or not hasattr(shape, "check_paid"):
        return None
    return lambda task: shape.model_validate(dict(task.options)).check_paid()


def picture_check(env: str, blind: str) -> TaskCheck | None:
    """The check that no task shows pictures, if a part of the run reads text alone: `blind` says
    which, and what to take instead.
    """
    shape = _options_of(env)
    if not blind or shape is None or "images" not in shape.model_fields:
        return None

    def check(task: Task) -> None:
        if shows_images(shape.model_validate(dict(task.options))):
            raise ConfigError(f"it shows pictures, and {blind}")

    return check


def _explain_fault(fault: Fault, row: Mapping[str, Any], shape: type[Settings]) -> str:
    """The reason why a row cannot be a task, and the remedy."""
    if fault.kind == "extra_forbidden":
        return (
            f"{fault}: the environment takes {', '.join(shape.model_fields)}. Name the columns that"
            " it takes in tasks.columns"
        )
    if fault.kind != "missing" and fault.where in row and fault.where != "prompt":
        return (
            f"{fault}. If this column is something else, name the columns that are needed in"
            " tasks.columns"
        )
    if fault.kind != "missing":
        return str(fault)
    if fault.where == "prompt":
        return f"there is no prompt, and the columns are {format_names(row)}: {advice(row)}"
    return (
        f"the environment needs {fault.where}, and the columns are {format_names(row)}: write "
        f"tasks.columns={{{fault.where}: COLUMN}}"
    )


def _reading_settings(settings: RowSettings) -> list[Any]:
    """The settings that decide how rows are read."""
    return [settings.columns, settings.prompt, settings.answer]


def _id_text(named: Any) -> str:
    """An id as the end of a task's id, which has no slashes or spaces."""
    return "_".join(str(named).replace("/", "_").split())[:80]


def _check_disjoint(train: DataRows, held_out: DataRows) -> None:
    """Check that no task is in both.

    Raises:
        ConfigError: one is. Names the first, in both files.
    """
    if found := _overlap(train.parts, held_out.parts):
        count, one, other = found
        raise ConfigError(
            f"{count:,} of {len(held_out):,} held-out rows are also trained on, the first:"
            f" {held_out.where(other)} is the task of {train.where(one)}. Remove them from one of"
            " the two; or, if they are different tasks, say with tasks.key which columns tell"
            " tasks apart"
        )


@lru_cache(maxsize=16)
def _overlap(
    train: Sequence[RowIndex], held_out: Sequence[RowIndex]
) -> tuple[int, int, int] | None:
    """The number of held-out rows that are also trained on, and the first such row's number in
    both; None if there are none.
    """
    measured = DataRows(held_out).keys
    ordered = np.sort(measured)
    hits: set[int] = set()
    first: tuple[int, int] | None = None
    start = 0
    for part in train:
        places = np.searchsorted(ordered, part.keys).clip(max=len(ordered) - 1)
        same = np.flatnonzero(ordered[places] == part.keys)
        if len(same) and first is None:
            first = (start + int(same[0]), int(np.flatnonzero(measured == part.keys[same[0]])[0]))
        hits.update(map(int, part.keys[same]))
        start += part.size
    if first is None:
        return None
    return int(np.isin(measured, np.fromiter(hits, np.uint64)).sum()), *first
