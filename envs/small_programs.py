"""Functions of whole numbers: written in several languages, evaluated here, and broken."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Operator = Literal["+", "-", "*"]
OPERATORS: tuple[Operator, ...] = ("+", "-", "*")


@dataclass(frozen=True, slots=True)
class Operation:
    """Two expressions and an operator."""

    operator: Operator
    left: "int | str | Operation | Invocation"
    right: "int | str | Operation | Invocation"


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of another function with one argument."""

    name: str
    argument: "int | str | Operation | Invocation"


Expression = int | str | Operation | Invocation


@dataclass(frozen=True, slots=True)
class Value:
    """The body of a function that returns an expression."""

    result: Expression


@dataclass(frozen=True, slots=True)
class Branch:
    """The body of a function that returns one of two expressions, by whether `left` is greater."""

    left: str
    right: str
    then: Expression
    other: Expression
    greater: bool = True
    """False for a comparison the wrong way round."""


@dataclass(frozen=True, slots=True)
class Fold:
    """The body of a function that goes through numbers: `total = total operator term`."""

    first: Expression
    last: Expression
    start: int
    operator: Operator
    term: Expression
    divisor: str = ""
    """Only multiples of it count, if it is given."""


Body = Value | Branch | Fold


@dataclass(frozen=True, slots=True)
class Function:
    """A function of whole numbers."""

    name: str
    says: str
    """Its purpose in words, as its comment says it."""
    body: Body
    arguments: Mapping[str, range]
    """The range of each argument in tests."""

    def cases(self, rng: random.Random, count: int) -> list[tuple[int, ...]]:
        """`count` different tuples of arguments, or all if there are fewer."""
        # Each combination has a number, whose digits, in the bases of the ranges' lengths, are the
        # positions of its arguments. So combinations are sampled without listing them all.
        total = 1
        for values in self.arguments.values():
            total *= len(values)
        found = []
        for number in rng.sample(range(total), min(count, total)):
            case, rest = [], number
            for values in self.arguments.values():
                rest, at = divmod(rest, len(values))
                case.append(values[at])
            found.append(tuple(case))
        return found


Functions = Mapping[str, Function]


def evaluate(functions: Functions, name: str, arguments: Sequence[int]) -> int:
    """The value that a function returns."""
    function = functions[name]
    known = dict(zip(function.arguments, arguments, strict=True))

    def worth(expression: Expression, **more: int) -> int:
        match expression:
            case int():
                return expression
            case str():
                return {**known, **more}[expression]
            case Invocation(called, argument):
                return evaluate(functions, called, [worth(argument, **more)])
            case Operation(operator, left, right):
                return _compute(operator, worth(left, **more), worth(right, **more))

    match function.body:
        case Value(result):
            return worth(result)
        case Branch(left, right, then, other, greater):
            is_greater = known[left] > known[right]
            return worth(then if is_greater == greater else other)
        case Fold(first, last, start, operator, term, divisor):
            total = start
            for i in range(worth(first), worth(last) + 1):
                if not divisor or i % known[divisor] == 0:
                    total = _compute(operator, total, worth(term, i=i))
            return total


def _compute(operator: Operator, left: int, right: int) -> int:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right


def broken(body: Body) -> Iterator[Body]:
    """Bodies with one mistake each. Some may still return the same for all arguments."""
    match body:
        case Value(result):
            yield from map(Value, _wrong_variants(result))
        case Branch():
            yield replace(body, greater=not body.greater)
            for expression in _wrong_variants(body.then):
                yield replace(body, then=expression)
        case Fold():
            yield replace(body, first=Operation("+", body.first, 1))
            yield replace(body, last=Operation("-", body.last, 1))
            yield replace(body, start=1 - body.start)
            for operator in OPERATORS:
                if operator != body.operator:
                    yield replace(body, operator=operator)
            for expression in _wrong_variants(body.term):
                yield replace(body, term=expression)


def _wrong_variants(expression: Expression) -> Iterator[Expression]:
    match expression:
        case int():
            yield expression + 1
        case Invocation(name, argument):
            yield argument
            for other in _wrong_variants(argument):
                yield Invocation(name, other)
        case Operation(operator, left, right):
            for wrong in OPERATORS:
                if wrong != operator:
                    yield Operation(wrong, left, right)
            for other in _wrong_variants(left):
                yield Operation(operator, other, right)
            for other in _wrong_variants(right):
                yield Operation(operator, left, other)


_SMALL, _TINY = range(2, 30), range(1, 10)
_PLUS_TIMES = {"+": "plus", "-": "minus", "*": "times"}
_LETTERS = "abcdefghjkmnpqrstuvwxyz"  # without `i`, which counts, and letters like digits


def drawn_function(rng: random.Random) -> Function:
    """A function with one operator, whose sentence gives it in words."""
    left, right = rng.sample(_LETTERS, 2)
    operator = rng.choice(OPERATORS)
    number = rng.randrange(2, 100)
    if rng.random() < 0.5:
        body, said, names = Operation(operator, left, number), f"{number}", [left]
    else:
        body, said, names = Operation(operator, left, right), right, [left, right]
    arguments = {name: range(3, 100) for name in names}
    return Function("value", f"{left} {_PLUS_TIMES[operator]} {said}", Value(body), arguments)


BASICS = (
    Function("square", "n times itself", Value(Operation("*", "n", "n")), {"n": _SMALL}),
    Function("double", "twice n", Value(Operation("*", 2, "n")), {"n": _SMALL}),
    Function("one_less", "the number before n", Value(Operation("-", "n", 1)), {"n": _SMALL}),
    Function(
        "larger", "the larger one of x and y", Branch("x", "y", "x", "y"),
        {"x": _SMALL, "y": _SMALL},
    ),
    Function(
        "smaller", "the smaller one of x and y", Branch("x", "y", "y", "x"),
        {"x": _SMALL, "y": _SMALL},
    ),
    Function(
        "distance",
        "how far x is from y, which is never negative",
        Branch("x", "y", Operation("-", "x", "y"), Operation("-", "y", "x")),
        {"x": _SMALL, "y": _SMALL},
    ),
    Function(
        "perimeter",
        "the perimeter of a rectangle of x by y",
        Value(Operation("*", 2, Operation("+", "x", "y"))),
        {"x": _SMALL, "y": _SMALL},
    ),
)  # fmt: skip
SERIES = (
    Function("sum_to", "the sum of 1 to n", Fold(1, "n", 0, "+", "i"), {"n": _SMALL}),
    Function("factorial", "the product of 1 to n", Fold(1, "n", 1, "*", "i"), {"n": _TINY}),
    Function(
        "sum_between", "the sum of x to y", Fold("x", "y", 0, "+", "i"),
        {"x": _TINY, "y": range(10, 30)},
    ),
    Function(
        "power", "x to the power of n", Fold(1, "n", 1, "*", "x"), {"x": _TINY, "n": range(1, 6)}
    ),
    Function(
        "multiples", "how many multiples of k there are from 1 to n",
        Fold(1, "n", 0, "+", 1, "k"), {"n": _SMALL, "k": range(2, 6)},
    ),
)  # fmt: skip
OF_OTHERS = (
    Function(
        "squares_to", "the sum of the squares of 1 to n",
        Fold(1, "n", 0, "+", Invocation("square", "i")), {"n": _SMALL},
    ),
    Function(
        "doubles_to", "the sum of the doubles of 1 to n",
        Fold(1, "n", 0, "+", Invocation("double", "i")), {"n": _SMALL},
    ),
    Function(
        "square_after", "the square of the number before n",
        Value(Invocation("square", Invocation("one_less", "n"))), {"n": _SMALL},
    ),
    Function(
        "sum_of_square", "the sum of 1 to the square of n",
        Value(Invocation("sum_to", Invocation("square", "n"))), {"n": range(1, 13)},
    ),
)  # fmt: skip


def needed(functions: Sequence[Function]) -> set[str]:
    """The names of the functions that these functions call."""
    found: set[str] = set()

    def look(part: object) -> None:
        match part:
            case Invocation(name, argument):
                found.add(name)
                look(argument)
            case Operation(_, left, right):
                look(left)
                look(right)
            case Value(result):
                look(result)
            case Fold():
                look(part.term)

    for function in functions:
        look(function.body)
    return found
