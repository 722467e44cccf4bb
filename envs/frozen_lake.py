"""Gymnasium's FrozenLake as text, with a new solvable map for every seed, made for tiny models.

The observation is the grid, then a line with the cells left, down, right and up of the player. Each
cell is a space and a letter, so that a byte-level tokenizer makes one token of it, the same at
every position. P is the player, S the start, F frozen, H a hole, G the goal, W the wall around the
lake. With `view: picture` it is a picture instead, and no text: of the lake, or of what is around
the player.
"""

import random
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from pydantic import Field

from agentrl.envs.base import TextEnv, plays, read_options
from agentrl.envs.board import board_html, board_image
from agentrl.errors import EnvError
from agentrl.protocols import Observation, StepReply
from agentrl.settings.base import Settings
from agentrl.tokens.encoded_image import EncodedImage

ACTIONS = ("left", "down", "right", "up")
"""The legal messages, in Gymnasium's order."""

_HINT = "Say left, down, right or up."
_GRID_PROMPT = (
    "You are P. Reach G, avoid H. Say left, down, right or up. "
    "The last line is what is left, down, right, up of you."
)
_PICTURE_PROMPT = (
    "You are the dot. Reach the green square, avoid the dark ones. Say left, down, right or up."
)
_COLOURS = {
    "S": "#dde7f0",
    "F": "#e4f1fa",
    "H": "#5b7f9e",
    "G": "#8fd3a5",
    "P": "#f2b35e",
    "W": "#22303c",
}
_SIGNS = {"F": "", "H": "", "P": "●", "G": "★"}

Map = tuple[str, ...]
"""Rows of S, F, H and G."""


class FrozenLake(TextEnv):
    """Walk from the start to the goal (reward 1) without falling into a hole (reward 0); either
    ends the episode.

    A message that is not exactly one legal word costs a turn; the answer is the same grid and a
    hint. Only the run limits the number of turns.
    """

    system_prompt = _GRID_PROMPT
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        size: int = Field(4, ge=2, le=16)
        """Cells per side."""
        p: float = Field(0.8, ge=0.6, le=1.0)
        """Probability that a cell is frozen. Below 0.6 a large map almost never has a path to the
        goal.
        """
        slippery: bool | Annotated[float, Field(ge=0, le=1)] = False
        """The share of moves that go sideways. If true, two of three, as is Gymnasium's default."""
        view: Literal["grid", "picture"] = "grid"
        """The observation: the grid as text, or a picture of 28 x 28 pixels per cell."""
        sight: int | None = Field(None, ge=1, le=16)
        """With `view: picture`: the cells that are seen on each side of the player, who is then in
        the middle of the picture; null: the whole lake."""

        @property
        def shows_images(self) -> bool:
            """True if the model must be able to see."""
            return self.view == "picture"

    def __init__(self) -> None:
        self._lake: gymnasium.Env[int, int] | None = None
        self._desc: Map = ()
        self._slips = 0.0
        self._sees = False
        self._sight: int | None = None
        self._state = 0
        self._over = True

    def start(self, seed: int, options: Mapping[str, Any]) -> str | Observation:
        """Set up the map of this seed."""
        chosen = read_options(self.Options, options)
        desc = _solvable_map(chosen.size, chosen.p, seed)
        slips = 2 / 3 if chosen.slippery is True else float(chosen.slippery)
        if self._lake is None or (desc, slips) != (self._desc, self._slips):
            # gymnasium.make would only add its time limit and its checks, at several times the
            # cost. All state of an episode is set by reset, so the environment can be reused.
            self._lake = FrozenLakeEnv(
                desc=list(desc), is_slippery=slips > 0, success_rate=1 - slips
            )
            self._desc, self._slips = desc, slips
        self._state, _ = self._lake.reset(seed=seed)
        self._over = False
        self._sees, self._sight = chosen.shows_images, chosen.sight
        self.system_prompt = _PICTURE_PROMPT if self._sees else _GRID_PROMPT
        return self._view()

    def step(self, action: str) -> StepReply:
        """Move, if the message is a legal word.

        Raises:
            EnvError: no episode is being played.
        """
        if self._lake is None or self._over:
            raise EnvError("no episode is being played; call reset first")
        word = action.strip().lower()
        if word not in ACTIONS:
            return self._view(_HINT), 0.0, False, False, {"success": False}
        self._state, reward, self._over, _, _ = self._lake.step(ACTIONS.index(word))
        return self._view(), float(reward), self._over, False, {"success": float(reward) > 0}

    def render_html(self) -> str:
        """The lake: ice, holes (dark), the goal (a star), and the player (a dot)."""
        return _html(self._desc, self._state)

    def shortest_moves(self) -> list[str]:
        """The legal words that begin a shortest path from the player to the goal (on ice that is
        not slippery).
        """
        to_goal = _distances(self._desc)
        far = len(to_goal)
        moves = {
            word: to_goal.get(_move(self._desc, self._state, index), far)
            for index, word in enumerate(ACTIONS)
        }
        shortest = min(moves.values())
        return [word for word, distance in moves.items() if distance == shortest]

    def safe_moves(self) -> list[str]:
        """The legal words that lead to another cell that is not a hole (on ice that is not
        slippery).
        """
        cells = "".join(self._desc)
        reached = {
            word: _move(self._desc, self._state, index) for index, word in enumerate(ACTIONS)
        }
        return [
            word for word, state in reached.items() if state != self._state and cells[state] != "H"
        ]

    def _view(self, hint: str = "") -> str | Observation:
        if self._sees:
            return Observation(hint, [_image(self._desc, self._state, self._sight)])
        grid = _grid(self._desc, self._state)
        return f"{grid}\n{hint}" if hint else grid


@plays(FrozenLake)
def weak_player(env: FrozenLake, rng: random.Random, skill: float = 0.3) -> str:
    """With probability `skill` the first word of a shortest path, else any legal word. For warm
    starts.
    """
    return rng.choice(env.shortest_moves() if rng.random() < skill else ACTIONS)


@plays(FrozenLake)
def careful_player(env: FrozenLake, rng: random.Random) -> str:
    """Any move to another cell that is not a hole: it avoids danger but does not know the way. A
    `ScriptedPlayer`.
    """
    return rng.choice(env.safe_moves())


@lru_cache(maxsize=4096)
def _solvable_map(size: int, p: float, seed: int) -> Map:
    """A solvable map; all members of a group share it."""
    return tuple(generate_random_map(size, p, seed))


@lru_cache(maxsize=4096)
def _grid(desc: Map, state: int) -> str:
    """The map as text, with the player, and below it what is around the player."""
    row, column = divmod(state, len(desc))
    rows = ["".join(f" {cell}" for cell in cells) for cells in desc]
    rows[row] = f"{rows[row][: 2 * column]} P{rows[row][2 * column + 2 :]}"
    around = [_move(desc, state, action) for action in range(len(ACTIONS))]
    cells = "".join(desc)
    view = "".join(" W" if after == state else f" {cells[after]}" for after in around)
    return "\n".join([*rows, view])


@lru_cache(maxsize=4096)
def _html(desc: Map, state: int) -> str:
    return board_html(_rows_with_player(desc, state), _COLOURS, _SIGNS)


@lru_cache(maxsize=4096)
def _image(desc: Map, state: int, sight: int | None = None) -> EncodedImage:
    rows = _rows_with_player(desc, state)
    if sight is not None:
        # Walls around the lake on all sides, so that the window of a player at the shore is whole.
        row, column = divmod(state, len(desc))
        shore = "W" * sight
        wide = [f"{shore}{cells}{shore}" for cells in rows]
        wall = ["W" * len(wide[0])] * sight
        around = [*wall, *wide, *wall][row : row + 2 * sight + 1]
        rows = [cells[column : column + 2 * sight + 1] for cells in around]
    return board_image(rows, _COLOURS, _SIGNS)


def _rows_with_player(desc: Map, state: int) -> list[str]:
    """The rows of the grid without its spaces, and without its last line."""
    return [row[1::2] for row in _grid(desc, state).split("\n")[:-1]]


def _move(desc: Map, state: int, action: int) -> int:
    """The cell that a move leads to; a wall stops it."""
    row, column = divmod(state, len(desc))
    down, right = ((0, -1), (1, 0), (0, 1), (-1, 0))[action]
    last = len(desc) - 1
    return min(max(row + down, 0), last) * len(desc) + min(max(column + right, 0), last)


@lru_cache(maxsize=4096)
def _distances(desc: Map) -> dict[int, int]:
    """Number of moves to the goal from each cell that can reach it, by breadth-first search from
    the goal.
    """
    cells = "".join(desc)
    goal = cells.index("G")
    distances = {goal: 0}
    queue = deque([goal])
    while queue:
        state = queue.popleft()
        for action in range(len(ACTIONS)):
            # Moves are symmetric, so the cells that lead here are the cells reachable from here.
            neighbour = _move(desc, state, action)
            if cells[neighbour] != "H" and neighbour not in distances:
                distances[neighbour] = distances[state] + 1
                queue.append(neighbour)
    return distances
