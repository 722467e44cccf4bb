"""Kuhn poker: the environment's own rules give the values that are known of the game."""

import random
from fractions import Fraction
from itertools import product

import pytest

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.guess_number import GuessNumber
from agentrl.envs.kuhn_poker import (
    CARDS,
    LEGAL,
    TIMID,
    KuhnOracle,
    KuhnPoker,
    best_play,
    kuhn_game,
    moves,
    situation,
    strong_player,
    weak_player,
)
from agentrl.errors import ConfigError
from agentrl.flow import run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.testing import check_env
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Message, Task

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
        (card, said): Fraction(best_play(card, said, bluff)).limit_denominator(1000)
        for card in CARDS
        for said in LEGAL
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


def strategy_of(bold) -> dict[str, list[float]]:
    """The strategy with these probabilities of the bolder word, and no other message."""
    found = {}
    for (card, said), p in bold.items():
        chances = {word: float(p if word in ("bet", "call") else 1 - p) for word in LEGAL[said]}
        found[situation(card, said)] = [chances.get(word, 0.0) for word in moves(said)]
    return found


@pytest.mark.parametrize("bluff", [0.0, 0.2, 1 / 3])
def test_optimal_play_cannot_be_exploited_and_is_worth_minus_an_eighteenth(bluff):
    best = strategy_of(
        {(card, said): best_play(card, said, bluff) for card in CARDS for said in LEGAL}
    )
    assert kuhn_game().exploitability(best) == pytest.approx(0, abs=1e-12)
    assert kuhn_game().value(best) == pytest.approx(-1 / 18)


def test_a_timid_player_can_be_exploited():
    timid = strategy_of({(card, said): TIMID[card] for card in CARDS for said in LEGAL})
    assert kuhn_game().exploitability(timid) == pytest.approx(0.352, abs=0.001)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_exploitability_is_what_the_best_of_all_pure_strategies_wins_by_the_environments_own_rules(
    seed,
):
    """For uniform play 11/24: 1/2 for a best response in the first seat, 5/12 in the second."""
    rng = random.Random(seed)
    spots = list(product(CARDS, LEGAL))
    bold = {
        spot: Fraction(1, 2) if seed is None else Fraction(rng.randint(0, 8), 8) for spot in spots
    }
    outcomes, found = playouts(), {}
    for player, said in SPOTS.items():
        places = list(product(CARDS, said))
        values = [
            value(outcomes, {**bold, **dict(zip(places, map(Fraction, choice), strict=True))})
            for choice in product((0, 1), repeat=len(places))
        ]
        found[player] = max(values) if player == "north" else -min(values)
    game, strategy = kuhn_game(), strategy_of(bold)
    assert game.value(strategy) == pytest.approx(float(value(outcomes, bold)))
    assert [game.best_response(strategy, 0), game.best_response(strategy, 1)] == pytest.approx(
        [float(found["north"]), float(found["south"])]
    )
    assert game.exploitability(strategy) == pytest.approx(
        float(found["north"] + found["south"]) / 2
    )
    if seed is None:
        assert found == {"north": Fraction(1, 2), "south": Fraction(5, 12)}
        assert len(game.choices) == 12
        assert min(game.reach(strategy).values()) > 0


def test_what_is_no_word_is_a_fold_in_exact_metrics_too():
    oracle = KuhnPoker().enumeration({"strict": True})
    silent = oracle.metrics([[0.0, 0.0]] * 12)
    assert silent == pytest.approx(
        {"exploitability": 1.0, "first_player_value": -1.0, "legal": 0.0}
    )
    uniform = oracle.metrics([[0.5, 0.5]] * 12)
    assert uniform["exploitability"] == pytest.approx(11 / 24)
    assert uniform["legal"] == pytest.approx(1.0)
    for options in ({"strict": True, "hands": 2}, {}):
        with pytest.raises(ConfigError, match="a single hand whose words are exact"):
            KuhnPoker().enumeration(options)


def test_where_words_are_strict_only_the_exact_word_acts():
    env = KuhnPoker()
    for action, over in {"bet": False, "Bet": True, " bet": True, "bet.": True}.items():
        env.reset(seed=0, options={"strict": True})
        assert env.step(action)[2] is over


def test_the_questions_are_what_agents_are_shown_when_they_play():
    renderer = TemplateRenderer(ByteTokenizer())
    seen: set[tuple[Message, ...]] = set()

    async def main() -> None:
        nonlocal seen
        host = EnvPool({"kuhn": KuhnPoker}, EnvDeadlines())
        runner = EnvEpisodeRunner(
            ScriptedPolicy(weak_player, renderer), renderer, host, Budget(turns=9), 600
        )
        for seed in range(300):
            for played in await runner.play(
                Assignment("e", Task("kuhn", seed, {"strict": True}), seed)
            ):
                seen |= {
                    played.messages[:n]
                    for n, said in enumerate(played.messages)
                    if said.role == "assistant"
                }

    run_virtual(main)
    asked = {tuple(question.messages) for question in KuhnOracle().questions}
    assert seen == asked
    assert len(asked) == 12


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
