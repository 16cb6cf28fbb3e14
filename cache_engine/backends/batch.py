"""Batches as callers give them, checked, in the types of the kernels; and the rows of host tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel

Bytes = npt.NDArray[np.uint8]

_MOST_KEPT = 1 << 14  # keys
_CPU_MEMORY = (1, 3, 11)  # DLPack's device types whose bytes the host can read: CPU, CUDA host, ROCm host


def as_numpy(values: Any, what: str) -> Any:
    """Return a NumPy array over the memory of an object with DLPack, no copy; anything else as it is.

    Args:
        values: the object.
        what: how an error begins: "ids are", "out is".

    Raises:
        ValueError: its memory is that of a GPU.
    """
    if isinstance(values, np.ndarray) or not hasattr(values, "__dlpack_device__"):
        return values
    if int(values.__dlpack_device__()[0]) not in _CPU_MEMORY:
        raise ValueError(f"{what} in a GPU's memory, where this needs memory of the host")
    return np.from_dlpack(values)


def as_ids(array: Any, what: str) -> npt.NDArray[np.int64]:
    """Return integers of any layout as the int64 array that kernels are compiled for."""
    if _is_plain(array, np.int64):
        return array  # as it nearly always is: what follows takes several microseconds
    ids = np.asarray(as_numpy(array, f"{what} are"))
    if ids.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got shape {ids.shape}")
    if ids.dtype.kind not in "iu" and ids.size:
        raise TypeError(f"{what} must be integers, got {ids.dtype}")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.uint64(2**63 - 1):
        raise ValueError(f"{what} must fit int64, got {ids.max()}; map them to dense codes or view them as int64")
    # One layout: kernels would be compiled anew for arrays that are read-only, strided or not aligned.
    return np.require(ids, np.int64, ("C", "ALIGNED", "WRITEABLE"))


def _is_plain(array: Any, dtype: type) -> bool:
    """Tell whether it is a one-dimensional array of that type, of the layout that kernels are compiled for."""
    return type(array) is np.ndarray and array.ndim == 1 and array.dtype == dtype and array.flags.carray


def host_batch(ids: Any, tables: Any, table_count: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return (tables, keys) of a batch; `tables` is one number for all, or one for each id."""
    keys = as_ids(ids, "ids")
    if isinstance(tables, (int, np.integer)):
        if not 0 <= tables < table_count:
            raise ValueError(f"tables must be in [0, {table_count}), got {tables}")
        return (_same if keys.size <= _MOST_KEPT else _same.__wrapped__)(int(tables), keys.size), keys
    # As kernels take them, unless they are something else: conversions there and back take as long as a look-up.
    numbers: npt.NDArray[np.integer] = tables if _is_plain(tables, np.int16) else as_ids(tables, "tables")
    if numbers.size != keys.size:
        raise ValueError(f"tables must have one entry per id: {numbers.size} for {keys.size} ids")
    if _outside(numbers, table_count) >= 0:
        raise ValueError(f"tables must be in [0, {table_count}), got {numbers.min()}..{numbers.max()}")
    return numbers.astype(np.int16, copy=False), keys


@functools.lru_cache(64)
def _same(table: int, n: int) -> npt.NDArray[np.int16]:
    """Return [n] times the table, kept for the next batch of that size: nobody writes to it."""
    return np.full(n, table, np.int16)


def check_rows(tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], limits: npt.NDArray[np.int64]) -> None:
    """Raise ValueError for the first key that is no row of its table; `limits`: rows of each table."""
    i = _first_unknown(tables, keys, limits)
    if i >= 0:
        raise ValueError(f"ids[{i}] = {keys[i]} is not a row of table {tables[i]}, which has {limits[tables[i]]}")


@kernel
def _first_unknown(tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], limits: npt.NDArray[np.int64]) -> int:
    """Return the first key that is no row of its table, -1: none. With NumPy that took as long as a look-up."""
    for i in range(keys.size):
        if keys[i] < 0 or keys[i] >= limits[tables[i]]:
            return i
    return -1


@kernel
def _outside(numbers: npt.NDArray[np.integer], limit: int) -> int:
    """Return the first number outside [0, limit), -1: none."""
    for i in range(numbers.size):
        if numbers[i] < 0 or numbers[i] >= limit:
            return i
    return -1


def as_rows(table: Any, row_bytes: int, number: int) -> Bytes:
    """Return a host table as bytes [rows, width], no copy."""
    array = as_numpy(table, f"table {number} is")
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise TypeError(f"table {number} must be a NumPy array of plain values, got {type(table).__name__}")
    if array.ndim < 2 or not array.flags.c_contiguous or not all(array.shape[1:]):
        raise ValueError(f"table {number} must be a C-contiguous array [rows, ...], got shape {array.shape}")
    rows = array.reshape(array.shape[0], math.prod(array.shape[1:])).view(np.uint8)
    if rows.shape[1] > row_bytes:
        raise ValueError(f"rows of table {number} have {rows.shape[1]} bytes, more than row_bytes={row_bytes}")
    return rows


def read_rows(tables: Sequence[Bytes], numbers: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], out: Bytes) -> None:
    """Copy row keys[i] of table numbers[i] into out[i], zeros after the width of its table."""
    for k in np.unique(numbers) if len(tables) > 1 else (0,) if keys.size else ():
        at = numbers == k if len(tables) > 1 else slice(None)
        rows = tables[k]
        width = rows.shape[1]
        if len(tables) == 1 and width == out.shape[1] and type(rows) is np.ndarray:
            np.take(rows, keys, axis=0, out=out, mode="clip")  # in range already; "raise" would copy twice
        else:
            out[at, :width] = rows[keys[at]]
            out[at, width:] = 0
