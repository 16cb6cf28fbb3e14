"""The engine in the same process: its counters are what was looked up, its pool follows the target."""

from __future__ import annotations

import time

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool, KvCache
from helm_rl.control.static import StaticAlpha
from helm_rl.runtime.adapters.engine import Costs, EngineAdapter
from helm_rl.runtime.counters import StaleTelemetry, masked
from helm_rl.runtime.loop import ControlLoop
from helm_rl.runtime.recorder import RequestRecorder


def engine(ghost: bool = False) -> tuple[HbmPool, EmbeddingCache, KvCache]:
    table = np.zeros((10_000, 16), np.float32)
    pool = HbmPool(pages=64, page_bytes=4096)
    caches = EmbeddingCache(pool, row_bytes=64, tables=[table], ghost=ghost), KvCache(pool, token_bytes=64, ghost=ghost)
    pool.set_target(0.5, revision=1)
    pool.migrate(64)
    return pool, *caches


def test_what_was_looked_up_is_counted_and_never_falls() -> None:
    pool, emb, kv = engine()
    adapter = EngineAdapter(pool, emb, kv, RequestRecorder(), waiting=lambda: 3, queue_bound=10)
    for k in range(1, 4):
        kv.lookup(7, 100)
        kv.extend(7, 128)
        emb.lookup(np.arange(50))
        counters = adapter.read()
        assert (counters.rows, counters.rows_hit) == (50 * k, 50 * (k - 1))
        assert (counters.history_tokens, counters.history_tokens_hit) == (100 * k, 100 * (k - 1))
    assert (counters.queue, counters.queue_bound, counters.alpha, counters.pages) == (3, 10, 0.5, 64)
    assert counters.backlog_pages == 0
    assert masked(counters).sum() == 7  # hot users, link and compute twice each, both margins


def test_the_pool_follows_the_target_when_whoever_serves_migrates() -> None:
    pool, emb, kv = engine()
    adapter = EngineAdapter(pool, emb, kv, RequestRecorder())
    assert adapter.apply(0.25, 5) == 0.5
    assert adapter.read().backlog_pages == 16
    while pool.migrate(4).backlog:
        pass
    assert adapter.read().alpha == 0.25
    with pytest.raises(StaleTelemetry, match="has a later target than revision 4"):
        adapter.apply(0.75, 4)
    assert pool.backlog == 0


def test_a_loop_whose_clock_was_set_back_is_followed_again() -> None:
    """Revisions are made of the time at which a loop was made."""
    pool, emb, kv = engine()
    pool.set_target(0.5, revision=10**15)  # of the year 33658
    loop = ControlLoop(EngineAdapter(pool, emb, kv, RequestRecorder()), StaticAlpha(0.75), 0.05, slo_ms=50.0)
    with loop:
        until = time.monotonic() + 20
        while pool.backlog == 0:
            assert time.monotonic() < until, dict(loop.status.fallbacks)
            time.sleep(0.01)
    assert loop.status.unapplied == 0
    assert pool.revision is not None
    assert pool.revision > 10**15


def test_margins_need_ghosts_and_costs() -> None:
    pool, emb, kv = engine(ghost=True)
    adapter = EngineAdapter(pool, emb, kv, RequestRecorder(), costs=Costs(0.01, 0.02, 4))
    rng = np.random.default_rng(0)
    for _ in range(300):
        kv.lookup(int(rng.integers(40)), 100)
        emb.lookup(rng.integers(0, 6_000, 200))
    counters = adapter.read()
    assert counters.emb_margin_ms is not None
    assert counters.emb_margin_ms > 0
    assert counters.kv_margin_ms is not None
    assert counters.kv_margin_link_ms is not None
    assert 0 < counters.kv_margin_link_ms < counters.kv_margin_ms
    pool, emb, kv = engine()
    with pytest.raises(ValueError, match="make them with ghost=True"):
        EngineAdapter(pool, emb, kv, RequestRecorder(), costs=Costs(0.01, 0.02, 4))
