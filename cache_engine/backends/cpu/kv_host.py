"""Kernels of the KV cache's second tier: pages that left the GPU's memory, kept in host memory for their return.

A page's blocks lie in one tier. What the host has of a user goes on where his pages in the pool end: those are full and
as many as `first`, the number of the host's first page. So both together are a valid prefix at every moment. Pages come
in at the front, as the pool evicts from the tail; they leave at the front, when they are brought back, or at the tail,
when the host is full and its least recent user gives way. Whatever breaks the connection (an epoch that ends, a history
computed anew past `first`) makes the rest worthless, and it is dropped at once.

These kernels decide; whoever calls them copies the bytes. A page comes back in two steps, `start_onboard` and
`finish_onboard`: meanwhile neither its source nor its destination is anybody else's, whatever becomes of the user.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu.kv import (
    MEMBER,
    N_IDLE,
    N_SCALARS,
    N_UNUSED,
    NEWEST,
    NONE,
    OLDEST,
    PAGE_TOKENS,
    PINNED,
    RESIDENT,
    STALE,
    USED,
    KvState,
    drop,
    erase,
    evict_tail,
    extend,
    find,
    insert,
    link_newest,
    lookup,
    make_idle,
    oldest_evictable,
    retire,
    shortage,
    unlink,
)
from cache_engine.backends.cpu.pool import PoolState, surplus
from cache_engine.jit import inner, kernel

# KvHostState.scalars, after those of KvState
N_MOVES = N_SCALARS

# KvHostState.counters, pages but for the last
OFFLOADED = 0
ONBOARDED = 1
GIVEN_UP = 2  # for others
HOST_HITS = 3  # tokens that a lookup found here, beyond the pool's
N_HOST_COUNTERS = 4


class KvHostState(NamedTuple):
    """Metadata of H host pages and U = H + 1 user entries, for a pool of P pages; users as in KvState."""

    place: npt.NDArray[np.int32]  # [a power of two] entry, NONE = -1
    user: npt.NDArray[np.int64]  # [U]
    epoch: npt.NDArray[np.int64]  # [U]
    tokens: npt.NDArray[np.int64]  # [U] where the prefix ends, counted from the user's first token
    first: npt.NDArray[np.int32]  # [U] number of the first page here in the user's history
    n_pages: npt.NDArray[np.int32]  # [U]
    head: npt.NDArray[np.int32]  # [U] first page here
    tail: npt.NDArray[np.int32]  # [U] last page
    older: npt.NDArray[np.int32]  # [U] next less recent user
    newer: npt.NDArray[np.int32]  # [U]
    unused: npt.NDArray[np.int32]  # [U] stack of entries
    before: npt.NDArray[np.int32]  # [H] the user's page before this one, NONE at the head
    after: npt.NDArray[np.int32]  # [H] NONE at the tail
    holder: npt.NDArray[np.int32]  # [H] entry of its user, NONE = idle, or dropped while on its way
    onto: npt.NDArray[np.int32]  # [H] page of the pool to which it is on its way, NONE = none
    idle: npt.NDArray[np.int32]  # [H] stack of pages that hold nothing
    moves: npt.NDArray[np.int32]  # [P, 2] page of the pool, host page: to be copied after `make_room`
    scalars: npt.NDArray[np.int64]  # RESIDENT: users here; USED: pages here, those on their way included
    counters: npt.NDArray[np.int64]


def new_kv_host_state(host_pages: int, page_tokens: int, pages: int) -> KvHostState:
    """Return an empty tier of `host_pages` pages for a pool of `pages` pages."""
    users = host_pages + 1  # the page of a new user is found after he is entered
    size = 1 << max(1, (2 * users - 1).bit_length())
    scalars = np.zeros(N_SCALARS + 1, np.int64)
    scalars[PAGE_TOKENS] = page_tokens
    scalars[N_UNUSED] = users
    scalars[N_IDLE] = host_pages
    scalars[OLDEST] = scalars[NEWEST] = NONE

    def nones(n: int) -> npt.NDArray[np.int32]:
        return np.full(n, NONE, np.int32)

    return KvHostState(
        place=nones(size),
        user=np.zeros(users, np.int64),
        epoch=np.zeros(users, np.int64),
        tokens=np.zeros(users, np.int64),
        first=np.zeros(users, np.int32),
        n_pages=np.zeros(users, np.int32),
        head=nones(users),
        tail=nones(users),
        older=nones(users),
        newer=nones(users),
        unused=np.arange(users - 1, -1, -1, dtype=np.int32),
        before=nones(host_pages),
        after=nones(host_pages),
        holder=nones(host_pages),
        onto=nones(host_pages),
        idle=np.arange(host_pages - 1, -1, -1, dtype=np.int32),
        moves=np.zeros((pages, 2), np.int32),
        scalars=scalars,
        counters=np.zeros(N_HOST_COUNTERS, np.int64),
    )


@kernel
def lookup_tiers(kv: KvState, host: KvHostState, user: int, epoch: int, tokens: int) -> int:
    """Look the user up as `lookup` does, and make him the most recent here, too; another epoch is dropped from both."""
    _drop_stale(kv, host, user, epoch)
    hit = lookup(kv, user, epoch, tokens)
    h = find(host, user)
    if h != NONE:
        host.counters[HOST_HITS] += min(host.tokens[h], tokens) - hit
        unlink(host, h)
        link_newest(host, h)
    return hit


@kernel
def beyond(kv: KvState, host: KvHostState, user: int, epoch: int, tokens: int) -> int:
    """Return how many of the first `tokens` tokens lie here, after those in the pool."""
    h = find(host, user)
    if h == NONE or host.epoch[h] != epoch:
        return 0
    e = find(kv, user)
    here = min(host.tokens[h], tokens) - (kv.tokens[e] if e != NONE else 0)
    return max(0, here)


@kernel
def make_room(kv: KvState, host: KvHostState, pool: PoolState, user: int, epoch: int, tokens: int) -> int:
    """Evict what an extension of the user to `tokens` tokens would evict, into this tier; return the pages moved.

    `moves` lists them: the caller copies each before anything else happens, or calls `forget_moves`. 0 where the
    extension would be refused. Another epoch of the user is dropped from both tiers.
    """
    host.scalars[N_MOVES] = 0
    _drop_stale(kv, host, user, epoch)
    e = find(kv, user)
    if e != NONE and kv.epoch[e] != epoch:
        kv.counters[STALE] += 1
        drop(kv, user)
        e = NONE
    need = -(-tokens // kv.scalars[PAGE_TOKENS]) - (kv.n_pages[e] if e != NONE else 0)
    if need <= 0:
        return 0
    short = shortage(kv, pool, e, need)
    for _ in range(short):
        _offload_tail(kv, host, oldest_evictable(kv, e), NONE)
    return host.scalars[N_MOVES]


@kernel
def make_idle_pages(kv: KvState, host: KvHostState, pool: PoolState, count: int) -> int:
    """Evict into this tier until the cache has `count` idle pages, as far as leases allow; else as `make_room`."""
    host.scalars[N_MOVES] = 0
    while kv.scalars[N_IDLE] < count:
        e = oldest_evictable(kv, NONE)
        if e == NONE:
            break
        _offload_tail(kv, host, e, NONE)
    return host.scalars[N_MOVES]


@kernel
def make_surplus_idle(kv: KvState, host: KvHostState, pool: PoolState, budget: int) -> int:
    """Evict what `release_pages` with this budget would evict, into this tier; else as `make_room`."""
    return make_idle_pages(kv, host, pool, min(budget, surplus(pool, kv.scalars[MEMBER])))


@kernel
def forget_moves(host: KvHostState, done: int) -> None:
    """Undo the moves from number `done` on, whose bytes never came: their users lose what is here."""
    for i in range(done, host.scalars[N_MOVES]):
        h = host.holder[host.moves[i, 1]]
        if h != NONE:
            _drop_entry(host, h)


@kernel
def extend_tiers(kv: KvState, host: KvHostState, pool: PoolState, user: int, epoch: int, tokens: int) -> bool:
    """Extend the user as `extend` does, after `make_room`; what the pool now has as well leaves this tier."""
    if not extend(kv, pool, user, epoch, tokens):
        return False
    e = find(kv, user)
    h = find(host, user)
    if e != NONE and h != NONE:
        while host.n_pages[h] > 0 and host.first[h] < kv.n_pages[e]:
            _idle_host_page(host, _pop_head(host, h))
        if host.n_pages[h] == 0 or kv.tokens[e] < host.first[h] * kv.scalars[PAGE_TOKENS]:
            _drop_entry(host, h)
    return True


@kernel
def drop_tiers(kv: KvState, host: KvHostState, user: int) -> bool:
    """Forget the user in both tiers; False if he was in neither."""
    h = find(host, user)
    if h != NONE:
        _drop_entry(host, h)
    return drop(kv, user) or h != NONE


@kernel
def next_onboard(kv: KvState, host: KvHostState, pool: PoolState, user: int, epoch: int, tokens: int) -> int:
    """Return the host page to bring back next so that the pool has the user's first `tokens` tokens; NONE: none.

    None while it is on its way already, or where the pool can have no room for it. Evicts into this tier what must
    leave for it, as `make_room`; never what the user himself has here.
    """
    host.scalars[N_MOVES] = 0
    if beyond(kv, host, user, epoch, tokens) == 0:
        return NONE
    h = find(host, user)
    at = host.head[h]
    e = find(kv, user)
    short = shortage(kv, pool, e, 1)
    if host.onto[at] != NONE or short == NONE:
        return NONE
    unlink(host, h)
    link_newest(host, h)
    for _ in range(short):
        _offload_tail(kv, host, oldest_evictable(kv, e), h)
    return at


@kernel
def start_onboard(kv: KvState, host: KvHostState, at: int) -> int:
    """Set the host page `at` on its way to an idle page of the pool, which is returned; nobody gets either."""
    n = kv.scalars[N_IDLE] - 1
    page = kv.idle[n]
    kv.scalars[N_IDLE] = n
    kv.scalars[USED] += 1
    kv.scalars[PINNED] += 1
    host.onto[at] = page
    return page


@kernel
def finish_onboard(kv: KvState, host: KvHostState, at: int, copied: bool) -> bool:
    """End the way of host page `at`; return whether it now belongs to its user's prefix in the pool.

    Not where it was not copied, or where meanwhile the user was dropped or changed so that it does not follow his last
    page: then the pool's page is idle again, and the host's, if the user still has it, as it was.
    """
    page = host.onto[at]
    host.onto[at] = NONE
    kv.scalars[PINNED] -= 1
    h = host.holder[at]
    if h == NONE or host.head[h] != at or not copied:
        make_idle(kv, page)
        if h == NONE:
            _idle_host_page(host, at)
        return False
    e = find(kv, host.user[h])
    if e == NONE:
        e = insert(kv, host.user[h], host.epoch[h])
    else:
        unlink(kv, e)
        link_newest(kv, e)
    kv.holder[page] = e
    kv.before[page] = kv.tail[e]
    kv.tail[e] = page
    kv.n_pages[e] += 1
    if kv.pins[e] > 0:
        kv.scalars[PINNED] += 1
    kv.tokens[e] = min(host.tokens[h], kv.n_pages[e] * kv.scalars[PAGE_TOKENS])
    _idle_host_page(host, _pop_head(host, h))
    if host.n_pages[h] == 0:
        _drop_entry(host, h)
    host.counters[ONBOARDED] += 1
    return True


@inner
def _drop_stale(kv: KvState, host: KvHostState, user: int, epoch: int) -> None:
    """Drop another epoch of the user from this tier; it counts here only if the pool has none of it."""
    h = find(host, user)
    if h != NONE and host.epoch[h] != epoch:
        _drop_entry(host, h)
        if find(kv, user) == NONE:
            kv.counters[STALE] += 1


@inner
def _offload_tail(kv: KvState, host: KvHostState, e: int, keep: int) -> None:
    """Evict the last page of entry `e` of the pool into this tier; where there is no room, it is lost."""
    user = kv.user[e]
    epoch = kv.epoch[e]
    tokens = kv.tokens[e]
    number = kv.n_pages[e] - 1
    page = kv.tail[e]
    evict_tail(kv, e)
    at = _host_page(host, keep)
    h = find(host, user)
    if at == NONE:
        if h != NONE:
            _drop_entry(host, h)
        return
    if h == NONE:
        h = insert(host, user, epoch)
        host.tokens[h] = tokens
        host.head[h] = NONE
    else:
        unlink(host, h)
        link_newest(host, h)
    head = host.head[h]
    host.before[at] = NONE
    host.after[at] = head
    if head != NONE:
        host.before[head] = at
    else:
        host.tail[h] = at
    host.head[h] = at
    host.holder[at] = h
    host.first[h] = number
    host.n_pages[h] += 1
    host.scalars[USED] += 1
    host.counters[OFFLOADED] += 1
    n = host.scalars[N_MOVES]
    host.moves[n, 0] = page
    host.moves[n, 1] = at
    host.scalars[N_MOVES] = n + 1


@inner
def _host_page(host: KvHostState, keep: int) -> int:
    """Return a page to fill: an idle one, else the tail of the least recent user but `keep`; NONE if there is none."""
    if host.scalars[N_IDLE] == 0:
        h = host.scalars[OLDEST]
        while h != NONE and (h == keep or host.onto[host.tail[h]] != NONE):
            h = host.newer[h]
        if h == NONE:
            return NONE
        at = host.tail[h]
        host.tail[h] = host.before[at]
        host.n_pages[h] -= 1
        host.counters[GIVEN_UP] += 1
        if host.n_pages[h] == 0:
            host.head[h] = NONE
            _drop_entry(host, h)
        else:
            host.after[host.tail[h]] = NONE
            end = np.int64(host.first[h] + host.n_pages[h]) * host.scalars[PAGE_TOKENS]
            host.tokens[h] = min(host.tokens[h], end)
        _idle_host_page(host, at)
    n = host.scalars[N_IDLE] - 1
    host.scalars[N_IDLE] = n
    return host.idle[n]


@inner
def _pop_head(host: KvHostState, h: int) -> int:
    at = host.head[h]
    head = host.after[at]
    host.head[h] = head
    if head != NONE:
        host.before[head] = NONE
    else:
        host.tail[h] = NONE
    host.first[h] += 1
    host.n_pages[h] -= 1
    return at


@inner
def _drop_entry(host: KvHostState, h: int) -> None:
    at = host.head[h]
    while at != NONE:
        after = host.after[at]
        _idle_host_page(host, at)
        at = after
    host.head[h] = NONE
    host.tail[h] = NONE
    host.n_pages[h] = 0
    host.tokens[h] = 0
    unlink(host, h)
    erase(host, h)
    host.scalars[RESIDENT] -= 1
    retire(host, h)


@inner
def _idle_host_page(host: KvHostState, at: int) -> None:
    """Take a page from its user; it becomes idle now, or at the end of its way."""
    host.holder[at] = NONE
    host.before[at] = NONE
    host.after[at] = NONE
    if host.onto[at] == NONE:
        host.idle[host.scalars[N_IDLE]] = at
        host.scalars[N_IDLE] += 1
        host.scalars[USED] -= 1
