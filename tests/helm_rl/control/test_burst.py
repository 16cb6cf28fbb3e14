"""The burst detectors against arrivals and tails whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from helm_rl.control import burst
from helm_rl.control.burst import BurstSettings, BurstState, look, look_at_all, new_burst_state
from helm_rl.errors import UserError

TICK_S = 0.01


def arrivals(rng: np.random.Generator, *stretches: tuple[float, float]) -> npt.NDArray[np.int64]:
    """Return Poisson arrivals per tick over stretches of (seconds, requests/s)."""
    return np.concatenate([rng.poisson(rate * TICK_S, round(seconds / TICK_S)) for seconds, rate in stretches])


def firings_s(settings: BurstSettings, ticks: npt.NDArray[np.int64]) -> npt.NDArray[np.floating]:
    found = np.zeros(ticks.size, np.bool_)
    count = look_at_all(new_burst_state(settings), ticks, found)
    at = (np.flatnonzero(found) + 1) * TICK_S
    assert at.size == count
    return at


@pytest.mark.parametrize("rate", [20.0, 150.0, 1000.0])
def test_a_rise_of_half_is_found_within_seconds_and_once(rate: float) -> None:
    delays = []
    for seed in range(20):
        at = firings_s(
            BurstSettings(threshold=8.0), arrivals(np.random.default_rng(seed), (60, rate), (30, 1.5 * rate))
        )
        at = at[at > 60]
        assert at.size == 1
        delays.append(at[0] - 60)
    # CUSUM climbs by rate * (1.5 ln 1.5 - .5) nats a second.
    assert np.median(delays) == pytest.approx(8.0 / (rate * (1.5 * math.log(1.5) - 0.5)), rel=0.35, abs=2 * TICK_S)


def test_the_threshold_sets_the_time_between_false_alarms() -> None:
    ticks = arrivals(np.random.default_rng(1), (3000, 100))
    counts = [firings_s(BurstSettings(threshold=h), ticks).size for h in (4.0, 6.0, 8.0, 12.0)]
    assert counts[0] > counts[1] > counts[2] > counts[3]
    assert counts[3] <= 2


def test_nothing_is_found_before_anything_is_normal() -> None:
    ticks = arrivals(np.random.default_rng(2), (5, 10), (5, 1000), (60, 10))
    assert firings_s(BurstSettings(least_s=10.0), ticks).size == 0


def test_a_burst_is_over_when_the_rate_is_back_and_the_next_one_is_found() -> None:
    ticks = arrivals(np.random.default_rng(3), (60, 100), (20, 300), (60, 100), (20, 300), (30, 100))
    at = firings_s(BurstSettings(calm_s=2.0), ticks)
    assert at == pytest.approx([60, 140], abs=0.3)


def test_a_burst_that_does_not_end_is_normal_after_a_while() -> None:
    ticks = arrivals(np.random.default_rng(4), (60, 100), (200, 300), (20, 900))
    state = new_burst_state(BurstSettings(normal_after_s=30.0))
    found = np.zeros(ticks.size, np.bool_)
    look_at_all(state, ticks, found)
    at = (np.flatnonzero(found) + 1) * TICK_S
    assert at == pytest.approx([60, 260], abs=0.3)  # what comes on top of the new normal is a burst again


def test_what_is_normal_stays_while_a_burst_is_on() -> None:
    state = new_burst_state(BurstSettings())
    look_at_all(state, arrivals(np.random.default_rng(5), (60, 100), (20, 400)), np.zeros(8000, np.bool_))
    assert state.counts[burst.ACTIVE] > 0
    assert state.sums[burst.RATE] / TICK_S == pytest.approx(100, rel=0.1)
    assert state.sums[burst.FAST] / TICK_S == pytest.approx(400, rel=0.15)


def fed(state: BurstState, p99_ms: npt.NDArray[np.float64]) -> list[int]:
    return [i for i, value in enumerate(p99_ms) if look(state, 1.0, value)]


def test_a_tail_above_its_moving_average_is_found() -> None:
    rng = np.random.default_rng(6)
    calm = rng.normal(50.0, 2.0, 6000)
    state = new_burst_state(BurstSettings(p99_sigmas=6.0))
    assert fed(state, calm) == []
    assert state.sums[burst.P99_MEAN] == pytest.approx(50.0, abs=0.5)
    assert math.sqrt(state.sums[burst.P99_VAR]) == pytest.approx(2.0, rel=0.15)
    assert fed(state, np.array([60.0, 61.0, 61.5, 70.0, 80.0])) == [3]  # above 50 + 6 * 2, once


def test_the_score_is_one_at_the_threshold() -> None:
    state = new_burst_state(BurstSettings(p99_sigmas=5.0))
    fed(state, np.random.default_rng(7).normal(50.0, 2.0, 6000))
    mean, spread = state.sums[burst.P99_MEAN], math.sqrt(state.sums[burst.P99_VAR])
    look(state, 1.0, mean + 2.5 * spread)
    assert state.sums[burst.SCORE] == pytest.approx(0.5, rel=0.05)


def test_ticks_without_a_tail_change_nothing_of_it() -> None:
    state = new_burst_state(BurstSettings())
    fed(state, np.full(3000, 50.0))
    before = state.sums[burst.P99_MEAN], state.sums[burst.P99_VAR]
    assert fed(state, np.full(1000, math.nan)) == []
    assert (state.sums[burst.P99_MEAN], state.sums[burst.P99_VAR]) == before
    assert fed(state, np.array([50.5, 80.0])) == [1]  # a tail that never varied is not a burst by luck


def test_a_silent_node_has_no_bursts() -> None:
    assert firings_s(BurstSettings(), np.zeros(20_000, np.int64)).size == 0


@pytest.mark.parametrize(
    "changes", [{"factor": 1.0}, {"threshold": 0.0}, {"tick_s": math.nan}, {"least_s": -1.0}, {"calm_s": math.inf}]
)
def test_settings_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"burst detector: {next(iter(changes))}"):
        BurstSettings(**changes)
