"""A part of a run's reward: a `Reward`, a `GroupReward`, a `Rule` or a plain function, behind one
interface.

Sync code runs in a thread of its own unless `isolation` says otherwise; rules run in killable
processes.
"""

import asyncio
import inspect
import logging
import pickle
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import BuiltinMethodType, MethodType
from typing import Any, TypeGuard

from agentrl.errors import ConfigError, RuleLimitError
from agentrl.plugins import unbound
from agentrl.protocols.env import Isolation, isolation_of
from agentrl.protocols.reward import GroupReward, Reward, RewardOffers, Rule
from agentrl.scoring.returned import as_score, as_scores
from agentrl.scoring.rule_pool import RulePool
from agentrl.tokens.arrays import at_least
from agentrl.trajectory import Score, Trajectory

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[Trajectory]], Awaitable[list[Score]]]
"""Asks a part for the scores of a group, or of a single trajectory if the part scores those one by
one.

Raises `RewardError` if the part returned something other than a score, and whatever the part itself
raises.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RewardPart:
    """A reward with its name and weight."""

    reward: Any
    """The reward, or the function that computes it."""
    name: str
    """Its name among the parts."""
    weight: float = 1.0
    """Its weight in the score. A part of weight 0 only watches: if it fails, the score goes without
    it."""
    isolation: Isolation | None = None
    """The place where its sync code runs."""
    success_at: float | None = None
    """The lowest score of an episode that succeeded, if this part has a verdict."""
    needed: bool = False
    """The score fails with it even at weight 0."""

    @property
    def watches(self) -> bool:
        """True if its failure is reported, and changes no score."""
        return self.weight == 0 and not self.needed

    def verdict(self, score: Score) -> bool | None:
        """True if this part's score means that the episode succeeded; None if it has no verdict."""
        if self.success_at is not None:
            return at_least(score.value, self.success_at)
        return None if score.success is None else bool(score.success)

    @property
    def owner(self) -> Any:
        """The reward, or what it is a `functools.partial` of: what may be entered, and have
        metrics.
        """
        return unbound(self.reward)

    @property
    def compares(self) -> bool:
        """True if it scores the trajectories of a group by comparing them."""
        return isinstance(self.reward, GroupReward)

    def bind(self, pool: RulePool) -> Ask:
        """The function that asks it, with the processes of `pool`, which will import the modules it
        needs.
        """
        call = self._call(pool)

        async def ask_each(trajectories: Sequence[Trajectory]) -> list[Score]:
            return [
                as_score(await call(trajectory), len(trajectory.turns))
                for trajectory in trajectories
            ]

        async def ask_together(trajectories: Sequence[Trajectory]) -> list[Score]:
            return as_scores(
                await call(trajectories), [len(trajectory.turns) for trajectory in trajectories]
            )

        return ask_together if self.compares else ask_each

    def _call(self, pool: RulePool) -> Callable[[Any], Awaitable[Any]]:
        """Its function, made async according to where it runs."""
        reward = self.reward
        if isinstance(reward, Rule):
            offers = RewardOffers.of(reward)
            pool.imports += [type(reward).__module__, *offers.imports]
            is_inline = (self.isolation or offers.isolation) == "inline"
            return partial(_evaluate, reward, None if is_inline else pool)
        function: Any = reward.score if isinstance(reward, Reward) else reward
        if self.compares:
            function = reward.score_group
        isolation = self.isolation or isolation_of(self.owner)
        if _is_async(function):
            return function
        if isolation == "process":
            _check_pickles(function, self.name)
            pool.imports.append(module_of(function))
            return partial(pool.run, function, cached=False)
        return partial(_call_sync, function, threaded=isolation == "thread")


def module_of(function: Any) -> str:
    """The module that a process has to import to run a function, a method or a callable object."""
    function = unbound(function)
    # A function of C has its module as `__self__`.
    if isinstance(function, MethodType | BuiltinMethodType):
        owner = function.__self__
        if owner is not None and not inspect.ismodule(owner):
            function = owner
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _is_async(function: Any) -> TypeGuard[Callable[[Any], Awaitable[Any]]]:
    function = unbound(function)
    if callable(function) and inspect.iscoroutinefunction(type(function).__call__):
        return True  # an object with an async `__call__`
    return inspect.iscoroutinefunction(function)


def _check_pickles(function: Any, name: str) -> None:
    try:
        pickle.dumps(function)
    except Exception as error:  # pickle raises whatever the object's own code raises
        raise ConfigError(
            f"the reward {name!r} cannot run in a process: {type(error).__name__}: {error}. Write a"
            " function at the top level of a module, or isolation: thread"
        ) from error


async def _call_sync(function: Callable[[Any], Any], argument: Any, *, threaded: bool) -> Any:
    """The result of a function that does not look async."""
    result = await _in_thread(function, argument) if threaded else function(argument)
    # It may have returned a coroutine all the same, as a lambda around an async function does.
    return await result if inspect.isawaitable(result) else result


async def _evaluate(rule: Rule, pool: RulePool | None, trajectory: Trajectory) -> Any:
    """A rule's verdict, from a process of the pool if there is one."""
    content = rule.content(trajectory)
    if pool is None:
        return rule.evaluate(content)
    try:
        return await pool.run(rule.evaluate, content)
    except RuleLimitError as error:
        logger.info("%s: its content is judged wrong", error)
        return float(RewardOffers.of(rule).wrong)


def _in_thread(function: Callable[[Any], Any], argument: Any) -> "asyncio.Future[Any]":
    """Call it in its own daemon thread: a call that hangs is abandoned at its deadline, and blocks
    nothing else.
    """
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
