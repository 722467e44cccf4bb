"""reasoning-gym, TextArena and GEM as environments, on real instances."""

import contextlib
import io
import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import plugins
from agentrl.envs import foreign
from agentrl.envs.foreign import GlobalRng
from agentrl.errors import AgentRLError, ConfigError, EnvError, PluginError
from agentrl.protocols import Env
from agentrl.testing import check_env


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


reasoning_gym, textarena, gem, minigrid = map(
    needs, ("reasoning_gym", "textarena", "gem", "minigrid")
)

NO_WORDS = "NLTK's word list has to be downloaded"
NO_KEY = "asks a paid model: wants OPENROUTER_API_KEY"
NO_PANDAS = "imports pandas, which GEM does not ask for"
NO_WFC = "wants what minigrid[wfc] brings"
NEEDS_312 = "its source is Python 3.12's"
TOO_SLOW = "searches a puzzle for minutes in reset; not tried"
MAY_WORK_ELSEWHERE = (NO_WORDS, NO_KEY, NO_PANDAS, NO_WFC, NEEDS_312)
LEVELS = ("easy", "hard", "random")
NOT_PLAYED: Mapping[str, Mapping[str, str]] = {
    "rg": {
        "composite": "has no questions of its own",
        "game_of_life_halting": "pays garbage in full: its scorer takes any words for an answer",
    },
    "textarena": {
        "BabyAiText-v0": "imports gym",
        "CharacterConclave-v0": "calls TextArena's State wrongly",
        **dict.fromkeys(
            (
                "Checkers-v0",
                "Chess-v0",
                "IteratedStagHunt-v0",
                "ReverseTicTacToe-v0",
                "UltimateTexasHoldem-v0",
            ),
            NEEDS_312,
        ),
        "Klondike-v0": "its source is no Python",
        **dict.fromkeys(
            ("Debate-v0", "GuessWho-v0", "ScenarioPlanning-v0", "TwentyQuestions-v0"), NO_KEY
        ),
        **dict.fromkeys(
            (
                "Codenames-v0",
                "DontSayIt-v0",
                "Hangman-v0",
                "LetterAuction-v0",
                "SpellingBee-v0",
                "WordChains-v0",
                "WordLadder-v0",
                "WordSearch-v0",
                "Wordle-v0",
            ),
            NO_WORDS,
        ),
        "ScorableGames-v0": "its games are not in the package",
        "UsedCarNegotiation-v0": "its data are not in the package",
    },
    "gem": {
        **dict.fromkeys(
            ("game:Crosswords-v0-easy", "game:Crosswords-v0-hard", "game:Crosswords-v0-random"),
            NO_PANDAS,
        ),
        "game:FifteenPuzzle-v0-random": "cannot be made: its size is None",
        **{
            f"game:{word}-v0-{level}": NO_WORDS
            for word in ("Hangman", "WordSearch", "Wordle")
            for level in LEVELS
        },
        **dict.fromkeys(("game:Sokoban-v0-hard", "game:Sokoban-v0-random"), TOO_SLOW),
    },
    "gymnasium": dict.fromkeys(
        (
            f"minigrid:MiniGrid-WFC-{name}-v0"
            for name in (
                "DungeonMazeScaled",
                "MazeSimple",
                "ObstaclesAngular",
                "ObstaclesBlackdots",
                "ObstaclesHogs3",
                "RoomsFabric",
            )
        ),
        NO_WFC,
    ),
}
"""What does not keep the contract here, and why."""

NO_GOLD = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Data sets of reasoning-gym that score answers and know no right one."""

SLOW_OPTIONS = {"rg:acre": {"size": 500}}


def make(address: str) -> Env:
    env: Env = plugins.load("envs", address)()
    return env


def play(env: Env, actions: Sequence[str], seed: int = 0, **options: Any) -> list[Any]:
    """What is seen, to the end of the episode or of the actions."""
    seen: list[Any] = [env.reset(seed=seed, options=options)]
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


# The global generators, boxed.


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=20), st.integers(0, 2**63)
)
def test_what_boxes_draw_in_turns_is_what_each_draws_alone(
    turns: list[tuple[int, int]], seed: int
) -> None:
    def draw(count: int) -> list[float]:
        return [
            value for _ in range(count) for value in (random.random(), float(np.random.random()))
        ]

    before = (random.getstate(), np.random.get_state(legacy=True)[1].tobytes())
    generators = [GlobalRng(seed + number) for number in range(3)]
    drawn: list[list[float]] = [[], [], []]
    for number, count in turns:
        with generators[number].install():
            drawn[number] += draw(count)
    for number, values in enumerate(drawn):
        with GlobalRng(seed + number).install():
            assert draw(len(values) // 2) == values
    assert (random.getstate(), np.random.get_state(legacy=True)[1].tobytes()) == before


def test_the_generators_come_back_from_a_game_that_raises() -> None:
    before = random.getstate()
    with contextlib.suppress(KeyError), GlobalRng(1).install():
        raise KeyError(random.random())
    assert random.getstate() == before
    with GlobalRng(1).install():
        pass


def test_a_game_that_never_gives_the_generators_back_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign, "GLOBAL_RNG_SECONDS", 0.01)
    with (
        GlobalRng(0).install(),
        pytest.raises(EnvError, match="isolation=process"),
        GlobalRng(1).install(),
    ):
        pass


# reasoning-gym.


@reasoning_gym
@pytest.mark.parametrize(
    "name",
    [
        "prime_factorization",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("leg_counting", "list_functions")
        ),
    ],
)
def test_questions_keep_the_contract(name: str) -> None:
    check_env(plugins.load("envs", f"rg:{name}"), seeds=(0, 10_001))


@reasoning_gym
def test_a_question_is_answered_once_and_the_gold_answer_is_told_only_then() -> None:
    env = make("rg:leg_counting")
    _, info = env.reset(seed=5, options={})  # type: ignore[misc]
    assert info == {}
    observation, reward, terminated, truncated, info = env.step("no idea")  # type: ignore[misc]
    gold = info["answer"]
    assert (observation, reward, terminated, truncated, info["success"]) == (
        "Score: 0.",
        0.0,
        True,
        False,
        False,
    )
    assert gold.isdigit()
    with pytest.raises(EnvError, match="call reset first"):
        env.step(gold)
    for message in (gold, f"<answer>0</answer> no, <answer> {gold} </answer>"):
        result = play(env, [message], seed=5)[-1]
        assert result == ("Score: 1.", 1.0, True, False, {"success": True, "answer": gold})


@reasoning_gym
def test_the_seed_chooses_the_question_and_the_settings_the_data_set() -> None:
    env = make("rg:chain_sum")
    first = [env.reset(seed=seed, options={}) for seed in range(20)]
    assert len({text for text, _ in first}) == 20  # type: ignore[misc]
    longer, _ = env.reset(seed=0, options={"config": {"min_terms": 9, "max_terms": 9}})  # type: ignore[misc]
    assert longer.count("+") + longer.count(" - ") == 8
    with pytest.raises(ConfigError, match=r"Its settings: .*min_terms=2"):
        env.reset(seed=0, options={"config": {"terms": 9}})


@reasoning_gym
def test_a_data_set_that_knows_no_right_answer_is_remarked_on() -> None:
    (cost,) = check_env(plugins.load("envs", "rg:leg_counting"), seeds=(0,))
    assert cost.startswith("[snapshot] ")
    assert (
        "is None: no answer is known"
        in check_env(plugins.load("envs", "rg:rubiks_cube"), seeds=(0,))[0]
    )


@reasoning_gym
def test_a_scorer_that_raises_or_is_flooded_has_not_accepted_the_answer() -> None:
    env = make("rg:prime_factorization")
    for message in ("two and three", "2 × " * 50_000):
        assert play(env, [message])[-1][1] == 0.0


@reasoning_gym
def test_a_scorer_that_is_broken_is_an_error_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from reasoning_gym.arithmetic.prime_factorization import PrimeFactorizationDataset

    def score_answer(self: Any, answer: str | None, entry: dict[str, Any]) -> float:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(PrimeFactorizationDataset, "score_answer", score_answer)
    with pytest.raises(
        EnvError, match=r"even on the expected answer: RuntimeError\('the disk is full'\)"
    ):
        play(make("rg:prime_factorization"), ["two and three"])


# TextArena.


@textarena
@pytest.mark.parametrize(
    "name", ["TicTacToe-v0", "Blackjack-v0", "KuhnPoker-v0", "ThreeCardMonte-v0", "Countdown-v0"]
)
def test_games_keep_the_contract(name: str) -> None:
    check_env(plugins.load("envs", f"textarena:{name}"), seeds=(0, 1), max_turns=6)


def free_cells(observation: str) -> list[str]:
    """The legal moves that TicTacToe lists last."""
    return re.findall(r"'(\[\d\])'", observation.rsplit("Available Moves", maxsplit=1)[-1])


def opens_at_the_top(seen: str, rng: random.Random) -> str:
    """An opponent of TicTacToe for the tests."""
    return "[1]" if seen.count("Available Moves") == 1 else "[7]"


@textarena
def test_the_first_legal_move_is_found_and_told() -> None:
    env = make("textarena:TicTacToe-v0")
    seen = play(env, ["[4]", "[4]", "nonsense"], opponent="first")
    assert "Tic Tac Toe" in seen[0][0]
    assert [len(free_cells(text)) for text, *_ in seen[:2]] == [9, 7]
    assert "[4]" not in free_cells(seen[1][0])
    assert "invalid move" in seen[2][0]
    assert seen[2][1:] == (0.0, False, False, {"success": False})
    assert seen[3][1:] == (-1.0, True, False, {"success": False})


@textarena
def test_a_game_against_a_random_opponent_can_be_won_and_lost() -> None:
    results = set()
    for seed in range(30):
        env = make("textarena:TicTacToe-v0")
        result: Any = env.reset(seed=seed, options={})
        while not (len(result) == 5 and result[2]):
            result = env.step(free_cells(result[0])[0])
        assert "invalid" not in result[0]
        results.add((result[1], result[4]["success"]))
    assert {(1.0, True), (-1.0, False)} <= results


@textarena
def test_an_opponent_may_be_a_function_and_move_first() -> None:
    env = make("textarena:TicTacToe-v0")
    seen = play(env, ["[4]"], seat=1, opponent=f"{__name__}:opens_at_the_top")
    assert [free_cells(text) for text, *_ in seen] == [
        ["[0]", "[2]", "[3]", "[4]", "[5]", "[6]", "[7]", "[8]"],
        ["[0]", "[2]", "[3]", "[5]", "[6]", "[8]"],
    ]
    for options, said in (
        ({"opponent": "randm"}, "Write 'random', 'first'"),
        ({"opponent": "no_such_package:x"}, "cannot be found"),
        ({"seat": 2}, "is played by 2, from 0"),
        ({"players": 3}, "refuses options"),
    ):
        with pytest.raises(ConfigError, match=said):
            env.reset(seed=0, options=options)


@textarena
def test_games_that_draw_from_the_global_random_are_the_same_beside_others() -> None:
    names = ("2048-v0", "Minesweeper-v0", "PigDice-v0")
    actions = ["[up]", "[0 0]", "[roll]", "[left]", "[3 3]", "[roll]"]
    alone = [play(make(f"textarena:{name}"), actions, seed=3) for name in names]
    envs = [make(f"textarena:{name}") for name in names]
    together: list[list[Any]] = [[env.reset(seed=3, options={})] for env in envs]
    for turn, action in enumerate(actions, 1):
        for env, seen, expected in zip(envs, together, alone, strict=True):
            random.random()
            if turn < len(expected):
                seen.append(env.step(action))
    assert together == alone


# GEM.


@gem
@pytest.mark.parametrize(
    "name", ["game:GuessTheNumber-v0-easy", "game:Minesweeper-v0-easy", "rg:leg_counting"]
)
def test_gem_keeps_the_contract(name: str) -> None:
    check_env(plugins.load("envs", f"gem:{name}"), seeds=(0, 2**63), max_turns=6)


@gem
def test_a_number_is_guessed_by_halving() -> None:
    env = make("gem:game:GuessTheNumber-v0-easy")
    result: Any = env.reset(
        seed=1, options={"kwargs": {"min_number": 1, "max_number": 8, "max_turns": 8}}
    )
    low, high = 1, 8
    for _ in range(8):
        guess = (low + high) // 2
        result = env.step(f"I say \\boxed{{{guess}}}")
        if result[2]:
            break
        low, high = (guess + 1, high) if "higher" in result[0] else (low, guess - 1)
    assert result[1:] == (1.0, True, False, {"success": True})
    with pytest.raises(EnvError, match="call reset first"):
        env.step("\\boxed{1}")
    with pytest.raises(ConfigError, match="gem cannot make"):
        env.reset(seed=1, options={"kwargs": {"max_number": "many"}})


@gem
def test_importing_gem_leaves_the_logging_of_the_program_alone() -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    plugins.load("envs", "gem:game:GuessTheNumber-v0-easy")
    assert (logging.getLogger().handlers, logging.getLogger().level) == before


@gem
@reasoning_gym
@textarena
def test_a_wrong_id_names_the_nearest() -> None:
    for address, said in (
        ("rg:leg_count", "Did you mean 'leg_counting'"),
        ("textarena:Wordl-v0", "Did you mean 'Wordle-v0'"),
        ("gem:game:GuessTheNumber-v0", "'game:GuessTheNumber-v0-easy'"),
        ("gem:", "Some of them"),
    ):
        with pytest.raises(PluginError) as error:
            plugins.load("envs", address)
        assert said in str(error.value)


# All that there are.


def surprises(scheme: str, ids: Sequence[str], seeds: Sequence[int] = (0, 1)) -> dict[str, str]:
    """What of `ids` breaks the contract, and how, though `NOT_PLAYED` gives no reason; or does not,
    though it does; and what keeps it with a remark that `NO_GOLD` does not know of.
    """
    known = {name: reason for name, reason in NOT_PLAYED.get(scheme, {}).items() if name in ids}
    broken = {}
    for name in ids:
        if known.get(name) == TOO_SLOW:
            continue
        options: Mapping[str, Any] = SLOW_OPTIONS.get(f"{scheme}:{name}", {})
        # Games print, and tell of downloads that failed.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                factory: Callable[[], Env] = plugins.load("envs", f"{scheme}:{name}")
                remarks = check_env(factory, seeds=seeds, options=options, deadline=60, max_turns=6)
                remarks = tuple(one for one in remarks if not one.startswith("[snapshot] "))
                if bool(remarks) != (name in NO_GOLD):
                    broken[name] = f"remarks: {remarks}"
            except AgentRLError as error:
                broken[name] = str(error)
    healed = {
        name: "plays"
        for name in known
        if name not in broken and known[name] not in MAY_WORK_ELSEWHERE
    }
    healed = {name: text for name, text in healed.items() if known[name] != TOO_SLOW}
    return {name: text for name, text in broken.items() if name not in known} | healed


in_part_and_whole = pytest.mark.parametrize(
    "each",
    [
        pytest.param(8, marks=pytest.mark.slow, id="an eighth"),
        pytest.param(1, marks=pytest.mark.long, id="all"),
    ],
)
"""Every so many of them."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_toy_text_keeps_the_contract() -> None:
    from gymnasium import registry

    ids = [
        name
        for name, spec in registry.items()
        if "toy_text" in str(spec.entry_point) and name != "Taxi-v3"
    ]
    assert len(ids) >= 6
    assert surprises("gymnasium", ids) == {}


@minigrid
@in_part_and_whole
@pytest.mark.filterwarnings("ignore")
def test_the_boards_of_minigrid_keep_the_contract(each: int) -> None:
    plugins.load("envs", "gymnasium:minigrid:MiniGrid-Empty-5x5-v0")
    from gymnasium import registry

    boards = [f"minigrid:{name}" for name in registry if name.startswith(("MiniGrid-", "BabyAI-"))]
    assert surprises("gymnasium", boards[::each], seeds=(1,)) == {}
    assert len(boards) - len(NOT_PLAYED["gymnasium"]) >= 170


@reasoning_gym
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_over_a_hundred_sets_of_questions_keep_the_contract() -> None:
    plugins.load("envs", "rg:leg_counting")
    from reasoning_gym.factory import DATASETS

    assert surprises("rg", sorted(DATASETS)) == {}
    assert len(DATASETS.keys() - NOT_PLAYED["rg"].keys()) >= 100


@textarena
@in_part_and_whole
@pytest.mark.filterwarnings("ignore")
def test_over_sixty_games_keep_the_contract(
    each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files where they run
    plugins.load("envs", "textarena:TicTacToe-v0")
    from textarena.envs.registration import ENV_REGISTRY

    games = sorted(name for name in ENV_REGISTRY if name.endswith("-v0"))
    assert surprises("textarena", games[::each]) == {}
    assert len(games) - len(NOT_PLAYED["textarena"]) >= 60


@gem
@in_part_and_whole
@pytest.mark.filterwarnings("ignore")
def test_the_games_of_gem_keep_the_contract(each: int) -> None:
    plugins.load("envs", "gem:game:GuessTheNumber-v0-easy")
    from gem.envs.registration import ENV_REGISTRY

    games = sorted(name for name in ENV_REGISTRY if name.startswith("game:"))
    assert surprises("gem", games[::each]) == {}
    assert len(games) - len(NOT_PLAYED["gem"]) >= 20
