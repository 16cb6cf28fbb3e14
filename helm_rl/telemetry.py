"""What of a node's measurements reaches its controller: late, or not at all, as in production."""

from __future__ import annotations

from collections import deque

import numpy as np

from helm_rl.metrics import WindowStats
from helm_rl.scenario import TelemetrySection


class Telemetry:
    """Holds windows back for `delay_s` and loses a share of them.

    That only a sample of requests is measured (`sample`) shows in the windows themselves: the node measures no others.
    """

    def __init__(self, section: TelemetrySection, seed: int = 0) -> None:
        self._delay_ns = round(section.delay_s * 1e9)
        self._loss = section.loss
        self.reset(seed)

    def reset(self, seed: int = 0) -> None:
        """Forget all windows; what is lost from now on depends on the seed alone."""
        self._waiting: deque[WindowStats] = deque()
        self._rng = np.random.default_rng(seed)

    def pass_on(self, window: WindowStats) -> list[WindowStats]:
        """Take the newest window; return those that arrive by its end, in their order."""
        if self._loss == 0.0 or self._rng.random() >= self._loss:
            self._waiting.append(window)
        arrived = []
        while self._waiting and self._waiting[0].end_ns + self._delay_ns <= window.end_ns:
            arrived.append(self._waiting.popleft())
        return arrived
