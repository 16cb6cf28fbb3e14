"""A cluster of nodes behind a router, on the model clock, driven by one trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.serving import cluster_loop, loop, queues
from envs.serving.node import MAX_SAMPLED_SLOTS, NodeSim, ServedTrace
from helm_rl import latency
from helm_rl.errors import UserError
from helm_rl.memory import free_bytes
from helm_rl.metrics import WindowStats
from helm_rl.profiles.hardware import resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.routing import NOWHERE, miss_costs_ms, new_router
from helm_rl.scenario import HardwareSection, NodeEvent, Scenario, node_kinds
from helm_rl.workloads.trace import Trace

CLUSTER_SAMPLED_SLOTS = 1 << 17
"""Embedding rows simulated per node, at most, where there are several: see `helm-rl bench model` for what it costs."""
_LOOK_EVERY = 64  # nodes between two looks at the memory that is left
_TYPICAL_MISS_RATE = 0.1  # of rows, in the router's weights


@dataclass(frozen=True, slots=True)
class ClusterWindow:
    """What was measured over a window.

    nodes: one for each node; None for one that was down at the end of the window. refused: requests for which no node
    was up; moved: requests that a lost node had, and others took over.
    """

    nodes: tuple[WindowStats | None, ...]
    refused: int
    moved: int


class ClusterSim:
    """Nodes behind a router.

    `run` serves until a time of the trace's clock; nodes are lost and come back as the scenario's events say, or when
    `lose` and `restore` are called. What a lost node had in its queues and in the middle of a batch goes to others at
    once, its latency running on from its arrival; what it had in its caches is gone. Where no node is up, requests are
    refused. The same scenario and trace give the same bits.

    Args:
        scenario: hardware.nodes nodes, hardware.group of other kinds, router and events.
        trace: the arrivals at the cluster.
        alpha, start_ns: see `reset`.
        max_sampled_slots: see `NodeSim`.
        served: the trace, made ready once for several clusters.

    Raises:
        UserError: what NodeSim refuses; an event that loses a node that is down, or returns one that is up.
    """

    def __init__(
        self,
        scenario: Scenario,
        trace: Trace,
        alpha: float | Sequence[float] = 0.5,
        start_ns: int | None = None,
        *,
        max_sampled_slots: int | None = None,
        served: ServedTrace | None = None,
    ) -> None:
        sections = node_sections(scenario.hardware)
        if max_sampled_slots is None:
            max_sampled_slots = CLUSTER_SAMPLED_SLOTS if len(sections) > 1 else MAX_SAMPLED_SLOTS
        check_events(scenario)
        self.scenario = scenario
        self.served = ServedTrace(scenario, trace) if served is None else served
        self.trace = trace = self.served.trace
        self.latency_ms = np.full(len(trace), np.nan, np.float32)
        """Latency of each request from its scheduled arrival, [n]; NaN: not complete; shed: SHED_FACTOR * SLO."""
        alphas = self._per_node(alpha, len(sections))
        self.nodes: list[NodeSim] = []
        for k, section in enumerate(sections):
            node = NodeSim(
                scenario,
                trace,
                alphas[k],
                start_ns,
                max_sampled_slots=max_sampled_slots,
                hardware=section,
                served=self.served,
                latency_ms=self.latency_ms,
            )
            self.nodes.append(node)
            rest = len(sections) - k - 1
            if k % _LOOK_EVERY == 0 and rest * node.state_bytes > free_bytes():
                raise UserError(
                    f"hardware.nodes = {scenario.hardware.nodes}: a node's state takes {node.state_bytes / 2**20:.1f} "
                    f"MiB, and this machine has {free_bytes() / 2**30:.1f} GiB of memory left; take fewer nodes"
                )
        model = resolve_model(scenario.model)
        history = float(trace.history_tokens.mean())
        costs = miss_costs_ms(
            model,
            resolve_hardware(scenario.hardware),
            scenario.hardware,
            history,
            _TYPICAL_MISS_RATE,
            scenario.slo_ms,
        )
        self._costs = costs
        self.end_ns = int(trace.arrival_ns[-1]) + 1
        self._start()

    def reset(self, alpha: float | Sequence[float] = 0.5, start_ns: int | None = None) -> None:
        """Start anew, at the first request or at `start_ns` of the trace's clock, with this alpha of all or of each.

        Events before `start_ns` have happened by then.
        """
        alphas = self._per_node(alpha, len(self.nodes))
        self.latency_ms[:] = np.nan
        for node, value in zip(self.nodes, alphas, strict=True):
            node.reset(value, start_ns)
        self._start()

    def _start(self) -> None:
        nodes, requests = len(self.nodes), self.served.requests
        phases = len(self.trace.meta.phases)
        slo_ns = self.scenario.slo_ms * 1e6
        self.state = cluster_loop.ClusterState(
            nodes=np.zeros((nodes, cluster_loop.ROW), np.uint8),
            histories=np.stack([cluster_loop.pack_history(node.state.kv) for node in self.nodes]),
            router=new_router(self.scenario.router, nodes, self._costs),
            requests=requests,
            refused=latency.new_latency_state(
                np.full(max(1, len(self.scenario.tenant)) + 1, slo_ns), self.served.tenant, self.latency_ms
            ),
            clocks=np.zeros(cluster_loop.N_CLOCKS, np.int64),
            refresh_ns=np.array([round(self.scenario.router.refresh_s * 1e9)]),
            slo_ns=np.array([slo_ns]),
            idle_ns=np.zeros(nodes, np.int64),
            seen_ns=np.zeros(nodes, np.int64),
            emb=np.ones((nodes, phases)),
            seen_emb=np.ones((nodes, phases)),
            previous=self.served.previous,
            node_of=np.full(len(self.trace), NOWHERE, np.int16),
        )
        for k, node in enumerate(self.nodes):
            self.state.nodes[k, : node.packed.size] = node.packed
        self.now_ns = self.nodes[0].now_ns
        self.state.clocks[cluster_loop.NEXT_REQUEST] = self.nodes[0].state.clocks[loop.NEXT_REQUEST]
        self.state.clocks[cluster_loop.REFRESHED_NS] = self.now_ns - 2**61
        self.state.idle_ns[:] = self.state.seen_ns[:] = self.now_ns
        self._events = sorted(self.scenario.event, key=lambda event: event.at_s)
        self._refused = self._moved = 0

    @staticmethod
    def _per_node(alpha: float | Sequence[float], nodes: int) -> list[float]:
        alphas = np.atleast_1d(np.asarray(alpha, np.float64)).tolist() * (nodes if np.ndim(alpha) == 0 else 1)
        if len(alphas) != nodes:
            raise ValueError(f"one alpha per node: {len(alphas)} for {nodes}")
        return alphas

    @property
    def up(self) -> npt.NDArray[np.bool_]:
        """Which nodes are up, [N]; not to be written."""
        return self.state.router.up

    @property
    def node_of(self) -> npt.NDArray[np.int16]:
        """The node that took each request last, [n]; NOWHERE: none."""
        return self.state.node_of

    @property
    def alpha(self) -> npt.NDArray[np.float64]:
        """The embedding cache's share in each node, [N]."""
        return np.array([node.alpha for node in self.nodes])

    def set_targets(self, alpha: Sequence[float] | npt.NDArray[np.floating]) -> None:
        """Ask each node for its alpha, [N]; NaN leaves that node's target as it is."""
        if len(alpha) != len(self.nodes):
            raise ValueError(f"one alpha per node: {len(alpha)} for {len(self.nodes)}")
        for node, value in zip(self.nodes, alpha, strict=True):
            if math.isfinite(value):
                node.set_target(float(value))

    def run(self, until_ns: int) -> ClusterWindow:
        """Serve until `until_ns` of the trace's clock and return what was measured since the last call."""
        if until_ns < self.now_ns:
            raise ValueError(f"until_ns = {until_ns} lies before the cluster's clock, {self.now_ns}")
        for node in self.nodes:
            node.start_window(until_ns)
        self._refused = self._moved = 0
        self.state.refused.window[:] = 0.0
        while self._events and self._events[0].at_s * 1e9 < until_ns:
            event = self._events.pop(0)
            self._serve_until(max(self.now_ns, round(event.at_s * 1e9)))
            if event.action == "lose":
                self.lose(event.node)
            else:
                self.restore(event.node)
        self._serve_until(until_ns)
        windows = [node.end_window(until_ns) if up else None for node, up in zip(self.nodes, self.up, strict=True)]
        for node in self.nodes:
            node.now_ns = until_ns
        return ClusterWindow(tuple(windows), self._refused + int(self.state.refused.window[latency.SHED]), self._moved)

    def _serve_until(self, until_ns: int) -> None:
        cluster_loop.run(self.state, until_ns)
        self.now_ns = until_ns

    def lose(self, k: int) -> None:
        """Lose node `k` now: others take over what it was to serve, and its caches are gone."""
        self._check_node(k)
        if not self.up[k]:
            raise UserError(f"node {k} cannot be lost: it is down")
        node = self.nodes[k]
        left = queues.present(node.state.queue)
        self.up[k] = False
        self._moved += int(left.size)
        for request in left:
            cluster_loop.place(self.state, int(request), self.now_ns)

    def restore(self, k: int) -> None:
        """Let node `k` come back, with empty caches, at the target it had."""
        self._check_node(k)
        if self.up[k]:
            raise UserError(f"node {k} cannot return: it is up")
        node = self.nodes[k]
        node.reset(node.target, self.now_ns, empty=True)
        self.state.nodes[k, : node.packed.size] = node.packed
        self.state.histories[k] = cluster_loop.pack_history(node.state.kv)
        self.state.idle_ns[k] = self.state.seen_ns[k] = self.now_ns
        self.state.emb[k] = self.state.seen_emb[k] = 0.0
        self.up[k] = True

    def _check_node(self, k: int) -> None:
        if not 0 <= k < len(self.nodes):
            raise UserError(f"there is no node {k}: nodes are counted from 0 to {len(self.nodes) - 1}")

    def drain(self) -> None:
        """Serve what is left of the trace and wait until every queue is empty, however long that takes."""
        self.run(max(self.end_ns, self.now_ns))
        for node, up in zip(self.nodes, self.up, strict=True):
            if up:
                node.empty_queues()
        self.now_ns = max(node.now_ns for node in self.nodes)


def node_sections(hardware: HardwareSection) -> list[HardwareSection]:
    """Return what each node is, the groups' first."""
    kinds = node_kinds(hardware)
    counts = [group.nodes for group in hardware.group]
    counts += [hardware.nodes - sum(counts)] * (len(kinds) - len(counts))
    return [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]


def check_events(scenario: Scenario) -> None:
    """Raise UserError unless every node that is lost is up then, and every one that returns is down."""
    down: set[int] = set()
    event: NodeEvent
    for event in sorted(scenario.event, key=lambda event: event.at_s):
        if (event.action == "lose") == (event.node in down):
            what = "lost, but it is down already" if event.action == "lose" else "return, but it is up"
            raise UserError(f"scenario {scenario.name}: [[event]] at_s = {event.at_s:g} has node {event.node} {what}")
        down ^= {event.node}
