"""One trace under many schedules of alpha: what they have in common is served once, what cannot win is given up."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from envs.serving.node import NodeSim, NodeSnapshot
from eval.segments import Span, measured_part

if TYPE_CHECKING:
    from helm_rl.scenario import Scenario
    from helm_rl.workloads.trace import Trace

SAMPLED_SLOTS = 1 << 17
"""Of the simulator's sample of embedding rows: a quarter of its default, and 1.7 times as fast."""
CHECK_NS = 10_000_000_000
"""How often it is checked whether a schedule can still win."""
MOST_KEPT = 6

Schedule = tuple[tuple[int, float], ...]
"""(time in ns from which an alpha is asked for, that alpha), ascending; the first also rules what is before it."""


class _Kept(NamedTuple):
    time_ns: int
    head: Schedule  # the steps before that time
    snapshot: NodeSnapshot


class Player:
    """Serves one trace again and again.

    Args:
        scenario: what serves; trace: the arrivals.
        keep_ns: times at which the state is kept, for schedules that are the same until then.

    Attributes:
        part: the measured part and its segments; start_ns: where serving starts; played: requests simulated so far, in
            replays of the whole trace.
    """

    def __init__(self, scenario: Scenario, trace: Trace, keep_ns: Collection[int] = ()) -> None:
        self.trace = trace
        self.part = measured_part(trace)
        self.played = 0.0
        self._node = NodeSim(scenario, trace, max_sampled_slots=SAMPLED_SLOTS)
        self.start_ns = self._node.now_ns
        self._keep_ns = sorted(keep_ns)
        self._kept: list[_Kept] = []

    def static(self, alpha: float) -> Schedule:
        """Return the schedule that stays at `alpha`."""
        return ((self.start_ns, alpha),)

    def play(
        self, schedule: Schedule, limit_ms: float = np.inf, segment: Span | None = None
    ) -> npt.NDArray[np.float32] | None:
        """Return the latency of each request under `schedule`, float32[n]; None once P99 must exceed `limit_ms`.

        With a `segment`, its own P99 must exceed the limit, too.
        """
        node, times = self._node, [time_ns for time_ns, _ in schedule]
        started_ns = self._start(schedule)
        checks = range(self.part.start_ns + CHECK_NS, node.end_ns, CHECK_NS) if np.isfinite(limit_ms) else ()
        keep = [time_ns for time_ns in self._keep_ns if started_ns < time_ns < node.end_ns]
        cuts = sorted({time_ns for time_ns in (*times, *checks, *keep) if started_ns < time_ns < node.end_ns})
        lost = False
        for until_ns in (*cuts, node.end_ns):
            node.set_target(schedule[max(0, int(np.searchsorted(times, node.now_ns, side="right")) - 1)][1])
            node.run(until_ns)
            if until_ns in keep:
                self._keep(until_ns, schedule)
            lost = np.isfinite(limit_ms) and self._lost(until_ns, limit_ms, segment)
            if lost:
                break
        served = np.searchsorted(self.trace.arrival_ns, [started_ns, node.now_ns])
        self.played += float(served[1] - served[0]) / len(self.trace)
        if lost:
            return None
        node.empty_queues()
        latency_ms = node.latency_ms.copy()
        if self._lost(node.now_ns, limit_ms, segment):
            return None
        return latency_ms

    def _start(self, schedule: Schedule) -> int:
        """Go to the latest state kept on the way of `schedule`, or to the start; return its time."""
        fit = [kept for kept in self._kept if kept.head == _head(schedule, kept.time_ns)]
        if not fit:
            self._node.reset(schedule[0][1])
            return self.start_ns
        latest = max(fit, key=lambda kept: kept.time_ns)
        self._node.restore(latest.snapshot)
        return latest.time_ns

    def _keep(self, time_ns: int, schedule: Schedule) -> None:
        self._kept.append(_Kept(time_ns, _head(schedule, time_ns), self._node.save()))
        del self._kept[:-MOST_KEPT]

    def _lost(self, now_ns: int, limit_ms: float, segment: Span | None) -> bool:
        """Whether so many requests have exceeded the limit, done or still there, that P99 must, too."""
        parts = [(self.part.first, len(self.trace)), *([(segment.first, segment.last)] if segment is not None else [])]
        arrived = int(np.searchsorted(self.trace.arrival_ns, now_ns))
        latency_ms = self._node.latency_ms[:arrived]
        age_ms = (now_ns - self.trace.arrival_ns[:arrived]) * 1e-6
        slow = np.where(np.isnan(latency_ms), age_ms, latency_ms) > limit_ms
        return all(int(slow[first:last].sum()) > _allowed(last - first) for first, last in parts)


def _allowed(count: int) -> int:
    """Of so many requests, how many may exceed a limit that their P99 by nearest rank does not."""
    return count - max(1, int(np.ceil(np.round(0.99 * count, 9))))


def _head(schedule: Schedule, time_ns: int) -> Schedule:
    """The steps before `time_ns`; a step at that time itself may still differ."""
    return schedule[:1] + tuple(step for step in schedule[1:] if step[0] < time_ns)
