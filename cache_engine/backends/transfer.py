"""Rows of host tables on their way to a device: read by a kernel out of page-locked memory, or staged by the CPU."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.batch import read_rows
from cache_engine.backends.device import CHUNK_BYTES, Device, Event, Mapping, is_mapped_file

Bytes = npt.NDArray[np.uint8]

RING = 4  # page-locked buffers of a lane: the CPU fills one while others are copied
TRIAL_BYTES = 8 << 20  # of the rows by which the two paths are compared


class Lane:
    """One stream's way to the device, with page-locked buffers for the rows that the CPU collects."""

    def __init__(self, device: Device, row_bytes: int, buffers: int) -> None:
        self.device = device
        self.rows = max(1, CHUNK_BYTES // row_bytes)  # of a buffer
        self._row_bytes = row_bytes
        self._events: list[Event | None] = [None] * buffers
        self._buffers: list[Bytes | None] = [None] * buffers
        self._next = 0

    def stage(self, m: int, fill: Callable[[Bytes], None], to: Any) -> None:
        """Let `fill` write m rows into the next buffer, once it is free, and begin to copy them into `to`."""
        at = self._next
        self._next = (at + 1) % len(self._buffers)
        buffer = self._buffers[at]
        if buffer is None:
            buffer = self._buffers[at] = self.device.pinned(self.rows * self._row_bytes)
        event = self._events[at]
        if event is not None:
            event.wait()
        rows = buffer[: m * self._row_bytes].reshape(m, self._row_bytes)
        fill(rows)
        self.device.send(to, rows)
        self._events[at] = self.device.record()


class HostTables:
    """Tables in the host's memory, and how their rows reach a device.

    Args:
        tables: bytes [rows, width] each.
        row_bytes: width of a row on the device; zeros follow shorter ones.
        device: with the stream of foreground fetches.
        gather: "zero-copy", "staging", or "auto" for what is measured to be faster.

    Attributes:
        gather: the one that was chosen.

    Raises:
        ValueError: "zero-copy" for tables that a kernel cannot read.
    """

    def __init__(self, tables: Sequence[Bytes], row_bytes: int, device: Device, gather: str) -> None:
        self._tables = list(tables)
        self._row_bytes = row_bytes
        self._copies: dict[int, Bytes] = {}
        self._release: Callable[[], object] = _nothing
        self.gather = "staging"
        if gather != "staging" and self._map(device, gather == "zero-copy"):
            self.gather = "zero-copy" if gather == "zero-copy" else self._faster(device)
            if self.gather == "staging":
                self.close()

    def fetch(self, lane: Lane, tables: Any, keys: Any, first: Any, m: int, to: Any) -> None:
        """Begin to copy the rows of keys[first[:m]] into to[:m], all arrays of the device, on the lane's stream."""
        device = lane.device
        if self.gather == "zero-copy":
            units = self._row_bytes // self._unit
            device.launch(
                f"fetch_rows_{self._unit}", m * units, self._addresses, self._widths, keys, tables, first, to, units, m
            )
            return
        missed_keys, missed_tables = device.empty(m, np.int64), device.empty(m, np.int16)
        device.launch("pick_keys", m, keys, tables, first, missed_keys, missed_tables, m)
        self.stage(lane, device.read(missed_tables), device.read(missed_keys), to)

    def stage(self, lane: Lane, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], to: Any) -> None:
        """Let the CPU collect rows, and begin to copy them into `to`."""
        for at in range(0, keys.size, lane.rows):
            part = slice(at, min(at + lane.rows, keys.size))
            fill = functools.partial(read_rows, self._tables, tables[part], keys[part])
            lane.stage(part.stop - at, fill, to[part])

    def refresh(self, device: Device, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> None:
        """Let page-locked copies follow an update of these rows; ids that are no rows are passed over."""
        device.record().wait()  # no kernel reads a copy while it changes
        for k, copy in self._copies.items():
            rows = keys[tables == k]
            rows = rows[(rows >= 0) & (rows < copy.shape[0])]
            copy[rows] = self._tables[k][rows]

    @property
    def has_copies(self) -> bool:
        """Whether `refresh` has anything to do."""
        return bool(self._copies)

    def close(self) -> None:
        """Undo the page-locking; call when no kernel reads the tables any more."""
        self._release()
        self._copies.clear()

    def _map(self, device: Device, required: bool) -> bool:
        mappings: list[Mapping] = []
        # Memory that stays registered after its array has gone would be taken for whatever comes to its address.
        release = weakref.finalize(self, _release_all, mappings)
        release.atexit = False  # the driver may be gone by then
        self._release = release
        for k, table in enumerate(self._tables):
            mapping = device.map(table)
            if mapping is None and not is_mapped_file(table):
                copy = device.pinned(table.nbytes).reshape(table.shape)
                copy[:] = table
                self._copies[k] = copy
                mapping = device.map(copy)
            if mapping is None:
                self.close()
                if required:
                    raise ValueError(f"table {k} is a memory-mapped file, whose rows can only be staged")
                return False
            mappings.append(mapping)
        sizes = [self._row_bytes, *(t.shape[1] for t in self._tables), *(m.address for m in mappings)]
        self._unit = next(unit for unit in (16, 4, 1) if all(size % unit == 0 for size in sizes))
        self._addresses = device.array(np.array([m.address for m in mappings], np.int64))
        self._widths = device.array(np.array([t.shape[1] for t in self._tables], np.int64))
        return True

    def _faster(self, device: Device) -> str:
        """Return the path that copies random rows of the largest table in less time."""
        k = int(np.argmax([t.shape[0] for t in self._tables]))
        rows = self._tables[k].shape[0]
        if not rows:
            return "zero-copy"
        m = max(1, min(TRIAL_BYTES // self._row_bytes, 65_536))
        keys = device.array(np.random.default_rng(0).integers(0, rows, m))
        tables = device.array(np.full(m, k, np.int16))
        first = device.array(np.arange(m, dtype=np.int32))
        to = device.empty((m, self._row_bytes), np.uint8)
        lane = Lane(device, self._row_bytes, RING)
        best: dict[str, float] = {}
        for path in ("zero-copy", "staging") * 4:
            self.gather = path
            start = time.perf_counter()
            self.fetch(lane, tables, keys, first, m, to)
            device.record().wait()
            best[path] = min(best.get(path, np.inf), time.perf_counter() - start)
        return min(best, key=best.__getitem__)


def _release_all(mappings: list[Mapping]) -> None:
    while mappings:
        mappings.pop().release()


def _nothing() -> None:
    pass
