"""The compiled loop of a node: requests in order of arrival through caches, link and accelerator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, ghost, kv, kv_host
from cache_engine.backends.cpu.embedding import EmbeddingScratch, EmbeddingState, MovingRows
from cache_engine.backends.cpu.ghost import GhostState
from cache_engine.backends.cpu.kv import KvState
from cache_engine.backends.cpu.kv_host import KvHostState
from cache_engine.backends.cpu.pool import PoolState
from cache_engine.hashing import mix
from cache_engine.jit import inner, kernel
from envs.serving import queues
from envs.serving.queues import QueueState
from envs.serving.rows import ITEMS, RowState, candidate_rows, history_rows
from helm_rl.latency import shed, weight_of

# Node.params
TOKEN_NS = 0  # of compute, per new token
PAIR_NS = 1  # of compute, per pair of a new token and one that it attends to
ROW_BYTES = 2
ROW_NS = 3  # of link, per row
ROWS_PER_TOKEN = 4
CANDIDATES = 5
TICK_NS = 6
PAGES_PER_TICK = 7
KV_MISS = 8  # one of the three below
PAGE_BYTES = 9
PAGE_NS = 10  # of PCIe, per KV page that comes back
ONBOARD_NS = 11  # fixed, for a request that has pages brought back
ONBOARD_PCIE_NS = 12  # of it, what keeps PCIe busy: the fixed cost is that of a batch, which requests share
PCIE_IS_LINK = 13  # 1: rows come over PCIe too
N_PARAMS = 14

RECOMPUTE, ONBOARD, CHEAPER = 0, 1, 2
KV_MISSES = {"recompute": RECOMPUTE, "onboard": ONBOARD, "cheaper": CHEAPER}

# Node.clocks
NEXT_REQUEST = 0
NEXT_TICK_NS = 1
REFILL_FROM = 2  # next row of the law to look at, by popularity; NONE: nothing is refilled
N_CLOCKS = 3
NONE = -1

# Node.window, reset by the reader up to KEPT
ARRIVALS = 0  # all of them, measured or not
RETURNING = 1
TOKENS = 2
TOKENS_HIT = 3
ROWS = 4
ROWS_HIT = 5
MOVED = 6  # pages
FETCHED = 7  # bytes over link and PCIe while a request waits for them
REFILLED = 8  # bytes over the link in the background
KEPT = 9
BUDGET = 9  # fraction of a page carried from tick to tick
REFILL_NS = 10  # work in the background that was done and whose rows were not yet admitted
N_WINDOW = 11

# Classes of rows, whose miss rates differ by orders of magnitude. Of the law's tail: those of new tokens, of candidates
# and of the histories of users who come for the first time; and those that were read before, when the user came last.
FRESH, REREAD = 0, 1
HOT = 2  # the hot set of phase f is class HOT + f
# Sampled lookups over which a class's miss rate is smoothed. Fewer, and it is noise; more, and it lags behind the true
# rate, which moves within a second or two: with four times as many, P99 near the limit was up to 4 % too low.
SMOOTHING = 1_250.0
REFILL_ROWS = 256  # looked at at a time
_REFILL_SCAN = 16_384  # of those that are cached, on each tick
_DRAIN_LIMIT_NS = np.int64(10_000_000_000)


class Requests(NamedTuple):
    """The columns of a trace, n requests."""

    arrival_ns: npt.NDArray[np.int64]  # [n]
    user: npt.NDArray[np.int64]  # [n]
    phase: npt.NDArray[np.int32]  # [n]
    history: npt.NDArray[np.int32]  # [n] tokens
    new: npt.NDArray[np.int32]  # [n] tokens
    returning: npt.NDArray[np.bool_]  # [n] the user came within the last 60 s
    again: npt.NDArray[np.bool_]  # [n] the user came before


class Node(NamedTuple):
    """All that a node is. R sampled rows of a request at most, C classes of rows, B classes of popularity."""

    params: npt.NDArray[np.float64]
    clocks: npt.NDArray[np.int64]
    window: npt.NDArray[np.float64]
    miss_rate: npt.NDArray[np.float64]  # [C] smoothed: misses / lookups
    seen: npt.NDArray[np.float64]  # [C] lookups smoothed over so far, at most SMOOTHING
    fetch_rate: npt.NDArray[np.float64]  # [C] the same for rows fetched, one for all copies of a row in a request
    counted: npt.NDArray[np.float64]  # [2, B, 3] of a request, FRESH and REREAD: lookups, misses, fetched rows
    learnt: npt.NDArray[np.float64]  # [2, B, 3] lookups smoothed over, miss rate, fetch rate
    keys: npt.NDArray[np.int64]  # [R]
    tables: npt.NDArray[np.int16]  # [R] zeros
    found: npt.NDArray[np.bool_]  # [REFILL_ROWS]
    moving: MovingRows  # of a page
    requests: Requests
    rows: RowState
    queue: QueueState
    pool: PoolState
    emb: EmbeddingState
    scratch: EmbeddingScratch
    kv: KvState
    host: KvHostState  # of no pages where there is none
    emb_ghost: GhostState
    kv_ghost: GhostState


@kernel
def run(node: Node, until_ns: int) -> None:
    """Serve every request that arrives before `until_ns`, moving pages tick by tick, and the queues until then."""
    clocks = node.clocks
    arrival_ns = node.requests.arrival_ns
    n = arrival_ns.size
    i = clocks[NEXT_REQUEST]
    while i < n and arrival_ns[i] < until_ns:
        advance(node, arrival_ns[i])
        serve(node, i, arrival_ns[i])
        i += 1
    clocks[NEXT_REQUEST] = i
    advance(node, until_ns)


@kernel
def advance(node: Node, now_ns: int) -> None:
    """Move pages on every tick up to `now_ns`, and let link and accelerator work until then."""
    clocks, pool = node.clocks, node.pool
    tick_ns = np.int64(node.params[TICK_NS])
    e, k = node.emb.scalars[embedding.MEMBER], node.kv.scalars[kv.MEMBER]
    while clocks[NEXT_TICK_NS] <= now_ns:
        tick = clocks[NEXT_TICK_NS]
        settled = pool.owned[e] == pool.goal[e] and pool.owned[k] == pool.goal[k]
        if settled and clocks[REFILL_FROM] == NONE:
            clocks[NEXT_TICK_NS] += ((now_ns - tick) // tick_ns + 1) * tick_ns
            break
        clocks[NEXT_TICK_NS] += tick_ns
        if not settled:
            _migrate(node, tick)
        if clocks[REFILL_FROM] != NONE:
            queues.advance(node.queue, tick)
            _refill(node, tick)
    queues.advance(node.queue, now_ns)


@inner
def _migrate(node: Node, tick: int) -> None:
    """Move pages, at most the budget of a tick; the same steps as `HbmPool.migrate`."""
    window, pool, emb = node.window, node.pool, node.emb
    window[BUDGET] += node.params[PAGES_PER_TICK]
    budget = np.int64(window[BUDGET])
    window[BUDGET] -= budget
    if emb.scalars[embedding.POLICY] == embedding.SIEVE:
        freed = embedding.relocate_pages(
            emb, pool, node.scratch, node.moving, node.moving.rows, 0, 0, budget, tick, _DRAIN_LIMIT_NS
        )
    else:
        freed = embedding.release_pages(emb, pool, budget, tick, _DRAIN_LIMIT_NS)
    if freed > 0 and node.clocks[REFILL_FROM] != NONE:
        _stop_refill(node, tick)
    if node.host.onto.size > 0:
        kv_host.make_surplus_idle(node.kv, node.host, pool, budget - freed)
    kv.release_pages(node.kv, pool, budget - freed)
    granted = embedding.accept_pages(emb, pool, budget)
    refills = node.queue.params[queues.BACKGROUND_SHARE] > 0.0 and node.rows.content[0] != ITEMS
    if granted > 0 and refills and node.clocks[REFILL_FROM] == NONE:
        node.clocks[REFILL_FROM] = 0
    granted += kv.accept_pages(node.kv, pool, budget - granted)
    window[MOVED] += granted


@inner
def _refill(node: Node, tick: int) -> None:
    """Admit the rows that came in the background since the last tick, and ask for more while there is room.

    They are the most popular rows of the law that are not cached. What the catalogue's popularity is, a server knows
    from its logs; of hot sets it knows nothing, and of items (content ITEMS) nothing is refilled.
    """
    clocks, window, queue, emb = node.clocks, node.window, node.queue, node.emb
    row_ns = node.params[ROW_NS] / node.rows.rate[0]  # of the link, per sampled row
    _take_refilled(node)
    strata = np.int64(node.rows.edges[node.rows.edges.size - 1])
    room = embedding.unfilled_slots(emb, 1) > 0
    short = False  # the next row that is not cached has not come
    passed = 0
    while room and not short and passed < _REFILL_SCAN and clocks[REFILL_FROM] < strata:
        first = clocks[REFILL_FROM]
        n = min(np.int64(REFILL_ROWS), strata - first)
        for j in range(n):
            node.keys[j] = first + j
        embedding.contains(emb, node.tables, node.keys, n, node.found)
        for j in range(n):
            if node.found[j]:
                passed += 1
            else:
                short = window[REFILL_NS] < row_ns
                if short or not room:
                    break
                window[REFILL_NS] -= row_ns
                node.keys[0] = first + j
                embedding.lookup(emb, node.pool, node.scratch, node.tables, node.keys, 1)
                room = embedding.unfilled_slots(emb, 1) > 0
            clocks[REFILL_FROM] = first + j + 1
    if not room or clocks[REFILL_FROM] >= strata:
        _stop_refill(node, tick)
    elif short:
        share_ns = queue.params[queues.BACKGROUND_SHARE] * node.params[TICK_NS]
        queues.ask_background(queue, max(row_ns - window[REFILL_NS], queue.params[queues.PIECE_NS], share_ns), tick)


@inner
def _take_refilled(node: Node) -> None:
    """Count what came in the background."""
    window, sums = node.window, node.queue.sums
    window[REFILL_NS] += sums[queues.BACKGROUND_DONE]
    window[REFILLED] += sums[queues.BACKGROUND_DONE] / node.params[ROW_NS] * node.params[ROW_BYTES]
    sums[queues.BACKGROUND_DONE] = 0.0


@inner
def _stop_refill(node: Node, tick: int) -> None:
    """Ask for no more rows in the background; those that came and found no room are lost."""
    _take_refilled(node)
    node.clocks[REFILL_FROM] = NONE
    node.window[REFILL_NS] = 0.0
    queues.ask_background(node.queue, 0.0, tick)


@kernel
def serve(node: Node, i: int, now_ns: int) -> None:
    """Take up request `i`, which comes to this node at `now_ns`; the node has been advanced to that time."""
    params, window, queue, requests = node.params, node.window, node.queue, node.requests
    history = np.int64(requests.history[i])
    measured = weight_of(queue.measured, i)
    window[ARRIVALS] += 1
    if requests.returning[i]:
        window[RETURNING] += measured
    pages = -(-history // node.kv.scalars[kv.PAGE_TOKENS])
    fits = pages <= node.pool.owned[node.kv.scalars[kv.MEMBER]]  # else there is no memory to compute it in
    if not fits or not queues.make_place(queue, i, now_ns):
        shed(queue.measured, i)
        return

    prefix, onboarded = _find_history(node, i, now_ns)
    window[TOKENS] += measured * history
    window[TOKENS_HIT] += measured * prefix
    ghost.access(node.kv_ghost, requests.user[i], float(pages), float(pages))

    _look_up(node, i, prefix)
    # The request is charged the expected fetches of its rows: a sample's own would add noise that no real request has.
    rows, missing, fetches = _expected(node, i, prefix)
    window[ROWS] += measured * rows
    window[ROWS_HIT] += measured * (rows - missing)
    window[FETCHED] += fetches * params[ROW_BYTES] + onboarded * params[PAGE_BYTES]

    if node.host.onto.size > 0:
        kv_host.make_room(node.kv, node.host, node.pool, requests.user[i], 0, history)
        kv_host.extend_tiers(node.kv, node.host, node.pool, requests.user[i], 0, history)
    else:
        kv.extend(node.kv, node.pool, requests.user[i], 0, history)
    link_ns = fetches * params[ROW_NS]
    pcie_ns = soonest_ns = 0.0
    if onboarded > 0:
        pcie_ns = params[ONBOARD_PCIE_NS] + onboarded * params[PAGE_NS]
        soonest_ns = params[ONBOARD_NS] + onboarded * params[PAGE_NS]
    if params[PCIE_IS_LINK] == 1.0:
        link_ns += pcie_ns
        pcie_ns = 0.0
    work_ns = _compute_ns(params, float(prefix), float(history))
    queues.admit(queue, i, now_ns, link_ns, pcie_ns, soonest_ns, work_ns)


@inner
def _find_history(node: Node, i: int, now_ns: int) -> tuple[int, int]:
    """Return the tokens of the request's history that need not be computed, and the pages that come back for that.

    What lies in host memory comes back, is computed anew, or whatever is faster, as the node is set.
    """
    params, requests, kvs, host = node.params, node.requests, node.kv, node.host
    user = requests.user[i]
    history = np.int64(requests.history[i])
    old = history - np.int64(requests.new[i])  # newest events were never computed, so they cannot be found
    if host.onto.size == 0:
        return kv.lookup(kvs, user, 0, old), 0
    prefix = kv_host.lookup_tiers(kvs, host, user, 0, old)
    beyond = kv_host.beyond(kvs, host, user, 0, old)
    if beyond == 0 or params[KV_MISS] == RECOMPUTE:
        return prefix, 0
    pages = -(-beyond // kvs.scalars[kv.PAGE_TOKENS])
    if params[KV_MISS] == CHEAPER:
        waiting_ns = max(0, node.queue.clocks[queues.PCIE_FREE] - now_ns)
        onboard_ns = max(float(waiting_ns), params[ONBOARD_NS]) + pages * params[PAGE_NS]
        compute_ns = _compute_ns(params, float(prefix), float(history)) - _compute_ns(
            params, float(prefix + beyond), float(history)
        )
        reread_ns = _row_fetches(node, i, REREAD) * params[ROWS_PER_TOKEN] * params[ROW_NS]
        # Rows that are fetched either way hide what comes over PCIe meanwhile.
        hidden_ns = 0.0
        if params[PCIE_IS_LINK] == 0.0:
            fresh_ns = _row_fetches(node, i, FRESH) * params[ROWS_PER_TOKEN] * params[ROW_NS]
            hidden_ns = (float(history - prefix - beyond) + params[CANDIDATES]) * fresh_ns
        if onboard_ns >= hidden_ns + float(beyond) * reread_ns + compute_ns:
            return prefix, 0
    came = 0
    while True:
        at = kv_host.next_onboard(kvs, host, node.pool, user, 0, old)
        if at == kv.NONE:
            break
        kv_host.start_onboard(kvs, host, at)
        kv_host.finish_onboard(kvs, host, at, True)
        came += 1
    if came == 0:
        return prefix, 0
    e = kv.find(kvs, user)
    return min(old, kvs.tokens[e]), came


@inner
def _compute_ns(params: npt.NDArray[np.float64], prefix: float, history: float) -> float:
    """Return the ns of compute for the tokens of a history after its prefix, and for the candidates."""
    tokens = history - prefix
    candidates = params[CANDIDATES]
    pairs = tokens * (prefix + 0.5 * tokens) + candidates * history
    return params[TOKEN_NS] * (tokens + candidates) + params[PAIR_NS] * pairs


@inner
def _reread_tokens(node: Node, i: int, prefix: int) -> int:
    """Return how many tokens after the prefix the user's last request had read."""
    requests = node.requests
    if not requests.again[i]:
        return 0
    return max(0, int(requests.history[i]) - int(requests.new[i]) - prefix)


@inner
def _expected(node: Node, i: int, prefix: int) -> tuple[float, float, float]:
    """Return the rows that a request reads, and how many of them are expected to miss and to be fetched."""
    params, rows = node.params, node.rows
    phase = np.int64(node.requests.phase[i])
    reread = float(_reread_tokens(node, i, prefix)) * params[ROWS_PER_TOKEN]
    total = (float(node.requests.history[i] - prefix) + params[CANDIDATES]) * params[ROWS_PER_TOKEN]
    hot = total * rows.hot_fraction[phase]
    missing = node.miss_rate[HOT + phase] * hot
    fetches = node.fetch_rate[HOT + phase] * hot
    tail_share = (1.0 - rows.hot_fraction[phase]) * rows.tail_share[0]
    for part, count in ((FRESH, total - reread), (REREAD, reread)):
        missing += min(1.0, node.miss_rate[part]) * count * tail_share
        fetches += node.fetch_rate[part] * count * tail_share
    return total, missing, fetches


@inner
def _row_fetches(node: Node, i: int, part: int) -> float:
    """Return the expected fetches of one row of a token, fresh or read before."""
    phase = np.int64(node.requests.phase[i])
    hot = node.rows.hot_fraction[phase]
    learnt = part if node.seen[part] > 0.0 else FRESH
    return (1.0 - hot) * node.rows.tail_share[0] * node.fetch_rate[learnt] + hot * node.fetch_rate[HOT + phase]


@inner
def _look_up(node: Node, i: int, prefix: int) -> None:
    """Look up and admit the sampled rows of a request, and learn from them how many of each class miss."""
    requests, rows, scratch = node.requests, node.rows, node.scratch
    phase = np.int64(requests.phase[i])
    user = requests.user[i]
    history = np.int64(requests.history[i])
    keys = node.keys
    middle = prefix + _reread_tokens(node, i, prefix)
    # In order: rows read before, of the tail and of the hot set; then fresh ones.
    tail, hot = history_rows(rows, keys, 0, i, user, phase, prefix, middle)
    reread_end = tail
    fresh_from = tail + hot
    tail, fresh_hot = history_rows(rows, keys, fresh_from, i, user, phase, middle, history)
    hot_from = fresh_from + tail
    candidates = np.int64(node.params[CANDIDATES])
    hot_end = candidate_rows(rows, keys, hot_from + fresh_hot, i, phase, candidates, 1)
    end = candidate_rows(rows, keys, hot_end, i, phase, candidates, 0)
    embedding.lookup(node.emb, node.pool, scratch, node.tables, keys, end)
    misses_hot = fetched_hot = 0
    miss, first = scratch.miss, scratch.first
    threshold = node.emb_ghost.threshold[0]
    node.counted[:] = 0.0
    for j in range(end):
        if mix(np.uint64(keys[j])) < threshold:
            ghost.follow(node.emb_ghost, keys[j], 1.0, 1.0)
        missed = miss[j] >= 0
        fetched = missed and first[miss[j]] == j
        if reread_end <= j < fresh_from or hot_from <= j < hot_end:
            misses_hot += missed
            fetched_hot += fetched
        else:
            counted = node.counted[REREAD if j < reread_end else FRESH, _popularity(rows.class_first, keys[j])]
            counted[0] += 1.0
            counted[1] += missed
            counted[2] += fetched
    if rows.content[0] == ITEMS:
        # Few popular items make up much of a log, and whether they are in the sample is chance. What the sample has too
        # few or too many of are mostly their hits (SHARDS-adj): misses are set against the lookups that were expected.
        per_token = node.params[ROWS_PER_TOKEN] * rows.rate[0]
        node.counted[REREAD, 0, 0] = float(middle - prefix) * per_token
        node.counted[FRESH, 0, 0] = float(history - middle + candidates) * per_token
    _learn_tail(node, REREAD)
    _learn_tail(node, FRESH)
    _learn_hot(node, HOT + phase, float(fresh_from - reread_end + hot_end - hot_from), misses_hot, fetched_hot)


@inner
def _popularity(class_first: npt.NDArray[np.int64], stratum: int) -> int:
    """Return the class of popularity of a stratum of the tail."""
    low, high = 0, class_first.size
    while high - low > 1:
        middle = (low + high) // 2
        if class_first[middle] <= stratum:
            low = middle
        else:
            high = middle
    return low


@inner
def _learn_tail(node: Node, part: int) -> None:
    """Smooth the tail's rates of misses and fetches over the last lookups, over all of them while there are few.

    Each class of popularity by itself: whether a row is cached hangs on its popularity above all, and how many popular
    rows a sample of lookups has is chance, but their share is known.
    """
    shares = node.rows.class_share
    seen = misses = fetches = known = 0.0
    for b in range(shares.size):
        counted, learnt = node.counted[part, b], node.learnt[part, b]
        if counted[0] > 0.0:
            learnt[0] = min(learnt[0] + counted[0], SMOOTHING * shares[b])
            weight = min(1.0, counted[0] / learnt[0])
            learnt[1] += weight * (counted[1] / counted[0] - learnt[1])
            learnt[2] += weight * (counted[2] / counted[0] - learnt[2])
        if learnt[0] > 0.0:
            seen += learnt[0]
            known += shares[b]
            misses += shares[b] * learnt[1]
            fetches += shares[b] * learnt[2]
    if known > 0.0:
        node.seen[part] = seen
        node.miss_rate[part] = misses / known
        node.fetch_rate[part] = fetches / known


@inner
def _learn_hot(node: Node, part: int, lookups: float, misses: int, fetched: int) -> None:
    """Smooth a hot set's rates, whose rows are equally popular."""
    if lookups > 0.0:
        node.seen[part] = min(node.seen[part] + lookups, SMOOTHING)
        weight = min(1.0, lookups / node.seen[part])
        node.miss_rate[part] += weight * (misses / lookups - node.miss_rate[part])
        node.fetch_rate[part] += weight * (fetched / lookups - node.fetch_rate[part])
