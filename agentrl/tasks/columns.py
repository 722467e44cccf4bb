"""The columns of a row: one by its path, and which of them are most likely the question and its
answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl import plugins
from agentrl.tasks.rows import BadRowError

_QUESTIONS = (
    "prompt",
    "question",
    "problem",
    "instruction",
    "query",
    "input",
    "goal",
    "messages",
    "conversations",
    "conversation",
    "dialog",
    "dialogue",
    "task",
    "text",
    "inputs",
    "request",
    "ctx",
)
_ANSWERS = (
    "answer",
    "finalanswer",
    "groundtruth",
    "expectedanswer",
    "referenceanswer",
    "correctanswer",
    "answerkey",
    "answers",
    "solution",
    "target",
    "targets",
    "label",
    "gold",
    "correct",
    "output",
    "response",
    "completion",
    "reference",
    "outputs",
)
"""Names of columns without capitals and what joins words, those that say most first."""
_CHOICES = ("choices", "options", "endings", "candidates")
_CONTEXTS = ("context", "passage", "article", "paragraph", "document", "story", "background")
_MAX_DEPTH = 3
"""The depth of the search in columns of mappings."""
_MAX_LISTED_COLUMNS = 30
"""Columns that a message names."""
_LONGEST_NAME = 60


def column(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, where a dot goes into a mapping or a list:
    `reward_model.ground_truth`, `turns.-1.text`.

    Raises:
        BadRowError: there is none.
    """
    if path in row:
        return row[path]
    outer, _, inner = path.partition(".")
    if inner and outer in row:
        return _value_inside(row[outer], inner, outer)
    raise BadRowError(
        f"no column {path!r}.{plugins.nearest(path, row)} There are {format_names(row)}"
    )


def _value_inside(value: Any, path: str, said: str) -> Any:
    if isinstance(value, Mapping):
        if path in value:
            return value[path]
        step, _, rest = path.partition(".")
        if step in value:
            return _value_inside(value[step], rest, f"{said}.{step}") if rest else value[step]
        raise BadRowError(
            f"column {said!r} has no {step!r}.{plugins.nearest(step, value)} It has "
            f"{format_names(value)}"
        )
    step, _, rest = path.partition(".")
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and step.removeprefix("-").isdecimal()
    ):
        if not -len(value) <= int(step) < len(value):
            raise BadRowError(
                f"column {said!r} has {len(value)} entries, and none has the number {step}"
            )
        return _value_inside(value[int(step)], rest, f"{said}.{step}") if rest else value[int(step)]
    raise BadRowError(f"column {said!r} is {type(value).__name__}, which has no {step!r} in it")


def format_names(columns: Mapping[str, Any]) -> str:
    """The names of columns, for people."""
    short = (
        name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..." for name in columns
    )
    names = [name or "(one without a name)" for name in short]
    more = (
        f" and {len(names) - _MAX_LISTED_COLUMNS} more" if len(names) > _MAX_LISTED_COLUMNS else ""
    )
    return (", ".join(names[:_MAX_LISTED_COLUMNS]) or "none") + more


def answer_advice(row: Mapping[str, Any]) -> str:
    """The settings that make a column of the row, if any, the right answer."""
    path = _answer_column(row)
    return f"write tasks.columns={{prompt: prompt, answer: {path}}}" if path else ""


def advice(row: Mapping[str, Any]) -> str:
    """The settings by which a row's columns are read as a question and its answer."""
    answer = _answer_column(row)
    if template := _template(row):
        also = f" and tasks.columns={{answer: {answer}}}" if answer else ""
        return f"write 'tasks.prompt={template}'{also}"
    if {"chosen", "rejected"} <= row.keys():
        return "these are preferences, which recipe=dpo learns from (recipe.preferences.path)"
    question = next(
        (path for path, value in _find_columns(row, _QUESTIONS) if isinstance(value, str | list)),
        None,
    )
    tables = [
        name
        for name, value in row.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping)
    ]
    if question is None and tables:
        return (
            f"{tables[0]} is a list of objects, and a task is one row: write a row for each of them"
        )
    if question is None and any(_is_no_name(name) for name in row):
        return "these are no names of columns: a file of fields begins with a line that names them"
    also = f", answer: {answer}" if answer and answer != question else ""
    return (
        "write tasks.columns={prompt:"
        f" {question or 'COLUMN'}{also if question else ', answer: COLUMN'}}}"
    )


def _template(row: Mapping[str, Any]) -> str:
    """A prompt of more than one column, for tasks with choices, a text to read, or an input; else
    nothing.
    """
    question = next(
        (path for path, value in _find_columns(row, _QUESTIONS) if isinstance(value, str)), ""
    )
    if not question:
        return ""
    context = next((path for path, _ in _find_columns(row, _CONTEXTS) if path != question), "")
    choices = _choices_template(row)
    second = "input" if question == "instruction" and isinstance(row.get("input"), str) else ""
    parts = [f"{{{name}}}" for name in (context, question, second) if name]
    if len(parts) == 1 and not choices:
        return ""
    return '"' + "\\n\\n".join(parts) + (f"\\n{choices}" if choices else "") + '"'


def _choices_template(row: Mapping[str, Any]) -> str:
    """The choices of a row as a template writes them."""
    if all(isinstance(row.get(letter), str) for letter in "ABCD"):
        return "\\n".join(f"{letter}. {{{letter}}}" for letter in "ABCDEFGHIJ" if letter in row)
    for path, value in _find_columns(row, _CHOICES):
        texts = f"{path}.text" if isinstance(value, Mapping) and "text" in value else path
        if isinstance(column(row, texts), list | tuple):
            return f"{{{texts} | lettered}}"
    return ""


def _answer_column(row: Mapping[str, Any]) -> str:
    for path, value in _find_columns(row, _ANSWERS):
        if isinstance(value, Mapping):  # the answers of SQuAD
            if "text" in value:
                return f"{path}.text"
        elif value is not None:
            return path
    return ""


def _find_columns(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(path, value) of the columns with one of these names, in their order: those of the row before
    those inside.
    """
    columns = dict(row)
    for _ in range(_MAX_DEPTH):
        for name in names:
            yield from (
                (path, value) for path, value in columns.items() if _normalise_name(path) == name
            )
        # Breadth first: a column of the row wins over one inside of another.
        inner_columns = {}
        for outer, value in columns.items():
            if isinstance(value, Mapping):
                for inner, inner_value in value.items():
                    inner_columns[f"{outer}.{inner}"] = inner_value
        columns = inner_columns


def _normalise_name(path: str) -> str:
    """The last name of a path without case and punctuation: `finalanswer` of `a.Final_Answer`."""
    return "".join(filter(str.isalnum, path.rpartition(".")[2].casefold()))


def _is_no_name(name: str) -> bool:
    return (
        not name
        or len(name) > _LONGEST_NAME
        or name.endswith(("?", "."))
        or name.replace(".", "").isdecimal()
    )
