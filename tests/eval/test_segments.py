from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from eval.segments import Run, flat_distance, gap, measured_part, reduce_replay
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.eval.fakes import BASE_MS, CURVATURE, FakeServing, small_scenario


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(small_scenario(), seed=5)


def run_of(alpha: np.ndarray, time_s: np.ndarray) -> Run:
    fields = {field.name: np.empty(0) if field.type == "Floats" else 0 for field in dataclasses.fields(Run)}
    return Run(**{**fields, "time_s": time_s, "alpha": alpha})  # type: ignore[arg-type]


def test_spans_cover_the_measured_part_and_are_halved_in_time(trace: Trace) -> None:
    part = measured_part(trace)
    assert [(span.label, span.start_ns, span.end_ns) for span in part.spans] == [
        ("base", 0, 40_000_000_000),
        ("burst", 40_000_000_000, 80_000_000_000),
        ("base", 80_000_000_000, 120_000_000_000),
    ]
    assert part.first == int((trace.arrival_ns < 0).sum())
    assert part.spans[0].first == part.first
    assert part.spans[-1].last == len(trace)
    assert part.requests == len(trace) - part.first
    burst = part.spans[1]
    assert trace.arrival_ns[burst.middle - 1] < 60_000_000_000 <= trace.arrival_ns[burst.middle]
    assert part.seconds == 120.0
    assert trace.arrival_ns[part.opening - 1] < 30_000_000_000 <= trace.arrival_ns[part.opening]


def test_a_short_trace_is_refused_with_its_count(trace: Trace) -> None:
    with pytest.raises(UserError, match=r"requests arrive at or after .* at least 1000"):
        measured_part(trace.between(-10_000_000_000, 3_000_000_000))


def test_sparse_segments_are_left_out_and_counted() -> None:
    trace = generate(small_scenario(seconds=1200.0, load={"rate": 2, "users": 100}), seed=1)
    with pytest.raises(UserError, match="no segment holds 100 requests in each half"):
        measured_part(trace)


def test_replay_is_reduced_to_the_known_figures(trace: Trace) -> None:
    scenario = small_scenario()
    part = measured_part(trace)
    replay = FakeServing()(scenario, trace, StaticAlpha(0.6), alpha0=0.6, seed=0)
    run = reduce_replay(replay, trace, part, scenario.slo_ms)
    at_best, off = 2 * BASE_MS, 2 * BASE_MS * np.exp(CURVATURE * 0.16)
    np.testing.assert_allclose(run.segment_p99_ms, [at_best, off, at_best], rtol=1e-5)
    np.testing.assert_allclose(run.settled_p99_ms, [at_best, off, at_best], rtol=1e-5)
    assert run.p50_ms == pytest.approx(BASE_MS, rel=1e-5)
    assert run.p99_ms == pytest.approx(off, rel=1e-5)
    # Twelve windows of 10 s, four of them in the burst.
    assert run.windowed_p99_ms == pytest.approx((8 * at_best + 4 * off) / 12, rel=1e-5)
    assert run.window_s.tolist() == list(range(5, 120, 10))
    assert run.opening_p99_ms == pytest.approx(at_best, rel=1e-5)
    slow = (trace.arrival_ns >= 40_000_000_000) & (trace.arrival_ns < 80_000_000_000)
    slow &= np.arange(len(trace)) % 20 == 0  # the burst's slow requests take 198 ms, all others under 100
    assert run.slo == pytest.approx(1 - slow.sum() / part.requests)
    assert run.throughput_per_s == pytest.approx(part.requests / 120)
    assert run.time_s[0] == -9.0
    assert run.time_s[-1] == 120.0


def test_warm_up_does_not_count_and_shed_requests_do(trace: Trace) -> None:
    scenario = small_scenario()
    part = measured_part(trace)
    replay = FakeServing(shed=300)(scenario, trace, StaticAlpha(0.6), alpha0=0.6, seed=0)
    latency = replay.latency_ms.copy()
    latency[: part.first] = 1e6
    run = reduce_replay(replace(replay, latency_ms=latency), trace, part, scenario.slo_ms)
    assert run.shed == 300
    assert run.p99_ms == 100 * scenario.slo_ms
    assert run.throughput_per_s == pytest.approx((part.requests - 300) / 120)


def test_a_request_that_never_ends_is_an_error_not_a_fast_one(trace: Trace) -> None:
    scenario = small_scenario()
    replay = FakeServing()(scenario, trace, StaticAlpha(0.6), alpha0=0.6, seed=0)
    replay.latency_ms[-1] = np.nan
    with pytest.raises(RuntimeError, match="1 measured requests"):
        reduce_replay(replay, trace, measured_part(trace), scenario.slo_ms)


def test_flat_distance_is_zero_inside_and_to_the_nearest_edge_outside() -> None:
    flat = ((0.2, 0.3), (0.5, 0.5))
    np.testing.assert_allclose(
        flat_distance(np.array([0.1, 0.2, 0.25, 0.35, 0.45, 0.5, 0.9]), flat),
        [0.1, 0.0, 0.0, 0.05, 0.05, 0.0, 0.4],
        atol=1e-12,
    )


def test_gap_takes_the_intervals_that_end_in_the_window() -> None:
    run = run_of(np.array([0.1, 0.2, 0.3, 0.4]), np.array([1.0, 2.0, 3.0, 4.0]))
    found = gap(run, [(1_000_000_000, 3_000_000_000)], [0.5], [((0.28, 0.5),)])
    assert found.intervals == 2
    assert found.ratio == pytest.approx((0.3 + 0.2) / 2)
    assert found.flat == pytest.approx((0.08 + 0.0) / 2)
    # Two windows with their own best alphas are averaged over all their intervals alike.
    both = gap(run, [(0, 1_000_000_000), (1_000_000_000, 4_000_000_000)], [0.1, 0.4], [((0.1, 0.1),)] * 2)
    assert both.ratio == pytest.approx((0.0 + 0.2 + 0.1 + 0.0) / 4)
    assert np.isnan(gap(run, [(9_000_000_000, 10_000_000_000)], [0.1], [((0.1, 0.1),)]).ratio)
