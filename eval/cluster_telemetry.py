"""Ways by which the telemetry of a cluster's nodes comes to one place, and a simulated cluster to try them on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from envs.serving import cluster_loop
from envs.serving.cluster import ClusterSim
from helm_rl import racks
from helm_rl.latency import SKETCH_BINS
from helm_rl.observation import SIZE, FloatArray
from helm_rl.racks import ClusterObserver, Summary


class Interval(NamedTuple):
    """What N nodes measured: `Summary.values`, [N, WIDTH], and the latencies of what completed, an array for each."""

    values: npt.NDArray[np.float64]
    latency_ms: list[npt.NDArray[np.float32]]


class Nodes:
    """The nodes of a simulated cluster, none of which is ever lost."""

    def __init__(self, cluster: ClusterSim) -> None:
        self.cluster = cluster
        self._pending = np.zeros(0, np.int64)
        self._next = int(cluster.state.clocks[cluster_loop.NEXT_REQUEST])

    def run(self, until_ns: int) -> Interval:
        """Serve until `until_ns`; return what was measured since the last call."""
        cluster = self.cluster
        windows = cluster.run(until_ns).nodes
        arrived = int(cluster.state.clocks[cluster_loop.NEXT_REQUEST])
        pending = np.concatenate([self._pending, np.arange(self._next, arrived)])
        done = np.isfinite(cluster.latency_ms[pending])
        self._pending, self._next = pending[~done], arrived
        completed = pending[done]
        node = cluster.node_of[completed]
        order = np.argsort(node, kind="stable")
        ends = np.searchsorted(node[order], np.arange(1, len(windows)))
        latency_ms = np.split(cluster.latency_ms[completed[order]], ends)
        values = np.stack([racks.values_of(window) for window in windows if window is not None])
        return Interval(values, latency_ms)


@dataclass(frozen=True)
class Seen:
    """What came of an interval in one way.

    observation, bound: [17], the latter NaN without a sample; centre_bytes, rack_bytes: that came in at the centre and
    at all racks; node_us, rack_us, centre_us: a core's time for one node, one rack, the centre.
    """

    observation: FloatArray
    bound: npt.NDArray[np.float64]
    centre_bytes: int
    rack_bytes: int
    node_us: float
    rack_us: float
    centre_us: float


class InFull:
    """Every node sends its counters and each latency to the centre."""

    def __init__(self, slo_ms: float) -> None:
        self._observer = ClusterObserver(slo_ms)

    def see(self, interval: Interval) -> Seen:
        """Send, receive and observe what was measured."""
        begun = time.thread_time()
        both = zip(interval.values, interval.latency_ms, strict=True)
        messages = [values.tobytes() + latency_ms.tobytes() for values, latency_ms in both]
        sent = time.thread_time()
        values = np.stack([np.frombuffer(message, np.float64, racks.WIDTH) for message in messages])
        latency_ms = np.concatenate([np.frombuffer(one, np.float32, offset=values[0].nbytes) for one in messages])
        received = Summary(values, np.zeros((len(values), SKETCH_BINS)))
        racks.count_latencies(received.latencies, np.zeros(latency_ms.size, np.int64), latency_ms)
        observation = self._observer.update(received)
        ended = time.thread_time()
        node_us, centre_us = (sent - begun) / len(messages) * 1e6, (ended - sent) * 1e6
        return Seen(observation, np.full(SIZE, np.nan), sum(map(len, messages)), 0, node_us, 0.0, centre_us)


class Summarised:
    """Nodes send a summary each to their rack, and racks one to the centre.

    Args:
        slo_ms: of the latencies.
        nodes: how many there are.
        rack_nodes: of a rack; None: there are no racks, and nodes send to the centre.
        share: of the nodes of each rack, drawn anew each interval, that report; at least one does.
        seed: of what is drawn.
    """

    def __init__(self, slo_ms: float, nodes: int, rack_nodes: int | None, share: float = 1.0, seed: int = 0) -> None:
        self._through_racks = rack_nodes is not None
        self._rack = np.arange(nodes) // (rack_nodes or nodes)
        sizes = np.bincount(self._rack)
        self._first = np.cumsum(sizes) - sizes
        self._reporting = np.maximum(np.round(share * sizes), 1).astype(np.int64)
        self._share = float(self._reporting.sum() / nodes)
        self._rng = np.random.default_rng([seed, 0x5A3])
        self._observer = ClusterObserver(slo_ms, len(sizes) if self._share < 1.0 else 0)

    def see(self, interval: Interval) -> Seen:
        """Send, add up and observe what those measured that report."""
        nodes = _counted(interval)
        reporting = self.draw()
        begun = time.thread_time()
        messages = [racks.encode(nodes, k) for k in reporting]
        sent = time.thread_time()
        node_us, rack_us, rack_bytes = (sent - begun) / len(messages) * 1e6, 0.0, 0
        to = self._rack[reporting]
        if self._through_racks:
            rack_bytes = sum(map(len, messages))
            added = self._added(messages, to)
            messages = [racks.encode(added, k) for k in range(len(self._first))]
            to = np.arange(len(self._first))
            rack_us = (time.thread_time() - sent) / len(messages) * 1e6
        sent = time.thread_time()
        observation = self._observer.update(self._added(messages, to))
        bound = self._observer.bound(self._share)
        centre_us = (time.thread_time() - sent) * 1e6
        return Seen(observation, bound, sum(map(len, messages)), rack_bytes, node_us, rack_us, centre_us)

    def draw(self) -> npt.NDArray[np.int64]:
        """Return which nodes report this time, ascending."""
        order = np.lexsort((self._rng.random(self._rack.size), self._rack))
        within = np.arange(order.size) - self._first[self._rack]
        return np.sort(order[within < self._reporting[self._rack]])

    def _added(self, messages: list[bytes], to: npt.NDArray[np.int64]) -> Summary:
        """Return what the messages say, each added to the rack that it belongs to."""
        total = racks.new_summary(len(self._first))
        for message, rack in zip(messages, to.tolist(), strict=True):
            racks.add_message(total, rack, message)
        return total


def _counted(interval: Interval) -> Summary:
    """Return what the nodes have by the end of the interval: they count each latency as it comes."""
    nodes = Summary(interval.values, np.zeros((len(interval.values), SKETCH_BINS)))
    node = np.repeat(np.arange(len(interval.values)), [one.size for one in interval.latency_ms])
    racks.count_latencies(nodes.latencies, node, np.concatenate(interval.latency_ms))
    return nodes
