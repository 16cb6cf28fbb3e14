"""Kernels of the KV cache: pages per user, users in order of last use, eviction from the tail.

A user's keys and values lie in pages of `page_tokens` tokens, in order, so what is cached is always a prefix of the
history and giving up the tail page leaves a shorter valid prefix. Memory is won from the user used least recently.
A user who is leased is never evicted; if his cache is dropped meanwhile (a new epoch, an abort) it becomes unreachable
at once and its pages come back when the last lease ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu.pool import PoolState, give_back_page, new_pool_state, surplus, take_free_page
from cache_engine.hashing import mix
from cache_engine.jit import in_memory, inner, kernel

if TYPE_CHECKING:
    from cache_engine.backends.cpu.kv_host import KvHostState

    Users: TypeAlias = "KvState | KvHostState"  # either tier's table of users

NONE = -1

# KvState.scalars
PAGE_TOKENS = 0
MEMBER = 1
N_IDLE = 2
N_UNUSED = 3  # user entries not in use
OLDEST = 4  # least recent user
NEWEST = 5
USED = 6  # pages that hold blocks
PINNED = 7  # pages that hold blocks of leased users, doomed ones included
RESIDENT = 8  # users with an entry that lookups can reach
N_SCALARS = 9

# KvState.counters
LOOKUPS = 0
REQUESTED = 1  # tokens
HITS = 2
MISSES = 3
EXTENDED = 4  # pages filled
EVICTED = 5  # pages
REFUSED = 6  # extensions refused
STALE = 7  # users dropped for a new epoch
N_COUNTERS = 8


class KvState(NamedTuple):
    """Metadata of the cache: U user entries, P pages, a hash table of H places (a power of two, at most half full)."""

    place: npt.NDArray[np.int32]  # [H] entry, NONE = -1; linear probing
    user: npt.NDArray[np.int64]  # [U] any int64 is legal
    epoch: npt.NDArray[np.int64]  # [U]
    tokens: npt.NDArray[np.int64]  # [U] valid prefix
    n_pages: npt.NDArray[np.int32]  # [U]
    tail: npt.NDArray[np.int32]  # [U] last page, NONE = -1
    pins: npt.NDArray[np.int32]  # [U] leases
    doomed: npt.NDArray[np.uint8]  # [U] 1: unreachable, freed when the last lease ends
    older: npt.NDArray[np.int32]  # [U] next less recent user
    newer: npt.NDArray[np.int32]  # [U]
    unused: npt.NDArray[np.int32]  # [U] stack of entries
    before: npt.NDArray[np.int32]  # [P] the user's page before this one, NONE at the head
    holder: npt.NDArray[np.int32]  # [P] entry of the user whose blocks lie here, NONE = idle
    idle: npt.NDArray[np.int32]  # [P] stack of owned pages that hold nothing
    scalars: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]


def new_kv_state(pages: int, page_tokens: int, member: int) -> KvState:
    """Return an empty cache for a pool of `pages` pages."""
    users = pages + 1  # one more than can hold a page: a new user is entered before others are evicted for him
    size = 1 << max(1, (2 * users - 1).bit_length())
    scalars = np.zeros(N_SCALARS, np.int64)
    scalars[PAGE_TOKENS] = page_tokens
    scalars[MEMBER] = member
    scalars[N_UNUSED] = users
    scalars[OLDEST] = scalars[NEWEST] = NONE

    def nones(n: int) -> npt.NDArray[np.int32]:
        return np.full(n, NONE, np.int32)

    return KvState(
        nones(size),
        np.zeros(users, np.int64),
        np.zeros(users, np.int64),
        np.zeros(users, np.int64),
        np.zeros(users, np.int32),
        nones(users),
        np.zeros(users, np.int32),
        np.zeros(users, np.uint8),
        nones(users),
        nones(users),
        np.arange(users - 1, -1, -1, dtype=np.int32),
        nones(pages),
        nones(pages),
        np.zeros(pages, np.int32),
        scalars,
        np.zeros(N_COUNTERS, np.int64),
    )


# The state that Python hands over at each call, in one array: see `in_memory`.
_store, _load = in_memory((new_kv_state(1, 1, 0), new_pool_state(1, 1)))


@kernel
def pack(kv: KvState, pool: PoolState, packed: npt.NDArray[np.uint8]) -> None:
    """Write what the `*_packed` kernels need into `packed`, uint8 [MOST_BYTES]; the caller keeps the arrays alive."""
    _store(packed, (kv, pool))


@kernel
def lookup_packed(packed: npt.NDArray[np.uint8], user: int, epoch: int, tokens: int) -> int:
    """`lookup` with the state that `pack` wrote."""
    kv, _ = _load(packed)
    return int(lookup(kv, user, epoch, tokens))


@kernel
def extend_packed(packed: npt.NDArray[np.uint8], user: int, epoch: int, tokens: int) -> bool:
    """`extend` with the state that `pack` wrote."""
    kv, pool = _load(packed)
    return bool(extend(kv, pool, user, epoch, tokens))


@kernel
def find(kv: Users, user: int) -> int:
    """Return the user's entry or NONE."""
    mask = kv.place.size - 1
    at = np.int64(mix(np.uint64(user)) & np.uint64(mask))
    while kv.place[at] != NONE:
        e = kv.place[at]
        if kv.user[e] == user:
            return e
        at = (at + 1) & mask
    return NONE


@kernel
def lookup(kv: KvState, user: int, epoch: int, tokens: int) -> int:
    """Return how many of the first `tokens` tokens of the user's history are cached; he becomes the most recent.

    A cache of another epoch is dropped and misses.
    """
    kv.counters[LOOKUPS] += 1
    kv.counters[REQUESTED] += tokens
    e = find(kv, user)
    hit = 0
    if e != NONE:
        if kv.epoch[e] != epoch:
            kv.counters[STALE] += 1
            drop(kv, user)
        else:
            hit = min(kv.tokens[e], tokens)
            unlink(kv, e)
            link_newest(kv, e)
    kv.counters[HITS] += hit
    kv.counters[MISSES] += tokens - hit
    return hit


@kernel
def extend(kv: KvState, pool: PoolState, user: int, epoch: int, tokens: int) -> bool:
    """Make the user's cache cover `tokens` tokens, evicting the least recent users' tails; all or nothing.

    False, and nothing changed, where the goal, leases or the partition leave too little room (his cache of another
    epoch is dropped all the same). The user becomes the most recent. The caller fills the new pages.
    """
    page_tokens = kv.scalars[PAGE_TOKENS]
    e = find(kv, user)
    if e != NONE and kv.epoch[e] != epoch:
        kv.counters[STALE] += 1
        drop(kv, user)
        e = NONE
    need = -(-tokens // page_tokens) - (kv.n_pages[e] if e != NONE else 0)
    if need <= 0:
        if e != NONE:
            kv.tokens[e] = max(kv.tokens[e], tokens)
            unlink(kv, e)
            link_newest(kv, e)
        return True
    short = shortage(kv, pool, e, need)
    if short == NONE:
        kv.counters[REFUSED] += 1
        return False
    if e == NONE:
        e = insert(kv, user, epoch)
    else:
        unlink(kv, e)
        link_newest(kv, e)
    for _ in range(short):
        evict_tail(kv, oldest_evictable(kv, e))
    for _ in range(need):
        n = kv.scalars[N_IDLE] - 1
        page = kv.idle[n]
        kv.scalars[N_IDLE] = n
        kv.holder[page] = e
        kv.before[page] = kv.tail[e]
        kv.tail[e] = page
    kv.n_pages[e] += need
    kv.scalars[USED] += need
    if kv.pins[e] > 0:
        kv.scalars[PINNED] += need
    kv.tokens[e] = tokens
    kv.counters[EXTENDED] += need
    return True


@kernel
def pin(kv: KvState, user: int) -> int:
    """Lease the user's pages, those that come later included; return his entry, NONE if he has none."""
    e = find(kv, user)
    if e != NONE:
        if kv.pins[e] == 0:
            kv.scalars[PINNED] += kv.n_pages[e]
        kv.pins[e] += 1
    return e


@kernel
def unpin(kv: KvState, e: int) -> None:
    """End a lease of entry `e`; a dropped user's pages become idle with the last one."""
    kv.pins[e] -= 1
    if kv.pins[e] == 0:
        kv.scalars[PINNED] -= kv.n_pages[e]
        if kv.doomed[e]:
            kv.doomed[e] = 0
            _free_pages(kv, e)
            retire(kv, e)


@kernel
def drop(kv: KvState, user: int) -> bool:
    """Forget the user; a leased one becomes unreachable now and is freed by the end of his last lease."""
    e = find(kv, user)
    if e == NONE:
        return False
    unlink(kv, e)
    erase(kv, e)
    kv.scalars[RESIDENT] -= 1
    if kv.pins[e] > 0:
        kv.doomed[e] = 1
    else:
        _free_pages(kv, e)
        retire(kv, e)
    return True


@kernel
def accept_pages(kv: KvState, pool: PoolState, budget: int) -> int:
    """Take at most `budget` FREE pages, as far as the goal asks; return how many came."""
    member = kv.scalars[MEMBER]
    came = 0
    while came < budget and pool.owned[member] < pool.goal[member]:
        page = take_free_page(pool, member)
        if page < 0:
            break
        kv.idle[kv.scalars[N_IDLE]] = page
        kv.scalars[N_IDLE] += 1
        came += 1
    return came


@kernel
def release_pages(kv: KvState, pool: PoolState, budget: int) -> int:
    """Give up pages over the goal, at most `budget`: idle ones, then the least recent user's tail; return how many.

    Where all that is left is leased, the rest is deferred: a later call takes it.
    """
    member = kv.scalars[MEMBER]
    gone = 0
    while gone < budget and surplus(pool, member) > 0:
        if kv.scalars[N_IDLE] == 0:
            e = oldest_evictable(kv, NONE)
            if e == NONE:
                break
            evict_tail(kv, e)
        n = kv.scalars[N_IDLE] - 1
        kv.scalars[N_IDLE] = n
        give_back_page(pool, kv.idle[n])
        gone += 1
    return gone


@inner
def shortage(kv: KvState, pool: PoolState, e: int, need: int) -> int:
    """Return how many pages must be evicted before entry `e` (NONE: a new user) gets `need` more; NONE: he cannot."""
    member = kv.scalars[MEMBER]
    have = kv.n_pages[e] if e != NONE else 0
    own_pinned = kv.n_pages[e] if e != NONE and kv.pins[e] > 0 else 0
    # No new page while over the goal: what is used afterwards, unevictable pages and his own, must fit under it.
    limit = min(pool.goal[member], pool.owned[member] - pool.n_draining[member])
    fixed = kv.scalars[PINNED] - own_pinned + have
    if need > limit - fixed:
        return NONE
    return max(0, kv.scalars[USED] + need - limit)


@inner
def oldest_evictable(kv: KvState, keep: int) -> int:
    """Return the entry of the least recent user who is neither leased nor `keep`; NONE if there is none."""
    e = kv.scalars[OLDEST]
    while e != NONE and (kv.pins[e] > 0 or e == keep):
        e = kv.newer[e]
    return e


@inner
def evict_tail(kv: KvState, e: int) -> None:
    """Make the last page of an unleased user idle."""
    page = kv.tail[e]
    kv.tail[e] = kv.before[page]
    kv.n_pages[e] -= 1
    kv.tokens[e] = min(kv.tokens[e], kv.n_pages[e] * kv.scalars[PAGE_TOKENS])
    make_idle(kv, page)
    kv.counters[EVICTED] += 1
    if kv.n_pages[e] == 0:
        unlink(kv, e)
        erase(kv, e)
        kv.scalars[RESIDENT] -= 1
        retire(kv, e)


@inner
def make_idle(kv: KvState, page: int) -> None:
    """Put a page that held blocks on the idle stack."""
    kv.holder[page] = NONE
    kv.before[page] = NONE
    kv.idle[kv.scalars[N_IDLE]] = page
    kv.scalars[N_IDLE] += 1
    kv.scalars[USED] -= 1


@inner
def _free_pages(kv: KvState, e: int) -> None:
    page = kv.tail[e]
    while page != NONE:
        before = kv.before[page]
        make_idle(kv, page)
        page = before
    kv.tail[e] = NONE
    kv.n_pages[e] = 0
    kv.tokens[e] = 0


@inner
def retire(kv: Users, e: int) -> None:
    """Make the entry one that is not in use."""
    kv.unused[kv.scalars[N_UNUSED]] = e
    kv.scalars[N_UNUSED] += 1


@inner
def insert(kv: Users, user: int, epoch: int) -> int:
    """Enter a user without pages, the most recent; return his entry."""
    n = kv.scalars[N_UNUSED] - 1
    e = kv.unused[n]
    kv.scalars[N_UNUSED] = n
    kv.user[e] = user
    kv.epoch[e] = epoch
    kv.tokens[e] = 0
    kv.n_pages[e] = 0
    kv.tail[e] = NONE
    mask = kv.place.size - 1
    at = np.int64(mix(np.uint64(user)) & np.uint64(mask))
    while kv.place[at] != NONE:
        at = (at + 1) & mask
    kv.place[at] = e
    kv.scalars[RESIDENT] += 1
    link_newest(kv, e)
    return e


@inner
def erase(kv: Users, e: int) -> None:
    """Take the entry out of the hash table, moving later ones of the probe run back (Knuth, algorithm 6.4R)."""
    mask = kv.place.size - 1
    at = np.int64(mix(np.uint64(kv.user[e])) & np.uint64(mask))
    while kv.place[at] != e:
        at = (at + 1) & mask
    hole = at
    at = (at + 1) & mask
    while kv.place[at] != NONE:
        home = np.int64(mix(np.uint64(kv.user[kv.place[at]])) & np.uint64(mask))
        if ((at - home) & mask) >= ((at - hole) & mask):
            kv.place[hole] = kv.place[at]
            hole = at
        at = (at + 1) & mask
    kv.place[hole] = NONE


@inner
def unlink(kv: Users, e: int) -> None:
    """Take the entry out of the order of use."""
    older = kv.older[e]
    newer = kv.newer[e]
    if older != NONE:
        kv.newer[older] = newer
    else:
        kv.scalars[OLDEST] = newer
    if newer != NONE:
        kv.older[newer] = older
    else:
        kv.scalars[NEWEST] = older


@inner
def link_newest(kv: Users, e: int) -> None:
    """Make the entry the most recent."""
    newest = kv.scalars[NEWEST]
    kv.older[e] = newest
    kv.newer[e] = NONE
    if newest != NONE:
        kv.newer[newest] = e
    else:
        kv.scalars[OLDEST] = e
    kv.scalars[NEWEST] = e
