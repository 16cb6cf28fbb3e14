"""Ghosts of real caches: what they say that other sizes would gain, against caches of those sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cache_engine import EmbeddingCache, EmbeddingGhost, HbmPool, KvCache, KvGhost
from cache_engine.backends.cpu import embedding
from tests.cache_engine.backends.cpu.test_ghost import zipf

ROWS = 64  # per page
POLICIES = {"lru": embedding.LRU, "sieve": embedding.SIEVE}


def make_cache(pages: int, owned: int, policy: str = "lru", rate: float | None = None) -> EmbeddingCache:
    pool = HbmPool(pages, 64 * ROWS, ("emb",), payload=False)
    emb = EmbeddingCache(pool, row_bytes=64, tables=3, policy=policy, ghost=True)
    if rate is not None:
        emb.ghost = make_ghost(pool, policy, rate)
        emb._backend.sample_below(emb.ghost.limit)
    pool.set_goals({"emb": owned}, 1)
    pool.migrate(owned)
    return emb


def make_ghost(pool: HbmPool, policy: str, rate: float) -> EmbeddingGhost:
    return EmbeddingGhost(pool, "emb", max_pages=pool.pages, rows_per_page=ROWS, policy=POLICIES[policy], rate=rate)


def look_up(emb: EmbeddingCache, keys: np.ndarray) -> float:
    """Hit ratio of batches of 64."""
    for batch in keys.reshape(-1, 64):
        emb.lookup(batch)
    stats = emb.stats()
    return stats.hits / stats.requested


@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_samples_err_as_little_and_as_much_as_they_say(policy: str) -> None:
    """Gains and losses of a tenth of the pages against caches of those sizes; 20 samples of an eighth of the keys."""
    warm, keys = zipf(0, 512_000, 20_000, 0.9).reshape(2, -1)
    hits = {}
    for owned in (72, 80, 88):
        emb = make_cache(160, owned, policy)
        look_up(emb, warm)
        hits[owned] = look_up(emb, keys)
    pool = make_cache(160, 80, policy)._pool
    tables = np.zeros(64, np.int16)
    errors = []
    within = []
    for k in range(20):
        ghost = make_ghost(pool, policy, 0.125)
        for part in (warm, keys):
            ghost.reset()
            for batch in (part + (k << 32)).reshape(-1, 64):
                ghost.feed_keys(tables, batch)
        assert ghost.requests == keys.size
        for pages in (8, -8):
            gain = ghost.gain(pages)
            truth = hits[80 + pages] - hits[80]
            errors.append(gain.hits_per_request / truth - 1)
            within.append(abs(gain.hits_per_request - truth) <= 2 * gain.standard_error)
    # SIEVE's curve bends more at so few slots.
    bias, least_within = {"lru": (0.06, 0.85), "sieve": (0.12, 0.7)}[policy]
    assert abs(np.mean(errors)) < bias
    assert 0.02 < np.std(errors) < 0.12
    assert np.mean(within) >= least_within


def test_with_all_keys_followed_little_is_left_to_err() -> None:
    warm, keys = zipf(2, 256_000, 10_000, 1.0).reshape(2, -1)
    hits = {}
    for owned in (40, 44):
        emb = make_cache(80, owned, rate=1.0)
        look_up(emb, warm)
        assert emb.ghost is not None
        emb.ghost.reset()
        hits[owned] = look_up(emb, keys)
        if owned == 40:
            gain = emb.ghost.gain(4)
    assert gain.hits_per_request == pytest.approx(hits[44] - hits[40], rel=0.08)
    assert gain.standard_error == pytest.approx(0.025 * gain.hits_per_request)


def test_the_miniatures_follow_the_size_of_the_cache() -> None:
    """A loop over 10 pages' rows hits in 12 pages and not in 8: there is much to gain at 10, nothing at 5 and 20."""
    emb = make_cache(40, 10, rate=1.0)
    ghost = emb.ghost
    assert ghost is not None
    loop = np.arange(10 * ROWS).reshape(-1, 64)
    for revision, (owned, gains) in enumerate([(10, True), (20, False), (5, False), (10, True)], start=2):
        emb._pool.set_goals({"emb": owned}, revision)
        emb._pool.migrate(40)
        for again in range(6):
            if again == 5:
                ghost.reset()
            for batch in loop:
                emb.lookup(batch)
        assert (ghost.gain(1).hits_per_request > 0.1) is gains, owned


def test_no_more_is_lost_than_there_is_and_no_more_gained() -> None:
    emb = make_cache(40, 10, rate=1.0)
    ghost = emb.ghost
    assert ghost is not None
    keys = zipf(5, 64_000, 2_000, 1.0)
    hit = look_up(emb, keys)
    assert ghost.gain(-10).hits_per_request == pytest.approx(-hit, abs=0.02)
    assert ghost.gain(30).hits_per_request <= 1 - hit + 0.02


def test_tables_are_told_apart() -> None:
    """A loop over 30 rows fits the miniatures of a page, 51 and 77 slots; over 30 of two tables only the larger."""
    for tables in (1, 2):
        emb = make_cache(4, 1, rate=1.0)
        ghost = emb.ghost
        assert ghost is not None
        for again in range(20):
            if again == 10:
                ghost.reset()
            for table in range(tables):
                emb.lookup(np.arange(30), table)
        assert (ghost.gain(1).hits_per_request > 0.02) is (tables == 2)


def test_a_window_begins_anew_and_stays_warm() -> None:
    emb = make_cache(8, 8, rate=1.0)
    ghost = emb.ghost
    assert ghost is not None
    assert ghost.gain(-1) == (0.0, math.inf)
    keys = np.arange(300)
    emb.lookup(keys)
    assert ghost.requests == 300
    assert ghost.gain(-8).hits_per_request == 0
    ghost.reset()
    assert ghost.gain(-1) == (0.0, math.inf)
    emb.lookup(keys)
    assert ghost.gain(-8).hits_per_request == 0  # both miniatures have room for all
    assert ghost._hits.sum() == 600


def test_more_sampled_rows_in_a_batch_than_the_buffer_takes() -> None:
    emb = make_cache(160, 160, rate=1.0)
    for _ in range(2):
        emb.lookup(np.arange(5_000))
    assert emb.ghost is not None
    emb.ghost.gain(-1)
    assert emb.ghost._hits.tolist() == pytest.approx(np.full((2, 16), 5_000 / 16), rel=0.3)
    assert emb.ghost._hits.sum() == 10_000


def test_sizes_that_the_cache_cannot_have_are_refused() -> None:
    ghost = make_cache(8, 3).ghost
    assert ghost is not None
    for pages in (-4, 6, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"pages must be in \[-3, 5\]"):
            ghost.gain(pages)
    pool = HbmPool(8, 64, ("kv",), payload=False)
    with pytest.raises(ValueError, match=r"rate must be in \(0, 1\], got 0"):
        KvGhost(pool, "kv", rate=0)
    with pytest.raises(ValueError, match=r"pages must be in \[0, 8\], got 9"):
        KvGhost(pool, "kv").gain(9)


def test_a_cache_without_pages_can_gain() -> None:
    emb = make_cache(8, 1, rate=1.0)
    emb._pool.set_goals({"emb": 1}, 2)
    ghost = emb.ghost
    assert ghost is not None
    emb._pool.min_pages = 0
    emb._pool.set_goals({"emb": 0}, 3)
    emb._pool.migrate(8)
    assert emb._pool.owned("emb") == 0
    for _ in range(10):
        emb.lookup(np.zeros(1, np.int64))
    assert ghost.gain(0) == (0.0, pytest.approx(0.0, abs=0.1))
    assert math.isfinite(ghost.gain(8).hits_per_request)


def test_the_sample_follows_the_size_of_the_pool() -> None:
    small, large = (HbmPool(8, 64 * rows, ("emb",), payload=False) for rows in (64, 2**20))
    for pool, rate in ((small, 1 / 128), (large, 4096 / 2**23)):
        ghost = EmbeddingCache(pool, row_bytes=64, ghost=True).ghost
        assert ghost is not None
        assert ghost.rate == rate
        assert ghost.metadata_bytes() < 2**20


def test_pages_of_users() -> None:
    """Users of 1 to 8 pages, returning by Zipf's law: gains of pages found per page asked against caches of the size.

    An extension of a large history evicts several tails, so a cache is no exact LRU of pages.
    """
    users = zipf(3, 20_000, 1_000, 0.8)
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
