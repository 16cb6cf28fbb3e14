"""Integers that callers give: whole, in range, and Python's own, or an error that names them."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def integer(what: str, value: SupportsIndex) -> int:
    """Return `value` as an int; TypeError if it is none, of whatever size it may be."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {value!r}") from None


def int64(what: str, value: SupportsIndex) -> int:
    """Return `value` as an int that fits int64; TypeError or ValueError if it does not.

    Kernels would be compiled anew for a wider or another type, and compare it as a float.
    """
    number = integer(what, value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what} must fit int64, got {number}")
    return number
