"""Kernels whose time is taken: routing decisions, serving without any, networks, reading memory, arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner, kernel
from envs.serving.cluster_loop import ClusterState, decide, serve
from helm_rl.control.base import ALPHA, PolicyState, mean_action, normalise

LINE_BYTES = 64


@kernel
def decide_all(cluster: ClusterState, first: int, last: int, now_ns: int, other: npt.NDArray[np.uint8]) -> int:
    """Decide on requests first..last - 1, reading `other` before each; return a sum that depends on all of it."""
    total = 0
    for i in range(first, last):
        total += _read(other, i) + decide(cluster, i, now_ns)
    return total


@kernel
def serve_placed(cluster: ClusterState, order: npt.NDArray[np.int64], placed: npt.NDArray[np.int16]) -> None:
    """Serve requests in an order, each on the node that `placed` [n] has for it: without a router.

    order: int64 [m], each node's requests as they arrive; between nodes it is free, for none sees another.
    """
    for i in order:
        k = placed[i]
        serve(cluster.nodes[k], i, cluster.requests.arrival_ns[i], cluster.idle_ns[k : k + 1], cluster.emb[k])


@kernel
def read_all(first: int, last: int, other: npt.NDArray[np.uint8]) -> int:
    """Read `other` as `decide_all` does, and do no more; return a sum that depends on all of it."""
    total = 0
    for i in range(first, last):
        total += _read(other, i)
    return total


@kernel
def chase(memory: npt.NDArray[np.int64], at: int, n: int) -> int:
    """Load n times, each time from the index that the load before it brought; return the last."""
    for _ in range(n):
        at = memory[at]
    return at


@kernel
def arithmetic(steps: int) -> int:
    """Compute without touching memory."""
    state = 1
    for i in range(steps):
        state = (state * 6364136223846793005 + i) & 0x7FFFFFFFFFFFFFFF
    return state


@kernel
def networks(policy: PolicyState, observation: npt.NDArray[np.float32], count: int) -> float:
    """Let a base policy see an observation and act so many times; return the sum of its actions."""
    total = 0.0
    for _ in range(count):
        normalise(policy, observation, observation[ALPHA])
        total += mean_action(policy)
    return total


@kernel
def nothing(memory: npt.NDArray[np.uint8], applied_alpha: float, now_ns: int, age_ns: int, mode: int) -> float:
    """Take what a decision takes, and return at once."""
    return applied_alpha


@inner
def _read(other: npt.NDArray[np.uint8], i: int) -> int:
    """Read a byte of every line, another one for every i, lest the compiler read once for all."""
    total = 0
    for at in range(i % LINE_BYTES, other.size, LINE_BYTES):
        total += other[at]
    return total
