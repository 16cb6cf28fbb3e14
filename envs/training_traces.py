"""The arrivals that environments draw their episodes from, and what a static split would have earned on them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from envs.serving.cluster import ClusterSim, ClusterWindow
from envs.serving.node import NodeSim, ServedTrace
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

SEEDS_FROM = 1 << 32
"""Generated training traces have seeds from here on; evaluations use smaller ones, so the two never share arrivals."""

REFERENCE_ALPHA = 0.5
TAIL_SCALE = 0.25
"""Mean tail cost from which its log counts, about what it is where P99 is the SLO."""


class TrainingTraces:
    """A fixed set of traces, shared by environments of one scenario; everything is made when first asked for.

    Args:
        scenario: what is served.
        traces: the traces, or None to generate `count` from the scenario with seeds from SEEDS_FROM + count * seed.
    """

    def __init__(
        self, scenario: Scenario, traces: Sequence[Trace] | None = None, *, count: int = 8, seed: int = 0
    ) -> None:
        if traces is not None and len(traces) == 0:
            raise UserError("no traces were given: at least one is needed")
        for trace in traces or ():
            if len(trace) == 0:
                raise UserError(f"trace {trace.meta.name} has no requests: there is nothing to serve")
        if count < 1:
            raise UserError(f"the number of training traces must be at least 1, got {count}")
        self.scenario = scenario
        self.interval_ns = round(scenario.control.interval_s * 1e9)
        self._traces: list[Trace | None] = list(traces) if traces is not None else [None] * count
        self._first_seed = SEEDS_FROM + count * seed
        self._served: list[ServedTrace | None] = [None] * len(self._traces)
        self._references: list[npt.NDArray[np.float64] | None] = [None] * len(self._traces)
        self._locks = [threading.RLock() for _ in self._traces]

    def __len__(self) -> int:
        return len(self._traces)

    def trace(self, i: int) -> Trace:
        """Return trace i."""
        with self._locks[i]:
            trace = self._traces[i]
            if trace is None:
                trace = self._traces[i] = generate(self.scenario, seed=self._first_seed + i)
            return trace

    def intervals(self, i: int) -> int:
        """Return the number of whole intervals of trace i from the start of measurement to its end."""
        return self._intervals(self.trace(i))

    def served(self, i: int) -> ServedTrace:
        """Return trace i as the simulators take it."""
        with self._locks[i]:
            served = self._served[i]
            if served is None:
                served = self._served[i] = ServedTrace(self.scenario, self.trace(i))
            return served

    def reference(self, i: int) -> npt.NDArray[np.float64]:
        """Return what a static split of REFERENCE_ALPHA, on every node, earns on trace i, [intervals]."""
        with self._locks[i]:
            reference = self._references[i]
            if reference is None:
                reference = self._references[i] = self._earn(self.trace(i), self.served(i))
            return reference

    def _earn(self, trace: Trace, served: ServedTrace) -> npt.NDArray[np.float64]:
        start = trace.meta.measure_from_ns
        ends = [start + (k + 1) * self.interval_ns for k in range(self._intervals(trace))]
        if is_cluster(self.scenario):
            cluster = ClusterSim(self.scenario, trace, REFERENCE_ALPHA, served=served)
            still = np.zeros(len(cluster.nodes))
            cluster.run(max(start, cluster.now_ns))
            return np.array([cluster_reward(cluster.run(end), self.scenario, still) for end in ends])
        node = NodeSim(self.scenario, trace, REFERENCE_ALPHA, served=served)
        node.run(max(start, node.now_ns))
        return np.array([reward(node.run(end), self.scenario, moved=0.0) for end in ends])

    def _intervals(self, trace: Trace) -> int:
        return int((trace.arrival_ns[-1] - trace.meta.measure_from_ns) // self.interval_ns)


def is_cluster(scenario: Scenario) -> bool:
    """Return whether a scenario needs a cluster to be served: several nodes, or one that is lost."""
    return scenario.hardware.nodes > 1 or bool(scenario.event)


def reward(window: WindowStats, scenario: Scenario, moved: float) -> float:
    """Return -ln(1 + mean tail cost / TAIL_SCALE) * interval_s - move_cost * moved.

    The tail cost of a request is (latency / SLO)^4, less than that in overload (`latency.tail_cost`); the mean is over
    the requests that completed in the window, 0 without any. moved: of alpha. Times the interval, so that a return does
    not depend on how often decisions fall.
    """
    return -tail_loss(window) * scenario.control.interval_s - scenario.reward.move_cost * abs(moved)


def tail_loss(window: WindowStats) -> float:
    """Return ln(1 + mean tail cost / TAIL_SCALE): the mean itself where it is small, and its log in overload.

    An episode may begin in an overload that no action could have spared it; without the log, that would drown what
    actions do.
    """
    return math.log1p(window.tail_cost_sum / max(window.completed, 1) / TAIL_SCALE)


def cluster_reward(window: ClusterWindow, scenario: Scenario, moved: npt.NDArray[np.floating]) -> float:
    """Return the mean of the rewards of the nodes that are up, 0 where none is. moved: alpha moved by each, [N]."""
    earned = [
        reward(node, scenario, float(own)) for node, own in zip(window.nodes, moved, strict=True) if node is not None
    ]
    return float(np.mean(earned)) if earned else 0.0
