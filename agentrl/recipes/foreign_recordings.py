"""Recordings of other libraries: the rollouts that verifiers saves, and OpenEnv's training traces.

A rollout is a text (a row of `results.jsonl`, or of the data set that is made from it), and becomes
the tokens that the model would have read and written. A trace (`TrainingTrace`) has the tokens that
were sampled, and stays as it is.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from math import nan
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError

from agentrl.conversation.chats import is_chat, read_chat
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.recipes.written_conversation import trajectory_from_messages
from agentrl.tasks.columns import format_names
from agentrl.tasks.rows import BadRowError, rows_of, sources
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import (
    Completion,
    Message,
    Task,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)

logger = logging.getLogger(__name__)

RESULTS = "results.jsonl"
"""The file of rollouts in the folder of an evaluation by verifiers."""
_VERIFIERS = "verifiers"


def read_foreign_recordings(
    files: Sequence[Path], renderer: TemplateRenderer
) -> list[tuple[Trajectory, float]]:
    """(conversation, score) of all that these files hold. The score is NaN if there is none.

    Rollouts that failed over there are left out, and counted in a warning.

    Raises:
        ConfigError: a file cannot be read, or a row is no rollout and no trace. Names its line.
    """
    found, failed = list[tuple[Trajectory, float]](), 0
    for file in files:
        for where, row in _rows(file):
            try:
                if isinstance(row, BadRowError):
                    raise row
                conversation = _convert(row, f"{file.name}, {where}", renderer)
            except (ValueError, ConfigError) as error:
                raise ConfigError(f"recipe.recordings.path: {file}, {where}: {error}") from error
            if conversation is None:
                failed += 1
            else:
                found.append(conversation)
    if failed:
        logger.warning("%d rollouts that failed are left out", failed)
    thought = sum(
        any(message.reasoning for message in one.messages)
        for one, _ in found
        if one.task.env == _VERIFIERS  # traces have the tokens of theirs
    )
    if thought and renderer.reasoning_marks is None:
        logger.warning(
            "the reasoning of %d rollouts is left out: the model's chat template has no marks for"
            " it",
            thought,
        )
    return found


def rollout_files(path: Path) -> Sequence[Path]:
    """A file, the files of a folder, or the rollouts of an evaluation by verifiers.

    Raises:
        ConfigError: there is none.
    """
    if (path / RESULTS).is_file():
        return [path / RESULTS]
    return [source for source in sources(str(path), "train") if isinstance(source, Path)]


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | BadRowError]]:
    if file.suffix == ".json":  # maybe a single trace
        with suppress(ValueError, OSError):
            whole = json.loads(file.read_bytes())
            if isinstance(whole, dict) and "turns" in whole:
                yield "row 1", whole
                return
    yield from rows_of(file)


def _convert(
    row: Mapping[str, Any], name: str, renderer: TemplateRenderer
) -> tuple[Trajectory, float] | None:
    """(conversation, score) of a row of either library; None for one that failed there."""
    if "turns" in row:
        return _convert_trace(row, name)
    if {"prompt", "completion"} <= row.keys():
        return _convert_rollout(row, name, renderer)
    raise ValueError(
        "it has neither prompt and completion, as rollouts of verifiers, nor turns, as OpenEnv's"
        f" training traces, but {format_names(row)}"
    )


def _convert_rollout(
    row: Mapping[str, Any], name: str, renderer: TemplateRenderer
) -> tuple[Trajectory, float] | None:
    """A rollout of verifiers; None for one that failed there."""
    if row.get("error") is not None or not row["completion"] or not row["prompt"]:
        return None
    reward = row.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float | None):
        raise ValueError(f"reward is {reward!r:.80}: write a number, or null for none")
    asked = [replace(message, given=True) for message in _parse_messages(row, "prompt", "user")]
    messages = [*asked, *_parse_messages(row, "completion", "assistant")]
    cut = bool(row.get("is_truncated"))
    tools = _parse_tools(row.get("tool_defs"))
    played = trajectory_from_messages(messages, renderer, tools, cut=cut)
    task = Task(_VERIFIERS, 0, {}, str(row.get("example_id", "")))
    status = Truncated("env") if cut else Terminated()
    known = replace(played, id=name, task=task, status=status)
    return known, nan if reward is None else float(reward)


def _parse_messages(
    row: Mapping[str, Any], column: str, role: Literal["user", "assistant"]
) -> Sequence[Message]:
    content = row[column]
    if isinstance(content, str):
        return [Message(role, content)]
    if not is_chat(content):
        raise ValueError(f"{column} is {content!r:.80}: write a text, or the messages of a chat")
    try:
        return read_chat(content)
    except ValueError as error:
        raise ValueError(f"{column}: {error}") from error


def _parse_tools(defined: Any) -> list[dict[str, Any]]:
    """The definitions of tools in the form of chat templates."""
    if isinstance(defined, str):
        defined = json.loads(defined)
    if not isinstance(defined, list | None):
        raise ValueError(f"tool_defs is {defined!r:.80}: write a list of objects")
    tools = list[dict[str, Any]]()
    for one in defined or ():
        tool = one.get("function", one) if isinstance(one, Mapping) else {}
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise ValueError(f"tool_defs has {one!r:.80}: write an object with name")
        known = {key: value for key, value in tool.items() if value is not None}
        tools.append({"type": "function", "function": known})
    return tools


class _TraceTurn(BaseModel):
    """`TrainingTurn` of OpenEnv 0.10: one call of the engine. The mask is of prompt and answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    node_id: str = Field(min_length=1)
    prompt_token_ids: list[NonNegativeInt] = Field(min_length=1)
    completion_token_ids: list[NonNegativeInt]
    per_token_logps: list[Annotated[FiniteFloat, Field(le=0)]]
    loss_mask: list[Literal[0, 1]]
    request: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    def check(self) -> None:
        """Check that the lists fit each other.

        Raises:
            ValueError: they do not.
        """
        asked, sampled = len(self.prompt_token_ids), len(self.completion_token_ids)
        if len(self.per_token_logps) != sampled:
            raise ValueError(
                f"{self.node_id!r} has {sampled} sampled tokens and {len(self.per_token_logps)}"
                " logprobs"
            )
        if len(self.loss_mask) != asked + sampled:
            raise ValueError(
                f"the loss_mask of {self.node_id!r} has {len(self.loss_mask)} entries, and its"
                f" prompt and completion have {asked + sampled} tokens"
            )
        if any(self.loss_mask[:asked]):
            raise ValueError(f"the loss_mask of {self.node_id!r} trains on tokens of the prompt")

    @property
    def choice(self) -> Mapping[str, Any]:
        """The engine's reply, as far as it was kept."""
        choices = self.response.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else {}
        return first if isinstance(first, Mapping) else {}


class _Trace(BaseModel):
    """`TrainingTrace` of OpenEnv 0.10: the calls of one episode."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: Literal[1] = 1
    turns: list[_TraceTurn]


def _convert_trace(row: Mapping[str, Any], name: str) -> tuple[Trajectory, float]:
    """A trace. Masked tokens are context and not learned. Its score is the last `reward` in the
    metadata of its turns, where an environment has put one.
    """
    try:
        trace = _Trace.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    names = [turn.node_id for turn in trace.turns]
    if len({*names}) < len(names):
        raise ValueError("two of its turns have the same node_id")
    for turn in trace.turns:
        turn.check()
    rewards = [turn.metadata.get("reward") for turn in trace.turns]
    scores = [
        float(one) for one in rewards if isinstance(one, int | float) and not isinstance(one, bool)
    ]
    played = Trajectory(
        name,
        Task("openenv", 0, {}, name),
        tuple(_turns(trace.turns)),
        Terminated(),
        tuple(_messages(trace.turns)),
    )
    return played, scores[-1] if scores else nan


def _turns(calls: Sequence[_TraceTurn]) -> Iterator[Turn]:
    """A turn for each run of trained tokens, with the masked tokens before it as its prompt.

    Example: a call with the prompt p p and the answer a a b a, where the mask leaves b out, gives
    two turns: the prompt p p with the answer a a, and then the prompt b with the answer a.
    """
    seen, context, forked, any_yet = list[int](), list[int](), False, False
    for call in calls:
        prompt = call.prompt_token_ids
        if seen and prompt[: len(seen)] == seen:
            context += prompt[len(seen) :]
        else:  # it does not extend the call before, so the whole prompt is new
            context, forked = [*prompt], any_yet
        seen = [*prompt, *call.completion_token_ids]
        masks = call.loss_mask[len(prompt) :]
        sampled = zip(masks, call.completion_token_ids, call.per_token_logps, strict=True)
        for trained, run in groupby(sampled, lambda one: one[0]):
            _, tokens, logprobs = zip(*run, strict=True)
            if not trained:
                context += tokens
                continue
            completion = Completion(
                ints(tokens),
                floats(logprobs),
                ints([0] * len(tokens)),
                "length" if call.choice.get("finish_reason") == "length" else "stop",
            )
            yield Turn(ints(context), completion, 0.0, {}, forked)
            context, forked, any_yet = [], False, True


def _messages(calls: Sequence[_TraceTurn]) -> Iterator[Message]:
    """What was said, as far as the trace has kept requests and replies."""
    shown = 0
    for call in calls:
        asked = call.request.get("messages")
        new = read_chat(asked)[shown:] if is_chat(asked) else ()
        yield from (replace(message, given=message.role == "assistant") for message in new)
        reply = call.choice.get("message")
        said: Sequence[Message] = ()
        if isinstance(reply, Mapping):
            # A message needs a content, also where the model only called tools.
            present = {key: value for key, value in reply.items() if value is not None}
            said = read_chat([{"role": "assistant", "content": "", **present}])
        learned = any(call.loss_mask)
        yield from (replace(message, given=not learned) for message in said)
        shown += len(new) + len(said)
