"""Environments so small that exact numbers follow from the probabilities of answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agentrl.protocols.env import Env
from agentrl.protocols.offers import Offers
from agentrl.trajectory import Message, Trajectory


@dataclass(frozen=True, slots=True)
class Question:
    """A point of a conversation at which an agent answers.

    `messages`: all that it has been shown so far, its own earlier answers among them; the last one
    is not its own. `answers`: texts that it could answer.
    """

    messages: Sequence[Message]
    answers: Sequence[str]


class Enumeration(Protocol):
    """An exhaustive enumeration of an environment, from which exact metrics of a policy are
    computed. `probabilities` has, for each of `questions`, that of each of its answers; the rest is
    that of all other messages. It may also have the method of `EnumerationOffers`.
    """

    @property
    def questions(self) -> Sequence[Question]:
        """All points at which the policy answers, in every reachable conversation."""
        ...

    def metrics(self, probabilities: Sequence[Sequence[float]]) -> Mapping[str, float]:
        """Exact numbers, by name. A run reports them as `exact/NAME`."""
        ...


@dataclass(frozen=True, slots=True)
class Credit:
    """The expected return from a turn on, before its answer, and by how much the answer raised it
    (undiscounted).
    """

    value: float
    advantage: float


@dataclass(frozen=True, slots=True)
class EnumerationOffers(Offers):
    """The optional methods of an `Enumeration`, which are found by their names."""

    credit: Callable[[Sequence[Sequence[float]], Trajectory], Sequence[Credit] | None] | None = None
    """Returns the credit of each turn of a trajectory, from the probabilities of all answers: the
    exact advantages, to compare the trained ones with. `None` if it is unknown."""


@runtime_checkable
class Enumerable(Env, Protocol):
    """An environment so small that it can be enumerated. Its runs have the metrics `exact/...`
    (docs/oracles.md).
    """

    def enumeration(self, options: Mapping[str, Any]) -> Enumeration:
        """The enumeration of the environment with these options.

        Raises:
            ConfigError: with these options it cannot be enumerated; the message says why.
        """
        ...
