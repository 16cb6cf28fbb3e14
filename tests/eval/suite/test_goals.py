"""How a ratio is shown as a change."""

from __future__ import annotations

import pytest

from eval.suite.goals import change


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.877, "-12.3 %"),
        (1.0 - 1e-9, "+0.0 %"),
        (1.0, "+0.0 %"),
        (1.0004, "+0.0 %"),
        (0.9994, "-0.1 %"),
        (1.999, "+99.9 %"),
        (2.0, "2.0 times"),
        (1234.4, "1,234 times"),
    ],
)
def test_a_change_has_a_sign_unless_it_is_none(ratio: float, text: str) -> None:
    assert change(ratio) == text
