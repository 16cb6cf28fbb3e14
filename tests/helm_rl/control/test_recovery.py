"""Recovery above a controller: who decides when, and what the one below sees."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helm_rl.control import burst
from helm_rl.control.burst import BurstSettings
from helm_rl.control.protocol import FloatArray, Watching
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE
from tests.helm_rl.control.test_peers import window

SETTINGS = BurstSettings(least_s=1.0, calm_s=0.5, threshold=8.0)


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
    recovery = Recovery(below, RecoveryRule(alpha_cold=0.6, alpha_hot=0.2), SETTINGS)
    assert isinstance(recovery, Watching)
    recovery.reset(7)
    assert ticks(recovery, 200, 20) == []
    assert recovery.decide(observed(0.5), 0.5, 0) == 0.55
    recovery.feedback(window())
    (fired,) = ticks(recovery, 800, 2)
    assert fired < 30
    assert recovery.active
    assert recovery.decide(observed(0.75), 0.5, 0) == pytest.approx(0.3)
    assert recovery.decide(observed(0.0), 0.5, 0) == pytest.approx(0.6)
    assert recovery.decide(observed(math.nan), 0.41, 0) == 0.41
    recovery.feedback(window())
    assert below.windows == 1  # it did not steer the burst
    assert below.resets[1:] == [7]
    ticks(recovery, 200, 5)
    assert not recovery.active
    assert recovery.decide(observed(0.75), 0.3, 0) == pytest.approx(0.35)  # from the alpha applied now
    assert below.resets[1:] == [7, 7]  # once
    recovery.decide(observed(0.75), 0.3, 0)
    assert below.resets[1:] == [7, 7]


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
