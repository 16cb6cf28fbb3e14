"""Pool and embedding cache on backend "cuda" through their public interface, on a device that lives on the host."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_engine import EmbeddingCache, EmbeddingGhost, EmbeddingStats, HbmPool, KvCache, PoolClosedError, refill
from cache_engine.backends import transfer
from cache_engine.backends.cpu.backend import CpuBackend
from cache_engine.backends.cpu.embedding import SIEVE
from cache_engine.backends.device import CudaUnavailableError
from cache_engine.backends.transfer import HostTables
from tests.cache_engine.backends.host_device import kernel_names
from tests.cache_engine.backends.local_device import LocalArray, LocalDevice, LocalEvent, World
from tests.cache_engine.backends.public_twins import Operation, PublicTwins
from tests.cache_engine.backends.sequences import programs


@pytest.mark.parametrize("gather", ["zero-copy", "staging"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    program=programs,
    row_bytes=st.sampled_from([16, 12, 7]),
    max_pages=st.integers(2, 6),
    policy=st.sampled_from(["lru", "sieve"]),
    order=st.sampled_from(["forward", "reverse", "random"]),
    seed=st.integers(0, 99),
)
def test_any_sequence_of_calls_leaves_both_backends_the_same(
    library: Path,
    all_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    gather: str,
    program: list[Operation],
    row_bytes: int,
    max_pages: int,
    policy: str,
    order: str,
    seed: int,
) -> None:
    with monkeypatch.context() as patch:
        # Copies of five rows, so that a batch has many.
        for module in (refill, transfer):
            patch.setattr(module, "CHUNK_BYTES", 5 * row_bytes)
        world = World(library, kernel_names(all_kernels), order, seed)
        twins = PublicTwins(world.device(), row_bytes=row_bytes, gather=gather, max_pages=max_pages, policy=policy)
        twins.run(program)
        assert not world.mapped
        world.check()


def build(world: World, pages: int = 8, gather: str = "staging", tables: Any = None) -> tuple[HbmPool, EmbeddingCache]:
    """The embedding cache alone, with all pages of a pool: four rows of 16 bytes each."""
    pool = HbmPool(pages, 64, ("emb",), min_pages=0, backend="cuda", device=world.device())
    emb = EmbeddingCache(pool, row_bytes=16, tables=[numbers()] if tables is None else tables, gather=gather)
    pool.set_goals({"emb": pages}, 0)
    pool.migrate(pages)
    return pool, emb


def numbers(rows: int = 200) -> np.ndarray:
    return np.arange(4 * rows, dtype=np.int32).reshape(rows, 4)


def host(world: World, array: Any) -> np.ndarray:
    world.run()
    assert isinstance(array, LocalArray)
    return array.host


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of 16 bytes in a background copy."""
    for module in (refill, transfer):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    return 4


# Streams


@pytest.mark.parametrize(("gather", "copy"), [("staging", "send"), ("zero-copy", "fetch_rows_16")])
def test_rows_of_a_refill_are_published_after_their_copy_is_done(
    world: World, small_chunks: int, gather: str, copy: str
) -> None:
    """Whatever comes between is served as if the copy were not there."""
    pool, emb = build(world, gather=gather)
    world.slow = True
    assert emb.refill(np.arange(10)) == 10
    world.log.clear()
    for _ in range(3):
        assert emb.advance_refill() == 10
        answer = emb.lookup(np.arange(8, 12))
        assert (host_of_front(answer.rows).view(np.int32) == numbers()[8:12]).all()
    back = [what for stream, what in world.log if stream != "front"]
    assert copy not in back, "nobody waited for it"
    stats = emb.stats()
    assert (stats.requested, stats.fetched, stats.refilled) == (12, 4, 4), "one copy is begun"
    assert not emb._backend.contains(np.zeros(8, np.int16), np.arange(8)).any()
    world.log.clear()
    assert emb.advance_refill(wait=True) == 0
    assert emb._backend.contains(np.zeros(10, np.int16), np.arange(10)).all()
    world.run()
    relevant = [what for _, what in world.log if what in (copy, "publish")]
    # 8 and 9 came with the lookups; two copies of four rows, each published before the next is begun.
    assert relevant == [copy, "publish"] * 2
    stats = emb.stats()
    assert (stats.requested, stats.fetched, stats.refilled, stats.link_bytes) == (0, 0, 4, 4 * 16)
    pool.close()


def host_of_front(array: Any) -> np.ndarray:
    """Read an array after the work of the foreground alone."""
    array.world.streams[0].run()
    result: np.ndarray = array.host
    return result


def test_a_copy_does_not_land_on_rows_that_are_still_being_admitted(world: World) -> None:
    """The stores of one copy wait in the foreground's stream while the next one is begun, into the same memory."""
    _, emb = build(world)
    backend, zeros = emb._backend, np.zeros(4, np.int16)
    first = backend.fetch(zeros, np.arange(4))
    first.event.wait()
    backend.admit(first)
    backend.fetch(zeros, np.arange(4, 8)).event.wait()
    answer = emb.lookup(np.arange(4))
    assert host(world, answer.hit).all()
    assert (host(world, answer.rows).view(np.int32) == numbers()[:4]).all()


def test_a_batch_of_more_rows_than_the_ring_has_room_for(world: World, small_chunks: int) -> None:
    """Buffers are filled anew only after their last copy."""
    _, emb = build(world, pages=4)
    answer = emb.lookup(np.arange(199, -1, -1))
    assert answer.fetched == 200
    assert (host(world, answer.rows).view(np.int32) == numbers()[::-1]).all()
    assert (host(world, answer.slots) >= 0).sum() == 16


def test_at_most_one_copy_of_at_most_a_mebibyte_is_on_its_way(world: World) -> None:
    tables = [np.zeros((5000, 1024), np.uint8)]
    pool = HbmPool(64, 65536, ("emb",), min_pages=0, backend="cuda", device=world.device())
    emb = EmbeddingCache(pool, row_bytes=1024, tables=tables, gather="staging")
    pool.set_goals({"emb": 64}, 0)
    pool.migrate(64)
    world.slow = True
    assert emb.refill(np.arange(2500)) == 2500
    sizes = []
    while emb._refill.waiting:
        assert emb._refill._fetch is not None
        sizes.append(emb._refill._fetch.keys.size * 1024)
        assert sum(queued == "send" for s in world.streams[1:] for queued, _ in s._work) == 1
        emb._refill.admit(wait=True)
        emb._refill.start()
    assert sizes == [1 << 20, 1 << 20, 452 << 10]
    pool.close()


def test_rows_on_their_way_are_copied_once_more_after_an_update(world: World) -> None:
    rows = numbers()
    _, emb = build(world, tables=[rows])
    world.slow = True
    emb.refill(np.arange(4))
    for event in emb._backend._back._events:  # type: ignore[attr-defined]
        event.wait()  # the old values have been copied
    rows[2] = -7
    assert emb.invalidate(np.array([2])) == 0
    emb.advance_refill(wait=True)
    answer = emb.lookup(np.arange(4))
    assert host(world, answer.hit).all()
    assert (host(world, answer.rows).view(np.int32) == rows[:4]).all()


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_right_whenever_copies_end(world: World, small_chunks: int, seed: int) -> None:
    """Marks are done at once, or not before somebody waits, as chance has it; rows change in between."""
    rng = np.random.default_rng(seed)
    tables = [numbers(60), -numbers(60)]
    pool, emb = build(world, gather=("staging", "zero-copy")[seed % 2], tables=tables)
    asked = hits = 0
    for step in range(80):
        world.slow = bool(rng.random() < 0.7)
        keys, which = rng.integers(0, 60, 9), rng.integers(0, 2, 9)
        kind = rng.integers(6)
        if kind == 0:
            emb.refill(rng.integers(0, 60, 20), int(rng.integers(2)))
        elif kind == 1:
            world.run()  # zero-copy: rows of batches before are read before they change
            tables[0][keys] = step
            emb.invalidate(keys, 0)
        elif kind == 2:
            emb.advance_refill(wait=bool(rng.random() < 0.3))
        elif kind == 3:
            pool.set_goals({"emb": int(rng.integers(2, 9))}, step)
            pool.migrate(2)
        else:
            answer = emb.lookup(keys, which)
            asked += keys.size
            hits += int(host_of_front(answer.hit).sum())
            wanted = np.stack([tables[t][k] for t, k in zip(which, keys, strict=True)])
            assert (host_of_front(answer.rows).view(np.int32) == wanted).all()
    stats = emb.stats()
    assert (stats.requested, stats.hits) == (asked, hits)
    assert stats.refilled > 0
    assert stats.link_bytes == (stats.fetched + stats.refilled) * 16
    pool.close()


def test_pages_are_copied_in_pieces_after_what_the_foreground_wrote(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_engine.pool.CHUNK_BYTES", 24)
    pool, emb = build(world)
    slot = int(host(world, emb.lookup(np.array([5])).slots)[0])
    emb.lookup(np.array([6, 7, 8]))
    out = pool.host_memory(64)
    world.log.clear()
    pool.read_page(slot // 4, out)
    assert (out.view(np.int32).reshape(4, 4)[: 4 - slot % 4] == numbers()[5 : 9 - slot % 4]).all()
    assert [what for stream, what in world.log if stream != "front"] == ["after", "read", "read", "read"]
    data = np.arange(64, dtype=np.uint8)
    pool.write_page(3, data)
    assert (host_of_front(pool.page(3)) == data).all(), "there without another's waiting"


def test_nobody_gets_a_page_while_bytes_are_copied_into_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer into A's pages begins, A is dropped, B asks for pages: B has them when the transfer has ended."""
    pool = HbmPool(2, 64, ("kv",), min_pages=0, backend="cuda", device=world.device())
    kv = KvCache(pool, token_bytes=16)
    pool.set_goals({"kv": 2}, 0)
    pool.migrate(2)
    assert kv.extend(1, 8)
    kv.drop(7)  # compiled in advance
    page = int(kv.pages(1)[0])
    begun, go_on = threading.Event(), threading.Event()
    wait = LocalEvent.wait

    def slow(event: LocalEvent) -> None:
        if event.stream.name != "front":
            begun.set()
            go_on.wait(60)
        wait(event)

    monkeypatch.setattr(LocalEvent, "wait", slow)
    steps: list[str] = []

    def transfer_in() -> None:
        pool.write_page(page, np.full(64, 7, np.uint8))
        steps.append("written")

    def abort_and_allocate() -> None:
        begun.wait(60)
        kv.drop(1)
        assert kv.extend(2, 8)
        steps.append("allocated")

    threads = [threading.Thread(target=work) for work in (transfer_in, abort_and_allocate)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    time.sleep(0.05)
    assert not steps, "the page is still being written"
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(steps) == ["allocated", "written"]
    monkeypatch.undo()
    for mine in kv.pages(2).tolist():
        pool.write_page(mine, np.full(64, 9, np.uint8))
        assert (host(world, pool.page(mine)) == 9).all()


# Memory of others


class OnDevice:
    """An array of another library in the device's memory, under one protocol."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class WithInterface(OnDevice):
    @property
    def __cuda_array_interface__(self) -> Any:
        return {**self.values.__array_interface__, "version": 3, "stream": None}


class WithDlpack(OnDevice):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self.values.__dlpack__()


@pytest.mark.parametrize("wrap", [WithInterface, WithDlpack])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_ids_in_the_devices_memory_do_not_go_through_the_host(world: World, wrap: Any, dtype: Any) -> None:
    _, emb = build(world, gather="zero-copy", tables=[numbers(), -numbers()])
    keys, tables = np.array([3, 1, 3, 199], dtype), np.array([0, 1, 0, 1], dtype)
    emb.lookup(wrap(keys), wrap(tables))
    world.run()
    world.log.clear()
    out = world.device().empty((4, 16), np.uint8)
    answer = emb.lookup(wrap(keys), wrap(tables), out=out)
    assert answer.rows is out
    assert host(world, answer.hit).tolist() == [True] * 4
    assert "write" not in {what for _, what in world.log}, "no byte came from the host"
    assert (host(world, out).view(np.int32) == np.array([1, -1, 1, -1])[:, None] * numbers()[keys.astype(int)]).all()
    assert emb.invalidate(wrap(keys), wrap(tables)) == 3
    # One side of a batch on the device, the other on the host, and one table for all.
    assert host(world, emb.lookup(wrap(keys), tables).rows).tolist() == host(world, out).tolist()
    assert host(world, emb.lookup(keys, wrap(tables)).rows).tolist() == host(world, out).tolist()
    assert (host(world, emb.lookup(wrap(keys), 1).rows).view(np.int32) == -numbers()[keys.astype(int)]).all()


def test_torch_sees_rows_and_pages_without_a_copy(world: World) -> None:
    torch = pytest.importorskip("torch")
    pool, emb = build(world)
    answer = emb.lookup(np.array([5, 6]))
    rows = torch.from_dlpack(answer.rows)
    assert rows.data_ptr() == answer.rows.host.ctypes.data
    assert rows.view(torch.int32).tolist() == numbers()[5:7].tolist()
    assert torch.from_dlpack(answer.hit).tolist() == [False, False]
    assert torch.from_dlpack(answer.slots).dtype == torch.int32
    page = torch.from_dlpack(pool.page(2))
    page[:] = 9
    assert (host(world, pool.page(2)) == 9).all()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("keys", "tables", "error", "message"),
    [
        (np.array([1.0]), 0, TypeError, "ids must be integers, got float64"),
        (np.array([[1]]), 0, ValueError, r"ids must be one-dimensional, got shape \(1, 1\)"),
        (np.array([1, 2**63], np.uint64), 0, ValueError, "ids must fit int64, got 9223372036854775808"),
        (np.array([1, 10]), 0, ValueError, r"ids\[1\] = 10 is not a row of table 0, which has 10"),
        (np.array([1, -1]), 0, ValueError, r"ids\[1\] = -1 is not a row of table 0"),
        (np.array([1, 9]), np.array([0, 1]), ValueError, r"ids\[1\] = 9 is not a row of table 1, which has 5"),
        (np.array([1]), 2, ValueError, r"tables must be in \[0, 2\), got 2"),
        (np.array([1]), -1, ValueError, r"tables must be in \[0, 2\), got -1"),
        (np.array([1]), 2**40, ValueError, r"tables must be in \[0, 2\)"),
        (np.array([1, 1]), np.array([0, 65536]), ValueError, r"tables must be in \[0, 2\), got 0..65536"),
        (np.array([1, 1]), np.array([0]), ValueError, "one entry per id: 1 for 2 ids"),
        (np.array([1]), np.array([0.0]), TypeError, "tables must be integers"),
    ],
)
def test_wrong_batches_are_refused_in_the_words_of_the_cpu_backend(
    world: World, on_device: bool, keys: np.ndarray, tables: Any, error: type[Exception], message: str
) -> None:
    _, emb = build(world, tables=[numbers(10), numbers(5)])
    emb.lookup(np.array([1, 2, 3]))
    before = [host(world, a).copy() for a in emb.state]
    given = (keys, tables)
    if on_device:
        given = (WithInterface(keys), tables if isinstance(tables, int) else WithInterface(tables))  # type: ignore[assignment]
    for call in (emb.lookup, emb.refill):
        with pytest.raises(error, match=message):
            call(*given)
    assert all((a == host(world, b)).all() for a, b in zip(before, emb.state, strict=True))
    # What was wrong once is not held against the next batch.
    answer = emb.lookup(WithInterface(np.array([3, 2])))
    assert host(world, answer.hit).all()


def test_strided_ids_empty_batches_and_a_batch_larger_than_the_cache(world: World) -> None:
    _, emb = build(world, pages=1)
    answer = emb.lookup(WithInterface(np.array([3, 0, 1, 0, 3])[::2]))
    assert (host(world, answer.rows).view(np.int32) == numbers()[[3, 1, 3]]).all()
    for empty in ([], np.zeros(0), WithInterface(np.zeros(0, np.int64))):
        answer = emb.lookup(empty, empty)
        assert host(world, answer.rows).shape == (0, 16)
        assert (answer.hit.shape, answer.slots.shape, answer.fetched) == ((0,), (0,), 0)
        assert emb.invalidate(empty) == 0
        assert emb.refill(empty) == 0
    _, emb = build(world, pages=1)
    answer = emb.lookup(np.arange(6))
    assert (host(world, answer.rows).view(np.int32) == numbers()[:6]).all()
    assert (host(world, answer.slots) >= 0).sum() == 4, "four cached, two past the cache"
    assert emb.stats().bypassed == 2


def test_rows_go_only_into_memory_of_the_device(world: World) -> None:
    _, emb = build(world)
    device = world.device()
    wrong = [
        np.zeros((2, 16), np.uint8),
        device.empty((3, 16), np.uint8),
        device.empty((2, 16), np.int8),
        WithInterface(np.zeros((2, 32), np.uint8)[:, ::2]),
    ]
    for out in wrong:
        with pytest.raises(ValueError, match=r"uint8 array of shape \(2, 16\) on the pool's device"):
            emb.lookup(np.array([6, 7]), out=out)
    assert emb.stats().requested == 0


# Host tables


def test_a_table_that_cannot_be_page_locked_is_copied_and_the_copy_follows_updates(world: World) -> None:
    rows = numbers()
    world.can_map = False
    pool, emb = build(world, gather="zero-copy", tables=[numbers(), rows])
    assert emb.gather == "zero-copy"
    assert rows.ctypes.data not in world.mapped
    rows[[3, 5]] = -7
    assert host(world, emb.lookup(np.array([3]), 1).rows).view(np.int32)[0, 0] == 12, "nothing told of it"
    assert emb.invalidate(np.array([5, 3, 999, -1]), 1) == 1
    assert (host(world, emb.lookup(np.array([3, 5, 6]), 1).rows).view(np.int32) == rows[[3, 5, 6]]).all()
    pool.close()
    assert not world.mapped


def test_mapped_files_are_staged(world: World, tmp_path: Path) -> None:
    numbers().tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.int32, "r", shape=(200, 4))
    for gather in ("auto", "staging"):
        _, emb = build(world, gather=gather, tables=[numbers(), mapped])
        assert emb.gather == "staging"
        assert not world.mapped
        assert (host(world, emb.lookup(np.array([199, 0]), 1).rows).view(np.int32) == numbers()[[199, 0]]).all()
    with pytest.raises(ValueError, match="table 1 is a memory-mapped file, whose rows can only be staged"):
        build(world, gather="zero-copy", tables=[numbers(), mapped])
    assert not world.mapped, "the first table's page-locking is undone"


@pytest.mark.parametrize("slow", ["zero-copy", "staging"])
def test_auto_takes_the_path_that_is_faster(world: World, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    fetch = HostTables.fetch
    clock = [0.0]

    def timed(self: HostTables, *arguments: Any) -> None:
        clock[0] += 2.0 if self.gather == slow else 1.0
        fetch(self, *arguments)

    monkeypatch.setattr(HostTables, "fetch", timed)
    monkeypatch.setattr(transfer.time, "perf_counter", lambda: clock[0])
    pool, emb = build(world, gather="auto")
    assert emb.gather == ("staging" if slow == "zero-copy" else "zero-copy")
    assert len(world.mapped) == (slow == "staging")
    assert (host(world, emb.lookup(np.array([5])).rows).view(np.int32) == numbers()[5]).all()
    pool.close()
    assert not world.mapped


def test_page_locking_ends_with_the_cache(world: World) -> None:
    """A range that stays registered would be taken for whatever comes to its address."""
    pool, emb = build(world, gather="zero-copy")
    assert len(world.mapped) == 1
    del pool, emb
    gc.collect()
    assert not world.mapped


@pytest.mark.parametrize(("row_bytes", "unit"), [(16, 4), (14, 1), (12, 4)])
def test_tables_of_other_widths_are_padded_by_the_kernel(world: World, row_bytes: int, unit: int) -> None:
    tables = [np.arange(60, dtype=np.uint8).reshape(5, 12), np.arange(40, dtype=np.uint8).reshape(5, 8)]
    pool = HbmPool(4, 64, ("emb",), min_pages=0, backend="cuda", device=world.device())
    emb = EmbeddingCache(pool, row_bytes=row_bytes, tables=tables, gather="zero-copy")
    answer = emb.lookup(np.array([4, 4, 0]), np.array([0, 1, 1]))
    wanted = [tables[0][4], tables[1][4], tables[1][0]]
    assert [bytes(r) for r in host(world, answer.rows)] == [bytes(w).ljust(row_bytes, b"\0") for w in wanted]
    assert f"fetch_rows_{unit}" in {what for _, what in world.log}


# Failures


def test_a_read_that_fails_in_the_middle_of_a_batch_leaves_no_row_behind(world: World, small_chunks: int) -> None:
    class Failing(np.ndarray):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Failing.reads += 1
            if Failing.reads == 2:
                raise OSError("input/output error")
            return super().__getitem__(key)

    _, emb = build(world, tables=[numbers().view(Failing)])
    with pytest.raises(OSError, match="input/output error"):
        emb.lookup(np.arange(12))
    assert emb.stats() == EmbeddingStats(0, 0, 0, 0, 0, 0, 0)
    answer = emb.lookup(np.arange(12))
    assert not host(world, answer.hit).any()
    assert (host(world, answer.rows).view(np.int32) == numbers()[:12]).all()
    # A refill gives such rows up, tells of them once, and goes on; lookups do not suffer.
    Failing.reads = 0
    emb.refill(np.arange(20, 32))
    emb.lookup(np.array([1]))
    with pytest.raises(OSError, match="input/output error"):
        emb.advance_refill(wait=True)
    assert emb.advance_refill() == 0
    found = emb._backend.contains(np.zeros(12, np.int16), np.arange(20, 32))
    assert found.tolist() == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("policy", ["sieve", "lru"])
def test_an_interrupt_at_any_launch_leaves_a_cache_that_serves(
    world: World, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """At worst it is empty. What leases hold stays; pages that left may be written by others at once."""
    pool = HbmPool(6, 64, ("emb", "other"), min_pages=0, backend="cuda", device=world.device())
    emb = EmbeddingCache(pool, row_bytes=16, tables=[numbers()], gather="staging", policy=policy)
    pool.set_goals({"emb": 6, "other": 0}, 0)
    pool.migrate(6)
    launch = LocalDevice.launch
    left = [0]

    def interrupted(device: LocalDevice, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        launch(device, *arguments)

    monkeypatch.setattr(LocalDevice, "launch", interrupted)
    revision = itertools.count(1)

    def goals(pages: int) -> None:
        pool.set_goals({"emb": pages, "other": 6 - pages}, next(revision))

    interrupted_calls: list[int] = []
    for at in range(1, 40):
        slots = emb.lookup(np.array([7])).slots
        held = [emb.lease(slots)] if host(world, slots)[0] >= 0 else []
        place = int(host(world, slots)[0])
        calls: tuple[Callable[[], Any], ...] = (
            lambda: emb.lookup(np.arange(30)),
            lambda: (emb.refill(np.arange(40, 60)), emb.advance_refill(wait=True)),
            lambda: (goals(4), pool.migrate(2)),
            lambda: (goals(6), pool.migrate(2)),
        )
        for number, call in enumerate(calls):
            left[0] = at
            try:
                call()
            except KeyboardInterrupt:
                interrupted_calls.append(number)
            left[0] = 0
            for free in np.flatnonzero(pool.state.owner < 0):
                host(world, pool.page(int(free)))[:] = 0xEE
            if held:
                page = host(world, pool.page(place // 4)).view(np.int32).reshape(4, 4)
                assert (page[place % 4] == numbers()[7]).all()
            keys = np.arange(at, at + 20)
            assert (host(world, emb.lookup(keys).rows).view(np.int32) == numbers()[keys]).all()
        for lease in held:
            lease.release()
    assert interrupted_calls.count(0) >= 12, "at each of a lookup's launches"
    assert interrupted_calls.count(1) >= 12, "and of a refill's"
    assert interrupted_calls.count(2) >= (20 if policy == "sieve" else 1), "many where rows move"
    emb.lookup(np.array([3]))
    assert host(world, emb.lookup(np.array([3])).hit).all()


def test_after_close_memory_is_gone_and_counters_stay(world: World) -> None:
    pool, emb = build(world, gather="zero-copy")
    slots = emb.lookup(np.arange(4)).slots
    lease = emb.lease(slots)
    emb.refill(np.arange(20, 24))
    view = pool.page(0)
    storage = weakref.ref(pool.storage)
    pool.close()
    pool.close()
    assert storage() is None
    assert emb.state is None
    assert emb.metadata_bytes() == 0
    assert not world.mapped
    assert view.size == 64, "what the caller holds stays"
    for call in (
        lambda: emb.lookup(np.arange(4)),
        lambda: emb.lookup(world.device().array(np.arange(4))),
        lambda: emb.invalidate(np.arange(4)),
        lambda: emb.refill(np.arange(4)),
        emb.advance_refill,
        lambda: emb.lease(slots),
        lambda: pool.page(0),
        lambda: pool.read_page(0, np.zeros(64, np.uint8)),
        lambda: pool.write_page(0, np.zeros(64, np.uint8)),
        lambda: pool.migrate(1),
        lambda: EmbeddingCache(pool, row_bytes=16, tables=[numbers()]),
    ):
        with pytest.raises(PoolClosedError):
            call()
    lease.release()
    assert not pool.state.pins.any()
    assert emb.stats().requested == 4
    assert emb.stats().requested == 0


def test_two_threads(world: World) -> None:
    pool, emb = build(world, pages=6)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for step in range(15):
            keys = rng.integers(0, 200, 20)
            rows = np.from_dlpack(emb.lookup(keys).rows).view(np.int32)
            if not (rows == numbers()[keys]).all():
                wrong.append(keys)
            emb.refill(rng.integers(0, 200, 8))
            if step % 5 == seed:
                pool.set_goals({"emb": int(rng.integers(0, 7))}, 100 * seed + step)
                pool.migrate(2)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    stats = emb.stats()
    assert stats.requested == stats.hits + stats.misses == 2 * 15 * 20


def test_metadata_alone_on_the_device(world: World) -> None:
    """payload=False: any int64 is an id, no rows, no table is read."""
    twins = PublicTwins(world.device(), payload=False)
    twins.goal(6)
    twins.migrate(6)
    extreme = [0, -1, 2**63 - 1, -(2**63)]
    twins.lookup(extreme, 0)
    twins.lookup(extreme, 2, True)
    twins.refill(list(range(5)), 1, True)
    twins.advance(True)
    twins.lookup([*extreme, *range(6)], 1)
    twins.check()
    with pytest.raises(ValueError, match="keeps no bytes"):
        twins.pools[1].read_page(0, np.zeros(128, np.uint8))
    twins.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "rocm"}, ValueError, "backend must be 'cpu' or 'cuda', got 'rocm'"),
        ({"backend": "cpu", "device": object()}, ValueError, "a device is for backend 'cuda' alone"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HbmPool(4, 64, **arguments)


def test_backend_cuda_without_cupy_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaUnavailableError, match="needs CuPy") as raised:
        HbmPool(4, 64, backend="cuda")
    assert "\n" not in str(raised.value)


def test_a_gather_path_that_is_not_is_refused(world: World) -> None:
    pool = HbmPool(4, 64, backend="cuda", device=world.device())
    with pytest.raises(ValueError, match="gather must be one of auto, zero-copy, staging"):
        EmbeddingCache(pool, row_bytes=16, tables=[numbers()], gather="fast")
    EmbeddingCache(pool, row_bytes=16, tables=[numbers()], gather="zero-copy")
    with pytest.raises(ValueError, match="attached already"):
        EmbeddingCache(pool, row_bytes=16, tables=[numbers()], gather="zero-copy")
    gc.collect()
    assert len(world.mapped) == 1, "the second one's page-locking is undone"


def test_the_kv_cache_beside_it(world: World) -> None:
    pool = HbmPool(6, 64, backend="cuda", device=world.device())
    kv = KvCache(pool, token_bytes=16)
    pool.set_target(0.0, 0)
    pool.migrate(6)
    assert kv.extend(1, 6)
    data = np.arange(64, dtype=np.uint8)
    for page in kv.pages(1).tolist():
        pool.write_page(page, data)
    out = pool.host_memory(64)
    pool.read_page(int(kv.pages(1)[1]), out)
    assert (out == data).all()
    assert kv.lookup(1, 6) == 6


def test_a_ghost_follows_the_same_keys_on_both_backends(world: World) -> None:
    gains = []
    for options in ({}, {"backend": "cuda", "device": world.device()}):
        pool = HbmPool(16, 1024, ("emb",), payload=False, **options)
        emb = EmbeddingCache(pool, row_bytes=16, tables=2, ghost=True)
        emb.ghost = ghost = EmbeddingGhost(pool, "emb", max_pages=16, rows_per_page=64, policy=SIEVE, rate=0.5)
        if isinstance(emb._backend, CpuBackend):
            emb._backend.sample_below(ghost.limit)
        pool.set_goals({"emb": 8}, 1)
        pool.migrate(16)
        rng = np.random.default_rng(0)
        for _ in range(100):
            emb.lookup((2_000 ** rng.random(50)).astype(np.int64), rng.integers(0, 2, 50))
        assert ghost.requests == 5_000
        gains += [ghost.gain(4), ghost.gain(-2)]
    assert gains[:2] == gains[2:]
    assert gains[0].hits_per_request > 0 > gains[1].hits_per_request
