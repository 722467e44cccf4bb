"""PettingZoo's games as environments of several agents: `env: pettingzoo:classic/connect_four_v3`.

The address is a module of `pettingzoo`, with dots or slashes, or that of another package which has
`env` or `parallel_env` (`pettingzoo:mpe2/simple_spread_v3`). Each agent keeps the name that
PettingZoo gives it, so `env.agents` says who plays it:

    env:
      name: pettingzoo:classic/connect_four_v3
      agents: {player_1: {name: scripted, player: "agentrl.envs.pettingzoo:random_player"}}

Agents act one after another, also in a parallel game, where each of them sees the state before the
round. What a message must hold is told in each agent's first observation
(`agentrl/envs/spaces_text.py`). An action that the game's mask forbids costs a turn, is answered by
those that are possible, and never ends the game. At the end, an agent succeeded if its rewards sum
to more than 0.
"""

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces
from pydantic import Field

from agentrl.envs.base import TextEnv, ToolError, plays, read_options
from agentrl.envs.foreign import GlobalRng, load_package, silence_output
from agentrl.envs.spaces_text import (
    ActionReader,
    WordReader,
    action_reader,
    check_readable,
    format_observation,
)
from agentrl.errors import ConfigError, EnvError, PluginError
from agentrl.protocols import Env, OwnerOnly, ResetResult, StepResult
from agentrl.settings.base import Settings

MOST_LISTED = 64
"""Most possible actions that an observation lists."""


@dataclass(frozen=True, slots=True)
class PettingZooGame:
    """A PettingZoo game as agentrl knows it."""

    rules: str
    """The rules, for the player."""
    words: tuple[str, ...] = ()
    """Words for the first actions, by their numbers."""
    show: Callable[[Any, int], str] | None = None
    """Describes an observation; gets it and the number of actions."""
    moves: Callable[[Any], Mapping[str, int]] | None = None
    """The words of the actions that are possible now with their numbers, for games with too many
    actions to name all."""


def _show_board(planes: Any, actions: int, numbered: bool = False) -> str:
    """A board whose first plane has the own pieces (X), and whose second has the other player's
    (O).
    """
    own, other = np.asarray(planes)[..., 0], np.asarray(planes)[..., 1]
    numbers = np.arange(own.size).reshape(own.shape).astype(str)
    empty = numbers if numbered else np.full(own.shape, ".")
    return "\n".join(map(" ".join, np.where(own, "X", np.where(other, "O", empty))))


_SHAPES = ("rock", "paper", "scissors", "spock", "lizard")


def _show_last_shape(observation: Any, actions: int) -> str:
    number = int(observation)
    named = _SHAPES[number] if number < len(_SHAPES) else str(number)
    return f"The other's last choice: {'none yet' if number == actions else named}."


def _chess_moves(env: Any) -> dict[str, int]:
    from pettingzoo.classic.chess import chess_utils

    board, player = env.unwrapped.board, env.possible_agents.index(env.agent_selection)
    legal = chess_utils.legal_moves(board)
    return {chess_utils.action_to_move(board, action, player).uci(): action for action in legal}


GAMES: Mapping[str, PettingZooGame] = {
    "connect_four": PettingZooGame(
        "Drop a piece into a column, 0 to 6 from the left. Four of yours in a row win. X is yours,"
        " O the other's.",
        show=_show_board,
    ),
    "tictactoe": PettingZooGame(
        "Three of yours in a row win. X is yours, O the other's; a free cell shows its number.",
        show=partial(_show_board, numbered=True),
    ),
    "go": PettingZooGame(
        "X is yours, O the other's. The points are numbered from 0, row by row; the number after"
        " the last one passes.",
        show=_show_board,
    ),
    "chess": PettingZooGame(
        "Write a move as two squares: e2e4, or e7e8q to promote. White's pieces are capitals.",
        moves=_chess_moves,
    ),
    "rps": PettingZooGame(
        "Both choose at once; the better choice wins.", _SHAPES, _show_last_shape
    ),
    "leduc_holdem": PettingZooGame("Leduc hold'em.", ("call", "raise", "fold", "check")),
    "texas_holdem": PettingZooGame("Limit hold'em.", ("call", "raise", "fold", "check")),
    "texas_holdem_no_limit": PettingZooGame(
        "No-limit hold'em.",
        ("fold", "check or call", "raise half the pot", "raise the pot", "all in"),
    ),
}
"""By module, without the version."""


def scheme(rest: str) -> Callable[[], Env]:
    """pettingzoo:classic/connect_four_v3: a game of PettingZoo, each agent by its name.

    Raises:
        PluginError: there is no such game, or a package is missing.
    """
    load_package("pettingzoo")
    _module(rest)
    return partial(PettingZoo, rest)


class PettingZoo(TextEnv):
    """A game of PettingZoo, with an agent for each of its agents."""

    system_prompt = "You play a game. Answer each turn with one action, as told at its start."

    class Options(Settings):
        """The options of `reset`."""

        kwargs: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Keyword arguments of the game's `env` or `parallel_env`."""

    deterministic = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._env: Any = None
        self._made_of: dict[str, Any] | None = None
        self._over = True

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin a game, and name its agents and who acts first.

        Raises:
            ConfigError: the game cannot be made, or not be played in text.
        """
        self.rng = random.Random(seed)
        observation = self.start(seed, options)
        return observation, {"agents": list(self._readers), "agent": self._env.agent_selection}

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Make the game, unless the last one had the same options, and reset it."""
        chosen = read_options(self.Options, options)
        module = _module(self._name)  # its import takes the global generators itself
        self._global_rng = GlobalRng(seed)
        with self._global_rng.install(), silence_output():
            if self._env is None or self._made_of != chosen.kwargs:
                self.close()
                self._env, self._game = _make(self._name, module, chosen.kwargs)
                self._readers = _make_readers(self._name, self._env, self._game)
                self._made_of = dict(chosen.kwargs)
            self._env.reset(seed=seed % 2**32)  # rlcard takes no larger one
            self._earned = dict.fromkeys(self._readers, 0.0)
            self._greeted: set[str] = set()
            self._over = False
            return self._next_message(self._env.agent_selection)

    def step(self, action: str) -> StepResult:
        """Take the action of the agent whose turn it is.

        Raises:
            EnvError: no episode is being played.
        """
        if self._env is None or self._over:
            raise EnvError("no episode is being played; call reset first")
        with self._global_rng.install():
            actor = self._env.agent_selection
            try:
                taken = self._read(actor, action)
            except ToolError as mistake:
                return str(mistake), 0.0, False, False, {"agent": actor}
            self._env.step(taken)
            rewards = {agent: float(paid) for agent, paid in self._env.rewards.items()}
            for agent, paid in rewards.items():
                self._earned[agent] += paid
            terminated, truncated = (
                any(self._env.terminations.values()),
                any(self._env.truncations.values()),
            )
            return self._next_turn(actor, rewards) or self._final_result(
                actor, rewards, truncated and not terminated
            )

    def close(self) -> None:
        """Close the game."""
        env, self._env, self._over = self._env, None, True
        if env is not None:
            env.close()

    def any_action(self, rng: random.Random) -> str:
        """A possible action of the agent whose turn it is, at random, as a message."""
        agent = self._env.agent_selection
        if self._game.moves is not None:
            return rng.choice(list(self._game.moves(self._env)))
        space, legal, reader = (
            self._env.action_space(agent),
            self._legal(agent),
            self._readers[agent],
        )
        if isinstance(space, spaces.Discrete):
            first = int(space.start)
            number = rng.choice(
                sorted(legal) if legal is not None else range(first, first + int(space.n))
            )
            return reader.write(number)
        space.seed(rng.randrange(2**32))
        return reader.write(space.sample())

    def _next_turn(self, actor: str, rewards: Mapping[str, float]) -> StepResult | None:
        """The turn of the next agent that is still in the game; `None` if there is none."""
        while self._env.agents:
            agent = self._env.agent_selection
            if not (self._env.terminations[agent] or self._env.truncations[agent]):
                seen, paid = self._next_message(agent), rewards.get(actor, 0.0)
                return seen, paid, False, False, {"agent": agent, "rewards": dict(rewards)}
            self._env.step(None)  # PettingZoo's rule: an agent that is out steps once with None
        return None

    def _final_result(
        self, actor: str, rewards: Mapping[str, float], truncated: bool
    ) -> StepResult:
        self._over = True
        success = {agent: earned > 0 for agent, earned in self._earned.items()}
        info = {"rewards": dict(rewards), "success": success}
        return "The game is over.", rewards.get(actor, 0.0), not truncated, truncated, info

    def _read(self, agent: str, message: str) -> Any:
        if self._game.moves is None:
            return self._readers[agent].read(message, self._legal(agent))
        moves = self._game.moves(self._env)
        return moves[list(moves)[WordReader(tuple(moves)).read(message)]]

    def _legal(self, agent: str) -> Collection[int] | None:
        """The numbers of the actions that the game's mask allows; `None` if it has none."""
        observation, info = self._env.observe(agent), self._env.infos.get(agent, {})
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        mask = info.get("action_mask") if mask is None else mask
        if mask is None:
            return None
        space = self._env.action_space(agent)
        first = int(space.start) if isinstance(space, spaces.Discrete) else 0
        return {first + int(index) for index in np.flatnonzero(mask)}

    def _next_message(self, agent: str) -> str:
        """The agent's present observation; before its first turn with the rules."""
        lines = []
        if agent not in self._greeted:
            self._greeted.add(agent)
            lines = [f"You are {agent}.", self._game.rules]
            lines += [self._readers[agent].instruction] if self._game.moves is None else []
        lines += [_describe_observation(self._env, self._game, agent), self._list_possible(agent)]
        return "\n".join(filter(None, lines))

    def _list_possible(self, agent: str) -> str:
        """The possible actions, where not all are, and they are not too many."""
        if self._game.moves is not None:
            return f"Possible: {', '.join(self._game.moves(self._env))}."
        legal, reader = self._legal(agent), self._readers[agent]
        if (
            legal is None
            or len(legal) > MOST_LISTED
            or len(legal) == self._env.action_space(agent).n
        ):
            return ""
        listed = (
            reader.list_words(legal)
            if isinstance(reader, WordReader)
            else ", ".join(map(str, sorted(legal)))
        )
        return f"Possible: {listed}."


@plays(PettingZoo)
def random_player(env: PettingZoo, rng: random.Random) -> str:
    """Any possible action. A `ScriptedPlayer`, for opponents and demonstrations."""
    return env.any_action(rng)


def _module(name: str) -> ModuleType:
    """The module of a game. It is one of PettingZoo's, or of another package.

    Raises:
        PluginError: there is none, it cannot be imported, or it has no game.
    """
    dotted = name.replace("/", ".")
    family = dotted.partition(".")[0]
    own = family in ("atari", "butterfly", "classic", "sisl")
    extra = f"pettingzoo[{family if own else 'classic'}]"
    try:
        module = load_package(f"pettingzoo.{dotted}" if own else dotted)
    except PluginError as error:
        raise PluginError(
            f"'pettingzoo:{name}': {error.__cause__}. Write pettingzoo:classic/connect_four_v3 or"
            " another module of PettingZoo; what a family's games need is installed by: pip"
            f" install '{extra}'"
        ) from error
    if not {"env", "parallel_env"} & vars(module).keys():
        raise PluginError(
            f"'pettingzoo:{name}': the module has no game: neither `env` nor `parallel_env`"
        )
    return module


def _make(name: str, module: ModuleType, kwargs: Mapping[str, Any]) -> tuple[Any, PettingZooGame]:
    game = GAMES.get(
        name.replace("/", ".").rpartition(".")[2].rpartition("_v")[0], PettingZooGame("")
    )
    raw: Any = vars(module).get("raw_env")  # a class or a function
    is_class = isinstance(raw, type)
    modes = raw.metadata.get("render_modes", ()) if is_class else ()
    arguments = ({"render_mode": "ansi"} if "ansi" in modes else {}) | dict(kwargs)
    try:
        if "env" in vars(module):
            return module.env(**arguments), game
        from pettingzoo.utils import parallel_to_aec

        return parallel_to_aec(module.parallel_env(**arguments)), game
    except Exception as error:
        raise ConfigError(
            f"pettingzoo cannot make {name!r} with kwargs={dict(kwargs)!r}: {error!r}. Correct"
            " options['kwargs']"
        ) from error


def _make_readers(name: str, env: Any, game: PettingZooGame) -> dict[str, ActionReader]:
    """The action reader of each agent; checks the observation spaces, too."""
    readers = {}
    for agent in env.possible_agents:
        space, seen = env.action_space(agent), env.observation_space(agent)
        if isinstance(seen, spaces.Dict) and "action_mask" in seen.spaces:
            seen = spaces.Dict({key: inner for key, inner in seen.items() if key != "action_mask"})
        if game.show is None and not _draws_text(env):
            check_readable(f"{name} ({agent})", seen)
        actions = int(space.n) if isinstance(space, spaces.Discrete) else 0
        words = game.words[:actions] if actions <= len(game.words) else ()
        readers[agent] = action_reader(f"{name} ({agent})", space, words)
    return readers


def _describe_observation(env: Any, game: PettingZooGame, agent: str) -> str:
    """An observation, without the mask of its actions."""
    observation = env.observe(agent)
    if isinstance(observation, Mapping) and "action_mask" in observation:
        rest = {key: value for key, value in observation.items() if key != "action_mask"}
        observation = rest["observation"] if list(rest) == ["observation"] else rest
    if game.show is not None:
        return game.show(observation, int(env.action_space(agent).n))
    drawing = env.render() if _draws_text(env) else None
    return drawing if isinstance(drawing, str) else format_observation(observation)


def _draws_text(env: Any) -> bool:
    """True if an environment's `render` returns text."""
    return getattr(env, "render_mode", None) == "ansi"
