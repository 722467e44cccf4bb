"""TextArena's games: `env: textarena:Wordle-v0`, alone or against scripted opponents.

The observation is what the game has sent the player since its last turn. A game of several players
needs opponents: `"random"`, `"first"` (the first legal move found), or a function `opponent(seen,
rng) -> message` given as "package.module:name"; `seen` is all that this opponent has seen in this
episode. With the opponent `"agent"` no player is scripted: each is an agent, player_0, player_1 and
so on (`agentrl.Env`).
"""

import copy
import importlib
import random
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from agentrl.envs.base import TextEnv, read_options
from agentrl.envs.foreign import GlobalRng, check_known, load_package
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env, OwnerOnly, ResetResult, StepResult
from agentrl.settings.base import Settings

MOST_PLAYERS = 8
MOST_REPLIES = 400
"""Most moves of the opponents between two turns of the player; after that the episode is truncated.
"""
MOST_TRIES = 40
"""Moves that a scripted opponent tries on copies of the game. If all are illegal, it plays the last
one anyway.
"""

Opponent = Callable[[str, random.Random], str]


def scheme(rest: str) -> Callable[[], Env]:
    """textarena:TicTacToe-v0: a game of TextArena, with scripted opponents if it needs any.

    Raises:
        PluginError: there is no such game, or the package is missing.
    """
    load_package("textarena")
    from textarena.envs.registration import ENV_REGISTRY

    check_known(f"textarena:{rest}", rest, ENV_REGISTRY)
    return partial(TextArena, rest)


class TextArena(TextEnv):
    """A game of TextArena. At the end each player gets the game's reward, from -1 to 1.

    Success means a reward of 1 in a game for one player, and a reward above 0 against others.
    """

    system_prompt = (
        "You play a game. Write each move as its rules say, in square brackets where they ask for"
        " them."
    )

    class Options(Settings):
        """The options of `reset`."""

        kwargs: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Keyword arguments of `textarena.make`."""
        players: int = Field(0, ge=0, le=MOST_PLAYERS)
        """Number of players, opponents included; 0 is the fewest that the game allows."""
        seat: int = Field(0, ge=0)
        """The number of the model's player; 0 moves first in most games."""
        opponent: Annotated[str, OwnerOnly()] = "random"
        """"random", "first", "package.module:name" of a function, or "agent": all are agents;
        `seat` is ignored.
        """

    deterministic = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._env: Any = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Make a new game, and let the opponents play until it is the player's turn.

        Raises:
            ConfigError: TextArena cannot make it, or it cannot be played this way.
            EnvError: the game ended before the player's first turn.
        """
        chosen = read_options(self.Options, options)
        opponent = _opponent(chosen.opponent)
        self._player = chosen.seat
        self._seen: dict[int, list[str]] = {}
        self._global_rng = GlobalRng(seed)
        with self._global_rng.install():
            self._env, self._players = _make(self._name, chosen, seed)
            self._opponent = opponent or partial(
                _legal_move, self._env, shuffled=chosen.opponent == "random"
            )
            self._agents = {chosen.seat: ""}
            if chosen.opponent == "agent":
                self._agents = {player: f"player_{player}" for player in range(self._players)}
            text = self._play_opponents()
        if text is None:
            self._env = None
            raise EnvError(
                f"{self._name} ended before the turn of player {self._player}; choose another"
                " options['seat']"
            )
        return text

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Make a new game; if several agents play, the info names them."""
        self.rng = random.Random(seed)
        observation = self.start(seed, options)
        names = list(self._agents.values())
        return observation, {"agents": names, **self._turn()} if names[0] else {}

    def step(self, action: str) -> StepResult:
        """Send the message to the game, and let the opponents move.

        Raises:
            EnvError: no episode is being played.
        """
        if self._env is None:
            raise EnvError("no episode is being played; call reset first")
        with self._global_rng.install():
            actor = self._player
            done, _ = self._env.step(action)
            text = None if done else self._play_opponents()
            if text is not None:
                return text, 0.0, False, False, self._turn() or {"success": False}
            return self._end(actor)

    def close(self) -> None:
        """Drop the game."""
        self._env = None

    def _turn(self) -> dict[str, Any]:
        """The agent whose turn it is, if several play."""
        agent = self._agents[self._player]
        return {"agent": agent} if agent else {}

    def _play_opponents(self) -> str | None:
        """The observation of the next agent; `None` if no further turn comes."""
        for _ in range(MOST_REPLIES):
            player, messages = _unwrap(self._env).get_observation()
            text = _text(messages, player)
            if player in self._agents:
                self._player = player
                return text or "It is your turn."
            seen = self._seen.setdefault(player, [])
            seen.append(text)
            done, _ = self._env.step(self._opponent("\n".join(seen), self.rng))
            if done:
                return None
        return None

    def _end(self, actor: int) -> StepResult:
        env, self._env = self._env, None
        state = _unwrap(env).state
        observation = _text(state.observations.get(actor, []), actor)
        if not state.done:
            return (
                observation or "The others play on without you.",
                0.0,
                False,
                True,
                {"success": False},
            )
        rewards, about = env.close()
        outcomes = {
            player: _reward_and_reason(player, rewards or {}, about or {})
            for player in self._agents
        }
        success = {
            player: paid > 0 if self._players > 1 else paid >= 1
            for player, (paid, _) in outcomes.items()
        }
        reward, reason = outcomes[actor]
        info: dict[str, Any] = {"success": success[actor]}
        if self._agents[actor]:
            names = self._agents
            info = {
                "rewards": {names[player]: paid for player, (paid, _) in outcomes.items()},
                "success": {names[player]: won for player, won in success.items()},
            }
        return (
            "\n".join(filter(None, (observation, reason))) or "The game is over.",
            reward,
            True,
            False,
            info,
        )


Options = TextArena.Options


def _reward_and_reason(
    player: int, rewards: Mapping[int, Any], about: Mapping[int, Any]
) -> tuple[float, str]:
    """A player's reward, and the game's reason for it."""
    paid, reason = rewards.get(player, 0.0), about.get(player, {}).get("reason")
    if isinstance(paid, str):  # some games swap the two
        paid, reason = 0.0, paid
    return float(paid), str(reason or "")


def _unwrap(env: Any) -> Any:
    """The game without its wrappers, which repeat the whole history in each observation."""
    from textarena.core import Wrapper

    while isinstance(env, Wrapper):
        env = env.env
    return env


def _make(name: str, options: Options, seed: int) -> tuple[Any, int]:
    """The game after its reset, and its number of players. Games reveal that number only by
    refusing others.
    """
    import textarena

    refused = ""
    for players in [options.players] if options.players else range(1, MOST_PLAYERS + 1):
        try:
            env = textarena.make(name, **options.kwargs)
        except Exception as error:
            raise ConfigError(
                f"textarena cannot make {name!r} with kwargs={options.kwargs!r}: {error!r}. Install"
                " or download what it needs, or correct options['kwargs']"
            ) from error
        try:
            env.reset(num_players=players, seed=seed)
        except (AssertionError, ValueError) as error:
            refused = str(error)
            continue
        if options.seat >= players:
            raise ConfigError(
                f"options['seat'] = {options.seat}, but {name} is played by {players}, from 0"
            )
        return env, players
    raise ConfigError(
        f"{name} refuses options['players'] = {options.players or f'1 to {MOST_PLAYERS}'}:"
        f" {refused}"
    )


def _text(messages: Any, player: int) -> str:
    """The messages of the game and of other players, as text; a player knows its own."""
    if isinstance(messages, str):
        return messages
    lines = []
    for message in messages:
        # Some games pass the fields in another order; the first string is the message.
        sender = message[0] if isinstance(message[0], int) else -1
        text = next((part for part in message if isinstance(part, str)), "").strip("\n")
        if text and sender != player:
            lines.append(text if sender < 0 else f"[Player {sender}] {text}")
    return "\n".join(lines)


def _opponent(name: str) -> Opponent | None:
    """The named function; `None` for the built-in opponents, which need the game itself, and for
    "agent".
    """
    if name in ("random", "first", "agent"):
        return None
    module, _, attribute = name.partition(":")
    try:
        found: Opponent = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"options['opponent'] = {name!r} cannot be found: {error}. Write 'random', 'first',"
            " 'agent', or 'package.module:name' of a function opponent(seen, rng) that returns a"
            " message"
        ) from error
    return found


def _legal_move(env: Any, seen: str, rng: random.Random, *, shuffled: bool) -> str:
    """The first candidate in `seen` that the game accepts, tried on copies of it; in random order
    if `shuffled`.
    """
    moves = list(_candidates(seen))
    if shuffled:
        rng.shuffle(moves)
    for move in moves[:MOST_TRIES]:
        if _accepts(env, move):
            return move
    return moves[min(MOST_TRIES, len(moves)) - 1]


def _candidates(seen: str) -> Iterable[str]:
    """Everything in brackets, the latest first, then the moves of many games."""
    read = re.findall(r"\[[^\[\]\n]{1,40}\]", seen)[::-1]
    numbers = [f"[{number}]" for number in range(10)]
    cells = [f"[{row} {column}]" for row in range(4) for column in range(4)]
    return dict.fromkeys([*read[:MOST_TRIES], *numbers, *cells, "pass"])


def _accepts(env: Any, move: str) -> bool:
    # Games do not say beforehand what is legal; they count an error, or mark the move, afterwards.
    trial = copy.deepcopy(env)
    state = _unwrap(trial).state
    player, errors = state.current_player_id, state.error_count
    try:
        trial.step(move)
    except Exception:  # a move that the game cannot read is illegal
        return False
    return bool(
        state.error_count <= errors and not state.game_info.get(player, {}).get("invalid_move")
    )
