"""A player whose right answers are known: ln latency is a parabola in alpha, around one best alpha per segment."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from eval.map.player import Schedule
from eval.segments import Span, measured_part
from helm_rl.metrics import p99_ms
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace

CURVATURE = 10.0
BEST = {"base": 0.6, "burst": 0.2}


class FakePlayer:
    """Stands in for `eval.map.player.Player`; alpha follows its target at once.

    A request's latency is 20 ms * exp(CURVATURE * (alpha - best)**2), and twice that for every 20th request, so P99 is
    that of the worse segment. A pool of more than 48 GiB serves everything at its best alpha. `most_rate` is the rate
    from which everything is shed.
    """

    most_rate = np.inf

    def __init__(self, scenario: Scenario, trace: Trace, keep_ns: Collection[int] = ()) -> None:
        self.trace, self.part = trace, measured_part(trace)
        self.start_ns = min(int(trace.arrival_ns[0]), trace.meta.measure_from_ns)
        self.played = 0.0
        self.schedules: list[Schedule] = []
        self._large = scenario.hardware.pool_gib > 48
        self._shed = sum(part.rate for part in scenario.load.parts) > self.most_rate
        self._scenario = scenario

    def static(self, alpha: float) -> Schedule:
        return ((self.start_ns, alpha),)

    def play(
        self, schedule: Schedule, limit_ms: float = np.inf, segment: Span | None = None
    ) -> npt.NDArray[np.float32] | None:
        self.played += 1.0
        self.schedules.append(schedule)
        arrival_ns = self.trace.arrival_ns
        at = np.searchsorted([time_ns for time_ns, _ in schedule], arrival_ns, side="right") - 1
        alpha = np.array([alpha for _, alpha in schedule])[np.maximum(at, 0)]
        best = np.full(arrival_ns.size, BEST["base"])
        for each in self.trace.segments():
            best[(arrival_ns >= each.start_ns) & (arrival_ns < each.end_ns)] = BEST[each.label]
        latency = 20.0 * np.exp(CURVATURE * (0.0 if self._large else 1.0) * (alpha - best) ** 2)
        latency *= np.where(np.arange(latency.size) % 20 == 0, 2.0, 1.0)
        if self._shed:
            latency[:] = 100 * self._scenario.slo_ms
        latency_ms = latency.astype(np.float32)
        parts = [latency_ms[self.part.first :]]
        parts += [] if segment is None else [latency_ms[segment.first : segment.last]]
        return None if all(p99_ms(part) > limit_ms for part in parts) else latency_ms


def row(**changes: Any) -> dict[str, Any]:
    """Return a cell's row as it is stored."""
    values = {
        "key": "decoder-0.2b remote-ps 0 1500 0.5 limit",
        "seed": 1,
        "rate": 300.0,
        "pace": 1.0,
        "requests": 40_000,
        "hindsight": 0.3,
        "hindsight_ms": 100.0,
        "deployable": 0.6,
        "deployable_ms": 250.0,
        "burst": 0.2,
        "burst_flat": [[0.15, 0.3]],
        "bound_ms": 75.0,
        "reference_ms": 80.0,
        "shift": None,
        "plays": 12.5,
        "cpu_s": 3.0,
    }
    return values | changes


def later_row(**changes: Any) -> dict[str, Any]:
    """Return the row of a seed after the first."""
    return row(seed=2, known_ms=95.0, known_static_ms=100.0) | changes


def setting_row(**changes: Any) -> dict[str, Any]:
    """Return the row of that cell's setting as it is stored."""
    static = {"alpha": 0.7, "flat": [[0.6, 0.8]], "p99_ms": 90.0}
    values = {
        "key": "decoder-0.2b remote-ps 0 1500 0.5",
        "rate": 316.0,
        "slo_ms": 100,
        "deployable": {"limit": static},
    }
    return values | changes
