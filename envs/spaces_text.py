"""Gymnasium's spaces in text: what a message must hold to be an action, and how an observation is written out.

| action space | an action is | words |
|---|---|---|
| `Discrete` | the one action word in the message, by default its number | may be given |
| `MultiDiscrete`, `MultiBinary` | as many whole numbers as the space has, in its order, each within its bounds | |
| `Box` | as many numbers as the box has, in its order, each within its bounds | |

Numbers may stand between any other text, with or without brackets and commas. All else about a message is a mistake
that costs a turn: it is answered by a hint, and nothing is rounded or clipped. All other spaces are refused.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from gymnasium import Space, spaces

from agentrl.envs.base import ToolError
from agentrl.errors import ConfigError

MAX_NUMBERS = 256
"""Most numbers of an observation that is written out as text."""
MAX_ACTION_NUMBERS = 64
"""Most numbers of an action."""
MAX_WORDS = 256
"""Most actions of a `Discrete` space that are told one by one."""

_NUMBER = re.compile(r"(?<![\w.-])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w-]|\.\w)")


class ActionReader(Protocol):
    """Finds the action in a message."""

    @property
    def told(self) -> str:
        """What the player is told about its actions, such as "Actions: left, right."."""
        ...

    def read(self, message: str, legal: Collection[int] | None = None) -> Any:
        """The action that the message names. `legal`: the numbers of the allowed ones, if not all are.

        Raises:
            ToolError: it names none, more than one, or one that is not legal; the text is for the player.
        """
        ...


@dataclass(frozen=True, slots=True)
class WordReader:
    """Actions of a `Discrete` space: a word for each, in its order. `first` is the number of the first."""

    words: Sequence[str]
    first: int = 0

    @property
    def told(self) -> str:
        """The words."""
        return f"Actions: {', '.join(self.words)}."

    def listed(self, legal: Collection[int] | None) -> str:
        """The words of the legal actions."""
        return ", ".join(word for index, word in enumerate(self.words) if legal is None or index + self.first in legal)

    def read(self, message: str, legal: Collection[int] | None = None) -> int:
        """The number of the one action word in the message."""
        matched = {match.lastgroup for match in _pattern(tuple(self.words)).finditer(message)}
        one_of = f"Answer with one of: {self.listed(legal)}."
        if len(matched) != 1:
            problem = "more than one action" if matched else "no action"
            raise ToolError(f"Your message names {problem}. {one_of}")
        index = int(str(matched.pop()).removeprefix("action"))
        if legal is not None and index + self.first not in legal:
            raise ToolError(f"{self.words[index]} is not possible now. {one_of}")
        return self.first + index


@dataclass(frozen=True, slots=True)
class NumberReader:
    """Actions of several numbers, or of one that is not whole: `low` and `high` bound each of them."""

    space: Space[Any]
    low: Sequence[float]
    high: Sequence[float]
    whole: bool

    @property
    def told(self) -> str:
        """How many numbers, and their bounds."""
        return f"An action is {self._asked()}."

    def read(self, message: str, legal: Collection[int] | None = None) -> Any:
        """The numbers in the message, in the shape of the space."""
        found = [float(text) for text in _NUMBER.findall(message)]
        if len(found) != len(self.low):
            raise ToolError(f"Your message holds {_count(len(found), 'number')}. Answer with {self._asked()}.")
        if self.whole and not all(map(float.is_integer, found)):
            raise ToolError(f"Not every number is whole. Answer with {self._asked()}.")
        shape, dtype = self.space.shape or (), self.space.dtype
        if all(low <= number <= high for low, number, high in zip(self.low, found, self.high, strict=True)):
            action = np.array(found).astype(dtype).reshape(shape)[()]
            if legal is not None and int(action) not in legal:
                raise ToolError(f"{int(action)} is not possible now. Answer with another number.")
            if self.space.contains(action):
                return action
        raise ToolError(f"Not every number is within its bounds. Answer with {self._asked()}.")

    def _asked(self) -> str:
        bounds = list(zip(self.low, self.high, strict=True))
        kind = "whole number" if self.whole else "number"
        if len(set(bounds)) == 1:
            each = "" if len(bounds) == 1 else ", each"
            return f"{_count(len(bounds), kind)}{each} {_between(*bounds[0])}"
        return f"{_count(len(bounds), kind)}: {', '.join(_between(*bound) for bound in bounds)}"


def action_reader(name: str, space: Space[Any], words: Sequence[str] = ()) -> ActionReader:
    """The reader of a space's actions. `words`: one for each action of a `Discrete` space, by default its numbers.

    Raises:
        ConfigError: the space has no rule (see the head of this module), or the words do not fit it.
    """
    if isinstance(space, spaces.Discrete):
        first, count = int(space.start), int(space.n)
        if count > MAX_WORDS and not words:
            return NumberReader(space, [first], [first + count - 1], whole=True)
        chosen = tuple(words) or tuple(map(str, range(first, first + count)))
        if len(chosen) != count or len({word.lower().strip() for word in chosen} - {""}) != count:
            raise ConfigError(f"options['actions'] must hold {count} different words for {name}, got {list(chosen)}")
        return WordReader(chosen, first)
    if words:
        raise ConfigError(
            f"options['actions'] are words for a Discrete action space, and that of {name} is {space}, whose actions "
            "are numbers: leave them out"
        )
    bounds = _bounds(space)
    if bounds is None or not 0 < len(bounds[0]) <= MAX_ACTION_NUMBERS:
        raise ConfigError(
            f"{name} has the action space {space}. Discrete, MultiDiscrete, MultiBinary and Box spaces of at most "
            f"{MAX_ACTION_NUMBERS} numbers can be played in text. Wrap the environment so that it has one of them, or "
            "write an agentrl.envs.base.TextEnv for it"
        )
    whole = np.issubdtype(space.dtype or float, np.integer)
    return NumberReader(space, *bounds, whole)


def check_readable(name: str, space: Space[Any] | None) -> None:
    """Check that observations of this space can be written out as text.

    Raises:
        ConfigError: they hold an image, or too many numbers.
    """
    for path, array in _arrays(space):
        where = f"{path} of an observation" if path else "an observation"
        if is_image(array):
            raise ConfigError(
                f"{where} of {name} is an image, an array of {array.shape} in {array.dtype}, and the models trained "
                "here read text alone. Choose an environment that says the same in text or numbers, wrap it so that "
                "it does, or write an agentrl.envs.base.TextEnv for it"
            )
        if np.prod(array.shape) > MAX_NUMBERS:
            raise ConfigError(
                f"{where} of {name} is an array of {array.shape}, too long to write out as text (at most {MAX_NUMBERS} "
                "numbers). Wrap the environment, or write an agentrl.envs.base.TextEnv for it"
            )


def is_image(box: spaces.Box) -> bool:
    """Whether the arrays of a box are pictures: bytes from 0 to 255 in height and width, and maybe colours."""
    if box.dtype != np.uint8 or int(np.max(box.high, initial=0)) != 255:
        return False
    colours = len(box.shape) == 3 and (box.shape[-1] in (1, 3, 4) or box.shape[0] in (1, 3, 4))
    return colours or (len(box.shape) == 2 and min(box.shape) >= 8)


def written_out(observation: Any) -> str:
    """The observation as text: floats with four digits, nested as they come."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {written_out(value)}" for key, value in observation.items())
    if isinstance(observation, np.ndarray):
        observation = observation.tolist()
    if isinstance(observation, list | tuple):
        return f"[{', '.join(map(written_out, observation))}]"
    return f"{float(observation):.4g}" if isinstance(observation, float | np.floating) else str(observation)


def _bounds(space: Space[Any]) -> tuple[list[float], list[float]] | None:
    """The bounds of each number of an action, flattened; `None` for a space without a rule."""
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(space.start)
        return _exact(start), _exact(start + space.nvec - 1)
    if isinstance(space, spaces.MultiBinary):
        return [0.0] * int(np.prod(space.shape)), [1.0] * int(np.prod(space.shape))
    return (_exact(space.low), _exact(space.high)) if isinstance(space, spaces.Box) else None


def _exact(bounds: Any) -> list[float]:
    """The shortest decimal of each bound, which is the same number in the type of the bound."""
    return [float(str(bound)) for bound in np.asarray(bounds).flatten()]


def _between(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "of any size"
    if math.isinf(high):
        return f"from {low:.10g} up"
    return f"up to {high:.10g}" if math.isinf(low) else f"from {low:.10g} to {high:.10g}"


def _count(number: int, of: str) -> str:
    return f"one {of}" if number == 1 else f"{number or 'no'} {of}s"


def _arrays(space: Space[Any] | None, path: str = "") -> Iterator[tuple[str, spaces.Box]]:
    """All boxes in a space, with their places in it."""
    if isinstance(space, spaces.Box):
        yield path, space
    elif isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _arrays(inner, f"{path}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for number, inner in enumerate(space.spaces):
            yield from _arrays(inner, f"{path}[{number}]")


@lru_cache(maxsize=256)
def _pattern(actions: tuple[str, ...]) -> re.Pattern[str]:
    """One group for each action, longest first, so that "pick up" is not read as "up"; whole words only."""
    order = sorted(range(len(actions)), key=lambda index: -len(actions[index]))
    words = "|".join(f"(?P<action{index}>{re.escape(actions[index].strip())})" for index in order)
    return re.compile(rf"(?<![\w-])(?<!\d\.)(?:{words})(?![\w-]|\.\d)", re.IGNORECASE)
