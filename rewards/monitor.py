"""Monitors: temporal logic over the tool calls of an episode, as a reward and as the rate of
violations.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from agentrl.errors import ConfigError
from agentrl.rewards.ltl import Automaton, automaton
from agentrl.rewards.rules.tool_use import calls_in, exchanges
from agentrl.settings.base import Settings
from agentrl.settings.yaml_values import read_value
from agentrl.trajectory import MadeCall, Score, ToolCall, Trajectory


class Monitor:
    """Checks that the calls of an episode satisfy a formula of `agentrl/rewards/ltl.py`, such as
    `!delete W confirm`.

    Each call is an event (`ToolUse` says which calls are seen), in which these atoms hold: the
    tool's name; the name with arguments, `buy(shop="north")`, if the call has these and possibly
    others; `refused`, if the tools answered with an error; `malformed`, if the call could not be
    read. A message without any call is an event in which `message` holds.

    Parts: `violated` is 1 if the formula does not hold (its mean is the rate of violations, which a
    constraint of `batch_processing` can bound). `progress` is 1 - d / d0, where d is the fewest
    further events after which the formula would hold, and d0 the same at the start. The idea of
    rewards from a task's automaton: LCRL (arXiv:2209.10341).
    """

    isolation: Literal["inline"] = "inline"

    class Config(Settings):
        """The formula, and what it pays."""

        formula: str
        """A formula over finite traces; `agentrl/rewards/ltl.py` lists the operators."""
        pays: Literal["verdict", "progress"] = "verdict"
        """1 if the formula holds and else 0 (`verdict`), or the progress."""
        end: Literal["strong", "weak"] = "strong"
        """A formula that is still pending at the end of the episode counts as violated (strong) or
        not (weak)."""

        @field_validator("formula")
        @classmethod
        def _is_a_formula(cls, formula: str) -> str:
            for atom in automaton(formula).atoms:
                _parse_atom(atom)
            return formula

        @model_validator(mode="after")
        def _tells_episodes_apart(self) -> Self:
            # A formula that gives every episode the same score is nearly always a mistake.
            machine = automaton(self.formula)
            ends = machine.ends()
            said = {_holds_at(machine, state, self.end) for state in ends}
            graded = (
                self.pays == "progress" and len({machine.to_accepted[state] for state in ends}) > 1
            )
            if len(said) == 1 and not graded:
                always, pays = (
                    ("holds of every episode", 1) if said == {True} else ("holds of no episode", 0)
                )
                raise ValueError(
                    f"formula: {self.formula!r} {always} (end: {self.end}), so this part would"
                    f" always say {pays}: mend the formula, or leave the part out"
                )
            return self

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def automaton(self) -> Automaton:
        """The formula's automaton."""
        return automaton(self._config.formula)

    def content(self, trajectory: Trajectory) -> tuple[frozenset[str], ...]:
        """The episode's events, each as the formula's atoms that hold in it."""
        matchers = {atom: _parse_atom(atom) for atom in self.automaton.atoms}
        names = {name for name, _ in matchers.values()} - _NO_TOOLS
        return tuple(
            frozenset(
                atom
                for atom, (name, arguments) in matchers.items()
                if _holds(event, atom, name, arguments)
            )
            for event in events(trajectory, names)
        )

    def evaluate(self, content: tuple[frozenset[str], ...]) -> Score:
        """The verdict at the end of the episode, or its progress."""
        machine = self.automaton
        state = machine.run(content)
        holds = _holds_at(machine, state, self._config.end)
        # None: the formula can no longer hold.
        left, first = machine.to_accepted[state], machine.to_accepted[0]
        progress = 0.0 if left is None else max(0.0, 1.0 - left / max(1, first or 0))
        paid = progress if self._config.pays == "progress" else float(holds)
        return Score(paid, {"violated": float(not holds), "progress": progress})


def _holds_at(machine: Automaton, state: int, end: Literal["strong", "weak"]) -> bool:
    """True if the formula holds of an episode that ends in this state."""
    return machine.accepted(state) if end == "strong" else machine.verdict(state) is not False


_ARGUMENT = re.compile(r'\s*([\w.\-]+)\s*=\s*("[^"]*"|[^",]*?)\s*(?:,|$)')

Event = tuple[ToolCall | None, frozenset[str]]
"""A call, if one could be read, and the other atoms that hold."""


_NO_TOOLS = frozenset(("refused", "malformed", "message"))


def events(trajectory: Trajectory, names: Collection[str] = ()) -> Iterator[Event]:
    """The events of an episode, in order.

    Where the environment does not say what it took for calls, a message that begins with one of the
    tools' `names` and has no call in JSON is a call in words.
    """
    for said, answered in exchanges(trajectory):
        calls = calls_in(said, answered)
        if (
            not calls
            and isinstance(said, str)
            and (word := said.split(maxsplit=1)[:1])
            and word[0] in names
        ):
            calls = (MadeCall(ToolCall(word[0], {})),)
        for made in calls:
            others = {"refused"} if made.refused else set()
            yield made.call, frozenset(others | ({"malformed"} if made.call is None else set()))
        if not calls:
            yield None, frozenset({"message"})


def _parse_atom(atom: str) -> tuple[str, dict[str, Any]]:
    """The tool and the arguments that an atom names.

    Raises:
        ValueError: its arguments cannot be read.
    """
    name, opened, inside = atom.partition("(")
    if not opened:
        return atom, {}
    found = list(_ARGUMENT.finditer(inside, 0, len(inside) - 1))
    if "".join(argument[0] for argument in found) != inside[:-1]:
        raise ValueError(
            f'the atom {atom!r} has arguments that cannot be read; write {name}(shop="north",'
            " count=2)"
        )
    try:
        return name, {argument[1]: read_value(argument[2]) for argument in found}
    except ConfigError as error:
        raise ValueError(
            f"the atom {atom!r} has an argument that cannot be read: {error}"
        ) from error


def _holds(event: Event, atom: str, name: str, arguments: dict[str, Any]) -> bool:
    """True if the atom, of this tool and arguments, holds in an event."""
    call, others = event
    if atom in others:
        return True
    missing = object()
    return (
        call is not None
        and call.name == name
        and all(
            _equal_as_json(call.arguments.get(key, missing), value)
            for key, value in arguments.items()
        )
    )


def _equal_as_json(given: Any, asked: Any) -> bool:
    """Equal as JSON: 1 is not true."""
    return type(given) is type(asked) and json.dumps(given, sort_keys=True) == json.dumps(
        asked, sort_keys=True
    )
