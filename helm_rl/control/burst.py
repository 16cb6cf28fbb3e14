"""Burst detectors: a scan of the arrivals and P99 above its moving average, looked at on every tick, compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner, kernel
from helm_rl.errors import UserError

_WINDOWS_S = (0.1, 1.0, 3.0)
"""How far back the arrivals are looked at: large bursts show in the first, small ones in the last."""
_HANDICAP = (4.0, 0.0, 1.0)
"""Nats that a window needs on top of the threshold. There are ten times as many tenths as whole seconds in which chance
may look like a burst, and what is asked of a detector is to find most bursts within a second."""

# BurstState.params
FACTOR = 0
THRESHOLD = 1
RATE_WEIGHT = 2  # of a tick, in the rate that is taken as normal
BLOCK_TICKS = 3
BLOCK_WEIGHT = 4  # of a block, in the dispersion
P99_WEIGHT = 5
SIGMAS = 6
LEAST_TICKS = 7
CALM_TICKS = 8
P99_HOLD_TICKS = 9
NORMAL_TICKS = 10
SILENT_TICKS = 11
TICK_NS = 12
WINDOWS = 13  # ticks of each, from here on
HANDICAPS = WINDOWS + len(_WINDOWS_S)  # nats of each, from here on
N_PARAMS = HANDICAPS + len(_WINDOWS_S)

# BurstState.sums
RATE = 0  # requests a tick that are normal
DISPERSION = 1  # variance of the requests of a block over their mean
BLOCK = 2  # requests in the block so far
BURST_RATE = 3  # requests a tick since a burst was found
P99_MEAN = 4
P99_VAR = 5
SCORE = 6  # the larger of both statistics over its threshold
TOTAL = 7  # requests in all
PEAK = 8  # the largest SCORE since the reader set it to 0
PARTIAL = 9  # requests since the last tick ended
N_SUMS = 10

# BurstState.counts
LEARNT = 0  # ticks that the normal rate is the mean of
P99_LEARNT = 1  # ticks that the mean P99 is the mean of
SINCE = 2  # ticks that windows may cover: those before belong to another state of the load
BLOCKED = 3  # ticks in the block so far
BLOCKS = 4  # that the dispersion is the mean of
SILENT = 5  # ticks since the last request
ACTIVE = 6  # ticks since a burst was found, 0: none is on
CALM = 7  # ticks in a row whose arrivals looked normal while one is on
TICKS = 8  # in all
TICK_END_NS = 9  # when the tick under way ends, UNSET: not known
N_COUNTS = 10

UNSET = -(1 << 62)

_LEAST_TICK_S, _MOST_TICK_S = 1e-4, 10.0  # a detector holds the ticks of its windows
_MOST_S = 1e9
_BLOCK_S = 1.0
_BLOCK_MEMORY = 5.0  # times the rate's: a variance takes more to know than a mean
_PRIOR_BLOCKS, _PRIOR_DISPERSION = 4, 2.0  # what the dispersion is taken for at first
_POISSON = 1.02  # up to this dispersion arrivals count as Poisson
_LEAST_SPREAD = 0.02  # of the P99's mean: a standard deviation below it is luck
_MOST_SQUARE = 9.0  # times the dispersion: what is further off is a burst in the making and no noise
_SILENCE = 20.0  # requests that would have come by now: the load was cut off, which is no rate
_QUIET = 0.5  # of a threshold: below it a signal looks normal again
_DROP = 2.0  # thresholds that a fall takes: an error there would leave nothing known for a while


@dataclass(frozen=True)
class BurstSettings:
    """When a burst is found, and when it is over.

    Args:
        tick_s: seconds between looks.
        factor: the least rise of the arrival rate that counts as a burst; above 1.
        threshold: log likelihood ratio (nats) at which arrivals are a burst; larger: fewer false alarms, later
            detection.
        memory_s: over which the normal rate is the mean; a slower rise is no burst. After as long a silence nothing is
            known to be normal any more.
        p99_sigmas: standard deviations above its moving average that make a P99 a burst.
        p99_memory_s: over which that average is taken.
        least_s: seconds before anything is found: until then nothing is known to be normal.
        calm_s: seconds for which both signals must stay below half their thresholds before a burst is over.
        p99_hold_s: a P99 that stays high keeps a burst on for so long after arrivals look normal; then it is normal.
        normal_after_s: a burst that lasts longer is over all the same, and its rate is normal from then on.

    Raises:
        UserError: a value lies outside its range.
    """

    tick_s: float = 0.01
    factor: float = 1.25
    threshold: float = 8.0
    memory_s: float = 60.0
    p99_sigmas: float = 6.0
    p99_memory_s: float = 30.0
    least_s: float = 10.0
    calm_s: float = 5.0
    p99_hold_s: float = 60.0
    normal_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not _LEAST_TICK_S <= self.tick_s <= _MOST_TICK_S:
            raise UserError(
                f"burst detector: tick_s must be from {_LEAST_TICK_S:g} to {_MOST_TICK_S:g}, not {self.tick_s!r}"
            )
        for name in ("threshold", "p99_sigmas"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise UserError(f"burst detector: {name} must be a number above 0, not {value!r}")
        for name in ("memory_s", "p99_memory_s", "calm_s", "p99_hold_s", "normal_after_s"):
            value = getattr(self, name)
            if not 0.0 < value <= _MOST_S:
                most = f" and at most {_MOST_S:g}" if value > _MOST_S else ""
                raise UserError(f"burst detector: {name} must be a number above 0{most}, not {value!r}")
        if not 1.0 < self.factor < math.inf:
            raise UserError(f"burst detector: factor must be a number above 1, not {self.factor!r}")
        if not 0.0 <= self.least_s <= _MOST_S:
            raise UserError(
                f"burst detector: least_s must be a number of at least 0 and at most {_MOST_S:g}, not {self.least_s!r}"
            )


class BurstState(NamedTuple):
    """What a detector is and has seen."""

    params: npt.NDArray[np.float64]
    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    recent: npt.NDArray[np.float64]  # TOTAL at the end of each of the last ticks, a ring of 2^k


def new_burst_state(settings: BurstSettings) -> BurstState:
    """Return a detector that has seen nothing."""
    params = np.zeros(N_PARAMS)
    tick_s = settings.tick_s
    params[FACTOR] = settings.factor
    params[THRESHOLD] = settings.threshold
    params[RATE_WEIGHT] = -math.expm1(-tick_s / settings.memory_s)
    params[BLOCK_TICKS] = math.ceil(_BLOCK_S / tick_s)
    params[BLOCK_WEIGHT] = -math.expm1(-params[BLOCK_TICKS] * tick_s / (_BLOCK_MEMORY * settings.memory_s))
    params[P99_WEIGHT] = -math.expm1(-tick_s / settings.p99_memory_s)
    params[SIGMAS] = settings.p99_sigmas
    params[LEAST_TICKS] = math.ceil(settings.least_s / tick_s)
    params[CALM_TICKS] = math.ceil(settings.calm_s / tick_s)
    params[P99_HOLD_TICKS] = math.ceil(settings.p99_hold_s / tick_s)
    params[NORMAL_TICKS] = math.ceil(settings.normal_after_s / tick_s)
    params[SILENT_TICKS] = math.ceil(settings.memory_s / tick_s)
    params[TICK_NS] = max(1.0, round(tick_s * 1e9))
    windows = [max(1, round(window_s / tick_s)) for window_s in _WINDOWS_S]
    params[WINDOWS:HANDICAPS] = windows
    params[HANDICAPS:] = _HANDICAP
    counts = np.zeros(N_COUNTS, np.int64)
    counts[TICK_END_NS] = UNSET
    state = BurstState(params, np.zeros(N_SUMS), counts, np.zeros(1 << max(windows).bit_length()))
    _forget(state)
    return state


@kernel
def look(state: BurstState, arrivals: float, p99_ms: float) -> bool:
    """Take the arrivals of a tick and the P99 at its end (NaN: none is known); return whether a burst is found now.

    Of the arrivals of the last tenth, second and three seconds, the logarithm of the ratio of two likelihoods is taken:
    at the rate that they show, but at least `factor` times the normal one, and at the normal rate. That is CUSUM (Page,
    "Continuous inspection schemes", Biometrika 1954) for a rise of unknown size, over a few windows (Lai, "Sequential
    changepoint detection in quality control and dynamical systems", JRSS B 1995). Arrivals that vary more than Poisson
    ones, by a dispersion measured over blocks of a second, are taken for Poisson ones at a rate that varies by a gamma
    law, so their numbers for negative binomial: a large number then proves less.

    While a burst is on, what is normal stays as it was before, so that the burst's end is seen; then it is over when
    both signals have looked normal for a while. A large fall of the rate is learnt at once. While the load is cut off
    nothing is learnt, and after a long silence all is forgotten.
    """
    params, sums, counts, recent = state.params, state.sums, state.counts, state.recent
    counts[TICKS] += 1
    sums[TOTAL] += arrivals
    recent[counts[TICKS] & (recent.size - 1)] = sums[TOTAL]
    if arrivals > 0.0:
        counts[SILENT] = 0
    else:
        counts[SILENT] += 1
        if counts[SILENT] >= params[SILENT_TICKS]:
            _forget(state)
            return False
    learning = counts[ACTIVE] == 0 and counts[SILENT] * sums[RATE] <= _SILENCE
    counts[LEARNT] += learning
    counts[SINCE] += 1
    known = counts[LEARNT] > params[LEAST_TICKS] and sums[RATE] > 0.0

    tail = 0.0
    if counts[P99_LEARNT] > params[LEAST_TICKS] and not math.isnan(p99_ms):
        spread = max(math.sqrt(sums[P99_VAR]), _LEAST_SPREAD * sums[P99_MEAN])
        if spread > 0.0:
            tail = (p99_ms - sums[P99_MEAN]) / (params[SIGMAS] * spread)
    rise = _rise(state) / params[THRESHOLD] if known else 0.0
    sums[SCORE] = max(rise, tail)
    sums[PEAK] = max(sums[PEAK], sums[SCORE])

    if counts[ACTIVE] > 0:
        _follow_burst(state, arrivals, rise, tail)
        return False
    if rise >= 1.0 or tail >= 1.0:
        counts[ACTIVE] = 1
        counts[CALM] = 0
        sums[BURST_RATE] = arrivals
        return True
    if learning:
        if known and counts[SINCE] >= params[HANDICAPS - 1]:
            _learn_fall(state)
        _learn(state, arrivals, known)
        if not math.isnan(p99_ms):
            counts[P99_LEARNT] += 1
            weight = max(params[P99_WEIGHT], 1.0 / counts[P99_LEARNT])
            off = p99_ms - sums[P99_MEAN]
            sums[P99_MEAN] += weight * off
            sums[P99_VAR] += weight * (off * (p99_ms - sums[P99_MEAN]) - sums[P99_VAR])
    return False


@kernel
def _forget(state: BurstState) -> None:
    """Start as if nothing had been seen; the clock of the ticks, and what is still to be read, stay."""
    for i in range(SCORE + 1):
        state.sums[i] = 0.0
    for i in range(CALM + 1):
        if i != SILENT:
            state.counts[i] = 0
    state.sums[DISPERSION] = _PRIOR_DISPERSION
    state.counts[BLOCKS] = _PRIOR_BLOCKS


@inner
def _within(state: BurstState, ticks: int) -> float:
    """Return the requests of the last `ticks` ticks."""
    recent = state.recent
    return state.sums[TOTAL] - recent[(state.counts[TICKS] - ticks) & (recent.size - 1)]


@inner
def _log_ratio(state: BurstState, number: float, mean: float, factor: float) -> float:
    """Return ln of the likelihood of `number` requests at `factor` times the mean over that at the mean."""
    dispersion = state.sums[DISPERSION]
    ratio = number * math.log(factor)
    if dispersion <= _POISSON:
        return ratio - (factor - 1.0) * mean
    # Variance over mean of a block's requests is 1 + mean / shape.
    shape = state.sums[RATE] * state.params[BLOCK_TICKS] / (dispersion - 1.0)
    return ratio - (number + shape) * math.log((shape + factor * mean) / (shape + mean))


@inner
def _rise(state: BurstState) -> float:
    """Return the log likelihood ratio (nats) for a rise in the window where it is largest, at least 0."""
    params, counts, rate = state.params, state.counts, state.sums[RATE]
    most = 0.0
    for k in range(HANDICAPS - WINDOWS):
        ticks = int(params[WINDOWS + k])
        number, mean = _within(state, ticks), rate * ticks
        # The ratio is at most this square, whose window is most often not worth a logarithm.
        if number > mean and ticks <= counts[SINCE] and (number - mean) ** 2 > 2.0 * mean * params[HANDICAPS + k]:
            ratio = _log_ratio(state, number, mean, max(number / mean, params[FACTOR]))
            most = max(most, ratio - params[HANDICAPS + k])
    return most


@inner
def _learn_fall(state: BurstState) -> None:
    """Where the last seconds prove a fall of the rate, take them for all that is known."""
    params, sums, counts = state.params, state.sums, state.counts
    ticks = int(params[HANDICAPS - 1])
    number, mean = _within(state, ticks), sums[RATE] * ticks
    if number * params[FACTOR] >= mean:
        return
    if _log_ratio(state, number, mean, max(number, 0.5) / mean) >= _DROP * params[THRESHOLD]:
        sums[RATE] = number / ticks
        sums[BLOCK] = 0.0
        counts[BLOCKED] = 0
        counts[LEARNT] = ticks


@inner
def _learn(state: BurstState, arrivals: float, known: bool) -> None:
    """Learn from a tick what rate and what dispersion are normal."""
    params, sums, counts = state.params, state.sums, state.counts
    sums[RATE] += max(params[RATE_WEIGHT], 1.0 / counts[LEARNT]) * (arrivals - sums[RATE])
    sums[BLOCK] += arrivals
    counts[BLOCKED] += 1
    if counts[BLOCKED] >= params[BLOCK_TICKS]:
        mean = sums[RATE] * counts[BLOCKED]
        if known and mean > 0.0:
            counts[BLOCKS] += 1
            square = min((sums[BLOCK] - mean) ** 2 / mean, _MOST_SQUARE * max(sums[DISPERSION], 1.0))
            sums[DISPERSION] += max(params[BLOCK_WEIGHT], 1.0 / counts[BLOCKS]) * (square - sums[DISPERSION])
        sums[BLOCK] = 0.0
        counts[BLOCKED] = 0


@inner
def _follow_burst(state: BurstState, arrivals: float, rise: float, tail: float) -> None:
    """Look whether the burst that is on is over, or has become normal."""
    params, sums, counts = state.params, state.sums, state.counts
    counts[ACTIVE] += 1
    sums[BURST_RATE] += max(params[RATE_WEIGHT], 1.0 / counts[ACTIVE]) * (arrivals - sums[BURST_RATE])
    counts[CALM] = counts[CALM] + 1 if rise <= _QUIET else 0
    slow = tail > _QUIET
    over = counts[CALM] >= params[CALM_TICKS] and not slow
    # What raises the P99 by now may be the alpha that the burst was met with.
    if not over and counts[CALM] < params[P99_HOLD_TICKS] and counts[ACTIVE] <= params[NORMAL_TICKS]:
        return
    if counts[CALM] == 0:
        sums[RATE] = sums[BURST_RATE]
    if slow:
        counts[P99_LEARNT] = 0
    counts[ACTIVE] = counts[CALM] = counts[SINCE] = counts[BLOCKED] = 0
    sums[BLOCK] = 0.0


@kernel
def look_at_all(
    state: BurstState,
    arrivals: npt.NDArray[np.int64],
    p99_ms: npt.NDArray[np.float64],
    found: npt.NDArray[np.bool_],
) -> int:
    """Look at the arrivals of n ticks and the P99 at the end of each (empty: none is known).

    Mark those at which a burst is found, and count them.
    """
    count = 0
    for i in range(arrivals.size):
        found[i] = look(state, float(arrivals[i]), p99_ms[i] if p99_ms.size > 0 else math.nan)
        count += found[i]
    return count
