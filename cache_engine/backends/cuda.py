"""The embedding cache's kernels on a CUDA device.

The kernels are compiled for sm_80 and sm_90 and, with the launches below, run on the host against the CPU backend.

The pool's metadata stay on the host, where other members and leases change them; what a batch needs of them is copied
to the device when it has changed. Which pages to take or give up is decided by the CPU backend's own kernels, from the
device's fill levels, stack and times of last use; the device erases what was on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding as cpu
from cache_engine.backends.cpu.pool import FREE_COUNT, PoolState
from cache_engine.backends.device import Device

_LEAST_PLACES = 2
_GROUP_BITS = 1024  # keys whose numbers share a base

# CudaScratch.totals
UNIQUE = 0
WAITING = 1
UNFILLED = 2
FOUND = 6
REMAINING = 7
VICTIMS = 8
SURVIVORS = 9
N_TOTALS = 15

# Entries of the queues that SIEVE examines in one round, per key of the batch.
_EXAMINED = 4


class CudaState(NamedTuple):
    """The CPU backend's EmbeddingState on the device, whose kernels take index and records as plain integers."""

    index: Any  # int32 [L * 16]
    row: Any  # uint64 [2 * S] the slots' records: key; last use, table and marks
    queue: Any
    spot: Any
    fill: Any
    fresh: Any
    scalars: Any
    counters: Any


class CudaScratch(NamedTuple):
    """Room on the device for one batch of at most B keys, with H >= 2 B places of hash tables, a power of two.

    The first five are the outputs, as in the CPU backend's EmbeddingScratch.
    """

    slots: Any  # int32 [B] slot of each key, -1: served past the cache
    miss: Any  # int32 [B] number of the key's unique miss, -1: hit
    first: Any  # int32 [B] of each unique miss: position of its first occurrence
    place: Any  # int32 [B] of each unique miss: its entry, -1: none
    miss_slot: Any  # int32 [B] of each unique miss: its slot, -1: served past the cache
    cell: Any  # int32 [B] place in `seen` of each missed key, -1: hit
    seen: Any  # int32 [H] least position of the missed key at this place
    group: Any  # int32 [B] place of each unique miss's index set in the next two
    group_set: Any  # int32 [H] first entry of the index set
    group_top: Any  # int32 [H * WAYS] the least numbers of misses of the set
    first_bits: Any  # uint32 [B / 32] set for the first occurrence of each unique miss
    waiting_bits: Any  # uint32 [B / 32] set for each unique miss that took an empty entry
    victims: Any  # int32 [B] slots that SIEVE evicts, in order
    victim_bits: Any  # uint32 [C / 32] of the C entries examined in a round: set for those to evict
    survivor_bits: Any  # uint32 [C / 32] set for those that stay
    victim_bases: Any  # int32 [C / 1024] set bits before each group
    survivor_bases: Any  # int32 [C / 1024]
    sums: Any  # int32 [C / 1024] set bits of each group
    first_bases: Any  # int32 [B / 1024] set bits before each group
    waiting_bases: Any  # int32 [B / 1024]
    totals: Any  # int64 [N_TOTALS]
    gone: Any  # int64 [1] rows that an invalidation found


class PoolMirror(NamedTuple):
    """What the device knows of the pool; names as in PoolState."""

    pins: Any  # int32 [P]
    draining: Any  # uint8 [P]
    lists: Any  # int32 [P] this member's row alone


class CudaEmbedding:
    """The embedding cache of one pool member, its state on a device; see the CPU backend's kernels for what it does.

    A batch is `lookup`, then `publish`; with payload `store_rows` between them and `gather_rows` after. Not
    thread-safe: hold the pool's lock.

    Args:
        pool: the pool's state, on the host.
        rows_per_page: rows in a page.
        max_pages: most pages that the member can own; sizes the index.
        member: the member's number.
        device: where the state lives.

    Attributes:
        state: as the CPU backend's EmbeddingState, but arrays of the device.
        scratch: outputs of the last batch, arrays of the device.
    """

    def __init__(
        self, pool: PoolState, rows_per_page: int, max_pages: int, member: int, policy: int, device: Device
    ) -> None:
        self.device = device
        self.pool = pool
        self.member = member
        self.rows_per_page = rows_per_page
        self._policy = policy
        self._max_pages = max_pages
        host = cpu.new_embedding_state(pool.owner.size, rows_per_page, max_pages, member, policy)
        self.state = CudaState(*(device.array(a) for a in as_integers(host)))
        self.scratch = self._new_scratch(1024)
        self.published = True
        self._n = 0
        self._unique = 0
        self._sent: list[npt.NDArray[Any]] = [a.copy() for a in self._pool_arrays()]
        self._mirror = PoolMirror(*(device.array(a) for a in self._sent))
        # Of the state on the host: only what `_read_heat` asks for is ever written, and takes room.
        self._row = np.zeros(host.row.size, cpu.ROW)
        self._may_be_stale = False  # of the queues' entries: their pages have left

    def lookup(self, tables: Any, keys: Any) -> int:
        """Look up a batch and choose what it evicts; return the number of unique misses.

        What the misses evicted is erased from the index; the index learns of their own rows by `publish`.

        Args:
            tables: int16 [n], table of each key; of NumPy or of the device, as the keys.
            keys: int64 [n].

        Raises:
            RuntimeError: the batch before was not published.
            TypeError, ValueError: wrong dtypes or shapes; nothing has changed then.
        """
        self._check_published()
        tables, keys = self._batch(tables, keys)
        n = int(keys.size)
        if n > self.scratch.slots.size:
            self.scratch = self._new_scratch(n)
        self._send_pool()
        emb, s, pool, launch = self.state, self.scratch, self._mirror, self.device.launch
        places = _places(n)
        sieve = self._policy == cpu.SIEVE
        chunk = _EXAMINED * n if sieve else 0
        if sieve:
            self._compact_queues(n)
        self.published = False
        self._n = n
        launch(
            "begin_batch", places, emb.scalars, emb.fill, emb.fresh, s.totals, s.seen, s.group_set, s.group_top,
            s.first_bits, s.waiting_bits, s.victim_bits, s.survivor_bits, chunk, int(self.pool.owned[self.member]), n,
            places,
        )  # fmt: skip
        launch("probe", n, emb.index, emb.row, emb.scalars, tables, keys, s.slots, s.miss, s.cell, s.seen, n, places)
        launch("mark_first", n, s.cell, s.seen, s.first_bits, n)
        self._number(s.first_bits, s.first_bases, UNIQUE, n)
        launch(
            "number_misses", n, tables, keys, emb.scalars, s.cell, s.seen, s.first_bits, s.first_bases, s.miss, s.first,
            s.place, s.group, s.group_set, s.group_top, n, places,
        )  # fmt: skip
        # How many unique misses there are is known on the device alone: there may be one for each key.
        launch(
            "claim_entries", n, emb.index, emb.row, pool.pins, pool.draining, emb.scalars, emb.spot, s.totals, s.group,
            s.group_top, s.place, s.miss_slot, s.waiting_bits,
        )  # fmt: skip
        self._number(s.waiting_bits, s.waiting_bases, WAITING, n)
        launch(
            "admit", n, emb.index, emb.row, emb.fill, emb.fresh, emb.counters, emb.scalars, s.totals, tables, keys,
            s.first, s.place, s.miss_slot, s.waiting_bits, s.waiting_bases,
        )  # fmt: skip
        if sieve:
            totals = self._sieve(chunk)
            launch(
                "sieve_place", n, emb.row, emb.queue, emb.spot, emb.scalars, s.totals, tables, keys, s.first,
                s.miss_slot, s.victims, s.waiting_bits, s.waiting_bases,
            )  # fmt: skip
        else:
            launch(
                "take_windows", n, emb.index, emb.row, pool.pins, pool.draining, pool.lists, emb.counters, emb.scalars,
                s.totals, tables, keys, s.first, s.place, s.miss_slot, s.waiting_bits, s.waiting_bases,
            )  # fmt: skip
            totals = self.device.read(s.totals)
        launch("deliver", n, emb.fill, emb.fresh, emb.scalars, emb.counters, s.totals, s.miss, s.miss_slot, s.slots, n)
        self._unique = int(totals[UNIQUE])
        return self._unique

    def _sieve(self, chunk: int) -> npt.NDArray[np.int64]:
        """Find the batch's victims, in rounds; return its totals. One round is nearly always enough."""
        emb, s, pool, launch = self.state, self.scratch, self._mirror, self.device.launch
        while True:
            launch(
                "sieve_examine", chunk, emb.row, pool.pins, pool.draining, emb.queue, emb.spot, emb.scalars, s.totals,
                s.victim_bits, s.survivor_bits, chunk,
            )  # fmt: skip
            self._number(s.victim_bits, s.victim_bases, VICTIMS, chunk)
            self._number(s.survivor_bits, s.survivor_bases, SURVIVORS, chunk)
            launch(
                "sieve_take", chunk, emb.index, emb.row, emb.queue, emb.spot, emb.counters, emb.scalars, s.totals,
                s.victims, s.victim_bits, s.victim_bases, s.survivor_bits, s.survivor_bases, chunk,
            )  # fmt: skip
            launch("sieve_close", -(-chunk // 32), emb.scalars, s.totals, s.victim_bits, s.survivor_bits, chunk)
            totals: npt.NDArray[np.int64] = self.device.read(s.totals)
            if totals[WAITING] <= totals[UNFILLED] + totals[FOUND] or totals[REMAINING] == 0:
                return totals

    def _number(self, bits: Any, bases: Any, total: int, n: int) -> None:
        """Count the set bits before each group of them, and all."""
        groups = -(-n // _GROUP_BITS)
        self.device.launch("sum_bits", groups, bits, self.scratch.sums, n)
        self.device.launch("base_bits", groups, self.scratch.sums, bases, self.scratch.totals, total, groups)

    def _compact_queues(self, n: int) -> None:
        """Make room in the queues for a batch of n keys, as the CPU backend does: on the host, for it is rare."""
        if not self._may_be_stale:
            return
        emb, device = self.state, self.device
        pages = self._pages()
        entries = pages.scalars[cpu.COUNT : cpu.COUNT + 2].sum()
        if entries == pages.scalars[cpu.QUEUED : cpu.QUEUED + 2].sum():
            self._may_be_stale = False
        elif entries + cpu.unfilled_slots(pages, n) > pages.scalars[cpu.ROOM]:
            host = pages._replace(queue=device.read(emb.queue), spot=device.read(emb.spot))
            cpu.compact_queues(host)
            for name in ("scalars", "queue", "spot"):
                device.write(getattr(emb, name), getattr(host, name))
            self._may_be_stale = False

    def publish(self) -> None:
        """Let the index tell of the rows that the last batch admitted, once they are in their slots."""
        if self.published:
            raise RuntimeError("there is no batch to publish")
        emb, s = self.state, self.scratch
        self.device.launch("publish", self._unique, emb.index, emb.row, s.totals, s.place, s.miss_slot)
        self.published = True

    def retract(self) -> None:
        """Take back the last batch, published or not, whose rows did not come. Its victims stay evicted."""
        if not self.published:
            self.publish()
        emb, s = self.state, self.scratch
        self.device.launch(
            "retract", self._n, emb.index, emb.row, emb.scalars, emb.counters, s.miss, s.first, s.place, s.miss_slot,
            self._n,
        )  # fmt: skip
        self._n = 0

    def store_rows(self, storage: Any, page_bytes: int, staged: Any) -> None:
        """Copy the rows that the last batch fetched into their slots.

        Args:
            storage: uint8, the pool's bytes on the device.
            page_bytes: bytes of a page.
            staged: uint8 [m, row_bytes], rows of the unique misses in order; on the device.
        """
        unit, units = _units(staged.shape[1], page_bytes, self._unique)
        s = self.scratch
        self.device.launch(
            f"store_rows_{unit}", self._unique * units, storage, staged, s.miss_slot, page_bytes, self.rows_per_page,
            units, self._unique,
        )  # fmt: skip

    def gather_rows(self, storage: Any, page_bytes: int, staged: Any, out: Any) -> None:
        """Copy the rows of all keys of the last batch into `out`, uint8 [n, row_bytes]; others as in `store_rows`."""
        unit, units = _units(out.shape[1], page_bytes, self._n)
        s = self.scratch
        self.device.launch(
            f"gather_rows_{unit}", self._n * units, storage, staged, s.slots, s.miss, out, page_bytes,
            self.rows_per_page, units, self._n,
        )  # fmt: skip

    def invalidate(self, tables: Any, keys: Any) -> int:
        """Forget rows, as after an update of their table; return how many were cached. Arguments as of `lookup`."""
        self._check_published()
        tables, keys = self._batch(tables, keys)
        n = int(keys.size)
        emb, gone = self.state, self.scratch.gone
        self.device.write(gone, np.zeros(1, np.int64))
        self.device.launch("invalidate", n, emb.index, emb.row, emb.scalars, tables, keys, gone, n)
        return int(self.device.read(gone)[0])

    def contains(self, tables: Any, keys: Any) -> npt.NDArray[np.bool_]:
        """Tell on the host which keys are cached; nothing is counted or stamped. Arguments as of `lookup`."""
        self._check_published()
        tables, keys = self._batch(tables, keys)
        n = int(keys.size)
        emb, found = self.state, self.device.empty(n, np.bool_)
        self.device.launch("contains", n, emb.index, emb.row, emb.scalars, tables, keys, found, n)
        return self.device.read(found)

    def release(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages over the goal, as the CPU backend's `release_pages`; return how many."""
        pool, member = self.pool, self.member
        if pool.n_draining[member] == 0 and pool.owned[member] <= pool.goal[member]:
            return 0

        def release(pages: cpu.EmbeddingState) -> int:
            # One page at a time: before the next, its candidates are known.
            gone = 0
            while True:
                self._read_heat(int(pages.scalars[cpu.CURSOR]))
                left = int(cpu.release_pages(pages, pool, min(1, budget - gone), now_ns, limit_ns))
                gone += left
                if gone == budget or left == 0:
                    return gone

        return self._give_up(release)

    def finish_drains(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up draining pages, as the CPU backend's `finish_drains`; return how many."""
        pool = self.pool
        if pool.n_draining[self.member] == 0:
            return 0
        return self._give_up(lambda pages: int(cpu.finish_drains(pages, pool, budget, now_ns, limit_ns)))

    def drain_coldest(self, now_ns: int) -> int:
        """Begin to drain a page, as the CPU backend's `drain_coldest`; return it, or -1."""
        if self.pool.owned[self.member] <= self.pool.goal[self.member]:
            return -1
        self._check_published()
        pages = self._pages()
        self._read_heat(int(pages.scalars[cpu.CURSOR]))
        page = int(cpu.drain_coldest(pages, self.pool, now_ns))
        self._send_pages(pages)
        return page

    def records(self, page: int) -> npt.NDArray[Any]:
        """Return the records of a page's slots, of ROW, on the host."""
        n = self.rows_per_page
        words = self.device.empty(2 * n, np.uint64)
        self.device.launch("read_records", 2 * n, self.state.row, 2 * n * page, words, 2 * n)
        return self.device.read(words).view(cpu.ROW)

    def copy_slots(self, storage: Any, page_bytes: int, slots: Any, out: Any) -> None:
        """Copy the rows of any slots, int32 [n] of the device, into `out`, uint8 [n, row_bytes]."""
        n = int(slots.size)
        unit, units = _units(out.shape[1], page_bytes, n)
        self.device.launch(
            f"gather_rows_{unit}", n * units, storage, out, slots, slots, out, page_bytes, self.rows_per_page, units, n
        )

    def _give_up(self, decide: Callable[[cpu.EmbeddingState], int]) -> int:
        """Let `decide` give pages up, on the host and by the CPU backend's kernels, and erase what was on them.

        The pool calls them FREE already, but nobody can have them before its lock, and no launch comes before these.
        """
        self._check_published()
        emb, pages = self.state, self._pages()
        filled = pages.fill.copy()
        generation = self.pool.generation.copy()
        count = decide(pages)
        self._send_pages(pages)
        for page in np.flatnonzero(self.pool.generation != generation):
            rows = int(filled[page])
            if rows:
                self._may_be_stale = True
                self.device.launch(
                    "unpublish_page", rows, emb.index, emb.row, emb.spot, emb.counters, emb.scalars, int(page), rows
                )
        return count

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal, as the CPU backend's `accept_pages`; return how many."""
        pool, member = self.pool, self.member
        if pool.owned[member] >= pool.goal[member] or pool.scalars[FREE_COUNT] == 0:
            return 0
        self._check_published()
        pages = self._pages()
        came = int(cpu.accept_pages(pages, pool, budget))
        self._send_pages(pages)
        return came

    def start_anew(self) -> None:
        """Forget all rows, whatever an interrupt left behind: pages are as when they came. Counters stay.

        Pages that leases hold take no rows before they have changed hands.
        """
        pool, member, device = self.pool, self.member, self.device
        host = cpu.new_embedding_state(pool.owner.size, self.rows_per_page, self._max_pages, member, self._policy)
        owned = pool.lists[member, : pool.owned[member]]
        fresh = owned[(pool.draining[owned] == 0) & (pool.pins[owned] == 0)]
        host.fill[owned] = self.rows_per_page
        host.fill[fresh] = 0
        host.fresh[: fresh.size] = fresh
        host.scalars[cpu.N_FRESH] = fresh.size
        host.scalars[cpu.NOW] = device.read(self.state.scalars)[cpu.NOW]
        host.counters[:] = device.read(self.state.counters)
        for array, values in zip(self.state, as_integers(host), strict=True):
            device.write(array, values)
        for sent, array, here in zip(self._sent, self._mirror, self._pool_arrays(), strict=True):
            sent[:] = here
            device.write(array, sent)
        self._may_be_stale = False
        self._n = 0
        self.published = True

    def _pages(self) -> cpu.EmbeddingState:
        """Return on the host what the CPU backend decides about pages by.

        Records of slots that are not live, and a `spot` that is EMPTY wherever one looks, make it leave the rest alone.
        """
        emb, device = self.state, self.device
        nothing = np.zeros(1, np.int64)
        none = np.full(1, cpu.EMPTY, np.int32)
        return cpu.EmbeddingState(
            word=nothing.view(np.uint64),
            tag=nothing.view(np.uint8),
            slot=none,
            row=self._row,
            queue=none,
            spot=np.lib.stride_tricks.as_strided(none, (self._row.size,), (0,)),
            fill=device.read(emb.fill),
            fresh=device.read(emb.fresh),
            scalars=device.read(emb.scalars),
            counters=np.zeros(cpu.N_COUNTERS, np.int64),
        )

    def _read_heat(self, cursor: int) -> None:
        """Read the times of last use by which `release_pages` may compare pages for the next one to give up.

        It compares CANDIDATES of those neither pinned nor draining, in the order of the list, from the cursor on.
        """
        pool, rows_per_page = self.pool, self.rows_per_page
        ring = np.roll(pool.lists[self.member, : pool.owned[self.member]], -cursor)
        comparable = np.cumsum((pool.pins[ring] == 0) & (pool.draining[ring] == 0))
        pages = ring[: np.searchsorted(comparable, cpu.CANDIDATES) + 1]
        sample = np.arange(0, rows_per_page, max(1, rows_per_page // cpu.SAMPLE), dtype=np.int32)
        slots = (pages[:, None] * np.int32(rows_per_page) + sample).ravel()
        if slots.size:
            values = self.device.empty(slots.size, np.uint32)
            self.device.launch("read_last", slots.size, self.state.row, self.device.array(slots), values, slots.size)
            self._row["last"][slots] = self.device.read(values)

    def _send_pages(self, pages: cpu.EmbeddingState) -> None:
        for name in ("fill", "fresh", "scalars"):
            self.device.write(getattr(self.state, name), getattr(pages, name))

    def _pool_arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.pool.pins, self.pool.draining, self.pool.lists[self.member]

    def _send_pool(self) -> None:
        for sent, array, here in zip(self._sent, self._mirror, self._pool_arrays(), strict=True):
            if not np.array_equal(sent, here):
                self.device.write(array, here)
                sent[:] = here

    def _batch(self, tables: Any, keys: Any) -> tuple[Any, Any]:
        for array, dtype, name in ((tables, np.int16, "tables"), (keys, np.int64, "keys")):
            if array.dtype != dtype:
                raise TypeError(f"{name} must be {np.dtype(dtype)}, got {array.dtype}")
            if array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be one-dimensional and contiguous, got shape {array.shape}")
        if tables.size != keys.size:
            raise ValueError(f"tables must have one entry per key: {tables.size} for {keys.size} keys")
        if keys.size >= 2**29:
            raise ValueError(f"a batch must have fewer than 2**29 keys, got {keys.size}")
        tables, keys = (self.device.array(a) if isinstance(a, np.ndarray) else a for a in (tables, keys))
        return tables, keys

    def _check_published(self) -> None:
        if not self.published:
            raise RuntimeError("publish (or retract) the last batch first")

    def _new_scratch(self, batch: int) -> CudaScratch:
        empty = self.device.empty
        places = _places(batch)
        words = -(-batch // 32)
        groups = -(-batch // _GROUP_BITS)
        chunk = _EXAMINED * batch if self._policy == cpu.SIEVE else 0
        chunk_groups = -(-chunk // _GROUP_BITS)
        return CudaScratch(
            slots=empty(batch, np.int32),
            miss=empty(batch, np.int32),
            first=empty(batch, np.int32),
            place=empty(batch, np.int32),
            miss_slot=empty(batch, np.int32),
            cell=empty(batch, np.int32),
            seen=empty(places, np.int32),
            group=empty(batch, np.int32),
            group_set=empty(places, np.int32),
            group_top=empty(places * cpu.WAYS, np.int32),
            first_bits=empty(words, np.uint32),
            waiting_bits=empty(words, np.uint32),
            victims=empty(batch, np.int32),
            victim_bits=empty(-(-chunk // 32), np.uint32),
            survivor_bits=empty(-(-chunk // 32), np.uint32),
            victim_bases=empty(chunk_groups, np.int32),
            survivor_bases=empty(chunk_groups, np.int32),
            sums=empty(max(groups, chunk_groups), np.int32),
            first_bases=empty(groups, np.int32),
            waiting_bases=empty(groups, np.int32),
            totals=empty(N_TOTALS, np.int64),
            gone=empty(1, np.int64),
        )


def as_integers(emb: cpu.EmbeddingState) -> tuple[npt.NDArray[Any], ...]:
    """Return the arrays of a state as CudaState has them, without a copy."""
    return (emb.slot, emb.row.view(np.uint64), *emb[4:])


def _places(n: int) -> int:
    return max(_LEAST_PLACES, 1 << max(0, 2 * n - 1).bit_length())


def _units(row_bytes: int, page_bytes: int, rows: int) -> tuple[int, int]:
    """Return the bytes of the widest unit that rows can be copied in, and units per row."""
    unit = next(u for u in (16, 4, 1) if row_bytes % u == 0 and page_bytes % u == 0)
    units = row_bytes // unit
    if rows * units >= 2**31:
        raise ValueError(f"{rows} rows of {row_bytes} bytes are too many for one batch: copy fewer than 2**31 units")
    return unit, units
