"""One node on the model clock: virtual time, deterministic, driven by a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, ghost, kv, kv_host, pool
from envs.serving import loop, packed, queues
from envs.serving.rows import ITEMS, RowModel, build_rows
from helm_rl import latency
from helm_rl.control import burst
from helm_rl.control.burst import BurstState
from helm_rl.errors import UserError
from helm_rl.margins import GHOST_MEMORY_S
from helm_rl.metrics import WindowStats
from helm_rl.profiles.hardware import ONBOARD_BATCH, link_gb_s, pcie_gb_s, resolve_hardware
from helm_rl.profiles.model import ModelProfile, resolve_model
from helm_rl.scenario import HardwareSection, Scenario
from helm_rl.workloads.inspect import returning
from helm_rl.workloads.trace import Trace

MAX_SAMPLED_SLOTS = 1 << 19  # `helm-rl bench model --parts sampling` says what it costs in accuracy
MAX_PAGES = 1 << 23  # 0.9 GiB of metadata
MAX_REQUEST_ROWS = 1 << 22  # sampled rows; 0.3 GiB of scratch
MAX_INTERVALS = 1_000_000  # 11 days of 1 s; a replay takes minutes then, whatever arrives
_MIN_PAGES = 16
_HEAD_ROWS = 65_536
_GHOST_BUCKETS = 256
CURVE_STEPS = 64  # of WindowStats.emb_saved_ms
_MARGIN_SPAN = 0.04  # margins are slopes of the ghost's curve over this share of the pool on either side
_PIECE_BYTES = 1 << 20  # of what is fetched in the background
_LITTLE = 0.01
EMB, KV = 0, 1

_NOTHING = np.zeros((0, 2))


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """What `NodeSim.save` keeps."""

    arrays: tuple[npt.NDArray[Any], ...]
    target: float
    now_ns: int
    ghost_requests: float


class ServedTrace:
    """A trace as the kernels take it; the nodes that serve it share one.

    Raises:
        UserError: an unsound or empty trace, one too long, or tenants that the scenario does not have.
    """

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        if len(trace) == 0:
            raise UserError(f"trace {trace.meta.name} has no requests: there is nothing to serve")
        trace.validate()  # the kernels rely on it: they check no index
        self.trace = trace = plain(trace)
        start_ns = min(int(trace.arrival_ns[0]), trace.meta.measure_from_ns)  # as `NodeSim.reset` has it
        seconds = (int(trace.arrival_ns[-1]) - start_ns) / 1e9
        if seconds > MAX_INTERVALS * scenario.control.interval_s:
            raise UserError(
                f"trace {trace.meta.name} lasts {seconds:,.0f} s, more than {MAX_INTERVALS:,} intervals of "
                f"control.interval_s = {scenario.control.interval_s:g}; cut it, or speed it up (trace convert has "
                "--end-s and --speed-up), or lengthen the interval"
            )
        if scenario.tenant and int(trace.tenant.max()) >= len(scenario.tenant):
            raise UserError(
                f"trace {trace.meta.name} has a tenant {trace.tenant.max()}, and scenario {scenario.name} has only "
                f"{len(scenario.tenant)} (counted from 0); add [[tenant]] tables"
            )
        self.tenant = trace.tenant if scenario.tenant else np.zeros(len(trace), np.int32)
        user = trace.user
        order = np.argsort(user, kind="stable")
        same = user[order][1:] == user[order][:-1]
        self.previous = np.full(user.size, -1, np.int64)
        """The number of the user's request before each, [n]; -1: it is his first."""
        self.previous[order[1:][same]] = order[:-1][same]
        self.requests = loop.Requests(
            trace.arrival_ns,
            user,
            trace.phase,
            trace.history_tokens,
            trace.new_tokens,
            returning(trace),
            self.previous >= 0,
        )
        self._rows: dict[tuple[Any, ...], RowModel] = {}

    def rows(self, scenario: Scenario, model: ModelProfile, page_tokens: int, rate: float, head: int) -> RowModel:
        """Return the rows of the trace sampled at `rate`; nodes that ask for the same get the same."""
        key = (page_tokens, rate, head)
        if key not in self._rows:
            self._rows[key] = build_rows(
                self.trace,
                features=model.features_per_token,
                candidates=model.candidates,
                page_tokens=page_tokens,
                rate=rate,
                head=head,
                zipf=scenario.load.zipf_items,
                items=scenario.load.items,
            )
        rows = self._rows[key]
        if rows.max_rows > MAX_REQUEST_ROWS:
            raise UserError(
                f"trace {self.trace.meta.name} has a history of {self.trace.history_tokens.max()} tokens: with "
                f"model.features_per_token = {model.features_per_token} and model.candidates = {model.candidates} one "
                f"request reads {rows.max_rows} sampled rows; at most {MAX_REQUEST_ROWS} are possible"
            )
        return rows


class NodeSim:
    """A serving node: pool, caches, link and accelerator under one trace.

    `reset` puts it at the start with a given alpha, `run` serves until a time of the trace's clock and returns what was
    measured, `set_target` asks for another alpha, which `run` then approaches within the migration budget. Everything
    is a function of scenario, trace and the targets: no random numbers are drawn while serving.

    Caches start as after a long time without a history of requests: the embedding cache holds the most popular rows,
    the KV cache is empty; the trace's warm-up fills it. Pages that the embedding cache gains later are filled by what
    misses and, in the background, by the most popular rows that it lacks (hardware.refill_share).

    Limits: what a request reads and computes is in the caches as soon as it arrives; a user whose history has reached
    its maximum is taken to keep it (no slide of the window); keys and values go to host memory without using PCIe's
    other direction up.

    Args:
        scenario: what serves, on what; its load only says how popular rows are where the trace does not.
        trace: the arrivals.
        alpha, start_ns: see `reset`.
        max_sampled_slots: embedding rows that the pool is taken to hold at most; of more, a sample is simulated.
        hardware: of this node of a cluster, in place of the scenario's.
        served: the trace, made ready once for several nodes.
        latency_ms: where latencies go, float32 [n], for nodes that share the trace's requests; None: an array of its
            own, new at each reset.

    Raises:
        UserError: an unsound or empty trace, a model that does not fit the pool's pages, or events of a cluster.
    """

    def __init__(
        self,
        scenario: Scenario,
        trace: Trace,
        alpha: float = 0.5,
        start_ns: int | None = None,
        *,
        max_sampled_slots: int = MAX_SAMPLED_SLOTS,
        hardware: HardwareSection | None = None,
        served: ServedTrace | None = None,
        latency_ms: npt.NDArray[np.float32] | None = None,
    ) -> None:
        if scenario.event and hardware is None:
            raise UserError(
                f"scenario {scenario.name} has [[event]] tables, and one node is simulated here, which is always up: "
                "leave them out (HelmCluster-v0 takes them)"
            )
        served = ServedTrace(scenario, trace) if served is None else served
        self.scenario = scenario
        self.trace = trace = served.trace
        self.hardware = section = scenario.hardware if hardware is None else hardware
        model = resolve_model(scenario.model)
        profile = resolve_hardware(section)
        self.pages, self.page_tokens, rows_per_page = page_layout(section, model)
        control = scenario.control
        sampled_rows = max(1, min(rows_per_page, max_sampled_slots // self.pages))
        self.rate = sampled_rows / rows_per_page
        smallest = max(1, int(control.alpha_min * self.pages)) * rows_per_page
        self._rows = served.rows(scenario, model, self.page_tokens, self.rate, min(_HEAD_ROWS, smallest // 16))
        self.slo_ns = scenario.slo_ms * 1e6
        self.end_ns = int(trace.arrival_ns[-1]) + 1
        self._served = served
        self._sampled_rows = sampled_rows
        self._tick_ns = max(1, round(min(control.tick_s, control.interval_s) * 1e9))
        link, pcie, page_bytes = link_gb_s(section), pcie_gb_s(section), section.page_kib * 1024
        # ms that a hit saves: a row's transfer, or a token's prefill.
        self._row_ms = model.row_bytes / link * 1e-6
        self._token_ms = profile.prefill_ns(model.flops_per_token, 0.0) * 1e-6
        self._features = model.features_per_token
        self._params = np.zeros(loop.N_PARAMS)
        self._params[loop.TOKEN_NS] = profile.prefill_ns(model.flops_per_token, 0.0)
        self._params[loop.PAIR_NS] = profile.prefill_ns(0.0, model.flops_per_pair)
        self._params[loop.ROW_BYTES] = model.row_bytes
        self._params[loop.ROW_NS] = model.row_bytes / link
        self._params[loop.ROWS_PER_TOKEN] = model.features_per_token
        self._params[loop.CANDIDATES] = model.candidates
        self._params[loop.TICK_NS] = self._tick_ns
        self._params[loop.PAGES_PER_TICK] = control.migrate_pages_per_s * self._tick_ns * 1e-9
        self._params[loop.KV_MISS] = loop.KV_MISSES[section.kv_miss]
        self._params[loop.PAGE_BYTES] = page_bytes
        self._params[loop.PAGE_NS] = page_bytes / pcie
        self._params[loop.ONBOARD_NS] = profile.onboard_ms * 1e6
        self._params[loop.ONBOARD_PCIE_NS] = profile.onboard_ms * 1e6 / ONBOARD_BATCH
        self._params[loop.PCIE_IS_LINK] = section.link == "local-host"
        self._host_pages = int(section.kv_host_gib * 2**30) // page_bytes
        if self._host_pages > MAX_PAGES:
            raise UserError(
                f"hardware.kv_host_gib = {section.kv_host_gib:g} holds {self._host_pages} pages of hardware.page_kib = "
                f"{section.page_kib} KiB; at most {MAX_PAGES} can be simulated"
            )
        queue = np.zeros(queues.N_PARAMS)
        queue[queues.BATCH_NS] = profile.batch_ms * 1e6
        queue[queues.REQUEST_NS] = profile.request_ms * 1e6
        queue[queues.MAX_BATCH] = section.max_batch
        queue[queues.QUEUE_BOUND] = section.queue_bound
        queue[queues.BACKGROUND_SHARE] = section.refill_share
        queue[queues.PIECE_NS] = _PIECE_BYTES / link
        self._queue_params = queue
        tenants = scenario.tenant
        self._slo_ns = np.array([(tenant.slo_ms or scenario.slo_ms) * 1e6 for tenant in tenants] + [self.slo_ns])
        if not tenants:
            self._slo_ns = np.array([self.slo_ns, self.slo_ns])
        self._weight = np.array([tenant.weight for tenant in tenants] or [1.0])
        self._priority = np.array([tenant.priority for tenant in tenants] or [0], np.int64)
        self._shared_ms = latency_ms
        self._ghost_rate = min(1.0, 8192.0 / (self.pages * sampled_rows))
        self.reset(alpha, start_ns)

    def reset(self, alpha: float, start_ns: int | None = None, empty: bool = False) -> None:
        """Start anew with `alpha` applied, at the first request or at `start_ns` of the trace's clock.

        `alpha` is clipped to the scenario's bounds; NaN is refused with ValueError. empty: with no rows cached.
        """
        pages, trace, scenario = self.pages, self.trace, self.scenario
        requests = self._served.requests
        own_pool = pool.new_pool_state(pages, 2)
        self._pool = own_pool
        self.set_target(alpha)
        most = largest_partition(scenario, pages)
        policy = embedding.POLICIES[self.hardware.emb_policy]
        scratch = embedding.new_embedding_scratch(max(1024, loop.REFILL_ROWS, self._rows.max_rows, self._sampled_rows))
        latency_ms = np.full(len(trace), np.nan, np.float32) if self._shared_ms is None else self._shared_ms
        measured = latency.new_latency_state(self._slo_ns, self._served.tenant, latency_ms, scenario.telemetry.sample)
        start = min(int(trace.arrival_ns[0]), trace.meta.measure_from_ns) if start_ns is None else start_ns
        clocks = np.full(loop.N_CLOCKS, loop.NONE, np.int64)
        clocks[loop.NEXT_REQUEST] = 0 if start_ns is None else int(np.searchsorted(trace.arrival_ns, start_ns))
        clocks[loop.NEXT_TICK_NS] = start + self._tick_ns
        classes = loop.HOT + len(trace.meta.phases)
        seen = np.full(classes, loop.SMOOTHING)
        # The tail is there from the start; a hot set starts cold, and its first misses are charged with delay, but
        # no more often than they happen.
        seen[: loop.HOT] = 0.0
        size = scratch.slots.size
        self.state = loop.Node(
            params=self._params,
            clocks=clocks,
            window=np.zeros(loop.N_WINDOW),
            miss_rate=np.zeros(classes),
            seen=seen,
            fetch_rate=np.zeros(classes),
            counted=np.zeros((2, self._rows.state.class_first.size, 3)),
            learnt=np.zeros((2, self._rows.state.class_first.size, 3)),
            keys=np.zeros(size, np.int64),
            tables=np.zeros(size, np.int16),
            found=np.zeros(loop.REFILL_ROWS, np.bool_),
            moving=embedding.new_moving_rows(self._sampled_rows, 0),
            requests=requests,
            rows=self._rows.state,
            queue=queues.new_queue_state(
                self._queue_params, self._weight, self._priority, requests.arrival_ns, measured, start
            ),
            pool=own_pool,
            emb=embedding.new_embedding_state(pages, self._sampled_rows, most, EMB, policy),
            scratch=scratch,
            kv=kv.new_kv_state(pages, self.page_tokens, KV),
            host=kv_host.new_kv_host_state(self._host_pages, self.page_tokens, pages),
            emb_ghost=ghost.new_ghost_state(
                self._ghost_rate, 16_384, float(pages * self._sampled_rows), _GHOST_BUCKETS
            ),
            kv_ghost=ghost.new_ghost_state(1.0, min(16_384, 2 * pages), float(pages), _GHOST_BUCKETS),
        )
        self.packed = packed.pack(self.state)
        self.now_ns = start
        self._ghost_requests = 0.0
        embedding.accept_pages(self.state.emb, own_pool, pages)
        kv.accept_pages(self.state.kv, own_pool, pages)
        if self._rows.state.content[0] == ITEMS:
            return
        if not empty:
            self._fill()
        elif self.hardware.refill_share > 0:
            clocks[loop.REFILL_FROM] = 0

    def _fill(self) -> None:
        """Fill the embedding cache with the most popular rows, the most popular last."""
        node = self.state
        slots = int(node.pool.owned[EMB]) * self._sampled_rows
        keys = np.arange(min(self._rows.strata, slots) - 1, -1, -1, dtype=np.int64)
        size = node.scratch.slots.size
        for start in range(0, keys.size, size):
            part = keys[start : start + size]
            embedding.lookup(node.emb, node.pool, node.scratch, node.tables, part, part.size)

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
        return self.state.queue.measured.latency_ms

    @property
    def simulated_lookups(self) -> int:
        """Row lookups that the embedding cache has answered since the reset; each stands for 1 / rate rows."""
        return int(self.state.emb.counters[embedding.REQUESTED])

    def run(
        self,
        until_ns: int,
        detector: BurstState | None = None,
        *,
        stop: bool = False,
        seen: npt.NDArray[np.float64] = _NOTHING,
    ) -> WindowStats:
        """Serve until `until_ns` of the trace's clock and return what was measured since the last call.

        A detector looks at every tick of its own; with `stop` the window ends at the one at which it finds a burst.
        What it is shown at its first m ticks, arrivals and P99, goes to `seen`, float64 [m, 2].
        """
        if until_ns < self.now_ns:
            raise ValueError(f"until_ns = {until_ns} lies before the node's clock, {self.now_ns}")
        until_ns = int(until_ns)  # of a float the kernels would be compiled anew
        self.start_window(until_ns)
        if detector is None:
            packed.run(self.packed, until_ns)
            return self.end_window(until_ns)
        detector.sums[burst.PEAK] = 0.0
        until_ns = packed.run_watched(self.packed, self.now_ns, until_ns, detector, stop, seen)
        return self.end_window(until_ns, float(detector.sums[burst.PEAK]))

    def start_window(self, until_ns: int) -> None:
        """Begin to measure anew; the window will end at `until_ns`."""
        node, queue = self.state, self.state.queue
        latency.start_window(queue.measured)
        queue.sums[queues.LINK_BUSY] = queue.sums[queues.COMPUTE_BUSY] = 0.0
        node.window[: loop.KEPT] = 0.0
        decay = math.exp(-(until_ns - self.now_ns) * 1e-9 / GHOST_MEMORY_S)
        node.emb_ghost.hits[:] *= decay
        node.kv_ghost.hits[:] *= decay
        self._ghost_requests *= decay

    def end_window(self, until_ns: int, burst_score: float = 0.0) -> WindowStats:
        """Return what was measured since `start_window`; burst_score: what a detector made of it."""
        node, queue = self.state, self.state.queue
        start_ns, self.now_ns = self.now_ns, until_ns
        w, q, sums = node.window, queue.measured.window, queue.sums
        self._ghost_requests += w[loop.ARRIVALS]
        emb_ms, kv_ms, link_share = self._ghost_hit_ms()
        kv_margin_ms = 0.01 * _slope(node.kv_ghost.hits, 1.0 - self.alpha) * kv_ms
        emb_hits, kv_hits = node.emb_ghost.hits, node.kv_ghost.hits

        def whole(count: float) -> int:  # of a sample: an estimate
            return round(float(count))

        return WindowStats(
            start_ns=start_ns,
            end_ns=until_ns,
            arrivals=whole(w[loop.ARRIVALS]),
            returning=whole(w[loop.RETURNING]),
            completed=whole(q[latency.COMPLETED]),
            slow=whole(q[latency.SLOW]),
            shed=whole(q[latency.SHED]),
            history_tokens=whole(w[loop.TOKENS]),
            history_tokens_hit=whole(w[loop.TOKENS_HIT]),
            rows=float(w[loop.ROWS]),
            rows_hit=float(w[loop.ROWS_HIT]),
            log_latency_sum=float(q[latency.LOG_SUM]),
            tail_cost_sum=float(q[latency.TAIL_SUM]),
            latency_ms_sum=float(q[latency.MS_SUM]),
            p99_ms=float(latency.sketch_p99_ms(queue.measured)),
            link_busy_ns=int(sums[queues.LINK_BUSY]),
            compute_busy_ns=int(sums[queues.COMPUTE_BUSY]),
            queue=int(queues.waiting(queue)),
            queue_bound=self.hardware.queue_bound,
            alpha=self.alpha,
            target=self.target,
            backlog_pages=int(np.abs(self._pool.owned - self._pool.goal).max()),
            moved_pages=int(w[loop.MOVED]),
            pages=self.pages,
            emb_margin_ms=0.01 * _slope(emb_hits, self.alpha) * emb_ms,
            kv_margin_ms=kv_margin_ms,
            kv_margin_link_ms=link_share * kv_margin_ms,
            fetched_bytes=float(w[loop.FETCHED]),
            refilled_bytes=float(w[loop.REFILLED]),
            burst_score=burst_score,
            emb_saved_ms=_curve(emb_hits, emb_ms),
            kv_saved_ms=_curve(kv_hits, kv_ms),
        )

    def save(self) -> NodeSnapshot:
        """Return a copy of all that serving changes, for `restore`: 16 to 30 MB at production size."""
        return NodeSnapshot(
            tuple(array.copy() for array in self._changing()), self.target, self.now_ns, self._ghost_requests
        )

    def restore(self, snapshot: NodeSnapshot) -> None:
        """Go back to where `save` was called, on this node or another of the same scenario and trace."""
        for array, saved in zip(self._changing(), snapshot.arrays, strict=True):
            np.copyto(array, saved)
        self.state.scratch.seen[:] = 0  # it tells batches apart by numbers that now come again
        self.target, self.now_ns, self._ghost_requests = snapshot.target, snapshot.now_ns, snapshot.ghost_requests

    def _changing(self) -> list[npt.NDArray[Any]]:
        node, emb = self.state, self.state.emb
        own = [node.clocks, node.window, node.miss_rate, node.seen, node.fetch_rate, node.learnt]
        rows = [emb.word, emb.row, emb.queue, emb.spot, emb.fill, emb.fresh, emb.scalars, emb.counters]
        kept = ("arrival_ns", "measured")  # the trace's, and below
        queue: list[npt.NDArray[Any]] = [array for name, array in node.queue._asdict().items() if name not in kept]
        measured: list[npt.NDArray[Any]] = [
            node.queue.measured.latency_ms,
            node.queue.measured.window,
            node.queue.measured.sketch,
            node.queue.measured.tail,
        ]
        return [*own, *rows, *queue, *measured, *node.pool, *node.kv, *node.host, *node.emb_ghost, *node.kv_ghost]

    @property
    def state_bytes(self) -> int:
        """The bytes that this node's state takes, the trace's columns and latencies left out."""
        return sum(array.nbytes for array in self._changing()) - self.latency_ms.nbytes

    def drain(self) -> None:
        """Serve what is left of the trace and wait until every queue is empty, however long that takes."""
        self.run(max(self.end_ns, self.now_ns))
        self.empty_queues()

    def empty_queues(self) -> None:
        """Wait until every queue is empty, however long that takes.

        Raises RuntimeError if the mean number present is not the rate of arrivals times the mean time in the system
        (Little's law), which would be a fault of the simulator.
        """
        queue = self.state.queue
        queues.advance(queue, queues.FOREVER_NS)
        self.now_ns = max(self.now_ns, int(queue.clocks[queues.BATCH_END]))
        sums = queue.sums
        present, took = sums[queues.PRESENT_NS], sums[queues.LATENCY_NS] - sums[queues.ELSEWHERE_NS]
        if queue.clocks[queues.PRESENT] or abs(present - took) > _LITTLE * took + 1.0:
            raise RuntimeError(
                f"the simulator has lost count: {queue.clocks[queues.PRESENT]} requests are left, those present add up "
                f"to {present:g} requests x ns, and their times in the system to {took:g} ns"
            )

    def _ghost_hit_ms(self) -> tuple[float, float, float]:
        """Return the ms per request that a hit of each ghost, of rows and of users, stands for; 0 without requests.

        The last number is the link's share of what a hit of users saves.
        """
        requests = self._ghost_requests
        if requests == 0:
            return 0.0, 0.0, 0.0
        fetches = self.state.fetch_rate[loop.REREAD] * self._rows.state.tail_share[0]
        link_ms = self._features * fetches * self._row_ms
        token_ms = self._token_ms + link_ms
        return (
            float(self._row_ms / (self._ghost_rate * self.rate) / requests),
            float(self.page_tokens * token_ms / requests),
            float(link_ms / token_ms),
        )


def largest_partition(scenario: Scenario, pages: int) -> int:
    """Return the most pages that the embedding cache can come to own, for which its index is sized."""
    return min(pages - 1, math.ceil(scenario.control.alpha_max * pages) + 1)


def page_layout(hardware: HardwareSection, model: ModelProfile) -> tuple[int, int, int]:
    """Return the pool's pages, and how many tokens and how many rows a page holds; UserError where that cannot be."""
    if hardware.nodes != 1:
        raise UserError(
            f"hardware.nodes = {hardware.nodes}: one node is simulated here, so it must be 1 (`helm-rl eval routing` "
            "and HelmCluster-v0 take more)"
        )
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


def _curve(hits: npt.NDArray[np.float64], hit_ms: float) -> tuple[float, ...]:
    """Return what 0, 1 / CURVE_STEPS, ..., 1 of the pool would save, by a ghost whose hits are worth `hit_ms` each."""
    total = np.cumsum(hits.reshape(CURVE_STEPS, -1).sum(1)) * hit_ms
    return (0.0, *total.tolist())


def plain(trace: Trace) -> Trace:
    """Return the trace with contiguous, writeable columns: any other is another type to numba, which compiles anew."""
    names = ("arrival_ns", "user", "tenant", "phase", "history_tokens", "new_tokens", "item_offsets", "item_values")
    return replace(trace, **{name: np.require(getattr(trace, name), requirements=["C", "W"]) for name in names})
