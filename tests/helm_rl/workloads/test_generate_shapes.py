"""What a load may have beyond constant rates and one catalogue: a day, a rate that varies, long pauses, new items."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl.errors import UserError
from helm_rl.scenario import Scenario, scenario_hash
from helm_rl.workloads.generate import _law, _uniform, generate, zipf_codes
from helm_rl.workloads.inspect import dispersion, gaps_to_previous
from helm_rl.workloads.kernels import interpolate
from helm_rl.workloads.popularity import fit_zipf
from tests.helm_rl.workloads.loads import SALE, scenario
from tests.helm_rl.workloads.test_generate import counts


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0.001, 10).map(lambda exponent: round(exponent, 4)),
    st.integers(0, 40).map(lambda power: max(1, int(2**power))),
    st.integers(0, 2**32),
)
def test_codes_are_those_of_the_law_computed_in_full(exponent: float, items: int, seed: int) -> None:
    """The table, the cubics and what they leave undecided together give what NumPy gives for every number."""
    wanted = 3000
    found = zipf_codes(np.random.default_rng(seed), wanted, exponent, items)
    rng, parts, have = np.random.default_rng(seed), [], 0
    while have < wanted:
        parts.append(_law(exponent, items).ranks(rng.random(int((wanted - have) * 1.15) + 16)) - 1)
        have += parts[-1].size
    assert np.array_equal(found, np.concatenate(parts)[:wanted])


@settings(deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(0, 2**32))
def test_interpolation_is_numpys(rises: list[float], seed: int) -> None:
    xp = np.concatenate([[0.0], np.cumsum([*rises, 1.0])])
    fp = np.cumsum(np.random.default_rng(seed).random(xp.size))
    x = np.random.default_rng(seed).random(500) * xp[-1]
    expected = np.interp(x, xp, fp)
    interpolate(x, xp, fp, np.empty(64, np.int64))
    # Where the curve is a step, any height of it is right; NumPy's loop and ours take the same.
    np.testing.assert_array_equal(x, expected)


def test_a_day_is_followed_and_its_mean_is_the_rate() -> None:
    day = (1, 0, 3, 4)
    asked = scenario(seconds=800, warm_s=0, rate=200, requests_per_visit=1, day=day, day_s=400)
    trace = generate(asked)
    found = counts(trace, 0, 50) / 50
    middle = (np.arange(8) + 0.5) * 50  # of windows; the weights are those of the middles of the quarters
    expected = np.interp(middle / 400, (np.arange(4) + 0.5) / 4, day, period=1.0) * 100
    for one_day in (found[:8], found[8:]):
        assert (np.abs(one_day - expected) < 4.5 * np.sqrt(np.maximum(expected, 1) / 50) + 2).all()
    assert found.mean() == pytest.approx(200, rel=0.02)


def test_the_warm_up_is_the_end_of_the_day_before() -> None:
    asked = scenario(seconds=100, warm_s=100, rate=100, requests_per_visit=1, day=(0, 1), day_s=200)
    found = counts(generate(asked), 0, 100) / 100
    assert found[0] == pytest.approx(200 * 0.75, rel=0.06)
    assert found[1] == pytest.approx(200 * 0.25, rel=0.1)


@pytest.mark.parametrize(("cv", "hold_s"), [(0.5, 2.0), (1.0, 10.0)])
def test_a_rate_that_varies_has_the_dispersion_of_its_law(cv: float, hold_s: float) -> None:
    rate = 40
    asked = scenario(seconds=40_000, warm_s=0, rate=rate, requests_per_visit=1, rate_cv=cv, rate_cv_s=hold_s)
    trace = generate(asked)
    assert len(trace) / 40_000 == pytest.approx(rate, rel=0.05)
    for window, value in dispersion(trace, (0.1, 1.0, 10.0, 60.0)).items():
        share = hold_s / float(window) * (1 - np.exp(-float(window) / hold_s))
        assert value == pytest.approx(1 + 2 * rate * cv**2 * hold_s * (1 - share), rel=0.15)


def test_a_phase_does_not_vary() -> None:
    asked = scenario(rate=0, rate_cv=2, phase=[SALE])
    trace = generate(asked)
    assert np.array_equal(trace.arrival_ns, generate(scenario(rate=0, phase=[SALE])).arrival_ns)


def test_pauses_may_be_lognormal_and_the_load_is_stationary_from_its_first_instant() -> None:
    load = scenario(
        seconds=300,
        warm_s=0,
        rate=300,
        requests_per_visit=15,
        think_s=8,
        think_sigma=1.2,
        users=10**10,
        history_sigma=0,
    )
    traces = [generate(load, seed) for seed in range(12)]
    windows = sum(counts(trace, 0, 20) for trace in traces) / (12 * 20 * 300)
    assert np.abs(windows - 1).max() < 4 * np.sqrt(2 * 15 / (12 * 20 * 300))
    long = generate(load.model_copy(update={"seconds": 3000.0}))
    gap_ns = gaps_to_previous(long.arrival_ns, long.user)
    # Visits that end well before the trace does, so that no long pause of theirs is cut off.
    pauses = np.log(gap_ns[(gap_ns > 0) & (long.arrival_ns < 2.5e12) & (long.arrival_ns > 0.5e12)] / 1e9)
    assert pauses.std() == pytest.approx(1.2, rel=0.02)
    assert pauses.mean() == pytest.approx(np.log(8) - 1.2**2 / 2, abs=0.02)


def test_some_users_may_come_more_often() -> None:
    trace = generate(scenario(seconds=500, rate=200, requests_per_visit=1, zipf_users=0.8, users=20_000))
    fit = fit_zipf(np.bincount(trace.user))
    assert fit is not None
    assert fit.exponent == pytest.approx(0.8, rel=0.05)
    assert np.bincount(trace.user).argmax() == 0


def test_new_items_take_the_places_of_old_ones() -> None:
    """At .5 an hour, half of the places have changed hands after an hour and all after two."""
    asked = scenario(seconds=7200, warm_s=0, rate=20, requests_per_visit=1, renewed_per_hour=0.5, items=10**9)
    trace = generate(asked)
    old = generate(asked.model_copy(update={"load": asked.load.model_copy(update={"renewed_per_hour": 0.0})}))
    assert np.array_equal(old.arrival_ns, trace.arrival_ns)
    changed = trace.item_values != old.item_values
    time_s = np.repeat(trace.arrival_ns, trace.new_tokens) / 1e9
    for hour in (0.25, 0.5, 1.0, 1.5):
        now = np.abs(time_s / 3600 - hour) < 0.1
        # A few hundred places make up half of the references, so the share scatters.
        places = np.unique(old.item_values[now])
        newer = np.unique(old.item_values[now & changed])
        assert newer.size / places.size == pytest.approx(hour / 2, abs=0.03)
    assert (trace.item_values[changed] >= 5 * 10**8).all()
    assert np.array_equal(trace.item_values[~changed], old.item_values[~changed])
    # Each place has one item at a time, and two over the two hours.
    first = old.item_values == 0
    assert np.unique(trace.item_values[first]).size == 2
    assert np.flatnonzero(np.diff(changed[first].astype(int))).size == 1
    assert "items renewed: 0.5 of them an hour" in trace.meta.steps


def test_new_items_are_not_those_of_a_hot_set() -> None:
    asked = scenario(seconds=300, rate=50, renewed_per_hour=60, items=10_000, phase=[SALE])
    trace = generate(asked)
    base = np.repeat(trace.phase == 0, trace.new_tokens)
    hot = trace.meta.phases[1]
    new = trace.item_values[base & (np.repeat(trace.arrival_ns, trace.new_tokens) > 100e9)]
    assert (new >= hot.hot_first + hot.hot_items).all()


def test_the_hash_of_a_scenario_tells_what_it_has() -> None:
    plain = scenario_hash(scenario())
    for field in ({"think_sigma": 1}, {"zipf_users": 1}, {"rate_cv": 1}, {"day": (1, 2)}, {"renewed_per_hour": 1}):
        assert scenario_hash(scenario(**field)) != plain


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="items = 2 leaves none"):
        scenario(renewed_per_hour=1, items=2, hot_fraction=0.5, hot_items=1)
    with pytest.raises(ValueError, match="day has no weight of at least"):
        scenario(day=(0, 0))
    with pytest.raises(ValueError, match="day"):
        Scenario.model_validate({"name": "x", "slo_ms": 1, "load": {"day": [-1, 2]}})
    with pytest.raises(UserError, match=r"rate_cv_s = 0.001 would change the rate"):
        generate(scenario(seconds=1e6, rate=1, rate_cv=1, rate_cv_s=0.001))


@pytest.mark.parametrize("shape", [{"rate_cv": 1e-4, "rate_cv_s": 2.0}, {"day": [1e-6, 0.0], "day_s": 10.0}])
def test_the_least_shapes_allowed_are_drawn(shape: dict[str, Any]) -> None:
    assert generate(scenario(seconds=100, warm_s=0, rate=50, **shape)).arrival_ns.size == pytest.approx(5000, rel=0.3)


def test_hashes_to_numbers_are_splitmix64s() -> None:
    """The stream of seed 0 begins with 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4 (as in Java's SplittableRandom)."""
    found = _uniform(np.array([0, 1], np.uint64))
    assert found.tolist() == [((0xE220A8397B1DCDAF >> 11) + 1) * 2.0**-53, ((0x6E789E6AA1B965F4 >> 11) + 1) * 2.0**-53]


def test_histories_have_the_quantiles_asked() -> None:
    asked = (10.0, 100.0, 100.0, 1000.0, 4000.0)
    trace = generate(scenario(seconds=400, rate=100, users=10**10, requests_per_visit=1, history_quantiles=asked))
    before = trace.history_tokens - trace.new_tokens
    assert np.quantile(before, [0.25, 0.5, 0.75]).tolist() == pytest.approx([100, 100, 1000], rel=0.05)
    assert np.mean(before == 100) == pytest.approx(0.25, abs=0.01)
    assert np.quantile(before, 0.125) == pytest.approx(math.sqrt(1000), rel=0.06)
    assert before.min() >= 10
    assert before.max() <= 4000
