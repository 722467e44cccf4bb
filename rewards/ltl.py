"""Linear temporal logic over finite traces: a parser, formula progression, and the automaton of a
formula.

A trace is a sequence of events, each the set of atoms that hold in it. Formulas (De Giacomo and
Vardi, IJCAI 2013):

    true  false  pay  pay(method="card", times=2)    constants and atoms
    !f  f & g  f | g  f -> g  f <-> g                not, and, or, implies, if and only if
    X f   N f                                        at the next event; for X there has to be one
    F f   G f                                        at some event, at every event from here on
    f U g   f W g                                    f until g; for U there has to be a g
    f R g                                            g until f and g

Unary operators bind tightest, then U, W and R (right to left), &, |, ->, <->. "F" in quotes is an
atom of that name.

Progression (Bacchus and Kabanza, 2000) turns a formula into what has to hold of the rest of a trace
after its first event. This remainder is kept as alternatives, each a set of obligations, so that a
formula has only finitely many remainders: the states of an automaton, which is built once.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from typing import NamedTuple

MOST_ATOMS = 8
MOST_STATES = 2_000


@dataclass(frozen=True, slots=True)
class BooleanConstant:
    """True or false."""

    value: bool


@dataclass(frozen=True, slots=True)
class Atom:
    """An atom that has to hold in the event, or (not `positive`) must not."""

    name: str
    positive: bool = True


@dataclass(frozen=True, slots=True)
class Remains:
    """Events of the trace are left (or, with `some` false, none). Arises in progression only."""

    some: bool


@dataclass(frozen=True, slots=True)
class And:
    """Both."""

    left: "Formula"
    right: "Formula"


@dataclass(frozen=True, slots=True)
class Or:
    """One or both."""

    left: "Formula"
    right: "Formula"


@dataclass(frozen=True, slots=True)
class Next:
    """`formula` holds at the next event. Without one this is false if `strong`, else true."""

    formula: "Formula"
    strong: bool


@dataclass(frozen=True, slots=True)
class Until:
    """`right` holds at some event, and `left` at every event before it."""

    left: "Formula"
    right: "Formula"


@dataclass(frozen=True, slots=True)
class Release:
    """`right` holds up to and including the first event at which `left` holds; to the end, if
    `left` never holds.
    """

    left: "Formula"
    right: "Formula"


Formula = BooleanConstant | Atom | Remains | And | Or | Next | Until | Release
"""In negation normal form: only atoms are negated."""

State = frozenset[frozenset[Formula]]
"""Alternatives, one of which has to hold; each is a set of obligations, all of which have to hold.
"""

TRUE: State = frozenset({frozenset()})
FALSE: State = frozenset()


def negation(formula: Formula) -> Formula:  # noqa: PLR0911  one for each kind of formula
    """The formula that holds exactly if this one does not."""
    match formula:
        case BooleanConstant(value):
            return BooleanConstant(not value)
        case Atom(name, positive):
            return Atom(name, not positive)
        case Remains(some):
            return Remains(not some)
        case And(left, right):
            return Or(negation(left), negation(right))
        case Or(left, right):
            return And(negation(left), negation(right))
        case Next(inner, strong):
            return Next(negation(inner), not strong)
        case Until(left, right):
            return Release(negation(left), negation(right))
        case Release(left, right):
            return Until(negation(left), negation(right))


def progress(  # noqa: PLR0911  one for each kind of formula
    formula: Formula, event: frozenset[str]
) -> State:
    """The formula that the rest of a trace has to satisfy after `event`, for this one to hold of
    the whole trace.
    """
    match formula:
        case BooleanConstant(holds) | Remains(holds):
            return TRUE if holds else FALSE
        case Atom(name, positive):
            return TRUE if (name in event) == positive else FALSE
        case And(left, right):
            return _both(progress(left, event), progress(right, event))
        case Or(left, right):
            return _either(progress(left, event), progress(right, event))
        case Next(inner, strong):
            return (
                _both(state_of(inner), _just(Remains(True)))
                if strong
                else _either(state_of(inner), _just(Remains(False)))
            )
        case Until(left, right):
            return _either(progress(right, event), _both(progress(left, event), _just(formula)))
        case Release(left, right):
            return _both(progress(right, event), _either(progress(left, event), _just(formula)))


def holds_of_nothing(formula: Formula) -> bool:  # noqa: PLR0911  one for each kind of formula
    """True if the formula holds of an empty rest, that is, after the end of a trace."""
    match formula:
        case BooleanConstant(value):
            return value
        case Atom(_, positive):
            return not positive
        case Remains(some):
            return not some
        case And(left, right):
            return holds_of_nothing(left) and holds_of_nothing(right)
        case Or(left, right):
            return holds_of_nothing(left) or holds_of_nothing(right)
        case Next(_, strong):
            return not strong
        case Until():
            return False
        case Release():
            return True


def state_of(formula: Formula) -> State:
    """A formula as alternatives of obligations."""
    match formula:
        case BooleanConstant(value):
            return TRUE if value else FALSE
        case And(left, right):
            return _both(state_of(left), state_of(right))
        case Or(left, right):
            return _either(state_of(left), state_of(right))
        case _:
            return _just(formula)


def advance(state: State, event: frozenset[str]) -> State:
    """`progress` of a state."""
    after = FALSE
    for alternative in state:
        met = TRUE
        for obligation in alternative:
            met = _both(met, progress(obligation, event))
        after = _either(after, met)
    return after


def accepts(state: State) -> bool:
    """True if the formula holds when the trace ends in this state."""
    return any(
        all(holds_of_nothing(obligation) for obligation in alternative) for alternative in state
    )


def _just(formula: Formula) -> State:
    """A state with one alternative, which has one obligation."""
    return frozenset({frozenset({formula})})


def _both(left: State, right: State) -> State:
    """The state in which one alternative of each holds."""
    joined = {a | b for a in left for b in right}
    return _without_longer(
        alternative
        for alternative in joined
        # No rest of a trace has an atom and its contrary. Longer contradictions may stay: they
        # only make more states.
        if not any(
            isinstance(one, Atom | Remains) and negation(one) in alternative for one in alternative
        )
    )


def _either(left: State, right: State) -> State:
    """The state in which an alternative of either holds."""
    return _without_longer(left | right)


def _without_longer(alternatives: Iterable[frozenset[Formula]]) -> State:
    """Drop alternatives whose obligations include all those of another one."""
    kept: list[frozenset[Formula]] = []
    for alternative in sorted(set(alternatives), key=len):
        if not any(other <= alternative for other in kept):
            kept.append(alternative)
    return frozenset(kept)


@dataclass(frozen=True, slots=True)
class Automaton:
    """The remainders of a formula after all traces, as states. State 0 is the formula itself.

    `after[state][letter]` is the next state; a letter is a set of `atoms` as a binary number.
    `to_accepted` and `to_rejected` are the fewest further events after which the trace may end
    accepted or rejected; None if it never can.
    """

    atoms: tuple[str, ...]
    after: tuple[tuple[int, ...], ...]
    to_accepted: tuple[int | None, ...]
    to_rejected: tuple[int | None, ...]

    def run(self, trace: Iterable[Iterable[str]]) -> int:
        """The state after a trace; ignores atoms that are not in the formula."""
        state = 0
        for event in trace:
            holding = set(event)
            state = self.after[state][
                sum(1 << bit for bit, atom in enumerate(self.atoms) if atom in holding)
            ]
        return state

    def verdict(self, state: int) -> bool | None:
        """True or False if no continuation can change the verdict, None while it is pending."""
        if self.to_rejected[state] is None:
            return True
        return False if self.to_accepted[state] is None else None

    def ends(self) -> frozenset[int]:
        """The states that traces of one event or more can end in."""
        found: set[int] = set()
        ahead = set(self.after[0])
        while ahead:
            found |= ahead
            ahead = set(chain.from_iterable(self.after[state] for state in ahead)) - found
        return frozenset(found)

    def accepted(self, state: int) -> bool:
        """True if the formula holds of a trace that ends in this state."""
        return self.to_accepted[state] == 0


@lru_cache(maxsize=256)
def automaton(text: str) -> Automaton:
    """The automaton of a formula.

    Raises:
        ValueError: the text is not a formula, or has too many atoms or states.
    """
    formula = parse(text)
    atoms = tuple(sorted(set(_atoms_in(formula))))
    if len(atoms) > MOST_ATOMS:
        raise ValueError(
            f"{text!r} has {len(atoms)} atoms, and a monitor may have {MOST_ATOMS}: write several"
            " monitors, whose scores are added"
        )
    every = chain.from_iterable(combinations(range(len(atoms)), n) for n in range(len(atoms) + 1))
    letters = sorted(
        (sum(1 << bit for bit in bits), frozenset(atoms[bit] for bit in bits)) for bits in every
    )
    # Every state is reached from the first by some letters, so a walk over them finds all. The
    # numbers are in the order of that walk.
    numbers = {state_of(formula): 0}
    after: list[tuple[int, ...]] = []
    unseen = deque(numbers)
    while unseen:
        state = unseen.popleft()
        row = []
        for _, letter in letters:
            following = advance(state, letter)
            if following not in numbers:
                numbers[following] = len(numbers)
                unseen.append(following)
            row.append(numbers[following])
        after.append(tuple(row))
        if len(numbers) > MOST_STATES:
            raise ValueError(
                f"{text!r} has more than {MOST_STATES} states: write several monitors, whose scores"
                " are added"
            )
    accepting = [accepts(state) for state in numbers]
    return Automaton(
        atoms,
        tuple(after),
        _distances(after, accepting),
        _distances(after, [not accepted for accepted in accepting]),
    )


def _distances(after: list[tuple[int, ...]], goal: list[bool]) -> tuple[int | None, ...]:
    """The fewest steps from each state to a state of `goal`."""
    before: list[set[int]] = [set() for _ in after]
    for state, row in enumerate(after):
        for following in row:
            before[following].add(state)
    found: list[int | None] = [0 if reached else None for reached in goal]
    queue = deque(state for state, reached in enumerate(goal) if reached)
    while queue:
        state = queue.popleft()
        for earlier in before[state]:
            if found[earlier] is None:
                found[earlier] = (found[state] or 0) + 1
                queue.append(earlier)
    return tuple(found)


def _atoms_in(formula: Formula) -> Iterator[str]:
    """The names of a formula's atoms, some of them more than once."""
    match formula:
        case Atom(name):
            yield name
        case Next(inner):
            yield from _atoms_in(inner)
        case And(left, right) | Or(left, right) | Until(left, right) | Release(left, right):
            yield from _atoms_in(left)
            yield from _atoms_in(right)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


_TOKENS = re.compile(
    r"\s*(?:(?P<op><->|->|[!&|()])|(?P<quoted>\"[^\"\n]+\")"
    r"|(?P<name>[A-Za-z_][\w.\-]*)(?P<arguments>\((?:[^()\"]|\"[^\"\n]*\")*\))?)"
)
_UNARY = {"!", "X", "N", "F", "G"}
_TEMPORAL = {"U", "W", "R"}


def parse(text: str) -> Formula:
    """Read a formula.

    Raises:
        ValueError: the text is not a formula; the message says where, and what was expected.
    """
    reader = _Reader(text)
    formula = reader.equivalence()
    if reader.token.kind != "end":
        reader.fail("an operator or the end")
    return formula


class _Reader:
    """Parses a formula from its tokens, with one method for each precedence level."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self.token = next(self._tokens)

    def fail(self, expected: str) -> None:
        """Raise the error for the current token."""
        found = repr(self.token.text) if self.token.text else "the end"
        raise ValueError(
            f"the formula {self._text!r} has {found} at character {self.token.at + 1}, where"
            f" {expected} should be; operators are ! & | -> <-> X N F G U W R, other names are"
            " atoms (quote an atom with such a name)"
        )

    def _take(self, *kinds: str) -> bool:
        """Go on to the next token, if the current one is of one of these kinds."""
        if self.token.kind not in kinds:
            return False
        self.token = next(self._tokens)
        return True

    def equivalence(self) -> Formula:
        left = self._implication()
        while self._take("<->"):
            right = self._implication()
            left = And(Or(negation(left), right), Or(left, negation(right)))
        return left

    def _implication(self) -> Formula:
        left = self._disjunction()
        return Or(negation(left), self._implication()) if self._take("->") else left

    def _disjunction(self) -> Formula:
        left = self._conjunction()
        while self._take("|"):
            left = Or(left, self._conjunction())
        return left

    def _conjunction(self) -> Formula:
        left = self._temporal()
        while self._take("&"):
            left = And(left, self._temporal())
        return left

    def _temporal(self) -> Formula:
        left = self._unary()
        operator = self.token.kind
        if not self._take(*_TEMPORAL):
            return left
        right = self._temporal()
        if operator == "U":
            return Until(left, right)
        return Release(left, right) if operator == "R" else Release(right, Or(left, right))

    def _unary(self) -> Formula:
        operator = self.token.kind
        if not self._take(*_UNARY):
            return self._primary()
        inner = self._unary()
        match operator:
            case "!":
                return negation(inner)
            case "F":
                return Until(BooleanConstant(True), inner)
            case "G":
                return Release(BooleanConstant(False), inner)
            case _:
                return Next(inner, strong=operator == "X")

    def _primary(self) -> Formula:
        token = self.token
        if self._take("("):
            inner = self.equivalence()
            if not self._take(")"):
                self.fail("an operator or )")
            return inner
        if self._take("true", "false"):
            return BooleanConstant(token.kind == "true")
        if not self._take("atom"):
            self.fail("a formula")
        return Atom(token.text)


def _tokens(text: str) -> Iterator[_Token]:
    """The tokens of a text, and then its end, as often as it is asked for."""
    at = 0
    while found := _TOKENS.match(text, at):
        start = found.end() - len(found[0].lstrip())
        name, arguments = found["name"], found["arguments"] or ""
        if found["quoted"]:
            yield _Token("atom", found["quoted"][1:-1], start)
        elif name is None:
            yield _Token(found["op"], found["op"], start)
        elif name in _UNARY | _TEMPORAL | {"true", "false"}:  # F(a) is an operator and its operand
            yield _Token(name, name, start)
            at = start + len(name)
            continue
        else:
            yield _Token("atom", name + arguments, start)
        at = found.end()
    rest = text[at:].strip()
    yield _Token(
        "end" if not rest else "unknown", rest[:1], len(text) if not rest else text.index(rest, at)
    )
    while True:
        yield _Token("end", "", len(text))
