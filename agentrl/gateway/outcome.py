"""The outcome of a program: the reward that it reports."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.errors import EnvError
from agentrl.trajectory import Failed, Score

LONGEST_REWARD = 1 << 16
"""Bytes of the text that a command writes for its reward."""


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """The outcome of a program: the reward that it earned, if it reports one, and more about that.

    Without a reward, the run's own rewards are all there is. `parts`: named parts of it, for the
    records.
    """

    reward: float | None = None
    success: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, Any]:
        """The entries of the last turn's info about it."""
        known = {} if self.success is None else {"success": self.success}
        return {**known, **{f"reward/{name}": value for name, value in self.parts.items()}}

    def filled_from(self, earlier: "AgentOutcome | None") -> "AgentOutcome":
        """This outcome, if it has a reward; else with that of an earlier one, and with what else
        only that one reports.
        """
        if earlier is None or self.reward is not None:
            return self
        success = earlier.success if self.success is None else self.success
        return AgentOutcome(earlier.reward, success, {**earlier.parts, **self.parts})


def outcome_of(result: object, name: str) -> AgentOutcome:
    """The returned value of a program as an outcome: nothing, a number, a `Score`, or a mapping
    with `reward` and `success`.

    Raises:
        EnvError: it is something else, or no finite number.
    """
    if isinstance(result, AgentOutcome) or result is None:
        return result or AgentOutcome()
    if isinstance(result, Score):
        if isinstance(result.status, Failed):
            raise EnvError(f"{name} returned a failed score: {result.status.error}")
        return AgentOutcome(
            _finite_number(result.value, name),
            result.success,
            {part: _finite_number(value, name) for part, value in result.parts.items()},
        )
    if isinstance(result, dict):
        if unknown := [str(key) for key in result if key not in ("reward", "success", "parts")]:
            raise EnvError(
                f"{name} returned {', '.join(unknown):.200}: write reward, success and parts"
            )
        reward, success, given = (
            result.get("reward"),
            result.get("success"),
            result.get("parts") or {},
        )
        if not isinstance(given, Mapping):
            raise EnvError(
                f"{name} returned {_format_value(given)} for its parts: write names with numbers"
            )
        parts = {str(part): _finite_number(value, name) for part, value in given.items()}
        if not isinstance(success, bool | np.bool_ | None):
            raise EnvError(
                f"{name} returned {_format_value(success)} for its success: return true or false"
            )
        return AgentOutcome(
            None if reward is None else _finite_number(reward, name),
            None if success is None else bool(success),
            parts,
        )
    return AgentOutcome(_finite_number(result, name))


def written_outcome(written: str, command: str) -> AgentOutcome:
    """The outcome that a command has written.

    Raises:
        EnvError: it is none.
    """
    try:
        return outcome_of(json.loads(written), f"the command {command!r:.200}")
    except (RecursionError, ValueError) as error:
        raise EnvError(
            f"the command {command!r:.200} wrote {written!r:.80} for its reward: write a number, or"
            " JSON with `reward` and `success`"
        ) from error


def _finite_number(value: object, name: str) -> float:
    is_none = isinstance(value, bool | str | bytes)
    try:
        number = math.nan if is_none else float(value)  # type: ignore[arg-type]
    except Exception:  # an array, a number beyond all floats, an object of the program's own
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(
            f"{name} returned {_format_value(value)} for its reward: return a finite number, an"
            " agentrl.Score, a dict with `reward` and `success`, or None if the run has"
            " rewards of its own"
        )
    return number


def _format_value(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # an int of too many digits, or an object of the program's own
        return f"an object of type {type(value).__name__}"
