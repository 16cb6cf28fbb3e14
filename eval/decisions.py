"""Kernels that take routing decisions one after the other, to time them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner, kernel
from envs.serving.cluster_loop import ClusterState, decide

LINE_BYTES = 64


@kernel
def decide_all(cluster: ClusterState, first: int, last: int, now_ns: int, other: npt.NDArray[np.uint8]) -> int:
    """Decide on requests first..last - 1, reading `other` before each; return a sum that depends on all of it."""
    total = 0
    for i in range(first, last):
        total += _read(other) + decide(cluster, i, now_ns)
    return total


@kernel
def read_all(other: npt.NDArray[np.uint8], times: int) -> int:
    """Read `other` so many times; return a sum that depends on all of it."""
    total = 0
    for i in range(times):
        other[0] = np.uint8(i)  # lest it be read once
        total += _read(other)
    return total


@inner
def _read(other: npt.NDArray[np.uint8]) -> int:
    total = 0
    for at in range(0, other.size, LINE_BYTES):
        total += other[at]
    return total
