"""What is measured over a window of serving, and how latencies become the figures that are quoted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHED_FACTOR = 100.0
"""A request that is shed or refused counts as this many times the SLO in every figure."""
MOST_REGRET = 1.0
"""Regret, as a share of the reference's P99, beyond which a policy counts as no worse in a mean."""


def shed_ms(slo_ms: float) -> np.float32:
    """Return the latency, ms, that a request shed under this SLO is recorded with, in latencies' own float32."""
    return np.float32(SHED_FACTOR * slo_ms)


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Counters of one window of serving: [start_ns, end_ns) of the trace's clock.

    Latencies count in the window in which the request completes, arrivals in the window in which it arrives.
    """

    start_ns: int
    end_ns: int
    arrivals: int
    returning: int  # arrivals whose user came within the last 60 s
    completed: int  # includes shed
    slow: int  # completed over the SLO, shed included
    shed: int  # refused at admission, the queue being full
    history_tokens: int  # asked
    history_tokens_hit: int  # found in the KV cache
    rows: float  # embedding rows asked
    rows_hit: float
    log_latency_sum: float  # sum over completed of ln(latency / SLO)
    tail_cost_sum: (
        float  # sum over completed of (latency / SLO)^4, beyond 2 x the SLO 16 (1 + ln of half of that ratio)
    )
    latency_ms_sum: float
    p99_ms: float  # decayed sketch of at least the last 1,000 requests; NaN before the first request completes
    link_busy_ns: int
    compute_busy_ns: int
    queue: int  # requests waiting when the window closed
    queue_bound: int
    alpha: float  # EMB share as applied when the window closed
    target: float  # EMB share asked for
    backlog_pages: int  # pages still to move to reach the target
    moved_pages: int  # ownership changes within the window
    pages: int
    emb_margin_ms: float  # ms saved per request by 1 % more of the pool as EMB (ghost estimate)
    kv_margin_ms: float  # the same as KV
    # of kv_margin_ms, what is saved on the link: rows of histories that are not read again
    kv_margin_link_ms: float = 0.0
    fetched_bytes: float = 0.0  # over link and PCIe while requests waited for them
    refilled_bytes: float = 0.0  # over the link in the background
    # largest statistic of a burst detector over its threshold, of all ticks; 0 where none looked
    burst_score: float = 0.0
    # ms saved per request if EMB had k / K of the pool, k = 0..K, and if KV had (ghosts); empty on the live engine
    emb_saved_ms: tuple[float, ...] = ()
    kv_saved_ms: tuple[float, ...] = ()

    @property
    def length_ns(self) -> int:
        """How long it lasted."""
        return self.end_ns - self.start_ns


def quantile_ms(latency_ms: npt.NDArray[np.floating], q: float) -> float:
    """Return the `q`-quantile (0 < q <= 1) by the nearest-rank method: an observed value; NaN for an empty
    array.
    """
    if not 0.0 < q <= 1.0:
        raise ValueError(f"q must lie in (0, 1], got {q}")
    if latency_ms.size == 0:
        return float("nan")
    rank = max(0, int(np.ceil(np.round(q * latency_ms.size, 9))) - 1)
    return float(np.partition(latency_ms, rank)[rank])


def p99_ms(latency_ms: npt.NDArray[np.floating]) -> float:
    """Return the 99th percentile by nearest rank (an observed latency, never an interpolation); NaN if empty."""
    return quantile_ms(latency_ms, 0.99)


def mean_regret(regrets: Collection[float]) -> float:
    """Return the mean of P99 regrets, each counted as MOST_REGRET at the most: of a collapse, how deep says little."""
    return float(np.mean([min(regret, MOST_REGRET) for regret in regrets]))
