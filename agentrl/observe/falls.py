"""Alarms from the history of steps: gradients that explode, success that
is lost, rewards that rise alone.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from statistics import fmean, median, pstdev
from typing import Any

Row = Mapping[str, Any]
_WINDOW = 50
"""Steps that are remembered."""
_BEFORE = 5
"""Steps before a change that it is compared with."""
_EXPLODED = 1000.0
"""Factor over its median from which on the norm of a gradient has exploded."""
_LOST = 0.2
"""Share of an earlier success below which it counts as lost."""
_ALONE = 8
"""Steps at both ends that are compared to see whether the reward has risen without a success. With
fewer, the spread may be small by chance, and a reward that only varies would raise an alarm: one
history in a hundred with 5."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A warning about training. `metrics`: those that it is about; their charts show it."""

    text: str
    metrics: tuple[str, ...]


def _windowed() -> "deque[float]":
    return deque(maxlen=_WINDOW)


@dataclass(slots=True)
class History:
    """The steps of a run in order. `fallen`: success was lost, and is not back."""

    fallen: bool = False
    _norms: "deque[float]" = field(default_factory=_windowed)
    _successes: "deque[float]" = field(default_factory=_windowed)
    _had: float = 0.0
    _exploded: bool = False
    _rewards: list[float] = field(default_factory=list)
    _told: bool = False

    def read(self, row: Row) -> list[Alarm]:
        """The alarms of this step, each once until its condition has ended."""
        found = {
            ("grad_norm",): self._exploded_gradient(row),
            ("success",): self._lost_success(row),
            ("reward", "success"): self._reward_without_success(row),
        }
        return [Alarm(text, metrics) for metrics, text in found.items() if text]

    def _exploded_gradient(self, row: Row) -> str:
        norm = row.get("grad_norm", 0.0)
        usual = median(self._norms) if len(self._norms) >= _BEFORE else 0.0
        exploded = 0 < _EXPLODED * usual < norm
        is_new, self._exploded = exploded and not self._exploded, exploded
        if norm > 0:
            self._norms.append(norm)
        if not is_new:
            return ""
        return (
            f"the norm of the gradient is {norm:.3g}, {norm / usual:,.0f} times its median of"
            f" {usual:.3g}: a few tokens decide this update, which trainer.max_grad_norm only"
            " hides. Look at health/advantage_std and reward_std for advantages or rewards of"
            " another scale, lower trainer.lr, and go back to an earlier checkpoint if success"
            " falls"
        )

    def _lost_success(self, row: Row) -> str:
        success = row.get("success")
        if success is None or isnan(success):
            return ""
        if self.fallen:
            self.fallen = success <= self._had / 2
        seen = list(self._successes)
        self._successes.append(success)
        if self.fallen or len(seen) < 3:
            return ""
        # Two steps in a row must be low: one may be by chance.
        had = median(seen[:-1][-_BEFORE:])
        if had < 0.3 or max(success, seen[-1]) > _LOST * had:
            return ""
        self.fallen, self._had = True, had
        return (
            f"success has fallen from {had:.0%} to {success:.0%} within a few steps: the tasks are"
            " not too hard, the policy has collapsed. Go back to an earlier checkpoint, and lower"
            " trainer.lr or raise algorithm.kl; read the episodes of both (`agentrl view`)"
        )

    def _reward_without_success(self, row: Row) -> str:
        success, reward = row.get("success"), row.get("reward")
        if success is None or reward is None or isnan(success) or isnan(reward) or success > 0:
            self._rewards, self._told = [], False
            return ""
        self._rewards.append(reward)
        if self._told or len(self._rewards) < 2 * _ALONE:
            return ""
        first, last = self._rewards[:_ALONE], self._rewards[-_ALONE:]
        # Noise, small changes and overlapping ends raise no alarm.
        rise = fmean(last) - fmean(first)
        spread = max(pstdev(first), pstdev(last))
        if (
            rise <= 3 * spread
            or rise <= 0.1 * max(map(abs, (*first, *last)))
            or min(last) <= max(first)
        ):
            return ""
        self._told = True
        return (
            f"the reward rose from {fmean(first):.3g} to {fmean(last):.3g} in {len(self._rewards)}"
            " steps, and not one episode succeeded: it pays for something else than success, and"
            " may be exploited. Read the episodes that earn most (`agentrl view`), compare"
            " reward/..., and pay for success"
        )
