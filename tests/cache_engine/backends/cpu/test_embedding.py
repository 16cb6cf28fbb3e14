"""The kernels of the embedding cache against a plain model of the batch algorithm and of moving pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cache_engine.backends.cpu import embedding as kernels
from cache_engine.backends.cpu import pool as pools
from tests.cache_engine.models import BatchCache, Key, index_set

LIMIT_NS = 5

ids = st.sampled_from([*range(40), -1, -2, -(2**63), 2**63 - 1])
keys = st.lists(st.tuples(st.integers(0, 1), ids), min_size=6, max_size=40)
operations = st.one_of(
    st.tuples(st.just("lookup"), keys),
    st.tuples(st.just("lookup"), keys),
    st.tuples(st.just("lookup"), keys | st.just([])),
    st.tuples(st.just("invalidate"), keys),
    st.tuples(st.just("goal"), st.integers(0, 5)),
    st.tuples(st.just("migrate"), st.integers(0, 6)),
    st.tuples(st.just("pin"), st.lists(st.integers(0, 4), min_size=1, max_size=5)),
    st.tuples(st.just("unpin"), st.integers(0, 4)),
)


class Twin:
    """The kernels and the model, one beside the other."""

    def __init__(
        self, pages: int, rows_per_page: int, index_pages: int, start: int = 0, policy: int = kernels.LRU
    ) -> None:
        self.pool = pools.new_pool_state(pages, 1)
        self.emb = kernels.new_embedding_state(pages, rows_per_page, index_pages, 0, policy)
        self.scratch = kernels.new_embedding_scratch(64)
        self.emb.scalars[kernels.NOW] = start
        sets = int(self.emb.scalars[kernels.SETS])
        self.model = BatchCache(pages, rows_per_page, sets, policy == kernels.SIEVE, now=start)
        self.now_ns = 0

    def lookup(self, batch: list[Key]) -> tuple[list[bool], list[int], list[Key]]:
        tables, numbers = arrays(batch)
        n = len(batch)
        unique = kernels.lookup(self.emb, self.pool, self.scratch, tables, numbers, n)
        served = self.model.lookup(batch)
        assert (self.scratch.miss[:n] < 0).tolist() == served.hit
        assert self.scratch.slots[:n].tolist() == served.slots
        # What the payload is copied by: the first occurrence of each unique miss, and its slot.
        new = list(dict.fromkeys(key for key, hit in zip(batch, served.hit, strict=True) if not hit))
        assert [batch[i] for i in self.scratch.first[:unique]] == new
        assert self.scratch.miss_slot[:unique].tolist() == [self.model.slot_of.get(key, -1) for key in new]
        return served.hit, served.slots, served.victims

    def apply(self, operation: tuple[str, Any]) -> None:
        name, value = operation
        if name == "lookup":
            self.lookup(value)
        elif name == "invalidate":
            tables, numbers = arrays(value)
            assert kernels.invalidate(self.emb, tables, numbers, len(value)) == self.model.invalidate(value)
        elif name == "goal":
            self.pool.goal[0] = self.model.goal = min(value, self.model.pages)
        elif name == "migrate":
            self.migrate(value)
        elif name == "pin" and self.model.owned:
            for page in {self.model.owned[i % len(self.model.owned)] for i in value}:
                self.pool.pins[page] += 1
                self.model.pins[page] = self.model.pins.get(page, 0) + 1
        elif name == "unpin":
            pinned = [page for page, count in self.model.pins.items() if count]
            if pinned:
                page = pinned[value % len(pinned)]
                self.pool.pins[page] -= 1
                self.model.pins[page] -= 1

    def migrate(self, budget: int) -> None:
        self.now_ns += 2
        freed = kernels.release_pages(self.emb, self.pool, budget, self.now_ns, LIMIT_NS)
        granted = kernels.accept_pages(self.emb, self.pool, budget)
        assert (freed, granted) == self.model.migrate(budget, self.now_ns, LIMIT_NS)

    def check(self) -> None:
        emb, pool, model = self.emb, self.pool, self.model
        slots = emb.slot[kernels.entries(emb)]
        rows = emb.row[slots]
        found = zip(slots.tolist(), rows["table"].tolist(), rows["key"].tolist(), strict=True)
        assert {slot: (table, number) for slot, table, number in found} == model.row_at
        if model.sieve:
            ahead = int(emb.scalars[kernels.AHEAD])
            assert (queued(emb, ahead), queued(emb, 1 - ahead)) == (model.ahead, model.passed)
            assert set(np.flatnonzero(emb.row["visited"]).tolist()) == model.visited
        assert pool.lists[0, : pool.owned[0]].tolist() == model.owned
        assert pool.free[: pool.scalars[pools.FREE_COUNT]].tolist() == model.free
        assert set(np.flatnonzero(pool.draining).tolist()) == set(model.draining)
        assert emb.fresh[: emb.scalars[kernels.N_FRESH]].tolist() == model.filling
        names = ("requested", "hits", "misses", "fetched", "bypassed", "evicted")
        assert dict(zip(names, emb.counters.tolist(), strict=True)) == model.counts


def queued(emb: kernels.EmbeddingState, which: int) -> list[int]:
    """The slots that stand in one of the queues, in order."""
    room = int(emb.scalars[kernels.ROOM])
    first = int(emb.scalars[kernels.START + which])
    at = [which * room + (first + k) % room for k in range(int(emb.scalars[kernels.COUNT + which]))]
    return [int(emb.queue[k]) for k in at if emb.spot[emb.queue[k]] == k]


def arrays(batch: list[Key]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([t for t, _ in batch], np.int16), np.array([k for _, k in batch], np.int64)


@given(
    pages=st.integers(1, 5),
    rows_per_page=st.sampled_from([1, 2, 3, 8]),
    index_pages=st.integers(1, 5),
    start=st.sampled_from([0, 2**31 - 4, 2**32 - 4]),
    policy=st.sampled_from([kernels.LRU, kernels.SIEVE]),
    program=st.lists(operations, min_size=15, max_size=50),
)
@settings(max_examples=200, deadline=None)
def test_kernels_do_what_the_model_does(
    pages: int, rows_per_page: int, index_pages: int, start: int, policy: int, program: list[tuple[str, Any]]
) -> None:
    """Hits, slots, victims, counters and pages, whatever the order of operations.

    An index that was sized for fewer pages than there are makes full sets common.
    """
    twin = Twin(pages, rows_per_page, min(index_pages, pages), start, policy)
    twin.apply(("goal", pages))
    twin.migrate(pages)
    for operation in program:
        twin.apply(operation)
        twin.check()
    counts = twin.model.counts
    event(f"evicted: {counts['evicted'] > 0}, bypassed: {counts['bypassed'] > 0}, aborted: {twin.pool.aborted[0] > 0}")


@pytest.mark.parametrize("policy", [kernels.LRU, kernels.SIEVE], ids=["lru", "sieve"])
def test_kernels_do_what_the_model_does_on_a_long_skewed_stream(policy: int) -> None:
    rng = np.random.default_rng(7)
    twin = Twin(6, 8, 4, policy=policy)
    twin.apply(("goal", 6))
    twin.migrate(6)
    victims = 0
    for i in range(600):
        batch = [(int(t), int(k)) for t, k in zip(rng.integers(0, 2, 24), rng.zipf(1.3, 24) % 120, strict=True)]
        victims += len(twin.lookup(batch)[2])
        if i % 50 == 20:
            twin.apply(("goal", int(rng.integers(1, 7))))
        if i % 5 == 0:
            twin.migrate(1)
        twin.check()
    assert victims > 1000
    assert twin.model.counts["hits"] > 1000


def filled(pages: int, rows_per_page: int, batches: list[list[int]], start: int = 0) -> Twin:
    twin = Twin(pages, rows_per_page, pages, start)
    twin.apply(("goal", pages))
    twin.migrate(pages)
    for batch in batches:
        twin.lookup([(0, k) for k in batch])
    return twin


def cached(twin: Twin) -> set[int]:
    return set(twin.emb.row["key"][twin.emb.row["live"] == 1].tolist())


@pytest.mark.parametrize("start", [0, 2**31 - 9, 2**31 - 1, 2**32 - 9, 2**32 - 1], ids=str)
def test_eviction_does_not_depend_on_where_the_counter_of_use_starts(start: int) -> None:
    """16 slots, hand at slot 0: each miss takes the oldest of its own window of 8."""
    twin = filled(2, 8, [[k] for k in range(16)], start)
    twin.lookup([(0, 0), (0, 1), (0, 9)])
    gone = []
    for k in range(100, 106):
        before = cached(twin)
        twin.lookup([(0, k)])
        gone += sorted(before - cached(twin))
    # Page 1 was filled first. Windows are pages 0 and 1 by turns; rows 0, 1 and 9 were used again.
    assert gone == [8, 2, 10, 3, 11, 4]
    twin.check()


def test_misses_of_one_batch_take_victims_from_windows_of_their_own() -> None:
    twin = filled(4, 8, [[k] for k in range(32)])
    hit, slots, victims = twin.lookup([(0, k) for k in (100, 101, 102, 103)])
    assert hit == [False] * 4
    assert victims == [(0, 24), (0, 16), (0, 8), (0, 0)], "pages were filled from the last to the first"
    assert slots == [0, 8, 16, 24]
    # The hand has gone round once; there is no fifth window.
    _, slots, victims = twin.lookup([(0, k) for k in (104, 105, 106, 107, 108)])
    assert victims == [(0, 25), (0, 17), (0, 9), (0, 1)]
    assert slots == [1, 9, 17, 25, -1]


def test_a_full_set_gives_its_oldest_row_and_slot() -> None:
    """An index of 2 sets over 12 rows that all fall into one: the next one takes the oldest's entry and slot."""
    twin = Twin(2, 8, 1)
    sets = int(twin.emb.scalars[kernels.SETS])
    assert sets == 2
    same = [k for k in range(300) if index_set((0, k), sets) == 0][:14]
    twin.apply(("goal", 2))
    twin.migrate(2)
    for k in same[:12]:
        twin.lookup([(0, k)])
    twin.lookup([(0, same[0])])
    _, slots, victims = twin.lookup([(0, same[12])])
    assert victims == [(0, same[1])]
    assert slots == [9], "page 1 was filled first"
    # All twelve were touched in this batch: nothing to give.
    held = [k for k in same if (0, k) in twin.model.slot_of]
    _, slots, victims = twin.lookup([(0, k) for k in [*held, same[13]]])
    assert slots[-1] == -1
    assert victims == []
    twin.check()


def test_sieve_evicts_what_was_not_visited_since_the_hand_passed() -> None:
    """The example of the method's authors in small: survivors stay in order, newcomers come last."""
    twin = Twin(1, 8, 1, policy=kernels.SIEVE)
    twin.apply(("goal", 1))
    twin.migrate(1)
    for k in range(8):
        twin.lookup([(0, k)])
    twin.lookup([(0, 0), (0, 1), (0, 6)])
    assert twin.lookup([(0, 8)])[2] == [(0, 2)], "0 and 1 were visited and are passed"
    assert twin.lookup([(0, 9)])[2] == [(0, 3)]
    twin.lookup([(0, 0), (0, 9)])
    assert twin.lookup([(0, k) for k in (10, 11, 12)])[2] == [(0, 4), (0, 5), (0, 7)], "6 was visited"
    assert twin.lookup([(0, 13)])[2] == [(0, 8)]
    # 9 was visited and survives; then nothing but newcomers is ahead.
    assert twin.lookup([(0, k) for k in (14, 15, 16, 17)])[2] == [(0, 10), (0, 11), (0, 12), (0, 13)]
    twin.check()


def test_a_scan_passes_through_sieve_and_flushes_lru() -> None:
    kept = {}
    for policy in (kernels.LRU, kernels.SIEVE):
        twin = Twin(4, 8, 4, policy=policy)
        twin.apply(("goal", 4))
        twin.migrate(4)
        hot = [(0, k) for k in range(24)]
        for _ in range(4):
            twin.lookup(hot)
        for start in range(100, 140, 2):
            twin.lookup([(0, start), (0, start + 1)])
        kept[policy] = len(cached(twin) & set(range(24)))
    assert kept[kernels.SIEVE] == 24
    assert kept[kernels.LRU] < 4


def test_queues_full_of_pages_that_left_are_compacted() -> None:
    """Pages that come and go leave entries behind; the rows that stay keep their order."""
    twin = Twin(4, 8, 4, policy=kernels.SIEVE)
    number = 0
    compacted = 0
    for step in range(200):
        twin.apply(("goal", 4 if step % 2 else 2))
        twin.migrate(4)
        entries = twin.emb.scalars[kernels.COUNT : kernels.COUNT + 2].sum()
        twin.lookup([(0, number + k) for k in range(12)])
        compacted += twin.emb.scalars[kernels.COUNT : kernels.COUNT + 2].sum() < entries
        number += 9
        twin.check()
    assert compacted > 10


def test_a_cache_smaller_than_a_window_still_replaces() -> None:
    """Four slots, one window: the oldest goes, or a small partition would keep its first rows for ever."""
    twin = filled(1, 4, [[0], [1], [2], [3]])
    assert twin.lookup([(0, 4)])[2] == [(0, 0)]
    assert twin.lookup([(0, 1)])[0] == [True]
    assert twin.lookup([(0, 5)])[2] == [(0, 2)]
    assert cached(twin) == {1, 3, 4, 5}


def test_the_page_whose_rows_were_used_least_recently_goes_first() -> None:
    """Whatever the order in which pages came or where the hand stands."""
    twin = filled(6, 8, [[k] for k in range(100)])
    wanted = [2, 4, 0, 5, 3, 1]
    for i, page in enumerate(wanted):
        twin.lookup([key for key, slot in twin.model.slot_of.items() if slot // 8 == page])
        for _ in range(256 >> i):
            twin.lookup([])
    order: list[int] = []
    for goal in range(5, -1, -1):
        twin.apply(("goal", goal))
        before = set(twin.model.owned)
        twin.migrate(1)
        twin.check()
        order += before - set(twin.model.owned)
    assert order == wanted


def test_of_many_pages_the_coldest_of_each_sixteen_goes() -> None:
    """40 pages; of each 16 in the list one was not used again."""
    twin = Twin(40, 8, 40)
    twin.apply(("goal", 40))
    twin.migrate(40)
    for start in range(0, 640, 32):
        twin.lookup([(0, k) for k in range(start, start + 32)])
    cold = [twin.model.owned[at] for at in (3, 20)]
    for _ in range(100):
        twin.lookup([])
    for start in range(0, 640, 32):
        keys = [(0, k) for k in range(start, start + 32)]
        twin.lookup([key for key in keys if key in twin.model.slot_of and twin.model.slot_of[key] // 8 not in cold])
    twin.apply(("goal", 38))
    before = set(twin.model.owned)
    twin.migrate(2)
    assert before - set(twin.model.owned) == set(cold)
    for goal in (30, 12, 0):
        twin.apply(("goal", goal))
        twin.migrate(40)
        twin.check()


def test_an_empty_page_goes_before_one_with_rows() -> None:
    twin = filled(3, 4, [[0, 1]])
    assert len(twin.model.filling) == 3
    twin.apply(("goal", 1))
    twin.migrate(2)
    assert cached(twin) == {0, 1}
    twin.apply(("goal", 0))
    twin.migrate(1)
    assert cached(twin) == set()
    twin.check()
