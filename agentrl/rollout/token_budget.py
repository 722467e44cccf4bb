"""`TokenBudget`: how many episodes may be live, by the tokens that the engines' KV caches hold.

A live episode occupies the KV cache between its turns too: its context waits there for the next
one. If the contexts of all live episodes do not fit, engines preempt requests, and recompute
contexts that they already had. So episodes begin only while all contexts are expected to fit, now
and after each further turn:

    cost of an environment ── expected tokens, turn by turn ─▶ of those that live, and of new ones
    KV caches of the engines that serve ── tokens ─▶ how many new ones fit

The cost is learned from what live episodes report, by environment and turn: how many tokens a turn
adds to the context (prompt and answer), and how often an episode ends after it. Earlier episodes
count less, so the budget follows answers that grow while the policy learns. For turns that no
episode has reached yet, the worst is assumed: the episode continues, and the turn adds as much as
the one before. If even the first turn is unknown, it is assumed to fill the engine's context. So a
run begins with as many episodes as fit in any case, and adds more as soon as they have answered.

If the expectation was too low, there is a hard cap: once the contexts of the live episodes exceed
the KV caches, the youngest episodes are preempted, which have the least to lose. Each is played
again from its beginning when there is room.

Dimension suffixes: S stages (turns, or spans of turns if an episode may have many); J stages from
now on.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.protocols import Engine

_STAGES = 64
"""Most stages of an episode. More turns than that are counted in spans."""
_REMEMBERED = 256
"""Episodes at a stage that its statistics cover, approximately: earlier ones fade."""
_MOST_SHARE, _LEAST_SHARE = 0.9, 0.45
"""Bounds of the share of the KV caches that contexts are expected to fill. The rest is room for
episodes that grow more than expected."""
_AFTER_PREEMPTION = 0.95
"""Factor of that share after an expectation that was too low."""
_RECOVERY = 0.002
"""Part of the distance to `_MOST_SHARE` that the share regains with each look."""
_LIKELIEST_END = 0.999
"""Upper bound of the probability that an episode ends after a stage, so that no end is certain."""
_RARE = 0.002
"""Stages that a smaller share of the episodes reaches are left out of expectations."""
_LOOKS_PER_GENERATION = 8
"""How often the limit is computed while each live episode gets one answer."""

T = TypeVar("T")
Array = npt.NDArray[np.float64]


class EnvironmentCost:
    """The tokens that live episodes of one environment hold, and are expected to hold.

    `turns`: most answers of an episode.
    """

    def __init__(self, turns: int) -> None:
        self._span = -(-turns // _STAGES)
        stages = self.stage(turns) + 1
        # Lists: single numbers change with each answer, and those of arrays are slow to change.
        self._went_on_S = [0.0] * stages
        self._ended_S = [0.0] * stages
        self._growth_S = [0.0] * stages
        self._live_S = [0] * stages
        self._held_S = [0] * stages
        self._last = stages - 1

    def stage(self, answers: int) -> int:
        """The stage of an episode with so many answers; 0 before the first."""
        return -(-answers // self._span)

    def begin(self) -> None:
        """Count an episode without an answer."""
        self._live_S[0] += 1

    def advance(self, before: int, after: int, added: int) -> None:
        """Learn that an episode went from one stage to a later one, in which its context grew."""
        for stage in range(before, min(after, self._last)):
            growth = added / (after - before)
            self._fade(stage)
            self._went_on_S[stage] += 1
            seen = self._went_on_S[stage]
            self._growth_S[stage] += (growth - self._growth_S[stage]) / seen

    def end(self, stage: int) -> None:
        """Learn that an episode ended at a stage."""
        stage = min(stage, self._last)
        self._fade(stage)
        self._ended_S[stage] += 1

    def hold(self, stage: int, episodes: int, tokens: int) -> None:
        """Count so many more live episodes at a stage, and tokens that they hold."""
        stage = min(stage, self._last)
        self._live_S[stage] += episodes
        self._held_S[stage] += tokens

    def _fade(self, stage: int) -> None:
        self._went_on_S[stage] *= 1 - 1 / _REMEMBERED
        self._ended_S[stage] *= 1 - 1 / _REMEMBERED

    def expected(self, max_context: int) -> tuple[Array, Array]:
        """(tokens that the live episodes hold after each further stage, those of one new episode),
        each of shape J, from now on. No context exceeds `max_context`.

        Example: each turn adds 100 tokens, and half of the episodes end after each. A new episode
        is expected to hold 0 tokens before its first turn, 100 after it (it surely plays one), then
        200 / 2 = 100, then 300 / 4 = 75. One that lives and holds 100 after its first turn: 100
        now, then 200 / 2, then 300 / 4.
        """
        went_on_S, ended_S = np.asarray(self._went_on_S), np.asarray(self._ended_S)
        all_live_S, all_held_S = np.asarray(self._live_S), np.asarray(self._held_S)
        growth_S = _fill_forward(np.asarray(self._growth_S), went_on_S > 0, float(max_context))
        # Of a new episode: the tokens that it holds at each stage, and the chance that it gets
        # there.
        left_S = went_on_S + ended_S
        ends_S = np.divide(ended_S, left_S, out=np.zeros_like(left_S), where=left_S > 0)
        goes_on_S = 1 - np.minimum(ends_S, _LIKELIEST_END)
        held_S = np.concatenate(([0.0], np.cumsum(growth_S[:-1])))
        lasts_S = np.concatenate(([1.0], np.cumprod(goes_on_S[:-1])))
        matters_S = (lasts_S > _RARE) | (all_live_S > 0)
        last = int(np.flatnonzero(matters_S)[-1])  # few stages, where episodes are short
        live_S, held_now_S = all_live_S[: last + 1], all_held_S[: last + 1]
        # Of those that are at stage S now: the chance that they live J stages later, which is that
        # of getting to S + J, given that they got to S; and what they then hold.
        stage = np.arange(last + 1)
        later_SJ = np.minimum(stage[:, None] + stage, last)
        is_there_SJ = stage[:, None] + stage <= last
        lives_SJ = np.where(is_there_SJ, lasts_S[later_SJ] / lasts_S[: last + 1, None], 0.0)
        now_S = held_now_S / np.maximum(live_S, 1)
        each_SJ = np.minimum(
            now_S[:, None] + held_S[later_SJ] - held_S[: last + 1, None],
            max(max_context, now_S.max()),
        )
        of_live_J, of_new_J = np.zeros(self._last + 1), np.zeros(self._last + 1)
        of_live_J[: last + 1] = (live_S[:, None] * lives_SJ * each_SJ).sum(axis=0)
        of_new_J[: last + 1] = lives_SJ[0] * np.minimum(held_S[: last + 1], max_context)
        return of_live_J, of_new_J


def _fill_forward(values_S: Array, is_known_S: npt.NDArray[np.bool_], first: float) -> Array:
    """The values, with unknown ones replaced by the last known one before them, or by `first`."""
    last_known_S = np.maximum.accumulate(np.where(is_known_S, np.arange(len(values_S)), -1))
    return np.where(last_known_S < 0, first, values_S[last_known_S])


@dataclass(eq=False, slots=True)
class Holding:
    """What one live episode holds."""

    _budget: "TokenBudget"
    _share: "TokenShare"
    _cost: EnvironmentCost
    _task: asyncio.Task[Any]
    tokens: int = 0
    """Of its contexts."""
    is_preempted: bool = False
    """Its task was cancelled to make room."""
    _answers: int = 0
    _tokens_before: int = 0
    """Those that it held when its stage began."""
    _is_counted: bool = True

    def answered(self, answers: int, tokens: int) -> None:
        """Note that there are so many more answers, and that the episode holds so many tokens."""
        if not self._is_counted:
            return
        before = self._cost.stage(self._answers)
        self._answers += answers
        after = self._cost.stage(self._answers)
        if after > before:
            self._cost.advance(before, after, tokens - self._tokens_before)
            self._tokens_before = tokens
        self._cost.hold(before, -1, -self.tokens)
        self._cost.hold(after, 1, tokens)
        self._budget.held += tokens - self.tokens
        self.tokens = tokens
        self._budget._note()

    def end(self, *, whole: bool) -> None:
        """Note that the episode holds nothing any more. `whole`: it was played to its end. May be
        called repeatedly.
        """
        if not self._is_counted:
            return
        if whole:
            self._cost.end(self._cost.stage(self._answers))
        self._leave()
        self._budget._note()

    def preempt(self) -> None:
        """Cancel the episode's task, and count it as gone."""
        self._leave()
        # Not at once: this may be called by that task, which may be past its last await.
        asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self in self._share._inside:
            self.is_preempted = True
            self._task.cancel()

    def _leave(self) -> None:
        self._is_counted = False
        self._cost.hold(self._cost.stage(self._answers), -1, -self.tokens)
        del self._budget._live[self]
        self._budget.held -= self.tokens
        self._share.live -= 1


class TokenShare:
    """The episodes of one scheduler in the budget. `changed` is called when its limit may have
    changed.
    """

    def __init__(self, budget: "TokenBudget", changed: Callable[[], None]) -> None:
        self._budget = budget
        self._inside: set[Holding] = set()
        self.changed = changed
        self.live = 0
        """Its episodes that hold tokens, or will."""
        self.preempted = 0
        """Its episodes that were preempted so far."""

    @property
    def limit(self) -> int | None:
        """How many of its episodes may be live; None if the engines report no capacity."""
        room = self._budget.room()
        return None if room is None else self.live + room

    def leave(self) -> None:
        """Leave the budget."""
        self._budget._shares.remove(self)

    async def play(self, env: str, episode: Callable[[Holding], Awaitable[T]]) -> T | None:
        """The result of an episode in the budget; None if it was preempted."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        holding = self._budget._begin(self, env, task)
        self._inside.add(holding)
        try:
            return await episode(holding)
        except asyncio.CancelledError:
            # If somebody else has cancelled the task too, it ends.
            if not holding.is_preempted or task.uncancel() > cancelling:
                raise
            self.preempted += 1
            return None
        finally:
            self._inside.discard(holding)
            holding.end(whole=False)


@dataclass(eq=False)
class TokenBudget:
    """One budget for all episodes that an engine's policy plays: those of training, and of
    evaluations at the same time. See the module's docstring.
    """

    engine: Engine | None
    """Whose KV caches hold the contexts: `EngineStats.kv_tokens`, and `max_context`. Without one,
    nothing is limited.
    """
    turns: int
    """Most answers of an episode."""
    held: int = 0
    """Tokens of the contexts of live episodes, as far as they have reported."""
    costs: dict[str, EnvironmentCost] = field(init=False)
    """By environment."""
    _shares: list[TokenShare] = field(default_factory=list)
    _live: dict[Holding, None] = field(default_factory=dict)
    """In the order in which they began."""
    _begun: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _capacity: int = 0
    _max_context: int = 0
    _filled_share: float = _MOST_SHARE
    _cap: int = 0
    _allowed: int | None = None
    """Live episodes, as last computed."""
    _events: int = 0
    _due: int = 0

    def __post_init__(self) -> None:
        turns = self.turns
        self.costs = defaultdict(lambda: EnvironmentCost(turns))

    def join(self, changed: Callable[[], None] = lambda: None) -> TokenShare:
        """The share of one more scheduler, until it leaves."""
        self._look()
        share = TokenShare(self, changed)
        self._shares.append(share)
        return share

    def room(self) -> int | None:
        """How many more episodes may begin; None if the engines report no capacity."""
        return None if self._allowed is None else max(0, self._allowed - len(self._live))

    @property
    def capacity(self) -> int:
        """Tokens that the KV caches of the engines that serve hold; 0 if that is not known."""
        return self._capacity

    def metrics(self) -> dict[str, float]:
        """Tokens held, capacity, and the learned cost of an episode; none without a capacity."""
        if not self._capacity:
            return {}
        metrics = {
            "live_episodes/tokens": float(self.held),
            "live_episodes/tokens_limit": float(self._capacity),
        }
        if self._begun:
            metrics["live_episodes/tokens_each"] = float(self._expected()[1].max())
        if len(self.costs) > 1:
            for env, cost in self.costs.items():
                most = cost.expected(self._max_context)[1].max()
                metrics[f"envs/{env}/tokens_each"] = float(most)
        return metrics

    def _begin(self, share: TokenShare, env: str, task: asyncio.Task[Any]) -> Holding:
        holding = Holding(self, share, self.costs[env], task)
        self.costs[env].begin()
        self._live[holding] = None
        for name in self._begun:
            self._begun[name] *= 1 - 1 / _REMEMBERED
        self._begun[env] += 1
        share.live += 1
        return holding

    def _note(self) -> None:
        """React to something learned: check the cap each time, and compute the limit now and
        then.
        """
        self._events += 1
        too_much = self._capacity and self.held > self._cap and len(self._live) > 1
        if self._events >= self._due or too_much:
            self._due = self._events + max(1, len(self._live) // _LOOKS_PER_GENERATION)
            self._look()

    def _look(self) -> None:
        if self.engine is None:
            return
        # While no engine serves, nothing is known that was not known before.
        self._capacity = self.engine.stats().kv_tokens or self._capacity
        if not self._capacity:
            return
        self._max_context = self.engine.max_context
        # Contexts that fitted when they began may be too many for engines that have left: those
        # compute some again until enough episodes have ended, and none is preempted for that.
        self._cap = max(self._capacity, self._cap if self.held > self._capacity else 0)
        if self.held > self._cap and len(self._live) > 1:
            self._filled_share = max(_LEAST_SHARE, self._filled_share * _AFTER_PREEMPTION)
        while self.held > self._cap and len(self._live) > 1:
            next(reversed(self._live)).preempt()
        self._filled_share += (_MOST_SHARE - self._filled_share) * _RECOVERY
        self._allowed = max(1, len(self._live) + self._fitting())
        for share in self._shares:
            share.changed()

    def _fitting(self) -> int:
        """How many new episodes fit beside the live ones."""
        of_live_J, of_new_J = self._expected()
        left_J = self._filled_share * self._capacity - of_live_J
        takes_room = of_new_J > 0
        if left_J[0] <= 0 or not takes_room.any():
            return 0
        return max(0, int((left_J[takes_room] / of_new_J[takes_room]).min()))

    def _expected(self) -> tuple[Array, Array]:
        """As `EnvironmentCost.expected`, of all environments; a new episode is of each as often as
        those that have begun.
        """
        context = self._max_context
        if not self._begun:
            return np.zeros(2), np.array([0.0, context])
        begun = sum(self._begun.values())
        of_each = [
            (cost.expected(context), self._begun[env] / begun) for env, cost in self.costs.items()
        ]
        return (
            np.sum([live_J for (live_J, _), _ in of_each], axis=0),
            np.sum([new_J * share for (_, new_J), share in of_each], axis=0),
        )


__all__ = ["EnvironmentCost", "Holding", "TokenBudget", "TokenShare"]
