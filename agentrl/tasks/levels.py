"""`Levels`: a curriculum over levels of difficulty, which are options of the environment.

Which level a task has depends on its index, the run's seed and the outcomes observed before. So a
resumed run, which replays the outcomes of its ledger, goes on with the same tasks.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.plugins import NoSettings
from agentrl.rollout.seeds import derive_seed
from agentrl.settings.base import Settings
from agentrl.tasks.seeded import SeededTasks
from agentrl.tokens.arrays import at_least
from agentrl.trajectory import Task


class RunningMean:
    """An exponential moving mean whose first values count fully, as Adam corrects its bias
    (arXiv:1412.6980).
    """

    def __init__(self, memory: float) -> None:
        self._rate = 1 / memory
        self._total = self._weight = 0.0

    def add(self, value: float) -> None:
        """Count one more value."""
        self._total += self._rate * (value - self._total)
        self._weight += self._rate * (1 - self._weight)

    @property
    def value(self) -> float | None:
        """The mean of about the last `memory` values; None before the first."""
        return self._total / self._weight if self._weight else None


class Levels:
    """`Curriculum`: draws the level of each task by how well the policy does at each.

    With `rule: band`, the levels whose success rate lies in the band, and the next one above a
    level that has left it. With `rule: progress`, levels in proportion to how fast their success
    rate changes, up or down ("Teacher-student curriculum learning", T. Matiisen et al.,
    arXiv:1707.00183, section 3, with two moving means for the slope). Held-out tasks have all
    levels in turn.
    """

    class Config(Settings):
        """The levels, and which of them to draw."""

        levels: tuple[dict[str, Any], ...] = Field(min_length=2)
        """Options of the environment for each level, the easiest first, on top of `env.options`."""
        rule: Literal["band", "progress"] = "band"
        """Draw the levels that are neither too hard nor too easy, or those at which success changes
        most.
        """
        band: tuple[float, float] = (0.2, 0.8)
        """Success rates between which a level is worth training on (`rule: band`)."""
        explore: float = Field(0.1, ge=0, le=1)
        """Share of tasks with any level: with `rule: band`, up to the one above the highest that
        has been played.
        """
        memory: float = Field(16.0, ge=1)
        """About how many groups of a level its success rate is the mean of. Progress is its
        distance from the mean of four times as many."""
        success_at: float = 0.5
        """An episode with at least this score has succeeded."""

        @model_validator(mode="after")
        def _check_band(self) -> Self:
            if not 0 <= self.band[0] < self.band[1] <= 1:
                raise ValueError(
                    f"band is {list(self.band)}: write [low, high] with 0 <= low < high <= 1"
                )
            return self

    def __init__(
        self,
        settings: Config,
        env: str,
        seed: int,
        split: str = "train",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings, self._seed, self._split = settings, seed, split
        shared = options or {}
        self._levels = [
            SeededTasks(NoSettings(), env, seed, split, {**shared, **level})
            for level in settings.levels
        ]
        self._recent = [RunningMean(settings.memory) for _ in settings.levels]
        self._long_term = [RunningMean(4 * settings.memory) for _ in settings.levels]

    def task(self, index: int) -> Task:
        """The task of this index, at a level that is drawn for it now."""
        if self._split != "train":
            return self._levels[index % len(self._levels)].task(index)
        rng = Random(derive_seed(self._seed, "level", index))
        draw = self._draw_in_band if self._settings.rule == "band" else self._draw_by_progress
        return self._levels[draw(rng)].task(index)

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """Count the outcome of a task for its level."""
        level = next(
            number
            for number, one in enumerate(self._levels)
            if dict(one.options) == dict(task.options)
        )
        success = sum(at_least(reward, self._settings.success_at) for reward in rewards_G) / len(
            rewards_G
        )
        self._recent[level].add(success)
        self._long_term[level].add(success)

    def metrics(self) -> dict[str, float]:
        """The success rate of each level that has been played."""
        rates = {level: mean.value for level, mean in enumerate(self._recent)}
        return {
            f"curriculum/{level}/success": rate for level, rate in rates.items() if rate is not None
        }

    def _draw_in_band(self, rng: Random) -> int:
        rates = [mean.value for mean in self._recent]
        played = [level for level, rate in enumerate(rates) if rate is not None]
        reached = min(max(played, default=-1) + 1, len(rates) - 1)
        if rng.random() < self._settings.explore:
            return rng.randrange(reached + 1)
        low, high = self._settings.band
        fit = [level for level in played if low <= (rates[level] or 0.0) <= high]
        # The next level above, once the one below it has been left.
        if reached not in played and (reached == 0 or (rates[reached - 1] or 0.0) > high):
            fit.append(reached)
        if fit:
            return rng.choice(fit)
        # All that have been played are too hard or too easy: between the two, the easiest that is
        # too hard.
        return next((level for level in played if (rates[level] or 0.0) < low), reached)

    def _draw_by_progress(self, rng: Random) -> int:
        slopes = [
            abs((lately.value or 0.0) - (before.value or 0.0))
            for lately, before in zip(self._recent, self._long_term, strict=True)
        ]
        if rng.random() < self._settings.explore or not any(slopes):
            return rng.randrange(len(slopes))
        return rng.choices(range(len(slopes)), weights=slopes)[0]
