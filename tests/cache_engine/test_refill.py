"""Rows admitted in the background, on the CPU backend; what differs on a device is in backends/test_cuda_cache.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cache_engine import EmbeddingCache, EmbeddingStats, HbmPool
from cache_engine import refill as refills
from tests.cache_engine.invariants import check


def build(pages: int = 8, tables: Any = None) -> tuple[HbmPool, EmbeddingCache]:
    """The embedding cache alone, with all pages of the pool: four rows of 16 bytes each."""
    pool = HbmPool(pages, 64, ("emb",), min_pages=0)
    emb = EmbeddingCache(pool, row_bytes=16, tables=[numbers()] if tables is None else tables)
    pool.set_goals({"emb": pages}, 0)
    pool.migrate(pages)
    return pool, emb


def numbers() -> np.ndarray:
    return np.arange(800, dtype=np.int32).reshape(200, 4)


@pytest.fixture
def four_rows_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refills, "CHUNK_BYTES", 64)


def test_a_refill_is_no_request(four_rows_a_copy: None) -> None:
    pool, emb = build()
    emb.lookup(np.array([2, 3]))
    emb.stats()
    assert emb.refill(np.array([0, 1, 2, 1, 0, 3, 4, 5, 6])) == 5, "distinct rows that are not cached"
    assert emb.advance_refill(wait=True) == 0
    check(pool, emb)
    assert emb.stats() == EmbeddingStats(
        requested=0, hits=0, misses=0, fetched=0, bypassed=0, evicted=0, link_bytes=5 * 16, refilled=5
    )
    answer = emb.lookup(np.arange(7))
    assert answer.hit.all()
    assert (answer.rows.view(np.int32) == numbers()[:7]).all()


def test_each_lookup_moves_a_refill_one_copy_on(four_rows_a_copy: None) -> None:
    _, emb = build()
    waiting = [emb.refill(np.arange(10))]
    found = []
    for _ in range(4):
        found.append(emb.lookup(np.array([0, 4, 8])).hit.tolist() if len(found) == 3 else emb.lookup([]).hit.tolist())
        waiting.append(emb._refill.waiting)
    assert waiting == [10, 6, 2, 0, 0]
    assert found[3] == [True] * 3


def test_a_refill_takes_the_place_of_the_oldest_and_never_of_leased_rows() -> None:
    pool, emb = build(pages=2)
    slots = emb.lookup(np.arange(4)).slots
    emb.lookup(np.arange(4, 8))
    with emb.lease(slots):
        emb.refill(np.arange(20, 30))
        emb.advance_refill(wait=True)
        check(pool, emb)
        assert emb.lookup(np.arange(4)).hit.all()
    stats = emb.stats()
    assert stats.refilled == 10, "all were copied"
    assert 0 < stats.evicted <= 4
    assert stats.bypassed == 0, "rows without a slot are not served past the cache: nobody asked for them"


def test_rows_that_cannot_be_read_are_given_up_and_told_of_once(four_rows_a_copy: None) -> None:
    class Failing(np.ndarray):
        broken = False

        def __getitem__(self, key: Any) -> Any:
            if Failing.broken:
                raise OSError("input/output error")
            return super().__getitem__(key)

    pool, emb = build(tables=[numbers().view(Failing)])
    emb.refill(np.arange(8))
    Failing.broken = True
    assert emb.lookup(np.zeros(0, np.int64)).fetched == 0, "a lookup does not pay for it"
    Failing.broken = False
    with pytest.raises(OSError, match="input/output"):
        emb.refill(np.arange(100))
    assert emb.refill(np.arange(20, 24)) == 4
    emb.advance_refill(wait=True)
    assert emb.lookup(np.array([0, 3, 4, 7, 20])).hit.tolist() == [True, True, False, False, True]
    check(pool, emb)


def test_an_update_between_copy_and_admission_is_seen() -> None:
    rows = numbers()
    _, emb = build(tables=[rows])
    emb.refill(np.arange(4))
    rows[2] = -7
    assert emb.invalidate(np.array([2])) == 0
    emb.advance_refill(wait=True)
    answer = emb.lookup(np.arange(4))
    assert answer.hit.all()
    assert (answer.rows.view(np.int32) == rows[:4]).all()


def test_a_partition_of_no_pages_takes_nothing() -> None:
    pool = HbmPool(4, 64)
    emb = EmbeddingCache(pool, row_bytes=16, tables=[numbers()])
    emb.refill(np.arange(4))
    assert emb.advance_refill(wait=True) == 0
    assert not emb.lookup(np.arange(4)).hit.any()
    check(pool, emb)


def test_wrong_rows_are_refused_and_nothing_waits() -> None:
    _, emb = build()
    with pytest.raises(ValueError, match=r"ids\[1\] = 200 is not a row"):
        emb.refill(np.array([1, 200]))
    with pytest.raises(TypeError, match="ids must be integers"):
        emb.refill(np.array([1.5]))
    assert emb.advance_refill() == 0
