"""Simulated arrivals and the tests that look for bursts in them, against what is known of both."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from helm_rl.control.burst import BurstSettings
from train.detection import NEVER, Found, Load, bisect, draw_ticks


@pytest.mark.parametrize("dispersion", [1.0, 2.0, 4.0])
def test_arrivals_have_the_rate_and_the_dispersion_that_were_asked_for(dispersion: float) -> None:
    ticks = draw_ticks(np.random.default_rng(1), 20_000, 50.0, dispersion)
    assert ticks.size == 2_000_000
    seconds = ticks.reshape(-1, 100).sum(1)
    assert seconds.mean() == pytest.approx(50.0, rel=0.01 * dispersion)
    assert seconds.var() / seconds.mean() == pytest.approx(dispersion, rel=0.08)


def test_ticks_of_another_length_have_the_same_law() -> None:
    ticks = draw_ticks(np.random.default_rng(2), 20_000, 50.0, 3.0, tick_s=0.1)
    seconds = ticks.reshape(-1, 10).sum(1)
    assert seconds.var() / seconds.mean() == pytest.approx(3.0, rel=0.08)


def test_bisection_finds_the_least_threshold() -> None:
    assert bisect(lambda at: 10 if at < 3.7 else 2, 1.0, 50.0, 2) == pytest.approx(3.7, rel=0.002)
    assert bisect(lambda at: 0, 1.0, 50.0, 2) == 1.0
    assert bisect(lambda at: 9, 1.0, 50.0, 2) == 50.0


def test_quantiles_count_what_was_not_found() -> None:
    found = Found(np.array([0.2, 0.4, 1.0, 1.5, math.inf]))
    assert found.within == 0.6
    assert found.quantile_s(0.5) == 1.0
    assert found.quantile_s(0.95) == math.inf


@pytest.fixture(scope="module")
def load() -> Load:
    return Load(1, 140.0, 1.0, 6_000.0, 150, 0.01)


def test_the_limit_is_a_test_that_knows_the_burst(load: Load) -> None:
    """CUSUM climbs by rate * (f ln f - (f - 1)) nats a second from a little above 0 to a threshold of some 7 nats."""
    limit = load.limit(2.0, load.bursts(2.0), 500.0)
    assert limit.within > 0.97
    assert 0.1 < limit.quantile_s(0.5) < 0.5
    small = load.limit(1.2, load.bursts(1.2), 500.0)
    assert small.within < 0.4  # 2.6 nats a second: nothing can find that


def test_the_detector_comes_near_the_limit(load: Load) -> None:
    settings = BurstSettings()
    nats = load.threshold(settings, 500.0)
    assert load.alarms(replace(settings, threshold=nats, p99_sigmas=NEVER)) <= 12
    assert load.alarms(replace(settings, threshold=0.97 * nats, p99_sigmas=NEVER)) > 12
    for factor, least in ((1.5, 0.85), (2.0, 0.97), (4.0, 1.0)):
        cell = load.cell(settings, factor, 500.0, nats)
        assert cell.ours.within >= least
        assert cell.ours.within >= cell.limit.within - 0.06
    assert cell.ours.quantile_s(0.5) < 0.15


def test_a_detector_that_never_fires_finds_nothing(load: Load) -> None:
    found = load.detect(BurstSettings(threshold=NEVER), load.bursts(4.0))
    assert found.within == 0.0
    assert found.quantile_s(0.01) == math.inf


def test_bursts_do_not_change_what_is_normal(load: Load) -> None:
    """Each is found as if it were the first, however many went before."""
    settings = BurstSettings(threshold=8.0)
    bursts = load.bursts(3.0)
    once, again = load.detect(settings, bursts), load.detect(settings, bursts)
    assert np.array_equal(once.delay_s, again.delay_s)
    assert once.within == 1.0
