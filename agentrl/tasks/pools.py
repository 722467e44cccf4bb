"""`DifficultyPools`: a curriculum over the rows of data, which draws those less often that are too
easy or too hard.
"""

from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.rollout.seeds import derive_seed
from agentrl.tasks.dataset import DatasetSettings, DatasetTasks
from agentrl.tokens.arrays import at_least, scale_of
from agentrl.trajectory import Task

Pool = Literal["easy", "normal", "hard"]


class DifficultyPools(DatasetTasks):
    """`Curriculum`: rows of data in three pools, by the mean score of their last group (as in
    prime-rl).

    A row is drawn at random. If it is in the pool of easy or of hard ones, it is kept with the
    pool's share only, and else another is drawn. New rows are in the normal pool. What is drawn
    depends on the index, the run's seed and the outcomes observed before, so a resumed run goes on
    with the same tasks. Held-out tasks are as in `tasks: dataset`.
    """

    class Config(DatasetSettings):
        """The data, and the pools."""

        easy_at: float = 1.0
        """A row whose group had at least this mean score is easy."""
        hard_at: float = 0.0
        """A row whose group had at most this mean score is hard."""
        easy: float = Field(0.1, ge=0, le=1)
        """The probability that a drawn easy row is kept; 0: never again."""
        hard: float = Field(0.3, ge=0, le=1)
        """The probability that a drawn hard row is kept."""

        @model_validator(mode="after")
        def _check_pools(self) -> Self:
            if self.hard_at >= self.easy_at:
                raise ValueError(
                    f"hard_at ({self.hard_at:g}) has to be below easy_at ({self.easy_at:g})"
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
        super().__init__(settings, env, seed, split, options)
        self._keep_probability: Mapping[Pool, float] = {
            "easy": settings.easy,
            "normal": 1.0,
            "hard": settings.hard,
        }
        self._bounds = settings.hard_at, settings.easy_at
        self._pools: dict[int, Pool] = {}

    def task(self, index: int) -> Task:
        """The task of this index: a row that is drawn now."""
        if self._split != "train":
            return super().task(index)
        rng = Random(derive_seed(self._seed, "pools", index))
        place = rng.randrange(len(self))
        for _ in range(1000):  # if nearly all are easy, one of them is better than none
            if rng.random() < self._keep_probability[self._pools.get(place, "normal")]:
                break
            place = rng.randrange(len(self))
        return self._task_at(place, index, f"@{place}")

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """Put the row of a task into the pool of its outcome."""
        place, mean = int(task.id.rpartition("@")[2]), fmean(rewards_G)
        hard_at, easy_at = self._bounds
        self._pools.pop(place, None)
        scale = scale_of(rewards_G)
        if at_least(mean, easy_at, scale):
            self._pools[place] = "easy"
        elif at_least(hard_at, mean, scale):
            self._pools[place] = "hard"

    def metrics(self) -> dict[str, float]:
        """The shares of all rows that are easy, and hard."""
        pools = list(self._pools.values())
        return {f"curriculum/{pool}": pools.count(pool) / len(self) for pool in ("easy", "hard")}
