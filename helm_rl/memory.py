"""The machine's memory."""

from __future__ import annotations

import os
from pathlib import Path


def free_bytes() -> int:
    """Return the bytes of memory that a process can still get."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
