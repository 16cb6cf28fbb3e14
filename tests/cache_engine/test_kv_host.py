"""The KV cache's host tier: what leaves the pool, what comes back, and that no wrong byte or hole ever does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from cache_engine import HbmPool, KvCache, KvStats, PoolClosedError
from cache_engine.backends.cpu import kv as kernels
from tests.cache_engine.invariants import check, host_run
from tests.cache_engine.models import KvModel

PAGE, TOKEN = 64, 16  # bytes: four tokens a page


def build(pages: int, host_pages: int, payload: bool = True) -> tuple[HbmPool, KvCache]:
    """The KV cache alone with all pages of the pool."""
    pool = HbmPool(pages, PAGE, ("kv",), min_pages=0, payload=payload)
    kv = KvCache(pool, token_bytes=TOKEN, host_pages=host_pages)
    pool.set_goals({"kv": pages}, 0)
    pool.migrate(pages)
    return pool, kv


def page_of(pool: HbmPool, kv: KvCache, user: int, token: int) -> np.ndarray:
    page = int(kv.pages(user)[token // 4])
    return pool.page(page)[token % 4 * TOKEN :][:TOKEN]  # type: ignore[no-any-return]


def value(user: int, token: int) -> int:
    return (user * 37 + token) % 255 + 1


def write(pool: HbmPool, kv: KvCache, user: int, tokens: int) -> bool:
    """Extend, and write what lookup did not find, as a server does."""
    found = kv.lookup(user, tokens)
    if not kv.extend(user, tokens):
        return False
    for token in range(found, tokens):
        page_of(pool, kv, user, token)[:] = value(user, token)
    return True


def right(pool: HbmPool, kv: KvCache, user: int, tokens: int) -> bool:
    return all((page_of(pool, kv, user, token) == value(user, token)).all() for token in range(tokens))


def tiers(kv: KvCache, *users: int) -> list[tuple[int, int]]:
    """Pages of each user in the pool and on the host."""
    return [(kv.pages(user).size, len(host_run(kv, user))) for user in users]


def during_copy(pool: HbmPool, monkeypatch: pytest.MonkeyPatch, *actions: Callable[[], object]) -> None:
    """Let the n-th copy to the pool be preceded by the n-th action."""
    write_page, left = pool.write_page, list(actions)

    def copy(page: int, data: np.ndarray) -> None:
        if left:
            left.pop(0)()
        write_page(page, data)

    monkeypatch.setattr(pool, "write_page", copy)


def test_what_was_evicted_comes_back_byte_for_byte() -> None:
    pool, kv = build(4, 8)
    assert write(pool, kv, 1, 14)
    assert write(pool, kv, 2, 8)
    assert tiers(kv, 1, 2) == [(2, 2), (2, 0)]
    kv.stats()
    assert (kv.lookup(1, 100), kv.onboardable(1, 100), kv.onboardable(1, 9), kv.onboardable(2, 100)) == (8, 6, 1, 0)
    assert kv.onboard(1, 100) == 14
    assert tiers(kv, 1, 2) == [(4, 0), (0, 2)]
    assert right(pool, kv, 1, 14)
    assert kv.onboard(2, 4) == 4
    assert tiers(kv, 1, 2) == [(3, 1), (1, 1)]
    assert kv.lookup(2, 8) == 4
    assert right(pool, kv, 2, 4)
    assert kv.stats() == KvStats(
        lookups=2,
        requested=108,
        hits=12,
        misses=96,
        extended=0,
        evicted=3,
        refused=0,
        stale=0,
        host_hits=6 + 4,
        offloaded=3,
        onboarded=3,
        given_up=0,
    )
    check(pool, kv=kv)


def test_without_a_host_what_is_evicted_is_lost() -> None:
    pool, kv = build(4, 0)
    write(pool, kv, 1, 16)
    write(pool, kv, 2, 8)
    assert (kv.onboardable(1, 16), kv.onboard(1, 16), kv.offload(4), kv.host_used, kv.host) == (0, 8, 0, 0, None)
    assert (kv.pages(2).size, kv.stats().offloaded) == (2, 0)
    check(pool, kv=kv)


def test_the_least_recent_host_user_gives_way_from_the_tail() -> None:
    pool, kv = build(2, 4, payload=False)
    for user in (1, 2, 3):
        assert kv.extend(user, 8)
    assert tiers(kv, 1, 2, 3) == [(0, 2), (0, 2), (2, 0)]
    kv.lookup(1, 8)  # now 2 is the least recent
    assert kv.extend(4, 4)
    assert tiers(kv, 1, 2, 3, 4) == [(0, 2), (0, 1), (1, 1), (1, 0)]
    assert kv.extend(4, 8)
    assert tiers(kv, 1, 2, 3, 4) == [(0, 2), (0, 0), (0, 2), (2, 0)]
    assert kv.extend(5, 8)
    assert tiers(kv, 1, 3, 4, 5) == [(0, 0), (0, 2), (0, 2), (2, 0)]
    assert kv.stats().given_up == 4
    check(pool, kv=kv)


def test_a_host_of_one_page_keeps_the_head() -> None:
    """The only user's own tail gives way to the page before it: what is left is the beginning of the history."""
    pool, kv = build(3, 1)
    write(pool, kv, 1, 12)
    assert write(pool, kv, 2, 12)
    assert tiers(kv, 1, 2) == [(0, 1), (3, 0)]
    assert kv.onboard(1, 12) == 4
    assert right(pool, kv, 1, 4)
    assert tiers(kv, 2) == [(2, 0)], "there was room for nobody else's page while his was on its way"
    check(pool, kv=kv)


def test_a_user_who_comes_back_keeps_what_the_host_has_of_him() -> None:
    """A full host: pages that leave the pool for his are lost rather than take his place."""
    pool, kv = build(3, 3)
    write(pool, kv, 1, 12)
    write(pool, kv, 2, 12)
    assert kv.onboard(1, 12) == 12
    assert right(pool, kv, 1, 12)
    assert tiers(kv, 2)[0][1] <= 2
    kv.onboard(2, 12)
    assert right(pool, kv, 2, kv.lookup(2, 12))
    check(pool, kv=kv)


def test_done_twice_or_below_zero_changes_nothing() -> None:
    pool, kv = build(3, 4)
    write(pool, kv, 1, 12)
    write(pool, kv, 2, 8)
    assert kv.onboard(1, 12) == 12
    before = [array.copy() for array in (*kv.state[:-1], *(kv.host or ())[:-1])]
    assert kv.onboard(1, 12) == 12
    with pytest.raises(ValueError, match="tokens must be in"):
        kv.onboard(1, -1)
    with pytest.raises(ValueError, match="user must fit int64"):
        kv.onboard(2**63, 1)
    with pytest.raises(ValueError, match="epoch must fit int64"):
        kv.onboardable(1, 1, epoch=-(2**63) - 1)
    with pytest.raises(ValueError, match="idle_pages must be at least 0, got -1"):
        kv.offload(-1)
    with pytest.raises(TypeError):
        kv.offload(1.5)  # type: ignore[arg-type]
    after = (*kv.state[:-1], *(kv.host or ())[:-1])
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert kv.drop(1)
    assert kv.drop(2), "he was on the host alone"
    assert not kv.drop(1)
    assert not kv.drop(2)
    assert (kv.host_used, kv.state.scalars[kernels.N_IDLE]) == (0, 3)
    check(pool, kv=kv)


@pytest.mark.parametrize("lost_by", ["drop", "epoch", "close"])
def test_pages_of_a_copy_on_its_way_are_nobody_elses(lost_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into A's page, A aborted, B allocates: B gets neither of its pages before it ends; then nothing leaks."""
    pool, kv = build(4, 4)
    write(pool, kv, 1, 16)
    write(pool, kv, 2, 16)
    assert tiers(kv, 1, 2) == [(0, 4), (4, 0)]
    kv.drop(2)
    assert kv.host is not None
    host = kv.host

    def abort() -> None:
        on_its_way = np.flatnonzero(host.onto != kernels.NONE)
        assert on_its_way.size == 1
        destination = int(host.onto[on_its_way[0]])
        if lost_by == "close":
            pool.close()
            return
        assert kv.drop(1) if lost_by == "drop" else kv.lookup(1, 16, epoch=1) == 0
        check(pool, kv=kv)
        assert (kv.host_used, kv.onboardable(1, 16)) == (1, 0)
        assert not write(pool, kv, 3, 16), "the fourth page is still on its way"
        assert write(pool, kv, 3, 12)
        assert write(pool, kv, 4, 12)
        assert destination not in [*kv.pages(3), *kv.pages(4)]
        assert on_its_way[0] not in host_run(kv, 3)
        check(pool, kv=kv)

    during_copy(pool, monkeypatch, abort)
    if lost_by == "close":
        with pytest.raises(PoolClosedError):
            kv.onboard(1, 16)
        check(pool, kv=kv)
        assert not (host.onto != kernels.NONE).any()
        return
    assert kv.onboard(1, 16) == 0
    check(pool, kv=kv)
    assert write(pool, kv, 5, 16), "every page comes back"
    for user in (3, 4):
        found = kv.lookup(user, 12) + kv.onboardable(user, 12)
        kv.onboard(user, 12)
        assert found > 0
        assert right(pool, kv, user, kv.lookup(user, 12))
    check(pool, kv=kv)


def test_a_copy_that_ends_before_the_abort() -> None:
    pool, kv = build(4, 5)
    write(pool, kv, 1, 16)
    write(pool, kv, 2, 16)
    assert kv.onboard(1, 8) == 8
    assert kv.drop(1)
    assert tiers(kv, 1, 2) == [(0, 0), (2, 2)]
    assert kv.onboard(2, 16) == 16
    assert right(pool, kv, 2, 16)
    assert kv.host_used == 0
    check(pool, kv=kv)


def test_whatever_happens_to_the_user_during_a_copy_his_prefix_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kv = build(4, 8)
    write(pool, kv, 1, 15)
    write(pool, kv, 2, 16)
    # Extended past the page on its way, by other content than the host has in the tail.
    during_copy(pool, monkeypatch, lambda: None, lambda: kv.drop(2) and write(pool, kv, 1, 9))
    assert kv.onboard(1, 15) == 9
    assert right(pool, kv, 1, 9)
    assert kv.onboardable(1, 15) == 0, "what followed the page that was computed anew has lost its connection"
    check(pool, kv=kv)
    # His last page leaves the pool meanwhile, so that the one on its way no longer follows.
    write(pool, kv, 1, 16)
    write(pool, kv, 3, 8)
    assert tiers(kv, 1) == [(2, 2)]
    during_copy(pool, monkeypatch, lambda: kv.offload(3))
    kv.onboard(1, 12)
    check(pool, kv=kv)
    assert kv.onboard(1, 16) == 16
    assert right(pool, kv, 1, 16)
    check(pool, kv=kv)


def test_the_same_page_does_not_come_twice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kv = build(4, 8)
    write(pool, kv, 1, 16)
    write(pool, kv, 2, 8)
    found: list[int] = []
    during_copy(pool, monkeypatch, lambda: found.append(kv.onboard(1, 16)))
    assert kv.onboard(1, 16) == 16
    assert found == [8], "who comes second is told what is there, and waits for nobody"
    assert kv.stats().onboarded == 2
    assert right(pool, kv, 1, 16)
    check(pool, kv=kv)


def test_a_page_lost_before_the_one_on_its_way_takes_that_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """His last page in the pool must leave while the next one is on its way, and the host has no room for it."""
    pool, kv = build(3, 1)
    write(pool, kv, 1, 12)
    write(pool, kv, 2, 4)
    assert tiers(kv, 1, 2) == [(2, 1), (1, 0)]

    def other() -> None:
        assert write(pool, kv, 3, 4)
        check(pool, kv=kv)
        assert tiers(kv, 1, 2, 3) == [(1, 0), (0, 0), (1, 0)]

    during_copy(pool, monkeypatch, other)
    assert kv.onboard(1, 12) == 4
    assert right(pool, kv, 1, 4)
    assert (kv.host_used, kv.state.scalars[kernels.N_IDLE]) == (0, 1)
    check(pool, kv=kv)


def test_a_copy_that_fails_leaves_the_page_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kv = build(3, 4)
    write(pool, kv, 1, 12)
    write(pool, kv, 2, 12)

    def fail() -> None:
        raise OSError("input/output error")

    during_copy(pool, monkeypatch, lambda: None, fail)
    with pytest.raises(OSError, match="input/output"):
        kv.onboard(1, 12)
    check(pool, kv=kv)
    assert kv.lookup(1, 12) == 4
    assert kv.onboard(1, 12) == 12
    assert right(pool, kv, 1, 12)
    check(pool, kv=kv)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_page_that_cannot_be_saved_is_in_neither_tier(copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension raises, nothing is extended, and no page that was not copied is ever found on the host."""
    pool, kv = build(3, 4)
    write(pool, kv, 1, 12)
    read_page, left = pool.read_page, [copies]

    def copy(page: int, out: np.ndarray) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("input/output error")
        read_page(page, out)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "read_page", copy)
        with pytest.raises(OSError, match="input/output"):
            kv.extend(2, 12)
    check(pool, kv=kv)
    assert (kv.pages(2).size, kv.lookup(1, 12), kv.onboardable(1, 12)) == (0, 0, 0)
    assert write(pool, kv, 2, 12)
    assert right(pool, kv, 2, 12)
    check(pool, kv=kv)


def test_fill_offload_onboard_and_free_in_random_order() -> None:
    """Per-tier counts exact against an independent model, every page in one list, over 5,000 operations."""
    rng = np.random.default_rng(3)
    pool, kv = build(24, 16, payload=False)
    model = KvModel(kv.page_tokens, owned=24, goal=24, host_pages=16)
    leases = []
    for i in range(5000):
        user, tokens, epoch = int(rng.integers(0, 20)), int(rng.integers(0, 40)), int(rng.integers(0, 12) == 0)
        what = rng.integers(0, 24)
        if what < 5:
            assert kv.lookup(user, tokens, epoch) == model.lookup(user, tokens, epoch)
        elif what < 12:
            assert kv.extend(user, tokens, epoch) == model.extend(user, tokens, epoch)
        elif what < 16:
            assert kv.onboardable(user, tokens, epoch) == model.onboardable(user, tokens, epoch)
            while (page := model.start_onboard(user, tokens, epoch)) is not None:
                model.finish_onboard(user, page, True)
            known = model.users.get(user)
            same = known is not None and known.epoch == epoch
            assert kv.onboard(user, tokens, epoch) == (min(known.tokens, tokens) if known is not None and same else 0)
        elif what < 17:
            assert kv.drop(user) == model.drop(user)
        elif what < 19:
            idle = int(rng.integers(0, 6))
            assert kv.offload(idle) == model.offload(idle)
        elif what < 20:
            lease, history = kv.lease(user), model.lease(user)
            assert (lease is None) == (history is None)
            if lease is not None and history is not None:
                leases.append((lease, history))
        elif what < 22 and leases:
            lease, history = leases.pop(int(rng.integers(0, len(leases))))
            lease.release()
            model.release(history)
        elif i % 3 == 0:
            goal = int(rng.integers(4, 25))
            pool.set_goals({"kv": goal}, i + 1)
            model.goal = goal
            freed = model.shrink(5)
            model.owned += (granted := min(5, max(0, goal - model.owned)))
            migration = pool.migrate(5)
            assert (migration.freed, migration.granted) == (freed, granted)
        if i % 5 == 0:
            check(pool, kv=kv)
        assert (kv.state.scalars[kernels.USED], kv.host_used) == (model.used, model.host_used)
    stats = kv.stats()
    for name in ("extended", "evicted", "refused", "stale", "host_hits", "offloaded", "onboarded", "given_up"):
        assert getattr(stats, name) == getattr(model, name) > 50, name
    for lease, _ in leases:
        lease.release()


def test_a_prefix_with_a_hole_is_never_reported() -> None:
    pool, kv = build(4, 4)
    write(pool, kv, 1, 16)
    write(pool, kv, 2, 12)
    assert tiers(kv, 1) == [(1, 3)]
    # Computed anew to the middle of page 2: tokens 10 and 11 are nowhere, so page 3 on the host hangs in the air.
    kv.drop(2)
    assert write(pool, kv, 1, 10)
    assert (kv.lookup(1, 16), kv.onboardable(1, 16), tiers(kv, 1)) == (10, 0, [(3, 0)])
    # To its end: page 3 follows.
    write(pool, kv, 1, 16)
    write(pool, kv, 2, 12)
    kv.drop(2)
    assert write(pool, kv, 1, 12)
    assert (kv.lookup(1, 16), kv.onboardable(1, 16), tiers(kv, 1)) == (12, 4, [(3, 1)])
    assert kv.onboard(1, 16) == 16
    assert right(pool, kv, 1, 16)
    check(pool, kv=kv)


def test_an_epoch_ends_in_both_tiers() -> None:
    pool, kv = build(3, 4, payload=False)
    kv.extend(1, 12, epoch=1)
    kv.extend(2, 8, epoch=1)
    assert tiers(kv, 1) == [(1, 2)]
    assert (kv.onboardable(1, 12, epoch=2), kv.onboard(1, 12, epoch=2)) == (0, 0)
    assert tiers(kv, 1) == [(1, 2)], "asking changes nothing"
    assert kv.lookup(1, 12, epoch=2) == 0
    assert tiers(kv, 1) == [(0, 0)]
    assert kv.extend(3, 12, epoch=1)
    assert tiers(kv, 2) == [(0, 2)]
    assert kv.extend(2, 12, epoch=7)
    assert tiers(kv, 2) == [(3, 0)]
    assert kv.stats().stale == 2, "a user counts once, wherever he was"
    check(pool, kv=kv)


def test_a_history_that_shrinks_evicts_nobody_from_either_tier() -> None:
    pool, kv = build(4, 8, payload=False)
    kv.extend(1, 32 // 2)
    kv.extend(2, 12)
    before = tiers(kv, 1, 2)
    assert before == [(1, 3), (3, 0)]
    assert (kv.lookup(1, 4), kv.extend(1, 4), kv.onboard(1, 4), kv.onboard(1, 3)) == (4, True, 4, 3)
    assert tiers(kv, 1, 2) == before
    check(pool, kv=kv)


def test_where_all_others_are_leased_nothing_comes_and_nothing_goes() -> None:
    pool, kv = build(4, 8, payload=False)
    kv.extend(1, 16)
    kv.extend(2, 12)
    lease = kv.lease(2)
    assert lease is not None
    assert kv.onboard(1, 16) == 4
    assert kv.offload(4) == 1
    assert tiers(kv, 1, 2) == [(0, 4), (3, 0)]
    assert kv.onboard(1, 16) == 4
    assert tiers(kv, 1, 2) == [(1, 3), (3, 0)]
    pool.set_goals({"kv": 3}, 1)
    pool.migrate(4)
    assert (tiers(kv, 1, 2), kv.onboard(1, 16)) == ([(0, 4), (3, 0)], 0), "no new page over the goal"
    lease.release()
    assert kv.onboard(1, 16) == 12
    check(pool, kv=kv)


def test_a_leased_user_grows_from_the_host() -> None:
    pool, kv = build(4, 8)
    write(pool, kv, 1, 16)
    write(pool, kv, 2, 12)
    with kv.lease(1) or pytest.fail("he has a page"):
        assert kv.onboard(1, 16) == 16
        check(pool, kv=kv)
        assert not kv.extend(2, 4)
    assert right(pool, kv, 1, 16)
    assert kv.extend(2, 4)
    check(pool, kv=kv)


def test_pages_ahead_of_need_leave_nothing_to_copy_to_an_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kv = build(6, 8)
    for user in (1, 2, 3):
        write(pool, kv, user, 8)
    assert kv.offload(3) == 3
    assert tiers(kv, 1, 2, 3) == [(0, 2), (1, 1), (2, 0)]
    assert kv.offload(3) == 0

    def copy(page: int, out: np.ndarray) -> None:
        raise AssertionError("nothing is to be copied")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "read_page", copy)
        assert write(pool, kv, 4, 12)
        assert kv.offload(0) == 0
    assert kv.onboard(1, 8) == 8
    assert right(pool, kv, 1, 8)
    check(pool, kv=kv)


def test_a_partition_that_shrinks_hands_its_pages_to_the_host() -> None:
    pool, kv = build(6, 8)
    for user in (1, 2, 3):
        write(pool, kv, user, 8)
    pool.set_goals({"kv": 2}, 1)
    assert pool.migrate(3).freed == 3
    assert tiers(kv, 1, 2, 3) == [(0, 2), (1, 1), (2, 0)]
    assert pool.migrate(3).freed == 1
    for page in range(6):
        if pool.state.owner[page] == -1:
            pool.page(page)[:] = 0
    pool.set_goals({"kv": 6}, 2)
    pool.migrate(6)
    for user in (1, 2, 3):
        assert kv.onboard(user, 8) == 8
        assert right(pool, kv, user, 8)
    assert kv.host_used == 0
    check(pool, kv=kv)


def test_users_of_any_int64() -> None:
    users = [0, -1, -2, 2**63 - 1, -(2**63)]
    pool, kv = build(1, 8)
    for user in users:
        assert write(pool, kv, user, 4)
    for user in users:
        assert kv.lookup(user, 4) == (4 if user == users[-1] and kv.onboardable(user, 4) == 0 else 0)
        assert kv.onboard(user, 2**40) == 4
        assert right(pool, kv, user, 4)
        check(pool, kv=kv)


def test_tokens_of_none_and_of_all() -> None:
    pool, kv = build(2, 2, payload=False)
    assert (kv.onboard(1, 0), kv.onboardable(1, 0), kv.extend(1, 0)) == (0, 0, True)
    kv.extend(1, 8)
    kv.offload(2)
    assert (kv.onboard(1, 0), kv.extend(1, 0), kv.onboardable(1, 0), kv.onboardable(1, 2**40)) == (0, True, 0, 8)
    assert not kv.extend(1, 2**40)
    assert tiers(kv, 1) == [(0, 2)], "refused: nothing changed"
    check(pool, kv=kv)


@pytest.mark.parametrize("host_pages", [-1, 2**31])
def test_a_host_that_cannot_be_is_refused(host_pages: int) -> None:
    pool = HbmPool(4, PAGE, payload=False)
    with pytest.raises(ValueError, match="host_pages must be in"):
        KvCache(pool, token_bytes=TOKEN, host_pages=host_pages)
    with pytest.raises(TypeError):
        KvCache(pool, token_bytes=TOKEN, host_pages=1.5)  # type: ignore[arg-type]
    assert KvCache(pool, token_bytes=TOKEN, host_pages=0).host is None


def test_after_close() -> None:
    pool, kv = build(2, 4)
    write(pool, kv, 1, 8)
    kv.offload(1)
    pool.close()
    for operation in (
        lambda: kv.onboard(1, 8),
        lambda: kv.onboardable(1, 8),
        lambda: kv.offload(2),
        lambda: kv.extend(1, 8),
        lambda: kv.drop(1),
    ):
        with pytest.raises(PoolClosedError):
            operation()
    assert (kv.host_used, kv.stats().offloaded) == (1, 1)
    assert kv._host_bytes is None, "the host's memory is given back, too"


def test_metadata_of_the_host_is_counted() -> None:
    _, one = build(4, 0)
    _, two = build(4, 1000)
    assert two.host is not None
    extra = two.metadata_bytes() - one.metadata_bytes()
    assert extra == sum(array.nbytes for array in two.host)
    assert extra < 100 * 1000


def test_threads_that_extend_onboard_and_drop_the_same_users_never_read_a_wrong_byte() -> None:
    pool, kv = build(8, 12)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        end = time.monotonic() + 1.5
        try:
            while time.monotonic() < end:
                user, tokens = int(rng.integers(0, 5)), int(rng.integers(1, 25))
                kv.onboard(user, tokens)
                with pool.lock:  # a lookup and what is read of it are one operation
                    assert right(pool, kv, user, kv.lookup(user, tokens))
                    write(pool, kv, user, tokens)
                if rng.integers(0, 10) == 0:
                    kv.drop(user)
                if rng.integers(0, 10) == 0:
                    kv.offload(3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert kv.stats().onboarded > 50
    check(pool, kv=kv)
    for user in range(5):
        kv.drop(user)
    assert (kv.host_used, kv.state.scalars[kernels.USED]) == (0, 0)
