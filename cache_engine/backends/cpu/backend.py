"""The embedding cache on the CPU: NumPy arrays in and out, numba kernels between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends import batch
from cache_engine.backends.cpu import embedding as kernels
from cache_engine.backends.cpu import payload
from cache_engine.backends.cpu.pool import PoolState
from cache_engine.backends.protocol import Fetch, Follower
from cache_engine.jit import MOST_BYTES

MOST_PENDING = 2048


class Done:
    """The event of rows that have been read."""

    def done(self) -> bool:
        """Whether the rows have come: reading them waits for them."""
        return True

    def wait(self) -> None:
        """Return at once."""


class CpuBackend:
    """See `EmbeddingBackend`.

    Args:
        pool: the pool's state.
        storage: the pool's bytes; None without payload.
        page_bytes: of a page.
        rows_per_page: rows in a page.
        max_pages: most pages that the member can own.
        member: its number.
        policy: LRU or SIEVE.
        tables: host tables as bytes [rows, width]; without payload empty.
        table_count: how many tables there are.
        row_bytes: width of a row.
    """

    gather = "host"

    def __init__(
        self,
        pool: PoolState,
        storage: Any,
        page_bytes: int,
        rows_per_page: int,
        max_pages: int,
        member: int,
        policy: int,
        tables: Sequence[npt.NDArray[np.uint8]],
        table_count: int,
        row_bytes: int,
    ) -> None:
        self.state = kernels.new_embedding_state(pool.owner.size, rows_per_page, max_pages, member, policy)
        self._pool = pool
        self._storage = storage
        self._page_bytes = page_bytes
        self._rows_per_page = rows_per_page
        self._tables = tables
        self._table_count = table_count
        self._row_bytes = row_bytes
        self._limits = np.array([t.shape[0] for t in tables], np.int64)
        self._packed = np.zeros(MOST_BYTES, np.uint8)
        self.sample = np.zeros(2, np.uint64)
        self._moving = kernels.new_moving_rows(rows_per_page, row_bytes if tables else 0)
        self._new_scratch(max(1024, rows_per_page))

    def batch(self, ids: Any, tables: Any, rows: bool) -> tuple[Any, Any, int]:
        """Check a batch; see `EmbeddingBackend`."""
        table, keys = batch.host_batch(ids, tables, self._table_count)
        if rows and self._tables:
            batch.check_rows(table, keys, self._limits)
        return table, keys, keys.size

    def output(self, n: int, out: Any | None) -> Any | None:
        """Return where the rows go; see `EmbeddingBackend`."""
        shape = (n, self._row_bytes)
        if out is None:
            return np.empty(shape, np.uint8) if self._tables else None
        rows = batch.as_numpy(out, "out is")
        if not self._tables:
            raise ValueError("the pool was made with payload=False: there are no rows for out")
        if not isinstance(rows, np.ndarray):
            raise TypeError(f"out must be an array, got {type(out).__name__}")
        if rows.shape != shape or rows.dtype != np.uint8 or not rows.flags.c_contiguous or not rows.flags.writeable:
            raise ValueError(f"out must be a writeable C-contiguous uint8 array of shape {shape}")
        return rows

    def lookup(self, tables: Any, keys: Any, n: int, out: Any | None) -> tuple[Any, Any, int]:
        """Look up a batch and admit what it misses; see `EmbeddingBackend`."""
        scratch = self._room(n)
        before = self.state.scalars[kernels.NOW]
        try:
            unique = int(kernels.lookup_packed(self._packed, tables, keys, n))
            if out is not None:
                staged = np.empty((unique, self._row_bytes), np.uint8)
                if unique:
                    first = scratch.first[:unique]
                    batch.read_rows(self._tables, tables[first], keys[first], staged)
                    self._store(unique, staged)
                payload.gather_rows(
                    self._storage,
                    self._page_bytes,
                    self._rows_per_page,
                    scratch.slots[:n],
                    scratch.miss[:n],
                    staged,
                    out,
                )
            return scratch.miss[:n] < 0, scratch.slots[:n].copy(), unique
        except BaseException:
            # The index was told of rows that may never have come (an I/O error of a mapped file, an interrupt).
            if self.state.scalars[kernels.NOW] != before:
                kernels.retract(self.state, scratch, n)
            self.sample[1] = 0  # with those before it, which a sample can spare
            raise

    def sample_below(self, limit: int) -> None:
        """Append the hashes below `limit` of all keys looked up to `sample`, as `EmbeddingScratch.sample` holds them.

        The caller takes them out, whenever there are more than MOST_PENDING.
        """
        self.sample = np.array([limit, 0], np.uint64)
        self._new_scratch(self._scratch.slots.size)

    def feed(self, ghost: Follower, tables: Any, keys: Any, n: int) -> None:
        """Let a ghost follow the last batch."""
        ghost.feed(self.sample, n)

    def contains(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which keys are cached."""
        found = np.zeros(keys.size, np.bool_)
        kernels.contains(self.state, tables, keys, keys.size, found)
        return found

    def fetch(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> Fetch:
        """Read rows."""
        rows = np.empty((keys.size if self._tables else 0, self._row_bytes), np.uint8)
        if self._tables:
            batch.read_rows(self._tables, tables, keys, rows)
        return Fetch(tables, keys, rows, Done())

    def admit(self, fetch: Fetch) -> None:
        """Admit the rows of a fetch; see `EmbeddingBackend`."""
        n = fetch.keys.size
        scratch = self._room(n)
        counters = self.state.counters.copy()
        sampled = self.sample[1]
        before = self.state.scalars[kernels.NOW]
        try:
            unique = int(kernels.lookup_packed(self._packed, fetch.tables, fetch.keys, n))
            if self._tables:
                self._store(unique, fetch.rows[scratch.first[:unique]])
        except BaseException:
            if self.state.scalars[kernels.NOW] != before:
                kernels.retract(self.state, scratch, n)
            raise
        finally:
            counters[kernels.EVICTED] = self.state.counters[kernels.EVICTED]
            self.state.counters[:] = counters
            self.sample[1] = sampled  # nobody asked for these keys

    def invalidate(self, tables: Any, keys: Any, n: int) -> int:
        """Forget rows; return how many were cached."""
        return int(kernels.invalidate(self.state, tables, keys, n))

    def on_host(self, values: Any, what: str) -> npt.NDArray[np.int64]:
        """Return integers on the host."""
        return batch.as_ids(values, what)

    def take_counters(self) -> list[int]:
        """Return the counters and start them anew."""
        counters = [int(x) for x in self.state.counters]
        self.state.counters[:] = 0
        return counters

    def release(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages over the goal."""
        return int(kernels.release_packed(self._packed, budget, now_ns, limit_ns))

    def relocate(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages, their rows that were hit moving to others."""
        storage = self._storage if self._tables else self._moving.rows
        row_bytes = self._row_bytes if self._tables else 0
        return int(
            kernels.relocate_packed(
                self._packed, self._moving, storage, self._page_bytes, row_bytes, budget, now_ns, limit_ns
            )
        )

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal."""
        return int(kernels.accept_packed(self._packed, budget))

    def metadata_bytes(self) -> int:
        """Bytes of the state."""
        return kernels.metadata_bytes(self.state)

    def close(self) -> None:
        """Give the rows back; metadata and counters stay."""
        self._storage = None

    def _room(self, n: int) -> kernels.EmbeddingScratch:
        if n > self._scratch.slots.size:
            self._new_scratch(n)
        return self._scratch

    def _new_scratch(self, n: int) -> None:
        if self.sample[0]:
            pending = self.sample[: 2 + int(self.sample[1])]
            self.sample = np.zeros(2 + MOST_PENDING + n, np.uint64)
            self.sample[: pending.size] = pending
            pending[1] = 0  # whoever still has the old one must not follow them too
        self._scratch = kernels.new_embedding_scratch(n)._replace(sample=self.sample)
        kernels.pack(self.state, self._pool, self._scratch, self._packed)

    def _store(self, unique: int, staged: npt.NDArray[np.uint8]) -> None:
        slots = self._scratch.miss_slot[:unique]
        payload.store_rows(self._storage, self._page_bytes, self._rows_per_page, slots, staged)
