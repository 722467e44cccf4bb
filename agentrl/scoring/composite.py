"""`Composite`: a run's reward, the weighted sum of named parts of any shape.

A part is a `Reward`, a `GroupReward`, a `Rule` or a plain function (`agentrl/protocols.py`); `ask` asks any of them in
one way. Sync code runs in a thread of its own unless `isolation` says otherwise; rules run in killable processes.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Self, cast

from agentrl.errors import RewardError
from agentrl.protocols import GroupReward, Isolation, Rule
from agentrl.scoring.rule_pool import RulePool
from agentrl.trajectory import Failed, Score, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class RewardPart:
    """A reward, what it is called, and how much it counts. `isolation` is where its sync code runs."""

    reward: Any
    name: str
    weight: float = 1.0
    isolation: Isolation | None = None


class Composite:
    """The parts of a run's reward. An async context manager: entering enters the parts that are such themselves.

    `single` are the parts that score a trajectory, `grouped` those that compare the trajectories of a group.

    Raises:
        ValueError: there is no part, or two have one name.
    """

    def __init__(self, parts: Sequence[RewardPart], pool: RulePool | None = None) -> None:
        names = [part.name for part in parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a reward needs one or more parts, each with a name of its own, got {names}")
        self.parts = tuple(parts)
        self.grouped = tuple(part for part in parts if isinstance(part.reward, GroupReward))
        self.single = tuple(part for part in parts if part not in self.grouped)
        self._pool = pool or RulePool()
        self._calls = {part: self._call(part) for part in parts}
        self._open = AsyncExitStack()

    @staticmethod
    def of(reward: Any) -> "Composite":
        """`reward` itself, where it is one, or a composite with it as the only part."""
        if isinstance(reward, Composite):
            return reward
        return Composite([RewardPart(reward, getattr(reward, "__name__", type(reward).__name__))])

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._pool)
            for part in self.parts:
                if hasattr(part.reward, "__aenter__"):
                    await opened.enter_async_context(part.reward)
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._open.__aexit__(*exc)

    async def ask(self, part: RewardPart, trajectories: Sequence[Trajectory]) -> list[Score]:
        """What a part says of a group, or of the one trajectory that is given to a part that scores one.

        Raises:
            RewardError: it failed, or returned something that is no score.
        """
        call = self._calls[part]
        if part not in self.grouped:
            return [_as_score(await call(trajectory)) for trajectory in trajectories]
        returned = await call(trajectories)
        if len(returned) != len(trajectories):
            raise RewardError(f"score_group returned {len(returned)} scores for {len(trajectories)} trajectories")
        return [_as_score(score) for score in returned]

    def metrics(self) -> dict[str, float]:
        """What the parts say of their own work since the last call, by the part's name: `scoring/judge/cost`."""
        return {
            f"scoring/{part.name}/{name}": float(value)
            for part in self.parts
            if hasattr(part.reward, "metrics")
            for name, value in part.reward.metrics().items()
        }

    def _call(self, part: RewardPart) -> Callable[[Any], Awaitable[Any]]:
        """How a part is asked: its function, made async by where it runs."""
        reward = part.reward
        if isinstance(reward, Rule):
            where: Isolation | None = getattr(reward, "isolation", None)
            self._pool.imports += [reward.__module__, *getattr(reward, "imports", ())]
            return self._evaluate(reward, part.isolation or where or "process")
        function = reward.score_group if part in self.grouped else getattr(reward, "score", reward)
        isolation = part.isolation or getattr(reward, "isolation", "thread")
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return cast(Callable[[Any], Awaitable[Any]], function)
        if isolation == "process":
            self._pool.imports.append(getattr(reward, "func", reward).__module__)
            return partial(self._pool.run, function, cached=False)
        return partial(_in_thread if isolation == "thread" else _now, function)

    def _evaluate(self, rule: Rule, isolation: Isolation) -> Callable[[Trajectory], Awaitable[Any]]:
        async def evaluate(trajectory: Trajectory) -> Any:
            content = rule.content(trajectory)
            return rule.evaluate(content) if isolation == "inline" else await self._pool.run(rule.evaluate, content)

        return evaluate


def total(parts: Sequence[RewardPart], scores: Sequence[Score], base: Score | None = None) -> Score:
    """The weighted sum of what `parts` returned, added to `base`. `parts` of the score are unweighted, by their names.

    What a part itself gives as parts stands beside it: `judge` and `judge/clarity`. When any failed, the sum has.
    """
    if base is not None and isinstance(base.status, Failed):
        return base
    value, named = (base.value, dict(base.parts)) if base is not None else (0.0, {})
    for part, score in zip(parts, scores, strict=True):
        if isinstance(score.status, Failed):
            return Score.failed(f"{part.name}: {score.status.error}", score.status.layer)
        value += part.weight * score.value
        named[part.name] = score.value
        for key, inner in score.parts.items():
            if key != part.name:
                named[f"{part.name}/{key}"] = inner
    return Score(value, named)


def _as_score(returned: Any) -> Score:
    if not isinstance(returned, Score | Real):
        raise RewardError(f"the reward returned {returned!r:.80}; return a Score or a number, or raise RewardError")
    score = returned if isinstance(returned, Score) else Score(float(returned))
    wrong = [value for value in (score.value, *score.parts.values()) if not math.isfinite(value)]
    if wrong and not isinstance(score.status, Failed):
        raise RewardError(
            f"the reward returned {'NaN' if math.isnan(wrong[0]) else wrong[0]}; a score and its parts are finite "
            "numbers, and what cannot be scored is a RewardError or Score.failed(why)"
        )
    return score


async def _now(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)


def _in_thread(function: Callable[[Any], Any], argument: Any) -> "asyncio.Future[Any]":
    """In a daemon thread of its own: one that hangs is abandoned at its deadline, and nobody waits for it."""
    future: Future[Any] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = function(argument)
        except BaseException as error:  # handed to the caller
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return asyncio.wrap_future(future)
