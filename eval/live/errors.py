"""The model clock held against the live node: latencies of the same requests under the same static split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from envs.serving import queues
from envs.serving.live import LiveNode
from envs.serving.node import NodeSim
from envs.serving.queues import QueueState
from eval.comparison import steady_scenario
from eval.live.ladder import flop
from eval.live.lost import lost
from helm_rl import latency
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats, quantile_ms
from helm_rl.profiles.hardware import link_gb_s, resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario, at_load
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

P50_GOAL, P99_GOAL = 0.1, 0.2
SEEDS_FROM = 1 << 33
"""Arrivals that loads are set by; those that are measured have smaller seeds."""
LEAST_ALONE = 10
_LOAD_S = 120.0  # of simulated load, from which the busy share is taken
_CLOSE = 0.02
_TRIES = 8
_STEP_NS = 1_000_000_000

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Usage:
    """Hits and busy time over all windows, as shares."""

    kv_hits: float
    emb_hits: float
    link: float
    compute: float


@dataclass(frozen=True)
class Measured:
    """One load on the live node and on the model clock; latencies of the measured requests in order of arrival, [n]."""

    rate: float  # requests/s
    live_ms: FloatArray
    model_ms: FloatArray
    replayed_ms: FloatArray  # of the model's queues, given the service times that the live node took
    live: Usage
    model: Usage

    def error(self, q: float, replayed: bool = False) -> float:
        """Return |modelled / measured - 1| of the `q`-quantile."""
        modelled = self.replayed_ms if replayed else self.model_ms
        return abs(quantile_ms(modelled, q) / quantile_ms(self.live_ms, q) - 1.0)


def base_load(scenario: Scenario, seconds: float, warm_s: float) -> Scenario:
    """Return the scenario without its phases, for so long."""
    return steady_scenario(scenario).model_copy(update={"seconds": seconds, "warm_s": warm_s})


def at_busy(scenario: Scenario, share: float, alpha: float) -> Scenario:
    """Scale the load until the busier of link and accelerator is busy for `share` of the time, by the model clock.

    Raises UserError where it cannot be that busy.
    """
    multiple = 1.0
    for _ in range(_TRIES):
        scaled = at_load(scenario, multiple)
        longer = scaled.model_copy(update={"seconds": _LOAD_S})
        node = NodeSim(longer, generate(longer, seed=SEEDS_FROM), alpha)
        node.run(0)
        found = usage([node.run(round(_LOAD_S * 1e9))])
        busy = max(found.link, found.compute)
        if abs(busy / share - 1.0) <= _CLOSE:
            return scaled
        multiple *= min(max(share / busy, 0.1), 10.0)
    raise UserError(
        f"scenario {scenario.name}: no multiple of its load was found that keeps link or accelerator busy {share:.0%} "
        f"of the time (the last one: {busy:.0%}); give it a load nearer to that"
    )


def measure(
    node: LiveNode, alpha: float, warm_s: float, until_ns: int, advance: Callable[[float], None] = lambda seconds: None
) -> Measured:
    """Serve a node's trace up to `until_ns` live and on the model clock; `advance` is told of the seconds that pass."""
    scenario, trace = node.scenario, node.trace
    start_ns = trace.meta.measure_from_ns
    windows = serve(node, alpha, warm_s, until_ns, advance)
    model = NodeSim(scenario, trace, alpha)
    model.run(start_ns)
    modelled = model.run(until_ns)
    model.drain()
    measured = _measured(trace, until_ns)
    return Measured(
        rate=float(measured.sum()) / ((until_ns - start_ns) * 1e-9),
        live_ms=node.latency_ms[measured].astype(np.float64),
        model_ms=model.latency_ms[measured].astype(np.float64),
        replayed_ms=replay_times(node)[measured],
        live=usage(windows),
        model=usage([modelled]),
    )


def serve(
    node: LiveNode, alpha: float, warm_s: float, until_ns: int, advance: Callable[[float], None] = lambda seconds: None
) -> list[WindowStats]:
    """Serve live up to `until_ns` of the trace's clock, and whoever has come by then; return the windows until then.

    Raises:
        RuntimeError: somebody was not served within two minutes of the end.
    """
    node.reset(alpha, node.trace.meta.measure_from_ns, round(warm_s * 1e9))
    windows = []
    while node.now_ns < until_ns:
        windows.append(node.run(min(node.now_ns + _STEP_NS, until_ns)))
        advance((windows[-1].end_ns - windows[-1].start_ns) * 1e-9)
    drain(node, until_ns)
    return windows


def drain(node: LiveNode, until_ns: int) -> None:
    """Wait until all who have come by `until_ns` are served.

    Raises:
        RuntimeError: somebody was not within two minutes.
    """
    if out := lost(node, node.trace.meta.measure_from_ns, until_ns):
        raise RuntimeError(f"{out} requests were neither served nor shed")


def usage(windows: Sequence[WindowStats]) -> Usage:
    """Return hits and busy time of windows that follow each other."""
    wall_ns = windows[-1].end_ns - windows[0].start_ns
    return Usage(
        kv_hits=sum(w.history_tokens_hit for w in windows) / max(1, sum(w.history_tokens for w in windows)),
        emb_hits=sum(w.rows_hit for w in windows) / max(1.0, sum(w.rows for w in windows)),
        link=sum(w.link_busy_ns for w in windows) / wall_ns,
        compute=sum(w.compute_busy_ns for w in windows) / wall_ns,
    )


def served_alone(node: LiveNode) -> npt.NDArray[np.int64]:
    """Return the numbers of the requests that found the node idle and were computed alone.

    Raises:
        UserError: there are too few of them to tell anything.
    """
    times, arrival_ns = node.times, node.trace.arrival_ns
    served = np.flatnonzero(times.batch >= 0)
    gone_ns = np.maximum.accumulate(arrival_ns[served] + node.latency_ms[served].astype(np.float64) * 1e6)
    batch = times.batch[served]
    alone = (np.bincount(batch)[batch] == 1) & (arrival_ns[served] >= np.concatenate([[0.0], gone_ns[:-1]]))
    if alone.sum() < LEAST_ALONE:
        raise UserError(f"only {alone.sum()} requests found the node idle: this machine is busy with other things")
    return served[alone]


def fixed_ms(node: LiveNode) -> float:
    """Return the median ms of requests served alone which were neither transfer nor compute."""
    alone = served_alone(node)
    row_ns = resolve_model(node.scenario.model).row_bytes / link_gb_s(node.scenario.hardware)
    took_ns = node.latency_ms[alone].astype(np.float64) * 1e6
    rest_ns = took_ns - node.times.compute_ns[alone] - node.times.fetched[alone] * row_ns
    return max(0.0, float(np.median(rest_ns)) * 1e-6)


def slowdown(node: LiveNode) -> float:
    """Return how many times longer requests served alone were computed than the node's profile says, the median."""
    alone, hardware = served_alone(node), resolve_hardware(node.scenario.hardware)
    history = node.trace.history_tokens[alone].astype(np.int64)
    linear, pair = flop(resolve_model(node.scenario.model), node.times.prefix[alone], history)
    prefill_ns = [hardware.prefill_ns(*work) for work in zip(linear, pair, strict=True)]
    return float(np.median(node.times.compute_ns[alone] / (hardware.batch_ms * 1e6 + np.array(prefill_ns))))


def replay_times(node: LiveNode) -> FloatArray:
    """Return the latencies, ms [n], that the model's queues give with the service times that the node took.

    A batch's time is shared out among its requests as the profile would have it. NaN for what the node did not serve.
    """
    trace, times = node.trace, node.times
    hardware, section = resolve_hardware(node.scenario.hardware), node.scenario.hardware
    served = np.flatnonzero(times.batch >= 0)
    linear, pair = flop(resolve_model(node.scenario.model), times.prefix, trace.history_tokens.astype(np.int64))
    alone = np.array([hardware.prefill_ns(linear[i], pair[i]) for i in served])
    batch = times.batch[served]
    work_ns = times.compute_ns[served] * alone / np.bincount(batch, alone)[batch]
    params = np.zeros(queues.N_PARAMS)
    params[queues.REQUEST_NS] = hardware.request_ms * 1e6
    params[queues.MAX_BATCH] = section.max_batch
    params[queues.QUEUE_BOUND] = section.queue_bound
    slo_ns = np.full(2, node.scenario.slo_ms * 1e6)
    took_ms = np.full(served.size, np.nan, np.float32)
    measured = latency.new_latency_state(slo_ns, np.zeros(served.size, np.int32), took_ms)
    arrival_ns = trace.arrival_ns[served]
    queue = queues.new_queue_state(params, np.ones(1), np.zeros(1, np.int64), arrival_ns, measured, int(arrival_ns[0]))
    _replay(queue, arrival_ns, times.link_ns[served], work_ns)
    found = np.full(len(trace), np.nan)
    found[served] = took_ms
    return found


@kernel
def _replay(queue: QueueState, arrival_ns: npt.NDArray[np.int64], link_ns: FloatArray, work_ns: FloatArray) -> None:
    for i in range(arrival_ns.size):
        queues.advance(queue, arrival_ns[i])
        if queues.make_place(queue, i, arrival_ns[i]):
            queues.admit(queue, i, arrival_ns[i], link_ns[i], 0.0, 0.0, work_ns[i])
        else:
            latency.shed(queue.measured, i)
    queues.advance(queue, queues.FOREVER_NS - 1)


def _measured(trace: Trace, until_ns: int) -> npt.NDArray[np.bool_]:
    return (trace.arrival_ns >= trace.meta.measure_from_ns) & (trace.arrival_ns < until_ns)
