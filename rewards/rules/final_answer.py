"""Finds the expression that a message gives as its answer."""

import re
from collections.abc import Iterator

from agentrl.rewards.rules.notation import plain

_BOX = re.compile(r"\\f?boxed\s*(?=\{)|\\boxed\s+(?=[\d\w])")
_JOINT = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;! ]|\\q?quad\b|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\b[A-Za-z]\s*=)*",
    re.IGNORECASE,
)
_LISTED = re.compile(r"[,;]|and|or", re.IGNORECASE)
_PERCENT = re.compile(r"[\s$]{0,3}\\?%")
_DELIMITERS = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_LONE_DOLLAR = re.compile(r"(?<!\\)\$")
_DECORATION = " \t\n*`"
# No run of letters other than commands of LaTeX.
_BARE = re.compile(r"(?:[^A-Za-z\\]|\\[A-Za-z]+|\\[^A-Za-z]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+")
_PIECE = r"(?:\d[\d.,]*|\\(?:frac|sqrt|pi|infty|pm|cdot|times|div)|[-+*/^=(){}]|(?<=[\d{)}^])[A-Za-z](?![A-Za-z]))"
_FORMULA = re.compile(rf"(?<![\w\\]){_PIECE}(?:[ ]?{_PIECE}){{0,200}}")
_NEEDS_LATEX = re.compile(r"\\|\^|\d[A-Za-z]")


def final_answer(message: str, *, several: bool) -> str | None:
    """What math-verify is to parse of a message: `$...$` where that is a single expression; None if there is nothing.

    It is the last `\\boxed{...}`. Boxes with nothing but "and", "or" or a comma between them are a list, and so are
    adjacent ones if the right answer has `several` parts; otherwise the last of them counts. Without a box, a message
    that is nothing but mathematics is the answer, and else math-verify looks for the last expression in the text.
    """
    text = plain(message)
    boxes = list(_boxes(text))
    if boxes:
        listed = _last_boxes(text, boxes, several)
        sign = "\\%" if _PERCENT.match(text, boxes[-1][1]) else ""
        return f"${','.join(map(_content, listed))}{sign}$" if all(map(_content, listed)) else None
    if _DELIMITERS.search(text):
        return text
    whole = text.strip(_DECORATION).removesuffix(".").strip(_DECORATION)
    if whole and _BARE.fullmatch(whole):
        return f"${whole}$"
    return _FORMULA.sub(_as_latex, text)


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of the outermost boxes that are closed."""
    at = 0
    while (found := _BOX.search(text, at)) is not None:
        inside = found.end()
        if text[inside] != "{":
            yield found.start(), inside + 1, text[inside]
            at = inside + 1
            continue
        end = _closing(text, inside)
        if end is None:
            at = inside
        else:
            yield found.start(), end, text[inside + 1 : end - 1]
            at = end


def _closing(text: str, start: int) -> int | None:
    """Where the brace that opens at `start` is closed."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return start + brace.end()
    return None


def _last_boxes(text: str, boxes: list[tuple[int, int, str]], several: bool) -> list[str]:
    last = boxes[-1][2]
    run, listed = [last], False
    for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[end:start]
        if not _JOINT.fullmatch(between):
            break
        run.insert(0, content)
        listed = listed or _LISTED.search(between) is not None
    if len(set(map(_content, run))) == 1 or not (several or listed):
        return [last]
    return run


def _content(box: str) -> str:
    """What stands in a box, without the boxes and dollars in it."""
    content = plain(_LONE_DOLLAR.sub("", re.sub(r"\\f?boxed\b", "", box)))
    while content.startswith("{") and _closing(content, 0) == len(content):
        content = content[1:-1].strip()
    return content


def _as_latex(found: re.Match[str]) -> str:
    """A formula in a text, in dollars; math-verify itself reads 2 from a bare `2\\pi`."""
    formula = found[0].rstrip(" .,=")
    rest = found[0][len(formula) :]
    return f"${formula}${rest}" if _NEEDS_LATEX.search(formula) else found[0]
