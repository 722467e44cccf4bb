"""The settings of an algorithm that an environment of a mixture can override: those that its
groups' advantages depend on.

The loss is computed for a whole batch, so it cannot differ by environment. The settings that the
advantages depend on are found by computing advantages of made-up groups, and watching which
settings are read.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.algorithms.returned import advantages_of
from agentrl.protocols.algorithm import Algorithm, AlgorithmOffers, MemberAdvantage
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn

_REWARDS: Sequence[Sequence[Sequence[float]]] = (
    ((0.0, 1.0), (1.0, 0.0, 0.5), (-0.25,), (0.0, 0.0)),
    ((0.5,), (0.125, 0.5), (0.0, 0.0, 2.0), (1.0,)),
)
"""The rewards of the turns of each member, in two groups."""


def without_effect(
    factory: Callable[[Settings], Algorithm], own: Settings, shared: Settings
) -> list[str]:
    """The settings in which `own`, an environment's, differs from the run's `shared`, and which its
    advantages ignore, as does what the algorithm learns for them. `factory` makes the algorithm
    from its settings.

    An algorithm that these groups do not suit cannot be asked: then none is known to be without
    effect.
    """
    of_run = dict(shared)
    differing = [name for name, value in own if value != of_run.get(name)]
    if not differing:
        return []
    read: set[str] = set()
    try:
        algorithm = factory(_watch_settings(own, read.add))
        in_constructor = set(read)
        learn = AlgorithmOffers.of(algorithm).learn  # its offers follow from all settings
        read.clear()
        answers = _answers(algorithm, learn)
        ineffective: list[str] = []
        for name in differing:
            if name in read:
                continue
            if name in in_constructor:  # the advantages may depend on what was made of it there
                other = factory(own.model_copy(update={name: of_run[name]}))
                if answers != _answers(other, AlgorithmOffers.of(other).learn):
                    continue
            ineffective.append(name)
        return ineffective
    except Exception:  # the user's code, which may need what these groups do not have
        return []


def _answers(
    algorithm: Algorithm, learn: Callable[[Sequence[Group]], object] | None
) -> list[list[list[MemberAdvantage]]]:
    """The advantages of two groups, before and after the algorithm has learned from them."""
    groups = [_group(f"{number}", rewards) for number, rewards in enumerate(_REWARDS)]
    answers = [[advantages_of(algorithm, group) for group in groups]]
    if learn is not None:
        learn(groups)
        answers.append([advantages_of(algorithm, group) for group in groups])
    return answers


def _group(name: str, rewards_G: Sequence[Sequence[float]]) -> Group:
    task = Task("env", 0, {}, name)
    members = tuple(
        _member(task, f"{name}/{number}", rewards) for number, rewards in enumerate(rewards_G)
    )
    return Group(
        task, members, tuple(Score(sum(rewards), turns=tuple(rewards)) for rewards in rewards_G)
    )


def _member(task: Task, name: str, rewards: Sequence[float]) -> Trajectory:
    said = Completion(ints((2, 3)), floats((-0.5, -0.5)), ints((0, 0)), "stop")
    turns = tuple(
        Turn(ints((1,)), said, reward, {}, state=f"{number % 2}")
        for number, reward in enumerate(rewards)
    )
    return Trajectory(name, task, turns, Terminated(), agent="a")


def _watch_settings(settings: Settings, on_read: Callable[[str], None]) -> Settings:
    """The same settings, which call `on_read` with the name of each that is read."""
    kind: Any = type(settings)
    fields = frozenset(kind.model_fields)

    def get(self: Settings, name: str) -> Any:
        if name in fields:
            on_read(name)
        return super(watched, self).__getattribute__(name)

    namespace = {"__getattribute__": get, "__module__": kind.__module__}
    watched: Any = type(kind)(kind.__name__, (kind,), namespace)
    made: Settings = watched.model_construct(**dict(settings))
    return made
