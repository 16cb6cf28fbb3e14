"""Ghosts: what a cache would gain by more pages, or lose by fewer, estimated from a hashed sample of its keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import ghost as kernels
from cache_engine.pool import HbmPool

GROUPS = 16
BUCKETS = 512
# Hits at sizes within this share of the middle of a step tell the density of hits in the step. On hit curves whose
# density falls as size**-1.5 or slower that errs by less than BIAS of the gain.
SMOOTHING = 0.2
BIAS = 0.025
# Sampled keys that a cache of all pages would hold: enough for standard errors of 3 to 9 % of a gain.
SAMPLE = 4096
MOST_RATE = 1 / 128
_BATCH = 1024


class Gain(NamedTuple):
    """Hits per request that other pages would have brought, and the standard error of that estimate."""

    hits_per_request: float
    standard_error: float


class Ghost:
    """The hit curve of one cache around its size, over a window of time.

    A hashed sample of the keys is followed, and the number of distinct ones used between two uses of a key, over the
    sampling rate, is the size from which exact LRU would have hit (SHARDS, Waldspurger et al., FAST 2015). So it
    tells what LRU would gain. The gain of a step in size is the mean density of hits within SMOOTHING of its middle,
    times the step: narrow steps have too few sampled hits of their own. Steps in the hit curve that are narrower than
    that, such as those of loops over as many keys, are smoothed away. The standard error comes from GROUPS disjoint
    samples, plus BIAS for the smoothing.

    Args:
        pool: the pool, whose member `name` the cache is.
        max_pages: most pages that the cache can own.
        units_per_page: of a page; sizes are counted in units (rows) that a key weighs.
        rate: share of the keys that are followed; None: as many as SAMPLE and MOST_RATE allow.
    """

    def __init__(
        self, pool: HbmPool, name: str, *, max_pages: int, units_per_page: int, rate: float | None = None
    ) -> None:
        units = max_pages * units_per_page
        if rate is None:
            rate = min(MOST_RATE, SAMPLE / units)
        if not 0 < rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {rate}")
        self.rate = rate
        self.max_pages = max_pages
        self.units_per_page = units_per_page
        self._pool = pool
        self._name = name
        span = units * (1 + SMOOTHING)
        # The kernel may forget a quarter of its keys; a sample of n keys is as many as n + 5 sqrt(n).
        expected = rate * span
        keys = 64 + math.ceil(4 / 3 * (expected + 5 * math.sqrt(expected)))
        self._state = kernels.new_ghost_state(rate, keys, span, BUCKETS)
        self._bucket_units = span / BUCKETS
        self._hits = np.zeros((GROUPS, BUCKETS))
        self._requests = 0
        self._sampled = np.zeros(_BATCH, np.uint64)
        self._n_sampled = 0
        self._keys = np.zeros(_BATCH, np.int64)
        self._pages = np.zeros(_BATCH)
        self._n_runs = 0

    def feed_rows(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> None:
        """Follow a batch of single rows, [n] each (called by the cache)."""
        self._requests += keys.size
        n = kernels.sample_rows(self._state.threshold, tables, keys, 0, self._sampled, self._n_sampled)
        while n < 0:
            self._n_sampled = _BATCH
            self._follow()
            n = kernels.sample_rows(self._state.threshold, tables, keys, -1 - n, self._sampled, 0)
        self._n_sampled = n

    def feed_run(self, key: int, pages: int) -> None:
        """Follow one use of `pages` pages that are one user's (called by the cache)."""
        self._requests += pages
        if pages == 0:
            return
        self._keys[self._n_runs] = key
        self._pages[self._n_runs] = pages
        self._n_runs += 1
        if self._n_runs == _BATCH:
            self._follow()

    def gain(self, pages: float) -> Gain:
        """Return what `pages` more than the cache owns now would have brought since the last `reset`.

        Args:
            pages: up to what the cache can own; negative: fewer, as far as none, and what is lost is negative.

        Returns:
            Per request (a row asked of an embedding cache, a page asked of a KV cache). Before the first request the
            error is infinite. It is meaningful once the ghost has followed as many keys as the cache holds.

        Raises:
            ValueError: a size that the cache cannot have.
        """
        with self._pool.lock:
            return self._gain(pages)

    def _gain(self, pages: float) -> Gain:
        now = self._pool.owned(self._name)
        if not -now <= pages <= self.max_pages - now:  # NaN is not
            raise ValueError(f"pages must be in [{-now}, {self.max_pages - now}], got {pages}")
        self._follow()
        if self._requests == 0:
            return Gain(0.0, math.inf)
        if pages == 0:
            return Gain(0.0, 0.0)
        size = now * self.units_per_page
        step = pages * self.units_per_page
        middle = size + step / 2
        half = max(SMOOTHING * middle, abs(step) / 2)
        edges = np.arange(BUCKETS + 1) * self._bucket_units
        low, high = middle - half, min(middle + half, edges[-1])
        share = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0.0, None) / self._bucket_units
        one_hit = step / (high - low) / (self.rate * self._requests)
        groups = self._hits @ share * one_hit
        gain = float(groups.sum())
        # What all keys show has no sampling error; where nothing was seen, one hit may have been.
        variance = (1 - self.rate) * max(GROUPS * groups.var(ddof=1), one_hit**2) + (BIAS * gain) ** 2
        return Gain(gain, math.sqrt(variance))

    def reset(self) -> None:
        """Begin a new window; keys followed stay known."""
        with self._pool.lock:
            self._follow()
            self._hits[:] = 0.0
            self._requests = 0

    @property
    def requests(self) -> int:
        """Rows (EMB) or pages (KV) asked since the last `reset`."""
        return self._requests

    def metadata_bytes(self) -> int:
        """Bytes of the ghost itself, host memory."""
        own = (self._hits, self._sampled, self._keys, self._pages)
        return sum(array.nbytes for array in (*self._state, *own))

    def _follow(self) -> None:
        if self._n_sampled:
            kernels.follow_rows(self._state, self._hits, self._sampled, self._n_sampled)
            self._n_sampled = 0
        if self._n_runs:
            kernels.follow_runs(self._state, self._hits, self._keys, self._pages, self._n_runs)
            self._n_runs = 0
