"""The fixed alpha."""

from __future__ import annotations

import numpy as np
import pytest

from helm_rl.control.protocol import Controller
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError


def test_it_asks_for_the_same_alpha_whatever_happens() -> None:
    controller: Controller = StaticAlpha(0.35)
    controller.reset(1)
    assert controller.decide(np.zeros(17, np.float32), 0.9, 0) == 0.35
    assert controller.decide(np.full(17, np.nan, np.float32), 0.1, 10**18) == 0.35
    assert controller.tick(1000, 1e9, 0) is False


@pytest.mark.parametrize("alpha", [-0.01, 1.01, float("nan"), float("inf")])
def test_an_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match="within 0 and 1"):
        StaticAlpha(alpha)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_ends_are_legal(alpha: float) -> None:
    assert StaticAlpha(alpha).decide(np.zeros(17, np.float32), 0.5, 0) == alpha
