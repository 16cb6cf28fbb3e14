"""One trace served under one controller, from start to end: what every evaluation is made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.serving.node import NodeSim
from helm_rl.control.protocol import Controller
from helm_rl.metrics import WindowStats
from helm_rl.observation import ObservationBuilder
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace


@dataclass(frozen=True)
class Replay:
    """What one replay measured; n requests, k intervals."""

    latency_ms: npt.NDArray[np.float32]  # [n], shed ones at SHED_FACTOR times the SLO
    measured: npt.NDArray[np.bool_]  # [n] arrived at or after the trace's measure_from_ns
    time_s: npt.NDArray[np.float64]  # [k] ends of the intervals, on the trace's clock
    alpha: npt.NDArray[np.float32]  # [k] applied at the end of each
    target: npt.NDArray[np.float32]  # [k] in force during each
    windows: list[WindowStats]  # [k]
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

    A target that is not a number is ignored: the last one stays.
    """
    if node is None:
        node = NodeSim(scenario, trace, alpha0)
    else:
        node.reset(alpha0)
    controller.reset(seed)
    builder = ObservationBuilder(scenario.slo_ms)
    interval_ns = round(scenario.control.interval_s * 1e9)
    windows: list[WindowStats] = []
    targets: list[float] = []
    spent_us: list[float] = []
    until = node.now_ns
    while until < node.end_ns:
        until += interval_ns
        targets.append(node.target)
        window = node.run(until)
        windows.append(window)
        controller.feedback(window)
        start = time.perf_counter()
        target = controller.decide(builder.update(window), window.alpha, until)
        spent_us.append((time.perf_counter() - start) * 1e6)
        if np.isfinite(target):
            node.set_target(float(target))
        if advance is not None:
            advance(until)
    node.drain()
    return Replay(
        latency_ms=node.latency_ms.copy(),
        measured=trace.arrival_ns >= trace.meta.measure_from_ns,
        time_s=np.array([w.end_ns for w in windows]) * 1e-9,
        alpha=np.array([w.alpha for w in windows], np.float32),
        target=np.array(targets, np.float32),
        windows=windows,
        decide_us=float(np.median(spent_us)),
    )
