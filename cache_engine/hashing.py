"""The one hash that indexes, samples and draws: splitmix64's finaliser."""

from __future__ import annotations

import numpy as np

from cache_engine.jit import inner

_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S30 = np.uint64(30)
_S27 = np.uint64(27)
_S31 = np.uint64(31)
_S32 = np.uint64(32)


@inner
def mix(x: np.uint64) -> np.uint64:
    """Return 64 well-mixed bits of `x` (a bijection of uint64; Steele, Lea and Flood, OOPSLA 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> _S30)) * _C1
    x = (x ^ (x >> _S27)) * _C2
    return x ^ (x >> _S31)


@inner
def mix2(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return 64 well-mixed bits of the pair (a, b); order matters."""
    return mix(mix(a) ^ (b * _GOLDEN))


@inner
def reduce_range(bits: np.uint64, n: int | np.int64) -> np.int64:
    """Map 64 random bits to [0, n), n < 2**32, by a multiplication instead of a division (Lemire 2019)."""
    return np.int64(((bits >> _S32) * np.uint64(n)) >> _S32)
