"""The compiled loop of a cluster: each request to the node that the router chooses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import kv
from cache_engine.jit import MOST_BYTES, in_memory, inner, kernel
from envs.serving import loop, packed, queues
from envs.serving.loop import Requests
from helm_rl.latency import LatencyState, shed
from helm_rl.routing import HELM, KV_AWARE, NOWHERE, RouterState, choose

# ClusterState.clocks
NEXT_REQUEST = 0
REFRESHED_NS = 1  # when the router last saw loads and hit rates
N_CLOCKS = 2

LOOK_BACK = 4
"""A history lies where a user was served: that many of his last requests are followed to the nodes that had them."""
# Rows of a power of two would all fall into the same sets of the processor's caches.
ROW = MOST_BYTES + 192


class ClusterState(NamedTuple):
    """N nodes and what the router knows of them. n requests, F phases."""

    nodes: npt.NDArray[np.uint8]  # [N, ROW] as `packed.load` takes them
    histories: npt.NDArray[np.uint8]  # [N, ROW] their KV caches alone
    router: RouterState
    requests: Requests
    refused: LatencyState  # requests for which no node was up
    clocks: npt.NDArray[np.int64]
    refresh_ns: npt.NDArray[np.int64]  # [1] age up to which loads and hit rates are seen; 0: as they are
    slo_ns: npt.NDArray[np.float64]  # [1]
    idle_ns: npt.NDArray[np.int64]  # [N] when a node will have done all, as of its last request or interval's end
    seen_ns: npt.NDArray[np.int64]  # [N] the same as the router saw it
    emb: npt.NDArray[np.float64]  # [N, F] share of the rows of a phase's requests that a node holds
    seen_emb: npt.NDArray[np.float64]  # [N, F]
    previous: npt.NDArray[np.int64]  # [n] the user's request before this one, NOWHERE: none
    node_of: npt.NDArray[np.int16]  # [n] node that serves the request, NOWHERE: none yet


_store_kv: Any
_load_kv: Any
_store_kv, _load_kv = in_memory(kv.new_kv_state(1, 1, 0))


@kernel
def _pack_history(history: npt.NDArray[np.uint8], state: kv.KvState) -> None:
    _store_kv(history, state)


def pack_history(state: kv.KvState) -> npt.NDArray[np.uint8]:
    """Return a KV cache as the router reads it, uint8 [ROW]; the caller keeps the cache's arrays alive."""
    history = np.zeros(ROW, np.uint8)
    _pack_history(history, state)
    return history


@kernel
def run(cluster: ClusterState, until_ns: int) -> None:
    """Serve every request that arrives before `until_ns`, and every node that is up until then.

    A node is taken up when it gets a request, not at every event of its queues: of many nodes, all that belongs to one
    has left the processor's caches by then. What it did meanwhile happens at its own times all the same.
    """
    clocks = cluster.clocks
    arrival_ns = cluster.requests.arrival_ns
    i = clocks[NEXT_REQUEST]
    while i < arrival_ns.size and arrival_ns[i] < until_ns:
        place(cluster, i, arrival_ns[i])
        i += 1
    clocks[NEXT_REQUEST] = i
    for k in range(cluster.idle_ns.size):
        if cluster.router.up[k]:
            _advance(cluster.nodes[k], until_ns, cluster.idle_ns[k : k + 1])


@kernel
def place(cluster: ClusterState, i: int, now_ns: int) -> None:
    """Send request `i`, which comes to the cluster at `now_ns`, to a node."""
    k = decide(cluster, i, now_ns)
    if k == NOWHERE:
        shed(cluster.refused, i)
        return
    cluster.node_of[i] = k
    serve(cluster.nodes[k], i, now_ns, cluster.idle_ns[k : k + 1], cluster.emb[k])


@inner
def decide(cluster: ClusterState, i: int, now_ns: int) -> int:
    """Return the node for request `i`, NOWHERE if none is up: all that routing is, the look at the nodes included."""
    _look_around(cluster, i, now_ns)
    return choose(cluster.router, cluster.requests.user[i], i)


@inner
def _look_around(cluster: ClusterState, i: int, now_ns: int) -> None:
    """Write what is known of every node, and of what it has for the request, to the router."""
    router, requests = cluster.router, cluster.requests
    nodes = cluster.idle_ns.size
    refresh_ns = cluster.refresh_ns[0]
    if refresh_ns == 0 or now_ns - cluster.clocks[REFRESHED_NS] >= refresh_ns:
        cluster.clocks[REFRESHED_NS] = now_ns
        for k in range(nodes):
            cluster.seen_ns[k] = cluster.idle_ns[k]
            for phase in range(cluster.emb.shape[1]):
                cluster.seen_emb[k, phase] = cluster.emb[k, phase]
    now_phase = requests.phase[i]
    for k in range(nodes):
        router.load[k] = max(0, cluster.seen_ns[k] - now_ns) / cluster.slo_ns[0]
        router.emb[k] = cluster.seen_emb[k, now_phase]
        router.kv[k] = 0.0
    if router.policy[0] == HELM or router.policy[0] == KV_AWARE:
        history = np.int64(requests.history[i])
        old = history - np.int64(requests.new[i])
        before = cluster.previous[i]
        for _ in range(LOOK_BACK):
            if before == NOWHERE:
                break
            k = cluster.node_of[before]
            if k != NOWHERE and router.up[k] and router.kv[k] == 0.0:  # most users were on one node all the time
                router.kv[k] = _held(cluster.histories[k], requests.user[i], old) / history
            before = cluster.previous[before]


@kernel
def _held(history: npt.NDArray[np.uint8], user: int, tokens: int) -> float:
    """Return how many of the user's first `tokens` tokens a KV cache holds."""
    cache = _load_kv(history)
    e = kv.find(cache, user)
    if e == kv.NONE:
        return 0.0
    return float(min(cache.tokens[e], tokens))


@kernel
def _advance(one: npt.NDArray[np.uint8], now_ns: int, idle_ns: npt.NDArray[np.int64]) -> None:
    node = packed.load(one)
    loop.advance(node, now_ns)
    idle_ns[0] = now_ns + np.int64(min(queues.backlog_ns(node.queue, now_ns), 2.0**60))


@kernel
def serve(
    one: npt.NDArray[np.uint8],
    i: int,
    now_ns: int,
    idle_ns: npt.NDArray[np.int64],
    emb: npt.NDArray[np.float64],
) -> None:
    """Let a node serve request `i`, which comes to it at `now_ns`; idle_ns [1], emb [F]: its rows of the state."""
    node = packed.load(one)
    loop.advance(node, now_ns)
    loop.serve(node, i, now_ns)
    idle_ns[0] = now_ns + np.int64(min(queues.backlog_ns(node.queue, now_ns), 2.0**60))
    for phase in range(emb.size):
        hot = node.rows.hot_fraction[phase]
        tail_missing = min(1.0, node.miss_rate[loop.FRESH]) * node.rows.tail_share[0]
        emb[phase] = 1.0 - (1.0 - hot) * tail_missing - hot * node.miss_rate[loop.HOT + phase]
