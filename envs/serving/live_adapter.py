"""The live node as the control loop sees a server: its windows added up to counters, its target set from outside."""

from __future__ import annotations

import math
import threading

from envs.serving.live import LiveNode
from helm_rl import latency
from helm_rl.runtime.counters import Cause, Counters, Latencies, StaleTelemetry

_ADDED_UP = ("arrivals", "returning", "shed", "history_tokens", "history_tokens_hit", "rows", "rows_hit")


class LiveAdapter:
    """A `LiveNode` that has been reset; whoever else calls its `run` takes windows away from here.

    Attributes:
        asked: the least and the most alpha that it was ever asked for.
        applied: the least and the most that it has had when it was read.
    """

    period_s = 0.01

    def __init__(self, node: LiveNode) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(_ADDED_UP, 0.0)
        self._link_s = self._compute_s = 0.0
        self._start_ns = node.now_ns
        self.asked = (math.inf, -math.inf)
        self.applied = (math.inf, -math.inf)

    def read(self) -> Counters:
        """Return what was counted since the adapter was made."""
        with self._lock:
            try:
                window = self._node.run(self._node.clock_ns())
            except RuntimeError as error:
                raise StaleTelemetry(str(error)) from error
            for name in _ADDED_UP:
                self._sums[name] += getattr(window, name)
            self._link_s += window.link_busy_ns * 1e-9
            self._compute_s += window.compute_busy_ns * 1e-9
            self.applied = _widened(self.applied, window.alpha)
            return Counters(
                **self._sums,
                link_busy_s=self._link_s,
                compute_busy_s=self._compute_s,
                clock_s=(window.end_ns - self._start_ns) * 1e-9,
                latency=Latencies(latency.sketch_edges_ms(), self._node.took),
                queue=window.queue,
                queue_bound=window.queue_bound,
                alpha=window.alpha,
                backlog_pages=window.backlog_pages,
                pages=window.pages,
                emb_margin_ms=window.emb_margin_ms,
                kv_margin_ms=window.kv_margin_ms,
                kv_margin_link_ms=window.kv_margin_link_ms,
                revision=self._node.revision,
            )

    def apply(self, alpha: float, revision: int) -> float:
        """Set the target; the pages follow it within the scenario's budget."""
        with self._lock:
            self.asked = _widened(self.asked, alpha)
            if not self._node.set_target(alpha, revision):
                raise StaleTelemetry(f"revision {revision} is not above {self._node.revision}", Cause.STALE)
            return self._node.alpha


def _widened(span: tuple[float, float], value: float) -> tuple[float, float]:
    return min(span[0], value), max(span[1], value)
