"""Kuhn poker in text: two agents, three cards, one bet. The smallest game of bluffing.

It is solved (Kuhn, "A simplified two-person poker", 1950), so a learned policy can be compared with
optimal play: between two perfect players, the one who acts first loses 1/18 of a chip per hand.
Copy this environment for a game of several agents: `reset` names them, each `step` names the next
one, and each agent sees only what is new to it.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count, permutations
from typing import TYPE_CHECKING, Any

from pydantic import Field

from agentrl.envs.base import TextEnv, plays, read_options
from agentrl.errors import ConfigError
from agentrl.protocols import Enumeration, Question, ResetResult, StepResult
from agentrl.settings.base import Settings
from agentrl.trajectory import Message

if TYPE_CHECKING:
    from agentrl.oracles.games import GameNode, Player, ZeroSumGame

AGENTS = ("north", "south")
CARDS = ("jack", "queen", "king")
LEGAL = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("call", "fold"),
    ("check", "bet"): ("call", "fold"),
}
"""The legal words after each history. After any other history the hand is over."""


TIMID = {"jack": 0.05, "queen": 0.1, "king": 0.6}
"""The probability that `timid_player` bets or calls."""


class KuhnPoker(TextEnv):
    """Kuhn poker for two agents, north and south. Rewards are the chips won or lost in each hand: 1
    or 2.

    The agents take turns in acting first, hand by hand. A message that is not a legal word folds.
    Success means winning chips over all hands.
    """

    isolation = "inline"
    restorable = True
    reward_range = (-2.0, 2.0)
    system_prompt = (
        "You play poker with three cards: jack, queen and king. Each player antes 1 chip and gets"
        " one card. A player may check, or bet 1 chip; who faces a bet may call it or fold. The"
        " higher card wins what was put in. Answer with one word. Any other message folds."
    )

    actor: str
    history: tuple[str, ...]

    class Options(Settings):
        """The options of `reset`."""

        hands: int = Field(1, ge=1, le=50)
        """Hands in an episode."""
        strict: bool = False
        """Only the exact word acts, so that ` Bet` folds as any other message does. With this and a
        single hand, the exploitability of the policy that is trained is a metric of the run."""

    def enumeration(self, options: Mapping[str, Any]) -> Enumeration:
        """The enumeration of a single hand, for a policy's exploitability; see `Enumerable`.

        Raises:
            ConfigError: there are several hands, or not only exact words act.
        """
        read = read_options(self.Options, options)
        if read.hands != 1 or not read.strict:
            raise ConfigError(
                "they are exact for a single hand whose words are exact: write"
                " env.options.strict=true"
            )
        return KuhnOracle()

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Deal the first hand."""
        self.options = read_options(self.Options, options)
        self.hand = 0
        self.chips = dict.fromkeys(AGENTS, 0)
        self._news: dict[str, list[str]] = {agent: [] for agent in AGENTS}
        self._deal()
        return self._next_message()

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Deal, and name the agents and the one who acts first."""
        self.rng = random.Random(seed)
        return self.start(seed, options), {"agents": list(AGENTS), "agent": self.actor}

    def step(self, action: str) -> StepResult:
        """Take the word of the acting agent."""
        actor = self.actor
        word = action if self.options.strict else action.strip().lower()
        word = word if word in LEGAL[self.history] else "fold"
        self._news[self._other()].append(f"{actor} {word}s.")
        self.history += (word,)
        winnings = self._settle()
        if winnings is None:
            self.actor = self._other()
            return self._next_message(), 0.0, False, False, {"agent": self.actor}
        for agent, chips in winnings.items():
            self.chips[agent] += chips
            self._news[agent].append(f"You {'win' if chips > 0 else 'lose'} {abs(chips)}.")
        info: dict[str, Any] = {"rewards": winnings}
        if self.hand == self.options.hands:
            info["success"] = {agent: chips > 0 for agent, chips in self.chips.items()}
            return "\n".join(self._news[actor]), float(winnings[actor]), True, False, info
        self._deal()
        return (
            self._next_message(),
            float(winnings[actor]),
            False,
            False,
            {**info, "agent": self.actor},
        )

    def render_html(self) -> str:
        """Both cards, which the players do not see, what was said in this hand, and the chips so
        far.
        """
        rows = "".join(
            f"<tr><td>{agent}{' (to act)' if agent == self.actor else ''}</td>"
            f"<td><b>{self.cards[agent]}</b></td><td>{self.chips[agent]:+d} chips</td></tr>"
            for agent in AGENTS
        )
        said = ", ".join(self.history) or "nothing was said yet"
        return (
            f"<p>Hand {self.hand} of {self.options.hands}: {said}</p><table"
            f' cellpadding="6">{rows}</table>'
        )

    def _deal(self) -> None:
        self.actor = AGENTS[self.hand % 2]
        self.hand += 1
        self.history = ()
        self.cards = dict(zip(AGENTS, self.rng.sample(CARDS, 2), strict=True))
        for agent in AGENTS:
            self._news[agent].append(
                f"Hand {self.hand} of {self.options.hands}. You hold the {self.cards[agent]}."
            )

    def _next_message(self) -> str:
        """The acting agent's new message, and its legal words."""
        news, self._news[self.actor] = self._news[self.actor], []
        return "\n".join([*news, f"{' or '.join(LEGAL[self.history])}?".capitalize()])

    def _settle(self) -> dict[str, int] | None:
        """The chips that each agent wins or loses in the hand; `None` while it goes on. Cards that
        are shown become news.
        """
        first, second = AGENTS if self.hand % 2 else AGENTS[::-1]
        chips = chips_won((self.cards[first], self.cards[second]), self.history)
        if chips is None:
            return None
        if self.history[-1] != "fold":
            for agent, seen in ((first, second), (second, first)):
                self._news[agent].append(f"{seen} shows the {self.cards[seen]}.")
        return {first: chips, second: -chips}

    def _other(self) -> str:
        return AGENTS[1 - AGENTS.index(self.actor)]


def chips_won(cards: Sequence[str], history: tuple[str, ...]) -> int | None:
    """Chips that the first player wins, by the cards of both; None while the hand goes on."""
    if history in LEGAL:
        return None
    if history[-1] == "fold":
        return 1 if len(history) % 2 == 0 else -1
    stake = 2 if history[-1] == "call" else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def moves(history: tuple[str, ...]) -> tuple[str, ...]:
    """All effects that a message can have after a history: those of the legal words, and of
    folding, as any other message does.
    """
    return tuple(dict.fromkeys((*LEGAL[history], "fold")))


def situation(card: str, history: tuple[str, ...]) -> str:
    """The name of an information set: what a player knows when it acts."""
    return " ".join((card, *history))


def kuhn_game() -> "ZeroSumGame":
    """One hand as a game whose strategies can be judged exactly. Its information sets are named by
    `situation`.
    """
    from agentrl.oracles.games import ChanceNode, ChoiceNode, Payoff, ZeroSumGame

    def after(cards: tuple[str, str], history: tuple[str, ...]) -> "GameNode":
        chips = chips_won(cards, history)
        if chips is not None:
            return Payoff(chips)
        seat: Player = 1 if len(history) % 2 else 0
        then = tuple(after(cards, (*history, word)) for word in moves(history))
        return ChoiceNode(seat, situation(cards[seat], history), then)

    deals = [(first, second) for first, second in permutations(CARDS, 2)]
    return ZeroSumGame(ChanceNode(tuple((1 / len(deals), after(deal, ())) for deal in deals)))


class KuhnOracle:
    """`Enumeration` of one strict hand: how far a policy that plays both seats is from optimal
    play.
    """

    @cached_property
    def situations(self) -> Mapping[str, Question]:
        """The messages that an agent has seen in each situation, and its legal words."""
        found: dict[str, Question] = {}
        env, unseen = KuhnPoker(), set(permutations(CARDS, 2))
        for seed in count():  # until each of the six deals has come up
            env.reset(seed=seed, options={"strict": True})
            cards = (env.cards["north"], env.cards["south"])
            if cards in unseen:
                unseen.remove(cards)
                found |= {
                    situation(cards[len(line) % 2], line): _question_after(env, seed, line)
                    for line in LEGAL
                }
            if not unseen:
                break
        return found

    @property
    def questions(self) -> Sequence[Question]:
        """The questions of all situations, in the order of their numbers."""
        return list(self.situations.values())

    def metrics(self, probabilities: Sequence[Sequence[float]]) -> dict[str, float]:
        """Exploitability of the policy, and what the first player wins, in chips a hand.

        The probabilities of the words may sum to less than 1: the rest is that of other messages,
        which fold, as the word itself does.
        """
        strategy, legal = {}, {}
        for (name, question), of_words in zip(self.situations.items(), probabilities, strict=True):
            chances = dict(zip(question.answers, of_words, strict=True))
            legal[name] = min(1.0, sum(of_words))
            chances["fold"] = chances.get("fold", 0.0) + max(0.0, 1 - sum(of_words))
            strategy[name] = [chance / sum(chances.values()) for chance in chances.values()]
        game = kuhn_game()
        reach = game.reach(strategy)
        return {
            "exploitability": game.exploitability(strategy),
            "first_player_value": game.value(strategy),
            "legal": sum(reach[name] * legal[name] for name in reach) / sum(reach.values()),
        }


def _question_after(env: KuhnPoker, seed: int, line: tuple[str, ...]) -> Question:
    """The messages that the agent who acts after the words of `line` has seen by then."""
    observation, _ = env.reset(seed=seed, options={"strict": True})
    seen = {agent: [Message("system", env.system_prompt)] for agent in AGENTS}
    for word in line:
        seen[env.actor] += [Message("user", observation), Message("assistant", word)]
        observation, *_ = env.step(word)
    return Question((*seen[env.actor], Message("user", observation)), LEGAL[line])


def best_play(card: str, history: tuple[str, ...], bluff: float = 1 / 3) -> float:
    """Probability of the bolder word (bet, or call) in equilibrium; `bluff` is the first player's
    choice, 0 to 1/3.

    Kuhn (1950): the first player bets the jack with probability `bluff`, the king with three times
    that probability and the queen never, and calls with the queen with probability `bluff` + 1/3.
    The second player bluffs with the jack and calls with the queen, each with probability 1/3.
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
    """With probability `skill` optimal play, else any legal word. A `ScriptedPlayer` for opponents
    and warm starts.
    """
    meek, bold = sorted(LEGAL[env.history], key=lambda word: word in ("bet", "call"))
    chance = best_play(env.cards[env.actor], env.history) if rng.random() < skill else 0.5
    return bold if rng.random() < chance else meek


@plays(KuhnPoker)
def timid_player(env: KuhnPoker, rng: random.Random) -> str:
    """Bets and calls with three kings in five, and hardly ever with another card. A
    `ScriptedPlayer` for warm starts.

    It shows that cards matter, and is easily exploited: by 0.35 chips a hand.
    """
    meek, bold = sorted(LEGAL[env.history], key=lambda word: word in ("bet", "call"))
    return bold if rng.random() < TIMID[env.cards[env.actor]] else meek
