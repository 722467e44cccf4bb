"""How a program ended: what it says that it earned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import EnvError
from agentrl.trajectory import Failed, Score


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """How a program ended: the reward that it earned, if it says so, and more about that.

    Without a reward, the run's own rewards are all there is. `parts`: named parts of it, for the records.
    """

    reward: float | None = None
    success: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, Any]:
        """What the last turn's info says of it."""
        known = {} if self.success is None else {"success": self.success}
        return {**known, **{f"reward/{name}": value for name, value in self.parts.items()}}


def outcome_of(result: object, name: str) -> AgentOutcome:
    """What a program returned, as an outcome: nothing, a number, a `Score`, or a mapping with `reward` and `success`.

    Raises:
        EnvError: it is something else, or no finite number.
    """
    if isinstance(result, AgentOutcome) or result is None:
        return result or AgentOutcome()
    if isinstance(result, Score):
        if isinstance(result.status, Failed):
            raise EnvError(f"{name} returned a failed score: {result.status.error}")
        return AgentOutcome(_finite(result.value, name), None, dict(result.parts))
    if isinstance(result, dict):
        if unknown := sorted(result.keys() - {"reward", "success", "parts"}):
            raise EnvError(f"{name} returned {', '.join(unknown)}: write reward, success and parts")
        reward, success = result.get("reward"), result.get("success")
        parts = {str(part): _finite(value, name) for part, value in dict(result.get("parts") or {}).items()}
        return AgentOutcome(
            None if reward is None else _finite(reward, name), None if success is None else bool(success), parts
        )
    return AgentOutcome(_finite(result, name))


def _finite(value: object, name: str) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        raise EnvError(
            f"{name} returned {value!r:.80} for its reward: return a finite number, an agentrl.Score, a dict with "
            "`reward` and `success`, or None if the run has rewards of its own"
        )
    return float(value)
