"""Kernels of the embedding cache: a set-associative index apart from the slots that hold the rows.

The algorithm of a batch of lookups below is the definition that every backend follows:

1. Every key probes the state before the batch. A hit stamps its slot with the number of the batch.
2. Misses are made unique in order of first occurrence. Each takes an empty entry of its index set, else the set's
   oldest evictable entry and with it that entry's slot, else it is served past the cache.
3. Those that took an empty entry take, in order, a slot that was never filled, else the oldest evictable slot of a
   window of WINDOW slots behind the hand: the r-th such miss looks at window r, so windows are disjoint and victims
   independent (fewer slots than one window are one, in which they come round again). No slot found: served past the
   cache, the entry left empty.

Oldest: (batch of last use, slot), least first; a row that was forgotten counts as used 2**31 batches before that.
Evictable: not touched in this batch, its page neither pinned nor draining. An entry that step 3 empties is not
refilled in the same batch, for step 2 has ended by then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu.pool import (
    PoolState,
    abort_drain,
    give_back_page,
    start_drain,
    surplus,
    take_free_page,
)
from cache_engine.hashing import mix2, reduce_range
from cache_engine.jit import inner, kernel

WAYS = 8
WINDOW = 8
EMPTY = -1
_RESERVED = -2
# Of this many pages the coldest is given up, by a sample of their rows. More of either changes hit rates after a shrink
# by less than .003.
CANDIDATES = 16
SAMPLE = 16

# EmbeddingState.scalars
NOW = 0  # number of the current batch; `last` keeps its low 32 bits
HAND = 1  # position in the member's slots, [0, owned pages * rows per page)
N_FRESH = 2
SETS = 3
ROWS_PER_PAGE = 4
MEMBER = 5
CURSOR = 6  # position in the member's pages, from where candidates for release are compared
N_SCALARS = 7

# EmbeddingState.counters
REQUESTED = 0
HITS = 1
MISSES = 2
FETCHED = 3
BYPASSED = 4
EVICTED = 5
N_COUNTERS = 6


class EmbeddingState(NamedTuple):
    """Metadata of the cache: E index entries in sets of WAYS, S = P * rows per page slots."""

    key: npt.NDArray[np.int64]  # [E] id; any int64 is legal, emptiness is in `slot`
    table: npt.NDArray[np.int16]  # [E]
    slot: npt.NDArray[np.int32]  # [E] slot of the entry, EMPTY = -1
    entry: npt.NDArray[np.int32]  # [S] entry of the slot, EMPTY = -1
    last: npt.NDArray[np.uint32]  # [S] batch of last use, modulo 2**32
    fill: npt.NDArray[np.int32]  # [P] slots of the page handed out so far
    fresh: npt.NDArray[np.int32]  # [P] stack of pages with slots never filled
    scalars: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]


class EmbeddingScratch(NamedTuple):
    """Room for one batch of at most B keys; `seen_*` is a hash table of at least 2 B places, a power of two.

    For one cache alone: `seen_batch` tells batches apart by their number.
    """

    slots: npt.NDArray[np.int32]  # [B] out: slot of each key, -1: served past the cache
    miss: npt.NDArray[np.int32]  # [B] number of the key's unique miss, -1: hit
    first: npt.NDArray[np.int32]  # [B] of each unique miss: position of its first occurrence
    place: npt.NDArray[np.int32]  # [B] of each unique miss: its entry, -1: none
    miss_slot: npt.NDArray[np.int32]  # [B] of each unique miss: its slot, -1: served past the cache
    seen_miss: npt.NDArray[np.int32]  # number of the unique miss
    seen_batch: npt.NDArray[np.int64]  # batch in which the place was filled


def new_embedding_state(pages: int, rows_per_page: int, max_pages: int, member: int) -> EmbeddingState:
    """Return an empty cache whose index is at most half full when the member has `max_pages` pages."""
    slots = pages * rows_per_page
    sets = max(1, -(-2 * max_pages * rows_per_page // WAYS))
    entries = sets * WAYS
    scalars = np.zeros(N_SCALARS, np.int64)
    scalars[SETS] = sets
    scalars[ROWS_PER_PAGE] = rows_per_page
    scalars[MEMBER] = member
    return EmbeddingState(
        np.zeros(entries, np.int64),
        np.zeros(entries, np.int16),
        np.full(entries, EMPTY, np.int32),
        np.full(slots, EMPTY, np.int32),
        np.zeros(slots, np.uint32),
        np.zeros(pages, np.int32),
        np.zeros(pages, np.int32),
        scalars,
        np.zeros(N_COUNTERS, np.int64),
    )


def new_embedding_scratch(batch: int) -> EmbeddingScratch:
    """Return room for batches of at most `batch` keys."""
    size = 1 << max(1, (2 * batch - 1).bit_length())
    return EmbeddingScratch(
        np.zeros(batch, np.int32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.int32),
        np.zeros(size, np.int32),
        np.full(size, -1, np.int64),
    )


@kernel
def lookup(
    emb: EmbeddingState,
    pool: PoolState,
    scratch: EmbeddingScratch,
    tables: npt.NDArray[np.int16],
    keys: npt.NDArray[np.int64],
    n: int,
) -> int:
    """Look up and admit the first n keys; return the number of unique misses.

    scratch.slots[i] is key i's slot; for a miss, the row must be copied there before the next batch. scratch.first,
    scratch.miss_slot describe the unique misses in order.
    """
    now = emb.scalars[NOW] + 1
    emb.scalars[NOW] = now
    now32 = np.uint32(now & 0xFFFFFFFF)
    misses = _probe(emb, scratch, tables, keys, n, now, now32)
    _place(emb, pool, scratch, tables, keys, misses, now32)
    bypassed = 0
    missed = 0
    for i in range(n):
        r = scratch.miss[i]
        if r >= 0:
            missed += 1
            scratch.slots[i] = scratch.miss_slot[r]
            if scratch.miss_slot[r] < 0:
                bypassed += 1
    counters = emb.counters
    counters[REQUESTED] += n
    counters[HITS] += n - missed
    counters[MISSES] += missed
    counters[FETCHED] += misses
    counters[BYPASSED] += bypassed
    return misses


@inner
def _probe(
    emb: EmbeddingState,
    scratch: EmbeddingScratch,
    tables: npt.NDArray[np.int16],
    keys: npt.NDArray[np.int64],
    n: int,
    now: int,
    now32: np.uint32,
) -> int:
    """Step 1 and the first half of 2: hits stamped, misses unique in order of first occurrence."""
    sets = emb.scalars[SETS]
    index_key, index_table, index_slot, last = emb.key, emb.table, emb.slot, emb.last
    slots, miss, first, place = scratch.slots, scratch.miss, scratch.first, scratch.place
    seen_batch, seen_miss = scratch.seen_batch, scratch.seen_miss
    mask = np.int64(seen_batch.size - 1)
    misses = 0
    for i in range(n):
        key = keys[i]
        table = tables[i]
        bits = mix2(np.uint64(table), np.uint64(key))
        base = reduce_range(bits, sets) * WAYS
        found = -1
        for e in range(base, base + WAYS):
            if index_key[e] == key and index_slot[e] >= 0 and index_table[e] == table:
                found = index_slot[e]
                break
        slots[i] = found
        if found >= 0:
            last[found] = now32
            miss[i] = -1
            continue
        at = np.int64(bits & np.uint64(mask))
        while seen_batch[at] == now:
            j = first[seen_miss[at]]
            if keys[j] == key and tables[j] == table:
                break
            at = (at + 1) & mask
        if seen_batch[at] != now:
            seen_batch[at] = now
            seen_miss[at] = misses
            first[misses] = i
            place[misses] = base
            misses += 1
        miss[i] = seen_miss[at]
    return misses


@inner
def _place(
    emb: EmbeddingState,
    pool: PoolState,
    scratch: EmbeddingScratch,
    tables: npt.NDArray[np.int16],
    keys: npt.NDArray[np.int64],
    misses: int,
    now32: np.uint32,
) -> None:
    """The second half of step 2, then step 3."""
    index_key, index_table, index_slot, entry, last = emb.key, emb.table, emb.slot, emb.entry, emb.last
    fill, fresh, pins, draining, lists = emb.fill, emb.fresh, pool.pins, pool.draining, pool.lists
    first, place, miss_slot = scratch.first, scratch.place, scratch.miss_slot
    rows_per_page = emb.scalars[ROWS_PER_PAGE]
    evicted = 0
    for r in range(misses):
        base = place[r]
        found = -1
        oldest = -1
        oldest_slot = -1
        oldest_age = np.uint32(0)
        for e in range(base, base + WAYS):
            slot = index_slot[e]
            if slot == EMPTY:
                found = e
                break
        if found < 0:
            for e in range(base, base + WAYS):
                slot = index_slot[e]
                if slot < 0:
                    continue
                age = _age(last, pins, draining, slot, slot // rows_per_page, now32)
                if age > oldest_age or (age > 0 and age == oldest_age and slot < oldest_slot):
                    oldest = e
                    oldest_slot = slot
                    oldest_age = age
        miss_slot[r] = -1
        if found >= 0:
            index_slot[found] = _RESERVED
        elif oldest >= 0:
            found = oldest
            last[oldest_slot] = now32
            miss_slot[r] = oldest_slot
            evicted += 1
        place[r] = found
        if found >= 0:
            index_key[found] = keys[first[r]]
            index_table[found] = tables[first[r]]

    member = emb.scalars[MEMBER]
    total = pool.owned[member] * rows_per_page
    windows = max(total // WINDOW, min(total, 1))
    hand = emb.scalars[HAND]
    if hand >= total:
        hand = 0
    n_fresh = emb.scalars[N_FRESH]
    at_page = hand // rows_per_page
    at_row = hand % rows_per_page
    used = 0
    for r in range(misses):
        e = place[r]
        if e < 0 or miss_slot[r] >= 0:
            continue
        slot = -1
        if n_fresh > 0:
            page = fresh[n_fresh - 1]
            slot = page * rows_per_page + fill[page]
            fill[page] += 1
            if fill[page] == rows_per_page:
                n_fresh -= 1
        elif used < windows:
            used += 1
            oldest_age = np.uint32(0)
            for _ in range(WINDOW):
                page = lists[member, at_page]
                candidate = page * rows_per_page + at_row
                at_row += 1
                if at_row == rows_per_page:
                    at_row = 0
                    at_page += 1
                    if at_page * rows_per_page == total:
                        at_page = 0
                age = _age(last, pins, draining, candidate, page, now32)
                if age > oldest_age or (age > 0 and age == oldest_age and candidate < slot):
                    slot = candidate
                    oldest_age = age
            if slot >= 0 and entry[slot] != EMPTY:
                index_slot[entry[slot]] = EMPTY
                evicted += 1
        if slot < 0:
            index_slot[e] = EMPTY
            continue
        index_slot[e] = slot
        entry[slot] = e
        last[slot] = now32
        miss_slot[r] = slot
    emb.scalars[N_FRESH] = n_fresh
    emb.scalars[HAND] = at_page * rows_per_page + at_row
    emb.counters[EVICTED] += evicted


@inner
def _age(
    last: npt.NDArray[np.uint32],
    pins: npt.NDArray[np.int32],
    draining: npt.NDArray[np.uint8],
    slot: int,
    page: int,
    now32: np.uint32,
) -> np.uint32:
    """Return how many batches ago the slot was used; 0 if it is not evictable."""
    age = np.uint32(now32 - last[slot])
    return age if age > 0 and pins[page] == 0 and draining[page] == 0 else np.uint32(0)


@kernel
def accept_pages(emb: EmbeddingState, pool: PoolState, budget: int) -> int:
    """Take at most `budget` FREE pages, as far as the goal asks; return how many came."""
    member = emb.scalars[MEMBER]
    came = 0
    while came < budget and pool.owned[member] < pool.goal[member]:
        page = take_free_page(pool, member)
        if page < 0:
            break
        emb.fill[page] = 0
        emb.fresh[emb.scalars[N_FRESH]] = page
        emb.scalars[N_FRESH] += 1
        came += 1
    return came


@kernel
def release_pages(emb: EmbeddingState, pool: PoolState, budget: int, now_ns: int, limit_ns: int) -> int:
    """Give up pages over the goal, at most `budget`; return how many became FREE.

    Coldest first: empty pages, other pages with slots never filled, then of the next CANDIDATES pages in the member's
    list the one whose rows were used least recently. (Rows do not move, so a page stays as hot as the rows that it
    was filled with; what the list or the hand has next is often the hottest.) Pinned pages are passed over; if all are
    pinned, one more is left draining by each call, until its leases are clear, the goal rises, or `limit_ns` has
    passed.
    """
    member = emb.scalars[MEMBER]
    rows_per_page = emb.scalars[ROWS_PER_PAGE]
    gone = 0
    i = 0
    while pool.n_draining[member] > 0 and i < pool.owned[member]:
        page = pool.lists[member, i]
        if pool.draining[page]:
            staying = pool.owned[member] - pool.n_draining[member]
            if staying < pool.goal[member] or now_ns - pool.drain_since[page] > limit_ns:
                abort_drain(pool, page)
                if emb.fill[page] < rows_per_page:
                    emb.fresh[emb.scalars[N_FRESH]] = page
                    emb.scalars[N_FRESH] += 1
            elif pool.pins[page] == 0 and gone < budget:
                _unpublish_page(emb, page)
                give_back_page(pool, page)
                gone += 1
                continue
        i += 1
    while gone < budget and surplus(pool, member) > 0:
        page = _coldest_page(emb, pool, member)
        if page < 0:
            break
        start_drain(pool, page, now_ns)
        _close_page(emb, page)
        if pool.pins[page] > 0:
            break
        _unpublish_page(emb, page)
        give_back_page(pool, page)
        gone += 1
    return gone


@inner
def _coldest_page(emb: EmbeddingState, pool: PoolState, member: int) -> int:
    """Return the page to give up next: unpinned if there is one, never one that drains already; -1 if all drain."""
    started = -1
    for k in range(emb.scalars[N_FRESH]):
        page = emb.fresh[emb.scalars[N_FRESH] - 1 - k]
        if pool.pins[page] == 0:
            if emb.fill[page] == 0:
                return page
            if started < 0:
                started = page
    if started >= 0:
        return started
    n = pool.owned[member]
    at = emb.scalars[CURSOR]
    coldest = -1
    least = 0
    pinned = -1
    compared = 0
    for k in range(n):
        page = pool.lists[member, (at + k) % n]
        if pool.draining[page]:
            continue
        if pool.pins[page] > 0:
            if pinned < 0:
                pinned = page
            continue
        heat = _heat(emb, page)
        if coldest < 0 or heat < least:
            coldest = page
            least = heat
        compared += 1
        if compared == CANDIDATES:
            emb.scalars[CURSOR] = (at + k + 1) % n
            break
    return coldest if coldest >= 0 else pinned


@inner
def _heat(emb: EmbeddingState, page: int) -> int:
    """Return how recently a full page's rows were used: over at least SAMPLE of them, 32 less the bits of the age."""
    rows_per_page = emb.scalars[ROWS_PER_PAGE]
    now32 = np.uint32(emb.scalars[NOW] & 0xFFFFFFFF)
    heat = 0
    for slot in range(page * rows_per_page, (page + 1) * rows_per_page, max(1, rows_per_page // SAMPLE)):
        age = np.int64(np.uint32(now32 - emb.last[slot]))
        heat += 32
        for bits in (16, 8, 4, 2, 1):
            if age >> bits:
                age >>= bits
                heat -= bits
        heat -= int(age)
    return heat


@inner
def _close_page(emb: EmbeddingState, page: int) -> None:
    """Take the page off the stack of pages with slots never filled, if it is there: nothing new goes in."""
    n = emb.scalars[N_FRESH]
    for k in range(n):
        if emb.fresh[k] == page:
            for j in range(k, n - 1):
                emb.fresh[j] = emb.fresh[j + 1]
            emb.scalars[N_FRESH] = n - 1
            break


@inner
def _unpublish_page(emb: EmbeddingState, page: int) -> None:
    """Erase the index entries of a page's rows, before its slots can be anyone else's."""
    rows_per_page = emb.scalars[ROWS_PER_PAGE]
    for slot in range(page * rows_per_page, page * rows_per_page + emb.fill[page]):
        e = emb.entry[slot]
        if e != EMPTY:
            emb.slot[e] = EMPTY
            emb.entry[slot] = EMPTY
            emb.counters[EVICTED] += 1
    emb.fill[page] = 0


@kernel
def invalidate(emb: EmbeddingState, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], n: int) -> int:
    """Forget rows, as after an update of their table; return how many were cached.

    Their slots are the next victims of their windows.
    """
    sets = emb.scalars[SETS]
    gone = 0
    for i in range(n):
        base = reduce_range(mix2(np.uint64(tables[i]), np.uint64(keys[i])), sets) * WAYS
        for e in range(base, base + WAYS):
            if emb.key[e] == keys[i] and emb.slot[e] >= 0 and emb.table[e] == tables[i]:
                _forget(emb, emb.slot[e])
                gone += 1
                break
    return gone


@kernel
def contains(
    emb: EmbeddingState,
    tables: npt.NDArray[np.int16],
    keys: npt.NDArray[np.int64],
    n: int,
    found: npt.NDArray[np.bool_],
) -> None:
    """Tell which keys are cached; nothing is counted or stamped."""
    sets = emb.scalars[SETS]
    for i in range(n):
        base = reduce_range(mix2(np.uint64(tables[i]), np.uint64(keys[i])), sets) * WAYS
        found[i] = False
        for e in range(base, base + WAYS):
            if emb.key[e] == keys[i] and emb.slot[e] >= 0 and emb.table[e] == tables[i]:
                found[i] = True


@kernel
def retract(emb: EmbeddingState, scratch: EmbeddingScratch, n: int) -> None:
    """Take back the last lookup, of n keys, whose rows did not come: forget the rows it admitted, do not count it.

    Its victims stay evicted.
    """
    counters = emb.counters
    missed = 0
    misses = 0
    for i in range(n):
        r = scratch.miss[i]
        if r < 0:
            continue
        missed += 1
        misses = max(misses, r + 1)
        slot = scratch.miss_slot[r]
        if slot < 0:
            counters[BYPASSED] -= 1
        elif emb.entry[slot] != EMPTY:
            _forget(emb, slot)
    counters[REQUESTED] -= n
    counters[HITS] -= n - missed
    counters[MISSES] -= missed
    counters[FETCHED] -= misses


@inner
def _forget(emb: EmbeddingState, slot: int) -> None:
    """Take a row out of the index, and make its slot older than any live one."""
    emb.slot[emb.entry[slot]] = EMPTY
    emb.entry[slot] = EMPTY
    emb.last[slot] = np.uint32((emb.scalars[NOW] + 0x80000000) & 0xFFFFFFFF)
