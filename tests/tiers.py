"""Which cases of a test are in `make test`; all others take their time in `make long`.

A case is a value of one parameter, or a tuple of values of several.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def evenly(cases: Iterable[Any], count: int) -> list[ParameterSet]:
    """All cases of a parameter, of which so many, evenly spread, are in `make test`.

    For cases of one kind that differ in size or origin: templates, families, seeds, places to fail.
    The first is always one of them: `evenly("abcdef", 3)` keeps a, c and e.
    """
    listed = list(cases)
    kept = {number * len(listed) // count for number in range(count)}
    return [_param(case, is_long=number not in kept) for number, case in enumerate(listed)]


def evenly_crossed(count: int, *factors: Iterable[Any]) -> list[ParameterSet]:
    """All combinations of a value of each factor, of which so many, evenly spread, are in
    `make test`. A count that has no divisor in common with the last factor's length takes each of
    its values in turn.
    """
    return evenly(product(*factors), count)


def only(cases: Iterable[Any], *kept: Any) -> list[ParameterSet]:
    """All cases of a parameter, of which these are in `make test`."""
    listed = list(cases)
    assert set(kept) <= set(listed), f"no case of {listed}: {set(kept) - set(listed)}"
    return [_param(case, is_long=case not in kept) for case in listed]


def _param(case: Any, *, is_long: bool) -> ParameterSet:
    marks = [pytest.mark.long] if is_long else []
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, marks=[*case.marks, *marks], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
