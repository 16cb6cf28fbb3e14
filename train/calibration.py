"""Thresholds of the burst detectors for a mean time between false alarms, from a scenario's load without its bursts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from envs.serving.node import NodeSim
from eval.sweep import Work
from helm_rl.control.burst import BurstSettings, look_at_all, new_burst_state
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from train.detection import LEAST_NATS, MOST_NATS, NEVER, Floats, Ticks, bisect

CONFIDENCE = 0.95
MARGIN = 1.5
"""Thresholds are set for so many times the mean time that is asked for, lest chance decides on other arrivals."""
_LEAST_SIGMAS, _MOST_SIGMAS = 1.0, 1000.0

Advance = Callable[[], None]


@dataclass(frozen=True)
class Recording:
    """What a detector is shown on one draw. arrivals: int64 [n]; p99_ms: float64 [n], NaN where none is known."""

    arrivals: Ticks
    p99_ms: Floats


@dataclass(frozen=True)
class Alarms:
    """False alarms in so many seconds."""

    count: int
    seconds: float

    @property
    def mean_s(self) -> float:
        """The mean time between them as measured; inf where there was none."""
        return self.seconds / self.count if self.count else math.inf

    @property
    def least_s(self) -> float:
        """The lower CONFIDENCE bound of that mean time, false alarms taken for a Poisson process."""
        return self.seconds / most_expected(self.count)


def most_expected(count: int) -> float:
    """Return the largest mean at which a Poisson number is at most `count` with probability 1 - CONFIDENCE."""
    low, high = float(count), count + 10.0 * math.sqrt(count + 1.0) + 10.0
    for _ in range(60):
        mean = 0.5 * (low + high)
        logs = [k * math.log(mean) - mean - math.lgamma(k + 1.0) for k in range(count + 1)]
        low, high = (mean, high) if sum(map(math.exp, logs)) > 1.0 - CONFIDENCE else (low, mean)
    return 0.5 * (low + high)


def most_alarms(seconds: float, false_alarm_s: float) -> int:
    """Return with how many alarms in `seconds` the mean time between them is surely `false_alarm_s`; -1: with none."""
    count = -1
    while Alarms(count + 1, seconds).least_s >= false_alarm_s:
        count += 1
    return count


def calm(scenario: Scenario, seconds: float) -> Scenario:
    """Return the scenario without its phases, for so long."""
    load = scenario.load.model_copy(update={"phase": ()})
    return scenario.model_copy(update={"load": load, "seconds": seconds})


def record(
    scenario: Scenario, alpha: float, seeds: Iterable[int], seconds: float, tick_s: float, work: Work, advance: Advance
) -> list[Recording]:
    """Serve draws of the load without bursts at a fixed alpha; return what detectors are shown, warm-ups left out."""
    quiet = calm(scenario, seconds)
    interval_ns = round(scenario.control.interval_s * 1e9)

    def one(seed: int) -> Recording:
        trace = generate(quiet, seed)
        node = NodeSim(quiet, trace, alpha)
        node.run(max(node.now_ns, trace.meta.measure_from_ns))
        detector = new_burst_state(BurstSettings(tick_s=tick_s, threshold=NEVER, p99_sigmas=NEVER))
        seen = np.zeros((round(seconds / tick_s), 2))
        end_ns = node.now_ns + round(seconds * 1e9)
        while node.now_ns < end_ns:
            node.run(min(node.now_ns + interval_ns, end_ns), detector, seen=seen)
        advance()
        return Recording(seen[:, 0].astype(np.int64), np.ascontiguousarray(seen[:, 1]))

    return work.map(one, seeds)


def false_alarms(settings: BurstSettings, recorded: list[Recording]) -> Alarms:
    """Count how often a detector fires on what was recorded, each draw by itself."""
    count = 0
    for one in recorded:
        found = np.zeros(one.arrivals.size, np.bool_)
        count += look_at_all(new_burst_state(settings), one.arrivals, one.p99_ms, found)
    return Alarms(count, sum(one.arrivals.size for one in recorded) * settings.tick_s)


def calibrate(settings: BurstSettings, recorded: list[Recording], false_alarm_s: float) -> BurstSettings:
    """Return the settings with thresholds for a mean time between false alarms.

    Each of both detectors has half of the alarms that are allowed, and less where both together are beyond them: an
    alarm of one changes what the other takes for normal. With the confidence of Alarms.least_s that is MARGIN times the
    mean time.
    """
    seconds = sum(one.arrivals.size for one in recorded) * settings.tick_s
    most = most_alarms(seconds, MARGIN * false_alarm_s)
    for each in range(max(most, 0) // 2, -1, -1):
        nats = bisect(partial(_arrival_alarms, settings, recorded), LEAST_NATS, MOST_NATS, each)
        sigmas = bisect(partial(_p99_alarms, settings, recorded), _LEAST_SIGMAS, _MOST_SIGMAS, each, 14)
        settings = _alone(settings, nats, sigmas)
        if false_alarms(settings, recorded).count <= most:
            break
    return settings


def _arrival_alarms(settings: BurstSettings, recorded: list[Recording], nats: float) -> int:
    return false_alarms(_alone(settings, nats, NEVER), recorded).count


def _p99_alarms(settings: BurstSettings, recorded: list[Recording], sigmas: float) -> int:
    return false_alarms(_alone(settings, NEVER, sigmas), recorded).count


def _alone(settings: BurstSettings, nats: float, sigmas: float) -> BurstSettings:
    return replace(settings, threshold=nats, p99_sigmas=sigmas)


def by_detector(settings: BurstSettings, recorded: list[Recording]) -> tuple[Alarms, Alarms]:
    """Return the false alarms of the arrivals' detector alone, and of the P99's."""
    return (
        false_alarms(replace(settings, p99_sigmas=NEVER), recorded),
        false_alarms(replace(settings, threshold=NEVER), recorded),
    )
