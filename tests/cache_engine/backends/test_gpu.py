"""The CUDA backend on a GPU against the CPU backend; needs cupy, numpy, numba and pytest alone.

Those named `short` are what compute-sanitizer runs.
"""

from __future__ import annotations

import numpy as np
import pytest

from cache_engine.backends.cpu import embedding as cpu
from cache_engine.backends.device import CupyDevice
from tests.cache_engine.backends import gpu_table
from tests.cache_engine.backends.twins import Twins, random_program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("row_bytes", [1, 12, 64])
@pytest.mark.parametrize("start", [0, 2**31 - 4, 2**32 - 4], ids=str)
def test_short_sequences_leave_the_same_state(gpu: CupyDevice, start: int, row_bytes: int) -> None:
    twins = Twins(gpu, 8, 32, 5, start=start, row_bytes=row_bytes)
    twins.own_all()
    for operation in random_program(np.random.default_rng(row_bytes), 40, 700, 300):
        twins.apply(operation)
        twins.check()
    assert twins.emb.counters[cpu.HITS] > 300
    assert twins.emb.counters[cpu.EVICTED] > 100


def test_short_batch_of_copies_of_one_cold_key(gpu: CupyDevice) -> None:
    twins = Twins(gpu, 2, 8, 2)
    twins.own_all()
    slots = twins.lookup_arrays(np.zeros(4096, np.int16), np.full(4096, -1))
    twins.check()
    assert set(slots.tolist()) == {8}
    assert twins.emb.counters.tolist() == [4096, 0, 4096, 1, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_long_sequences_leave_the_same_state(gpu: CupyDevice, seed: int) -> None:
    rng = np.random.default_rng(seed)
    twins = Twins(gpu, 12, 256, 8, row_bytes=16)
    twins.own_all()
    for operation in random_program(rng, 150, 20_000, 4000):
        twins.apply(operation)
    twins.check()


def test_batches_of_65536_keys(gpu: CupyDevice) -> None:
    """Thousands of threads at once on the same table places and index sets; 64 groups of bits."""
    twins = Twins(gpu, 40, 4096, 40)
    twins.own_all()
    rng = np.random.default_rng(1)
    for _ in range(12):
        tables = rng.integers(0, 3, 65_536).astype(np.int16)
        twins.lookup_arrays(tables, gpu_table.skewed_ids(rng, 10**6, 65_536))
        twins.check()
    twins.lookup_arrays(np.zeros(200_000, np.int16), rng.integers(-(2**62), 2**62, 200_000))
    twins.check()
    assert twins.emb.counters[cpu.BYPASSED] > 1000


def test_every_key_of_a_large_batch_in_one_index_set(gpu: CupyDevice) -> None:
    """One set: all misses meet in the same eight words."""
    twins = Twins(gpu, 1, 4, 1)
    twins.own_all()
    twins.lookup_arrays(np.zeros(20_000, np.int16), np.arange(20_000))
    twins.check()
    assert twins.emb.counters[cpu.BYPASSED] == 20_000 - 4
