"""The problems of the oracles as text: environments so small that a policy's mean return is an
exact number.

A problem is a tree of decisions (`agentrl/oracles/problems.py`). Each answer that is one of the
offered words goes one step down; any other message ends the episode with the reward `other`. So the
probabilities of the words at every point of every conversation say all about a policy, and a run on
such a problem reports its exact return (docs/oracles.md).
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator, validate_call

from agentrl.envs.base import TextEnv, plays, read_options
from agentrl.oracles.problems import PROBLEMS, Decision
from agentrl.protocols import Credit, Question, ResetResult, StepResult
from agentrl.settings.base import Settings
from agentrl.settings.faults import faults
from agentrl.trajectory import Message, Trajectory

SYSTEM_PROMPT = (
    "Answer with one of the offered words, and nothing else. Any other message ends the episode."
)


@dataclass(frozen=True, slots=True)
class _Point:
    """A decision at one point of a conversation. `then`: the numbers of the points after it, by
    action and result.
    """

    decision: Decision
    messages: tuple[Message, ...]
    then: Mapping[tuple[int, int], int]

    @property
    def words(self) -> list[str]:
        return [action.name for action in self.decision.actions]


class PlayedProblem:
    """A problem as conversations: an `Enumeration`. Points have numbers, by which
    `info["decision"]` names them.
    """

    def __init__(self, root: Decision, other: float) -> None:
        self.other = other
        self.points: list[_Point] = []
        self._add(root, (Message("system", SYSTEM_PROMPT), Message("user", prompt_of(root))))
        self.best = self._values(None)[0][0]
        """The mean return of the best policy that sees the whole conversation."""

    @property
    def questions(self) -> Sequence[Question]:
        """Every point of every conversation, with its words."""
        return [Question(point.messages, point.words) for point in self.points]

    def metrics(self, probabilities: Sequence[Sequence[float]]) -> Mapping[str, float]:
        """The mean return, that of the best policy, their difference, and how often an episode ends
        by other words.
        """
        value = self._values(probabilities)[0][0]
        return {
            "return": value,
            "best_return": self.best,
            "regret": self.best - value,
            "other": self._probability_of_leaving(probabilities),
        }

    def credit(
        self, probabilities: Sequence[Sequence[float]], trajectory: Trajectory
    ) -> Sequence[Credit] | None:
        """The exact value and advantage of each turn, by the decision that its info names."""
        worth = self._values(probabilities)
        found = []
        for turn in trajectory.turns:
            number, word = turn.info.get("decision"), turn.info.get("word")
            if number is None:
                return None
            value, of_words = worth[number]
            point = self.points[number]
            got = of_words[point.words.index(word)] if word in point.words else self.other
            found.append(Credit(value, got - value))
        return found

    def best_words(self, number: int) -> Sequence[str]:
        """The words of the best policy at a point."""
        _, of_words = self._values(None)[number]
        return [
            word
            for word, q in zip(self.points[number].words, of_words, strict=True)
            if q >= max(of_words) - 1e-9
        ]

    def _values(
        self, probabilities: Sequence[Sequence[float]] | None
    ) -> list[tuple[float, list[float]]]:
        """The value of each point and of its words, under a policy; `None`: under the best one."""
        worth: list[tuple[float, list[float]]] = [(0.0, [])] * len(self.points)
        for number in reversed(range(len(self.points))):  # what comes later has a higher number
            point = self.points[number]
            of_words = []
            for a, action in enumerate(point.decision.actions):
                of_results = []
                for r, result in enumerate(action.results):
                    later = worth[point.then[a, r]][0] if (a, r) in point.then else 0.0
                    of_results.append(result.probability * (result.reward + later))
                of_words.append(sum(of_results))
            if probabilities is None:
                value = max(*of_words, self.other)
            else:
                chances = probabilities[number]
                value = (
                    sum(p * q for p, q in zip(chances, of_words, strict=True))
                    + _probability_of_others(chances) * self.other
                )
            worth[number] = value, of_words
        return worth

    def _probability_of_leaving(self, probabilities: Sequence[Sequence[float]]) -> float:
        """The probability that an episode ends by a word that was not offered."""
        # Forwards, because a point has a lower number than all that follow it.
        reached = [1.0, *[0.0] * (len(self.points) - 1)]
        for number, point in enumerate(self.points):
            for (a, r), then in point.then.items():
                chance = probabilities[number][a] * point.decision.actions[a].results[r].probability
                reached[then] += reached[number] * chance
        return sum(
            reach * _probability_of_others(chances)
            for reach, chances in zip(reached, probabilities, strict=True)
        )

    def _add(self, decision: Decision, messages: tuple[Message, ...]) -> int:
        """Add a decision and all that can follow it. Returns its number."""
        number = len(self.points)
        then: dict[tuple[int, int], int] = {}
        self.points.append(_Point(decision, messages, then))
        for a, action in enumerate(decision.actions):
            for r, result in enumerate(action.results):
                if result.then is None or result.truncated:
                    continue
                said = (Message("assistant", action.name), Message("user", prompt_of(result.then)))
                then[a, r] = self._add(result.then, (*messages, *said))
        return number


def prompt_of(decision: Decision) -> str:
    """The prompt at a decision: the observation and the legal words."""
    words = " or ".join(action.name for action in decision.actions)
    return f"{decision.shown or decision.state}\n{words}?"


def _probability_of_others(chances: Sequence[float]) -> float:
    """The probability of all other messages, which rounding must not make negative."""
    return max(0.0, 1.0 - sum(chances))


class OracleEnv(TextEnv):
    """A decision problem with exact answers, as text. Success: the episode earned what the best
    policy does on average.

    `info["state_key"]` is the state; `info["decision"]` and `info["word"]` say what was decided.
    """

    isolation = "inline"
    restorable = True
    system_prompt = SYSTEM_PROMPT

    class Options(Settings):
        """The options of `reset`."""

        problem: Literal["bandit", "stopping", "t_maze", "corridor", "chain", "dialogue"] = (
            "stopping"
        )
        """The name of a problem in `agentrl.oracles.problems`."""
        settings: dict[str, Any] = Field(default_factory=dict)
        """The problem's own settings: the arguments of its function, such as `length` of `t_maze`.
        """
        other: float = 0.0
        """The reward of a message that is none of the offered words. It ends the episode."""

        @model_validator(mode="after")
        def _check_settings(self) -> Self:
            try:
                played(self.problem, json.dumps(self.settings, sort_keys=True), self.other)
            except ValidationError as error:
                wrong = "; ".join(map(str, faults(error, self.settings)))
                known = ", ".join(signature(PROBLEMS[self.problem]).parameters) or "none"
                raise ValueError(
                    f"settings of {self.problem!r}: {wrong}. Its settings are: {known}"
                ) from error
            return self

    def enumeration(self, options: Mapping[str, Any]) -> PlayedProblem:
        """All conversations of the problem that these options choose."""
        chosen = read_options(self.Options, options)
        return played(chosen.problem, json.dumps(chosen.settings, sort_keys=True), chosen.other)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin at the first decision, and name its state."""
        self.rng = random.Random(seed)
        return self.start(seed, options), {"state_key": self.point.decision.state}

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Begin at the first decision."""
        chosen = read_options(self.Options, options)
        self._chosen = chosen.problem, json.dumps(chosen.settings, sort_keys=True), chosen.other
        self.number = 0
        self.earned = 0.0
        return prompt_of(self.point.decision)

    @property
    def problem(self) -> PlayedProblem:
        """The problem of the episode."""
        return played(*self._chosen)

    @property
    def point(self) -> _Point:
        """The decision that the episode is at."""
        return self.problem.points[self.number]

    def step(self, action: str) -> StepResult:
        """Take one of the offered words; any other message ends the episode."""
        point, info = self.point, {"decision": self.number, "word": action}
        if action not in point.words:
            return self._final_result(self.problem.other, info | {"word": ""})
        a = point.words.index(action)
        results = point.decision.actions[a].results
        (r,) = self.rng.choices(range(len(results)), [result.probability for result in results])
        result = results[r]
        if result.then is None:
            return self._final_result(result.reward, info)
        info["state_key"] = result.then.state
        if result.truncated:
            _, reward, _, _, info = self._final_result(result.reward, info)
            return prompt_of(result.then), reward, False, True, info
        self.earned += result.reward
        self.number = point.then[a, r]
        return prompt_of(result.then), result.reward, False, False, info

    def _final_result(self, reward: float, info: dict[str, Any]) -> StepResult:
        success = self.earned + reward >= self.problem.best - 1e-9
        return "The episode is over.", float(reward), True, False, {**info, "success": success}


@lru_cache(maxsize=64)
def played(problem: str, settings: str, other: float) -> PlayedProblem:
    """A problem with its settings, which are JSON text.

    Raises:
        ValidationError: the settings do not fit the problem.
    """
    root: Decision = validate_call(PROBLEMS[problem])(**json.loads(settings))
    return PlayedProblem(root, other)


@plays(OracleEnv)
def weak_player(env: OracleEnv, rng: random.Random, skill: float = 0.3) -> str:
    """With probability `skill` the best word, else any offered one. For warm starts."""
    return rng.choice(
        env.problem.best_words(env.number) if rng.random() < skill else env.point.words
    )
