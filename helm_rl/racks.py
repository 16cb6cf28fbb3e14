"""Telemetry of many nodes, through racks, as one observation: summaries that add up, and what a sample leaves open.

A node sums up an interval in counters and a histogram of its latencies; a rack adds those of its nodes, and the centre
those of the racks, in any order and to the same result. The observation is that of the mean node: rates, busy times and
queues per node, while shares and the P99 are those of all requests together. Where only some nodes of each rack report,
how much the racks differ says how far the observation may be off.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from helm_rl.latency import SKETCH_BINS, SKETCH_REQUESTS, SKETCH_WIDTH, bin_of, sketches_p99_ms
from helm_rl.metrics import WindowStats
from helm_rl.observation import OBSERVATION_NAMES, SIZE, FloatArray, ObservationBuilder

_COUNTERS = (
    "arrivals",
    "returning",
    "completed",
    "slow",
    "shed",
    "history_tokens",
    "history_tokens_hit",
    "rows",
    "rows_hit",
    "log_latency_sum",
    "tail_cost_sum",
    "latency_ms_sum",
    "link_busy_ns",
    "compute_busy_ns",
    "queue",
    "queue_bound",
    "backlog_pages",
    "moved_pages",
    "pages",
    "emb_margin_ms",
    "kv_margin_ms",
    "fetched_bytes",
    "refilled_bytes",
)
"""Fields of WindowStats that add up, and after them what follows."""
NODES, EMB_PAGES, TARGET_PAGES = range(len(_COUNTERS), len(_COUNTERS) + 3)
_ADDED = TARGET_PAGES + 1
BURST_SCORE, END_NS, MINUS_START_NS = range(_ADDED, _ADDED + 3)  # of these the highest counts
WIDTH = MINUS_START_NS + 1

_P99 = OBSERVATION_NAMES.index("p99_over_slo")
_COMPLETED = _COUNTERS.index("completed")
_HEAD = struct.Struct("<4sI")  # mark, occupied bins
_MARK = b"HRT1"
_VALUES_BYTES = 8 * WIDTH
_BIN = np.dtype([("at", "<u2"), ("requests", "<u4")])
_PAGES = _COUNTERS.index("pages")

# What any group can have measured.
_MOST = 2.0**62
_LEAST = np.zeros(WIDTH)
_LEAST[[_COUNTERS.index(name) for name in ("log_latency_sum", "emb_margin_ms", "kv_margin_ms")]] = -_MOST
_LEAST[[_PAGES, _COUNTERS.index("queue_bound"), NODES]] = 1.0
_LEAST[[END_NS, MINUS_START_NS]] = -_MOST


class Summary(NamedTuple):
    """What n nodes, racks or other groups measured in an interval."""

    values: npt.NDArray[np.float64]  # [n, WIDTH] counters, and what of which the highest counts
    latencies: npt.NDArray[np.float64]  # [n, SKETCH_BINS] requests that completed, by their latency


def new_summary(groups: int = 1) -> Summary:
    """Return one of groups that no node has been added to."""
    values = np.zeros((groups, WIDTH))
    values[:, _ADDED:] = -math.inf
    return Summary(values, np.zeros((groups, SKETCH_BINS)))


def values_of(window: WindowStats) -> npt.NDArray[np.float64]:
    """Return the row of `Summary.values` for what one node measured, [WIDTH]."""
    counters = [float(getattr(window, name)) for name in _COUNTERS]
    pages = (1.0, window.alpha * window.pages, window.target * window.pages)
    return np.array([*counters, *pages, window.burst_score, window.end_ns, -window.start_ns])


@kernel
def count_latencies(
    latencies: npt.NDArray[np.float64], group: npt.NDArray[np.int64], latency_ms: npt.NDArray[np.float32]
) -> None:
    """Count request after request, [n], in the histogram of its group, [groups, SKETCH_BINS]."""
    for i in range(group.size):
        latencies[group[i], bin_of(np.float64(latency_ms[i]))] += 1.0


def add(total: Summary, group: int, other: Summary) -> None:
    """Add all of another summary to one group."""
    values = total.values[group]
    values[:_ADDED] += other.values[:, :_ADDED].sum(0)
    np.maximum(values[_ADDED:], other.values[:, _ADDED:].max(0), out=values[_ADDED:])
    total.latencies[group] += other.latencies.sum(0)


def encode(summary: Summary, group: int = 0) -> bytes:
    """Return one group as a message: its values, and the bins that any request fell into.

    Raises:
        ValueError: a bin has no whole number of requests, or more than 32 bits hold.
    """
    at = np.flatnonzero(summary.latencies[group])
    requests = summary.latencies[group, at]
    bins = np.empty(at.size, _BIN)
    if not ((requests > 0) & (requests < 2.0**32) & (requests % 1.0 == 0)).all():
        raise ValueError("a bin of a summary holds no number of requests, or more than 2^32 - 1")
    bins["at"], bins["requests"] = at, requests
    return _HEAD.pack(_MARK, at.size) + summary.values[group].astype("<f8").tobytes() + bins.tobytes()


def add_message(total: Summary, group: int, message: bytes) -> None:
    """Add what `encode` returned to one group.

    Raises:
        ValueError: the message is cut, of another version, or holds what cannot be; nothing is added then.
    """
    bins_at = _HEAD.size + _VALUES_BYTES
    if len(message) < bins_at or message[:4] != _MARK:
        raise ValueError(f"not a summary of this version: {len(message)} bytes that begin with {message[:4]!r}")
    occupied = _HEAD.unpack_from(message)[1]
    if len(message) != bins_at + occupied * _BIN.itemsize:
        raise ValueError(f"a summary of {occupied} bins has not {len(message)} bytes")
    values = np.frombuffer(message, "<f8", WIDTH, _HEAD.size)
    bins = np.frombuffer(message, _BIN, occupied, bins_at)
    at = bins["at"]
    if not _possible(values) or (at >= SKETCH_BINS).any() or (np.diff(at.astype(np.int64)) <= 0).any():
        raise ValueError("a summary holds numbers that no node can have measured")
    total.values[group, :_ADDED] += values[:_ADDED]
    np.maximum(total.values[group, _ADDED:], values[_ADDED:], out=total.values[group, _ADDED:])
    total.latencies[group, at] += bins["requests"]


def _possible(values: npt.NDArray[np.float64]) -> bool:
    """Whether a row of `Summary.values` is what nodes can have measured; infinities and NaN are not."""
    most_pages = values[_PAGES] * (1.0 + 1e-9)  # shares of it are rounded
    return bool(
        ((values >= _LEAST) & (values <= _MOST)).all()
        and values[NODES] % 1.0 == 0.0
        and max(values[EMB_PAGES], values[TARGET_PAGES]) <= most_pages
        and values[END_NS] >= -values[MINUS_START_NS]
    )


def mean_window(values: npt.NDArray[np.float64], p99_ms: float) -> WindowStats:
    """Return a row of `Summary.values` as the window of the mean node, whose counts need not be whole."""
    mean = values[:_ADDED] / values[NODES]
    fields: dict[str, Any] = dict(zip(_COUNTERS, mean[:NODES].tolist(), strict=True))
    return WindowStats(
        start_ns=int(-values[MINUS_START_NS]),
        end_ns=int(values[END_NS]),
        p99_ms=p99_ms,
        alpha=float(values[EMB_PAGES] / values[_PAGES]),
        target=float(values[TARGET_PAGES] / values[_PAGES]),
        burst_score=float(values[BURST_SCORE]),
        **fields,
    )


class ClusterObserver:
    """What a controller of all nodes sees, from the summaries of the racks.

    Args:
        slo_ms: of the latencies.
        racks: how many there are, where a bound is wanted; 0: none is.
    """

    def __init__(self, slo_ms: float, racks: int = 0) -> None:
        # The first is of all racks, each other one of all but one.
        self._builders = [ObservationBuilder(slo_ms) for _ in range(1 + racks)]
        self._observations = np.zeros((1 + racks, SIZE))
        self._sketches = np.zeros((1 + racks, SKETCH_BINS))
        self._completed = np.zeros((1 + racks, 1))
        self._reported = np.zeros(racks, np.bool_)

    def update(self, racks: Summary) -> FloatArray:
        """Take the racks' summaries of an interval; return the observation, [17] float32.

        A rack of which no node reported has no part in it; one at least must have one.

        Raises:
            ValueError: no node reported.
        """
        groups = new_summary(len(self._builders))
        add(groups, 0, racks)
        if self._reported.size:
            groups.values[1:] = groups.values[0]
            groups.values[1:, :_ADDED] -= racks.values[:, :_ADDED]
            groups.latencies[1:] = groups.latencies[0] - racks.latencies
        nodes = groups.values[:, NODES]
        if nodes[0] == 0:
            raise ValueError("no node reported: there is nothing to observe")
        per_node = np.maximum(nodes, 1.0)[:, np.newaxis]
        # As in a node: what completed in a window makes the sketch decay when the next one begins.
        self._sketches *= np.exp(-self._completed / SKETCH_REQUESTS)
        self._sketches += groups.latencies / per_node
        self._completed = groups.values[:, _COMPLETED, np.newaxis] / per_node
        p99_ms = sketches_p99_ms(self._sketches)
        for k in np.flatnonzero(nodes):
            window = mean_window(groups.values[k], float(p99_ms[k]))
            self._observations[k] = self._builders[k].update(window)
        if self._reported.size:
            self._reported = racks.values[:, NODES] > 0
        return self._observations[0].astype(np.float32)

    def bound(self, share: float) -> npt.NDArray[np.float64]:
        """Return by how much each signal of the last observation may be off, with 95 % confidence, [17].

        share: of the nodes that report, drawn anew in each interval and in each rack. What the observation would be
        without each of the racks in turn tells its error (the jackknife: Wolter, "Introduction to Variance Estimation",
        2007, chapter 4); that racks differ by themselves makes it wider. The P99 may be off by a bin of the sketch
        besides. NaN where fewer than two racks reported.
        """
        without = self._observations[1:][self._reported]
        if len(without) < 2:
            return np.full(SIZE, np.nan)
        error = without.std(0) * math.sqrt((len(without) - 1) * max(1.0 - share, 0.0))
        bound = _t_quantile(len(without) - 1) * error
        bound[_P99] += SKETCH_WIDTH * self._observations[0, _P99]
        return bound


def _t_quantile(freedom: int) -> float:
    """Return the .975 quantile of Student's t (Abramowitz and Stegun 26.7.5): 1 % off for 2 degrees, 11 % for 1."""
    z, n = 1.959964, freedom
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return float(sum(terms))
