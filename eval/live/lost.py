"""Requests that a live node has neither served nor shed: there must be none."""

from __future__ import annotations

import numpy as np

from envs.serving.live import LiveNode

PATIENCE_S = 120.0
"""In which what has arrived by the end must have been served."""
_LOOK_NS = 50_000_000


def lost(node: LiveNode, begin_ns: int, end_ns: int) -> int:
    """Wait, at most PATIENCE_S after `end_ns`, for who has come from `begin_ns` to then; return how many are still out.

    Raises:
        RuntimeError: serving failed, or the node was closed meanwhile.
    """
    arrival_ns = node.trace.arrival_ns
    came = (arrival_ns >= begin_ns) & (arrival_ns < end_ns)
    while (out := int(np.isnan(node.latency_ms[came]).sum())) and node.clock_ns() < end_ns + PATIENCE_S * 1e9:
        node.wait(node.clock_ns() + _LOOK_NS)
    return out
