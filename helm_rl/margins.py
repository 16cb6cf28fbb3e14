"""What one per cent more of the pool would save a request on either side, from the caches' ghosts."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cache_engine import EmbeddingCache, HbmPool, KvCache

GHOST_MEMORY_S = 30.0
"""Over which ghosts' hits are forgotten."""


class Saved(NamedTuple):
    """Ms per request that 1 % more of the pool would save: as EMB, as KV, and of the latter the link's."""

    emb_ms: float
    kv_ms: float
    kv_link_ms: float


class Margins:
    """Follows the ghosts of a pool's two caches, both made with `ghost=True`.

    Args:
        pool, emb, kv: the pool and its members; the ghosts are read and reset here, and nowhere else.
        row_ms: what a row costs that is not found, in ms of the link.
        token_ms: what a token of history costs that is not found, in ms of prefill, without its rows.
        rows_per_token: embedding rows of a token.
    """

    def __init__(
        self, pool: HbmPool, emb: EmbeddingCache, kv: KvCache, *, row_ms: float, token_ms: float, rows_per_token: float
    ) -> None:
        self._pool, self._emb, self._kv = pool, emb, kv
        self._row_ms, self._token_ms, self._rows_per_token = row_ms, token_ms, rows_per_token
        # Requests, rows asked, rows fetched, and rows and pages that 1 % more of the pool would have found; decayed.
        self._recent = np.zeros(5)

    def take(self, requests: float, rows: float, fetched: float, seconds: float) -> Saved:
        """Take what has passed since the last call, `seconds` ago; return what would be saved."""
        percent = 0.01 * self._pool.pages
        gains = []
        with self._pool.lock:  # nothing may move between size and gain
            for name, ghost in (("emb", self._emb.ghost), ("kv", self._kv.ghost)):
                assert ghost is not None
                # At its most, what 1 % less would lose.
                step = percent if self._pool.owned(name) + percent <= ghost.max_pages else -percent
                gains.append(ghost.gain(step).hits_per_request * ghost.requests * percent / step)
                ghost.reset()
        self._recent *= math.exp(-seconds / GHOST_MEMORY_S)
        self._recent += (requests, rows, fetched, *gains)
        recent, recent_rows, recent_fetched, emb_rows, kv_pages = self._recent
        if recent == 0:
            return Saved(0.0, 0.0, 0.0)
        # A token found saves its prefill, and the fetches among its rows.
        link_ms = self._rows_per_token * recent_fetched / max(recent_rows, 1.0) * self._row_ms
        tokens = kv_pages / recent * self._kv.page_tokens
        return Saved(
            emb_ms=float(emb_rows / recent * self._row_ms),
            kv_ms=float(tokens * (self._token_ms + link_ms)),
            kv_link_ms=float(tokens * link_ms),
        )
