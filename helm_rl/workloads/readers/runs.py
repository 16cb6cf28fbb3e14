"""Rows sorted by time in bounded memory: sorted runs, spilled to a file where they are large, and merged by time range.

A merge takes from every run the piece between two times, and sorts what they hold together; no row is handled alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from helm_rl.errors import UserError
from helm_rl.workloads.readers.rows import Rows
from helm_rl.workloads.trace import gather

RUN_ROWS = 1 << 22
"""Rows (or quarters of items) that are sorted at once, and spilled if more follow."""
PIECE_ROWS = 1 << 19
"""Rows that a merge aims to hold at a time."""
_MARK = 4096  # rows (or quarters of items) between two entries of a run's index
_DIGIT = 11

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_FLAT = ("user", "item", "tenant", "tokens", "request")


def sort_order(*keys: npt.NDArray[Any]) -> Int32Array | None:
    """Return the stable order of rows by the first key, ties by the next, ...; None where they stand in order already.

    keys: (n,) whole numbers, n < 2^31. A radix sort: each pass moves 11 bits.
    """
    n = keys[0].size
    if _in_order(*keys):
        return None
    order = np.arange(n, dtype=np.int32)
    spare = np.empty_like(order)
    counts = np.zeros(1 << _DIGIT, dtype=np.int64)
    for key in reversed(keys):
        low, high = int(key.min()), int(key.max())
        step = 1
        if high - low >= 1 << 2 * _DIGIT and key.dtype == np.int64:
            step = next((s for s in (10**9, 10**6, 1000) if not (key[:64] % s).any() and not (key % s).any()), 1)
        digits = ((key - low) if step == 1 else (key // step - low // step)).astype(np.uint64)
        width = ((high - low) // step).bit_length()
        for shift in range(0, width, _DIGIT):
            _radix_pass(digits, order, spare, np.uint64(shift), counts)
            order, spare = spare, order
    return order


def _in_order(*keys: npt.NDArray[Any]) -> bool:
    first = keys[0]
    if len(keys) == 1:
        return bool(np.all(first[1:] >= first[:-1]))
    return bool(_lexicographic(keys[0], keys[1], keys[-1]))


@kernel
def _lexicographic(a: Any, b: Any, c: Any) -> bool:
    for i in range(1, a.size):
        if a[i] < a[i - 1]:
            return False
        if a[i] == a[i - 1]:
            if b[i] < b[i - 1]:
                return False
            if b[i] == b[i - 1] and c[i] < c[i - 1]:
                return False
    return True


@kernel
def _radix_pass(keys: Any, order: Any, out: Any, shift: Any, counts: Any) -> None:
    mask = np.uint64(counts.size - 1)
    for i in range(counts.size):
        counts[i] = 0
    for i in range(keys.size):
        counts[(keys[i] >> shift) & mask] += 1
    total = 0
    for i in range(counts.size):
        count = counts[i]
        counts[i] = total
        total += count
    for i in range(order.size):
        row = order[i]
        digit = (keys[row] >> shift) & mask
        out[counts[digit]] = row
        counts[digit] += 1


@dataclass
class _Run:
    """One sorted run: its columns in memory, or where they lie in the spill file."""

    rows: int
    columns: dict[str, npt.NDArray[Any]]
    places: dict[str, tuple[int, Any]]  # offset and dtype
    mark: int  # rows between two entries of the index
    weight: int  # of them, in rows or quarters of items
    times: Int64Array  # of every mark-th row
    values: Int64Array  # items before every mark-th row, if rows have several


class Runs:
    """Collects rows, and gives them back in order of time."""

    def __init__(self, folder: Path | None) -> None:
        """folder: where a spill file is made (it has no name, so that nothing is left of it whatever happens)."""
        self._folder = folder
        self._waiting: list[Rows] = []
        self._size = 0  # waiting, in rows and items
        self._runs: list[_Run] = []
        self._file: Any = None
        self._end = 0
        self._latest: int | None = None
        self._columns: set[str] | None = None
        self.rows = 0
        self.early = 0  # rows whose time lies before that of the row above
        self.first_ns = self.last_ns = 0

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, rows: Rows) -> None:
        """Take in rows; all must have the same columns."""
        time = rows.time_ns
        self.early += int(np.count_nonzero(time[1:] < time[:-1]))
        if self._latest is not None:
            self.early += int(time[0]) < self._latest
        self._latest = int(time[-1])
        low, high = int(time.min()), int(time.max())
        self.first_ns, self.last_ns = (
            (low, high) if self.rows == 0 else (min(low, self.first_ns), max(high, self.last_ns))
        )
        self.rows += time.size
        columns = {name for name in ("user", "item", "tokens", "request") if getattr(rows, name) is not None}
        if self._columns is None:
            self._columns = columns
        elif columns != self._columns:
            odd = ", ".join(sorted(columns ^ self._columns))
            raise UserError(f"the files of one log must have the same columns; some lack {odd}")
        self._waiting.append(rows)
        self._size += max(time.size, 0 if rows.lengths is None or rows.item is None else rows.item.size // 4)
        if self._size >= RUN_ROWS:
            self._sort(spill=True)

    def finish(self) -> None:
        """Take no more; a single run stays in memory."""
        if self._waiting:
            self._sort(spill=bool(self._runs))

    def pieces(self, from_ns: int, to_ns: int) -> Iterator[Rows]:
        """Yield the rows with from_ns <= time < to_ns in pieces of rising time; equal times are in one piece.

        Within a piece rows of equal time keep the order in which they were added.
        """
        edges = [from_ns, *self._splitters(from_ns, to_ns), to_ns]
        places = [self._find(run, from_ns) for run in self._runs]
        for edge in edges[1:]:
            parts = []
            for k, run in enumerate(self._runs):
                end = self._find(run, edge) if places[k] < run.rows else places[k]
                if end > places[k]:
                    parts.append(self._take(run, places[k], end))
                places[k] = end
            if parts:
                yield _sorted(_joined(parts))

    def _sort(self, spill: bool) -> None:
        rows = _sorted(_joined(self._waiting))
        self._waiting, self._size = [], 0
        columns: dict[str, npt.NDArray[Any]] = {"time_ns": rows.time_ns}
        for name in (*_FLAT, "lengths"):
            column = getattr(rows, name)
            if column is not None:
                columns[name] = column
        values, mark, weight = np.zeros(0, dtype=np.int64), _MARK, _MARK
        if rows.lengths is not None:
            totals = np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)])
            quarters = int(totals[-1]) // 4
            if quarters > rows.time_ns.size:  # so that a piece between two entries is not larger where rows are wide
                mark = max(1, _MARK * rows.time_ns.size // quarters)
                weight = quarters * mark // rows.time_ns.size
            values = totals[:-1][::mark].copy()
        run = _Run(rows.time_ns.size, columns, {}, mark, weight, rows.time_ns[::mark].copy(), values)
        if spill:
            self._spill(run)
        self._runs.append(run)

    def _spill(self, run: _Run) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed by __exit__)
        for name, column in run.columns.items():
            run.places[name] = (self._end, column.dtype)
            data = np.ascontiguousarray(column).data.cast("B")
            while data:
                written = os.pwrite(self._file.fileno(), data, self._end)
                self._end += written
                data = data[written:]
        run.columns = {}

    def _column(self, run: _Run, name: str, start: int, end: int) -> npt.NDArray[Any]:
        if name in run.columns:
            return run.columns[name][start:end]
        offset, dtype = run.places[name]
        out = np.empty(end - start, dtype=dtype)
        view = out.data.cast("B")
        at = offset + start * out.itemsize
        while view:
            count = os.preadv(self._file.fileno(), [view], at)
            if count == 0:
                raise OSError(f"the spill file in {self._folder or tempfile.gettempdir()} was cut off")
            view, at = view[count:], at + count
        return out

    def _take(self, run: _Run, start: int, end: int) -> Rows:
        names = run.columns or run.places
        ragged = "lengths" in names
        rows = Rows(self._column(run, "time_ns", start, end))
        for name in (*_FLAT, "lengths"):
            if name in names and not (ragged and name == "item"):
                setattr(rows, name, self._column(run, name, start, end))
        if ragged and "item" in names:
            rows.item = self._column(run, "item", self._value(run, start), self._value(run, end))
        return rows

    def _value(self, run: _Run, row: int) -> int:
        """Return the items before a row."""
        if row >= run.rows:
            mark = (run.rows - 1) // run.mark
            row = run.rows
        else:
            mark = row // run.mark
        return int(run.values[mark]) + int(self._column(run, "lengths", mark * run.mark, row).sum(dtype=np.int64))

    def _find(self, run: _Run, time_ns: int) -> int:
        """Return the first row whose time is time_ns or later."""
        mark = int(np.searchsorted(run.times, time_ns, side="left"))
        if mark == 0:
            return 0
        start, end = (mark - 1) * run.mark, min(mark * run.mark, run.rows)
        return start + int(np.searchsorted(self._column(run, "time_ns", start, end), time_ns, side="left"))

    def _splitters(self, from_ns: int, to_ns: int) -> list[int]:
        if not self._runs:
            return []
        times = np.concatenate([run.times for run in self._runs])
        weights = np.concatenate([np.full(run.times.size, run.weight, dtype=np.int64) for run in self._runs])
        order = np.argsort(times, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        cuts = np.unique(times[order][np.flatnonzero(np.diff(before // PIECE_ROWS, prepend=-1))])
        return [int(cut) for cut in cuts if from_ns < cut < to_ns]


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    names = [name for name in (*_FLAT, "lengths") if any(getattr(part, name) is not None for part in parts)]
    return Rows(
        np.concatenate([part.time_ns for part in parts]),
        **{name: np.concatenate([_or_zero(part, name) for part in parts]) for name in names},
    )


def _or_zero(rows: Rows, name: str) -> npt.NDArray[Any]:
    """Return a column; where one file of several lacks it, a tenant is -1 (none), and a row has 1 item."""
    column: npt.NDArray[Any] | None = getattr(rows, name)
    if column is None:
        fill = 1 if name == "lengths" else -1
        return np.full(rows.time_ns.size, fill, dtype=np.int32)
    return column


def _sorted(rows: Rows) -> Rows:
    order = sort_order(rows.time_ns)
    return rows if order is None else reordered(rows, order)


def reordered(rows: Rows, order: npt.NDArray[Any]) -> Rows:
    """Return the rows `order` of rows."""
    found = Rows(rows.time_ns[order])
    for name in ("user", "tenant", "tokens", "request", "lengths"):
        column = getattr(rows, name)
        if column is not None:
            setattr(found, name, column[order])
    if rows.item is not None:
        if rows.lengths is None:
            found.item = rows.item[order]
        else:
            offsets = np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)])
            found.item = gather(offsets, rows.item, np.asarray(order, dtype=np.int64))[1]
    return found
