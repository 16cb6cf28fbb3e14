"""A resize under load: hit rates after a shrink and after growth, and what foreground batches wait meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cache_engine import EmbeddingCache, HbmPool
from eval.engine.caches import PAGES, look_up, make_cache, resize
from eval.engine.loads import Keys, zipf
from helm_rl.figures import Figure

Advance = Callable[[str], None]

BATCH = 1_000
KEYS = 1_000_000
STEP_PAGES = 2
WINDOWS = (10_000, 50_000)  # requests from the first step of a resize on
DROP_GOAL = 0.01
P99_GOAL = 1.2


def measure_resize(slots: int, policy: str, repeats: int, advance: Advance) -> dict[str, Figure]:
    """Shrink a cache by a tenth and grow it again, STEP_PAGES before each batch; Zipf 1.0 over 1M keys, batches of 1k.

    Hit rates are held against a cache that always had the new size, on the same requests. Batches are timed against
    a cache that stays as it is, the same batches by turns; a batch waits for the step before it, so the step's time is
    part of it. In CPU time of the one thread, for nothing else is waited for, and a 99th percentile of wall-clock time
    is that of the machine's other work.
    """
    rng = np.random.default_rng(8)
    sizes = {"shrink": PAGES - PAGES // 10, "growth": PAGES}
    pool, moving = make_cache(slots, policy=policy)
    constant = make_cache(slots, policy=policy)[1]
    settled = {
        kind: make_cache(slots // PAGES * pages, policy=policy, pages=pages, pool_pages=PAGES)[1]
        for kind, pages in sizes.items()
    }
    drops: dict[str, list[float]] = {}
    seconds: list[tuple[float, float]] = []
    advance(f"filling caches of {slots:,} slots")
    between = 8 * slots
    revision = 0
    for repeat in range(repeats):
        for kind, pages in sizes.items():
            keys = zipf(rng, between // BATCH * BATCH, KEYS, 1.0)
            for cache in (moving, constant, *settled.values()):
                look_up(cache, keys, BATCH)
            between = 4 * slots
            advance(f"{kind} {repeat + 1} at {slots:,} slots")
            revision += 1
            resize(pool, pages, revision=revision)
            missed = _Missed(moving), _Missed(settled[kind])
            keys = zipf(rng, max(WINDOWS), KEYS, 1.0)
            for start in range(0, max(WINDOWS), BATCH):
                batch = keys[start : start + BATCH]
                if pool.backlog:
                    seconds.append(_by_turns(pool, moving, constant, batch, start // BATCH % 2 == 0))
                else:
                    moving.lookup(batch)
                    constant.lookup(batch)
                settled[kind].lookup(batch)
                requests = start + BATCH
                if requests in WINDOWS:
                    drop = (missed[0].count() - missed[1].count()) / requests
                    drops.setdefault(f"{requests // 1000}k.{kind}", []).append(drop)
            if pool.backlog:
                raise RuntimeError(f"the {kind} has not ended after {max(WINDOWS):,} requests")
    figures = {}
    for requests in WINDOWS:
        name = f"{requests // 1000}k"
        means = {kind: float(np.mean(drops[f"{name}.{kind}"])) for kind in sizes}
        for kind, mean in means.items():
            figures[f"engine.resize_hit_drop_{name}.{kind}"] = Figure(mean, "", "lower")
        figures[f"engine.resize_hit_drop_{name}"] = Figure(max(means.values()), "", "lower", DROP_GOAL)
    p50, p99 = np.percentile(seconds, (50, 99), axis=0)
    figures["engine.resize_p50_ratio"] = Figure(p50[0] / p50[1], "", "lower")
    figures["engine.resize_p99_us"] = Figure(p99[0] * 1e6, "us", "lower")
    figures["engine.resize_p99_us.still"] = Figure(p99[1] * 1e6, "us", "lower")
    figures["engine.resize_p99_ratio"] = Figure(p99[0] / p99[1], "", "lower", P99_GOAL)
    return figures


class _Missed:
    """Misses since this was made; the counters themselves begin anew whenever they are read."""

    def __init__(self, emb: EmbeddingCache) -> None:
        self._emb = emb
        self._missed = 0
        emb.stats()

    def count(self) -> int:
        self._missed += self._emb.stats().misses
        return self._missed


def _by_turns(
    pool: HbmPool, moving: EmbeddingCache, constant: EmbeddingCache, batch: Keys, moving_first: bool
) -> tuple[float, float]:
    """Return the CPU seconds of a step and a batch, and of the batch in the cache that stays as it is."""

    def step_and_batch() -> float:
        begun = time.thread_time()
        pool.migrate(STEP_PAGES)
        moving.lookup(batch)
        return time.thread_time() - begun

    def batch_alone() -> float:
        begun = time.thread_time()
        constant.lookup(batch)
        return time.thread_time() - begun

    if moving_first:
        return step_and_batch(), batch_alone()
    stayed = batch_alone()
    return step_and_batch(), stayed
