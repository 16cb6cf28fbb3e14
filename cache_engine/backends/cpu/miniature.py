"""Kernels of miniatures: embedding caches scaled down, and fed a hashed sample of the keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding
from cache_engine.backends.cpu.embedding import EmbeddingScratch, EmbeddingState
from cache_engine.backends.cpu.pool import PoolState
from cache_engine.hashing import mix, mix2
from cache_engine.jit import kernel


@kernel
def sample_keys(tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], sample: npt.NDArray[np.uint64]) -> None:
    """Append the hashes of keys to a sample, as lookups do with `EmbeddingScratch.sample`."""
    n = np.int64(sample[1])
    for i in range(keys.size):
        bits = mix2(np.uint64(tables[i]), np.uint64(keys[i]))
        if bits < sample[0]:
            sample[2 + n] = bits
            n += 1
    sample[1] = np.uint64(n)


@kernel
def resize(emb: EmbeddingState, pool: PoolState, slots: int) -> None:
    """Give a miniature, alone in its pool of one-slot pages, so many of them."""
    pool.goal[0] = slots
    embedding.release_pages(emb, pool, pool.owner.size, 0, 0)
    embedding.accept_pages(emb, pool, pool.owner.size)


@kernel
def follow(
    emb: EmbeddingState,
    pool: PoolState,
    scratch: EmbeddingScratch,
    tables: npt.NDArray[np.int16],
    sampled: npt.NDArray[np.int64],
    n: int,
    batch: int,
    hits: npt.NDArray[np.float64],
) -> None:
    """Look n sampled keys up, known by their hashes, in batches; hits[g], [G], counts those of a G-th of all keys.

    G is a power of two.
    """
    for start in range(0, n, batch):
        m = min(batch, n - start)
        embedding.lookup(emb, pool, scratch, tables, sampled[start : start + m], m)
        for i in range(m):
            if scratch.miss[i] < 0:
                hits[np.int64(mix(np.uint64(sampled[start + i])) & np.uint64(hits.size - 1))] += 1.0
