"""Any Gymnasium environment with a discrete action space, as text.

    env.reset(seed=7, options={"id": "Taxi-v4", "kwargs": {"is_rainy": True}})

`env: gymnasium:Taxi-v4` in a config chooses this environment with that id. Packages that register in the entry-point
group `gymnasium.envs`, which Gymnasium itself no longer reads, work too; so do MiniGrid and BabyAI, as
`gymnasium:minigrid:MiniGrid-DoorKey-5x5-v0`.

The observation is the environment's own text drawing ("ansi") if it has one, with the highlighted cell in square
brackets; otherwise its observation as text. The action is the one action word in the model's message.
"""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Annotated, Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator, namespace
from pydantic import Field

from agentrl.envs import minigrid
from agentrl.envs.base import TextEnv, read_options
from agentrl.envs.foreign import silenced
from agentrl.errors import ConfigError, EnvError, PluginError
from agentrl.protocols import Env, OwnerOnly, Settings, StepResult

GymEnv = gymnasium.Env[Any, Any]
MAX_NUMBERS = 256
"""Most numbers of an observation that is written out as text."""


@dataclass(frozen=True, slots=True)
class Game:
    """What agentrl knows about a Gymnasium environment: words for its actions, and instructions.

    `success(reward, terminated)` judges the last step of an episode; most games pay only for reaching the goal.
    A `noisy` game prints during reset.
    """

    actions: tuple[str, ...]
    rules: str
    describe: Callable[[GymEnv, Any], str] | None = None
    success: Callable[[float, bool], bool] = lambda reward, terminated: terminated and reward > 0
    noisy: bool = False


def _describe_taxi(env: GymEnv, observation: Any) -> str:
    row, column, passenger, destination = env.unwrapped.decode(int(observation))  # type: ignore[attr-defined]
    where = "in the taxi" if passenger == 4 else f"at {'RGYB'[passenger]}"
    return f"Taxi: row {row}, column {column}. Passenger: {where}. Destination: {'RGYB'[destination]}."


def _describe_blackjack(env: GymEnv, observation: Any) -> str:
    own, dealer, ace = (int(part) for part in observation)
    return f"You have {own}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."


def _reached(reward: float, terminated: bool) -> bool:
    """For games that terminate only at the goal and give no reward for it."""
    return terminated


def _lasted(reward: float, terminated: bool) -> bool:
    """For games that are won by lasting until the time limit."""
    return not terminated


_MOVES = ("left", "down", "right", "up")
_LAKE = Game(_MOVES, "You walk on a frozen lake: S start, F ice, H hole, G goal. You are in the cell in [ ]. Reach G.")
_CLIFF = Game(
    ("up", "right", "down", "left"),
    "You are x. Reach T. Stepping on the cliff C costs 100 and takes you back to the start.",
    success=_reached,
)
GAMES: Mapping[str, Game] = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "Taxi": Game(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "You drive the taxi, the cell in [ ]. Fetch the passenger and drop them off at the destination. "
        "The stands are R, G, Y and B; | is a wall, : is open.",
        _describe_taxi,
    ),
    "Blackjack": Game(
        ("stick", "hit"),
        "Get closer to 21 than the dealer without going over. The dealer's ace is shown as 1.",
        _describe_blackjack,
    ),
    "CartPole": Game(
        ("left", "right"),
        "Keep the pole upright. You see the cart's position and speed, then the pole's angle and speed.",
        None,
        _lasted,
    ),
    "MountainCar": Game(
        ("left", "coast", "right"), "Drive the car up the right hill. You see its position and speed.", None, _reached
    ),
    "Acrobot": Game(
        ("minus", "none", "plus"),
        "Swing the lower link above the line. You see cosine and sine of both angles, then both speeds.",
        None,
        _reached,
    ),
    "LunarLander": Game(("nothing", "left", "main", "right"), "Land between the flags by firing engines."),
}
"""By environment name, without the version."""

FAMILIES: Mapping[str, Callable[[GymEnv], Game]] = {
    "minigrid": lambda env: Game(minigrid.action_words(env), minigrid.RULES, minigrid.describe, noisy=True),
}
"""By package, for packages with too many environments to list."""


def scheme(rest: str) -> Callable[[], Env]:
    """gymnasium:Taxi-v4: a Gymnasium environment of discrete actions, in text.

    Raises:
        PluginError: there is no such environment.
    """
    try:
        _find(rest)
    except ConfigError as error:
        raise PluginError(str(error)) from error
    return partial(GymnasiumText, rest)


class GymnasiumText(TextEnv):
    """Gymnasium in text. A message without exactly one action word costs a turn; the answer lists the words.

    `info["success"]` is decided in the last step of an episode (it is false before): by the game's own rule if it is
    known, otherwise by whether the episode terminated with a last reward above zero.
    """

    system_prompt = "You play a game. Answer each turn with one of the actions listed at its start."

    class Options(Settings):
        """What `reset(options=...)` takes."""

        id: Annotated[str, OwnerOnly()]
        """A registered Gymnasium id, such as "FrozenLake-v1" ("package:Name-v0" imports `package` first)."""
        kwargs: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Keyword arguments of `gymnasium.make`."""
        actions: tuple[str, ...] = ()
        """A word for each action, in the order of the action space. Default: known games have words, others numbers."""

    def __init__(self, env_id: str = "") -> None:
        """`env_id` is the id if the options give none."""
        self._defaults = {"id": env_id} if env_id else {}
        self._env: GymEnv | None = None
        self._made_of: Options | None = None
        self._over = True

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Make the environment, unless the last episode had the same options, and reset it.

        Raises:
            ConfigError: there is no such environment, or it cannot be played in text.
        """
        chosen = read_options(self.Options, {**self._defaults, **options})
        if self._env is None or self._made_of != chosen:
            self.close()
            self._env, self._game = _make(chosen)
            self._first_action = int(getattr(self._env.action_space, "start", 0))
            self._words = _pattern(self._game.actions)
            self._made_of = chosen.model_copy(deep=True)
        with silenced() if self._game.noisy else nullcontext():
            observation, _ = self._env.reset(seed=seed)
        self._over = False
        rules = f"{self._game.rules}\n" if self._game.rules else ""
        return f"{rules}Actions: {', '.join(self._game.actions)}.\n{_as_text(self._env, self._game, observation)}"

    def step(self, action: str) -> StepResult:
        """Take the action that the one action word in the message names.

        Raises:
            EnvError: no episode is being played.
        """
        if self._env is None or self._over:
            raise EnvError("no episode is being played; call reset first")
        matched = {match.lastgroup for match in self._words.finditer(action)}
        if len(matched) != 1:
            problem = "more than one action" if matched else "no action"
            hint = f"Your message names {problem}. Answer with one of: {', '.join(self._game.actions)}."
            return hint, 0.0, False, False, {"success": False}
        index = int(str(matched.pop()).removeprefix("action"))
        observation, reward, terminated, truncated, _ = self._env.step(self._first_action + index)
        reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        self._over = terminated or truncated
        success = self._over and self._game.success(reward, terminated)
        return _as_text(self._env, self._game, observation), reward, terminated, truncated, {"success": success}

    def close(self) -> None:
        """Close the Gymnasium environment."""
        env, self._env, self._over = self._env, None, True
        if env is not None:
            env.close()


Options = GymnasiumText.Options


def _make(options: Options) -> tuple[GymEnv, Game]:
    spec = _find(options.id)
    try:
        point = spec.entry_point
        creator = load_env_creator(point) if isinstance(point, str) else point
        modes = getattr(creator, "metadata", {}).get("render_modes", [])
        # The passive checker's warnings are meant for the environment's author.
        arguments = {"disable_env_checker": True, **options.kwargs}
        if "ansi" in modes:
            arguments.setdefault("render_mode", "ansi")
        env = gymnasium.make(spec, **arguments)
    except Exception as error:
        raise ConfigError(
            f"gymnasium cannot make {options.id!r} with kwargs={options.kwargs!r}: {error}. Install what it needs, "
            "or correct options['kwargs']"
        ) from error
    try:
        return env, _game(options, spec, env)
    except ConfigError:
        env.close()
        raise


def _find(env_id: str) -> EnvSpec:
    """The registered environment. Unlike `gymnasium.make(id)`, this does not warn about old versions."""
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"gymnasium cannot find {env_id!r}: the package {module!r} cannot be imported: {error}. Install it "
                "(minigrid comes with agentrl[envs])"
            ) from error
    failed = () if name in gymnasium.registry else _register_installed()
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    near = difflib.get_close_matches(name, gymnasium.registry, n=3)
    if not module and name.startswith(("MiniGrid-", "BabyAI-")):
        near = [f"minigrid:{name}"]
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"There are {', '.join(gymnasium.registry)}."
    also = f" Packages that failed to register theirs: {'; '.join(failed)}" if failed else ""
    raise ConfigError(f"gymnasium has no environment {name!r}. {hint}{also}")


@cache
def _register_installed() -> tuple[str, ...]:
    """Let all packages in the entry-point group `gymnasium.envs` register their environments; returns the failures.

    The name of an entry point is the namespace of the ids ("MyGames" in "MyGames/Maze-v0"); a name that begins with
    `__` means no namespace. The entry point is a module, or a function that registers.
    """
    failed = []
    for point in entry_points(group="gymnasium.envs"):
        with nullcontext() if point.name.startswith("__") else namespace(point.name):
            try:
                found = point.load()
                if callable(found):
                    found()
            # Another package's failure must not affect this environment, and no exception may pass through
            # Gymnasium's `namespace`.
            except Exception as error:
                failed.append(f"{point.value} ({error!r})")
    return tuple(failed)


def _game(options: Options, spec: EnvSpec, env: GymEnv) -> Game:
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(
            f"{options.id} has the action space {space}; only discrete ones can be played by words. "
            "Wrap the environment so that it has a Discrete action space, or write an agentrl.envs.base.TextEnv for it"
        )
    family = FAMILIES.get(str(spec.entry_point).partition(".")[0])
    known = GAMES.get(spec.name) or (family(env) if family else Game((), ""))
    numbers = tuple(str(int(space.start) + index) for index in range(int(space.n)))
    actions = options.actions or (known.actions if len(known.actions) == len(numbers) else numbers)
    if len(actions) != len(numbers) or len({word.lower().strip() for word in actions} - {""}) != len(numbers):
        raise ConfigError(
            f"options['actions'] must hold {len(numbers)} different words for {options.id}, got {list(actions)}"
        )
    _check_readable(options, env)
    return replace(known, actions=actions)


def _check_readable(options: Options, env: GymEnv) -> None:
    space = env.observation_space
    if env.render_mode != "ansi" and isinstance(space, gymnasium.spaces.Box) and np.prod(space.shape) > MAX_NUMBERS:
        raise ConfigError(
            f"an observation of {options.id} is an array of {space.shape}, too long to write out as text (at most "
            f"{MAX_NUMBERS} numbers). Wrap the environment, or write an agentrl.envs.base.TextEnv for it"
        )


def _pattern(actions: Sequence[str]) -> re.Pattern[str]:
    """One group for each action, longest first, so that "pick up" is not read as "up"; whole words only."""
    order = sorted(range(len(actions)), key=lambda index: -len(actions[index]))
    words = "|".join(f"(?P<action{index}>{re.escape(actions[index].strip())})" for index in order)
    return re.compile(rf"(?<![\w-])(?<!\d\.)(?:{words})(?![\w-]|\.\d)", re.IGNORECASE)


def _as_text(env: GymEnv, game: Game, observation: Any) -> str:
    drawing = env.render() if env.render_mode == "ansi" else None
    parts = [_without_colours(drawing).strip("\n")] if isinstance(drawing, str) else []
    if game.describe is not None:
        parts.append(game.describe(env, observation))
    elif not parts:
        parts.append(_written_out(observation))
    return "\n".join(parts)


_COLOUR = re.compile(r"\x1b\[([\d;]*)m")
_BACKGROUND = re.compile(r"(?:^|;)(?:4[0-8]|10[0-7])(?:;|$)")


def _without_colours(drawing: str) -> str:
    """Strip ANSI colours, and put the highlighted cell, which is the player's, in square brackets."""
    text: list[str] = []
    highlighted = False
    at = 0
    for code in _COLOUR.finditer(drawing):
        text.append(drawing[at : code.start()])
        at = code.end()
        if _BACKGROUND.search(code[1]) and not highlighted:
            text.append("[")
            highlighted = True
        elif code[1] in ("", "0") and highlighted:
            text.append("]")
            highlighted = False
    return "".join(text) + drawing[at:] + ("]" if highlighted else "")


def _written_out(observation: Any) -> str:
    """The observation as text: floats with four digits, nested as they come."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_written_out(value)}" for key, value in observation.items())
    if isinstance(observation, np.ndarray):
        observation = observation.tolist()
    if isinstance(observation, list | tuple):
        return f"[{', '.join(map(_written_out, observation))}]"
    return f"{float(observation):.4g}" if isinstance(observation, float | np.floating) else str(observation)
