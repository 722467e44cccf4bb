"""`RewardPipeline`: a run's reward, the weighted sum of named parts.

Each part is asked within its deadline, and only failed parts are retried. Only here do failures of
a reward become data: a failed score, never a number.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import starmap, zip_longest
from operator import add
from types import FunctionType, MappingProxyType
from typing import Any, Self

from agentrl.errors import RAISED_BY_CODE, ConfigError, RewardError, describe, is_cancellation
from agentrl.flow import Flow, Retries, deadline, span
from agentrl.protocols.metrics import Metrics, merge_metrics
from agentrl.protocols.reward import GroupReward, Reward, RewardOffers
from agentrl.scoring.part import RewardPart
from agentrl.scoring.returned import finite_all, own_metrics, turn_rewards
from agentrl.scoring.rule_pool import RulePool
from agentrl.tokens.arrays import settled
from agentrl.trajectory import Failed, Score, Scored, Trajectory, Unscored

logger = logging.getLogger(__name__)

OnFailure = Callable[[str], None]
"""Called with the id of the (first) trajectory whenever a failed part is retried."""

_ONCE = Retries(reward=0)


def _ignore_failure(trajectory_id: str) -> None:
    """An `OnFailure` for callers that do not count failures."""


class RewardPipeline:
    """The parts of a run's reward. An async context manager: entering also enters the parts that
    are context managers.

    `deadline`: seconds for each call of a part. `retries`: how often a failed part is retried.
    `pool`: the processes that rules run in. `by_env`: what scores the episodes of some environments
    instead, with the same pool.

    Raises:
        ValueError: there is no part, or two have the same name.
    """

    def __init__(
        self,
        parts: Sequence[RewardPart],
        pool: RulePool | None = None,
        *,
        deadline: float,
        retries: Retries = _ONCE,
        by_env: Mapping[str, "RewardPipeline"] = MappingProxyType({}),
    ) -> None:
        names = [part.name for part in parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"a reward needs one or more parts, each with a name of its own, got {names}"
            )
        self.parts = tuple(parts)
        self._pool = pool or RulePool()
        self._by_env = by_env
        self._asks = {part: part.bind(self._pool) for part in parts}
        self._single = [part for part in parts if not part.compares]
        self._grouped = [part for part in parts if part.compares]
        self._deadline = deadline
        self._retries = retries
        self._open = AsyncExitStack()
        self._failed: Counter[RewardPart] = Counter()
        self._told: set[RewardPart] = set()

    @staticmethod
    def of(
        reward: "Reward | GroupReward | RewardPipeline", deadline: float, retries: Retries
    ) -> "RewardPipeline":
        """`reward` itself if it is a pipeline, else a pipeline with it as the only part."""
        if isinstance(reward, RewardPipeline):
            return reward
        function: Any = reward
        is_function = isinstance(function, FunctionType)
        name = function.__name__ if is_function else type(reward).__name__
        part = RewardPart(reward, name)
        return RewardPipeline([part], deadline=deadline, retries=retries)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._pool)
            for part in [
                *self.parts,
                *(part for own in self._by_env.values() for part in own.parts),
            ]:
                if isinstance(part.owner, AbstractAsyncContextManager):
                    await opened.enter_async_context(part.owner)
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._open.__aexit__(*exc)

    async def score(self, trajectory: Trajectory, failed: OnFailure = _ignore_failure) -> Score:
        """The sum of the parts that score single trajectories, which run concurrently.

        Raises:
            ConfigError: a part cannot work with such tasks at all.
        """
        if pipeline := self._by_env.get(trajectory.task.env):
            return await pipeline.score(trajectory, failed)
        scores_by_part = await _gather(
            self._ask(part, (trajectory,), failed) for part in self._single
        )
        return total(self._single, [scores[0] for scores in scores_by_part])

    def score_turns(self, trajectory: Trajectory) -> Score:
        """The rewards so far of an unfinished episode's turns, by the parts that score single
        turns.
        """
        if pipeline := self._by_env.get(trajectory.task.env):
            return pipeline.score_turns(trajectory)
        parts: list[RewardPart] = []
        scores: list[Score] = []
        for part in self._single:
            score_turns = RewardOffers.of(part.reward).score_turns
            if score_turns is not None:
                turns = turn_rewards(score_turns(trajectory.unshared()))
                parts.append(part)
                scores.append(Score(sum(turns), turns=tuple(turns)))
        return total(parts, scores)

    async def score_group(
        self,
        trajectories: Sequence[Trajectory],
        scores: Sequence[Score],
        failed: OnFailure = _ignore_failure,
    ) -> list[Score]:
        """The members' `scores` so far, with those of the parts that compare members added.

        Raises:
            ConfigError: as `score`.
        """
        if own := self._by_env.get(trajectories[0].task.env):
            return await own.score_group(trajectories, scores, failed)
        if not self._grouped:
            return list(scores)
        scores_by_part = await _gather(
            self._ask(part, trajectories, failed) for part in self._grouped
        )
        by_member = zip(*scores_by_part, strict=True)
        return [
            total(self._grouped, of_member, base)
            for of_member, base in zip(by_member, scores, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """The parts' own metrics since the last call, by the part's name, such as
        `scoring/judge/cost`.
        """
        restarts = {"restarts/rules": float(self._pool.died)} if self._pool.died else {}
        reported: dict[str, Metrics] = {"the pool of rules": restarts, **self._part_metrics("")}
        for env, pipeline in self._by_env.items():
            reported |= pipeline._part_metrics(f"{env}/")
        return merge_metrics(reported)

    def _part_metrics(self, env: str) -> dict[str, Metrics]:
        """The metrics of the parts of this pipeline, by who reports them. `env`: the prefix of
        their names.
        """
        reported: dict[str, Metrics] = {}
        for part in self.parts:
            prefix = f"scoring/{env}{part.name}/"
            measure = RewardOffers.of(part.owner).metrics
            if measure is not None:
                own = own_metrics(measure())
                reported[f"the reward {env}{part.name}"] = {prefix + key: own[key] for key in own}
            if part.watches:
                failed = float(self._failed.pop(part, 0))
                reported[f"the failures of {env}{part.name}"] = {f"{prefix}failed": failed}
        return reported

    async def _ask(
        self, part: RewardPart, trajectories: Sequence[Trajectory], failed: OnFailure
    ) -> list[Score]:
        for failures in range(1, self._retries.reward + 2):
            scores = await self._ask_once(part, trajectories)
            found = [score.status for score in scores if isinstance(score.status, Failed)]
            if not found:
                return scores
            if any(status.final for status in found):  # another attempt would fail as well
                break
            if failures <= self._retries.reward:
                failed(trajectories[0].id)
                await asyncio.sleep(self._retries.pause(failures))
        if part.watches:
            self._note_failure(part, scores)
        return scores

    def _note_failure(self, part: RewardPart, scores: Sequence[Score]) -> None:
        """Count the failure of a part of weight 0 in its metric; the first one is also logged."""
        errors = [score.status.error for score in scores if isinstance(score.status, Failed)]
        self._failed[part] += len(errors)
        if part not in self._told:
            self._told.add(part)
            logger.warning(
                "the reward %s, of weight 0, has failed, and scores go without it (metric"
                " scoring/%s/failed): %s",
                part.name,
                part.name,
                errors[0],
            )

    async def _ask_once(self, part: RewardPart, trajectories: Sequence[Trajectory]) -> list[Score]:
        try:
            with span("rewards", part.name), deadline("reward", "reward", self._deadline):
                # A reward is the user's code: what it changes must change no other reward, member
                # or attempt.
                return await self._asks[part](
                    [trajectory.unshared() for trajectory in trajectories]
                )
        except ConfigError as error:
            if not part.watches:
                raise
            failed = Score.failed(str(error))
        except RewardError as error:
            failed = Score.failed(str(error), final=error.final)
        except RAISED_BY_CODE as error:  # the user's code: anything that it raises is its failure
            if is_cancellation(error):
                raise
            failed = Score.failed(describe(error))
        return [failed] * len(trajectories)


def total(parts: Sequence[RewardPart], scores: Sequence[Score], base: Score | None = None) -> Score:
    """The weighted sum of the `scores` of `parts`, added to `base`. The sum's own `parts` are
    unweighted, by name.

    A part's own parts are listed beside it: `judge` and `judge/clarity`, and so are its words;
    those by the name "" are about the whole part. If any score failed, so does the sum, unless its
    part only watches. The sum says that the episode succeeded if every part with a verdict does.
    Without any part, nothing is scored.
    """
    if base is not None and isinstance(base.status, Failed):
        return base
    value, named = (base.value, dict(base.parts)) if base is not None else (0.0, {})
    turns, explanations = (base.turns, dict(base.explanations)) if base is not None else ((), {})
    verdicts = [None if base is None else base.success]
    # The largest term, to which the rounding of the sum is relative: terms may cancel.
    scale = abs(value)
    for part, score in zip(parts, scores, strict=True):
        if isinstance(score.status, Failed):
            if part.watches:
                continue
            why = f"{part.name}: {score.status.error}"
            return Score.failed(why, score.status.layer, final=score.status.final)
        value += part.weight * score.value
        verdicts.append(part.verdict(score))
        scale = max(scale, abs(part.weight * score.value))
        weighted = [part.weight * earned for earned in score.turns]
        # Parts may reward fewer turns than others; the last turn gets their rest later.
        turns = tuple(starmap(add, zip_longest(turns, weighted, fillvalue=0.0)))
        named[part.name] = score.value
        for key, inner in score.parts.items():
            if key != part.name:
                named[f"{part.name}/{key}"] = inner
        for key, text in score.explanations.items():
            explanations[f"{part.name}/{key}" if key else part.name] = text
    # Finite parts may still add up to infinity.
    try:
        finite_all((value, *turns), "the weighted sum of its parts is")
    except RewardError as error:
        return Score.failed(f"{', '.join(part.name for part in parts)}: {error}")
    known = [verdict for verdict in verdicts if verdict is not None]
    status = Scored() if named or parts else Unscored()
    return Score(
        settled(value, scale),
        named,
        status,
        turns=turns,
        explanations=explanations,
        success=all(known) if known else None,
    )


async def score_trajectory(
    reward: Reward | RewardPipeline, trajectory: Trajectory, seconds: float
) -> Score:
    """A reward's score within a deadline, without retries; a failure gives a failed score, never a
    number.
    """
    return await RewardPipeline.of(reward, seconds, _ONCE).score(trajectory)


async def _gather(calls: Iterable[Coroutine[Any, Any, list[Score]]]) -> list[list[Score]]:
    """The results of concurrent calls, in order."""
    calls = list(calls)
    if len(calls) == 1:  # the usual case needs no task
        return [await calls[0]]
    async with Flow("reward") as flow:
        tasks = [flow.start(call, name=str(number)) for number, call in enumerate(calls)]
    return [task.result() for task in tasks]
