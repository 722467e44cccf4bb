"""YAML as agentrl reads and writes it. Config files, saved configs, overrides and options on the
command line all come through here, so that the same text is the same value everywhere, and a saved
value is read back as it was.

A value is text, a number, true, false, null, a list, or a mapping with texts as keys: what JSON has
too. Scalars without quotes are read as by YAML 1.2, whatever PyYAML was built with, with YAML 1.1's
words for true and false:

    1e-3  .5  1_000  0x1F  0o17   numbers            '1e-3'  "007"         text: quotes make a text
    .inf  .nan                    floats             inf  nan  12:30       text
    yes  on  True                 true               2026-11-25            text: JSON has no dates
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from agentrl.errors import ConfigError
from agentrl.settings.faults import DEEPEST

_CORE = "tag:yaml.org,2002:"
_WORDS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(
        r"(?:(?:yes|true|on|no|false|off)|(?:Yes|True|On|No|False|Off)"
        r"|(?:YES|TRUE|ON|NO|FALSE|OFF))\Z"
    ),
    "int": re.compile(r"(?:[-+]?[0-9]+(?:_[0-9]+)*|[-+]?0(?:x[0-9a-fA-F]+|o[0-7]+|b[01]+))\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""The types of a scalar without quotes, in this order; anything else is text."""
_MERGE = "<<"
_TOO_DEEP = f"more than {DEEPEST} levels of lists and mappings in each other"


# libyaml's is ten times as fast.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Reader(_SafeLoader):  # type: ignore[misc]
    # PyYAML's own name, without its rules of YAML 1.1.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


class _Writer(yaml.SafeDumper):
    """Quotes whatever these rules, or those of YAML 1.1, would not read as the text that it is."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _LineWriter(_Writer):
    """Escapes line breaks and whatever else a terminal does not show."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(_CORE + "str", data, style=None if data.isprintable() else '"')


_LineWriter.add_representer(str, _LineWriter.represent_str)
for _tag, _pattern in _WORDS.items():
    _Reader.add_implicit_resolver(_CORE + _tag, _pattern, None)
    _Writer.add_implicit_resolver(_CORE + _tag, _pattern, None)


def read_yaml(text: str | bytes, where: str) -> yaml.Node | None:
    """The tree of a YAML text, in which keys are unique texts and merges (`<<: *base`) are done;
    None if it is empty.

    Raises:
        ConfigError: it is no YAML, or holds what is no value of settings. Begins with `where` and
            the line, unless `where` is empty.
    """
    if isinstance(text, str) and not text.isascii():
        check_encodes(text, where)
    try:
        root = yaml.compose(text, Loader=_Reader)
    except yaml.reader.ReaderError as error:
        character = f"0x{error.character:x}, character {error.position}: {error.reason}"
        raise ConfigError(f"{where} cannot be read as YAML: {character}".strip()) from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"{_prefix(where, error.problem_mark)}this is not YAML: {_explain(error, text)}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{_prefix(where, None)}{_TOO_DEEP}") from error
    return None if root is None else _Tree(where).plain(root, ())


def read_value(text: str) -> Any:
    """The value of a text on the command line: what it is behind `key: ` in a line of a file.

    Raises:
        ConfigError: it could not stand there.
    """
    root = read_yaml(f"v: {text}", "")
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    if len(pairs) != 1:
        raise ConfigError("it has several lines")
    node: yaml.Node = pairs[0][1]
    if isinstance(node, yaml.ScalarNode) and node.style not in {"|", ">"} and node.end_mark.line:
        raise ConfigError("it has several lines, which would become one")
    end = max(node.end_mark.index - len("v: "), 0)
    if rest := text[end:].strip():
        raise ConfigError(f"{rest!r} would be left out as a comment")
    return value_of(node)


def value_of(node: yaml.Node) -> Any:
    """The value of a node in the tree of `read_yaml`."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: value_of(inner) for key, inner in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [value_of(inner) for inner in node.value]
    return _scalar(node.tag.removeprefix(_CORE), node.value)


def to_yaml(value: Any) -> str:
    """The YAML text of a value; `read_yaml` reads the same one back."""
    return yaml.dump(value, Dumper=_Writer, sort_keys=False)


def in_yaml(value: Any) -> str:
    """The value in one line, as an override would write it."""
    text = yaml.dump(
        value,
        Dumper=_LineWriter,
        sort_keys=False,
        default_flow_style=True,
        allow_unicode=True,
        width=math.inf,
    )
    return text.removesuffix("...\n").rstrip("\n")


def check_encodes(text: str, where: str) -> None:
    """Check that a text can be a value of settings.

    Raises:
        ConfigError: it is not text in UTF-8. Begins with `where`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} has {text[error.start]!r}, a byte that is no UTF-8 or half of a surrogate"
            " pair: rename the file, or write the text in UTF-8".strip()
        ) from error


def _scalar(kind: str, text: str) -> Any:
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() in {"yes", "true", "on"}
        case "int":
            digits = text.lstrip("+-")
            sign = -1 if text.startswith("-") else 1
            base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2].lower(), 10)
            return sign * int(digits, base)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Tree:
    """Checks the nodes of a YAML text, and turns them into a tree."""

    def __init__(self, where: str) -> None:
        self._where = where

    def plain(self, node: yaml.Node, inside: tuple[yaml.Node, ...]) -> yaml.Node:
        """The node without merges. `inside`: the nodes that it stands in."""
        if any(node is one for one in inside):
            raise self._error_at(node, "an anchor that holds itself: write the value out")
        if len(inside) > DEEPEST:
            raise self._error_at(node, _TOO_DEEP)
        within = (*inside, node)
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, "map")
            pairs = [(key, self.plain(inner, within)) for key, inner in self._pairs(node, within)]
            return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq")
            items = [self.plain(inner, within) for inner in node.value]
            return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
        self._check_scalar(node)
        return node

    def _pairs(
        self, node: yaml.MappingNode, within: tuple[yaml.Node, ...]
    ) -> list[tuple[yaml.Node, yaml.Node]]:
        """The keys and values of a mapping: first what is merged into it, as far as it does not
        write that itself.
        """
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merges = 0
        for key, inner in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error_at(key, "a key that is a list or a mapping: write a text")
            self._check_scalar(key)
            if key.value == _MERGE and not key.style:
                merges += 1
                if merges > 1:
                    raise self._error_at(
                        key, f"a second `{_MERGE}`: write `{_MERGE}: [*one, *other]`"
                    )
                for base in self._bases(inner, within):
                    for one, value in self._pairs(base, (*within, base)):
                        merged.setdefault(one.value, (one, value))
            elif key.value in own:
                first = own[key.value][0].start_mark.line + 1
                raise self._error_at(
                    key,
                    f"{key.value!r} for the second time, after line {first}: leave one of them out",
                )
            elif not key.value and not key.style:
                raise self._error_at(key, "a value without a key")
            else:
                own[key.value] = key, inner
        return list({**merged, **own}.values())

    def _bases(self, node: yaml.Node, within: tuple[yaml.Node, ...]) -> Iterator[yaml.MappingNode]:
        """The mappings that `<<` names."""
        for base in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(base, yaml.MappingNode):
                raise self._error_at(
                    base,
                    f"`{_MERGE}` without a mapping: write `{_MERGE}: *name`, after `&name {{...}}`",
                )
            if any(base is one for one in within):
                raise self._error_at(base, "an anchor that holds itself: write the value out")
            yield base

    def _check_scalar(self, node: yaml.Node) -> None:
        kind = node.tag.removeprefix(_CORE)
        if kind not in {*_WORDS, "str"}:
            raise self._wrong_tag(node)
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise self._error_at(
                node, f"{node.value!r:.80}, which has half of a surrogate pair and is no text"
            )
        if kind != "str" and not _WORDS[kind].match(node.value):
            raise self._error_at(node, f"{node.value!r:.80}, which is no {kind}")
        try:
            value = _scalar(kind, node.value)
        except ValueError as error:  # thousands of digits
            raise self._error_at(node, f"a number that is too long: {error}") from error
        if isinstance(value, float) and math.isinf(value) and "inf" not in node.value.lower():
            raise self._error_at(
                node, f"{node.value:.80}, which is too large a number: put quotes around a text"
            )

    def _check_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != _CORE + kind:
            raise self._wrong_tag(node)

    def _wrong_tag(self, node: yaml.Node) -> ConfigError:
        tag = node.tag.replace(_CORE, "!!", 1)
        return self._error_at(
            node,
            f"the tag {tag}: settings are text, numbers, true, false, null, lists and mappings",
        )

    def _error_at(self, node: yaml.Node, what: str) -> ConfigError:
        return ConfigError(f"{_prefix(self._where, node.start_mark)}{what}")


def _prefix(where: str, mark: yaml.Mark | None) -> str:
    line = "" if mark is None else f":{mark.line + 1}"
    return f"{where}{line}: " if where else ""


def _explain(error: yaml.MarkedYAMLError, text: str | bytes) -> str:
    problem = str(error.problem)
    begins = _character_at(text, error.problem_mark) if "cannot start any token" in problem else ""
    if begins == "\t" or any(sign in problem for sign in ("\\t", "\t", "tab character")):
        return "a tab begins a line or a value: indent by spaces"
    if begins in {"%", "@", "`"}:
        return f"{begins} begins a value: put the value in quotes"
    if error.context is None:
        return problem
    begun = error.context_mark.line if error.context_mark else 0
    return f"{error.context}{f' of line {begun + 1}' if begun else ''}, {problem}"


def _character_at(text: str | bytes, mark: yaml.Mark | None) -> str:
    """The character that a mark is at; the parser in C does not name it."""
    if mark is None:
        return ""
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    lines = whole.splitlines(keepends=True)
    line = lines[mark.line] if mark.line < len(lines) else ""
    return line[mark.column : mark.column + 1]
