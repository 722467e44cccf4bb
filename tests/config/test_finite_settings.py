"""Numbers in settings are finite and bounded, in every component's `Config` and in that of a user's
plug-in.
"""

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from agentrl import plugins
from agentrl.algorithms.grpo import Grpo
from agentrl.config import load_config
from agentrl.errors import ConfigError, PluginError
from agentrl.settings.base import LARGEST, Settings

WRONG = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1.1 * LARGEST)


def subclasses(kind: type[Settings]) -> Iterator[type[Settings]]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def all_settings() -> list[type[Settings]]:
    """The settings of every registered component, and of the config itself."""
    for group in plugins.GROUPS:
        for plugin in plugins.installed(group):
            try:
                plugins.load(group, plugin.name)
            except PluginError:
                assert not plugin.origin.startswith("agentrl-train ") or plugin.name in {
                    "deepspeed",
                    "vllm",
                }, plugin
    found = {one for one in subclasses(Settings) if one.__module__.startswith("agentrl.")}
    return sorted(found, key=lambda one: (one.__module__, one.__qualname__))


def shapes(annotation: Any, number: float) -> Iterator[Any]:
    """Values of this type in which the number stands wherever a float can."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is float:
        yield number
    elif origin is Annotated:
        yield from shapes(inner[0], number)
    elif origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from shapes(one, number)
    elif origin is tuple:
        length = 1 if inner[-1] is Ellipsis else len(inner)
        yield from ([value] * length for value in shapes(inner[0], number))
    elif origin in (dict, Mapping):
        for value in [number] if inner[1] is Any else shapes(inner[1], number):
            yield {"a": value}
    elif origin in (list, Sequence):
        yield from ([value] for value in shapes(inner[0], number))


def refused(kind: type[Settings], name: str, value: Any) -> bool:
    try:
        kind.model_validate({name: value})
    except ValidationError as error:
        return any(problem["loc"][:1] == (name,) for problem in error.errors())
    return False


def test_every_float_of_every_component_is_finite_and_bounded() -> None:
    accepted, tried = [], 0
    for kind in all_settings():
        for name, field in kind.model_fields.items():
            for wrong in WRONG:
                for value in shapes(field.annotation, wrong):
                    tried += 1
                    if not refused(kind, name, value):
                        accepted.append(f"{kind.__module__}:{kind.__qualname__}.{name} = {value}")
    assert accepted == []
    assert tried > 1000, "the settings were not found"


def test_no_default_is_infinite() -> None:
    for kind in all_settings():
        for name, field in kind.model_fields.items():
            value = field.default
            assert not isinstance(value, float) or math.isfinite(value), (
                f"{kind.__qualname__}.{name}"
            )


class Mine(Grpo):
    """A user's algorithm, whose limit may be infinite."""

    class Config(Grpo.Config):
        """Its settings."""

        own: float = 1.0
        """Without any bound of its own."""
        limit: float = Field(math.inf, allow_inf_nan=True)
        """May be infinite."""
        more: dict[str, Any] = Field(default_factory=dict)
        """Anything."""


def loaded(tmp_path: Path, algorithm: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(f"env: guess_number\nalgorithm: {algorithm}\n")
    return load_config(path).config


@pytest.mark.parametrize("wrong", [".inf", "-.inf", ".nan", "1.0e+308"])
def test_a_plug_ins_settings_are_checked_too(tmp_path: Path, wrong: str) -> None:
    mine = f"name: '{__name__}:Mine'"
    for setting in (f"own: {wrong}", f"more: {{a: [1, {{b: {wrong}}}]}}", f"clip_high: {wrong}"):
        name = setting.split(":")[0]
        why = (
            rf"algorithm\.{name}.*(not a finite number.*large number such as 1e9|too large|greater"
            r" than)"
        )
        with pytest.raises(ConfigError, match=why):
            loaded(tmp_path, f"{{{mine}, {setting}}}")


def test_what_may_be_infinite_is_read_back_as_it_was(tmp_path: Path) -> None:
    config = loaded(tmp_path, f"{{name: '{__name__}:Mine'}}")
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again).config == config
    assert load_config(again).config.algorithm.settings.limit == math.inf  # type: ignore[attr-defined]


def test_a_default_that_could_not_be_saved_is_refused() -> None:
    class Careless(Settings):
        """A default that is not finite."""

        limit: float = math.inf
        """No limit."""

    with pytest.raises(
        ValidationError, match="the default of limit will not do: inf is not a finite number"
    ):
        Careless()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rollout: {sampling: {top_k: 1}}", r"top_k=1 leaves the likeliest token alone"),
        ("rollout: {sampling: {min_p: 1.0}}", r"min_p=1 leaves the likeliest token alone"),
        ("rollout: {sampling: {temperature: 1.0e-300}}", r"logits cannot be divided by so little"),
        ("evaluation: {temperature: 1.0e-300}", r"logits cannot be divided by so little"),
        (
            "algorithm: {importance: mask, importance_cap: 0.5}",
            r"leaves out every token whose weight is 1",
        ),
        ("trainer: {betas: [1.5, 0.9]}", r"trainer\.betas\.0: Input should be less than 1"),
        ("trainer: {betas: [0.9, 1.0]}", r"trainer\.betas\.1: Input should be less than 1"),
        (
            "trainer: {betas: [-0.1, 0.9]}",
            r"trainer\.betas\.0: Input should be greater than or equal to 0",
        ),
        ("trainer: {eps: 1.0e-300}", r"trainer\.eps"),
        ("algorithm: {normalizer: 1.0e-300}", r"algorithm\.normalizer"),
        (
            "algorithm: {name: distill, reward_weight: 1.0}\nrollout: {group_size: 1}",
            r"'distill', as configured, compares the members",
        ),
        (
            "algorithm: {name: reinforce_pp, group_baseline: true}\nrollout: {group_size: 1}",
            r"'reinforce_pp', as configured, compares the members",
        ),
    ],
)
def test_a_setting_with_which_nothing_is_learned_is_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"env: guess_number\n{text}\n")
    with pytest.raises(ConfigError, match=why):
        load_config(path)


@pytest.mark.parametrize(
    "text",
    [
        "evaluation: {top_k: 1}",
        "evaluation: {temperature: 0}",
        "algorithm: {importance_cap: 0.5}",
        "algorithm: {name: distill}\nrollout: {group_size: 1}",
        "algorithm: reinforce_pp\nrollout: {group_size: 1}",
    ],
)
def test_what_is_near_to_these_and_does_learn_is_accepted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"env: guess_number\n{text}\n")
    load_config(path)
