"""Kuhn poker in text: two agents, three cards, one bet. The smallest game of bluffing.

It is solved (Kuhn, "A simplified two-person poker", 1950), so a learned policy can be compared with optimal play:
between two perfect players, the one who acts first loses 1/18 of a chip per hand. Copy this environment for a game of
several agents: `reset` names them, each `step` names the next one, and each agent sees only what is new to it.
"""

import random
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from agentrl.envs.base import TextEnv, plays, read_options
from agentrl.protocols import ResetResult, Settings, StepResult

AGENTS = ("north", "south")
CARDS = ("jack", "queen", "king")
LEGAL = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("call", "fold"),
    ("check", "bet"): ("call", "fold"),
}
"""The legal words after each history. After any other history the hand is over."""


class KuhnPoker(TextEnv):
    """Kuhn poker for two agents, north and south. Rewards are the chips won or lost in each hand: 1 or 2.

    The agents take turns in acting first, hand by hand. A message that is not a legal word folds. Success means winning
    chips over all hands.
    """

    isolation = "inline"
    reward_range = (-2.0, 2.0)
    system_prompt = (
        "You play poker with three cards: jack, queen and king. Each player antes 1 chip and gets one card. A player "
        "may check, or bet 1 chip; who faces a bet may call it or fold. The higher card wins what was put in. "
        "Answer with one word. Any other message folds."
    )

    actor: str
    history: tuple[str, ...]

    class Options(Settings):
        """What `reset(options=...)` takes."""

        hands: int = Field(1, ge=1, le=50)
        """Hands in an episode."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Deal the first hand."""
        self.options = read_options(self.Options, options)
        self.hand = 0
        self.chips = dict.fromkeys(AGENTS, 0)
        self._news: dict[str, list[str]] = {agent: [] for agent in AGENTS}
        self._deal()
        return self._tell()

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Deal, and name the agents and the one who acts first."""
        self.rng = random.Random(seed)
        return self.start(seed, options), {"agents": list(AGENTS), "agent": self.actor}

    def step(self, action: str) -> StepResult:
        """Take the word of the acting agent."""
        actor = self.actor
        word = action.strip().lower()
        word = word if word in LEGAL[self.history] else "fold"
        self._news[self._other()].append(f"{actor} {word}s.")
        self.history += (word,)
        winnings = self._winnings()
        if winnings is None:
            self.actor = self._other()
            return self._tell(), 0.0, False, False, {"agent": self.actor}
        for agent, chips in winnings.items():
            self.chips[agent] += chips
            self._news[agent].append(f"You {'win' if chips > 0 else 'lose'} {abs(chips)}.")
        info: dict[str, Any] = {"rewards": winnings}
        if self.hand == self.options.hands:
            info["success"] = {agent: chips > 0 for agent, chips in self.chips.items()}
            return "\n".join(self._news[actor]), float(winnings[actor]), True, False, info
        self._deal()
        return self._tell(), float(winnings[actor]), False, False, {**info, "agent": self.actor}

    def _deal(self) -> None:
        self.actor = AGENTS[self.hand % 2]
        self.hand += 1
        self.history = ()
        self.cards = dict(zip(AGENTS, self.rng.sample(CARDS, 2), strict=True))
        for agent in AGENTS:
            self._news[agent].append(f"Hand {self.hand} of {self.options.hands}. You hold the {self.cards[agent]}.")

    def _tell(self) -> str:
        """What is new to the acting agent, and its legal words."""
        news, self._news[self.actor] = self._news[self.actor], []
        return "\n".join([*news, f"{' or '.join(LEGAL[self.history])}?".capitalize()])

    def _winnings(self) -> dict[str, int] | None:
        """Chips that each agent wins or loses in the hand; `None` while it goes on."""
        if self.history in LEGAL:
            return None
        actor, other = self.actor, self._other()
        at_stake = 2 if self.history[-1] == "call" else 1
        if self.history[-1] == "fold":
            winner = other
        else:
            winner = max(AGENTS, key=lambda agent: CARDS.index(self.cards[agent]))
            for agent, seen in ((actor, other), (other, actor)):
                self._news[agent].append(f"{seen} shows the {self.cards[seen]}.")
        return {agent: at_stake if agent == winner else -at_stake for agent in AGENTS}

    def _other(self) -> str:
        return AGENTS[1 - AGENTS.index(self.actor)]


def best_play(card: str, history: tuple[str, ...], bluff: float = 1 / 3) -> float:
    """Probability of the bolder word (bet, or call) in equilibrium; `bluff` is the first player's choice, 0 to 1/3.

    Kuhn (1950): the first player bets the jack with probability `bluff`, the king with three times that probability and
    the queen never, and calls with the queen with probability `bluff` + 1/3. The second player bluffs with the jack and
    calls with the queen, each with probability 1/3.
    """
    bold = {
        (): {"jack": bluff, "queen": 0, "king": 3 * bluff},
        ("check",): {"jack": 1 / 3, "queen": 0, "king": 1},
        ("bet",): {"jack": 0, "queen": 1 / 3, "king": 1},
        ("check", "bet"): {"jack": 0, "queen": bluff + 1 / 3, "king": 1},
    }
    return bold[history][card]


@plays(KuhnPoker)
def strong_player(env: KuhnPoker, rng: random.Random) -> str:
    """Optimal play of the agent whose turn it is. A `ScriptedPlayer`."""
    return weak_player(env, rng, skill=1.0)


@plays(KuhnPoker)
def weak_player(env: KuhnPoker, rng: random.Random, skill: float = 0.3) -> str:
    """With probability `skill` optimal play, else any legal word. A `ScriptedPlayer` for opponents and warm starts."""
    meek, bold = sorted(LEGAL[env.history], key=lambda word: word in ("bet", "call"))
    chance = best_play(env.cards[env.actor], env.history) if rng.random() < skill else 0.5
    return bold if rng.random() < chance else meek
