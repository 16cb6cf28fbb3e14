"""Firings on recorded arrivals: where they are, and what is shown around them."""

from __future__ import annotations

import numpy as np
import pytest

from helm_rl.control.burst import BurstSettings
from helm_rl.errors import UserError
from tests.envs.worlds import trace
from train.firings import firings, ticks_of

SETTINGS = BurstSettings(threshold=12.0)


def arrivals_ms(*stretches: tuple[float, float]) -> list[float]:
    """Return Poisson arrivals (ms) over stretches of (seconds, requests/s)."""
    rng = np.random.default_rng(1)
    made, start = [], 0.0
    for seconds, rate in stretches:
        made.append(start + np.sort(rng.random(rng.poisson(rate * seconds))) * seconds)
        start += seconds
    return (np.concatenate(made) * 1000.0).tolist()


def test_a_rise_in_a_log_is_a_firing() -> None:
    made = trace(arrivals_ms((120, 50), (20, 200), (160, 50)))
    found = firings(made, "log", SETTINGS)
    assert found.fired_s == pytest.approx([120.0], abs=0.3)
    assert found.per_hour == pytest.approx(12.0, rel=0.01)  # one in five minutes
    assert found.rate[:11].mean() == pytest.approx(50, rel=0.1)
    assert found.rate[12] == pytest.approx(200, rel=0.15)
    assert found.around.shape == (1, 120)
    before, after = found.around[0, :58], found.around[0, 61:78]
    assert before.mean() == pytest.approx(1.0, rel=0.05)
    assert after.mean() == pytest.approx(4.0, rel=0.15)
    assert found.around_s[60] == 0.5


def test_every_request_is_in_a_tick() -> None:
    made = trace([1000.0, 1004.0, 1010.0, 1029.9, 1030.0])
    assert ticks_of(made, 0.01).tolist() == [2, 1, 1, 1]


def test_logs_without_an_answer_are_refused() -> None:
    with pytest.raises(UserError, match="no requests"):
        firings(trace([]), "empty", SETTINGS)
    with pytest.raises(UserError, match="lasts 3e\\+06 s"):
        ticks_of(trace([0.0, 3e9]), 0.01)
