"""The engine's caches as the benchmarks build and drive them."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_engine import EmbeddingCache, HbmPool
from cache_engine.backends.cpu import embedding as kernels
from cache_engine.backends.cpu.embedding import EmbeddingScratch, EmbeddingState
from cache_engine.backends.cpu.pool import PoolState
from cache_engine.jit import kernel
from eval.engine.loads import Keys

PAGES = 512
LRU = "lru"
SIEVE = "sieve"
POLICIES = tuple(kernels.POLICIES)
DEFAULT_POLICY: str = inspect.signature(EmbeddingCache).parameters["policy"].default


def make_cache(
    slots: int, *, policy: str, pages: int = PAGES, pool_pages: int | None = None, ghost: bool = False
) -> tuple[HbmPool, EmbeddingCache]:
    """Return a cache of `slots` slots without payload, a multiple of `pages`, in a pool of `pool_pages` (as many)."""
    rows_per_page = slots // pages
    if rows_per_page * pages != slots:
        raise ValueError(f"{slots} slots are no multiple of {pages} pages")
    pool = HbmPool(pool_pages or pages, 64 * rows_per_page, ("emb",), payload=False)
    emb = EmbeddingCache(pool, row_bytes=64, policy=policy, ghost=ghost)
    resize(pool, pages, revision=0)
    pool.migrate(pool.pages)
    return pool, emb


def resize(pool: HbmPool, pages: int, revision: int) -> None:
    """Ask for another number of pages; `migrate` moves them."""
    pool.set_goals({"emb": pages}, revision)


def look_up(emb: EmbeddingCache, keys: Keys, batch: int) -> float:
    """Look the keys up through the public call; return the seconds that it took."""
    begun = time.perf_counter()
    for start in range(0, keys.size, batch):
        emb.lookup(keys[start : start + batch])
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Ratios:
    """Per request since the counters were last read."""

    misses: float  # every copy of a key that was not there before its batch
    fetches: float  # rows that crossed the link: copies within a batch are fetched once


def ratios(emb: EmbeddingCache) -> Ratios:
    """Read the counters of a cache."""
    stats = emb.stats()
    return Ratios(stats.misses / stats.requested, stats.fetched / stats.requested)


class Compiled:
    """The same lookups in one compiled loop over the kernel, as the simulator calls it."""

    def __init__(self, pool: HbmPool, emb: EmbeddingCache, batch: int) -> None:
        self._pool = pool
        self._emb = emb
        self._batch = batch
        self._scratch = kernels.new_embedding_scratch(batch)
        self._tables = np.zeros(batch, np.int16)

    def look_up(self, keys: Keys) -> float:
        """Look the keys up; return the seconds that it took."""
        begun = time.perf_counter()
        _look_up(self._emb.state, self._pool.state, self._scratch, self._tables, keys, self._batch)
        return time.perf_counter() - begun


@kernel
def _look_up(
    emb: EmbeddingState,
    pool: PoolState,
    scratch: EmbeddingScratch,
    tables: npt.NDArray[np.int16],
    keys: Keys,
    batch: int,
) -> None:
    for start in range(0, keys.size, batch):
        n = min(batch, keys.size - start)
        kernels.lookup(emb, pool, scratch, tables, keys[start : start + n], n)
