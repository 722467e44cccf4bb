"""`check_reward`: tests a reward against its contract; and trajectories to test one with."""

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from agentrl.errors import (
    RAISED_BY_CODE,
    ConformanceError,
    RewardError,
    ScoreError,
    is_cancellation,
)
from agentrl.flow import Flow, deadline, now
from agentrl.protocols import RewardOffers, Rule
from agentrl.scoring.config import RulePoolConfig
from agentrl.scoring.part import Ask, RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.returned import own_metrics
from agentrl.scoring.rule_pool import RulePool
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import (
    Completion,
    Failed,
    MadeCall,
    Message,
    Score,
    Task,
    Terminated,
    Trajectory,
    Turn,
)


def trajectory(
    replies: str | Sequence[str],
    *,
    observations: Sequence[str] = (),
    rewards: Sequence[float] = (),
    calls: Sequence[Sequence[MadeCall] | None] = (),
    options: Mapping[str, Any] | None = None,
    id: str = "task/0/0",  # noqa: A002  as the field is called
) -> Trajectory:
    """An episode with these messages of the model, one per turn, and the environment's answers and
    rewards (default 0).

    The messages are tokenised byte by byte; the first observation is empty. `observations` become
    messages of a tool. `calls`: what the environment took for calls in each message, if it says so.
    """
    texts = [replies] if isinstance(replies, str) else list(replies)
    messages, turns = [Message("user", "")], []
    for text, seen, reward, made in zip_longest(
        texts, observations[: len(texts)], rewards[: len(texts)], calls[: len(texts)]
    ):
        tokens = ints(list(text.encode()))
        sampled = Completion(
            tokens, floats(np.full(len(tokens), -1.0)), ints(np.zeros(len(tokens))), "stop"
        )
        known = None if made is None else tuple(made)
        turns.append(Turn(ints([0]), sampled, reward or 0.0, {}, calls=known))
        messages += [
            Message("assistant", text),
            *([Message("tool", seen)] if seen is not None else []),
        ]
    return Trajectory(
        id,
        Task("test", 0, options or {}, id.partition("/")[0]),
        tuple(turns),
        Terminated(),
        tuple(messages),
    )


def check_reward(
    make_reward: Callable[[], Any],
    trajectories: Iterable[Trajectory],
    *,
    pure: bool | None = None,
    seconds: float = 10.0,
) -> None:
    """Let a reward score trajectories, and check it against the contract.

    `make_reward` makes it: a class without settings, or a function without arguments that returns
    it (for a plain function `f`: `lambda: f`). The reward is entered, scores all trajectories one
    by one, then again, then all at once, says its `metrics()` if it has any, and is left. `pure`:
    whether the same trajectory must always get the same score; by default only for a `Rule`.
    `seconds` is the deadline of one call. A reward may fail with `RewardError` or `Score.failed`.
    It must not return NaN, an infinity or a failed score with a value, nor raise another exception.

    Raises:
        ConformanceError: lists everything found, each with what to write instead.
    """
    _check_makes(make_reward)
    played = _listed(trajectories)
    if not 0 < seconds < math.inf:
        raise ConformanceError(f"check_reward needs a positive deadline, got seconds={seconds!r}")
    findings = asyncio.run(_collect_findings(make_reward, played, pure, seconds))
    if findings:
        listed = "\n".join(
            f"  {number}. {text}" for number, text in enumerate(dict.fromkeys(findings), 1)
        )
        raise ConformanceError(f"the reward breaks the contract:\n{listed}")


def _check_makes(make_reward: object) -> None:
    """Check that a reward can be made by a call without arguments.

    Raises:
        ConformanceError: it cannot, as with the reward itself, or a class with settings.
    """
    hint = "write `lambda: reward` for a reward that is there, or a plain function that scores"
    if not callable(make_reward):
        raise ConformanceError(
            "check_reward needs a class or a function that makes the reward, got"
            f" {make_reward!r:.100}: {hint}"
        )
    try:
        signature = inspect.signature(make_reward)
    except ValueError:  # some callables of C do not say
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConformanceError(
            f"check_reward makes the reward by a call without arguments, and {make_reward!r:.100}"
            f" does not allow that ({error}): {hint}, or `lambda: Reward(...)` for a class with"
            " settings"
        ) from error


def _listed(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The trajectories as a list.

    Raises:
        ConformanceError: there are none, or these are none.
    """
    if isinstance(trajectories, Trajectory):
        raise ConformanceError(
            "check_reward needs a list of trajectories, got a single one: write `[trajectory]`"
        )
    played = list(trajectories) if isinstance(trajectories, Iterable) else [trajectories]
    if not played:
        raise ConformanceError(
            "check_reward needs at least one trajectory; agentrl.testing.trajectory makes one"
        )
    for one in played:
        if not isinstance(one, Trajectory):
            raise ConformanceError(
                f"check_reward needs a list of trajectories, got {one!r:.100} for one;"
                " agentrl.testing.trajectory makes one from messages"
            )
    return played


async def _collect_findings(
    make_reward: Callable[[], Any], played: list[Trajectory], pure: bool | None, seconds: float
) -> list[str]:
    reward = make_reward()
    part = RewardPart(reward, "reward")
    kept = copy.deepcopy(played)
    # In training, a rule that computes for too long says "wrong"; here it is a finding.
    pool = RulePool(RulePoolConfig(deadline=seconds, cpu_seconds=10 * seconds, workers=1, cache=0))
    asker = _Asker(part.bind(pool), seconds)
    async with RewardPipeline([part], pool, deadline=seconds):
        groups = [played] if part.compares else [[one] for one in played]
        alone = [await asker.ask(group) for group in groups]
        again = [await asker.ask(group) for group in groups]
        async with Flow("check_reward") as flow:
            tasks = [
                flow.start(asker.ask(group), name=str(number))
                for number, group in enumerate(groups)
            ]
        together = [task.result() for task in tasks]
        asker.findings += _check_metrics(part.owner)
    if played != kept:
        asker.findings.append("[pure] it changed a trajectory; make a new value instead")
    if pure or (pure is None and isinstance(reward, Rule)):
        asker.note_difference(
            "pure", alone, again, "two calls with the same trajectory returned {0} and then {1}"
        )
        asker.note_difference(
            "concurrent", alone, together, "calls at the same time returned {1}, and one by one {0}"
        )
    return asker.findings


def _check_metrics(reward: Any) -> list[str]:
    """What is wrong with the reward's metrics."""
    measure = RewardOffers.of(reward).metrics
    if measure is None:
        return []
    try:
        returned = measure()
        kept = own_metrics(returned)
    except ScoreError as error:
        return [f"[metrics] {error}"]
    except RAISED_BY_CODE as error:  # whatever the reward raises is a finding
        return [
            f"[metrics] metrics() raised {type(error).__name__}: {error}; a run asks for them after"
            " each step"
        ]
    dropped = sorted(set(returned) - set(kept))
    return [
        f"[metrics] {name!r} is {returned[name]!r:.80}, and a metric is a finite number"
        for name in dropped
    ]


class _Asker:
    """Calls the reward, and notes what breaks the contract."""

    def __init__(self, asked: Ask, seconds: float) -> None:
        self._asked = asked
        self._seconds = seconds
        self.findings: list[str] = []

    async def ask(self, trajectories: Sequence[Trajectory]) -> list[Score] | str:
        """The scores, or why there are none."""
        began = now()
        try:
            with deadline("reward", "reward", self._seconds):
                scores = await self._asked(trajectories)
        except ScoreError as error:
            self.findings.append(f"[value] {error}")
            return f"ScoreError: {error}"
        except RewardError as error:
            return f"RewardError: {error}"
        except RAISED_BY_CODE as error:  # whatever the reward raises is a finding
            if is_cancellation(error):
                raise
            self.findings.append(
                f"[failure] {trajectories[0].id}: it raised {type(error).__name__}: {error}; raise"
                " RewardError(why) for what cannot be scored"
            )
            return type(error).__name__
        if now() - began > self._seconds:
            # No deadline ends what does not await: it holds up everything else of a run.
            self.findings.append(
                f"[deadline] {trajectories[0].id}: it blocked the event loop beyond its deadline of"
                f" {self._seconds:g} s; await what takes long, or write a function without `async`,"
                " which runs in its own thread"
            )
        for score in scores:
            if isinstance(score.status, Failed) and not math.isnan(score.value):
                self.findings.append(
                    f"[failure] {trajectories[0].id}: a failed score has the value {score.value:g};"
                    " write Score.failed(why)"
                )
        return scores

    def note_difference(
        self, check: str, first: Sequence[object], second: Sequence[object], text: str
    ) -> None:
        """Note where two rounds differ. They are compared by `repr`, since failed scores contain
        NaN.
        """
        for one, other in zip(first, second, strict=True):
            if repr(one) != repr(other):
                self.findings.append(
                    f"[{check}] " + text.format(_describe_replies(one), _describe_replies(other))
                )
                return


def _describe_replies(replies: object) -> str:
    """What `ask` has returned, in a few words."""
    if isinstance(replies, list):
        return ", ".join(f"{score.value:g} {dict(score.parts) or ''}".strip() for score in replies)
    return str(replies)
