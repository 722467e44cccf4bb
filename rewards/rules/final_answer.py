"""Finds the expression that a message gives as its answer."""

import re
from collections.abc import Iterator

from agentrl.rewards.rules.notation import plain
from agentrl.rewards.rules.units import without_unit

_BOX = re.compile(r"\\f?boxed\s*(?=\{)|\\boxed\s+(?=[\d\w])")
_JOINT = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;!"
    r" ]|\\q?quad\b|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\b[A-Za-z]\s*=)*",
    re.IGNORECASE,
)
_LISTED = re.compile(r"[,;]|and|or", re.IGNORECASE)
_PERCENT = re.compile(r"[\s$]{0,3}\\?%")
_IN_PERCENT = re.compile(r"\s*\\?%\Z")
# math-verify reads one side of these and drops the other.
_ALTERNATIVE = re.compile(
    r"(?<=[\d})])\s*(?:\\mid\b|\\vert\b|\\\||\||\\\\|\\newline\b|[?@#`])\s*(?=[-+\d\\])"
)
# ... and the number of a relation without a left side: "at most 2" would be 2.
_ONE_SIDED = re.compile(
    r"(\A|(?<!\\)\$|\\[(\[])(?=\s*(?:[<>]|\\(?:leq?|geq?|ne|neq|lt|gt|leqslant|geqslant)\b))"
)
_DELIMITED = re.compile(r"(?<!\\)\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DELIMITERS = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_LONE_DOLLAR = re.compile(r"(?<!\\)\$")
_WORDS_AFTER = 40
_DECORATION = " \t\n*`"
# No run of letters other than commands of LaTeX.
_BARE = re.compile(
    r"(?:[^A-Za-z\\]|\\(?:begin|end)\{[A-Za-z]{1,20}\*?\}|\\[A-Za-z]+|\\[^A-Za-z]"
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+"
)
_PIECE = (
    r"(?:\d[\d.,]*|\\(?:frac|sqrt|pi|infty|pm|cdot|times|div)|[-+*/^=(){}]"
    r"|(?<=[\d{)}^])[A-Za-z](?![A-Za-z]))"
)
_FORMULA = re.compile(rf"(?<![\w\\]){_PIECE}(?:[ ]?{_PIECE}){{0,200}}")
_NEEDS_LATEX = re.compile(r"\\|\^|\d[A-Za-z]")


def final_answer(message: str, *, several: bool) -> str | None:
    """The part of a message for math-verify: `$...$` around a single expression; None if there is
    none.

    It is the last `\\boxed{...}`. Boxes with nothing but "and", "or" or a comma between them are a
    list, and so are adjacent ones if the right answer has `several` parts; otherwise the last of
    them counts. Without a box, a message that is nothing but mathematics is the answer, and else
    math-verify looks for the last expression in the text.
    """
    text = plain(message)
    boxes = list(_boxes(text))
    if boxes:
        listed = _final_boxes(text, boxes, several)
        said = ",".join(map(_clean_content, listed)) + (
            "%" if _PERCENT.match(text, boxes[-1][1]) else ""
        )
        return in_dollars(said) if all(map(_clean_content, listed)) else None
    if _DELIMITERS.search(text):
        return _without_dropping(text)
    whole = text.strip(_DECORATION).removesuffix(".").strip(_DECORATION)
    if whole and _BARE.fullmatch(whole):
        return in_dollars(_without_dropping(without_unit(whole)))
    return _FORMULA.sub(_formula_in_dollars, text)


def in_dollars(formula: str) -> str:
    """A formula as LaTeX in a text, with a percent sign behind it: math-verify reads 100/(3/100) in
    `100/3\\%`.
    """
    number = _IN_PERCENT.sub("", formula)
    return f"${number}$" if number == formula else f"${number}$\\%"


def answer_part(message: str) -> str:
    """The part of a message that states the answer: its last box with the words after it, or all of
    it.
    """
    boxes = list(_boxes(message))
    if not boxes:
        return message
    start, end, _ = boxes[-1]
    return (
        message[start:end]
        + re.split(r"[\d\n]|\.\s", message[end : end + _WORDS_AFTER], maxsplit=1)[0]
    )


def last_formula(message: str) -> str | None:
    """What stands between the last pair of LaTeX's delimiters; None without any."""
    found = None
    for found in _DELIMITED.finditer(message):  # noqa: B007  the last one
        pass
    return None if found is None else next(filter(None, found.groups()))


def two_sided(formula: str) -> str:
    """The formula with an x before a relation that has no left side: math-verify reads 2 in
    `\\le 2`.
    """
    return _ONE_SIDED.sub(r"\1x ", formula)


def _without_dropping(text: str) -> str:
    """The text with what math-verify needs to read both sides of a relation, and a comma where it
    would read one of two alternatives.
    """
    text = two_sided(text)
    return text if "\\begin" in text else _ALTERNATIVE.sub(",", text)


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of the outermost boxes that are closed."""
    at = 0
    while (found := _BOX.search(text, at)) is not None:
        inside = found.end()
        if text[inside] != "{":
            yield found.start(), inside + 1, text[inside]
            at = inside + 1
            continue
        end = _find_closing(text, inside)
        if end is None:
            at = inside
        else:
            yield found.start(), end, text[inside + 1 : end - 1]
            at = end


def _find_closing(text: str, start: int) -> int | None:
    """The index of the brace that closes the one at `start`."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return start + brace.end()
    return None


def _final_boxes(text: str, boxes: list[tuple[int, int, str]], several: bool) -> list[str]:
    """The contents of the boxes that are the answer: the last one, or a list that ends with it."""
    last = boxes[-1][2]
    run, listed = [last], False
    for (_, end, content), (start, _, _) in zip(
        reversed(boxes[:-1]), reversed(boxes[1:]), strict=True
    ):
        between = text[end:start]
        if not _JOINT.fullmatch(between):
            break
        run.insert(0, content)
        listed = listed or _LISTED.search(between) is not None
    # The same box twice in a row is said again, and is no list.
    if len(set(map(_clean_content, run))) == 1 or not (several or listed):
        return [last]
    return run


def _clean_content(box: str) -> str:
    """The content of a box, without the boxes and dollars in it."""
    content = plain(_LONE_DOLLAR.sub("", re.sub(r"\\f?boxed\b", "", box)))
    while content.startswith("{") and _find_closing(content, 0) == len(content):
        content = content[1:-1].strip()
    return _without_dropping(without_unit(content.replace("~", " ")))


def _formula_in_dollars(found: re.Match[str]) -> str:
    """A formula in a text, in dollars; math-verify itself reads 2 from a bare `2\\pi`."""
    formula = found[0].rstrip(" .,=")
    rest = found[0][len(formula) :]
    return f"${formula}${rest}" if _NEEDS_LATEX.search(formula) else found[0]
