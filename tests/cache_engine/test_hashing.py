"""The hash: against published outputs of splitmix64, and what the index needs of it."""

from __future__ import annotations

import numpy as np

from cache_engine import hashing
from cache_engine.jit import kernel
from tests.cache_engine import models


@kernel
def _mix(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = hashing.mix(x[i])


@kernel
def _index(tables: np.ndarray, keys: np.ndarray, n: int, out: np.ndarray) -> None:
    for i in range(keys.size):
        out[i] = hashing.reduce_range(hashing.mix2(np.uint64(tables[i]), np.uint64(keys[i])), n)


def mix(values: list[int]) -> list[int]:
    x = np.array(values, np.uint64)
    out = np.zeros_like(x)
    _mix(x, out)
    return [int(v) for v in out]


def test_mix_is_splitmix64() -> None:
    """The first outputs from seed 1234567, as published with several implementations."""
    golden = 0x9E3779B97F4A7C15
    assert mix([(1234567 + k * golden) % 2**64 for k in range(5)]) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_mix_agrees_with_arithmetic_on_integers() -> None:
    values = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
    assert mix(values) == [models.mix(v) for v in values]


def test_sets_of_keys_are_those_of_the_model_for_every_int64() -> None:
    keys = [0, 1, -1, -2, 2**63 - 1, -(2**63), 12345678901234]
    for table in (0, 1, 32766):
        for n in (1, 3, 1000, 2**31):
            out = np.zeros(len(keys), np.int64)
            _index(np.full(len(keys), table, np.int16), np.array(keys, np.int64), n, out)
            assert out.tolist() == [models.index_set((table, k), n) for k in keys]
            assert ((out >= 0) & (out < n)).all()


def test_consecutive_ids_of_two_tables_spread_evenly() -> None:
    """100,000 keys over 1,000 sets: the counts vary as if drawn at random (chi-squared within 5 sd)."""
    n, sets = 100_000, 1_000
    for table in (0, 1):
        out = np.zeros(n, np.int64)
        _index(np.full(n, table, np.int16), np.arange(n, dtype=np.int64), sets, out)
        counts = np.bincount(out, minlength=sets)
        chi = ((counts - n / sets) ** 2 / (n / sets)).sum()
        assert abs(chi - (sets - 1)) < 5 * (2 * sets) ** 0.5
