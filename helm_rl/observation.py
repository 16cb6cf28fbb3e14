"""The observation, schema v1: seventeen numbers, ordered, bounded and hashed.

| # | name | formula over the last max(interval, 1 s) |
|---|---|---|
| 0 | hot_user_ratio | requests whose user came within the last 60 s / requests |
| 1 | kv_hit_rate | history tokens found / history tokens asked |
| 2 | emb_hit_rate | rows found / rows asked |
| 3 | mean_history | log1p(mean history tokens) / log1p(32768) |
| 4 | slo_violation_rate | requests over the SLO, shed or refused / requests completed |
| 5 | alpha | applied EMB share |
| 6 | p99_over_slo | min(P99 / SLO, 4) / 4, P99 from a decayed sketch of at least 1,000 requests |
| 7 | rate_fast_slow | tanh(log(EMA 2 s of arrivals / EMA 60 s)), -1..1 |
| 8, 9 | link_util, compute_util | busy time begun / time, at most 1 |
| 10, 11 | link_demand, compute_demand | mean ms per request / SLO, at most 1 |
| 12 | queue | requests waiting / bound |
| 13, 14 | emb_margin, kv_margin | tanh(100 * ms saved per request by 1 % more of the pool there (ghosts) / SLO) |
| 15 | backlog | pages still to move / pages |
| 16 | burst_score | largest statistic of a burst detector / its threshold, clipped to 2, / 2; 0 where none looks |

With no request in the window the last value of a ratio over requests stands; `ObservationBuilder.age_s` is its age.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque

import numpy as np
import numpy.typing as npt

from helm_rl.metrics import WindowStats

SCHEMA_VERSION = 1
OBSERVATION_NAMES = (
    "hot_user_ratio",
    "kv_hit_rate",
    "emb_hit_rate",
    "mean_history",
    "slo_violation_rate",
    "alpha",
    "p99_over_slo",
    "rate_fast_slow",
    "link_util",
    "compute_util",
    "link_demand",
    "compute_demand",
    "queue",
    "emb_margin",
    "kv_margin",
    "backlog",
    "burst_score",
)
SIZE = len(OBSERVATION_NAMES)
LOW = np.array([-1.0 if name == "rate_fast_slow" else 0.0 for name in OBSERVATION_NAMES], np.float32)
HIGH = np.ones(SIZE, np.float32)

# Version of each formula; a changed formula changes the hash, and bundles trained on the old one no longer load.
_FORMULAS = dict.fromkeys(OBSERVATION_NAMES, 1) | {"burst_score": 2}
_MARGIN_SCALE = 100.0
_FAST_S, _SLOW_S = 2.0, 60.0
_WINDOW_S = 1.0
_LOG_HISTORY = math.log1p(32768)

FloatArray = npt.NDArray[np.float32]


def schema_hash() -> str:
    """Return the sha256 (hex) over names, formula versions and order; it is in every bundle."""
    document = {"version": SCHEMA_VERSION, "formulas": [[name, _FORMULAS[name]] for name in OBSERVATION_NAMES]}
    return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode("ascii")).hexdigest()


class ObservationBuilder:
    """Turns the windows of one node into observations; windows may be shorter than the second that signals cover."""

    def __init__(self, slo_ms: float) -> None:
        self._slo_ms = slo_ms
        self.reset()

    def reset(self) -> None:
        """Forget all windows."""
        self._windows: deque[WindowStats] = deque()
        self._fast = self._slow = 0.0
        self._seen_s = 0.0
        self.age_s = 0.0
        """Seconds since the end of the last window in which a request arrived."""
        self._last = np.zeros(SIZE, np.float32)

    def update(self, window: WindowStats) -> FloatArray:
        """Take the newest window and return the observation, [17] float32, a new array."""
        windows = self._windows
        windows.append(window)
        while len(windows) > 1 and (window.end_ns - windows[1].start_ns) * 1e-9 >= _WINDOW_S - 1e-9:
            windows.popleft()
        seconds = max((window.end_ns - windows[0].start_ns) * 1e-9, 1e-9)
        self._follow_rate(window)
        self.age_s = 0.0 if window.arrivals else self.age_s + (window.end_ns - window.start_ns) * 1e-9

        x = self._last.copy()
        arrivals = sum(w.arrivals for w in windows)
        completed = sum(w.completed for w in windows)
        tokens = sum(w.history_tokens for w in windows)
        rows = sum(w.rows for w in windows)
        link_ms = sum(w.link_busy_ns for w in windows) * 1e-6
        compute_ms = sum(w.compute_busy_ns for w in windows) * 1e-6
        if arrivals:
            x[0] = sum(w.returning for w in windows) / arrivals
            x[10] = link_ms / arrivals / self._slo_ms
            x[11] = compute_ms / arrivals / self._slo_ms
        served = arrivals - sum(w.shed for w in windows)
        if tokens:
            x[1] = sum(w.history_tokens_hit for w in windows) / tokens
            x[3] = math.log1p(tokens / max(served, 1)) / _LOG_HISTORY
        if rows:
            x[2] = sum(w.rows_hit for w in windows) / rows
        if completed:
            x[4] = sum(w.slow for w in windows) / completed
        x[5] = window.alpha
        if not math.isnan(window.p99_ms):
            x[6] = min(window.p99_ms / self._slo_ms, 4.0) / 4.0
        if self._fast > 0 and self._slow > 0:
            x[7] = math.tanh(math.log(self._fast / self._slow))
        x[8] = link_ms / seconds * 1e-3
        x[9] = compute_ms / seconds * 1e-3
        x[12] = window.queue / window.queue_bound
        x[13] = math.tanh(_MARGIN_SCALE * window.emb_margin_ms / self._slo_ms)
        x[14] = math.tanh(_MARGIN_SCALE * window.kv_margin_ms / self._slo_ms)
        x[15] = window.backlog_pages / window.pages
        x[16] = max(w.burst_score for w in windows) / 2.0
        np.clip(x, LOW, HIGH, out=x)
        self._last = x
        return x.copy()

    def _follow_rate(self, window: WindowStats) -> None:
        """Exponential means of the arrival rate; until 60 s are seen, the slow one is the mean of what was."""
        seconds = (window.end_ns - window.start_ns) * 1e-9
        if seconds <= 0:
            return
        rate = window.arrivals / seconds
        self._seen_s += seconds
        for name, memory_s in (("_fast", _FAST_S), ("_slow", _SLOW_S)):
            weight = max(1.0 - math.exp(-seconds / memory_s), min(1.0, seconds / self._seen_s))
            old = getattr(self, name)
            setattr(self, name, old + weight * (rate - old))
