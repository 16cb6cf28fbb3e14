"""Thresholds for a mean time between false alarms: the counting, its confidence, and the search."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from envs.serving.node import NodeSim
from eval.sweep import Work
from helm_rl.control.burst import BurstSettings
from helm_rl.workloads.generate import generate
from tests.envs.worlds import QUICK, scenario
from train.calibration import (
    MARGIN,
    Alarms,
    Recording,
    by_detector,
    calibrate,
    calm,
    false_alarms,
    most_alarms,
    most_expected,
    record,
)
from train.detection import draw_ticks


@pytest.mark.parametrize("count", [0, 1, 4, 30, 200])
def test_the_bound_of_a_poisson_number_is_the_chi_squared_one(count: int) -> None:
    assert most_expected(count) == pytest.approx(stats.chi2.ppf(0.95, 2 * (count + 1)) / 2)


def test_so_many_alarms_still_prove_the_mean_time() -> None:
    most = most_alarms(40_000.0, 1_500.0)
    assert Alarms(most, 40_000.0).least_s >= 1_500.0 > Alarms(most + 1, 40_000.0).least_s
    assert most == 17
    assert most_alarms(2_000.0, 1_500.0) == -1
    assert Alarms(0, 100.0).mean_s == math.inf
    assert Alarms(4, 100.0).mean_s == 25.0


def recorded(seed: int, seconds: float = 2_000.0) -> list[Recording]:
    """Two draws of Poisson arrivals, and of a P99 that wanders about 50 ms."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(2):
        arrivals = draw_ticks(rng, seconds, 60.0)
        p99 = 50.0 + np.convolve(rng.standard_normal(arrivals.size + 999), np.ones(1000) / math.sqrt(1000), "valid")
        made.append(Recording(arrivals, p99))
    return made


def test_thresholds_keep_the_mean_time_also_on_other_draws() -> None:
    own, others = recorded(1), recorded(2)
    settings = calibrate(BurstSettings(), own, 100.0)
    most = most_alarms(4_000.0, MARGIN * 100.0)
    assert false_alarms(settings, own).count <= most
    assert false_alarms(settings, own).least_s >= 100.0
    assert false_alarms(settings, others).mean_s >= 100.0
    arrivals, p99 = by_detector(settings, own)
    assert arrivals.count <= most // 2
    assert p99.count <= most // 2
    # Both are as low as that lets them be.
    lower = replace(settings, threshold=0.9 * settings.threshold, p99_sigmas=0.9 * settings.p99_sigmas)
    arrivals, p99 = by_detector(lower, own)
    assert arrivals.count > 0.5 * most - 2
    assert p99.count > 0.5 * most - 2


def test_what_is_recorded_is_what_a_detector_is_shown() -> None:
    world = scenario(
        **QUICK,
        load__rate=200.0,
        load__phase=({"start_s": 2.0, "seconds": 4.0, "rate": 500.0, "requests_per_visit": 1.0},),
    )
    quiet = calm(world, 12.0)
    assert quiet.load.phase == ()
    made = record(world, 0.5, [3, 4], 12.0, 0.01, Work(2), lambda: None)
    for one, seed in zip(made, (3, 4), strict=True):
        trace = generate(quiet, seed)
        expected = np.histogram(trace.arrival_ns, np.arange(1201) * 10_000_000)[0]
        assert np.array_equal(one.arrivals, expected)
        node = NodeSim(quiet, trace, 0.5)
        window = node.run(12_000_000_000)
        assert np.isnan(one.p99_ms[0])
        assert one.p99_ms[-1] == pytest.approx(window.p99_ms, rel=0.25)
