"""Windows between readings: they are what happened, and what cannot be is refused and counted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl import latency
from helm_rl.metrics import SHED_FACTOR, p99_ms
from helm_rl.observation import OBSERVATION_NAMES, ObservationBuilder
from helm_rl.runtime.counters import Cause, Counters, Latencies
from helm_rl.runtime.meter import Meter
from tests.helm_rl.runtime.feeds import EDGES_MS, SECOND, histogram, steady

SLO_MS = 50.0


def meter_at(*readings: Counters, interval_s: float = 1.0) -> Meter:
    """Return a meter that has taken these readings, one a second."""
    meter = Meter(SLO_MS, interval_s)
    for k, one in enumerate(readings):
        assert meter.take(one, k * SECOND) is (Cause.BASELINE if k == 0 else None)
    return meter


def test_a_window_is_the_difference_of_two_readings() -> None:
    window = meter_at(steady(3), steady(4)).window(0.5, 0.6, 0.25)
    assert (window.start_ns, window.end_ns) == (0, SECOND)
    assert (window.arrivals, window.returning, window.completed, window.slow, window.shed) == (100, 40, 100, 0, 0)
    assert (window.history_tokens, window.history_tokens_hit) == (50_000, 30_000)
    assert (window.rows, window.rows_hit) == (8_000.0, 6_000.0)
    assert (window.link_busy_ns, window.compute_busy_ns) == (SECOND // 4, SECOND // 2)
    assert (window.queue, window.queue_bound, window.backlog_pages, window.pages) == (4, 512, 8, 256)
    assert (window.alpha, window.target, window.burst_score) == (0.5, 0.6, 0.25)
    assert (window.emb_margin_ms, window.kv_margin_ms, window.kv_margin_link_ms) == (0.1, 0.2, 0.05)
    assert window.p99_ms == pytest.approx(20.0, rel=0.011)
    assert window.latency_ms_sum == pytest.approx(2_000.0, rel=0.01)
    assert window.log_latency_sum == pytest.approx(100 * math.log(20 / SLO_MS), rel=0.01)
    assert window.tail_cost_sum == pytest.approx(100 * (20 / SLO_MS) ** 4, rel=0.03)


def test_windows_follow_each_other_and_none_counts_twice() -> None:
    meter = meter_at(steady(0), steady(1))
    assert meter.window(0.5, 0.5, 0.0).arrivals == 100
    for k in (2, 3, 4):
        assert meter.take(steady(k), k * SECOND) is None
    window = meter.window(0.5, 0.5, 0.0)
    assert (window.arrivals, window.completed, window.start_ns, window.end_ns) == (300, 300, SECOND, 4 * SECOND)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(0.5, 400.0), min_size=1, max_size=60), min_size=1, max_size=6))
def test_latencies_are_those_of_the_simulators_own_recorder(windows: list[list[float]]) -> None:
    """One by one through `complete`, and as differences of a histogram: the same sums, and the same P99."""
    total = sum(map(len, windows))
    state = latency.new_latency_state(
        np.full(2, SLO_MS * 1e6), np.zeros(total, np.int32), np.full(total, np.nan, np.float32)
    )
    meter, seen = meter_at(Counters(0.0, latency=histogram())), []
    for k, took_ms in enumerate(windows, 1):
        for one in took_ms:
            latency.complete(state, len(seen), one)
            seen.append(one)
        assert meter.take(Counters(float(len(seen)), latency=histogram(*seen)), k * SECOND) is None
        window = meter.window(0.5, 0.5, 0.0)
        assert window.completed == len(took_ms) == state.window[latency.COMPLETED]
        assert window.latency_ms_sum == pytest.approx(state.window[latency.MS_SUM], rel=0.006)
        assert window.tail_cost_sum == pytest.approx(state.window[latency.TAIL_SUM], rel=0.025)
        assert window.p99_ms == pytest.approx(latency.sketch_p99_ms(state), rel=1e-9)
        assert abs(window.slow - state.window[latency.SLOW]) <= sum(abs(one / SLO_MS - 1) < 0.011 for one in took_ms)
        latency.start_window(state)
    if len(windows) == 1:
        assert window.p99_ms == pytest.approx(p99_ms(np.array(windows[0])), rel=0.011)


def test_the_observation_is_that_of_the_same_windows() -> None:
    meter, builder = meter_at(steady(0), steady(1)), ObservationBuilder(SLO_MS)
    x = dict(zip(OBSERVATION_NAMES, builder.update(meter.window(0.5, 0.5, 0.5)), strict=True))
    expected = {
        "hot_user_ratio": 0.4,
        "kv_hit_rate": 0.6,
        "emb_hit_rate": 0.75,
        "mean_history": math.log1p(500) / math.log1p(32768),
        "slo_violation_rate": 0.0,
        "alpha": 0.5,
        "rate_fast_slow": 0.0,
        "link_util": 0.25,
        "compute_util": 0.5,
        "link_demand": 2.5 / SLO_MS,
        "compute_demand": 5.0 / SLO_MS,
        "queue": 4 / 512,
        "emb_margin": math.tanh(100 * 0.1 / SLO_MS),
        "kv_margin": math.tanh(100 * 0.2 / SLO_MS),
        "backlog": 8 / 256,
        "burst_score": 0.25,
    }
    assert {name: float(x[name]) for name in expected} == pytest.approx(expected, abs=1e-6)
    assert x["p99_over_slo"] == pytest.approx(20 / SLO_MS / 4, rel=0.011)


def test_what_is_shed_counts_as_slow_and_completed_at_a_hundred_times_the_slo() -> None:
    window = meter_at(steady(0), steady(1, shed=10.0, arrivals=110.0)).window(0.5, 0.5, 0.0)
    assert (window.arrivals, window.completed, window.slow, window.shed) == (110, 110, 10, 10)
    assert window.latency_ms_sum == pytest.approx(2_000 + 10 * SHED_FACTOR * SLO_MS, rel=0.01)
    assert window.p99_ms == pytest.approx(SHED_FACTOR * SLO_MS, rel=0.011)


def test_a_coarse_histogram_is_spread_within_its_buckets() -> None:
    """Of 100 requests between 40 and 80 ms, 50 ms lie at a third on a logarithmic scale."""
    edges = np.array([40.0, 80.0, math.inf])
    before = Counters(0.0, latency=Latencies(edges, np.zeros(3)))
    after = Counters(100.0, latency=Latencies(edges, np.array([0.0, 100.0, 0.0])))
    window = meter_at(before, after).window(0.5, 0.5, 0.0)
    assert window.slow == pytest.approx(100 * math.log(80 / 50) / math.log(2), abs=2)
    assert window.p99_ms == pytest.approx(80.0, rel=0.03)


def test_beyond_the_last_edge_a_latency_counts_at_that_edge() -> None:
    edges = np.array([40.0, 80.0, math.inf])
    before = Counters(0.0, latency=Latencies(edges, np.zeros(3)))
    after = Counters(9.0, latency=Latencies(edges, np.array([0.0, 0.0, 9.0])))
    window = meter_at(before, after).window(0.5, 0.5, 0.0)
    assert (window.slow, window.p99_ms) == (9, pytest.approx(80.0, rel=0.011))


def test_a_server_without_a_histogram_may_give_its_own_figures() -> None:
    plain: dict[str, Any] = {"latency": None, "p99_ms": 42.0}
    before = steady(0, completed=0.0, slow=0.0, **plain)
    meter = meter_at(before, steady(1, completed=90.0, slow=9.0, **plain))
    assert meter.p99_ms() == 42.0
    window = meter.window(0.5, 0.5, 0.0)
    assert (window.completed, window.slow, window.p99_ms) == (90, 9, 42.0)


def test_nothing_is_found_that_was_not_asked_for() -> None:
    """Of two counters that are not read at one instant, the one of hits may be ahead."""
    after = steady(1, returning=101.0, history_tokens_hit=50_001.0, rows_hit=8_001.0)
    window = meter_at(steady(0), after).window(0.5, 0.5, 0.0)
    assert (window.returning, window.history_tokens_hit, window.rows_hit) == (100, 50_000, 8_000.0)


def test_a_counter_that_fell_while_it_was_not_given_counts_nothing() -> None:
    meter = meter_at(steady(1), steady(2, rows=None, history_tokens=None), steady(3, rows=5.0, history_tokens=7.0))
    window = meter.window(0.5, 0.5, 0.0)
    assert (window.arrivals, window.rows, window.history_tokens) == (200, 0.0, 0)


def test_the_servers_clock_tells_how_long_a_window_was() -> None:
    """An answer that was under way for long is not taken for a slow second."""
    meter = Meter(SLO_MS, 1.0)
    meter.take(steady(3), 0)
    meter.take(steady(4), round(1.4 * SECOND))
    window = meter.window(0.5, 0.5, 0.0)
    assert window.end_ns - window.start_ns == SECOND


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"arrivals": math.nan}, Cause.NOT_FINITE),
        ({"rows": -1.0}, Cause.ABSURD),
        ({"arrivals": 1e12}, Cause.ABSURD),
        ({"history_tokens": 3.0}, Cause.BACKWARDS),
        ({"clock_s": 3.0}, Cause.STALE),
    ],
)
def test_one_bad_reading_is_refused_and_the_next_good_one_goes_on(changes: dict[str, float], cause: Cause) -> None:
    meter = meter_at(*map(steady, range(4)))
    meter.window(0.5, 0.5, 0.0)
    assert meter.take(steady(4, **changes), 4 * SECOND) is cause
    assert meter.take(steady(5), 5 * SECOND) is None
    assert meter.window(0.5, 0.5, 0.0).arrivals == 200
    assert meter.restarts == 0


def test_a_restarted_server_is_believed_at_its_second_reading() -> None:
    meter = meter_at(*map(steady, range(4)))
    assert meter.take(steady(0), 4 * SECOND) is Cause.BACKWARDS
    assert meter.take(steady(1), 5 * SECOND) is None
    assert meter.restarts == 1
    window = meter.window(0.5, 0.5, 0.0)
    assert (window.arrivals, window.completed) == (100, 100)


def test_a_server_whose_counters_leap_for_good_is_believed_at_its_second_reading() -> None:
    meter = meter_at(steady(0), steady(1))
    leapt = [steady(k, arrivals=1e12 + 100.0 * k) for k in (2, 3)]
    assert meter.take(leapt[0], 2 * SECOND) is Cause.ABSURD
    assert meter.take(leapt[1], 3 * SECOND) is None
    assert meter.window(0.5, 0.5, 0.0).arrivals == 100


def test_after_a_long_gap_measuring_begins_anew() -> None:
    meter = meter_at(steady(0), steady(1))
    assert meter.take(steady(12), 12 * SECOND) is Cause.BASELINE
    assert meter.take(steady(13), 13 * SECOND) is None
    assert meter.window(0.5, 0.5, 0.0).arrivals == 100
    assert meter.restarts == 1


def test_detectors_see_no_p99_before_a_thousand_requests() -> None:
    meter = meter_at(*map(steady, range(10)))
    assert math.isnan(meter.p99_ms())
    meter.take(steady(10), 10 * SECOND)
    assert meter.p99_ms() == pytest.approx(20.0, rel=0.011)


def test_edges_of_bins_fill_their_own_bin_alone() -> None:
    state = latency.new_latency_state(np.full(2, 1e8), np.zeros(0, np.int32), np.zeros(0, np.float32))
    counts = np.arange(1.0, latency.SKETCH_BINS + 1)
    latency.complete_counts(state, EDGES_MS, counts)
    assert np.array_equal(state.sketch, counts)
    assert state.window[latency.COMPLETED] == counts.sum()
