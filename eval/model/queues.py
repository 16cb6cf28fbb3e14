"""The node as a queue whose waiting times are known: M/D/1, M/M/1, a stall, and Little's law on each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from envs.serving.node import NodeSim
from helm_rl.figures import Figure
from helm_rl.metrics import p99_ms
from helm_rl.profiles.hardware import link_gb_s, resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import BASE, Trace, TraceMeta, TracePhase

Advance = Callable[[str], None]
Station = Literal["accelerator", "link"]
FloatArray = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.int64]

STATIONS: tuple[Station, ...] = ("accelerator", "link")
LOADS = (0.5, 0.8)
MEAN_MS = 1000.0  # of the service: long beside a token's or a row's .1 ms, so that it is as good as continuous
WAIT_GOAL = 0.02
LITTLE_GOAL = 0.01
STALL_GOAL = 0.02
BATCHES = 64  # whose means tell the standard error; each is far longer than the queue's memory
_ITEMS = 10**12


@dataclass(frozen=True)
class SingleServer:
    """A node that is one server, first come, first served; n requests."""

    scenario: Scenario
    trace: Trace
    service_ms: FloatArray  # [n] at that server
    batch_ms: FloatArray  # [n] on the accelerator, whichever is the server
    rest_ms: float  # all else that a latency holds, outside the queues included

    def waits_ms(self, latency_ms: npt.NDArray[np.float32]) -> FloatArray:
        """Return how long each request waited for the server."""
        return latency_ms.astype(np.float64) - self.service_ms - self.rest_ms


@dataclass(frozen=True)
class Served:
    """What a run of a node gave."""

    latency_ms: npt.NDArray[np.float32]  # [n]
    little_error: float  # relative, the larger of those of all who are present and of those who wait


def single_server(station: Station, arrival_ns: IntArray, service_ms: FloatArray) -> SingleServer:
    """Return a node and requests of about these service times, rounded to tokens or rows of .1 ms.

    Every request is its user's first, scores no candidates and reads rows of a uniform law over 10^12 items, so both
    caches are useless. As accelerator, the node runs one request at a time, of a model whose tokens take long and
    whose attention takes nothing, behind an endless link. As link, it fetches large rows, and the accelerator takes
    all who are ready in one short batch.
    """
    computes = station == "accelerator"
    scenario = Scenario.model_validate(
        {
            "name": station,
            "slo_ms": MEAN_MS,
            "model": {
                "layers": 1,
                "heads": 1,
                "kv_heads": 1,
                "head_dim": 1,
                "d_model": 1 << 15 if computes else 1,
                "ffn": 1 << 17 if computes else 1,
                "features_per_token": 1,
                "row_bytes": 1 if computes else 1024,
                "candidates": 0,
            },
            "hardware": {
                "link_gb_s": 10_000.0 if computes else 0.01024,
                "pool_gib": 1 / 32,
                "max_batch": 1 if computes else 1024,
                "queue_bound": 1_000_000,
            },
            "control": {"interval_s": 10.0, "tick_s": 10.0},
        }
    )
    model, hardware = resolve_model(scenario.model), resolve_hardware(scenario.hardware)
    if computes:
        token_ms = hardware.prefill_ns(model.flops_per_token, 0.0) * 1e-6
        pair_ms = hardware.prefill_ns(0.0, model.flops_per_pair) * 1e-6
        tokens = np.maximum(1.0, np.rint((service_ms - hardware.batch_ms) / token_ms))
        service_ms = batch_ms = hardware.batch_ms + tokens * token_ms + 0.5 * tokens**2 * pair_ms
        rest_ms = hardware.request_ms
    else:
        row_ms = model.row_bytes / link_gb_s(scenario.hardware) * 1e-6
        tokens = np.maximum(1.0, np.rint(service_ms / row_ms))
        service_ms = tokens * row_ms
        batch_ms = np.full(tokens.size, hardware.batch_ms)
        rest_ms = hardware.batch_ms + hardware.request_ms
    return SingleServer(scenario, _trace(station, arrival_ns, tokens.astype(np.int32)), service_ms, batch_ms, rest_ms)


def serve(server: SingleServer, samples: int) -> Served:
    """Serve the trace to its end; over its first part, count who is there at `samples` instants, one service apart.

    Little's law (J. D. C. Little, Operations Research 9(3), 1961) over that part: who is present on the average is the
    time that requests spend there, summed, over its length; likewise who waits for the accelerator's next batch. The
    former is counted by the node's clock, as arrivals less completions and as `WindowStats.queue`; the latter is told
    by the latencies.
    """
    node = NodeSim(server.scenario, server.trace, max_sampled_slots=1)
    start_ns = node.now_ns
    step_ns = round(float(server.service_ms.mean()) * 1e6)
    present = waiting = there = 0
    for k in range(samples):
        window = node.run(start_ns + (k + 1) * step_ns)
        there += window.arrivals - window.completed
        present += there
        waiting += window.queue
    end_ns = node.now_ns
    node.drain()
    arrival_ms = (server.trace.arrival_ns - start_ns) * 1e-6
    inside_ms = node.latency_ms.astype(np.float64) - resolve_hardware(server.scenario.hardware).request_ms
    length_ms = (end_ns - start_ns) * 1e-6
    error = max(
        little_error(present / samples, arrival_ms, inside_ms, length_ms),
        little_error(waiting / samples, arrival_ms, inside_ms - server.batch_ms, length_ms),
    )
    return Served(node.latency_ms, error)


def little_error(counted: float, arrival_ms: FloatArray, inside_ms: FloatArray, length_ms: float) -> float:
    """Return |L - lambda W| / (lambda W) over [0, length_ms).

    Args:
        counted: L, the mean number inside as it was counted.
        arrival_ms: [n] of all requests.
        inside_ms: [n] how long each was inside; what lies before 0 or past the end is not counted.
        length_ms: of the time over which was counted.
    """
    overlap = np.minimum(arrival_ms + inside_ms, length_ms) - np.maximum(arrival_ms, 0.0)
    told = float(overlap[overlap > 0.0].sum()) / length_ms
    return abs(counted - told) / told


def measure_waits(requests: int, samples: int, advance: Advance) -> dict[str, Figure]:
    """Hold the mean waits of M/D/1 and M/M/1 against Pollaczek and Khinchine's formula at each load and station.

    Args:
        requests: of each run.
        samples: instants per run at which Little's law counts.
        advance: called with what is done next.
    """
    figures: dict[str, Figure] = {}
    little = 0.0
    for law, squared in (("md1", 1.0), ("mm1", 2.0)):  # E[S^2] / E[S]^2
        for load in LOADS:
            name = f"model.{law}_error.{round(100 * load)}"
            errors, deviations = {}, {}
            for station in STATIONS:
                advance(f"{law.upper()[0]}/{law.upper()[1]}/1 at load {load:g}, the {station} as server")
                rng = np.random.default_rng([5, round(100 * load), STATIONS.index(station)])
                arrival_ns = np.rint(np.cumsum(rng.exponential(MEAN_MS / load, requests)) * 1e6).astype(np.int64)
                drawn = np.full(requests, MEAN_MS) if law == "md1" else rng.exponential(MEAN_MS, requests)
                server = single_server(station, arrival_ns, drawn)
                served = serve(server, samples)
                waits = server.waits_ms(served.latency_ms)
                wait_ms = load * squared * MEAN_MS / (2.0 * (1.0 - load))
                errors[station] = abs(float(waits.mean()) / wait_ms - 1.0)
                deviations[station] = _standard_error(waits) / wait_ms
                little = max(little, served.little_error)
            figures[name] = Figure(max(errors.values()), "", "lower", WAIT_GOAL)
            for station in STATIONS:
                figures[f"{name}.{station}"] = Figure(errors[station], "", "lower")
                figures[f"{name}.{station}.standard_error"] = Figure(deviations[station], "", "lower")
    figures["model.little_error.queues"] = Figure(little, "", "lower", LITTLE_GOAL)
    return figures


def measure_stall(advance: Advance) -> dict[str, Figure]:
    """Serve 10 s of 100 requests/s of which one holds the server for 1 s.

    100 requests are due while it lasts, the k-th with 1,000 - 10 k ms of it to come. Ten of 1,000 may be slower than
    the P99, so it is the wait of the 10th of them, 900 ms, if latency runs from the scheduled arrival. Were it to run
    from when the server is free to take a request, it would be a few ms.
    """
    figures: dict[str, Figure] = {}
    worst = little = 0.0
    for station in STATIONS:
        advance(f"the {station} stalls")
        service_ms = np.zeros(1000)  # one token
        service_ms[500] = 1000.0
        server = single_server(station, np.arange(1000) * 10_000_000, service_ms)
        served = serve(server, 8_000)
        p99 = p99_ms(served.latency_ms)
        little = max(little, served.little_error)
        figures[f"model.stall_p99_ms.{station}"] = Figure(p99, "ms", "higher")
        worst = max(worst, abs(p99 / 900.0 - 1.0))
    figures["model.stall_p99_error"] = Figure(worst, "", "lower", STALL_GOAL)
    figures["model.little_error.stall"] = Figure(little, "", "lower", LITTLE_GOAL)
    return figures


def _trace(name: str, arrival_ns: IntArray, tokens: npt.NDArray[np.int32]) -> Trace:
    """Return requests of as many users, each with a history of these tokens that was never computed."""
    n = arrival_ns.size
    start_ns, end_ns = int(arrival_ns[0]), int(arrival_ns[-1]) + 1
    return Trace(
        arrival_ns=arrival_ns,
        user=np.arange(n),
        tenant=np.zeros(n, np.int32),
        phase=np.zeros(n, np.int32),
        history_tokens=tokens,
        new_tokens=np.zeros(n, np.int32),
        item_offsets=np.zeros(n + 1, np.int64),
        item_values=np.zeros(0, np.int64),
        meta=TraceMeta(
            name=name,
            source="queueing theory",
            origin_ns=0,
            measure_from_ns=start_ns,
            users=n,
            items=_ITEMS,
            content="law",
            zipf_items=0.0,
            law_items=_ITEMS,
            phases=(TracePhase(label=BASE, start_ns=start_ns, end_ns=end_ns),),
        ),
    )


def _standard_error(waits_ms: FloatArray) -> float:
    """Return that of the mean of successive waits, by the means of batches of them."""
    size = waits_ms.size // BATCHES
    means = waits_ms[: size * BATCHES].reshape(BATCHES, size).mean(axis=1)
    return float(means.std(ddof=1)) / float(np.sqrt(BATCHES))
