"""What else the machine does while something is measured: a wall clock sees that, too."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Others:
    """Tells the share of the processors' time that other processes took since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float:
        """Return it, 0 to 1; NaN where the system does not tell."""
        busy, own, wall = (now - then for now, then in zip(self._now(), self._start, strict=True))
        if not busy > 0:
            return float("nan")
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return the seconds that all processors were busy, those of this process, and the clock."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            fields = []
        ticks = [float(field) for field in fields]
        # user nice system idle iowait irq softirq steal ...: all but the two in which nothing was done.
        busy = (sum(ticks[:8]) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK") if len(ticks) >= 8 else float("nan")
        return busy, time.process_time(), time.monotonic()
