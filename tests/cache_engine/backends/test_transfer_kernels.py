"""The kernels of transfer.cu, each against NumPy, in every thread order, under ASan and UBSan.

fetch_rows reads memory by its address, which the sanitized process does not share: test_cuda_cache.py has it.
"""

from __future__ import annotations

import numpy as np
import pytest

from cache_engine.backends.cpu import embedding as cpu
from tests.cache_engine.backends.host_device import HostDevice


@pytest.fixture
def rng(host_device: HostDevice) -> np.random.Generator:
    host_device.clear(1)
    return np.random.default_rng(0)


def test_report(host_device: HostDevice, rng: np.random.Generator) -> None:
    slots, miss = rng.integers(-1, 9, 300).astype(np.int32), rng.integers(-1, 3, 300).astype(np.int32)
    out, hit = host_device.empty(300, np.int32), host_device.empty(300, np.bool_)
    host_device.launch("report", 300, host_device.array(slots), host_device.array(miss), out, hit, 300)
    np.testing.assert_array_equal(host_device.read(out), slots)
    np.testing.assert_array_equal(host_device.read(hit), miss < 0)


def test_pick_keys(host_device: HostDevice, rng: np.random.Generator) -> None:
    keys, tables = rng.integers(-(2**62), 2**62, 300), rng.integers(0, 9, 300).astype(np.int16)
    first = rng.permutation(300)[:70].astype(np.int32)
    some_keys, some_tables = host_device.empty(70, np.int64), host_device.empty(70, np.int16)
    arrays = (host_device.array(a) for a in (keys, tables, first))
    host_device.launch("pick_keys", 70, *arrays, some_keys, some_tables, 70)
    np.testing.assert_array_equal(host_device.read(some_keys), keys[first])
    np.testing.assert_array_equal(host_device.read(some_tables), tables[first])


@pytest.mark.parametrize(("unit", "row_bytes"), [(16, 48), (4, 12), (1, 7)])
def test_pick_rows(host_device: HostDevice, rng: np.random.Generator, unit: int, row_bytes: int) -> None:
    rows = rng.integers(0, 256, (50, row_bytes), np.uint8)
    which = rng.integers(0, 50, 40).astype(np.int32)
    out = host_device.empty((40, row_bytes), np.uint8)
    units = row_bytes // unit
    host_device.launch(
        f"pick_rows_{unit}", 40 * units, host_device.array(rows), host_device.array(which), out, units, 40
    )
    np.testing.assert_array_equal(host_device.read(out), rows[which])


def test_uncount(host_device: HostDevice) -> None:
    before, after = np.arange(cpu.N_COUNTERS), np.arange(cpu.N_COUNTERS) + 100
    counters = host_device.array(after)
    host_device.launch("uncount", 1, counters, host_device.array(before), cpu.N_COUNTERS)
    assert host_device.read(counters).tolist() == [*before[: cpu.EVICTED], 100 + cpu.EVICTED]


@pytest.mark.parametrize("one_table", [-1, 1])
@pytest.mark.parametrize("bounded", [0, 1])
@pytest.mark.parametrize("unsigned", [0, 1])
def test_check_batch(
    host_device: HostDevice, rng: np.random.Generator, one_table: int, bounded: int, unsigned: int
) -> None:
    """Each key alone: 257 of them, one in a second block."""
    limits = np.array([5, 9, 2])
    keys = rng.choice([-1, 0, 1, 4, 5, 8, 9, -(2**63), 2**63 - 1], 257)
    tables = rng.choice([-1, 0, 1, 2, 3, 2**40], 257)
    table = np.full(257, one_table) if one_table >= 0 else tables
    known = (table >= 0) & (table < 3)
    good = known & ((keys >= 0) | (not unsigned and not bounded))
    good &= (keys < limits[np.where(known, table, 0)]) | (not bounded)
    for part in (good, np.ones(257, bool)):
        n = int(part.sum())
        out, wrong = host_device.empty(n, np.int16), host_device.array(np.zeros(1, np.int32))
        host_device.launch(
            "check_batch", n, host_device.array(keys[part]), host_device.array(tables[part]), one_table,
            host_device.array(limits), 3, bounded, unsigned, out, wrong, n,
        )  # fmt: skip
        assert bool(host_device.read(wrong)[0]) == (not good[part].all())
        np.testing.assert_array_equal(host_device.read(out), np.where(good, table, 0)[part])
