"""Readings of counters become the windows that controllers and observations are made for."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from helm_rl import latency
from helm_rl.metrics import SHED_FACTOR, WindowStats
from helm_rl.runtime.counters import Cause, Counters, FloatArray64, disagree, unfit

_MOST_GAP_S = 10.0
"""Readings further apart are not compared: what went on between them is no window to decide upon."""
_LEAST_INTERVALS = 5.0  # that such a gap has


class Reading(NamedTuple):
    """Counters, and when they were asked for by the reader's clock."""

    counters: Counters
    at_ns: int


class Meter:
    """Takes readings of a server, refuses those that cannot be, and measures windows between them.

    A counter that falls, or leaps, is not believed at first. Where the next reading goes on from there the server has
    started anew, and so does the measuring.

    Args:
        slo_ms: the latency that requests are to stay under.
        interval_s: between decisions.
    """

    def __init__(self, slo_ms: float, interval_s: float) -> None:
        self._slo_ms = slo_ms
        self._most_gap_ns = max(_MOST_GAP_S, _LEAST_INTERVALS * interval_s) * 1e9
        nobody = np.zeros(0, np.int32)
        self._latency = latency.new_latency_state(np.full(2, slo_ms * 1e6), nobody, np.zeros(0, np.float32))
        self._shed_edges_ms = np.array([SHED_FACTOR * slo_ms, math.inf])
        # Compiled now, and not while a decision waits.
        latency.complete_counts(self._latency, self._shed_edges_ms, np.zeros(2))
        latency.sketch_p99_ms(self._latency)
        self._start: Reading | None = None  # of the window
        self._newest: Reading | None = None
        self._suspect: Reading | None = None
        self.restarts = 0
        """Times that measuring began anew."""

    @property
    def newest(self) -> Reading | None:
        """The newest reading that was taken."""
        return self._newest

    def take(self, counters: Counters, at_ns: int) -> Cause | None:
        """Take a reading that was asked for at `at_ns`; return why it is refused, None if it is not."""
        reading = Reading(counters, at_ns)
        if (wrong := unfit(counters)) is not None:
            return wrong
        before = self._newest
        if before is None or at_ns - before.at_ns > self._most_gap_ns:
            self._begin(reading)
            return Cause.BASELINE
        if (wrong := _disagree(before, reading)) is not None:
            if wrong is Cause.STALE:
                return wrong
            if self._suspect is None or _disagree(self._suspect, reading) is not None:
                self._suspect = reading
                return wrong
            before = self._suspect
            self._begin(before)
        self._suspect = None
        self._newest = reading
        self._measure(before.counters, counters)
        return None

    def arrivals_since(self, before: Reading) -> float:
        """Return how many requests have arrived between a reading and the newest one; 0 across a restart."""
        assert self._newest is not None
        return max(0.0, self._newest.counters.arrivals - before.counters.arrivals)

    def p99_ms(self) -> float:
        """Return the P99 that a detector may look at: NaN before P99_REQUESTS were measured."""
        if self._newest is not None and self._newest.counters.latency is None:
            return _or(self._newest.counters.p99_ms, math.nan)
        known = self._latency.tail[latency.SUM] >= latency.P99_REQUESTS
        return float(latency.sketch_p99_ms(self._latency)) if known else math.nan

    def window(self, alpha: float, target: float, burst_score: float) -> WindowStats:
        """Return what was measured since the last window, up to the newest reading; the next one starts there.

        What the server cannot give is 0 in it, and whoever looks at it must not (`counters.masked`).
        """
        assert self._start is not None
        assert self._newest is not None
        start, end = self._start, self._newest
        now, w = end.counters, self._latency.window

        def grown(name: str) -> float:
            old, new = getattr(start.counters, name), getattr(now, name)
            # Lower it can be only where a reading between the two had none.
            return 0.0 if old is None or new is None else max(0.0, float(new - old))

        arrivals, tokens, rows = grown("arrivals"), grown("history_tokens"), grown("rows")
        shed = min(grown("shed"), arrivals)
        measured = now.latency is not None
        by_its_clock_ns = round(1e9 * grown("clock_s"))  # which no network delays
        slow = float(w[latency.SLOW]) if now.slow is None else grown("slow") + shed
        stats = WindowStats(
            start_ns=end.at_ns - (by_its_clock_ns or end.at_ns - start.at_ns),
            end_ns=end.at_ns,
            arrivals=round(arrivals),
            returning=round(min(grown("returning"), arrivals)),
            completed=round(float(w[latency.COMPLETED])) if measured else round(grown("completed") + shed),
            slow=round(slow),
            shed=round(shed),
            history_tokens=round(tokens),
            history_tokens_hit=round(min(grown("history_tokens_hit"), tokens)),
            rows=rows,
            rows_hit=min(grown("rows_hit"), rows),
            log_latency_sum=float(w[latency.LOG_SUM]),
            tail_cost_sum=float(w[latency.TAIL_SUM]),
            latency_ms_sum=float(w[latency.MS_SUM]),
            p99_ms=float(latency.sketch_p99_ms(self._latency)) if measured else _or(now.p99_ms, math.nan),
            link_busy_ns=round(1e9 * grown("link_busy_s")),
            compute_busy_ns=round(1e9 * grown("compute_busy_s")),
            queue=round(_or(now.queue, 0.0)),
            queue_bound=max(1, round(_or(now.queue_bound, 1.0))),
            alpha=alpha,
            target=target,
            backlog_pages=round(_or(now.backlog_pages, 0.0)),
            moved_pages=0,
            pages=max(1, round(_or(now.pages, 1.0))),
            emb_margin_ms=_or(now.emb_margin_ms, 0.0),
            kv_margin_ms=_or(now.kv_margin_ms, 0.0),
            kv_margin_link_ms=_or(now.kv_margin_link_ms, 0.0),
            burst_score=burst_score,
        )
        latency.start_window(self._latency)
        self._start = end
        return stats

    def _begin(self, reading: Reading) -> None:
        self.restarts += self._newest is not None
        self._start = self._newest = reading
        self._suspect = None
        latency.start_window(self._latency)

    def _measure(self, before: Counters, after: Counters) -> None:
        """Record the latencies of the requests between two readings."""
        if before.latency is None or after.latency is None:
            return
        requests: FloatArray64 = after.latency.requests - before.latency.requests
        latency.complete_counts(self._latency, after.latency.edges_ms, requests)
        if before.shed is not None and after.shed is not None and after.shed > before.shed:
            shed = after.shed - before.shed
            latency.complete_counts(self._latency, self._shed_edges_ms, np.array([0.0, shed]))
            self._latency.window[latency.SHED] += shed


def _disagree(before: Reading, after: Reading) -> Cause | None:
    return disagree(before.counters, after.counters, (after.at_ns - before.at_ns) * 1e-9)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)
