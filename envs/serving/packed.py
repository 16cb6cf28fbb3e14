"""Nodes in memory as the machine code has them, so that a kernel can take up any of many."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, ghost, kv, kv_host, pool
from cache_engine.jit import MOST_BYTES, in_memory, kernel
from envs.serving import loop, queues
from envs.serving.rows import new_row_state
from helm_rl import latency
from helm_rl.control import burst
from helm_rl.control.burst import BurstState, look
from helm_rl.latency import sketch_p99_ms


def _example() -> loop.Node:
    """Return a node of the least size: what it is made of is the same in all."""
    zeros = np.zeros(1)
    ids = np.zeros(1, np.int64)
    params = np.ones(queues.N_PARAMS)
    measured = latency.new_latency_state(zeros, np.zeros(1, np.int32), np.zeros(1, np.float32))
    return loop.Node(
        params=zeros,
        clocks=ids,
        window=zeros,
        miss_rate=zeros,
        seen=zeros,
        fetch_rate=zeros,
        counted=np.zeros((2, 1, 3)),
        learnt=np.zeros((2, 1, 3)),
        keys=ids,
        tables=np.zeros(1, np.int16),
        found=np.zeros(1, np.bool_),
        moving=embedding.new_moving_rows(1, 0),
        requests=loop.Requests(
            ids,
            ids,
            np.zeros(1, np.int32),
            np.zeros(1, np.int32),
            np.zeros(1, np.int32),
            np.zeros(1, np.bool_),
            np.zeros(1, np.bool_),
        ),
        rows=new_row_state(),
        queue=queues.new_queue_state(params, zeros, ids, ids, measured),
        pool=pool.new_pool_state(1, 2),
        emb=embedding.new_embedding_state(1, 1, 1, 0, embedding.LRU),
        scratch=embedding.new_embedding_scratch(1),
        kv=kv.new_kv_state(1, 1, 1),
        host=kv_host.new_kv_host_state(0, 1, 1),
        emb_ghost=ghost.new_ghost_state(1.0, 1, 1.0, 1),
        kv_ghost=ghost.new_ghost_state(1.0, 1, 1.0, 1),
    )


_store: Any
load: Any  # for kernels: load(packed) -> Node
_store, load = in_memory(_example())


@kernel
def _pack(packed: npt.NDArray[np.uint8], node: loop.Node) -> None:
    _store(packed, node)


def pack(node: loop.Node) -> npt.NDArray[np.uint8]:
    """Return what `load` makes the node of again, uint8 [MOST_BYTES]; the caller keeps the node's arrays alive."""
    packed = np.zeros(MOST_BYTES, np.uint8)
    _pack(packed, node)
    return packed


@kernel
def run(packed: npt.NDArray[np.uint8], until_ns: int) -> None:
    """Run `loop.run` on a packed node."""
    loop.run(load(packed), until_ns)


@kernel
def run_watched(
    packed: npt.NDArray[np.uint8],
    now_ns: int,
    until_ns: int,
    detector: BurstState,
    stop: bool,
    seen: npt.NDArray[np.float64],
) -> int:
    """Run a packed node from `now_ns` until `until_ns`, the detector looking at the end of every tick.

    With `stop`, only until it finds a burst; return the end. Ticks go on from window to window, whatever lies between.
    What is shown to the detector at its first m ticks, arrivals and P99, goes to `seen`, float64 [m, 2].
    The P99 that is looked at is that of the requests that were complete when the last one came: so the node is taken
    up as often as without a detector, and serves the same. It is not known before latency.P99_REQUESTS were measured.
    """
    node = load(packed)
    clocks, arrival_ns, measured = node.clocks, node.requests.arrival_ns, node.queue.measured
    params, sums, counts = detector.params, detector.sums, detector.counts
    tick_ns = np.int64(params[burst.TICK_NS])
    if not now_ns < counts[burst.TICK_END_NS] <= now_ns + tick_ns:  # it has seen nothing, or has not seen all
        counts[burst.TICK_END_NS] = now_ns + tick_ns
        sums[burst.PARTIAL] = 0.0
    i = clocks[loop.NEXT_REQUEST]
    completed, p99_ms = -1.0, math.nan
    while True:
        coming = i < arrival_ns.size and arrival_ns[i] < until_ns
        now_ns = arrival_ns[i] if coming else until_ns
        while counts[burst.TICK_END_NS] <= now_ns:
            end_ns = counts[burst.TICK_END_NS]
            if measured.window[latency.COMPLETED] != completed:
                completed = measured.window[latency.COMPLETED]
                if measured.tail[latency.SUM] >= latency.P99_REQUESTS:
                    p99_ms = sketch_p99_ms(measured)
            tick = counts[burst.TICKS]
            if tick < seen.shape[0]:
                seen[tick, 0] = sums[burst.PARTIAL]
                seen[tick, 1] = p99_ms
            found = look(detector, sums[burst.PARTIAL], p99_ms)
            sums[burst.PARTIAL] = 0.0
            counts[burst.TICK_END_NS] = end_ns + tick_ns
            if found and stop:
                clocks[loop.NEXT_REQUEST] = i
                loop.advance(node, end_ns)
                return end_ns
        loop.advance(node, now_ns)
        if not coming:
            clocks[loop.NEXT_REQUEST] = i
            return until_ns
        loop.serve(node, i, now_ns)
        sums[burst.PARTIAL] += 1.0
        i += 1
