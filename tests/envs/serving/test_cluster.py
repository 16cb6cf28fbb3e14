"""Nodes behind a router: who serves whom, what a loss does, and that nothing is lost or served twice."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from envs.serving.cluster import ClusterSim, ClusterWindow, node_sections
from envs.serving.node import MAX_SAMPLED_SLOTS, NodeSim, ServedTrace
from envs.serving.replay import replay, replay_cluster
from helm_rl import latency
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.metrics import SHED_FACTOR
from helm_rl.routing import NOWHERE, ROUTERS
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario, trace

SECOND = 1_000_000_000
MS = 1_000_000
REFUSED_MS = SHED_FACTOR * 100.0


def world(nodes: int = 4, policy: str = "helm", **changes: Any) -> Scenario:
    return scenario(**{**QUICK, "hardware__nodes": nodes, "router__policy": policy, **changes})


def event(at_s: float, node: int, action: str = "lose") -> dict[str, Any]:
    return {"at_s": at_s, "node": node, "action": action}


def serve(cluster: ClusterSim, every_s: float = 0.5) -> list[ClusterWindow]:
    """Serve the whole trace in windows that end at multiples of `every_s`, and drain."""
    windows, every = [], round(every_s * SECOND)
    while cluster.now_ns < cluster.end_ns:
        windows.append(cluster.run((cluster.now_ns // every + 1) * every))
    cluster.drain()
    return windows


def counted(windows: list[ClusterWindow], name: str) -> Any:
    return sum(getattr(node, name) for window in windows for node in window.nodes if node is not None)


@pytest.fixture(scope="module")
def load() -> Trace:
    return generate(world(seconds=8, load__rate=240, load__users=1600))


def test_one_node_behind_a_router_is_a_node(load: Trace) -> None:
    """Bit for bit, windows and latencies, with alpha moving and pages going with it."""
    alone = NodeSim(world(1), load, 0.3)
    cluster = ClusterSim(world(1), load, 0.3, max_sampled_slots=MAX_SAMPLED_SLOTS)
    target = 0.3
    while alone.now_ns < alone.end_ns:
        until = alone.now_ns + SECOND // 2
        expected = alone.run(until)
        window = cluster.run(until)
        assert window == ClusterWindow((expected,), 0, 0)
        target = 0.9 if target < 0.5 else 0.1
        alone.set_target(target)
        cluster.set_targets([target])
    alone.drain()
    cluster.drain()
    assert np.array_equal(alone.latency_ms, cluster.latency_ms)
    assert (cluster.node_of == 0).all()
    assert alone.state.emb.counters.tolist() == cluster.nodes[0].state.emb.counters.tolist()


def test_a_replay_on_one_node_of_a_cluster_is_a_replay(load: Trace) -> None:
    expected = replay(world(1), load, StaticAlpha(0.4), alpha0=0.4)
    got = replay_cluster(world(1), load, lambda: StaticAlpha(0.4), alpha0=0.4)
    assert np.array_equal(got.latency_ms, expected.latency_ms)
    assert np.array_equal(got.measured, expected.measured)
    assert got.time_s == pytest.approx(expected.time_s)
    assert np.array_equal(got.alpha[:, 0], expected.alpha)


def test_it_may_start_in_the_middle(load: Trace) -> None:
    """As a node does; what has happened before has happened."""
    alone = NodeSim(world(1), load, 0.3, start_ns=2 * SECOND)
    one = ClusterSim(world(1), load, 0.3, start_ns=2 * SECOND, max_sampled_slots=MAX_SAMPLED_SLOTS)
    assert one.run(4 * SECOND).nodes == (alone.run(4 * SECOND),)
    assert np.array_equal(one.latency_ms, alone.latency_ms, equal_nan=True)
    assert np.isnan(one.latency_ms[load.arrival_ns < 2 * SECOND]).all()
    events = [event(0.5, 0), event(1.0, 1), event(1.5, 0, "return"), event(3.0, 1, "return")]
    cluster = ClusterSim(world(event=events), load, start_ns=2 * SECOND)
    cluster.run(2 * SECOND + 1)
    assert cluster.up.tolist() == [True, False, True, True]
    cluster.run(4 * SECOND)
    assert cluster.up.all()


@pytest.mark.parametrize("policy", ROUTERS)
def test_windows_add_up_to_the_trace(policy: str, load: Trace) -> None:
    cluster = ClusterSim(world(policy=policy), load)
    windows = serve(cluster)
    assert counted(windows, "arrivals") == len(load)
    assert np.isfinite(cluster.latency_ms).all()
    served = cluster.latency_ms < REFUSED_MS
    assert served.all()
    assert counted(windows, "history_tokens") == int(load.history_tokens.sum())
    drained = sum(int(node.state.queue.measured.window[latency.COMPLETED]) for node in cluster.nodes)
    assert counted(windows, "completed") + drained == len(load)
    mine = [node.simulated_lookups > 0 for node in cluster.nodes]
    assert all(mine)
    arrivals = np.array([[node.arrivals for node in window.nodes if node is not None] for window in windows]).sum(0)
    assert arrivals.tolist() == np.bincount(cluster.node_of, minlength=4).tolist()
    if policy == "round-robin":
        assert cluster.node_of.tolist() == (np.arange(len(load)) % 4).tolist()


def test_same_bits_whenever_and_on_whatever_thread(load: Trace) -> None:
    def run(every_s: float) -> ClusterSim:
        cluster = ClusterSim(world(), load)
        serve(cluster, every_s)
        return cluster

    first = run(0.5)
    with ThreadPoolExecutor(2) as pool:
        for other in pool.map(run, [0.5, 0.5, 3.0]):  # nor does the length of the windows matter
            assert np.array_equal(other.latency_ms, first.latency_ms)
            assert np.array_equal(other.node_of, first.node_of)
    again = first.latency_ms.copy()
    first.reset()
    serve(first)
    assert np.array_equal(first.latency_ms, again)


@pytest.mark.parametrize("policy", ["helm", "kv-aware"])
def test_a_history_is_sought_where_its_user_was_served(policy: str) -> None:
    """Six users in turn, three times: each goes where he was, and all of his history is found there but what is new."""
    arrivals = np.arange(18) * 200.0
    made = trace(arrivals.tolist(), user=list(range(6)) * 3, history=[200] * 6 + [210] * 6 + [220] * 6, new=10)
    cluster = ClusterSim(world(policy=policy), made)
    windows = serve(cluster, every_s=0.2)
    nodes = cluster.node_of.reshape(3, 6)
    assert (nodes == nodes[0]).all()
    found = [sum(node.history_tokens_hit for node in window.nodes if node is not None) for window in windows[:18]]
    assert found == [0] * 6 + [200] * 6 + [210] * 6
    # A router that does not look sends them elsewhere, and nothing is found there.
    blind = ClusterSim(world(policy="round-robin"), made)
    assert counted(serve(blind), "history_tokens_hit") < counted(windows, "history_tokens_hit")


def test_a_history_is_not_sought_on_a_node_that_came_back_empty() -> None:
    made = trace([0.0, 1000.0, 3000.0], user=[7, 7, 7], history=[500, 501, 502])
    straight = ClusterSim(world(policy="kv-aware"), made)
    serve(straight)
    k = int(straight.node_of[0])
    assert straight.node_of.tolist() == [k, k, k]
    # A return in time for the last request: the node has forgotten the history, and so does the router.
    emptied = ClusterSim(world(policy="kv-aware", event=[event(1.5, k), event(2.0, k, "return")]), made)
    windows = serve(emptied)
    assert emptied.node_of.tolist()[:2] == [k, k]
    assert counted(windows[4:], "history_tokens_hit") == 0


def test_a_node_lost_in_the_middle_of_a_batch() -> None:
    """Its request starts again on another at once, and its time runs on from its arrival."""
    made = trace([0.0, 5000.0], history=900)
    calm = ClusterSim(world(2, "round-robin"), made)
    serve(calm)
    took_ms = float(calm.latency_ms[0])
    assert took_ms > 1.0
    half_ms = round(took_ms / 2, 3)
    cluster = ClusterSim(world(2, "round-robin", event=[event(half_ms / 1000, 0)]), made)
    windows = serve(cluster)
    assert [window.moved for window in windows[:2]] == [1, 0]
    assert cluster.node_of[0] == 1
    # The request's fixed time outside the queues is over or not when the node goes: it starts anew there.
    assert cluster.latency_ms[0] == pytest.approx(half_ms + took_ms, rel=1e-4)
    assert [node is None for node in windows[0].nodes] == [True, False]
    assert windows[0].nodes[1] is not None
    assert windows[0].nodes[1].completed == 1


@pytest.mark.parametrize("policy", ROUTERS)
def test_a_loss_and_a_return_lose_nobody_and_serve_nobody_twice(policy: str) -> None:
    """Losses fall on the windows' ends, so that what a node did before is in the count."""
    small = world(3, policy, load__rate=900, load__users=800, seconds=6, event=[event(1.0, 0), event(2.0, 1)])
    busy = small.model_copy(update={"event": (*small.event, *world(3, event=[event(3.0, 0, "return")]).event)})
    made = generate(small)
    cluster = ClusterSim(busy, made)
    windows = serve(cluster)
    assert np.isfinite(cluster.latency_ms).all()
    assert (cluster.latency_ms > 0).all()
    moved = sum(window.moved for window in windows)
    assert moved > 0
    assert counted(windows, "arrivals") == len(made) + moved
    drained = sum(int(node.state.queue.measured.window[latency.COMPLETED]) for node in cluster.nodes)
    assert counted(windows, "completed") + drained == len(made)
    at_s = made.arrival_ns / SECOND
    assert 0 in cluster.node_of[at_s < 1.0]
    assert set(cluster.node_of[(at_s >= 2.0) & (at_s < 3.0)]) == {2}
    assert set(cluster.node_of[at_s >= 3.0]) == {0, 2}
    assert cluster.up.tolist() == [True, False, True]


def test_a_node_returns_empty() -> None:
    made = generate(world(2, seconds=6, load__rate=100))
    cluster = ClusterSim(world(2, "round-robin", event=[event(2.0, 1), event(3.0, 1, "return")]), made)
    cluster.run(2 * SECOND)
    before = cluster.nodes[1].state.kv.tokens.sum()
    assert before > 0
    cluster.run(3 * SECOND)  # the return falls on the next
    assert not cluster.up[1]
    cluster.run(3 * SECOND + 1)
    assert cluster.up[1]
    assert cluster.nodes[1].state.kv.tokens.sum() == 0
    assert cluster.nodes[1].now_ns == 3 * SECOND + 1
    window = cluster.run(6 * SECOND)
    one, other = window.nodes
    assert one is not None
    assert other is not None
    assert other.start_ns == 3 * SECOND + 1
    # Rows come back in the background, and by what misses.
    assert other.refilled_bytes > 0
    assert other.fetched_bytes > one.fetched_bytes


def test_without_any_node_requests_are_refused() -> None:
    """Stated: refused ones count 100 times the SLO; those that were under way have nobody to go to."""
    made = generate(world(2, seconds=6, load__rate=200))
    down = [event(1.0, 0), event(1.5, 1)]
    cluster = ClusterSim(world(2, event=down), made)
    windows = serve(cluster)
    late = made.arrival_ns >= 1.5 * SECOND
    assert (cluster.latency_ms[late] == np.float32(REFUSED_MS)).all()
    assert (cluster.node_of[late] == NOWHERE).all()
    refused = sum(window.refused for window in windows)
    assert refused == int((cluster.latency_ms == np.float32(REFUSED_MS)).sum())
    assert int(late.sum()) <= refused < int(late.sum()) + 30
    assert [node is None for node in windows[-1].nodes] == [True, True]
    # And one that comes back serves again.
    revived = ClusterSim(world(2, event=[*down, event(3.0, 0, "return")]), made)
    serve(revived)
    assert (revived.node_of[made.arrival_ns >= 3 * SECOND] == 0).all()
    assert (revived.latency_ms[made.arrival_ns >= 4 * SECOND] < REFUSED_MS).mean() > 0.9


def test_events_before_the_first_request() -> None:
    made = trace([1000.0, 1100.0, 1200.0], measure_from_ms=1000.0)
    cluster = ClusterSim(world(2, "round-robin", event=[event(-5.0, 0)]), made)
    serve(cluster)
    assert cluster.node_of.tolist() == [1, 1, 1]


def test_a_slower_link_makes_a_slower_node(load: Trace) -> None:
    group = [{"nodes": 1, "link_gb_s": 0.02}, {"nodes": 1, "pool_gib": 1 / 32}]
    mixed = world(3, "round-robin", hardware__group=group)
    assert [section.link_gb_s for section in node_sections(mixed.hardware)] == [0.02, 0.1, 0.1]
    assert [section.pool_gib for section in node_sections(mixed.hardware)] == [1 / 16, 1 / 32, 1 / 16]
    cluster = ClusterSim(mixed, load)
    serve(cluster)
    means = [float(np.median(cluster.latency_ms[cluster.node_of == k])) for k in range(3)]
    assert means[0] > 1.5 * means[2]
    assert [node.pages for node in cluster.nodes] == [256, 128, 256]
    # HELM's router sees it in the load: the slow one gets less.
    clever = ClusterSim(mixed.model_copy(update={"router": world(policy="helm").router}), load)
    serve(clever)
    assert np.bincount(clever.node_of, minlength=3).argmin() == 0


def test_alpha_of_each_node(load: Trace) -> None:
    cluster = ClusterSim(world(3), load, [0.2, 0.5, 0.8])
    assert cluster.alpha == pytest.approx([0.2, 0.5, 0.8], abs=1 / 256)
    cluster.set_targets([0.3, float("nan"), 0.1])
    windows = serve(cluster)
    last = windows[-1].nodes
    assert [node.target for node in last if node is not None] == [0.3, 0.5, 0.1]
    assert cluster.alpha == pytest.approx([0.3, 0.5, 0.1], abs=2 / 256)
    with pytest.raises(ValueError, match="one alpha per node: 2 for 3"):
        cluster.set_targets([0.1, 0.2])
    with pytest.raises(ValueError, match="one alpha per node: 4 for 3"):
        ClusterSim(world(3), load, [0.1] * 4)


def test_what_the_router_sees_may_be_old() -> None:
    """Between two looks at the nodes it sends everybody to the one that was idle then."""
    busy = world(policy="least-loaded", load__rate=800, load__users=1600, seconds=3, warm_s=1)
    made = generate(busy)
    fresh = ClusterSim(busy, made)
    stale = ClusterSim(
        busy.model_copy(update={"router": world(policy="least-loaded", router__refresh_s=1.0).router}), made
    )
    serve(fresh)
    serve(stale)
    assert np.quantile(stale.latency_ms, 0.99) > 1.2 * np.quantile(fresh.latency_ms, 0.99)


def test_overload_without_end_is_shed() -> None:
    flood = world(2, hardware__queue_bound=16, load__rate=5000, seconds=2, warm_s=0)
    made = generate(flood)
    cluster = ClusterSim(flood, made)
    windows = serve(cluster)
    shed = cluster.latency_ms == np.float32(REFUSED_MS)
    assert counted(windows, "shed") == int(shed.sum()) > len(made) / 2
    assert np.isfinite(cluster.latency_ms).all()


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([event(1.0, 0), event(2.0, 0)], "at_s = 2 has node 0 lost, but it is down already"),
        ([event(1.0, 1, "return")], "at_s = 1 has node 1 return, but it is up"),
        ([event(1.0, 0), event(2.0, 0, "return"), event(3.0, 0, "return")], "at_s = 3 has node 0 return"),
    ],
)
def test_events_that_cannot_be(events: list[dict[str, Any]], said: str, load: Trace) -> None:
    with pytest.raises(UserError, match=said):
        ClusterSim(world(2, event=events), load)


def test_what_cannot_be_is_refused(load: Trace) -> None:
    for nodes in (0, -1, 5000):
        with pytest.raises(ValueError, match=r"hardware\.nodes"):
            world(nodes)
    with pytest.raises(ValueError, match=r"event\[0\].node = 2 must be below hardware.nodes = 2"):
        world(2, event=[event(1.0, 2)])
    empty = trace([])
    with pytest.raises(UserError, match="has no requests"):
        ClusterSim(world(2), empty)
    cluster = ClusterSim(world(2), load)
    cluster.run(SECOND)
    with pytest.raises(ValueError, match="before the cluster's clock"):
        cluster.run(0)
    with pytest.raises(UserError, match="node 0 cannot return: it is up"):
        cluster.restore(0)
    cluster.lose(0)
    with pytest.raises(UserError, match="node 0 cannot be lost: it is down"):
        cluster.lose(0)


def test_nodes_that_are_not_there_and_more_than_memory_holds_are_refused(
    load: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterSim(world(2), load, np.float32(0.5))
    for k in (-1, 2):
        with pytest.raises(UserError, match=f"there is no node {k}: nodes are counted from 0 to 1"):
            cluster.lose(k)
        with pytest.raises(UserError, match="there is no node"):
            cluster.restore(k)
    monkeypatch.setattr("envs.serving.cluster.free_bytes", lambda: 2 * cluster.nodes[0].state_bytes)
    ClusterSim(world(3), load)
    with pytest.raises(UserError, match=r"hardware.nodes = 4: a node's state takes .* MiB, and this machine has"):
        ClusterSim(world(4), load)


def test_the_bytes_of_a_node_are_what_it_takes(load: Trace) -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    node = NodeSim(world(1), load, served=ServedTrace(world(1), load), latency_ms=np.zeros(len(load), np.float32))
    took = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert node.state_bytes == pytest.approx(took, rel=0.25)
