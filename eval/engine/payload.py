"""Random operations on an engine with payload, every byte that is served compared with its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine import EmbeddingCache, EmbeddingLease, HbmPool, KvCache, KvLease
from helm_rl.figures import Figure

Bytes = npt.NDArray[np.uint8]

PAGES = 64
PAGE_BYTES = 4_096
ROW_BYTES = 64
TABLE_ROWS = (20_000, 5_000)
MOST_ROWS = 64  # in a batch
TOKEN_BYTES = 256
USERS = 200
MOST_TOKENS = 200
MOST_LEASES = 4
HOST_PAGES = 24


@dataclass
class Served:
    """What was compared."""

    operations: int = 0
    rows: int = 0
    pages: int = 0
    moved: int = 0  # pages that changed owner
    wrong_bytes: int = 0


@dataclass
class _User:
    epoch: int = 0
    tokens: int = 1


@dataclass
class _Leases:
    rows: list[tuple[EmbeddingLease, npt.NDArray[np.int32], Bytes]] = field(default_factory=list)
    users: list[tuple[KvLease, npt.NDArray[np.int32], list[Bytes]]] = field(default_factory=list)


def page_bytes(user: int, epoch: int, index: int) -> Bytes:
    """Return what the `index`-th page of a user's history holds in an epoch: a function of the three alone."""
    seed = (user * 1_000_003 + epoch) * 1_000_003 + index
    words = np.arange(PAGE_BYTES // 8, dtype=np.uint64) + np.uint64(seed % 2**32)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


class PayloadRun:
    """An engine of two caches, its sources, and the operations on them.

    Lookups of rows of two tables, updates of rows, visits of users whose histories grow, shrink and begin anew, leases
    of both over later operations, targets and steps of migration; evicted pages of users go to the host and come back.
    """

    def __init__(self, seed: int, policy: str) -> None:
        self.served = Served()
        self._rng = np.random.default_rng(seed)
        self._pool = HbmPool(PAGES, PAGE_BYTES, min_pages=4)
        self._tables = [self._rng.integers(0, 256, (rows, ROW_BYTES), np.uint8) for rows in TABLE_ROWS]
        self._emb = EmbeddingCache(self._pool, row_bytes=ROW_BYTES, tables=self._tables, policy=policy)
        self._kv = KvCache(self._pool, token_bytes=TOKEN_BYTES, host_pages=HOST_PAGES)
        self._users = [_User() for _ in range(USERS)]
        self._leases = _Leases()
        self._revision = 0
        self._resize()
        self._pool.migrate(PAGES)

    def run(self, operations: int) -> None:
        """Do so many operations."""
        kinds: list[tuple[Callable[[], object], float]] = [
            (self._look_up, 0.5),
            (self._visit, 0.3),
            (self._migrate, 0.1),
            (self._lease_rows, 0.02),
            (self._lease_user, 0.02),
            (self._end_lease, 0.04),
            (self._update_rows, 0.015),
            (self._resize, 0.005),
        ]
        for kind in self._rng.choice(len(kinds), operations, p=[share for _, share in kinds]):
            kinds[kind][0]()
        self.served.operations += operations

    def finish(self) -> Served:
        """End all leases; return what was compared."""
        while self._leases.rows or self._leases.users:
            self._end_lease()
        return self.served

    def _look_up(self) -> tuple[npt.NDArray[np.int32], Bytes]:
        n = int(self._rng.integers(0, MOST_ROWS + 1))
        table = int(self._rng.integers(2))
        ids = np.minimum(TABLE_ROWS[table] ** self._rng.random(n), TABLE_ROWS[table] - 1).astype(np.int64)
        found = self._emb.lookup(ids, table)
        rows = self._tables[table][ids]
        self._compare(found.rows, rows)
        self.served.rows += n
        return found.slots, rows

    def _lease_rows(self) -> None:
        slots, rows = self._look_up()
        if len(self._leases.rows) < MOST_LEASES:
            self._leases.rows.append((self._emb.lease(slots), slots, rows))

    def _visit(self) -> None:
        number = int(self._rng.integers(USERS))
        user = self._users[number]
        draw = self._rng.random()
        if draw < 0.05:
            user.epoch += 1
            user.tokens = 1
        elif draw < 0.1:
            user.tokens = int(self._rng.integers(1, user.tokens + 1))
        else:
            user.tokens = min(MOST_TOKENS, user.tokens + int(self._rng.integers(1, 40)))
        hit = self._kv.lookup(number, user.tokens, user.epoch)
        if self._rng.random() < 0.5:
            hit = self._kv.onboard(number, user.tokens, user.epoch)
        whole = -(-hit // self._kv.page_tokens)
        self._compare_pages(self._kv.pages(number)[:whole], self._history(number, whole))
        before = self._kv.pages(number).size
        if self._kv.extend(number, user.tokens, user.epoch):
            pages = self._kv.pages(number)
            for index in range(before, pages.size):
                self._pool.write_page(int(pages[index]), page_bytes(number, user.epoch, index))
            self._compare_pages(pages, self._history(number, pages.size))

    def _lease_user(self) -> None:
        number = int(self._rng.integers(USERS))
        lease = self._kv.lease(number) if len(self._leases.users) < MOST_LEASES else None
        if lease is not None:
            pages = self._kv.pages(number)
            # Of the epoch that is cached, which need not be the user's next one: as it is now, checked by `_visit`.
            self._leases.users.append((lease, pages, [self._pool.page(int(page)).copy() for page in pages]))

    def _end_lease(self) -> None:
        if self._leases.rows and (not self._leases.users or self._rng.random() < 0.5):
            rows_lease, slots, rows = self._leases.rows.pop(0)
            held = slots >= 0
            per_page = self._emb.rows_per_page
            for slot, row in zip(slots[held], rows[held], strict=True):
                start = int(slot) % per_page * ROW_BYTES
                self._compare(self._pool.page(int(slot) // per_page)[start : start + ROW_BYTES], row)
            self.served.rows += int(held.sum())
            rows_lease.release()
        elif self._leases.users:
            lease, pages, held_bytes = self._leases.users.pop(0)
            self._compare_pages(pages, held_bytes)
            lease.release()

    def _update_rows(self) -> None:
        table = int(self._rng.integers(2))
        ids = self._rng.integers(0, TABLE_ROWS[table], 8)
        self._tables[table][ids] = self._rng.integers(0, 256, (8, ROW_BYTES), np.uint8)
        self._emb.invalidate(ids, table)

    def _resize(self) -> None:
        self._revision += 1
        self._pool.set_target(float(self._rng.random()), self._revision)

    def _migrate(self) -> None:
        self.served.moved += self._pool.migrate(int(self._rng.integers(1, 5))).granted

    def _history(self, number: int, pages: int) -> list[Bytes]:
        return [page_bytes(number, self._users[number].epoch, index) for index in range(pages)]

    def _compare_pages(self, pages: npt.NDArray[np.int32], expected: list[Bytes]) -> None:
        for page, content in zip(pages, expected, strict=True):
            self._compare(self._pool.page(int(page)), content)
        self.served.pages += len(expected)

    def _compare(self, served: Any, expected: Bytes) -> None:
        if not np.array_equal(served, expected):
            self.served.wrong_bytes += int((served != expected).sum())


def measure_payload(operations: int, policy: str, seed: int, advance: Callable[[int], None]) -> dict[str, Figure]:
    """Do random operations and count the bytes that were not those of their source.

    `advance` is called with the number of operations done since it was last called.
    """
    run = PayloadRun(seed, policy)
    done = 0
    while done < operations:
        n = min(1_000, operations - done)
        run.run(n)
        done += n
        advance(n)
    served = run.finish()
    return {
        "engine.payload_operations": Figure(served.operations, "", "higher"),
        "engine.payload_rows": Figure(served.rows, "", "higher"),
        "engine.payload_kv_pages": Figure(served.pages, "", "higher"),
        "engine.payload_pages_moved": Figure(served.moved, "", "higher"),
        "engine.payload_wrong_bytes": Figure(served.wrong_bytes, "B", "lower", 0.0),
    }
