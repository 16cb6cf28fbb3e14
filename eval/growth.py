"""Whether the memory of a process stays flat: samples of it over time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from helm_rl.memory import resident_bytes

GROWTH_LIMIT_MIB = 16.0
"""A process's memory is flat if it has grown by no more than this over a run."""


def held_mib() -> float:
    """Return the MiB of memory that this process holds now; NaN where the system does not tell.

    What the C library's allocator keeps for later is given back first, or a queue that was once long would look like a
    leak: it never gets smaller by itself where blocks of several threads lie between each other.
    """
    _give_back()(0)
    return resident_bytes() / 2**20


@functools.cache
def _give_back() -> Callable[[int], int]:
    """Return glibc's malloc_trim; of other libraries, nothing that does anything."""
    return getattr(ctypes.CDLL(None), "malloc_trim", int)


def memory_growth(time_s: npt.NDArray[np.float64], rss_mib: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the growth, from the least of the first third of the samples to that of the last, and the slope per s.

    What requests hold while they are served comes and goes, with bursts as well, and the least is where there is least
    of it; a leak stays.
    """
    third = -(-rss_mib.size // 3)
    growth = float(rss_mib[-third:].min() - rss_mib[:third].min())
    slope = float(np.polyfit(time_s, rss_mib, 1)[0]) if rss_mib.size > 1 else 0.0
    return growth, slope
