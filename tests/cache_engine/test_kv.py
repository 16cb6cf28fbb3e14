"""The KV cache through its public face: prefixes, order of eviction, leases, epochs, refusals."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from cache_engine import HbmPool, KvCache, KvStats
from cache_engine.backends.cpu import kv as kernels
from cache_engine.kv import MOST_TOKENS
from tests.cache_engine.invariants import check
from tests.cache_engine.models import KvModel


def build(pages: int, payload: bool = False) -> tuple[HbmPool, KvCache]:
    """The KV cache alone with all pages of the pool, four tokens of 16 bytes each."""
    pool = HbmPool(pages, 64, ("kv",), min_pages=0, payload=payload)
    kv = KvCache(pool, token_bytes=16)
    pool.set_goals({"kv": pages}, 0)
    pool.migrate(pages)
    return pool, kv


def found(kv: KvCache, *users: int, tokens: int = 1000) -> list[int]:
    return [kv.lookup(user, tokens) for user in users]


def unchanged(kv: KvCache, before: list[np.ndarray]) -> bool:
    """Everything but the counters."""
    return all((a == b).all() for a, b in zip(before[:-1], kv.state[:-1], strict=True))


def copy_of(kv: KvCache) -> list[np.ndarray]:
    return [array.copy() for array in kv.state]


def test_a_lookup_returns_the_length_of_the_valid_prefix() -> None:
    pool, kv = build(8)
    assert kv.lookup(7, 10) == 0
    assert kv.extend(7, 10)
    assert kv.pages(7).size == 3
    assert [kv.lookup(7, tokens) for tokens in (0, 9, 10, 11, 500)] == [0, 9, 10, 10, 10]
    assert kv.extend(7, 12)
    assert kv.pages(7).size == 3, "the third page had room"
    assert kv.lookup(7, 500) == 12
    assert kv.stats() == KvStats(
        lookups=7, requested=1040, hits=51, misses=989, extended=3, evicted=0, refused=0, stale=0
    )
    assert kv.stats() == KvStats(0, 0, 0, 0, 0, 0, 0, 0)
    check(pool, kv=kv)


def test_pages_are_in_the_order_of_the_tokens_and_stay() -> None:
    pool, kv = build(8)
    kv.extend(1, 8)
    first = kv.pages(1).tolist()
    kv.extend(2, 4)
    kv.extend(1, 20)
    assert kv.pages(1).tolist()[:2] == first
    assert set(kv.pages(1).tolist()) & set(kv.pages(2).tolist()) == set()
    assert kv.pages(3).size == 0
    check(pool, kv=kv)


def test_the_least_recent_users_tail_goes_first() -> None:
    pool, kv = build(6)
    for user in (1, 2, 3):
        assert kv.extend(user, 8)
    kv.lookup(1, 8)
    head_of_2, head_of_3 = kv.pages(2)[0], kv.pages(3)[0]
    lengths = []
    for user in (4, 5, 6, 7):
        assert kv.extend(user, 4)
        lengths.append([kv.pages(u).size for u in (1, 2, 3, 4, 5, 6, 7)])
    assert lengths == [
        [2, 1, 2, 1, 0, 0, 0],
        [2, 0, 2, 1, 1, 0, 0],
        [2, 0, 1, 1, 1, 1, 0],
        [2, 0, 0, 1, 1, 1, 1],
    ]
    assert {int(kv.pages(u)[0]) for u in (5, 7)} == {head_of_2, head_of_3}, "heads went last, to those who came last"
    assert kv.stats().evicted == 4
    assert found(kv, 2, 3, 1) == [0, 0, 8]
    check(pool, kv=kv)


def test_an_extension_never_evicts_the_user_himself() -> None:
    pool, kv = build(4)
    kv.extend(1, 8)
    kv.extend(2, 8)
    assert kv.extend(1, 16)
    assert found(kv, 1, 2) == [16, 0]
    assert not kv.extend(1, 17)
    assert found(kv, 1) == [16]
    check(pool, kv=kv)


def test_released_twice_or_allocated_below_zero_changes_nothing() -> None:
    pool, kv = build(4)
    kv.extend(1, 8)
    one, two = kv.lease(1), kv.lease(1)
    assert one is not None
    assert two is not None
    before = copy_of(kv)
    one.release()
    one.release()
    assert not kv.extend(2, 16), "the other lease still holds"
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 1099511627776\], got -1"):
        kv.extend(1, -1)
    with pytest.raises(ValueError, match="tokens must be in"):
        kv.lookup(1, -1)
    two.release()
    before[kernels.KvState._fields.index("pins")][kernels.find(kv.state, 1)] = 0
    before[kernels.KvState._fields.index("scalars")][kernels.PINNED] = 0
    assert unchanged(kv, before)
    assert kv.drop(1)
    assert not kv.drop(1)
    assert kv.state.scalars[kernels.N_IDLE] == 4
    check(pool, kv=kv)


@pytest.mark.parametrize("completes_first", [True, False])
def test_pages_under_transfer_are_nobody_elses(completes_first: bool) -> None:
    """A transfer into A's pages, A aborted: B never gets them before it ends; afterwards nothing leaks."""
    pool, kv = build(4, payload=True)
    kv.extend(1, 12)
    pages = kv.pages(1)
    transfer = kv.lease(1)
    assert transfer is not None
    if completes_first:
        transfer.release()
        assert kv.drop(1)
    else:
        assert kv.drop(1)
        check(pool, kv=kv)
        assert kv.lookup(1, 12) == 0, "unreachable at once"
        assert not kv.extend(2, 8)
        assert kv.extend(2, 4)
        assert set(kv.pages(2).tolist()).isdisjoint(pages.tolist())
        for page in pages:
            pool.page(int(page))[:] = 255
        assert (pool.page(int(kv.pages(2)[0])) == 0).all()
        # A himself may come back before the transfer ends; he starts anew.
        assert kv.extend(1, 4)
        assert set(kv.pages(1).tolist()).isdisjoint(pages.tolist())
        check(pool, kv=kv)
        transfer.release()
        transfer.release()
        assert kv.lookup(1, 12) == 4
    check(pool, kv=kv)
    assert kv.extend(3, 16), "every page comes back"
    check(pool, kv=kv)


def test_fill_and_free_in_random_order() -> None:
    """One tier: counts exact, every page in one list."""
    rng = np.random.default_rng(0)
    pool, kv = build(32)
    for _ in range(20):
        users = rng.permutation(16)
        for user in users:
            kv.extend(int(user), 8)
        assert kv.state.scalars[kernels.USED] == 32
        for freed, user in enumerate(rng.permutation(16), start=1):
            assert kv.drop(int(user))
            assert kv.state.scalars[kernels.N_IDLE] == 2 * freed
            check(pool, kv=kv)


def test_an_allocation_that_does_not_fit_is_rolled_back() -> None:
    """5 pages free, another caller takes 3, allocate 5: refused, nothing changed."""
    pool, kv = build(5)
    assert kv.extend(1, 12)
    lease = kv.lease(1)
    before = copy_of(kv)
    assert not kv.extend(2, 20)
    assert unchanged(kv, before)
    assert kv.extend(2, 8)
    before = copy_of(kv)
    assert not kv.extend(2, 12)
    assert unchanged(kv, before)
    assert kv.stats().refused == 2
    assert lease is not None
    lease.release()
    assert kv.extend(2, 12)
    check(pool, kv=kv)


def test_what_lost_its_head_is_never_a_hit() -> None:
    """History p0 p1 p2: pages go from the tail, so p0 goes last; reused by another user it hits for him alone."""
    pool, kv = build(3)
    kv.extend(1, 12)
    p0, p1, p2 = kv.pages(1).tolist()
    for user, page, left in ((2, p2, 8), (3, p1, 4), (4, p0, 0)):
        # Of three pages the oldest user's tail goes; the others are touched first.
        for other in range(2, user):
            kv.lookup(other, 4)
        assert kv.extend(user, 4)
        assert kv.pages(user).tolist() == [page]
        assert kernels.find(kv.state, 1) == kernels.NONE or kv.pages(1).size == left // 4
    assert found(kv, 1) == [0]
    assert found(kv, 2, 3, 4) == [4, 4, 4]
    check(pool, kv=kv)


def test_a_lookup_whose_extension_fails_three_times_is_counted_once() -> None:
    _, kv = build(4)
    kv.extend(1, 12)
    lease = kv.lease(1)
    kv.stats()
    assert kv.lookup(2, 8) == 0
    assert [kv.extend(2, 8) for _ in range(3)] == [False] * 3
    assert lease is not None
    lease.release()
    assert kv.extend(2, 8)
    assert kv.stats() == KvStats(lookups=1, requested=8, hits=0, misses=8, extended=2, evicted=1, refused=3, stale=0)


def test_a_history_that_shrinks_evicts_nobody() -> None:
    """From 128 to 16 tokens."""
    pool, kv = build(40)
    kv.extend(1, 128)
    kv.extend(2, 32)
    kv.stats()
    assert kv.lookup(1, 16) == 16
    assert kv.extend(1, 16)
    assert kv.stats().evicted == 0
    assert found(kv, 2, 1) == [32, 128]
    check(pool, kv=kv)


def test_where_all_users_are_leased_an_extension_is_refused() -> None:
    pool, kv = build(4)
    for user in (1, 2):
        kv.extend(user, 8)
    leases = [kv.lease(1), kv.lease(2)]
    for user in (1, 2, 3):
        assert not kv.extend(user, 9)
    assert found(kv, 1, 2, 3) == [8, 8, 0]
    assert kv.stats().evicted == 0
    check(pool, kv=kv)
    for lease in leases:
        assert lease is not None
        lease.release()


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    pool, kv = build(4)
    kv.extend(1, 8)
    for tokens in (17, 2**39, 2**40):
        assert not kv.extend(2, tokens)
    assert found(kv, 1, 2) == [8, 0]
    assert kv.extend(2, 8)
    assert found(kv, 1, 2) == [8, 8]
    assert kv.stats().evicted == 0
    check(pool, kv=kv)


def test_another_epoch_starts_anew() -> None:
    pool, kv = build(8)
    kv.extend(1, 12, epoch=5)
    assert kv.lookup(1, 12, epoch=5) == 12
    assert kv.lookup(1, 12, epoch=6) == 0
    assert kv.lookup(1, 12, epoch=5) == 0, "the old one is gone"
    kv.extend(1, 12, epoch=6)
    assert kv.extend(1, 4, epoch=-(2**63))
    assert kv.lookup(1, 12, epoch=-(2**63)) == 4
    assert kv.stats().stale == 2
    check(pool, kv=kv)


def test_an_epoch_that_ends_under_a_lease_gives_its_pages_back_with_it() -> None:
    pool, kv = build(4)
    kv.extend(1, 8, epoch=1)
    lease = kv.lease(1)
    assert lease is not None
    old = kv.pages(1).tolist()
    assert kv.lookup(1, 8, epoch=2) == 0
    assert not kv.extend(1, 12, epoch=2)
    assert kv.extend(1, 8, epoch=2)
    assert set(kv.pages(1).tolist()).isdisjoint(old)
    check(pool, kv=kv)
    lease.release()
    assert kv.extend(1, 16, epoch=2)
    assert kv.lookup(1, 16, epoch=2) == 16
    check(pool, kv=kv)


def test_a_lease_holds_pages_that_come_later() -> None:
    pool, kv = build(6)
    kv.extend(1, 4)
    with kv.lease(1) or pytest.fail("he has a page") as lease:
        assert lease.user == 1
        kv.extend(1, 16)
        assert not kv.extend(2, 12)
        pool.set_goals({"kv": 0}, 1)
        assert pool.migrate(8).freed == 2
        assert found(kv, 1) == [16]
        check(pool, kv=kv)
    assert pool.migrate(8).freed == 4
    assert found(kv, 1) == [0]
    assert kv.lease(1) is None
    check(pool, kv=kv)


def test_a_lease_is_neither_copied_nor_pickled() -> None:
    _, kv = build(2)
    kv.extend(1, 4)
    with kv.lease(1) or pytest.fail("he has a page") as lease:
        for copier in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copier(lease)


def test_users_are_any_int64_and_nothing_wider() -> None:
    pool, kv = build(8)
    users = [0, -1, -2, 2**63 - 1, -(2**63)]
    assert found(kv, *users) == [0] * 5
    for user in users:
        assert kv.extend(user, 4)
    assert found(kv, *users) == [4] * 5
    assert found(kv, np.int32(-1), np.uint64(0), np.int64(-2)) == [4] * 3  # type: ignore[arg-type]
    for user in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="user must fit int64"):
            kv.lookup(user, 1)
    with pytest.raises(ValueError, match="epoch must fit int64"):
        kv.extend(0, 4, epoch=2**64)
    for operation in (kv.pages, kv.lease, kv.drop):
        with pytest.raises(TypeError, match=r"user must be an integer, got 1\.0"):
            operation(1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tokens must be an integer, got 4\.0"):
        kv.extend(0, 4.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tokens must be an integer, got nan"):
        kv.lookup(0, float("nan"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"user must be an integer, got array\(\[1, 2\]\)"):
        kv.lookup(np.array([1, 2]), 4)  # type: ignore[arg-type]
    assert len(kernels.lookup_packed.signatures) == 1  # type: ignore[attr-defined]
    check(pool, kv=kv)


@pytest.mark.parametrize("token_bytes", [0, 65])
def test_a_token_wider_than_a_page_is_refused(token_bytes: int) -> None:
    pool = HbmPool(4, 64, payload=False)
    with pytest.raises(ValueError, match=r"token_bytes must be in \[1, 64\]"):
        KvCache(pool, token_bytes=token_bytes)
    with pytest.raises(TypeError, match=r"token_bytes must be an integer, got 16\.0"):
        KvCache(pool, token_bytes=16.0)  # type: ignore[arg-type]
    KvCache(pool, token_bytes=64)


def test_tokens_of_none() -> None:
    pool, kv = build(2)
    assert kv.extend(1, 0)
    assert kv.lease(1) is None
    assert (kv.lookup(1, 0), kv.stats().requested) == (0, 0)
    check(pool, kv=kv)


def test_long_random_use_is_that_of_the_model() -> None:
    """Prefixes, evictions and refusals over 6,000 operations in a table of users that fills and empties."""
    rng = np.random.default_rng(5)
    pool, kv = build(24)
    model = KvModel(kv.page_tokens, owned=24, goal=24)
    leases = []
    for i in range(6000):
        user, tokens, epoch = int(rng.integers(0, 25)), int(rng.integers(0, 40)), int(rng.integers(0, 5) == 0)
        what = rng.integers(0, 20)
        if what < 7:
            assert kv.lookup(user, tokens, epoch) == model.lookup(user, tokens, epoch)
        elif what < 15:
            assert kv.extend(user, tokens, epoch) == model.extend(user, tokens, epoch)
        elif what < 16:
            assert kv.drop(user) == model.drop(user)
        elif what < 17:
            lease, history = kv.lease(user), model.lease(user)
            assert (lease is None) == (history is None)
            if lease is not None and history is not None:
                leases.append((lease, history))
        elif what < 19 and leases:
            lease, history = leases.pop(int(rng.integers(0, len(leases))))
            lease.release()
            model.release(history)
        elif i % 3 == 0:
            goal = int(rng.integers(0, 25))
            pool.set_goals({"kv": goal}, i + 1)
            model.goal = goal
            freed = model.shrink(5)
            model.owned += (granted := min(5, max(0, goal - model.owned)))
            migration = pool.migrate(5)
            assert (migration.freed, migration.granted) == (freed, granted)
        if i % 10 == 0:
            check(pool, kv=kv)
        assert kv.state.scalars[kernels.USED] == model.used
    stats = kv.stats()
    assert (stats.extended, stats.evicted) == (model.extended, model.evicted)
    assert (stats.refused, stats.stale) == (model.refused, model.stale)
    assert min(stats.evicted, stats.refused, stats.stale) > 50


def test_the_longest_histories_overflow_nothing() -> None:
    """A page of one token, somebody else pinned: what is asked is compared with what is left, not added up."""
    pool = HbmPool(4, 64, ("kv",), payload=False)
    kv = KvCache(pool, token_bytes=64, ghost=True)
    pool.set_goals({"kv": 4}, 1)
    pool.migrate(4)
    assert kv.extend(1, 1)
    with kv.lease(1):  # type: ignore[union-attr]
        assert not kv.extend(2, MOST_TOKENS)
    assert kv.lookup(2, MOST_TOKENS) == 0
    for user in range(50):
        kv.lookup(user % 7, 500)
    assert kv.stats().requested == MOST_TOKENS + 50 * 500
    assert kv.ghost is not None
    assert 0 <= kv.ghost.gain(0).hits_per_request <= 1
    check(pool, kv=kv)
