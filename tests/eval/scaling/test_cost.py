"""What a run costs: the load, and that the parts of it are the same work."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from envs.serving.replay import replay_cluster
from eval.scaling import cost
from eval.scaling.cost import ALPHA, load_of, measure, measure_beside, serve_without_router
from eval.suite.plan import expected_requests
from eval.timed_kernels import serve_placed
from helm_rl.control.static import StaticAlpha


def test_a_shorter_load_has_the_suites_rates_for_less_long() -> None:
    whole, short = load_of(8, 1.0), load_of(8, 0.25)
    assert (whole.warm_s, whole.seconds) == (60.0, 300.0)
    assert (short.warm_s, short.seconds) == (15.0, 75.0)
    assert short.hardware.nodes == 8
    (phase,), (short_phase,) = whole.load.phase, short.load.phase
    assert (short_phase.start_s, short_phase.seconds, short_phase.ramp_s) == (30.0, 30.0, 7.5)
    assert (short.load.rate, short_phase.rate, short.load.users) == (8 * 67.0, 8 * 267.0, 8 * 400_000)
    assert phase.rate == short_phase.rate
    assert expected_requests(short) == pytest.approx(expected_requests(whole) / 4)


def test_without_a_router_the_nodes_do_the_same_work() -> None:
    """In order of arrival and node by node alike, each request has the latency that it had behind the router."""
    scenario = load_of(3, 0.01)
    cluster, took_s = cost._run(scenario)
    routed_ms, placed = cluster.latency_ms.copy(), cluster.node_of.copy()
    assert np.isfinite(routed_ms).all()
    assert set(placed) == {0, 1, 2}
    assert all(each > 0 for each in took_s)

    plain = replay_cluster(scenario, cluster.trace, lambda: StaticAlpha(ALPHA), alpha0=ALPHA)
    assert np.array_equal(plain.latency_ms, routed_ms)

    assert all(each > 0 for each in serve_without_router(cluster, placed))  # which ends node by node
    for order in (None, np.arange(placed.size)):
        if order is not None:
            cluster.reset(ALPHA)
            serve_placed(cluster.state, order, placed)
        for node in cluster.nodes:
            node.empty_queues()
        assert np.array_equal(cluster.latency_ms, routed_ms)

    cluster.reset(ALPHA)
    with pytest.raises(ValueError, match="a request has no node"):
        serve_without_router(cluster, cluster.node_of)

    cluster.reset(ALPHA)  # another place is another load for the nodes: the placement is what counts
    serve_placed(cluster.state, np.arange(placed.size), np.zeros_like(placed))
    assert not np.array_equal(cluster.latency_ms, routed_ms)


def test_a_size_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, places = [], []
    real, real_again = cost._run, serve_without_router
    monkeypatch.setattr(cost, "LOADED_BYTES", 1 << 16)
    monkeypatch.setattr(cost, "_run", lambda *given: runs.append(given) or real(*given))
    monkeypatch.setattr(
        cost, "serve_without_router", lambda *given: places.append(given[1].copy()) or real_again(*given)
    )
    row = measure(2, 0.005, parts=True, least_s=1e9)
    assert len(runs) == 1 + cost.MOST_ROUNDS  # the first loads what is compiled
    assert len(places) == 1 + cost.MOST_ROUNDS
    assert all(np.array_equal(place, places[1]) for place in places[1:])
    found = cost.Cost(**row)
    assert found.requests == pytest.approx(expected_requests(load_of(2, 0.005)), rel=0.2)
    assert 0 < found.alone_s < 10
    assert 0 < found.placed_s < 10
    assert found.peak_bytes > 2 * found.node_bytes > 10 << 20
    assert 0.1 < found.load_ns < 1_000
    assert np.isnan(measure(1, 0.005, parts=False)["alone_s"])


def test_processes_start_each_measurement_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "ARITHMETIC_STEPS", 10)
    monkeypatch.setattr(cost, "LOADED_BYTES", 1 << 16)
    together = threading.Barrier(2)
    rows = []
    threads = [
        threading.Thread(target=lambda: rows.append(measure_beside(1, 0.005, rounds=2, start=together)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(row) for row in rows] == [{"serve_s", "arithmetic_s"}] * 2
    assert all(row["serve_s"] > row["arithmetic_s"] > 0 for row in rows)
    monkeypatch.setattr(cost, "WAIT_S", 0.01)
    with pytest.raises(threading.BrokenBarrierError):
        measure_beside(1, 0.005, rounds=1, start=threading.Barrier(2))
