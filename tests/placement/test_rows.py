"""Samples are packed so that ranks in step wait little for each other."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.placement.rows import lockstep_ratio, pack_rows
from tests.properties import examples

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """benchmarks/ is no package."""
    spec = spec_from_file_location(
        "lockstep", Path(__file__).parents[2] / "benchmarks" / "lockstep.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(lengths, st.integers(1, 80), st.integers(1, 5), st.sampled_from([0.0, 0.05, 1.0]))
@examples(200)
def test_a_row_has_room_for_the_limit_or_its_longest_sample_and_takes_no_longer(
    listed: list[int], limit: int, ranks: int, attention: float
) -> None:
    costs = [length + attention / 2 * length**2 for length in listed]
    rows = pack_rows(listed, costs, limit, ranks)
    assert rows == pack_rows(listed, costs, limit, ranks)
    assert sorted(number for row in rows for one in row for number in one) == list(
        range(len(listed))
    )
    for row in rows:
        assert 1 <= len(row) <= ranks
        assert all(row)
        longest = max(listed[number] for one in row for number in one)
        used = [sum(listed[number] for number in one) for one in row]
        assert max(used) <= max(limit, longest)
        if longest > limit:
            head = max(costs[number] for one in row for number in one)
            assert max(sum(costs[number] for number in one) for one in row) <= head


@given(lengths, st.integers(60, 120))
def test_one_rank_has_at_most_one_micro_batch_that_is_half_empty(
    listed: list[int], limit: int
) -> None:
    rows = pack_rows(listed, [float(length) for length in listed], limit, 1)
    used = [sum(listed[number] for number in one) for (one,) in rows]
    assert sum(2 * count <= limit for count in used) <= 1


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=40))
def test_costs_need_not_follow_lengths(drawn: list[tuple[int, int]]) -> None:
    """As those of families, whose members see a long prefix that is computed once."""
    tokens, costs = zip(*drawn, strict=True)
    rows = pack_rows(tokens, costs, 20, 3)
    assert sorted(number for row in rows for one in row for number in one) == list(
        range(len(drawn))
    )
    assert all(
        sum(tokens[number] for number in one)
        <= max(20, *(tokens[number] for one in row for number in one))
        for row in rows
        for one in row
    )


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("samples", [32, 128, 512])
def test_ranks_never_wait_longer_than_with_even_sums(
    benchmark: Any, samples: int, ranks: int
) -> None:
    for draw in benchmark.LENGTHS.values():
        for seed in range(8):
            drawn = draw(np.random.default_rng(seed), samples).tolist()
            now = lockstep_ratio(benchmark.by_rows(drawn, ranks), ranks)
            assert 1 <= now <= lockstep_ratio(benchmark.by_sums(drawn, ranks), ranks) + 1e-9


def test_ranks_hardly_wait_where_lengths_are_uniform_and_less_than_half_in_long_tails(
    benchmark: Any,
) -> None:
    for name, at_most in (
        ("uniform, 2k to 8k", 1.02),
        ("lognormal, median 8k, sigma 1.0, up to 128k", 1.15),
        ("lognormal, median 4k, sigma 1.3, up to 128k", 1.2),
    ):
        drawn = [
            benchmark.LENGTHS[name](np.random.default_rng(seed), 512).tolist() for seed in range(5)
        ]
        waits = [lockstep_ratio(benchmark.by_rows(one, 8), 8) for one in drawn]
        assert sum(waits) / len(waits) < at_most


def test_the_ratio_is_the_sum_of_the_slowest_over_the_mean() -> None:
    assert lockstep_ratio([[4.0, 2.0], [1.0, 3.0]], 2) == pytest.approx(7 / 5)
    assert lockstep_ratio([[4.0]], 2) == 2, "a rank that has nothing waits too"
    assert lockstep_ratio([], 2) == 1


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="1 or more tokens"):
        pack_rows([1], [1.0], 0, 1)
