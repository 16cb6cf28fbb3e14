"""Burst detectors: CUSUM on arrivals and P99 above its moving average, looked at on every tick, compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from helm_rl.errors import UserError

# BurstState.params
LN_FACTOR = 0
FACTOR = 1
THRESHOLD = 2
RATE_WEIGHT = 3  # of a tick, in the rate that is taken as normal
FAST_WEIGHT = 4  # of a tick, in the rate of the last moments
P99_WEIGHT = 5
SIGMAS = 6
LEAST_TICKS = 7
CALM_TICKS = 8
NORMAL_TICKS = 9
N_PARAMS = 10

# BurstState.sums
RATE = 0  # requests a tick that are normal
FAST = 1  # requests a tick of late
CUSUM = 2
P99_MEAN = 3
P99_VAR = 4
SCORE = 5  # the larger of both statistics over its threshold
N_SUMS = 6

# BurstState.counts
TICKS = 0  # seen
P99_TICKS = 1  # seen with a P99
ACTIVE = 2  # ticks since a burst was found, 0: none is on
CALM = 3  # ticks in a row that looked normal while one is on
N_COUNTS = 4

_FAST_S = 1.0
_LEAST_SPREAD = 0.02  # of the P99's mean: a standard deviation below it is luck


@dataclass(frozen=True)
class BurstSettings:
    """When a burst is found, and when it is over.

    Args:
        tick_s: seconds between looks.
        factor: the rise of the arrival rate that CUSUM is best at; above 1.
        threshold: of CUSUM, in nats; larger: fewer false alarms, later detection.
        memory_s: over which the normal rate is the mean; a rise that lasts much longer is the new normal.
        p99_sigmas: standard deviations above its moving average that make a P99 a burst.
        p99_memory_s: over which that average is taken.
        least_s: seconds before anything is found: until then nothing is known to be normal.
        calm_s: seconds for which both signals must look normal before a burst is over.
        normal_after_s: a burst that lasts longer is over all the same, and its rate is normal from then on.

    Raises:
        UserError: a value lies outside its range.
    """

    tick_s: float = 0.01
    factor: float = 1.5
    threshold: float = 10.0
    memory_s: float = 60.0
    p99_sigmas: float = 3.0
    p99_memory_s: float = 30.0
    least_s: float = 10.0
    calm_s: float = 5.0
    normal_after_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("tick_s", "threshold", "memory_s", "p99_sigmas", "p99_memory_s", "calm_s", "normal_after_s"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise UserError(f"burst detector: {name} must be a number above 0, not {value!r}")
        if not 1.0 < self.factor < math.inf:
            raise UserError(f"burst detector: factor must be a number above 1, not {self.factor!r}")
        if not 0.0 <= self.least_s < math.inf:
            raise UserError(f"burst detector: least_s must be a number of at least 0, not {self.least_s!r}")


class BurstState(NamedTuple):
    """What a detector is and has seen."""

    params: npt.NDArray[np.float64]
    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


def new_burst_state(settings: BurstSettings) -> BurstState:
    """Return a detector that has seen nothing."""
    params = np.zeros(N_PARAMS)
    tick_s = settings.tick_s
    params[LN_FACTOR] = math.log(settings.factor)
    params[FACTOR] = settings.factor
    params[THRESHOLD] = settings.threshold
    params[RATE_WEIGHT] = -math.expm1(-tick_s / settings.memory_s)
    params[FAST_WEIGHT] = -math.expm1(-tick_s / _FAST_S)
    params[P99_WEIGHT] = -math.expm1(-tick_s / settings.p99_memory_s)
    params[SIGMAS] = settings.p99_sigmas
    params[LEAST_TICKS] = math.ceil(settings.least_s / tick_s)
    params[CALM_TICKS] = math.ceil(settings.calm_s / tick_s)
    params[NORMAL_TICKS] = math.ceil(settings.normal_after_s / tick_s)
    return BurstState(params, np.zeros(N_SUMS), np.zeros(N_COUNTS, np.int64))


@kernel
def look(state: BurstState, arrivals: float, p99_ms: float) -> bool:
    """Take the arrivals of a tick and the P99 at its end (NaN: none is known); return whether a burst is found now.

    CUSUM (Page, "Continuous inspection schemes", Biometrika 1954) sums the log likelihood of a rate `factor` times the
    normal one against the normal one, Poisson arrivals taken for granted, and never falls below 0: the sum passes the
    threshold a few requests after the rate has risen, whatever the rate. While a burst is on, what is normal stays as
    it was before, so that the burst's end is seen; then it is over when both signals have looked normal for a while.
    """
    params, sums, counts = state.params, state.sums, state.counts
    counts[TICKS] += 1
    known = counts[TICKS] > params[LEAST_TICKS]
    weight = max(params[FAST_WEIGHT], 1.0 / counts[TICKS])
    sums[FAST] += weight * (arrivals - sums[FAST])
    spread = max(math.sqrt(sums[P99_VAR]), _LEAST_SPREAD * sums[P99_MEAN])
    tail = 0.0
    if not math.isnan(p99_ms) and counts[P99_TICKS] > 0 and spread > 0.0:
        tail = (p99_ms - sums[P99_MEAN]) / (params[SIGMAS] * spread)
    if known and sums[RATE] > 0.0:
        gain = arrivals * params[LN_FACTOR] - sums[RATE] * (params[FACTOR] - 1.0)
        # Far above the threshold it would take as long to come down as it took to climb.
        sums[CUSUM] = min(max(0.0, sums[CUSUM] + gain), 2.0 * params[THRESHOLD])
    rise = sums[CUSUM] / params[THRESHOLD]
    sums[SCORE] = max(rise, tail, 0.0) if known else 0.0

    if counts[ACTIVE] > 0:
        counts[ACTIVE] += 1
        loud = sums[FAST] > sums[RATE] * 0.5 * (1.0 + params[FACTOR]) or tail > 0.5
        counts[CALM] = 0 if loud else counts[CALM] + 1
        if counts[CALM] >= params[CALM_TICKS] or counts[ACTIVE] > params[NORMAL_TICKS]:
            if loud:  # it has lasted so long that it is normal now
                sums[RATE] = sums[FAST]
                counts[P99_TICKS] = 0
            counts[ACTIVE] = counts[CALM] = 0
            sums[CUSUM] = 0.0
        return False
    if known and (rise >= 1.0 or tail >= 1.0):
        counts[ACTIVE] = 1
        counts[CALM] = 0
        return True
    sums[RATE] += max(params[RATE_WEIGHT], 1.0 / counts[TICKS]) * (arrivals - sums[RATE])
    if not math.isnan(p99_ms):
        counts[P99_TICKS] += 1
        weight = max(params[P99_WEIGHT], 1.0 / counts[P99_TICKS])
        off = p99_ms - sums[P99_MEAN]
        sums[P99_MEAN] += weight * off
        sums[P99_VAR] += weight * (off * (p99_ms - sums[P99_MEAN]) - sums[P99_VAR])
    return False


@kernel
def look_at_all(state: BurstState, arrivals: npt.NDArray[np.int64], found: npt.NDArray[np.bool_]) -> int:
    """Look at the arrivals of many ticks, without a P99; mark those at which a burst is found, and count them."""
    count = 0
    for i in range(arrivals.size):
        found[i] = look(state, float(arrivals[i]), math.nan)
        count += found[i]
    return count
