"""`Preference`: a better and a worse conversation, read from a file or from the episodes of a run."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isnan
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agentrl.errors import ConfigError
from agentrl.protocols import Settings
from agentrl.recipes.recordings import Recorded, read_recordings
from agentrl.rounding import constant
from agentrl.trajectory import Message, Trajectory

T = TypeVar("T")


class PreferencesConfig(Settings):
    """Pairs to learn from."""

    path: Path
    """A `.jsonl` or `.parquet` file of rows with `chosen` and `rejected` (lists of messages, or texts that answer a
    `prompt`; rows of one `task` are held out together), or the folder of a run: of two episodes of one task, the one
    with the higher score is preferred."""
    pairs_per_task: int = Field(8, gt=0)
    """Most pairs of one task, drawn at random, if `path` is the folder of a run."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of the pairs (of a run: of the tasks) that is not trained on, but used to measure accuracy."""
    epochs: int = Field(1, gt=0)
    """Passes over the pairs."""
    pairs_per_step: int = Field(32, gt=0)
    """Pairs in one update."""
    micro_batch_pairs: int = Field(8, gt=0)
    """Pairs that go through the model at once. Changes memory and speed, not the result."""
    max_tokens: int = Field(2048, gt=0)
    """Pairs with a longer conversation are left out, and counted."""
    lr: float = Field(1e-4, gt=0)
    """AdamW's learning rate, after a linear warm-up over the first tenth of the steps."""
    device: str = "auto"
    """A torch device, or "auto": the first GPU, else the CPU."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two conversations of one `task` (any name; `split` keeps pairs with the same name together).

    `played`: the chosen and the rejected one with their exact tokens, if a model has said them.
    """

    task: str
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    played: tuple[Trajectory, Trajectory] | None = None


class _Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class _Row(BaseModel):
    task: str | None = None
    prompt: str | tuple[_Message, ...] = ()
    chosen: str | tuple[_Message, ...]
    rejected: str | tuple[_Message, ...]


def read_preferences(config: PreferencesConfig, rng: Random) -> list[Preference]:
    """All pairs of a file or a run, in an order that depends on `rng` alone.

    Raises:
        ConfigError: there is no such file or run, a row is malformed, or there are no pairs.
    """
    path = config.path
    if (path / "trajectories").is_dir():
        pairs = list(_of_run(path / "trajectories", config.pairs_per_task, rng))
        nothing = "no two of its episodes of one task have different scores"
    elif path.suffix in (".jsonl", ".parquet") and path.is_file():
        pairs = [_pair(path, number, row) for number, row in enumerate(_rows(path))]
        nothing = "it is empty"
    else:
        raise ConfigError(f"recipe.preferences.path: {path} is no .jsonl or .parquet file, and no folder of a run")
    if not pairs:
        raise ConfigError(f"recipe.preferences.path: {path} has no pairs: {nothing}")
    rng.shuffle(pairs)
    return pairs


def split(pairs: Sequence[Preference], held_out: float, rng: Random) -> tuple[list[Preference], list[Preference]]:
    """(pairs to train on, pairs to measure accuracy on): no task is in both."""
    tasks = sorted({pair.task for pair in pairs})
    rng.shuffle(tasks)
    measured = set(tasks[: round(held_out * len(tasks))])
    return [pair for pair in pairs if pair.task not in measured], [pair for pair in pairs if pair.task in measured]


def in_batches(pairs: Sequence[T], rng: Random, *, epochs: int, size: int) -> Iterator[list[T]]:
    """Batches of all pairs, in a different order in each epoch; the last batch of an epoch may be smaller."""
    for _ in range(epochs):
        mixed = rng.sample(pairs, len(pairs))
        for start in range(0, len(mixed), size):
            yield mixed[start : start + size]


def write_preferences(path: Path, pairs: Iterable[tuple[Preference, Mapping[str, float]]]) -> None:
    """Write pairs to a `.jsonl` file that `read_preferences` reads. Each row also has remarks, which it ignores."""
    with path.open("w") as file:
        for pair, remarks in pairs:
            chosen, rejected = (
                [{"role": message.role, "content": message.content} for message in half]
                for half in (pair.chosen, pair.rejected)
            )
            row = {"task": pair.task, "chosen": chosen, "rejected": rejected, **remarks}
            file.write(json.dumps(row) + "\n")


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
        return
    for number, line in enumerate(line for line in path.read_text().split("\n") if line.strip()):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, row {number}: it is not JSON: {error}") from error


def _pair(path: Path, number: int, row: Any) -> Preference:
    try:
        read = _Row.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}, row {number}: {where}: {first['msg']}; a row has chosen and rejected") from error
    asked = _messages(read.prompt, "user") if read.prompt else ()
    chosen, rejected = (asked + _messages(content, "assistant") for content in (read.chosen, read.rejected))
    return Preference(f"{number}" if read.task is None else read.task, chosen, rejected)


def _messages(content: str | tuple[_Message, ...], role: Literal["user", "assistant"]) -> tuple[Message, ...]:
    if isinstance(content, str):
        return (Message(role, content),)
    return tuple(Message(message.role, message.content) for message in content)


def _of_run(folder: Path, pairs_per_task: int, rng: Random) -> Iterator[Preference]:
    played: dict[str, list[Recorded]] = defaultdict(list)
    for one in read_recordings(folder):
        if not isnan(one.score):
            played[one.trajectory.task.id].append(one)
    for task, episodes in sorted(played.items()):
        differing = [
            (one.trajectory, other.trajectory) if one.score > other.score else (other.trajectory, one.trajectory)
            for one, other in combinations(episodes, 2)
            if not constant((one.score, other.score))
        ]
        for better, worse in rng.sample(differing, min(pairs_per_task, len(differing))):
            tokens = (better, worse) if better.turns and worse.turns else None
            yield Preference(task, better.messages, worse.messages, tokens)
