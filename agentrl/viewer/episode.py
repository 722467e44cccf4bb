"""One episode in full: its conversation, its tokens with the trainer's numbers for each, and its
fate.
"""

import shlex
import sqlite3
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.errors import ConfigError
from agentrl.ledger.ledger import read_ledger
from agentrl.ledger.report import explain
from agentrl.observe.reports import HELD_OUT
from agentrl.observe.run_images import RunImages, named_images
from agentrl.tokens.arrays import constant
from agentrl.viewer.episodes import KINDS, EpisodeIndex
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.lineage import parents
from agentrl.viewer.trees import trees_of

_UNREAD = (pa.ArrowException, OSError)
"""Exceptions of reading a damaged file, or one that has just been deleted."""
_PER_TOKEN = ("old_logprobs", "logprobs", "entropies", "advantages")
_MAX_SHORT_CHARACTERS = 2000
_MAX_NAMED_EPISODES = 8
"""Episodes that an error names."""


class EpisodeReader:
    """Reads episodes of a run from its files, each from the row group that holds it."""

    def __init__(self, run: RunFolder, index: EpisodeIndex) -> None:
        self._run = run
        self._index = index

    def episode(
        self, name: str, agent: str = "", step: int | None = None, *, pictures: bool = False
    ) -> dict[str, Any]:
        """An episode from the view of an agent: its row of the index, trajectory, samples and fate.

        If it was trained on in parts, the part of `step`, by default the last. What was never
        written is `None`. `pictures`: its messages also have the addresses of what they show.

        Raises:
            ConfigError: there is no such episode.
        """
        rows = self._index.named(name)
        if not rows:
            of_task = list(dict.fromkeys(row["id"] for row in self._index.group(name)))
            there = (
                f"; the episodes of that task are {', '.join(of_task[:_MAX_NAMED_EPISODES])}"
                if of_task
                else ""
            )
            raise ConfigError(f"this run has no episode {name!r}{there}")
        fitting = [
            row
            for row in rows
            if (not agent or row["agent"] == agent) and step in (None, row["step"])
        ]
        row = (fitting or rows)[-1]
        played = self._trajectory(row)
        samples = (
            [] if row["step"] is None else self._samples(row["step"], name, row["agent"] or "")
        )
        if played is not None:
            if pictures:
                _add_pictures(played, RunImages(self._run.path))
            _add_numbers(played["turns"], samples)
            for turn, parent in zip(played["turns"], parents(played["turns"]), strict=True):
                turn["parent"] = parent
                turn["prompt"], turn["tokens"] = (
                    self._texts(turn["prompt_ids"]),
                    self._texts(turn["token_ids"]),
                )
        return {
            "row": row,
            "others": [{key: one[key] for key in ("agent", "step", "score")} for one in rows],
            "trajectory": played,
            "samples": [
                {key: value for key, value in one.items() if not isinstance(value, list)}
                for one in samples
            ],
            "fate": self._fate(row, samples),
            "replay": self._command(row, rows) if played is not None else None,
        }

    def _command(self, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The command that plays the episode again, to which a turn may be added."""
        if row["agent"] or row is not rows[-1]:
            return None  # it goes on from the newest row of an episode of a single agent
        return shlex.join(["agentrl", "replay", str(self._run.path.resolve()), row["id"]])

    def group(self, task: str) -> dict[str, Any]:
        """The episodes of a task, with the beginnings of their messages, to compare them, and the
        trees that they make.
        """
        members, rows = [], self._index.group(task)
        for row in rows:
            played = self._trajectory(row, ["messages"])
            messages = [] if played is None else played["messages"]
            shown = [
                {**message, "content": named_images(message)[:_MAX_SHORT_CHARACTERS]}
                for message in messages
            ]
            members.append({"row": row, "messages": shown})
        return {"task": task, "members": members, "trees": trees_of(rows)}

    def turns_of_step(
        self, step: int, kind: str = "trajectories", *, staleness: bool = False
    ) -> list[dict[str, Any]]:
        """The times at which the episodes of a step were played, and the model, the environment and
        rewards worked in each.

        `kind`: those that were trained on (`trajectories`), or some of the others (`untrained`).
        With `staleness`, also how many versions the oldest token of each turn is behind the step.
        """
        path = self._run.files(kind).get(step)
        if path is None:
            return []
        columns = [
            "id",
            "agent",
            "score",
            "success",
            "started",
            "seconds",
            "scoring",
            *(
                f"turns.list.element.{n}"
                for n in (*_TIMES, *(["policy_versions"] if staleness else []))
            ),
        ]
        try:
            with pq.ParquetFile(path) as file:
                rows = [
                    row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist()
                ]
        except _UNREAD:
            return []
        return sorted(
            (_add_times(row, step if staleness else None) for row in rows),
            key=lambda one: one["started"],
        )

    def _trajectory(
        self, row: Mapping[str, Any], columns: Sequence[str] | None = None
    ) -> dict[str, Any] | None:
        path = None if row["kind"] is None else self._run.files(row["kind"]).get(row["step"])
        if path is None or row["place"] is None:
            return None
        try:
            with pq.ParquetFile(path) as file:
                return _row_at(file, row["place"], columns)
        except _UNREAD:
            return None

    def _samples(self, step: int, name: str, agent: str) -> list[dict[str, Any]]:
        path = self._run.files("samples").get(step)
        if path is None:
            return []
        try:
            table = pq.read_table(
                path, filters=(pc.field("episode") == name) & (pc.field("agent") == agent)
            )
            total = pq.read_metadata(path).num_rows
        except _UNREAD:
            return []
        return [{**row, "of": total} for row in table.to_pylist()]

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token; its number in brackets without the model's tokenizer."""
        path = self._run.tokenizer()
        if path is None:
            return [f"[{token}]" for token in token_ids]
        # The time of its last change is part of the cache's key.
        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
        texts = {
            token: tokenizer.decode([token], skip_special_tokens=False) for token in set(token_ids)
        }
        return [texts[token] for token in token_ids]

    def _fate(self, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
        """The fate of the episode and its reason, in a sentence or two."""
        if row["evaluation"] is not None:
            return _evaluation_fate(row, self._index.named(row["id"]))
        if any(sample["loss_tokens"] for sample in samples):
            return _training_fate(row, samples, self._index.group(row["task"]))
        if (
            row["fate"] != "masked"
            and row["kind"] == KINDS[0]
            and row["step"] in self._run.files("samples")
        ):
            return (
                f"{row['id']} was in the batch of step {row['step']}, and none of its tokens"
                " carried a loss there (too old, or left out by `batch_processing`)."
            )
        ledger = self._run.path / "ledger.sqlite"
        if not ledger.exists():
            return (
                f"{row['id']} is in the batch of step {row['step']}. The run has no ledger that"
                " says more."
            )
        try:
            with read_ledger(ledger) as reader:
                return explain(reader, row["id"]).sentence
        except (ConfigError, sqlite3.Error) as error:
            return f"What became of {row['id']} is not known: {error}"


_TIMES = ("asked", "generate_seconds", "env_seconds")


def _add_times(row: dict[str, Any], step: int | None) -> dict[str, Any]:
    """The times of an episode's turns and rewards; with a `step`, how many versions each turn is
    behind it.
    """
    turns = [turn for turn in row.pop("turns") or () if "asked" in turn]
    times = [[turn[name] for name in _TIMES] for turn in turns]
    scoring = [[one["began"], one["ended"]] for one in row.pop("scoring", None) or ()]
    found = {"started": 0.0, "seconds": 0.0, **row, "turns": times, "scoring": scoring}
    if step is None:
        return found
    return {**found, "stale": [step - min(turn["policy_versions"], default=step) for turn in turns]}


def _row_at(
    file: pq.ParquetFile, place: int, columns: Sequence[str] | None
) -> dict[str, Any] | None:
    """The row at this place of a file, of which only its row group is read."""
    for number in range(file.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if place < rows:
            table = file.read_row_group(number, columns=None if columns is None else list(columns))
            found: dict[str, Any] = table.slice(place, 1).to_pylist()[0]
            return found
        place -= rows
    return None


def _training_fate(
    row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], group: Sequence[Mapping[str, Any]]
) -> str:
    numbers = [str(sample["sample"]) for sample in samples]
    named = (
        f"sample {numbers[0]}"
        if len(numbers) == 1
        else f"samples {', '.join(numbers[:-1])} and {numbers[-1]}"
    )
    fate = f"{row['id']} was trained at step {row['step']} as {named} of {samples[0]['of']}"
    advantages = sorted({round(sample["advantage"], 3) for sample in samples})
    fate += (
        ", with the advantage"
        f" {' and '.join(f'{each:+g}' if each else '0' for each in advantages)}."
    )
    scores = [
        member["score"]
        for member in group
        if member["score"] is not None and member["agent"] == row["agent"]
    ]
    if len(scores) > 1 and constant(scores):
        fate += f" All {len(scores)} members of its group scored {scores[0]:g}."
    elif len(scores) > 1 and row["score"] is not None:
        fate += (
            f" It scored {row['score']:g}; the mean of its group of {len(scores)} is"
            f" {sum(scores) / len(scores):.3g}."
        )
    if all(sample["weight"] == 0 for sample in samples):
        fate += " Its loss had the weight 0, as only the critic learned in this step."
    return fate


def _evaluation_fate(row: Mapping[str, Any], plays: Sequence[Mapping[str, Any]]) -> str:
    """The evaluation that played the episode, and the steps at which its task was solved."""
    name = (
        "the held-out tasks" if row["evaluation"] == HELD_OUT else f"the suite {row['evaluation']}"
    )
    fate = (
        f"{row['id']} was played to evaluate the weights after {row['step']} steps on {name};"
        " nothing trains on it."
    )
    own = [
        one
        for one in plays
        if one["evaluation"] == row["evaluation"] and one["agent"] == row["agent"]
    ]
    solved = [one["step"] for one in own if one["success"]]
    if len(own) > 1 and any(one["success"] is not None for one in own):
        first = f", first after {solved[0]} steps" if solved else ""
        fate += f" {len(solved)} of {len(own)} evaluations solved it{first}."
    return fate


def _add_pictures(trajectory: Mapping[str, Any], images: RunImages) -> None:
    """Add what they show to messages, and how many tokens each picture is; None where it stands in
    no prompt.
    """
    tokens = {
        placed["image"]: placed["tokens"]
        for turn in trajectory["turns"]
        for placed in turn.get("images") or ()  # earlier versions kept none
    }
    for message in trajectory["messages"]:
        names = message.get("images") or ()
        message["pictures"] = [images.address(name) for name in names]
        message["picture_tokens"] = [tokens.get(name) for name in names]


def _add_numbers(turns: Sequence[dict[str, Any]], samples: Sequence[Mapping[str, Any]]) -> None:
    """Add what the trainer computed to each turn: lists with an entry for each sampled token,
    `None` where unknown.
    """
    for turn in turns:
        count = len(turn["token_ids"])
        turn["sample"] = None
        turn["trainer"] = {name: [None] * count for name in _PER_TOKEN}
    for sample in samples:
        # A sample is the tokens of its turns in a row, prompt and answer in turn, and positions
        # count in it. `begins`: the position of the first sampled token of each turn.
        begins, at = {}, 0
        for number in range(sample["first_turn"], min(sample["last_turn"] + 1, len(turns))):
            turn = turns[number]
            turn["sample"] = sample["sample"]
            begins[number] = at + len(turn["prompt_ids"])
            at = begins[number] + len(turn["token_ids"])
        for place, position in enumerate(sample["positions"] or ()):
            number = sample["turns"][place]
            for name in _PER_TOKEN:
                if sample.get(name) is not None and number in begins:
                    turns[number]["trainer"][name][position - begins[number]] = sample[name][place]


@lru_cache(maxsize=8)
def _tokenizer(path: Path, changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
