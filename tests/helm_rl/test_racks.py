"""Summaries of nodes: they add up in any order to what one place would have measured, and a sample knows its error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl import latency, racks
from helm_rl.metrics import WindowStats
from helm_rl.observation import OBSERVATION_NAMES, SIZE, ObservationBuilder
from helm_rl.racks import ClusterObserver, Summary, add, add_message, encode, new_summary, values_of

SLO_MS = 100.0
SECOND = 1_000_000_000
_P99 = OBSERVATION_NAMES.index("p99_over_slo")


def window(rng: np.random.Generator, at: int = 0, rate: float = 60.0, **given: float) -> WindowStats:
    arrivals = int(rng.poisson(rate)) + 1
    tokens = int(rng.integers(1, 2_000)) * arrivals
    fields: dict[str, float] = {
        "start_ns": at * SECOND,
        "end_ns": (at + 1) * SECOND,
        "arrivals": arrivals,
        "returning": int(rng.binomial(arrivals, 0.4)),
        "completed": arrivals,
        "slow": int(rng.binomial(arrivals, 0.02)),
        "shed": 0,
        "history_tokens": tokens,
        "history_tokens_hit": int(rng.binomial(tokens, 0.3)),
        "rows": 32.0 * tokens,
        "rows_hit": 30.0 * tokens,
        "log_latency_sum": float(rng.normal()),
        "tail_cost_sum": float(rng.uniform(0, 5)),
        "latency_ms_sum": 50.0 * arrivals,
        "p99_ms": math.nan,
        "link_busy_ns": int(rng.integers(SECOND)),
        "compute_busy_ns": int(rng.integers(SECOND)),
        "queue": int(rng.integers(512)),
        "queue_bound": 512,
        "alpha": int(rng.integers(1, 6144)) / 6144,
        "target": float(rng.uniform(0.1, 0.9)),
        "backlog_pages": int(rng.integers(100)),
        "moved_pages": int(rng.integers(100)),
        "pages": 6144,
        "emb_margin_ms": float(rng.uniform(0, 0.5)),
        "kv_margin_ms": float(rng.uniform(0, 0.5)),
        "burst_score": float(rng.uniform(0, 2)),
    }
    return WindowStats(**(fields | given))  # type: ignore[arg-type]


def latencies(rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.exp(rng.normal(3.5, 0.8, count)).astype(np.float32)


def summary(
    windows: Sequence[WindowStats], latency_ms: Sequence[np.ndarray[tuple[int], np.dtype[np.float32]]]
) -> Summary:
    found = Summary(np.stack([values_of(one) for one in windows]), np.zeros((len(windows), latency.SKETCH_BINS)))
    group = np.repeat(np.arange(len(windows)), [one.size for one in latency_ms])
    racks.count_latencies(found.latencies, group, np.concatenate(latency_ms))
    return found


def drawn(
    seed: int, nodes: int, at: int = 0
) -> tuple[list[WindowStats], list[np.ndarray[tuple[int], np.dtype[np.float32]]]]:
    rng = np.random.default_rng([seed, at])
    windows = [window(rng, at) for _ in range(nodes)]
    return windows, [latencies(rng, one.completed) for one in windows]


def total_of(groups: Sequence[Summary]) -> Summary:
    total = new_summary()
    for one in groups:
        add(total, 0, one)
    return total


def part(whole: Summary, nodes: Sequence[int]) -> Summary:
    return Summary(whole.values[list(nodes)], whole.latencies[list(nodes)])


def assert_same(one: Summary, other: Summary) -> None:
    """Whole numbers are the same to the last; sums of others but for rounding."""
    whole = one.values == np.rint(one.values)
    np.testing.assert_array_equal(one.values[whole], other.values[whole])
    np.testing.assert_allclose(one.values, other.values, rtol=1e-12, atol=1e-9)
    np.testing.assert_array_equal(one.latencies, other.latencies)


# Adding up


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 12), data=st.data())
def test_any_order_and_any_grouping_come_to_the_same(seed: int, nodes: int, data: st.DataObject) -> None:
    whole = summary(*drawn(seed, nodes))
    direct = total_of([whole])
    order = data.draw(st.permutations(range(nodes)))
    cuts = sorted(data.draw(st.sets(st.integers(1, nodes - 1)))) if nodes > 1 else []
    groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, nodes], strict=True)]
    through = total_of([total_of([part(whole, [k]) for k in group]) for group in groups])
    assert_same(direct, through)
    received = new_summary(len(groups))
    for k, group in enumerate(groups):
        for node in group:
            add_message(received, k, encode(whole, node))
    centre = new_summary()
    for k in range(len(groups)):
        add_message(centre, 0, encode(received, k))
    assert_same(direct, centre)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 12))
def test_the_sum_is_what_one_place_would_have_measured(seed: int, nodes: int) -> None:
    windows, latency_ms = drawn(seed, nodes)
    total = total_of([summary(windows, latency_ms)])
    mean = racks.mean_window(total.values[0], 0.0)
    for name in ("arrivals", "returning", "completed", "slow", "history_tokens", "history_tokens_hit", "link_busy_ns"):
        assert getattr(mean, name) * nodes == pytest.approx(sum(getattr(one, name) for one in windows), rel=1e-14)
    assert mean.alpha == pytest.approx(np.mean([one.alpha for one in windows]))
    assert mean.burst_score == max(one.burst_score for one in windows)
    assert (mean.start_ns, mean.end_ns, mean.pages, mean.queue_bound) == (0, SECOND, 6144, 512)
    everything = np.sort(np.concatenate(latency_ms))
    assert total.latencies.sum() == everything.size
    exact = float(everything[-math.ceil(0.01 * everything.size)])  # a hundredth of all took at least as long
    found = float(latency.sketches_p99_ms(total.latencies)[0])
    assert exact * (1 - 1e-9) <= found <= exact * math.exp(latency.SKETCH_WIDTH) * (1 + 1e-9)


def test_a_sketch_of_several_rows_has_the_p99_of_each() -> None:
    rng = np.random.default_rng(3)
    rows = np.zeros((3, latency.SKETCH_BINS))
    expected = []
    for k, count in enumerate((1, 250)):
        state = latency.new_latency_state(np.array([1e8, 1e8]), np.zeros(count, np.int32), np.zeros(count, np.float32))
        for request, one in enumerate(latencies(rng, count)):
            latency.complete(state, request, float(one))
        rows[k] = state.sketch
        expected.append(latency.sketch_p99_ms(state))
    assert latency.sketches_p99_ms(rows).tolist() == pytest.approx([*expected, math.nan], nan_ok=True)


# Messages


def test_a_message_holds_only_bins_that_are_not_empty() -> None:
    whole = summary(*drawn(1, 2))
    occupied = np.count_nonzero(whole.latencies[0])
    assert 20 < occupied < 80
    assert len(encode(whole, 0)) == 8 + 8 * racks.WIDTH + 6 * occupied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: b"", "not a summary of this version: 0 bytes"),
        (lambda m: b"HRT2" + m[4:], "not a summary of this version: .* begin with b'HRT2'"),
        (lambda m: m[:-1], "bins has not"),
        (lambda m: m[:4] + b"\xff\xff\xff\xff" + m[8:], "a summary of 4294967295 bins has not"),
        (lambda m: m[:8] + np.array([np.nan]).tobytes() + m[16:], "numbers that no node can have measured"),
        (lambda m: m[:-6] + b"\xff\xff" + m[-4:], "numbers that no node can have measured"),
        (lambda m: m[:-6] + m[-12:-10] + m[-4:], "numbers that no node can have measured"),
        # bins a, b, a: of the first the requests would be lost
        (lambda m: m[:-6] + m[-18:-16] + m[-4:], "numbers that no node can have measured"),
    ],
)
def test_a_broken_message_is_refused_and_adds_nothing(change, message: str) -> None:  # type: ignore[no-untyped-def]
    whole = summary(*drawn(1, 1))
    total = total_of([whole])
    with pytest.raises(ValueError, match=message):
        add_message(total, 0, change(encode(whole)))
    assert_same(total, total_of([whole]))


@pytest.mark.parametrize(
    "changes",
    [
        {"arrivals": -1.0},
        {"completed": 1e300},
        {"pages": 0.0},
        {"queue_bound": 0.0},
        {"rows": math.inf},
        {racks.NODES: 0.0},
        {racks.NODES: 1.5},
        {racks.EMB_PAGES: 6145.0},
        {racks.TARGET_PAGES: -1.0},
        {racks.END_NS: -1.0},  # it ends before it begins
        {racks.END_NS: 1e300},
        {racks.BURST_SCORE: -1.0},
    ],
)
def test_what_no_node_can_have_measured_adds_nothing(changes: dict[str | int, float]) -> None:
    whole = summary(*drawn(1, 1))
    total = total_of([whole])
    spoilt = Summary(whole.values.copy(), whole.latencies)
    for name, value in changes.items():
        spoilt.values[0, name if isinstance(name, int) else racks._COUNTERS.index(name)] = value
    with pytest.raises(ValueError, match="numbers that no node can have measured"):
        add_message(total, 0, encode(spoilt))
    assert_same(total, total_of([whole]))


@pytest.mark.parametrize("requests", [2.0**32, 0.5, -1.0, math.nan])
def test_no_message_loses_requests(requests: float) -> None:
    whole = summary(*drawn(1, 1))
    whole.latencies[0, 7] = 2.0**32 - 1
    total = new_summary()
    add_message(total, 0, encode(whole))
    assert_same(total, total_of([whole]))
    whole.latencies[0, 7] = requests
    with pytest.raises(ValueError, match="holds no number of requests"):
        encode(whole)


def test_a_group_without_nodes_is_no_message() -> None:
    with pytest.raises(ValueError, match="no node can have measured"):
        add_message(new_summary(), 0, encode(new_summary()))


# The observation


def test_one_node_observes_what_a_node_does_by_itself() -> None:
    """The P99 too: the node's own sketch decays by what completed in the window before."""
    observer, builder = ClusterObserver(SLO_MS), ObservationBuilder(SLO_MS)
    n = 10_000
    state = latency.new_latency_state(np.array([1e8, 1e8]), np.zeros(n, np.int32), np.zeros(n, np.float32))
    request = 0
    for at in range(40):
        (one,), (latency_ms,) = drawn(5, 1, at)
        latency.start_window(state)
        for value in latency_ms:
            latency.complete(state, request, float(value))
            request += 1
        expected = builder.update(
            WindowStats(
                **{name: getattr(one, name) for name in one.__slots__} | {"p99_ms": latency.sketch_p99_ms(state)}
            )
        )
        np.testing.assert_allclose(observer.update(summary([one], [latency_ms])), expected, rtol=1e-6)
    assert 0.05 < expected[_P99] < 1.0


def test_many_nodes_alike_are_observed_as_one() -> None:
    one, many = ClusterObserver(SLO_MS), ClusterObserver(SLO_MS, 3)
    for at in range(5):
        (window,), (latency_ms,) = drawn(6, 1, at)
        expected = one.update(summary([window], [latency_ms]))
        whole = summary([window] * 6, [latency_ms] * 6)
        grouped = new_summary(3)
        for k in range(3):
            add(grouped, k, part(whole, [2 * k, 2 * k + 1]))
        np.testing.assert_allclose(many.update(grouped), expected, rtol=1e-6)
    sketch = latency.SKETCH_WIDTH * expected[_P99]
    np.testing.assert_allclose(many.bound(0.5), np.where(np.arange(SIZE) == _P99, sketch, 0.0), atol=1e-6)


def test_a_rack_that_reports_nothing_has_no_part() -> None:
    (one, other), latency_ms = drawn(7, 2)
    observer, alone = ClusterObserver(SLO_MS, 3), ClusterObserver(SLO_MS)
    grouped = new_summary(3)
    whole = summary([one, other], latency_ms)
    add(grouped, 0, part(whole, [0]))
    np.testing.assert_allclose(observer.update(grouped), alone.update(part(whole, [0])))
    assert np.isnan(observer.bound(0.5)).all()  # one rack tells nothing of how racks differ
    add(grouped, 2, part(whole, [1]))
    observer.update(grouped)
    assert np.isfinite(observer.bound(0.5)).all()
    with pytest.raises(ValueError, match="no node reported"):
        observer.update(new_summary(3))


def test_the_bound_holds_about_as_often_as_it_says() -> None:
    """16 racks of 8, of which 2 nodes report: rates and shares of a sample, held against all 128 nodes."""
    rng = np.random.default_rng(11)
    held = []
    for _ in range(150):
        rates = rng.gamma(20.0, 3.0, 128)
        windows = [window(rng, rate=float(rate)) for rate in rates]
        whole = summary(windows, [latencies(rng, 20) for _ in windows])
        full = ClusterObserver(SLO_MS).update(whole)
        sampled = ClusterObserver(SLO_MS, 16)
        grouped = new_summary(16)
        for k in range(16):
            add(grouped, k, part(whole, (8 * k + rng.choice(8, 2, replace=False)).tolist()))
        off = np.abs(sampled.update(grouped) - full)
        bound = sampled.bound(0.25)
        checked = [OBSERVATION_NAMES.index(name) for name in ("hot_user_ratio", "link_util", "queue", "alpha")]
        assert (bound[checked] < 0.3).all()
        held.append((off <= bound)[checked])
    assert 0.90 <= np.mean(held) <= 0.99
    assert np.count_nonzero(sampled.bound(1.0)) == 1  # of the P99 the sketch's own


@pytest.mark.parametrize(("freedom", "error"), [(1, 0.12), (2, 0.01), (3, 2e-3), (15, 1e-4), (127, 1e-4)])
def test_the_quantile_of_students_t(freedom: int, error: float) -> None:
    assert racks._t_quantile(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=error)
    assert SIZE == 17
