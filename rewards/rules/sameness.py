"""Equality of two of sympy's expressions.

math-verify takes what differs by less than 1e-6 for equal, and 1/2^99 for 1/2^98. Here numbers
decide, wherever two expressions of the same form hold them; of expressions with variables, their
values at some points.
"""

from collections.abc import Iterator, Sequence
from typing import Any

_PRECISION_DIGITS = 50
NOT_COMPUTED = (
    ArithmeticError,
    AttributeError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of sympy for expressions that it cannot work with."""
# Of both signs, as |x| is x for positive numbers.
_POINTS = ((731, 1000), (1313, 1000), (-427, 1000))


def same(expected: Any, given: Any) -> bool:
    """True if an answer equals the right one."""
    from math_verify import verify
    from sympy import Equality

    both = isinstance(expected, Equality) and isinstance(given, Equality)
    if not both or expected.lhs == given.lhs:
        expected, given = _side(expected), _side(given)
    if value_of(expected) is not None and value_of(given) is not None:
        return close(expected, given)
    return bool(verify([expected], [given], timeout_seconds=None)) and not differ(expected, given)


def close(one: Any, other: Any) -> bool:
    """True if two numbers are equal. If neither is a decimal, exactly (to forty digits); else to
    six decimals and five significant digits, or to twelve significant digits.
    """
    from sympy import Float, Rational

    if isinstance(one, Rational) and isinstance(other, Rational):
        return bool(one == other)
    first, second = value_of(one), value_of(other)
    if first is None or second is None:
        return False
    larger, difference = max(abs(first), abs(second)), abs(first - second)
    if not (one.has(Float) or other.has(Float)):
        zeros = (one.is_zero, other.is_zero)
        # A sum of roots may be 0 unknown to sympy.
        scale = larger if None not in zeros or True not in zeros else 1
        return zeros == (True, True) or bool(difference <= Float("1e-40") * scale)
    return bool(
        difference
        <= max(min(Float("5e-7"), Float("1.0000001e-5") * larger), Float("1e-12") * larger)
    )


def value_of(form: Any) -> Any:
    """The number that a form stands for, to fifty digits; None if it is none, or not finite."""
    from sympy import Expr, Float, I

    if not isinstance(form, Expr) or form.free_symbols:
        return None
    try:
        real, imaginary = form.doit().evalf(_PRECISION_DIGITS).as_real_imag()
        real, imaginary = Float(real, _PRECISION_DIGITS), Float(imaginary, _PRECISION_DIGITS)
    except NOT_COMPUTED:
        return None
    if not (real.is_finite and imaginary.is_finite):
        return None
    return real + I * imaginary if imaginary else real


def differ(expected: Any, given: Any) -> bool:
    """True if two expressions that math-verify takes for equal have unequal numbers, or values at
    some point.
    """
    from sympy import Expr, Rational

    if value_of(expected) is not None and value_of(given) is not None:
        return not close(expected, given)
    if isinstance(expected, Expr) and isinstance(given, Expr):
        symbols = sorted(expected.free_symbols | given.free_symbols, key=str)
        for top, bottom in _POINTS:
            # Another number for each symbol: at equal ones, x - y is y - x.
            at = {
                symbol: Rational(top + 17 * number, bottom) for number, symbol in enumerate(symbols)
            }
            one, other = expected.subs(at), given.subs(at)
            # Outside of its domain, an expression has no value to compare.
            defined = value_of(one) is not None and value_of(other) is not None
            if defined and not close(one, other):
                return True
        return False
    return any(differ(*pair) for pair in _pair_parts(expected, given))


def _side(form: Any) -> Any:
    """The value that an equation gives to a variable."""
    from sympy import Equality, Symbol

    return form.rhs if isinstance(form, Equality) and isinstance(form.lhs, Symbol) else form


def _pair_parts(expected: Any, given: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of two forms of the same shape that belong together."""
    from sympy import FiniteSet, Interval, MatrixBase, Tuple, Union
    from sympy.core.relational import Relational

    if isinstance(expected, Interval) and isinstance(given, Interval):
        yield from ((expected.start, given.start), (expected.end, given.end))
    elif isinstance(expected, Relational) and isinstance(given, Relational):
        if expected.lhs == given.lhs:
            yield expected.rhs, given.rhs
    elif isinstance(expected, MatrixBase) and isinstance(given, MatrixBase):
        yield from zip(expected.flat(), given.flat(), strict=False)
    elif isinstance(expected, FiniteSet | Union) and isinstance(given, FiniteSet | Union):
        yield from zip(_sort_numbers(expected.args), _sort_numbers(given.args), strict=False)
    elif isinstance(expected, Tuple) and isinstance(given, Tuple | FiniteSet):
        # A set that was parsed has its elements as they were written: `args` has them sorted.
        elements = getattr(given, "_unsorted_args", given.args)
        yield from zip(expected.args, elements, strict=False)


def _sort_numbers(forms: Sequence[Any]) -> list[Any]:
    """Numbers and intervals by their value; the rest as it is."""
    from sympy import Interval

    sides = [_side(form) for form in forms]
    starts = [value_of(side.start if isinstance(side, Interval) else side) for side in sides]
    if not all(start is not None and start.is_real for start in starts):
        return []
    return [sides[at] for at in sorted(range(len(sides)), key=starts.__getitem__)]
