"""The replies that an environment may give: checked and converted in one place, whatever carries
the reply.

An environment runs on the event loop, in a thread, in a process or behind HTTP. Each reply comes
through here, so the same reply is taken, or refused, over every transport. A refused one fails its
episode, and never the run.
"""

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from agentrl.errors import EnvError
from agentrl.hosting.observations import as_result, images_taken
from agentrl.protocols.env import ResetResult, StepResult

_MOST_BITS = 14_000
"""Bits of an integer that Python writes in decimal digits (`sys.get_int_max_str_digits`)."""


def checked_reset(name: str, reply: Any) -> ResetResult:
    """The reply of `reset`, with the info in types that JSON has; `name` is the environment's.

    Raises:
        EnvError: it is no (observation: str, info: mapping), or one of these cannot be sent or
        stored.
    """
    reply = as_result(reply)
    if not (isinstance(reply, tuple) and len(reply) == 2):
        raise EnvError(
            f"{name}.reset must return (observation: str, info: dict), got {reply!r:.200}"
        )
    observation, info = reply
    return _check_text(f"{name}.reset", observation), _check_info(f"{name}.reset", info)


def checked_step(name: str, reply: Any) -> StepResult:
    """The reply of `step`, with a float, two bools, and the info in types that JSON has.

    Raises:
        EnvError: it is no (observation: str, reward: float, terminated: bool, truncated: bool,
            info: mapping), the reward is not finite, or a text or the info cannot be sent or
            stored.
    """
    reply = as_result(reply)
    if not (isinstance(reply, tuple) and len(reply) == 5):
        raise EnvError(
            f"{name}.step must return (observation: str, reward: float, terminated: bool,"
            f" truncated: bool, info: dict), got {reply!r:.200}"
        )
    observation, info = reply[0], reply[4]
    reward, terminated, truncated = map(_to_python, reply[1:4])
    step = f"{name}.step"
    if not (isinstance(reward, Real) and math.isfinite(reward)):
        raise EnvError(
            f"{step} returned the reward {reward!r:.80}; return a finite number: `float(...)`"
        )
    for flag, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool):
            raise EnvError(
                f"{step} returned {flag}={value!r:.80} ({type(value).__name__}); return a bool:"
                " `bool(...)`"
            )
    return (
        _check_text(step, observation),
        float(reward),
        terminated,
        truncated,
        _check_info(step, info),
    )


def checked_state(name: str, state: Any) -> bytes:
    """The reply of `snapshot`.

    Raises:
        EnvError: it is no bytes.
    """
    if not isinstance(state, bytes):
        raise EnvError(
            f"{name}.snapshot must return bytes, got {state!r:.80} ({type(state).__name__}):"
            " `pickle.dumps(...)`, or the name of what is kept elsewhere"
        )
    return state


def checked_tools(name: str, tools: Any) -> tuple[dict[str, Any], ...]:
    """The tools that an environment offers, in types that JSON has.

    Raises:
        EnvError: they are no sequence of JSON schemas.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise EnvError(f"{name}.tools is {tools!r:.80}; write a sequence of JSON schemas")
    return tuple(_check_info(f"{name}.tools", tool) for tool in tools)


def checked_prompt(name: str, prompt: Any) -> str:
    """The system prompt of an environment; "" for none.

    Raises:
        EnvError: it is no text.
    """
    return _check_text(f"{name}.system_prompt", str(prompt or ""))


def _check_text(where: str, observation: Any) -> str:
    if not isinstance(observation, str):
        if _holds_image(observation):
            raise EnvError(
                f"{where} gave an image ({type(observation).__name__}) for a text: write"
                " agentrl.Observation(text, [agentrl.EncodedImage.of_pixels(array)])"
            )
        raise EnvError(f"{where} gave {observation!r:.80} for a text; write a str")
    _check_encodes(f"{where} gave a text", observation)
    return _as_plain_str(observation)


def _to_python(value: Any) -> Any:
    """A scalar or an array of NumPy or torch as Python's; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_plain_str(text: str) -> str:
    """A text without its subclass. A template would write a member of a `StrEnum` by its name, and
    JSON, which leaves a process, by its value.
    """
    return str.__str__(text)


def _holds_image(observation: Any) -> bool:
    """True if this is an array of pixels, a picture of Pillow, or a message's content that has an
    image among it.
    """
    if isinstance(observation, Mapping):
        return "image" in str(observation.get("type")) or any(
            map(_holds_image, observation.values())
        )
    if isinstance(observation, list | tuple):
        return any(map(_holds_image, observation))
    if isinstance(observation, np.ndarray):
        return observation.dtype == np.uint8 and observation.ndim in (2, 3)
    return type(observation).__module__.startswith("PIL.")


def _check_encodes(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise EnvError(
            f"{what} with {half!r}, half of a surrogate pair, which is no character: decode with"
            " errors='replace'"
        ) from error


def _check_info(where: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise EnvError(
            f"{where} returned the info {info!r:.80}; return a dict with text keys, `{{}}` for"
            " nothing"
        )
    plain = {
        _key_text(where, key, "info"): _to_json_value(where, value, f"info[{key!r}]")
        for key, value in info.items()
    }
    images_taken(where, plain)
    return plain


def _to_json_value(where: str, value: Any, path: str) -> Any:
    """A value of the info in types that JSON has; scalars and arrays of NumPy and torch become
    numbers and lists.
    """
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise EnvError(
            f"{where} returned {path}, an integer of {value.bit_length():,} bits, which is too"
            " long for JSON's writers; write it as text (hex(...))"
        )
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        _check_encodes(f"{where} returned {path}", value)
        return _as_plain_str(value)
    if isinstance(value, Mapping):
        return {
            _key_text(where, key, path): _to_json_value(where, one, f"{path}[{key!r}]")
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_to_json_value(where, one, f"{path}[{number}]") for number, one in enumerate(value)]
    if (bare := _to_python(value)) is not value:
        return _to_json_value(where, bare, path)
    if isinstance(value, Real):  # a fraction
        return float(value)
    raise EnvError(
        f"{where} returned {path} = {value!r:.80} ({type(value).__name__}), which JSON does not"
        " have; write text, numbers, lists and dicts"
    )


def _key_text(where: str, key: Any, path: str) -> str:
    """A key of the info as text: numbers become the texts that JSON writes for them."""
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    if not isinstance(key, str):
        raise EnvError(
            f"{where} returned {path} with the key {key!r:.80} ({type(key).__name__}); keys are"
            " texts"
        )
    _check_encodes(f"{where} returned {path} with a key", key)
    return _as_plain_str(key)
