"""What is made of measured speeds before they stand in a profile."""

from __future__ import annotations

import numpy as np
import pytest

from eval.live.hardware import speeds_of
from eval.live.speeds import _line


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
    assert speeds_of(0.1, 0.5, 0.25) == {"peak_tflop_s": 0.1, "linear_efficiency": 0.5, "pair_efficiency": 0.25}
    found = speeds_of(0.1, 1.6, 0.8)
    assert found == pytest.approx({"peak_tflop_s": 0.16, "linear_efficiency": 1.0, "pair_efficiency": 0.5})
