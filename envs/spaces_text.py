"""Gymnasium's spaces in text: what a message must hold to be an action, and how an observation is
written out.

| action space | an action is | words |
|---|---|---|
| `Discrete` | the one action word in the message, by default its number | may be given |
| `MultiDiscrete`, `MultiBinary` | the whole numbers of the space, in order, within bounds | |
| `Box` | as many numbers as the box has, in order, within bounds | |
| `Text` | the whole message, without the white space at its ends | |
| `Dict`, `Tuple` | one line for each part, `name: action`, each read by its own space's rule | |

Numbers may stand between any other text, with or without brackets and commas. The lines of parts
may stand in any order and between others. The name of a part is its key, or its number from 0 on in
a `Tuple`; that of a part inside a part is the path to it, as in `arm.grip: 1`. All else about a
message is a mistake that costs a turn: it is answered by a hint, and nothing is rounded, clipped or
cut. All other spaces are refused.
"""

import math
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from agentrl.envs.base import ToolError
from agentrl.errors import ConfigError
from agentrl.tokens.pixels import is_of_pixels

MAX_NUMBERS = 256
"""Most numbers of an observation that is written out as text."""
MAX_ACTION_NUMBERS = 64
"""Most numbers of an action."""
MAX_WORDS = 256
"""Most actions of a `Discrete` space that are told one by one."""

_NUMBER = re.compile(r"(?<![\w.-])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w-]|\.\w)")


@dataclass(frozen=True, slots=True)
class WordReader:
    """Actions of a `Discrete` space: a word for each, in its order. `first` is the number of the
    first.
    """

    words: Sequence[str]
    first: int = 0

    @property
    def instruction(self) -> str:
        """The words."""
        return f"Actions: {', '.join(self.words)}."

    @property
    def description(self) -> str:
        """Their list."""
        return f"one of: {self.list_words(None)}"

    def list_words(self, legal: Collection[int] | None) -> str:
        """The words of the legal actions."""
        return ", ".join(
            word
            for index, word in enumerate(self.words)
            if legal is None or index + self.first in legal
        )

    def read(self, message: str, legal: Collection[int] | None = None) -> int:
        """The number of the one action word in the message."""
        matched = {match.lastgroup for match in _pattern(tuple(self.words)).finditer(message)}
        one_of = f"Answer with one of: {self.list_words(legal)}."
        if len(matched) != 1:
            problem = "more than one action" if matched else "no action"
            raise ToolError(f"Your message names {problem}. {one_of}")
        index = int(str(matched.pop()).removeprefix("action"))
        if legal is not None and index + self.first not in legal:
            raise ToolError(f"{self.words[index]} is not possible now. {one_of}")
        return self.first + index

    def write(self, action: Any) -> str:
        """Its word."""
        return self.words[int(action) - self.first]


@dataclass(frozen=True, slots=True)
class NumberReader:
    """Actions of several numbers, or one that is not whole: `low` and `high` bound each."""

    space: Space[Any]
    low: Sequence[float]
    high: Sequence[float]
    whole: bool

    @property
    def instruction(self) -> str:
        """The number of numbers, and their bounds."""
        return f"An action is {self.description}."

    @property
    def description(self) -> str:
        """The same, as a part of a sentence."""
        bounds = list(zip(self.low, self.high, strict=True))
        kind = "whole number" if self.whole else "number"
        if len(set(bounds)) == 1:
            each = "" if len(bounds) == 1 else ", each"
            return f"{_count(len(bounds), kind)}{each} {_bounds_text(*bounds[0])}"
        return f"{_count(len(bounds), kind)}: {', '.join(_bounds_text(*bound) for bound in bounds)}"

    def read(self, message: str, legal: Collection[int] | None = None) -> Any:
        """The numbers in the message, in the shape of the space."""
        found = [float(text) for text in _NUMBER.findall(message)]
        if len(found) != len(self.low):
            raise ToolError(
                f"Your message holds {_count(len(found), 'number')}. Answer with "
                f"{self.description}."
            )
        if self.whole and not all(map(float.is_integer, found)):
            raise ToolError(f"Not every number is whole. Answer with {self.description}.")
        shape, dtype = self.space.shape or (), self.space.dtype
        if all(
            low <= number <= high
            for low, number, high in zip(self.low, found, self.high, strict=True)
        ):
            action = np.array(found).astype(dtype).reshape(shape)[()]
            if legal is not None and int(action) not in legal:
                raise ToolError(f"{int(action)} is not possible now. Answer with another number.")
            if self.space.contains(action):
                return action
        raise ToolError(f"Not every number is within its bounds. Answer with {self.description}.")

    def write(self, action: Any) -> str:
        """Its numbers."""
        return " ".join(map(str, np.asarray(action).flatten()))


@dataclass(frozen=True, slots=True)
class TextReader:
    """Actions of a `Text` space."""

    space: spaces.Text

    @property
    def instruction(self) -> str:
        """The length of a text, and its characters."""
        return f"An action is {self.description}: your whole message."

    @property
    def description(self) -> str:
        """The same, as a part of a sentence."""
        shortest, longest = self.space.min_length, self.space.max_length
        length = str(longest) if shortest == longest else f"{shortest} to {longest}"
        letters = self.space.characters
        plain = set(letters) == set(string.ascii_letters + string.digits)
        return (
            f"a text of {length}"
            f" {'letters or digits' if plain else f'of the characters {letters!r:.200}'}"
        )

    def read(self, message: str, legal: Collection[int] | None = None) -> str:
        """The message without the white space at its ends."""
        text = message.strip()
        if not self.space.contains(text):
            raise ToolError(f"{text!r:.60} is no action. Answer with {self.description}.")
        return text

    def write(self, action: Any) -> str:
        """The text itself."""
        return str(action)


@dataclass(frozen=True, slots=True)
class PartsReader:
    """Actions of a `Dict` or `Tuple` space: `parts` are its innermost ones, by their paths."""

    space: Space[Any]
    parts: Mapping[str, "ActionReader"]

    @property
    def instruction(self) -> str:
        """The lines."""
        return f"An action is {self.description}"

    @property
    def description(self) -> str:
        """The same, as a part of a sentence."""
        lines = [f"{name}: ({reader.description})" for name, reader in self.parts.items()]
        return "\n".join(
            [f"{_count(len(lines), 'line')}, with your choice in place of the brackets:", *lines]
        )

    def read(self, message: str, legal: Collection[int] | None = None) -> Any:
        """The parts, put together as the space has them."""
        found = {name: self._read(name, reader, message) for name, reader in self.parts.items()}
        return _put_together(self.space, found)

    def _read(self, name: str, reader: "ActionReader", message: str) -> Any:
        lines = re.findall(
            rf"^[ \t*>-]*{re.escape(name)}[ \t*]*:(.*)$", message, re.MULTILINE | re.IGNORECASE
        )
        if len(lines) != 1:
            problem = "more than one line" if lines else "no line"
            raise ToolError(
                f"Your message has {problem} `{name}: ...`. Answer with {self.description}"
            )
        try:
            return reader.read(lines[0])
        except ToolError as mistake:
            raise ToolError(f"In the line `{name}: ...`: {mistake}") from mistake

    def write(self, action: Any) -> str:
        """Its lines."""
        parts = _take_apart(self.space, action)
        return "\n".join(
            f"{name}: {reader.write(parts[name])}" for name, reader in self.parts.items()
        )


ActionReader = WordReader | NumberReader | TextReader | PartsReader
"""Finds the action in a message. `instruction` and `description` tell the player what an action is.
`read` returns the action that a message names, of which `legal` has the numbers of the allowed
ones, if not all are. It raises `ToolError`, with a text for the player, for a message that names
none, more than one, or one that is not legal. `write` returns the message that names an action."""


def parts_of(space: Space[Any] | None) -> Mapping[Any, Space[Any]] | None:
    """The parts of a space by their keys, or by their numbers; `None` if it has none."""
    if isinstance(space, spaces.Dict):
        return space.spaces
    return dict(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None


def _innermost_spaces(space: Space[Any], path: str = "") -> Iterator[tuple[str, Space[Any]]]:
    """The innermost parts of a space, with their paths."""
    inner = parts_of(space)
    if inner is None:
        yield path, space
    else:
        for key, part in inner.items():
            yield from _innermost_spaces(part, f"{path}.{key}" if path else str(key))


def _put_together(space: Space[Any], parts: Mapping[str, Any], path: str = "") -> Any:
    inner = parts_of(space)
    if inner is None:
        return parts[path]
    built = {
        key: _put_together(part, parts, f"{path}.{key}" if path else str(key))
        for key, part in inner.items()
    }
    return built if isinstance(space, spaces.Dict) else tuple(built.values())


def _take_apart(space: Space[Any], action: Any, path: str = "") -> dict[str, Any]:
    inner = parts_of(space)
    if inner is None:
        return {path: action}
    parts: dict[str, Any] = {}
    for key, part in inner.items():
        parts |= _take_apart(part, action[key], f"{path}.{key}" if path else str(key))
    return parts


def action_reader(name: str, space: Space[Any], words: Sequence[str] = ()) -> ActionReader:
    """The reader of a space's actions. `words`: one for each action of a `Discrete` space, by
    default its numbers.

    Raises:
        ConfigError: the space has no rule (see the head of this module), or the words do not fit
        it.
    """
    if isinstance(space, spaces.Discrete):
        first, count = int(space.start), int(space.n)
        # Too many to list in a prompt: any number in the range is read instead.
        if count > MAX_WORDS and not words:
            return NumberReader(space, [first], [first + count - 1], whole=True)
        chosen = tuple(words) or tuple(map(str, range(first, first + count)))
        if len(chosen) != count or len({word.lower().strip() for word in chosen} - {""}) != count:
            raise ConfigError(
                f"options['actions'] must hold {count} different words for {name}, got"
                f" {list(chosen)}"
            )
        return WordReader(chosen, first)
    if words:
        kind = (
            "texts"
            if isinstance(space, spaces.Text)
            else "numbers"
            if parts_of(space) is None
            else "of several parts"
        )
        raise ConfigError(
            f"options['actions'] are words for a Discrete action space, and that of {name} is"
            f" {space}, whose actions are {kind}: leave them out"
        )
    if isinstance(space, spaces.Text):
        return TextReader(space)
    if parts_of(space) is not None:
        return _parts_reader(name, space)
    bounds = _bounds(space)
    if bounds is None or not 0 < len(bounds[0]) <= MAX_ACTION_NUMBERS:
        raise ConfigError(
            f"{name} has the action space {space}. Discrete, Text, and MultiDiscrete, MultiBinary"
            f" and Box spaces of at most {MAX_ACTION_NUMBERS} numbers can be played in text, and"
            " Dict and Tuple spaces of these. Wrap the environment so that it has one of them, or"
            " write an agentrl.TextEnv for it"
        )
    whole = np.issubdtype(space.dtype or float, np.integer)
    return NumberReader(space, *bounds, whole)


def _parts_reader(name: str, space: Space[Any]) -> PartsReader:
    leaves = list(_innermost_spaces(space))
    paths = [path for path, _ in leaves]
    if (
        not leaves
        or any("\n" in path for path in paths)
        or len({path.lower().strip() for path in paths}) < len(paths)
    ):
        raise ConfigError(
            f"{name} has the action space {space}, and the lines of an action need a name for each"
            f" part: {paths}. Wrap the environment so that its parts have names of their own"
        )
    return PartsReader(
        space, {path: action_reader(f"{path} of {name}", part) for path, part in leaves}
    )


def check_readable(name: str, space: Space[Any] | None, way_out: str = "") -> None:
    """Check that observations of this space can be written out as text. `way_out`: what else one
    may do with a picture.

    Raises:
        ConfigError: they hold an image, or too many numbers.
    """
    for path, array in _arrays(space):
        where = f"{path} of an observation" if path else "an observation"
        if is_image(array):
            raise ConfigError(
                f"{where} of {name} is an image, an array of {array.shape} in {array.dtype}, and"
                f" no text: {f'{way_out}, ' if way_out else ''}choose an environment that says the"
                " same in text or numbers, wrap it so that it does, or write an"
                " agentrl.TextEnv for it"
            )
        if np.prod(array.shape) > MAX_NUMBERS:
            raise ConfigError(
                f"{where} of {name} is an array of {array.shape}, too long to write out as text (at"
                f" most {MAX_NUMBERS} numbers). Wrap the environment, or write an"
                " agentrl.TextEnv for it"
            )


def is_image(box: spaces.Box) -> bool:
    """True if the arrays of a box are pictures: bytes from 0 to 255 in height and width, and maybe
    colours.
    """
    if box.dtype != np.uint8 or int(np.max(box.high, initial=0)) != 255:
        return False
    return is_of_pixels(box.shape)


def format_observation(observation: Any) -> str:
    """The observation as text: floats with four digits, nested as they come."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(
            f"{key}: {format_observation(value)}" for key, value in observation.items()
        )
    if isinstance(observation, np.ndarray):
        observation = observation.tolist()
    if isinstance(observation, list | tuple):
        return f"[{', '.join(map(format_observation, observation))}]"
    return (
        f"{float(observation):.4g}"
        if isinstance(observation, float | np.floating)
        else str(observation)
    )


def _bounds(space: Space[Any]) -> tuple[list[float], list[float]] | None:
    """The bounds of each number of an action, flattened; `None` for a space without a rule."""
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(space.start)
        return _exact_bounds(start), _exact_bounds(start + space.nvec - 1)
    if isinstance(space, spaces.MultiBinary):
        return [0.0] * int(np.prod(space.shape)), [1.0] * int(np.prod(space.shape))
    return (
        (_exact_bounds(space.low), _exact_bounds(space.high))
        if isinstance(space, spaces.Box)
        else None
    )


def _exact_bounds(bounds: Any) -> list[float]:
    """The shortest decimal of each bound, which is the same number in the type of the bound."""
    return [float(str(bound)) for bound in np.asarray(bounds).flatten()]


def _bounds_text(low: float, high: float) -> str:
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
    """One group for each action, longest first, so that "pick up" is not read as "up"; whole words
    only.
    """
    order = sorted(range(len(actions)), key=lambda index: -len(actions[index]))
    words = "|".join(f"(?P<action{index}>{re.escape(actions[index].strip())})" for index in order)
    return re.compile(rf"(?<![\w-])(?<!\d\.)(?:{words})(?![\w-]|\.\d)", re.IGNORECASE)
