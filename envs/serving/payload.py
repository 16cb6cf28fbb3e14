"""Bytes that tell where they are from: rows a function of (table, id), KV pages of (user, epoch, page index).

So whatever is served can be checked byte for byte without keeping a second copy of it. Taken for bf16 or float32, they
are numbers of magnitude .5 to 1 of either sign, which a network can compute with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix, mix2
from cache_engine.jit import inner, kernel

Bytes = npt.NDArray[np.uint8]

_PAGE = np.uint64(0x9A6E)  # apart from rows
_S3 = np.uint64(3)
_BYTE = np.uint64(0xFF)
# Of every 16 bits sign and mantissa of a bf16 are random, its exponent is -1; of a float32 they are the upper half.
_RANDOM = np.uint64(0x807F807F807F807F)
_EXPONENT = np.uint64(0x3F003F003F003F00)


def make_table(table: int, rows: int, row_bytes: int) -> Bytes:
    """Return host table `table`, [rows, row_bytes] uint8."""
    made = np.empty((rows, row_bytes), np.uint8)
    _fill_table(made, table)
    return made


@kernel
def _fill_table(rows: Bytes, table: int) -> None:
    for i in range(rows.shape[0]):
        _fill(rows[i], mix2(np.uint64(table), np.uint64(i)))


@kernel
def wrong_row_bytes(rows: Bytes, tables: npt.NDArray[np.int16], ids: npt.NDArray[np.int64]) -> int:
    """Return how many bytes of `rows`, [n, row_bytes], are not those of (tables[i], ids[i])."""
    wrong = 0
    for i in range(rows.shape[0]):
        wrong += _wrong(rows[i], mix2(np.uint64(tables[i]), np.uint64(ids[i])))
    return wrong


@kernel
def fill_page(page: Bytes, user: int, epoch: int, index: int) -> None:
    """Write what the keys and values of page `index` of a user's history stand for into `page`, [page_bytes]."""
    _fill(page, _page_seed(user, epoch, index))


@kernel
def wrong_page_bytes(page: Bytes, user: int, epoch: int, index: int) -> int:
    """Return how many bytes of `page` are not those that `fill_page` writes."""
    return _wrong(page, _page_seed(user, epoch, index))


@inner
def _page_seed(user: int, epoch: int, index: int) -> np.uint64:
    return mix2(mix2(np.uint64(user), np.uint64(epoch)), np.uint64(index)) ^ _PAGE


@inner
def _word(seed: np.uint64, at: int) -> np.uint64:
    return mix(seed + np.uint64(at)) & _RANDOM | _EXPONENT


@inner
def _fill(out: Bytes, seed: np.uint64) -> None:
    whole = out.size // 8
    for w in range(whole):
        word = _word(seed, w)
        for b in range(8):
            out[8 * w + b] = np.uint8((word >> (np.uint64(b) << _S3)) & _BYTE)
    word = _word(seed, whole)
    for b in range(8 * whole, out.size):
        out[b] = np.uint8((word >> (np.uint64(b - 8 * whole) << _S3)) & _BYTE)


@inner
def _wrong(found: Bytes, seed: np.uint64) -> int:
    wrong = 0
    whole = found.size // 8
    for w in range(whole):
        word = _word(seed, w)
        for b in range(8):
            wrong += found[8 * w + b] != np.uint8((word >> (np.uint64(b) << _S3)) & _BYTE)
    word = _word(seed, whole)
    for b in range(8 * whole, found.size):
        wrong += found[b] != np.uint8((word >> (np.uint64(b - 8 * whole) << _S3)) & _BYTE)
    return wrong
