"""Statistics over seeds: interquartile mean, seeded bootstrap interval, standard error; and over requests:
latency tails.

The percentile itself (nearest rank) is `helm_rl.metrics.quantile_ms`; every figure of this package goes through it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 10_000
"""Bootstrap resamples behind every interval."""


def survival_curve(latency_ms: npt.NDArray[np.floating], points: int = 240) -> tuple[Floats, Floats]:
    """Return (latency_ms, share of requests slower than it), each float64[<= points], shares spaced evenly in
    log.

    The shares run from 1 down to 1 / n, so the tail is drawn as densely as the body. Empty in, empty out.
    """
    n = latency_ms.size
    if n == 0:
        return np.empty(0), np.empty(0)
    ordered = np.sort(latency_ms).astype(np.float64)
    above = np.unique(np.round(np.geomspace(1, n, points)).astype(np.int64))[::-1]  # requests at or above the value
    return ordered[n - above], above / n


def interquartile_mean(values: npt.ArrayLike) -> float:
    """Return the mean of the middle half; the values at its edges count by the share of them that lies inside.

    With one or two values it is their mean. NaN if empty. (Without the fractional edge, three or fewer values
    would not be trimmed at all and five would keep three fifths.)
    """
    data = np.asarray(values, dtype=np.float64).ravel()
    if data.size == 0:
        return float("nan")
    return float(np.sort(data) @ _middle_half(data.size))


def bootstrap_interval(
    values: npt.ArrayLike, *, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of the interquartile mean of the values (one per seed).

    The resampling is seeded: the same values give the same interval. None for fewer than two values, since one
    seed says nothing about the spread; with few seeds the interval is too narrow and is read as a lower bound
    on the doubt.
    """
    data = np.asarray(values, dtype=np.float64).ravel()
    if data.size < 2 or not np.isfinite(data).all():
        return None
    rng = np.random.default_rng(seed)
    draws = np.sort(data[rng.integers(0, data.size, size=(resamples, data.size))], axis=1)
    low, high = np.quantile(draws @ _middle_half(data.size), [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def _middle_half(n: int) -> Floats:
    """Weights of n ordered values in their interquartile mean, float64[n], summing to 1."""
    edges = np.arange(n + 1, dtype=np.float64)
    weights = np.clip(np.minimum(edges[1:], 0.75 * n) - np.maximum(edges[:-1], 0.25 * n), 0.0, None)
    return weights / weights.sum()


def standard_error(values: npt.ArrayLike) -> float:
    """Return sd / sqrt(n) with the n - 1 denominator; NaN for fewer than two values."""
    data = np.asarray(values, dtype=np.float64).ravel()
    if data.size < 2:
        return float("nan")
    return float(data.std(ddof=1) / np.sqrt(data.size))
