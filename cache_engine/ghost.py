"""Ghosts: what a cache would gain by more pages, or lose by fewer, estimated from a hashed sample of its keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, miniature
from cache_engine.backends.cpu import ghost as shards
from cache_engine.backends.cpu.backend import MOST_PENDING
from cache_engine.backends.cpu.pool import new_pool_state
from cache_engine.pool import HbmPool

# Both ghosts know how the hit ratio changes with the size from hits between the size less SMOOTHING and the size plus
# SMOOTHING: what a step of a few pages alone brings is too few sampled hits to tell. That errs by less than BIAS of the
# gain where the density of hits falls with the size as its power -.5 to -1.7. Steps of the hit ratio that are narrower,
# such as those of loops over as many keys, are smoothed away.
SMOOTHING = 0.2
BIAS = 0.025
# Standard errors come from that many disjoint samples.
GROUPS = 16
# Keys followed by a cache of all pages, and their largest share: standard errors of 4 to 10 % of a gain.
SAMPLE = 4096
MOST_RATE = 1 / 128

_BUFFER = 1024
_BUCKETS = 512


class Gain(NamedTuple):
    """Hits per request that other pages would have brought, and the standard error of that estimate."""

    hits_per_request: float
    standard_error: float


class EmbeddingGhost:
    """Two miniatures of an embedding cache, somewhat smaller and somewhat larger than it is, fed a sample of its keys.

    A cache of R times the slots that sees the keys of a hashed share R hits about as often as the whole, whatever its
    policy (Waldspurger et al., ATC 2017): the miniatures run the kernels of the cache itself. Between their sizes, the
    hit ratio is taken to grow with the logarithm of the size.

    Args:
        pool: the pool, whose member `name` the cache is.
        max_pages: most pages that the cache can own.
        rows_per_page: rows of a page.
        policy: of the kernels.
        rate: share of the keys that are followed; None: as many as SAMPLE and MOST_RATE allow.

    Attributes:
        limit: keys whose hash is below are followed.
    """

    def __init__(
        self, pool: HbmPool, name: str, *, max_pages: int, rows_per_page: int, policy: int, rate: float | None = None
    ) -> None:
        slots = max_pages * rows_per_page
        self.rate = min(MOST_RATE, SAMPLE / slots) if rate is None else _checked(rate)
        self.max_pages = max_pages
        self.rows_per_page = rows_per_page
        self._pool = pool
        self._name = name
        self.limit = min(int(self.rate * 2.0**64), 2**64 - 1)
        most = math.ceil(self.rate * slots * (1 + SMOOTHING)) + 2
        self._caches = [
            (
                embedding.new_embedding_state(most, 1, most, 0, policy),
                new_pool_state(most, 1),
                embedding.new_embedding_scratch(_BUFFER),
            )
            for _ in range(2)
        ]
        self._tables = np.zeros(_BUFFER, np.int16)
        self._sample = np.array([self.limit, 0], np.uint64)
        self._hits = np.zeros((2, GROUPS))
        self._asked = 0  # of the sampled keys
        self._requests = 0
        self._batch = 1
        self._owned = -1
        self._sizes = (1, 2)

    @property
    def requests(self) -> int:
        """Rows asked since the last `reset`."""
        return self._requests

    def feed(self, sample: npt.NDArray[np.uint64], n: int) -> None:
        """Follow a batch of n rows, whose hashes below `limit` are in `sample`, as the kernel's scratch holds them.

        Called by the cache.
        """
        self._requests += n
        self._batch = n
        self._sample = sample
        if sample.item(1) > MOST_PENDING:
            self._follow()

    def feed_keys(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> None:
        """Follow a batch of rows, [n] each, given their keys (called by the cache on backend "cuda")."""
        sample = self._sample
        if sample.size < 2 + MOST_PENDING + keys.size:
            sample = np.zeros(2 + MOST_PENDING + keys.size, np.uint64)
            sample[: self._sample.size] = self._sample
        miniature.sample_keys(tables, keys, sample)
        self.feed(sample, keys.size)

    def gain(self, pages: float) -> Gain:
        """Return what `pages` more than the cache owns now would have brought since the last `reset`.

        Args:
            pages: up to what the cache can own; negative: fewer, and what is lost is negative. Steps of over SMOOTHING
                of the size are extrapolated.

        Returns:
            Per row asked. Before the first request the error is infinite. It is meaningful once the cache is warm.

        Raises:
            ValueError: a size that the cache cannot have.
        """
        with self._pool.lock:
            now = _checked_step(pages, self._pool.owned(self._name), self.max_pages)
            self._follow()
            if self._requests == 0:
                return Gain(0.0, math.inf)
            followed = self.rate * self._requests
            ratio = math.log(self._sizes[1] / self._sizes[0])
            # Of a cache without pages, the miniatures are of the smallest size that there is.
            slots = max(now * self.rows_per_page, sum(self._sizes) / 2 / self.rate)
            step = math.log1p(max(pages * self.rows_per_page / slots, -1 + 1e-9)) / ratio
            groups = (self._hits[1] - self._hits[0]) * step / followed
            # It can neither lose more hits than there are, nor gain more than there are misses.
            have = float(self._hits.sum()) / 2
            least, most = max(-1.0, -have / followed), min(1.0, (self._asked - have) / followed)
            gain = min(max(float(groups.sum()), least), most)
            return _with_error(gain, groups, step / followed, self.rate)

    def reset(self) -> None:
        """Begin a new window; the miniatures stay as they are."""
        with self._pool.lock:
            self._follow()
            self._hits[:] = 0.0
            self._asked = 0
            self._requests = 0

    def metadata_bytes(self) -> int:
        """Bytes of the ghost itself, host memory."""
        caches = sum(
            embedding.metadata_bytes(state) + sum(a.nbytes for a in (*pool, *scratch))
            for state, pool, scratch in self._caches
        )
        return caches + self._tables.nbytes + self._sample.nbytes + self._hits.nbytes

    def _follow(self) -> None:
        """Look the sampled keys up, in batches as small beside the miniatures as the cache's own, or a 64th of them."""
        owned = self._pool.owned(self._name)
        if owned != self._owned:
            self._owned = owned
            slots = self.rate * owned * self.rows_per_page
            smaller = max(1, round(slots * (1 - SMOOTHING)))
            self._sizes = (smaller, max(smaller + 1, round(slots * (1 + SMOOTHING))))
            for (state, pool, _), size in zip(self._caches, self._sizes, strict=True):
                miniature.resize(state, pool, size)
        n = int(self._sample[1])
        sampled = self._sample[2 : 2 + n].view(np.int64)
        batch = min(max(round(self.rate * self._batch), self._sizes[0] // 64, 1), _BUFFER)
        for (state, pool, scratch), hits in zip(self._caches, self._hits, strict=True):
            miniature.follow(state, pool, scratch, self._tables, sampled, n, batch, hits)
        self._asked += n
        self._sample[1] = 0


class KvGhost:
    """Distances of reuse of a KV cache's users: how many pages were used between two visits of one (SHARDS).

    A cache of more pages than that finds the user's again. A new epoch of a user is taken for the old one.

    Args:
        pool: the pool, whose member `name` the cache is.
        rate: share of the users that are followed; None: as many as SAMPLE allows.
    """

    def __init__(self, pool: HbmPool, name: str, *, rate: float | None = None) -> None:
        self.rate = min(1.0, SAMPLE / pool.pages) if rate is None else _checked(rate)
        self.max_pages = pool.pages
        self._pool = pool
        self._name = name
        span = pool.pages * (1 + SMOOTHING)
        # The kernel may forget a quarter of its keys; a sample of n keys is as many as n + 5 sqrt(n).
        expected = self.rate * span
        keys = 64 + math.ceil(4 / 3 * (expected + 5 * math.sqrt(expected)))
        self._state = shards.new_ghost_state(self.rate, keys, span, _BUCKETS)
        self._edges = np.linspace(0.0, span, _BUCKETS + 1)
        self._hits = np.zeros((GROUPS, _BUCKETS))
        self._requests = 0
        self._users = np.zeros(_BUFFER, np.int64)
        self._pages = np.zeros(_BUFFER)
        self._n = 0

    @property
    def requests(self) -> int:
        """Pages asked since the last `reset`."""
        return self._requests

    def feed(self, user: int, pages: int) -> None:
        """Follow a lookup of so many pages (called by the cache)."""
        self._requests += pages
        if pages:
            self._users[self._n] = user
            self._pages[self._n] = pages
            self._n += 1
            if self._n == _BUFFER:
                self._follow()

    def gain(self, pages: float) -> Gain:
        """Return what `pages` more than the cache owns now would have brought since the last `reset`.

        As `EmbeddingGhost.gain`, but per page asked, and steps of any size are measured.
        """
        with self._pool.lock:
            now = _checked_step(pages, self._pool.owned(self._name), self._pool.pages)
            self._follow()
            if self._requests == 0:
                return Gain(0.0, math.inf)
            middle = now + pages / 2
            half = max(SMOOTHING * middle, abs(pages) / 2)
            low, high = middle - half, min(middle + half, self._edges[-1])
            edges = self._edges
            share = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0.0, None) / edges[1]
            one_hit = pages / max(high - low, edges[1]) / (self.rate * self._requests)
            groups = self._hits @ share * one_hit
            return _with_error(float(groups.sum()), groups, one_hit, self.rate)

    def reset(self) -> None:
        """Begin a new window; users followed stay known."""
        with self._pool.lock:
            self._follow()
            self._hits[:] = 0.0
            self._requests = 0

    def metadata_bytes(self) -> int:
        """Bytes of the ghost itself, host memory."""
        return sum(array.nbytes for array in (*self._state, self._hits, self._users, self._pages, self._edges))

    def _follow(self) -> None:
        if self._n:
            shards.follow_runs(self._state, self._hits, self._users, self._pages, self._n)
            self._n = 0


def _checked(rate: float) -> float:
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}")
    return rate


def _checked_step(pages: float, owned: int, most: int) -> int:
    if not -owned <= pages <= most - owned:  # NaN is not
        raise ValueError(f"pages must be in [{-owned}, {most - owned}], got {pages}")
    return owned


def _with_error(gain: float, groups: npt.NDArray[Any], one_hit: float, rate: float) -> Gain:
    # What all keys show has no sampling error; where nothing was seen, one hit may have been.
    variance = (1 - rate) * max(GROUPS * float(groups.var(ddof=1)), one_hit**2) + (BIAS * gain) ** 2
    return Gain(gain, math.sqrt(variance))
