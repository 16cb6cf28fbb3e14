"""Kernels that copy rows: host table to slot, slot to the caller."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_engine.jit import copy_bytes, inner, kernel, prefetch

Bytes = npt.NDArray[np.uint8]

_AHEAD = 8  # rows


@inner
def row_place(slot: int, page_bytes: int, rows_per_page: int, row_bytes: int) -> int:
    """Return where the slot's row begins in the pool's bytes."""
    return (slot // rows_per_page) * page_bytes + (slot % rows_per_page) * row_bytes


@kernel
def store_rows(storage: Bytes, page_bytes: int, rows_per_page: int, slots: npt.NDArray[np.int32], rows: Bytes) -> None:
    """Copy rows[r] into slot slots[r] of the pool's bytes; slot -1 is passed over. rows: [m, row_bytes]."""
    row_bytes = rows.shape[1]
    flat = rows.reshape(-1)
    for r in range(rows.shape[0]):
        slot = slots[r]
        if slot >= 0:
            copy_bytes(storage, row_place(slot, page_bytes, rows_per_page, row_bytes), flat, r * row_bytes, row_bytes)


@kernel
def gather_rows(
    storage: Bytes,
    page_bytes: int,
    rows_per_page: int,
    slots: npt.NDArray[np.int32],
    miss: npt.NDArray[np.int32],
    staged: Bytes,
    out: Bytes,
) -> None:
    """Copy key i's row into out[i]: from its slot, or from staged[miss[i]] where it is served past the cache."""
    n, row_bytes = out.shape
    to = out.reshape(-1)
    beside = staged.reshape(-1)
    for i in range(n):
        soon = slots[min(i + _AHEAD, n - 1)]
        prefetch(storage, row_place(max(soon, 0), page_bytes, rows_per_page, row_bytes))
        slot = slots[i]
        if slot >= 0:
            copy_bytes(to, i * row_bytes, storage, row_place(slot, page_bytes, rows_per_page, row_bytes), row_bytes)
        else:
            copy_bytes(to, i * row_bytes, beside, miss[i] * row_bytes, row_bytes)
