"""What a server written in Python tells of its requests, so that a control loop in the same process can count them."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from helm_rl import latency
from helm_rl.runtime.counters import Latencies

_RETURNING_S = 60.0


class RequestRecorder:
    """Counts requests and their times; any thread may call it.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._came_s: OrderedDict[int, float] = OrderedDict()  # when each user of the last minute came last
        self._took = np.zeros(latency.SKETCH_BINS)
        self.arrivals = self.shed = 0
        self.returning: int | None = None
        self.link_s: float | None = None
        self.compute_s: float | None = None

    def arrived(self, user: int | None = None) -> None:
        """Count a request when it comes; `user`: whose it is, without which nobody is known to return."""
        with self._lock:
            self.arrivals += 1
            if user is None:
                return
            now_s = self._clock()
            came_s = self._came_s.pop(user, -np.inf)
            self.returning = (self.returning or 0) + (now_s - came_s <= _RETURNING_S)
            self._came_s[user] = now_s
            while now_s - next(iter(self._came_s.values())) > _RETURNING_S:
                self._came_s.popitem(last=False)

    def served(self, latency_ms: float) -> None:
        """Count a request when it is complete; latency from when it was due, however late it was taken up.

        Raises:
            ValueError: it is no number.
        """
        if math.isnan(latency_ms):
            raise ValueError("latency_ms must be a number, not nan")
        with self._lock:
            latency.count(self._took, max(float(latency_ms), latency.SKETCH_LOW_MS))

    def refused(self) -> None:
        """Count a request that was shed; it has arrived, too, and is never served."""
        with self._lock:
            self.shed += 1

    def busy(self, link_s: float | None = None, compute_s: float | None = None) -> None:
        """Add to the time for which the link, or the accelerator, was busy; what is never told of is not known.

        Raises:
            ValueError: a time is below 0 or not finite: the sum would be no counter any more.
        """
        for name, seconds in (("link_s", link_s), ("compute_s", compute_s)):
            if seconds is not None and not 0.0 <= seconds < math.inf:  # NaN is not
                raise ValueError(f"{name} must be a number of seconds of at least 0, not {seconds!r}")
        with self._lock:
            if link_s is not None:
                self.link_s = (self.link_s or 0.0) + link_s
            if compute_s is not None:
                self.compute_s = (self.compute_s or 0.0) + compute_s

    def latencies(self) -> Latencies:
        """Return the histogram of the requests served; nothing in it is shared."""
        with self._lock:
            return Latencies(latency.sketch_edges_ms(), self._took.copy())
