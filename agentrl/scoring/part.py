"""A part of a run's reward: a `Reward`, a `GroupReward`, a `Rule` or a plain function, behind one interface.

Sync code runs in a thread of its own unless `isolation` says otherwise; rules run in killable processes.
"""

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, cast

from agentrl.errors import RewardError, RuleLimitError
from agentrl.protocols import GroupReward, Isolation, Rule
from agentrl.scoring.rule_pool import RulePool
from agentrl.trajectory import Failed, Score, Trajectory

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[Trajectory]], Awaitable[list[Score]]]
"""Asks a part for the scores of a group, or of a single trajectory if the part scores those one by one.

Raises `RewardError` if the part returned something other than a score, and whatever the part itself raises.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RewardPart:
    """A reward with its name and weight. `isolation` is where its sync code runs. `success_at`: the lowest score of an
    episode that succeeded, if this part says so.
    """

    reward: Any
    name: str
    weight: float = 1.0
    isolation: Isolation | None = None
    success_at: float | None = None

    def verdict(self, score: Score) -> bool | None:
        """Whether this part's score says that the episode succeeded; None if it does not say."""
        if self.success_at is not None:
            return score.value >= self.success_at
        return None if score.success is None else bool(score.success)

    @property
    def compares(self) -> bool:
        """Whether it scores the trajectories of a group by comparing them."""
        return isinstance(self.reward, GroupReward)

    def asked_in(self, pool: RulePool) -> Ask:
        """The function that asks it, with the processes of `pool`, which will import the modules it needs."""
        call = self._call(pool)

        async def ask_each(trajectories: Sequence[Trajectory]) -> list[Score]:
            return [_as_score(await call(trajectory)) for trajectory in trajectories]

        async def ask_together(trajectories: Sequence[Trajectory]) -> list[Score]:
            returned = await call(trajectories)
            if len(returned) != len(trajectories):
                raise RewardError(f"score_group returned {len(returned)} scores for {len(trajectories)} trajectories")
            return [_as_score(score) for score in returned]

        return ask_together if self.compares else ask_each

    def _call(self, pool: RulePool) -> Callable[[Any], Awaitable[Any]]:
        """Its function, made async according to where it runs."""
        reward = self.reward
        if isinstance(reward, Rule):
            where: Isolation | None = getattr(reward, "isolation", None)
            pool.imports += [reward.__module__, *getattr(reward, "imports", ())]
            return partial(_evaluate, reward, None if (self.isolation or where) == "inline" else pool)
        function = reward.score_group if self.compares else getattr(reward, "score", reward)
        isolation = self.isolation or getattr(reward, "isolation", "thread")
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return cast(Callable[[Any], Awaitable[Any]], function)
        if isolation == "process":
            pool.imports.append(getattr(reward, "func", reward).__module__)
            return partial(pool.run, function, cached=False)
        return partial(_in_thread if isolation == "thread" else _now, function)


def _as_score(returned: Any) -> Score:
    if not isinstance(returned, Score | Real):
        raise RewardError(f"the reward returned {returned!r:.80}; return a Score or a number, or raise RewardError")
    # The mappings of a score are copied: a reward may use one for all that it scores.
    score = _own(returned) if isinstance(returned, Score) else Score(float(returned))
    wrong = [value for value in (score.value, *score.parts.values(), *score.turns) if not math.isfinite(value)]
    if wrong and not isinstance(score.status, Failed):
        raise RewardError(
            f"the reward returned {'NaN' if math.isnan(wrong[0]) else wrong[0]}; a score and its parts must be finite "
            "numbers: if it cannot score, raise RewardError or return Score.failed(why)"
        )
    return score


def _own(score: Score) -> Score:
    return replace(score, parts=dict(score.parts), words=dict(score.words))


async def _evaluate(rule: Rule, pool: RulePool | None, trajectory: Trajectory) -> Any:
    """A rule's verdict, from a process of the pool if there is one."""
    content = rule.content(trajectory)
    if pool is None:
        return rule.evaluate(content)
    try:
        return await pool.run(rule.evaluate, content)
    except RuleLimitError as error:
        logger.info("%s: its content is judged wrong", error)
        return float(getattr(rule, "wrong", 0.0))


async def _now(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)


def _in_thread(function: Callable[[Any], Any], argument: Any) -> "asyncio.Future[Any]":
    """Call it in its own daemon thread: a call that hangs is abandoned at its deadline, and blocks nothing else."""
    future: Future[Any] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = function(argument)
        except BaseException as error:  # raised in the caller
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return asyncio.wrap_future(future)
