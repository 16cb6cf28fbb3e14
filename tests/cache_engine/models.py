"""Slow, plain models of what the engine should do: integers, lists and dicts, written from its contracts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MASK = 2**64 - 1
WAYS = 8
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


def index_set(key: Key, sets: int) -> int:
    """The set of the index in which `key` belongs."""
    table, number = key
    bits = mix(mix(table) ^ ((number & MASK) * 0x9E3779B97F4A7C15 & MASK))
    return (bits >> 32) * sets >> 32


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
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.pages - 1, -1, -1))
        self.counts = dict.fromkeys(("requested", "hits", "misses", "fetched", "bypassed", "evicted"), 0)

    def evictable(self, slot: int) -> bool:
        page = slot // self.rows_per_page
        return not self.pins.get(page) and page not in self.draining and self.used[slot] != self.now

    def oldest(self, slots: Iterable[int]) -> int | None:
        return min((s for s in slots if self.evictable(s)), key=lambda s: (self.used[s], s), default=None)

    def evict(self, slot: int) -> Key:
        key = self.row_at.pop(slot)
        del self.slot_of[key]
        self.counts["evicted"] += 1
        return key

    def lookup(self, keys: Sequence[Key]) -> Served:
        self.now += 1
        hit = [key in self.slot_of for key in keys]
        new = list(dict.fromkeys(key for key in keys if key not in self.slot_of))
        for key in keys:
            if key in self.slot_of:
                self.used[self.slot_of[key]] = self.now
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
            slot = self.oldest(self.slot_of[k] for k in inhabitants if k is not None)
            if slot is not None:
                victims.append(self.row_at[slot])
                inhabitants[inhabitants.index(self.row_at[slot])] = None
                self.evict(slot)
                self.used[slot] = self.now
                arrivals[key] = slot

        # Third: a slot.
        total = len(self.owned) * self.rows_per_page
        windows = total // WINDOW or (1 if total else 0)
        hand = self.hand if self.hand < total else 0
        for key in waiting:
            if self.filling:
                page = self.filling[-1]
                slot = page * self.rows_per_page + self.filled[page]
                self.filled[page] += 1
                if self.filled[page] == self.rows_per_page:
                    self.filling.pop()
            elif windows:
                windows -= 1
                places = [(hand + k) % total for k in range(WINDOW)]
                hand = (hand + WINDOW) % total
                found = self.oldest(
                    self.owned[p // self.rows_per_page] * self.rows_per_page + p % self.rows_per_page for p in places
                )
                if found is None:
                    continue
                slot = found
                if slot in self.row_at:
                    victims.append(self.evict(slot))
            else:
                continue
            self.used[slot] = self.now
            arrivals[key] = slot
        self.hand = hand
        for key, slot in arrivals.items():
            self.slot_of[key] = slot
            self.row_at[slot] = key
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
    """What the KV cache holds of one user."""

    epoch: int
    tokens: int = 0
    pages: int = 0
    leases: int = 0


@dataclass
class KvModel:
    """The KV cache as numbers of pages: users in order of last use, tails of the least recent given up first."""

    page_tokens: int
    owned: int = 0
    goal: int = 0
    users: OrderedDict[int, History] = field(default_factory=OrderedDict)  # least recent first
    doomed: list[History] = field(default_factory=list)  # dropped while leased
    evicted: int = 0
    refused: int = 0
    stale: int = 0
    extended: int = 0

    @property
    def used(self) -> int:
        return sum(h.pages for h in [*self.users.values(), *self.doomed])

    def lookup(self, user: int, tokens: int, epoch: int) -> int:
        self.drop_stale(user, epoch)
        if user not in self.users:
            return 0
        self.users.move_to_end(user)
        return min(tokens, self.users[user].tokens)

    def extend(self, user: int, tokens: int, epoch: int) -> bool:
        self.drop_stale(user, epoch)
        mine = self.users.get(user, History(epoch))
        need = -(-tokens // self.page_tokens) - mine.pages
        if need > 0:
            others = [h for u, h in self.users.items() if u != user]
            fixed = sum(h.pages for h in [*others, *self.doomed] if h.leases)
            room = min(self.owned, self.goal)
            if fixed + mine.pages + need > room:
                self.refused += 1
                return False
            self.users[user] = mine
            while self.used + need > room:
                assert self.evict(keep=user)
            mine.pages += need
            self.extended += need
        mine.tokens = max(mine.tokens, tokens)
        if user in self.users:
            self.users.move_to_end(user)
        return True

    def evict(self, keep: int | None = None) -> bool:
        for user, history in self.users.items():
            if user != keep and not history.leases:
                history.pages -= 1
                history.tokens = min(history.tokens, history.pages * self.page_tokens)
                self.evicted += 1
                if not history.pages:
                    del self.users[user]
                return True
        return False

    def drop_stale(self, user: int, epoch: int) -> None:
        if user in self.users and self.users[user].epoch != epoch:
            self.stale += 1
            self.drop(user)

    def drop(self, user: int) -> bool:
        history = self.users.pop(user, None)
        if history is not None and history.leases:
            self.doomed.append(history)
        return history is not None

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
