"""Decision problems so small that everything about them can be enumerated: trees of decisions.

`agentrl.oracles.estimators` proves estimators with them, and the environment `oracle` plays them as
text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

Length = Annotated[int, Field(ge=1, le=8)]
Chance = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Result:
    """A possible result of an action."""

    reward: float
    """The reward of the action."""
    then: "Decision | None" = None
    """The next decision; None at the end."""
    probability: float = 1.0
    """Its probability, given the action."""
    truncated: bool = False
    """A limit ends the episode, and `then` is the decision that would have come next. Its returns
    do not count; a critic knows its value."""


@dataclass(frozen=True, slots=True)
class Action:
    """An answer: its `tokens`, of which the first decides and the others follow with certainty; and
    its results.
    """

    name: str
    results: tuple[Result, ...]
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """A turn: what the policy knows (decisions with the same `state` share their logits), and what
    it can do.

    `shown`: what a player sees there, which remembers what it has seen before; by default the
    state.
    """

    state: str
    actions: tuple[Action, ...]
    shown: str = ""


def all_decisions(root: Decision) -> Iterator[Decision]:
    """All decisions of a problem, each once."""
    yield root
    for action in root.actions:
        for result in action.results:
            if result.then is not None:
                yield from all_decisions(result.then)


# Problems


def bandit(rewards: Sequence[float] = (1.0, 0.4, 0.0), tokens: Sequence[int] = ()) -> Decision:
    """One turn, one arm for each reward; the answers differ in length (by default 2, 5 and 12
    tokens in turn).
    """
    arms = (
        zip(rewards, tokens, strict=True)
        if tokens
        else zip(rewards, cycle((2, 5, 12)), strict=False)
    )
    return Decision(
        "bandit", tuple(Action(f"arm {i}", (Result(r),), n) for i, (r, n) in enumerate(arms))
    )


def stopping() -> Decision:
    """Two turns, if the policy does not stop after the first. Stopping is safe, going on pays or
    costs.
    """
    second = Decision(
        "second", (Action("left", (Result(2.0),), 3), Action("right", (Result(-1.0),), 1))
    )
    go = Action("go", (Result(0.5, second),), 2)
    return Decision(
        "first", (Action("stop", (Result(0.8),), 4), go, Action("give up", (Result(0.0),), 1))
    )


def t_maze(length: Length = 1, *, remembers: bool = True) -> Decision:
    """A sign, shown first, says where the prize is behind a corridor of so many steps (Bakker,
    2002).

    A policy that remembers can always find it; one that sees only where it is now cannot do better
    than 0.5.
    """

    def corridor(sign: str, left: int) -> Decision:
        known = f"{sign} " if remembers else ""
        if left == 0:
            turns = [Action(side, (Result(float(side == sign)),)) for side in ("left", "right")]
            return Decision(f"{known}junction", tuple(turns), "junction")
        shown = f"corridor {left}" if left < length else f"A sign points {sign}. corridor {left}"
        return Decision(
            f"{known}corridor {left}",
            (Action("on", (Result(0.0, corridor(sign, left - 1)),)),),
            shown,
        )

    starts = tuple(Result(0.0, corridor(sign, length), 0.5) for sign in ("left", "right"))
    return Decision("start", (Action("go", starts),))


def corridor(length: Length = 2, noise: Chance = 0.2, limit: Length = 3) -> Decision:
    """A corridor with a large prize at its end and a small one to take at once; steps fail with
    some probability.

    Which one is better depends on the discount. After `limit` turns the episode is cut.
    """

    def at(place: int, left: int) -> Decision:
        if left == 0:
            return Decision(f"place {place}", (Action("wait", (Result(0.25),)),))

        def then(next_place: int, probability: float) -> Result:
            if next_place == length:
                return Result(1.0, None, probability)
            return Result(0.0, at(next_place, left - 1), probability, truncated=left == 1)

        on = Action("on", (then(place + 1, 1 - noise), then(place, noise)), 2)
        return Decision(f"place {place} of {left}", (on, Action("take", (Result(0.3),), 1)))

    return at(0, limit)


def chain(length: Length = 3) -> Decision:
    """So many turns with a reward each: doing the same as before pays, changing costs."""

    def link(left: int, last: str) -> Decision:
        paid = {"same": 1.0 if last == "same" else 0.2, "other": 0.5 if last == "other" else -0.1}
        return Decision(
            f"{left} {last}",
            tuple(
                Action(
                    name,
                    (Result(reward, link(left - 1, name) if left > 1 else None),),
                    1 + (name == "other"),
                )
                for name, reward in paid.items()
            ),
        )

    return link(length, "start")


def dialogue(cost: float = 0.1) -> Decision:
    """A guest wants tea or coffee. Asking costs something, but only who has asked knows what is
    worth serving.

    After the wrong drink one can make up for some of it. The problem of ArCHer (arXiv:2402.19446):
    what a first message is worth shows only in what is said later.
    """
    drinks = ("tea", "coffee")

    def served(drink: str, chances: Mapping[str, float]) -> Action:
        """Right with the chance that the guest wants this drink."""
        sorry = Action("sorry", (Result(0.3),), 1)
        wrong = Decision(
            "wrong",
            (sorry, Action("never mind", (Result(0.0),), 2)),
            "Guest: That is not what I wanted.",
        )
        results = (Result(1.0, None, chances[drink]), Result(0.0, wrong, 1 - chances[drink]))
        return Action(drink, tuple(result for result in results if result.probability), len(drink))

    def serving(state: str, shown: str, chances: Mapping[str, float]) -> Decision:
        return Decision(state, tuple(served(drink, chances) for drink in drinks), shown)

    wishes = [
        serving(
            f"wants {drink}",
            f"Guest: {drink}, please.",
            {other: float(other == drink) for other in drinks},
        )
        for drink in drinks
    ]
    unknown = serving("wants something", "Guest: Nice weather.", dict.fromkeys(drinks, 0.5))
    ask = Action("ask", tuple(Result(-cost, wish, 0.5) for wish in wishes), 2)
    return Decision(
        "greeting", (ask, Action("chat", (Result(0.0, unknown),), 3)), "A guest comes in."
    )


PROBLEMS: Mapping[str, Callable[..., Decision]] = MappingProxyType(
    {
        "bandit": bandit,
        "stopping": stopping,
        "t_maze": t_maze,
        "corridor": corridor,
        "chain": chain,
        "dialogue": dialogue,
    }
)
"""All problems, by name."""


__all__ = [
    "PROBLEMS",
    "Action",
    "Decision",
    "Result",
    "all_decisions",
    "bandit",
    "chain",
    "corridor",
    "dialogue",
    "stopping",
    "t_maze",
]
