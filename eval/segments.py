"""Segments of a trace and what one replay, or one alpha, scored in each: half by half, against the best alpha.

A segment is a phase, or 60 s of a drift; the trace names them. Its first half is the
transition, its second half is settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from eval.statistics import Floats, survival_curve
from helm_rl.errors import UserError
from helm_rl.metrics import p99_ms, quantile_ms, shed_ms

if TYPE_CHECKING:
    from envs.serving.replay import Replay
    from helm_rl.workloads.trace import Trace

LEAST_REQUESTS = 1_000
"""Measured requests below which a trace has no P99 worth quoting (ten requests lie beyond it)."""
LEAST_SEGMENT_REQUESTS = 100
"""Requests below which half a segment has no P99: the nearest rank would be its slowest request."""
WINDOW_S = 10.0
"""Length of the windows of arrivals whose P99s are averaged."""
ONSET_S = 10.0
"""Of a burst, whose P99 recovery is to lower."""


@dataclass(frozen=True)
class Span:
    """One segment: [start_ns, end_ns) of the trace's clock, and which requests arrive in it.

    first, middle, last: request indices; transition = [first, middle), settled = [middle, last).
    """

    label: str
    start_ns: int
    end_ns: int
    first: int
    middle: int
    last: int

    @property
    def middle_ns(self) -> int:
        """Where the transition ends and the settled half begins."""
        return (self.start_ns + self.end_ns) // 2


@dataclass(frozen=True)
class Measured:
    """The measured part of a trace.

    first: index of the first measured request; opening: of the first one after the opening quarter of the time;
    spans: the segments that can be judged, in order of time; sparse: segments left out because half of one
    holds too few requests; end_ns: where the last segment ends.
    """

    first: int
    opening: int
    requests: int
    start_ns: int
    end_ns: int
    spans: tuple[Span, ...]
    sparse: int

    @property
    def seconds(self) -> float:
        """Length of the measured part."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class Run:
    """One replay reduced to what is compared; measured requests only, a shed request counting as 100 x the SLO.

    slo: share of requests within the SLO; throughput_per_s: requests served (not shed) per second of the measured part;
    windowed_p99_ms: mean over 10 s windows of arrivals; opening_p99_ms: first quarter of the measured part;
    onset_p99_ms: the first ONSET_S of bursts, NaN without any; the *_p99_ms arrays have one value per span; time_s,
    alpha and target are the trajectory (interval ends); tail_ms, tail_share the survival curve; window_s, window_p99_ms
    the windows (their middles); decide_us the median time of one decision (a timing: it differs from run to run).
    """

    p99_ms: float
    p50_ms: float
    windowed_p99_ms: float
    slo: float
    throughput_per_s: float
    shed: int
    opening_p99_ms: float
    onset_p99_ms: float
    segment_p99_ms: Floats
    transition_p99_ms: Floats
    settled_p99_ms: Floats
    time_s: Floats
    alpha: Floats
    target: Floats
    tail_ms: Floats
    tail_share: Floats
    window_s: Floats
    window_p99_ms: Floats
    decide_us: float


@dataclass(frozen=True)
class Gap:
    """Mean distance of alpha over some of the intervals: to the best alpha, and to the flat set (zero inside
    it).

    intervals: how many intervals were averaged; with none, the distances are NaN.
    """

    ratio: float
    flat: float
    intervals: int


def measured_part(trace: Trace) -> Measured:
    """Cut the measured part of a trace into spans; UserError if it is too short to judge anything."""
    arrival_ns = trace.arrival_ns
    segments = trace.segments()
    first = int(np.searchsorted(arrival_ns, trace.meta.measure_from_ns, side="left"))
    requests = int(arrival_ns.size) - first
    if requests < LEAST_REQUESTS or not segments:
        raise UserError(
            f"trace {trace.meta.name!r}: {requests} requests arrive at or after measure_from_ns = "
            f"{trace.meta.measure_from_ns}; a P99 needs at least {LEAST_REQUESTS}"
        )
    spans = []
    for segment in segments:
        middle_ns = (segment.start_ns + segment.end_ns) // 2
        cuts = np.searchsorted(arrival_ns, [segment.start_ns, middle_ns, segment.end_ns], side="left")
        spans.append(Span(segment.label, segment.start_ns, segment.end_ns, *(int(cut) for cut in cuts)))
    dense = tuple(
        span for span in spans if min(span.middle - span.first, span.last - span.middle) >= LEAST_SEGMENT_REQUESTS
    )
    if not dense:
        raise UserError(
            f"trace {trace.meta.name!r}: no segment holds {LEAST_SEGMENT_REQUESTS} requests in each half; "
            "give a denser trace (trace convert has --speed-up)"
        )
    start_ns, end_ns = segments[0].start_ns, segments[-1].end_ns
    opening = int(np.searchsorted(arrival_ns, start_ns + (end_ns - start_ns) // 4, side="left"))
    return Measured(first, opening, requests, start_ns, end_ns, dense, len(spans) - len(dense))


def reduce_replay(replay: Replay, trace: Trace, part: Measured, slo_ms: float) -> Run:
    """Reduce one replay of `trace` to a `Run`; RuntimeError if a measured request never ended."""
    latency_ms = replay.latency_ms
    measured = latency_ms[part.first :]
    if not np.isfinite(measured).all():
        pending = int((~np.isfinite(measured)).sum())
        raise RuntimeError(f"{pending} measured requests of trace {trace.meta.name!r} never ended in the replay")
    shed = int((measured == shed_ms(slo_ms)).sum())
    tail_ms, tail_share = survival_curve(measured)
    window_s, window_p99_ms = _windows(measured, trace.arrival_ns[part.first :], part.start_ns)
    return Run(
        p99_ms=p99_ms(measured),
        p50_ms=quantile_ms(measured, 0.5),
        windowed_p99_ms=float(window_p99_ms.mean()),
        slo=float((measured <= slo_ms).mean()),
        throughput_per_s=(part.requests - shed) / part.seconds,
        shed=shed,
        opening_p99_ms=p99_ms(latency_ms[part.first : part.opening]),
        onset_p99_ms=p99_ms(latency_ms[onsets(trace)]),
        segment_p99_ms=np.array([p99_ms(latency_ms[span.first : span.last]) for span in part.spans]),
        transition_p99_ms=np.array([p99_ms(latency_ms[span.first : span.middle]) for span in part.spans]),
        settled_p99_ms=np.array([p99_ms(latency_ms[span.middle : span.last]) for span in part.spans]),
        time_s=np.asarray(replay.time_s, dtype=np.float64),
        alpha=np.asarray(replay.alpha, dtype=np.float64),
        target=np.asarray(replay.target, dtype=np.float64),
        tail_ms=tail_ms,
        tail_share=tail_share,
        window_s=window_s,
        window_p99_ms=window_p99_ms,
        decide_us=float(replay.decide_us),
    )


class Trajectory(Protocol):
    """Alpha over time: of one node, [k], or of N, [k, N]."""

    @property
    def time_s(self) -> Floats:
        """[k] ends of the intervals."""

    @property
    def alpha(self) -> npt.NDArray[np.floating]:
        """[k] or [k, N], applied at the end of each."""


def gap(run: Trajectory, windows_ns: list[tuple[int, int]], best: list[float], flat: list[FlatSet]) -> Gap:
    """Average |alpha - best| and the distance to the flat set over the intervals that end in the given windows.

    windows_ns: (start, end] of each; best and flat: the best alpha and the flat set in force in each.
    """
    ratio, distance = [], []
    for (start_ns, end_ns), star, flat_set in zip(windows_ns, best, flat, strict=True):
        inside = (run.time_s > start_ns / 1e9) & (run.time_s <= end_ns / 1e9)
        ratio.append(np.abs(run.alpha[inside] - star))
        distance.append(flat_distance(run.alpha[inside], flat_set))
    ratios, distances = np.concatenate(ratio), np.concatenate(distance)
    if ratios.size == 0:
        return Gap(float("nan"), float("nan"), 0)
    return Gap(float(ratios.mean()), float(distances.mean()), int(ratios.size))


FlatSet = tuple[tuple[float, float], ...]
"""Alphas within 2 % of the least P99, as closed intervals in ascending order (more than one if the curve has
two valleys).
"""


def flat_distance(alpha: npt.NDArray[np.floating], flat_set: FlatSet) -> Floats:
    """Distance of each alpha to the nearest interval of the flat set, 0 inside, same shape as `alpha`."""
    lows = np.array([low for low, _ in flat_set])
    highs = np.array([high for _, high in flat_set])
    point = np.asarray(alpha, dtype=np.float64)[..., None]
    return np.maximum(np.maximum(lows - point, point - highs), 0.0).min(axis=-1)


def onsets(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return which requests arrive in the first ONSET_S of bursts, the phases that begin in the measured part."""
    found = np.zeros(len(trace), np.bool_)
    for phase in trace.meta.phases[1:]:
        if phase.start_ns > trace.meta.measure_from_ns:
            end_ns = min(phase.start_ns + int(ONSET_S * 1e9), phase.end_ns)
            found |= (trace.arrival_ns >= phase.start_ns) & (trace.arrival_ns < end_ns)
    return found


def _windows(
    latency_ms: npt.NDArray[np.floating], arrival_ns: npt.NDArray[np.int64], start_ns: int
) -> tuple[Floats, Floats]:
    """Middle (s) and P99 (ms) of every window of WINDOW_S of arrivals, without those in which no request arrives."""
    window = (arrival_ns - start_ns) // int(WINDOW_S * 1e9)
    cuts = np.flatnonzero(np.diff(window)) + 1
    middles = start_ns / 1e9 + (window[np.concatenate([[0], cuts])] + 0.5) * WINDOW_S
    return middles, np.array([p99_ms(part) for part in np.split(latency_ms, cuts)])
