"""`Scoring`: asks a run's reward, each part within its deadline, and a part that failed again, alone.

This is where what goes wrong in a reward becomes data: a score that failed, and never a number.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError, RewardError
from agentrl.flow import Flow, Retries, deadline
from agentrl.protocols import Reward
from agentrl.scoring.composite import Composite, RewardPart, total
from agentrl.trajectory import Failed, Score, Trajectory

_ONCE = Retries(reward=0)


@dataclass(frozen=True, slots=True)
class Scoring:
    """A reward with a deadline in seconds for each question, and a budget of retries. `failed` is told the id of the
    (first) trajectory whenever a part failed and is asked again.
    """

    reward: Composite
    deadline: float
    retries: Retries = _ONCE
    failed: Callable[[str], None] = lambda trajectory_id: None

    async def score(self, trajectory: Trajectory) -> Score:
        """What the parts that look at one trajectory say, together. All are asked at once.

        Raises:
            ConfigError: a part cannot work with such tasks at all.
        """
        scores_by_part = await _all(self._ask(part, (trajectory,)) for part in self.reward.single)
        return total(self.reward.single, [scores[0] for scores in scores_by_part])

    async def score_group(self, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> list[Score]:
        """`scores`, which the members have already, with what the parts say that compare them.

        Raises:
            ConfigError: as `score`.
        """
        parts = self.reward.grouped
        if not parts:
            return list(scores)
        scores_by_part = await _all(self._ask(part, trajectories) for part in parts)
        by_member = zip(*scores_by_part, strict=True)
        return [total(parts, of_member, base) for of_member, base in zip(by_member, scores, strict=True)]

    async def _ask(self, part: RewardPart, trajectories: Sequence[Trajectory]) -> list[Score]:
        for failures in range(1, self.retries.reward + 2):
            scores = await self._ask_once(part, trajectories)
            if not any(isinstance(score.status, Failed) for score in scores):
                return scores
            if failures <= self.retries.reward:
                self.failed(trajectories[0].id)
                await asyncio.sleep(self.retries.pause(failures))
        return scores

    async def _ask_once(self, part: RewardPart, trajectories: Sequence[Trajectory]) -> list[Score]:
        try:
            with deadline("reward", "reward", self.deadline):
                return await self.reward.ask(part, trajectories)
        except ConfigError:
            raise
        except RewardError as error:
            failed = Score.failed(str(error))
        except Exception as error:  # a reward is the user's code: whatever it raises is its failure
            failed = Score.failed(f"{type(error).__name__}: {error}")
        return [failed] * len(trajectories)


async def score_trajectory(reward: Reward | Composite, trajectory: Trajectory, seconds: float) -> Score:
    """What a reward says within a deadline, asked once; what goes wrong is a failed score, never a number."""
    return await Scoring(Composite.of(reward), seconds).score(trajectory)


async def _all(asked: Iterable[Coroutine[Any, Any, list[Score]]]) -> list[list[Score]]:
    """The answers, in order; of one question without a task of its own."""
    questions = list(asked)
    if len(questions) == 1:
        return [await questions[0]]
    async with Flow("reward") as flow:
        tasks = [flow.start(question, name=str(number)) for number, question in enumerate(questions)]
    return [task.result() for task in tasks]
