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
MOVED_PAGES = 50
KEYS = 1_000_000
WINDOWS = (10_000, 50_000)  # requests from the first step of a resize on
DROP_GOAL = 0.01
P99_GOAL = 1.2


def measure_resize(slots: int, policy: str, repeats: int, advance: Advance) -> dict[str, Figure]:
    """Shrink a cache by a tenth and grow it again, one page before each batch; Zipf 1.0 over 1M keys, batches of 1k.

    Hit rates are held against a cache that always had the new size, on the same requests. Batches are timed against
    a cache that stays as it is, the same batches by turns: alone, and as one that waits for all of the step before it.
    In CPU time of the one thread, for nothing else is waited for, and a 99th percentile of wall-clock time is that of
    the machine's other work.
    """
    rng = np.random.default_rng(8)
    sizes = {"shrink": PAGES - MOVED_PAGES, "growth": PAGES}
    pool, moving = make_cache(slots, policy=policy)
    constant = make_cache(slots, policy=policy)[1]
    settled = {
        kind: make_cache(slots // PAGES * pages, policy=policy, pages=pages, pool_pages=PAGES)[1]
        for kind, pages in sizes.items()
    }
    drops: dict[str, list[float]] = {}
    seconds: list[tuple[float, float, float]] = []
    for revision, pages in enumerate((PAGES - 1, PAGES), 1):  # steps are compiled or loaded before they are timed
        resize(pool, pages, revision=revision)
        pool.migrate(1)
    advance(f"filling caches of {slots:,} slots")
    between = 8 * slots
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
    for k, waits in enumerate(("", ".with_step")):
        figures[f"engine.resize_p99_ratio{waits}"] = Figure(p99[k] / p99[2], "", "lower", P99_GOAL)
        figures[f"engine.resize_p50_ratio{waits}"] = Figure(p50[k] / p50[2], "", "lower")
        figures[f"engine.resize_p99_us{waits}"] = Figure(p99[k] * 1e6, "us", "lower")
    figures["engine.resize_p99_us.still"] = Figure(p99[2] * 1e6, "us", "lower")
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
) -> tuple[float, float, float]:
    """Return the CPU seconds of a batch after a step, of both, and of the batch in the cache that stays as it is."""

    def alone(emb: EmbeddingCache) -> float:
        begun = time.thread_time()
        emb.lookup(batch)
        return time.thread_time() - begun

    stayed = 0.0 if moving_first else alone(constant)
    begun = time.thread_time()
    pool.migrate(1)
    step = time.thread_time() - begun
    moved = alone(moving)
    return moved, step + moved, alone(constant) if moving_first else stayed
