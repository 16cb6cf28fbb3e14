"""The pool: ownership, targets and the moving of pages."""

from __future__ import annotations

import threading
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool, KvCache, Migration, PoolClosedError, PoolStats, TargetStatus
from cache_engine.lease import Lease
from tests.cache_engine.invariants import check

APPLIED, DEFERRED, HELD, STALE = TargetStatus.APPLIED, TargetStatus.DEFERRED, TargetStatus.HELD, TargetStatus.STALE
PAGE = 64  # bytes: four rows of 16, or four tokens of 16


def build(
    pages: int = 8, min_pages: int = 1, max_pages: int | None = None, drain_limit_s: float = 10.0
) -> tuple[HbmPool, EmbeddingCache, KvCache]:
    pool = HbmPool(pages, PAGE, min_pages=min_pages, payload=False, drain_limit_s=drain_limit_s)
    return pool, EmbeddingCache(pool, row_bytes=16, max_pages=max_pages), KvCache(pool, token_bytes=16)


def ids(*pages: int) -> np.ndarray:
    return np.array([4 * page + row for page in pages for row in range(4)], np.int64)


def test_a_new_pool_is_free_and_moves_nothing_before_a_target() -> None:
    pool, emb, kv = build()
    assert (pool.free, pool.owned("emb"), pool.owned("kv"), pool.alpha, pool.backlog) == (8, 0, 0, 0.0, 0)
    assert pool.migrate(100) == Migration(freed=0, granted=0, backlog=0, pinned=0, aborted=0)
    check(pool, emb, kv)


def test_a_target_is_reached_within_the_budget_of_each_call() -> None:
    pool, emb, kv = build()
    assert pool.set_target(0.75, 1) is DEFERRED
    assert (pool.free, pool.backlog) == (8, 8)
    assert pool.migrate(0) == Migration(0, 0, 8, 0, 0)
    assert pool.migrate(5) == Migration(freed=0, granted=5, backlog=3, pinned=0, aborted=0)
    assert pool.migrate(5) == Migration(freed=0, granted=3, backlog=0, pinned=0, aborted=0)
    assert (pool.owned("emb"), pool.owned("kv"), pool.alpha) == (6, 2, 0.75)
    assert pool.set_target(0.75, 2) is APPLIED
    assert pool.set_target(0.25, 3) is DEFERRED
    assert pool.migrate(3) == Migration(freed=3, granted=3, backlog=1, pinned=0, aborted=0)
    assert pool.migrate(3) == Migration(freed=1, granted=1, backlog=0, pinned=0, aborted=0)
    assert (pool.owned("emb"), pool.owned("kv")) == (2, 6)
    check(pool, emb, kv)


def test_generations_count_changes_of_owner() -> None:
    pool, _, _ = build(pages=2)
    pool.set_goals({"emb": 1, "kv": 1}, 1)
    pool.migrate(2)
    assert pool.state.generation.tolist() == [1, 1]
    pool2, _, _ = build(pages=3)
    pool2.set_goals({"emb": 2, "kv": 1}, 1)
    pool2.migrate(3)
    pool2.set_goals({"emb": 1, "kv": 2}, 2)
    pool2.migrate(3)
    assert sorted(pool2.state.generation.tolist()) == [1, 1, 3]


@pytest.mark.parametrize(
    ("alpha", "emb"), [(0.0, 2), (-3.0, 2), (0.1, 2), (0.5, 5), (0.449, 4), (0.95, 8), (1.0, 8), (7.0, 8)]
)
def test_alpha_is_rounded_and_kept_within_the_floors(alpha: float, emb: int) -> None:
    pool, _, _ = build(pages=10, min_pages=2)
    pool.set_target(alpha, 1)
    pool.migrate(10)
    assert (pool.owned("emb"), pool.owned("kv")) == (emb, 10 - emb)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), float("-inf")])
def test_an_alpha_that_is_no_number_is_stale_and_leaves_the_goal(alpha: float) -> None:
    pool, _, _ = build()
    pool.set_target(0.5, 1)
    assert pool.set_target(alpha, 2) is STALE
    assert pool.state.goal.tolist() == [4, 4]
    # Its revision was not recorded either.
    assert pool.set_target(0.25, 2) is DEFERRED
    assert pool.state.goal.tolist() == [2, 6]


def test_revisions_order_targets() -> None:
    pool, _, _ = build()
    assert pool.set_target(0.5, 5) is DEFERRED
    assert pool.set_target(0.25, 4) is STALE
    assert pool.set_target(0.25, 5) is DEFERRED, "the same revision is the same target"
    assert pool.state.goal.tolist() == [4, 4]
    pool.migrate(8)
    assert pool.set_target(0.25, 5) is APPLIED
    assert pool.set_target(0.25, 6) is DEFERRED
    assert pool.state.goal.tolist() == [2, 6]
    assert pool.set_target(0.5, -1) is STALE
    assert pool.set_target(0.5, 2**70) is APPLIED, "it has that already"


def test_targets_within_the_hysteresis_move_nothing_and_small_steps_add_up() -> None:
    pool = HbmPool(100, PAGE, payload=False, hysteresis_pages=5)
    EmbeddingCache(pool, row_bytes=16)
    KvCache(pool, token_bytes=16)
    assert pool.set_target(0.02, 0) is DEFERRED, "the first target counts, however near to nothing"
    pool.set_target(0.5, 1)
    pool.migrate(100)
    for revision, alpha in enumerate((0.54, 0.46, 0.52), start=2):
        assert pool.set_target(alpha, revision) is HELD
        assert pool.migrate(100) == Migration(0, 0, 0, 0, 0)
    assert pool.set_target(0.5, 5) is APPLIED, "no difference at all"
    assert pool.set_target(0.4, 4) is STALE, "revisions of targets that were held count"
    assert pool.set_target(0.55, 6) is DEFERRED
    assert pool.migrate(3).granted == 3
    assert pool.set_target(0.51, 7) is HELD, "compared with the recorded target, not with where the pages are"
    assert pool.migrate(100).granted == 2
    assert pool.set_goals({"emb": 54, "kv": 30}, 8) is DEFERRED, "one member's difference is enough"
    assert pool.state.goal.tolist() == [54, 30]


def test_the_pool_counts_targets_by_outcome_and_pages() -> None:
    pool, emb, _ = build(pages=8, min_pages=0)
    assert pool.stats() == PoolStats(applied=0, deferred=0, held=0, stale=0, granted=0, taken=0, aborted=0)
    pool.set_target(0.5, 1)
    pool.migrate(8)
    pool.set_target(0.5, 2)
    pool.set_target(0.5, 1)
    pool.set_target(float("nan"), 3)
    assert pool.stats() == PoolStats(applied=1, deferred=1, held=0, stale=2, granted=8, taken=0, aborted=0)
    lease = emb.lease(emb.lookup(ids(0, 1, 2, 3)).slots)
    pool.set_goals({"emb": 3, "kv": 2}, 4)
    pool.migrate(8)
    pool.set_goals({"emb": 4, "kv": 2}, 5)
    pool.migrate(8)
    assert pool.stats() == PoolStats(applied=0, deferred=2, held=0, stale=0, granted=0, taken=2, aborted=1)
    with pytest.raises(ValueError, match="together"):
        pool.set_goals({"emb": 8, "kv": 8}, 6)
    assert pool.stats() == PoolStats(applied=0, deferred=0, held=0, stale=0, granted=0, taken=0, aborted=0)
    lease.release()


def test_a_target_below_pinned_pages_is_deferred_and_completes_by_itself() -> None:
    """8 pages, 6 pinned, target 4: no exception, lookups served, no new pages; unpinned: applied; 8: grows again."""
    pool, emb, kv = build(pages=8, min_pages=0)
    pool.set_goals({"emb": 8, "kv": 0}, 1)
    pool.migrate(8)
    leases = [emb.lease(emb.lookup(ids(page)).slots) for page in range(6)]
    emb.lookup(ids(6, 7))
    assert (pool.state.pins == 1).sum() == 6

    assert pool.set_goals({"emb": 4, "kv": 0}, 2) is DEFERRED
    for _ in range(10):
        migration = pool.migrate(8)
        check(pool, emb, kv)
        assert emb.lookup(ids(0, 1, 2, 3, 4, 5)).hit.all()
        assert not emb.lookup(ids(20)).hit.any()
        assert migration.granted == 0
    assert pool.owned("emb") == 6
    assert pool.backlog == 2
    assert migration.pinned == 2, "as many drain as are over the goal"
    assert pool.set_goals({"emb": 4, "kv": 0}, 2) is DEFERRED

    for lease in leases:
        lease.release()
    assert pool.migrate(8) == Migration(freed=2, granted=0, backlog=0, pinned=0, aborted=0)
    assert pool.owned("emb") == 4
    assert pool.set_goals({"emb": 4, "kv": 0}, 2) is APPLIED
    before = pool.state.generation.copy()
    assert pool.migrate(8) == Migration(0, 0, 0, 0, 0)
    assert (pool.state.generation == before).all(), "the same target twice: nothing happens"

    assert pool.set_goals({"emb": 8, "kv": 0}, 3) is DEFERRED
    assert pool.migrate(8).granted == 4
    assert pool.owned("emb") == 8
    emb.lookup(ids(10, 11, 12, 13, 14, 15, 16, 17))
    check(pool, emb, kv)


def test_a_target_below_pinned_kv_pages_is_deferred() -> None:
    pool, emb, kv = build(pages=8, min_pages=0)
    pool.set_goals({"emb": 0, "kv": 8}, 1)
    pool.migrate(8)
    assert kv.extend(1, 24)
    assert kv.extend(2, 8)
    leases = [kv.lease(1)]
    assert pool.set_goals({"emb": 0, "kv": 4}, 2) is DEFERRED
    assert pool.migrate(8) == Migration(freed=2, granted=0, backlog=2, pinned=0, aborted=0)
    assert (kv.lookup(1, 24), kv.lookup(2, 8)) == (24, 0)
    assert not kv.extend(2, 4), "no new pages over the goal"
    assert not kv.extend(1, 25)
    check(pool, emb, kv)
    for lease in leases:
        assert lease is not None
        lease.release()
    assert pool.migrate(8).freed == 2
    assert kv.lookup(1, 24) == 16, "the tail goes first"
    assert pool.set_goals({"emb": 0, "kv": 4}, 3) is APPLIED
    pool.set_goals({"emb": 0, "kv": 8}, 4)
    assert pool.migrate(8).granted == 4
    assert kv.extend(2, 16)
    check(pool, emb, kv)


def drained(goal: int, drain_limit_s: float = 10.0) -> tuple[HbmPool, EmbeddingCache, Lease]:
    """Four pages of rows, all leased, draining towards `goal` since 100 ns."""
    pool, emb, _ = build(pages=4, min_pages=0, drain_limit_s=drain_limit_s)
    pool.set_goals({"emb": 4, "kv": 0}, 1)
    pool.migrate(4)
    lease = emb.lease(emb.lookup(ids(0, 1, 2, 3)).slots)
    pool.set_goals({"emb": goal, "kv": 0}, 2)
    for _ in range(4):
        pool.migrate(4, now_ns=100)
    return pool, emb, lease


def test_pages_drain_one_more_per_call_and_take_no_new_rows() -> None:
    pool, emb, lease = drained(1)
    assert pool.state.n_draining[0] == 3
    lease.release()
    draining = np.flatnonzero(pool.state.draining)
    before = pool.state.owner.copy(), emb.state.row["key"].copy()
    served = emb.lookup(ids(7, 8, 9, 10))
    taken = set((served.slots[served.slots >= 0] // 4).tolist())
    assert taken.isdisjoint(draining)
    assert len(taken) == 1
    assert (before[1].reshape(4, 4)[draining] == emb.state.row["key"].reshape(4, 4)[draining]).all()
    check(pool, emb)


def test_a_raised_goal_takes_back_only_the_pages_it_needs() -> None:
    """Three of four pages drain; a goal of two needs one of them."""
    pool, emb, lease = drained(1)
    pool.set_goals({"emb": 2, "kv": 0}, 3)
    assert pool.migrate(4, now_ns=200) == Migration(freed=0, granted=0, backlog=2, pinned=2, aborted=1)
    assert pool.migrate(4, now_ns=300) == Migration(freed=0, granted=0, backlog=2, pinned=2, aborted=0)
    lease.release()
    assert pool.migrate(4, now_ns=400) == Migration(freed=2, granted=0, backlog=0, pinned=0, aborted=0)
    check(pool, emb)


def test_a_goal_raised_to_all_pages_takes_every_draining_page_back() -> None:
    pool, emb, lease = drained(1)
    assert pool.set_goals({"emb": 4, "kv": 0}, 3) is DEFERRED, "pages still drain"
    assert pool.migrate(4, now_ns=200) == Migration(freed=0, granted=0, backlog=0, pinned=0, aborted=3)
    assert pool.set_goals({"emb": 4, "kv": 0}, 3) is APPLIED
    lease.release()
    assert emb.lookup(ids(0, 1, 2, 3)).hit.all()
    check(pool, emb)


def test_a_page_that_drains_too_long_goes_back_and_another_takes_its_turn() -> None:
    pool, emb, lease = drained(3, drain_limit_s=1e-6)
    assert pool.state.n_draining[0] == 1
    lease.release()
    held = int(np.flatnonzero(pool.state.draining)[0])
    first = emb.lease(np.array([4 * held]))
    assert pool.migrate(4, now_ns=1100) == Migration(freed=0, granted=0, backlog=1, pinned=1, aborted=0)
    assert pool.migrate(4, now_ns=1101) == Migration(freed=1, granted=0, backlog=0, pinned=0, aborted=1)
    assert pool.state.owner[held] == 0
    first.release()
    check(pool, emb)


def test_a_page_with_empty_slots_that_comes_back_is_filled_again() -> None:
    pool, emb, _ = build(pages=2, min_pages=0)
    pool.set_goals({"emb": 1, "kv": 0}, 1)
    pool.migrate(1)
    lease = emb.lease(emb.lookup(np.array([1, 2])).slots)
    pool.set_goals({"emb": 0, "kv": 0}, 2)
    pool.migrate(1)
    assert emb.lookup(np.array([3])).slots.tolist() == [-1]
    pool.set_goals({"emb": 1, "kv": 0}, 3)
    assert pool.migrate(1).aborted == 1
    assert emb.lookup(np.array([1, 2, 3, 4, 5])).slots.tolist() == [0, 1, 2, 3, -1]
    lease.release()
    check(pool, emb)


def test_a_partition_of_no_pages() -> None:
    """Lookups go past the cache; nothing divides by zero."""
    pool, emb, kv = build(min_pages=0)
    assert emb.lookup(ids(0)).slots.tolist() == [-1] * 4, "before the first page"
    pool.set_target(0.0, 1)
    pool.migrate(8)
    assert pool.owned("emb") == 0
    served = emb.lookup(np.array([1, 1, 2]))
    assert (served.hit.tolist(), served.slots.tolist(), served.fetched) == ([False] * 3, [-1] * 3, 2)
    assert emb.stats().bypassed == 7
    check(pool, emb, kv)

    assert kv.extend(1, 8)
    pool.set_target(1.0, 2)
    pool.migrate(8)
    assert pool.owned("kv") == 0
    assert kv.lookup(1, 8) == 0
    assert not kv.extend(1, 1)
    assert emb.lookup(ids(0)).slots.min() >= 0
    check(pool, emb, kv)


def test_a_goal_beyond_what_a_member_can_own_never_leaves_the_pool_stuck() -> None:
    pool, emb, kv = build(pages=8, max_pages=3)
    assert pool.set_target(0.9, 1) is DEFERRED
    assert pool.state.goal.tolist() == [3, 5], "the rest is the other's"
    pool.migrate(8)
    assert pool.set_target(0.9, 2) is APPLIED
    with pytest.raises(ValueError, match=r"goal of 'emb' must be in \[1, 3\] pages, got 4"):
        pool.set_goals({"emb": 4, "kv": 4}, 3)
    assert pool.state.goal.tolist() == [3, 5]
    assert pool.set_goals({"emb": 2, "kv": 4}, 3) is DEFERRED, "a refused one leaves no revision"
    pool.migrate(8)
    assert pool.free == 2
    check(pool, emb, kv)


def test_a_member_that_comes_after_a_larger_goal_is_refused() -> None:
    pool = HbmPool(8, PAGE, payload=False)
    pool.set_target(0.5, 1)
    with pytest.raises(ValueError, match="'emb' can own at most 3 pages, but min_pages or the goal asks for 4"):
        EmbeddingCache(pool, row_bytes=16, max_pages=3)
    EmbeddingCache(pool, row_bytes=16, max_pages=4)
    pool.migrate(8)
    assert (pool.owned("emb"), pool.owned("kv"), pool.free) == (4, 0, 4), "pages of a member that is not there are FREE"


def test_three_members_share_a_pool() -> None:
    pool = HbmPool(9, PAGE, ("a", "b", "c"), payload=False)
    caches = [EmbeddingCache(pool, row_bytes=16, name=name) for name in ("a", "b", "c")]
    with pytest.raises(ValueError, match="use set_goals"):
        pool.set_target(0.5, 1)
    pool.set_goals({"c": 5, "a": 1, "b": 2}, 1)
    pool.migrate(9)
    assert [pool.owned(name) for name in "abc"] == [1, 2, 5]
    for cache in caches:
        cache.lookup(ids(0, 1, 2, 3))
    pool.set_goals({"a": 5, "b": 2, "c": 2}, 2)
    assert pool.migrate(9) == Migration(freed=3, granted=4, backlog=0, pinned=0, aborted=0)
    for cache in caches:
        check(pool, cache)


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        ({"emb": 4}, "must name emb, kv"),
        ({"emb": 4, "kv": 4, "x": 0}, "must name emb, kv"),
        ({"emb": 0, "kv": 8}, r"'emb' must be in \[1, 8\]"),
        ({"emb": 9, "kv": 1}, r"'emb' must be in \[1, 8\]"),
        ({"emb": 5, "kv": 4}, "at most 8 pages together, got 9"),
    ],
)
def test_goals_that_no_pool_can_meet_are_refused(goals: dict[str, int], message: str) -> None:
    pool, _, _ = build()
    pool.set_target(0.5, 1)
    with pytest.raises(ValueError, match=message):
        pool.set_goals(goals, 2)
    assert pool.state.goal.tolist() == [4, 4]


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    pool, _, _ = build()
    with pytest.raises(TypeError, match=r"the goal of 'emb' must be an integer, got 3\.5"):
        pool.set_goals({"emb": 3.5, "kv": 2}, 1)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="revision must be an integer, got nan"):
        pool.set_target(0.5, float("nan"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="alpha must be a number, got None"):
        pool.set_target(None, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget must be at least 0 pages, got -1"):
        pool.migrate(-1)
    with pytest.raises(TypeError, match=r"budget must be an integer, got 1\.5"):
        pool.migrate(1.5)  # type: ignore[arg-type]
    for now_ns in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="now_ns must fit int64"):
            pool.migrate(1, now_ns=now_ns)
    with pytest.raises(TypeError, match="now_ns must be an integer, got nan"):
        pool.migrate(1, now_ns=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"page must be an integer, got 1\.0"):
        pool.page(1.0)  # type: ignore[arg-type]
    assert pool.set_target(10**400, 1) is STALE
    assert pool.state.goal.tolist() == [0, 0]
    assert pool.free == 8
    assert pool.set_target(np.float32(0.5), np.int32(1)) is DEFERRED  # type: ignore[arg-type]
    assert pool.migrate(10**30, now_ns=5).granted == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pages": 1}, "at least 1 for each of the 2 members"),
        ({"pages": 5, "min_pages": 3}, "at least 3 for each"),
        ({"pages": 8, "min_pages": -1}, "min_pages"),
        ({"pages": 8, "page_bytes": 100}, "multiple of 64"),
        ({"pages": 8, "page_bytes": 0}, "multiple of 64"),
        ({"pages": 2**31}, r"below 2\*\*31"),
        ({"pages": 8, "members": ("a", "a")}, "distinct"),
        ({"pages": 8, "members": ()}, "distinct"),
        ({"pages": 8, "drain_limit_s": float("nan")}, "drain_limit_s"),
        ({"pages": 8, "drain_limit_s": -1.0}, "drain_limit_s"),
        ({"pages": 8, "hysteresis_pages": -1}, r"hysteresis_pages must be in \[0, 8\], got -1"),
        ({"pages": 8, "hysteresis_pages": 9}, r"hysteresis_pages must be in \[0, 8\], got 9"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HbmPool(**{"page_bytes": PAGE, "payload": False, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pages": 8.0}, r"pages must be an integer, got 8\.0"),
        ({"pages": 8, "page_bytes": 64.0}, r"page_bytes must be an integer, got 64\.0"),
        ({"pages": 8, "min_pages": 1.5}, r"min_pages must be an integer, got 1\.5"),
        ({"pages": 8, "hysteresis_pages": None}, "hysteresis_pages must be an integer, got None"),
        ({"pages": 8, "members": "kv"}, "members must be a sequence of names, got 'kv'"),
        ({"pages": 8, "members": ("emb", 2)}, r"members must be a sequence of names, got \('emb', 2\)"),
    ],
)
def test_a_pool_of_the_wrong_kind_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        HbmPool(**{"page_bytes": PAGE, "payload": False, **arguments})  # type: ignore[arg-type]


def test_a_cache_of_a_closed_pool_is_refused() -> None:
    pool = HbmPool(8, PAGE, payload=False)
    pool.close()
    with pytest.raises(PoolClosedError):
        KvCache(pool, token_bytes=16)
    with pytest.raises(PoolClosedError):
        EmbeddingCache(pool, row_bytes=16)


def test_a_member_attaches_once_and_by_its_name() -> None:
    pool, _, _ = build()
    with pytest.raises(ValueError, match="'emb' is attached already"):
        EmbeddingCache(pool, row_bytes=16)
    with pytest.raises(ValueError, match="no member 'x'; it has emb, kv"):
        EmbeddingCache(pool, row_bytes=16, name="x")
    with pytest.raises(ValueError, match="no member 'x'"):
        pool.owned("x")


def test_pages_are_views_of_one_allocation() -> None:
    pool = HbmPool(4, PAGE)
    for page in range(4):
        pool.page(page)[:] = page + 1
    assert pool.storage is not None
    assert pool.storage.tolist() == [page + 1 for page in range(4) for _ in range(PAGE)]
    assert pool.page(np.int32(3))[0] == 4  # type: ignore[arg-type]
    for page in (-1, 4):
        with pytest.raises(ValueError, match=r"page must be in \[0, 4\)"):
            pool.page(page)
    with pytest.raises(ValueError, match="payload=False"):
        HbmPool(4, PAGE, payload=False).page(0)


def test_after_close_operations_raise_and_leases_end() -> None:
    pool, emb, kv = build()
    pool.set_target(0.5, 1)
    pool.migrate(8)
    kv.extend(1, 4)
    user, rows = kv.lease(1), emb.lease(emb.lookup(ids(0)).slots)
    assert user is not None
    pool.close()
    pool.close()
    for operation in (
        lambda: pool.set_target(0.25, 2),
        lambda: pool.set_target(float("nan"), 2),
        lambda: pool.set_goals({"emb": 4, "kv": 4}, 2),
        lambda: pool.migrate(1),
        lambda: pool.page(0),
        lambda: pool.read_page(0, np.zeros(PAGE, np.uint8)),
        lambda: pool.write_page(0, np.zeros(PAGE, np.uint8)),
        lambda: emb.lookup(ids(0)),
        lambda: emb.invalidate(ids(0)),
        lambda: emb.lease(np.array([0])),
        lambda: kv.lookup(1, 4),
        lambda: kv.extend(1, 4),
        lambda: kv.pages(1),
        lambda: kv.lease(1),
        lambda: kv.drop(1),
    ):
        with pytest.raises(PoolClosedError):
            operation()
    user.release()
    rows.release()
    assert pool.storage is None
    assert (pool.alpha, pool.owned("kv"), emb.stats().requested, kv.stats().extended) == (0.5, 4, 4, 1)


def test_metadata_is_counted() -> None:
    pool, emb, kv = build()
    for thing in (pool, emb, kv):
        arrays = {array.ctypes.data: array.nbytes for array in thing.state if array.size}  # some are views of one
        assert thing.metadata_bytes() == sum(arrays.values())
        assert thing.metadata_bytes() > 0


def test_threads_that_look_up_and_move_pages_leave_a_consistent_pool() -> None:
    """Counters add up over two threads of lookups while a third moves pages."""
    table = np.arange(4000, dtype=np.int32).reshape(1000, 4)
    pool = HbmPool(16, PAGE)
    emb = EmbeddingCache(pool, row_bytes=16, tables=[table])
    kv = KvCache(pool, token_bytes=16)
    pool.set_target(0.5, 0)
    pool.migrate(16)
    errors: list[BaseException] = []

    def look(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(150):
                keys = rng.integers(0, 1000, 20)
                rows = emb.lookup(keys).rows
                assert rows is not None
                assert (rows.view(np.int32) == table[keys]).all()
                user = int(rng.integers(0, 5))
                kv.lookup(user, 10)
                kv.extend(user, int(rng.integers(1, 20)))
                lease = kv.lease(user)
                if lease is not None:
                    lease.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    revision = 1
    while any(thread.is_alive() for thread in threads):
        pool.set_target(revision % 10 / 10, revision)
        pool.migrate(2)
        revision += 1
    for thread in threads:
        thread.join()
    assert errors == []
    stats = emb.stats()
    assert stats.requested == 2 * 150 * 20 == stats.hits + stats.misses
    assert kv.stats().lookups == 2 * 150
    check(pool, emb, kv)


def test_one_lock_makes_a_lookup_and_a_lease_one_operation() -> None:
    """While a thread holds the pool's lock, no other gets between its lookup and its lease."""
    pool, emb, _ = build()
    pool.set_target(0.5, 1)
    pool.migrate(8)
    done = threading.Event()

    def look() -> None:
        emb.lookup(ids(1))
        done.set()

    other = threading.Thread(target=look)
    with pool.lock:
        served = emb.lookup(ids(0))
        other.start()
        assert not done.wait(0.05)
        lease = emb.lease(served.slots)
    other.join(10)
    assert done.is_set()
    lease.release()
    assert astuple(emb.stats())[:3] == (8, 0, 8)


def test_pages_are_copied_to_the_host_and_back() -> None:
    pool = HbmPool(3, 128, ("emb",))
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (3, 128), np.uint8)
    for page in range(3):
        pool.write_page(page, data[page])
    host = pool.host_memory(3 * 128).reshape(3, 128)
    for page in (2, 0, 1):
        pool.read_page(page, host[page])
    assert (host == data).all()
    assert (pool.page(1) == data[1]).all()


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.zeros(127, np.uint8), ValueError, r"must be C-contiguous uint8 \[128\], got uint8 \[127\]"),
        (np.zeros(128, np.int8), ValueError, r"got int8 \[128\]"),
        (np.zeros(256, np.uint8)[::2], ValueError, "must be C-contiguous"),
        (np.zeros((1, 128), np.uint8), ValueError, r"got uint8 \[1, 128\]"),
        (bytes(128), TypeError, "must be a NumPy array, got bytes"),
    ],
)
def test_a_copy_of_a_page_needs_memory_of_its_size(array: Any, error: type[Exception], message: str) -> None:
    pool = HbmPool(3, 128, ("emb",))
    with pytest.raises(error, match=message):
        pool.read_page(0, array)
    with pytest.raises(error, match=message):
        pool.write_page(0, array)


def test_a_copy_of_no_page_or_into_locked_memory_is_refused() -> None:
    pool = HbmPool(3, 128, ("emb",))
    locked = np.zeros(128, np.uint8)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writeable"):
        pool.read_page(0, locked)
    pool.write_page(0, locked)
    for page in (-1, 3):
        with pytest.raises(ValueError, match=r"page must be in \[0, 3\)"):
            pool.write_page(page, locked)
