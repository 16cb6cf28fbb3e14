"""Arguments of the wrong type: a TypeError that names them, or what an integer of NumPy's means."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool


def pool(**options: Any) -> HbmPool:
    return HbmPool(4, 256, **options)


def cache(**options: Any) -> EmbeddingCache:
    return EmbeddingCache(pool(payload=False), **({"row_bytes": 64} | options))


def with_payload(tables: Any = None) -> EmbeddingCache:
    return EmbeddingCache(pool(), row_bytes=64, tables=[np.zeros((8, 64), np.uint8)] if tables is None else tables)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cache(row_bytes=64.0), "row_bytes must be an integer, got 64.0"),
        (lambda: cache(row_bytes="64"), "row_bytes must be an integer, got '64'"),
        (lambda: cache(max_pages=2.5), "max_pages must be an integer, got 2.5"),
        (lambda: cache(tables=True), "tables must be a sequence of arrays, or their number, got True"),
        (lambda: with_payload(False), "tables must be a sequence of arrays, or their number, got False"),
        (lambda: cache(tables=2.0), "tables must be a sequence of arrays, or their number, got 2.0"),
        (lambda: with_payload().lookup([1], out=[1]), "out must be an array, got list"),
        (lambda: pool(drain_limit_s="1"), "drain_limit_s must be a number, got '1'"),
        (lambda: pool(backend="cuda", device="cuda:0"), "device must be a Device, such as CupyDevice(), got 'cuda:0'"),
        (lambda: pool().migrate(1, relocate="yes"), "relocate must be True, False or None, got 'yes'"),  # type: ignore
        (lambda: pool().set_target("x", 0), "alpha must be a number, got 'x'"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_type_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call()


def test_integers_of_numpy_are_integers() -> None:
    emb = cache(row_bytes=np.int32(64), max_pages=np.int64(3), tables=np.int64(3))
    assert (emb.table_count, emb.rows_per_page) == (3, 4)
    assert {type(emb.table_count), type(emb.row_bytes)} == {int}
    with pytest.raises(ValueError, match="needs the tables themselves"):
        with_payload(np.int64(3))
