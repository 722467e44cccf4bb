"""Gymnasium environments played in text."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from agentrl import EncodedImage, Observation
from agentrl.envs.gymnasium_text import GymnasiumText
from agentrl.envs.spaces_text import action_reader
from agentrl.errors import ConfigError, EnvError
from agentrl.testing import check_env
from agentrl.tokens.pixels import pictures_of

EYE = spaces.Box(0, 255, (8, 8, 3), "uint8")


SPACES: dict[str, spaces.Space[Any]] = {}
"""Spaces by a name: options are plain values, and `Fixture` takes its spaces as keyword arguments.
"""


def plain(options: Any) -> Any:
    """The options with names in place of spaces."""
    if isinstance(options, dict):
        return {key: plain(value) for key, value in options.items()}
    if isinstance(options, spaces.Space):
        SPACES[f"space {len(SPACES)}"] = options
        return f"space {len(SPACES) - 1}"
    return options


class Fixture(gymnasium.Env[Any, int]):
    """A Gymnasium environment of any spaces: action `good` ends it with reward 1, the others do
    nothing.
    """

    def __init__(self, action_space: str = "", observation_space: str = "", good: int = 1) -> None:
        self.action_space = SPACES.get(action_space, spaces.Discrete(2))
        self.observation_space = SPACES.get(observation_space, spaces.Discrete(3))
        self.good = good
        self.done: list[int] = []
        self.closed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.done.append(action)
        return (
            self.observation_space.sample(),
            np.float32(np.array_equal(action, self.good)),
            np.bool_(np.array_equal(action, self.good)),
            False,
            {},
        )

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def fixture_id() -> Iterator[str]:
    gymnasium.register("Fixture-v0", entry_point=Fixture)
    yield "Fixture-v0"
    del gymnasium.registry["Fixture-v0"]


def start(env_id: str, seed: int = 0, **options: Any) -> tuple[GymnasiumText, str]:
    env = GymnasiumText()
    observation, _ = env.reset(seed=seed, options=plain({"id": env_id, **options}))  # type: ignore[misc]
    return env, observation


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("FrozenLake-v1", {"is_slippery": True}),
        ("Taxi-v4", {}),
        ("Blackjack-v1", {}),
        ("CliffWalking-v1", {}),
        ("CartPole-v1", {}),
        ("MountainCar-v0", {}),
        ("Acrobot-v1", {}),
        ("Pendulum-v1", {}),
        ("MountainCarContinuous-v0", {}),
    ],
)
def test_gymnasium_environments_keep_the_contract(env_id: str, kwargs: dict[str, Any]) -> None:
    check_env(GymnasiumText, options={"id": env_id, "kwargs": kwargs})


def test_frozen_lake_is_walked_to_its_goal_by_words() -> None:
    env, first = start("FrozenLake-v1", kwargs={"is_slippery": False})
    assert "Actions: left, down, right, up." in first
    assert first.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    for word in ("down", "Down!", "I go RIGHT", "right", "**down**"):
        observation, reward, terminated, truncated, info = env.step(word)
        assert (reward, terminated, truncated, info) == (0.0, False, False, {"success": False})
    assert observation == "  (Down)\nSFFF\nFHFH\nFFFH\nHF[F]G"
    assert env.step("right")[1:] == (1.0, True, False, {"success": True})
    with pytest.raises(EnvError, match="call reset first"):
        env.step("right")


def test_the_time_limit_truncates_without_success() -> None:
    env, _ = start("FrozenLake-v1", kwargs={"is_slippery": False, "max_episode_steps": 2})
    env.step("left")
    assert env.step("left")[1:] == (0.0, False, True, {"success": False})


def test_the_taxi_says_where_everything_is() -> None:
    _, first = start("Taxi-v4", seed=3)
    assert "|R: |[ ]: :G|" in first
    assert first.endswith("Taxi: row 0, column 2. Passenger: at R. Destination: Y.")
    assert "\x1b" not in first
    env, _ = start("Taxi-v4", seed=3)
    for word in ("south", "south", "west", "west", "north", "north"):
        env.step(word)
    observation = env.step("pickup")[0]
    assert "[R]: |" in observation
    assert "Passenger: in the taxi." in observation


def test_blackjack_is_told_in_words() -> None:
    env, first = start("Blackjack-v1", seed=1)
    assert first.endswith("Actions: stick, hit.\nYou have 20. The dealer shows 7.")
    _, reward, terminated, _, info = env.step("Stick.")
    assert (terminated, info) == (True, {"success": reward > 0})


def test_the_goal_behind_the_cliff_is_a_success_though_it_pays_nothing() -> None:
    env, first = start("CliffWalking-v1")
    assert first.endswith("x  C  C  C  C  C  C  C  C  C  C  T")
    assert env.step("right")[1] == -100.0
    for word in ("up", *["right"] * 11):
        assert env.step(word)[1:] == (-1.0, False, False, {"success": False})
    assert env.step("down")[1:] == (-1.0, True, False, {"success": True})


def test_a_pole_that_falls_is_no_success() -> None:
    env, first = start("CartPole-v1")
    assert first.endswith("[0.0137, -0.02302, -0.0459, -0.04835]")
    terminated = False
    while not terminated:
        _, reward, terminated, _, info = env.step("left")
    assert (reward, terminated, info) == (1.0, True, {"success": False})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "names no action"),
        ("go on", "names no action"),
        ("leftward or upward", "names no action"),
        ("left or right?", "names more than one action"),
    ],
)
def test_a_message_without_exactly_one_action_word_costs_a_turn(message: str, said: str) -> None:
    env, _ = start("FrozenLake-v1")
    observation, *rest = env.step(message)
    assert said in observation
    assert "left, down, right, up" in observation
    assert rest == [0.0, False, False, {"success": False}]


def test_an_unknown_environment_is_played_by_numbers_from_its_start(fixture_id: str) -> None:
    env, first = start(
        fixture_id, kwargs={"action_space": spaces.Discrete(3, start=-1), "good": -1}
    )
    assert "Actions: -1, 0, 1." in first
    for message, action in (("1", 1), ("0", 0), ("I take -1.", -1)):
        result = env.step(message)
        assert env._env.unwrapped.done[-1] == action  # type: ignore[union-attr]
    assert result[1:] == (1.0, True, False, {"success": True})
    assert [type(value) for value in result[1:4]] == [float, bool, bool]
    for message in ("0.1", "10", "-0", "1-0", "0 or 1"):
        env.reset(
            seed=0,
            options=plain({"id": fixture_id, "kwargs": {"action_space": spaces.Discrete(2)}}),
        )
        assert "Answer with one of: 0, 1." in env.step(message)[0]


def test_actions_may_be_given_words_and_the_longest_counts(fixture_id: str) -> None:
    env, first = start(fixture_id, actions=["up", "pick up"])
    assert "Actions: up, pick up." in first
    env.step("UP")
    env.step("I pick UP the key")
    assert env._env.unwrapped.done == [0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("actions", [["up"], ["up", "Up"], ["up", " "]])
def test_wrong_action_words_are_refused(fixture_id: str, actions: list[str]) -> None:
    with pytest.raises(ConfigError, match="must hold 2 different words for Fixture-v0"):
        start(fixture_id, actions=actions)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Discrete(1, start=7), "7"),
        (spaces.Box(0.12345678, 0.12345678, (2,), np.float64), "[0.1235, 0.1235]"),
        (spaces.MultiDiscrete([1, 1]), "[0, 0]"),
        (
            spaces.Dict({"a": spaces.Discrete(1), "b": spaces.Tuple([spaces.Discrete(1)])}),
            "a: 0\nb: [0]",
        ),
        (spaces.Text(min_length=3, max_length=3, charset="x"), "xxx"),
    ],
)
def test_observations_of_any_structure_are_written_out(
    fixture_id: str, space: Any, text: str
) -> None:
    _, first = start(fixture_id, kwargs={"observation_space": space})
    assert first == f"Actions: 0, 1.\n{text}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "FrozenLak-v1"}, "Did you mean 'FrozenLake-v1'"),
        ({"id": "Taxi-v3"}, "Did you mean 'Taxi-v4'"),
        ({"id": "zzzz"}, "Some of "),
        ({"id": "no_such_package:Game-v0"}, "'no_such_package' cannot be imported"),
        ({"id": "Pendulum-v1", "actions": ["left"]}, "whose actions are numbers: leave them out"),
        (
            {"id": "Fixture-v0", "kwargs": {"action_space": spaces.Sequence(spaces.Discrete(3))}},
            "Discrete, Text, and MultiDiscrete, MultiBinary and Box",
        ),
        (
            {
                "id": "Fixture-v0",
                "kwargs": {"action_space": spaces.Dict(x=spaces.Graph(spaces.Discrete(2), None))},
            },
            "x of Fixture-v0 has the action space Graph",
        ),
        (
            {"id": "Fixture-v0", "kwargs": {"action_space": spaces.Tuple(())}},
            "need a name for each part: []",
        ),
        (
            {
                "id": "Fixture-v0",
                "kwargs": {
                    "action_space": spaces.Dict(
                        {"a.b": spaces.Discrete(2), "a": spaces.Dict(b=spaces.Text(2))}
                    )
                },
            },
            "so that its parts have names of their own",
        ),
        (
            {"id": "Fixture-v0", "kwargs": {"action_space": spaces.Box(0, 1, (65,))}},
            "at most 64 numbers",
        ),
        ({"id": "FrozenLake-v1", "kwargs": {"map_name": "5x5"}}, "cannot make 'FrozenLake-v1'"),
        ({"id": "FrozenLake-v1", "kwargs": {"slippery": True}}, "cannot make 'FrozenLake-v1'"),
        (
            {"id": "Fixture-v0", "kwargs": {"observation_space": spaces.Box(0, 255, (64, 64, 3))}},
            "too long to write",
        ),
        (
            {
                "id": "Fixture-v0",
                "kwargs": {
                    "observation_space": spaces.Dict(eye=spaces.Box(0, 255, (8, 8, 3), "uint8"))
                },
            },
            "['eye'] of an observation of Fixture-v0 is an image, an array of (8, 8, 3) in uint8",
        ),
        ({}, "'id'"),
        ({"id": "Taxi-v4", "kwarg": {}}, "did you mean 'kwargs'"),
    ],
)
def test_what_cannot_be_played_says_the_way_out(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        GymnasiumText().reset(seed=0, options=plain(options))
    assert said in str(error.value)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize(
    ("space", "told", "message", "action"),
    [
        (
            spaces.MultiDiscrete([5, 2]),
            "2 whole numbers: from 0 to 4, from 0 to 1",
            "I press 3, then 1.",
            [3, 1],
        ),
        (
            spaces.MultiDiscrete([[2], [2]], start=[[1], [1]]),
            "2 whole numbers, each from 1 to 2",
            "[2, 1]",
            [[2], [1]],
        ),
        (spaces.MultiBinary(3), "3 whole numbers, each from 0 to 1", "0 1 1", [0, 1, 1]),
        (spaces.Box(-0.4, 0.4), "one number from -0.4 to 0.4", "push by -.4", [-0.4]),
        (spaces.Box(0, np.inf, (2,)), "2 numbers, each from 0 up", "(1e3; +2.)", [1000, 2]),
        (spaces.Discrete(1000), "one whole number from 0 to 999", "**999**", 999),
    ],
)
def test_actions_of_several_numbers_are_read_in_their_order(
    fixture_id: str, space: Any, told: str, message: str, action: Any
) -> None:
    env, first = start(fixture_id, kwargs={"action_space": space})
    assert first.startswith(f"An action is {told}.\n")
    env.step(message)
    (taken,) = env._env.unwrapped.done  # type: ignore[union-attr]
    np.testing.assert_array_equal(taken, np.array(action, taken.dtype))


PARTS = spaces.Dict(
    move=spaces.Discrete(3),
    arm=spaces.Dict(grip=spaces.MultiBinary(2), say=spaces.Text(5)),
    pair=spaces.Tuple([spaces.Box(0, 1, (1,)), spaces.Discrete(300)]),
)
IN_LINES = """3 lines, with your choice in place of the brackets:
0: (one of: 0, 1)
1: (2 whole numbers, each from 0 to 1)
2: (a text of 2 to 3 of the characters 'ab')"""
TRIPLE = spaces.Tuple(
    [spaces.Discrete(2), spaces.MultiBinary(2), spaces.Text(3, min_length=2, charset="ab")]
)


@pytest.mark.parametrize(
    ("space", "told", "message", "action"),
    [
        (
            spaces.Text(5),
            "An action is a text of 1 to 5 letters or digits: your whole message.",
            " go12 \n",
            "go12",
        ),
        (
            TRIPLE,
            f"An action is {IN_LINES}",
            "So:\n- **0**: 1\n2: ab\n1: [0, 1]\nThat is it.",
            (1, [0, 1], "ab"),
        ),
        (
            PARTS,
            "An action is 5 lines",
            "pair.1: 299\nArm.Say: hi\nmove: 2\narm.grip: 1 0\npair.0: 0.5",
            {"move": 2, "arm": {"grip": [1, 0], "say": "hi"}, "pair": ([0.5], 299)},
        ),
    ],
    ids=["text", "tuple", "dict"],
)
def test_texts_and_actions_of_several_parts_are_read_by_their_rule(
    fixture_id: str, space: Any, told: str, message: str, action: Any
) -> None:
    env, first = start(fixture_id, kwargs={"action_space": space})
    assert first.startswith(told)
    env.step(message)
    (taken,) = env._env.unwrapped.done  # type: ignore[union-attr]
    np.testing.assert_equal(taken, action)


@pytest.mark.parametrize(
    "space", [PARTS, TRIPLE, spaces.Text(4), spaces.Discrete(3), spaces.Box(-1, 1, (2, 2))]
)
def test_an_action_that_is_written_is_read_as_the_same(space: Any) -> None:
    reader = action_reader("it", space)
    space.seed(0)
    for _ in range(20):
        action = space.sample()
        np.testing.assert_equal(reader.read(reader.write(action)), action)


@pytest.mark.parametrize(
    ("space", "message", "said"),
    [
        (TRIPLE, "0: 1\n1: 0 1", f"Your message has no line `2: ...`. Answer with {IN_LINES}"),
        (TRIPLE, "0: 1\n1: 0 1\n2: ab\n2: ba", "Your message has more than one line `2: ...`."),
        (
            TRIPLE,
            "0: 1\n1: 0 1\n2: ac",
            "In the line `2: ...`: 'ac' is no action. Answer with a text of 2 to 3",
        ),
        (
            TRIPLE,
            "0: 5\n1: 0 1\n2: ab",
            "In the line `0: ...`: Your message names no action. Answer with one of: 0, 1.",
        ),
        (
            spaces.Text(3),
            "too long",
            "'too long' is no action. Answer with a text of 1 to 3 letters or digits.",
        ),
        (spaces.Text(3), "  ", "'' is no action."),
    ],
)
def test_a_part_that_is_missing_or_wrong_costs_a_turn(
    fixture_id: str, space: Any, message: str, said: str
) -> None:
    env, _ = start(fixture_id, kwargs={"action_space": space})
    observation, *rest = env.step(message)
    assert said in observation
    assert rest == [0.0, False, False, {"success": False}]
    assert env._env.unwrapped.done == []  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "holds no numbers"),
        ("3", "holds one number"),
        ("1, 1, 1", "holds 3 numbers"),
        ("1.5 and 1", "Not every number is whole"),
        ("5 1", "Not every number is within its bounds"),
        ("1 1e999", "Not every number is"),
        ("from 3-1 to v2", "holds no numbers"),
    ],
)
def test_numbers_that_are_no_action_cost_a_turn_and_are_never_clipped(
    fixture_id: str, message: str, said: str
) -> None:
    env, _ = start(fixture_id, kwargs={"action_space": spaces.MultiDiscrete([5, 2])})
    observation, *rest = env.step(message)
    assert said in observation
    assert observation.endswith("Answer with 2 whole numbers: from 0 to 4, from 0 to 1.")
    assert rest == [0.0, False, False, {"success": False}]
    assert env._env.unwrapped.done == []  # type: ignore[union-attr]


class TwoAims(Fixture):
    """A game whose reward has two parts, as those of MO-Gymnasium."""

    reward_space = spaces.Box(-1, 1, (2,))

    def step(self, action: int) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward, -0.25]), *rest


def test_a_reward_of_several_parts_is_summed_by_the_weights_of_the_options() -> None:
    gymnasium.register("TwoAims-v0", entry_point=TwoAims)
    try:
        env, _ = start("TwoAims-v0", reward_weights=[2, 4])
        assert env.step("1")[1:] == (
            1.0,
            True,
            False,
            {"success": True, "reward_parts": [1.0, -0.25]},
        )
        for weights in ([], [1.0]):
            with pytest.raises(
                ConfigError, match=r"has 2 parts, .* write one for each, such as \[1.0, 1.0\]"
            ):
                start("TwoAims-v0", reward_weights=weights)
        del TwoAims.reward_space
        env, _ = start("TwoAims-v0")
        with pytest.raises(EnvError, match="the reward has 2 parts"):
            env.step("0")
    finally:
        del gymnasium.registry["TwoAims-v0"]


def test_an_environment_is_kept_for_the_same_options_and_closed_for_others(fixture_id: str) -> None:
    env, _ = start(fixture_id)
    made = env._env
    assert made is not None
    env.reset(seed=1, options={"id": fixture_id})
    assert env._env is made
    env.reset(seed=1, options={"id": fixture_id, "kwargs": {"good": 0}})
    assert env._env is not made
    assert made.unwrapped.closed == 1  # type: ignore[attr-defined]
    env.close()
    env.close()
    with pytest.raises(EnvError, match="call reset first"):
        env.step("0")


class Drawn(Fixture):
    """Draws its state: the number of steps as a shade."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, draws: Any = None, **spaces: str) -> None:
        super().__init__(**spaces)
        self.render_mode, self.draws = render_mode, draws

    def render(self) -> Any:
        return np.full((8, 9, 3), len(self.done), np.uint8) if self.draws is None else self.draws


@pytest.fixture
def drawn_id() -> Iterator[str]:
    gymnasium.register("Drawn-v0", entry_point=Drawn)
    yield "Drawn-v0"
    del gymnasium.registry["Drawn-v0"]


def pixels_of(image: EncodedImage) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(BytesIO(image.data)))


def test_what_render_draws_is_shown_and_nothing_else(drawn_id: str) -> None:
    env = GymnasiumText()
    options = {"id": drawn_id, "view": "render"}
    assert GymnasiumText.Options.model_validate(options).shows_images
    assert not GymnasiumText.Options.model_validate({"id": drawn_id}).shows_images
    begun = env.start(0, options)
    assert isinstance(begun, Observation)
    assert begun.text == "Actions: 0, 1."
    for steps in range(1, 3):
        seen, *_ = env.step("0")
        assert isinstance(seen, Observation)
        assert seen.text == ""
        (image,) = seen.images
        assert pixels_of(image).tolist() == np.full((8, 9, 3), steps).tolist()
    assert env.step("2") == (
        "Your message names no action. Answer with one of: 0, 1.",
        0.0,
        False,
        False,
        {"success": False},
    )


GREY = spaces.Box(0, 255, (8, 9), "uint8")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 9), [lambda pixels: pixels]),
        ((8, 9, 1), [lambda pixels: pixels[..., 0]]),
        ((1, 8, 9), [lambda pixels: pixels[0]]),
        ((8, 9, 3), [lambda pixels: pixels]),
        ((8, 9, 4), [lambda pixels: pixels]),
        ((3, 8, 9), [lambda pixels: pixels.transpose(1, 2, 0)]),
        ((3, 9, 3), [lambda pixels: pixels]),
        ((4, 8, 9), [lambda pixels, n=n: pixels[n] for n in range(4)]),
    ],
)
def test_arrays_of_pixels_are_pictures_by_their_shape(shape: Any, expected: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = pictures_of(pixels)
    assert len(found) == len(expected)
    for image, of in zip(found, expected, strict=True):
        np.testing.assert_array_equal(pixels_of(image), of(pixels))


def test_an_observation_is_shown_as_its_pictures_and_the_rest_as_text() -> None:
    space = spaces.Dict(
        near=GREY,
        place=spaces.Tuple([spaces.Discrete(1), spaces.Box(0, 255, (8, 9, 3), "uint8")]),
    )
    env = GymnasiumText()
    begun = env.start(
        0,
        plain({"id": "Fixture-v0", "view": "observation", "kwargs": {"observation_space": space}}),
    )
    assert isinstance(begun, Observation)
    assert begun.text == "Actions: 0, 1.\nplace: [0]"
    space.seed(0)
    sampled = space.sample()
    near, far = begun.images
    np.testing.assert_array_equal(pixels_of(near), sampled["near"])
    np.testing.assert_array_equal(pixels_of(far), sampled["place"][1])
    alone = plain(
        {"id": "Fixture-v0", "view": "observation", "kwargs": {"observation_space": GREY}}
    )
    shown = env.start(0, alone)
    assert isinstance(shown, Observation)
    assert (shown.text, len(shown.images)) == ("Actions: 0, 1.", 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "Fixture-v0", "view": "render"}, "Fixture-v0 draws no pictures"),
        ({"id": "Fixture-v0", "view": "observation"}, "holds no picture"),
        (
            {
                "id": "Fixture-v0",
                "view": "observation",
                "kwargs": {
                    "observation_space": spaces.Dict(a=GREY, b=spaces.Box(0, 1, (300,))),
                },
            },
            "too long to write",
        ),
    ],
)
def test_a_view_that_there_is_not_says_the_way_out(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        GymnasiumText().start(0, plain(options))
    assert said in str(error.value)


def test_a_drawing_that_is_no_picture_fails_the_episode_by_name(drawn_id: str) -> None:
    for draws in ("a text", [[0, 0]]):
        options = {"id": drawn_id, "view": "render", "kwargs": {"draws": draws}}
        with pytest.raises(EnvError, match=r"render\(\) of .* gave"):
            GymnasiumText().start(0, options)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "minigrid:MiniGrid-Empty-5x5-v0"])
def test_games_with_pictures_keep_the_contract(env_id: str) -> None:
    check_env(GymnasiumText, options={"id": env_id, "view": "render"})
