"""`helm-rl bench decision`: the routing decisions that are timed are the router's, and what is printed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envs.serving.cluster import ClusterSim
from eval import bench_decision, whole_decision
from eval.bench_decision import Args, decision_us, main, warmed_cluster
from eval.timed_kernels import decide_all, read_all
from helm_rl.errors import UserError
from helm_rl.routing import ROUTERS, own_node


@pytest.fixture(scope="module")
def cluster() -> ClusterSim:
    return warmed_cluster(2, 4.0)


def test_the_cluster_has_served_into_the_burst(cluster: ClusterSim) -> None:
    assert cluster.now_ns == 4_000_000_000
    served = cluster.trace.arrival_ns < cluster.now_ns
    assert (cluster.node_of[served] >= 0).all()
    phase = cluster.trace.phase[served]
    at_s = cluster.trace.arrival_ns[served] * 1e-9
    assert (at_s[phase == 1] >= 2.0).all()
    assert np.count_nonzero(phase == 1) > 500


def test_the_routers_own_decisions_are_timed(cluster: ClusterSim) -> None:
    """A user's own node depends on nothing else, so the sum over many decisions is known."""
    policy = cluster.state.router.policy
    before = int(policy[0])
    policy[0] = ROUTERS["user-hash"]
    other = np.zeros(4096, np.uint8)
    decided = [decide_all(cluster.state, i, i + 1, cluster.now_ns, other) for i in range(40)]
    assert decided == [own_node(cluster.state.router, user) for user in cluster.trace.user[:40].tolist()]
    assert set(decided) == {0, 1}
    assert decide_all(cluster.state, 0, 40, cluster.now_ns, other) == sum(decided)
    other[64:128] = 3  # of each of 64 lines one byte is read before each
    assert decide_all(cluster.state, 0, 40, cluster.now_ns, other) == sum(decided) + 120
    policy[0] = before


def test_reading_alone() -> None:
    """Of each line of 64 bytes one: that of the reading's number."""
    other = np.arange(256, dtype=np.uint8)
    assert read_all(0, 1, other) == 0 + 64 + 128 + 192
    assert read_all(62, 65, other) == 3 * 384 + 4 * (62 + 63 + 0)


def test_a_time_is_that_of_one_decision(cluster: ClusterSim, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 3 ms at every look, 100 decisions take 3 ms."""

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            now += 3e-3
            yield now

    clock = ticks()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert decision_us(cluster, batch=100, batches=5) == pytest.approx(30.0)
    assert decision_us(cluster, 4096, batch=100, batches=20) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="fewer than a batch of 1000000"):
        decision_us(cluster, batch=1_000_000)


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_decision, "NODES", (1, 2))
    monkeypatch.setattr(bench_decision, "REFERENCE_NODES", 2)
    monkeypatch.setattr(bench_decision, "SERVED_S", 2.0)
    monkeypatch.setattr(bench_decision, "BATCHES", 3)
    monkeypatch.setattr(bench_decision, "BATCH", 100)
    for name, count in (("CALLS", 300), ("ROUND", 100), ("REMEMBERED", 1_000)):
        monkeypatch.setattr(whole_decision, name, count)
    main(Args(json=tmp_path / "figures.json"))
    shown = capsys.readouterr().out
    for name in (
        "NumPy: normaliser",
        "decision.p99_us ",
        "multiply-adds",
        "router.p50_us ",
        "router.p50_us.1_nodes",
        "router.p50_us.disturbed",
        "router.p50_us.kv-aware",
    ):
        assert name in shown
    written = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert {"decision.p50_us", "decision.p999_us", "decision.ratio_vs_torch", "router.p50_us"} <= written.keys()
    with pytest.raises(UserError, match="exists already"):
        main(Args(json=tmp_path / "figures.json"))
    with pytest.raises(UserError, match="is a folder; name a file"):
        main(Args(json=tmp_path, overwrite=True))
