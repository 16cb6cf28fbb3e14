"""One node on the wall clock: the live cache engine with payload, driven by a trace in real time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine import EmbeddingCache, HbmPool, KvCache
from cache_engine.backends.device import CudaUnavailableError, CupyDevice
from cache_engine.hashing import mix, reduce_range
from cache_engine.jit import kernel
from envs.serving import payload
from envs.serving.live_compute import EPOCH, Taken, new_compute
from envs.serving.node import page_layout, plain
from envs.serving.rows import ITEMS, build_rows, candidate_token_rows, token_rows
from helm_rl import latency
from helm_rl.errors import UserError
from helm_rl.margins import Margins, Saved
from helm_rl.memory import free_bytes
from helm_rl.metrics import WindowStats
from helm_rl.profiles.hardware import link_gb_s, resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario
from helm_rl.workloads.inspect import returning
from helm_rl.workloads.trace import Trace

BACKENDS = ("cpu", "cuda")
TABLES = 4
_MAX_REQUEST_ROWS = 1 << 22
_JOIN_S = 60.0


@dataclass(frozen=True)
class LiveTotals:
    """What was counted since the reset. Rows, pages and scores are verified in the warm-up, too."""

    requests: int  # completed on the wall clock, shed ones included
    shed: int
    refused: int  # histories for which the KV cache had no room
    rows_verified: int
    pages_verified: int  # of a stand-in
    wrong_bytes: int
    scores_verified: int  # of a network
    wrong_scores: int
    pages_moved: int  # ownership changes
    busy_s: float  # of link and accelerator, without the time that verifying and a stated bandwidth take
    engine_s: float  # of it inside calls of the cache engine


@dataclass(frozen=True)
class ServiceTimes:
    """What each of n requests took, NaN and -1 where it was not served."""

    link_ns: npt.NDArray[np.float64]  # [n] on the link
    compute_ns: npt.NDArray[np.float64]  # [n] of the batch that it was in
    batch: npt.NDArray[np.int64]  # [n] number of that batch
    prefix: npt.NDArray[np.int64]  # [n] tokens found
    fetched: npt.NDArray[np.int64]  # [n] rows that crossed the link


class LiveNode:
    """A serving node on the wall clock: pool, caches, host tables, copies and an HSTU are real.

    One thread is the link: request by request it finds the history's prefix in the KV cache and leases its pages, and
    reads the rows of what is not cached through the embedding cache. On the CPU that is a copy in memory, so the link
    is paced: it takes at least the time that the fetched bytes would at the scenario's bandwidth. A second thread is
    the accelerator: it takes what is ready in batches, and computes scores and the new keys and values. A third moves
    pages, a few on every tick. `reset` starts them, `run` waits for the end of a window and returns what was measured,
    `pause` stops the clock, `close` ends all and gives the memory back.

    For an hstu the network is computed (`envs.serving.live_compute.Network`); for a decoder a matrix product stands in.

    Times are those of the trace divided by `speed`; everything else happens in real time. Latency runs from a request's
    scheduled arrival, however late it is taken up.

    Limits: tokens and rows count in the window in which a request is taken by the link, arrivals in the one in which it
    arrives. What an embedding cache gains by a resize is filled by misses alone.

    Args:
        scenario: model, pool, control and queue; its load only says how popular rows are where the trace does not.
        trace: the arrivals.
        backend: where pool and network are: "cpu" or "cuda".
        speed: how many times faster than the trace's clock its requests arrive.
        compute_scale: times the compute time of the scenario's profile that a stand-in takes; 0: none.
        table_rows: rows of each of the TABLES host tables. Rows of the law that lie past them share others' places.
        tables: those of another node of the same model, to be shared, in place of new ones.
        verify: compare every row served, byte for byte, and every score with that of the whole request computed from
            the tables without any cache; of a stand-in every KV page.

    Raises:
        UserError: an unsound trace, a pool or tables that do not fit this machine, no GPU for "cuda".
    """

    def __init__(
        self,
        scenario: Scenario,
        trace: Trace,
        *,
        backend: str = "cpu",
        speed: float = 1.0,
        compute_scale: float = 1.0,
        table_rows: int = 1 << 21,
        tables: Sequence[npt.NDArray[np.uint8]] | None = None,
        verify: bool = False,
    ) -> None:
        if backend not in BACKENDS:
            raise UserError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if not 1e-6 <= speed <= 1e6:
            raise UserError(f"speed must be in [1e-6, 1e6], got {speed}")
        if not (math.isfinite(compute_scale) and compute_scale >= 0):
            raise UserError(f"compute_scale must be at least 0, got {compute_scale}")
        if not 1 <= table_rows < 2**31:
            raise UserError(f"table_rows must lie in 1 to {2**31 - 1}, got {table_rows}")
        if len(trace) == 0:
            raise UserError(f"trace {trace.meta.name} has no requests: there is nothing to serve")
        trace.validate()  # the kernels rely on it: they check no index
        model = resolve_model(scenario.model)
        hardware = resolve_hardware(scenario.hardware)
        self.pages, page_tokens, self._rows_per_page = page_layout(scenario.hardware, model)
        self._page_bytes = scenario.hardware.page_kib * 1024
        need = self.pages * self._page_bytes + (TABLES * table_rows * model.row_bytes if tables is None else 0)
        _refuse_larger_than_memory(scenario, need)
        try:
            # The link has a stream of its own.
            self._device = CupyDevice().fork() if backend == "cuda" else None
        except CudaUnavailableError as error:
            raise UserError(str(error)) from None
        most_tokens = int(trace.history_tokens.max())
        self.compute = new_compute(model, hardware, backend, compute_scale, most_tokens)
        self.scenario = scenario
        self.trace = _at_speed(plain(trace), speed)
        self.backend = backend
        self.verify = verify
        self._model = model
        self._rows = build_rows(
            self.trace,
            features=model.features_per_token,
            candidates=model.candidates,
            page_tokens=page_tokens,
            rate=1.0,
            head=0,
            zipf=scenario.load.zipf_items,
            items=scenario.load.items,
        )
        most_rows = (most_tokens + model.candidates) * model.features_per_token
        if most_rows > _MAX_REQUEST_ROWS:
            raise UserError(
                f"trace {trace.meta.name} has a history of {most_tokens} tokens: with model.features_per_token = "
                f"{model.features_per_token} and model.candidates = {model.candidates} one request reads {most_rows} "
                f"rows; at most {_MAX_REQUEST_ROWS} are possible"
            )
        if tables is None:
            tables = [payload.make_table(k, table_rows, model.row_bytes) for k in range(TABLES)]
        self.tables = list(tables)
        self._most_rows = most_rows
        # What a token reads must be a function of its user and place alone, or cached keys and values would be others.
        _, first, user_at = np.unique(self.trace.user, return_index=True, return_inverse=True)
        self._home_phase = self.trace.phase[first][user_at]
        self._returning = returning(self.trace)
        self._link_gb_s = link_gb_s(scenario.hardware)
        # What a hit saves by the profile, as in the simulator, in ms.
        self._row_ms = model.row_bytes / self._link_gb_s * 1e-6
        self._token_ms = compute_scale * model.flops_per_token / hardware.flop_per_s * 1e3
        self._slo_ns = np.full(2, scenario.slo_ms * 1e6)
        # Of counters, queues and ghosts; the pool's lock is taken within it, never the other way round.
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._halted = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pool: HbmPool | None = None
        self._error: BaseException | None = None
        self._closed = False
        self.revision = 0  # of the target
        self._use_once()

    def reset(self, alpha: float, start_ns: int, warm_ns: int = 0) -> None:
        """Start anew at `start_ns` of the trace's clock, with empty KV cache and the most popular rows in the other.

        The requests of the `warm_ns` before are served first, as fast as can be; a stand-in takes no time for them.
        """
        if self._closed:
            raise RuntimeError("the node was closed: make a new one")
        self._shut_down()
        self._start_engine(alpha)
        self._serve_largest()
        if self._rows.state.content[0] != ITEMS:
            self._fill()
        first, at = np.searchsorted(self.trace.arrival_ns, [start_ns - warm_ns, start_ns])
        self.now_ns = start_ns - warm_ns
        most = self.scenario.hardware.max_batch
        with self.compute.session():
            for i in range(int(first), int(at), most):
                batch = [self._take(k) for k in range(i, min(i + most, int(at)))]
                self.compute.warm(batch)
                self._end(batch)
        self._take_margins(start_ns)
        self._new_window()
        self._next = int(at)
        self._busy_ns = self._engine_ns = 0
        self.now_ns = start_ns
        self._origin_ns = time.monotonic_ns() - start_ns
        self._link_end_ns = start_ns
        self._paused_ns: int | None = None
        self._error = None
        self._stop.clear()
        self._halted.clear()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"helm-live-{name}", daemon=True)
            for name, work in (("link", self._link), ("compute", self._serve), ("migrate", self._migrate))
        ]
        for thread in self._threads:
            thread.start()

    def serve_at_once(self, numbers: Sequence[int]) -> list[Taken]:
        """Serve these requests as one batch here and now, beside the clock, and return it; `times` has what it took.

        In a session of `compute`, and while nothing arrives: the node's own threads must have nothing to do.
        """
        batch = [self._take(i) for i in numbers]
        self.times.compute_ns[numbers] = self.compute.run(batch, self._stop)
        self._end(batch)
        return batch

    def set_target(self, alpha: float, revision: int | None = None) -> bool:
        """Ask for `alpha`, within the scenario's bounds; NaN is refused with ValueError.

        revision: the sender's number of the target; one that is not above the last one's changes nothing, and False
        comes back. None: the next.
        """
        if not math.isfinite(alpha):
            raise ValueError(f"alpha must be a number in [0, 1], got {alpha}")
        number = self.revision + 1 if revision is None else revision
        if number <= self.revision:
            return False
        control = self.scenario.control
        self.target = min(max(alpha, control.alpha_min), control.alpha_max)
        self.revision = number
        self.pool.set_target(self.target, number)
        return True

    @property
    def pool(self) -> HbmPool:
        """The pool; it is another one after each reset."""
        if self._pool is None:
            raise RuntimeError("the node was closed: make a new one" if self._closed else "call reset first")
        return self._pool

    @property
    def alpha(self) -> float:
        """The share of the pool that the embedding cache owns now."""
        return self.pool.alpha

    @property
    def latency_ms(self) -> npt.NDArray[np.float32]:
        """Latency of each request from its scheduled arrival, [n]; NaN: not complete; shed: SHED_FACTOR * SLO."""
        return self._latency.latency_ms

    @property
    def took(self) -> npt.NDArray[np.float64]:
        """Requests served since the reset in each bin of latency (`helm_rl.latency`), [SKETCH_BINS]; a copy."""
        with self._lock:
            return self._took.copy()

    @property
    def totals(self) -> LiveTotals:
        """What was counted since the reset."""
        with self._lock:
            return LiveTotals(
                requests=self._requests,
                shed=self._shed,
                refused=self._refused,
                rows_verified=self._rows_verified,
                pages_verified=self._pages_verified,
                wrong_bytes=self._wrong_bytes,
                scores_verified=self._scores_verified,
                wrong_scores=self._wrong_scores,
                pages_moved=self._pages_moved,
                busy_s=self._busy_ns * 1e-9,
                engine_s=self._engine_ns * 1e-9,
            )

    @property
    def paused(self) -> bool:
        """Whether the clock stands."""
        return self._paused_ns is not None

    def clock_ns(self) -> int:
        """Return the time now, on the trace's clock."""
        paused_ns = self._paused_ns  # read once: another thread may let the clock go on
        return time.monotonic_ns() - self._origin_ns if paused_ns is None else paused_ns

    def pause(self) -> None:
        """Finish what link and accelerator have begun, take up nothing more, move no page, and stop the clock; twice is
        harmless.
        """
        with self._lock:
            self._pausing = True
            self._lock.wait_for(lambda: self._stop.is_set() or not (self._on_link or self._computing))
            self._paused_ns = self.clock_ns()

    def resume(self) -> None:
        """Let the clock go on where `pause` has stopped it; harmless where it has not."""
        with self._lock:
            if self._paused_ns is not None:
                self._origin_ns = time.monotonic_ns() - self._paused_ns
            self._pausing, self._paused_ns = False, None
            self._lock.notify_all()

    def wait(self, until_ns: int) -> None:
        """Sleep until `until_ns` of the trace's clock.

        Raises:
            RuntimeError: a thread of the node failed (its error is the cause), or the node was closed meanwhile.
        """
        while (left_ns := until_ns - self.clock_ns()) > 0 and not self._halted.wait(left_ns * 1e-9):
            pass
        if self._error is not None:
            raise RuntimeError(f"serving failed: {self._error!r}; reset starts anew") from self._error
        if self._halted.is_set():
            raise RuntimeError("the node was closed while it was serving")

    def run(self, until_ns: int) -> WindowStats:
        """Sleep until `until_ns` of the trace's clock and return what was measured since the last call; see `wait`."""
        pool = self.pool
        self.wait(until_ns)
        alpha, backlog = pool.alpha, pool.backlog
        with self._lock:
            now = self.clock_ns()
            self._admit(now)
            stats = self._window_stats(now, alpha, backlog)
            self._new_window()
            self.now_ns = now
        return stats

    def close(self) -> None:
        """Stop the threads and give the memory back; twice is harmless."""
        self._closed = True
        self._shut_down()
        self.tables = []

    def _shut_down(self) -> None:
        self._halt()
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                raise RuntimeError(f"thread {thread.name} has not ended within {_JOIN_S:g} s")
        self._threads = []
        self.compute.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _halt(self) -> None:
        """Tell all threads to stop."""
        self._stop.set()
        self._halted.set()
        with self._lock:
            self._lock.notify_all()

    def _start_engine(self, alpha: float) -> None:
        scenario, model = self.scenario, self._model
        self._pool = pool = HbmPool(self.pages, self._page_bytes, backend=self.backend, device=self._device)
        most = min(self.pages - 1, math.ceil(scenario.control.alpha_max * self.pages) + 1)
        self._emb = EmbeddingCache(
            pool,
            row_bytes=model.row_bytes,
            tables=self.tables,
            max_pages=most,
            policy=scenario.hardware.emb_policy,
            ghost=True,
        )
        self._kv = KvCache(pool, token_bytes=model.kv_bytes_per_token, ghost=True)
        self._margins = Margins(
            pool,
            self._emb,
            self._kv,
            row_ms=self._row_ms,
            token_ms=self._token_ms,
            rows_per_token=model.features_per_token,
        )
        # The system gives memory at its first use: let that be now, not while requests wait.
        _touch(pool.storage, *pool.state, *self._emb.state, *self._kv.state)
        self.compute.start(pool)
        self.revision = 0
        self.set_target(alpha)
        pool.migrate(self.pages)
        requests = len(self.trace)
        self._latency = latency.new_latency_state(
            self._slo_ns, np.zeros(requests, np.int32), np.full(requests, np.nan, np.float32)
        )
        self._took = np.zeros(latency.SKETCH_BINS)
        self._link_busy_ns = self._compute_busy_ns = 0
        self.times = ServiceTimes(
            np.full(requests, np.nan), np.full(requests, np.nan), *(np.full(requests, -1) for _ in range(3))
        )
        self._batches = 0
        self._waiting: deque[int] = deque()  # for the link
        self._ready: deque[Taken] = deque()  # for the accelerator
        self._on_link = self._pausing = False
        self._computing = 0
        self._requests = self._shed = self._refused = 0
        self._rows_verified = self._pages_verified = self._wrong_bytes = self._pages_moved = 0
        self._scores_verified = self._wrong_scores = 0
        self._busy_ns = self._engine_ns = 0
        self._new_window()

    def _use_once(self) -> None:
        """Serve a request into caches that are then thrown away: what is compiled or loaded at first use, is now."""
        self.now_ns = 0
        self._start_engine(0.5)
        batch = [self._take(0)]
        with self.compute.session():
            self.compute.run(batch, threading.Event())
            self._end(batch)
        latency.complete(self._latency, 0, 1.0)
        latency.count(self._took, 1.0)
        latency.shed(self._latency, 0)
        self._window_stats(0, 0.5, 0)
        for alpha in (self.scenario.control.alpha_min, self.scenario.control.alpha_max):
            self.set_target(alpha)
            self.pool.migrate(self.pages)
        self._shut_down()

    def _serve_largest(self) -> None:
        """Look up as many rows as the largest request has, and forget them: buffers have grown to their size then."""
        n = min(self._most_rows, self.pages * self._rows_per_page, TABLES * len(self.tables[0]))
        rows = np.arange(n - 1, -1, -1, dtype=np.int64)
        self._emb.lookup(rows // TABLES, rows % TABLES)
        self._emb.invalidate(rows // TABLES, rows % TABLES)

    def _fill(self) -> None:
        """Fill the embedding cache with the most popular rows, the most popular last."""
        slots = self.pool.owned("emb") * self._rows_per_page
        rows = np.arange(min(self._rows.strata, slots, TABLES * len(self.tables[0])) - 1, -1, -1, dtype=np.int64)
        self._emb.refill(rows // TABLES, rows % TABLES)
        self._emb.advance_refill(wait=True)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            self._halt()

    def _link(self) -> None:
        """Let one request after the other read its rows, until told to stop."""
        while (i := self._next_for_link()) is not None:
            began_ns, begun = self.clock_ns(), time.perf_counter_ns()
            one = self._take(i)
            took_ns = time.perf_counter_ns() - begun
            transfer_ns = 0.0
            if self._device is None:
                transfer_ns = one.fetched * self._model.row_bytes / self._link_gb_s
                # From when the link was free, not from when this thread woke up: no time is lost between transfers.
                self._link_end_ns = max(self._link_end_ns, began_ns) + round(transfer_ns)
                self._stop.wait(max(0, self._link_end_ns - self.clock_ns()) * 1e-9)
            with self._lock:
                self.times.link_ns[i] = max(took_ns, transfer_ns)
                self._link_busy_ns += round(max(took_ns, transfer_ns))
                self._busy_ns += took_ns
                self._on_link = False
                self._ready.append(one)
                self._lock.notify_all()

    def _next_for_link(self) -> int | None:
        """Wait for the next request and take it off the queue; None: the node stops."""
        arrival_ns = self.trace.arrival_ns
        with self._lock:
            while not self._stop.is_set():
                left_s = None
                if not self._pausing:
                    now = self.clock_ns()
                    self._admit(now)
                    if self._waiting:
                        self._on_link = True
                        return self._waiting.popleft()
                    if self._next < len(arrival_ns):
                        left_s = max(0, int(arrival_ns[self._next]) - now) * 1e-9
                self._lock.wait(left_s)
        return None

    def _serve(self) -> None:
        """Compute batches until told to stop."""
        with self.compute.session():
            while batch := self._next_batch():
                self._serve_batch(batch)

    def _next_batch(self) -> list[Taken]:
        """Wait for requests that are ready and take them off the queue; none: the node stops."""
        with self._lock:
            self._computing = 0
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._stop.is_set() or (self._ready and not self._pausing))
            if self._stop.is_set():
                return []
            self._admit(self.clock_ns())
            most = min(self.scenario.hardware.max_batch, len(self._ready))
            batch = [self._ready.popleft() for _ in range(most)]
            self._computing = len(batch)
            return batch

    def _admit(self, now_ns: int) -> None:
        """Queue what has arrived by `now_ns`. Whoever takes requests out calls this first: so what finds the queue full
        here found it full when it arrived.
        """
        last = int(np.searchsorted(self.trace.arrival_ns, now_ns, side="right"))
        for i in range(self._next, last):
            self._arrivals += 1
            self._returned += int(self._returning[i])
            if self._queued >= self.scenario.hardware.queue_bound:
                latency.shed(self._latency, i)
                self._shed += 1
                self._requests += 1
            else:
                self._waiting.append(i)
        self._next = last

    @property
    def _queued(self) -> int:
        """Requests that wait for the link, are on it, or wait for the accelerator."""
        return len(self._waiting) + self._on_link + len(self._ready)

    def _serve_batch(self, batch: Sequence[Taken]) -> None:
        begun = time.perf_counter_ns()
        compute_ns = self.compute.run(batch, self._stop)
        ended = time.perf_counter_ns()
        numbers = [one.number for one in batch]
        with self._lock:
            now = self.clock_ns()
            for i in numbers:
                took_ms = max(now - int(self.trace.arrival_ns[i]), 1) * 1e-6
                latency.complete(self._latency, i, took_ms)
                latency.count(self._took, took_ms)
            self.times.compute_ns[numbers] = compute_ns
            self.times.batch[numbers] = self._batches
            self._batches += 1
            self._compute_busy_ns += compute_ns
            self._busy_ns += ended - begun
            self._requests += len(batch)
        self._end(batch)

    def _take(self, i: int) -> Taken:
        """Find the history's prefix and lease its pages, and read the rows of the rest and of the candidates."""
        trace, pool = self.trace, self.pool
        user, history = int(trace.user[i]), int(trace.history_tokens[i])
        begun = time.perf_counter_ns()
        with pool.lock:  # nothing may be evicted between the look-up and the lease
            # Newest events were never computed, so they cannot be found.
            prefix = self._kv.lookup(user, history - int(trace.new_tokens[i]), EPOCH)
            kept = self._kv.extend(user, history, EPOCH)
            lease = self._kv.lease(user)
            pages = self._kv.pages(user)
        engine_ns = time.perf_counter_ns() - begun
        ids, tables = self.rows_of(i, prefix)
        begun = time.perf_counter_ns()
        rows = self._emb.lookup(ids, tables)
        hits = int(np.count_nonzero(self._on_host(rows.hit)))  # on a device it waits for the rows, too
        engine_ns += time.perf_counter_ns() - begun
        wrong = payload.wrong_row_bytes(self._on_host(rows.rows), tables, ids) if self.verify else 0
        one = Taken(i, user, prefix, history, pages, lease, rows.rows, rows.fetched)
        self.compute.take(one)
        with self._lock:
            self.times.prefix[i], self.times.fetched[i] = prefix, rows.fetched
            self._tokens += history
            self._tokens_hit += prefix
            self._rows_asked += ids.size
            self._rows_hit += hits
            self._fetched += rows.fetched
            self._looked_up += 1
            self._engine_ns += engine_ns
            self._refused += not kept
            self._rows_verified += ids.size if self.verify else 0
            self._wrong_bytes += wrong
        return one

    def rows_of(self, i: int, first: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
        """Return row and table of what request `i` reads for its tokens from `first` on, and for its candidates."""
        trace, rows, model = self.trace, self._rows.state, self._model
        history = int(trace.history_tokens[i])
        keys = np.empty((history - first + model.candidates) * model.features_per_token, np.int64)
        n = token_rows(rows, keys, i, int(trace.user[i]), int(self._home_phase[i]), first, history)
        candidate_token_rows(rows, keys, n, i, int(trace.phase[i]), model.candidates)
        ids, tables = np.empty(keys.size, np.int64), np.empty(keys.size, np.int16)
        _locate(keys, ids, tables, TABLES, len(self.tables[0]))
        return ids, tables

    def _from_tables(self, i: int) -> npt.NDArray[np.uint8]:
        """Return all rows of request `i`, [n, row_bytes], read where they come from."""
        ids, tables = self.rows_of(i, 0)
        rows = np.empty((ids.size, self._model.row_bytes), np.uint8)
        for number, table in enumerate(self.tables):
            its = tables == number
            rows[its] = table[ids[its]]
        return rows

    def _on_host(self, array: Any) -> npt.NDArray[Any]:
        return array if self._device is None else self._device.read(array)

    def _end(self, batch: Sequence[Taken]) -> None:
        """Check what the batch has used and given, and let go of its pages."""
        for one in batch:
            if self.verify:
                found = self.compute.check(one, self._from_tables(one.number))
                with self._lock:
                    self._pages_verified += found.pages
                    self._wrong_bytes += found.wrong_bytes
                    self._scores_verified += found.scores
                    self._wrong_scores += found.wrong_scores
            if one.lease is not None:
                one.lease.release()

    def _migrate(self) -> None:
        """Move pages on every tick until told to stop; a tick that was missed is not made up for."""
        control = self.scenario.control
        tick_ns = max(1, round(min(control.tick_s, control.interval_s) * 1e9))
        budget = 0.0
        due = time.monotonic_ns()
        while True:
            now = time.monotonic_ns()
            due += ((now - due) // tick_ns + 1) * tick_ns
            if self._stop.wait((due - now) * 1e-9):
                return
            if self._pausing or not self.pool.backlog:
                continue
            budget += control.migrate_pages_per_s * tick_ns * 1e-9
            whole = int(budget)
            budget -= whole
            moved = self.pool.migrate(whole).granted
            with self._lock:
                self._moved += moved
                self._pages_moved += moved

    def _new_window(self) -> None:
        latency.start_window(self._latency)
        self._link_busy_ns = self._compute_busy_ns = 0
        self._arrivals = self._returned = self._tokens = self._tokens_hit = 0
        self._looked_up = self._rows_asked = self._rows_hit = self._fetched = self._moved = 0

    def _take_margins(self, now_ns: int) -> Saved:
        seconds = (now_ns - self.now_ns) * 1e-9
        return self._margins.take(self._looked_up, self._rows_asked, self._fetched, seconds)

    def _window_stats(self, now_ns: int, alpha: float, backlog: int) -> WindowStats:
        w = self._latency.window
        margins = self._take_margins(now_ns)
        return WindowStats(
            start_ns=self.now_ns,
            end_ns=now_ns,
            arrivals=self._arrivals,
            returning=self._returned,
            completed=int(w[latency.COMPLETED]),
            slow=int(w[latency.SLOW]),
            shed=int(w[latency.SHED]),
            history_tokens=self._tokens,
            history_tokens_hit=self._tokens_hit,
            rows=float(self._rows_asked),
            rows_hit=float(self._rows_hit),
            log_latency_sum=float(w[latency.LOG_SUM]),
            tail_cost_sum=float(w[latency.TAIL_SUM]),
            latency_ms_sum=float(w[latency.MS_SUM]),
            p99_ms=float(latency.sketch_p99_ms(self._latency)),
            link_busy_ns=self._link_busy_ns,
            compute_busy_ns=self._compute_busy_ns,
            queue=self._queued,
            queue_bound=self.scenario.hardware.queue_bound,
            alpha=alpha,
            target=self.target,
            backlog_pages=backlog,
            moved_pages=self._moved,
            pages=self.pages,
            emb_margin_ms=margins.emb_ms,
            kv_margin_ms=margins.kv_ms,
            kv_margin_link_ms=margins.kv_link_ms,
        )


@kernel
def _locate(
    keys: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int16],
    table_count: int,
    table_rows: int,
) -> None:
    """Give each key its row: popular rows lie in turn in all tables; a key past them all shares another's place."""
    for j in range(keys.size):
        row = keys[j]
        if row >= table_count * table_rows:
            row = reduce_range(mix(np.uint64(row)), table_rows) * table_count + row % table_count
        ids[j] = row // table_count
        tables[j] = row % table_count


def _touch(*arrays: Any) -> None:
    """Write to every byte of the arrays of NumPy among these what it holds already."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            flat = array.reshape(-1).view(np.uint8)
            np.bitwise_or(flat, 0, out=flat)


def _at_speed(trace: Trace, speed: float) -> Trace:
    """Return the trace with its times divided by `speed`."""
    if speed == 1.0:
        return trace
    meta = trace.meta
    phases = tuple(
        phase.model_copy(update={"start_ns": int(phase.start_ns / speed), "end_ns": int(phase.end_ns / speed)})
        for phase in meta.phases
    )
    return replace(
        trace,
        arrival_ns=(trace.arrival_ns / speed).astype(np.int64),
        meta=meta.model_copy(update={"phases": phases, "measure_from_ns": int(meta.measure_from_ns / speed)}),
    )


def _refuse_larger_than_memory(scenario: Scenario, need_bytes: int) -> None:
    """Refuse what the machine has no memory for, before it is taken from whatever else runs there."""
    free = free_bytes()
    if need_bytes > free:
        raise UserError(
            f"scenario {scenario.name} needs {need_bytes / 2**30:.1f} GiB of memory for pool and tables, and "
            f"{free / 2**30:.1f} GiB are free: lower hardware.pool_gib or table_rows, or use scenario laptop"
        )
