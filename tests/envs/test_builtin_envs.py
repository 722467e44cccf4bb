"""Sokoban, the maze, search and shop: every seed can be solved, the level is felt, and rewards say
what they should.
"""

import asyncio
import copy
import random
import re
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envs import search, shop, sokoban, text_maze
from agentrl.envs.search import Search, make_world, normal
from agentrl.envs.shop import TOPICS, Shop, Wish, scripted_user
from agentrl.envs.sokoban import MOVES, Sokoban
from agentrl.envs.text_maze import TextMaze
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import StepResult
from agentrl.testing import check_env
from agentrl.trajectory import ToolCall
from tests.properties import examples

Player = Callable[[Any, random.Random], str]

# The environment, its module, and turns that suffice at level 3.
GAMES = [(Sokoban, sokoban, 100), (TextMaze, text_maze, 80), (Search, search, 20), (Shop, shop, 30)]
each_game = pytest.mark.parametrize(
    ("env", "module", "turns"), GAMES, ids=lambda value: getattr(value, "__name__", "")
)
levels = st.integers(1, 5)
seeds = st.integers(0, 2**32)


def call(name: str, **arguments: Any) -> str:
    return ToolCall(name, arguments).render()


def step(env: Any, action: str) -> StepResult:
    result = env.step(action)
    if isinstance(result, Coroutine):
        try:
            result.send(None)
        except StopIteration as done:
            result = done.value
    assert isinstance(result, tuple)
    return result


def begin(env: type, seed: int, **options: Any) -> Any:
    made = env()
    made.opening = made.reset(seed=seed, options=options)[0]
    return made


def solved(env: type, player: Player, seed: int, level: int, turns: int, **options: Any) -> bool:
    live, rng = begin(env, seed, level=level, **options), random.Random(seed)
    for _ in range(turns):
        _, reward, terminated, _, info = step(live, player(live, rng))
        if terminated:
            live.close()
            assert info["success"] == (reward == 1.0)
            return bool(info["success"])
    live.close()
    return False


@each_game
@pytest.mark.parametrize("level", [1, 5])
def test_each_keeps_the_contract_played_by_anyone(
    env: Any, module: Any, turns: int, level: int
) -> None:
    check_env(env, options={"level": level})
    check_env(env, options={"level": level}, actions=module.weak_player, max_turns=64)


@each_game
def test_the_doctor_sees_the_strong_player_succeed(env: Any, module: Any, turns: int) -> None:
    check_env(env, seeds=(0, 1), gold=module.strong_player)


@each_game
def test_a_strong_player_solves_almost_every_seed_and_a_random_one_almost_none(
    env: Any, module: Any, turns: int
) -> None:
    def at_random(live: Any, rng: random.Random) -> str:
        return str(module.weak_player(live, rng, 0.0))

    assert sum(solved(env, module.strong_player, seed, 3, turns) for seed in range(40)) >= 38
    assert sum(solved(env, module.weak_player, seed, 3, turns) for seed in range(30)) >= 3
    assert sum(solved(env, at_random, seed, 3, turns) for seed in range(40)) <= 4


@each_game
def test_the_highest_level_is_solved_too_by_the_strong_player(
    env: Any, module: Any, turns: int
) -> None:
    assert sum(solved(env, module.strong_player, seed, 5, 2 * turns) for seed in range(20)) >= 19


@each_game
def test_a_wrong_option_is_named_with_the_nearest_right_one(
    env: Any, module: Any, turns: int
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'level'"):
        begin(env, 0, levle=2)
    with pytest.raises(ConfigError, match="less than or equal to 5"):
        begin(env, 0, level=6)


@each_game
def test_a_player_plays_its_own_game_only(env: Any, module: Any, turns: int) -> None:
    other = Sokoban if env is not Sokoban else TextMaze
    with pytest.raises(TypeError, match=f"plays {env.__name__}, not {other.__name__}"):
        module.strong_player(other(), random.Random(0))


@each_game
def test_a_player_does_on_a_used_instance_what_it_does_on_a_fresh_one(
    env: Any, module: Any, turns: int
) -> None:
    def said(live: Any) -> list[str]:
        live.reset(seed=1, options={"level": 3})
        words = []
        for _ in range(turns):
            words.append(module.strong_player(live, random.Random(0)))
            if step(live, words[-1])[2]:
                break
        live.close()
        return words

    used = env()
    assert said(used) == said(used) == said(env())


@pytest.mark.parametrize("env", [Sokoban, TextMaze])
def test_one_legal_word_is_found_in_a_sentence_and_two_are_asked_about(env: Any) -> None:
    for seed in range(5):
        plain, wordy = begin(env, seed), begin(env, seed)
        assert step(plain, "down") == step(wordy, "I think I'll go DOWN!")
        view = step(plain, "")[0]
        observation, reward, terminated, truncated, _ = step(plain, "Left, or rather right?")
        assert observation == view
        assert "Say one of left, down, right, up." in observation
        assert (reward, terminated, truncated) == (0.0, False, False)


# Sokoban: the rules once more, on the text alone, so that they judge the environment's.

State = tuple[frozenset[tuple[int, int]], tuple[int, int]]


def read_grid(text: str) -> tuple[dict[tuple[int, int], str], State]:
    rows = [row.split() for row in text.splitlines() if row.startswith(" ")]
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row)}
    boxes = frozenset(at for at, cell in cells.items() if cell in "$*")
    (player,) = [at for at, cell in cells.items() if cell in "@+"]
    return cells, (boxes, player)


def after(cells: dict[tuple[int, int], str], state: State, word: str) -> State:
    boxes, (row, column) = state
    down, right = MOVES[word]
    to, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if cells[to] == "#" or (to in boxes and (cells[behind] == "#" or behind in boxes)):
        return state
    return (boxes - {to} | {behind}) if to in boxes else boxes, to


def shortest_solution(text: str) -> list[str] | None:
    cells, start = read_grid(text)
    goals = {at for at, cell in cells.items() if cell in ".*+"}
    ways: dict[State, list[str]] = {start: []}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state[0] == goals:
            return ways[state]
        for word in MOVES:
            following = after(cells, state, word)
            if following not in ways:
                ways[following] = [*ways[state], word]
                queue.append(following)
    return None


@pytest.mark.parametrize(("level", "how_many"), [(1, 40), (2, 40), (3, 4)])
def test_a_search_of_the_whole_game_finds_a_solution_and_it_pays_one(
    level: int, how_many: int
) -> None:
    for seed in range(how_many):
        env = begin(Sokoban, seed, level=level)
        solution = shortest_solution(env.opening)
        assert solution, "no puzzle is impossible, and none is solved before it begins"
        results = [step(env, word) for word in solution]
        assert [result[1] for result in results] == [0.0] * (len(solution) - 1) + [1.0]
        assert results[-1][2:] == (True, False, {"success": True})
        with pytest.raises(EnvError, match="call reset first"):
            env.step("up")


@settings(max_examples=25, deadline=None)
@given(seed=seeds, level=levels, words=st.lists(st.sampled_from(list(MOVES)), max_size=30))
def test_every_move_is_by_the_rules_of_sokoban(seed: int, level: int, words: list[str]) -> None:
    env = begin(Sokoban, seed, level=level)
    cells, state = read_grid(env.opening)
    assert len(state[0]) == level - (level > 1) == sum(cell in ".+" for cell in cells.values())
    for word in words:
        observation, _, terminated, _, _ = step(env, word)
        expected = after(cells, state, word)
        assert read_grid(observation)[1] == expected
        assert ("blocked" in observation) == (expected == state)
        state = expected
        if terminated:
            break


def test_a_box_is_not_pushed_into_another_nor_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    row = frozenset((0, column) for column in range(6))
    boxes, goals = frozenset({(0, 2), (0, 4)}), frozenset({(0, 4), (0, 5)})
    made = sokoban.Puzzle(6, row, goals, boxes, (0, 1), {})
    monkeypatch.setattr(sokoban, "make_puzzle", lambda *chosen: made)
    env = begin(Sokoban, 0)
    rows = [step(env, word)[0].splitlines()[1] for word in ("left", "right", "right", "right")]
    assert rows == [" # @ - $ - * . #", " # - @ $ - * . #", " # - - @ $ * . #", " # - - @ $ * . #"]


def test_a_room_has_the_size_and_the_walls_that_were_asked_for_and_can_be_solved() -> None:
    for side, walls in ((4, 5), (6, 0), (8, 21)):
        opening = begin(Sokoban, 5, level=1, side=side, walls=walls).opening
        assert (len(opening.splitlines()), opening.count("#")) == (side + 2, 4 * side + 4 + walls)
        assert shortest_solution(opening)
    with pytest.raises(ConfigError, match="a room of 5 x 5 takes at most 8"):
        begin(Sokoban, 0, level=2, walls=9)
    with pytest.raises(ConfigError, match="a room of this level has at least 5 cells per side"):
        begin(Sokoban, 0, level=2, side=4)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, words=st.lists(st.sampled_from(list(MOVES)), max_size=20))
def test_the_words_of_a_view_lead_from_the_player_to_the_box_and_on_to_the_goal(
    seed: int, words: list[str]
) -> None:
    grid, told = begin(Sokoban, seed, level=2), begin(Sokoban, seed, level=2, view="words")
    views = grid.opening, told.opening
    for word in words:
        cells, (boxes, player) = read_grid(views[0])
        (goal,) = [at for at, cell in cells.items() if cell in ".*+"]
        line, *rest = views[1].splitlines()
        to_box, to_goal = line.removeprefix("box ").split(", goal ")
        assert {walked(player, to_box)} == boxes
        assert walked(walked(player, to_box), to_goal) == goal
        walls = [way for way in MOVES if cells[walked(player, f"1 {way}")] == "#"]
        assert rest[: bool(walls)] == ([f"wall {' '.join(walls)}"] if walls else [])
        results = step(grid, word), step(told, word)
        assert results[0][1:] == results[1][1:]
        assert ("blocked" in results[0][0]) == ("blocked" in results[1][0])
        if results[0][2]:
            break
        views = results[0][0], results[1][0]


def walked(start: tuple[int, int], way: str) -> tuple[int, int]:
    """Where steps in words, such as `2 up 1 left`, lead to."""
    row, column = start
    parts = way.replace("here", "").split()
    for steps, word in zip(parts[::2], parts[1::2], strict=True):
        row, column = row + int(steps) * MOVES[word][0], column + int(steps) * MOVES[word][1]
    return row, column


@settings(max_examples=25, deadline=None)
@given(seed=seeds, play=st.integers(0, 99))
def test_shaping_pays_what_stands_better_at_the_end_and_no_more(seed: int, play: int) -> None:
    env, rng = begin(Sokoban, seed, level=3, shaping=0.25), random.Random(play)
    earned, observation, won = 0.0, env.opening, False
    for _ in range(60):
        observation, reward, won, _, _ = step(env, sokoban.weak_player(env, rng))
        earned += reward
        if won:
            break
    assert earned == pytest.approx(0.25 * observation.count("*") + won)


# The maze


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_the_goal_can_be_walked_to_and_only_with_every_key(level: int) -> None:
    for seed in range(10):
        env = begin(TextMaze, seed, level=level)
        seen = {(env.cell, env.keys)}
        queue, found = deque([env]), []
        while queue:
            here = queue.popleft()
            for word in MOVES:
                there = copy.copy(here)
                _, reward, terminated, _, _ = step(there, word)
                if terminated:
                    assert reward == 1.0
                    found.append(there)
                elif (there.cell, there.keys) not in seen:
                    seen.add((there.cell, there.keys))
                    queue.append(there)
        assert found
        assert all(len(there.keys) == text_maze.LEVELS[level][1] for there in found)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, level=levels, words=st.lists(st.sampled_from(list(MOVES)), max_size=40))
def test_what_is_seen_in_a_direction_is_what_happens_there(
    seed: int, level: int, words: list[str]
) -> None:
    env = begin(TextMaze, seed, level=level)
    view = env.opening
    for word in words:
        seen = dict(line.split(": ") for line in view.splitlines()[-5:])
        assert set(seen) == {*MOVES, "You hold"}
        what, held, before = seen[word], seen["You hold"], env.cell
        view, _, terminated, _, _ = step(env, word)
        locked = what.endswith("door") and what.replace("door", "key") not in held
        assert (
            (env.cell == before) == (what == "wall" or locked) == (f"You cannot go {word}." in view)
        )
        if what.endswith("key"):
            assert f"You take the {what}." in view
        if what == "goal":
            assert terminated
        if terminated:
            break


@settings(max_examples=25, deadline=None)
@given(seed=seeds, level=levels, cells=st.integers(6, 12))
def test_a_maze_of_few_cells_has_so_many_each_beside_its_parent_and_can_be_solved(
    seed: int, level: int, cells: int
) -> None:
    env = begin(TextMaze, seed, level=level, side=8, cells=cells)
    parents = env.maze.parents
    assert len(parents) == cells
    for cell, (row, column) in parents.items():
        assert abs(cell[0] - row) + abs(cell[1] - column) == (cell != env.maze.start)
        assert set(cell) <= set(range(8))
    assert len(env.maze.doors) == len(env.maze.keys) == text_maze.LEVELS[level][1]
    assert any(
        step(env, text_maze.strong_player(env, random.Random(0)))[2] for _ in range(6 * cells)
    )


def test_more_cells_than_the_square_has_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="12 cells do not fit into 3 x 3; set side too"):
        begin(TextMaze, 0, cells=12)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, level=levels, words=st.lists(st.sampled_from(list(MOVES)), max_size=40))
def test_a_brief_view_says_of_each_way_what_the_full_one_does(
    seed: int, level: int, words: list[str]
) -> None:
    full, brief = begin(TextMaze, seed, level=level), begin(TextMaze, seed, level=level, brief=True)
    views = full.opening, brief.opening
    for word in [*words, ""]:
        *ways, held = (line.split(": ") for line in views[0].splitlines()[-5:])
        told = views[1].splitlines()
        if held[1] != "nothing":
            assert told.pop() == f"You hold: {held[1]}"
        assert told.pop() == ", ".join(
            ": ".join(way).removesuffix(": free") for way in ways if way[1] != "wall"
        )
        assert told == views[0].splitlines()[:-5]
        results = step(full, word), step(brief, word)
        assert results[0][1:] == results[1][1:]
        if results[0][2]:
            break
        views = results[0][0], results[1][0]


# Search


@settings(max_examples=25, deadline=None)
@given(seed=seeds, level=levels)
def test_each_document_on_the_way_names_the_next_thing_and_the_question_the_first(
    seed: int, level: int
) -> None:
    world = make_world(level, seed)
    texts = {document.title: document.text for document in world.documents}
    assert (
        len(texts)
        == len(world.documents)
        == len({document.id for document in world.documents})
        == 16 * level
    )
    assert len(world.chain) == level + 1
    assert world.chain[0] in world.question
    assert not any(thing in world.question for thing in world.chain[1:])
    for thing, following in zip(world.chain, world.chain[1:], strict=False):
        assert following in texts[thing]


def test_an_answer_counts_whatever_its_case_articles_and_punctuation() -> None:
    for said, right in [("{}", 1.0), ("  the {}. ", 1.0), ("{} lamp", 0.0), ("", 0.0)]:
        env = begin(Search, 1, level=2)
        _, reward, terminated, _, info = step(
            env, call("answer", text=said.format(env.world.chain[-1].upper()))
        )
        assert (reward, terminated, info) == (right, True, {"success": bool(right)})
        env.close()
    assert normal("The River  Sonn!") == "river sonn"


@examples(50)
@given(query=st.text() | st.text(alphabet='"*()^:-+ANDORNEAR \x00', max_size=40))
def test_no_query_breaks_the_index(query: str) -> None:
    env = begin(Search, 0)
    found = step(env, call("search", query=query, k=10))[0]
    assert len(found.splitlines()) <= 10
    env.close()


def test_documents_are_read_by_the_numbers_that_search_gives() -> None:
    env = begin(Search, 0)
    title = env.world.chain[0]
    found = step(env, call("search", query=title))[0]
    number = int(found[1 : found.index("]")])
    assert step(env, call("read", document=number))[0].startswith(f"{title}\n")
    assert "there is no document 1;" in step(env, call("read", document=1))[0]
    env.close()


def test_a_search_shows_no_more_documents_than_the_option_says() -> None:
    for most in (1, 2, 10):
        env = begin(Search, 0, most=most)
        assert len(step(env, call("search", query="was born in", k=5))[0].splitlines()) == min(
            most, 5
        )
        env.close()


def test_a_brief_search_shows_of_each_document_the_sentence_with_most_words_of_the_query() -> None:
    for seed in range(50):
        env = begin(Search, seed, brief=True)
        person, other = env.world.chain
        document = next(document for document in env.world.documents if document.title == person)
        (fact,) = (sentence for sentence in document.text.split(". ") if other in sentence)
        words = " ".join(word for word in fact.rstrip(".").split() if word not in other.split())
        shown = step(env, call("search", query=words.upper(), k=4))[0].splitlines()
        assert shown[0] == f"[{document.id}] {fact.rstrip('.')}."
        by_id = {str(document.id): document.text for document in env.world.documents}
        for line in shown:
            number, sentence = line[1:].split("] ")
            assert sentence in by_id[number]
            assert sentence.count(".") == 1
        assert (
            step(env, call("search", query=person, k=1))[0]
            == f"[{document.id}] {document.text.split('. ')[0]}."
        )
        assert step(env, call("search", query="zzz"))[0] == "Nothing was found."
        env.close()


def test_worlds_that_share_their_names_still_differ_and_can_be_solved() -> None:
    worlds = [search.make_world(1, seed, 40) for seed in range(100)]
    words = {
        word for world in worlds for document in world.documents for word in document.title.split()
    }
    assert len(words - {"Works", "Brothers", "Society"}) <= 40
    assert len({(world.question, world.chain) for world in worlds}) >= 95
    assert (
        len({frozenset(document.text for document in world.documents) for world in worlds}) == 100
    )
    assert all(solved(Search, search.strong_player, seed, 1, 5, names=40) for seed in range(20))


@pytest.mark.parametrize(
    ("options", "needed"), [({"names": 39}, 40), ({"level": 5, "names": 40}, 200)]
)
def test_fewer_names_than_a_world_has_are_refused(options: dict[str, int], needed: int) -> None:
    with pytest.raises(ConfigError, match=f"names.*has {needed} names"):
        begin(Search, 0, **options)


@pytest.mark.parametrize(("env", "module"), [(Search, search), (Shop, shop)])
def test_players_write_short_calls_where_these_are_asked_for(env: Any, module: Any) -> None:
    live, rng, over = begin(env, 3, short_calls=True), random.Random(0), False
    words = []
    while not over:
        words.append(module.strong_player(live, rng))
        _, reward, over, _, _ = step(live, words[-1])
    live.close()
    assert reward == 1.0
    assert not any("{" in word for word in words)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, level=levels)
def test_a_hasty_player_of_search_reads_nothing_and_answers_what_an_excerpt_shows(
    seed: int, level: int
) -> None:
    env, rng = begin(Search, seed, level=level), random.Random(seed)
    calls = [search.hasty_player(env, rng, 1.0)]
    for _ in range(level):
        step(env, calls[-1])
        calls.append(search.hasty_player(env, rng, 1.0))
    for said, thing in zip(calls[:-1], env.world.chain, strict=False):
        assert '"search"' in said
        assert f'{thing}"' in said
    assert '"answer"' in calls[-1]
    assert (env.world.chain[-1] in calls[-1]) == (env.world.chain[-1] in env.shown)
    assert env.done == set()
    env.close()


def test_a_search_for_the_words_of_the_fact_shows_the_answer_more_often_than_one_for_the_name() -> (
    None
):
    def solved_by(skill: float, brief: bool = False) -> int:
        def player(live: Any, rng: random.Random) -> str:
            return str(search.hasty_player(live, rng, skill))

        return sum(solved(Search, player, seed, 1, 3, brief=brief) for seed in range(100))

    assert solved_by(1.0) >= 65
    assert 25 <= solved_by(0.0) <= 50
    assert solved_by(1.0, brief=True) == 100
    assert 10 <= solved_by(0.0, brief=True) <= 35


# Shop


@settings(max_examples=25, deadline=None)
@given(seed=seeds, level=levels)
def test_one_room_fits_and_every_wish_is_needed_to_find_it(seed: int, level: int) -> None:
    env = begin(Shop, seed, level=level)
    assert len(env.wishes) == level + 1
    assert len(env.rooms) == 4 * level + 4
    missed = [
        tuple(wish.about for wish in env.wishes if not wish.holds(room))
        for room in env.rooms.values()
        if room.free
    ]
    assert missed.count(()) == 1
    assert all((wish.about,) in missed for wish in env.wishes)
    assert sum(not room.free for room in env.rooms.values()) == (level >= 3)


@pytest.mark.parametrize(
    ("topics", "wishes", "rooms"),
    [(("area",), None, 3), (("beds", "price"), 1, 2), (("area",), 1, 24)],
)
def test_a_smaller_house_has_one_room_that_fits_too(
    topics: tuple[str, ...], wishes: int | None, rooms: int
) -> None:
    for seed in range(50):
        env = begin(Shop, seed, topics=topics, wishes=wishes, rooms=rooms)
        assert {wish.about for wish in env.wishes} <= set(topics)
        assert len(env.wishes) == 1
        assert len(env.rooms) == rooms
        assert sum(env.wishes[0].holds(room) for room in env.rooms.values()) == 1


@pytest.mark.parametrize(
    ("topics", "told"),
    [
        (("area",), r"\w+: (centre|harbour|old town|university)"),
        (("price", "beds"), r"\w+: \d+ euros"),
        (("pets", "beds"), r"\w+"),
        (("area", "price"), r"\w+: \d+ euros, \w[\w ]+"),
    ],
)
def test_a_brief_list_of_rooms_says_nothing_about_what_is_no_topic(
    topics: tuple[str, ...], told: str
) -> None:
    listed = step(begin(Shop, 0, topics=topics, brief=True), call("list_rooms"))[0]
    rooms = listed.removeprefix("Rooms: ").split("; ")
    assert len(rooms) == 8
    assert all(re.fullmatch(told, room) for room in rooms)


@pytest.mark.parametrize("brief", [False, True])
def test_the_rooms_of_one_part_of_town_are_those_of_the_whole_list_that_are_there(
    brief: bool,
) -> None:
    lists = [
        [
            step(begin(Shop, seed, brief=brief, topics=["area"]), call("list_rooms", **where))[0]
            for where in ({}, *({"area": area} for area in shop.AREAS))
        ]
        for seed in range(20)
    ]
    for everything, *parts in lists:
        rooms = re.findall(r"\w+: [^;\n]+", everything.removeprefix("Rooms: "))
        assert len(rooms) == 8
        for area, part in zip(shop.AREAS, parts, strict=True):
            there = [room for room in rooms if room.endswith(area)]
            assert re.findall(r"\w+: [^;\n]+", part.removeprefix("Rooms: ")) == there
            assert there or part == "No rooms."
    assert any("No rooms." in parts for parts in lists)


def test_a_part_of_town_may_be_written_in_capitals_and_an_unknown_one_is_named_in_the_error() -> (
    None
):
    env = begin(Shop, 0)
    assert (
        step(env, call("list_rooms", area=" Old Town"))[0]
        == step(env, call("list_rooms", area="old town"))[0]
    )
    assert (
        "no part of town 'downtown', only centre"
        in step(env, call("list_rooms", area="downtown"))[0]
    )


@pytest.mark.parametrize(
    "options",
    [{"topics": ["area"], "wishes": 2}, {"rooms": 2}, {"level": 3, "rooms": 5}, {"names": 7}],
)
def test_a_house_with_too_few_topics_or_rooms_or_names_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="need"):
        begin(Shop, 0, **options)


def test_a_hasty_player_of_the_shop_books_what_fits_if_it_asks_and_else_the_first_room() -> None:
    def solved_by(skill: float) -> int:
        won = 0
        for seed in range(100):
            env, rng, over = begin(Shop, seed, topics=["area"], rooms=4), random.Random(seed), False
            while not over:
                _, reward, over, _, _ = step(env, shop.hasty_player(env, rng, skill))
            won += reward == 1.0
        return won

    assert solved_by(1.0) == 100
    assert 10 <= solved_by(0.0) <= 40


@pytest.mark.parametrize(
    ("skill", "called"), [(1, ["ask_user", "list_rooms", "book"]), (0, ["list_rooms", "book"])]
)
def test_a_hasty_player_of_the_shop_looks_only_where_the_user_wants_a_room(
    skill: int, called: list[str]
) -> None:
    env, rng = begin(Shop, 0, topics=["area"], short_calls=True), random.Random(0)
    said = [shop.hasty_player(env, rng, skill)]
    while not said[-1].startswith("book"):
        step(env, said[-1])
        said.append(shop.hasty_player(env, rng, skill))
    assert [words.split()[0] for words in said] == called
    assert f"list_rooms {env.wishes[0].value}" in said or not skill


def test_the_user_says_a_wish_only_when_asked_about_it_and_two_at_most() -> None:
    wishes = (Wish("price", 90), Wish("beds", 3), Wish("pets", True))
    answer = {
        question: scripted_user(question, wishes, random.Random(0))
        for question in (
            "Hello, what would you like?",
            "What is your budget?",
            "Do you need parking?",
            "Price, beds and pets?",
        )
    }
    said = [[str(wish) in text for wish in wishes] for text in answer.values()]
    assert said == [[False] * 3, [True, False, False], [False] * 3, [True, True, False]]
    for topic in TOPICS:
        assert f"mind about the {topic}" in scripted_user(f"And the {topic}?", (), random.Random(0))


def test_only_a_standing_booking_that_fits_is_a_success() -> None:
    env = begin(Shop, 0, level=3)
    fitting = [room for room in env.rooms.values() if all(wish.holds(room) for wish in env.wishes)]
    (taken,), (right,) = (
        [r.name for r in fitting if not r.free],
        [r.name for r in fitting if r.free],
    )
    wrong = next(room.name for room in env.rooms.values() if room not in fitting)
    for bookings, success in [
        ([], False),
        ([wrong], False),
        ([taken], False),
        ([right], True),
        ([wrong, right], True),
        ([right, wrong], False),
        ([right, taken], True),
        ([right.upper(), "nowhere"], True),
    ]:
        env.reset(seed=0, options={"level": 3})
        said = [step(env, call("book", room=name))[0] for name in bookings]
        assert all(
            ("is booked" in text) == (name not in (taken, "nowhere"))
            for text, name in zip(said, bookings, strict=True)
        )
        assert step(env, call("finish"))[1:] == (float(success), True, False, {"success": success})


def silent_user(question: str, wishes: Sequence[Wish], rng: random.Random) -> str:
    return "..."


async def slow_user(question: str, wishes: Sequence[Wish], rng: random.Random) -> str:
    await asyncio.sleep(0)
    return f"You ask {question!r}; I have {len(wishes)} wishes."


def test_another_user_may_be_given_as_a_function_a_name_or_async() -> None:
    asking = call("ask_user", question="Price?")
    assert step(begin(Shop, 0, user=silent_user), asking)[0] == "..."
    named = step(begin(Shop, 0, user="agentrl.envs.shop:scripted_user"), asking)
    assert named == step(begin(Shop, 0), asking)
    assert (
        asyncio.run(begin(Shop, 0, level=1, user=slow_user).step(asking))[0]
        == "You ask 'Price?'; I have 2 wishes."
    )
    for wrong in ("no_such_module:user", "agentrl.envs.shop:AREAS"):
        with pytest.raises(ConfigError, match="'user'"):
            begin(Shop, 0, user=wrong)
