"""A maze of which the player sees only adjacent cells, new for every seed; higher levels have
locked doors and keys.

The observation says what lies left, down, right and up, and which keys the player holds. Unless
asked to (`located`), it never says where the player is: finding the goal takes memory. Walking
onto a key takes it for the whole episode; a door opens with its key.
"""

import random
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from agentrl.envs.base import TextEnv, plays, read_options
from agentrl.envs.board import board_html
from agentrl.errors import EnvError
from agentrl.protocols import StepResult
from agentrl.settings.base import Settings

Cell = tuple[int, int]
"""(row, column)"""

MOVES: Mapping[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""The legal words, and the step of each."""

LEVELS = {1: (3, 0), 2: (4, 0), 3: (5, 1), 4: (6, 2), 5: (7, 3)}
"""Cells per side and doors, by level."""

COLOURS = ("red", "green", "blue", "yellow", "white")

_HINT = "Say one of left, down, right, up."
_SHADES = {
    "red": "#e8837a",
    "green": "#7cbf8e",
    "blue": "#7fa8d9",
    "yellow": "#ecd06f",
    "white": "#fbfbf8",
}


@dataclass(frozen=True, slots=True)
class Maze:
    """A tree of cells."""

    start: Cell
    """The cell of the player at the start, which is its own parent."""
    goal: Cell
    """The cell to reach."""
    parents: Mapping[Cell, Cell]
    """The cell next to each cell on its way to the start."""
    doors: Mapping[Cell, str]
    """The colour of the door between a cell and its parent."""
    keys: Mapping[Cell, str]
    """The colour of the key in a cell."""


class TextMaze(TextEnv):
    """Walk to the goal: reward 1, and the episode ends.

    The message is free text with exactly one legal word in it, in any case. Any other message costs
    a turn; the answer is the same view and a hint. Only the run limits the number of turns.
    """

    system_prompt = (
        "You are in a maze and see only what is next to you. Find the goal. A door opens if you"
        " hold the key of its colour. Say left, down, right or up."
    )
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        level: int = Field(1, ge=1, le=5)
        """From 1, 3 x 3 cells without doors, to 5, 7 x 7 cells with three doors (see `LEVELS`)."""
        side: int | None = Field(None, ge=3, le=20)
        """Cells per side, instead of the level's."""
        cells: int | None = Field(None, ge=6)
        """Cells of the maze, which then fills only a part of the square: a small maze of which
        there are many. By default it fills the square."""
        brief: bool = False
        """If true, the view is one line that names open ways (`down, right: goal`) and held
        keys."""
        located: bool = False
        """If true, the view also says where the player and the goal are: then no memory is needed
        to know a place again."""

        @field_validator("cells")
        @classmethod
        def _cells_fit(cls, cells: int | None, info: ValidationInfo) -> int | None:
            side = info.data.get("side") or LEVELS[info.data.get("level", 1)][0]
            if cells and cells > side**2:
                raise ValueError(f"{cells} cells do not fit into {side} x {side}; set side too")
            return cells

    def __init__(self) -> None:
        self._over = True

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Set up the maze of this seed."""
        chosen = read_options(self.Options, options)
        self.maze = make_maze(chosen.level, seed, chosen.side, chosen.cells)
        self._brief, self._located = chosen.brief, chosen.located
        self.cell = self.maze.start
        self.visited = {self.cell}
        self.keys: tuple[str, ...] = ()
        self._over = False
        return self._view()

    def step(self, action: str) -> StepResult:
        """Walk, if the message has exactly one legal word.

        Raises:
            EnvError: no episode is being played.
        """
        if self._over:
            raise EnvError("no episode is being played; call reset first")
        words = set(re.findall(r"[a-z]+", action.lower())) & set(MOVES)
        happened = self._walk(*words) if len(words) == 1 else _HINT
        self._over = self.cell == self.maze.goal
        return (
            f"{happened}\n{self._view()}".lstrip(),
            float(self._over),
            self._over,
            False,
            {"success": self._over},
        )

    def render_html(self) -> str:
        """The whole maze, which the player never sees: walls, where the player has been, doors,
        keys and the goal.
        """
        side = 1 + max(row for row, _ in self.maze.parents)
        # Cells are drawn at odd rows and columns; between two of them is a wall, a way or a door.
        cells = [["#"] * (2 * side + 1) for _ in range(2 * side + 1)]
        for (row, column), (up, left) in self.maze.parents.items():
            cell = row, column
            key = self.maze.keys.get(cell, "")
            seen = "o" if cell in self.visited else "-"
            cells[2 * row + 1][2 * column + 1] = key[0] if key and key not in self.keys else seen
            door = self.maze.doors.get(cell, "")
            cells[row + up + 1][column + left + 1] = (
                door[0].upper() if door and door not in self.keys else "-"
            )
        for (row, column), letter in ((self.maze.goal, "*"), (self.cell, "@")):
            cells[2 * row + 1][2 * column + 1] = letter
        keys = {colour[0]: shade for colour, shade in _SHADES.items()}
        doors = {letter.upper(): shade for letter, shade in keys.items()}
        colours = {
            "#": "#5d6a75",
            "-": "#f4f1ea",
            "o": "#dfe9f3",
            "*": "#8fd3a5",
            "@": "#f2b35e",
            **keys,
            **doors,
        }
        signs = (
            dict.fromkeys("#-o", "")
            | {"*": "★", "@": "●"}
            | dict.fromkeys(keys, "⚷")
            | dict.fromkeys(doors, "▮")
        )
        return board_html(["".join(row) for row in cells], colours, signs)

    def way_on(self) -> str:
        """The first word of a shortest path through visited cells to an unvisited one, or to the
        goal if it is next.

        It uses only what the player has been shown.
        """
        words = [word for word in MOVES if self._next(self.cell, word) == self.maze.goal]
        if words:
            return words[0]
        firsts = {self.cell: ""}
        queue = deque([self.cell])
        while queue:
            cell = queue.popleft()
            for word in MOVES:
                to = self._next(cell, word)
                if to is None or to in firsts:
                    continue
                firsts[to] = firsts[cell] or word
                if to not in self.visited:
                    return firsts[to]
                queue.append(to)
        raise EnvError("every reachable cell was visited, and the goal is none of them")

    def _walk(self, word: str) -> str:
        """Move there if possible; returns a text of what happened, if anything did."""
        to = self._next(self.cell, word)
        if to is None:
            return f"You cannot go {word}."
        self.cell = to
        self.visited.add(to)
        key = self.maze.keys.get(to)
        if key and key not in self.keys:
            self.keys += (key,)
            return f"You take the {key} key."
        return "You are at the goal." if to == self.maze.goal else ""

    def _next(self, cell: Cell, word: str) -> Cell | None:
        """The cell that the word leads to now, if any."""
        to = _neighbour(cell, word)
        door = _door_between(self.maze, cell, to)
        return to if door == "" or door in self.keys else None

    def _view(self) -> str:
        seen = {word: self._look(word) for word in MOVES}
        held = ", ".join(f"{key} key" for key in self.keys)
        if self._brief:
            ways = [
                word if what == "free" else f"{word}: {what}"
                for word, what in seen.items()
                if what != "wall"
            ]
            lines = [", ".join(ways), *([f"You hold: {held}"] if held else [])]
        else:
            lines = [f"{word}: {what}" for word, what in seen.items()]
            lines.append(f"You hold: {held or 'nothing'}")
        if self._located:
            (row, column), (goal_row, goal_column) = self.cell, self.maze.goal
            lines.insert(0, f"You: {row} {column}. Goal: {goal_row} {goal_column}.")
        return "\n".join(lines)

    def _look(self, word: str) -> str:
        """The cell in that direction."""
        to = _neighbour(self.cell, word)
        door = _door_between(self.maze, self.cell, to)
        if door is None:
            return "wall"
        if door:
            return f"{door} door"
        if to == self.maze.goal:
            return "goal"
        key = self.maze.keys.get(to)
        return f"{key} key" if key and key not in self.keys else "free"


@plays(TextMaze)
def strong_player(env: TextMaze, rng: random.Random) -> str:
    """Explores the nearest unvisited cell, with a perfect memory but no other knowledge. For
    demonstrations.
    """
    return weak_player(env, rng, skill=1.0)


@plays(TextMaze)
def weak_player(env: TextMaze, rng: random.Random, skill: float = 0.3) -> str:
    """The word of `strong_player` with probability `skill`, else a legal one. For warm starts."""
    return env.way_on() if rng.random() < skill else rng.choice(list(MOVES))


@lru_cache(maxsize=4096)
def make_maze(level: int, seed: int, side: int | None = None, cells: int | None = None) -> Maze:
    """The maze of a seed; all members of a group share it."""
    rng = random.Random(seed)
    side, how_many = side or LEVELS[level][0], LEVELS[level][1]
    way: list[Cell] = []
    while len(way) < how_many + 2:  # a maze of few cells may be too short for its doors
        parents = _grow_tree(side, cells, rng)
        way = _longest_path(parents)
    # `way` leads from the goal back. No door is next to the start, where there would be no room for
    # its key.
    behind = sorted(rng.sample(way[:-2], how_many), key=lambda cell: -way.index(cell))
    doors = dict(zip(behind, rng.sample(COLOURS, how_many), strict=True))
    return Maze(way[-1], way[0], parents, doors, _hide_keys(parents, doors, rng))


def _longest_path(parents: Mapping[Cell, Cell]) -> list[Cell]:
    """The cells from the one that is farthest from the start back to the start."""
    depths: dict[Cell, int] = {}
    for cell, parent in parents.items():
        depths[cell] = depths.get(parent, -1) + 1
    way = [max(depths, key=lambda cell: depths[cell])]
    while parents[way[-1]] != way[-1]:
        way.append(parents[way[-1]])
    return way


def _grow_tree(side: int, cells: int | None, rng: random.Random) -> dict[Cell, Cell]:
    """The parent of each cell, parents first: a tree grown mostly at its newest end, so that paths
    are long.

    It grows until it has that many cells, or no room.
    """
    start = (rng.randrange(side), rng.randrange(side))
    parents, ends = {start: start}, [start]
    while ends and len(parents) != cells:
        cell = ends[-1] if rng.random() < 0.7 else rng.choice(ends)
        around = [_neighbour(cell, word) for word in MOVES]
        new = [to for to in around if to not in parents and 0 <= to[0] < side and 0 <= to[1] < side]
        if not new:
            ends.remove(cell)
            continue
        to = rng.choice(new)
        parents[to] = cell
        ends.append(to)
    return parents


def _hide_keys(
    parents: Mapping[Cell, Cell], doors: Mapping[Cell, str], rng: random.Random
) -> dict[Cell, str]:
    """Put each door's key behind all earlier doors and before the door itself, so that the maze can
    be solved.
    """
    # Doors between the start and each cell. They all lie on the way to the goal, so a cell behind
    # `number` doors is behind the first ones, and before the door whose key it may hold.
    passed: dict[Cell, int] = {}
    for cell, parent in parents.items():
        passed[cell] = passed.get(parent, 0) + (cell in doors)
    start = next(iter(parents))
    places = [
        [cell for cell in parents if passed[cell] == number and cell != start]
        for number in range(len(doors))
    ]
    return {rng.choice(place): colour for place, colour in zip(places, doors.values(), strict=True)}


def _door_between(maze: Maze, cell: Cell, to: Cell) -> str | None:
    """The colour of the door between two cells, "" if the way is free, `None` for a wall."""
    if maze.parents.get(to) == cell:
        return maze.doors.get(to, "")
    return maze.doors.get(cell, "") if maze.parents[cell] == to else None


def _neighbour(cell: Cell, word: str) -> Cell:
    down, right = MOVES[word]
    return cell[0] + down, cell[1] + right
