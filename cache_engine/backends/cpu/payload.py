"""Kernels that copy rows: host table to slot, slot to the caller."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel

Bytes = npt.NDArray[np.uint8]


@kernel
def store_rows(storage: Bytes, page_bytes: int, rows_per_page: int, slots: npt.NDArray[np.int32], rows: Bytes) -> None:
    """Copy rows[r] into slot slots[r] of the pool's bytes; slot -1 is passed over. rows: [m, row_bytes]."""
    row_bytes = rows.shape[1]
    for r in range(rows.shape[0]):
        slot = slots[r]
        if slot >= 0:
            at = (slot // rows_per_page) * page_bytes + (slot % rows_per_page) * row_bytes
            for b in range(row_bytes):
                storage[at + b] = rows[r, b]


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
    row_bytes = out.shape[1]
    for i in range(out.shape[0]):
        slot = slots[i]
        if slot >= 0:
            at = (slot // rows_per_page) * page_bytes + (slot % rows_per_page) * row_bytes
            for b in range(row_bytes):
                out[i, b] = storage[at + b]
        else:
            for b in range(row_bytes):
                out[i, b] = staged[miss[i], b]
