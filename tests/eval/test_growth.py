from __future__ import annotations

import numpy as np
import pytest

from eval.growth import held_mib, memory_growth


def test_growth_and_slope_of_memory() -> None:
    time_s = np.arange(100.0)
    assert memory_growth(time_s, 500 + 0.25 * time_s) == pytest.approx((0.25 * 66, 0.25))
    spike = np.full(100, 500.0)
    spike[10:30] = spike[70:] = 900.0  # bursts, the second to the end
    spike[68] = 400.0
    assert memory_growth(time_s, spike)[0] == -100
    spike[68] = 500.0
    assert memory_growth(time_s, spike)[0] == 0
    assert memory_growth(time_s[:1], spike[:1]) == (0.0, 0.0)


def test_what_is_held_counts_and_what_the_allocator_keeps_does_not() -> None:
    before = held_mib()
    # Too small to come from the system one by one; every other one goes, so that none of them lies at an end.
    blocks = [bytearray(100_000) for _ in range(1_000)]
    assert 90 < held_mib() - before < 110
    del blocks[::2]
    assert 40 < held_mib() - before < 60
