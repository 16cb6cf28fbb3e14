"""Slow, plain models of what the engine should do: integers, lists and dicts, written from its contracts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MASK = 2**64 - 1
WAYS = 12
WINDOW = 8
CANDIDATES = 16
SAMPLE = 16

Key = tuple[int, int]  # table, id


def mix(x: int) -> int:
    """splitmix64's next output from state x."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_key(key: Key) -> int:
    table, number = key
    return mix(mix(table) ^ ((number & MASK) * 0x9E3779B97F4A7C15 & MASK))


def index_set(key: Key, sets: int) -> int:
    """The set of the index in which `key` belongs."""
    return (hash_key(key) >> 32) * sets >> 32


def tag(key: Key) -> int:
    """The byte that stands for `key` in the index; 0 is that of nothing."""
    return hash_key(key) & 255 or 1


@dataclass
class Served:
    hit: list[bool]
    slots: list[int]  # -1: past the cache
    victims: list[Key]


@dataclass
class BatchCache:
    """The embedding cache alone in a pool of `pages` pages, and the pool's part in it."""

    pages: int
    rows_per_page: int
    sets: int
    sieve: bool = False  # or LRU
    goal: int = 0
    now: int = 0
    hand: int = 0
    cursor: int = 0  # where the search for a page to give up goes on
    slot_of: dict[Key, int] = field(default_factory=dict)
    row_at: dict[int, Key] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)  # slot -> batch of last use
    owned: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    filling: list[int] = field(default_factory=list)  # pages with slots never filled, the next one last
    filled: dict[int, int] = field(default_factory=dict)  # page -> slots handed out
    draining: dict[int, int] = field(default_factory=dict)  # page -> since
    pins: dict[int, int] = field(default_factory=dict)
    visited: set[int] = field(default_factory=set)
    ahead: list[int] = field(default_factory=list)  # slots that the hand of SIEVE comes to, the next one first
    passed: list[int] = field(default_factory=list)  # those it has passed
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.pages - 1, -1, -1))
        self.counts = dict.fromkeys(("requested", "hits", "misses", "fetched", "bypassed", "evicted"), 0)

    def evictable(self, slot: int) -> bool:
        page = slot // self.rows_per_page
        return not self.pins.get(page) and page not in self.draining and self.used[slot] != self.now

    def oldest(self, slots: Iterable[int]) -> int | None:
        return min((s for s in slots if self.evictable(s)), key=lambda s: (self.used[s], s), default=None)

    def first_of(self, slots: list[int]) -> int | None:
        """Of a full set's slots the one that goes first."""
        if not self.sieve:
            return self.oldest(slots)
        queue = self.ahead + self.passed
        evictable = [s for s in slots if self.evictable(s)]
        return min(evictable, key=lambda s: (s in self.visited, queue.index(s)), default=None)

    def evict(self, slot: int) -> Key:
        key = self.row_at.pop(slot)
        del self.slot_of[key]
        self.counts["evicted"] += 1
        return key

    def take_windows(self, n: int) -> list[int | None]:
        """The victims' slots of n misses by LRU."""
        total = len(self.owned) * self.rows_per_page
        windows = total // WINDOW or (1 if total else 0)
        hand = self.hand if self.hand < total else 0
        found: list[int | None] = []
        for _ in range(min(n, windows)):
            places = [(hand + k) % total for k in range(WINDOW)]
            hand = (hand + WINDOW) % total
            slot = self.oldest(
                self.owned[p // self.rows_per_page] * self.rows_per_page + p % self.rows_per_page for p in places
            )
            found.append(slot)
            if slot is not None:
                self.used[slot] = self.now
        self.hand = hand
        return found + [None] * (n - len(found))

    def take_sieved(self, n: int) -> list[int | None]:
        """The victims' slots of n misses by SIEVE."""
        found: list[int | None] = []
        for _ in range(len(self.ahead) + len(self.passed)):
            if len(found) == n:
                break
            if not self.ahead:
                self.ahead, self.passed = self.passed, []
            slot = self.ahead.pop(0)
            if slot in self.visited or not self.evictable(slot):
                self.visited.discard(slot)
                self.passed.append(slot)
            else:
                found.append(slot)
                self.used[slot] = self.now
        if not self.ahead:
            self.ahead, self.passed = self.passed, []
        return found + [None] * (n - len(found))

    def lookup(self, keys: Sequence[Key]) -> Served:
        self.now += 1
        hit = [key in self.slot_of for key in keys]
        new = list(dict.fromkeys(key for key in keys if key not in self.slot_of))
        for key in keys:
            if key in self.slot_of:
                self.used[self.slot_of[key]] = self.now
                self.visited.add(self.slot_of[key])
        victims = []

        # Second: an entry of the index. Rows that left their set to a newcomer left their slot to it, too.
        members: dict[int, list[Key | None]] = {}
        for key in self.slot_of:
            members.setdefault(index_set(key, self.sets), []).append(key)
        waiting = []  # have an entry, need a slot
        arrivals: dict[Key, int] = {}
        for key in new:
            inhabitants = members.setdefault(index_set(key, self.sets), [])
            if len(inhabitants) < WAYS:
                inhabitants.append(None)
                waiting.append(key)
                continue
            slot = self.first_of([self.slot_of[k] for k in inhabitants if k is not None])
            if slot is not None:
                victims.append(self.row_at[slot])
                inhabitants[inhabitants.index(self.row_at[slot])] = None
                self.evict(slot)
                self.used[slot] = self.now
                arrivals[key] = slot

        # Third: a slot.
        filled: list[int | None] = []
        while self.filling and len(filled) < len(waiting):
            page = self.filling[-1]
            slot = page * self.rows_per_page + self.filled[page]
            self.used[slot] = self.now
            filled.append(slot)
            self.filled[page] += 1
            if self.filled[page] == self.rows_per_page:
                self.filling.pop()
        take = self.take_sieved if self.sieve else self.take_windows
        for key, slot in zip(waiting, filled + take(len(waiting) - len(filled)), strict=True):
            if slot is None:
                continue
            if slot in self.row_at:
                victims.append(self.evict(slot))
            arrivals[key] = slot
            if self.sieve:
                self.ahead.append(slot)
        for key, slot in arrivals.items():
            self.slot_of[key] = slot
            self.row_at[slot] = key
            self.visited.discard(slot)
        slots = [self.slot_of.get(key, -1) for key in keys]
        for name, count in (
            ("requested", len(keys)),
            ("hits", sum(hit)),
            ("misses", len(keys) - sum(hit)),
            ("fetched", len(new)),
            ("bypassed", slots.count(-1)),
        ):
            self.counts[name] += count
        return Served(hit, slots, victims)

    def invalidate(self, keys: Iterable[Key]) -> int:
        gone = 0
        for key in keys:
            if key in self.slot_of:
                slot = self.slot_of.pop(key)
                del self.row_at[slot]
                self.used[slot] = self.now - 2**31
                self.visited.discard(slot)
                gone += 1
        return gone

    def migrate(self, budget: int, now_ns: int, limit_ns: int) -> tuple[int, int]:
        """Move pages towards the goal; return how many were freed and granted."""
        freed = 0
        at = 0
        while at < len(self.owned):
            page = self.owned[at]
            if page in self.draining:
                staying = len(self.owned) - len(self.draining)
                if staying < self.goal or now_ns - self.draining[page] > limit_ns:
                    del self.draining[page]
                    if self.filled[page] < self.rows_per_page:
                        self.filling.append(page)
                elif not self.pins.get(page) and freed < budget:
                    self.leave(page)
                    freed += 1
                    continue
            at += 1
        while freed < budget and len(self.owned) - len(self.draining) > self.goal:
            page = self.coldest()
            if page in self.filling:
                self.filling.remove(page)
            if self.pins.get(page):
                self.draining[page] = now_ns
                break
            self.leave(page)
            freed += 1
        granted = 0
        while granted < budget and len(self.owned) < self.goal and self.free:
            page = self.free.pop()
            self.owned.append(page)
            self.filled[page] = 0
            self.filling.append(page)
            granted += 1
        return freed, granted

    def coldest(self) -> int:
        unpinned = [p for p in reversed(self.filling) if not self.pins.get(p)]
        for page in unpinned:
            if self.filled[page] == 0:
                return page
        if unpinned:
            return unpinned[0]
        ring = [self.owned[(self.cursor + k) % len(self.owned)] for k in range(len(self.owned))]
        candidates = [p for p in ring if p not in self.draining and not self.pins.get(p)][:CANDIDATES]
        if not candidates:
            return next(p for p in ring if p not in self.draining)
        if len(candidates) == CANDIDATES:
            self.cursor = (self.owned.index(candidates[-1]) + 1) % len(self.owned)
        return min(candidates, key=self.heat)

    def heat(self, page: int) -> int:
        slots = range(page * self.rows_per_page, (page + 1) * self.rows_per_page)
        sampled = slots[:: max(1, self.rows_per_page // SAMPLE)]
        return sum(32 - (self.now - self.used[slot]).bit_length() for slot in sampled)

    def leave(self, page: int) -> None:
        for slot in range(page * self.rows_per_page, (page + 1) * self.rows_per_page):
            if slot in self.row_at:
                self.evict(slot)
            for queue in (self.ahead, self.passed):
                if slot in queue:
                    queue.remove(slot)
            self.visited.discard(slot)
        self.filled[page] = 0
        self.draining.pop(page, None)
        at = self.owned.index(page)
        self.owned[at] = self.owned[-1]
        self.owned.pop()
        self.free.append(page)


def lru_misses(ids: Iterable[int], slots: int) -> int:
    """Misses of an exact LRU cache, one id after the other."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for number in ids:
        if number in cache:
            cache.move_to_end(number)
        else:
            misses += 1
            cache[number] = None
            if len(cache) > slots:
                cache.popitem(last=False)
    return misses


@dataclass
class History:
    """What the KV cache holds of one user in the pool."""

    epoch: int
    tokens: int = 0
    pages: int = 0
    leases: int = 0


@dataclass(eq=False)
class HostPage:
    number: int  # in the user's history
    moving: bool = False  # on its way back to the pool


@dataclass
class HostRun:
    """What the host holds of one user: where his pages in the pool end, these go on."""

    epoch: int
    tokens: int  # where the prefix ends, counted from the user's first token
    pages: list[HostPage] = field(default_factory=list)


@dataclass
class KvModel:
    """The KV cache as numbers of pages: users in order of last use, tails of the least recent given up first."""

    page_tokens: int
    owned: int = 0
    goal: int = 0
    host_pages: int = 0
    users: OrderedDict[int, History] = field(default_factory=OrderedDict)  # least recent first
    doomed: list[History] = field(default_factory=list)  # dropped while leased
    host: OrderedDict[int, HostRun] = field(default_factory=OrderedDict)  # least recent first
    moving: list[HostPage] = field(default_factory=list)  # each takes a page of the pool as well
    orphans: list[HostPage] = field(default_factory=list)  # dropped on their way
    evicted: int = 0
    refused: int = 0
    stale: int = 0
    extended: int = 0
    host_hits: int = 0
    offloaded: int = 0
    onboarded: int = 0
    given_up: int = 0

    @property
    def used(self) -> int:
        return sum(h.pages for h in [*self.users.values(), *self.doomed]) + len(self.moving)

    @property
    def host_used(self) -> int:
        return sum(len(run.pages) for run in self.host.values()) + len(self.orphans)

    def lookup(self, user: int, tokens: int, epoch: int) -> int:
        self.drop_stale(user, epoch)
        found = 0
        if user in self.users:
            self.users.move_to_end(user)
            found = min(tokens, self.users[user].tokens)
        if user in self.host:
            self.host.move_to_end(user)
            self.host_hits += min(tokens, self.host[user].tokens) - found
        return found

    def extend(self, user: int, tokens: int, epoch: int) -> bool:
        self.drop_stale(user, epoch)
        mine = self.users.get(user, History(epoch))
        need = -(-tokens // self.page_tokens) - mine.pages
        if need > 0:
            if not self.could_have(user, mine, need):
                self.refused += 1
                return False
            self.users[user] = mine
            while self.used + need > min(self.owned, self.goal):
                assert self.evict(keep=user)
            mine.pages += need
            self.extended += need
        mine.tokens = max(mine.tokens, tokens)
        if user in self.users:
            self.users.move_to_end(user)
        if user in self.users and user in self.host:
            run = self.host[user]
            while run.pages and run.pages[0].number < mine.pages:
                self.leave(run.pages.pop(0))
            if not run.pages or mine.tokens < run.pages[0].number * self.page_tokens:
                self.drop_run(user)
        return True

    def could_have(self, user: int, mine: History, need: int) -> bool:
        others = [h for u, h in self.users.items() if u != user]
        fixed = sum(h.pages for h in [*others, *self.doomed] if h.leases) + len(self.moving)
        return fixed + mine.pages + need <= min(self.owned, self.goal)

    def evict(self, keep: int | None = None, keep_run: int | None = None) -> bool:
        for user, history in self.users.items():
            if user != keep and not history.leases:
                end = history.tokens
                history.pages -= 1
                history.tokens = min(end, history.pages * self.page_tokens)
                self.evicted += 1
                if not history.pages:
                    del self.users[user]
                self.take_in(user, history.epoch, HostPage(history.pages), end, keep_run)
                return True
        return False

    def take_in(self, user: int, epoch: int, page: HostPage, end: int, keep: int | None) -> None:
        """The host gets a page that was evicted, if it has room or someone to give way."""
        if self.host_used == self.host_pages and not self.give_up(keep):
            self.drop_run(user)
            return
        run = self.host.setdefault(user, HostRun(epoch, end))
        run.pages.insert(0, page)
        self.host.move_to_end(user)
        self.offloaded += 1

    def give_up(self, keep: int | None) -> bool:
        for user, run in self.host.items():
            if user != keep and not run.pages[-1].moving:
                run.tokens = min(run.tokens, run.pages.pop().number * self.page_tokens)
                if not run.pages:
                    del self.host[user]
                self.given_up += 1
                return True
        return False

    def onboardable(self, user: int, tokens: int, epoch: int) -> int:
        if user not in self.host or self.host[user].epoch != epoch:
            return 0
        return max(0, min(tokens, self.host[user].tokens) - self.tokens(user))

    def tokens(self, user: int) -> int:
        return self.users[user].tokens if user in self.users else 0

    def start_onboard(self, user: int, tokens: int, epoch: int) -> HostPage | None:
        if not self.onboardable(user, tokens, epoch):
            return None
        page = self.host[user].pages[0]
        if page.moving or not self.could_have(user, self.users.get(user, History(epoch)), 1):
            return None
        self.host.move_to_end(user)
        while self.used + 1 > min(self.owned, self.goal):
            assert self.evict(keep=user, keep_run=user)
        page.moving = True
        self.moving.append(page)
        return page

    def finish_onboard(self, user: int, page: HostPage, copied: bool) -> bool:
        page.moving = False
        self.moving.remove(page)
        if page in self.orphans:
            self.orphans.remove(page)
            return False
        run = self.host[user]
        if not copied or run.pages[0] is not page:
            return False
        mine = self.users.setdefault(user, History(run.epoch))
        self.users.move_to_end(user)
        mine.pages += 1
        mine.tokens = min(run.tokens, mine.pages * self.page_tokens)
        run.pages.pop(0)
        if not run.pages:
            del self.host[user]
        self.onboarded += 1
        return True

    def offload(self, idle_pages: int) -> int:
        before = self.offloaded
        while self.host_pages and self.owned - self.used < idle_pages and self.evict():
            pass
        return self.offloaded - before

    def leave(self, page: HostPage) -> None:
        if page.moving:
            self.orphans.append(page)

    def drop_run(self, user: int) -> bool:
        run = self.host.pop(user, None)
        for page in run.pages if run else []:
            self.leave(page)
        return run is not None

    def drop_stale(self, user: int, epoch: int) -> None:
        if any(user in tier and tier[user].epoch != epoch for tier in (self.users, self.host)):
            self.stale += 1
            self.drop(user)

    def drop(self, user: int) -> bool:
        on_host = self.drop_run(user)
        history = self.users.pop(user, None)
        if history is not None and history.leases:
            self.doomed.append(history)
        return history is not None or on_host

    def lease(self, user: int) -> History | None:
        history = self.users.get(user)
        if history is not None:
            history.leases += 1
        return history

    def release(self, history: History) -> None:
        history.leases -= 1
        if not history.leases:
            self.doomed = [h for h in self.doomed if h is not history]

    def shrink(self, budget: int) -> int:
        freed = 0
        while freed < budget and self.owned > self.goal and (self.used < self.owned or self.evict()):
            self.owned -= 1
            freed += 1
        return freed


def sieve_misses(ids: Iterable[int], slots: int) -> int:
    """Misses of an exact SIEVE cache, one id after the other: a linked list and a hand, as its authors draw it."""
    newer: dict[int, int | None] = {}
    older: dict[int, int | None] = {}
    visited: dict[int, bool] = {}
    newest: int | None = None
    oldest: int | None = None
    hand: int | None = None
    misses = 0
    for number in map(int, ids):
        if number in visited:
            visited[number] = True
            continue
        misses += 1
        if len(visited) == slots:
            victim = oldest if hand is None else hand
            assert victim is not None
            while visited[victim]:
                visited[victim] = False
                following = newer[victim]
                victim = oldest if following is None else following
                assert victim is not None
            before, hand = older.pop(victim), newer.pop(victim)
            del visited[victim]
            if hand is None:
                newest = before
            else:
                older[hand] = before
            if before is None:
                oldest = hand
            else:
                newer[before] = hand
        older[number], newer[number], visited[number] = newest, None, False
        if newest is not None:
            newer[newest] = number
        else:
            oldest = number
        newest = number
    return misses
