"""Leases that are lost: collected without release, anywhere, they neither pin pages for ever nor disturb what runs."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool, KvCache
from cache_engine.backends.cpu import kv as kernels
from tests.cache_engine.invariants import check

PAGE = 64


def build() -> tuple[HbmPool, EmbeddingCache, KvCache]:
    pool = HbmPool(8, PAGE, payload=False)
    emb, kv = EmbeddingCache(pool, row_bytes=16), KvCache(pool, token_bytes=16, host_pages=4)
    pool.set_target(0.5, 1)
    pool.migrate(8)
    return pool, emb, kv


def lose(*leases: object) -> None:
    """Its caller keeps none either."""
    for lease in leases:
        assert lease is not None


def pinned(kv: KvCache) -> int:
    return int(kv.state.scalars[kernels.PINNED])


def test_a_lost_lease_warns_and_ends_with_the_next_operation() -> None:
    pool, emb, kv = build()
    kv.extend(1, 8)
    with pytest.warns(ResourceWarning, match=r"a lease was lost without release: <cache_engine\.kv\.KvLease object"):
        lose(kv.lease(1))
    with pytest.warns(ResourceWarning, match=r"lost without release: <cache_engine\.embedding\.EmbeddingLease"):
        lose(emb.lease(emb.lookup(np.arange(8)).slots))
    assert (pinned(kv), int(pool.state.pins.sum())) == (0, 2), "the second operation on rows came before the loss"
    kv.lookup(1, 8)
    assert (pinned(kv), int(pool.state.pins.sum())) == (0, 0)
    assert kv.extend(2, 16)
    check(pool, emb, kv)


def test_a_released_lease_is_not_lost() -> None:
    _, emb, kv = build()
    kv.extend(1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kv.lease(1) or pytest.fail("he has a page"):
            pass
        rows = emb.lease(emb.lookup(np.arange(8)).slots)
        rows.release()
        lose(rows)
        del rows
        gc.collect()


@pytest.mark.parametrize(
    "operation",
    [
        lambda pool, emb, kv: pool.migrate(0),
        lambda pool, emb, kv: pool.set_target(0.5, 1),
        lambda pool, emb, kv: emb.lookup(np.arange(1)),
        lambda pool, emb, kv: kv.pages(5),
        lambda pool, emb, kv: kv.onboard(5, 1),
        lambda pool, emb, kv: kv.offload(0),
        lambda pool, emb, kv: kv.drop(5),
    ],
)
@pytest.mark.filterwarnings("ignore:a lease was lost")
def test_any_operation_ends_it(operation: Callable[..., object]) -> None:
    pool, emb, kv = build()
    kv.extend(1, 8)
    lose(kv.lease(1))
    assert pinned(kv) == 2
    operation(pool, emb, kv)
    assert pinned(kv) == 0


@pytest.mark.filterwarnings("ignore:a lease was lost")
def test_what_was_dropped_under_a_lost_lease_comes_back() -> None:
    pool, emb, kv = build()
    kv.extend(1, 16)
    lease = kv.lease(1)
    kv.drop(1)
    assert not kv.extend(2, 4)
    del lease
    assert kv.extend(2, 16)
    check(pool, emb, kv)


def test_a_lease_lost_before_or_after_close_leaves_no_pin() -> None:
    pool, emb, kv = build()
    kv.extend(1, 8)
    rows = emb.lease(emb.lookup(np.arange(8)).slots)
    with pytest.warns(ResourceWarning, match="lost"):
        lose(kv.lease(1))
    pool.close()
    assert pinned(kv) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del rows  # the memory is gone: nothing is pinned for anybody
    check(pool, emb, kv)


@pytest.mark.filterwarnings("ignore:a lease was lost")
def test_a_lease_lost_in_a_cycle_with_its_pool_goes_with_it() -> None:
    pool, _, kv = build()
    kv.extend(1, 8)
    gone = threading.Event()

    class Witness:
        def __del__(self) -> None:
            gone.set()

    pool.at_close(Witness().__del__)
    pool.lease = kv.lease(1)  # type: ignore[attr-defined]
    del pool, kv, _
    gc.collect()
    gc.collect()
    assert gone.is_set()


@pytest.mark.filterwarnings("ignore:a lease was lost")
def test_a_lease_collected_inside_an_operation_of_the_same_thread_ends_after_it() -> None:
    """The pool's lock is re-entrant, so it would not have kept a release out of the middle of an extension."""
    pool = HbmPool(4, PAGE, ("kv",), min_pages=0)
    kv = KvCache(pool, token_bytes=16, host_pages=4)
    pool.set_goals({"kv": 4}, 1)
    pool.migrate(4)
    kv.extend(1, 4)
    kv.extend(2, 12)
    held = [kv.lease(1)]
    read_page, seen = pool.read_page, []

    def copy(page: int, out: np.ndarray) -> None:
        held.clear()
        seen.append(pinned(kv))
        read_page(page, out)

    pool.read_page = copy  # type: ignore[method-assign]
    kv.extend(3, 8)
    assert seen[0] == 1, "collected, but not ended yet"
    kv.lookup(1, 4)
    assert pinned(kv) == 0
    check(pool, kv=kv)


@pytest.mark.filterwarnings("ignore:a lease was lost")
def test_leases_lost_in_threads_and_by_the_collector_of_cycles() -> None:
    """Two threads lose leases in cycles while both operate and the collector runs at any allocation."""
    pool, emb, kv = build()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            end = time.monotonic() + 0.7
            while time.monotonic() < end:
                user = int(rng.integers(0, 4))
                kv.lookup(user, 8)
                kv.extend(user, int(rng.integers(1, 13)))
                with pool.lock:
                    leases = [kv.lease(user), emb.lease(emb.lookup(rng.integers(0, 40, 6)).slots)]
                leases.append(leases)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "nobody waits for ever"
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert errors == []
    pool.migrate(0)
    assert (pinned(kv), int(pool.state.pins.sum()), int(kv.state.pins.sum())) == (0, 0, 0)
    assert kv.extend(9, 16)
    check(pool, emb, kv)


def test_a_lease_open_at_the_end_of_the_interpreter_is_silent() -> None:
    code = """
import numpy as np
from cache_engine import HbmPool, KvCache
from cache_engine.lease import Lease
class Held(Lease):
    def _end(self):
        print("ended")
pool = HbmPool(4, 64, payload=False)
held = Held(pool)
cycle = [Held(pool)]
cycle.append(cycle)
print("done")
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
