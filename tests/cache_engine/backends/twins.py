"""The CPU backend and the CUDA backend side by side: after the same operations, every array of both is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding as cpu
from cache_engine.backends.cpu import payload
from cache_engine.backends.cpu import pool as pools
from cache_engine.backends.cuda import CudaEmbedding, CudaState, as_integers
from cache_engine.backends.device import Device

Key = tuple[int, int]  # table, id

LIMIT_NS = 5
OUTPUTS = ("slots", "miss")
UNIQUE_OUTPUTS = ("first", "place", "miss_slot")
LEFT_OVER = 0xEE  # what storage holds before any row


class Twins:
    """One cache on each backend. It is the second of two members: the first owns no page.

    Args:
        device: of the CUDA backend.
        pages, rows_per_page: of the pool.
        index_pages: for which the index is sized; fewer than `pages` make full index sets common.
        start: number of the batch before the first.
        row_bytes: width of the rows; 0 for metadata alone.
        policy: LRU or SIEVE.
    """

    def __init__(
        self,
        device: Device,
        pages: int,
        rows_per_page: int,
        index_pages: int,
        start: int = 0,
        row_bytes: int = 0,
        policy: int = cpu.SIEVE,
    ) -> None:
        self.device = device
        self.pages = pages
        self.rows_per_page = rows_per_page
        self.row_bytes = row_bytes
        self.pool = pools.new_pool_state(pages, 2)
        self.emb = cpu.new_embedding_state(pages, rows_per_page, index_pages, 1, policy)
        self.emb.scalars[cpu.NOW] = start
        self.scratch = cpu.new_embedding_scratch(64)
        self.other_pool = pools.new_pool_state(pages, 2)
        self.cuda = CudaEmbedding(self.other_pool, rows_per_page, index_pages, 1, policy, device)
        device.write(self.cuda.state.scalars, self.emb.scalars)
        self.now_ns = 0
        if row_bytes:
            self.page_bytes = -(-rows_per_page * row_bytes // 64) * 64
            self.storage = np.full(pages * self.page_bytes, LEFT_OVER, np.uint8)
            self.other_storage = device.array(self.storage)

    def own_all(self) -> None:
        """Take all pages."""
        self.apply(("goal", self.pages))
        self.migrate(self.pages)

    def apply(self, operation: tuple[str, Any]) -> None:
        """Do one of `lookup`, `failed lookup`, `invalidate` (keys), `goal`, `migrate`, `unpin` (int), `pin` (ints)."""
        name, value = operation
        if name == "lookup":
            self.lookup(value)
        elif name == "failed lookup":
            self.lookup(value, fails=True)
        elif name == "invalidate":
            tables, keys = arrays(value)
            gone = cpu.invalidate(self.emb, tables, keys, keys.size)
            assert self.cuda.invalidate(tables, keys) == gone
        elif name == "goal":
            for pool in (self.pool, self.other_pool):
                pool.goal[1] = min(value, self.pages)
        elif name == "migrate":
            self.migrate(value)
        elif name == "pin":
            owned = self.pool.owned[1]
            for page in {int(self.pool.lists[1, i % owned]) for i in value} if owned else ():
                for pool in (self.pool, self.other_pool):
                    pool.pins[page] += 1
        elif name == "unpin":
            pinned = np.flatnonzero(self.pool.pins)
            if pinned.size:
                for pool in (self.pool, self.other_pool):
                    pool.pins[pinned[value % pinned.size]] -= 1
        else:
            raise AssertionError(f"no operation {name}")

    def lookup(self, batch: list[Key], fails: bool = False) -> None:
        self.lookup_arrays(*arrays(batch), fails=fails)

    def lookup_arrays(
        self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], fails: bool = False
    ) -> npt.NDArray[np.int32]:
        """Look up on both; return the slots."""
        n = keys.size
        if n > self.scratch.slots.size:
            self.scratch = cpu.new_embedding_scratch(n)
        unique = int(cpu.lookup(self.emb, self.pool, self.scratch, tables, keys, n))
        assert self.cuda.lookup(tables, keys) == unique
        for names, count in ((OUTPUTS, n), (UNIQUE_OUTPUTS, unique)):
            for name in names:
                mine = getattr(self.scratch, name)[:count]
                other = self.device.read(getattr(self.cuda.scratch, name), count)
                np.testing.assert_array_equal(other, mine, err_msg=name)
        if fails:
            cpu.retract(self.emb, self.scratch, n)
            self.cuda.retract()
        elif self.row_bytes:
            self.serve(tables, keys, unique)
        else:
            self.cuda.publish()
        return self.scratch.slots[:n].copy()

    def serve(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], unique: int) -> None:
        n = keys.size
        first = self.scratch.first[:unique]
        truth = rows(tables, keys, self.row_bytes)
        staged = truth[first]
        out = np.zeros((n, self.row_bytes), np.uint8)
        payload.store_rows(self.storage, self.page_bytes, self.rows_per_page, self.scratch.miss_slot[:unique], staged)
        payload.gather_rows(
            self.storage,
            self.page_bytes,
            self.rows_per_page,
            self.scratch.slots[:n],
            self.scratch.miss[:n],
            staged,
            out,
        )
        other_staged = self.device.array(staged)
        other_out = self.device.empty((n, self.row_bytes), np.uint8)
        self.cuda.store_rows(self.other_storage, self.page_bytes, other_staged)
        self.cuda.publish()
        self.cuda.gather_rows(self.other_storage, self.page_bytes, other_staged, other_out)
        np.testing.assert_array_equal(out, truth)
        np.testing.assert_array_equal(self.device.read(other_out), truth)

    def migrate(self, budget: int) -> None:
        self.now_ns += 2
        freed = cpu.release_pages(self.emb, self.pool, budget, self.now_ns, LIMIT_NS)
        granted = cpu.accept_pages(self.emb, self.pool, budget)
        # What is not read anew from the device must not decide: it would make any page the coldest.
        self.cuda._row["last"] = (int(self.emb.scalars[cpu.NOW]) + 2**31) % 2**32
        assert self.cuda.release(budget, self.now_ns, LIMIT_NS) == freed
        assert self.cuda.accept(budget) == granted

    def check(self) -> None:
        """Every array of the two states, the pools and the storage is the same, bit for bit."""
        for name, mine, other in zip(CudaState._fields, as_integers(self.emb), self.cuda.state, strict=True):
            np.testing.assert_array_equal(self.device.read(other), mine, err_msg=name)
        for name, here, there in zip(self.pool._fields, self.pool, self.other_pool, strict=True):
            np.testing.assert_array_equal(there, here, err_msg=name)
        if self.row_bytes:
            np.testing.assert_array_equal(self.device.read(self.other_storage), self.storage)


def arrays(batch: list[Key]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    return np.array([t for t, _ in batch], np.int16), np.array([k for _, k in batch], np.int64)


def rows(tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64], row_bytes: int) -> npt.NDArray[np.uint8]:
    """The row of each key: bytes that no other key of the tests has at the same place."""
    salt = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + tables.astype(np.uint64) * np.uint64(
        0xD1B54A32D192ED03
    )
    at = np.arange(1, row_bytes + 1, dtype=np.uint64)
    return ((salt[:, None] * (2 * at + np.uint64(1))[None, :]) >> np.uint64(56)).astype(np.uint8)


def random_program(rng: np.random.Generator, steps: int, ids: int, batch: int) -> list[tuple[str, Any]]:
    """Operations on a skewed stream: without hypothesis, for machines that have only what the engine needs."""

    def keys(n: int) -> list[Key]:
        numbers = rng.zipf(1.2, n) % ids
        extreme = rng.random(n) < 0.02
        numbers[extreme] = rng.choice([-1, -2, -(2**63), 2**63 - 1], n)[extreme]
        return [(int(t), int(k)) for t, k in zip(rng.integers(0, 3, n), numbers, strict=True)]

    program: list[tuple[str, Any]] = []
    for _ in range(steps):
        name = rng.choice(
            ["lookup", "failed lookup", "invalidate", "goal", "migrate", "pin", "unpin"],
            p=[0.55, 0.04, 0.06, 0.07, 0.14, 0.07, 0.07],
        )
        if name in ("lookup", "failed lookup"):
            program.append((name, keys(int(rng.integers(0, batch + 1)))))
        elif name == "invalidate":
            program.append((name, keys(20)))
        elif name == "pin":
            program.append((name, rng.integers(0, 8, 2).tolist()))
        else:
            program.append((name, int(rng.integers(0, 9))))
    return program
