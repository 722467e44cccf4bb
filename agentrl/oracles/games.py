"""Games of two players whose strategies can be judged exactly: their value, best responses, and
exploitability.

A game is a tree of chance, choices and payoffs. What one player wins, the other loses. A player
knows only in which information set a choice is, and cannot tell apart the choices that share one.

    game = ZeroSumGame(root)
    game.exploitability(strategy)      # 0 in equilibrium
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from agentrl.errors import ConformanceError

Player = Literal[0, 1]
Strategy = Mapping[str, Sequence[float]]
"""The probabilities of the moves in each information set, of both players."""


@dataclass(frozen=True, slots=True, eq=False)
class Payoff:
    """The end of a game: what player 0 wins and player 1 loses."""

    amount: float


@dataclass(frozen=True, slots=True, eq=False)
class ChanceNode:
    """Something that no player decides: (probability, what follows) of each outcome."""

    outcomes: tuple[tuple[float, "GameNode"], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceNode:
    """A player's choice: its information set by name, and what follows each move."""

    player: Player
    information: str
    moves: tuple["GameNode", ...]


GameNode = Payoff | ChanceNode | ChoiceNode


@dataclass(frozen=True, slots=True)
class ZeroSumGame:
    """A game with exact answers. Players remember what they knew and did (perfect recall)."""

    root: GameNode
    choices: Mapping[str, Sequence[ChoiceNode]] = field(init=False)
    """All choices, by information set."""

    def __post_init__(self) -> None:
        found: dict[str, list[ChoiceNode]] = defaultdict(list)
        for choice in _choices(self.root):
            found[choice.information].append(choice)
        object.__setattr__(self, "choices", dict(found))

    def value(self, strategy: Strategy) -> float:
        """The mean win of player 0.

        Raises:
            ConformanceError: the strategy lacks an information set, or its numbers there are no
                probabilities of the moves.
        """
        self._check(strategy)

        def of(node: GameNode) -> float:
            return (
                node.amount
                if isinstance(node, Payoff)
                else sum(p * of(then) for p, then in _ways(node, strategy))
            )

        return of(self.root)

    def best_response(self, strategy: Strategy, player: Player) -> float:
        """The mean win of `player` by its best response to the other player's strategy.

        The best move in an information set is the best against its choices together, each weighted
        by the probability that chance and the other player lead there.

        Raises:
            ConformanceError: as `value`.
        """
        self._check(strategy)
        reach = dict(self._reach(self.root, strategy, 1.0, player))

        @cache
        def best_move(information: str) -> int:
            choices = self.choices[information]
            move_values = []
            for move in range(len(choices[0].moves)):
                # The player cannot tell these choices apart, so one move is made in all of them.
                values = [reach[choice] * value_of(choice.moves[move]) for choice in choices]
                move_values.append(sum(values))
            return move_values.index(max(move_values))

        def value_of(node: GameNode) -> float:
            if isinstance(node, Payoff):
                return -node.amount if player else node.amount
            if isinstance(node, ChoiceNode) and node.player == player:
                return value_of(node.moves[best_move(node.information)])
            return sum(p * value_of(then) for p, then in _ways(node, strategy))

        return value_of(self.root)

    def nash_conv(self, strategy: Strategy) -> float:
        """The gain of both players together by best responses: the sum of these, as the game is
        zero-sum.

        Lanctot et al., "A Unified Game-Theoretic Approach to Multiagent Reinforcement Learning"
        (arXiv:1711.00832), section 3.

        Raises:
            ConformanceError: as `value`.
        """
        return self.best_response(strategy, 0) + self.best_response(strategy, 1)

    def exploitability(self, strategy: Strategy) -> float:
        """`nash_conv` / 2: what a best response wins on average if both seats are played equally
        often.

        It is 0 exactly for a Nash equilibrium.

        Raises:
            ConformanceError: as `value`.
        """
        return self.nash_conv(strategy) / 2

    def reach(self, strategy: Strategy) -> dict[str, float]:
        """The probability that play comes to each information set.

        Raises:
            ConformanceError: as `value`.
        """
        self._check(strategy)
        total = dict.fromkeys(self.choices, 0.0)
        for choice, probability in self._reach(self.root, strategy, 1.0, None):
            total[choice.information] += probability
        return total

    def _reach(
        self, node: GameNode, strategy: Strategy, probability: float, certain: Player | None
    ) -> Iterator[tuple[ChoiceNode, float]]:
        """Each choice, with the probability of what leads there; the moves of the player `certain`
        count 1.
        """
        if isinstance(node, ChoiceNode):
            yield node, probability
        if not isinstance(node, Payoff):
            sure = isinstance(node, ChoiceNode) and node.player == certain
            for p, then in _ways(node, strategy):
                yield from self._reach(
                    then, strategy, probability if sure else probability * p, certain
                )

    def _check(self, strategy: Strategy) -> None:
        for information, choices in self.choices.items():
            given = strategy.get(information)
            count = len(choices[0].moves)
            if given is None or len(given) != count or min(given) < 0 or abs(sum(given) - 1) > 1e-6:
                raise ConformanceError(
                    f"the strategy has {given} in the information set {information!r}: give it"
                    f" {count} probabilities that add up to 1, one for each move"
                )


def _ways(node: ChanceNode | ChoiceNode, strategy: Strategy) -> Iterator[tuple[float, GameNode]]:
    """(probability, what follows) of each way on."""
    if isinstance(node, ChanceNode):
        yield from node.outcomes
    else:
        yield from zip(strategy[node.information], node.moves, strict=True)


def _choices(node: GameNode) -> Iterator[ChoiceNode]:
    if isinstance(node, Payoff):
        return
    if isinstance(node, ChoiceNode):
        yield node
    for then in node.moves if isinstance(node, ChoiceNode) else (then for _, then in node.outcomes):
        yield from _choices(then)


__all__ = ["ChanceNode", "ChoiceNode", "GameNode", "Payoff", "Player", "Strategy", "ZeroSumGame"]
