"""`RowReader`: what a row of data is as a task: its options, its id and its seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from agentrl.conversation.chats import as_json, is_chat, question_of, read_chat, written_chat
from agentrl.settings.base import Settings
from agentrl.tasks.columns import advice, column, format_names
from agentrl.tasks.pictures import placed_pictures
from agentrl.tasks.rows import BadRowError
from agentrl.tasks.template import RowTemplate


class RowSettings(Settings):
    """The meaning of the data's columns."""

    columns: dict[str, str] = Field(default_factory=dict)
    """The columns of the data by meaning: `{prompt: question, answer: reward_model.ground_truth}`.
    A dot goes into a column of mappings or a list (`messages.0.content`). Only these are then read;
    by default all are, by their own names."""
    prompt: str | None = None
    """A template of the prompt, over the data's columns: `"{question}\\n{choices | lettered}"`.
    With `{{` or `{%` it is one of Jinja, in a sandbox. By default the prompt is the column
    `prompt`."""
    answer: str | None = None
    """The same for the right answer, such as `"{answer | final}"`, the result that a solution ends
    with; by default the column `answer`."""

    @field_validator("prompt", "answer", mode="before")
    @classmethod
    def _read_braces(cls, given: Any) -> Any:
        """`tasks.prompt={question}` is a mapping in YAML."""
        if isinstance(given, dict) and len(given) == 1 and next(iter(given.values())) is None:
            return f"{{{next(iter(given))}}}"
        return given

    @field_validator("prompt", "answer")
    @classmethod
    def _check_template(cls, template: str | None) -> str | None:
        if template is not None:
            RowTemplate(template)
        return template


class RowTask(NamedTuple):
    """A row as a task. `named` is its id and `seed` its seed, where it has them."""

    options: dict[str, Any]
    named: Any
    seed: int | None


@dataclass(frozen=True)
class RowReader:
    """Reads rows as `settings` say, for an environment whose options have this `shape`, if it says.

    An option that is null is as if left out where it has another default. If there is an option
    `prompt`, a chat may stand there: what was asked last is then the question, and what was
    answered to that the right answer, unless a column has it.
    """

    settings: RowSettings
    shape: type[Settings] | None = None

    @cached_property
    def _templates(self) -> Mapping[str, RowTemplate]:
        given = {"prompt": self.settings.prompt, "answer": self.settings.answer}
        return {name: RowTemplate(text) for name, text in given.items() if text is not None}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are needed of a row; () for all."""
        named = [template.columns for template in self._templates.values()]
        if not self.settings.columns or None in named:
            return ()
        return (*self.settings.columns.values(), *(path for paths in named for path in paths or ()))

    def read(self, row: Mapping[str, Any], folder: Path | None = None) -> RowTask:
        """The task of a row. `folder`: where its pictures are, if it names files.

        Raises:
            BadRowError: a column is missing, or a special one is not what it must be.
        """
        columns = self.settings.columns
        options = (
            {name: column(row, path) for name, path in columns.items()} if columns else dict(row)
        )
        named = options.pop("id", None)
        seed = options.pop("seed", None)
        more = options.pop("options", None) or {}
        options |= {
            name: template.of({**options, **row}) for name, template in self._templates.items()
        }
        if not isinstance(more, Mapping):
            raise BadRowError(
                f"its options are {more!r:.80}, not a mapping of the environment's options, and the"
                f" columns are {format_names(row)}: {advice(row)}"
            )
        options = {**more, **options}
        fields = {} if self.shape is None else self.shape.model_fields
        if "prompt" in fields:
            options = _parse_written_chat(options)
            if "images" in fields:
                options = placed_pictures(options, folder)
            options |= _split_chat(options)
        for name in [name for name, value in options.items() if value is None and name in fields]:
            if not fields[name].is_required() and fields[name].default is not None:
                del options[name]
        return RowTask(options, named, _checked_seed(seed))


def _parse_written_chat(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a chat that is written as a text."""
    prompt = options.get("prompt")
    try:
        chat = written_chat(prompt) if isinstance(prompt, str) else None
    except ValueError as error:
        raise BadRowError(f"prompt: {error}") from error
    return options if chat is None else {**options, "prompt": chat}


def _split_chat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt of a task whose prompt is a chat, and its answer; nothing for others."""
    chat = options.get("prompt")
    if not is_chat(chat):
        return {}
    try:
        asked, answered = question_of(read_chat(chat, pictures=True))
    except ValueError as error:
        raise BadRowError(f"prompt: {error}") from error
    found: dict[str, Any] = {"prompt": [as_json(message) for message in asked]}
    return (
        found
        if answered is None or options.get("answer") is not None
        else {**found, "answer": answered}
    )


def _checked_seed(seed: Any) -> int | None:
    if isinstance(seed, str) and seed.isdecimal():
        seed = int(seed)
    if seed is not None and (
        not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63
    ):
        raise BadRowError(
            f"its seed is {seed!r:.80}, not a whole number from 0 to 2^63 - 1: if this column is"
            " something else, name the columns that are needed in tasks.columns"
        )
    return seed
