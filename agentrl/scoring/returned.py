"""Reads what a reward has returned: numbers of any library become floats, and everything that is no
score is rejected, with an error that names it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.errors import ScoreError
from agentrl.settings.base import LARGEST
from agentrl.tokens.arrays import dimensions_of, read_number
from agentrl.trajectory import Failed, Score


def as_score(returned: Any, turns: int | None = None) -> Score:
    """A reward's verdict on one trajectory, of so many turns.

    Raises:
        ScoreError: it is neither a number nor a valid `Score`; says what it is, and what to return.
    """
    if not isinstance(returned, Score):
        return Score(finite(_number(returned, "the reward returned", _ADVICE)))
    if isinstance(returned.status, Failed):
        explanations = dict(returned.explanations)
        return replace(returned, parts=dict(returned.parts), explanations=explanations)
    value = finite(_number(returned.value, "the reward returned a Score with the value"))
    texts = _check_mapping(returned.explanations, "explanations")
    explanations = {name: str(text) for name, text in texts.items()}
    parts: dict[str, float] = {}
    for name, part in _check_mapping(returned.parts, "parts").items():
        number = _number(part, f"the reward returned a Score with the part {name!r},")
        parts[name] = finite(number, where=f" for the part {name!r}")
    earned = turn_rewards(returned.turns)
    if turns is not None and len(earned) > turns:
        raise ScoreError(
            f"the reward returned a Score with {len(earned)} turns for an episode of {turns}"
        )
    success = None if returned.success is None else read_number(returned.success)
    if returned.success is not None and success not in (0.0, 1.0):
        raise ScoreError(
            f"the reward returned a Score with the success {_describe_value(returned.success)}; "
            "write True or False"
        )
    verdict = None if success is None else bool(success)
    # The mappings are new ones: a reward may use one for all that it scores.
    return replace(
        returned,
        value=value,
        parts=parts,
        turns=earned,
        explanations=explanations,
        success=verdict,
    )


def as_scores(returned: Any, turns: Sequence[int]) -> list[Score]:
    """A reward's verdicts on the trajectories of a group, which have so many turns.

    Raises:
        ScoreError: they are no sequence of that many scores.
    """
    # An array of numbers.
    listed = returned.tolist() if dimensions_of(returned) == 1 else returned
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise ScoreError(
            f"score_group returned {_describe_value(returned)}; return a list with one Score or "
            "number for each trajectory, in their order"
        )
    if len(listed) != len(turns):
        raise ScoreError(f"score_group returned {len(listed)} scores for {len(turns)} trajectories")
    return [as_score(score, count) for score, count in zip(listed, turns, strict=True)]


def turn_rewards(returned: Any) -> tuple[float, ...]:
    """The rewards of single turns.

    Raises:
        ScoreError: it is no sequence of finite numbers.
    """
    listed = returned.tolist() if dimensions_of(returned) == 1 else returned
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise ScoreError(
            f"the reward returned {_describe_value(returned)} for its turns; return a tuple of "
            "numbers"
        )
    # The environment's own are plain floats, and many: they are read as an array.
    if set(map(type, listed)) <= {float}:
        return finite_all(listed)
    return finite_all([_number(one, "the reward returned for a turn") for one in listed])


def own_metrics(returned: Any) -> dict[str, float]:
    """A reward's own metrics; what is no finite number is left out.

    Raises:
        ScoreError: it is no mapping.
    """
    found = {}
    for name, value in _check_mapping(returned, "metrics").items():
        number = read_number(value)
        if number is not None and math.isfinite(number):
            found[name] = number
    return found


_ADVICE = "return a Score or a number, or raise RewardError"


def _number(value: Any, what: str, advice: str = "write a number") -> float:
    number = read_number(value)
    if number is None:
        more = ""
        if isinstance(value, Mapping):
            more = ": its parts go into Score(value, parts)"
        elif isinstance(value, tuple | list):
            more = ": a score has one value, Score(value, parts, turns=...)"
        raise ScoreError(f"{what} {_describe_value(value)}{more}; {advice}")
    return number


def finite(value: float, what: str = "the reward returned", where: str = "") -> float:
    """A number that can be learned from.

    Raises:
        ScoreError: it is not finite, or too large; `what` begins the sentence.
    """
    if not math.isfinite(value):
        shown = "NaN" if math.isnan(value) else value
        raise ScoreError(
            f"{what} {shown}{where}; a score and its parts must be finite numbers: if it cannot"
            " score, raise RewardError or return Score.failed(why)"
        )
    if abs(value) > LARGEST:
        raise ScoreError(
            f"{what} {value:g}{where}, which is too large to learn from: a score and its parts are"
            f" at most {LARGEST:g}"
        )
    return value


def finite_all(values: Sequence[float], what: str = "the reward returned") -> tuple[float, ...]:
    """Numbers that can be learned from.

    Raises:
        ScoreError: as `finite`, of the first that is not finite, or too large.
    """
    if not np.all(np.abs(np.asarray(values)) <= LARGEST):  # nor is NaN
        for value in values:
            finite(value, what)
    return tuple(values)


def _check_mapping(returned: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise ScoreError(
            f"the reward returned {_describe_value(returned)} for its {what}; write a dict by name"
        )
    return returned


def _describe_value(value: Any) -> str:
    """The name of a value's kind, for an error."""
    if value is None:
        return "None"
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Sequence | Mapping):
        return f"a {type(value).__name__}"
    return (
        f"{value!r:.80}"
        if isinstance(value, str | bytes)
        else f"{value!r:.80} (a {type(value).__name__})"
    )
