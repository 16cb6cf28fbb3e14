"""Kernels of a node's queues: requests wait for the link, transfer their missing rows, wait for the accelerator.

The link serves one request at a time. Whenever the accelerator is idle it takes the requests that are ready, at most
`max_batch`, and serves them as one batch that ends as a whole: continuous batching of prefill-only requests. Keys and
values that come back from host memory cross PCIe meanwhile, first come, first served, and a request is ready when both
are there.

Tenants wait in queues of their own, at the link as at the accelerator. Those of the highest priority are served first,
and among these in the proportion of their weights: the tenant with the least work served so far, divided by its weight,
is next; one that comes back after a pause starts level with the others (start-time fair queueing: Goyal, Vin and Cheng,
SIGCOMM 1996). When all places are taken, a request of the lowest priority, among them of the tenant who waits for the
most for his weight (the one that comes included), gives way: his newest at the link, else his last to be ready.

Work in the background uses the link in pieces while nobody waits for it, so a request waits for one piece at most, and
no more than a share of all time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner, kernel
from helm_rl.latency import LatencyState, complete, shed

# QueueState.params
BATCH_NS = 0  # fixed, per batch
REQUEST_NS = 1  # fixed, per request, outside the queues
MAX_BATCH = 2
QUEUE_BOUND = 3
BACKGROUND_SHARE = 4  # of the link's time
PIECE_NS = 5  # most of a piece of background work
N_PARAMS = 6

# QueueState.clocks
ON_LINK = 0  # place of the request on the link, or one of the two below
LINK_END = 1  # when the link is free, or since when it is
BATCH = 2  # requests in the batch on the accelerator, 0: idle
BATCH_END = 3  # when the accelerator is free, or since when it is
PCIE_FREE = 4
BACKGROUND_NEXT = 5  # when the next piece of background work may start
PRESENT = 6  # requests admitted and not complete
COUNTED_TO = 7  # PRESENT_NS is summed up to here
N_FREE = 8
N_CLOCKS = 9

# QueueState.sums
LINK_WORK = 0  # ns, of the requests that wait for the link
COMPUTE_WORK = 1  # ns, of all that are not in the batch
BACKGROUND = 2  # ns of link still to be used in the background
BACKGROUND_DONE = 3  # ns
PRESENT_NS = 4  # requests x ns: the integral of PRESENT
LATENCY_NS = 5  # of all that have gone, from arrival, without REQUEST_NS
ELSEWHERE_NS = 6  # of it, what passed before a request was admitted here
LINK_BUSY = 7  # ns, foreground; reset by the reader
COMPUTE_BUSY = 8  # ns; reset by the reader
PIECE_WORK = 9  # ns of the piece that is on the link
N_SUMS = 10

LINK, READY = 0, 1  # where requests wait
IDLE, PIECE = -1, -2  # on the link: nothing, background work

FOREVER_NS = 2**63 - 1
# However slow link and accelerator are, times stay within int64: a trace's are below 2**62.
_LATEST_NS = np.int64(2**62 + 2**61)
_LONGEST_NS = 2.0**60


class QueueState(NamedTuple):
    """Queues of one node: Q places for requests, T tenants."""

    params: npt.NDArray[np.float64]
    weight: npt.NDArray[np.float64]  # [T]
    priority: npt.NDArray[np.int64]  # [T]
    arrival_ns: npt.NDArray[np.int64]  # [n] of the trace
    clocks: npt.NDArray[np.int64]
    sums: npt.NDArray[np.float64]
    request: npt.NDArray[np.int64]  # [Q]
    link_ns: npt.NDArray[np.float64]  # [Q]
    work_ns: npt.NDArray[np.float64]  # [Q] on the accelerator
    ready_ns: npt.NDArray[np.int64]  # [Q] when what it needs from PCIe is there; past the link, when all is
    free: npt.NDArray[np.int32]  # [Q] stack of places without a request
    batch: npt.NDArray[np.int32]  # [max_batch] places
    ring: npt.NDArray[np.int32]  # [2, T, Q] places that wait: in order of arrival, past the link of ready_ns
    head: npt.NDArray[np.int64]  # [2, T]
    length: npt.NDArray[np.int64]  # [2, T]
    tag: npt.NDArray[np.float64]  # [2, T] work served / weight
    started: npt.NDArray[np.float64]  # [2, T] the tag with which the tenant was served last
    measured: LatencyState


def new_queue_state(
    params: npt.NDArray[np.float64],
    weight: npt.NDArray[np.float64],
    priority: npt.NDArray[np.int64],
    arrival_ns: npt.NDArray[np.int64],
    measured: LatencyState,
    start_ns: int = 0,
) -> QueueState:
    """Return queues that are idle since `start_ns`."""
    tenants = weight.size
    places = int(params[QUEUE_BOUND]) + int(params[MAX_BATCH]) + 1
    clocks = np.full(N_CLOCKS, start_ns, np.int64)
    clocks[ON_LINK] = IDLE
    clocks[BATCH] = clocks[PRESENT] = 0
    clocks[N_FREE] = places
    return QueueState(
        params,
        weight,
        priority,
        arrival_ns,
        clocks,
        np.zeros(N_SUMS),
        np.zeros(places, np.int64),
        np.zeros(places),
        np.zeros(places),
        np.zeros(places, np.int64),
        np.arange(places - 1, -1, -1, dtype=np.int32),
        np.zeros(int(params[MAX_BATCH]), np.int32),
        np.zeros((2, tenants, places), np.int32),
        np.zeros((2, tenants), np.int64),
        np.zeros((2, tenants), np.int64),
        np.zeros((2, tenants)),
        np.zeros((2, tenants)),
        measured,
    )


def present(queue: QueueState) -> npt.NDArray[np.int64]:
    """Return the requests that are in the queues or in the batch, ascending."""
    taken = np.ones(queue.free.size, np.bool_)
    taken[queue.free[: queue.clocks[N_FREE]]] = False
    return np.sort(queue.request[taken])


@kernel
def waiting(queue: QueueState) -> int:
    """Requests that wait for the link, are on it, or wait for the accelerator."""
    return queue.clocks[PRESENT] - queue.clocks[BATCH]


@kernel
def backlog_ns(queue: QueueState, now_ns: int) -> float:
    """Return how long the link or the accelerator, whichever it is longer, will take for what is here."""
    clocks, sums = queue.clocks, queue.sums
    link = sums[LINK_WORK]
    if clocks[ON_LINK] != IDLE:
        link += max(0, clocks[LINK_END] - now_ns)
    compute = sums[COMPUTE_WORK]
    if clocks[BATCH] > 0:
        compute += max(0, clocks[BATCH_END] - now_ns)
    return max(link, compute)


@kernel
def make_place(queue: QueueState, request: int, now_ns: int) -> bool:
    """Return whether the request can be admitted; if all places are taken, another one may be shed for it."""
    if waiting(queue) < queue.params[QUEUE_BOUND]:
        return True
    own = queue.measured.tenant[request]
    victim = -1
    longest = 0.0
    for t in range(queue.weight.size):
        n = queue.length[LINK, t] + queue.length[READY, t]
        if n == 0:
            continue
        wait = n / queue.weight[t]
        if (
            victim < 0
            or queue.priority[t] < queue.priority[victim]
            or (queue.priority[t] == queue.priority[victim] and wait > longest)
        ):
            victim = t
            longest = wait
    if victim < 0 or victim == own or queue.priority[victim] > queue.priority[own]:
        return False
    mine = (queue.length[LINK, own] + queue.length[READY, own] + 1) / queue.weight[own]
    if queue.priority[victim] == queue.priority[own] and longest <= mine:
        return False
    places = queue.free.size
    stage = LINK if queue.length[LINK, victim] > 0 else READY
    queue.length[stage, victim] -= 1
    at = queue.ring[stage, victim, (queue.head[stage, victim] + queue.length[stage, victim]) % places]
    if stage == LINK:
        queue.sums[LINK_WORK] -= queue.link_ns[at]
    queue.sums[COMPUTE_WORK] -= queue.work_ns[at]
    shed(queue.measured, queue.request[at])
    _go(queue, at, now_ns)
    return True


@kernel
def admit(
    queue: QueueState,
    request: int,
    now_ns: int,
    link_ns: float,
    pcie_ns: float,
    soonest_ns: float,
    work_ns: float,
) -> None:
    """Let a request, for which there is a place, wait for the link.

    The times are those for which it keeps link, PCIe and accelerator busy; it is not ready for the last before
    `soonest_ns` have passed.
    """
    clocks, sums = queue.clocks, queue.sums
    clocks[N_FREE] -= 1
    at = queue.free[clocks[N_FREE]]
    queue.request[at] = request
    queue.link_ns[at] = min(link_ns, _LONGEST_NS)
    queue.work_ns[at] = min(work_ns, _LONGEST_NS)
    queue.ready_ns[at] = min(now_ns + np.int64(min(soonest_ns, _LONGEST_NS)), _LATEST_NS)
    if pcie_ns > 0.0:
        clocks[PCIE_FREE] = min(max(clocks[PCIE_FREE], now_ns) + np.int64(min(pcie_ns, _LONGEST_NS)), _LATEST_NS)
        queue.ready_ns[at] = max(queue.ready_ns[at], clocks[PCIE_FREE])
    _count(queue, now_ns)
    clocks[PRESENT] += 1
    sums[ELSEWHERE_NS] += now_ns - queue.arrival_ns[request]
    sums[LINK_WORK] += queue.link_ns[at]
    sums[COMPUTE_WORK] += queue.work_ns[at]
    _enter(queue, LINK, queue.measured.tenant[request], at)
    if clocks[ON_LINK] == IDLE:
        _start_link(queue, now_ns)


@kernel
def ask_background(queue: QueueState, work_ns: float, now_ns: int) -> None:
    """Set the link's work in the background that is still to be done."""
    if queue.sums[BACKGROUND] <= 0.0:
        queue.clocks[BACKGROUND_NEXT] = max(queue.clocks[BACKGROUND_NEXT], now_ns)
    queue.sums[BACKGROUND] = work_ns


@kernel
def advance(queue: QueueState, now_ns: int) -> None:
    """Let link and accelerator work until `now_ns`: complete what ends by then, start what can start before."""
    clocks = queue.clocks
    while True:
        link_end = clocks[LINK_END] if clocks[ON_LINK] != IDLE else FOREVER_NS
        batch_end = clocks[BATCH_END] if clocks[BATCH] > 0 else FOREVER_NS
        batch_start = _batch_start(queue)
        piece_start = _piece_start(queue)
        if link_end <= min(batch_end, batch_start, piece_start):
            if link_end > now_ns or link_end == FOREVER_NS:
                return
            _end_link(queue)
        elif batch_end <= min(batch_start, piece_start):
            if batch_end > now_ns:
                return
            _end_batch(queue)
        elif batch_start <= piece_start:
            if batch_start >= now_ns:
                return
            _start_batch(queue, batch_start)
        else:
            if piece_start >= now_ns:
                return
            _start_piece(queue, piece_start)


@inner
def _batch_start(queue: QueueState) -> int:
    """Return when an idle accelerator finds a request that is ready."""
    if queue.clocks[BATCH] > 0:
        return FOREVER_NS
    first = np.int64(FOREVER_NS)
    for t in range(queue.weight.size):
        if queue.length[READY, t] > 0:
            first = min(first, queue.ready_ns[queue.ring[READY, t, queue.head[READY, t]]])
    return max(first, queue.clocks[BATCH_END])


@inner
def _piece_start(queue: QueueState) -> int:
    """Return when an idle link takes up work in the background. It is idle only while nobody waits for it."""
    if queue.clocks[ON_LINK] != IDLE or queue.sums[BACKGROUND] <= 0.0 or queue.params[BACKGROUND_SHARE] <= 0.0:
        return FOREVER_NS
    return max(queue.clocks[LINK_END], queue.clocks[BACKGROUND_NEXT])


@inner
def _start_piece(queue: QueueState, start_ns: int) -> None:
    clocks, sums = queue.clocks, queue.sums
    length = min(sums[BACKGROUND], queue.params[PIECE_NS], _LONGEST_NS)
    sums[BACKGROUND] -= length
    sums[PIECE_WORK] = length
    clocks[ON_LINK] = PIECE
    clocks[LINK_END] = min(start_ns + np.int64(length), _LATEST_NS)
    clocks[BACKGROUND_NEXT] = min(
        start_ns + np.int64(min(length / queue.params[BACKGROUND_SHARE], _LONGEST_NS)), _LATEST_NS
    )


@inner
def _start_link(queue: QueueState, now_ns: int) -> None:
    """Put on the idle link whoever is next, if anybody waits."""
    clocks = queue.clocks
    t = _next(queue, LINK, FOREVER_NS)
    if t < 0:
        return
    at = _leave(queue, LINK, t, queue.link_ns)
    busy = np.int64(queue.link_ns[at])
    queue.sums[LINK_WORK] -= queue.link_ns[at]
    if queue.length[LINK].sum() == 0:
        queue.sums[LINK_WORK] = 0.0  # what rounding has left
    clocks[ON_LINK] = at
    clocks[LINK_END] = min(now_ns + busy, _LATEST_NS)
    queue.sums[LINK_BUSY] += busy


@inner
def _end_link(queue: QueueState) -> None:
    clocks = queue.clocks
    at = clocks[ON_LINK]
    clocks[ON_LINK] = IDLE
    if at == PIECE:
        queue.sums[BACKGROUND_DONE] += queue.sums[PIECE_WORK]
    else:
        queue.ready_ns[at] = max(queue.ready_ns[at], clocks[LINK_END])
        _enter(queue, READY, queue.measured.tenant[queue.request[at]], at)
    _start_link(queue, clocks[LINK_END])


@inner
def _start_batch(queue: QueueState, start_ns: int) -> None:
    clocks = queue.clocks
    work = 0.0
    size = 0
    while size < queue.batch.size:
        t = _next(queue, READY, start_ns)
        if t < 0:
            break
        at = _leave(queue, READY, t, queue.work_ns)
        work += queue.work_ns[at]
        queue.batch[size] = at
        size += 1
    clocks[BATCH] = size
    queue.sums[COMPUTE_WORK] -= work
    if waiting(queue) == 0:
        queue.sums[COMPUTE_WORK] = 0.0  # what rounding has left
    busy = np.int64(min(queue.params[BATCH_NS] + work, _LONGEST_NS))
    clocks[BATCH_END] = min(start_ns + busy, _LATEST_NS)
    queue.sums[COMPUTE_BUSY] += busy


@inner
def _end_batch(queue: QueueState) -> None:
    clocks = queue.clocks
    end = clocks[BATCH_END]
    for k in range(clocks[BATCH]):
        at = queue.batch[k]
        request = queue.request[at]
        took = end - queue.arrival_ns[request] + queue.params[REQUEST_NS]
        complete(queue.measured, request, took * 1e-6)
        _go(queue, at, end)
    clocks[BATCH] = 0


@inner
def _next(queue: QueueState, stage: int, now_ns: int) -> int:
    """Return the tenant whose turn it is, of those whose first request is there by `now_ns`; -1: nobody's."""
    best = -1
    for t in range(queue.weight.size):
        if queue.length[stage, t] == 0:
            continue
        if stage == READY and queue.ready_ns[queue.ring[stage, t, queue.head[stage, t]]] > now_ns:
            continue
        if (
            best < 0
            or queue.priority[t] > queue.priority[best]
            or (queue.priority[t] == queue.priority[best] and queue.tag[stage, t] < queue.tag[stage, best])
        ):
            best = t
    return best


@inner
def _enter(queue: QueueState, stage: int, t: int, at: int) -> None:
    n = queue.length[stage, t]
    if n == 0:
        for other in range(queue.weight.size):
            if queue.priority[other] == queue.priority[t]:
                queue.tag[stage, t] = max(queue.tag[stage, t], queue.started[stage, other])
    ring, head, places = queue.ring[stage, t], queue.head[stage, t], queue.free.size
    k = n
    while stage == READY and k > 0 and queue.ready_ns[ring[(head + k - 1) % places]] > queue.ready_ns[at]:
        ring[(head + k) % places] = ring[(head + k - 1) % places]  # it still waits for PCIe
        k -= 1
    ring[(head + k) % places] = at
    queue.length[stage, t] = n + 1


@inner
def _leave(queue: QueueState, stage: int, t: int, cost_ns: npt.NDArray[np.float64]) -> int:
    """Take the tenant's first request off; its cost counts as served."""
    at = queue.ring[stage, t, queue.head[stage, t]]
    queue.head[stage, t] = (queue.head[stage, t] + 1) % queue.free.size
    queue.length[stage, t] -= 1
    queue.started[stage, t] = queue.tag[stage, t]
    queue.tag[stage, t] += cost_ns[at] / queue.weight[t]
    return at


@inner
def _go(queue: QueueState, at: int, now_ns: int) -> None:
    """Let the request leave the node, and free its place."""
    clocks = queue.clocks
    _count(queue, now_ns)
    clocks[PRESENT] -= 1
    queue.sums[LATENCY_NS] += now_ns - queue.arrival_ns[queue.request[at]]
    queue.free[clocks[N_FREE]] = at
    clocks[N_FREE] += 1


@inner
def _count(queue: QueueState, now_ns: int) -> None:
    """Add to the integral of PRESENT, up to now."""
    clocks = queue.clocks
    queue.sums[PRESENT_NS] += float(clocks[PRESENT]) * float(now_ns - clocks[COUNTED_TO])
    clocks[COUNTED_TO] = now_ns
