"""The percentile that is quoted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helm_rl.metrics import SHED_FACTOR, p99_ms


@pytest.mark.parametrize(
    ("n", "rank"),
    [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (200, 198), (1000, 990), (1001, 991)],
)
def test_nearest_rank(n: int, rank: int) -> None:
    values = np.random.default_rng(0).permutation(np.arange(1.0, n + 1))
    assert p99_ms(values) == rank


def test_of_nothing_it_is_nan() -> None:
    assert math.isnan(p99_ms(np.zeros(0, np.float32)))


@given(st.lists(st.floats(0, 1e9, width=32), min_size=1, max_size=300))
def test_at_least_99_percent_are_at_or_below_and_it_was_observed(values: list[float]) -> None:
    array = np.array(values, np.float32)
    kept = array.copy()
    got = p99_ms(array)
    assert got in values
    assert np.count_nonzero(array <= got) >= 0.99 * array.size
    assert np.count_nonzero(array < got) < 0.99 * array.size
    assert np.array_equal(array, kept)
    assert type(got) is float


def test_one_shed_request_in_fifty_is_the_p99() -> None:
    latencies = np.full(100, 10.0, np.float32)
    latencies[:2] = SHED_FACTOR * 100.0
    assert p99_ms(latencies) == 10_000.0
