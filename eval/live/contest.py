"""Static splits and a controller live on the same schedule, block by block in turns, so that drift hits all alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from envs.serving.live import LiveNode
from envs.serving.live_adapter import LiveAdapter
from eval.live.errors import drain
from eval.sweep import Sweep
from helm_rl.metrics import p99_ms, quantile_ms, shed_ms
from helm_rl.runtime.loop import ControlLoop
from helm_rl.runtime.steering import Steering
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace

_SAMPLE_NS = 250_000_000  # between looks at alpha
_PAUSED_S = 0.02  # between looks at a clock that stands

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Entrant:
    """Who takes part: a static split, or a controller that begins at `alpha`."""

    key: str
    title: str
    alpha: float
    steering: Steering | None = None


@dataclass(frozen=True)
class Result:
    """What an entrant came to: latencies of the measured requests in order of arrival [n], alpha over time [k]."""

    latency_ms: FloatArray
    time_ns: npt.NDArray[np.int64]
    alpha: FloatArray
    wrong_scores: int
    pages_moved: int
    decisions: int

    @property
    def p99_ms(self) -> float:
        """P99, a shed request counting as SHED_FACTOR times the SLO."""
        return p99_ms(self.latency_ms)

    @property
    def p50_ms(self) -> float:
        """Median."""
        return quantile_ms(self.latency_ms, 0.5)

    def within(self, slo_ms: float) -> float:
        """Return the share of requests within the SLO."""
        return float((self.latency_ms <= slo_ms).mean())

    def shed(self, slo_ms: float) -> int:
        """Return how many requests were refused."""
        return int((self.latency_ms == shed_ms(slo_ms)).sum())

    def ratio_gap(self, swept: Sweep) -> float:
        """Return the mean distance of alpha, in each segment's settled half, to the model clock's best one there."""
        distance = [
            np.abs(self.alpha[(self.time_ns >= span.middle_ns) & (self.time_ns < span.end_ns)] - curve.best)
            for span, curve in zip(swept.part.spans, swept.settled, strict=True)
        ]
        return float(np.concatenate(distance).mean())


@dataclass
class _Running:
    """An entrant's node, which stands still while others are served."""

    node: LiveNode
    loop: ControlLoop | None
    time_ns: list[int] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)

    def serve(self, until_ns: int) -> None:
        self.node.resume()
        while (now := self.node.clock_ns()) < until_ns:
            self.time_ns.append(now)
            self.alpha.append(self.node.alpha)
            self.node.wait(min(now + _SAMPLE_NS, until_ns))
        self.node.pause()


class _NodeClock:
    """A node's clock, for a control loop: it stands while the node is paused."""

    def __init__(self, node: LiveNode) -> None:
        self._node = node

    def now_ns(self) -> int:
        """Return its time."""
        return self._node.clock_ns()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until the event is set, at most so long by this clock; return whether it is."""
        due_ns = self.now_ns() + round(seconds * 1e9)
        while (left_ns := due_ns - self.now_ns()) > 0:
            if event.wait(_PAUSED_S if self._node.paused else left_ns * 1e-9):
                return True
        return event.is_set()


def contest(
    scenario: Scenario,
    trace: Trace,
    entrants: Sequence[Entrant],
    *,
    block_s: float,
    warm_s: float,
    table_rows: int,
    backend: str = "cpu",
    verify: bool = False,
    advance: Callable[[str, float], None] = lambda title, seconds: None,
) -> dict[str, Result]:
    """Serve the measured part of `trace` once for each entrant, on nodes that share the host tables.

    The schedule is cut into blocks; each is served by one entrant after the other, in an order that turns from block to
    block, and who waits stands still, clock and all. A controller runs as it does beside a serving system: a control
    loop on a thread of its own that reads the node's counters.

    Args:
        scenario: what serves.
        trace: the schedule.
        entrants: with distinct keys.
        block_s: length of a block.
        warm_s: of the trace before the measured part, served as fast as can be.
        table_rows, backend, verify: see `LiveNode`.
        advance: told who was served, and for how many seconds.

    Raises:
        RuntimeError: a request was lost, a node or a control loop failed.
    """
    start_ns, end_ns = trace.meta.measure_from_ns, trace.end_ns
    step_ns = round(block_s * 1e9)
    with contextlib.ExitStack() as stack:
        running: dict[str, _Running] = {}
        tables = None
        for one in entrants:
            node = LiveNode(scenario, trace, backend=backend, table_rows=table_rows, tables=tables, verify=verify)
            stack.callback(node.close)
            tables = node.tables
            node.reset(one.alpha, start_ns, round(warm_s * 1e9))
            node.pause()
            running[one.key] = _Running(node, _loop(one, node, scenario, stack))
            advance(f"{one.title}: caches warm", 0.0)
        order = list(entrants)
        for begin_ns in range(start_ns, end_ns, step_ns):
            until_ns = min(begin_ns + step_ns, end_ns)
            for one in order:
                running[one.key].serve(until_ns)
                advance(one.title, (until_ns - begin_ns) * 1e-9)
            order = [*order[1:], order[0]]
        results = {}
        for key, each in running.items():
            each.node.resume()
            drain(each.node, end_ns)
            if each.loop is not None:
                each.loop.stop()
            results[key] = _result(each, start_ns)
            each.node.close()
        return results


def _loop(one: Entrant, node: LiveNode, scenario: Scenario, stack: contextlib.ExitStack) -> ControlLoop | None:
    if one.steering is None:
        return None
    loop = ControlLoop(
        LiveAdapter(node),
        one.steering,
        scenario.control.interval_s,
        slo_ms=scenario.slo_ms,
        alpha0=one.alpha,
        clock=_NodeClock(node),
    )
    loop.start()
    stack.callback(loop.stop)
    return loop


def _result(each: _Running, start_ns: int) -> Result:
    node = each.node
    totals = node.totals
    return Result(
        latency_ms=node.latency_ms[node.trace.arrival_ns >= start_ns].astype(np.float64),
        time_ns=np.array(each.time_ns),
        alpha=np.array(each.alpha),
        wrong_scores=totals.wrong_scores,
        pages_moved=totals.pages_moved,
        decisions=0 if each.loop is None else each.loop.status.decisions,
    )
