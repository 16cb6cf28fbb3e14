"""What is in a trace, in numbers: rates, users and how soon they return, histories, items, phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from helm_rl.workloads.trace import Int64Array, Trace

RETURN_NS = 60_000_000_000
"""A user who came within this time is hot (observation v1, hot_user_ratio)."""


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
    rate_mean: float
    rate_peak_1s: float  # in the busiest second, wherever it starts
    rate_peak_10s: float
    users: int  # that come at least once
    user_codes: int
    tenants: int
    items: int  # that are named at least once
    item_codes: int
    item_references: int
    top_items_share: float  # references to the most popular 1 % of the items named, over all
    zipf_items: float | None
    returning: float  # share of requests whose user was in the trace before
    hot_user_ratio: float  # share of measured requests whose user came within the last 60 s
    return_gap_s: Distribution  # between requests of one user
    requests_per_user: Distribution
    history_tokens: Distribution  # per request
    new_tokens: Distribution  # per request
    phases: tuple[PhaseSummary, ...]
    segments: int
    steps: tuple[str, ...]
    dropped: dict[str, int]


def summarise(trace: Trace) -> TraceSummary:
    """Compute the statistics of a trace; it is sorted a few times, so this takes seconds for ten million requests."""
    meta, arrival_ns = trace.meta, trace.arrival_ns
    start_ns, end_ns = meta.phases[0].start_ns, trace.end_ns
    gap_ns = gaps_to_previous(arrival_ns, trace.user)
    returns = gap_ns >= 0
    measured = arrival_ns >= meta.measure_from_ns
    hot = returning(trace)
    _, visits = np.unique(trace.user, return_counts=True)
    _, references = np.unique(trace.item_values, return_counts=True)
    top = -(-references.size // 100)
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
        rate_mean=len(trace) / ((end_ns - start_ns) / 1e9),
        rate_peak_1s=_peak(arrival_ns, 1_000_000_000),
        rate_peak_10s=_peak(arrival_ns, 10_000_000_000) / 10,
        users=visits.size,
        user_codes=meta.users,
        tenants=np.unique(trace.tenant).size,
        items=references.size,
        item_codes=meta.items,
        item_references=trace.item_values.size,
        top_items_share=float(np.sort(references)[references.size - top :].sum() / max(1, trace.item_values.size)),
        zipf_items=meta.zipf_items,
        returning=float(returns.mean()),
        hot_user_ratio=float(hot[measured].mean()) if measured.any() else 0.0,
        return_gap_s=_distribution(gap_ns[returns], 1e9),
        requests_per_user=_distribution(visits),
        history_tokens=_distribution(trace.history_tokens),
        new_tokens=_distribution(trace.new_tokens),
        phases=_phases(trace),
        segments=len(trace.segments()),
        steps=meta.steps,
        dropped=meta.dropped,
    )


def returning(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return for each request whether its user came within the RETURN_NS before it; bool (n,)."""
    gap_ns = gaps_to_previous(trace.arrival_ns, trace.user)
    return (gap_ns >= 0) & (gap_ns <= RETURN_NS)


def gaps_to_previous(arrival_ns: Int64Array, user: Int64Array) -> Int64Array:
    """Return the time since the user's previous request, or -1 at his first; int64 (n,), ns."""
    order = np.argsort(user, kind="stable")
    gap = np.full(user.size, -1, dtype=np.int64)
    same = user[order][1:] == user[order][:-1]
    gap[order[1:][same]] = np.diff(arrival_ns[order])[same]
    return gap


def _peak(arrival_ns: Int64Array, window_ns: int) -> float:
    """Return the most requests in any [t, t + window)."""
    last = np.searchsorted(arrival_ns, arrival_ns + window_ns, side="left")
    return float(np.max(last - np.arange(arrival_ns.size)))


def _distribution(values: npt.NDArray[Any], unit: float = 1.0) -> Distribution:
    if values.size == 0:
        return Distribution(None, None, None, None, None, None, None)
    ranks = [0] + [max(0, int(np.ceil(q * values.size)) - 1) for q in (0.1, 0.5, 0.9, 0.99)] + [values.size - 1]
    found = np.partition(values, sorted(set(ranks)))[ranks] / unit
    return Distribution(float(values.mean() / unit), *map(float, found))


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
