"""What is made of measured speeds before they stand in a profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eval.live.hardware import within_peak
from eval.live.speeds import _line
from helm_rl.profiles.hardware import HARDWARE


def test_bytes_that_move_by_hand() -> None:
    moved = np.array([1e6, 2e6, 8e6])
    assert _line(moved, 0.5 + moved / 4e6) == pytest.approx((0.5, 4.0))  # 4 GB/s are 4e6 bytes/ms


@pytest.mark.parametrize("ms", [[4.0, 2.0, 1.0, 1.0], [1.0, 3.0, 9.0, 20.0]])
def test_a_disturbed_measurement_gives_a_speed_that_can_be(ms: list[float]) -> None:
    """More bytes in less time; and a fixed cost below 0."""
    fixed_ms, gb_s = _line(np.array([1.0, 2.0, 4.0, 8.0]) * 1e6, np.array(ms))
    assert fixed_ms == 0
    assert 0.1 < gb_s < 10


def test_work_that_is_faster_than_the_peak_raises_it() -> None:
    sound = replace(HARDWARE["cpu"], peak_tflop_s=0.1, linear_efficiency=0.5, pair_efficiency=0.25)
    assert within_peak(sound) == sound
    fast = replace(sound, linear_efficiency=1.6, pair_efficiency=0.8)
    found = within_peak(fast)
    assert (found.peak_tflop_s, found.linear_efficiency, found.pair_efficiency) == pytest.approx((0.16, 1.0, 0.5))
    assert found.prefill_ns(1e9, 2e9) == pytest.approx(fast.prefill_ns(1e9, 2e9))
