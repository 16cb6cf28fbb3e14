"""Kernels of the queues: one link, then batches on one accelerator; latencies as they complete.

A request waits for the link, transfers its missing rows (first come, first served), then waits for the accelerator.
Whenever that is idle it takes the requests that are ready, at most `max_batch`, and serves them as one batch that ends
as a whole: continuous batching of prefill-only requests.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel

# QueueState.params
SLO_NS = 0
BATCH_NS = 1  # fixed, per batch
REQUEST_NS = 2  # fixed, per request, outside the queues
LINK_BYTES_PER_NS = 3
FLOP_PER_NS = 4
MAX_BATCH = 5
QUEUE_BOUND = 6
SHED_NS = 7  # the latency that a shed request counts as
N_PARAMS = 8

# QueueState.clocks
LINK_FREE = 0
COMPUTE_FREE = 1
DONE = 2  # ring counters: [DONE, STARTED) is the batch in flight, [STARTED, ADMITTED) waits
STARTED = 3
ADMITTED = 4
N_CLOCKS = 5

# QueueState.window, reset by the reader
COMPLETED = 0
SLOW = 1
SHED = 2
LOG_SUM = 3
EXCESS_SUM = 4
MS_SUM = 5
LINK_BUSY = 6  # ns
COMPUTE_BUSY = 7  # ns
N_WINDOW = 8

SKETCH_BINS = 1600
SKETCH_LOW_MS = 0.01
SKETCH_WIDTH = 0.01  # in ln: 1 % a bin, up to 88,000 s
SKETCH_REQUESTS = 2_000.0  # over which the sketch decays
EXCESS_CLIP = 10.0

FOREVER_NS = 2**63 - 1
# However slow link and accelerator are, times stay within int64: a trace's are below 2**62.
_LATEST_NS = np.int64(2**62 + 2**61)
_LONGEST_NS = 2.0**60


class QueueState(NamedTuple):
    """Queues of one node; Q places in the ring, n requests in the trace."""

    params: npt.NDArray[np.float64]
    clocks: npt.NDArray[np.int64]
    ready_ns: npt.NDArray[np.int64]  # [Q] when the rows are there
    work_flop: npt.NDArray[np.float64]  # [Q]
    request: npt.NDArray[np.int64]  # [Q]
    window: npt.NDArray[np.float64]
    sketch: npt.NDArray[np.float64]  # [SKETCH_BINS] decayed histogram of ln latency
    latency_ms: npt.NDArray[np.float32]  # [n] NaN: not complete


def new_queue_state(params: npt.NDArray[np.float64], requests: int) -> QueueState:
    """Return idle queues."""
    places = int(params[QUEUE_BOUND]) + int(params[MAX_BATCH]) + 1
    return QueueState(
        params,
        np.zeros(N_CLOCKS, np.int64),
        np.zeros(places, np.int64),
        np.zeros(places, np.float64),
        np.zeros(places, np.int64),
        np.zeros(N_WINDOW, np.float64),
        np.zeros(SKETCH_BINS, np.float64),
        np.full(requests, np.nan, np.float32),
    )


def start_window(queue: QueueState) -> None:
    """Reset the window's counters, and let the sketch decay by what completed in it."""
    completed = queue.window[COMPLETED]
    if completed:
        queue.sketch[:] *= math.exp(-completed / SKETCH_REQUESTS)
    queue.window[:] = 0.0


@kernel
def waiting(queue: QueueState) -> int:
    """Requests that wait for the link or the accelerator."""
    return queue.clocks[ADMITTED] - queue.clocks[STARTED]


@kernel
def full(queue: QueueState) -> bool:
    """Return whether the next request must be shed."""
    return waiting(queue) >= queue.params[QUEUE_BOUND]


@kernel
def shed(queue: QueueState, request: int) -> None:
    """Refuse a request."""
    queue.window[SHED] += 1
    complete(queue, request, queue.params[SHED_NS] * 1e-6)


@kernel
def admit(queue: QueueState, request: int, arrival_ns: int, link_bytes: float, flop: float) -> None:
    """Put a request on the link, behind those before it."""
    clocks = queue.clocks
    start = max(arrival_ns, clocks[LINK_FREE])
    busy = np.int64(min(link_bytes / queue.params[LINK_BYTES_PER_NS], _LONGEST_NS))
    clocks[LINK_FREE] = min(start + busy, _LATEST_NS)
    queue.window[LINK_BUSY] += busy
    at = clocks[ADMITTED] % queue.ready_ns.size
    queue.ready_ns[at] = clocks[LINK_FREE]
    queue.work_flop[at] = flop
    queue.request[at] = request
    clocks[ADMITTED] += 1


@kernel
def advance(queue: QueueState, arrival_ns: npt.NDArray[np.int64], now_ns: int) -> None:
    """Let the accelerator work until `now_ns`: complete what ends by then, start what can start before."""
    clocks = queue.clocks
    places = queue.ready_ns.size
    while True:
        if clocks[DONE] < clocks[STARTED]:
            end = clocks[COMPUTE_FREE]
            if end > now_ns:
                return
            while clocks[DONE] < clocks[STARTED]:
                request = queue.request[clocks[DONE] % places]
                complete(queue, request, (end - arrival_ns[request] + queue.params[REQUEST_NS]) * 1e-6)
                clocks[DONE] += 1
        if clocks[STARTED] == clocks[ADMITTED]:
            return
        start = max(clocks[COMPUTE_FREE], queue.ready_ns[clocks[STARTED] % places])
        if start >= now_ns:
            return
        flop = 0.0
        size = 0
        while size < queue.params[MAX_BATCH] and clocks[STARTED] < clocks[ADMITTED]:
            at = clocks[STARTED] % places
            if queue.ready_ns[at] > start:
                break
            flop += queue.work_flop[at]
            size += 1
            clocks[STARTED] += 1
        busy = np.int64(min(queue.params[BATCH_NS] + flop / queue.params[FLOP_PER_NS], _LONGEST_NS))
        clocks[COMPUTE_FREE] = min(start + busy, _LATEST_NS)
        queue.window[COMPUTE_BUSY] += busy


@kernel
def complete(queue: QueueState, request: int, latency_ms: float) -> None:
    """Count a request that took `latency_ms`, which must be above 0."""
    window = queue.window
    ratio = latency_ms * 1e6 / queue.params[SLO_NS]
    queue.latency_ms[request] = latency_ms
    window[COMPLETED] += 1
    if ratio > 1.0:
        window[SLOW] += 1
        window[EXCESS_SUM] += min(ratio - 1.0, EXCESS_CLIP)
    window[LOG_SUM] += math.log(ratio)
    window[MS_SUM] += latency_ms
    at = int(math.log(latency_ms / SKETCH_LOW_MS) / SKETCH_WIDTH)
    queue.sketch[min(max(at, 0), SKETCH_BINS - 1)] += 1.0


@kernel
def sketch_p99_ms(queue: QueueState) -> float:
    """Return the 99th percentile of the decayed histogram (upper edge of its bin, within 1 %); NaN when empty."""
    total = queue.sketch.sum()
    if total <= 0.0:
        return np.nan
    above = 0.0
    for at in range(SKETCH_BINS - 1, -1, -1):
        above += queue.sketch[at]
        if above >= 0.01 * total:
            return SKETCH_LOW_MS * math.exp((at + 1) * SKETCH_WIDTH)
    return np.nan
