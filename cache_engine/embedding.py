"""The embedding hot cache: rows of large host tables, kept in pages of the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding as kernels
from cache_engine.backends.cpu import payload
from cache_engine.lease import Lease
from cache_engine.pool import HbmPool
from cache_engine.stats import EmbeddingStats

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EmbeddingLookup:
    """The answer to one batch of n keys."""

    rows: npt.NDArray[np.uint8] | None  # [n, row_bytes], the rows themselves; None without payload
    hit: npt.NDArray[np.bool_]  # [n] found before the batch
    slots: npt.NDArray[np.int32]  # [n] slot now, -1: served past the cache; valid until the next lookup
    fetched: int  # unique rows that crossed the link


class EmbeddingLease(Lease):
    """Holds the pages of some rows in place; see `EmbeddingCache.lease`."""

    def __init__(self, pool: HbmPool, pages: npt.NDArray[np.int64]) -> None:
        super().__init__(pool)
        self.pages = pages  # without repetitions
        pool.state.pins[pages] += 1

    def _end(self) -> None:
        self._pool.state.pins[self.pages] -= 1


class EmbeddingCache:
    """Rows of host tables under the key (table, id), least recently used out first (batch LRU; see the kernels).

    Args:
        pool: the pool, in which the cache becomes the member `name`.
        row_bytes: width to which the rows of all tables are padded.
        tables: with payload, one array [rows, ...] per table, C-contiguous rows of at most `row_bytes`; in memory or
            memory-mapped. Ids index it. Without payload: the number of tables, and any int64 is an id.
        max_pages: most pages that the cache can own; sizes the index. Default: the whole pool.
    """

    def __init__(
        self,
        pool: HbmPool,
        *,
        row_bytes: int,
        tables: Sequence[Array] | int = 1,
        name: str = "emb",
        max_pages: int | None = None,
    ) -> None:
        if not 1 <= row_bytes <= pool.page_bytes:
            raise ValueError(f"row_bytes must be in [1, {pool.page_bytes}] (one page), got {row_bytes}")
        rows_per_page = pool.page_bytes // row_bytes
        most = pool.pages if max_pages is None else max_pages
        if not 1 <= most <= pool.pages:
            raise ValueError(f"max_pages must be in [1, {pool.pages}], got {max_pages}")
        rows = max(pool.pages * rows_per_page, 2 * most * rows_per_page + kernels.WAYS)
        if rows >= 2**31:
            raise ValueError(
                f"the pool holds {pool.pages * rows_per_page} rows, of which the cache can own {most * rows_per_page}; "
                "it can number fewer than 2**31 of the former and 2**30 of the latter: raise row_bytes, lower "
                "max_pages or use a smaller pool"
            )
        if pool.payload == isinstance(tables, int):
            raise ValueError(
                "a pool with payload needs the tables themselves, one array per table; without, just their number"
            )
        self.table_count = tables if isinstance(tables, int) else len(tables)
        if not 1 <= self.table_count <= 2**15 - 1:
            raise ValueError(f"between 1 and {2**15 - 1} tables, got {self.table_count}")
        self.row_bytes = row_bytes
        self.rows_per_page = rows_per_page
        self._tables = [] if isinstance(tables, int) else [_as_bytes(t, row_bytes, k) for k, t in enumerate(tables)]
        self._pool = pool
        self.state = kernels.new_embedding_state(pool.pages, rows_per_page, most, pool.member(name))
        self._scratch = kernels.new_embedding_scratch(1024)
        pool.attach(name, self, most)

    def lookup(self, ids: Array, tables: Array | int = 0, out: npt.NDArray[np.uint8] | None = None) -> EmbeddingLookup:
        """Look up a batch; missed rows are fetched from the host tables and admitted.

        Args:
            ids: [n] integers, any int64 without payload, row numbers of their table with payload.
            tables: [n] table of each id, or one table for all.
            out: [n, row_bytes] uint8 to fill instead of a new array; with payload only.

        Raises:
            TypeError, ValueError: wrong dtypes, shapes or ids; nothing has changed then.
            Exception: whatever reading a table raises. The batch is not counted then, and none of its missed rows is
                cached; their victims stay evicted.
        """
        keys, table = self._keys(ids, tables)
        n = keys.size
        with self._pool.lock:
            self._pool.check_open()
            if self._tables:
                self._check_rows(keys, table)
            rows = self._rows(n, out)
            if n > self._scratch.slots.size:
                self._scratch = kernels.new_embedding_scratch(n)
            scratch = self._scratch
            before = self.state.scalars[kernels.NOW]
            try:
                unique = kernels.lookup(self.state, self._pool.state, scratch, table, keys, n)
                if rows is not None:
                    self._serve(keys, table, unique, rows)
                return EmbeddingLookup(
                    rows=rows, hit=scratch.miss[:n] < 0, slots=scratch.slots[:n].copy(), fetched=int(unique)
                )
            except BaseException:
                # The index was told of rows that may never have come (an I/O error of a mapped file, an interrupt).
                if self.state.scalars[kernels.NOW] != before:
                    kernels.retract(self.state, scratch, n)
                raise

    def lease(self, slots: npt.NDArray[np.integer[Any]]) -> EmbeddingLease:
        """Hold the pages of these slots against eviction and migration.

        Slots are valid until the next lookup: where other threads look up as well, hold the pool's lock over both.

        Args:
            slots: [n] as `lookup` returned them; -1 (served past the cache) is passed over.

        Raises:
            TypeError, ValueError: not slots of this cache; nothing is held then.
        """
        numbers = _as_ids(slots, "slots")
        with self._pool.lock:
            self._pool.check_open()
            if numbers.size and not (numbers.min() >= -1 and numbers.max() < self.state.entry.size):
                raise ValueError(
                    f"slots must be in [-1, {self.state.entry.size}), got {numbers.min()}..{numbers.max()}"
                )
            pages = np.unique(numbers[numbers >= 0] // self.rows_per_page)
            foreign = pages[self._pool.state.owner[pages] != self.state.scalars[kernels.MEMBER]]
            if foreign.size:
                raise ValueError(f"the cache does not own page {foreign[0]}: its slots are no longer valid")
            return EmbeddingLease(self._pool, pages)

    def invalidate(self, ids: Array, tables: Array | int = 0) -> int:
        """Forget rows, as after an update of their table; return how many of them were cached."""
        keys, table = self._keys(ids, tables)
        with self._pool.lock:
            self._pool.check_open()
            return int(kernels.invalidate(self.state, table, keys, keys.size))

    def stats(self) -> EmbeddingStats:
        """Return the counters since the last call and start them anew."""
        with self._pool.lock:
            counters = [int(x) for x in self.state.counters]
            self.state.counters[:] = 0
        return EmbeddingStats(
            requested=counters[kernels.REQUESTED],
            hits=counters[kernels.HITS],
            misses=counters[kernels.MISSES],
            fetched=counters[kernels.FETCHED],
            bypassed=counters[kernels.BYPASSED],
            evicted=counters[kernels.EVICTED],
            link_bytes=counters[kernels.FETCHED] * self.row_bytes,
        )

    def release(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages over the goal (called by the pool)."""
        return int(kernels.release_pages(self.state, self._pool.state, budget, now_ns, limit_ns))

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal (called by the pool)."""
        return int(kernels.accept_pages(self.state, self._pool.state, budget))

    def metadata_bytes(self) -> int:
        """Bytes of index and slot metadata; they count against the memory budget."""
        return sum(array.nbytes for array in self.state)

    def _serve(self, keys: npt.NDArray[np.int64], table: npt.NDArray[np.int16], unique: int, out: Array) -> None:
        scratch = self._scratch
        first = scratch.first[:unique]
        staged = np.zeros((unique, self.row_bytes), np.uint8)
        missed_tables = table[first]
        missed_keys = keys[first]
        for k in np.unique(missed_tables):
            at = missed_tables == k
            rows = self._tables[k]
            staged[at, : rows.shape[1]] = rows[missed_keys[at]]
        storage = self._pool.storage
        assert storage is not None
        page_bytes = self._pool.page_bytes
        payload.store_rows(storage, page_bytes, self.rows_per_page, scratch.miss_slot[:unique], staged)
        payload.gather_rows(
            storage,
            page_bytes,
            self.rows_per_page,
            scratch.slots[: keys.size],
            scratch.miss[: keys.size],
            staged,
            out,
        )

    def _keys(self, ids: Array, tables: Array | int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
        keys = _as_ids(ids, "ids")
        one = isinstance(tables, (int, np.integer))
        numbers = _as_ids(np.array([tables]) if one else np.asarray(tables), "tables")
        if not one and numbers.size != keys.size:
            raise ValueError(f"tables must have one entry per id: {numbers.size} for {keys.size} ids")
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.table_count):
            raise ValueError(f"tables must be in [0, {self.table_count}), got {numbers.min()}..{numbers.max()}")
        table = np.empty(keys.size, np.int16)
        table[:] = numbers
        return keys, table

    def _rows(self, n: int, out: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8] | None:
        shape = (n, self.row_bytes)
        if out is None:
            return np.empty(shape, np.uint8) if self._tables else None
        if not self._tables:
            raise ValueError("the pool was made with payload=False: there are no rows for out")
        if out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out must be a writeable C-contiguous uint8 array of shape {shape}")
        return out

    def _check_rows(self, keys: npt.NDArray[np.int64], table: npt.NDArray[np.int16]) -> None:
        limits = np.array([t.shape[0] for t in self._tables], np.int64)[table]
        wrong = (keys < 0) | (keys >= limits)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(f"ids[{i}] = {keys[i]} is not a row of table {table[i]}, which has {limits[i]}")


def _as_ids(array: Array, what: str) -> npt.NDArray[np.int64]:
    ids = np.asarray(array)
    if ids.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got shape {ids.shape}")
    if ids.dtype.kind not in "iu" and ids.size:
        raise TypeError(f"{what} must be integers, got {ids.dtype}")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.uint64(2**63 - 1):
        raise ValueError(f"{what} must fit int64, got {ids.max()}; map them to dense codes or view them as int64")
    # One layout: kernels would be compiled anew for arrays that are read-only, strided or not aligned.
    return np.require(ids, np.int64, ("C", "ALIGNED", "WRITEABLE"))


def _as_bytes(table: Array, row_bytes: int, number: int) -> npt.NDArray[np.uint8]:
    if not isinstance(table, np.ndarray) or table.dtype.hasobject:
        raise TypeError(f"table {number} must be a NumPy array of plain values, got {type(table).__name__}")
    if table.ndim < 2 or not table.flags.c_contiguous or not all(table.shape[1:]):
        raise ValueError(f"table {number} must be a C-contiguous array [rows, ...], got shape {table.shape}")
    rows = table.reshape(table.shape[0], math.prod(table.shape[1:])).view(np.uint8)
    if rows.shape[1] > row_bytes:
        raise ValueError(f"rows of table {number} have {rows.shape[1]} bytes, more than row_bytes={row_bytes}")
    return rows
