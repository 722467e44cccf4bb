"""`RowTemplate`: a text made of the columns of a row, such as a prompt with its choices.

    tasks:
      data: mmlu.parquet
      prompt: "{question}\\n{choices | lettered}\\nAnswer with a letter."

`{column}` stands for a column, where a dot goes inside. `lettered` writes choices, and `final` is
the result that a solution ends with. A text with `{{` or `{%` is a template of Jinja, which knows
the columns as variables (and as `row["any name"]`) and runs in a sandbox: it reaches no code but
what it is made of.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from string import ascii_uppercase
from typing import Any

from agentrl import plugins
from agentrl.tasks.columns import column, format_names
from agentrl.tasks.rows import BadRowError

_FIELD = re.compile(r"\{\s*([^\W\d][^{}|\n]*?)\s*(?:\|\s*(\w+)\s*)?\}")
"""A column in braces, with a filter or without. `{}`, `{1}` and `{"a": 1}` are text."""


class RowTemplate:
    """A text with columns in it.

    Raises:
        ValueError: the text is no template, or has an unknown filter.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_jinja = "{{" in text or "{%" in text
        if self._is_jinja:
            _ = self._template
        elif unknown := [name for _, name in _FIELD.findall(text) if name not in ("", *_FILTERS)]:
            raise ValueError(
                f"there is no filter {unknown[0]!r}.{plugins.nearest(unknown[0], _FILTERS)}"
            )

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns that it names, by their paths; None if these are known only for a row."""
        if not self._is_jinja:
            return frozenset(path for path, _ in _FIELD.findall(self._text))
        from jinja2 import meta

        named = meta.find_undeclared_variables(_environment().parse(self._text))
        return None if "row" in named else frozenset(named)

    def of(self, row: Mapping[str, Any]) -> str:
        """The text for a row, without space around it: a column may be empty.

        Raises:
            BadRowError: a column is missing, or the template fails.
        """
        if not self._is_jinja:
            return _FIELD.sub(lambda found: self._field(row, found), self._text).strip()
        from jinja2 import TemplateError

        try:
            return str(self._template.render({**row, "row": row})).strip()
        except TemplateError as error:
            raise BadRowError(
                f"its template fails: {error}. The columns are {format_names(row)}"
            ) from error
        except Exception as error:  # whatever the operations of a template raise on a row's values
            raise BadRowError(f"its template fails: {type(error).__name__}: {error}") from error

    def _field(self, row: Mapping[str, Any], found: re.Match[str]) -> str:
        try:
            value = column(row, found[1])
        except BadRowError as error:
            raise BadRowError(
                f"{error}. Braces that are text need a template of Jinja: {{{{ column }}}}"
            ) from error
        return str(_show_value(_FILTERS[found[2]](value) if found[2] else value))

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateError

        try:
            return _environment().from_string(self._text)
        except TemplateError as error:
            raise ValueError(f"it is no template of Jinja: {error}") from error


def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_show_value)
    made.filters.update(_FILTERS)
    return made


def lettered(choices: Any) -> str:
    """The choices of a question on lines of their own, after A., B., C., ..."""
    if isinstance(choices, Mapping) and isinstance(choices.get("text"), list | tuple):
        choices = choices["text"]
    if not isinstance(choices, list | tuple) or len(choices) > len(ascii_uppercase):
        raise BadRowError(
            f"`lettered` takes a list of at most {len(ascii_uppercase)} choices, got"
            f" {choices!r:.80}"
        )
    return "\n".join(
        f"{letter}. {_show_value(choice)}"
        for letter, choice in zip(ascii_uppercase, choices, strict=False)
    )


def final(solution: Any) -> str:
    """The result that a solution ends with: what follows its last `####`, or stands in its last
    `\\boxed{}`.
    """
    text = str(_show_value(solution))
    if "####" in text:
        return text.rpartition("####")[2].strip()
    start = text.rfind(_BOX)
    if start < 0:
        raise BadRowError(f"`final` finds neither #### nor {_BOX}}} in {text!r:.80}")
    depth = 0
    for place, letter in enumerate(text[start:], start):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "}" and not depth:
            return text[start + len(_BOX) : place].strip()
    raise BadRowError(f"`final` finds no end of the last {_BOX}}} in {text!r:.80}")


_BOX = r"\boxed{"
_FILTERS = {"lettered": lettered, "final": final}


def _show_value(value: Any) -> Any:
    """A value as it stands in a text: lists and mappings as JSON, and nothing for null."""
    if value is None:
        return ""
    return (
        json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list | tuple | Mapping)
        else value
    )
