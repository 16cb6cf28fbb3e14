"""The exponent of a popularity law, fitted to how often each item was named, and how well the law fits.

The Zipf law gives the item of rank r a probability proportional to r^-exponent. Ranks are known from the counts alone,
and far down they are chance: an item named twice may have been due once. So the law is fitted, by maximum likelihood,
to the most popular items, those named at least LEAST_COUNT times, given that the reference is to one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_COUNT = 10
LEAST_RANKS = 20
MOST_RANKS = 100_000
FITTING_DISTANCE = 0.03
"""The law is said to fit if the shares of its first ranks differ by no more than this, and chance, from those found."""

_MOST_EXPONENT = 10.0


@dataclass(frozen=True)
class ZipfFit:
    """A Zipf law beside the counts that it was fitted to."""

    exponent: float
    standard_error: float  # of the draw; the ranks are taken as known
    ranks: int  # items that it was fitted to
    references: int  # to them
    distance: float  # largest difference between the shares of the first ranks (Kolmogorov and Smirnov)
    fits: bool


def fit_zipf(counts: npt.NDArray[Any]) -> ZipfFit | None:
    """Fit the law to how often each item was named, (k,) in any order; None where too few were named often enough."""
    often = np.sort(counts[counts >= LEAST_COUNT])[::-1][:MOST_RANKS].astype(np.float64)
    if often.size < LEAST_RANKS:
        return None
    log_rank = np.log(np.arange(1, often.size + 1))
    total = often.sum()
    wanted = float((often * log_rank).sum() / total)

    def law(exponent: float) -> npt.NDArray[np.float64]:
        weights = np.exp(-exponent * log_rank)
        return weights / weights.sum()

    low, high = 0.0, _MOST_EXPONENT
    for _ in range(50):  # the mean logarithm of the rank falls with the exponent; at the maximum it is the one found
        middle = (low + high) / 2
        low, high = (middle, high) if float((law(middle) * log_rank).sum()) > wanted else (low, middle)
    exponent = (low + high) / 2
    shares = law(exponent)
    spread = float((shares * log_rank**2).sum() - (shares * log_rank).sum() ** 2)
    distance = float(np.abs(np.cumsum(shares) - np.cumsum(often) / total).max())
    return ZipfFit(
        exponent=exponent,
        standard_error=1 / math.sqrt(total * spread),
        ranks=often.size,
        references=int(total),
        distance=distance,
        fits=distance <= FITTING_DISTANCE + 1.36 / math.sqrt(total),
    )
