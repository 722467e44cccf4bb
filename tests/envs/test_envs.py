"""The bases that environments are built on, and the built-in environments made with them."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Mapping
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl import EncodedImage, Observation
from agentrl.envs.base import TextEnv, ToolEnv, ToolError, ToolResult
from agentrl.envs.calculator import Calculator
from agentrl.envs.frozen_lake import ACTIONS, FrozenLake, careful_player
from agentrl.envs.frozen_lake import weak_player as lake_player
from agentrl.envs.guess_number import GuessNumber
from agentrl.envs.guess_number import weak_player as guess_player
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env
from agentrl.testing import check_env
from agentrl.trajectory import ToolCall
from tests.properties import examples


def call(name: str, **arguments: Any) -> str:
    return ToolCall(name, arguments).render()


def run(result: Any) -> Any:
    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return asyncio.run(wait(result)) if isinstance(result, Awaitable) else result


class Safe(ToolEnv):
    """The environment of the README: twenty lines."""

    system_prompt = "Open the safe. Its code is a number from 0 to 99."

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.code = self.rng.randrange(100)
        return "The safe is closed."

    def compare(self, number: int) -> str:
        """Say whether the code is higher or lower than a number.

        Args:
            number: from 0 to 99
        """
        return "higher" if self.code > number else "lower or equal"

    def open(self, code: int) -> ToolResult:
        """Try a code. There is only one try."""
        right = code == self.code
        return ToolResult(
            "open" if right else "locked", reward=float(right), terminated=True, success=right
        )

    def weigh(self, things: list[str], unit: Literal["kg", "g"] = "kg") -> dict[str, Any]:
        if not things:
            raise ToolError("there is nothing to weigh")
        return {"sum": len(things), "unit": unit}

    def drop(self) -> str:
        return {}["the floor"]  # a bug

    def forget(self) -> None:
        return None


@pytest.fixture
def safe() -> Safe:
    env = Safe()
    assert env.reset(seed=3, options={}) == ("The safe is closed.", {})
    return env


def test_a_tool_environment_is_a_plain_class_of_typed_methods(safe: Safe) -> None:
    assert [tool["function"]["name"] for tool in Safe.tools] == [
        "compare",
        "open",
        "weigh",
        "drop",
        "forget",
    ]
    assert safe.step(call("compare", number=99)) == ("lower or equal", 0.0, False, False, {})
    observation, reward, terminated, truncated, info = safe.step(call("open", code=safe.code))
    assert (observation, reward, terminated, truncated, info) == (
        "open",
        1.0,
        True,
        False,
        {"success": True},
    )
    check_env(
        Safe,
        actions=[
            call("compare", number=3),
            "hm",
            call("weigh", things=["a"]),
            call("open", code=1),
        ],
    )


def test_the_same_seed_gives_the_same_episode_and_another_another() -> None:
    env = Safe()
    codes = []
    for seed in (1, 1, 2, 3, 4):
        env.reset(seed=seed, options={})
        codes.append(env.code)
    assert codes[0] == codes[1]
    assert len(set(codes)) > 2


def test_several_calls_of_a_message_run_in_order_until_one_ends_the_episode(safe: Safe) -> None:
    observation, reward, *_ = safe.step(
        call("compare", number=99) + call("weigh", things=["a", "b"])
    )
    assert observation == 'compare: lower or equal\nweigh: {"sum": 2, "unit": "kg"}'
    assert reward == 0.0
    observation, reward, terminated, _, info = safe.step(
        call("compare", number=99) + call("open", code=-1) + call("open", code=safe.code)
    )
    assert observation == "compare: lower or equal\nopen: locked"
    assert (reward, terminated, info) == (0.0, True, {"success": False})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (call("opne", code=3), "did you mean 'open'?"),
        (call("compare", number="three"), "valid integer, got 'three'"),
        (call("compare"), "'number' is missing"),
        ("<tool_call>{oops}</tool_call>", "not valid JSON"),
        (call("weigh", things=[]), "Error: there is nothing to weigh"),
        ("I would open it", "Call a tool (compare, open, weigh, drop, forget)"),
        ("", "Call a tool"),
    ],
)
def test_a_bad_call_costs_a_turn_and_says_what_was_wrong(
    safe: Safe, message: str, said: str
) -> None:
    observation, reward, terminated, truncated, info = safe.step(message)
    assert said in observation
    assert (reward, terminated, truncated, info) == (0.0, False, False, {})


def test_short_calls_are_a_name_and_the_first_argument_and_nothing_else(safe: Safe) -> None:
    safe.call_shortly(True)
    assert safe.tools == ()
    assert safe.system_prompt.startswith(Safe.system_prompt)
    assert "compare NUMBER, open CODE, weigh THINGS, drop, forget" in safe.system_prompt
    for message, said in [
        ("compare 99", "lower or equal"),
        (" compare  -1\n", "higher"),
        ('weigh ["a"]', '{"sum": 1, "unit": "kg"}'),
        ("compare three", "valid integer, got 'three'"),
        ("compare", "'number' is missing"),
        ("opne 3", "did you mean 'open'?"),
        ("drop it", "nothing may follow the name"),
        ("", "there is no tool ''"),
        (call("compare", number=99), "there is no tool"),
    ]:
        observation, reward, terminated, truncated, info = safe.step(message)
        assert said in observation
        assert (reward, terminated, truncated, info) == (0.0, False, False, {})
    called = safe.written(ToolCall("open", {"code": safe.code}))
    assert called == f"open {safe.code}"
    assert safe.step(called)[1:3] == (1.0, True)
    safe.call_shortly(False)
    assert safe.tools == Safe.tools
    assert safe.system_prompt == Safe.system_prompt
    assert safe.written(ToolCall("drop", {})) == call("drop")


@given(words=st.text(max_size=60))
def test_no_message_breaks_short_calls(words: str) -> None:
    env = Safe()
    env.reset(seed=0, options={})
    env.call_shortly(True)
    for message in (words, f"compare {words}", f"weigh {words}"):
        assert isinstance(env.step(message)[0], str)


def test_a_good_call_next_to_a_malformed_one_is_played(safe: Safe) -> None:
    observation, *_ = safe.step("<tool_call>{oops}</tool_call>" + call("compare", number=99))
    assert observation.startswith("compare: lower or equal\nError: the tool call is not valid JSON")


def test_an_exception_in_a_tool_is_a_failure_of_the_environment(safe: Safe) -> None:
    with pytest.raises(KeyError, match="the floor"):
        safe.step(call("drop"))
    with pytest.raises(EnvError, match=r"tool 'forget' returned NoneType; return a text"):
        safe.step(call("forget"))


def test_a_message_without_a_call_goes_to_reply() -> None:
    class Chat(Safe):
        def reply(self, text: str) -> ToolResult:
            return ToolResult(f"you said {text}", reward=0.5, truncated=True)

    env = Chat()
    env.reset(seed=0, options={})
    assert env.step(" hello ") == ("you said hello", 0.5, False, True, {})
    assert "reply" not in [tool["function"]["name"] for tool in env.tools]


def test_async_tools_run_on_the_event_loop() -> None:
    class Slow(ToolEnv):
        async def start(self, seed: int, options: Mapping[str, Any]) -> str:
            await asyncio.sleep(0)
            return "ready"

        async def fetch(self, number: int) -> int:
            await asyncio.sleep(0)
            return number + 1

        def plain(self) -> str:
            return "plain"

    env = Slow()
    assert run(env.reset(seed=0, options={})) == ("ready", {})
    assert run(env.step(call("fetch", number=1) + call("plain")))[0] == "fetch: 2\nplain: plain"
    check_env(Slow)


def test_a_sync_tool_that_waits_is_told_to_be_async() -> None:
    class Sneaky(ToolEnv):
        def start(self, seed: int, options: Mapping[str, Any]) -> str:
            return ""

        def fetch(self) -> Any:
            return asyncio.sleep(0, "x")

    env = Sneaky()
    env.reset(seed=0, options={})
    with pytest.raises(EnvError, match="async def"):
        env.step(call("fetch"))


def test_an_untyped_tool_is_an_error_when_the_class_is_written() -> None:
    with pytest.raises(ConfigError, match="parameter 'where' has no type"):

        class Wrong(ToolEnv):
            def start(self, seed: int, options: Mapping[str, Any]) -> str:
                return ""

            def go(self, where) -> str:  # type: ignore[no-untyped-def]
                return ""


@pytest.mark.parametrize("env", [FrozenLake, GuessNumber, Calculator])
def test_built_in_environments_keep_the_contract(env: type[TextEnv]) -> None:
    assert isinstance(env(), Env)
    check_env(env)


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        (FrozenLake, {"sise": 4}, "did you mean 'size'"),
        (FrozenLake, {"size": 1}, "greater than or equal to 2"),
        (GuessNumber, {"high": "many"}, "'high'"),
        (Calculator, {"figures": 2}, "Options are: digits"),
    ],
)
def test_wrong_options_say_what_exists(
    env: type[TextEnv], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match="options") as error:
        env().reset(seed=0, options=options)
    assert said in str(error.value)


# --- FrozenLake ---


def lake(seed: int = 0, **options: Any) -> tuple[FrozenLake, str]:
    env = FrozenLake()
    observation, _ = run(env.reset(seed=seed, options=options))
    return env, observation


def test_the_lake_is_shown_as_a_grid_and_what_lies_around() -> None:
    env, first = lake(seed=1, p=1.0)
    assert first == " P F F F\n F F F F\n F F F F\n F F F G\n W F F W"
    moved = " S P F F\n F F F F\n F F F F\n F F F G\n S F F W"
    assert env.step("right") == (moved, 0.0, False, False, {"success": False})
    assert env.step(" DOWN\n")[0] == " S F F F\n F P F F\n F F F F\n F F F G\n F F F F"


@given(seed=st.integers(0, 10_000), moves=st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_the_last_line_is_what_the_next_move_meets(seed: int, moves: list[str]) -> None:
    env, seen = lake(seed)
    for move in moves:
        *grid, around = seen.split("\n")
        row, column = next(
            (r, cells.split().index("P")) for r, cells in enumerate(grid) if "P" in cells
        )
        for (down, right), shown in zip(
            ((0, -1), (1, 0), (0, 1), (-1, 0)), around.split(), strict=True
        ):
            inside = 0 <= row + down < 4 and 0 <= column + right < 4
            assert shown == (grid[row + down].split()[column + right] if inside else "W")
        seen, _, over, _, _ = env.step(move)
        if over:
            return


def test_a_message_that_is_no_legal_word_costs_a_turn_on_the_lake() -> None:
    env, first = lake()
    for message in ("", "left right", "go left", "<tool_call>"):
        hinted = f"{first}\nSay left, down, right or up."
        assert env.step(message) == (hinted, 0.0, False, False, {"success": False})


def test_the_goal_pays_and_a_hole_ends_for_nothing() -> None:
    env, _ = lake(p=1.0, size=2)
    env.step("right")
    assert env.step("down") == (" S F\n F P\n F W W F", 1.0, True, False, {"success": True})
    with pytest.raises(EnvError, match="call reset first"):
        env.step("down")
    seed = next(seed for seed in range(100) if lake(seed)[1].splitlines()[0].startswith(" P H"))
    env, _ = lake(seed)
    observation, *rest = env.step("right")
    assert observation.startswith(" S P")
    assert rest == [0.0, True, False, {"success": False}]


def test_stepping_before_reset_is_an_error() -> None:
    with pytest.raises(EnvError, match="call reset first"):
        FrozenLake().step("left")


@examples(60)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 7), p=st.sampled_from([0.7, 0.8, 1.0]))
def test_shortest_moves_solve_every_map_in_the_fewest_moves(seed: int, size: int, p: float) -> None:
    env, _ = lake(seed, size=size, p=p)
    rng = random.Random(seed)
    turns, over, reward = 0, False, 0.0
    while not over:
        _, reward, over, _, _ = env.step(lake_player(env, rng, skill=1.0))
        turns += 1
        assert turns <= size * size
    assert reward == 1.0
    assert turns >= 2 * (size - 1)
    assert p < 1.0 or turns == 2 * (size - 1)


def test_the_weak_player_wins_more_with_more_skill() -> None:
    def wins(skill: float) -> int:
        rng = random.Random(0)
        won = 0
        env = FrozenLake()
        for seed in range(120):
            env.reset(seed=seed, options={})
            for _ in range(30):
                _, reward, over, _, _ = env.step(lake_player(env, rng, skill))
                if over:
                    won += int(reward)
                    break
        return won

    random_wins, weak, perfect = wins(0.0), wins(0.3), wins(1.0)
    assert random_wins < 12 < weak < 80 < perfect == 120


def test_the_careful_player_never_falls_and_always_moves() -> None:
    rng = random.Random(0)
    won = 0
    env = FrozenLake()
    for seed in range(200):
        seen, _ = env.reset(seed=seed, options={})
        for _ in range(12):
            before = seen
            seen, reward, over, _, _ = env.step(careful_player(env, rng))
            assert seen != before
            assert over == (reward == 1.0)
            if over:
                won += 1
                break
    assert 5 < won < 60


def test_maps_differ_between_seeds() -> None:
    assert len({lake(seed)[1] for seed in range(50)}) > 30


def slips(slippery: bool | float) -> int:
    """How many of 30 first moves to the right lead elsewhere."""
    lakes = [lake(seed, p=1.0, slippery=slippery)[0] for seed in range(30)]
    return sum(not env.step("right")[0].startswith(" S P") for env in lakes)


def test_ice_slips_as_often_as_it_should() -> None:
    assert 5 < slips(True) < 28
    assert [slips(share) for share in (False, 0, 1)] == [0, 0, 30]
    assert slips(0.02) < 10 < slips(0.8)


def test_a_reset_on_the_lake_is_fast() -> None:
    env = FrozenLake()
    started = time.process_time()
    for seed in range(500):
        env.reset(seed=seed, options={})
    assert (time.process_time() - started) / 500 < 2e-3  # 0.25 ms on two old cores


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", [GPT2, QWEN], ids=["gpt2", "qwen"])
def test_a_byte_level_tokenizer_makes_one_token_of_each_cell(pattern: str) -> None:
    grids = [lake(seed)[1] for seed in range(50)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        grids, trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet)
    )
    for grid in grids:
        cells = [tokenizer.decode([token]) for token in tokenizer.encode(grid).ids]
        # The grid, the view, and a line break after each row but the last.
        assert len(cells) == 16 + 4 + 4
        assert [cell.strip(" ") for cell in cells] == [
            cell for cell in grid.replace("\n", " \n ").split(" ") if cell
        ]


def test_players_refuse_what_they_cannot_play() -> None:
    with pytest.raises(TypeError, match="plays FrozenLake, not GuessNumber"):
        lake_player(GuessNumber(), random.Random(0))
    with pytest.raises(TypeError, match="plays GuessNumber, not FrozenLake"):
        guess_player(FrozenLake(), random.Random(0))
    with pytest.raises(TypeError, match="plays FrozenLake, not GuessNumber"):
        careful_player(GuessNumber(), random.Random(0))
    assert lake_player(lake()[0], random.Random(0)) in ACTIONS


# --- GuessNumber ---


def test_guessing_by_halves_finds_the_number_in_time() -> None:
    env = GuessNumber()
    for seed in range(100):
        env.reset(seed=seed, options={"high": 100, "max_turns": 7})
        for _ in range(7):
            hint, reward, terminated, truncated, info = env.step(
                guess_player(env, random.Random(0), skill=1.0)
            )
            if terminated:
                break
            assert hint in ("higher", "lower")
        assert (hint, reward, terminated, truncated, info) == (
            "right",
            1.0,
            True,
            False,
            {"success": True},
        )


def test_turns_run_out() -> None:
    env = GuessNumber()
    env.reset(seed=0, options={"max_turns": 2})
    assert env.step("none")[:4] == ("Answer with one number from 1 to 16.", 0.0, False, False)
    assert env.step("0") == ("higher", 0.0, False, True, {"success": False})


@pytest.mark.parametrize("message", ["7 or 8", "7.5", "-7", "1" * 50, "seven", "x7"])
def test_what_is_not_one_number_is_no_guess(message: str) -> None:
    env = GuessNumber()
    env.reset(seed=0, options={})
    assert env.step(message)[0] == "Answer with one number from 1 to 16."


# --- Calculator ---


def test_the_problem_is_solved_by_tools() -> None:
    env = Calculator()
    for seed in range(20):
        problem, _ = run(env.reset(seed=seed, options={"digits": 4}))
        boxes, each, lost = (int(word) for word in problem.split() if word.isdigit())
        total = json.loads(run(env.step(call("multiply", a=boxes, b=each)))[0])
        rest = json.loads(run(env.step("so " + call("subtract", a=total, b=lost)))[0])
        assert run(env.step(call("submit", answer=rest))) == (
            "right",
            1.0,
            True,
            False,
            {"success": True},
        )


def test_a_wrong_answer_ends_without_reward() -> None:
    env = Calculator()
    env.reset(seed=0, options={})
    assert env.step(call("divide", a=1, b=0)) == ("Error: division by zero", 0.0, False, False, {})
    assert "at most 30 digits" in run(env.step(call("multiply", a=10**40, b=2)))[0]
    assert env.step(call("submit", answer=-1)) == ("wrong", 0.0, True, False, {"success": False})


def test_prefixes_make_many_tasks_of_few_numbers() -> None:
    env = GuessNumber()
    begun = [env.reset(seed=seed, options={"high": 16, "prefixes": 1000})[0] for seed in range(100)]  # type: ignore[index]
    assert len(set(begun)) > 80
    low, high = env.range
    assert (low % 100, high % 100, 0 <= low // 100 < 1000) == (1, 16, True)
    assert low <= env.secret <= high
    assert env.step(str(low - 1))[0] == "higher"  # type: ignore[index]
    assert env.step(str(env.secret))[1:3] == (1.0, True)  # type: ignore[index]
    plain = GuessNumber()
    assert plain.reset(seed=99, options={"high": 16})[0] == "Guess a number from 1 to 16."  # type: ignore[index]
    assert plain.secret == env.secret % 100


class Darkroom(ToolEnv):
    """Its tools show pictures, alone, with a text and in a result."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        return "Look."

    def look(self) -> EncodedImage:
        """Look around."""
        return shade(1)

    def read(self) -> Observation:
        """Read a label."""
        return Observation("a label", [shade(2), shade(3)])

    def leave(self) -> ToolResult:
        """Leave."""
        return ToolResult("left", 1.0, terminated=True, success=True, images=[shade(4)])


def shade(value: int) -> EncodedImage:
    return EncodedImage.of_pixels(np.full((4, 4), value, np.uint8))


def test_tools_show_pictures_in_the_order_of_the_calls() -> None:
    env = Darkroom()
    env.reset(seed=0, options={})
    seen, *rest = run(env.step(call("look") + call("read") + call("leave")))
    assert isinstance(seen, Observation)
    assert seen.text == "look: \nread: a label\nleave: left"
    assert [*seen.images] == [shade(1), shade(2), shade(3), shade(4)]
    assert rest == [1.0, True, False, {"success": True}]
    seen, *_ = run(env.step(call("look")))
    assert seen == Observation("", [shade(1)])
    env.call_shortly(True)
    seen, *_ = run(env.step("read"))
    assert seen == Observation("a label", [shade(2), shade(3)])
    assert run(env.step(call("nothing")))[0].startswith("Error")
