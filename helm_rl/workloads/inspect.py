"""What is in a trace, in numbers: rates, users and how soon they return, histories, items, working sets, phases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.popularity import ZipfFit, fit_zipf
from helm_rl.workloads.trace import Int64Array, Trace

if TYPE_CHECKING:
    from helm_rl.workloads.curves import MissRatioCurve

RETURN_NS = 60_000_000_000
"""A user who came within this time is hot (observation v1, hot_user_ratio)."""

GAP_EDGES_S = (1.0, 10.0, 60.0, 300.0, 1800.0)
"""Pauses between a user's requests are counted between these."""

DISPERSION_WINDOWS_S = (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0)
_LEAST_WINDOWS = 10
_LEAST_PAUSES = 2  # by which a clock's step is told
_MOST_WINDOWS = 120  # that a trace is cut into for what changes over time
LEAST_SPAN_NS = 1_000_000  # of which a rate is told
_POINTS = 80  # of a curve that is drawn


@dataclass(frozen=True)
class Distribution:
    """Mean, nearest-rank quantiles and extremes of a quantity; all None if there is none of it."""

    mean: float | None
    min: float | None
    p10: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True)
class PhaseSummary:
    """One phase: what was asked of the generator (None in a recorded trace), and what came of it."""

    label: str
    start_s: float
    end_s: float
    requests: int
    rate_per_s: float
    asked_rate_per_s: float | None
    asked_rate_end_per_s: float | None
    ramp_s: float  # it was asked to come up over its first, and go down over its last, ramp_s
    factor: float | None  # all load while it lasts over all load in the 5 min before
    hot_fraction: float
    hot_items: int


@dataclass(frozen=True)
class Curve:
    """A miss-ratio curve: size (items, or tokens of histories), miss ratio and its standard error; k each."""

    size: list[float]
    miss_ratio: list[float]
    standard_error: list[float]
    rate: float  # share of the keys that was followed
    working_set: float


@dataclass(frozen=True)
class OverTime:
    """What changes over time: one number for each of k consecutive windows; None where a window has no request.

    The last window is what is left, half of window_s to one and a half of it.
    """

    window_s: float
    start_s: list[float]
    end_s: float  # of the last window
    rate_per_s: list[float]
    hot_user_ratio: list[float | None]
    history_tokens_mean: list[float | None]
    items: list[int]  # distinct items named: the working set of the embedding cache
    users: list[int]  # distinct users
    history_tokens: list[int]  # of those users, all together: the working set of the KV cache


@dataclass(frozen=True)
class Points:
    """A curve to draw: x ascending, y."""

    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class TraceSummary:
    """A trace in numbers. Times are seconds on the trace's clock, rates requests per second."""

    name: str
    source: str
    content: str
    block_tokens: int
    hash: str
    origin_ns: int
    seed: int | None
    start_s: float
    end_s: float
    measure_from_s: float
    requests: int
    measured_requests: int
    rate_mean: float | None  # None: all come within a millisecond
    clock_step_s: float  # of the clock that lets many requests come at one instant; 0: few do
    rate_peak_1s: float  # in the busiest second, wherever it starts
    rate_peak_10s: float
    dispersion: dict[str, float]  # by window in s that suits the clock: variance of its requests over mean; Poisson: 1
    same_instant: float  # share of requests that come at the instant of the one before
    repeated: int  # requests of a user at the instant of his one before
    users: int  # that come at least once
    user_codes: int
    tenants: int
    items: int  # that are named at least once
    item_codes: int
    item_references: int
    top_items_share: float  # references to the most popular 1 % of the items named, over all
    zipf_items: float | None
    popularity: ZipfFit | None  # None: too few items are named often enough
    returning: float  # share of requests whose user was in the trace before
    hot_user_ratio: float  # share of measured requests whose user came within the last 60 s
    return_gap_s: Distribution  # between requests of one user
    return_gap_shares: dict[str, float]  # of those pauses, by their length
    requests_per_user: Distribution
    history_tokens: Distribution  # per request
    new_tokens: Distribution  # per request
    embedding_curve: Curve | None  # None: no request names an item
    kv_curve: Curve
    over_time: OverTime
    popularity_points: Points  # references over rank
    gap_points: Points  # share of pauses up to x s
    history_points: Points  # share of requests with a history of up to x tokens
    phases: tuple[PhaseSummary, ...]
    shrinking: int  # requests whose history is shorter than at their user's one before
    segments: int | None  # of the measured part; None: more than results can be told for
    empty_segments: int
    steps: tuple[str, ...]
    dropped: dict[str, int]


def summarise(trace: Trace, doing: Callable[[str], None] = lambda _: None) -> TraceSummary:
    """Compute the statistics of a trace; it is sorted a few times, so this takes seconds for ten million requests.

    doing: told, in a few words, what is done next.
    """
    from helm_rl.workloads.curves import embedding_curve, kv_curve  # numba takes half a second to import

    meta, arrival_ns = trace.meta, trace.arrival_ns
    start_ns, end_ns = meta.phases[0].start_ns, trace.end_ns
    doing("users and their pauses")
    previous = previous_requests(trace.user)
    gap_ns = gaps_to_previous(arrival_ns, trace.user)
    returns = gap_ns >= 0
    step_s = clock_step_s(trace)
    span_ns = covered_ns(trace)
    gap_s = gap_ns[returns] / 1e9
    measured = arrival_ns >= meta.measure_from_ns
    hot = returns & (gap_ns <= RETURN_NS)
    _, visits = np.unique(trace.user, return_counts=True)
    doing("popularity of items")
    _, references = np.unique(trace.item_values, return_counts=True)
    references = np.sort(references)[::-1]
    doing("miss-ratio curve of the embedding cache")
    emb = _curve(embedding_curve(trace)) if references.size else None
    doing("miss-ratio curve of the KV cache")
    kv = _curve(kv_curve(trace))
    doing("working sets")
    over_time = _over_time(trace, hot, step_s)
    segments, empty_segments = _segments(trace, arrival_ns[measured])
    doing("the rest")
    return TraceSummary(
        name=meta.name,
        source=meta.source,
        content=meta.content,
        block_tokens=meta.block_tokens,
        hash=trace.hash(),
        origin_ns=meta.origin_ns,
        seed=meta.seed,
        start_s=start_ns / 1e9,
        end_s=end_ns / 1e9,
        measure_from_s=meta.measure_from_ns / 1e9,
        requests=len(trace),
        measured_requests=int(np.count_nonzero(measured)),
        rate_mean=len(trace) / (span_ns / 1e9) if span_ns >= LEAST_SPAN_NS else None,
        clock_step_s=step_s,
        rate_peak_1s=_peak(arrival_ns, 1_000_000_000),
        rate_peak_10s=_peak(arrival_ns, 10_000_000_000) / 10,
        dispersion=dispersion(trace, tuple(window for window in DISPERSION_WINDOWS_S if suits(window, step_s))),
        same_instant=float(np.count_nonzero(arrival_ns[1:] == arrival_ns[:-1]) / len(trace)),
        repeated=int(np.count_nonzero(gap_ns == 0)),
        users=visits.size,
        user_codes=meta.users,
        tenants=np.unique(trace.tenant).size,
        items=references.size,
        item_codes=meta.items,
        item_references=trace.item_values.size,
        top_items_share=float(references[: -(-references.size // 100)].sum() / max(1, trace.item_values.size)),
        zipf_items=meta.zipf_items,
        popularity=fit_zipf(references),
        returning=float(returns.mean()),
        hot_user_ratio=float(hot[measured].mean()) if measured.any() else 0.0,
        return_gap_s=_distribution(gap_ns[returns], 1e9),
        return_gap_shares=_gap_shares(gap_s, step_s),
        requests_per_user=_distribution(visits),
        history_tokens=_distribution(trace.history_tokens),
        new_tokens=_distribution(trace.new_tokens),
        embedding_curve=emb,
        kv_curve=kv,
        over_time=over_time,
        popularity_points=_by_rank(references),
        gap_points=_shares_up_to(gap_s),
        history_points=_shares_up_to(trace.history_tokens),
        phases=_phases(trace),
        shrinking=int(np.count_nonzero(trace.history_tokens[returns] < trace.history_tokens[previous[returns]])),
        segments=segments,
        empty_segments=empty_segments,
        steps=meta.steps,
        dropped=meta.dropped,
    )


def dispersion(trace: Trace, windows_s: tuple[float, ...] = DISPERSION_WINDOWS_S) -> dict[str, float]:
    """Return the index of dispersion, variance over mean of the requests per window, by the window's seconds.

    1 for Poisson arrivals; more where they come together, or the rate changes. Windows that fit fewer than
    10 times into the trace are left out.
    """
    found = {}
    since_ns = trace.arrival_ns - trace.meta.phases[0].start_ns
    span_ns = trace.end_ns - trace.meta.phases[0].start_ns
    for window_s in windows_s:
        window_ns = round(window_s * 1e9)
        windows = span_ns // window_ns
        if windows >= _LEAST_WINDOWS:
            # Memory does not depend on how long the trace is: windows without a request are not stored.
            occupied, counts = np.unique(since_ns // window_ns, return_counts=True)
            counts = counts[occupied < windows].astype(np.float64)
            mean = counts.sum() / windows
            variance = ((counts**2).sum() - windows * mean**2) / (windows - 1)
            if mean > 0:
                found[f"{window_s:g}"] = float(variance / mean)
    return found


def returning(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return for each request whether its user came within the RETURN_NS before it; bool (n,)."""
    gap_ns = gaps_to_previous(trace.arrival_ns, trace.user)
    return (gap_ns >= 0) & (gap_ns <= RETURN_NS)


def gaps_to_previous(arrival_ns: Int64Array, user: Int64Array) -> Int64Array:
    """Return the time since the user's previous request, or -1 at his first; int64 (n,), ns."""
    previous = previous_requests(user)
    return np.where(previous >= 0, arrival_ns - arrival_ns[previous], -1)


def previous_requests(user: Int64Array) -> Int64Array:
    """Return the place of the user's previous request, or -1 at his first; int64 (n,)."""
    order = np.argsort(user, kind="stable")
    previous = np.full(user.size, -1, dtype=np.int64)
    same = user[order][1:] == user[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def clock_step_s(trace: Trace) -> float:
    """Return the step of a clock that lets many requests come at one instant, in s; 0 where few do."""
    pauses = np.diff(trace.arrival_ns)
    apart = pauses[pauses > 0]
    if apart.size < _LEAST_PAUSES or np.count_nonzero(pauses == 0) < 0.3 * pauses.size:
        return 0.0
    return float(np.median(apart) / 1e9)


def covered_ns(trace: Trace) -> int:
    """Return the time that the requests of a trace took: those at a coarse clock's last tick came until the next."""
    step_ns = max(1, round(clock_step_s(trace) * 1e9))
    return -(-(trace.end_ns - trace.meta.phases[0].start_ns) // step_ns) * step_ns


def suits(window_s: float, step_s: float) -> bool:
    """Tell whether a clock's step does not show in the counts of windows: they are many steps long, or whole ones."""
    if step_s == 0 or window_s >= 10 * step_s:
        return True
    steps = window_s / step_s
    return steps > 0.5 and abs(steps - round(steps)) < 1e-6


def quantile(values: npt.NDArray[Any], share: float) -> float:
    """Return the least of the values, (n,) with n above 0, that at least this share of them does not exceed."""
    rank = max(0, math.ceil(share * values.size) - 1)
    return float(np.partition(values, rank)[rank])


def _peak(arrival_ns: Int64Array, window_ns: int) -> float:
    """Return the most requests in any [t, t + window)."""
    last = np.searchsorted(arrival_ns, arrival_ns + window_ns, side="left")
    return float(np.max(last - np.arange(arrival_ns.size)))


def _distribution(values: npt.NDArray[Any], unit: float = 1.0) -> Distribution:
    if values.size == 0:
        return Distribution(None, None, None, None, None, None, None)
    found = [quantile(values, share) / unit for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)]
    return Distribution(float(values.mean() / unit), *found)


def _gap_shares(gap_s: npt.NDArray[np.float64], step_s: float) -> dict[str, float]:
    """Return the share of pauses in each class; those that the clock cannot tell apart are one."""
    edges = [0.0, *(edge for edge in GAP_EDGES_S if edge >= step_s)]
    labels = [f"{low:g} to {high:g} s" for low, high in itertools.pairwise(edges)]
    counts = np.histogram(gap_s, [*edges, np.inf])[0] / max(1, gap_s.size)
    return dict(zip([*labels, f"over {edges[-1]:g} s"], counts.tolist(), strict=True))


def _curve(found: MissRatioCurve) -> Curve:
    return Curve(
        found.size.tolist(),
        found.miss_ratio.tolist(),
        found.standard_error.tolist(),
        found.rate,
        found.working_set,
    )


def _window_ns(span_ns: int, step_s: float) -> int:
    """Return a round length of time that suits the clock and fits into the span at most _MOST_WINDOWS times."""
    unit = 1_000_000
    while True:
        for factor in (1, 2, 5):
            if span_ns <= _MOST_WINDOWS * unit * factor and suits(unit * factor / 1e9, step_s):
                return unit * factor
        unit *= 10


def _over_time(trace: Trace, hot: npt.NDArray[np.bool_], step_s: float) -> OverTime:
    start_ns = trace.meta.phases[0].start_ns
    end_ns = start_ns + covered_ns(trace)
    window_ns = _window_ns(end_ns - start_ns, step_s)
    # What is left at the end is a window of its own only if it is long enough for a rate: a trace may end on an edge.
    windows = max(1, (end_ns - start_ns + window_ns // 2) // window_ns)
    edges_ns = start_ns + np.arange(windows) * window_ns
    last_ns = max(end_ns, start_ns + window_ns // 2)
    lengths_s = np.diff(np.append(edges_ns, last_ns)) / 1e9
    bounds = np.append(np.searchsorted(trace.arrival_ns, edges_ns), len(trace)).tolist()
    rate, ratio, mean, items, users, tokens = [], [], [], [], [], []
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
        some = high > low
        rate.append((high - low) / float(lengths_s[i]))
        ratio.append(float(hot[low:high].mean()) if some else None)
        mean.append(float(trace.history_tokens[low:high].mean()) if some else None)
        named = trace.item_values[trace.item_offsets[low] : trace.item_offsets[high]]
        items.append(int(np.unique(named).size))
        who, latest = np.unique(trace.user[low:high][::-1], return_index=True)
        users.append(int(who.size))
        tokens.append(int(trace.history_tokens[low:high][::-1][latest].sum(dtype=np.int64)))
    starts_s = (edges_ns / 1e9).tolist()
    return OverTime(window_ns / 1e9, starts_s, last_ns / 1e9, rate, ratio, mean, items, users, tokens)


def _by_rank(references: Int64Array) -> Points:
    """Return references over rank, at ranks even in the logarithm."""
    if references.size == 0:
        return Points([], [])
    ranks = np.unique(np.rint(np.geomspace(1, references.size, _POINTS)).astype(np.int64))
    return Points(ranks.astype(float).tolist(), references[ranks - 1].astype(float).tolist())


def _shares_up_to(values: npt.NDArray[Any]) -> Points:
    """Return the share of values up to x, at the quantiles."""
    if values.size == 0:
        return Points([], [])
    share = np.linspace(0, 1, _POINTS)
    at = np.sort(values)[np.minimum((share * values.size).astype(np.int64), values.size - 1)]
    return Points(at.astype(float).tolist(), share.tolist())


def _segments(trace: Trace, measured_ns: Int64Array) -> tuple[int | None, int]:
    """Return how many segments there are, None if too many to be told, and how many are without a request."""
    try:
        starts = [one.start_ns for one in trace.segments()]
    except UserError:
        return None, 0
    return len(starts), len(starts) - np.unique(np.searchsorted(starts, measured_ns, side="right")).size


def _phases(trace: Trace) -> tuple[PhaseSummary, ...]:
    counts = np.bincount(trace.phase, minlength=len(trace.meta.phases))
    return tuple(
        PhaseSummary(
            label=phase.label,
            start_s=phase.start_ns / 1e9,
            end_s=phase.end_ns / 1e9,
            requests=int(count),
            rate_per_s=float(count) / max(1e-9, (phase.end_ns - phase.start_ns) / 1e9),
            asked_rate_per_s=phase.rate,
            asked_rate_end_per_s=phase.rate_end,
            ramp_s=phase.ramp_s,
            factor=phase.factor,
            hot_fraction=phase.hot_fraction,
            hot_items=phase.hot_items,
        )
        for phase, count in zip(trace.meta.phases, counts, strict=True)
    )
