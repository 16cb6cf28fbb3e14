"""How fast bursts can be found at all, and how fast the detector finds them: simulated arrivals, compiled looks.

A test sees the arrivals of every tick. Its threshold is such that arrivals without bursts set it off once in a named
mean time; then bursts begin, each after a stretch of calm, and the delay of each is taken. The limit is the best of
tests that know the rate, the factor of the burst and, through their thresholds, the dispersion: CUSUM at the burst's
factor and at its root, and the requests of the last second and half second. For independent ticks (dispersion 1) and
the worst moment for a burst to begin, CUSUM is the fastest possible (Moustakides, "Optimal stopping times for detecting
changes in distributions", Annals of Statistics 1986); what share is found within a second is another question, which a
count over a second may answer better. For other dispersions the limit is the best test tried, and no proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from helm_rl.control import burst
from helm_rl.control.burst import BurstSettings, BurstState, look, look_at_all, new_burst_state

Ticks = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

HOLD_S = 1.0
"""Mean seconds for which the rate of an overdispersed process stays the same (the generator's `rate_cv_s`)."""
WITHIN_S = 1.0
NEVER = 1e9
"""A threshold that nothing reaches."""
LEAST_NATS, MOST_NATS = 4.0, 60.0
"""Between which a threshold of the arrivals is sought: below, chance alone would reach it every few seconds."""
NO_P99 = np.zeros(0)
_BURST_S = 5.0
_CALM_S = 10.0
_WARM_S = 60.0


@dataclass(frozen=True)
class Found:
    """What a test made of bursts. delay_s: of each, ascending, inf: not found within _BURST_S; test: its name."""

    delay_s: Floats
    test: str = ""

    @property
    def within(self) -> float:
        """The share found within WITHIN_S."""
        return float(np.mean(self.delay_s <= WITHIN_S + 1e-9))

    def quantile_s(self, q: float) -> float:
        """Return a quantile of the delay, by nearest rank; inf where so many were not found."""
        return float(self.delay_s[max(0, math.ceil(q * self.delay_s.size) - 1)])


@dataclass(frozen=True)
class Cell:
    """Bursts of one factor at one rate (requests/s) and dispersion, and the mean time between false alarms."""

    rate: float
    dispersion: float
    factor: float
    false_alarm_s: float
    limit: Found
    ours: Found


def draw_ticks(
    rng: np.random.Generator, seconds: float, rate: float, dispersion: float = 1.0, tick_s: float = 0.01
) -> Ticks:
    """Draw the arrivals of each tick at `rate` requests/s, int64 [n].

    At a dispersion of 1 they are Poisson. Above, they are a Cox process as the generator draws it for `rate_cv` with
    `rate_cv_s` = HOLD_S: the rate is multiplied by a gamma factor of mean 1, drawn anew after exponential times of mean
    HOLD_S, whose variance gives the requests of one second this variance over mean.
    """
    n = round(seconds / tick_s)
    if dispersion <= 1.0:
        return rng.poisson(rate * tick_s, n)
    # Var of the integral of the factor over 1 s, for a factor of variance 1 with correlation exp(-t / HOLD_S).
    share = 2.0 * (HOLD_S - HOLD_S**2 * -math.expm1(-1.0 / HOLD_S))
    variance = (dispersion - 1.0) / (rate * share)
    held = rng.exponential(HOLD_S, round(seconds / HOLD_S + 10.0 * math.sqrt(seconds / HOLD_S)) + 20)
    factors = rng.gamma(1.0 / variance, variance, held.size)
    ends = np.cumsum(held)
    edges = np.arange(n + 1) * tick_s
    work = np.interp(edges, np.concatenate([[0.0], ends]), np.concatenate([[0.0], np.cumsum(held * factors)]))
    return rng.poisson(np.diff(work) * rate)


@kernel
def _cusum_alarms(arrivals: Ticks, gain: float, loss: float, threshold: float) -> int:
    value = 0.0
    alarms = 0
    for i in range(arrivals.size):
        value = max(0.0, value + gain * arrivals[i] - loss)
        if value >= threshold:
            alarms += 1
            value = 0.0
    return alarms


@kernel
def _cusum_delays(
    calm: Ticks, bursts: npt.NDArray[np.int64], gain: float, loss: float, threshold: float, delays: Floats
) -> None:
    value = 0.0
    each = calm.size // delays.size
    for k in range(delays.size):
        for i in range(k * each, (k + 1) * each):
            value = max(0.0, value + gain * calm[i] - loss)
            if value >= threshold:
                value = 0.0
        moved = value
        delays[k] = math.inf
        for i in range(bursts.shape[1]):
            moved = max(0.0, moved + gain * bursts[k, i] - loss)
            if moved >= threshold:
                delays[k] = i + 1
                break


@kernel
def _window_alarms(arrivals: Ticks, width: int, threshold: float) -> int:
    inside = 0
    since = 0
    alarms = 0
    for i in range(arrivals.size):
        inside += arrivals[i]
        if i - since >= width:
            inside -= arrivals[i - width]
        if inside >= threshold:
            alarms += 1
            inside = 0
            since = i + 1
    return alarms


@kernel
def _window_delays(calm: Ticks, bursts: npt.NDArray[np.int64], width: int, threshold: float, delays: Floats) -> None:
    each = calm.size // delays.size
    for k in range(delays.size):
        end = (k + 1) * each
        inside = 0
        for i in range(end - width, end):
            inside += calm[i]
        delays[k] = math.inf
        for i in range(bursts.shape[1]):
            inside += bursts[k, i]
            inside -= calm[end - width + i] if i < width else bursts[k, i - width]
            if inside >= threshold:
                delays[k] = i + 1
                break


@kernel
def _look_delays(
    state: BurstState, calm: Ticks, bursts: npt.NDArray[np.int64], warm: int, aside: BurstState, delays: Floats
) -> None:
    """Show `warm` ticks, then stretches of calm; each is followed by a burst, of which nothing is remembered."""
    for i in range(warm):
        look(state, float(calm[i]), math.nan)
    each = (calm.size - warm) // delays.size
    for k in range(delays.size):
        for i in range(warm + k * each, warm + (k + 1) * each):
            look(state, float(calm[i]), math.nan)
        for i in range(burst.N_SUMS):
            aside.sums[i] = state.sums[i]
        for i in range(burst.N_COUNTS):
            aside.counts[i] = state.counts[i]
        for i in range(state.recent.size):
            aside.recent[i] = state.recent[i]
        delays[k] = math.inf
        if aside.counts[burst.ACTIVE] > 0:  # a false alarm is on, which has met the burst
            delays[k] = 0.0
            continue
        for i in range(bursts.shape[1]):
            if look(aside, float(bursts[k, i]), math.nan):
                delays[k] = i + 1
                break


def bisect(alarms: Callable[[float], int], low: float, high: float, most: float, steps: int = 12) -> float:
    """Return the least threshold in [low, high], to a 2^steps-th of their ratio, with at most so many alarms.

    `high` where there is none.
    """
    if alarms(low) <= most:
        return low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        if alarms(middle) <= most:
            high = middle
        else:
            low = middle
    return high


class Load:
    """Arrivals of one rate and dispersion, on which tests are set, and bursts on which they are tried.

    Args:
        seconds: without bursts, that thresholds are set on.
        bursts: how many are tried.
    """

    def __init__(self, seed: int, rate: float, dispersion: float, seconds: float, bursts: int, tick_s: float) -> None:
        self._rng = np.random.default_rng([seed, round(rate * 1000), round(dispersion * 1000)])
        self.rate, self.dispersion, self.tick_s = rate, dispersion, tick_s
        self.seconds = seconds
        self.calm = self.draw(seconds)
        self._before = self.draw(_WARM_S + bursts * _CALM_S)
        self._delays = np.zeros(bursts)
        self._found = np.zeros(self.calm.size, np.bool_)

    def draw(self, seconds: float, factor: float = 1.0) -> Ticks:
        """Draw more of it, at `factor` times the rate; its variation is multiplied too."""
        dispersion = 1.0 + (self.dispersion - 1.0) * factor
        return draw_ticks(self._rng, seconds, self.rate * factor, dispersion, self.tick_s)

    def bursts(self, factor: float) -> npt.NDArray[np.int64]:
        """Draw a burst for each that is tried, int64 [bursts, ticks]."""
        drawn = [self.draw(_BURST_S, factor) for _ in range(self._delays.size)]
        return np.stack(drawn)

    def alarms(self, settings: BurstSettings) -> int:
        """Count the false alarms of the detector on the arrivals."""
        return look_at_all(new_burst_state(settings), self.calm, NO_P99, self._found)

    def threshold(self, settings: BurstSettings, false_alarm_s: float) -> float:
        """Return the detector's threshold for a mean time between false alarms, its P99 left aside."""
        return bisect(
            lambda nats: self.alarms(replace(settings, threshold=nats, p99_sigmas=NEVER)),
            LEAST_NATS,
            MOST_NATS,
            self.seconds / false_alarm_s,
        )

    def detect(self, settings: BurstSettings, bursts: npt.NDArray[np.int64]) -> Found:
        """Let the detector find bursts."""
        state = new_burst_state(replace(settings, p99_sigmas=NEVER))
        aside = new_burst_state(settings)
        aside = BurstState(state.params, aside.sums, aside.counts, aside.recent)
        warm = round(_WARM_S / self.tick_s)
        _look_delays(state, self._before, bursts, warm, aside, self._delays)
        return self._taken("detector")

    def limit(self, factor: float, bursts: npt.NDArray[np.int64], false_alarm_s: float) -> Found:
        """Let the tests that know everything find bursts of `factor`; return what the best of them found."""
        most = self.seconds / false_alarm_s
        mean = self.rate * self.tick_s
        before = self._before[round(_WARM_S / self.tick_s) :]
        found = []
        for tuned in (factor, math.sqrt(factor)):
            gain, loss = math.log(tuned), mean * (tuned - 1.0)

            def cusum(nats: float, gain: float = gain, loss: float = loss) -> int:
                return _cusum_alarms(self.calm, gain, loss, nats)

            _cusum_delays(before, bursts, gain, loss, bisect(cusum, 0.5, 500.0, most), self._delays)
            found.append(self._taken(f"CUSUM {tuned:.2f}"))
        for width_s in (1.0, 0.5):
            width = max(1, round(width_s / self.tick_s))

            def counted(number: float, width: int = width) -> int:
                return _window_alarms(self.calm, width, number)

            high = 20.0 * (mean * width + 10.0)
            _window_delays(before, bursts, width, bisect(counted, mean * width, high, most, 14), self._delays)
            found.append(self._taken(f"count {width_s:g} s"))
        return max(found, key=lambda one: (one.within, -one.quantile_s(0.95)))

    def _taken(self, test: str) -> Found:
        return Found(np.sort(self._delays) * self.tick_s, test)

    def cell(
        self, settings: BurstSettings, factor: float, false_alarm_s: float, threshold: float | None = None
    ) -> Cell:
        """Measure bursts of one factor; the detector's threshold is set for this load unless it is given."""
        nats = self.threshold(settings, false_alarm_s) if threshold is None else threshold
        bursts = self.bursts(factor)
        ours = self.detect(replace(settings, threshold=nats), bursts)
        limit = self.limit(factor, bursts, false_alarm_s)
        return Cell(self.rate, self.dispersion, factor, false_alarm_s, limit, ours)
