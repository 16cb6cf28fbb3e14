"""The machine's memory, and this process's."""

from __future__ import annotations

import math
import os
from pathlib import Path


def free_bytes() -> int:
    """Return the bytes of memory that a process can still get."""
    return _meminfo("MemAvailable:") or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_bytes() -> int:
    """Return the bytes of memory that the machine has."""
    return _meminfo("MemTotal:") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> float:
    """Return the bytes of memory that this process occupies now; NaN where the system does not tell."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.nan


def _meminfo(name: str) -> int | None:
    """Return a line of the system's own account, in bytes; None where it has none."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
