"""A serving model whose right answers are known: ln latency is a parabola in alpha around each regime's best
alpha.
"""

from __future__ import annotations

import numpy as np

from envs.serving.replay import Replay
from helm_rl.control.protocol import Controller
from helm_rl.metrics import SHED_FACTOR
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace

CURVATURE = 10.0  # flat set: CURVATURE * d**2 <= ln 1.02, so d <= .0445
BEST = {"base": 0.6, "burst": 0.2}
BASE_MS = 20.0


class FakeServing:
    """Stands in for `envs.serving.replay.replay`; alpha follows its target at once.

    A request's latency is BASE_MS * exp(CURVATURE * (alpha - best)**2) * factor, the factor being a fixed
    sequence over the trace with the same mixture everywhere: 2 for every 20th request, 1 for the others. So P99
    is twice the median, in every segment, exactly. wobble shifts every best alpha by a value of the trace's own
    (its seed's). curvature takes the place of CURVATURE; busy: link and accelerator, as shares.
    """

    def __init__(
        self,
        best: dict[str, float] | None = None,
        wobble: dict[int, float] | None = None,
        shed: int = 0,
        curvature: float = CURVATURE,
        busy: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        self.curvature, self.busy = curvature, busy
        self.best = BEST if best is None else best
        self.wobble = wobble or {}
        self.shed = shed
        self.calls: list[tuple[str, float, int]] = []

    def __call__(
        self,
        scenario: Scenario,
        trace: Trace,
        controller: Controller,
        *,
        alpha0: float,
        seed: int,
        keep_windows: bool = True,
    ) -> Replay:
        self.calls.append((type(controller).__name__, alpha0, seed))
        interval_ns = int(scenario.control.interval_s * 1e9)
        start_ns = trace.meta.phases[0].start_ns
        intervals = -(-(trace.end_ns - start_ns) // interval_ns)
        controller.reset(seed)
        alpha, now_ns = alpha0, start_ns
        alphas = np.empty(intervals, dtype=np.float32)
        for index in range(intervals):
            alpha = controller.decide(np.zeros(17, dtype=np.float32), alpha, now_ns)
            alphas[index] = alpha
            now_ns += interval_ns
        at_request = alphas[(trace.arrival_ns - start_ns) // interval_ns].astype(np.float64)
        best = np.empty(len(trace))
        for segment in trace.segments():
            best[trace.arrival_ns >= segment.start_ns] = self.best[segment.label]
        best[trace.arrival_ns < trace.segments()[0].start_ns] = self.best["base"]
        best += self.wobble.get(trace.meta.seed or 0, 0.0)
        factor = np.where(np.arange(len(trace)) % 20 == 0, 2.0, 1.0)
        latency = BASE_MS * np.exp(self.curvature * (at_request - best) ** 2) * factor
        if self.shed:
            latency[-self.shed :] = SHED_FACTOR * scenario.slo_ms
        return Replay(
            latency_ms=latency.astype(np.float32),
            measured=trace.arrival_ns >= trace.meta.measure_from_ns,
            time_s=(start_ns + interval_ns * np.arange(1, intervals + 1)) / 1e9,
            alpha=alphas,
            target=alphas.copy(),
            windows=[],
            decide_us=1.0,
            link_busy=self.busy[0],
            compute_busy=self.busy[1],
        )


def small_scenario(**changes: object) -> Scenario:
    """120 s at 100 requests/s with a burst from 40 to 80 s; the fake makes .6 best outside it and .2 inside."""
    document: dict[str, object] = {
        "name": "burst",
        "slo_ms": 100,
        "seconds": 120,
        "warm_s": 10,
        "load": {
            "rate": 100,
            "users": 1000,
            "phase": [{"label": "burst", "start_s": 40, "seconds": 40, "rate": 50, "requests_per_visit": 2.0}],
        },
    }
    return Scenario.model_validate({**document, **changes})
