"""Kernels that record latencies, one by one or in counts: a window's sums, and a decayed histogram for the P99."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix2
from cache_engine.jit import inner, kernel
from helm_rl.metrics import SHED_FACTOR

# LatencyState.window, reset by the reader; requests that are not measured count in none of them
COMPLETED = 0
SLOW = 1
SHED = 2
LOG_SUM = 3
TAIL_SUM = 4
MS_SUM = 5
N_WINDOW = 6

# LatencyState.tail: where the P99 was last, so that the next one is found from there
SUM = 0  # of the sketch
ABOVE = 1  # of the sketch from AT on
AT = 2
N_TAIL = 3

SKETCH_BINS = 1600
SKETCH_LOW_MS = 0.01
SKETCH_WIDTH = 0.01  # in ln: 1 % a bin, up to 88,000 s
SKETCH_REQUESTS = 2_000.0  # over which the sketch decays
P99_REQUESTS = 1_000.0  # measured, below which their P99 says little
TAIL_POWER = 4  # `helm-rl eval reward` has what other powers, and other rewards, teach
TAIL_BEND = 2.0

_ROUNDING = 1e-6
_MEASURED = np.uint64(0x7E1E)  # apart from the other samples of requests
_UNIT = 1.0 / 2.0**53
_S11 = np.uint64(11)


class LatencyState(NamedTuple):
    """Latencies of n requests of T tenants."""

    slo_ns: npt.NDArray[np.float64]  # [T + 1] of each tenant; the last is the scenario's, which shed ones count against
    sample: npt.NDArray[np.float64]  # [1] share of requests that are measured
    tenant: npt.NDArray[np.int32]  # [n]
    latency_ms: npt.NDArray[np.float32]  # [n] NaN: not complete
    window: npt.NDArray[np.float64]
    sketch: npt.NDArray[np.float64]  # [SKETCH_BINS] decayed histogram of ln latency
    tail: npt.NDArray[np.float64]


def new_latency_state(
    slo_ns: npt.NDArray[np.float64],
    tenant: npt.NDArray[np.int32],
    latency_ms: npt.NDArray[np.float32],
    sample: float = 1.0,
) -> LatencyState:
    """Return a state in which nothing was recorded; `latency_ms` may be shared by the nodes of a cluster."""
    return LatencyState(
        slo_ns, np.array([sample]), tenant, latency_ms, np.zeros(N_WINDOW), np.zeros(SKETCH_BINS), np.zeros(N_TAIL)
    )


def sketch_edges_ms() -> npt.NDArray[np.float64]:
    """Return the upper edge of each bin of the sketch, [SKETCH_BINS]."""
    return SKETCH_LOW_MS * np.exp(SKETCH_WIDTH * np.arange(1.0, SKETCH_BINS + 1.0))


def start_window(state: LatencyState) -> None:
    """Reset the window's counters, and let the sketch decay by what completed in it."""
    completed = state.window[COMPLETED] * state.sample[0]
    if completed:
        state.sketch[:] *= math.exp(-completed / SKETCH_REQUESTS)
        state.tail[SUM] = state.sketch.sum()
        state.tail[ABOVE] = state.sketch[int(state.tail[AT]) :].sum()
    state.window[:] = 0.0


@kernel
def weight_of(state: LatencyState, request: int) -> float:
    """Return how many requests this one stands for in the measurements: 1 / sample, or 0 if it is not measured."""
    sample = state.sample[0]
    if sample >= 1.0:
        return 1.0
    return 1.0 / sample if (mix2(np.uint64(request), _MEASURED) >> _S11) * _UNIT < sample else 0.0


@kernel
def shed(state: LatencyState, request: int) -> None:
    """Record a request that was refused."""
    state.window[SHED] += weight_of(state, request)
    complete(state, request, SHED_FACTOR * state.slo_ns[state.slo_ns.size - 1] * 1e-6)


@kernel
def tail_cost(ratio: float) -> float:
    """Return (latency / SLO)^TAIL_POWER, and beyond TAIL_BEND times the SLO its value there, growing by the log.

    Its mean is small where P99 is, and far less noisy. A queue that overflows still costs more the longer it is, but
    does not drown all else.
    """
    if ratio <= TAIL_BEND:
        return float(ratio**TAIL_POWER)
    return float(TAIL_BEND**TAIL_POWER * (1.0 + math.log(ratio / TAIL_BEND)))


@kernel
def complete(state: LatencyState, request: int, latency_ms: float) -> None:
    """Record a request that took `latency_ms`, which must be above 0."""
    state.latency_ms[request] = latency_ms
    measured = weight_of(state, request)
    if measured == 0.0:
        return
    window = state.window
    ratio = latency_ms * 1e6 / state.slo_ns[state.tenant[request]]
    window[COMPLETED] += measured
    if ratio > 1.0:
        window[SLOW] += measured
    window[TAIL_SUM] += measured * tail_cost(ratio)
    window[LOG_SUM] += measured * math.log(ratio)
    window[MS_SUM] += measured * latency_ms
    _add_to_sketch(state, bin_of(latency_ms), 1.0)


@inner
def bin_of(latency_ms: float) -> int:
    """Return the bin of the sketch for a latency above 0; those beyond either end belong to the last bin there."""
    # Bounded before it becomes a whole number, for of infinity that is some number or other.
    return int(min(max(math.log(latency_ms / SKETCH_LOW_MS) / SKETCH_WIDTH, 0.0), SKETCH_BINS - 1.0))


@inner
def _add_to_sketch(state: LatencyState, at: int, requests: float) -> None:
    state.sketch[at] += requests
    state.tail[SUM] += requests
    if at >= state.tail[AT]:
        state.tail[ABOVE] += requests


@kernel
def count(histogram: npt.NDArray[np.float64], latency_ms: float) -> None:
    """Count a request that took `latency_ms`, above 0, in a histogram of the sketch's bins, [SKETCH_BINS]."""
    histogram[bin_of(latency_ms)] += 1.0


@kernel
def complete_counts(state: LatencyState, edges_ms: npt.NDArray[np.float64], requests: npt.NDArray[np.float64]) -> None:
    """Record requests of which only a histogram is known: `requests[k]` took over edges_ms[k - 1], up to edges_ms[k].

    edges_ms: [n], ascending, above 0; the last may be infinite, and what lies in its bucket counts at the edge before.
    The first bucket reaches down to half its edge. Within a bucket requests are spread evenly over the logarithm.
    """
    window, slo_ms = state.window, state.slo_ns[0] * 1e-6
    for k in range(requests.size):
        if requests[k] <= 0.0:
            continue
        low_ms = edges_ms[k - 1] if k > 0 else 0.5 * edges_ms[0]
        first = last = bin_of(low_ms)
        if edges_ms[k] < math.inf:
            # Edges that are those of bins, within rounding, take no bin of the next bucket.
            first, last = bin_of(low_ms * (1.0 + _ROUNDING)), bin_of(edges_ms[k] * (1.0 - _ROUNDING))
            last = max(first, last)
        share = requests[k] / (last - first + 1)
        for at in range(first, last + 1):
            latency_ms = SKETCH_LOW_MS * math.exp((at + 0.5) * SKETCH_WIDTH)
            ratio = latency_ms / slo_ms
            window[COMPLETED] += share
            if ratio > 1.0:
                window[SLOW] += share
            window[TAIL_SUM] += share * tail_cost(ratio)
            window[LOG_SUM] += share * math.log(ratio)
            window[MS_SUM] += share * latency_ms
            _add_to_sketch(state, at, share)


@kernel
def sketch_p99_ms(state: LatencyState) -> float:
    """Return the 99th percentile of the decayed histogram (upper edge of its bin, within 1 %); NaN when empty.

    It is sought from where it was last, so that a look at every tick costs next to nothing.
    """
    sketch, tail = state.sketch, state.tail
    if tail[SUM] <= 0.0:
        return np.nan
    enough = 0.01 * tail[SUM]
    at, above = int(tail[AT]), tail[ABOVE]
    while above < enough and at > 0:
        at -= 1
        above += sketch[at]
    while at < SKETCH_BINS - 1 and above - sketch[at] >= enough:
        above -= sketch[at]
        at += 1
    tail[AT], tail[ABOVE] = at, above
    return SKETCH_LOW_MS * math.exp((at + 1) * SKETCH_WIDTH)


def sketches_p99_ms(sketches: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the 99th percentile of each of n histograms in the sketch's bins, [n, SKETCH_BINS]; NaN where empty."""
    above = sketches[:, ::-1].cumsum(1)[:, ::-1]
    at = np.count_nonzero(above >= 0.01 * above[:, :1], axis=1) - 1
    return np.where(above[:, 0] > 0.0, SKETCH_LOW_MS * np.exp((at + 1) * SKETCH_WIDTH), np.nan)
