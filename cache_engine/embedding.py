"""The embedding hot cache: rows of large host tables, kept in pages of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.batch import as_rows
from cache_engine.backends.cpu import embedding as kernels
from cache_engine.backends.cpu.backend import CpuBackend
from cache_engine.backends.cuda_backend import CudaBackend
from cache_engine.backends.protocol import EmbeddingBackend
from cache_engine.ghost import EmbeddingGhost
from cache_engine.integers import integer
from cache_engine.lease import Lease
from cache_engine.pool import HbmPool
from cache_engine.refill import Refill
from cache_engine.stats import EmbeddingStats

GATHERS = ("auto", "zero-copy", "staging")


@dataclass(frozen=True)
class EmbeddingLookup:
    """The answer to one batch of n keys: NumPy arrays, on backend "cuda" arrays of the device.

    The latter are complete when the pool's stream has come that far. Where that is CuPy's current stream, as it is by
    default, whoever takes them through DLPack waits for it on its own stream.
    """

    rows: Any  # uint8 [n, row_bytes], the rows themselves; None without payload
    hit: Any  # bool [n] found before the batch
    slots: Any  # int32 [n] slot now, -1: served past the cache; see `EmbeddingCache.lease`
    fetched: int  # unique rows that crossed the link


class EmbeddingLease(Lease):
    """Holds the pages of some rows in place; see `EmbeddingCache.lease`."""

    def __init__(self, pool: HbmPool, pages: npt.NDArray[np.int64]) -> None:
        self.pages = pages  # without repetitions
        pool.state.pins[pages] += 1
        super().__init__(pool)

    def _end(self) -> None:
        self._pool.state.pins[self.pages] -= 1


class EmbeddingCache:
    """Rows of host tables under the key (table, id).

    Ids, tables and `out` may be NumPy arrays or any object with DLPack, a torch tensor for one; on backend "cuda" also
    such of the pool's device, or with the CUDA array interface: no bytes of those go through the host.

    Args:
        pool: the pool, in which the cache becomes the member `name`.
        row_bytes: width to which the rows of all tables are padded.
        tables: with payload, one array [rows, ...] per table, C-contiguous rows of at most `row_bytes`; in the host's
            memory or memory-mapped. Ids index it. Without payload: the number of tables, and any int64 is an id.
        max_pages: most pages that the cache can own; sizes the index. Default: the whole pool.
        policy: "sieve", what was not used since the hand came by goes first, or "lru", the least recently used; both by
            batches (see the CPU backend's kernels).
        gather: on backend "cuda", how missed rows come. "zero-copy": a kernel reads them out of the tables, which are
            page-locked for that, or copied to page-locked memory where they cannot be (the copy follows an update of
            the table at `invalidate`); it may still read when `lookup` has returned. "staging": the CPU collects them
            in page-locked buffers; memory-mapped tables can only be staged. "auto": what is measured to be faster.
        ghost: follow a sample of the keys, to tell what other sizes would gain. On backend "cuda" each lookup then
            copies its keys to the host and waits for that.

    Attributes:
        ghost: the `EmbeddingGhost` that every lookup feeds; None without.
    """

    def __init__(
        self,
        pool: HbmPool,
        *,
        row_bytes: int,
        tables: Sequence[Any] | int = 1,
        name: str = "emb",
        max_pages: int | None = None,
        policy: str = "sieve",
        gather: str = "auto",
        ghost: bool = False,
    ) -> None:
        row_bytes = integer("row_bytes", row_bytes)
        if not 1 <= row_bytes <= pool.page_bytes:
            raise ValueError(f"row_bytes must be in [1, {pool.page_bytes}] (one page), got {row_bytes}")
        rows_per_page = pool.page_bytes // row_bytes
        most = pool.pages if max_pages is None else integer("max_pages", max_pages)
        if not 1 <= most <= pool.pages:
            raise ValueError(f"max_pages must be in [1, {pool.pages}], got {max_pages}")
        if pool.pages * rows_per_page > 900_000_000 or most * rows_per_page > 800_000_000:
            raise ValueError(
                f"the pool holds {pool.pages * rows_per_page} rows, of which the cache can own {most * rows_per_page}; "
                "it can number 900 million of the former and 800 million of the latter: raise row_bytes, lower "
                "max_pages or use a smaller pool"
            )
        if isinstance(tables, np.integer):
            tables = int(tables)
        if isinstance(tables, bool) or not (isinstance(tables, int) or hasattr(tables, "__len__")):
            raise TypeError(f"tables must be a sequence of arrays, or their number, got {tables!r}")
        if pool.payload == isinstance(tables, int):
            raise ValueError(
                "a pool with payload needs the tables themselves, one array per table; without, just their number"
            )
        if gather not in GATHERS or (pool.device is None and gather != "auto"):
            raise ValueError(f"gather must be one of {', '.join(GATHERS)}, on backend 'cpu' 'auto'; got {gather!r}")
        if policy not in kernels.POLICIES:
            raise ValueError(f"policy must be one of {', '.join(kernels.POLICIES)}, got {policy!r}")
        self.table_count = tables if isinstance(tables, int) else len(tables)
        if not 1 <= self.table_count <= 2**15 - 1:
            raise ValueError(f"between 1 and {2**15 - 1} tables, got {self.table_count}")
        self.policy = policy
        self.row_bytes = row_bytes
        self.rows_per_page = rows_per_page
        host = [] if isinstance(tables, int) else [as_rows(t, row_bytes, k) for k, t in enumerate(tables)]
        self._pool = pool
        self._member = pool.member(name)
        with pool.lock:
            pool.check_open()
            sizes = (
                pool.page_bytes,
                rows_per_page,
                most,
                self._member,
                kernels.POLICIES[policy],
                host,
                self.table_count,
            )
            self._backend: EmbeddingBackend
            if pool.device is None:
                self._backend = CpuBackend(pool.state, pool.storage, *sizes, row_bytes)
            else:
                self._backend = CudaBackend(pool.state, pool.storage, *sizes, row_bytes, pool.device, gather)
            try:
                self._refill = Refill(self._backend, row_bytes)
                self.ghost: EmbeddingGhost | None = None
                if ghost:
                    self.ghost = EmbeddingGhost(
                        pool, name, max_pages=most, rows_per_page=rows_per_page, policy=kernels.POLICIES[policy]
                    )
                    self._backend.sample_below(self.ghost.limit)
                pool.attach(name, self, most)
            except BaseException:
                self._backend.close()
                raise
            pool.at_close(self._close)

    @property
    def state(self) -> Any:
        """The cache's metadata; on backend "cuda" arrays of the device, None after the pool was closed."""
        return self._backend.state

    @property
    def gather(self) -> str:
        """How missed rows come: "host" (backend "cpu"), "zero-copy" or "staging"."""
        return self._backend.gather

    def lookup(self, ids: Any, tables: Any = 0, out: Any | None = None) -> EmbeddingLookup:
        """Look up a batch; missed rows are fetched from the host tables and admitted.

        Args:
            ids: [n] integers, any int64 without payload, row numbers of their table with payload. They are read more
                than once: nobody may change them before this returns.
            tables: [n] table of each id, or one table for all.
            out: uint8 [n, row_bytes] to fill instead of a new array, in the pool's memory; with payload only.

        Raises:
            TypeError, ValueError: wrong dtypes, shapes or ids; nothing has changed then.
            Exception: whatever reading a table raises. The batch is not counted then, and none of its missed rows is
                cached; their victims stay evicted.
        """
        with self._pool.lock:
            self._pool.check_open()
            table, keys, n = self._backend.batch(ids, tables, rows=True)
            rows = self._backend.output(n, out)
            try:
                self._pool.busy = True
                self._refill.admit()
                hit, slots, fetched = self._backend.lookup(table, keys, n, rows)
                if self.ghost is not None:
                    self._backend.feed(self.ghost, table, keys, n)
                # After this batch's own rows, which would have waited for it.
                self._refill.start()
            finally:
                self._pool.busy = False
            return EmbeddingLookup(rows=rows if out is None else out, hit=hit, slots=slots, fetched=fetched)

    def refill(self, ids: Any, tables: Any = 0) -> int:
        """Admit rows in the background, as those that a larger partition has room for; return how many wait now.

        Copies go beside lookups, one of at most 1 MiB at a time; each `lookup` and `advance_refill` admits what has
        come and begins the next one. They are no requests: hits and misses are not counted. Arguments as of `lookup`.

        Raises:
            TypeError, ValueError: as `lookup`.
            Exception: what reading a table raised since the last call; those rows are given up.
        """
        with self._pool.lock:
            self._pool.check_open()
            self._refill.check()
            table, keys, _ = self._backend.batch(ids, tables, rows=True)
            self._refill.add(
                self._backend.on_host(table, "tables").astype(np.int16), self._backend.on_host(keys, "ids")
            )
            return self.advance_refill()

    def advance_refill(self, wait: bool = False) -> int:
        """Admit the rows that have come and begin the next copy; return how many rows wait now.

        Args:
            wait: go on until none waits.

        Raises:
            Exception: what reading a table raised since the last call; those rows are given up.
        """
        with self._pool.lock:
            self._pool.check_open()
            try:
                self._pool.busy = True
                self._refill.admit(wait)
                self._refill.start()
                while wait and self._refill.waiting:
                    self._refill.admit(wait)
                    self._refill.start()
            finally:
                self._pool.busy = False
            self._refill.check()
            return self._refill.waiting

    def lease(self, slots: Any) -> EmbeddingLease:
        """Hold the pages of these slots against eviction and migration.

        Slots are valid until the next lookup, step of a refill, `invalidate` or `migrate`: where other threads do such
        things, hold the pool's lock over both.

        Args:
            slots: [n] as `lookup` returned them; -1 (served past the cache) is passed over.

        Raises:
            TypeError, ValueError: not slots of this cache; nothing is held then.
        """
        with self._pool.lock:
            self._pool.check_open()
            numbers = self._backend.on_host(slots, "slots")
            most = self._pool.pages * self.rows_per_page
            if numbers.size and not (numbers.min() >= -1 and numbers.max() < most):
                raise ValueError(f"slots must be in [-1, {most}), got {numbers.min()}..{numbers.max()}")
            pages = np.unique(numbers[numbers >= 0] // self.rows_per_page)
            foreign = pages[self._pool.state.owner[pages] != self._member]
            if foreign.size:
                raise ValueError(f"the cache does not own page {foreign[0]}: its slots are no longer valid")
            return EmbeddingLease(self._pool, pages)

    def invalidate(self, ids: Any, tables: Any = 0) -> int:
        """Forget rows, as after an update of their table; return how many of them were cached."""
        with self._pool.lock:
            self._pool.check_open()
            table, keys, n = self._backend.batch(ids, tables, rows=False)
            self._refill.restart()
            return self._backend.invalidate(table, keys, n)

    def stats(self) -> EmbeddingStats:
        """Return the counters since the last call and start them anew."""
        with self._pool.lock:
            counters = self._backend.take_counters()
            refilled = self._refill.take_copied()
        return EmbeddingStats(
            requested=counters[kernels.REQUESTED],
            hits=counters[kernels.HITS],
            misses=counters[kernels.MISSES],
            fetched=counters[kernels.FETCHED],
            bypassed=counters[kernels.BYPASSED],
            evicted=counters[kernels.EVICTED],
            link_bytes=(counters[kernels.FETCHED] + refilled) * self.row_bytes,
            refilled=refilled,
        )

    def release(self, budget: int, now_ns: int, limit_ns: int, relocate: bool | None) -> int:
        """Give up at most `budget` pages over the goal (called by the pool)."""
        if self.policy == "sieve" if relocate is None else relocate:
            return self._backend.relocate(budget, now_ns, limit_ns)
        return self._backend.release(budget, now_ns, limit_ns)

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal (called by the pool)."""
        return self._backend.accept(budget)

    def metadata_bytes(self) -> int:
        """Bytes of index and slot metadata; they count against the memory budget. 0 when backend "cuda" was closed."""
        return self._backend.metadata_bytes()

    def _close(self) -> None:
        self._refill.close()
        self._backend.close()
