"""Statistics over seeds: interquartile mean, seeded bootstrap intervals, probability of improvement, standard error;
and over requests: latency tails.

The percentile itself (nearest rank) is `helm_rl.metrics.quantile_ms`; every figure of this package goes through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 10_000
"""Bootstrap resamples behind every interval."""
MOST_PAIRS = 1 << 20
"""Pairs of values that are compared at once."""


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
    return stratified_interval([values], level=level, seed=seed, resamples=resamples)


def stratified_interval(
    strata: Sequence[npt.ArrayLike], *, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the same over tasks: each stratum holds the values of one task, and is resampled by itself.

    The interquartile mean is taken of all values together (Agarwal et al., "Deep reinforcement learning at the edge of
    the statistical precipice", NeurIPS 2021), so they must be on one scale. None where a stratum has fewer than two
    values, or one that is not finite.
    """
    data = _whole(strata)
    if data is None:
        return None
    draws = np.sort(np.concatenate(list(_resampled(data, np.random.default_rng(seed), resamples)), axis=1), axis=1)
    return _ends(draws @ _middle_half(draws.shape[1]), level)


def improvement(ours: Sequence[npt.ArrayLike], theirs: Sequence[npt.ArrayLike]) -> float:
    """Return the probability that a run of ours is below one of theirs, the mean over tasks; ties count half.

    ours, theirs: a stratum of values for each task, in one order. In a task it is the Mann-Whitney statistic over its
    largest value (Agarwal et al., as above). Lower is taken as better.
    """
    pairs = zip(ours, theirs, strict=True)
    return float(np.mean([_below(np.asarray(one, np.float64), np.asarray(other, np.float64)) for one, other in pairs]))


def improvement_interval(
    ours: Sequence[npt.ArrayLike],
    theirs: Sequence[npt.ArrayLike],
    *,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float] | None:
    """Return its percentile bootstrap interval, strata resampled one by one; None as for `stratified_interval`."""
    first, second = _whole(ours), _whole(theirs)
    if first is None or second is None:
        return None
    rng = np.random.default_rng(seed)
    pairs = zip(_resampled(first, rng, resamples), _resampled(second, rng, resamples), strict=True)
    return _ends(np.mean([_below_each(one, other) for one, other in pairs], axis=0), level)


def _whole(strata: Sequence[npt.ArrayLike]) -> list[Floats] | None:
    """The strata as arrays, None where one of them says nothing about its spread."""
    data = [np.asarray(values, dtype=np.float64).ravel() for values in strata]
    return None if not data or any(one.size < 2 or not np.isfinite(one).all() for one in data) else data


def _resampled(strata: Sequence[Floats], rng: np.random.Generator, resamples: int) -> Iterator[Floats]:
    """Draw each stratum anew, with replacement, float64[resamples, n]."""
    return (data[rng.integers(0, data.size, size=(resamples, data.size))] for data in strata)


def _below(one: Floats, other: Floats) -> Floats:
    """Share of pairs, along the last axes, in which `one` is below `other`, ties counting half."""
    left, right = one[..., :, None], other[..., None, :]
    share: Floats = ((left < right) + 0.5 * (left == right)).mean(axis=(-2, -1))
    return share


def _below_each(one: Floats, other: Floats) -> Floats:
    """`_below` of each resample, float64[resamples], a few at a time: all their pairs at once may be gigabytes."""
    rows = max(1, MOST_PAIRS // (one.shape[1] * other.shape[1]))
    return np.concatenate([_below(one[k : k + rows], other[k : k + rows]) for k in range(0, len(one), rows)])


def _ends(statistic: Floats, level: float) -> tuple[float, float]:
    low, high = np.quantile(statistic, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
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
