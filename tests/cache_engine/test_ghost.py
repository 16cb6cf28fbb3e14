"""Ghosts of real caches: what they say that other sizes would gain, against caches of those sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool, KvCache
from cache_engine.ghost import BIAS, Ghost
from tests.cache_engine.backends.cpu.test_ghost import zipf

ROWS = 64  # per page


def make_cache(pages: int, owned: int, rate: float | None = None) -> EmbeddingCache:
    pool = HbmPool(pages, 64 * ROWS, ("emb",), payload=False)
    emb = EmbeddingCache(pool, row_bytes=64, tables=3, policy="lru", ghost=True)
    if rate is not None:
        emb.ghost = Ghost(pool, "emb", max_pages=pages, units_per_page=ROWS, rate=rate)
    pool.set_goals({"emb": owned}, 1)
    pool.migrate(owned)
    return emb


def look_up(emb: EmbeddingCache, keys: np.ndarray) -> float:
    """Hit ratio of batches of 64."""
    for batch in keys.reshape(-1, 64):
        emb.lookup(batch)
    stats = emb.stats()
    return stats.hits / stats.requested


def test_gains_and_losses_of_a_followed_stream() -> None:
    """Every key followed: what is left is the smoothing, the batches, and windows of victims instead of exact LRU."""
    warm, keys = zipf(0, 512_000, 20_000, 0.9).reshape(2, -1)
    hits = {}
    for owned in (60, 80, 100):
        emb = make_cache(160, owned, rate=1.0)
        look_up(emb, warm)
        assert emb.ghost is not None
        emb.ghost.reset()
        hits[owned] = look_up(emb, keys)
        if owned == 80:
            ghost = emb.ghost
    assert ghost.requests == keys.size
    for pages in (20, -20):
        gain = ghost.gain(pages)
        assert gain.hits_per_request == pytest.approx(hits[80 + pages] - hits[80], rel=0.06)
        assert gain.standard_error == pytest.approx(BIAS * abs(gain.hits_per_request))
    assert ghost.gain(0) == (0.0, 0.0)
    assert ghost.gain(-80).hits_per_request == pytest.approx(-hits[80], rel=0.01)


def test_a_sample_errs_as_much_as_it_says() -> None:
    """Forty samples of an eighth of the keys against all of them: two standard errors hold in about 95 of 100."""
    keys = zipf(1, 256_000, 20_000, 0.9)
    whole = make_cache(160, 80, rate=1.0)
    look_up(whole, keys)
    assert whole.ghost is not None
    truth = whole.ghost.gain(16).hits_per_request
    within = 0
    errors = []
    for k in range(40):
        ghost = Ghost(whole._pool, "emb", max_pages=160, units_per_page=ROWS, rate=0.125)
        ghost.feed_rows(np.zeros(keys.size, np.int16), keys + (k << 32))
        gain = ghost.gain(16)
        within += abs(gain.hits_per_request - truth) <= 2 * gain.standard_error
        errors.append(gain.hits_per_request / truth - 1)
    assert within >= 34  # 38 expected
    assert abs(np.mean(errors)) < 0.04
    assert 0.02 < np.std(errors) < 0.15


def test_tables_are_told_apart() -> None:
    """One id in two tables is two keys: loops over 60 rows fit one page of 64, over 120 they need a second."""
    for tables, gains in ((1, (-1.0, 0.0)), (2, (0.0, 1.0))):
        emb = make_cache(4, 1, rate=1.0)
        assert emb.ghost is not None
        for _ in range(3):
            emb.ghost.reset()
            for table in range(tables):
                emb.lookup(np.arange(60), table)
        assert (emb.ghost.gain(-1).hits_per_request, emb.ghost.gain(1).hits_per_request) == pytest.approx(gains)


def test_a_window_begins_anew_and_remembers_the_keys() -> None:
    emb = make_cache(8, 4, rate=1.0)
    ghost = emb.ghost
    assert ghost is not None
    assert ghost.gain(1) == (0.0, math.inf)
    keys = np.arange(300)
    emb.lookup(keys)
    assert ghost.gain(4).hits_per_request == 0
    ghost.reset()
    assert ghost.requests == 0
    emb.lookup(keys)
    # All reuses need 300 slots, 4.7 pages: in 8 pages, not in 4. Half of the range looked at is the step.
    assert ghost.gain(4).hits_per_request == pytest.approx(1.0)
    assert ghost.gain(-4).hits_per_request == 0


def test_more_sampled_rows_in_a_batch_than_the_buffer_takes() -> None:
    keys = np.arange(5_000)
    emb = make_cache(160, 160, rate=1.0)
    emb.lookup(keys)
    emb.lookup(keys)
    assert emb.ghost is not None
    assert emb.ghost.gain(-160).hits_per_request == pytest.approx(-0.5)


def test_sizes_that_the_cache_cannot_have_are_refused() -> None:
    ghost = make_cache(8, 3).ghost
    assert ghost is not None
    for pages in (-4, 6, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"pages must be in \[-3, 5\]"):
            ghost.gain(pages)
    with pytest.raises(ValueError, match=r"rate must be in \(0, 1\], got 0"):
        make_cache(8, 3, rate=0.0)


def test_the_sample_follows_the_size_of_the_cache() -> None:
    assert Ghost(HbmPool(8, 64, ("emb",), payload=False), "emb", max_pages=8, units_per_page=1).rate == 1 / 128
    ghost = Ghost(HbmPool(8, 64, ("emb",), payload=False), "emb", max_pages=8, units_per_page=2**20)
    assert ghost.rate == 4096 / 2**23
    assert ghost.metadata_bytes() < 2**20


def test_pages_of_users() -> None:
    """Users of 1 to 8 pages, returning by Zipf's law: gains of pages found per page asked against caches of the size.

    An extension of a large history evicts several tails, so a cache is no exact LRU of pages.
    """
    users = zipf(3, 40_000, 1_000, 0.8)
    tokens = np.random.default_rng(3).integers(1, 8 * 16, 1_000)
    asked = -(-tokens // 16)
    found = {}
    for owned in (600, 750, 900):
        pool = HbmPool(1_200, 1_024, ("kv",), payload=False)
        kv = KvCache(pool, token_bytes=64, ghost=owned == 750)
        pool.set_goals({"kv": owned}, 1)
        pool.migrate(owned)
        hits = 0
        for at, user in enumerate(users.tolist()):
            if at == users.size // 2 and kv.ghost is not None:
                kv.ghost.reset()
            hit = kv.lookup(user, int(tokens[user]))
            if at >= users.size // 2:
                hits += -(-hit // 16)
            kv.extend(user, int(tokens[user]))
        found[owned] = hits / asked[users[users.size // 2 :]].sum()
        if kv.ghost is not None:
            ghost = kv.ghost
    assert ghost.rate == 1.0
    assert ghost.requests == asked[users[users.size // 2 :]].sum()
    for pages in (150, -150):
        assert ghost.gain(pages).hits_per_request == pytest.approx(found[750 + pages] - found[750], rel=0.1)
