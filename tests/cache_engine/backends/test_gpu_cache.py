"""Pool and embedding cache on a GPU through their public interface; needs cupy, numpy, numba and pytest alone.

Those named `short` are what compute-sanitizer runs. torch and hypothesis are used where they are.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool
from cache_engine.backends.device import CupyDevice
from tests.cache_engine.backends.public_twins import PublicTwins, random_operations
from tests.cache_engine.backends.real_device import real_device

pytestmark = pytest.mark.gpu

ROW_BYTES = 512
STEPS = 300  # of the longer tests


@pytest.fixture
def device() -> Iterator[CupyDevice]:
    """The GPU as users get it, with CuPy's memory pool."""
    yield real_device()
    gc.collect()


def build(device: CupyDevice, rows: int = 20_000, **options: Any) -> tuple[HbmPool, EmbeddingCache, np.ndarray]:
    """A cache of 16 pages of 256 rows, and its table."""
    table = np.random.default_rng(0).integers(0, 256, (rows, ROW_BYTES), np.uint8)
    pool = HbmPool(16, 256 * ROW_BYTES, ("emb",), min_pages=0, backend="cuda", device=device)
    emb = EmbeddingCache(pool, row_bytes=ROW_BYTES, tables=[table], **options)
    pool.set_goals({"emb": 16}, 0)
    pool.migrate(16)
    return pool, emb, table


@pytest.mark.parametrize("gather", ["zero-copy", "staging"])
@pytest.mark.parametrize("row_bytes", [16, 7])
def test_short_sequences_of_calls_leave_both_backends_the_same(gpu: CupyDevice, gather: str, row_bytes: int) -> None:
    twins = PublicTwins(gpu, row_bytes=row_bytes, gather=gather, max_pages=4)
    twins.run(random_operations(np.random.default_rng(row_bytes), 25, 60))


@pytest.mark.parametrize("gather", ["zero-copy", "staging"])
@pytest.mark.parametrize("policy", ["sieve", "lru"])
@pytest.mark.parametrize("seed", range(2))
def test_long_sequences_of_calls_leave_both_backends_the_same(
    device: CupyDevice, gather: str, policy: str, seed: int
) -> None:
    twins = PublicTwins(device, row_bytes=12, gather=gather, max_pages=5, policy=policy)
    twins.run(random_operations(np.random.default_rng(seed), 150, 200))


@pytest.mark.parametrize("gather", ["zero-copy", "staging"])
def test_any_sequence_of_calls_leaves_both_backends_the_same(device: CupyDevice, gather: str) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    from tests.cache_engine.backends.sequences import programs

    @hypothesis.settings(max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(program=programs, policy=hypothesis.strategies.sampled_from(["sieve", "lru"]))
    def run(program: list[Any], policy: str) -> None:
        PublicTwins(device, gather=gather, max_pages=4, policy=policy).run(program)

    run()


@pytest.mark.parametrize("gather", ["zero-copy", "staging"])
def test_rows_are_right_while_a_refill_and_resizes_go_on(device: CupyDevice, gather: str) -> None:
    """On the streams as they are: nothing waits but what the engine itself waits for."""
    pool, emb, table = build(device, gather=gather)
    rng = np.random.default_rng(1)
    waited = 0
    for step in range(STEPS):
        keys = rng.zipf(1.2, 700) % table.shape[0]
        if not emb.advance_refill():
            emb.refill(rng.integers(0, table.shape[0], 5000))
        waited += emb.advance_refill() > 0
        answer = emb.lookup(keys)
        assert (device.read(answer.rows) == table[keys]).all()
        slots, hit = device.read(answer.slots), device.read(answer.hit)
        assert (slots[hit] >= 0).all()
        if step % 20 == 0:
            pool.set_goals({"emb": int(rng.integers(8, 17))}, step)
        pool.migrate(1)
    assert waited > STEPS // 3
    stats = emb.stats()
    assert stats.requested == stats.hits + stats.misses == STEPS * 700
    assert stats.refilled > 30 * STEPS
    assert stats.link_bytes == (stats.fetched + stats.refilled) * ROW_BYTES
    pool.close()


def test_pages_are_copied_while_rows_are_looked_up(device: CupyDevice) -> None:
    pool = HbmPool(4, 3 << 20, ("emb", "kv"), backend="cuda", device=device)
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    pinned = pool.host_memory(3 << 20)
    for page, source in ((2, data), (3, pinned)):
        source[:] = np.roll(data, page)
        pool.write_page(page, source)
    for out in (np.zeros_like(data), pinned):
        pool.read_page(2, out)
        assert (out == data).all()
        pool.read_page(3, out)
        assert (out == np.roll(data, 3)).all()
    assert not device.read(pool.page(1)).any()
    pool.close()


def test_torch_shares_ids_rows_and_pages(device: CupyDevice) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    pool, emb, table = build(device)
    keys = torch.randint(0, table.shape[0], (3000,), device="cuda")
    for ids in (keys, keys.int(), keys[::2]):
        answer = emb.lookup(ids)
        rows = torch.from_dlpack(answer.rows)
        assert rows.data_ptr() == answer.rows.data.ptr
        assert torch.equal(rows.cpu(), torch.from_numpy(table)[ids.cpu().long()])
        assert torch.from_dlpack(answer.hit).dtype == torch.bool
    out = torch.empty((3000, ROW_BYTES), dtype=torch.uint8, device="cuda")
    assert emb.lookup(keys, torch.zeros_like(keys), out=out).rows is out
    assert torch.equal(out.cpu(), torch.from_numpy(table)[keys.cpu()])
    page = torch.from_dlpack(pool.page(3))
    page[:] = 9
    torch.cuda.synchronize()
    assert (device.read(pool.page(3)) == 9).all()
    with pytest.raises(ValueError, match=r"ids\[2\] = 20000 is not a row of table 0"):
        emb.lookup(torch.tensor([1, 2, 20_000], device="cuda"))
    del page
    pool.close()


def test_tables_in_memory_that_is_page_locked_or_cannot_be(device: CupyDevice) -> None:
    """Two tables that share a page of memory, and one that torch's allocator, or ours, page-locked before."""
    whole = np.random.default_rng(0).integers(0, 256, (3000, 64), np.uint8)
    pinned = device.pinned(1000 * 64).reshape(1000, 64)
    pinned[:] = whole[:1000]
    read_only = whole[2000:]
    read_only.flags.writeable = False
    tables = [whole[:1001], whole[1001:2000], read_only, pinned]
    pool = HbmPool(4, 64 * 64, ("emb",), backend="cuda", device=device)
    emb = EmbeddingCache(pool, row_bytes=64, tables=tables, gather="zero-copy")
    keys = np.arange(999)
    for number, table in enumerate(tables):
        assert (device.read(emb.lookup(keys, number).rows) == table[keys]).all()
    pool.close()
    # Nothing is registered any more: the same memory serves another cache.
    pool = HbmPool(4, 64 * 64, ("emb",), backend="cuda", device=device)
    emb = EmbeddingCache(pool, row_bytes=64, tables=[whole], gather="zero-copy")
    assert (device.read(emb.lookup(keys).rows) == whole[keys]).all()
    pool.close()


def test_closing_gives_the_memory_back(device: CupyDevice) -> None:
    import cupy

    before = cupy.cuda.runtime.memGetInfo()[0]
    pool = HbmPool(256, 1 << 20, ("emb",), backend="cuda", device=device)
    assert cupy.cuda.runtime.memGetInfo()[0] <= before - (256 << 20)
    pool.close()
    assert cupy.cuda.runtime.memGetInfo()[0] > before - (64 << 20)


def test_two_threads(device: CupyDevice) -> None:
    _, emb, table = build(device)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(STEPS // 3):
            keys = rng.integers(0, table.shape[0], 500)
            if not (device.read(emb.lookup(keys).rows) == table[keys]).all():
                wrong.append(keys)
            emb.refill(rng.integers(0, table.shape[0], 100))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert emb.stats().requested == 2 * (STEPS // 3) * 500
