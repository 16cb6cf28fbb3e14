"""Kernels of ghosts: a hashed sample of keys that tells what more or fewer pages would have hit.

SHARDS (Waldspurger et al., FAST 2015): of all keys, those whose hash falls under the rate are followed; the distance of
a reuse is the weight of the distinct sampled keys used since, divided by the rate. Distances are kept exactly, in a
Fenwick tree over the order of last use. `hits[b]` sums the weight of sampled reuses that a cache of b + 1 buckets would
have hit, and one of b buckets not: the first b sum to the hits of a cache of b buckets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix
from cache_engine.jit import inner, kernel

EMPTY = -1

# GhostState.counts
NEXT = 0  # next position in the order of use
LIVE = 1  # sampled keys followed
N_COUNTS = 2

# GhostState.sums
ASKED = 0  # sampled weight asked
FOLLOWED = 1  # weight of all keys followed
RATE = 2
BUCKET = 3  # width of a bucket, in units of weight


class GhostState(NamedTuple):
    """T positions in the order of last use, at most T / 4 keys, a hash table of H places, B buckets of sizes."""

    threshold: npt.NDArray[np.uint64]  # [1] a key is sampled if its hash is below
    place: npt.NDArray[np.int32]  # [H] position of the key, EMPTY = -1
    key: npt.NDArray[np.int64]  # [T] key last used at the position
    weight: npt.NDArray[np.float64]  # [T] 0: the key was used again later
    tree: npt.NDArray[np.float64]  # [T + 1] Fenwick tree over weight
    hits: npt.NDArray[np.float64]  # [B]
    counts: npt.NDArray[np.int64]
    sums: npt.NDArray[np.float64]


def new_ghost_state(rate: float, keys: int, span: float, buckets: int) -> GhostState:
    """Return a ghost that samples at `rate`, follows at most `keys` keys, and resolves sizes up to `span`.

    Args:
        rate: share of keys that are sampled, in (0, 1].
        keys: bound on the sampled keys followed; past it the least recent quarter is forgotten, so reuses over more
            than 3/4 `keys / rate` distinct keys may count as misses.
        span: largest size resolved, in units of weight (rows, pages).
        buckets: number of equal steps of size up to `span`.
    """
    positions = 4 * keys
    size = 1 << max(1, (4 * keys - 1).bit_length())
    return GhostState(
        np.array([min(int(rate * 2.0**64), 2**64 - 1)], np.uint64),
        np.full(size, EMPTY, np.int32),
        np.zeros(positions, np.int64),
        np.zeros(positions, np.float64),
        np.zeros(positions + 1, np.float64),
        np.zeros(buckets, np.float64),
        np.zeros(N_COUNTS, np.int64),
        np.array([0.0, 0.0, rate, span / buckets]),
    )


@kernel
def access(ghost: GhostState, key: int, weight: float, asked: float) -> None:
    """Follow one use of `key`: it asks for `asked` units and weighs `weight` from now on.

    An unsampled key costs a hash.
    """
    if mix(np.uint64(key)) < ghost.threshold[0]:
        follow(ghost, key, weight, asked)


@inner
def follow(ghost: GhostState, key: int, weight: float, asked: float) -> None:
    """Follow one use of a sampled key; `access` without the test, for loops that make it themselves."""
    _follow(ghost, ghost.hits, key, weight, asked)


@kernel
def follow_runs(
    ghost: GhostState,
    hits: npt.NDArray[np.float64],
    keys: npt.NDArray[np.int64],
    pages: npt.NDArray[np.float64],
    n: int,
) -> None:
    """Follow one use of each of n keys that ask for runs of pages, if they are sampled.

    Row g of `hits`, [G, B], counts those of a G-th of all keys; G is a power of two.
    """
    for i in range(n):
        bits = mix(np.uint64(keys[i]))
        if bits < ghost.threshold[0]:
            group = np.int64(bits & np.uint64(hits.shape[0] - 1))
            _follow(ghost, hits[group], keys[i], pages[i], pages[i])


@inner
def _follow(ghost: GhostState, hits: npt.NDArray[np.float64], key: int, weight: float, asked: float) -> None:
    ghost.sums[ASKED] += asked
    at = _find(ghost, key)
    position = ghost.place[at]
    if position != EMPTY:
        held = ghost.weight[position]
        reused = min(held, asked)
        # Itself needs room too: half of a run on the average, one unit for a single row.
        size = (ghost.sums[FOLLOWED] - _prefix(ghost, position + 1)) / ghost.sums[RATE] + 0.5 * (reused + 1.0)
        # Sums of floats: what cancels out may fall below nothing.
        bucket = max(0, math.ceil(size / ghost.sums[BUCKET]) - 1)
        if bucket < hits.size:
            hits[bucket] += reused
        _add(ghost, position, -held)
        ghost.weight[position] = 0.0
        ghost.sums[FOLLOWED] -= held
        ghost.counts[LIVE] -= 1
    full = ghost.counts[LIVE] >= ghost.weight.size // 4
    if full or ghost.counts[NEXT] == ghost.weight.size:
        _compact(ghost)
        at = _find(ghost, key)
    now = ghost.counts[NEXT]
    ghost.counts[NEXT] = now + 1
    ghost.counts[LIVE] += 1
    ghost.place[at] = now
    ghost.key[now] = key
    ghost.weight[now] = weight
    ghost.sums[FOLLOWED] += weight
    _add(ghost, now, weight)


@inner
def _find(ghost: GhostState, key: int) -> np.int64:
    """Return the key's place in the hash table, or the empty place where it belongs."""
    mask = ghost.place.size - 1
    at = np.int64(mix(mix(np.uint64(key))) & np.uint64(mask))
    while ghost.place[at] != EMPTY and ghost.key[ghost.place[at]] != key:
        at = (at + 1) & mask
    return at


@inner
def _compact(ghost: GhostState) -> None:
    """Number the live positions anew from 0, dropping the oldest keys over 3/4 of the bound; rebuild table and tree."""
    bound = ghost.weight.size // 4
    drop = max(0, ghost.counts[LIVE] - bound * 3 // 4)
    ghost.place[:] = EMPTY
    used = 0
    total = 0.0
    for position in range(ghost.counts[NEXT]):
        weight = ghost.weight[position]
        if weight == 0.0:
            continue
        if drop > 0:
            drop -= 1
            continue
        key = ghost.key[position]
        ghost.key[used] = key
        ghost.weight[used] = weight
        total += weight
        ghost.place[_find(ghost, key)] = used
        used += 1
    ghost.weight[used:] = 0.0
    ghost.tree[:] = 0.0
    for position in range(used):
        _add(ghost, position, ghost.weight[position])
    ghost.counts[NEXT] = used
    ghost.counts[LIVE] = used
    ghost.sums[FOLLOWED] = total


@inner
def _add(ghost: GhostState, position: int, weight: float) -> None:
    i = position + 1
    while i < ghost.tree.size:
        ghost.tree[i] += weight
        i += i & -i


@inner
def _prefix(ghost: GhostState, count: int) -> float:
    total = 0.0
    i = count
    while i > 0:
        total += ghost.tree[i]
        i -= i & -i
    return total
