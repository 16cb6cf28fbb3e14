"""Kernels of the pool: who owns which page."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner

FREE = -1

# PoolState.scalars
FREE_COUNT = 0
N_POOL_SCALARS = 1


class PoolState(NamedTuple):
    """The pool's metadata for P pages and M members; every page is in exactly one list."""

    owner: npt.NDArray[np.int16]  # [P] member that owns the page, FREE = -1
    draining: npt.NDArray[np.uint8]  # [P] 1: on its way out of its owner, nothing new goes in
    drain_since: npt.NDArray[np.int64]  # [P] ns, when draining began
    pins: npt.NDArray[np.int32]  # [P] leases that hold the page
    generation: npt.NDArray[np.int64]  # [P] raised at every change of owner
    free: npt.NDArray[np.int32]  # [P] stack of FREE pages
    lists: npt.NDArray[np.int32]  # [M, P] pages of each member; the last one takes the place of one that leaves
    place: npt.NDArray[np.int32]  # [P] position of the page in its member's list
    owned: npt.NDArray[np.int64]  # [M] length of each list; draining pages are still in it
    n_draining: npt.NDArray[np.int64]  # [M]
    goal: npt.NDArray[np.int64]  # [M] pages that each member should have
    granted: npt.NDArray[np.int64]  # [M] pages given so far
    taken: npt.NDArray[np.int64]  # [M] pages taken back so far
    aborted: npt.NDArray[np.int64]  # [M] drains given up so far
    scalars: npt.NDArray[np.int64]


def new_pool_state(pages: int, members: int) -> PoolState:
    """Return the state of a pool in which every page is FREE."""
    free = np.arange(pages - 1, -1, -1, dtype=np.int32)
    scalars = np.zeros(N_POOL_SCALARS, np.int64)
    scalars[FREE_COUNT] = pages
    return PoolState(
        np.full(pages, FREE, np.int16),
        np.zeros(pages, np.uint8),
        np.zeros(pages, np.int64),
        np.zeros(pages, np.int32),
        np.zeros(pages, np.int64),
        free,
        np.zeros((members, pages), np.int32),
        np.zeros(pages, np.int32),
        np.zeros(members, np.int64),
        np.zeros(members, np.int64),
        np.zeros(members, np.int64),
        np.zeros(members, np.int64),
        np.zeros(members, np.int64),
        np.zeros(members, np.int64),
        scalars,
    )


@inner
def take_free_page(pool: PoolState, member: int) -> int:
    """Give a FREE page to `member`, at the end of its list; return it, or -1 if none is FREE."""
    n = pool.scalars[FREE_COUNT]
    if n == 0:
        return -1
    page = pool.free[n - 1]
    pool.scalars[FREE_COUNT] = n - 1
    pool.owner[page] = member
    pool.generation[page] += 1
    pool.lists[member, pool.owned[member]] = page
    pool.place[page] = pool.owned[member]
    pool.owned[member] += 1
    pool.granted[member] += 1
    return page


@inner
def give_back_page(pool: PoolState, page: int) -> None:
    """Make an unpinned page FREE. Its member must have unpublished whatever was on it."""
    member = pool.owner[page]
    last = pool.owned[member] - 1
    moved = pool.lists[member, last]
    pool.lists[member, pool.place[page]] = moved
    pool.place[moved] = pool.place[page]
    pool.owned[member] = last
    if pool.draining[page]:
        pool.draining[page] = 0
        pool.n_draining[member] -= 1
    pool.owner[page] = FREE
    pool.generation[page] += 1
    pool.taken[member] += 1
    pool.free[pool.scalars[FREE_COUNT]] = page
    pool.scalars[FREE_COUNT] += 1


@inner
def start_drain(pool: PoolState, page: int, now_ns: int) -> None:
    """Mark an owned page: nothing new goes in, it leaves as soon as its leases are clear."""
    pool.draining[page] = 1
    pool.drain_since[page] = now_ns
    pool.n_draining[pool.owner[page]] += 1


@inner
def abort_drain(pool: PoolState, page: int) -> None:
    """Return a draining page to its owner; nothing on it was unpublished yet."""
    pool.draining[page] = 0
    member = pool.owner[page]
    pool.n_draining[member] -= 1
    pool.aborted[member] += 1


@inner
def surplus(pool: PoolState, member: int) -> int:
    """Pages that `member` has over its goal, draining ones not counted; 0 if none."""
    return max(0, pool.owned[member] - pool.n_draining[member] - pool.goal[member])
