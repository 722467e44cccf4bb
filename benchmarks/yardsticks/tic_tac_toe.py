"""Tic-tac-toe for two agents, and against a player that never loses."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agentrl import TextEnv
from agentrl.protocols import Env, ResetResult, StepResult

AGENTS = ("first", "second")
OTHER = {"X": "O", "O": "X"}
_LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
_EMPTY = "." * 9
_PROMPT = "Answer with the number of a free cell. Three X in a row win. X is yours, O the other's."


def winner(board: str) -> str:
    """The mark that has three in a row; empty if none has."""
    for line in _LINES:
        marks = {board[int(cell)] for cell in line}
        if marks in ({"X"}, {"O"}):
            return marks.pop()
    return ""


def moves(board: str) -> list[int]:
    """The free cells."""
    return [cell for cell, mark in enumerate(board) if mark == "."]


def after(board: str, cell: int, mark: str) -> str:
    """The board with a mark in this cell."""
    return f"{board[:cell]}{mark}{board[cell + 1 :]}"


@cache
def value(board: str, mark: str) -> int:
    """What the side to move gets, if both play best: 1, 0 or -1."""
    if winner(board):
        return -1  # the other has just won
    return max((-value(after(board, cell, mark), OTHER[mark]) for cell in moves(board)), default=0)


def best_moves(board: str, mark: str) -> list[int]:
    """The moves of a player that never loses."""
    worth = {cell: -value(after(board, cell, mark), OTHER[mark]) for cell in moves(board)}
    return [cell for cell, one in worth.items() if one == max(worth.values())]


def shown(board: str, mark: str) -> str:
    """The board as the side with this mark sees it: its own are X, free cells have numbers."""
    own = [
        str(cell + 1) if one == "." else "X" if one == mark else "O"
        for cell, one in enumerate(board)
    ]
    return "\n".join(" ".join(own[row : row + 3]) for row in (0, 3, 6))


class Board(TextEnv):
    """A board, and whose turn it is."""

    isolation = "inline"
    system_prompt = _PROMPT
    board: str = _EMPTY
    mark: str = "X"

    def _cell(self, action: str) -> int | None:
        """The cell that a message names, if it is free."""
        cell = int(action) - 1 if action in tuple("123456789") else None
        return cell if cell in moves(self.board) else None


class TicTacToe(Board):
    """Two agents, of which `first` begins. A win pays 1 and costs the other 1. A message that is no
    free cell loses. Success is not to lose.
    """

    reward_range = (-1.0, 1.0)

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """An empty board."""
        self.board, self.mark = _EMPTY, "X"
        return shown(self.board, self.mark)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Name the agents, and the one that begins."""
        return self.start(seed, options), {"agents": list(AGENTS), "agent": AGENTS[0]}

    def step(self, action: str) -> StepResult:
        """Put the mark of the agent whose turn it is."""
        mine, cell = self.mark, self._cell(action)
        actor, other = AGENTS if mine == "X" else AGENTS[::-1]
        self.mark = OTHER[mine]
        if cell is None:
            return _end(actor, other, -1.0)
        self.board = after(self.board, cell, mine)
        if winner(self.board):
            return _end(actor, other, 1.0)
        if not moves(self.board):
            return _end(actor, other, 0.0)
        return shown(self.board, self.mark), 0.0, False, False, {"agent": other}


def _end(actor: str, other: str, reward: float) -> StepResult:
    """The end of a game between two agents. The reward is that of the one who has played last."""
    rewards = {actor: reward, other: -reward}
    successes = {agent: reward >= 0 for agent, reward in rewards.items()}
    info = {"rewards": rewards, "success": successes}
    return "The game is over.", reward, True, False, info


class AgainstMinimax(Board):
    """One agent against a player that never loses. The seed says who begins, and chooses among the
    player's best moves. Success is not to lose.
    """

    reward_range = (-1.0, 1.0)

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """The board when it is the agent's turn."""
        self.rng = random.Random(seed)
        self.board, self.mark = _EMPTY, self.rng.choice("XO")
        if self.mark == "O":
            self._answer()
        return shown(self.board, self.mark)

    def step(self, action: str) -> StepResult:
        """Put the agent's mark, and the other's."""
        cell = self._cell(action)
        if cell is None:
            return self._end(-1.0)
        self.board = after(self.board, cell, self.mark)
        if winner(self.board) or not moves(self.board):
            return self._end(1.0 if winner(self.board) else 0.0)
        self._answer()
        if winner(self.board) or not moves(self.board):
            return self._end(-1.0 if winner(self.board) else 0.0)
        return shown(self.board, self.mark), 0.0, False, False, {}

    def _answer(self) -> None:
        other = OTHER[self.mark]
        self.board = after(self.board, self.rng.choice(best_moves(self.board, other)), other)

    def _end(self, reward: float) -> StepResult:
        return "The game is over.", reward, True, False, {"success": reward >= 0}


def clumsy_player(env: Env, rng: random.Random, skill: float = 0.3) -> str:
    """With probability `skill` a best move, else any."""
    if not isinstance(env, Board):
        raise TypeError(f"this player plays tic-tac-toe, not {type(env).__name__}")
    cells: Sequence[int] = moves(env.board)
    if rng.random() < skill:
        cells = best_moves(env.board, env.mark)
    return str(rng.choice(cells) + 1)
