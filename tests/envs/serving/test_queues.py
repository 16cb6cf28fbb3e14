"""The queues against queueing theory and against examples worked out by hand."""

from __future__ import annotations

import copy
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

from envs.serving import queues
from envs.serving.queues import FOREVER_NS, QueueState
from helm_rl import latency
from helm_rl.metrics import SHED_FACTOR, p99_ms

MS = 1_000_000
SLO_MS = 100.0

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating[Any]]


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


def take(queue: QueueState, request: int, link_ns: float, pcie_ns: float, work_ns: float, now_ns: int) -> bool:
    """Admit a request or shed it, at a time to which the queues were advanced; return whether it was admitted."""
    if queues.make_place(queue, request, now_ns):
        queues.admit(queue, request, now_ns, link_ns, pcie_ns, 0.0, work_ns)
        return True
    latency.shed(queue.measured, request)
    return False


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
            queues.admit(queue, i, arrival_ns[i], link_ns[i], pcie_ns[i], 0.0, work_ns[i])
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


def at_station(station: str, ms: FloatArray | list[float] | float) -> dict[str, Any]:
    """Return arguments of `serve` by which requests need this station and nothing else."""
    return {"link_ms": ms} if station == "link" else {"work_ms": ms}


STATIONS = pytest.mark.parametrize("station", ["accelerator", "link"])
# Near saturation waits are long and alike for long: the standard error of their mean is .4 to .6 % with these.
LOADS = pytest.mark.parametrize(("load", "n"), [(0.5, 1_000_000), (0.8, 2_000_000)])


@STATIONS
@LOADS
def test_constant_service_is_m_d_1(station: str, load: float, n: int) -> None:
    service = at_station(station, 2.0)
    queue, took = serve(poisson(n, load / 2.0), **service, bound=n)
    wait_ms = load / (2 * (1 - load)) * 2.0  # Pollaczek and Khinchine
    assert took.min() == pytest.approx(2.0, rel=1e-6)
    assert took.mean() - 2.0 == pytest.approx(wait_ms, rel=0.02)
    assert queue.measured.window[latency.COMPLETED] == n


@LOADS
def test_exponential_work_is_m_m_1(load: float, n: int) -> None:
    work = np.random.default_rng(1).exponential(2.0, n)
    queue, took = serve(poisson(n, load / 2.0), 0.0, work, bound=n)
    mean_ms = 2.0 / (1 - load)
    assert took.mean() == pytest.approx(mean_ms, rel=0.02)
    # The time in the system is exponential too.
    assert p99_ms(took) == pytest.approx(mean_ms * math.log(100), rel=0.03)
    assert np.median(took) == pytest.approx(mean_ms * math.log(2), rel=0.02)
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
    assert window[latency.TAIL_SUM] == pytest.approx(
        0.5**4 + 0.99**4 + 1.48**4 + 3 * 16 * (1 + np.log(SHED_FACTOR / 2))
    )
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
def test_the_queues_never_hold_more_than_they_have_places_for(
    seed: int, bound: int, max_batch: int, load: float
) -> None:
    rng = np.random.default_rng(seed)
    n = 300
    arrival_ns = np.cumsum(rng.exponential(1.0 / load, n) * MS).astype(np.int64)
    queue = new_queue(arrival_ns, bound=bound, max_batch=max_batch)
    link, work = rng.exponential(0.5 * MS, n), rng.exponential(1.0 * MS, n)
    for i in range(n):
        queues.advance(queue, arrival_ns[i])
        take(queue, i, link[i], 0.0, work[i], arrival_ns[i])
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


def fifo(arrival: FloatArray, link: FloatArray, work: FloatArray, batch_ms: float, max_batch: int) -> FloatArray:
    """Return the latencies of one queue before the link and one before the accelerator, each in order of arrival."""
    ready = np.zeros(arrival.size)
    free = 0.0
    for i in range(arrival.size):
        free = ready[i] = max(free, arrival[i]) + link[i]
    took = np.zeros(arrival.size)
    free = 0.0
    first = 0
    while first < arrival.size:
        start = max(free, ready[first])
        last = first
        while last < arrival.size and last - first < max_batch and ready[last] <= start:
            last += 1
        free = start + batch_ms + work[first:last].sum()
        took[first:last] = free - arrival[first:last]
        first = last
    return took


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    max_batch=st.sampled_from([1, 3]),
    tenants=st.sampled_from([1, 3]),
    all_of=st.integers(0, 2),
)
def test_one_tenant_is_served_in_order_of_arrival(seed: int, max_batch: int, tenants: int, all_of: int) -> None:
    """However many there could be."""
    rng = np.random.default_rng(seed)
    n = 200
    arrival = np.cumsum(rng.integers(0, 4, n)).astype(np.float64)  # whole ms: much falls together
    link, work = rng.integers(0, 3, n).astype(np.float64), rng.integers(1, 4, n).astype(np.float64)
    _, took = serve(
        arrival,
        link,
        work,
        tenant=np.full(n, all_of % tenants),
        weight=np.arange(1.0, tenants + 1),
        priority=np.arange(tenants),
        batch_ms=1.0,
        max_batch=max_batch,
    )
    assert took == pytest.approx(fifo(arrival, link, work, 1.0, max_batch), rel=1e-6)


# Tenants


@STATIONS
def test_a_higher_priority_goes_first_and_interrupts_nobody(station: str) -> None:
    # The first is under way when the others come; of these, the two of the higher priority go first.
    tenant = np.array([0, 0, 1, 1])
    _, took = serve([0.0, 1.0, 1.0, 2.0], **at_station(station, 10.0), tenant=tenant, weight=(1, 1), priority=(0, 1))
    assert took == pytest.approx([10.0, 39.0, 19.0, 28.0])


def test_a_batch_takes_the_higher_priority_along_first() -> None:
    # At 10 the accelerator is free and four are ready: a batch of the two of the higher priority, then of the others.
    tenant = np.array([0, 0, 0, 1, 1])
    _, took = serve([0.0, 1, 2, 3, 4], work_ms=10.0, tenant=tenant, weight=(1, 1), priority=(3, 7), max_batch=2)
    assert took == pytest.approx([10.0, 49.0, 48.0, 27.0, 26.0])


@STATIONS
def test_work_is_shared_by_weight_under_overload(station: str) -> None:
    """3 : 1 of the work, however it is cut into requests, and whoever has more of it."""
    rng = np.random.default_rng(0)
    n = np.array([2_000, 20_000])
    size = [rng.exponential(4.0, n[0]), rng.exponential(0.4, n[1])]  # 8,000 ms each
    tenant = np.repeat([0, 1], n)
    order = rng.permutation(tenant.size)
    arrival = np.sort(rng.uniform(0.0, 100.0, tenant.size))
    cost = np.concatenate(size)[order]
    _, took = serve(arrival, **at_station(station, cost), tenant=tenant[order], weight=(3, 1), priority=(0, 0))
    done = (arrival + took > 500.0) & (arrival + took <= 8_500.0)
    served = np.bincount(tenant[order][done], weights=cost[done])
    assert served.sum() == pytest.approx(8_000.0, rel=0.002)
    assert served[0] / served[1] == pytest.approx(3.0, rel=0.02)


@STATIONS
def test_who_was_away_does_not_catch_up(station: str) -> None:
    """The second tenant comes after 50 ms in which the first had all: from then on they take turns."""
    arrival = [0.0] * 100 + [50.5] * 40
    tenant = np.repeat([0, 1], [100, 40])
    _, took = serve(arrival, **at_station(station, 1.0), tenant=tenant, weight=(1, 1), priority=(0, 0))
    ends = np.array(arrival) + took
    assert ends[tenant == 1] == pytest.approx(52.0 + 2 * np.arange(40), abs=1.0)
    assert np.sort(ends) == pytest.approx(np.arange(1.0, 141.0))


@STATIONS
def test_what_a_higher_priority_was_served_puts_nobody_back(station: str) -> None:
    """Tenants of one priority share what others leave, whatever these had, from when they come."""
    # The first, of the highest priority, is served until 100. When the third comes, the second has waited for 50 ms.
    arrival = [0.0] * 100 + [0.0] * 100 + [50.5] * 20
    tenant = np.repeat([0, 1, 2], [100, 100, 20])
    _, took = serve(arrival, **at_station(station, 1.0), tenant=tenant, weight=(1, 1, 1), priority=(5, 0, 0))
    ends = np.array(arrival) + took
    assert ends[tenant == 0].max() == 100.0
    assert ends[tenant == 2] == pytest.approx(102.0 + 2 * np.arange(20), abs=1.0)


# A full queue


def outcome(took: FloatArray) -> list[int]:
    """Return the requests that were shed."""
    shed = took == SHED_FACTOR * SLO_MS
    return np.flatnonzero(shed).tolist()


def test_the_lowest_priority_gives_way_first() -> None:
    # Three places: 0 is on the link, 1 and 2 wait. 3 takes the place of 1 (of two who wait alike, the first tenant's),
    # 4 that of 2; 5 finds nobody but its own tenant, and 6 nobody below its priority.
    tenant = np.array([0, 0, 1, 2, 2, 2, 1])
    queue, took = serve(
        np.arange(7.0), link_ms=100.0, tenant=tenant, weight=(1, 1, 1), priority=(0, 0, 1), bound=3, request_ms=1.0
    )
    assert outcome(took) == [1, 2, 5, 6]
    assert took[[0, 3, 4]] == pytest.approx([101.0, 198.0, 297.0])
    window = queue.measured.window
    assert (window[latency.SHED], window[latency.COMPLETED], window[latency.SLOW]) == (4, 7, 7)
    assert queue.clocks[queues.PRESENT] == 0
    # 0, 3 and 4 were there for 100, 197 and 296 ms; 1 until 3 came, 2 until 4 came.
    there_ms = queue.sums[queues.PRESENT_NS] / MS
    assert there_ms == pytest.approx(100 + 197 + 296 + 2 + 2)
    assert queue.sums[queues.LATENCY_NS] / MS == pytest.approx(there_ms)


def test_within_a_priority_the_newest_of_whoever_waits_for_most_gives_way() -> None:
    # Five places: 0 on the link, 1 to 4 wait. 5 makes it 1 against 4, 6 makes it 2 against 3; with 7 there would be 3
    # against 2, and 8 would be the third of its tenant, who has as many as the other: both are refused.
    tenant = np.array([0, 0, 0, 0, 0, 1, 1, 1, 0])
    _, took = serve(np.arange(9.0), link_ms=100.0, tenant=tenant, weight=(1, 1), priority=(0, 0), bound=5)
    assert outcome(took) == [3, 4, 7, 8]


def test_nobody_gives_way_to_who_would_then_wait_for_as_many() -> None:
    # Four places: 0 on the link, 1 to 3 wait. 4 takes the place of 3; 5 would make it 1 against 2.
    tenant = np.array([0, 0, 0, 0, 1, 1])
    _, took = serve(np.arange(6.0), link_ms=100.0, tenant=tenant, weight=(1, 1), priority=(0, 0), bound=4)
    assert outcome(took) == [3, 5]


def test_places_are_shared_by_weight() -> None:
    # 0 on the link, eight places: with three times the weight, six of them.
    tenant = np.array([1] * 9 + [0] * 10)
    _, took = serve(np.arange(19.0), link_ms=100.0, tenant=tenant, weight=(3, 1), priority=(0, 0), bound=9)
    shed = tenant[outcome(took)]
    assert np.count_nonzero(shed == 1) == 6  # one was on the link, two wait
    assert np.count_nonzero(shed == 0) == 4


def test_who_waits_for_the_accelerator_gives_way_too() -> None:
    # 0 runs until 100, 1 to 3 are ready and wait. 4, of a higher priority, takes the place of 3 and runs next.
    tenant = np.array([0, 0, 0, 0, 1])
    queue, took = serve([0.0, 1, 1, 2, 5], work_ms=100.0, tenant=tenant, weight=(1, 1), priority=(0, 1), bound=3)
    assert outcome(took) == [3]
    assert took[[0, 4, 1, 2]] == pytest.approx([100.0, 195.0, 299.0, 399.0])
    assert queue.sums[queues.COMPUTE_WORK] == 0
    assert queue.sums[queues.COMPUTE_BUSY] == 400 * MS


# PCIe


@pytest.mark.parametrize(
    ("link", "pcie", "took_ms"), [(3.0, 5.0, 7.0), (5.0, 3.0, 7.0), (3.0, 0.0, 5.0), (0.0, 4.0, 6.0)]
)
def test_a_request_is_ready_when_link_and_pcie_are_done(link: float, pcie: float, took_ms: float) -> None:
    _, took = serve([10.0], link, 2.0, pcie_ms=pcie)
    assert took[0] == pytest.approx(took_ms)


def test_pcie_serves_one_after_the_other() -> None:
    # PCIe until 5, 10 and (from 20 on) 23; the accelerator from 5, 10 and 23.
    _, took = serve([0.0, 0.0, 20.0], 1.0, 2.0, pcie_ms=[5.0, 5.0, 3.0])
    assert took == pytest.approx([7.0, 12.0, 5.0])


def test_who_needs_nothing_from_pcie_does_not_wait_for_who_does() -> None:
    # 0 is ready at 50, 3 at 60. 1 is ready at 2 and 2 at 12, and they run; 4 is ready at 56, while 0 runs until 58.
    _, took = serve([0.0, 1.0, 11.0, 12.0, 55.0], 1.0, 8.0, pcie_ms=[50.0, 0.0, 0.0, 10.0, 0.0])
    assert took == pytest.approx([58.0, 9.0, 9.0, 62.0, 11.0])


# Work in the background


def test_pieces_by_hand() -> None:
    # Pieces of 1 ms, half of the time: 0 to 1, 2 to 3; a request has the link from 3.5 to 6.5, then 6.5 to 7.5.
    queue = new_queue(np.array([3_500_000]), background_share=0.5, piece_ms=1.0, request_ms=0.001)
    queues.ask_background(queue, 100.0 * MS, 0)
    done = {}
    for now_ms in (0.9, 1.0, 2.9, 3.0, 3.5, 7.4, 7.5, 8.4, 8.5, 9.5):
        queues.advance(queue, int(now_ms * MS))
        done[now_ms] = queue.sums[queues.BACKGROUND_DONE] / MS  # what has come as a whole
        if now_ms == 3.5:
            assert take(queue, 0, 3.0 * MS, 0.0, 0.0, 3_500_000)
    assert list(done.values()) == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert queue.measured.latency_ms[0] == pytest.approx(3.001)
    queues.ask_background(queue, 0.0, 9_500_000)
    queues.advance(queue, FOREVER_NS)
    assert queue.sums[queues.BACKGROUND_DONE] / MS == 4


def test_a_request_waits_for_one_piece_at_most() -> None:
    """With the background allowed all of the link, and asking for more than there is."""
    rng = np.random.default_rng(1)
    n = 2_000
    arrival_ns = np.arange(n) * 20 * MS + rng.integers(0, 9 * MS, n)
    queue = new_queue(arrival_ns, background_share=1.0, piece_ms=3.0)
    queues.ask_background(queue, 1e6 * MS, 0)
    for i, now_ns in enumerate(arrival_ns):
        queues.advance(queue, now_ns)
        assert take(queue, i, 2.0 * MS, 0.0, 1.0 * MS, now_ns)
    queues.ask_background(queue, 0.0, int(arrival_ns[-1]))
    queues.advance(queue, FOREVER_NS)
    waited = queue.measured.latency_ms - 3.0
    assert waited.min() >= -1e-6
    assert waited.max() <= 3.0 + 1e-6
    assert waited.mean() == pytest.approx(1.5, rel=0.05)  # half a piece: requests come at any time
    # All the rest of the link's time was used.
    seconds = arrival_ns[-1] * 1e-9
    assert queue.sums[queues.BACKGROUND_DONE] * 1e-9 == pytest.approx(seconds - n * 0.002, rel=0.01)


@pytest.mark.parametrize(("load", "share", "got"), [(0.0, 0.25, 0.25), (0.5, 0.25, 0.25), (0.0, 0.03, 0.03)])
def test_the_background_gets_its_share_and_no_more(load: float, share: float, got: float) -> None:
    rng = np.random.default_rng(2)
    end_ms = 5_000.0
    n = round(load * end_ms / 2.0)
    arrival_ns = np.append(np.sort(rng.uniform(0.0, end_ms, n)), end_ms) * MS
    queue = new_queue(arrival_ns.astype(np.int64), background_share=share, piece_ms=0.5)
    queues.ask_background(queue, 1e6 * MS, 0)
    for i, now_ns in enumerate(queue.arrival_ns):
        queues.advance(queue, now_ns)
        assert take(queue, i, 2.0 * MS, 0.0, 0.0001 * MS, now_ns)
    measured = queue.sums[queues.BACKGROUND_DONE] / (end_ms * MS)
    assert measured <= share * 1.01
    assert measured >= got * (0.99 if load == 0.0 else 0.5)


def test_a_busy_link_does_nothing_in_the_background() -> None:
    n = 500
    arrival_ns = np.arange(n) * MS
    queue = new_queue(arrival_ns, background_share=1.0)
    alone, took = serve(np.arange(float(n)), link_ms=2.0, work_ms=0.5)
    queues.advance(queue, 0)
    take(queue, 0, 2.0 * MS, 0.0, 0.5 * MS, 0)
    queues.ask_background(queue, 1e6 * MS, 0)
    for i in range(1, n):
        queues.advance(queue, arrival_ns[i])
        take(queue, i, 2.0 * MS, 0.0, 0.5 * MS, arrival_ns[i])
    queues.advance(queue, 2 * n * MS)
    assert queue.sums[queues.BACKGROUND_DONE] == 0
    queues.advance(queue, (2 * n + 5) * MS)
    assert queue.sums[queues.BACKGROUND_DONE] == 5 * MS
    assert np.array_equal(queue.measured.latency_ms, took.astype(np.float32))
    assert alone.sums[queues.LINK_BUSY] == queue.sums[queues.LINK_BUSY] == 2 * n * MS


# Bookkeeping


def state_of(queue: QueueState) -> list[npt.NDArray[Any]]:
    arrays = [array.copy() for array in queue if isinstance(array, np.ndarray)]
    return [*arrays, *(array.copy() for array in queue.measured)]


def unchanged(queue: QueueState, before: list[npt.NDArray[Any]]) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(state_of(queue), before, strict=True)
    )


STEP = st.tuples(
    st.sampled_from(["request", "request", "request", "advance", "ask"]),
    st.integers(0, 12),  # ns until it
    st.integers(0, 2),  # tenant
    st.integers(0, 9),  # link, or work asked in the background
    st.sampled_from([0, 0, 3, 11]),  # PCIe
    st.integers(0, 9),  # work
    st.sampled_from([0, 0, 5]),  # ns since the request arrived elsewhere
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=50),
    bound=st.integers(1, 5),
    max_batch=st.integers(1, 3),
    priority=st.tuples(*[st.integers(0, 1)] * 3),
    weight=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_request_is_counted_while_it_is_there_and_ends_once(
    steps: list[tuple[str, int, int, int, int, int, int]],
    bound: int,
    max_batch: int,
    priority: tuple[int, ...],
    weight: tuple[float, ...],
    share: float,
) -> None:
    """Little's law to the last ns, under admissions, push-outs, PCIe, and the background, at whatever times."""
    times = np.cumsum([step[1] for step in steps])
    asked = [k for k, step in enumerate(steps) if step[0] == "request"]
    since = np.array([times[k] - steps[k][6] for k in asked], np.int64)
    tenant = np.array([steps[k][2] for k in asked], np.int64)
    # Times are ns, and an SLO of a second: no latency is that of a shed request.
    queue = new_queue(
        since,
        tenant,
        bound=bound,
        max_batch=max_batch,
        batch_ms=2e-6,
        request_ms=1e-6,
        slo_ms=1000.0,
        background_share=share,
        piece_ms=4e-6,
        weight=weight,
        priority=priority,
    )
    measured = queue.measured
    came: dict[int, int] = {}  # admitted: when
    there_ns = 0  # of those who were pushed out
    refused: set[int] = set()
    pushed: set[int] = set()
    i = 0
    for k, (what, _, _, link, pcie, work, _) in enumerate(steps):
        now_ns = int(times[k])
        at_once = copy.deepcopy(queue)
        queues.advance(at_once, now_ns)
        queues.advance(queue, now_ns - (now_ns - int(times[max(0, k - 1)])) // 2)
        queues.advance(queue, now_ns)
        assert unchanged(queue, state_of(at_once))
        if what == "request":
            waiting = set(queues.present(queue).tolist())
            ended = ~np.isnan(measured.latency_ms)
            if take(queue, i, float(link), float(pcie), float(work), now_ns):
                came[i] = now_ns
            else:
                refused.add(i)
            gone = {r for r in waiting if not ended[r] and not np.isnan(measured.latency_ms[r])}
            assert len(gone) <= 1
            for r in gone:
                assert measured.latency_ms[r] == SHED_FACTOR * 1000.0
                assert tenant[r] != tenant[i]
                assert priority[tenant[r]] <= priority[tenant[i]]
                there_ns += now_ns - came[r]
            pushed |= gone
            i += 1
        elif what == "ask":
            queues.ask_background(queue, float(link), now_ns)
        ended = ~np.isnan(measured.latency_ms)
        expected = [r for r in came if not ended[r]]
        assert queues.present(queue).tolist() == expected
        assert queue.clocks[queues.PRESENT] == len(expected)
        assert 0 <= queues.waiting(queue) <= bound
        assert queue.clocks[queues.BATCH] <= max_batch
    queues.advance(queue, FOREVER_NS)

    assert queues.present(queue).size == 0
    n = len(asked)
    assert not np.isnan(measured.latency_ms).any()
    assert measured.window[latency.COMPLETED] == n
    assert measured.window[latency.SHED] == len(refused) + len(pushed)
    served = [r for r in came if r not in pushed]
    # A latency ends 1 ns, the fixed cost, after the request has left.
    there_ns += sum(round(float(measured.latency_ms[r]) * 1e6) - 1 + int(since[r]) - came[r] for r in served)
    sums = queue.sums
    assert sums[queues.PRESENT_NS] == there_ns
    assert sums[queues.LATENCY_NS] - sums[queues.ELSEWHERE_NS] == there_ns
    assert (sums[queues.LINK_WORK], sums[queues.COMPUTE_WORK]) == (0, 0)
    assert queues.backlog_ns(queue, FOREVER_NS) == 0
    assert sorted(queue.free.tolist()) == list(range(queue.free.size))


def test_the_backlog_is_what_the_slower_station_has_left() -> None:
    # At 1: the link has 2 ms of the first and 3 ms of the second left, the accelerator the work of both.
    queue = new_queue(np.zeros(2, np.int64), request_ms=1.0)
    for i in range(2):
        take(queue, i, 3.0 * MS, 0.0, [4.0 * MS, 0.5 * MS][i], 0)
    queues.advance(queue, 1 * MS)
    assert queues.backlog_ns(queue, 1 * MS) == 5 * MS
    queues.advance(queue, 5 * MS)  # the first runs until 7, the second is on the link until 6
    assert queues.backlog_ns(queue, 5 * MS) == pytest.approx(2.5 * MS)
    queues.advance(queue, 8 * MS)
    assert queues.backlog_ns(queue, 8 * MS) == 0
