"""Any order of public operations on a pool with both caches, a host tier and real bytes: invariants, bytes, leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_engine import EmbeddingCache, HbmPool, KvCache, Migration, PoolClosedError, TargetStatus
from cache_engine.lease import Lease
from tests.cache_engine.invariants import check, host_run
from tests.cache_engine.models import History, KvModel

PAGES, PAGE_BYTES, ROW_BYTES, TOKEN_BYTES = 10, 128, 16, 32
ROWS, WIDE, NARROW = 60, 4, 3
DRAIN_LIMIT_NS = 1_000
STEPS = 10_000
STEPS_EACH = 80  # of a run
EXAMPLES = 170  # runs; some are cut short or discarded

ids = st.lists(st.integers(0, ROWS - 1), min_size=8, max_size=30) | st.just([])
users = st.integers(0, 5)
tokens = st.integers(0, 3) | st.integers(8, 24)


class Table(np.ndarray):
    """A host table that can fail, as a mapped file whose disk is gone."""

    broken = False

    def __getitem__(self, key: Any) -> Any:
        if Table.broken:
            raise OSError("input/output error")
        return super().__getitem__(key)


@dataclass
class Held:
    lease: Lease
    pages: list[int]
    was: list[bytes]  # of each slot or page, as `read` found them then
    read: Callable[[], list[bytes]]
    history: History | None = None


class Engine(RuleBasedStateMachine):
    """The engine beside its tables, a model of the KV cache, and what each lease saw when it began."""

    steps = 0  # after which invariants held, over all runs
    moves = 0  # pages that came back from the host

    @initialize(
        min_pages=st.integers(0, 2),
        hysteresis=st.sampled_from([0, 0, 3]),
        max_pages=st.integers(4, PAGES),
        host_pages=st.sampled_from([6, 2, 0, 40]),
        full=st.booleans(),
        policy=st.sampled_from(["sieve", "lru"]),
    )
    def start(self, min_pages: int, hysteresis: int, max_pages: int, host_pages: int, full: bool, policy: str) -> None:
        Table.broken = False
        rng = np.random.default_rng(0)
        self.tables = [
            rng.integers(0, 2**31, (ROWS, WIDE)).astype(np.int32).view(Table),
            rng.integers(0, 2**31, (ROWS, NARROW)).astype(np.int32).view(Table),
        ]
        self.pool = HbmPool(
            PAGES,
            PAGE_BYTES,
            min_pages=min_pages,
            drain_limit_s=DRAIN_LIMIT_NS * 1e-9,
            hysteresis_pages=hysteresis,
        )
        self.emb = EmbeddingCache(
            self.pool, row_bytes=ROW_BYTES, tables=self.tables, max_pages=max_pages, policy=policy
        )
        self.kv = KvCache(self.pool, token_bytes=TOKEN_BYTES, host_pages=host_pages)
        self.max_pages = max_pages
        self.outcomes: Counter[str] = Counter()
        self.outcomes[self.pool.set_target(0.5, 0).value] += 1
        self.count(self.pool.migrate(PAGES))
        kv_pages = self.pool.owned("kv")
        assert kv_pages == PAGES - min(PAGES // 2, max_pages)
        self.model = KvModel(self.kv.page_tokens, owned=kv_pages, goal=kv_pages, host_pages=host_pages)
        Engine.steps -= 1  # this is none
        self.held: list[Held] = []
        self.broke = False  # a refill may have met a broken table
        self.revision = 0
        self.now_ns = 0
        self.counts = dict.fromkeys(("rows", "fetched", "tokens"), 0)
        for user in range(6 if full else 0):
            self.kv_extend(user, 11, 0)

    # Embedding rows

    @rule(keys=ids, table=st.integers(0, 1), lease=st.booleans())
    def lookup_one_table(self, keys: list[int], table: int, lease: bool) -> None:
        self.look_up(keys, table, lease)

    @rule(keys=ids, seed=st.integers(0, 99))
    def lookup_both_tables(self, keys: list[int], seed: int) -> None:
        self.look_up(keys, np.random.default_rng(seed).integers(0, 2, len(keys)), False)

    def look_up(self, keys: list[int], tables: Any, lease: bool) -> None:
        wanted = [self.row(k, t) for k, t in zip(keys, np.broadcast_to(tables, len(keys)), strict=True)]
        known = self.emb.lookup(np.array(keys, np.int64), tables)
        assert known.rows is not None
        assert [row.tobytes() for row in known.rows] == wanted
        slots = known.slots[known.slots >= 0].tolist()
        assert [self.slot(s) for s in slots] == [w for w, s in zip(wanted, known.slots, strict=True) if s >= 0]
        self.counts["rows"] += len(keys)
        self.counts["fetched"] += known.fetched
        if lease and slots:
            held = self.emb.lease(known.slots)
            self.held.append(
                Held(held, held.pages.tolist(), [self.slot(s) for s in slots], lambda: [self.slot(s) for s in slots])
            )

    @rule(keys=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12), table=st.integers(0, 1))
    def lookup_of_a_broken_table(self, keys: list[int], table: int) -> None:
        Table.broken = self.broke = True
        try:
            known = self.emb.lookup(np.array(keys), table)
            assert known.hit.all()
            self.counts["rows"] += len(keys)
        except OSError:
            pass
        finally:
            Table.broken = False

    @rule(keys=st.lists(st.integers(0, ROWS - 1), max_size=6), table=st.integers(0, 1), value=st.integers(0, 2**31 - 1))
    def update_rows(self, keys: list[int], table: int, value: int) -> None:
        """New values in the table; forgotten, the rows are read again."""
        np.asarray(self.tables[table])[keys] = value
        assert self.emb.invalidate(np.array(keys, np.int64), table) <= len(set(keys))

    @rule(keys=ids, table=st.integers(0, 1))
    def refill(self, keys: list[int], table: int) -> None:
        """In the background; whether and when the rows are admitted, lookups return what the table has."""
        try:
            assert self.emb.refill(np.array(keys, np.int64), table) >= 0
        except OSError:
            assert self.broke
            self.broke = False

    @rule(wait=st.booleans())
    def advance_refill(self, wait: bool) -> None:
        try:
            waiting = self.emb.advance_refill(wait)
        except OSError:
            assert self.broke
            self.broke = False
        else:
            assert waiting == 0 or not wait

    @rule(keys=st.just([0, ROWS]) | st.just([-1]))
    def lookup_of_no_row(self, keys: list[int]) -> None:
        with pytest.raises(ValueError, match="is not a row of table 0"):
            self.emb.lookup(np.array(keys))

    def row(self, key: int, table: int) -> bytes:
        return np.asarray(self.tables[table])[key].tobytes().ljust(ROW_BYTES, b"\0")

    def slot(self, slot: int) -> bytes:
        start = slot % self.emb.rows_per_page * ROW_BYTES
        return self.pool.page(slot // self.emb.rows_per_page)[start : start + ROW_BYTES].tobytes()

    # Keys and values

    @rule(user=users, count=tokens, epoch=st.sampled_from([0, 0, 0, 1]))
    def kv_lookup(self, user: int, count: int, epoch: int) -> None:
        found = self.kv.lookup(user, count, epoch)
        assert found == self.model.lookup(user, count, epoch)
        self.counts["tokens"] += count
        self.check_prefix(user, found, epoch)

    @rule(user=users, count=tokens, epoch=st.sampled_from([0, 0, 0, 1]))
    def kv_extend(self, user: int, count: int, epoch: int) -> None:
        had = self.model.users.get(user)
        start = had.tokens if had is not None and had.epoch == epoch else 0
        fits = self.kv.extend(user, count, epoch)
        assert fits == self.model.extend(user, count, epoch)
        if fits:
            for token in range(start, count):
                self.token(user, token)[:] = self.value(user, token, epoch)
            self.check_prefix(user, max(start, count), epoch)

    @rule(user=users)
    def kv_lease(self, user: int) -> None:
        lease, history = self.kv.lease(user), self.model.lease(user)
        assert (lease is None) == (history is None)
        if lease is not None and history is not None:
            pages = self.kv.pages(user).tolist()
            # Of the tail page only the tokens that were there: others may be written later.
            last = history.tokens - (len(pages) - 1) * self.kv.page_tokens
            ends = [PAGE_BYTES] * (len(pages) - 1) + [last * TOKEN_BYTES]

            def read() -> list[bytes]:
                return [self.pool.page(page)[:end].tobytes() for page, end in zip(pages, ends, strict=True)]

            self.held.append(Held(lease, pages, read(), read, history))

    @rule(user=users)
    def kv_drop(self, user: int) -> None:
        assert self.kv.drop(user) == self.model.drop(user)

    @rule(idle_pages=st.integers(0, 4))
    def kv_offload(self, idle_pages: int) -> None:
        assert self.kv.offload(idle_pages) == self.model.offload(idle_pages)

    @precondition(lambda self: self.model.host)
    @rule(
        which=st.integers(0, 9),
        count=st.integers(1, 40),
        stale=st.sampled_from([False] * 7 + [True]),
        meanwhile=st.sampled_from(["", "", "", "drop", "epoch", "extend", "other", "same", "move", "fail"]),
        on_page=st.integers(0, 2),
    )
    def kv_onboard(self, which: int, count: int, stale: bool, meanwhile: str, on_page: int) -> None:
        """During the copy of one of the pages, outside the pool's lock, something else happens, or the copy fails."""
        user = list(self.model.host)[which % len(self.model.host)]
        self.onboard(user, count, self.model.host[user].epoch ^ stale, meanwhile, on_page)

    @precondition(lambda self: self.model.host)
    @rule()
    def kv_onboard_everybody(self) -> None:
        for user, run in list(self.model.host.items()):
            self.onboard(user, run.tokens, run.epoch)

    def onboard(self, user: int, count: int, epoch: int, meanwhile: str = "", on_page: int = 0) -> None:
        assert self.kv.onboardable(user, count, epoch) == self.model.onboardable(user, count, epoch)
        if not self.model.onboardable(user, count, epoch):
            meanwhile = ""
        write_page = self.pool.write_page
        came: list[bool] = []

        def copy(page: int, data: np.ndarray) -> None:
            assert page not in self.pool.state.free[: self.pool.free]
            moving = self.model.start_onboard(user, count, epoch)
            assert moving is not None
            copied = not (meanwhile == "fail" and len(came) == on_page)
            try:
                if len(came) == on_page:
                    came.append(False)  # nothing happens twice
                    self.happen(meanwhile, user, count, epoch)
                    came.pop()
                if not copied:
                    raise OSError("input/output error")
                write_page(page, data)
            finally:
                came.append(self.model.finish_onboard(user, moving, copied))

        self.pool.write_page = copy  # type: ignore[method-assign]
        try:
            found = self.kv.onboard(user, count, epoch)
        except OSError:
            assert meanwhile == "fail"
        else:
            known = self.model.users.get(user)
            assert found == (min(known.tokens, count) if known is not None and known.epoch == epoch else 0)
            assert not all(came) or self.model.start_onboard(user, count, epoch) is None, "there was no more to do"
            self.check_prefix(user, found, epoch)
        finally:
            self.pool.write_page = write_page  # type: ignore[method-assign]
        Engine.moves += sum(came)

    def happen(self, what: str, user: int, count: int, epoch: int) -> None:
        if what == "drop":
            self.kv_drop(user)
        elif what == "epoch":
            self.kv_lookup(user, count, 1 - epoch)
        elif what == "extend":
            self.kv_extend(user, count, epoch)
        elif what == "other":
            self.kv_extend((user + 1) % 6, 12, 0)
        elif what == "same":
            known = self.model.users.get(user)
            assert self.kv.onboard(user, count, epoch) == (min(known.tokens, count) if known is not None else 0)
        elif what == "move":
            self.set_target(0.8, 1)
            self.migrate(3, 0)
        self.everything_holds()

    def token(self, user: int, token: int) -> np.ndarray:
        start = token % self.kv.page_tokens * TOKEN_BYTES
        page = int(self.kv.pages(user)[token // self.kv.page_tokens])
        return self.pool.page(page)[start : start + TOKEN_BYTES]

    @staticmethod
    def value(user: int, token: int, epoch: int) -> int:
        return (user * 50 + token + epoch * 25) % 255 + 1

    def check_prefix(self, user: int, count: int, epoch: int) -> None:
        for token in range(count):
            assert (self.token(user, token) == self.value(user, token, epoch)).all()

    # Leases and moves

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), twice=st.booleans())
    def release(self, which: int, twice: bool) -> None:
        held = self.held.pop(which % len(self.held))
        held.lease.release()
        if held.history is not None:
            self.model.release(held.history)
        if twice:
            held.lease.release()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def lose(self, which: int) -> None:
        """The next operation, whichever it is, ends what nobody can release any more."""
        history = self.held[which % len(self.held)].history
        with pytest.warns(ResourceWarning, match="a lease was lost"):
            del self.held[which % len(self.held)]
        assert self.kv.pages(99).size == 0
        if history is not None:
            self.model.release(history)

    @rule(alpha=st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0, -1.0, float("nan"), float("inf")]), step=st.integers(-1, 1))
    def set_target(self, alpha: float, step: int) -> None:
        before = self.pool.state.goal.copy()
        status = self.pool.set_target(alpha, self.revision + step)
        self.outcomes[status.value] += 1
        assert (status is TargetStatus.STALE) == (step < 0 or not np.isfinite(alpha))
        if status is TargetStatus.STALE or step == 0:
            assert (self.pool.state.goal == before).all()
        else:
            self.revision += 1
            floor = self.pool.min_pages
            emb = min(max(round(min(max(alpha, 0), 1) * PAGES), floor), PAGES - floor, self.max_pages)
            self.check_goals(before, [emb, PAGES - emb], status)

    def check_goals(self, before: np.ndarray, wanted: list[int], status: TargetStatus) -> None:
        held = 0 < np.abs(before - wanted).max() < self.pool.hysteresis_pages
        assert self.pool.state.goal.tolist() == (before.tolist() if held else wanted)
        assert (status is TargetStatus.HELD) == held

    def count(self, done: Migration) -> None:
        self.outcomes.update(granted=done.granted, taken=done.freed, aborted=done.aborted)

    @rule(emb=st.integers(0, PAGES), kv=st.integers(0, PAGES))
    def set_goals(self, emb: int, kv: int) -> None:
        floor = self.pool.min_pages
        possible = floor <= emb <= self.max_pages and floor <= kv and emb + kv <= PAGES
        before = self.pool.state.goal.copy()
        try:
            status = self.pool.set_goals({"emb": emb, "kv": kv}, self.revision + 1)
        except ValueError:
            assert not possible
        else:
            assert possible
            self.revision += 1
            self.outcomes[status.value] += 1
            self.check_goals(before, [emb, kv], status)

    @rule(
        budget=st.integers(0, PAGES),
        wait_ns=st.sampled_from([0, 10, DRAIN_LIMIT_NS + 1]),
        relocate=st.sampled_from([None, True, False]),
    )
    def migrate(self, budget: int, wait_ns: int, relocate: bool | None = None) -> None:
        self.now_ns += wait_ns
        state = self.pool.state
        goal, before = state.goal.tolist(), state.owned.tolist()
        pinned = {page for held in self.held for page in held.pages}
        generations = state.generation.copy()
        done = self.pool.migrate(budget, self.now_ns, relocate=relocate)
        self.count(done)
        after = state.owned.tolist()
        assert done.freed <= budget
        assert done.granted <= budget
        assert done.granted - done.freed == sum(after) - sum(before)
        for was, now, wanted in zip(before, after, goal, strict=True):
            assert min(was, wanted) <= now <= max(was, wanted), "towards the goal, not past it"
        assert all(generations[page] == state.generation[page] for page in pinned), "leased pages stay"
        if not self.held and budget == PAGES:
            assert done.backlog == done.pinned == 0, "nothing in the way: all at once"
        self.model.goal = goal[1]
        freed = self.model.shrink(min(budget, max(0, before[1] - after[1])))
        assert freed == max(0, before[1] - after[1])
        self.model.owned = after[1]

    @rule()
    def read_counters(self) -> None:
        emb, kv = self.emb.stats(), self.kv.stats()
        assert emb.requested == emb.hits + emb.misses == self.counts["rows"]
        assert emb.fetched == self.counts["fetched"]
        assert emb.link_bytes == (emb.fetched + emb.refilled) * ROW_BYTES
        assert kv.requested == kv.hits + kv.misses == self.counts["tokens"]
        model = self.model
        for name in ("extended", "evicted", "refused", "stale", "host_hits", "offloaded", "onboarded", "given_up"):
            assert getattr(kv, name) == getattr(model, name), name
            setattr(model, name, 0)
        self.counts = dict.fromkeys(self.counts, 0)
        pool = asdict(self.pool.stats())
        assert pool == {name: self.outcomes[name] for name in pool}
        self.outcomes.clear()

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "pool"):
            self.model.goal = int(self.pool.state.goal[1])
            Engine.steps += 1
            check(self.pool, self.emb, self.kv)
            assert self.kv.host_used == self.model.host_used
            self.check_host_bytes()
            for held in self.held:
                assert held.read() == held.was, "what is leased keeps its bytes"

    def check_host_bytes(self) -> None:
        for user, run in self.model.host.items():
            pages = host_run(self.kv, user)
            assert len(pages) == len(run.pages)
            for page, at in zip(run.pages, pages, strict=True):
                start = page.number * self.kv.page_tokens
                end = min(run.tokens, start + self.kv.page_tokens)
                wanted = b"".join(bytes([self.value(user, t, run.epoch)]) * TOKEN_BYTES for t in range(start, end))
                assert self.host_bytes(at)[: len(wanted)].tobytes() == wanted

    def host_bytes(self, at: int) -> np.ndarray:
        assert self.kv._host_bytes is not None
        return self.kv._host_bytes[at]

    def teardown(self) -> None:
        Table.broken = False
        if not hasattr(self, "pool"):
            return
        held, self.held = self.held, []
        for each in held[::2]:
            each.lease.release()
        self.pool.close()
        with pytest.raises(PoolClosedError):
            self.emb.lookup(np.array([1]))
        for each in held:
            each.lease.release()
        assert not self.pool.state.pins.any()
        assert not self.kv.state.pins.any()
        check(self.pool, self.emb, self.kv)


def test_at_least_ten_thousand_steps_in_any_order() -> None:
    Engine.steps = Engine.moves = 0
    run_state_machine_as_test(
        Engine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS_EACH,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    print(f"{Engine.steps} steps, {Engine.moves} pages brought back from the host")
    assert Engine.steps >= STEPS
    assert Engine.moves >= STEPS // 200, "the host tier was used"
