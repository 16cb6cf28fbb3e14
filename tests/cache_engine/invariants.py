"""What must hold after every operation, read from the state of a pool and its caches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_engine import EmbeddingCache, HbmPool, KvCache
from cache_engine.backends.cpu import embedding as e
from cache_engine.backends.cpu import kv as k
from cache_engine.backends.cpu import kv_host as h
from cache_engine.backends.cpu import pool as p
from tests.cache_engine.models import index_set, tag


def check(pool: HbmPool, emb: EmbeddingCache | None = None, kv: KvCache | None = None) -> None:
    """Assert every invariant of the pool and of the caches given."""
    check_pool(pool)
    if emb is not None:
        check_embedding(pool, emb)
    if kv is not None:
        check_kv(pool, kv)


def check_pool(pool: HbmPool) -> None:
    s = pool.state
    free = s.free[: s.scalars[p.FREE_COUNT]].tolist()
    lists = [s.lists[m, : s.owned[m]].tolist() for m in range(len(pool.members))]
    assert sorted(sum(lists, free)) == list(range(pool.pages)), "each page lies in exactly one list"
    assert pool.free + sum(pool.owned(name) for name in pool.members) == pool.pages
    assert all(s.owner[page] == p.FREE and not s.draining[page] and not s.pins[page] for page in free)
    for m, pages in enumerate(lists):
        assert all(s.owner[page] == m and s.place[page] == i for i, page in enumerate(pages))
        assert s.n_draining[m] == sum(int(s.draining[page]) for page in pages)
        assert s.granted[m] - s.taken[m] == s.owned[m]
    assert s.generation.sum() == s.granted.sum() + s.taken.sum()
    assert s.pins.min() >= 0
    assert s.goal.sum() <= pool.pages
    assert {c.dtype for c in (s.owned, s.granted, s.taken, s.aborted, s.generation)} == {np.dtype(np.int64)}


def check_embedding(pool: HbmPool, emb: EmbeddingCache) -> None:
    s = emb.state
    rows_per_page = emb.rows_per_page
    member = s.scalars[e.MEMBER]
    owned = pool.state.lists[member, : pool.state.owned[member]].tolist()
    assert s.scalars[e.ROWS_PER_PAGE] == rows_per_page

    entries = e.entries(s)
    slots = s.slot[entries]
    rows = s.row[slots]
    lines, ways = entries // e.LINE_INTS, entries % e.LINE_INTS - e.FIRST_SLOT
    assert ((s.slot.reshape(-1, e.LINE_INTS)[:, e.FIRST_SLOT :]) >= e.EMPTY).all(), "no entry stays reserved"
    assert np.unique(slots).size == slots.size, "no slot twice"
    assert sorted(slots) == np.flatnonzero(s.row["live"]).tolist(), "index and slots are a bijection"
    keys = list(zip(rows["table"].tolist(), rows["key"].tolist(), strict=True))
    assert len(set(keys)) == len(keys), "no key twice"
    sets = int(s.scalars[e.SETS])
    assert [index_set(key, sets) for key in keys] == lines.tolist(), "every key is where it is looked for"
    tags = s.tag.reshape(-1, e.LINE_BYTES)[:, : e.WAYS]
    assert tags[lines, ways].tolist() == [tag(key) for key in keys]
    assert np.count_nonzero(tags) == entries.size, "an empty entry has no tag"
    check_queues(s, slots)

    pages = slots // rows_per_page
    assert (pool.state.owner[pages] == member).all(), "rows lie in owned pages"
    assert (slots % rows_per_page < s.fill[pages]).all()
    assert (s.fill[pool.state.owner != member] == 0).all()
    fresh = s.fresh[: s.scalars[e.N_FRESH]].tolist()
    wanted = [page for page in owned if s.fill[page] < rows_per_page and not pool.state.draining[page]]
    assert sorted(fresh) == sorted(wanted), "pages with slots never filled"

    c = s.counters
    assert c.dtype == np.int64
    assert c.min() >= 0
    assert c[e.HITS] + c[e.MISSES] == c[e.REQUESTED]
    assert c[e.FETCHED] <= c[e.MISSES]
    assert c[e.BYPASSED] <= c[e.MISSES]


def check_queues(s: e.EmbeddingState, live: npt.NDArray[np.int32]) -> None:
    """Every slot that was filled stands in one queue, in one place (SIEVE)."""
    room = int(s.scalars[e.ROOM])
    queued = []
    for which in range(2):
        start, count = int(s.scalars[e.START + which]), int(s.scalars[e.COUNT + which])
        assert count <= room
        at = [which * room + (start + k) % room for k in range(count)]
        stands = [k for k in at if s.spot[s.queue[k]] == k]
        assert len(stands) == s.scalars[e.QUEUED + which]
        queued += s.queue[stands].tolist()
    assert sorted(queued) == np.flatnonzero(s.spot != e.EMPTY).tolist()
    assert set(live.tolist()) <= set(queued) or s.scalars[e.POLICY] == e.LRU


def check_kv(pool: HbmPool, kv: KvCache) -> None:
    s = kv.state
    member = s.scalars[k.MEMBER]
    owned = pool.state.lists[member, : pool.state.owned[member]].tolist()
    idle = s.idle[: s.scalars[k.N_IDLE]].tolist()
    unused = s.unused[: s.scalars[k.N_UNUSED]].tolist()
    resident = s.place[s.place != k.NONE].tolist()
    doomed = np.flatnonzero(s.doomed).tolist()
    assert sorted(unused + resident + doomed) == list(range(s.user.size)), "each entry is in one place"
    check_users(s, resident)
    assert all(k.find(s, int(s.user[entry])) == entry for entry in resident), "every user is found"

    held: list[int] = []
    pinned = 0
    for entry in resident + doomed:
        chain = []
        page = s.tail[entry]
        while page != k.NONE:
            chain.append(int(page))
            assert s.holder[page] == entry
            page = s.before[page]
            assert len(chain) <= pool.pages, "a user's pages have no loop"
        assert len(chain) == s.n_pages[entry] >= 1
        assert s.holder[chain].tolist() == [entry] * len(chain)
        assert (len(chain) - 1) * kv.page_tokens < s.tokens[entry] <= len(chain) * kv.page_tokens
        held += chain
        pinned += len(chain) if s.pins[entry] else 0
    assert all(s.pins[entry] > 0 for entry in doomed)
    assert all(s.pins[entry] == 0 for entry in unused)
    coming = [] if kv.host is None else kv.host.onto[kv.host.onto != k.NONE].tolist()
    assert sorted(held + idle + coming) == sorted(owned), (
        "each owned page holds one user's tokens, awaits them, or idle"
    )
    assert all(s.holder[page] == k.NONE for page in idle + coming)
    assert s.scalars[k.USED] == len(held) + len(coming)
    assert s.scalars[k.PINNED] == pinned + len(coming)

    c = s.counters
    assert c.dtype == np.int64
    assert c.min() >= 0
    assert c[k.HITS] + c[k.MISSES] == c[k.REQUESTED]
    if kv.host is not None:
        check_host(kv, kv.host)


def check_users(s: k.Users, resident: list[int]) -> None:
    """The users of either tier stand in one order of use, each once."""
    assert len(resident) == s.scalars[k.RESIDENT]
    order = []
    at = s.scalars[k.OLDEST]
    previous = k.NONE
    while at != k.NONE:
        assert s.older[at] == previous
        order.append(int(at))
        previous, at = at, s.newer[at]
        assert len(order) <= len(resident), "the order of use has no loop"
    assert s.scalars[k.NEWEST] == previous
    assert sorted(order) == sorted(resident)


def check_host(kv: KvCache, s: h.KvHostState) -> None:
    idle = s.idle[: s.scalars[k.N_IDLE]].tolist()
    unused = s.unused[: s.scalars[k.N_UNUSED]].tolist()
    resident = s.place[s.place != k.NONE].tolist()
    assert sorted(unused + resident) == list(range(s.user.size)), "each entry is in one place"
    check_users(s, resident)

    held: list[int] = []
    for entry in resident:
        user = int(s.user[entry])
        assert k.find(s, user) == entry, "every user is found"
        run = host_run(kv, user)
        assert len(run) == s.n_pages[entry] >= 1
        assert run[-1] == s.tail[entry]
        assert s.before[run].tolist() == [k.NONE, *run[:-1]]
        assert s.holder[run].tolist() == [entry] * len(run)
        pages = int(s.first[entry]) + len(run)
        assert (pages - 1) * kv.page_tokens < s.tokens[entry] <= pages * kv.page_tokens
        held += run
        # The prefix has no hole: what is here goes on where the pool's pages end.
        e = k.find(kv.state, user)
        if e == k.NONE:
            assert s.first[entry] == 0
        else:
            assert kv.state.epoch[e] == s.epoch[entry]
            assert kv.state.n_pages[e] == s.first[entry]
            assert kv.state.tokens[e] == s.first[entry] * kv.page_tokens
    orphans = np.flatnonzero((s.holder == k.NONE) & (s.onto != k.NONE)).tolist()
    assert sorted(held + idle + orphans) == list(range(kv.host_pages)), "each host page lies in exactly one list"
    assert all(s.holder[page] == s.before[page] == s.after[page] == k.NONE for page in idle + orphans)
    assert all(s.onto[page] == k.NONE for page in idle)
    assert kv.host_used == s.scalars[k.USED] == len(held) + len(orphans)
    assert kv.host_used + len(idle) == kv.host_pages
    assert s.counters.dtype == np.int64
    assert s.counters.min() >= 0


def host_run(kv: KvCache, user: int) -> list[int]:
    """The user's host pages, in order."""
    assert kv.host is not None
    entry = k.find(kv.host, user)
    pages = []
    at = kv.host.head[entry] if entry != k.NONE else k.NONE
    while at != k.NONE:
        pages.append(int(at))
        at = kv.host.after[at]
        assert len(pages) <= kv.host_pages, "a user's pages have no loop"
    return pages
