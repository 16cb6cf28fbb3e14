"""Recovery above a controller: who decides when, and what the one below sees."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helm_rl.control import burst
from helm_rl.control.burst import BurstSettings
from helm_rl.control.protocol import Controller, FloatArray, Watching
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE
from tests.helm_rl.control.test_peers import window

SETTINGS = BurstSettings(least_s=1.0, calm_s=0.5, threshold=12.0)
SECOND = 1_000_000_000


class Below:
    """Asks for .05 more than what is applied, and notes what it is told."""

    def __init__(self) -> None:
        self.resets: list[int] = []
        self.windows = 0

    def reset(self, seed: int) -> None:
        self.resets.append(seed)

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        return applied_alpha + 0.05

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        raise AssertionError("only the detectors of the layer above look at ticks")

    def feedback(self, window: WindowStats) -> None:
        self.windows += 1


def observed(hot_users: float) -> FloatArray:
    observation = np.zeros(SIZE, np.float32)
    observation[0] = hot_users
    return observation


def ticks(recovery: Recovery, rate: float, seconds: float, seed: int = 1) -> list[int]:
    """Show Poisson arrivals at a rate; return the ticks at which a decision is asked for."""
    rng = np.random.default_rng(seed)
    return [i for i in range(round(seconds * 100)) if recovery.tick(int(rng.poisson(rate / 100)), math.nan, i)]


def test_it_takes_over_for_as_long_as_a_burst_is_on() -> None:
    below = Below()
    recovery = Recovery(below, RecoveryRule(alpha_cold=0.6, alpha_hot=0.2), SETTINGS, rate_per_s=0.1)
    assert isinstance(recovery, Watching)
    recovery.reset(7)
    assert ticks(recovery, 200, 20) == []
    assert recovery.decide(observed(0.5), 0.5, 20 * SECOND) == 0.55
    recovery.feedback(window())
    (fired,) = ticks(recovery, 800, 2)
    assert fired < 30
    assert recovery.active
    assert recovery.decide(observed(0.75), 0.5, 21 * SECOND) == pytest.approx(0.3)
    assert recovery.decide(observed(0.0), 0.5, 22 * SECOND) == pytest.approx(0.6)
    assert recovery.decide(observed(math.nan), 0.41, 23 * SECOND) == 0.41
    recovery.feedback(window())
    assert below.windows == 1  # it did not steer the burst
    assert below.resets[1:] == [7]
    ticks(recovery, 200, 5)
    assert not recovery.active
    assert recovery.decide(observed(0.75), 0.3, 24 * SECOND) == pytest.approx(0.35)  # from the alpha applied now
    assert below.resets[1:] == [7, 7]  # once
    recovery.decide(observed(0.75), 0.3, 25 * SECOND)
    assert below.resets[1:] == [7, 7]


def after_a_burst(inner: Controller) -> Recovery:
    recovery = Recovery(inner, RecoveryRule(0.2, 0.2), SETTINGS, rate_per_s=0.06)
    recovery.reset(0)
    ticks(recovery, 200, 20)
    recovery.decide(observed(0.0), 0.8, 20 * SECOND)
    ticks(recovery, 800, 1)
    assert recovery.decide(observed(0.0), 0.8, 21 * SECOND) == 0.2
    ticks(recovery, 200, 5)
    assert not recovery.active
    return recovery


def test_the_target_does_not_jump_when_a_burst_is_over() -> None:
    """A static below asks for its own alpha at once; it is reached at the rate that was set, and then kept."""
    recovery = after_a_burst(StaticAlpha(0.8))
    targets = [recovery.decide(observed(0.0), 0.2, (21 + k) * SECOND) for k in range(1, 13)]
    assert targets == pytest.approx([*np.arange(0.26, 0.77, 0.06), 0.8, 0.8, 0.8])


def test_the_way_back_follows_the_time_between_decisions() -> None:
    recovery = after_a_burst(StaticAlpha(0.8))
    assert recovery.decide(observed(0.0), 0.2, 21 * SECOND + SECOND // 2) == pytest.approx(0.23)
    assert recovery.decide(observed(0.0), 0.2, 24 * SECOND) == pytest.approx(0.38)


def test_a_new_burst_on_the_way_back_is_met_at_once() -> None:
    recovery = after_a_burst(StaticAlpha(0.8))
    recovery.decide(observed(0.0), 0.2, 22 * SECOND)
    assert len(ticks(recovery, 800, 1, seed=2)) == 1
    assert recovery.decide(observed(0.0), 0.26, 23 * SECOND) == 0.2
    ticks(recovery, 200, 5)
    assert recovery.decide(observed(0.0), 0.2, 24 * SECOND) == pytest.approx(0.26)


class Learning(Below):
    """Goes on from what it is told, and keeps what it has learnt."""

    def resume(self, applied_alpha: float) -> None:
        self.resumed = applied_alpha


def test_a_controller_that_can_go_on_is_not_reset() -> None:
    below = Learning()
    recovery = after_a_burst(below)
    resets = list(below.resets)
    recovery.decide(observed(0.0), 0.31, 22 * SECOND)
    assert below.resumed == 0.31
    assert below.resets == resets


def test_a_window_that_a_burst_ended_in_is_not_passed_on() -> None:
    below = Below()
    recovery = after_a_burst(below)
    recovery.feedback(window())
    assert below.windows == 0
    recovery.decide(observed(0.0), 0.31, 22 * SECOND)
    recovery.feedback(window())
    assert below.windows == 1


def test_numbers_that_are_none_and_a_clock_that_goes_back_do_not_stay() -> None:
    recovery = after_a_burst(StaticAlpha(0.8))
    assert math.isnan(recovery.decide(observed(0.0), math.nan, 22 * SECOND))
    assert recovery.decide(observed(0.0), 0.2, 22 * SECOND) == pytest.approx(0.2)
    assert recovery.decide(observed(0.0), 0.2, 21 * SECOND) == pytest.approx(0.2)
    assert recovery.decide(observed(0.0), 0.2, 22 * SECOND) == pytest.approx(0.26)
    recovery.reset(0)
    recovery.tick(1, math.inf, 0)
    ticks(recovery, 200, 5)
    assert np.isfinite(recovery.detector.sums).all()


def test_a_reset_forgets_a_burst() -> None:
    recovery = Recovery(Below(), RecoveryRule(0.6, 0.2), SETTINGS)
    ticks(recovery, 200, 20)
    ticks(recovery, 900, 1)
    assert recovery.active
    recovery.reset(0)
    assert not recovery.active
    assert recovery.detector.counts[burst.TICKS] == 0


@pytest.mark.parametrize(("cold", "hot"), [(1.1, 0.2), (0.5, math.nan), (-0.1, 0.2)])
def test_a_rule_outside_of_the_pool_is_refused(cold: float, hot: float) -> None:
    with pytest.raises(UserError, match="recovery rule"):
        RecoveryRule(cold, hot)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_leads_nowhere_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="rate_per_s"):
        Recovery(Below(), RecoveryRule(0.6, 0.2), rate_per_s=rate)
