"""RL3's value injection (arXiv:2306.15909): in a trial of several episodes of one task, show what
was estimated so far.

    env:
      name: frozen_lake
      wrappers: [{name: value_injection, episodes: 3}]

A meta-learner sees many tasks, and a few episodes of each. What it has seen of the present one says
more than it can easily read out of a long conversation: value iteration over the counts does that
for it. The values and the counts of the present state follow each observation.
"""

from collections import defaultdict
from collections.abc import Awaitable, Mapping
from copy import deepcopy
from inspect import isawaitable
from typing import Any

import numpy as np
from pydantic import Field

from agentrl import Env, EnvError, Settings, StepResult, Wrapper

ResetResult = tuple[str, Mapping[str, Any]]
"""The observation and the info of a reset."""


class TabularModel:
    """A Markov decision process of named states and actions, estimated from what was seen.

    The estimates are the maximum-likelihood ones: relative frequencies, and mean rewards.
    """

    def __init__(self) -> None:
        self._rewards: dict[tuple[str, str], float] = defaultdict(float)  # the sums of them
        self._results: dict[tuple[str, str], dict[str | None, int]] = defaultdict(
            lambda: defaultdict(int)
        )

    def see(self, state: str, action: str, reward: float, then: str | None) -> None:
        """Count what an action has led to: a reward and the next state, or `None` at the end of the
        episode.
        """
        self._rewards[state, action] += reward
        self._results[state, action][then] += 1

    def count(self, state: str, action: str) -> int:
        """How often an action was tried in a state."""
        return sum(self._results[state, action].values()) if (state, action) in self._results else 0

    def q_values(
        self, gamma: float, iterations: int, tolerance: float
    ) -> Mapping[str, Mapping[str, float]]:
        """The value of each tried action, by state, under the best policy among the tried actions.

        Value iteration: Q(s, a) = r(s, a) + gamma * sum over s' of p(s' | s, a) * max over a' of
        Q(s', a'), until no value changes by more than `tolerance`, at most so many times. A state
        in which nothing was tried is worth 0.
        """
        pairs = sorted(self._results)
        if not pairs:
            return {}
        states = list(dict.fromkeys(state for state, _ in pairs))  # in the order of the pairs
        number = {state: i for i, state in enumerate(states)}
        firsts = np.flatnonzero(
            [i == 0 or pairs[i - 1][0] != pair[0] for i, pair in enumerate(pairs)]
        )
        means, chances = np.zeros(len(pairs)), np.zeros((len(pairs), len(states)))
        for i, pair in enumerate(pairs):
            count = self.count(*pair)
            means[i] = self._rewards[pair] / count
            for then, times in self._results[pair].items():
                if then in number:
                    chances[i, number[then]] = times / count
        values = np.zeros(len(pairs))
        for _ in range(iterations):
            better = means + gamma * chances @ np.maximum.reduceat(values, firsts)
            change = float(np.abs(better - values).max())
            values = better
            if change <= tolerance:
                break
        found: dict[str, dict[str, float]] = {state: {} for state in states}
        for (state, action), value in zip(pairs, values.tolist(), strict=True):
            found[state][action] = value
        return found


class ValueInjection(Wrapper):
    """Plays several episodes of the same task as one, and adds the values of the present state to
    each observation.

    The inner environment is reset with the same seed and options for each episode. The trial ends
    with the last one. A state is what `info["state_key"]` says, or else the observation; an action
    is the whole message, so put a wrapper that takes the action out of a longer message around this
    one. An episode that a limit cut goes on in the estimate.
    """

    class Config(Settings):
        """Settings of `value_injection`."""

        episodes: int = Field(gt=0)
        """Episodes of a trial."""
        gamma: float = Field(0.95, ge=0, le=1)
        """Discount of the values, for each turn."""
        iterations: int = Field(1000, gt=0)
        """Most iterations. With `gamma` 1, values may grow in every one of them."""
        tolerance: float = Field(1e-6, ge=0)
        """The iteration ends when no value changes by more than this."""

    def __init__(self, config: Config, env: Env) -> None:
        super().__init__(env)
        self._config = config
        self._model = TabularModel()
        self._state, self._episode = "", 1
        self._task: tuple[int, Mapping[str, Any]] = (0, {})

    @property
    def system_prompt(self) -> str:
        """The inner environment's, with an explanation of what is added."""
        inner = str(getattr(self.env, "system_prompt", "") or "")
        added = (
            f"You play {self._config.episodes} episodes of the same game. After an observation you"
            " see the value of each message that you have tried there, and how often you have."
        )
        return f"{inner}\n\n{added}" if inner else added

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> ResetResult | Awaitable[ResetResult]:
        """Begin a trial: forget the last one, and begin the first episode."""
        self._model = TabularModel()
        self._episode = 1
        self._task = (seed, deepcopy(dict(options)))
        return super().reset(seed=seed, options=options)

    def began(self, result: ResetResult) -> ResetResult:
        """The first observation of an episode."""
        observation, info = result
        if "agents" in info:
            raise EnvError(
                "the wrapper value_injection estimates the task of one agent, and this game has"
                " several"
            )
        self._state = _state(observation, info)
        return (
            f"Episode {self._episode} of {self._config.episodes}.\n{observation}{self._values()}",
            info,
        )

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Step, learn from it, and begin the next episode if this one is over."""
        result = self.env.step(action)
        return self._later(action, result) if isawaitable(result) else self._learned(action, result)

    async def _later(self, action: str, result: Awaitable[StepResult]) -> StepResult:
        learned = self._learned(action, await result)
        return await learned if isawaitable(learned) else learned

    def _learned(self, action: str, result: StepResult) -> StepResult | Awaitable[StepResult]:
        observation, reward, terminated, truncated, info = result
        then = _state(observation, info)
        self._model.see(self._state, action, reward, None if terminated else then)
        self._state = then
        if not (terminated or truncated):
            return f"{observation}{self._values()}", reward, False, False, info
        if self._episode == self._config.episodes:
            return result
        self._episode += 1
        seed, options = self._task
        begun = super().reset(seed=seed, options=deepcopy(dict(options)))
        return self._joined_later(result, begun) if isawaitable(begun) else _joined(result, begun)

    async def _joined_later(self, last: StepResult, begun: Awaitable[ResetResult]) -> StepResult:
        return _joined(last, await begun)

    def _values(self) -> str:
        """The line of the present state's values; empty if nothing was tried there."""
        config = self._config
        of_actions = self._model.q_values(config.gamma, config.iterations, config.tolerance).get(
            self._state, {}
        )
        tried = [
            f"{action} {value:.2f} ({self._model.count(self._state, action)})"
            for action, value in of_actions.items()
        ]
        return f"\nTried: {', '.join(tried)}." if tried else ""


def _joined(last: StepResult, begun: ResetResult) -> StepResult:
    """The step that ended an episode, followed by the beginning of the next one."""
    observation, reward, _, _, info = last
    first, of_reset = begun
    kept = {key: value for key, value in info.items() if key not in ("state_key", "success")}
    return f"{observation}\n{first}", reward, False, False, {**kept, **of_reset}


def _state(observation: str, info: Mapping[str, Any]) -> str:
    return str(info.get("state_key", observation))
