"""The burst detectors against arrivals and tails whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helm_rl.control import burst
from helm_rl.control.burst import BurstSettings, BurstState, look, look_at_all, new_burst_state
from helm_rl.errors import UserError

TICK_S = 0.01
NO_P99 = np.zeros(0)
SURE = BurstSettings(threshold=12.0)  # no false alarm in years


def arrivals(rng: np.random.Generator, *stretches: tuple[float, float]) -> npt.NDArray[np.int64]:
    """Return Poisson arrivals per tick over stretches of (seconds, requests/s)."""
    return np.concatenate([rng.poisson(rate * TICK_S, round(seconds / TICK_S)) for seconds, rate in stretches])


def varied(rng: np.random.Generator, seconds: int, rate: float, dispersion: float) -> npt.NDArray[np.int64]:
    """Return arrivals per tick at a rate that varies from second to second, by a gamma law."""
    variance = (dispersion - 1.0) / rate
    return rng.poisson(np.repeat(rng.gamma(1.0 / variance, variance * rate, seconds), 100) * TICK_S)


def look_through(state: BurstState, ticks: npt.NDArray[np.int64]) -> npt.NDArray[np.floating]:
    """Return when bursts are found, in seconds from the first of these ticks."""
    found = np.zeros(ticks.size, np.bool_)
    count = look_at_all(state, ticks, NO_P99, found)
    at = (np.flatnonzero(found) + 1) * TICK_S
    assert at.size == count
    return at


def firings_s(settings: BurstSettings, ticks: npt.NDArray[np.int64]) -> npt.NDArray[np.floating]:
    return look_through(new_burst_state(settings), ticks)


@pytest.mark.parametrize(("rate", "factor"), [(67.0, 2.0), (150.0, 1.6), (1000.0, 1.5)])
def test_a_rise_is_found_within_a_second_and_once(rate: float, factor: float) -> None:
    delays = []
    for seed in range(20):
        at = firings_s(
            BurstSettings(threshold=6.5), arrivals(np.random.default_rng(seed), (60, rate), (30, factor * rate))
        )
        at = at[at > 60]
        assert at.size == 1
        delays.append(at[0] - 60)
    # The last second proves factor ln factor - (factor - 1) nats for each request that would have come.
    expected_s = 6.5 / (rate * (factor * math.log(factor) - factor + 1.0))
    assert 0.5 * expected_s < np.median(delays) < 2.0 * expected_s
    assert np.quantile(delays, 0.9) < 1.0


def test_a_tenfold_rise_is_found_within_a_tenth_of_a_second() -> None:
    at = firings_s(SURE, arrivals(np.random.default_rng(1), (60, 100), (5, 1000)))
    assert at == pytest.approx([60], abs=0.05)


def test_the_threshold_sets_the_time_between_false_alarms() -> None:
    ticks = arrivals(np.random.default_rng(1), (3000, 100))
    counts = [firings_s(BurstSettings(threshold=h), ticks).size for h in (3.0, 4.5, 6.0, 9.0)]
    assert counts[0] > counts[1] > counts[2] > counts[3]
    assert counts[3] == 0


def test_one_threshold_holds_for_arrivals_of_any_dispersion() -> None:
    """Were they taken for Poisson ones, these would raise a false alarm every few seconds."""
    for dispersion in (2.0, 4.0):
        state = new_burst_state(BurstSettings(threshold=8.0))
        at = look_through(state, varied(np.random.default_rng(2), 3000, 100, dispersion))
        assert at[at > 60].size <= 3
        assert state.sums[burst.DISPERSION] == pytest.approx(dispersion, rel=0.35)
        state.sums[burst.DISPERSION] = 1.0
        state.params[burst.BLOCK_WEIGHT] = 1e-9
        state.counts[burst.BLOCKS] = 10**9
        assert look_through(state, varied(np.random.default_rng(3), 3000, 100, dispersion)).size > 20


def test_a_small_rise_is_no_burst() -> None:
    """However surely it is proven: here by five standard deviations in three seconds."""
    ticks = arrivals(np.random.default_rng(4), (60, 5000), (20, 5200), (60, 5000), (5, 6800))
    assert firings_s(replace(SURE, factor=1.25), ticks) == pytest.approx([140], abs=1.0)


def test_nothing_is_found_before_anything_is_normal() -> None:
    ticks = arrivals(np.random.default_rng(2), (3, 10), (3, 1000), (60, 10))
    assert firings_s(BurstSettings(least_s=10.0), ticks).size == 0
    assert firings_s(BurstSettings(least_s=4.0), ticks) == pytest.approx([4.0], abs=0.05)


def test_a_burst_is_over_when_the_rate_is_back_and_the_next_one_is_found() -> None:
    ticks = arrivals(np.random.default_rng(3), (60, 100), (20, 300), (60, 100), (20, 300), (30, 100))
    assert firings_s(replace(SURE, calm_s=2.0), ticks) == pytest.approx([60, 140], abs=0.6)


@pytest.mark.parametrize("calm_s", [0.05, 0.5, 5.0])
def test_the_end_of_a_burst_is_not_taken_for_another(calm_s: float) -> None:
    """What the windows still hold of the burst does not count once it is over."""
    state = new_burst_state(replace(SURE, calm_s=calm_s))
    ticks = arrivals(np.random.default_rng(5), (60, 100), (10, 400), (60, 100))
    found = look_through(state, ticks)
    assert found[0] == pytest.approx(60, abs=0.2)
    assert np.all(found < 70.0)
    assert state.counts[burst.ACTIVE] == 0


def test_a_burst_that_does_not_end_is_normal_after_a_while() -> None:
    ticks = arrivals(np.random.default_rng(4), (60, 100), (200, 300), (20, 900))
    at = firings_s(replace(SURE, normal_after_s=30.0), ticks)
    assert at == pytest.approx([60, 260], abs=0.3)  # what comes on top of the new normal is a burst again


def test_what_is_normal_stays_while_a_burst_is_on() -> None:
    state = new_burst_state(SURE)
    look_through(state, arrivals(np.random.default_rng(5), (60, 100), (20, 400)))
    assert state.counts[burst.ACTIVE] > 0
    assert state.sums[burst.RATE] / TICK_S == pytest.approx(100, rel=0.1)
    assert state.sums[burst.BURST_RATE] / TICK_S == pytest.approx(400, rel=0.1)


def test_a_load_that_begins_with_a_burst_is_known_soon_after() -> None:
    """Its height was taken for normal; the fall is learnt at once, and the next burst is found."""
    ticks = arrivals(np.random.default_rng(6), (40, 400), (20, 100), (10, 200))
    assert firings_s(SURE, ticks) == pytest.approx([60], abs=0.6)


def test_a_gap_in_the_arrivals_is_neither_a_normal_rate_nor_followed_by_a_burst() -> None:
    state = new_burst_state(SURE)
    ticks = arrivals(np.random.default_rng(7), (60, 100), (30, 0), (30, 100), (10, 250))
    assert look_through(state, ticks) == pytest.approx([120], abs=0.6)
    # After a longer one nothing is known, and what comes is learnt anew.
    state = new_burst_state(SURE)
    ticks = arrivals(np.random.default_rng(8), (60, 100), (90, 0), (30, 250), (10, 600))
    assert look_through(state, ticks) == pytest.approx([180], abs=0.6)


def test_a_gap_ends_a_burst() -> None:
    state = new_burst_state(SURE)
    look_through(state, arrivals(np.random.default_rng(9), (60, 100), (5, 400), (61, 0)))
    assert state.counts[burst.ACTIVE] == 0
    assert state.sums[burst.SCORE] == 0.0


def fed(state: BurstState, p99_ms: npt.NDArray[np.float64]) -> list[int]:
    return [i for i, value in enumerate(p99_ms) if look(state, 1.0, value)]


def test_a_tail_above_its_moving_average_is_found() -> None:
    calm = np.random.default_rng(6).normal(50.0, 2.0, 6000)
    state = new_burst_state(BurstSettings(p99_sigmas=6.0))
    assert fed(state, calm) == []
    assert state.sums[burst.P99_MEAN] == pytest.approx(50.0, abs=0.5)
    assert math.sqrt(state.sums[burst.P99_VAR]) == pytest.approx(2.0, rel=0.15)
    assert fed(state, np.array([60.0, 61.0, 61.5, 70.0, 80.0])) == [3]  # above 50 + 6 * 2, once


def test_the_score_is_one_at_the_threshold_and_its_peak_is_kept() -> None:
    state = new_burst_state(BurstSettings(p99_sigmas=5.0))
    fed(state, np.random.default_rng(7).normal(50.0, 2.0, 6000))
    mean, spread = state.sums[burst.P99_MEAN], math.sqrt(state.sums[burst.P99_VAR])
    state.sums[burst.PEAK] = 0.0
    look(state, 1.0, mean + 2.5 * spread)
    assert state.sums[burst.SCORE] == pytest.approx(0.5, rel=0.05)
    look(state, 1.0, mean - spread)
    assert state.sums[burst.SCORE] < 0.1
    assert state.sums[burst.PEAK] == pytest.approx(0.5, rel=0.05)


def test_ticks_without_a_tail_change_nothing_of_it() -> None:
    state = new_burst_state(SURE)
    fed(state, np.full(3000, 50.0))
    before = state.sums[burst.P99_MEAN], state.sums[burst.P99_VAR]
    assert fed(state, np.full(1000, math.nan)) == []
    assert (state.sums[burst.P99_MEAN], state.sums[burst.P99_VAR]) == before
    assert fed(state, np.array([50.5, 80.0])) == [1]  # a tail that never varied is not a burst by luck


def test_a_tail_that_comes_late_is_learnt_before_it_is_judged() -> None:
    """It is not known for a long time, then grows as the first latencies come in."""
    state = new_burst_state(BurstSettings(least_s=10.0))
    assert fed(state, np.full(3000, math.nan)) == []
    assert fed(state, np.concatenate([np.linspace(10.0, 50.0, 500), np.full(2000, 50.0)])) == []


def test_a_tail_that_stays_high_is_normal_after_a_while() -> None:
    """As where the alpha that a burst was met with is worse for the load after it: recovery would never end."""
    settings = BurstSettings(p99_hold_s=20.0, calm_s=2.0)
    state = new_burst_state(settings)
    rng = np.random.default_rng(8)
    assert fed(state, rng.normal(50.0, 2.0, 6000)) == []
    ends = []
    for i, value in enumerate(rng.normal(120.0, 2.0, 9000)):
        was_on = state.counts[burst.ACTIVE] > 0
        assert look(state, 1.0, value) == (i == 0)
        if was_on and state.counts[burst.ACTIVE] == 0:
            ends.append(i)
    assert ends == [2000]
    assert state.sums[burst.P99_MEAN] == pytest.approx(120.0, abs=1.0)


def test_a_silent_node_has_no_bursts() -> None:
    assert firings_s(SURE, np.zeros(20_000, np.int64)).size == 0


@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0.01, 300.0) | st.sampled_from([0.0, math.nan])), max_size=40),
    st.floats(0.001, 1.0),
)
def test_whatever_comes_the_score_is_a_number_and_a_burst_is_found_where_it_reaches_one(
    stretches: list[tuple[int, float]], tick_s: float
) -> None:
    state = new_burst_state(replace(SURE, tick_s=tick_s, least_s=5 * tick_s, memory_s=40 * tick_s))
    for number, p99_ms in stretches:
        for _ in range(20):
            was_on = state.counts[burst.ACTIVE] > 0
            found = look(state, float(number), p99_ms)
            assert np.isfinite(state.sums).all()
            assert state.sums[burst.SCORE] >= 0.0
            assert found == (not was_on and state.sums[burst.SCORE] >= 1.0)
            assert state.sums[burst.PEAK] >= state.sums[burst.SCORE]


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 1.0},
        {"threshold": 0.0},
        {"tick_s": math.nan},
        {"tick_s": 1e-9},
        {"least_s": -1.0},
        {"p99_hold_s": math.inf},
        {"memory_s": 1e308, "tick_s": 1e-4},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"burst detector: {next(iter(changes))}"):
        BurstSettings(**changes)
