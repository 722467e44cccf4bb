"""Any Gymnasium environment whose actions are words or numbers, as text.

    env.reset(seed=7, options={"id": "Taxi-v4", "kwargs": {"is_rainy": True}})

`env: gymnasium:Taxi-v4` in a config chooses this environment with that id. Packages that register
in the entry-point group `gymnasium.envs`, which Gymnasium itself no longer reads, work too; so do
MiniGrid and BabyAI, as `gymnasium:minigrid:MiniGrid-DoorKey-5x5-v0`.

The observation is the environment's own text drawing ("ansi") if it has one, with the highlighted
cell in square brackets; otherwise its observation as text. The action is the one action word in the
model's message, or its numbers (`agentrl/envs/spaces_text.py`). A reward of several parts
(MO-Gymnasium) is summed with the weights of `options["reward_weights"]`; the parts are in
`info["reward_parts"]`. With `options["view"]`, models that see get pictures
(`agentrl/envs/spaces_pictures.py`); else these are refused.
"""

import difflib
import importlib
import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator, namespace
from pydantic import Field

from agentrl.envs import minigrid
from agentrl.envs.base import TextEnv, ToolError, read_options
from agentrl.envs.foreign import silence_output
from agentrl.envs.spaces_pictures import holds_pictures, rendered, shown_of, without_pictures
from agentrl.envs.spaces_text import ActionReader, action_reader, check_readable, format_observation
from agentrl.errors import ConfigError, EnvError, PluginError
from agentrl.package.distribution import install_command
from agentrl.protocols import Env, Observation, OwnerOnly, StepReply
from agentrl.settings.base import Settings

GymEnv = gymnasium.Env[Any, Any]


@dataclass(frozen=True, slots=True)
class Game:
    """A Gymnasium environment as agentrl knows it: words for its actions, and instructions."""

    actions: tuple[str, ...]
    """The word of each action, by its number."""
    rules: str
    """The instructions for the player."""
    describe: Callable[[GymEnv, Any], str] | None = None
    """Describes an observation of the environment as text; by default it is written out."""
    success: Callable[[float, bool], bool] = lambda reward, terminated: terminated and reward > 0
    """Judges the last step of an episode, by its reward and whether it terminated; most games pay
    only for reaching the goal."""
    noisy: bool = False
    """The game prints during reset."""


def _describe_taxi(env: GymEnv, observation: Any) -> str:
    taxi: Any = env.unwrapped
    row, column, passenger, destination = taxi.decode(int(observation))
    where = "in the taxi" if passenger == 4 else f"at {'RGYB'[passenger]}"
    return (
        f"Taxi: row {row}, column {column}. Passenger: {where}. Destination: {'RGYB'[destination]}."
    )


def _describe_blackjack(env: GymEnv, observation: Any) -> str:
    own, dealer, ace = (int(part) for part in observation)
    return f"You have {own}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."


def _is_goal_reached(reward: float, terminated: bool) -> bool:
    """For games that terminate only at the goal and give no reward for it."""
    return terminated


def _is_time_limit_reached(reward: float, terminated: bool) -> bool:
    """For games that are won by lasting until the time limit."""
    return not terminated


_MOVES = ("left", "down", "right", "up")
_LAKE = Game(
    _MOVES,
    "You walk on a frozen lake: S start, F ice, H hole, G goal. You are in the cell in [ ]."
    " Reach G.",
)
_CLIFF = Game(
    ("up", "right", "down", "left"),
    "You are x. Reach T. Stepping on the cliff C costs 100 and takes you back to the start.",
    success=_is_goal_reached,
)
GAMES: Mapping[str, Game] = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "Taxi": Game(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "You drive the taxi, the cell in [ ]. Fetch the passenger and drop them off at the"
        " destination. The stands are R, G, Y and B; | is a wall, : is open.",
        _describe_taxi,
    ),
    "Blackjack": Game(
        ("stick", "hit"),
        "Get closer to 21 than the dealer without going over. The dealer's ace is shown as 1.",
        _describe_blackjack,
    ),
    "CartPole": Game(
        ("left", "right"),
        "Keep the pole upright. You see the cart's position and speed, then the pole's angle and"
        " speed.",
        None,
        _is_time_limit_reached,
    ),
    "MountainCar": Game(
        ("left", "coast", "right"),
        "Drive the car up the right hill. You see its position and speed.",
        None,
        _is_goal_reached,
    ),
    "MountainCarContinuous": Game(
        (),
        "Drive the car up the right hill. You see its position and speed, and say its"
        " acceleration.",
        None,
        _is_goal_reached,
    ),
    "Pendulum": Game(
        (),
        "Swing the pendulum up and keep it there. You see cosine and sine of its angle and its"
        " speed, and say the torque.",
    ),
    "Acrobot": Game(
        ("minus", "none", "plus"),
        "Swing the lower link above the line. You see cosine and sine of both angles, then both"
        " speeds.",
        None,
        _is_goal_reached,
    ),
    "LunarLander": Game(
        ("nothing", "left", "main", "right"), "Land between the flags by firing engines."
    ),
}
"""By environment name, without the version."""

FAMILIES: Mapping[str, Callable[[GymEnv], Game]] = {
    "minigrid": lambda env: Game(
        minigrid.action_words(env), minigrid.RULES, minigrid.describe, noisy=True
    ),
}
"""By package, for packages with too many environments to list."""


def scheme(rest: str) -> Callable[[], Env]:
    """gymnasium:Taxi-v4: a Gymnasium environment, in text.

    Raises:
        PluginError: there is no such environment.
    """
    try:
        _find(rest)
    except ConfigError as error:
        raise PluginError(str(error)) from error
    return partial(GymnasiumText, rest)


class GymnasiumText(TextEnv):
    """Gymnasium in text. A message without exactly one action costs a turn; the answer says what an
    action is.

    `info["success"]` is decided in the last step of an episode (it is false before): by the game's
    own rule if it is known, otherwise by whether the episode terminated with a last reward above
    zero.
    """

    system_prompt = "You play a game. Answer each turn with one of the actions told at its start."

    class Options(Settings):
        """The options of `reset`."""

        id: Annotated[str, OwnerOnly()]
        """A registered Gymnasium id, such as "FrozenLake-v1" ("package:Name-v0" imports `package`
        first).
        """
        kwargs: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Keyword arguments of `gymnasium.make`."""
        actions: tuple[str, ...] = ()
        """A word for each action of a discrete space, in its order. Default: known games have
        words, others numbers.
        """
        reward_weights: tuple[float, ...] = ()
        """For an environment whose reward is a vector: the weight of each part in the sum that
        counts.
        """
        view: Literal["text", "render", "observation"] = "text"
        """What the model gets: text; or the picture that `render()` draws (`render_mode`
        "rgb_array"), and no text; or the pictures of the observation, and the rest of it as text.
        """

        @property
        def shows_images(self) -> bool:
            """True if the model must be able to see."""
            return self.view != "text"

    deterministic = True

    def __init__(self, env_id: str = "") -> None:
        """`env_id` is the id if the options give none."""
        self._defaults = {"id": env_id} if env_id else {}
        self._env: GymEnv | None = None
        self._made_of: Options | None = None
        self._over = True

    def start(self, seed: int, options: Mapping[str, Any]) -> str | Observation:
        """Make the environment, unless the last episode had the same options, and reset it.

        Raises:
            ConfigError: there is no such environment, or it cannot be played in text.
        """
        chosen = read_options(self.Options, {**self._defaults, **options})
        if self._env is None or self._made_of != chosen:
            self.close()
            self._env, self._game, self._reader = _make(chosen)
            self._weights = chosen.reward_weights
            self._made_of = chosen.model_copy(deep=True)
        with silence_output() if self._game.noisy else nullcontext():
            observation, _ = self._env.reset(seed=seed)
        self._over = False
        rules = f"{self._game.rules}\n" if self._game.rules and chosen.view == "text" else ""
        told, seen = f"{rules}{self._reader.instruction}", self._seen(self._env, observation)
        if isinstance(seen, str):
            return f"{told}\n{seen}"
        return Observation("\n".join(filter(None, (told, seen.text))), seen.images)

    def step(self, action: str) -> StepReply:
        """Take the action that the one action word in the message names.

        Raises:
            EnvError: no episode is being played.
        """
        if self._env is None or self._over:
            raise EnvError("no episode is being played; call reset first")
        try:
            taken = self._reader.read(action)
        except ToolError as mistake:
            return str(mistake), 0.0, False, False, {"success": False}
        observation, paid, terminated, truncated, _ = self._env.step(taken)
        reward, parts = _weigh_rewards(paid, self._weights)
        terminated, truncated = bool(terminated), bool(truncated)
        self._over = terminated or truncated
        success = self._over and self._game.success(reward, terminated)
        return (
            self._seen(self._env, observation),
            reward,
            terminated,
            truncated,
            {"success": success} | parts,
        )

    def _seen(self, env: GymEnv, observation: Any) -> str | Observation:
        assert self._made_of is not None
        if self._made_of.view == "render":
            return Observation("", [rendered(env)])
        if self._made_of.view == "observation":
            return shown_of(env.observation_space, observation)
        drawing = env.render() if env.render_mode == "ansi" else None
        parts = [_without_colours(drawing).strip("\n")] if isinstance(drawing, str) else []
        if self._game.describe is not None:
            parts.append(self._game.describe(env, observation))
        elif not parts:  # the drawing shows the state already
            parts.append(format_observation(observation))
        return "\n".join(parts)

    def render_html(self) -> str:
        """The environment's own text drawing, with the player's cell highlighted; "" if it has
        none.
        """
        drawing = (
            self._env.render()
            if self._env is not None and self._env.render_mode == "ansi"
            else None
        )
        return _with_highlight(drawing) if isinstance(drawing, str) else ""

    def close(self) -> None:
        """Close the Gymnasium environment."""
        env, self._env, self._over = self._env, None, True
        if env is not None:
            env.close()


Options = GymnasiumText.Options


def _make(options: Options) -> tuple[GymEnv, Game, ActionReader]:
    spec = _find(options.id)
    try:
        point = spec.entry_point
        creator = load_env_creator(point) if isinstance(point, str) else point
        metadata: Mapping[str, Any] = creator.metadata if isinstance(creator, type) else {}
        modes = metadata.get("render_modes", [])
        # Gymnasium's checker warns about the environment's code, which is no concern of a run.
        arguments = {"disable_env_checker": True, **options.kwargs}
        mode = {"text": "ansi", "render": "rgb_array"}.get(options.view)
        if mode in modes:
            arguments.setdefault("render_mode", mode)
        env = gymnasium.make(spec, **arguments)
    except Exception as error:
        raise ConfigError(
            f"gymnasium cannot make {options.id!r} with kwargs={options.kwargs!r}: {error}. Install"
            " what it needs, or correct options['kwargs']"
        ) from error
    try:
        game = _game(spec, env)
        _check_reward(options, env)
        _check_view(options, env, game)
        space = env.action_space
        count = space.n if isinstance(space, gymnasium.spaces.Discrete) else 0
        words = game.actions if len(game.actions) == count else ()
        return env, game, action_reader(options.id, space, options.actions or words)
    except ConfigError:
        env.close()
        raise


def _check_view(options: Options, env: GymEnv, game: Game) -> None:
    """Check that the environment can be shown as `options["view"]` says.

    Raises:
        ConfigError: it cannot.
    """
    space, has_text = env.observation_space, env.render_mode == "ansi" or game.describe is not None
    if options.view == "render" and env.render_mode != "rgb_array":
        raise ConfigError(
            f"options['view'] is render, and {options.id} draws no pictures (render_mode is"
            f" {env.render_mode!r}): leave it out, or write view: observation if it observes some"
        )
    if options.view == "observation" and not holds_pictures(space):
        raise ConfigError(
            f"options['view'] is observation, and an observation of {options.id} holds no picture"
            f" ({space}): leave it out, or write view: render"
        )
    if options.view == "text" and not has_text:
        check_readable(options.id, space, way_out="write options['view'] for a model that sees")
    elif options.view == "observation":
        check_readable(options.id, without_pictures(space))


def _find(env_id: str) -> EnvSpec:
    """The registered environment. Unlike `gymnasium.make(id)`, this does not warn about old
    versions.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"gymnasium cannot find {env_id!r}: the package {module!r} cannot be imported:"
                f" {error}. Install it (minigrid comes with {install_command('envs')})"
            ) from error
    failed = () if name in gymnasium.registry else _register_installed()
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    there = list(gymnasium.registry)
    near = difflib.get_close_matches(name, there, n=3)
    if not module and name.startswith(("MiniGrid-", "BabyAI-")):
        near = [f"minigrid:{name}"]
    hint = (
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"Some of {len(there)}: {', '.join(there[:12])}."
    )
    also = f" Packages that failed to register theirs: {'; '.join(failed)}" if failed else ""
    raise ConfigError(f"gymnasium has no environment {name!r}. {hint}{also}")


@cache
def _register_installed() -> tuple[str, ...]:
    """Let all packages in the entry-point group `gymnasium.envs` register their environments;
    returns the failures.

    The name of an entry point is the namespace of the ids ("MyGames" in "MyGames/Maze-v0"); a name
    that begins with `__` means no namespace. The entry point is a module, or a function that
    registers.
    """
    failed = []
    for point in entry_points(group="gymnasium.envs"):
        with nullcontext() if point.name.startswith("__") else namespace(point.name):
            try:
                found = point.load()
                if callable(found):
                    found()
            # Another package's failure must not affect this environment, and no exception may pass
            # through Gymnasium's `namespace`.
            except Exception as error:
                failed.append(f"{point.value} ({error!r})")
    return tuple(failed)


def _game(spec: EnvSpec, env: GymEnv) -> Game:
    """The entry of an environment: its own, its package's, or an empty one."""
    family = FAMILIES.get(str(spec.entry_point).partition(".")[0])
    return GAMES.get(spec.name) or (family(env) if family else Game((), ""))


def _check_reward(options: Options, env: GymEnv) -> None:
    """Check that there is a weight for each part of the reward, where the environment says that it
    has parts.
    """
    space = getattr(env.unwrapped, "reward_space", None)
    if space is None:
        return
    parts = math.prod(space.shape or ())
    if parts == len(options.reward_weights) or (parts == 1 and not options.reward_weights):
        return
    raise ConfigError(
        f"the reward of {options.id} has {parts} parts, and options['reward_weights'] has"
        f" {len(options.reward_weights)} weights: write one for each, such as {[1.0] * parts}, and"
        " their weighted sum is the reward"
    )


def _weigh_rewards(paid: Any, weights: tuple[float, ...]) -> tuple[float, dict[str, Any]]:
    """The reward of a step, and the info entry with its parts, if it has several."""
    parts = np.asarray(paid, float).reshape(-1)
    if len(parts) == 1 and not weights:
        return float(parts[0]), {}
    if len(parts) != len(weights):
        raise EnvError(
            f"the reward has {len(parts)} parts, {paid!r:.80}, and options['reward_weights']"
            f" {len(weights)} weights: write one for each part, and their weighted sum is the"
            " reward"
        )
    return float(parts @ np.array(weights)), {"reward_parts": parts.tolist()}


_COLOUR = re.compile(r"\x1b\[([\d;]*)m")
_HIGHLIGHT = '<b style="background: #f2b35e; color: #22303c">'
_BACKGROUND = re.compile(r"(?:^|;)(?:4[0-8]|10[0-7])(?:;|$)")


def _with_highlight(drawing: str) -> str:
    """A text drawing as HTML, with the cell that ANSI colours highlight, which is the player's."""
    text = _COLOUR.sub(
        lambda code: _HIGHLIGHT if _BACKGROUND.search(code[1]) else "</b>",
        escape(drawing.strip("\n")),
    )
    return f'<pre style="font-size: 16px">{text}</pre>'


def _without_colours(drawing: str) -> str:
    """Strip ANSI colours, and put the highlighted cell, the player's, in square brackets."""
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
