"""Conversations that were recorded: by `agentrl gateway` or a run, with their exact tokens, or by
another library.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.observe.run_images import RunImages
from agentrl.recipes.foreign_recordings import read_foreign_recordings, rollout_files
from agentrl.settings.base import COLDEST, Settings
from agentrl.tasks.saved_rows import saved_rows
from agentrl.tokens.arrays import at_least, floats, ints
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trajectory import (
    SEGMENT,
    Completion,
    Message,
    Task,
    Terminated,
    ToolCall,
    Trajectory,
    Turn,
)


class RecordingsConfig(Settings):
    """Conversations of a folder that the model imitates."""

    path: Path
    """The folder of recordings that `agentrl gateway RUN` has written, or that of a run; or a file
    or folder of rollouts of verifiers (`results.jsonl`) or of training traces of OpenEnv."""
    least_score: float | None = None
    """Imitate only conversations with at least this score. None: all, also those for which no
    reward came.
    """
    episodes_per_step: int = Field(32, gt=0)
    """Conversations in one supervised batch."""
    epochs: int = Field(1, gt=0)
    """Passes over the conversations."""
    lr: float = Field(1e-4, gt=0)
    """Learning rate of the supervised steps; all other settings are the trainer's."""
    temperature: float = Field(1.0, ge=COLDEST)
    """The temperature that divides logits while the model imitates, whatever
    `rollout.sampling.temperature` is.
    """


class Recorded(NamedTuple):
    """A conversation with its exact tokens. `score` is NaN if no reward came for it."""

    trajectory: Trajectory
    score: float


async def recorded(config: RecordingsConfig, renderer: TemplateRenderer) -> list[Trajectory]:
    """The conversations that are to be imitated, in the order in which they were recorded.

    Raises:
        ConfigError: there is none, or `renderer` is that of a model with other tokens.
    """
    path, least = config.path, config.least_score
    kinds = [path / kind for kind in ("trajectories", "unrewarded") if (path / kind).is_dir()]
    conversations = await asyncio.to_thread(
        lambda: (
            [conversation for kind in kinds for conversation in read_recordings(kind)]
            if kinds
            else _read_foreign(path, renderer)
        )
    )
    found = [one for one in conversations if one.trajectory.turns]
    if not found:
        raise ConfigError(f"recipe.recordings.path: {path} has no conversations yet")
    chosen = [one.trajectory for one in found if least is None or at_least(one.score, least)]
    if not chosen:
        scores = [one.score for one in found if not isnan(one.score)]
        best = f"the best has {max(scores):g}" if scores else "none has a score"
        raise ConfigError(
            f"recipe.recordings: no conversation of {path} has a score of at least {least}: of"
            f" {len(found)}, {best}"
        )
    if not same_tokens(chosen, renderer):
        raise ConfigError(
            f"recipe.recordings.path: the tokens of {path} mean something else to this run's model:"
            " they were recorded with a model that has another tokenizer. Train that one"
            " (`model`), or one that is made from it"
        )
    return chosen


def _read_foreign(path: Path, renderer: TemplateRenderer) -> list[Recorded]:
    """The recordings of another library."""
    try:
        if not path.exists():
            raise ConfigError("there is no such file or folder")
        files = rollout_files(path)
    except ConfigError as error:
        raise ConfigError(
            f"recipe.recordings.path: {path} has no folder trajectories/ or unrewarded/, and no"
            f" rollouts of others ({error}): name what `agentrl gateway RUN` has written, the"
            " folder of a run, or a file of rollouts of verifiers or traces of OpenEnv"
        ) from error
    return [Recorded(*pair) for pair in read_foreign_recordings(files, renderer)]


def read_recordings(folder: Path) -> Iterator[Recorded]:
    """All conversations in the files of a folder's steps, and none of an evaluation.

    Of an episode that a run has trained on in parts, only the last one: it has all of the turns.
    """
    images = RunImages(folder.parent)
    for _, row in saved_rows(folder):
        if row["detail"] != SEGMENT.limit:
            yield Recorded(played_in(row, images), nan if row["score"] is None else row["score"])


def same_tokens(trajectories: Iterable[Trajectory], renderer: TemplateRenderer) -> bool:
    """True if the tokens mean the same to `renderer` as to the model that sampled them: the tokens
    of most trajectories decode to the recorded text. Trajectories without text do not count.
    """
    with_text, decoded_alike = 0, 0
    for trajectory in trajectories:
        answers = [message for message in trajectory.messages if message.is_answer]
        texts = [said for answer in answers if (said := answer.said.strip())]
        texts += [call.name for answer in answers for call in answer.tool_calls]
        if texts:
            decoded = "".join(renderer.decode(t.completion.token_ids) for t in trajectory.turns)
            with_text += 1
            decoded_alike += all(text in decoded for text in texts)
    # Most and not all: templates may write a text in another way than it was parsed.
    return decoded_alike * 2 >= with_text


def played_in(row: dict[str, Any], images: RunImages) -> Trajectory:
    """The trajectory of a row, as one that has ended by itself.

    Raises:
        ConfigError: a picture of it is missing.
    """
    turns = [
        Turn(
            ints(turn["prompt_ids"]),
            Completion(
                ints(turn["token_ids"]),
                floats(turn["logprobs"]),
                ints(turn["policy_versions"]),
                turn["finish_reason"],
            ),
            turn["reward"],
            json.loads(turn["info"]),
            bool(turn["forked"]),
            trained=turn.get("trained") is not False,  # earlier versions kept none of these two
            images=tuple(
                PlacedImage(placed["start"], placed["tokens"], images.read(placed["image"]))
                for placed in turn.get("images") or ()
            ),
        )
        for turn in row["turns"] or ()
    ]
    options = json.loads(row.get("options") or "{}")
    task = Task(row["env"], row["seed"], options, row["task"])
    return Trajectory(
        row["id"],
        task,
        tuple(turns),
        Terminated(),
        tuple(message_of(message, images) for message in row["messages"]),
        agent=row["agent"] or "",
    )


def message_of(row: dict[str, Any], images: RunImages) -> Message:
    """The message of a row's list of them.

    Raises:
        ConfigError: a picture of it is missing.
    """
    return Message(
        row["role"],
        row["content"],
        reasoning=row["reasoning"] or "",
        tool_calls=tuple(ToolCall(**call) for call in json.loads(row["tool_calls"] or "[]")),
        tool_call_id=row["tool_call_id"] or "",
        given=bool(row.get("given")),  # earlier versions kept none, and no pictures
        images=tuple(map(images.read, row.get("images") or ())),
    )
