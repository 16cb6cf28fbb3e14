"""One trace served under control, on a node or a cluster, from start to end: what every evaluation is made of."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.serving.cluster import ClusterSim, ClusterWindow
from envs.serving.node import NodeSim
from helm_rl.control.burst import BurstSettings, new_burst_state
from helm_rl.control.protocol import Controller, Timetable, Watching
from helm_rl.metrics import WindowStats
from helm_rl.observation import ObservationBuilder
from helm_rl.scenario import Scenario
from helm_rl.telemetry import Telemetry
from helm_rl.workloads.trace import Trace


@dataclass(frozen=True)
class Replay:
    """What one replay measured; n requests, k intervals."""

    latency_ms: npt.NDArray[np.float32]  # [n], shed ones at SHED_FACTOR times the SLO
    measured: npt.NDArray[np.bool_]  # [n] arrived at or after the trace's measure_from_ns
    time_s: npt.NDArray[np.float64]  # [k] ends of the intervals, on the trace's clock
    alpha: npt.NDArray[np.float32]  # [k] applied at the end of each
    target: npt.NDArray[np.float32]  # [k] in force during each
    windows: list[WindowStats]  # [k]; none where they were not kept
    decide_us: float  # median time of a decision, observation included
    link_busy: float  # share of the time of the measured intervals
    compute_busy: float


@dataclass(frozen=True)
class ClusterReplay:
    """What one replay on a cluster measured; n requests, k intervals, N nodes."""

    latency_ms: npt.NDArray[np.float32]  # [n], shed ones at SHED_FACTOR times the SLO
    measured: npt.NDArray[np.bool_]  # [n] arrived at or after the trace's measure_from_ns
    node_of: npt.NDArray[np.int16]  # [n] node that took it last; NOWHERE: none ever did
    time_s: npt.NDArray[np.float64]  # [k] ends of the intervals, on the trace's clock
    alpha: npt.NDArray[np.float32]  # [k, N] applied at the end of each
    windows: list[ClusterWindow]  # [k]
    decide_us: float  # median time of a decision, observation included


def replay(
    scenario: Scenario,
    trace: Trace,
    controller: Controller,
    *,
    alpha0: float = 0.5,
    seed: int = 0,
    node: NodeSim | None = None,
    advance: Callable[[int], None] | None = None,
    keep_windows: bool = True,
) -> Replay:
    """Serve the whole trace; the controller decides at the end of every interval, warm-up included.

    Args:
        scenario: what is served, and how often decisions fall.
        trace: the arrivals.
        controller: asked for a target after each interval, then given the window that followed.
        alpha0: share applied at the start.
        seed: for the controller's `reset`.
        node: a simulator of this scenario and trace to use again, which saves building one.
        advance: called after each interval with its end (ns), for progress bars.
        keep_windows: whether to return them; they take 6 KB each, which of a month of seconds is 15 GB.

    A target that is not a number is ignored: the last one stays. A burst detector looks at every tick, and its score is
    part of the observation. That of a controller which has one also makes it decide at once where it finds a burst; the
    next interval starts there. All others are shown the score of one with the settings by default.
    """
    if node is None:
        node = NodeSim(scenario, trace, alpha0)
    else:
        node.reset(alpha0)
    pilot = Pilot(scenario, controller, seed)  # resets the controller
    interval_ns = round(scenario.control.interval_s * 1e9)
    windows: list[WindowStats] = []
    measured_ns = link_ns = compute_ns = 0
    ends_ns, alphas, targets = array("q"), array("f"), array("f")
    watching = isinstance(controller, Watching)
    detector = controller.detector if isinstance(controller, Watching) else new_burst_state(BurstSettings())
    while node.now_ns < node.end_ns:
        targets.append(node.target)
        window = node.run(node.now_ns + interval_ns, detector, stop=watching)
        ends_ns.append(window.end_ns)
        alphas.append(window.alpha)
        if keep_windows:
            windows.append(window)
        if window.end_ns > trace.meta.measure_from_ns:
            measured_ns += window.length_ns
            link_ns += window.link_busy_ns
            compute_ns += window.compute_busy_ns
        target = pilot.steer(window)
        if np.isfinite(target):
            node.set_target(target)
        if advance is not None:
            advance(node.now_ns)
    node.drain()
    return Replay(
        latency_ms=node.latency_ms.copy(),
        measured=trace.arrival_ns >= trace.meta.measure_from_ns,
        time_s=np.array(ends_ns, np.int64) * 1e-9,
        alpha=np.array(alphas, np.float32),
        target=np.array(targets, np.float32),
        windows=windows,
        decide_us=pilot.decide_us,
        link_busy=link_ns / max(measured_ns, 1),
        compute_busy=compute_ns / max(measured_ns, 1),
    )


def replay_cluster(
    scenario: Scenario,
    trace: Trace,
    make: Callable[[], Controller],
    *,
    alpha0: float = 0.5,
    seed: int = 0,
    cluster: ClusterSim | None = None,
    advance: Callable[[int], None] | None = None,
) -> ClusterReplay:
    """Serve the whole trace on a cluster; every node has a controller of its own, made by `make`.

    The others are as in `replay`; `cluster` is reset. A node that is down is not steered, and forgets nothing. No burst
    detector looks at a node's ticks, for all nodes are served in one loop: the observation's score is 0.
    """
    if cluster is None:
        cluster = ClusterSim(scenario, trace, alpha0)
    else:
        cluster.reset(alpha0)
    pilots = [Pilot(scenario, make(), seed + k) for k in range(len(cluster.nodes))]
    interval_ns = round(scenario.control.interval_s * 1e9)
    windows: list[ClusterWindow] = []
    alphas: list[npt.NDArray[np.float64]] = []
    until = cluster.now_ns
    while until < cluster.end_ns:
        until += interval_ns
        window = cluster.run(until)
        windows.append(window)
        alphas.append(cluster.alpha)
        targets = [
            math.nan if one is None else pilot.steer(one) for one, pilot in zip(window.nodes, pilots, strict=True)
        ]
        cluster.set_targets(targets)
        if advance is not None:
            advance(until)
    cluster.drain()
    return ClusterReplay(
        latency_ms=cluster.latency_ms.copy(),
        measured=trace.arrival_ns >= trace.meta.measure_from_ns,
        node_of=cluster.node_of.copy(),
        time_s=np.array([until - k * interval_ns for k in range(len(windows))][::-1]) * 1e-9,
        alpha=np.array(alphas, np.float32),
        windows=windows,
        decide_us=float(np.median([pilot.decide_us for pilot in pilots])),
    )


class Pilot:
    """A controller at work on one node: it sees what telemetry lets through; a timetable needs to see nothing."""

    def __init__(self, scenario: Scenario, controller: Controller, seed: int = 0) -> None:
        controller.reset(seed)
        self._controller = controller
        self._builder = ObservationBuilder(scenario.slo_ms)
        self._telemetry = Telemetry(scenario.telemetry, seed)
        self._spent_us: list[float] = []

    def steer(self, window: WindowStats) -> float:
        """Take the newest window; return the target, NaN where nothing has arrived to decide upon."""
        arrived = self._telemetry.pass_on(window)
        if not arrived:
            return self._controller.at(window.end_ns) if isinstance(self._controller, Timetable) else math.nan
        start = time.perf_counter()
        for one in arrived:
            self._controller.feedback(one)
            observation = self._builder.update(one)
        target = float(self._controller.decide(observation, window.alpha, window.end_ns))
        self._spent_us.append((time.perf_counter() - start) * 1e6)
        return target

    @property
    def decide_us(self) -> float:
        """The median time of a decision, observation included; NaN: there was none."""
        return float(np.median(self._spent_us)) if self._spent_us else math.nan
