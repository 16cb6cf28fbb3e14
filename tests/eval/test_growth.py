from __future__ import annotations

import numpy as np
import pytest

from eval.growth import memory_growth


def test_growth_and_slope_of_memory() -> None:
    time_s = np.arange(100.0)
    assert memory_growth(time_s, 500 + 0.25 * time_s) == pytest.approx((22.5, 0.25))
    spike = np.full(100, 500.0)
    spike[-1] = 900.0
    assert memory_growth(time_s, spike)[0] == 0
    assert memory_growth(time_s[:1], spike[:1]) == (0.0, 0.0)
