"""The recovery rule's fit: what is measured of a burst, and which rule is taken."""

from __future__ import annotations

import math

import numpy as np
import pytest

from envs.serving.replay import Replay, replay
from eval.sweep import Work
from helm_rl.control.burst import BurstSettings
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.metrics import p99_ms
from tests.envs.worlds import QUICK, scenario
from train.detection import NEVER
from train.recovery_fit import Bursts, Outcome, best_rule, burst_starts_s, reached, recovering

BURST = {"start_s": 14.0, "seconds": 12.0, "rate": 200.0, "requests_per_visit": 3.0, "label": "burst"}


def test_the_best_rule_is_the_one_for_the_whole_run_and_then_for_the_first_seconds() -> None:
    first, second, third = RecoveryRule(0.9, 0.1), RecoveryRule(0.5, 0.5), RecoveryRule(0.3, 0.3)
    assert best_rule({first: Outcome(20.0, 103.0), second: Outcome(70.0, 100.0), third: Outcome(60.0, 101.5)}) == third
    assert best_rule({first: Outcome(20.0, 101.0), second: Outcome(70.0, 100.0)}) == first


def test_outcomes_are_those_of_the_replays() -> None:
    world = scenario(**QUICK, seconds=28.0, load__phase=(BURST,))
    bursts = Bursts(world, (1, 2), 0.8, Work(2))
    assert burst_starts_s(bursts.traces[0]) == [14.0]
    settings = BurstSettings(least_s=4.0, threshold=10.0)
    rule = RecoveryRule(0.4, 0.2)
    done = []
    makers = [lambda: StaticAlpha(0.8), recovering(lambda: StaticAlpha(0.8), rule, settings, 0.06)]
    without, with_rule = bursts.outcomes(makers, lambda: done.append(1))
    assert len(done) == 4
    first, whole = [], []
    for trace in bursts.traces:
        run = replay(world, trace, Recovery(StaticAlpha(0.8), rule, settings), alpha0=0.8)
        at_s = trace.arrival_ns * 1e-9
        first.append(run.latency_ms[(at_s >= 14.0) & (at_s < 24.0)])
        whole.append(run.latency_ms[run.measured])
        assert run.alpha.min() < 0.5  # it acted
    assert with_rule == Outcome(p99_ms(np.concatenate(first)), p99_ms(np.concatenate(whole)))
    assert without != with_rule
    found = bursts.found_after_s(settings)
    assert len(found) == 2
    assert max(found) < 1.5
    assert bursts.found_after_s(BurstSettings(threshold=NEVER)) == [math.inf] * 2


def steps(targets: list[float], alphas: list[float]) -> Replay:
    """A replay of seconds, of which only targets and alphas count."""
    nothing = np.zeros(0)
    time_s = np.arange(1.0, len(targets) + 1)
    found = np.array(targets, np.float32), np.array(alphas, np.float32)
    return Replay(nothing, nothing.astype(bool), time_s, found[1], found[0], [], 0.0, 0.0, 0.0)


def test_the_time_to_a_target_is_held_against_detection_and_budget() -> None:
    # The burst begins at 2 s, is found at 3 s, and .4 of the pool at .1 a second take 4 s: it is there at 8 s
    served = steps([0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], [0.9, 0.9, 0.9, 0.82, 0.74, 0.66, 0.58, 0.505, 0.5])
    found = reached(served, 2.0, 9.0, 0.1, 0.06)
    assert found is not None
    assert (found.set_s, found.reached_s) == (1.0, 6.0)
    assert found.least_s == pytest.approx(4.0)
    assert found.ratio == pytest.approx(6.0 / 5.0)
    # A target that moves on is followed: the way is that to where it was when it was reached
    served = steps([0.9, 0.9, 0.9, 0.6, 0.55, 0.5], [0.9, 0.9, 0.9, 0.7, 0.6, 0.5])
    found = reached(served, 2.0, 6.0, 0.2, 0.06)
    assert found is not None
    assert (found.reached_s, found.least_s) == (pytest.approx(4.0), pytest.approx(2.0))
    # Never there, and nothing set
    late = reached(steps([0.9, 0.9, 0.3, 0.3], [0.9, 0.9, 0.8, 0.7]), 1.0, 4.0, 0.1, 0.06)
    assert late is not None
    assert late.ratio == math.inf
    assert reached(steps([0.9, 0.86, 0.82], [0.9, 0.88, 0.84]), 0.0, 3.0, 0.1, 0.06) is None
    # A false alarm at 2 s, just before a burst that begins at 2.5 s: it would have been found before it began
    assert reached(steps([0.9, 0.9, 0.5, 0.5], [0.9, 0.9, 0.7, 0.5]), 2.5, 4.0, 0.2, 0.06) is None


def test_a_load_without_bursts_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no \[\[load\.phase\]\]"):
        Bursts(scenario(**QUICK, seconds=2.0), (1,), 0.5, Work(1))
