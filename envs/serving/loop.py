"""The compiled loop of a node: requests in order of arrival through caches, link and accelerator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, ghost, kv
from cache_engine.backends.cpu.embedding import EmbeddingScratch, EmbeddingState, MovingRows
from cache_engine.backends.cpu.ghost import GhostState
from cache_engine.backends.cpu.kv import KvState
from cache_engine.backends.cpu.pool import PoolState
from cache_engine.hashing import mix
from cache_engine.jit import inner, kernel
from envs.serving import latency
from envs.serving.latency import QueueState
from envs.serving.rows import ITEMS, RowState, candidate_rows, history_rows

# NodeState.params
FLOP_PER_TOKEN = 0
FLOP_PER_PAIR = 1
ROW_BYTES = 2
ROWS_PER_TOKEN = 3
CANDIDATES = 4
TICK_NS = 5
PAGES_PER_TICK = 6
N_PARAMS = 7

# NodeState.clocks
NEXT_REQUEST = 0
NEXT_TICK_NS = 1
N_CLOCKS = 2

# NodeState.window, reset by the reader
ARRIVALS = 0
RETURNING = 1
TOKENS = 2
TOKENS_HIT = 3
ROWS = 4
ROWS_HIT = 5
MOVED = 6  # pages
BUDGET = 7  # fraction of a page carried from tick to tick; not reset
N_WINDOW = 8

TAIL, HOT = 0, 1
# Sampled lookups over which a class's miss rate is smoothed: its standard error is below .004.
SMOOTHING = 20_000.0
_DRAIN_LIMIT_NS = np.int64(10_000_000_000)


class NodeState(NamedTuple):
    """What a node keeps beside caches and queues. n requests, B sampled rows at most."""

    params: npt.NDArray[np.float64]
    clocks: npt.NDArray[np.int64]
    window: npt.NDArray[np.float64]
    miss_rate: npt.NDArray[np.float64]  # [2] smoothed, of TAIL and HOT: misses / lookups
    seen: npt.NDArray[np.float64]  # [2] lookups smoothed over so far, at most SMOOTHING
    fetch_rate: npt.NDArray[np.float64]  # [2] the same for rows fetched, one for all copies of a row in a request
    keys: npt.NDArray[np.int64]  # [B]
    tables: npt.NDArray[np.int16]  # [B] zeros
    moving: MovingRows  # of a page
    arrival_ns: npt.NDArray[np.int64]  # [n]
    user: npt.NDArray[np.int64]  # [n]
    phase: npt.NDArray[np.int32]  # [n]
    history: npt.NDArray[np.int32]  # [n] tokens
    new: npt.NDArray[np.int32]  # [n] tokens
    returning: npt.NDArray[np.bool_]  # [n] the user came within the last 60 s


@kernel
def run(
    node: NodeState,
    queue: QueueState,
    rows: RowState,
    pool: PoolState,
    emb: EmbeddingState,
    scratch: EmbeddingScratch,
    kvs: KvState,
    emb_ghost: GhostState,
    kv_ghost: GhostState,
    until_ns: int,
) -> None:
    """Serve every request that arrives before `until_ns`, moving pages tick by tick, and the queues until then."""
    clocks = node.clocks
    n = node.arrival_ns.size
    i = clocks[NEXT_REQUEST]
    while True:
        now = node.arrival_ns[i] if i < n else until_ns
        if now >= until_ns:
            break
        _migrate_until(node, pool, emb, scratch, kvs, now)
        latency.advance(queue, node.arrival_ns, now)
        _serve(node, queue, rows, pool, emb, scratch, kvs, emb_ghost, kv_ghost, i)
        i += 1
    clocks[NEXT_REQUEST] = i
    _migrate_until(node, pool, emb, scratch, kvs, until_ns)
    latency.advance(queue, node.arrival_ns, until_ns)


@inner
def _migrate_until(
    node: NodeState, pool: PoolState, emb: EmbeddingState, scratch: EmbeddingScratch, kvs: KvState, now_ns: int
) -> None:
    """Move pages on every tick up to `now_ns`, at most the budget on each; the same steps as `HbmPool.migrate`."""
    clocks = node.clocks
    window = node.window
    tick_ns = np.int64(node.params[TICK_NS])
    e, k = emb.scalars[embedding.MEMBER], kvs.scalars[kv.MEMBER]
    while clocks[NEXT_TICK_NS] <= now_ns:
        tick = clocks[NEXT_TICK_NS]
        if pool.owned[e] == pool.goal[e] and pool.owned[k] == pool.goal[k]:
            clocks[NEXT_TICK_NS] += ((now_ns - tick) // tick_ns + 1) * tick_ns
            return
        clocks[NEXT_TICK_NS] += tick_ns
        window[BUDGET] += node.params[PAGES_PER_TICK]
        budget = np.int64(window[BUDGET])
        window[BUDGET] -= budget
        if emb.scalars[embedding.POLICY] == embedding.SIEVE:
            freed = embedding.relocate_pages(
                emb, pool, scratch, node.moving, node.moving.rows, 0, 0, budget, tick, _DRAIN_LIMIT_NS
            )
        else:
            freed = embedding.release_pages(emb, pool, budget, tick, _DRAIN_LIMIT_NS)
        kv.release_pages(kvs, pool, budget - freed)
        granted = embedding.accept_pages(emb, pool, budget)
        granted += kv.accept_pages(kvs, pool, budget - granted)
        window[MOVED] += granted


@inner
def _serve(
    node: NodeState,
    queue: QueueState,
    rows: RowState,
    pool: PoolState,
    emb: EmbeddingState,
    scratch: EmbeddingScratch,
    kvs: KvState,
    emb_ghost: GhostState,
    kv_ghost: GhostState,
    i: int,
) -> None:
    params = node.params
    window = node.window
    user = node.user[i]
    phase = np.int64(node.phase[i])
    history = np.int64(node.history[i])
    window[ARRIVALS] += 1
    if node.returning[i]:
        window[RETURNING] += 1
    if latency.full(queue):
        latency.shed(queue, i)
        return

    # Newest events were never computed, so they cannot be found.
    old = history - np.int64(node.new[i])
    prefix = kv.lookup(kvs, user, 0, old)
    window[TOKENS] += history
    window[TOKENS_HIT] += prefix
    pages = float(-(-history // kvs.scalars[kv.PAGE_TOKENS]))
    ghost.access(kv_ghost, user, pages, pages)

    keys = node.keys
    tail, hot = history_rows(rows, keys, i, user, phase, prefix, history)
    n = tail + hot
    candidates = np.int64(params[CANDIDATES])
    hot_end = candidate_rows(rows, keys, n, i, phase, candidates, HOT)
    end = candidate_rows(rows, keys, hot_end, i, phase, candidates, TAIL)
    embedding.lookup(emb, pool, scratch, node.tables, keys, end)
    misses_tail = misses_hot = fetched_tail = fetched_hot = 0
    miss, first = scratch.miss, scratch.first
    threshold = emb_ghost.threshold[0]
    for j in range(end):
        if mix(np.uint64(keys[j])) < threshold:
            ghost.follow(emb_ghost, keys[j], 1.0, 1.0)
        if miss[j] >= 0:
            fetched = 1 if first[miss[j]] == j else 0
            if tail <= j < hot_end:
                misses_hot += 1
                fetched_hot += fetched
            else:
                misses_tail += 1
                fetched_tail += fetched
    tokens = history - prefix
    total = float(tokens + candidates) * params[ROWS_PER_TOKEN]
    lookups = float(end - hot_end + tail)
    if rows.content[0] == ITEMS:
        # Few popular items make up much of a log, and whether they are in the sample is chance. What the sample has too
        # few or too many of are mostly their hits (SHARDS-adj): misses are set against the lookups that were expected.
        lookups = total * rows.rate[0]
    _learn(node, TAIL, lookups, misses_tail, fetched_tail)
    _learn(node, HOT, float(hot_end - tail), misses_hot, fetched_hot)

    # The request is charged the expected fetches of its rows: a sample's own would add noise that no real request has.
    hot_rows = total * rows.hot_fraction[phase]
    tail_rows = (total - hot_rows) * rows.tail_share[0]
    missing = min(1.0, node.miss_rate[TAIL]) * tail_rows + node.miss_rate[HOT] * hot_rows
    window[ROWS] += total
    window[ROWS_HIT] += total - missing
    fetches = tail_rows * node.fetch_rate[TAIL] + hot_rows * node.fetch_rate[HOT]

    kv.extend(kvs, pool, user, 0, history)
    pairs = float(tokens) * (float(prefix) + 0.5 * float(tokens)) + float(candidates) * float(history)
    flop = params[FLOP_PER_TOKEN] * float(tokens + candidates) + params[FLOP_PER_PAIR] * pairs
    latency.admit(queue, i, node.arrival_ns[i], fetches * params[ROW_BYTES], flop)


@inner
def _learn(node: NodeState, part: int, lookups: float, misses: int, fetched: int) -> None:
    """Smooth a class's rates of misses and fetches over the last lookups, over all of them while there are few."""
    if lookups > 0.0:
        node.seen[part] = min(node.seen[part] + lookups, SMOOTHING)
        weight = min(1.0, lookups / node.seen[part])
        node.miss_rate[part] += weight * (misses / lookups - node.miss_rate[part])
        node.fetch_rate[part] += weight * (fetched / lookups - node.fetch_rate[part])
