"""The timetable of alphas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helm_rl.control.protocol import Controller
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.errors import UserError

OBSERVATION = np.zeros(17, np.float32)


def test_each_alpha_holds_from_its_start_to_the_next() -> None:
    # Starts that float64 could not tell apart.
    origin = 1_649_675_512_388_000_001
    controller: Controller = ScheduledAlpha([origin, origin + 1, origin + 10], [0.2, 0.5, 0.8])
    controller.reset(0)
    asked = [controller.decide(OBSERVATION, 0.9, origin + ns) for ns in (-5, 0, 1, 2, 9, 10, 10**12)]
    assert asked == [0.2, 0.2, 0.5, 0.5, 0.5, 0.8, 0.8]
    assert controller.decide(OBSERVATION, 0.9, origin) == 0.2  # time may go back: nothing is remembered
    assert controller.tick(1, 1.0, origin) is False


@pytest.mark.parametrize(
    ("times", "alphas", "message"),
    [
        ([], [], "at least one"),
        ([0, 1], [0.5], r"as many times as alphas.*\(2,\) and \(1,\)"),
        ([0, 5, 5], [0.1, 0.2, 0.3], "time 2 is 5 ns, after 5 ns"),
        ([5, 0], [0.1, 0.2], "time 1 is 0 ns, after 5 ns"),
        ([0, 1], [0.1, 1.2], "alpha 1 is 1.2"),
        ([0, 1], [float("nan"), 0.2], "alpha 0 is nan"),
        ([0.0, 1.5], [0.1, 0.2], "integer nanoseconds, not float64"),
    ],
)
def test_a_wrong_timetable_is_refused(times: Any, alphas: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ScheduledAlpha(times, alphas)
