"""`RewardsConfig`: the section `reward` of a config, one component or a list of them with weights.

reward: environment

reward:
  - environment
  - {name: numeric, tolerance: 0.01, weight: 0.5, as: answer}
  - {name: "my_package.rewards:politeness", isolation: process}
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import Field, create_model

from agentrl.errors import ConfigError
from agentrl.plugins import Component, NoSettings, settings_of, unbound
from agentrl.protocols.env import Isolation
from agentrl.protocols.reward import GroupReward, RewardOffers
from agentrl.settings.base import Settings

_METHODS = ("score", "score_group", "evaluate")
_WEIGHT = (
    "Factor by which its score counts. A part of weight 0 only watches: if it fails, the score goes"
    " without it."
)
PART_SETTINGS: Mapping[str, Any] = {
    "weight": (Annotated[float, Field(allow_inf_nan=False, description=_WEIGHT)], 1.0),
    "as": (
        Annotated[
            str | None,
            Field(min_length=1, description="Name of the part; by default the reward's name."),
        ],
        None,
    ),
    "success_at": (
        Annotated[
            float | None,
            Field(
                allow_inf_nan=False,
                description=(
                    "The episode succeeded if this part's own score is at least this, where the"
                    " environment gives no verdict; with several such parts, if all are. Without"
                    " any: if the whole score is above 0."
                ),
            ),
        ],
        None,
    ),
    "isolation": (
        Annotated[
            Isolation | None,
            Field(description="Where its sync code runs: inline, in a thread, in a process."),
        ],
        None,
    ),
}
"""Settings that every part has besides its own."""


@dataclass(frozen=True, slots=True)
class RewardsConfig:
    """The parts as written in the config; `listed` says whether as a list."""

    parts: tuple[Component, ...]
    listed: bool

    def dump(self) -> Any:
        """The section as written in a config; a part without a verdict does not mention it."""
        dumped = [part.dump() for part in self.parts]
        written = [
            {key: value for key, value in one.items() if (key, value) != ("success_at", None)}
            for one in dumped
        ]
        return written if self.listed else written[0]

    @property
    def only_compares(self) -> bool:
        """True if no part scores an episode that is played once."""
        return all(isinstance(part.factory, GroupReward) for part in self.parts)

    @property
    def is_the_environments(self) -> bool:
        """True if only the environment pays."""
        return all(
            RewardOffers.of(part.factory).pays_what_the_environment_pays for part in self.parts
        )


def name_of(part: Component) -> str:
    """A part's name in metrics: its `as`, or the last component of its name."""
    label: str | None = dict(part.settings)["as"]  # a keyword, so no attribute to write
    return label or part.name.rpartition(":")[2]


def settings_of_part(name: str, factory: Any) -> type[Settings]:
    """The settings that a part of this reward takes: its own and those of every part.

    Raises:
        ConfigError: `factory` is not a reward, or has a setting that every part has.
    """
    return _settings_of_part(name, _Identical(factory))


class _Identical:
    """Anything as the key of a cache, by identity: an instance need not have a hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@cache  # so that equal configs have settings of one class
def _settings_of_part(name: str, identical: _Identical) -> type[Settings]:
    factory = identical.value
    if isinstance(factory, type):
        own = settings_of(factory)
    elif any(hasattr(factory, method) for method in _METHODS):
        # an instance that is a reward already
        own = NoSettings
    elif callable(factory):
        own = _keyword_settings(name, factory)
    else:
        raise ConfigError(
            f"the reward {name!r} is {factory!r:.80}; it must be a class or a function of a"
            " trajectory"
        )
    if taken := sorted(PART_SETTINGS.keys() & own.model_fields.keys()):
        raise ConfigError(
            f"the reward {name!r} has a setting {taken[0]!r}, which every part has: rename it"
        )
    return create_model(own.__qualname__, __base__=own, **PART_SETTINGS)


def _keyword_settings(name: str, function: Callable[..., Any]) -> type[Settings]:
    """The keyword-only parameters of a function as settings."""
    parameters = list(inspect.signature(function).parameters.values())
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1:
        raise ConfigError(
            f"the reward {name!r} is a function of {len(required)} arguments; write f(trajectory)"
            " -> float, and settings after a star: f(trajectory, *, tolerance: float = 0.0)"
        )
    # The types of a partial are those of its function, and the types of an instance those of its
    # `__call__`.
    called: Any = unbound(function)
    called = called if inspect.isroutine(called) else type(called).__call__
    hints = typing.get_type_hints(called, include_extras=True)
    fields: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }
    return create_model(name, __base__=Settings, **fields)


class RulePoolConfig(Settings):
    """The processes that rules run in."""

    workers: int = Field(2, gt=0)
    """Processes; they start when the first rule needs one."""
    cpu_seconds: float = Field(5.0, gt=0)
    """CPU seconds for one verdict. Content that takes more is wrong."""
    deadline: float = Field(40.0, gt=0)
    """Seconds for one verdict, after which its process is killed and the rule is asked again. It
    must be well above `cpu_seconds`, since a busy machine gives a rule its CPU time later."""
    memory_mb: int = Field(4096, ge=512)
    """Address space of a process, in megabytes. Content that takes more is wrong."""
    cache: int = Field(100_000, ge=0)
    """Verdicts kept in memory, so that the same content is not judged again."""
