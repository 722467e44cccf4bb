"""The generator of covering arrays: no combination is left out, few rows, and a refusal settles
nothing else.
"""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import Coverage, covering_rows

FACTORS = {"a": ["1", "2", "3"], "b": ["1", "2"], "c": ["1", "2", "3", "4"], "d": ["1", "2"]}


def pairs_of(factors, strength=2):
    return {
        frozenset(zip(names, values, strict=True))
        for names in combinations(factors, strength)
        for values in product(*(factors[name] for name in names))
    }


def pairs_in(rows, strength=2):
    return {frozenset(chosen) for row in rows for chosen in combinations(row.items(), strength)}


@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 5), min_size=2),
    st.integers(0, 99),
    st.integers(2, 3),
)
def test_every_combination_is_in_a_row(sizes, seed, strength):
    factors = {name: list(range(size)) for name, size in sizes.items()}
    rows = covering_rows(factors, seed=seed, strength=min(strength, len(factors)))
    assert pairs_in(rows, min(strength, len(factors))) == pairs_of(
        factors, min(strength, len(factors))
    )
    assert all(list(row) == list(factors) for row in rows)


def test_pairs_of_many_factors_need_few_rows():
    factors = {f"factor {number}": list(range(4)) for number in range(12)}
    rows = covering_rows(factors, seed=0)
    # 16 are the least that twelve factors of four values could need; all together are 4^12.
    assert len(rows) <= 48


def test_a_seed_makes_the_same_rows_again():
    assert covering_rows(FACTORS, seed=3) == covering_rows(FACTORS, seed=3)
    assert covering_rows(FACTORS, seed=3) != covering_rows(FACTORS, seed=4)


def test_what_a_refused_row_has_besides_comes_again():
    coverage = Coverage(FACTORS, seed=0)
    forbidden = {"a": "1", "c": "2"}
    accepted, refusals = [], 0
    while (row := coverage.row()) is not None:
        if forbidden.items() <= row.items():
            refusals += 1
            coverage.refuse(forbidden)
        else:
            coverage.accept(row)
            accepted.append(row)
    assert refusals == 1
    assert pairs_in(accepted) == pairs_of(FACTORS) - {frozenset(forbidden.items())}
    assert coverage.impossible == []


def test_a_pair_that_what_was_refused_leaves_in_no_row_is_impossible_and_not_lost():
    coverage = Coverage({"a": ["1", "2"], "b": ["1", "2"], "c": ["1", "2"]}, seed=0)
    for value in ("1", "2"):
        coverage.refuse({"a": "1", "b": "1", "c": value})  # so a=1 and b=1 are in no row
    while (row := coverage.row()) is not None:
        coverage.accept(row)
    assert coverage.impossible == [frozenset({("a", "1"), ("b", "1")})]


def test_rows_are_found_among_many_refusals():
    factors = {f"factor {number}": list(range(5)) for number in range(14)}
    names = list(factors)
    refused = [
        {first: one, second: other, third: 0}
        for first, second, third in zip(names[:6], names[1:7], names[2:8], strict=True)
        for one in range(4)
        for other in range(1, 5)
    ]
    rows = covering_rows(factors, seed=0, refused=refused)
    assert not any(choices.items() <= row.items() for choices in refused for row in rows)
