"""Compiled loops of the generator, each in one pass over what NumPy would need several for."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix, mix2
from cache_engine.jit import kernel, prefetch

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Uint64Array = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # between the states of a SplitMix64 stream, of which `mix` is the output

MOST_IN_BUCKET = 64
_AHEAD = 16
UNSURE = 1e-13
"""Exponentials and logarithms of two libraries differ by less than this share of their result: see `zipf`."""


@kernel
def interpolate(x: FloatArray, xp: FloatArray, fp: FloatArray, guide: Int64Array) -> None:
    """Replace x [n] by np.interp(x, xp, fp), for xp [k] ascending from 0 and x in [0, xp[-1]).

    guide [g]: written; where to begin to look.
    """
    cells, last = guide.size, xp.size - 1
    scale = cells / xp[last]
    at = 0
    for cell in range(cells):
        # A cell earlier, for the product below may be rounded up into this one.
        while at < last - 1 and xp[at + 1] <= (cell - 1) / scale:
            at += 1
        guide[cell] = at
    for i in range(x.size):
        k = guide[min(int(x[i] * scale), cells - 1)]
        while k < last - 1 and xp[k + 1] <= x[i]:
            k += 1
        x[i] = (fp[k + 1] - fp[k]) / (xp[k + 1] - xp[k]) * (x[i] - xp[k]) + fp[k]


@kernel
def visit_requests(
    first_s: FloatArray,
    counts: Int64Array,
    pauses: FloatArray,
    start_ns: int,
    end_ns: int,
    arrival_ns: Int64Array,
    visit: Int64Array,
) -> int:
    """Lay out the requests of visits; return how many lie in [start_ns, end_ns).

    first_s, counts [v]: first request and number of requests of each visit; pauses [sum of counts]: before each
    request, that of the first is not used; arrival_ns, visit [sum of counts]: written, from the start, visit by visit.
    """
    found = 0
    at = 0
    total = 0.0
    for v in range(first_s.size):
        begin = total
        for k in range(counts[v]):
            if k > 0:
                total += pauses[at]
            at += 1
            time_ns = np.int64(np.rint((first_s[v] + (total - begin)) * 1e9))
            if start_ns <= time_ns < end_ns:
                arrival_ns[found] = time_ns
                visit[found] = v
                found += 1
    return found


@kernel
def order_by_time(arrival_ns: Int64Array, start_ns: int, end_ns: int, edges: Int64Array, ordered: Int64Array) -> bool:
    """Sort arrivals in [start_ns, end_ns), stably; return False, the work undone, where they crowd too much.

    edges [b + 1]: zeros; b buckets of equal time are filled and sorted one by one. Written: ordered [2 n], each time
    followed by the place that it had.
    """
    n = arrival_ns.size
    buckets = edges.size - 1
    scale = buckets / (end_ns - start_ns)
    for i in range(n):
        edges[min(int((arrival_ns[i] - start_ns) * scale), buckets - 1) + 1] += 1
    for b in range(buckets):
        if edges[b + 1] > MOST_IN_BUCKET:
            return False
        edges[b + 1] += edges[b]
    for i in range(n):
        if i + _AHEAD < n:
            b = min(int((arrival_ns[i + _AHEAD] - start_ns) * scale), buckets - 1)
            prefetch(ordered, 2 * min(edges[b], n - 1))
        b = min(int((arrival_ns[i] - start_ns) * scale), buckets - 1)
        at = edges[b]
        ordered[2 * at] = arrival_ns[i]
        ordered[2 * at + 1] = i
        edges[b] = at + 1
    # Each edge is now the next one's; within a bucket, requests stand in the order in which they were given.
    first = 0
    for b in range(buckets):
        for at in range(first + 1, edges[b]):
            time_ns, moved = ordered[2 * at], ordered[2 * at + 1]
            to = at
            while to > first and ordered[2 * to - 2] > time_ns:
                ordered[2 * to] = ordered[2 * to - 2]
                ordered[2 * to + 1] = ordered[2 * to - 1]
                to -= 1
            ordered[2 * to] = time_ns
            ordered[2 * to + 1] = moved
        first = edges[b]
    return True


@kernel
def gather_requests(
    order: Int64Array,
    ends: Int64Array,
    user: Int64Array,
    offsets: Int64Array,
    values: Int64Array,
    new_user: Int64Array,
    new_phase: Int32Array,
    new_tokens: Int32Array,
    new_offsets: Int64Array,
    new_values: Int64Array,
) -> None:
    """Bring users, and ragged rows (offsets, values), into an order [n]; those written are named new_.

    ends [p]: a request that stood before ends[0] is of phase 0, one before ends[1] of phase 1, and so on.
    """
    at = 0
    n = order.size
    new_offsets[0] = 0
    for i in range(n):
        # Requests stand anywhere: what will be needed is fetched meanwhile.
        if i + 2 * _AHEAD < n:
            prefetch(offsets, order[i + 2 * _AHEAD])
            prefetch(user, order[i + 2 * _AHEAD])
        if i + _AHEAD < n:
            prefetch(values, min(offsets[order[i + _AHEAD]], values.size - 1))
        stood = order[i]
        phase = 0
        while stood >= ends[phase]:
            phase += 1
        new_phase[i] = phase
        new_user[i] = user[stood]
        new_tokens[i] = offsets[stood + 1] - offsets[stood]
        for k in range(offsets[stood], offsets[stood + 1]):
            new_values[at] = values[k]
            at += 1
        new_offsets[i + 1] = at


@kernel
def histories(
    user: Int64Array, new_tokens: Int32Array, history: Int64Array, history_max: int, history_tokens: Int32Array
) -> None:
    """Write each request's history, its new tokens included, to history_tokens [n].

    history [users]: what each user had before, and then what he has at the end, not limited to history_max.
    """
    for i in range(user.size):
        total = history[user[i]] + new_tokens[i]
        history[user[i]] = total
        history_tokens[i] = min(total, history_max)


@kernel
def uniform_hashes(bits: Uint64Array, uniform: FloatArray) -> None:
    """Hash each of `bits` [n] to a number in (0, 1], written to `uniform` [n]."""
    for i in range(bits.size):
        uniform[i] = (np.float64(mix(bits[i] * _STEP) >> np.uint64(11)) + 1.0) * 2.0**-53


@kernel
def zipf(
    uniform: FloatArray,
    begin: int,
    low: float,
    high: float,
    power: float,
    below: FloatArray,
    above: FloatArray,
    accept: FloatArray,
    guide: Int64Array,
    cubics: FloatArray,
    codes: Int64Array,
    state: Int64Array,
) -> int:
    """Turn uniform numbers into codes until they are used up, `codes` is full, or one is too close to tell.

    What is too close is left to the caller, so that the codes are those of NumPy's functions, whichever way the
    machine's own round. Ranks up to k are looked up, those beyond computed.

    Args:
        uniform, begin: [n] numbers in [0, 1), and the first to use.
        low, high, power: of the law's integral, power = 1 - exponent.
        below, above: [k + 1] the integral from 1 to rank + 1/2, less and plus what is uncertain about it; entry 0 is of
            rank 0.
        accept: [k + 1] the least integral that is accepted for the rank.
        guide: [g] the rank at which to begin to look, for pieces of equal length between low and above[k].
        cubics: [c, 4] the rank that belongs to an integral beyond above[k], for c pieces of equal length up to `high`,
            as cubics of the place within the piece, 0 to 1, good to two fifths of UNSURE; c = 0: none is that good.
        codes: written from state[0] on, which counts those that there are.

    Returns:
        The number of `uniform` at which it stopped; n where none was too close.
    """
    last = below.size - 1
    exponent = 1.0 - power
    scale = guide.size / (above[last] - low)
    pieces = cubics.shape[0]
    steps = pieces / max(high - above[last], 1e-300)
    curvature = exponent * (exponent + 1.0) / 12.0
    done = state[0]
    for i in range(begin, uniform.size):
        if done == codes.size:
            break
        y = high + uniform[i] * (low - high)
        if y <= above[last]:
            rank = guide[min(max(int((y - low) * scale), 0), guide.size - 1)]
            while rank < last and y > above[rank]:
                rank += 1
            if y >= below[rank] or (rank > 1 and y <= above[rank - 1]):
                state[0] = done
                return i
            if y >= accept[rank]:
                codes[done] = rank - 1
                done += 1
        else:
            if pieces > 0:
                place = (y - above[last]) * steps
                piece = min(int(place), pieces - 1)
                t = place - piece
                x = cubics[piece, 0] + t * (cubics[piece, 1] + t * (cubics[piece, 2] + t * cubics[piece, 3]))
            elif power == 0.0:
                x = math.exp(y)
            else:
                x = math.exp(math.log1p(max(power * y, -1 + 1e-16)) / power)
            nearest = np.rint(x)
            # Rounding moves x by less than UNSURE of it, and y by less than a tenth of UNSURE of it, which is more of x
            # the steeper the law. What is rejected lies within `curvature / x^2` above the lower edge of the rank.
            moved = 1.0 + 0.1 * abs(y) / max(1.0 + power * y, 1e-300)
            if 0.5 - abs(x - nearest) < UNSURE * x * moved + curvature / (x * x):
                state[0] = done
                return i
            codes[done] = np.int64(nearest) - 1
            done += 1
    state[0] = done
    return uniform.size


@kernel
def renew(
    codes: Int64Array,
    lengths: Int64Array,
    arrival_ns: Int64Array,
    start_ns: int,
    per_ns: float,
    new_from: int,
    new_codes: int,
) -> None:
    """Replace codes by those of newer items where a new one took their place before the request that names them.

    codes: as many as lengths [n] add up to, request by request; per_ns: times that a place changes hands per ns, the
    first time at a share of that pause that a hash of its code chooses; new codes are new_from + 0..new_codes - 1.
    """
    at = 0
    for i in range(lengths.size):
        renewals = (arrival_ns[i] - start_ns) * per_ns
        for _ in range(lengths[i]):
            place = np.uint64(codes[at])
            begun = np.float64(mix2(place, np.uint64(0)) >> np.uint64(11)) * 2.0**-53
            newest = np.uint64(renewals + begun)
            if newest > 0:
                codes[at] = new_from + np.int64(mix2(place, newest) % np.uint64(new_codes))
            at += 1
