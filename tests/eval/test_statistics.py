from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from eval import statistics
from eval.statistics import (
    bootstrap_interval,
    improvement,
    improvement_interval,
    interquartile_mean,
    standard_error,
    stratified_interval,
    survival_curve,
)
from helm_rl.metrics import quantile_ms


def test_quantile_is_an_observed_value_at_the_nearest_rank() -> None:
    values = np.arange(1, 201, dtype=np.float32)[::-1]
    assert quantile_ms(values, 0.99) == 198.0
    assert quantile_ms(values, 0.5) == 100.0
    assert quantile_ms(values, 1.0) == 200.0
    assert quantile_ms(values, 0.001) == 1.0
    assert np.isnan(quantile_ms(np.empty(0, np.float32), 0.5))


def test_quantile_rank_is_not_pushed_up_by_rounding() -> None:
    # .07 * 100 is 7.000000000000001 in float64: the 7th smallest is meant, not the 8th.
    assert quantile_ms(np.arange(1, 101, dtype=np.float64), 0.07) == 7.0


def test_quantile_refuses_a_percentage() -> None:
    with pytest.raises(ValueError, match="99"):
        quantile_ms(np.ones(3), 99)


def test_survival_curve_counts_requests_at_or_above() -> None:
    latency, share = survival_curve(np.array([5.0, 1.0, 2.0, 10.0]), points=50)
    assert latency.tolist() == [1.0, 2.0, 5.0, 10.0]
    assert share.tolist() == [1.0, 0.75, 0.5, 0.25]
    empty, none = survival_curve(np.empty(0))
    assert empty.size == none.size == 0


def test_survival_curve_is_thin_for_a_million_requests() -> None:
    latency, share = survival_curve(np.arange(1_000_000, dtype=np.float32))
    assert latency.size <= 240
    assert share[0] == 1.0
    assert share[-1] == 1e-6
    assert latency[-1] == 999_999.0


def test_interquartile_mean_weighs_its_edges() -> None:
    assert interquartile_mean([1.0, 2.0, 3.0, 1000.0]) == 2.5
    # n = 5: the middle half is 2.5 values wide: .75 of the 2nd, the 3rd, .75 of the 4th.
    assert interquartile_mean([0.0, 4.0, 10.0, 20.0, 1e9]) == pytest.approx((0.75 * 4 + 10 + 0.75 * 20) / 2.5)
    assert interquartile_mean([7.0]) == 7.0
    assert interquartile_mean([1.0, 2.0]) == 1.5
    assert np.isnan(interquartile_mean([]))


def test_bootstrap_interval_is_seeded_and_near_the_normal_one() -> None:
    values = np.random.default_rng(3).normal(100.0, 10.0, size=60)
    first = bootstrap_interval(values, seed=1)
    assert first == bootstrap_interval(values, seed=1)
    assert first != bootstrap_interval(values, seed=2)
    assert first is not None
    low, high = first
    assert low < interquartile_mean(values) < high
    # The IQM of a normal sample has an efficiency of about .84: sd = 10 / sqrt(60 * .84) = 1.41, interval +-
    # 2.8.
    assert 3.5 < high - low < 8.0


def test_one_seed_has_no_interval() -> None:
    assert bootstrap_interval([1.0]) is None
    assert bootstrap_interval([1.0, float("nan")]) is None
    assert np.isnan(standard_error([1.0]))
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


VALUES = st.lists(st.integers(-50, 50).map(float), min_size=2, max_size=12)


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=40).filter(lambda values: len(values) % 4 == 0))
def test_the_interquartile_mean_is_scipys_trimmed_one(values: list[float]) -> None:
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25), abs=1e-6)


def test_the_bootstrap_interval_is_scipys() -> None:
    values = np.random.default_rng(5).lognormal(size=40)
    theirs = stats.bootstrap(
        (values,),
        lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    found = bootstrap_interval(values)
    assert found == pytest.approx(tuple(theirs), rel=0.02)


def test_strata_are_resampled_one_by_one() -> None:
    # Two tasks that differ by far more than their runs do: resampled together, the interval would hold the difference.
    near, far = [1.0, 1.1, 0.9, 1.0], [9.0, 9.1, 8.9, 9.0]
    found = stratified_interval([near, far])
    assert found is not None
    assert 4.5 < found[0] < found[1] < 5.5
    mixed = bootstrap_interval([*near, *far])
    assert mixed is not None
    assert mixed[1] - mixed[0] > 4
    assert stratified_interval([near]) == bootstrap_interval(near)
    assert stratified_interval([near, [1.0]]) is None
    assert stratified_interval([]) is None


@given(VALUES, VALUES)
def test_the_probability_of_improvement_is_mann_and_whitneys(ours: list[float], theirs: list[float]) -> None:
    expected = stats.mannwhitneyu(theirs, ours).statistic / (len(ours) * len(theirs))
    assert improvement([ours], [theirs]) == pytest.approx(expected)
    assert improvement([theirs], [ours]) == pytest.approx(1 - expected)


def test_the_probability_of_improvement_is_a_mean_over_tasks() -> None:
    better, worse = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
    assert improvement([better, worse], [worse, better]) == 0.5
    assert improvement([better, better], [worse, better]) == 0.75
    assert improvement_interval([better, better], [worse, worse]) == (1.0, 1.0)
    assert improvement_interval([better], [[1.0]]) is None


def test_the_interval_of_an_improvement_is_near_scipys() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = rng.normal(0.0, 1.0, 20), rng.normal(0.6, 1.0, 25)

    def statistic(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return (x[..., :, None] < y[..., None, :]).mean(axis=(-2, -1))

    theirs_interval = stats.bootstrap(
        (ours, theirs), statistic, method="percentile", n_resamples=4000, rng=np.random.default_rng(0), vectorized=True
    ).confidence_interval
    found = improvement_interval([ours], [theirs], resamples=4000)
    assert found == pytest.approx(tuple(theirs_interval), abs=0.02)
    assert found == improvement_interval([ours], [theirs], resamples=4000)


def test_pairs_are_compared_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    ours, theirs = [rng.normal(size=7), rng.normal(size=4)], [rng.normal(size=6), rng.normal(size=9)]
    whole = improvement_interval(ours, theirs, resamples=100)
    pairs: list[int] = []
    below = statistics._below

    def counted(one: statistics.Floats, other: statistics.Floats) -> statistics.Floats:
        pairs.append(one.size * other.shape[-1])
        return below(one, other)

    monkeypatch.setattr(statistics, "MOST_PAIRS", 300)
    monkeypatch.setattr(statistics, "_below", counted)
    assert improvement_interval(ours, theirs, resamples=100) == whole
    assert max(pairs) <= 300
    assert sum(pairs) == 100 * (7 * 6 + 4 * 9)
