"""Games: values and best responses are those of an enumeration of all strategies."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConformanceError
from agentrl.oracles.games import ChanceNode, ChoiceNode, Payoff, ZeroSumGame


def matching_pennies() -> ZeroSumGame:
    """Player 1 does not see what player 0 has chosen, and wins if both have chosen the same."""
    shown = [tuple(Payoff(-1 if own == said else 1) for said in (0, 1)) for own in (0, 1)]
    return ZeroSumGame(
        ChoiceNode(0, "first", tuple(ChoiceNode(1, "second", moves) for moves in shown))
    )


def test_who_cannot_see_cannot_answer_each_move_with_another():
    game = matching_pennies()
    assert game.exploitability({"first": (0.5, 0.5), "second": (0.5, 0.5)}) == 0
    assert game.best_response({"first": (1, 0), "second": (0.5, 0.5)}, 1) == 1
    # Player 1 wins as it is; player 0 would change.
    assert game.nash_conv({"first": (1, 0), "second": (1, 0)}) == 2
    assert game.value({"first": (1, 0), "second": (0.25, 0.75)}) == 0.5


def test_reach_is_the_probability_of_coming_there():
    coin = ChanceNode(
        (
            (0.25, ChoiceNode(0, "a", (Payoff(0), ChoiceNode(1, "b", (Payoff(1), Payoff(2)))))),
            (0.75, Payoff(5)),
        )
    )
    game = ZeroSumGame(coin)
    assert game.reach({"a": (0.5, 0.5), "b": (1, 0)}) == {"a": 0.25, "b": 0.125}
    assert game.value({"a": (0.5, 0.5), "b": (1, 0)}) == 0.25 * 0.5 + 0.75 * 5


def test_what_is_no_strategy_is_refused():
    game = matching_pennies()
    for first in ((0.5,), (0.7, 0.7), (1.5, -0.5), None):
        given_there = {"second": (0.5, 0.5)} | ({"first": first} if first else {})
        with pytest.raises(ConformanceError, match="information set 'first'"):
            game.exploitability(given_there)


@given(
    st.lists(st.integers(-3, 3), min_size=16, max_size=16),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
)
def test_a_best_response_is_the_best_of_all_pure_strategies(payoffs, bold):
    """A deal that player 0 sees and player 1 does not; each acts, and player 0 once more."""
    paid = iter(payoffs)

    def after(deal: str) -> ChoiceNode:
        def last(said: str) -> ChoiceNode:
            return ChoiceNode(0, f"{deal} {said}", (Payoff(next(paid)), Payoff(next(paid))))

        def second(said: str) -> ChoiceNode:
            return ChoiceNode(1, said, (last(f"{said} 0"), Payoff(next(paid))))

        return ChoiceNode(0, deal, (second("0"), Payoff(next(paid))))

    game = ZeroSumGame(ChanceNode(((0.3, after("low")), (0.7, after("high")))))
    assert set(game.choices) == {"low", "high", "0", "low 0 0", "high 0 0"}
    strategy = {name: (p, 1 - p) for name, p in zip(game.choices, bold, strict=False)}
    for player in (0, 1):
        own = [name for name, choices in game.choices.items() if choices[0].player == player]
        pure = [
            game.value({**strategy, **dict(zip(own, moves, strict=True))})
            for moves in product([(1, 0), (0, 1)], repeat=len(own))
        ]
        best = -min(pure) if player else max(pure)
        assert game.best_response(strategy, player) == pytest.approx(best)
