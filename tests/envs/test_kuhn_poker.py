"""Kuhn poker: the environment's own rules give the values that are known of the game."""

import random
from fractions import Fraction
from itertools import product

import pytest

from agentrl.envs.guess_number import GuessNumber
from agentrl.envs.kuhn_poker import CARDS, LEGAL, KuhnPoker, best_play, strong_player, weak_player
from agentrl.testing import check_env

THIRD = Fraction(1, 3)
SPOTS = {"north": ((), ("check", "bet")), "south": (("check",), ("bet",))}


def deals() -> dict[tuple[str, str], int]:
    """A seed for each of the six deals."""
    found: dict[tuple[str, str], int] = {}
    env = KuhnPoker()
    for seed in range(100):
        env.reset(seed=seed, options={})
        found.setdefault((env.cards["north"], env.cards["south"]), seed)
    assert len(found) == 6
    return found


def playouts() -> dict[tuple[str, str, tuple[str, ...]], int]:
    """What north wins, by deal and by all that is said, as the environment plays it."""
    outcomes = {}
    env = KuhnPoker()
    for (north, south), seed in deals().items():
        open_lines: list[tuple[str, ...]] = [()]
        while open_lines:
            line = open_lines.pop()
            for word in LEGAL[line]:
                env.reset(seed=seed, options={})
                for earlier in line:
                    env.step(earlier)
                _, _, over, _, info = env.step(word)
                if over:
                    assert info["rewards"]["north"] == -info["rewards"]["south"]
                    outcomes[north, south, (*line, word)] = info["rewards"]["north"]
                else:
                    open_lines.append((*line, word))
    return outcomes


def exact(bluff: Fraction):
    """Best play as fractions."""
    return {
        (card, said): Fraction(best_play(card, said, bluff)).limit_denominator(1000) for card in CARDS for said in LEGAL
    }


def value(outcomes, bold) -> Fraction:
    """North's winnings a hand, where `bold[card, said]` is the probability of the bolder word."""
    total = Fraction(0)
    for (north, south, line), paid in outcomes.items():
        chance = Fraction(1, 6)
        for place, word in enumerate(line):
            card = (north, south)[place % 2]
            p = bold[card, line[:place]]
            chance *= p if word in ("bet", "call") else 1 - p
        total += chance * paid
    return total


@pytest.mark.parametrize("bluff", [Fraction(0), Fraction(1, 5), THIRD])
def test_best_play_loses_an_eighteenth_of_a_chip_and_no_pure_strategy_does_better(bluff):
    outcomes, best = playouts(), exact(bluff)
    assert len(outcomes) == 6 * 5
    assert value(outcomes, best) == Fraction(-1, 18)
    for player, spots in SPOTS.items():
        places = list(product(CARDS, spots))
        values = [
            value(outcomes, {**best, **dict(zip(places, map(Fraction, choice), strict=True))})
            for choice in product((0, 1), repeat=len(places))
        ]
        assert (max(values) if player == "north" else min(values)) == Fraction(-1, 18)


def test_each_sees_its_own_card_and_the_other_one_only_when_it_is_shown():
    env = KuhnPoker()
    seed = deals()["king", "queen"]
    opening, info = env.reset(seed=seed, options={"hands": 2})
    assert info == {"agents": ["north", "south"], "agent": "north"}
    assert "king" in opening
    assert "queen" not in opening
    told, _, _, _, info = env.step("Bet")
    assert told == "Hand 1 of 2. You hold the queen.\nnorth bets.\nCall or fold?"
    assert info["agent"] == "south"
    told, reward, over, _, info = env.step("call")
    assert (reward, over, info["rewards"]) == (-2, False, {"north": 2, "south": -2})
    assert info["agent"] == "south", "who acts first changes with the hand"
    assert told.startswith("north shows the king.\nYou lose 2.\nHand 2 of 2.")
    told, *_ = env.step("check")
    assert told.startswith("south calls.\nsouth shows the queen.\nYou win 2.\nHand 2 of 2.")


def test_a_message_that_is_no_legal_word_folds():
    env = KuhnPoker()
    env.reset(seed=0, options={})
    _, reward, over, _, info = env.step("call")
    assert (reward, over, info["success"]) == (-1, True, {"north": False, "south": True})


@pytest.mark.parametrize("hands", [1, 5])
def test_it_keeps_the_contract(hands):
    check_env(KuhnPoker, options={"hands": hands})
    check_env(KuhnPoker, options={"hands": hands}, actions=weak_player)


def test_the_players_play_only_this_game():
    with pytest.raises(TypeError, match="plays KuhnPoker, not GuessNumber"):
        strong_player(GuessNumber(), random.Random(0))
