"""One node on the model clock: virtual time, deterministic, driven by a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, ghost, kv, pool
from envs.serving import latency, loop
from envs.serving.rows import build_rows
from helm_rl.errors import UserError
from helm_rl.metrics import SHED_FACTOR, WindowStats
from helm_rl.profiles.hardware import link_gb_s, resolve_hardware
from helm_rl.profiles.model import ModelProfile, resolve_model
from helm_rl.scenario import Scenario
from helm_rl.workloads.inspect import returning
from helm_rl.workloads.trace import Trace

MAX_SAMPLED_SLOTS = 1 << 19  # against 1 << 22: hit rates within .001, P99 within 2.5 % near saturation, 6 times faster
MAX_PAGES = 1 << 23  # 0.9 GiB of metadata
MAX_REQUEST_ROWS = 1 << 22  # sampled rows; 0.3 GiB of scratch
MAX_INTERVALS = 4_000_000  # 46 days of 1 s; each is kept, so this is GiBs and minutes
_MIN_PAGES = 16
_HEAD_ROWS = 65_536
_GHOST_BUCKETS = 256
GHOST_MEMORY_S = 30.0
_MARGIN_SPAN = 0.04  # margins are slopes of the ghost's curve over this share of the pool on either side
EMB, KV = 0, 1


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """What `NodeSim.save` keeps."""

    arrays: tuple[npt.NDArray[Any], ...]
    target: float
    now_ns: int
    ghost_requests: float


class NodeSim:
    """A serving node: pool, caches, link and accelerator under one trace.

    `reset` puts it at the start with a given alpha, `run` serves until a time of the trace's clock and returns what was
    measured, `set_target` asks for another alpha, which `run` then approaches within the migration budget. Everything
    is a function of scenario, trace and the targets: no random numbers are drawn while serving.

    Caches start as after a long time without a history of requests: the embedding cache holds the most popular rows,
    the KV cache is empty; the trace's warm-up fills it.

    Limits: what a request reads and computes is in the caches as soon as it arrives; a user whose history has reached
    its maximum is taken to keep it (no slide of the window); one tenant; no background refill.

    Raises:
        UserError: an unsound or empty trace, or a model that does not fit the pool's pages.
    """

    def __init__(
        self,
        scenario: Scenario,
        trace: Trace,
        alpha: float = 0.5,
        start_ns: int | None = None,
        *,
        max_sampled_slots: int = MAX_SAMPLED_SLOTS,
    ) -> None:
        if len(trace) == 0:
            raise UserError(f"trace {trace.meta.name} has no requests: there is nothing to serve")
        trace.validate()  # the kernels rely on it: they check no index
        trace = plain(trace)
        seconds = (int(trace.arrival_ns[-1]) - int(trace.arrival_ns[0])) / 1e9
        if seconds > MAX_INTERVALS * scenario.control.interval_s:
            raise UserError(
                f"trace {trace.meta.name} lasts {seconds:,.0f} s, more than {MAX_INTERVALS:,} intervals of "
                f"control.interval_s = {scenario.control.interval_s:g}; cut it, or speed it up (trace convert has "
                "--end-s and --speed-up)"
            )
        model = resolve_model(scenario.model)
        hardware = resolve_hardware(scenario.hardware)
        self.pages, self.page_tokens, rows_per_page = page_layout(scenario, model)
        control = scenario.control
        sampled_rows = max(1, min(rows_per_page, max_sampled_slots // self.pages))
        self.rate = sampled_rows / rows_per_page
        smallest = max(1, int(control.alpha_min * self.pages)) * rows_per_page
        rows = build_rows(
            trace,
            features=model.features_per_token,
            candidates=model.candidates,
            page_tokens=self.page_tokens,
            rate=self.rate,
            head=min(_HEAD_ROWS, smallest // 16),
            zipf=scenario.load.zipf_items,
            items=scenario.load.items,
        )
        if rows.max_rows > MAX_REQUEST_ROWS:
            raise UserError(
                f"trace {trace.meta.name} has a history of {trace.history_tokens.max()} tokens: with "
                f"model.features_per_token = {model.features_per_token} and model.candidates = {model.candidates} one "
                f"request reads {rows.max_rows} sampled rows; at most {MAX_REQUEST_ROWS} are possible"
            )
        self.scenario = scenario
        self.trace = trace
        self.slo_ns = scenario.slo_ms * 1e6
        self.end_ns = int(trace.arrival_ns[-1]) + 1
        self._rows = rows
        self._sampled_rows = sampled_rows
        self._tick_ns = max(1, round(min(control.tick_s, control.interval_s) * 1e9))
        self._params = np.zeros(loop.N_PARAMS)
        self._params[loop.FLOP_PER_TOKEN] = model.flops_per_token
        self._params[loop.FLOP_PER_PAIR] = model.flops_per_pair
        self._params[loop.ROW_BYTES] = model.row_bytes
        self._params[loop.ROWS_PER_TOKEN] = model.features_per_token
        self._params[loop.CANDIDATES] = model.candidates
        self._params[loop.TICK_NS] = self._tick_ns
        self._params[loop.PAGES_PER_TICK] = control.migrate_pages_per_s * self._tick_ns * 1e-9
        queue = np.zeros(latency.N_PARAMS)
        queue[latency.SLO_NS] = self.slo_ns
        queue[latency.BATCH_NS] = hardware.batch_ms * 1e6
        queue[latency.REQUEST_NS] = hardware.request_ms * 1e6
        queue[latency.LINK_BYTES_PER_NS] = link_gb_s(scenario.hardware)
        queue[latency.FLOP_PER_NS] = hardware.flop_per_s * 1e-9
        queue[latency.MAX_BATCH] = scenario.hardware.max_batch
        queue[latency.QUEUE_BOUND] = scenario.hardware.queue_bound
        queue[latency.SHED_NS] = SHED_FACTOR * self.slo_ns
        self._queue_params = queue
        self._returning = returning(trace)
        # ms that a hit saves: a row's transfer, or a token's prefill.
        self._row_ms = model.row_bytes / link_gb_s(scenario.hardware) * 1e-6
        self._token_ms = model.flops_per_token / hardware.flop_per_s * 1e3
        self._features = model.features_per_token
        self._ghost_rate = min(1.0, 8192.0 / (self.pages * sampled_rows))
        self.reset(alpha, start_ns)

    def reset(self, alpha: float, start_ns: int | None = None) -> None:
        """Start anew with `alpha` applied, at the first request or at `start_ns` of the trace's clock.

        `alpha` is clipped to the scenario's bounds; NaN is refused with ValueError.
        """
        pages = self.pages
        trace = self.trace
        scenario = self.scenario
        self._pool = pool.new_pool_state(pages, 2)
        self.set_target(alpha)
        most = min(pages - 1, math.ceil(scenario.control.alpha_max * pages) + 1)
        policy = embedding.POLICIES[scenario.hardware.emb_policy]
        self._emb = embedding.new_embedding_state(pages, self._sampled_rows, most, EMB, policy)
        self._kv = kv.new_kv_state(pages, self.page_tokens, KV)
        self._scratch = embedding.new_embedding_scratch(max(1024, self._rows.max_rows, self._sampled_rows))
        self._queue = latency.new_queue_state(self._queue_params, len(trace))
        self._emb_ghost = ghost.new_ghost_state(
            self._ghost_rate, 16_384, float(pages * self._sampled_rows), _GHOST_BUCKETS
        )
        self._kv_ghost = ghost.new_ghost_state(1.0, min(16_384, 2 * pages), float(pages), _GHOST_BUCKETS)
        first = 0 if start_ns is None else int(np.searchsorted(trace.arrival_ns, start_ns))
        start = min(int(trace.arrival_ns[0]), trace.meta.measure_from_ns) if start_ns is None else start_ns
        clocks = np.zeros(loop.N_CLOCKS, np.int64)
        clocks[loop.NEXT_REQUEST] = first
        clocks[loop.NEXT_TICK_NS] = start + self._tick_ns
        size = self._scratch.slots.size
        self._node = loop.NodeState(
            self._params,
            clocks,
            np.zeros(loop.N_WINDOW),
            np.zeros(2),
            # The tail is there from the start; a hot set starts cold, and its first misses are charged with delay, but
            # no more often than they happen.
            np.array([0.0, loop.SMOOTHING]),
            np.zeros(2),
            np.zeros(size, np.int64),
            np.zeros(size, np.int16),
            embedding.new_moving_rows(self._sampled_rows, 0),
            trace.arrival_ns,
            trace.user,
            trace.phase,
            trace.history_tokens,
            trace.new_tokens,
            self._returning,
        )
        self.now_ns = start
        self._queue.clocks[latency.LINK_FREE] = self._queue.clocks[latency.COMPUTE_FREE] = start
        self._ghost_requests = 0.0
        embedding.accept_pages(self._emb, self._pool, pages)
        kv.accept_pages(self._kv, self._pool, pages)
        if self._rows.state.content[0] != 1:
            self._fill()

    def _fill(self) -> None:
        """Fill the embedding cache with the most popular rows, the most popular last."""
        slots = int(self._pool.owned[EMB]) * self._sampled_rows
        keys = np.arange(min(self._rows.strata, slots) - 1, -1, -1, dtype=np.int64)
        size = self._scratch.slots.size
        for start in range(0, keys.size, size):
            part = keys[start : start + size]
            embedding.lookup(self._emb, self._pool, self._scratch, self._node.tables, part, part.size)

    def set_target(self, alpha: float) -> None:
        """Ask for `alpha`, within the scenario's bounds; NaN is refused with ValueError."""
        if not math.isfinite(alpha):
            raise ValueError(f"alpha must be a number in [0, 1], got {alpha}")
        control = self.scenario.control
        self.target = min(max(alpha, control.alpha_min), control.alpha_max)
        goal = min(max(round(self.target * self.pages), 1), self.pages - 1)
        self._pool.goal[EMB] = goal
        self._pool.goal[KV] = self.pages - goal

    @property
    def alpha(self) -> float:
        """The share of the pool that the embedding cache owns now."""
        return float(self._pool.owned[EMB] / self.pages)

    @property
    def latency_ms(self) -> npt.NDArray[np.float32]:
        """Latency of each request from its scheduled arrival, [n]; NaN: not complete; shed: SHED_FACTOR * SLO."""
        return self._queue.latency_ms

    @property
    def simulated_lookups(self) -> int:
        """Row lookups that the embedding cache has answered since the reset; each stands for 1 / rate rows."""
        return int(self._emb.counters[embedding.REQUESTED])

    def run(self, until_ns: int) -> WindowStats:
        """Serve until `until_ns` of the trace's clock and return what was measured since the last call."""
        if until_ns < self.now_ns:
            raise ValueError(f"until_ns = {until_ns} lies before the node's clock, {self.now_ns}")
        node, queue = self._node, self._queue
        latency.start_window(queue)
        node.window[: loop.BUDGET] = 0.0
        decay = math.exp(-(until_ns - self.now_ns) * 1e-9 / GHOST_MEMORY_S)
        self._emb_ghost.hits[:] *= decay
        self._kv_ghost.hits[:] *= decay
        self._ghost_requests *= decay
        loop.run(
            node,
            queue,
            self._rows.state,
            self._pool,
            self._emb,
            self._scratch,
            self._kv,
            self._emb_ghost,
            self._kv_ghost,
            until_ns,
        )
        start_ns, self.now_ns = self.now_ns, until_ns
        w, q = node.window, queue.window
        self._ghost_requests += w[loop.ARRIVALS]
        emb_margin, kv_margin = self._margins()
        return WindowStats(
            start_ns=start_ns,
            end_ns=until_ns,
            arrivals=int(w[loop.ARRIVALS]),
            returning=int(w[loop.RETURNING]),
            completed=int(q[latency.COMPLETED]),
            slow=int(q[latency.SLOW]),
            shed=int(q[latency.SHED]),
            history_tokens=int(w[loop.TOKENS]),
            history_tokens_hit=int(w[loop.TOKENS_HIT]),
            rows=float(w[loop.ROWS]),
            rows_hit=float(w[loop.ROWS_HIT]),
            log_latency_sum=float(q[latency.LOG_SUM]),
            excess_sum=float(q[latency.EXCESS_SUM]),
            latency_ms_sum=float(q[latency.MS_SUM]),
            p99_ms=float(latency.sketch_p99_ms(queue)),
            link_busy_ns=int(q[latency.LINK_BUSY]),
            compute_busy_ns=int(q[latency.COMPUTE_BUSY]),
            queue=int(latency.waiting(queue)),
            queue_bound=self.scenario.hardware.queue_bound,
            alpha=self.alpha,
            target=self.target,
            backlog_pages=int(np.abs(self._pool.owned - self._pool.goal).max()),
            moved_pages=int(w[loop.MOVED]),
            pages=self.pages,
            emb_margin_ms=emb_margin,
            kv_margin_ms=kv_margin,
        )

    def save(self) -> NodeSnapshot:
        """Return a copy of all that serving changes, for `restore`: 16 to 30 MB at production size."""
        return NodeSnapshot(
            tuple(array.copy() for array in self._changing()), self.target, self.now_ns, self._ghost_requests
        )

    def restore(self, snapshot: NodeSnapshot) -> None:
        """Go back to where `save` was called on this node, since its last `reset`; what follows is served as then."""
        for array, saved in zip(self._changing(), snapshot.arrays, strict=True):
            np.copyto(array, saved)
        self._scratch.seen[:] = 0  # it tells batches apart by numbers that now come again
        self.target, self.now_ns, self._ghost_requests = snapshot.target, snapshot.now_ns, snapshot.ghost_requests

    def _changing(self) -> list[npt.NDArray[Any]]:
        node, emb = self._node, self._emb
        own = [node.clocks, node.window, node.miss_rate, node.seen, node.fetch_rate]
        rows = [emb.word, emb.row, emb.queue, emb.spot, emb.fill, emb.fresh, emb.scalars, emb.counters]
        return [*own, *rows, *self._queue, *self._pool, *self._kv, *self._emb_ghost, *self._kv_ghost]

    def drain(self) -> None:
        """Serve what is left of the trace and wait until every queue is empty, however long that takes."""
        self.run(max(self.end_ns, self.now_ns))
        latency.advance(self._queue, self._node.arrival_ns, latency.FOREVER_NS)
        self.now_ns = max(self.now_ns, int(self._queue.clocks[latency.COMPUTE_FREE]))

    def _margins(self) -> tuple[float, float]:
        """Return the ms per request that 1 % more of the pool would save as EMB and as KV, from the ghosts' slopes."""
        requests = self._ghost_requests
        if requests == 0:
            return 0.0, 0.0
        emb_hits = _slope(self._emb_ghost.hits, self.alpha) / (self._ghost_rate * self.rate)
        kv_pages = _slope(self._kv_ghost.hits, 1.0 - self.alpha)
        fetches = self._node.fetch_rate[loop.TAIL] * self._rows.state.tail_share[0]
        token_ms = self._token_ms + self._features * fetches * self._row_ms
        return (
            float(0.01 * emb_hits / requests * self._row_ms),
            float(0.01 * kv_pages / requests * self.page_tokens * token_ms),
        )


def page_layout(scenario: Scenario, model: ModelProfile) -> tuple[int, int, int]:
    """Return the pool's pages, and how many tokens and how many rows a page holds; UserError where that cannot be."""
    hardware = scenario.hardware
    if hardware.nodes != 1:
        raise UserError(f"hardware.nodes = {hardware.nodes}: this is one node, so it must be 1")
    page_bytes = hardware.page_kib * 1024
    pages = int(hardware.pool_gib * 2**30) // page_bytes
    page_tokens = page_bytes // model.kv_bytes_per_token
    rows_per_page = page_bytes // model.row_bytes
    if page_tokens < 1 or rows_per_page < 1:
        raise UserError(
            f"hardware.page_kib = {hardware.page_kib} is too small: a page must hold at least one token's "
            f"keys and values ({model.kv_bytes_per_token} B) and one row ({model.row_bytes} B)"
        )
    if not _MIN_PAGES <= pages <= MAX_PAGES:
        raise UserError(
            f"hardware.pool_gib = {hardware.pool_gib:g} holds {pages} pages of hardware.page_kib = "
            f"{hardware.page_kib} KiB; there must be {_MIN_PAGES} to {MAX_PAGES}"
        )
    return pages, page_tokens, rows_per_page


def _slope(hits: npt.NDArray[np.float64], share: float) -> float:
    """Return the hits gained per unit of the pool at a size of `share` of it."""
    low = max(0, int((share - _MARGIN_SPAN) * hits.size))
    high = min(hits.size, max(low + 1, math.ceil((share + _MARGIN_SPAN) * hits.size)))
    return float(hits[low:high].sum()) * hits.size / (high - low)


def plain(trace: Trace) -> Trace:
    """Return the trace with contiguous, writeable columns: any other is another type to numba, which compiles anew."""
    names = ("arrival_ns", "user", "phase", "history_tokens", "new_tokens", "item_offsets", "item_values")
    return replace(trace, **{name: np.require(getattr(trace, name), requirements=["C", "W"]) for name in names})
