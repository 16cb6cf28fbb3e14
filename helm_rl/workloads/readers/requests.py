"""From rows in order of time to requests: of one user and time, of one session, or one by one; then histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix2, reduce_range
from cache_engine.jit import kernel
from helm_rl.workloads.readers.mapping import Requests as Mode
from helm_rl.workloads.readers.rows import Rows
from helm_rl.workloads.readers.runs import reordered, sort_order

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_FEW = 48  # rows of a request among which repeats are found pair by pair
_MOST_REFERENCES = 1 << 20  # of the window that candidates are drawn from


@dataclass
class Requests:
    """n requests in order of time."""

    time_ns: Int64Array  # (n,)
    user: Int64Array | None  # (n,) None: each has its own
    tenant: Int32Array | None  # (n,)
    tokens: Int32Array | None  # (n,)
    offsets: Int64Array  # (n + 1,)
    items: Int64Array
    rows: int = 0  # of the log that were taken in for them

    def __len__(self) -> int:
        return self.time_ns.size


class Grouper:
    """Makes requests of pieces of rows whose codes follow the order of the ids."""

    def __init__(self, mode: Mode, session_ns: int, drop_repeats: bool, by_user: bool) -> None:
        """by_user: rows of equal time are put in order of the user; else they stay in the log's order."""
        self._mode = mode
        self._session_ns = session_ns
        self.drops_repeats = drop_repeats
        self._by_user = by_user
        self.repeats = 0
        self.first_repeat: tuple[int, int, int] | None = None  # time, user, item
        self.tenants_mixed = self.tokens_mixed = 0  # requests whose rows differ in them
        self._open: Rows | None = None

    def requests(self, pieces: Iterator[Rows]) -> Iterator[Requests]:
        """Yield the requests of all pieces."""
        for piece in pieces:
            rows = self._ordered(piece)
            if self.drops_repeats:
                rows = self._without_repeats(rows)
            found = self._sessions(rows, False) if self._mode == "session-gap" else self._groups(rows)
            found.rows = piece.time_ns.size
            yield found
        if self._open is not None:
            yield self._sessions(None, True)

    def _ordered(self, rows: Rows) -> Rows:
        if not self._by_user or rows.user is None:
            return rows
        keys = (rows.time_ns, rows.user) if rows.request is None else (rows.time_ns, rows.user, rows.request)
        order = sort_order(*keys)
        return rows if order is None else reordered(rows, order)

    def _opens(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows differ from the one before in time, user or request."""
        opens = np.ones(rows.time_ns.size, dtype=bool)
        opens[1:] = rows.time_ns[1:] != rows.time_ns[:-1]
        for column in (rows.user, rows.request):
            if column is not None:
                opens[1:] |= column[1:] != column[:-1]
        return opens

    def _without_repeats(self, rows: Rows) -> Rows:
        assert rows.item is not None
        first = np.flatnonzero(self._opens(rows))
        edges = np.append(first, rows.time_ns.size)
        kept = np.ones(rows.time_ns.size, dtype=np.uint8)
        large = int(_mark_repeats(edges, rows.item, kept))
        if large:
            for group in np.flatnonzero(np.diff(edges) > _FEW):
                span = slice(edges[group], edges[group + 1])
                _, unique = np.unique(rows.item[span], return_index=True)
                marks = np.zeros(span.stop - span.start, dtype=np.uint8)
                marks[unique] = 1
                kept[span] = marks
        dropped = rows.time_ns.size - int(np.count_nonzero(kept))
        if not dropped:
            return rows
        if self.first_repeat is None:
            at = int(np.argmin(kept))
            self.first_repeat = (int(rows.time_ns[at]), int(rows.user[at]), int(rows.item[at]))  # type: ignore[index]
        self.repeats += dropped
        return reordered(rows, np.flatnonzero(kept))

    def _groups(self, rows: Rows) -> Requests:
        n = rows.time_ns.size
        if self._mode == "row":
            if rows.item is None:
                offsets = np.zeros(n + 1, dtype=np.int64)
            elif rows.lengths is None:
                offsets = np.arange(n + 1, dtype=np.int64)
            else:
                offsets = np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)])
            return self._made(rows, None, offsets)
        first = np.flatnonzero(self._opens(rows))
        offsets = np.append(first, n).astype(np.int64)
        if rows.item is None:
            offsets = np.zeros(first.size + 1, dtype=np.int64)
        elif rows.lengths is not None:
            offsets = np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)])[offsets]
        return self._made(rows, first, offsets)

    def _sessions(self, rows: Rows | None, last: bool) -> Requests:
        """Return the sessions that no later row can belong to; a request comes at its session's last row."""
        rows = _chained(self._open, rows)
        assert rows.user is not None
        order = sort_order(rows.user, rows.time_ns)
        latest = int(rows.time_ns.max())
        if order is not None:
            rows = reordered(rows, order)
        assert rows.user is not None
        n = rows.time_ns.size
        opens = np.ones(n, dtype=bool)
        opens[1:] = (rows.user[1:] != rows.user[:-1]) | (rows.time_ns[1:] - rows.time_ns[:-1] > self._session_ns)
        first = np.flatnonzero(opens)
        ends = np.append(first[1:], n)
        end_ns = rows.time_ns[ends - 1]
        closed = np.ones(first.size, dtype=bool) if last else end_ns + self._session_ns <= latest
        lengths = ends - first
        if closed.all():
            self._open = None
        else:
            self._open = reordered(rows, np.flatnonzero(np.repeat(~closed, lengths)))
            # As the pieces are: in order of time, so that what is left is merged the same way whatever was cut.
        sessions = np.flatnonzero(closed)
        by_end = sort_order(end_ns[sessions], rows.user[first[sessions]])
        if by_end is not None:
            sessions = sessions[by_end]
        taken = lengths[sessions]
        offsets = np.concatenate([[0], np.cumsum(taken)]).astype(np.int64)
        index = np.arange(offsets[-1]) + np.repeat(first[sessions] - offsets[:-1], taken)
        whole = reordered(rows, index)
        found = self._made(whole, offsets[:-1], offsets)
        found.time_ns = end_ns[sessions]
        if whole.lengths is not None:
            found.offsets = np.concatenate([[0], np.cumsum(whole.lengths, dtype=np.int64)])[offsets]
        return found

    def _made(self, rows: Rows, first: Int64Array | None, offsets: Int64Array) -> Requests:
        """Return requests of consecutive rows, each from `first` (n,) on, with items [offsets[i], offsets[i + 1]).

        first: None: each row is one.

        A request is its first row's tenant's; its history is the longest that one of its rows tells.
        """
        tenant, tokens = rows.tenant, rows.tokens
        if first is not None and first.size:
            if tenant is not None:
                self.tenants_mixed += _count_mixed(tenant, first)
            if tokens is not None:
                self.tokens_mixed += _count_mixed(tokens, first)
                tokens = np.maximum.reduceat(tokens, first)
        places = slice(None) if first is None else first
        return Requests(
            time_ns=rows.time_ns[places],
            user=None if rows.user is None else rows.user[places].astype(np.int64),
            tenant=None if tenant is None else tenant[places],
            tokens=tokens,
            offsets=offsets,
            items=np.zeros(0, dtype=np.int64) if rows.item is None else rows.item.astype(np.int64),
        )


def _count_mixed(column: Int32Array, first: Int64Array) -> int:
    """Return of how many stretches of a column, each from `first` on, the values differ."""
    return int(np.count_nonzero(np.maximum.reduceat(column, first) != np.minimum.reduceat(column, first)))


def _chained(before: Rows | None, rows: Rows | None) -> Rows:
    if before is None or rows is None:
        found = before or rows
        assert found is not None
        return found
    names = ("time_ns", "user", "item", "lengths", "tenant", "tokens", "request")
    both = {name: (getattr(before, name), getattr(rows, name)) for name in names}
    return Rows(**{name: np.concatenate(pair) for name, pair in both.items() if pair[0] is not None})


@kernel
def _mark_repeats(edges: Any, item: Any, kept: Any) -> int:
    """Clear `kept` of rows that repeat an item within [edges[i], edges[i + 1]); return how many spans were too long."""
    large = 0
    for group in range(edges.size - 1):
        low, high = edges[group], edges[group + 1]
        if high - low > _FEW:
            large += 1
            continue
        for i in range(low + 1, high):
            for j in range(low, i):
                if item[j] == item[i]:
                    kept[i] = 0
                    break
    return large


class Histories:
    """The history of each user so far, carried from piece to piece."""

    def __init__(self, users: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._total = np.zeros(users, dtype=np.int64)
        self._start = np.full(
            users if block_tokens else 0, -1, dtype=np.int64
        )  # of the last request's blocks in _blocks
        self._count = np.zeros(users if block_tokens else 0, dtype=np.int64)
        self._blocks = np.zeros(0, dtype=np.int64)

    def running(self, user: Int64Array, new: Int64Array) -> Int64Array:
        """Return the users' totals of `new` so far, their own included; int64 (n,)."""
        out = np.empty(user.size, dtype=np.int64)
        _run_totals(self._total, user, new, out)
        return out

    def after_blocks(self, user: Int64Array, tokens: Int32Array, offsets: Int64Array, items: Int64Array) -> Int32Array:
        """Return the tokens after the blocks that a request has in common, from its start, with the user's last one."""
        new = np.empty(user.size, dtype=np.int32)
        # The pieces' blocks follow those carried, so that a place is one number.
        carried = self._blocks.size
        both = np.concatenate([self._blocks, items])
        _after_common(self._start, self._count, user, tokens, offsets + carried, both, self._block_tokens, new)
        live = np.flatnonzero(self._start >= 0)
        lengths = self._count[live]
        places = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        take = np.arange(places[-1]) + np.repeat(self._start[live] - places[:-1], lengths)
        self._blocks = both[take]
        self._start[live] = places[:-1]
        return new


@kernel
def _run_totals(total: Any, user: Any, new: Any, out: Any) -> None:
    for i in range(user.size):
        total[user[i]] += new[i]
        out[i] = total[user[i]]


@kernel
def _after_common(
    start: Any, count: Any, user: Any, tokens: Any, offsets: Any, items: Any, block_tokens: int, new: Any
) -> None:
    for i in range(user.size):
        u = user[i]
        low = offsets[i]
        size = offsets[i + 1] - low
        common = 0
        if start[u] >= 0:
            before = start[u]
            most = min(size, count[u])
            while common < most and items[before + common] == items[low + common]:
                common += 1
        new[i] = max(0, tokens[i] - common * block_tokens)
        start[u] = low
        count[u] = size


class Candidates:
    """Draws what a request scores from the references of the last window, so that popular items come up often."""

    def __init__(self, count: int, window_ns: int, seed: int, items: int) -> None:
        self._count = count
        self._window_ns = window_ns
        self._seed = seed
        self._items = items
        self._time = np.zeros(0, dtype=np.int64)
        self._item = np.zeros(0, dtype=np.int64)
        self._number = 0

    def draw(self, arrival_ns: Int64Array, offsets: Int64Array, items: Int64Array) -> Int64Array:
        """Return item codes (n, count) for requests in order of time; uniform over all items if the window is empty."""
        carried = self._time.size
        time = np.concatenate([self._time, np.repeat(arrival_ns, np.diff(offsets))])
        item = np.concatenate([self._item, items])
        high = offsets[:-1] + carried
        low = np.searchsorted(time, arrival_ns - self._window_ns, side="left")
        low = np.minimum(np.maximum(low, high - _MOST_REFERENCES), high)
        out = np.empty((arrival_ns.size, self._count), dtype=np.int64)
        _draw(item, low, high, np.uint64(self._seed), self._number, self._items, out)
        self._number += arrival_ns.size
        keep = max(0, time.size - _MOST_REFERENCES)
        if arrival_ns.size:
            keep = max(keep, int(np.searchsorted(time, int(arrival_ns[-1]) - self._window_ns, side="left")))
        self._time, self._item = time[keep:].copy(), item[keep:].copy()
        return out


@kernel
def _draw(item: Any, low: Any, high: Any, seed: Any, number: int, items: int, out: Any) -> None:
    for i in range(out.shape[0]):
        span = high[i] - low[i]
        key = mix2(seed, np.uint64(number + i))
        for k in range(out.shape[1]):
            bits = mix2(key, np.uint64(k))
            if span > 0:
                out[i, k] = item[low[i] + reduce_range(bits, span)]
            else:
                out[i, k] = reduce_range(bits, items)
