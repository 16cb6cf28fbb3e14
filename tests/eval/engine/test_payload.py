"""Payload checks: operations that move everything, and that a wrong byte would be found."""

from __future__ import annotations

import numpy as np
import pytest

from cache_engine import EmbeddingCache, KvCache
from eval.engine.caches import DEFAULT_POLICY, POLICIES
from eval.engine.payload import PayloadRun, page_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_random_operations_serve_right_bytes_only(policy: str) -> None:
    run = PayloadRun(3, policy)
    assert run._emb.policy == policy
    run.run(5_000)
    served = run.finish()
    assert served.operations == 5_000
    assert served.rows > 50_000
    assert served.pages > 5_000
    assert served.moved > 200
    assert served.wrong_bytes == 0


def test_a_wrong_row_is_counted_by_the_byte() -> None:
    run = PayloadRun(3, DEFAULT_POLICY)
    run.run(500)
    lookup = EmbeddingCache.lookup

    def one_bit_off(self, *args, **kwargs):
        found = lookup(self, *args, **kwargs)
        if found.rows.size:
            found.rows[0, 0] ^= 1
        return found

    EmbeddingCache.lookup = one_bit_off  # type: ignore[method-assign]
    try:
        for _ in range(20):
            run._look_up()
    finally:
        EmbeddingCache.lookup = lookup  # type: ignore[method-assign]
    assert 15 <= run.served.wrong_bytes <= 20  # empty batches have none


def test_a_page_of_another_user_is_found() -> None:
    run = PayloadRun(4, DEFAULT_POLICY)
    run.run(2_000)
    assert run.served.wrong_bytes == 0
    pages = KvCache.pages

    def swapped(self, user):
        return pages(self, user)[::-1]

    KvCache.pages = swapped  # type: ignore[method-assign]
    try:
        for _ in range(200):
            run._visit()
    finally:
        KvCache.pages = pages  # type: ignore[method-assign]
    assert run.served.wrong_bytes > 1_000


def test_pages_differ_by_user_epoch_and_index() -> None:
    seen = {page_bytes(*key).tobytes() for key in np.ndindex(4, 4, 4)}
    assert len(seen) == 64
