"""What a serving system counts, what is wrong with what it says, and the protocol that reads and steers it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from helm_rl.observation import OBSERVATION_NAMES

BoolArray = npt.NDArray[np.bool_]
FloatArray64 = npt.NDArray[np.float64]


class Cause(StrEnum):
    """Why a reading was refused, or why the loop left alpha as it is instead of deciding."""

    UNREACHABLE = "unreachable"  # no connection, an error for an answer, or a redirection
    LATE = "late"  # the answer has not come in time
    STALE = "stale"  # the newest reading is too old, or the server's own clock stands still
    MALFORMED = "malformed"  # too large, or not what was agreed upon
    MISSING = "missing"  # a signal that should be there is not
    NOT_FINITE = "not_finite"
    ABSURD = "absurd"  # beyond what any server can count
    BACKWARDS = "backwards"  # a counter fell
    BASELINE = "baseline"  # the first reading, or the first after long: nothing to compare it with yet
    ADAPTER = "adapter"  # the adapter raised what it should not, or gave no counters
    NO_ALPHA = "no_alpha"  # what is applied is not known
    DECISION = "decision"  # the controller raised, or what it asked for is no number
    OUT_OF_RANGE = "out_of_range"  # it asked for more or less than the bounds allow, and got these


class StaleTelemetry(Exception):
    """Raised by an adapter that has no counters to give now, or could not apply a target."""

    def __init__(self, message: str, cause: Cause = Cause.UNREACHABLE) -> None:
        super().__init__(message)
        self.cause = cause


class Latencies(NamedTuple):
    """A histogram of the latencies of requests served since the server started; shed ones are not in it.

    `requests[k]` took over edges_ms[k - 1], up to edges_ms[k]; both float64 [n], the last edge may be infinite.
    """

    edges_ms: FloatArray64
    requests: FloatArray64


@dataclass(frozen=True)
class Counters:
    """What a server has counted since it started, and what it finds now.

    None: the server cannot give it. Features of the observation that need it are then masked (`masked`).
    """

    # Since the start: each only grows.
    arrivals: float
    returning: float | None = None  # arrivals whose user came within the last 60 s
    completed: float | None = None  # needed only without `latency`
    slow: float | None = None  # served over the SLO; without it taken from `latency`
    shed: float | None = None  # refused, the queue being full
    history_tokens: float | None = None  # asked
    history_tokens_hit: float | None = None
    rows: float | None = None  # embedding rows asked
    rows_hit: float | None = None
    link_busy_s: float | None = None
    compute_busy_s: float | None = None
    clock_s: float | None = None  # of the server, which tells an answer from an old one
    latency: Latencies | None = None
    # As it is now.
    p99_ms: float | None = None  # needed only without `latency`
    queue: float | None = None  # requests waiting
    queue_bound: float | None = None
    alpha: float | None = None  # the embedding cache's share, as applied; None: what `apply` has returned
    backlog_pages: float | None = None  # still to move
    pages: float | None = None
    emb_margin_ms: float | None = None  # saved per request by 1 % more of the pool as EMB
    kv_margin_ms: float | None = None
    kv_margin_link_ms: float | None = None  # of these, what is saved on the link
    revision: float | None = None  # of the target that it follows


class Adapter(Protocol):
    """A serving system as the control loop sees it. Each call comes from a thread of its own, one at a time.

    period_s: the least time between two reads, in seconds; infinite: once per decision is enough.
    """

    period_s: float

    def read(self) -> Counters:
        """Return the counters; StaleTelemetry where there are none to be had."""
        ...

    def apply(self, alpha: float, revision: int) -> float:
        """Ask for `alpha` and return what is applied by now; StaleTelemetry if it could not be asked for.

        revision: grows from target to target; of two, the server follows the one with the larger.
        """
        ...


_MOST_PER_S = {
    "arrivals": 1e6,
    "returning": 1e6,
    "completed": 1e6,
    "slow": 1e6,
    "shed": 1e6,
    "history_tokens": 1e11,
    "history_tokens_hit": 1e11,
    "rows": 1e12,
    "rows_hit": 1e12,
    "link_busy_s": 1e3,
    "compute_busy_s": 1e3,
}
"""What one server can count in a second at the most; a thousand times what any does."""
MONOTONE = (*_MOST_PER_S, "clock_s")
"""Counters that only grow, `latency` apart."""
_MOST = {
    "p99_ms": 1e9,
    "queue": 1e9,
    "queue_bound": 1e9,
    "alpha": 1.0,
    "backlog_pages": 1e12,
    "pages": 1e12,
    "emb_margin_ms": 1e9,
    "kv_margin_ms": 1e9,
    "kv_margin_link_ms": 1e9,
    "revision": 2.0**62,
}
_MAY_BE_NEGATIVE = {"emb_margin_ms", "kv_margin_ms", "kv_margin_link_ms"}
_CLOCKS_APART_S, _CLOCKS_APART = 1.0, 0.5  # plus that share of the time that has passed

_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "hot_user_ratio": (("returning",),),
    "kv_hit_rate": (("history_tokens", "history_tokens_hit"),),
    "emb_hit_rate": (("rows", "rows_hit"),),
    "mean_history": (("history_tokens",),),
    "slo_violation_rate": (("latency",), ("completed", "slow")),
    "p99_over_slo": (("latency",), ("p99_ms",)),
    "link_util": (("link_busy_s",),),
    "compute_util": (("compute_busy_s",),),
    "link_demand": (("link_busy_s",),),
    "compute_demand": (("compute_busy_s",),),
    "queue": (("queue", "queue_bound"),),
    "emb_margin": (("emb_margin_ms",),),
    "kv_margin": (("kv_margin_ms",),),
    "backlog": (("backlog_pages", "pages"),),
}
"""Which counters a feature needs, in one way or several; features that are not here need arrivals or alpha alone."""


def masked(counters: Counters) -> BoolArray:
    """Return which features of the observation the server cannot give, bool [17]."""
    given = {field.name for field in dataclasses.fields(Counters) if getattr(counters, field.name) is not None}
    return np.array(
        [name in _NEEDS and not any(given.issuperset(way) for way in _NEEDS[name]) for name in OBSERVATION_NAMES]
    )


def unfit(counters: Counters) -> Cause | None:
    """Return what is wrong with a reading by itself, None if nothing is; TypeError where it holds what is no number."""
    if counters.arrivals is None:
        return Cause.MISSING
    names = [field.name for field in dataclasses.fields(Counters) if field.name != "latency"]
    values = {name: getattr(counters, name) for name in names if getattr(counters, name) is not None}
    latency = counters.latency
    if latency is not None and not _is_histogram(latency):
        return Cause.MALFORMED
    if not all(math.isfinite(value) for value in values.values()):
        return Cause.NOT_FINITE
    if latency is not None and not (np.isfinite(latency.requests).all() and not np.isnan(latency.edges_ms).any()):
        return Cause.NOT_FINITE
    for name, value in values.items():
        if (value < 0 and name not in _MAY_BE_NEGATIVE) or abs(value) > _MOST.get(name, 2.0**62):
            return Cause.ABSURD
    if counters.pages == 0 or counters.queue_bound == 0:
        return Cause.ABSURD
    if latency is not None:
        edges = latency.edges_ms
        # Without a finite edge nothing is known of how long any request took.
        if edges.size == 0 or not 0 < edges[0] < math.inf:
            return Cause.ABSURD
        if (np.diff(edges) <= 0).any() or (latency.requests < 0).any():
            return Cause.ABSURD
    return None


def _is_histogram(latency: Latencies) -> bool:
    """Whether its arrays are such that compiled code, which checks nothing, may read them."""
    edges, requests = latency
    return (
        all(isinstance(each, np.ndarray) and each.ndim == 1 and each.dtype == np.float64 for each in latency)
        and edges.size == requests.size
    )


def disagree(before: Counters, after: Counters, seconds: float) -> Cause | None:
    """Return what is wrong with a reading that follows another after so many seconds, None if nothing is.

    Both must be fit by themselves. BACKWARDS: a counter is lower, as after a restart of the server.
    """
    most_s = max(seconds, 0.0) + _CLOCKS_APART_S
    grown = {name: _grown(before, after, name) for name in MONOTONE}
    latency_grown = None
    if before.latency is not None and after.latency is not None:
        if not np.array_equal(before.latency.edges_ms, after.latency.edges_ms):
            return Cause.BACKWARDS  # another server
        latency_grown = after.latency.requests - before.latency.requests
    if any(one is not None and one < 0 for one in grown.values()):
        return Cause.BACKWARDS
    if latency_grown is not None and (latency_grown < 0).any():
        return Cause.BACKWARDS
    for name, most in _MOST_PER_S.items():
        one = grown[name]
        if one is not None and one > most * most_s:
            return Cause.ABSURD
    if latency_grown is not None and latency_grown.sum() > _MOST_PER_S["completed"] * most_s:
        return Cause.ABSURD
    clock = grown["clock_s"]
    if clock is not None:
        if clock == 0:
            return Cause.STALE
        if abs(clock - seconds) > _CLOCKS_APART_S + _CLOCKS_APART * seconds:
            return Cause.STALE if clock < seconds else Cause.ABSURD
    return None


def _grown(before: Counters, after: Counters, name: str) -> float | None:
    old, new = getattr(before, name), getattr(after, name)
    return None if old is None or new is None else new - old
