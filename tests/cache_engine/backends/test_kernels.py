"""kernels.cu on the host, in every order of threads, against the CPU backend: bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from cache_engine.backends.cpu import embedding as cpu
from tests.cache_engine.backends.host_device import HostDevice
from tests.cache_engine.backends.twins import Key, Twins, random_program
from tests.cache_engine.models import index_set

ids = st.sampled_from([*range(40), -1, -2, -(2**63), 2**63 - 1])
keys = st.lists(st.tuples(st.integers(0, 2), ids), min_size=6, max_size=60)
operations = st.one_of(
    st.tuples(st.just("lookup"), keys),
    st.tuples(st.just("lookup"), keys),
    st.tuples(st.just("lookup"), keys | st.just([])),
    st.tuples(st.just("failed lookup"), keys),
    st.tuples(st.just("invalidate"), keys | st.just([])),
    st.tuples(st.just("goal"), st.integers(0, 5)),
    st.tuples(st.just("migrate"), st.integers(0, 6)),
    st.tuples(st.just("pin"), st.lists(st.integers(0, 4), min_size=1, max_size=5)),
    st.tuples(st.just("unpin"), st.integers(0, 4)),
)
POLICIES = [cpu.LRU, cpu.SIEVE]
STARTS = [0, 2**31 - 4, 2**32 - 4]


@pytest.mark.timeout(900)  # of a failure: hypothesis makes it small first
@given(
    pages=st.integers(1, 5),
    rows_per_page=st.sampled_from([1, 2, 3, 8]),
    index_pages=st.integers(1, 5),
    start=st.sampled_from(STARTS),
    row_bytes=st.sampled_from([0, 0, 1, 4, 48]),
    policy=st.sampled_from(POLICIES),
    program=st.lists(operations, min_size=12, max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors],
)
def test_any_sequence_leaves_the_same_state(
    host_device: HostDevice,
    pages: int,
    rows_per_page: int,
    index_pages: int,
    start: int,
    row_bytes: int,
    policy: int,
    program: list[tuple[str, Any]],
    seed: int,
) -> None:
    """States, outputs, counters and rows after each operation, whatever the order of operations and of threads."""
    host_device.clear(seed)
    twins = Twins(host_device, pages, rows_per_page, min(index_pages, pages), start, row_bytes, policy)
    twins.own_all()
    for operation in program:
        twins.apply(operation)
        twins.check()
    counters = twins.emb.counters
    event(f"evicted: {counters[cpu.EVICTED] > 0}, bypassed: {counters[cpu.BYPASSED] > 0}")


@pytest.mark.parametrize("policy", POLICIES, ids=["lru", "sieve"])
@pytest.mark.parametrize("start", STARTS, ids=str)
def test_long_skewed_streams_leave_the_same_state(host_device: HostDevice, start: int, policy: int) -> None:
    """Batches of up to 300 keys in a cache of 256 rows, with leases, failed fetches and resizes."""
    host_device.clear(seed=start % 1000)
    twins = Twins(host_device, 8, 32, 5, start, 16, policy)
    twins.own_all()
    for operation in random_program(np.random.default_rng(5), 80, 700, 300):
        twins.apply(operation)
        twins.check()
    counters = twins.emb.counters
    assert counters[cpu.HITS] > 1000
    assert counters[cpu.EVICTED] > 500
    assert counters[cpu.BYPASSED] > 100
    assert twins.pool.taken[1] > 3


def test_batches_of_thousands_of_keys(host_device: HostDevice) -> None:
    """Several groups of 1,024 in the numbering of misses; cold, then mixed, then larger than the cache."""
    host_device.clear(seed=1)
    twins = Twins(host_device, 4, 1024, 4, row_bytes=8)
    twins.own_all()
    rng = np.random.default_rng(3)
    for n, most in ((2500, 10**6), (3000, 4000), (1025, 2000), (7000, 10**9), (1024, 10)):
        tables = rng.integers(0, 3, n).astype(np.int16)
        twins.lookup_arrays(tables, rng.integers(-most, most, n))
        twins.check()
    assert twins.emb.counters[cpu.BYPASSED] > 1000


def test_thousands_of_copies_of_one_cold_key(host_device: HostDevice) -> None:
    host_device.clear(seed=1)
    twins = Twins(host_device, 2, 8, 2)
    twins.own_all()
    slots = twins.lookup_arrays(np.zeros(4096, np.int16), np.full(4096, -1))
    twins.check()
    assert set(slots.tolist()) == {8}, "page 1 is filled first"
    assert twins.emb.counters.tolist() == [4096, 0, 4096, 1, 0, 0]


def test_many_misses_of_one_full_index_set(host_device: HostDevice) -> None:
    """The thirteenth miss and later ones of a set find no entry; of the twelve, each takes the next oldest."""
    host_device.clear(seed=1)
    twins = Twins(host_device, 2, 8, 1)
    twins.own_all()
    sets = int(twins.emb.scalars[cpu.SETS])
    same: list[Key] = [(0, k) for k in range(2000) if index_set((0, k), sets) == 0]
    for k in range(12):
        twins.lookup([same[k]])
    twins.lookup([same[3]])
    newcomers = same[20:220]
    slots = twins.lookup_arrays(np.zeros(200, np.int16), np.array([k for _, k in newcomers]))
    twins.check()
    order = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3]
    assert slots[:12].tolist() == [(8 + k) % 16 for k in order], "page 1 was filled first"
    assert (slots[12:] == -1).all()


def test_a_stack_of_pages_handed_out_in_part(host_device: HostDevice) -> None:
    """A drain that is given up leaves a started page under another one: slots come from both, then from windows."""
    host_device.clear(seed=1)
    twins = Twins(host_device, 4, 8, 4, policy=cpu.LRU)
    twins.apply(("goal", 3))
    twins.migrate(3)
    twins.lookup([(0, k) for k in range(20)])
    assert twins.emb.fill.tolist() == [4, 8, 8, 0]
    twins.apply(("pin", [0, 1, 2]))
    twins.apply(("goal", 2))
    twins.migrate(3)
    assert twins.pool.draining.tolist() == [1, 0, 0, 0]
    twins.lookup([(1, k) for k in range(3)])
    assert twins.emb.counters[cpu.BYPASSED] == 3, "one page drains, the others are full and pinned"
    twins.apply(("goal", 4))
    twins.migrate(1)
    twins.lookup([(1, k) for k in range(3)])
    twins.check()
    assert twins.emb.fill.tolist() == [4, 8, 8, 3]
    assert twins.emb.fresh[:2].tolist() == [0, 3]
    slots = twins.lookup_arrays(np.full(11, 2, np.int16), np.arange(11))
    twins.check()
    assert slots.tolist() == [27, 28, 29, 30, 31, 4, 5, 6, 7, -1, -1]


def test_of_many_pages_the_same_ones_are_given_up(host_device: HostDevice) -> None:
    """More pages than are compared with each other, of all ages, some pinned; some drain first, several leave."""
    host_device.clear(seed=1)
    twins = Twins(host_device, 90, 8, 90)
    rng = np.random.default_rng(8)
    drained = 0
    for step in range(60):
        twins.apply(("goal", 90))
        twins.migrate(90)
        for _ in range(2):
            twins.lookup_arrays(np.zeros(300, np.int16), (3000 ** rng.random(300)).astype(np.int64))
        pinned = np.arange(90) if step % 3 == 0 else rng.integers(0, 90, 40)
        twins.apply(("pin", pinned.tolist()))
        for _ in range(3):
            twins.apply(("goal", twins.pool.owned[1] - int(rng.integers(2, 8))))
            twins.migrate(int(rng.integers(1, 5)))
        drained += int(twins.pool.n_draining[1])
        kept = rng.integers(0, 90, 20) if step % 2 else []
        for pool in (twins.pool, twins.other_pool):
            pool.pins[:] = 0
            pool.pins[kept] = pool.owner[kept] >= 0
        twins.migrate(int(rng.integers(1, 8)))
        twins.check()
        for pool in (twins.pool, twins.other_pool):
            pool.pins[:] = 0
    assert drained > 40
    assert twins.pool.taken[1] > 200


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32 - 1), start=st.sampled_from(STARTS), policy=st.sampled_from(POLICIES))
@example(seed=0, start=2**32 - 4, policy=cpu.SIEVE)
@example(seed=0, start=2**32 - 4, policy=cpu.LRU)
def test_threads_that_run_at_once_race_for_nothing(
    parallel_device: HostDevice, seed: int, start: int, policy: int
) -> None:
    """Under ThreadSanitizer; what it calls a race is undefined on a GPU, too."""
    parallel_device.clear(seed)
    twins = Twins(parallel_device, 6, 16, 3, start, 4, policy)
    twins.own_all()
    for operation in random_program(np.random.default_rng(seed), 12, 200, 200):
        twins.apply(operation)
    twins.check()
