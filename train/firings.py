"""When the burst detector fires on recorded arrivals, whose bursts nobody has labelled, and what arrivals did then."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from helm_rl.control.burst import BurstSettings, look_at_all, new_burst_state
from helm_rl.errors import UserError
from helm_rl.workloads.trace import Trace
from train.detection import NEVER, NO_P99, Floats, Ticks

BEFORE_S, AFTER_S = 60.0, 60.0
"""Around a firing, of which arrivals are shown."""
MOST_TICKS = 100_000_000
_BIN_S = 10.0


@dataclass(frozen=True)
class Firings:
    """n bins of a log's arrivals, k firings, of which m have all of what lies around them.

    fired_s: float64 [k]; time_s, rate: middles of the bins and requests/s, float64 [n]; around_s: float64 [w], and
    around: requests of each second around a firing over the mean of the minute before, float64 [m, w].
    """

    name: str
    seconds: float
    fired_s: Floats
    time_s: Floats
    rate: Floats
    around_s: Floats
    around: npt.NDArray[np.float64]

    @property
    def per_hour(self) -> float:
        """Firings an hour."""
        return float(self.fired_s.size * 3600.0 / self.seconds)


def ticks_of(trace: Trace, tick_s: float) -> Ticks:
    """Return the arrivals of each tick of a trace, int64 [n]; UserError where there are too many."""
    tick_ns = round(tick_s * 1e9)
    since_ns = trace.arrival_ns - trace.arrival_ns[0]
    count = int(since_ns[-1] // tick_ns) + 1
    if count > MOST_TICKS:
        raise UserError(
            f"trace {trace.meta.name} lasts {since_ns[-1] * 1e-9:.3g} s; of at most {MOST_TICKS * tick_s:.3g} s the "
            "ticks can be looked at: cut it"
        )
    return np.bincount(since_ns // tick_ns, minlength=count).astype(np.int64)


def firings(trace: Trace, name: str, settings: BurstSettings) -> Firings:
    """Let the arrivals' detector look at a trace, from its first request to its last."""
    if len(trace) == 0:
        raise UserError(f"trace {name} has no requests: there is nothing to look at")
    arrivals = ticks_of(trace, settings.tick_s)
    found = np.zeros(arrivals.size, np.bool_)
    look_at_all(new_burst_state(replace(settings, p99_sigmas=NEVER)), arrivals, NO_P99, found)
    at = np.flatnonzero(found)

    def per(seconds: float) -> Floats:
        width = round(seconds / settings.tick_s)
        whole = arrivals[: arrivals.size // width * width].reshape(-1, width)
        return np.asarray(whole.sum(1) / seconds, np.float64)

    each = round(1.0 / settings.tick_s)
    around_s = np.arange(-BEFORE_S, AFTER_S)
    start, end = round(BEFORE_S / settings.tick_s), round(AFTER_S / settings.tick_s)
    rows = []
    for tick in at:
        if tick >= start and tick + end <= arrivals.size:
            row = arrivals[tick - start : tick + end].reshape(-1, each).sum(1).astype(np.float64)
            rows.append(row / max(row[: round(BEFORE_S)].mean(), 1e-9))
    rate = per(_BIN_S)
    return Firings(
        name,
        arrivals.size * settings.tick_s,
        np.asarray((at + 1) * settings.tick_s, np.float64),
        np.arange(0.5, rate.size) * _BIN_S,
        rate,
        around_s + 0.5,
        np.array(rows).reshape(len(rows), around_s.size),
    )
