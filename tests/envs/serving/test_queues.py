"""The queues against queueing theory and against examples worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.serving import latency, queues
from envs.serving.queues import FOREVER_NS, QueueState
from helm_rl.metrics import SHED_FACTOR, p99_ms

MS = 1_000_000
SLO_MS = 100.0

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass
class Params:
    """Queues whose link takes 1 ns a byte and whose accelerator takes 1 ns a FLOP, unless said otherwise."""

    bound: int = 1_000_000
    max_batch: int = 1
    batch_ms: float = 0.0
    request_ms: float = 0.0
    slo_ms: float = SLO_MS
    background_share: float = 0.0
    piece_ms: float = 1.0
    weight: Sequence[float] = (1.0,)
    priority: Sequence[int] = (0,)


def new_queue(arrival_ns: Int64Array, tenant: Int64Array | None = None, **given: Any) -> QueueState:
    chosen = Params(**given)
    params = np.zeros(queues.N_PARAMS)
    params[queues.BATCH_NS] = chosen.batch_ms * MS
    params[queues.REQUEST_NS] = chosen.request_ms * MS
    params[queues.MAX_BATCH] = chosen.max_batch
    params[queues.QUEUE_BOUND] = chosen.bound
    params[queues.BACKGROUND_SHARE] = chosen.background_share
    params[queues.PIECE_NS] = chosen.piece_ms * MS
    n = arrival_ns.size
    measured = latency.new_latency_state(
        np.full(len(chosen.weight) + 1, chosen.slo_ms * MS),
        np.zeros(n, np.int32) if tenant is None else tenant.astype(np.int32),
        np.full(n, np.nan, np.float32),
    )
    weight, priority = np.array(chosen.weight, np.float64), np.array(chosen.priority, np.int64)
    return queues.new_queue_state(params, weight, priority, arrival_ns, measured)


@numba.njit  # not `kernel`: its disk cache would not see an edit of queues.py from here
def feed(queue: QueueState, link_ns: FloatArray, pcie_ns: FloatArray, work_ns: FloatArray, stops: Int64Array) -> int:
    """Serve all requests, the queues also being advanced at each of `stops`; return the sum of those present there."""
    present = 0
    k = 0
    arrival_ns = queue.arrival_ns
    for i in range(arrival_ns.size):
        while k < stops.size and stops[k] <= arrival_ns[i]:
            queues.advance(queue, stops[k])
            present += queue.clocks[queues.PRESENT]
            k += 1
        queues.advance(queue, arrival_ns[i])
        if queues.make_place(queue, i, arrival_ns[i]):
            queues.admit(queue, i, arrival_ns[i], link_ns[i], pcie_ns[i], work_ns[i])
        else:
            latency.shed(queue.measured, i)
    queues.advance(queue, FOREVER_NS)
    return present


def serve(
    arrival_ms: FloatArray | list[float],
    link_ms: FloatArray | list[float] | float = 0.0,
    work_ms: FloatArray | list[float] | float = 0.0,
    *,
    pcie_ms: FloatArray | list[float] | float = 0.0,
    tenant: Int64Array | None = None,
    stops_ms: FloatArray | None = None,
    **params: Any,
) -> tuple[QueueState, FloatArray]:
    """Return the queues after all is served, and the latencies in ms."""
    arrival_ns = np.rint(np.array(arrival_ms) * MS).astype(np.int64)
    n = arrival_ns.size
    queue = new_queue(arrival_ns, tenant, **params)
    stops = np.zeros(0, np.int64) if stops_ms is None else np.rint(stops_ms * MS).astype(np.int64)
    link, pcie, work = (np.broadcast_to(ms, n) * float(MS) for ms in (link_ms, pcie_ms, work_ms))
    feed(queue, link, pcie, work, stops)
    return queue, queue.measured.latency_ms.astype(np.float64)


def poisson(n: int, rate_per_ms: float, seed: int = 0) -> FloatArray:
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate_per_ms, n))


@pytest.mark.parametrize("station", ["accelerator", "link"])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_constant_service_is_m_d_1(station: str, load: float) -> None:
    n = 1_000_000
    service = {"link_ms": 2.0} if station == "link" else {"work_ms": 2.0}
    queue, took = serve(poisson(n, load / 2.0), **service, bound=n)
    wait_ms = load / (2 * (1 - load)) * 2.0  # Pollaczek and Khinchine
    assert took.min() == pytest.approx(2.0, rel=1e-6)
    assert took.mean() - 2.0 == pytest.approx(wait_ms, rel=0.03)
    assert queue.measured.window[latency.COMPLETED] == n


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_exponential_work_is_m_m_1(load: float) -> None:
    n = 1_000_000
    work = np.random.default_rng(1).exponential(2.0, n)
    queue, took = serve(poisson(n, load / 2.0), 0.0, work, bound=n)
    mean_ms = 2.0 / (1 - load)
    assert took.mean() == pytest.approx(mean_ms, rel=0.03)
    # The time in the system is exponential too.
    assert p99_ms(took) == pytest.approx(mean_ms * math.log(100), rel=0.05)
    assert np.median(took) == pytest.approx(mean_ms * math.log(2), rel=0.03)
    busy_ms = queue.sums[queues.COMPUTE_BUSY] / MS
    assert busy_ms == pytest.approx(work.sum(), rel=1e-4)


def test_littles_law() -> None:
    n = 200_000
    arrival = poisson(n, 0.35, seed=3)
    work = np.random.default_rng(4).exponential(2.0, n)
    stops = np.random.default_rng(5).uniform(0, arrival[-1], 400_000)
    queue, took = serve(arrival, 0.5, work, bound=n, max_batch=4, batch_ms=0.5)
    stops = np.sort(stops)
    ns = np.rint(arrival * MS).astype(np.int64)
    watched = new_queue(ns, bound=n, max_batch=4, batch_ms=0.5)
    present = feed(watched, np.full(n, 0.5 * MS), np.zeros(n), work * MS, np.rint(stops * MS).astype(np.int64))
    assert np.array_equal(took, watched.measured.latency_ms)
    # Mean number present = rate of arrivals * mean time in the system.
    assert present / stops.size == pytest.approx(took.sum() / arrival[-1], rel=0.01)
    # The queue's own count, over all time instead of samples.
    assert queue.sums[queues.PRESENT_NS] == pytest.approx(took.sum() * MS, rel=1e-6)
    assert queue.sums[queues.LATENCY_NS] == pytest.approx(took.sum() * MS, rel=1e-6)


def test_first_come_first_served() -> None:
    rng = np.random.default_rng(6)
    n = 5_000
    arrival = poisson(n, 0.4, seed=7)
    queue, took = serve(arrival, rng.exponential(1.0, n), rng.exponential(2.0, n), bound=n, max_batch=3)
    ends = arrival + took
    assert (np.diff(ends) >= -1e-3).all()
    assert queue.clocks[queues.PRESENT] == 0


def test_a_request_alone_takes_link_batch_work_and_its_fixed_cost() -> None:
    _, took = serve([10.0], link_ms=3.0, work_ms=5.0, batch_ms=0.5, request_ms=2.0)
    assert took[0] == pytest.approx(3.0 + 0.5 + 5.0 + 2.0)


def test_batches_by_hand() -> None:
    # Link 1 ms each: ready at 1, 2, 3, 4, 5. At 1 the first runs alone until 1 + 1 + 2 = 4; then 2, 3 and 4 are ready
    # and two fit: until 4 + 1 + 4 = 9; then the last two until 14.
    _, took = serve([0.0, 0.0, 0.0, 0.0, 0.0], link_ms=1.0, work_ms=2.0, batch_ms=1.0, max_batch=2)
    assert took == pytest.approx([4.0, 9.0, 9.0, 14.0, 14.0])


def test_a_batch_waits_for_nobody() -> None:
    # The second is ready at 6 while the first runs from 5 to 15; it runs from 15.
    _, took = serve([0.0, 1.0], link_ms=[5.0, 1.0], work_ms=10.0, max_batch=8)
    assert took == pytest.approx([15.0, 24.0])


def test_a_batch_takes_along_who_comes_as_it_starts() -> None:
    # At 10 the first ends; the second has waited since 5 and the third comes: one batch until 14.
    _, took = serve([0.0, 5.0, 10.0], work_ms=[10.0, 2.0, 2.0], max_batch=8)
    assert took == pytest.approx([10.0, 9.0, 4.0])


def test_a_stall_of_a_second_shows_in_the_p99() -> None:
    """Latency runs from the scheduled arrival, not from when the request was taken."""
    work = np.full(1000, 0.1)
    work[500] = 1000.0
    _, took = serve(np.arange(1000) * 10.0, 0.0, work, max_batch=8)
    # 100 requests come during the stall, the k-th 1000 - 10 k ms before it ends. Rank 990 of 1000 is that of the 10th,
    # which is served in the second batch of 8 after it.
    assert p99_ms(took) == pytest.approx(900.0 + 2 * 0.8, rel=1e-3)
    assert np.count_nonzero(took > 500) == pytest.approx(50, abs=1)
    assert np.median(took) == pytest.approx(0.1, rel=1e-3)


def test_a_full_queue_sheds_and_shed_counts_as_100_slo_in_every_figure() -> None:
    # One runs, two wait, the other three are shed.
    queue, took = serve([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0.0, 50.0, bound=2)
    shed_ms = SHED_FACTOR * SLO_MS
    assert took == pytest.approx([50.0, 99.0, 148.0, shed_ms, shed_ms, shed_ms])
    window = queue.measured.window
    assert window[latency.SHED] == 3
    assert window[latency.COMPLETED] == 6
    assert window[latency.SLOW] == 4
    ratios = took / SLO_MS
    assert window[latency.LOG_SUM] == pytest.approx(np.log(ratios).sum())
    assert window[latency.EXCESS_SUM] == pytest.approx(0.48 + 3 * latency.EXCESS_CLIP)
    assert window[latency.MS_SUM] == pytest.approx(took.sum())
    assert latency.sketch_p99_ms(queue.measured) == pytest.approx(shed_ms, rel=0.011)
    assert p99_ms(took) == shed_ms


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bound=st.sampled_from([1, 2, 7]),
    max_batch=st.sampled_from([1, 2, 16]),
    load=st.floats(0.3, 5.0),
)
def test_the_queues_never_hold_more_than_it_has_places(seed: int, bound: int, max_batch: int, load: float) -> None:
    rng = np.random.default_rng(seed)
    n = 300
    arrival_ns = np.cumsum(rng.exponential(1.0 / load, n) * MS).astype(np.int64)
    queue = new_queue(arrival_ns, bound=bound, max_batch=max_batch)
    link, work = rng.exponential(0.5 * MS, n), rng.exponential(1.0 * MS, n)
    for i in range(n):
        queues.advance(queue, arrival_ns[i])
        if queues.make_place(queue, i, arrival_ns[i]):
            queues.admit(queue, i, arrival_ns[i], link[i], 0.0, work[i])
        else:
            latency.shed(queue.measured, i)
        assert queue.clocks[queues.BATCH] <= max_batch
        assert 0 <= queues.waiting(queue) <= bound
        assert queues.present(queue).size == queue.clocks[queues.PRESENT] < queue.free.size
    queues.advance(queue, FOREVER_NS)
    assert not np.isnan(queue.measured.latency_ms).any()
    assert queue.measured.window[latency.COMPLETED] == n


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), max_batch=st.sampled_from([1, 4]))
def test_when_the_clock_is_looked_at_changes_nothing(seed: int, max_batch: int) -> None:
    rng = np.random.default_rng(seed)
    n = 200
    # Whole ms: arrivals, ends and stops often fall together.
    arrival = np.cumsum(rng.integers(0, 4, n)).astype(np.float64)
    link, work = rng.integers(0, 3, n).astype(np.float64), rng.integers(1, 4, n).astype(np.float64)
    _, once = serve(arrival, link, work, bound=5, max_batch=max_batch)
    stops = np.sort(rng.integers(0, int(arrival[-1]) + 1, 300)).astype(np.float64)
    _, often = serve(arrival, link, work, bound=5, max_batch=max_batch, stops_ms=stops)
    assert np.array_equal(once, often)


def test_speeds_near_zero_saturate_instead_of_overflowing() -> None:
    queue, took = serve([0.0, 1.0, 2.0], link_ms=1e300, work_ms=1e300, max_batch=1)
    assert np.isfinite(took).all()
    assert (took > 1e12).all()  # 36 years
    assert np.isfinite(queue.measured.window).all()
    assert (queue.clocks[queues.LINK_END : queues.PCIE_FREE] >= 0).all()


def test_the_sketch_is_within_a_bin_of_the_exact_percentile() -> None:
    rng = np.random.default_rng(8)
    work = np.exp(rng.normal(3.0, 1.0, 20_000))
    queue, took = serve(np.arange(20_000) * 1e5, 0.0, work)
    exact = p99_ms(took)
    assert exact <= latency.sketch_p99_ms(queue.measured) * 1.0001
    assert latency.sketch_p99_ms(queue.measured) == pytest.approx(exact, rel=0.012)


def test_the_sketch_of_nothing_is_nan() -> None:
    assert math.isnan(latency.sketch_p99_ms(new_queue(np.zeros(1, np.int64)).measured))


@pytest.mark.parametrize(("work_ms", "sketch_ms"), [(1e-6, 0.0101005), (1e12, 0.01 * math.exp(16.0))])
def test_latencies_beyond_the_sketch_fall_into_its_last_bins(work_ms: float, sketch_ms: float) -> None:
    queue, _ = serve([0.0], 0.0, work_ms)
    assert latency.sketch_p99_ms(queue.measured) == pytest.approx(sketch_ms, rel=1e-4)
