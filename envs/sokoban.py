"""Sokoban with a new solvable puzzle for every seed: push each box onto a goal. One wrong push can
lose the game.

The observation is the grid in the usual letters, a space before each: `@` the player, `$` a box,
`.` a goal, `*` a box on a goal, `+` the player on a goal, `#` a wall, `-` free floor. Puzzles are
made by playing backwards: the boxes start on the goals and are pulled away from them, so pushing
them back is a known solution. With `view: picture` it is a picture of the room instead.
"""

import random
import re
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from agentrl.envs.base import TextEnv, plays, read_options
from agentrl.envs.board import board_html, board_image
from agentrl.errors import EnvError
from agentrl.protocols import Observation, StepReply
from agentrl.settings.base import Settings

Cell = tuple[int, int]
"""(row, column); the room inside its walls begins at (0, 0)."""

Pull = tuple[frozenset[Cell], Cell, str, int]
"""The boxes and the player after a pull, the word that pushes the box back, and the player's steps
before the pull.
"""

MOVES: Mapping[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""The legal words, and the step of each."""

_GRID_PROMPT = (
    "You are @. Push every box $ onto a goal . (then it is *). # is a wall. You push a box by"
    " walking into it, one at a time, and cannot pull. Say left, down, right or up."
)
_PICTURE_PROMPT = (
    "You are the disc. Push every brown square onto a pink one (then it is green). Grey is a wall."
    " You push by walking, one at a time, and cannot pull. Say left, down, right or up."
)
_HINT = "Say one of left, down, right, up."
_COLOURS = {
    "#": "#7d8a95",
    "-": "#f4f1ea",
    ".": "#f7d9d0",
    "$": "#c9955c",
    "*": "#7cbf8e",
    "@": "#f4f1ea",
    "+": "#f7d9d0",
}
_SIGNS = {"#": "", "-": "", ".": "·", "$": "■", "*": "■", "@": "●", "+": "●"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of a level: cells per side, inner walls, boxes, and the most pulls."""

    side: int
    walls: int
    boxes: int
    pulls: int


LEVELS = {
    1: Shape(side=4, walls=1, boxes=1, pulls=6),
    2: Shape(side=5, walls=3, boxes=1, pulls=12),
    3: Shape(side=6, walls=5, boxes=2, pulls=20),
    4: Shape(side=7, walls=8, boxes=3, pulls=32),
    5: Shape(side=8, walls=11, boxes=4, pulls=48),
}


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A room, its initial state, and a solution: where to stand and the word to push, by the
    positions of the boxes.
    """

    side: int
    floor: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell
    solution: Mapping[frozenset[Cell], tuple[Cell, str]]


class Sokoban(TextEnv):
    """Push every box onto a goal: reward 1, and the episode ends. Boxes cannot be pulled.

    The message is free text with exactly one legal word in it, in any case. Any other message costs
    a turn; the answer is the same grid and a hint. No hint says that a box is stuck forever:
    foreseeing this is the task. Only the run limits the number of turns.
    """

    system_prompt = _GRID_PROMPT
    # A step takes microseconds; making a puzzle takes a few milliseconds at the highest levels,
    # once per group.
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        level: int = Field(1, ge=1, le=5)
        """From 1, one box in a room of 4 x 4, to 5, four boxes in a room of 8 x 8 with walls (see
        `LEVELS`).
        """
        side: int | None = Field(None, le=8)
        """Cells per side of the room, instead of the level's: at least as many."""
        walls: int | None = Field(None, ge=0)
        """Inner walls, instead of the level's: at most a third of the cells."""
        view: Literal["grid", "words", "picture"] = "grid"
        """The observation: the grid, or `words`, a few for each box (`box 2 up 1 left, goal 3
        right`: where it is from the player, and its nearest goal from there) and for the walls
        beside the player, or a picture of 28 x 28 pixels per cell."""
        shaping: float = Field(0.0, ge=0.0, le=1.0)
        """Reward for each box pushed onto a goal, subtracted when the box leaves it; 0 rewards only
        the solution. Over an episode only the boxes that end on a goal count, so pushing back and
        forth earns nothing."""

        @property
        def shows_images(self) -> bool:
            """True if the model must be able to see."""
            return self.view == "picture"

        @field_validator("side")
        @classmethod
        def _side_is_large_enough(cls, side: int | None, info: ValidationInfo) -> int | None:
            least = LEVELS[info.data.get("level", 1)].side
            if side is not None and side < least:
                raise ValueError(f"a room of this level has at least {least} cells per side")
            return side

        @field_validator("walls")
        @classmethod
        def _walls_leave_room(cls, walls: int | None, info: ValidationInfo) -> int | None:
            side = info.data.get("side") or LEVELS[info.data.get("level", 1)].side
            if walls is not None and walls > side**2 // 3:
                raise ValueError(f"a room of {side} x {side} takes at most {side**2 // 3}")
            return walls

    _has_started = False

    def start(self, seed: int, options: Mapping[str, Any]) -> str | Observation:
        """Set up the puzzle of this seed."""
        chosen = read_options(self.Options, options)
        self._shaping = chosen.shaping
        self._chosen_view = chosen.view
        self.system_prompt = _PICTURE_PROMPT if chosen.shows_images else _GRID_PROMPT
        self._has_started = True
        self._puzzle = make_puzzle(chosen.level, seed, chosen.side, chosen.walls)
        self._boxes, self._player = self._puzzle.boxes, self._puzzle.player
        return self._view()

    def step(self, action: str) -> StepReply:
        """Move or push, if the message has exactly one legal word.

        Raises:
            EnvError: no episode is being played.
        """
        if not self._has_started or self._is_solved:
            raise EnvError("no episode is being played; call reset first")
        # One word, however often it is said: "left, I say left" moves, "left or up" does not.
        words = set(re.findall(r"[a-z]+", action.lower())) & set(MOVES)
        if len(words) != 1:
            return self._view(_HINT), 0.0, False, False, {"success": False}
        before = len(self._boxes & self._puzzle.goals)
        moved = self._move(*words)
        reward = float(self._is_solved) + self._shaping * (
            len(self._boxes & self._puzzle.goals) - before
        )
        observation = self._view("" if moved else "That way is blocked.")
        return observation, reward, self._is_solved, False, {"success": self._is_solved}

    def render_html(self) -> str:
        """The room: walls, goals (pink), boxes (squares, green on a goal), the player (a dot)."""
        return board_html(self._letters(), _COLOURS, _SIGNS)

    def known_moves(self) -> list[str]:
        """The words that continue the known solution; empty once a push has left it."""
        stand, push = self._puzzle.solution.get(self._boxes, (self._player, ""))
        if self._player == stand:
            return [push] if push else []
        way = _distances(self._puzzle.floor - self._boxes, stand)
        here = way.get(self._player, 0)
        return [
            word for word in MOVES if here and way.get(_neighbour(self._player, word)) == here - 1
        ]

    @property
    def _is_solved(self) -> bool:
        return self._boxes == self._puzzle.goals

    def _move(self, word: str) -> bool:
        to = _neighbour(self._player, word)
        if to in self._boxes:
            behind = _neighbour(to, word)
            if behind not in self._puzzle.floor - self._boxes:
                return False
            self._boxes = self._boxes - {to} | {behind}
        elif to not in self._puzzle.floor:
            return False
        self._player = to
        return True

    def _view(self, more: str = "") -> str | Observation:
        """The observation, and a line of text after it."""
        if self._chosen_view == "picture":
            return Observation(more, [board_image(self._letters(), _COLOURS, _SIGNS)])
        shown = self._describe() if self._chosen_view == "words" else self._grid()
        return f"{shown}\n{more}" if more else shown

    def _letters(self) -> list[str]:
        return [row[1::2] for row in self._grid().split("\n")]

    def _describe(self) -> str:
        said = []
        for box in sorted(self._boxes):
            goal = min(
                sorted(self._puzzle.goals),
                key=lambda goal: abs(goal[0] - box[0]) + abs(goal[1] - box[1]),
            )
            said.append(
                f"box {_steps_between(self._player, box)}, goal {_steps_between(box, goal)}"
            )
        walls = [word for word in MOVES if _neighbour(self._player, word) not in self._puzzle.floor]
        return "\n".join([*said, *([f"wall {' '.join(walls)}"] if walls else [])])

    def _grid(self) -> str:
        cells = range(-1, self._puzzle.side + 1)
        return "\n".join(
            "".join(f" {self._letter((row, column))}" for column in cells) for row in cells
        )

    def _letter(self, cell: Cell) -> str:
        on_goal = cell in self._puzzle.goals
        if cell == self._player:
            return "+" if on_goal else "@"
        if cell in self._boxes:
            return "*" if on_goal else "$"
        if cell not in self._puzzle.floor:
            return "#"
        return "." if on_goal else "-"


@plays(Sokoban)
def strong_player(env: Sokoban, rng: random.Random) -> str:
    """A word of the known solution, or a legal word once a push left it. For demonstrations."""
    return weak_player(env, rng, skill=1.0)


@plays(Sokoban)
def weak_player(env: Sokoban, rng: random.Random, skill: float = 0.6) -> str:
    """A word of the known solution with probability `skill`, else a legal one. For warm starts."""
    known = env.known_moves() if rng.random() < skill else []
    return rng.choice(known or list(MOVES))


@lru_cache(maxsize=4096)
def make_puzzle(level: int, seed: int, side: int | None = None, walls: int | None = None) -> Puzzle:
    """The puzzle of a seed; all members of a group share it."""
    rng, shape = random.Random(seed), LEVELS[level]
    shape = replace(shape, side=side or shape.side, walls=shape.walls if walls is None else walls)
    while (puzzle := _pull_apart(_draw_floor(shape, rng), shape, rng)) is None:
        pass
    return puzzle


def _draw_floor(shape: Shape, rng: random.Random) -> frozenset[Cell]:
    """A random connected floor: walls are drawn again until no cell is cut off."""
    cells = [(row, column) for row in range(shape.side) for column in range(shape.side)]
    while True:
        rng.shuffle(cells)
        floor = frozenset(cells[shape.walls :])
        if len(_distances(floor, cells[-1])) == len(floor):
            return floor


def _pull_apart(floor: frozenset[Cell], shape: Shape, rng: random.Random) -> Puzzle | None:
    """Pull boxes away from the goals without repeating a position; the puzzle begins where they are
    farthest away.

    `None` if no position had every box off the goals.
    """
    player, *places = rng.sample(sorted(floor), 1 + shape.boxes)
    boxes = goals = frozenset(places)
    solution, best = {goals: (player, "")}, (0, goals, player)
    for _ in range(shape.pulls):
        pulls = _reachable_pulls(floor, boxes, player)
        new = [pull for pull in pulls if pull[0] not in solution]
        if not new:
            break
        # Prefer pulls away from the goals and near the player: a random walk would give easy
        # puzzles long solutions.
        boxes, player, push, _ = max(
            new, key=lambda pull: _off_goals(pull[0], goals) - pull[3] / 2 + rng.uniform(0, 2)
        )
        solution[boxes] = (player, push)
        if not boxes & goals:
            best = max(best, (_off_goals(boxes, goals), boxes, player), key=lambda found: found[0])
    if not best[0]:
        return None
    return Puzzle(shape.side, floor, goals, best[1], best[2], solution)


def _reachable_pulls(floor: frozenset[Cell], boxes: frozenset[Cell], player: Cell) -> list[Pull]:
    """All pulls that the player can reach. It stands beside the box, on the side that the box
    moves to, and steps back.
    """
    free = floor - boxes
    reached = _distances(free, player)
    pulls = []
    for row, column in sorted(boxes):
        for word, (down, right) in MOVES.items():
            near, far = (row - down, column - right), (row - 2 * down, column - 2 * right)
            if near in reached and far in free:
                pulls.append((boxes - {(row, column)} | {near}, far, word, reached[near]))
    return pulls


def _off_goals(boxes: Set[Cell], goals: Set[Cell]) -> int:
    """Sum of the steps from each box to its nearest goal, ignoring walls."""
    return sum(min(abs(row - r) + abs(column - c) for r, c in goals) for row, column in boxes)


def _neighbour(cell: Cell, word: str) -> Cell:
    down, right = MOVES[word]
    return cell[0] + down, cell[1] + right


def _steps_between(start: Cell, end: Cell) -> str:
    """The steps down or up, and right or left, between two cells: `2 up 1 left`, or `here`."""
    down, right = end[0] - start[0], end[1] - start[1]
    parts = [
        (abs(down), "down" if down > 0 else "up"),
        (abs(right), "right" if right > 0 else "left"),
    ]
    return " ".join(f"{steps} {word}" for steps, word in parts if steps) or "here"


def _distances(free: Set[Cell], start: Cell) -> dict[Cell, int]:
    """Steps from `start` to each reachable cell, by breadth-first search."""
    distances = {start: 0}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for word in MOVES:
            to = _neighbour(cell, word)
            if to in free and to not in distances:
                distances[to] = distances[cell] + 1
                queue.append(to)
    return distances
