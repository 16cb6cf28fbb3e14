"""Integers that callers give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cache_engine.integers import int64, integer


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)])
def test_any_integer_becomes_pythons_own(value: Any) -> None:
    for number in (integer("n", value), int64("n", value)):
        assert type(number) is int
        assert number == 7


@pytest.mark.parametrize("value", [7.0, float("nan"), "7", None, [7], np.float32(7), np.array([7, 8])])
def test_anything_else_is_named(value: Any) -> None:
    for function in (integer, int64):
        with pytest.raises(TypeError, match=r"^n must be an integer, got "):
            function("n", value)


def test_the_ends_of_int64() -> None:
    assert [int64("n", x) for x in (2**63 - 1, -(2**63))] == [2**63 - 1, -(2**63)]
    for x in (2**63, -(2**63) - 1, np.uint64(2**64 - 1)):
        with pytest.raises(ValueError, match=f"n must fit int64, got {x}"):
            int64("n", x)
    assert integer("n", 2**70) == 2**70
