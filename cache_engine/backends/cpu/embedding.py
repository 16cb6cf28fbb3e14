"""Kernels of the embedding cache: a set-associative index apart from the slots that hold the rows.

The algorithm of a batch of lookups below is the definition that every backend follows:

1. Every key probes the state before the batch. A hit stamps its slot with the number of the batch and marks it visited.
2. Misses are made unique in order of first occurrence. Each takes an empty entry of its index set, else the set's
   evictable entry that goes first by the policy (LRU: the oldest; SIEVE: those not visited first, of them the one that
   the hand comes to first) and with it that entry's slot, else it is served past the cache.
3. Those that took an empty entry take, in order, a slot that was never filled, else a victim of the policy (below). No
   slot found: served past the cache, the entry left empty.

Oldest: (batch of last use, slot), least first; a row that was forgotten counts as used 2**31 batches before that.
Evictable: not touched in this batch, its page neither pinned nor draining. An entry that step 3 empties is not
refilled in the same batch, for step 2 has ended by then.

Policy LRU: the victim is the oldest evictable slot of a window of WINDOW slots behind the hand. The r-th such miss
looks at window r, so windows are disjoint and victims independent (fewer slots than one window are one, in which they
come round again).

Policy SIEVE (Zhang et al., NSDI 2024): slots stand in a queue in the order in which they were filled, and a hand moves
through it from the oldest on; it evicts what was not visited since it last passed, and clears the mark of what was.
What the hand has passed and what lies before it are two queues here, `ahead` and `passed`: the hand takes the first of
`ahead`; a survivor goes to the end of `passed`, a newcomer to the end of `ahead`; when nothing is ahead they change
places. In a batch no slot is taken twice, slots that are not
evictable survive, and newcomers are entered at the end. The hand comes to each entry once a batch at most: misses for
which all that it comes to survive are served past the cache.

An index set is a cache line: a tag of one byte per way (a byte of the key's hash, 0: empty) and the slots. A slot's
record, of 16 bytes, holds the key and its last use, so that a hit touches two lines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu.payload import row_place
from cache_engine.backends.cpu.pool import (
    PoolState,
    abort_drain,
    give_back_page,
    new_pool_state,
    start_drain,
    surplus,
    take_free_page,
)
from cache_engine.hashing import mix2, reduce_range
from cache_engine.jit import copy_bytes, in_memory, inner, kernel, prefetch, trailing_zeros

LRU = 0
SIEVE = 1
POLICIES = {"lru": LRU, "sieve": SIEVE}

WAYS = 12
WINDOW = 8
EMPTY = -1
_RESERVED = -2
# Of this many pages the coldest is given up, by a sample of their rows. More of either changes hit rates after a shrink
# by less than .003.
CANDIDATES = 16
SAMPLE = 16

# A line of the index holds WAYS tags of one byte, four bytes of nothing, and WAYS slots of four bytes.
LINE_BYTES = 64
LINE_WORDS = 8  # of 8 bytes
LINE_INTS = 16
FIRST_SLOT = 4  # of a line's integers

# Keys that are hashed, then looked for, then served together: enough to overlap the memory's latency.
_GROUP = 32
_AHEAD = 8  # entries of a queue, rows of a page
_SLACK = 8  # a queue has room for a slack-th more than all slots, lest entries of pages that left crowd it soon

_EACH_BYTE = np.uint64(0x0101010101010101)
_HIGH_BITS = np.uint64(0x8080808080808080)
_FOUR_BYTES = np.uint64(0xFFFFFFFF)
_LAST_OF_FOUR = np.uint64(0x80000000)

# EmbeddingState.scalars
NOW = 0  # number of the current batch; `last` keeps its low 32 bits
HAND = 1  # position in the member's slots, [0, owned pages * rows per page)
N_FRESH = 2
SETS = 3
ROWS_PER_PAGE = 4
MEMBER = 5
CURSOR = 6  # position in the member's pages, from where candidates for release are compared
POLICY = 7
AHEAD = 8  # which of the two queues lies before the hand: 0, 1
ROOM = 9  # entries that each queue has room for
START = 10  # [2] position of each queue's first entry
COUNT = 12  # [2] entries of each queue
QUEUED = 14  # [2] of them, those whose slot has not left the queue since
N_SCALARS = 16

# EmbeddingState.counters
REQUESTED = 0
HITS = 1
MISSES = 2
FETCHED = 3
BYPASSED = 4
EVICTED = 5
N_COUNTERS = 6

ROW = np.dtype(
    [
        ("key", np.int64),  # any int64 is legal
        ("last", np.uint32),  # batch of last use, modulo 2**32
        ("table", np.int16),
        ("visited", np.uint8),  # 1: used since the hand passed (SIEVE)
        ("live", np.uint8),  # 1: the index tells of it
    ]
)


class EmbeddingState(NamedTuple):
    """Metadata of the cache: an index of L lines, S = P * rows per page slots, queues of at most Q entries."""

    word: npt.NDArray[np.uint64]  # [L * 8] the index
    tag: npt.NDArray[np.uint8]  # [L * 64] the same memory
    slot: npt.NDArray[np.int32]  # [L * 16] the same memory; a slot of the index, EMPTY = -1
    row: npt.NDArray[np.void]  # [S] of ROW
    queue: npt.NDArray[np.int32]  # [2 * Q] two rings of slots, by SIEVE alone
    spot: npt.NDArray[np.int32]  # [S] where in `queue` the slot stands, EMPTY = -1: nowhere
    fill: npt.NDArray[np.int32]  # [P] slots of the page handed out so far
    fresh: npt.NDArray[np.int32]  # [P] stack of pages with slots never filled
    scalars: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]


class EmbeddingScratch(NamedTuple):
    """Room for one batch of at most B keys; `seen` is a hash table of at least 2 B places, a power of two.

    For one cache alone: `seen` tells batches apart by their number.
    """

    slots: npt.NDArray[np.int32]  # [B] out: slot of each key, -1: served past the cache
    miss: npt.NDArray[np.int32]  # [B] number of the key's unique miss, -1: hit
    first: npt.NDArray[np.int32]  # [B] of each unique miss: position of its first occurrence
    place: npt.NDArray[np.int32]  # [B] of each unique miss: its entry, an index into `slot`, -1: none
    miss_slot: npt.NDArray[np.int32]  # [B] of each unique miss: its slot, -1: served past the cache
    bits: npt.NDArray[np.uint64]  # [B] hash of each key
    missed: npt.NDArray[np.int32]  # [B] positions of all misses
    waiting: npt.NDArray[np.int32]  # [B] unique misses that took an empty entry
    line: npt.NDArray[np.int32]  # [B] of each waiting miss: the index line that tells of its victim, -1: none
    seen: npt.NDArray[np.uint64]  # number of the batch, modulo 2**32, and below it that of the unique miss
    # [2 + n] hashes of keys asked for, those below sample[0], from the third place on; sample[1] counts them. The
    # caller takes them out while there is room for a batch of them.
    sample: npt.NDArray[np.uint64]


class MovingRows(NamedTuple):
    """Room for the rows of a page, R, on their way to others."""

    tables: npt.NDArray[np.int16]  # [R]
    keys: npt.NDArray[np.int64]  # [R]
    rows: npt.NDArray[np.uint8]  # [R * row bytes]


def new_moving_rows(rows_per_page: int, row_bytes: int) -> MovingRows:
    """Return room for a page's rows; row_bytes 0: for metadata alone."""
    return MovingRows(
        np.zeros(rows_per_page, np.int16),
        np.zeros(rows_per_page, np.int64),
        np.zeros(rows_per_page * row_bytes, np.uint8),
    )


def new_embedding_state(pages: int, rows_per_page: int, max_pages: int, member: int, policy: int) -> EmbeddingState:
    """Return an empty cache whose index is at most half full when the member has `max_pages` pages."""
    slots = pages * rows_per_page
    sets = max(1, -(-2 * max_pages * rows_per_page // WAYS))
    queued = slots + slots // _SLACK if policy == SIEVE else 0
    scalars = np.zeros(N_SCALARS, np.int64)
    scalars[SETS] = sets
    scalars[ROWS_PER_PAGE] = rows_per_page
    scalars[MEMBER] = member
    scalars[POLICY] = policy
    scalars[ROOM] = queued
    index = _in_lines(sets * LINE_BYTES)
    slot = index.view(np.int32)
    slot.reshape(sets, LINE_INTS)[:, FIRST_SLOT:] = EMPTY
    return EmbeddingState(
        index.view(np.uint64),
        index,
        slot,
        _in_lines(slots * ROW.itemsize).view(ROW),
        np.zeros(2 * queued, np.int32),
        np.full(slots if queued else 0, EMPTY, np.int32),
        np.zeros(pages, np.int32),
        np.zeros(pages, np.int32),
        scalars,
        np.zeros(N_COUNTERS, np.int64),
    )


def _in_lines(size: int) -> npt.NDArray[np.uint8]:
    """Return zeros that begin at a cache line."""
    array = np.zeros(size + LINE_BYTES, np.uint8)
    skipped = -array.ctypes.data % LINE_BYTES
    return array[skipped : skipped + size]


def metadata_bytes(emb: EmbeddingState) -> int:
    """Return the bytes that the state takes; `tag` and `slot` are the memory of `word`."""
    return sum(array.nbytes for array in emb) - emb.tag.nbytes - emb.slot.nbytes


def entries(emb: EmbeddingState) -> npt.NDArray[np.intp]:
    """Return the entries that are not empty, as indices into `slot`."""
    filled: npt.NDArray[np.intp] = np.flatnonzero(emb.slot != EMPTY)
    return filled[filled % LINE_INTS >= FIRST_SLOT]


def new_embedding_scratch(batch: int) -> EmbeddingScratch:
    """Return room for batches of at most `batch` keys."""

    def integers() -> npt.NDArray[np.int32]:
        return np.zeros(batch, np.int32)

    return EmbeddingScratch(
        integers(),
        integers(),
        integers(),
        integers(),
        integers(),
        np.zeros(batch, np.uint64),
        integers(),
        integers(),
        integers(),
        np.zeros(1 << max(1, (2 * batch - 1).bit_length()), np.uint64),
        np.zeros(2, np.uint64),
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
    now = np.uint32((emb.scalars[NOW] + 1) & 0xFFFFFFFF)
    emb.scalars[NOW] += 1
    seen = scratch.seen
    if now & np.uint32(0x7FFFFFFF) == 0:
        # Twice before the number comes round, so that no batch takes another's entries for its own.
        seen[:] = np.uint64(0) if now else ~np.uint64(0)
    missed, misses = _probe(emb, scratch, tables, keys, n, now)
    waiting = _claim(emb, pool, scratch, misses, now)
    if emb.scalars[POLICY] == SIEVE:
        _sieve(emb, pool, scratch, waiting, n, now)
    else:
        _windows(emb, pool, scratch, waiting, now)
    _publish(emb, scratch, tables, keys, misses, waiting, now)
    bypassed = 0
    for k in range(missed):
        i = scratch.missed[k]
        slot = scratch.miss_slot[scratch.miss[i]]
        scratch.slots[i] = slot
        bypassed += slot < 0
    counters = emb.counters
    counters[REQUESTED] += n
    counters[HITS] += n - missed
    counters[MISSES] += missed
    counters[FETCHED] += misses
    counters[BYPASSED] += bypassed
    return misses


# The state that Python hands over at each call, in one array: see `in_memory`.
_store, _load = in_memory((new_embedding_state(1, 1, 1, 0, LRU), new_pool_state(1, 1), new_embedding_scratch(1)))


@kernel
def pack(emb: EmbeddingState, pool: PoolState, scratch: EmbeddingScratch, packed: npt.NDArray[np.uint8]) -> None:
    """Write what the `*_packed` kernels need into `packed`, uint8 [MOST_BYTES]; the caller keeps the arrays alive."""
    _store(packed, (emb, pool, scratch))


@kernel
def lookup_packed(
    packed: npt.NDArray[np.uint8], tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], n: int
) -> int:
    """`lookup` with the arguments that `pack` wrote."""
    emb, pool, scratch = _load(packed)
    return int(lookup(emb, pool, scratch, tables, keys, n))


@kernel
def release_packed(packed: npt.NDArray[np.uint8], budget: int, now_ns: int, limit_ns: int) -> int:
    """`release_pages` with the state that `pack` wrote."""
    emb, pool, _ = _load(packed)
    return int(release_pages(emb, pool, budget, now_ns, limit_ns))


@kernel
def relocate_packed(
    packed: npt.NDArray[np.uint8],
    moving: MovingRows,
    storage: npt.NDArray[np.uint8],
    page_bytes: int,
    row_bytes: int,
    budget: int,
    now_ns: int,
    limit_ns: int,
) -> int:
    """`relocate_pages` with the state that `pack` wrote."""
    emb, pool, scratch = _load(packed)
    return int(relocate_pages(emb, pool, scratch, moving, storage, page_bytes, row_bytes, budget, now_ns, limit_ns))


@kernel
def accept_packed(packed: npt.NDArray[np.uint8], budget: int) -> int:
    """`accept_pages` with the state that `pack` wrote."""
    emb, pool, _ = _load(packed)
    return int(accept_pages(emb, pool, budget))


@inner
def _tag(bits: np.uint64) -> np.uint64:
    """Return the tag of a hash, in [1, 255]."""
    tag = bits & np.uint64(255)
    return tag if tag else np.uint64(1)


@inner
def _equal_bytes(word: np.uint64, byte: np.uint64) -> np.uint64:
    """Return the high bit of each byte of `word` that equals `byte`; above the lowest, some that do not."""
    x = word ^ (byte * _EACH_BYTE)
    return (x - _EACH_BYTE) & ~x & _HIGH_BITS


@inner
def _find(emb: EmbeddingState, line: int | np.int64, tag: np.uint64, table: np.int16, key: int) -> int:
    """Return the entry of a key, an index into `slot`, or -1."""
    for half in range(2):
        alike = _equal_bytes(emb.word[line * LINE_WORDS + half], tag)
        if half:
            alike &= _FOUR_BYTES
        while alike:
            e = line * LINE_INTS + FIRST_SLOT + half * 8 + (np.int64(trailing_zeros(alike)) >> 3)
            row = emb.row[emb.slot[e]]
            if row.key == key and row.table == table:
                return int(e)
            alike &= alike - np.uint64(1)
    return -1


@inner
def _set_tag(emb: EmbeddingState, e: int, tag: np.uint64) -> None:
    emb.tag[e // LINE_INTS * LINE_BYTES + e % LINE_INTS - FIRST_SLOT] = np.uint8(tag)


@inner
def _erase(emb: EmbeddingState, e: int) -> None:
    if e >= 0:
        emb.slot[e] = EMPTY
        _set_tag(emb, e, np.uint64(0))


@inner
def _entry_of(emb: EmbeddingState, line: int | np.int64, slot: int) -> int:
    """Return the entry in `line` that tells of `slot`, or -1: a caller who changes keys while they are looked up."""
    first = line * LINE_INTS + FIRST_SLOT
    found = np.int64(-1)
    for way in range(WAYS):  # to the end: where it stands cannot be predicted
        if emb.slot[first + way] == slot:
            found = np.int64(first + way)
    return int(found)


@inner
def _probe(
    emb: EmbeddingState,
    scratch: EmbeddingScratch,
    tables: npt.NDArray[np.int16],
    keys: npt.NDArray[np.int64],
    n: int,
    now: np.uint32,
) -> tuple[int, int]:
    """Step 1 and the first half of 2: hits stamped, misses unique in order of first occurrence.

    Return how many keys missed, and how many different ones.
    """
    sets = emb.scalars[SETS]
    word, index_slot, rows = emb.word, emb.slot, emb.row
    slots, miss, first, missed, seen, hashes = (
        scratch.slots,
        scratch.miss,
        scratch.first,
        scratch.missed,
        scratch.seen,
        scratch.bits,
    )
    mask = np.uint64(seen.size - 1)
    batch = np.uint64(now) << np.uint64(32)
    sample = scratch.sample
    limit = sample[0]
    n_sampled = np.int64(sample[1])
    n_missed = 0
    misses = 0
    for start in range(0, n, _GROUP):
        end = min(start + _GROUP, n)
        for i in range(start, end):
            bits = mix2(np.uint64(tables[i]), np.uint64(keys[i]))
            hashes[i] = bits
            if bits < limit and 2 + n_sampled < sample.size:
                sample[2 + n_sampled] = bits
                n_sampled += 1
            prefetch(word, reduce_range(bits, sets) * LINE_WORDS)
        for i in range(start, end):
            # The slot of the first entry with the key's tag: nearly always the key's, or there is none.
            bits = hashes[i]
            line = reduce_range(bits, sets)
            low = _equal_bytes(word[line * LINE_WORDS], _tag(bits))
            high = _equal_bytes(word[line * LINE_WORDS + 1], _tag(bits)) & _FOUR_BYTES
            some = low if low else high | _LAST_OF_FOUR
            way = (np.int64(trailing_zeros(some)) >> 3) + (0 if low else 8)
            slot = index_slot[line * LINE_INTS + FIRST_SLOT + way] if low | high else EMPTY
            slots[i] = slot
            prefetch(rows, max(slot, 0))
        for i in range(start, end):
            slot = slots[i]
            key = keys[i]
            table = tables[i]
            bits = hashes[i]
            if slot >= 0 and (rows[slot].key != key or rows[slot].table != table):
                e = _find(emb, reduce_range(bits, sets), _tag(bits), table, key)
                slot = index_slot[e] if e >= 0 else EMPTY
                slots[i] = slot
            if slot >= 0:
                rows[slot].last = now
                rows[slot].visited = 1
                miss[i] = -1
                continue
            at = bits & mask
            while seen[at] >> np.uint64(32) == now:
                j = first[np.int64(seen[at] & _FOUR_BYTES)]
                if keys[j] == key and tables[j] == table:
                    break
                at = (at + np.uint64(1)) & mask
            if seen[at] >> np.uint64(32) != now:
                seen[at] = batch | np.uint64(misses)
                first[misses] = i
                misses += 1
            miss[i] = np.int64(seen[at] & _FOUR_BYTES)
            missed[n_missed] = i
            n_missed += 1
    sample[1] = np.uint64(n_sampled)
    return n_missed, misses


@inner
def _order(emb: EmbeddingState, pool: PoolState, slot: int, now: np.uint32) -> np.uint64:
    """Return the more, the sooner the slot's row goes from a full set; 0 if it is not evictable."""
    age = np.uint32(now - emb.row[slot].last)
    page = slot // emb.scalars[ROWS_PER_PAGE]
    if age == 0 or pool.pins[page] > 0 or pool.draining[page]:
        return np.uint64(0)
    if emb.scalars[POLICY] == LRU:
        return np.uint64(age) << np.uint64(32) | (_FOUR_BYTES - np.uint64(slot))
    room = emb.scalars[ROOM]
    ahead = emb.scalars[AHEAD]
    which = np.int64(emb.spot[slot] >= room)
    distance = emb.spot[slot] - which * room - emb.scalars[START + which]
    if distance < 0:
        distance += room
    if which != ahead:
        distance += emb.scalars[COUNT + ahead]
    return np.uint64(0 if emb.row[slot].visited else 1) << np.uint64(32) | (_FOUR_BYTES - np.uint64(distance))


@inner
def _claim(emb: EmbeddingState, pool: PoolState, scratch: EmbeddingScratch, misses: int, now: np.uint32) -> int:
    """The second half of step 2; return how many took an empty entry and wait for a slot."""
    sets = emb.scalars[SETS]
    waiting = 0
    for r in range(misses):
        bits = scratch.bits[scratch.first[r]]
        line = reduce_range(bits, sets)
        scratch.miss_slot[r] = -1
        low = _equal_bytes(emb.word[line * LINE_WORDS], np.uint64(0))
        high = _equal_bytes(emb.word[line * LINE_WORDS + 1], np.uint64(0)) & _FOUR_BYTES
        found = -1
        if low | high:
            way = np.int64(trailing_zeros(low if low else high)) >> 3
            found = int(line * LINE_INTS + FIRST_SLOT + way + (0 if low else 8))
            emb.slot[found] = _RESERVED
            scratch.waiting[waiting] = r
            waiting += 1
        else:
            first = np.uint64(0)
            for e in range(line * LINE_INTS + FIRST_SLOT, (line + 1) * LINE_INTS):
                if emb.slot[e] >= 0:
                    order = _order(emb, pool, emb.slot[e], now)
                    if order > first:
                        found = e
                        first = order
            if found >= 0:
                slot = emb.slot[found]
                emb.row[slot].last = now
                scratch.miss_slot[r] = slot
                emb.counters[EVICTED] += 1
        scratch.place[r] = found
        if found >= 0:
            _set_tag(emb, found, _tag(bits))
    return waiting


@inner
def _fresh_slot(emb: EmbeddingState) -> int:
    """Return a slot that was never filled, or -1."""
    n_fresh = emb.scalars[N_FRESH]
    if n_fresh == 0:
        return -1
    page = emb.fresh[n_fresh - 1]
    rows_per_page = emb.scalars[ROWS_PER_PAGE]
    slot = page * rows_per_page + emb.fill[page]
    emb.fill[page] += 1
    if emb.fill[page] == rows_per_page:
        emb.scalars[N_FRESH] = n_fresh - 1
    return slot


@kernel
def unfilled_slots(emb: EmbeddingState, most: int) -> int:
    """Return how many slots were never filled, counted no further than `most`."""
    slots = 0
    k = emb.scalars[N_FRESH]
    while k > 0 and slots < most:
        k -= 1
        slots += emb.scalars[ROWS_PER_PAGE] - emb.fill[emb.fresh[k]]
    return min(slots, most)


@inner
def _take(emb: EmbeddingState, scratch: EmbeddingScratch, w: int, slot: int, now: np.uint32) -> None:
    """Give `slot`, -1 for none, to the w-th miss that waits."""
    scratch.miss_slot[scratch.waiting[w]] = slot
    scratch.line[w] = -1
    if slot >= 0:
        row = emb.row[slot]
        row.last = now
        if row.live:
            line = reduce_range(mix2(np.uint64(row.table), np.uint64(row.key)), emb.scalars[SETS])
            scratch.line[w] = line
            prefetch(emb.word, line * LINE_WORDS)


@inner
def _windows(emb: EmbeddingState, pool: PoolState, scratch: EmbeddingScratch, waiting: int, now: np.uint32) -> None:
    """Step 3 by LRU."""
    rows, lists, pins, draining = emb.row, pool.lists, pool.pins, pool.draining
    rows_per_page = emb.scalars[ROWS_PER_PAGE]
    member = emb.scalars[MEMBER]
    total = pool.owned[member] * rows_per_page
    windows = max(total // WINDOW, min(total, 1))
    hand = emb.scalars[HAND]
    if hand >= total:
        hand = 0
    at_page = hand // rows_per_page
    at_row = hand % rows_per_page
    for w in range(waiting):
        slot = _fresh_slot(emb)
        if slot < 0 and windows > 0:
            windows -= 1
            oldest = np.uint64(0)  # age, then how low the slot's number is
            page = lists[member, at_page]
            held = pins[page] > 0 or draining[page]
            for _ in range(WINDOW):
                candidate = page * rows_per_page + at_row
                age = np.uint32(now - rows[candidate].last)
                order = np.uint64(age) << np.uint64(32) | (_FOUR_BYTES - np.uint64(candidate))
                oldest = max(oldest, np.uint64(0) if held or age == 0 else order)
                at_row += 1
                if at_row == rows_per_page:
                    at_row = 0
                    at_page += 1
                    if at_page * rows_per_page == total:
                        at_page = 0
                    page = lists[member, at_page]
                    held = pins[page] > 0 or draining[page]
            if oldest:
                slot = int(np.int64(_FOUR_BYTES - (oldest & _FOUR_BYTES)))
        _take(emb, scratch, w, slot, now)
    emb.scalars[HAND] = at_page * rows_per_page + at_row


@inner
def _sieve(
    emb: EmbeddingState, pool: PoolState, scratch: EmbeddingScratch, waiting: int, n: int, now: np.uint32
) -> None:
    """Step 3 by SIEVE, for a batch of n keys."""
    rows, queue, spot, scalars = emb.row, emb.queue, emb.spot, emb.scalars
    rows_per_page = scalars[ROWS_PER_PAGE]
    room = scalars[ROOM]
    remaining = scalars[COUNT] + scalars[COUNT + 1]
    if remaining > scalars[QUEUED] + scalars[QUEUED + 1] and remaining + unfilled_slots(emb, n) > room:
        compact_queues(emb)
        remaining = scalars[COUNT] + scalars[COUNT + 1]
    ahead = scalars[AHEAD]
    for w in range(waiting):
        slot = _fresh_slot(emb)
        while slot < 0 and remaining > 0:
            if scalars[COUNT + ahead] == 0:
                ahead = 1 - ahead
            at = ahead * room + scalars[START + ahead]
            soon = scalars[START + ahead] + _AHEAD
            coming = queue[ahead * room + (soon if soon < room else 0)]
            prefetch(rows, coming)
            prefetch(spot, coming)
            candidate = queue[at]
            _skip(scalars, ahead, 1)
            remaining -= 1
            if spot[candidate] != at:
                continue
            row = rows[candidate]
            page = candidate // rows_per_page
            scalars[QUEUED + ahead] -= 1
            if row.visited or row.last == now or pool.pins[page] > 0 or pool.draining[page]:
                row.visited = 0
                _append(emb, 1 - ahead, candidate)
            else:
                slot = candidate
        _take(emb, scratch, w, slot, now)
    if scalars[QUEUED + ahead] == 0:
        _skip(scalars, ahead, scalars[COUNT + ahead])
        ahead = 1 - ahead
    scalars[AHEAD] = ahead
    for w in range(waiting):
        slot = scratch.miss_slot[scratch.waiting[w]]
        if slot >= 0:
            _append(emb, ahead, slot)


@inner
def _skip(scalars: npt.NDArray[np.int64], which: int, n: int) -> None:
    """Move the hand past the first n entries of a queue."""
    start = scalars[START + which] + n
    scalars[START + which] = start if start < scalars[ROOM] else start - scalars[ROOM]
    scalars[COUNT + which] -= n


@inner
def _append(emb: EmbeddingState, which: int, slot: int) -> None:
    """Enter a slot at the end of a queue."""
    room = emb.scalars[ROOM]
    end = emb.scalars[START + which] + emb.scalars[COUNT + which]
    if end >= room:
        end -= room
    emb.scalars[COUNT + which] += 1
    emb.scalars[QUEUED + which] += 1
    emb.queue[which * room + end] = slot
    emb.spot[slot] = which * room + end


@kernel
def compact_queues(emb: EmbeddingState) -> None:
    """Drop the entries whose slots have left the queues."""
    room = emb.scalars[ROOM]
    for which in range(2):
        start = emb.scalars[START + which]
        count = emb.scalars[COUNT + which]
        emb.scalars[COUNT + which] = 0
        emb.scalars[QUEUED + which] = 0
        for k in range(count):
            at = start + k
            if at >= room:
                at -= room
            slot = emb.queue[which * room + at]
            if emb.spot[slot] == which * room + at:
                _append(emb, which, slot)


@inner
def _publish(
    emb: EmbeddingState,
    scratch: EmbeddingScratch,
    tables: npt.NDArray[np.int16],
    keys: npt.NDArray[np.int64],
    misses: int,
    waiting: int,
    now: np.uint32,
) -> None:
    """Erase the victims of step 3 from the index, and let it tell of what took their places."""
    evicted = 0
    for w in range(waiting):
        line = scratch.line[w]
        if line >= 0:
            _erase(emb, _entry_of(emb, line, scratch.miss_slot[scratch.waiting[w]]))
            evicted += 1
    emb.counters[EVICTED] += evicted
    for r in range(misses):
        e = scratch.place[r]
        if e < 0:
            continue
        slot = scratch.miss_slot[r]
        if slot < 0:
            _erase(emb, e)
            continue
        i = scratch.first[r]
        row = emb.row[slot]
        row.key = keys[i]
        row.last = now
        row.table = tables[i]
        row.visited = 0
        row.live = 1
        emb.slot[e] = slot


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
    list the one whose rows were used least recently. (A page stays as hot as the rows that it was filled with; what
    the list or the hand has next is often the hottest.) Pinned pages are passed over; if all are
    pinned, one more is left draining by each call, until its leases are clear, the goal rises, or `limit_ns` has
    passed.
    """
    gone = finish_drains(emb, pool, budget, now_ns, limit_ns)
    while gone < budget:
        page = drain_coldest(emb, pool, now_ns)
        if page < 0 or pool.pins[page] > 0:
            break
        _unpublish_page(emb, page)
        give_back_page(pool, page)
        gone += 1
    return gone


@kernel
def relocate_pages(
    emb: EmbeddingState,
    pool: PoolState,
    scratch: EmbeddingScratch,
    moving: MovingRows,
    storage: npt.NDArray[np.uint8],
    page_bytes: int,
    row_bytes: int,
    budget: int,
    now_ns: int,
    limit_ns: int,
) -> int:
    """Give up pages as `release_pages` does, their rows that were hit moving to other pages; return how many.

    They are admitted as a batch once the page has gone, and looked up once more, for that marks them as hit: the next
    page to go may be the one that they moved to. Of the counters only EVICTED tells of it, what has left the cache.
    Scratch must have room for a page's rows. row_bytes 0: metadata alone, `storage` is not looked at.
    """
    gone = finish_drains(emb, pool, budget, now_ns, limit_ns)
    counters = emb.counters
    tables, keys = moving.tables, moving.keys
    rows_per_page = emb.scalars[ROWS_PER_PAGE]
    while gone < budget:
        page = drain_coldest(emb, pool, now_ns)
        if page < 0 or pool.pins[page] > 0:
            break
        n = 0
        for slot in range(page * rows_per_page, (page + 1) * rows_per_page):
            row = emb.row[slot]
            if row.live and row.visited:
                tables[n] = row.table
                keys[n] = row.key
                place = row_place(slot, page_bytes, rows_per_page, row_bytes)
                copy_bytes(moving.rows, n * row_bytes, storage, place, row_bytes)
                n += 1
        gone += finish_drains(emb, pool, 1, now_ns, limit_ns)
        sampled = scratch.sample[1]
        for _ in range(2):
            requested, hits, misses = counters[REQUESTED], counters[HITS], counters[MISSES]
            fetched, bypassed = counters[FETCHED], counters[BYPASSED]
            unique = lookup(emb, pool, scratch, tables, keys, n)
            scratch.sample[1] = sampled  # nobody asked for these keys
            for r in range(unique):
                slot = scratch.miss_slot[r]
                if slot >= 0:
                    place = row_place(slot, page_bytes, rows_per_page, row_bytes)
                    copy_bytes(storage, place, moving.rows, scratch.first[r] * row_bytes, row_bytes)
            counters[EVICTED] -= counters[FETCHED] - fetched - (counters[BYPASSED] - bypassed)
            counters[REQUESTED], counters[HITS], counters[MISSES] = requested, hits, misses
            counters[FETCHED], counters[BYPASSED] = fetched, bypassed
    return gone


@kernel
def finish_drains(emb: EmbeddingState, pool: PoolState, budget: int, now_ns: int, limit_ns: int) -> int:
    """Give up draining pages whose leases are clear, at most `budget`; return how many. Others may have to stay."""
    member = emb.scalars[MEMBER]
    gone = 0
    i = 0
    while pool.n_draining[member] > 0 and i < pool.owned[member]:
        page = pool.lists[member, i]
        if pool.draining[page]:
            staying = pool.owned[member] - pool.n_draining[member]
            if staying < pool.goal[member] or now_ns - pool.drain_since[page] > limit_ns:
                abort_drain(pool, page)
                if emb.fill[page] < emb.scalars[ROWS_PER_PAGE]:
                    emb.fresh[emb.scalars[N_FRESH]] = page
                    emb.scalars[N_FRESH] += 1
            elif pool.pins[page] == 0 and gone < budget:
                _unpublish_page(emb, page)
                give_back_page(pool, page)
                gone += 1
                continue
        i += 1
    return gone


@kernel
def drain_coldest(emb: EmbeddingState, pool: PoolState, now_ns: int) -> int:
    """Begin to drain the page to give up next, nothing new goes in; return it, or -1 if none is over the goal."""
    member = emb.scalars[MEMBER]
    if surplus(pool, member) == 0:
        return -1
    page = _coldest_page(emb, pool, member)
    if page >= 0:
        start_drain(pool, page, now_ns)
        _close_page(emb, page)
    return page


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
        age = np.int64(np.uint32(now32 - emb.row[slot].last))
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
    sets = emb.scalars[SETS]
    queued = emb.scalars[POLICY] == SIEVE
    start = page * emb.scalars[ROWS_PER_PAGE]
    end = start + emb.fill[page]
    for slot in range(start, end + _AHEAD):
        if slot < end:
            row = emb.row[slot]
            prefetch(emb.word, reduce_range(mix2(np.uint64(row.table), np.uint64(row.key)), sets) * LINE_WORDS)
        slot -= _AHEAD
        if slot < start:
            continue
        row = emb.row[slot]
        if row.live:
            line = reduce_range(mix2(np.uint64(row.table), np.uint64(row.key)), sets)
            _erase(emb, _entry_of(emb, line, slot))
            row.live = 0
            row.visited = 0
            emb.counters[EVICTED] += 1
        if queued and emb.spot[slot] != EMPTY:
            emb.scalars[QUEUED + (emb.spot[slot] >= emb.scalars[ROOM])] -= 1
            emb.spot[slot] = EMPTY
    emb.fill[page] = 0


@kernel
def invalidate(emb: EmbeddingState, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], n: int) -> int:
    """Forget rows, as after an update of their table; return how many were cached.

    Their slots are the next victims: by LRU of their windows, by SIEVE when the hand comes by.
    """
    sets = emb.scalars[SETS]
    gone = 0
    for i in range(n):
        bits = mix2(np.uint64(tables[i]), np.uint64(keys[i]))
        e = _find(emb, reduce_range(bits, sets), _tag(bits), tables[i], keys[i])
        if e >= 0:
            _forget(emb, e)
            gone += 1
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
        bits = mix2(np.uint64(tables[i]), np.uint64(keys[i]))
        found[i] = _find(emb, reduce_range(bits, sets), _tag(bits), tables[i], keys[i]) >= 0


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
        slot = scratch.miss_slot[r]
        if slot < 0:
            counters[BYPASSED] -= 1
        if r < misses:
            continue
        misses += 1
        if slot >= 0:
            _forget(emb, scratch.place[r])
    counters[REQUESTED] -= n
    counters[HITS] -= n - missed
    counters[MISSES] -= missed
    counters[FETCHED] -= misses


@inner
def _forget(emb: EmbeddingState, e: int) -> None:
    """Take a row out of the index, and make its slot older than any live one."""
    row = emb.row[emb.slot[e]]
    row.last = np.uint32((emb.scalars[NOW] + 0x80000000) & 0xFFFFFFFF)
    row.visited = 0
    row.live = 0
    _erase(emb, e)
