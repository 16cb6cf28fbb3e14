"""Two pools with an embedding cache, one on each backend: after the same calls all that can be read is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine import EmbeddingCache, HbmPool
from cache_engine.backends.cuda import CudaState, as_integers
from cache_engine.backends.device import Device
from cache_engine.lease import Lease

Operation = tuple[Any, ...]

PAGE_BYTES = 128
ROWS = 90
LIMIT_NS = 5


class Table(np.ndarray):
    """A host table that can fail, as a mapped file whose disk is gone."""

    broken = False

    def __getitem__(self, key: Any) -> Any:
        if Table.broken:
            raise OSError("input/output error")
        return super().__getitem__(key)


class PublicTwins:
    """An operation is a name and arguments; see the methods called so.

    Args:
        device: of the pool on backend "cuda".
        pages: of each pool.
        row_bytes: of the cache.
        gather: how missed rows come on the device.
        max_pages: for which the index is sized.
        payload: whether the pools keep bytes.
        policy: of the caches.
    """

    def __init__(
        self,
        device: Device,
        pages: int = 6,
        row_bytes: int = 16,
        gather: str = "staging",
        max_pages: int | None = None,
        payload: bool = True,
        policy: str = "sieve",
    ) -> None:
        Table.broken = False
        rng = np.random.default_rng(row_bytes)
        widths = (row_bytes, max(1, row_bytes - 4), max(1, row_bytes // 2))
        tables = [rng.integers(0, 256, (ROWS, width), np.uint8) for width in widths]
        self.device = device
        self.sources = [[t.copy().view(Table) for t in tables], [t.copy().view(Table) for t in tables]]
        options: dict[str, Any] = {"min_pages": 0, "payload": payload, "drain_limit_s": LIMIT_NS * 1e-9}
        self.pools = (
            HbmPool(pages, PAGE_BYTES, **options),
            HbmPool(pages, PAGE_BYTES, **options, backend="cuda", device=device),
        )
        self.caches = [
            EmbeddingCache(
                pool,
                row_bytes=row_bytes,
                tables=tables if payload else len(widths),
                max_pages=max_pages,
                policy=policy,
                gather=how,
            )
            for pool, tables, how in zip(self.pools, self.sources, ("auto", gather), strict=True)
        ]
        self.payload = payload
        self.row_bytes = row_bytes
        self.leases: list[list[Lease]] = []
        self.revision = 0
        self.now_ns = 0

    def run(self, program: list[Operation]) -> None:
        """Do all of it on all pages, compare after each, and close."""
        self.goal(6)
        self.migrate(6)
        for operation in program:
            if operation[0] == "broken_lookup" and self.caches[1].gather == "zero-copy":
                continue  # kernels read memory, which does not fail
            self.apply(operation)
            self.check()
        self.close()

    def apply(self, operation: Operation) -> None:
        # On a GPU a copy takes its time; on the CPU it is done when it is begun.
        fetch = self.caches[1]._refill._fetch
        if fetch is not None:
            fetch.event.wait()
        getattr(self, operation[0])(*operation[1:])

    def lookup(self, ids: list[int], tables: int | list[int], on_device: bool = False, lease: bool = False) -> None:
        """Look up, the ids on the host or on the device; hold what was found."""
        keys = np.array(ids, np.int64)
        numbers = tables if isinstance(tables, int) else np.array(tables, np.int64)[: keys.size]
        mine = self.caches[0].lookup(keys, numbers)
        if on_device:
            keys, numbers = self.device.array(keys), self.on_device(numbers)
        other = self.caches[1].lookup(keys, numbers)
        assert other.fetched == mine.fetched
        np.testing.assert_array_equal(self.device.read(other.hit), mine.hit)
        np.testing.assert_array_equal(self.device.read(other.slots), mine.slots)
        if self.payload:
            truth = self.rows(ids, tables)
            np.testing.assert_array_equal(mine.rows, truth)
            np.testing.assert_array_equal(self.device.read(other.rows), truth)
        if lease:
            self.leases.append([self.caches[0].lease(mine.slots), self.caches[1].lease(other.slots)])

    def broken_lookup(self, ids: list[int], table: int) -> None:
        """Look up while no row can be read; a refill that begins its next copy then tells of it at its next call."""
        said: list[list[str]] = []
        for cache in self.caches:
            said.append([])
            Table.broken = True
            for call, arguments in ((cache.lookup, (np.array(ids, np.int64), table)), (cache.advance_refill, ())):
                try:
                    call(*arguments)
                except OSError as e:
                    said[-1].append(f"{call.__name__} {e}")
                Table.broken = False
        assert said[0] == said[1]

    def update(self, ids: list[int], table: int, value: int) -> None:
        """Change rows of a table, and forget them."""
        gone = []
        for sources, cache in zip(self.sources, self.caches, strict=True):
            if self.payload:
                np.asarray(sources[table])[ids] = value
            gone.append(cache.invalidate(np.array(ids, np.int64), table))
        assert gone[0] == gone[1]

    def refill(self, ids: list[int], tables: int | list[int], on_device: bool = False) -> None:
        keys = np.array(ids, np.int64)
        numbers = tables if isinstance(tables, int) else np.array(tables, np.int64)[: keys.size]
        mine = self.caches[0].refill(keys, numbers)
        if on_device:
            keys, numbers = self.device.array(keys), self.on_device(numbers)
        assert self.caches[1].refill(keys, numbers) == mine

    def advance(self, wait: bool) -> None:
        waiting = [cache.advance_refill(wait) for cache in self.caches]
        assert waiting[0] == waiting[1]
        assert not (wait and waiting[0])

    def goal(self, pages: int) -> None:
        self.revision += 1
        pages = min(pages, self.pools[0]._most[0])
        for pool in self.pools:
            pool.set_goals({"emb": pages, "kv": pool.pages - pages}, self.revision)

    def migrate(self, budget: int, relocate: bool | None = None) -> None:
        self.now_ns += 2
        one, two = (pool.migrate(budget, self.now_ns, relocate=relocate) for pool in self.pools)
        assert one == two

    def end_lease(self, which: int) -> None:
        if self.leases:
            for lease in self.leases.pop(which % len(self.leases)):
                lease.release()

    def stats(self) -> None:
        assert self.caches[0].stats() == self.caches[1].stats()

    def check(self) -> None:
        """Every array of the two caches, the pools and the pages is the same, bit for bit."""
        for name, mine, other in zip(self.pools[0].state._fields, *(p.state for p in self.pools), strict=True):
            np.testing.assert_array_equal(other, mine, err_msg=name)
        for name, mine, other in zip(
            CudaState._fields, as_integers(self.caches[0].state), self.caches[1].state, strict=True
        ):
            np.testing.assert_array_equal(self.device.read(other), mine, err_msg=name)
        if self.payload:
            np.testing.assert_array_equal(self.device.read(self.pools[1].storage), self.pools[0].storage)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.stats()

    def on_device(self, numbers: Any) -> Any:
        return numbers if isinstance(numbers, int) else self.device.array(numbers)

    def rows(self, ids: list[int], tables: int | list[int]) -> npt.NDArray[np.uint8]:
        out = np.zeros((len(ids), self.row_bytes), np.uint8)
        for i, key in enumerate(ids):
            source = np.asarray(self.sources[0][tables if isinstance(tables, int) else tables[i]][key])
            out[i, : source.size] = source
        return out


def random_operations(rng: np.random.Generator, steps: int, batch: int) -> list[Operation]:
    """Operations on a skewed stream: without hypothesis, for machines that have only what the engine needs."""
    program: list[Operation] = []
    for _ in range(steps):
        ids = ((rng.zipf(1.3, int(rng.integers(0, batch + 1))) - 1) % ROWS).tolist()
        table = int(rng.integers(0, 3))
        tables = rng.integers(0, 3, len(ids)).tolist()
        kind = rng.choice(8, p=[0.45, 0.05, 0.08, 0.1, 0.07, 0.05, 0.1, 0.1])
        flag = bool(rng.integers(2))
        if kind == 0:
            program.append(("lookup", ids, tables, flag, bool(rng.random() < 0.2)))
        elif kind == 1:
            program.append(("broken_lookup", ids, table))
        elif kind == 2:
            program.append(("update", sorted(set(ids)), table, int(rng.integers(256))))
        elif kind == 3:
            program.append(("refill", ids, table if flag else tables, flag))
        elif kind == 4:
            program.append(("advance", True))
        elif kind == 5:
            program.append(("stats",))
        elif kind == 6:
            program += [("goal", int(rng.integers(0, 7))), ("migrate", int(rng.integers(0, 7)), bool(rng.integers(2)))]
        else:
            program.append(("end_lease", int(rng.integers(0, 8))))
    return program
