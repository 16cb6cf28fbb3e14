"""Which embedding rows a request reads, and the sample of them that the node simulates.

A history may read 50,000 rows, so the node simulates a sample. Rows of the popularity law fall into three parts:

- the head, the `head` most popular rows, which any partition holds all the time: counted as hits, not simulated;
- the tail: cut into strata of 1 / rate neighbouring ranks, each simulated as one row. A sampled row stands for 1 / rate
  rows, and the simulated cache has `rate` times the slots, so its hit rate is that of the whole (SHARDS, Waldspurger et
  al., FAST 2015; strata instead of a hash leave less noise);
- the hot set of a phase, each row equally likely: cut into strata of the same width.

What a user's token reads is a function of (user, token) alone, so a history that is read again reads the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix, mix2, reduce_range
from cache_engine.jit import inner, kernel
from helm_rl.errors import UserError
from helm_rl.workloads.trace import Trace

LAW, ITEMS, BLOCKS = 0, 1, 2
_CONTENT = {"law": LAW, "items": ITEMS, "blocks": BLOCKS}
_BINS = 1 << 14
POPULARITY_CLASSES = 16  # of the tail, of equal shares of its draws
_HOT_KEY = np.int64(1) << np.int64(60)  # keys of hot sets lie apart from those of the tail
_UNIT = 1.0 / 2.0**53
_S11 = np.uint64(11)
_CANDIDATES = np.uint64(0xC0FFEE)
_SAMPLE = np.uint64(0x5EED)  # apart from the ghosts' sample of the same keys
_EXACT_RANKS = 1024
_MAX_RANGE = 2**32 - 1  # of reduce_range


class RowState(NamedTuple):
    """The law as the kernels draw from it. Q equal-probability bins of the tail, B classes of them, F phases."""

    content: npt.NDArray[np.int64]  # [1] LAW, ITEMS, BLOCKS
    edges: npt.NDArray[np.float64]  # [Q + 1] strata at the edges of the bins
    class_first: npt.NDArray[np.int64]  # [B] first stratum of each class of popularity; content ITEMS: one class
    class_share: npt.NDArray[np.float64]  # [B] share of the tail's draws that fall into it
    tail_share: npt.NDArray[np.float64]  # [1] share of the law's draws that fall into the tail
    rate: npt.NDArray[np.float64]  # [1] sampled rows per row
    features: npt.NDArray[np.int64]  # [1] rows per token
    hot_fraction: npt.NDArray[np.float64]  # [F]
    hot_strata: npt.NDArray[np.int64]  # [F]
    block_tokens: npt.NDArray[np.int64]  # [1] tokens per content block
    stream_start: npt.NDArray[np.int64]  # [users + 1] ITEMS: where each user's items begin in `stream`; else [1]
    stream_from: npt.NDArray[np.int64]  # [users] ITEMS: tokens of the user's history before the first in `stream`
    stream: npt.NDArray[np.int64]  # ITEMS: item codes, user by user in order of time
    item_start: npt.NDArray[np.int64]  # [n + 1] BLOCKS: item_offsets of the trace
    items: npt.NDArray[np.int64]  # BLOCKS, ITEMS: item_values of the trace


def new_row_state() -> RowState:
    """Return a state of the least size, of a law with one row; `build_rows` makes those that are of use."""
    one = np.ones(1, np.int64)
    none = np.zeros(0, np.int64)
    real = np.zeros(1)
    return RowState(one, np.zeros(2), none, real, real, real, one, real, one, one, one, none, none, one, none)


@dataclass(frozen=True)
class RowModel:
    """Rows of one trace under one sampling rate."""

    state: RowState
    strata: int  # rows of the tail that are simulated
    max_rows: int  # most sampled rows of one request


def build_rows(
    trace: Trace, *, features: int, candidates: int, page_tokens: int, rate: float, head: int, zipf: float, items: int
) -> RowModel:
    """Prepare the rows of `trace`.

    Args:
        trace: the requests; its content says where the rows of a history come from.
        features: embedding rows per token.
        candidates: items scored per request, each of `features` rows.
        page_tokens: tokens of a KV page: histories are read in blocks of this many.
        rate: sampled rows per row.
        head: most popular rows that are taken as always resident; 0 for content "items".
        zipf, items: exponent and number of rows of the law, where the trace does not bring its own.

    Raises:
        UserError: the trace's histories consist of items, but it has none.
    """
    meta = trace.meta
    content = _CONTENT[meta.content]
    exponent = zipf if meta.zipf_items is None else meta.zipf_items
    rows = items if meta.law_items is None else meta.law_items
    head = 0 if content == ITEMS else min(head, rows - 1)
    edges, tail_share = _tail(exponent, rows, head, rate)
    class_first, class_share = _classes(edges) if content != ITEMS else (np.zeros(1, np.int64), np.ones(1))
    if content == ITEMS:
        if trace.item_values.size == 0:
            raise UserError(f"trace {meta.name} has content 'items' but not one item: its histories cannot be read")
        stream_start, stream_from, stream = _streams(trace)
    else:
        stream_start, stream_from, stream = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64)
    state = RowState(
        content=np.array([content], np.int64),
        edges=edges,
        class_first=class_first,
        class_share=class_share,
        tail_share=np.array([tail_share]),
        rate=np.array([rate]),
        features=np.array([features], np.int64),
        # Items are those of the log, hot or not.
        hot_fraction=np.array([0.0 if content == ITEMS else p.hot_fraction for p in meta.phases]),
        # A hot set of 2**32 strata or more is larger than any cache: that its size is clipped changes no hit rate.
        hot_strata=np.array([min(max(1, round(p.hot_items * rate)), _MAX_RANGE) for p in meta.phases], np.int64),
        block_tokens=np.array([meta.block_tokens if content == BLOCKS else page_tokens], np.int64),
        stream_start=stream_start,
        stream_from=stream_from,
        stream=stream,
        item_start=trace.item_offsets,
        items=trace.item_values,
    )
    longest = int(trace.history_tokens.max(initial=0))
    per_token = features * rate
    if content == ITEMS:
        most = (longest + candidates) * (int(per_token) + 1)
    else:
        # The shares of tail and hot set add up to at most 1; each count may be rounded up; 1 more for rounding errors.
        width = int(state.block_tokens[0])
        most = (longest // width + 1) * (int(width * per_token) + 3) + int(candidates * per_token) + 3
    return RowModel(state, max(1, int(edges[-1])), most)


def _tail(exponent: float, rows: int, head: int, rate: float) -> tuple[npt.NDArray[np.float64], float]:
    """Return the strata at the edges of equal-probability bins of ranks (head, rows], and the tail's share.

    Rank k has probability proportional to k^-exponent: exactly for the first ranks, for those beyond as the integral
    over [k - 1/2, k + 1/2], which is the same to 1 in 10^6 there.
    """
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        power = 0.0

    def between(low: float, high: float) -> float:  # the integral of x^-exponent
        if high <= low:
            return 0.0
        return math.log(high / low) if power == 0 else (high**power - low**power) / power

    def mass(last: int) -> float:  # of ranks 1..last
        exact = min(last, _EXACT_RANKS)
        ranks = np.arange(1.0, exact + 1)
        return float((ranks**-exponent).sum()) + between(exact + 0.5, last + 0.5)

    low, high = head + 0.5, rows + 0.5
    share = np.arange(_BINS + 1) / _BINS
    if power == 0:
        rank = low * (high / low) ** share
    else:
        rank = (low**power * (1.0 - share) + high**power * share) ** (1.0 / power)
    strata = np.maximum.accumulate(np.clip((rank - low) * rate, 0.0, (rows - head) * rate))
    return strata, 1.0 if head == 0 else 1.0 - mass(head) / mass(rows)


def _classes(edges: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the first stratum of each class of popularity, and its share of the tail's draws.

    Classes have equal shares but for their bounds, which are whole strata; those without one of their own are left out.
    """
    first = np.unique(edges[: -1 : _BINS // POPULARITY_CLASSES].astype(np.int64))
    share = np.interp(np.append(first, edges[-1]), edges, np.arange(_BINS + 1) / _BINS)
    return first, np.diff(share)


def _streams(
    trace: Trace,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return every user's items in order of time, one user after the other: starts, tokens before them, items."""
    counts = np.diff(trace.item_offsets)
    users, first = np.unique(trace.user, return_index=True)
    before = np.zeros(trace.meta.users, np.int64)
    before[users] = trace.history_tokens[first] - trace.new_tokens[first]
    order = np.argsort(trace.user, kind="stable")
    per_user = np.bincount(trace.user, weights=counts, minlength=trace.meta.users).astype(np.int64)
    start = np.concatenate([[0], np.cumsum(per_user)])
    taken = counts[order]
    source = np.repeat(trace.item_offsets[:-1][order], taken)
    within = np.arange(source.size) - np.repeat(np.cumsum(taken) - taken, taken)
    return start, before, trace.item_values[source + within]


@kernel
def history_rows(
    rows: RowState, keys: npt.NDArray[np.int64], start: int, request: int, user: int, phase: int, first: int, last: int
) -> tuple[int, int]:
    """Write the sampled rows of tokens [first, last) of the request's history to `keys`, from `start` on.

    Returns how many of the tail, then how many of the hot set; the tail's come first.
    """
    if last <= first:
        return 0, 0
    if rows.content[0] == ITEMS:
        return _stream_rows(rows, keys, start, user, first, last) - start, 0
    width = rows.block_tokens[0]
    fraction = rows.hot_fraction[phase]
    per_block = width * rows.features[0] * rows.rate[0]
    n = start
    tail = 0
    for part in range(2):
        share = (1.0 - fraction) * rows.tail_share[0] if part == 0 else fraction
        if share == 0.0:
            continue
        for block in range(first // width, (last - 1) // width + 1):
            seed = _block_seed(rows, request, user, block)
            if part == 1:
                seed = mix2(seed, np.uint64(phase) + _CANDIDATES)
            n = _draw(
                rows.edges,
                rows.hot_strata[phase],
                keys,
                n,
                seed,
                per_block * share,
                part,
                phase,
                width,
                first - block * width,
                last - block * width,
            )
        if part == 0:
            tail = n - start
    return tail, n - start - tail


@kernel
def candidate_rows(
    rows: RowState, keys: npt.NDArray[np.int64], start: int, request: int, phase: int, candidates: int, part: int
) -> int:
    """Write the sampled rows of the request's candidates from `start` on, of the tail or (part 1) the hot set.

    Candidates are drawn anew for each request: from the law, or (content "items") from the items of the log. Returns
    the new length.
    """
    seed = mix2(np.uint64(request), _CANDIDATES + np.uint64(part))
    if rows.content[0] == ITEMS:
        if part == 1:
            return start
        for c in range(candidates):
            start = _item_rows(rows, keys, start, rows.items[reduce_range(mix2(seed, np.uint64(c)), rows.items.size)])
        return start
    fraction = rows.hot_fraction[phase]
    share = (1.0 - fraction) * rows.tail_share[0] if part == 0 else fraction
    if share == 0.0:
        return start
    mean = candidates * rows.features[0] * rows.rate[0] * share
    return _draw(rows.edges, rows.hot_strata[phase], keys, start, seed, mean, part, phase, 1, 0, 1)


@kernel
def token_rows(
    rows: RowState, keys: npt.NDArray[np.int64], request: int, user: int, phase: int, first: int, last: int
) -> int:
    """Write the rows of tokens [first, last) of the user's history to `keys`, token by token; return how many.

    For a network, which wants of each token as many rows as there are features, all of them (rate 1): the law is that
    of `history_rows`, the rows are others. They are a function of (user, token) if `phase` is one of the user.
    """
    features = rows.features[0]
    width = rows.block_tokens[0]
    n = 0
    for token in range(first, last):
        if rows.content[0] == ITEMS:
            item = _item_of(rows, user, token)
            for f in range(features):
                keys[n + f] = item * features + f
        else:
            seed = mix2(_block_seed(rows, request, user, token // width), np.uint64(token % width + 1))
            _draw_features(rows, keys, n, seed, phase)
        n += features
    return n


@kernel
def candidate_token_rows(
    rows: RowState, keys: npt.NDArray[np.int64], start: int, request: int, phase: int, candidates: int
) -> int:
    """Write the rows of the request's candidates from `start` on, as `token_rows` does; return the new length."""
    features = rows.features[0]
    seed = mix2(np.uint64(request), _CANDIDATES)
    for c in range(candidates):
        own = mix2(seed, np.uint64(c))
        if rows.content[0] == ITEMS:
            item = rows.items[reduce_range(own, rows.items.size)]
            for f in range(features):
                keys[start + f] = item * features + f
        else:
            _draw_features(rows, keys, start, own, phase)
        start += features
    return start


@inner
def _draw_features(rows: RowState, keys: npt.NDArray[np.int64], start: int, seed: np.uint64, phase: int) -> None:
    """Draw one token's rows, each of the phase's hot set or of the whole law."""
    bins = rows.edges.size - 1
    for f in range(rows.features[0]):
        bits = mix2(seed, np.uint64(f + 1))
        if (mix(bits) >> _S11) * _UNIT < rows.hot_fraction[phase]:
            keys[start + f] = _HOT_KEY + (np.int64(phase) << np.int64(40)) + reduce_range(bits, rows.hot_strata[phase])
        else:
            at = (bits >> _S11) * _UNIT * bins
            b = int(at)
            keys[start + f] = np.int64(rows.edges[b] + (at - b) * (rows.edges[b + 1] - rows.edges[b]))


@inner
def _block_seed(rows: RowState, request: int, user: int, block: int) -> np.uint64:
    if rows.content[0] == BLOCKS:
        at = rows.item_start[request] + block
        if at < rows.item_start[request + 1]:
            return mix(np.uint64(rows.items[at]))
    return mix2(np.uint64(user), np.uint64(block))


@inner
def _draw(
    edges: npt.NDArray[np.float64],
    hot_strata: int,
    keys: npt.NDArray[np.int64],
    n: int,
    seed: np.uint64,
    mean: float,
    part: int,
    phase: int,
    width: int,
    first: int,
    last: int,
) -> int:
    """Draw `mean` sampled rows for a block (rounded at random, by its seed); keep those of tokens [first, last)."""
    bins = edges.size - 1
    count = int(mean)
    if (mix(seed) >> _S11) * _UNIT < mean - count:
        count += 1
    whole = first <= 0 and last >= width
    for j in range(count):
        bits = mix2(seed, np.uint64(j + 1))
        if not whole:
            token = reduce_range(mix(bits), width)
            if token < first or token >= last:
                continue
        if part == 1:
            keys[n] = _HOT_KEY + (np.int64(phase) << np.int64(40)) + reduce_range(bits, hot_strata)
        else:
            at = (bits >> _S11) * _UNIT * bins
            b = int(at)
            keys[n] = np.int64(edges[b] + (at - b) * (edges[b + 1] - edges[b]))
        n += 1
    return n


@inner
def _stream_rows(rows: RowState, keys: npt.NDArray[np.int64], n: int, user: int, first: int, last: int) -> int:
    """Write the sampled rows of the user's tokens [first, last) from n on; return the new length.

    A token that the trace does not tell, such as one from before its start, reads an item of the log drawn by
    (user, token).
    """
    for token in range(first, last):
        n = _item_rows(rows, keys, n, _item_of(rows, user, token))
    return n


@inner
def _item_of(rows: RowState, user: int, token: int) -> int:
    """Return the item of a token of the user's history."""
    start = rows.stream_start[user]
    at = token - rows.stream_from[user]
    if 0 <= at < rows.stream_start[user + 1] - start:
        return rows.stream[start + at]
    return rows.items[reduce_range(mix2(np.uint64(user), np.uint64(token)), rows.items.size)]


@inner
def _item_rows(rows: RowState, keys: npt.NDArray[np.int64], n: int, item: int) -> int:
    """Write the sampled rows of an item from n on, the same each time; return the new length."""
    mean = rows.features[0] * rows.rate[0]
    count = int(mean)
    if (mix2(np.uint64(item), _SAMPLE) >> _S11) * _UNIT < mean - count:
        count += 1
    for j in range(count):
        keys[n] = item * rows.features[0] + j
        n += 1
    return n
