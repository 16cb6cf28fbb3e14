"""Miss-ratio curves of a trace's two caches under LRU, from a hashed sample of the keys (SHARDS).

What a cache of any size would miss follows from the stack distances of one pass: the weight of the other keys used
since a key's last use (Mattson et al., IBM Systems Journal 1970), kept in a Fenwick tree over the order of last use.
SHARDS (Waldspurger et al., FAST 2015) follows the keys whose hash falls under a rate alone and divides distances by it.
Its adjustment (SHARDS-adj) counts the references that the sample has too few or too many as hits: they are to the
hottest keys, which any cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix
from cache_engine.jit import kernel
from helm_rl.errors import UserError
from helm_rl.workloads.trace import Trace

GROUPS = 16
"""Disjoint parts of the sample, whose scatter tells the error of the whole."""
SAMPLE = 1 << 20
LEAST_RATE = 0.01
"""By default, as many references are followed as SAMPLE, but not a smaller share of the keys than LEAST_RATE."""
POINTS = 64
SPAN = 1e4
"""Sizes of a curve that asks for none: POINTS of them, from a SPAN-th of the working set to all of it."""

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_EMPTY = -1
_KEY_BITS = np.uint64(0x3C6EF372FE94F82B)  # the sample is another than that of the engine's ghosts


@dataclass(frozen=True)
class MissRatioCurve:
    """Miss ratio over cache size. All arrays are (k,); sizes are in the unit that the weights had."""

    size: FloatArray
    miss_ratio: FloatArray
    standard_error: FloatArray  # 0 where every key was followed
    rate: float  # share of the keys that was followed
    followed: int  # references followed
    working_set: float  # weight of all keys, as it is at the end: a larger cache has the misses of the first uses alone


def embedding_curve(trace: Trace, rate: float | None = None, sizes: FloatArray | None = None) -> MissRatioCurve:
    """Return the curve of the items that a trace's requests name, in items; a miss is a reference not found.

    Raises UserError if the trace names no item.
    """
    if trace.item_values.size == 0:
        raise UserError(f"trace {trace.meta.name} names no item, so there is no miss-ratio curve of them")
    return miss_ratio_curve(trace.item_values, rate=rate, sizes=sizes)


def kv_curve(trace: Trace, rate: float | None = None, sizes: FloatArray | None = None) -> MissRatioCurve:
    """Return the curve of the histories of a trace's users, in tokens; a miss is a token of a history not found.

    A user's history is there as a whole after each of his requests, and loses its end first. New tokens always miss.
    Exact for histories that do not shrink; one that does would leave memory free which the curve fills at once.
    """
    history = trace.history_tokens.astype(np.float64)
    return miss_ratio_curve(
        trace.user, kept=history, asked=history, useful=history - trace.new_tokens, rate=rate, sizes=sizes
    )


def miss_ratio_curve(
    keys: Int64Array,
    *,
    kept: FloatArray | None = None,
    asked: FloatArray | None = None,
    useful: FloatArray | None = None,
    rate: float | None = None,
    sizes: FloatArray | None = None,
) -> MissRatioCurve:
    """Return the miss ratio of an LRU cache over its size, for references in order.

    Args:
        keys: (n,) what is referred to; any int64.
        kept: (n,) weight that the key has in the cache after the reference; None: 1.
        asked: (n,) weight that the reference asks for; None: 1.
        useful: (n,) most of the asked that can be found; None: all.
        rate: share of the keys that is followed, in (0, 1]; 1 is exact. None: see SAMPLE.
        sizes: (k,) sizes of the cache at which the curve is wanted; None: POINTS whole ones up to the working set, even
            in the logarithm.

    Returns:
        The curve. Its standard error is that of the choice of keys: the scatter between GROUPS disjoint parts of the
        sample, and what the number of keys followed leaves uncertain about distances.

    Raises:
        ValueError: no reference, or a rate out of range.
    """
    n = keys.size
    if n == 0:
        raise ValueError("there is no reference")
    rate = min(1.0, max(LEAST_RATE, SAMPLE / n)) if rate is None else rate
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}")
    index = np.empty(n, np.int64)
    count = _sample(keys, np.uint64(min(int(rate * 2.0**64), 2**64 - 1)), rate == 1, index)
    index = index[:count]
    own = np.ones(count) if kept is None else kept[index]
    want = np.ones(count) if asked is None else asked[index]
    most = want if useful is None else np.minimum(useful[index], want)
    total = float(n if asked is None else asked.sum()) * rate
    others, found = np.empty(count), np.empty(count)
    group = np.empty(count, np.int64)
    table = np.full(1 << max(4, (2 * count).bit_length()), _EMPTY, np.int64)
    tree = np.zeros(count + 1)
    live = _follow(keys[index], own, most, table, tree, others, found, group)

    others /= rate
    working_set = live / rate
    if sizes is None:
        sizes = np.unique(np.rint(np.geomspace(max(1.0, working_set / SPAN), max(2.0, working_set), POINTS)))
    hits = np.array([_hits(others[group == g], found[group == g], sizes) for g in range(GROUPS)])
    misses = np.bincount(group, weights=want, minlength=GROUPS)[:, None] - hits
    ratio = misses.sum(axis=0) / total if total else np.ones(sizes.size)
    error = np.zeros(sizes.size)
    if rate < 1 and total:
        chosen = misses.std(axis=0, ddof=1) * np.sqrt(GROUPS) / total
        # The weight below a distance is known from about as many keys as the sampled cache holds.
        held = np.maximum(sizes / max(1e-300, working_set) * np.count_nonzero(table != _EMPTY), 1.0)
        slope = np.gradient(ratio, np.log(sizes)) if sizes.size > 1 else np.zeros(sizes.size)
        error = np.sqrt((1 - rate) * (chosen**2 + slope**2 / held))
    return MissRatioCurve(sizes.astype(np.float64), np.clip(ratio, 0.0, 1.0), error, rate, count, working_set)


def _hits(others: FloatArray, found: FloatArray, sizes: FloatArray) -> FloatArray:
    """Return the weight found by caches of the sizes: of each reference, what fits beside the others, up to `found`."""
    return _above(others, sizes) - _above(others + found, sizes)


def _above(from_: FloatArray, sizes: FloatArray) -> FloatArray:
    """Return, for each size, the sum of max(0, size - from_)."""
    edges = np.sort(from_)
    below = np.searchsorted(edges, sizes, side="right")
    return sizes * below - np.concatenate([[0.0], np.cumsum(edges)])[below]


@kernel
def _sample(keys: Int64Array, limit: np.uint64, every: bool, index: Int64Array) -> int:
    """Write the places of the keys whose hash is below `limit` to index [n]; return how many there are."""
    count = 0
    for i in range(keys.size):
        index[count] = i
        if every or mix(np.uint64(keys[i]) ^ _KEY_BITS) < limit:
            count += 1
    return count


@kernel
def _follow(
    keys: Int64Array,
    kept: FloatArray,
    useful: FloatArray,
    table: Int64Array,
    tree: FloatArray,
    others: FloatArray,
    found: FloatArray,
    group: Int64Array,
) -> float:
    """Follow n references; return the weight of all keys at the end.

    table [H]: hash table of the last place of each key, H a power of 2 above n, all -1; tree [n + 1]: zeros. Written:
    others [n], weight of other keys used since the key's last use; found [n], what there is of the key then, at most
    `useful` and 0 at its first use; group [n], which part of the sample the key belongs to.
    """
    n = keys.size
    mask = np.uint64(table.size - 1)
    live = 0.0
    for i in range(n):
        bits = mix(np.uint64(keys[i]) ^ _KEY_BITS)
        group[i] = np.int64(bits & np.uint64(GROUPS - 1))
        at = (bits >> np.uint64(4)) & mask  # the high bits are those of the sample, which are all small
        while table[at] != _EMPTY and keys[table[at]] != keys[i]:
            at = (at + np.uint64(1)) & mask
        last = table[at]
        table[at] = i
        others[i] = 0.0
        found[i] = 0.0
        if last != _EMPTY:
            below = 0.0
            k = last + 1
            while k > 0:
                below += tree[k]
                k &= k - 1
            others[i] = max(0.0, live - below)
            found[i] = min(kept[last], useful[i])
            k = last + 1
            while k <= n:
                tree[k] -= kept[last]
                k += k & -k
            live -= kept[last]
        k = i + 1
        while k <= n:
            tree[k] += kept[i]
            k += k & -k
        live += kept[i]
    return live
