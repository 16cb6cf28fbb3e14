"""The embedding cache on a device: arrays of the device in and out, foreground on one stream, refills on another.

All of it runs on a device that the tests keep on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends import batch
from cache_engine.backends.cpu import embedding as cpu
from cache_engine.backends.cpu.pool import PoolState
from cache_engine.backends.cuda import CudaEmbedding
from cache_engine.backends.device import Device
from cache_engine.backends.protocol import Fetch, Follower
from cache_engine.backends.transfer import RING, HostTables, Lane


class CudaBackend:
    """See `EmbeddingBackend`.

    Args:
        pool, storage, page_bytes, rows_per_page, max_pages, member, policy, tables, table_count, row_bytes: see
            `CpuBackend`; the storage is on the device.
        device: where the cache lives; its stream is that of the foreground.
        gather: how missed rows come; see `HostTables`.
    """

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
        device: Device,
        gather: str,
    ) -> None:
        self._device = device
        self._storage = storage
        self._page_bytes = page_bytes
        self._table_count = table_count
        self._row_bytes = row_bytes
        self._payload = bool(tables)
        self._limits = np.array([t.shape[0] for t in tables], np.int64)
        self._core: CudaEmbedding | None = CudaEmbedding(pool, rows_per_page, max_pages, member, policy, device)
        self._tables = HostTables(tables, row_bytes, device, gather if tables else "staging")
        self._front = Lane(device, row_bytes, RING)
        self._back = Lane(device.fork(), row_bytes, 1)
        self._arrivals: Any = None  # where background copies land, one at a time
        self._device_limits = device.array(self._limits if tables else np.zeros(1, np.int64))
        self._wrong = device.array(np.zeros(1, np.int32))
        self._last_counters = np.zeros(cpu.N_COUNTERS, np.int64)

    @property
    def state(self) -> Any:
        """Arrays of the device; None after `close`."""
        return None if self._core is None else self._core.state

    @property
    def gather(self) -> str:
        """How missed rows come."""
        return self._tables.gather

    def batch(self, ids: Any, tables: Any, rows: bool) -> tuple[Any, Any, int]:
        """Check a batch; see `EmbeddingBackend`."""
        device = self._device
        keys: Any = device.adopt(ids)
        one = isinstance(tables, (int, np.integer))
        numbers: Any = None if one else device.adopt(tables)
        bounded = rows and self._payload
        if keys is None and numbers is None:
            host_tables, host_keys = batch.host_batch(ids, tables, self._table_count)
            if bounded:
                batch.check_rows(host_tables, host_keys, self._limits)
            return device.array(host_tables), device.array(host_keys), host_keys.size
        if keys is None:
            keys = device.array(batch.as_ids(ids, "ids"))
        if not one and numbers is None:
            numbers = device.array(batch.as_ids(tables, "tables"))
        for array, what in ((keys, "ids"), (keys if one else numbers, "tables")):
            if array.ndim != 1:
                raise ValueError(f"{what} must be one-dimensional, got shape {tuple(array.shape)}")
            if array.dtype.kind not in "iu" and array.size:
                raise TypeError(f"{what} must be integers, got {array.dtype}")
        n = int(keys.size)
        if not one and int(numbers.size) != n:
            raise ValueError(f"tables must have one entry per id: {numbers.size} for {n} ids")
        one_table = int(tables) if one and 0 <= tables < self._table_count else -1
        unsigned = int(keys.dtype == np.uint64)
        keys64 = device.cast(keys, np.int64)
        if one and one_table < 0:
            # Never a table: the host's words for it.
            batch.host_batch(np.zeros(0, np.int64), tables, self._table_count)
        table_of = device.empty(n, np.int16)
        numbers64 = keys64 if one else device.cast(numbers, np.int64)
        device.launch(
            "check_batch", n, keys64, numbers64, one_table, self._device_limits, self._table_count, int(bounded),
            unsigned, table_of, self._wrong, n,
        )  # fmt: skip
        # Without rows and with one table for all, signed ids cannot be wrong: no need to wait for the answer.
        if (bounded or not one or unsigned) and device.read(self._wrong)[0]:
            device.write(self._wrong, np.zeros(1, np.int32))
            host_tables, host_keys = batch.host_batch(
                device.read(keys), tables if one else device.read(numbers), self._table_count
            )
            batch.check_rows(host_tables, host_keys, self._limits)
            raise RuntimeError("the ids changed while they were checked")
        return table_of, keys64, n

    def output(self, n: int, out: Any | None) -> Any | None:
        """Return where the rows go; see `EmbeddingBackend`."""
        shape = (n, self._row_bytes)
        if out is None:
            return self._device.empty(shape, np.uint8) if self._payload else None
        if not self._payload:
            raise ValueError("the pool was made with payload=False: there are no rows for out")
        rows = self._device.adopt(out)
        if rows is None or tuple(rows.shape) != shape or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise ValueError(f"out must be a writeable C-contiguous uint8 array of shape {shape} on the pool's device")
        return rows

    def lookup(self, tables: Any, keys: Any, n: int, out: Any | None) -> tuple[Any, Any, int]:
        """Look up a batch and admit what it misses; see `EmbeddingBackend`."""
        core, device = self._open(), self._device
        unique = self._look_up(tables, keys)
        try:
            if out is not None:
                staged = device.empty((unique, self._row_bytes), np.uint8)
                if unique:
                    self._tables.fetch(self._front, tables, keys, core.scratch.first, unique, staged)
                    core.store_rows(self._storage, self._page_bytes, staged)
            core.publish()
            if out is not None:
                core.gather_rows(self._storage, self._page_bytes, staged, out)
            hit, slots = device.empty(n, np.bool_), device.empty(n, np.int32)
            device.launch("report", n, core.scratch.slots, core.scratch.miss, slots, hit, n)
        except BaseException:
            core.retract()
            raise
        return hit, slots, unique

    def sample_below(self, limit: int) -> None:
        """The host samples the keys themselves."""

    def feed(self, ghost: Follower, tables: Any, keys: Any, n: int) -> None:
        """Let a ghost follow the last batch, its keys copied to the host."""
        ghost.feed_keys(self.on_host(tables, "tables").astype(np.int16), self.on_host(keys, "ids"))

    def contains(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which keys are cached."""
        return self._open().contains(tables, keys)

    def fetch(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> Fetch:
        """Begin to copy rows on the background stream; see `EmbeddingBackend`."""
        back = self._back.device
        m = keys.size
        if self._payload:
            if self._arrivals is None:
                self._arrivals = back.empty((self._back.rows, self._row_bytes), np.uint8)
            # The foreground may still be storing the rows that came before.
            back.after(self._device.record())
            if self.gather == "staging":
                self._tables.stage(self._back, tables, keys, self._arrivals)
            else:
                first = back.array(np.arange(m, dtype=np.int32))
                self._tables.fetch(self._back, back.array(tables), back.array(keys), first, m, self._arrivals)
        return Fetch(tables, keys, self._arrivals, back.record())

    def admit(self, fetch: Fetch) -> None:
        """Admit the rows of a fetch; see `EmbeddingBackend`."""
        core, device = self._open(), self._device
        before = device.array(device.read(core.state.counters))
        try:
            self._admit(fetch)
        finally:
            device.launch("uncount", 1, core.state.counters, before, cpu.N_COUNTERS)

    def _admit(self, fetch: Fetch) -> None:
        core, device = self._open(), self._device
        unique = self._look_up(device.array(fetch.tables), device.array(fetch.keys))
        try:
            if self._payload and unique:
                chosen = device.empty((unique, self._row_bytes), np.uint8)
                unit = next(u for u in (16, 4, 1) if self._row_bytes % u == 0)
                units = self._row_bytes // unit
                device.launch(
                    f"pick_rows_{unit}", unique * units, fetch.rows, core.scratch.first, chosen, units, unique
                )
                core.store_rows(self._storage, self._page_bytes, chosen)
            core.publish()
        except BaseException:
            core.retract()
            raise

    def invalidate(self, tables: Any, keys: Any, n: int) -> int:
        """Forget rows; return how many were cached."""
        gone = self._open().invalidate(tables, keys)
        if self._tables.has_copies:
            self._tables.refresh(self._device, self._device.read(tables), self._device.read(keys))
        return gone

    def on_host(self, values: Any, what: str) -> npt.NDArray[np.int64]:
        """Return integers on the host."""
        adopted = self._device.adopt(values)
        return batch.as_ids(values if adopted is None else self._device.read(adopted), what)

    def take_counters(self) -> list[int]:
        """Return the counters and start them anew; those at the end after `close`."""
        if self._core is not None:
            self._last_counters = self._device.read(self._core.state.counters)
            self._device.write(self._core.state.counters, np.zeros(cpu.N_COUNTERS, np.int64))
        counters, self._last_counters = self._last_counters.tolist(), np.zeros(cpu.N_COUNTERS, np.int64)
        return [int(x) for x in counters]

    def release(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages over the goal."""
        try:
            return self._open().release(budget, now_ns, limit_ns)
        except BaseException:
            self._open().start_anew()
            raise

    def relocate(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages, their rows that were hit moving to others; see the CPU backend's kernel."""
        try:
            return self._relocate(budget, now_ns, limit_ns)
        except BaseException:
            self._open().start_anew()
            raise

    def _relocate(self, budget: int, now_ns: int, limit_ns: int) -> int:
        core, device = self._open(), self._device
        gone = core.finish_drains(budget, now_ns, limit_ns)
        while gone < budget:
            page = core.drain_coldest(now_ns)
            if page < 0 or core.pool.pins[page] > 0:
                break
            rows = self._visited_rows(page)
            gone += core.finish_drains(1, now_ns, limit_ns)
            for _ in range(2):
                before = device.read(core.state.counters)
                self._admit(rows)
                after = device.read(core.state.counters)
                came = after - before
                before[cpu.EVICTED] = after[cpu.EVICTED] - (came[cpu.FETCHED] - came[cpu.BYPASSED])
                device.write(core.state.counters, before)
        return gone

    def _visited_rows(self, page: int) -> Fetch:
        """Copy the rows of a page that were hit, on the foreground's stream."""
        core, device = self._open(), self._device
        records = core.records(page)
        chosen = np.flatnonzero(records["live"] & records["visited"]).astype(np.int32)
        copies = device.empty((chosen.size if self._payload else 0, self._row_bytes), np.uint8)
        if self._payload and chosen.size:
            slots = device.array(np.int32(page * core.rows_per_page) + chosen)
            core.copy_slots(self._storage, self._page_bytes, slots, copies)
        return Fetch(records["table"][chosen], records["key"][chosen], copies, device.record())

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal."""
        try:
            return self._open().accept(budget)
        except BaseException:
            self._open().start_anew()
            raise

    def metadata_bytes(self) -> int:
        """Bytes of the state; 0 after `close`."""
        return sum(array.nbytes for array in self.state or ())

    def close(self) -> None:
        """Give memory back, after all copies have ended. Counters stay."""
        if self._core is None:
            return
        self._back.device.record().wait()
        self._last_counters = self._device.read(self._core.state.counters)
        self._core = None
        self._storage = self._arrivals = None
        self._tables.close()

    def _look_up(self, tables: Any, keys: Any) -> int:
        core = self._open()
        try:
            return core.lookup(tables, keys)
        except BaseException:
            # In the middle of its launches (an interrupt), where there is nothing whole to go back to.
            if not core.published:
                core.start_anew()
            raise

    def _open(self) -> CudaEmbedding:
        assert self._core is not None, "the pool checks that it is open"
        return self._core
