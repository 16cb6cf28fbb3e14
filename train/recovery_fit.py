"""The recovery rule of a scenario: the alphas to go to in a burst, found by replays of training draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from envs.serving.replay import Replay, replay
from eval.segments import ONSET_S, onsets
from eval.sweep import Work
from helm_rl.control.burst import BurstSettings
from helm_rl.control.protocol import Controller
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.metrics import p99_ms
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from train.calibration import Advance, calm
from train.firings import firings

WORSE = 1.01
"""Times the P99 of the whole run without recovery, that it may be with it."""
ALIKE = 1.02
"""Rules whose P99 of the whole run is within this factor of the least are told apart by the bursts' first seconds."""
COARSE, FINE = 0.2, 0.1
NEAR = 0.01
"""Of the target: alpha is there."""
_STEADY_S = 200.0

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Reached:
    """A burst: seconds from its start to when recovery set a target, and to when that was applied; inf: it never was.

    least_s: what the budget of migration alone needs for the way, in seconds; 0 for one that was never done.
    """

    set_s: float
    reached_s: float
    least_s: float

    @property
    def ratio(self) -> float:
        """Time to the target over the least: detection and the budget's time together."""
        return self.reached_s / (self.set_s + self.least_s)


@dataclass(frozen=True)
class Outcome:
    """P99 (ms) over all draws: of requests in the first ONSET_S of bursts, and of all that are measured.

    reached: how soon the target that recovery set was applied, of each burst in which it set one.
    """

    first_ms: float
    whole_ms: float
    reached: tuple[Reached, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Fit:
    """rule: the fitted one; tried: each rule's outcome; without: that of the controller alone, on the same draws."""

    rule: RecoveryRule
    tried: dict[RecoveryRule, Outcome]
    without: Outcome


def burst_starts_s(trace: Trace) -> list[float]:
    """Return when the trace's labelled bursts begin: the phases that add to its base load."""
    return [phase.start_ns * 1e-9 for phase in trace.meta.phases[1:]]


def steady_alpha(scenario: Scenario, seeds: Sequence[int], work: Work, advance: Advance) -> float:
    """Return the fixed alpha whose P99 is least on draws of the load without its phases."""
    quiet = calm(scenario, _STEADY_S)
    traces = [generate(quiet, seed) for seed in seeds]
    control = scenario.control
    alphas = np.round(np.linspace(control.alpha_min, control.alpha_max, 9), 3).tolist()

    def tail_ms(alpha: float) -> float:
        served = [replay(quiet, trace, StaticAlpha(alpha), alpha0=alpha) for trace in traces]
        advance()
        return p99_ms(np.concatenate([one.latency_ms[one.measured] for one in served]))

    tails = work.map(tail_ms, alphas)
    return float(alphas[int(np.argmin(tails))])


class Bursts:
    """Draws of a scenario with bursts, on which controllers are replayed from one alpha."""

    def __init__(self, scenario: Scenario, seeds: Sequence[int], alpha0: float, work: Work) -> None:
        self.scenario, self.alpha0, self._work = scenario, alpha0, work
        self.traces = [generate(scenario, seed) for seed in seeds]
        if not burst_starts_s(self.traces[0]):
            raise UserError(
                f"scenario {scenario.name} has no [[load.phase]], so no burst to fit a recovery rule on; leave it out "
                "with --skip recovery"
            )

    def found_after_s(self, settings: BurstSettings) -> list[float]:
        """Return how long after its start the arrivals of each burst were found to be one; inf: not within ONSET_S."""
        delays = []
        for trace in self.traces:
            fired_s = firings(trace, trace.meta.name, settings).fired_s + trace.arrival_ns[0] * 1e-9
            for start_s in burst_starts_s(trace):
                after = fired_s[(fired_s >= start_s) & (fired_s <= start_s + ONSET_S)] - start_s
                delays.append(float(after[0]) if after.size else math.inf)
        return delays

    def outcomes(self, makers: Sequence[Callable[[], Controller]], advance: Advance) -> list[Outcome]:
        """Replay every draw under a new controller of each maker."""
        pairs = list(itertools.product(makers, self.traces))

        def one(pair: tuple[Callable[[], Controller], Trace]) -> tuple[Floats, Floats, list[Reached]]:
            make, trace = pair
            served = replay(self.scenario, trace, make(), alpha0=self.alpha0)
            advance()
            return served.latency_ms[onsets(trace)], served.latency_ms[served.measured], self._reached(served, trace)

        served = self._work.map(one, pairs)
        draws = len(self.traces)
        groups = [served[k * draws : (k + 1) * draws] for k in range(len(makers))]
        outcomes = []
        for group in groups:
            first, whole, reached = zip(*group, strict=True)
            outcomes.append(
                Outcome(p99_ms(np.concatenate(first)), p99_ms(np.concatenate(whole)), tuple(itertools.chain(*reached)))
            )
        return outcomes

    def _reached(self, served: Replay, trace: Trace) -> list[Reached]:
        control = self.scenario.control
        per_s, most = control.migrate_pages_per_s / served.windows[0].pages, control.rate_per_s * control.interval_s
        bursts = trace.meta.phases[1:]
        found = [reached(served, one.start_ns * 1e-9, one.end_ns * 1e-9, per_s, most) for one in bursts]
        return [one for one in found if one is not None]


def reached(served: Replay, start_s: float, end_s: float, per_s: float, most: float) -> Reached | None:
    """Return how soon the target that recovery set in a burst was applied; None: it set none there.

    It is set where the target jumps by more than a controller below moves it in an interval, and reached where no more
    than NEAR is missing from the target of that moment, which follows the load.

    Args:
        served: a replay under recovery.
        start_s, end_s: of the burst.
        per_s: most that alpha can change in a second.
        most: most that the target changes in an interval without recovery.
    """
    begins_s = np.concatenate([[-np.inf], served.time_s[:-1]])  # a target that was set before is not the burst's
    inside = (begins_s >= start_s) & (served.time_s <= end_s)
    jumps = np.abs(np.diff(served.target, prepend=served.target[0])) > 1.01 * most
    at = np.flatnonzero(inside & jumps)
    if at.size == 0:
        return None
    first = int(at[0])  # the window that began with the new target
    set_s = float(served.time_s[first - 1])
    near = np.abs(served.alpha - served.target) <= NEAR
    there = np.flatnonzero(near & (served.time_s <= end_s) & (np.arange(near.size) >= first))
    if there.size == 0:
        return Reached(set_s - start_s, math.inf, 0.0)
    last = int(there[0])
    way = abs(float(served.target[last]) - float(served.alpha[first - 1]))
    return Reached(set_s - start_s, float(served.time_s[last]) - start_s, way / per_s)


def fit_rule(bursts: Bursts, base: Callable[[], Controller], settings: BurstSettings, advance: Advance) -> Fit:
    """Seek the rule by which the whole run's P99 is least, and among those alike, that of bursts' first seconds.

    First on a grid of COARSE steps of both alphas, then of FINE ones around the best. The first seconds alone would be
    the wrong aim: a burst that comes up slowly is served best in them by the alpha of the load before it, whatever
    becomes of the rest.
    """
    control = bursts.scenario.control
    (without,) = bursts.outcomes([base], advance)
    tried: dict[RecoveryRule, Outcome] = {}

    def try_all(rules: Sequence[RecoveryRule]) -> None:
        new = [rule for rule in dict.fromkeys(rules) if rule not in tried]
        makers = [recovering(base, rule, settings, control.rate_per_s) for rule in new]
        tried.update(zip(new, bursts.outcomes(makers, advance), strict=True))

    steps = max(1, round((control.alpha_max - control.alpha_min) / COARSE))
    alphas = np.round(np.linspace(control.alpha_min, control.alpha_max, steps + 1), 3).tolist()
    try_all([RecoveryRule(cold, hot) for cold in alphas for hot in alphas if hot <= cold])
    best = best_rule(tried)

    def near(alpha: float) -> list[float]:
        shifted = (alpha - FINE, alpha, alpha + FINE)
        return [round(min(max(one, control.alpha_min), control.alpha_max), 3) for one in shifted]

    around = itertools.product(near(best.alpha_cold), near(best.alpha_hot))
    try_all([RecoveryRule(cold, hot) for cold, hot in around if hot <= cold])
    return Fit(best_rule(tried), tried, without)


def recovering(
    base: Callable[[], Controller], rule: RecoveryRule, settings: BurstSettings, rate_per_s: float
) -> Callable[[], Controller]:
    """Return a maker of the base controller under recovery."""
    return lambda: Recovery(base(), rule, settings, rate_per_s=rate_per_s)


def best_rule(tried: dict[RecoveryRule, Outcome]) -> RecoveryRule:
    """Return the best of the rules that were tried, as `fit_rule` says."""
    least_ms = min(one.whole_ms for one in tried.values())
    alike = [rule for rule, one in tried.items() if one.whole_ms <= ALIKE * least_ms]
    return min(alike, key=lambda rule: tried[rule].first_ms)
