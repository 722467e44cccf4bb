"""`Preference`: a better and a worse conversation, from a file or a run's episodes."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isnan
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

from pydantic import Field

from agentrl.conversation.chats import is_chat, read_chat
from agentrl.errors import ConfigError
from agentrl.hosting.beginnings import BEGIN
from agentrl.recipes.recordings import Recorded, read_recordings
from agentrl.settings.base import Settings
from agentrl.tasks.columns import column, format_names
from agentrl.tasks.rows import BadRowError, rows_of, sources
from agentrl.tokens.arrays import constant
from agentrl.trajectory import Message, Role, Task, Trajectory

T = TypeVar("T")


class PreferencesConfig(Settings):
    """Pairs to learn from."""

    path: Path
    """A file or folder of rows with `chosen` and `rejected`, of any kind that `tasks.data` may be:
    chats, texts that answer a `prompt`, or texts of "Human:" and "Assistant:" (HH-RLHF). Rows of
    one `task` are held out together. Or the folder of a run: of two episodes of one task, the one
    with the higher score is preferred, and each agent is compared with itself."""
    columns: dict[str, str] = Field(default_factory=dict)
    """As `tasks.columns`: `{prompt: input.messages, chosen: preferred_output, rejected:
    non_preferred_output}`.
    """
    pairs_per_task: int = Field(8, gt=0)
    """Most pairs of one task (and agent), drawn at random, if `path` is the folder of a run."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of the pairs (of a run: of the tasks, of which a row of data is one in all epochs) that
    is not trained on, but used to measure accuracy.
    """
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
    chosen: Sequence[Message]
    rejected: Sequence[Message]
    played: tuple[Trajectory, Trajectory] | None = None


def read_preferences(config: PreferencesConfig, rng: Random) -> list[Preference]:
    """All pairs of a file or a run, in an order that depends on `rng` alone.

    Raises:
        ConfigError: there is no such file or run, a row is malformed, or there are no pairs.
    """
    path = config.path
    if (path / "trajectories").is_dir():
        pairs = list(_read_run(path / "trajectories", config.pairs_per_task, rng))
        nothing = "no two of its episodes of one task have different scores"
    else:
        pairs = list(_read_files(config))
        nothing = "it is empty"
    if not pairs:
        raise ConfigError(f"recipe.preferences.path: {path} has no pairs: {nothing}")
    rng.shuffle(pairs)
    return pairs


def split(
    pairs: Sequence[Preference], held_out: float, rng: Random
) -> tuple[list[Preference], list[Preference]]:
    """(pairs to train on, pairs to measure accuracy on): no task is in both."""
    tasks = sorted({pair.task for pair in pairs})
    rng.shuffle(tasks)
    measured = set(tasks[: round(held_out * len(tasks))])
    return [pair for pair in pairs if pair.task not in measured], [
        pair for pair in pairs if pair.task in measured
    ]


def in_batches(pairs: Sequence[T], rng: Random, *, epochs: int, size: int) -> Iterator[list[T]]:
    """Batches of all pairs, in a different order in each epoch; the last batch of an epoch may be
    smaller.
    """
    for _ in range(epochs):
        mixed = rng.sample(pairs, len(pairs))
        for start in range(0, len(mixed), size):
            yield mixed[start : start + size]


def write_preferences(path: Path, pairs: Iterable[tuple[Preference, Mapping[str, float]]]) -> None:
    """Write pairs to a `.jsonl` file that `read_preferences` reads. Each row also has remarks,
    which it ignores.
    """
    with path.open("w") as file:
        for pair, remarks in pairs:
            chosen, rejected = (
                [{"role": message.role, "content": message.content} for message in half]
                for half in (pair.chosen, pair.rejected)
            )
            row = {"task": pair.task, "chosen": chosen, "rejected": rejected, **remarks}
            file.write(json.dumps(row) + "\n")


def _read_files(config: PreferencesConfig) -> Iterator[Preference]:
    try:
        found = [
            source for source in sources(str(config.path), "train") if isinstance(source, Path)
        ]
    except ConfigError as error:
        raise ConfigError(f"recipe.preferences.path is no folder of a run, and: {error}") from error
    if not found:
        raise ConfigError(
            f"recipe.preferences.path: {config.path} is no file of pairs, and no folder of a run"
        )
    rows = (
        (path, where, row)
        for path in found
        for where, row in rows_of(path, tuple(config.columns.values()))
    )
    for number, (path, where, row) in enumerate(rows):
        try:
            if isinstance(row, BadRowError):
                raise row
            yield _parse_pair(number, row, config.columns)
        except ValueError as error:
            raise ConfigError(
                f"recipe.preferences.path: {path}, {where}, row {number}: {error}"
            ) from error


def _parse_pair(number: int, row: Mapping[str, Any], columns: Mapping[str, str]) -> Preference:
    if missing := [
        name for name in ("chosen", "rejected") if name not in row and name not in columns
    ]:
        raise ValueError(
            f"{missing[0]}: Field required, and the columns are {format_names(row)}: write"
            " recipe.preferences.columns={prompt: COLUMN, chosen: COLUMN, rejected: COLUMN}"
        )
    given = {
        name: column(row, columns.get(name, name))
        for name in _COLUMNS
        if name in row or name in columns
    }
    asked = _parse_messages("prompt", given["prompt"], "user") if given.get("prompt") else ()
    halves = []
    for name in ("chosen", "rejected"):
        half = _parse_messages(name, given[name], "assistant")
        # A half is either an answer to the prompt, or a whole conversation with the prompt in it.
        halves.append(asked + half if half[0].role == "assistant" else half)
    chosen, rejected = halves
    task = given.get("task")
    return Preference(f"{number}" if task is None else str(task), chosen, rejected)


_COLUMNS = ("task", "prompt", "chosen", "rejected")
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def _parse_messages(
    name: str, content: Any, role: Literal["user", "assistant"]
) -> tuple[Message, ...]:
    try:
        if not isinstance(content, str):
            if not is_chat(content):
                raise ValueError(f"write a text, or the messages of a chat, not {content!r:.80}")
            return read_chat(content)
        if not _SPEAKER.match(content):
            return (Message(role, content),)
        _, *parts = _SPEAKER.split(content)  # what came before, and then speakers and what they say
        roles: Mapping[str, Role] = {"Human": "user", "Assistant": "assistant"}
        return tuple(
            Message(roles[who], said) for who, said in zip(parts[::2], parts[1::2], strict=True)
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _read_run(folder: Path, pairs_per_task: int, rng: Random) -> Iterator[Preference]:
    # Agents have goals and prompts of their own, so each is compared with itself.
    played: dict[tuple[str, str], list[Recorded]] = defaultdict(list)
    # A row of data is a task of its own in each epoch. It is held out, or trained on, in all.
    problems: dict[str, str] = {}
    for one in read_recordings(folder):
        if not isnan(one.score):
            task = one.trajectory.task
            played[task.id, one.trajectory.agent].append(one)
            problems.setdefault(_problem_of(task), task.id)
    for _, episodes in sorted(played.items(), key=lambda pair: pair[0]):
        problem = problems[_problem_of(episodes[0].trajectory.task)]
        differing = [
            (
                (one.trajectory, other.trajectory)
                if one.score > other.score
                else (other.trajectory, one.trajectory)
            )
            for one, other in combinations(episodes, 2)
            if not constant((one.score, other.score))
        ]
        for better, worse in rng.sample(differing, min(pairs_per_task, len(differing))):
            tokens = (better, worse) if better.turns and worse.turns else None
            yield Preference(problem, better.messages, worse.messages, tokens)


def _problem_of(task: Task) -> str:
    """A text that is equal for tasks of one problem, wherever they begin in it. Without options,
    as in recordings of the gateway, the id alone tells tasks apart.
    """
    if not task.options:
        return task.id
    own = {name: value for name, value in task.options.items() if name != BEGIN}
    return json.dumps([task.env, task.seed, own], sort_keys=True)
