"""The rule of two regimes: when it changes its mind, and how fast its target may follow."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helm_rl.control.rules import RegimeRule
from helm_rl.errors import UserError
from helm_rl.observation import OBSERVATION_NAMES, SIZE

SECOND = 1_000_000_000


def seen(hot_user_ratio: float) -> np.ndarray:
    observation = np.full(SIZE, 0.9, np.float32)  # whatever else it holds
    observation[OBSERVATION_NAMES.index("hot_user_ratio")] = hot_user_ratio
    return observation


def targets(rule: RegimeRule, ratios: list[float], applied: float = 0.5, every_ns: int = SECOND) -> list[float]:
    return [rule.decide(seen(ratio), applied, k * every_ns) for k, ratio in enumerate(ratios)]


def test_at_once() -> None:
    """Hot above .4 + .05, cold below .4 - .05, and as before in between."""
    ratios = [0.1, 0.44, 0.46, 0.36, 0.44, 0.34, 0.44, 0.9]
    expected = [0.8, 0.8, 0.2, 0.2, 0.2, 0.8, 0.8, 0.2]
    assert targets(RegimeRule(0.8, 0.2), ratios) == expected


def test_within_a_rate() -> None:
    rule = RegimeRule(0.8, 0.2, rate_per_s=0.25)
    assert targets(rule, [0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9]) == pytest.approx([0.5, 0.75, 0.8, 0.55, 0.3, 0.2, 0.2])
    # The target follows its own, not what has been applied by then, and the time that has really passed.
    rule.reset(0)
    assert targets(rule, [0.1] * 3, applied=0.6, every_ns=SECOND // 10) == pytest.approx([0.6, 0.625, 0.65])
    rule.reset(0)
    assert targets(rule, [0.1] * 3, applied=0.6, every_ns=60 * SECOND) == pytest.approx([0.6, 0.8, 0.8])


def test_a_ratio_that_is_not_a_number_changes_nothing() -> None:
    assert targets(RegimeRule(0.8, 0.2), [0.9, math.nan, 0.1, math.nan]) == [0.2, 0.2, 0.8, 0.8]


def test_reset_forgets() -> None:
    rule = RegimeRule(0.8, 0.2)
    assert targets(rule, [0.9, 0.4]) == [0.2, 0.2]
    rule.reset(1)
    assert targets(rule, [0.4]) == [0.8]
    assert rule.tick(10, 500.0, 0) is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"alpha_cold": 1.2, "alpha_hot": 0.1}, "alpha_cold must be within 0 and 1, not 1.2"),
        ({"alpha_cold": 0.2, "alpha_hot": math.nan}, "alpha_hot must be within 0 and 1, not nan"),
        ({"alpha_cold": 0.2, "alpha_hot": 0.1, "threshold": -0.1}, "threshold must be within"),
        ({"alpha_cold": 0.2, "alpha_hot": 0.1, "rate_per_s": 0.0}, "rate_per_s must be a number above 0, not 0.0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        RegimeRule(**arguments)
