"""A reply that cannot be used fails its episode with a sentence, and nothing else, whatever carries
it.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import StrEnum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agentrl.errors import ConfigError, ConformanceError, EnvError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.replies import checked_reset, checked_step
from agentrl.protocols import Env
from agentrl.remote.client import RemoteEnv
from agentrl.remote.openenv.client import OpenEnv
from agentrl.testing import check_env
from tests.properties import examples
from tests.remote.served import served

HALF = "half \ud800 of a pair"


class Untold(Exception):  # noqa: N818
    """An error that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def fails_untold() -> Any:
    """Raise an error without a text."""
    raise Untold


class Word(StrEnum):
    """Texts of a class of their own."""

    RED = "red"


class Unreadable(Mapping[str, Any]):
    """An info that raises when it is read."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("gone")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("gone")

    def __len__(self) -> int:
        return 1


class Nameless:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")


def endless() -> dict[str, Any]:
    info: dict[str, Any] = {}
    info["self"] = info
    return info


STEPS: Mapping[str, Callable[[], Any]] = {
    "no tuple": lambda: "text",
    "four": lambda: ("x", 0.0, False, False),
    "no text": lambda: (b"x", 0.0, False, False, {}),
    "half a pair": lambda: (HALF, 0.0, False, False, {}),
    "no reward": lambda: ("x", None, False, False, {}),
    "a text for a reward": lambda: ("x", "1.0", False, False, {}),
    "a vector for a reward": lambda: ("x", np.ones(2), False, False, {}),
    "not finite": lambda: ("x", math.nan, False, False, {}),
    "too large": lambda: ("x", 10**400, False, False, {}),
    "no flag": lambda: ("x", 0.0, "no", False, {}),
    "no info": lambda: ("x", 0.0, False, False, None),
    "a list for an info": lambda: ("x", 0.0, False, False, ["a"]),
    "an object in the info": lambda: ("x", 0.0, False, False, {"deep": [{"it": object()}]}),
    "half a pair in the info": lambda: ("x", 0.0, False, False, {"deep": [HALF]}),
    "a pair for a key": lambda: ("x", 0.0, False, False, {"deep": {(1, 2): 3}}),
    "an info that raises": lambda: ("x", 0.0, False, False, Unreadable()),
    "an info in itself": lambda: ("x", 0.0, False, False, endless()),
    "an integer beyond JSON": lambda: ("x", 0.0, False, False, {"deep": [10**5000]}),
    "an error without a text": fails_untold,
    "a value without a name": lambda: ("x", 0.0, False, False, {"it": Nameless()}),
}
ALIKE: Mapping[str, Callable[[], Any]] = {
    "texts of an enum": lambda: (Word.RED, 1.0, True, False, {Word.RED: [Word.RED]}),
    "scalars of NumPy": lambda: (
        "red",
        np.True_,
        np.bool_(True),
        np.array(False),
        {"red": ["red"]},
    ),
    "an array without axes": lambda: ("red", np.array(1.0), True, False, {"red": ["red"]}),
    "a fraction": lambda: ("red", Fraction(1), True, False, {"red": ["red"]}),
}
"""Ways to write one reply."""
RESETS: Mapping[str, Callable[[], Any]] = {
    "reset: no tuple": lambda: None,
    "reset: no info": lambda: ("x", None),
    "reset: half a pair": lambda: (HALF, {}),
    "reset: an object in the info": lambda: ("x", {"it": object()}),
}


class Odd:
    """Replies as its options, or the action, say. Plays well for any other action."""

    isolation = "thread"
    system_prompt = "Play."

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        return (
            RESETS[options["reply"]]()
            if "reply" in options
            else ("begin", {"seed": np.int64(seed)})
        )

    def step(self, action: str) -> Any:
        reply = {**STEPS, **ALIKE}.get(action)
        return (
            reply()
            if reply
            else (action, np.float32(0.5), np.bool_(action == "end"), False, {"a": np.arange(2)})
        )

    def close(self) -> None:
        """Nothing to close."""


class InlineOdd(Odd):
    """The same, on the event loop."""

    isolation = "inline"


# Each reply ends its process, and another one starts.
PROCESS = pytest.param("process", marks=pytest.mark.long)
ADDRESS = "tests.hosting.test_replies:Odd"


@pytest.fixture(scope="module", params=["inline", "thread", PROCESS, "http", "openenv"])
def factory(request: pytest.FixtureRequest) -> Iterator[Callable[[], Env]]:
    """Makes `Odd`, over each of the transports."""
    with ExitStack() as stack:
        if request.param in ("http", "openenv"):
            url = stack.enter_context(served(Odd)).url
            yield partial(RemoteEnv if request.param == "http" else OpenEnv, [url])
        else:
            yield {"inline": InlineOdd, "thread": Odd, "process": partial(ProcessEnv, ADDRESS)}[
                request.param
            ]


@pytest.mark.parametrize("name", [*STEPS, *RESETS])
def test_a_reply_that_cannot_be_used_fails_its_episode_and_the_next_one_is_played(
    factory: Callable[[], Env], name: str
) -> None:
    play_after(factory, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reset: half a pair"])
def test_a_reply_of_a_process_that_cannot_be_used_fails_its_episode(name: str) -> None:
    play_after(partial(ProcessEnv, ADDRESS), name, EnvDeadlines(reset=120))


def play_after(
    factory: Callable[[], Env], name: str, deadlines: EnvDeadlines | None = None
) -> None:
    """Play an episode that fails by the reply of this name, and another one."""

    async def main() -> None:
        envs = EnvPool({"odd": factory}, deadlines or EnvDeadlines())
        live = envs.acquire("odd")
        if name in STEPS:
            await live.reset(1, {})
        with pytest.raises(EnvError, match=r"\w+ \w+"):
            await (live.step(name) if name in STEPS else live.reset(1, {"reply": name}))
        assert live.broken
        await envs.release("odd", live)
        live = envs.acquire("odd")
        assert (await live.reset(2, {}))[0] == "begin"
        observation, reward, terminated, truncated, info = await live.step("end")
        assert (observation, reward, terminated, truncated) == ("end", 0.5, True, False)
        assert info["a"] == [0, 1]
        await envs.release("odd", live)
        await envs.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ALIKE)
def test_a_reply_is_the_same_over_every_transport_and_of_plain_types(
    factory: Callable[[], Env], name: str
) -> None:
    async def main() -> None:
        envs = EnvPool({"odd": factory}, EnvDeadlines())
        live = envs.acquire("odd")
        await live.reset(1, {})
        observation, *rest, info = await live.step(name)
        info = {key: value for key, value in info.items() if key == "red"}
        assert (observation, *rest, info) == ("red", 1.0, True, False, {"red": ["red"]})
        texts = [observation, *info, *info["red"]]
        assert [type(value) for value in (*texts, *rest)] == [str, str, str, float, bool, bool]
        await envs.release("odd", live)
        await envs.close()

    asyncio.run(main())


def test_a_prompt_of_an_enum_is_its_text() -> None:
    class Prompted(Odd):
        system_prompt = Word.RED

    async def main() -> None:
        live = LiveEnv(Prompted(), EnvDeadlines())
        await live.reset(1, {})
        assert f"{live.system_prompt}" == "red"
        assert type(live.system_prompt) is str
        await live.close()

    asyncio.run(main())


def test_a_negative_seed_is_refused_over_every_transport(factory: Callable[[], Env]) -> None:
    async def main() -> None:
        envs = EnvPool({"odd": factory}, EnvDeadlines())
        live = envs.acquire("odd")
        with pytest.raises(ConfigError, match="0 or more, got -1"):
            await live.reset(-1, {})
        assert (await live.reset(2, {}))[0] == "begin"
        await envs.release("odd", live)
        await envs.close()

    asyncio.run(main())


@pytest.mark.parametrize("attribute", ["tools", "system_prompt"])
def test_an_attribute_that_raises_fails_its_episode(attribute: str) -> None:
    def raises(env: Env) -> Any:
        raise KeyError("not loaded")

    class Raises(Odd):
        """Cannot say what it offers."""

    setattr(Raises, attribute, property(raises))

    async def main() -> None:
        live = LiveEnv(Raises(), EnvDeadlines())
        with pytest.raises(EnvError, match="Raises replied with what cannot be read: KeyError"):
            await live.reset(1, {})
        assert live.broken
        await live.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", [name for name in STEPS if name != "no tuple"])
def test_check_env_refuses_what_training_refuses(name: str) -> None:
    class Always(Odd):
        def step(self, action: str) -> Any:
            return STEPS[name]()

    with pytest.raises(ConformanceError):
        check_env(Always, seeds=[0])


_texts = st.text(st.characters(codec="utf-8"))
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=12,
)


@examples(100)
@given(info=st.dictionaries(_texts, _values, max_size=4))
def test_an_info_of_json_s_types_stays_as_it_is(info: dict[str, Any]) -> None:
    assert checked_reset("env", ("x", info)) == ("x", info)
    assert checked_step("env", ("x", 1, False, True, info)) == ("x", 1.0, False, True, info)


@examples(100)
@given(reply=st.tuples(*[_values | st.text() | st.builds(object)] * 5))
def test_whatever_is_replied_is_taken_in_json_s_types_or_refused_with_a_sentence(
    reply: tuple[Any, ...],
) -> None:
    refused = ""
    try:
        observation, reward, terminated, truncated, info = checked_step("env", reply)
    except EnvError as error:
        refused = str(error)
    if refused:
        assert refused.startswith("env.step ")
        return
    assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
    json.dumps([observation, info]).encode()
    assert math.isfinite(reward)


@pytest.mark.parametrize(
    "observation",
    [
        np.zeros((8, 8, 3), np.uint8),
        np.zeros((64, 64), np.uint8),
        Image.new("RGB", (4, 4)),
        [
            {"type": "text", "text": "Look:"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        ],
        {"agent": 1, "view": np.zeros((8, 8, 1), np.uint8)},
    ],
)
def test_an_image_for_an_observation_is_refused_by_that_name(observation: Any) -> None:
    with pytest.raises(
        EnvError, match=r"E.reset gave an image \(.*\) for a text: write agentrl.Observation"
    ):
        checked_reset("E", (observation, {}))
    with pytest.raises(EnvError, match=r"E\.step gave an image"):
        checked_step("E", (observation, 0.0, False, False, {}))


@pytest.mark.parametrize(
    "observation", [None, 3, np.zeros(4, np.uint8), [{"type": "text", "text": "Look:"}]]
)
def test_another_value_for_an_observation_is_no_image(observation: Any) -> None:
    with pytest.raises(EnvError, match=r"E.reset gave .* for a text; write a str"):
        checked_reset("E", (observation, {}))
