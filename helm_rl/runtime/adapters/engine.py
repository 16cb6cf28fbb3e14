"""The cache engine in the same process: a pool, its two caches, and what the server tells of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from cache_engine import EmbeddingCache, HbmPool, KvCache, TargetStatus
from helm_rl.margins import Margins
from helm_rl.runtime.counters import Cause, Counters, StaleTelemetry
from helm_rl.runtime.recorder import RequestRecorder


class Costs(NamedTuple):
    """What a miss costs, in ms of the link per row, and in ms of prefill per token without its `rows_per_token`."""

    row_ms: float
    token_ms: float
    rows_per_token: float


class EngineAdapter:
    """A pool with the members `emb` and `kv`, whose first is the embedding cache, as `HbmPool` has them.

    It takes the caches' `stats()`, which nobody else may then read, and only sets the pool's target: whoever serves
    calls `pool.migrate` between batches, and so decides what moving memory may cost.

    Args:
        pool, emb, kv: the engine.
        requests: what the server tells of its requests.
        waiting: returns how many requests wait; None: the signal is masked.
        queue_bound: how many can.
        costs: for the margins, which need caches made with `ghost=True`; None: they are masked.
    """

    period_s = 0.01

    def __init__(
        self,
        pool: HbmPool,
        emb: EmbeddingCache,
        kv: KvCache,
        requests: RequestRecorder,
        *,
        waiting: Callable[[], int] | None = None,
        queue_bound: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        if costs is not None and (emb.ghost is None or kv.ghost is None):
            raise ValueError("costs are for margins, which need both caches to have a ghost: make them with ghost=True")
        self._pool, self._emb, self._kv, self._requests = pool, emb, kv, requests
        self._waiting, self._queue_bound = waiting, queue_bound
        self._margins = None if costs is None else Margins(pool, emb, kv, **costs._asdict())
        self._rows = self._rows_hit = self._tokens = self._tokens_hit = 0
        self._read_s = time.monotonic()

    def read(self) -> Counters:
        """Return what was counted since the adapter was made."""
        requests = self._requests
        now_s, read_s = time.monotonic(), self._read_s
        self._read_s = now_s
        with self._pool.lock:
            rows, tokens = self._emb.stats(), self._kv.stats()
            alpha, backlog, revision = self._pool.alpha, self._pool.backlog, self._pool.revision
            margins = None
            if self._margins is not None:
                margins = self._margins.take(tokens.lookups, rows.requested, rows.fetched, now_s - read_s)
        self._rows += rows.requested
        self._rows_hit += rows.hits
        self._tokens += tokens.requested
        self._tokens_hit += tokens.hits
        return Counters(
            arrivals=requests.arrivals,
            returning=requests.returning,
            shed=requests.shed,
            history_tokens=self._tokens,
            history_tokens_hit=self._tokens_hit,
            rows=self._rows,
            rows_hit=self._rows_hit,
            link_busy_s=requests.link_s,
            compute_busy_s=requests.compute_s,
            clock_s=now_s,
            latency=requests.latencies(),
            queue=None if self._waiting is None else self._waiting(),
            queue_bound=self._queue_bound,
            alpha=alpha,
            backlog_pages=backlog,
            pages=self._pool.pages,
            emb_margin_ms=None if margins is None else margins.emb_ms,
            kv_margin_ms=None if margins is None else margins.kv_ms,
            kv_margin_link_ms=None if margins is None else margins.kv_link_ms,
            revision=revision,
        )

    def apply(self, alpha: float, revision: int) -> float:
        """Record the target; return the embedding cache's share of the pool now."""
        if self._pool.set_target(alpha, revision) is TargetStatus.STALE:
            raise StaleTelemetry(f"the pool has a later target than revision {revision}", Cause.STALE)
        return self._pool.alpha
