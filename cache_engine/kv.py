"""The KV cache: attention keys and values of user histories, in pages of the pool and, behind them, of host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import kv as kernels
from cache_engine.backends.cpu import kv_host as tiers
from cache_engine.ghost import KvGhost
from cache_engine.integers import int64, integer
from cache_engine.jit import MOST_BYTES
from cache_engine.lease import Lease
from cache_engine.pool import HbmPool
from cache_engine.stats import KvStats

MOST_TOKENS = 2**40  # of a history: counters add them up


class KvLease(Lease):
    """Holds a user's pages in place; see `KvCache.lease`."""

    def __init__(self, user: int, pool: HbmPool, state: kernels.KvState, entry: int) -> None:
        self.user = user
        self._state = state
        self._entry = entry
        super().__init__(pool)

    def _end(self) -> None:
        kernels.unpin(self._state, self._entry)


class KvCache:
    """Per user a prefix of the history, in pages of `page_bytes // token_bytes` tokens.

    History is append-only within an epoch; another epoch (a slide of the window, a new model version) starts anew.
    Users and epochs are any int64.

    With `host_pages`, pages that must leave the pool are copied to host memory first, where the least recent user gives
    way when it is full; `onboard` brings them back. A page lies in one tier, and both together hold a prefix. Copying
    out is part of the operation that evicts (`extend`, `onboard`, or the pool's `migrate`), under the pool's lock: the
    page's next owner may write it as soon as that returns. `offload`, called between requests, evicts ahead, so that
    `extend` finds idle pages and copies nothing.

    Args:
        pool: the pool, in which the cache becomes the member `name`.
        token_bytes: bytes of the keys and values of one token, over all layers.
        host_pages: pages of host memory behind the pool's; 0: what is evicted is lost.
        ghost: follow users, to tell what other sizes would gain.

    Attributes:
        ghost: the `KvGhost` that every lookup feeds; None without.
    """

    def __init__(
        self, pool: HbmPool, *, token_bytes: int, name: str = "kv", host_pages: int = 0, ghost: bool = False
    ) -> None:
        token_bytes, host_pages = integer("token_bytes", token_bytes), integer("host_pages", host_pages)
        if not 1 <= token_bytes <= pool.page_bytes:
            raise ValueError(f"token_bytes must be in [1, {pool.page_bytes}] (one page), got {token_bytes}")
        if not 0 <= host_pages < 2**31 - 1:
            raise ValueError(f"host_pages must be in [0, 2**31 - 2], got {host_pages}")
        self.token_bytes = token_bytes
        self.page_tokens = pool.page_bytes // token_bytes
        self.host_pages = host_pages
        self._pool = pool
        self.state = kernels.new_kv_state(pool.pages, self.page_tokens, pool.member(name))
        self._packed = np.zeros(MOST_BYTES, np.uint8)
        kernels.pack(self.state, pool.state, self._packed)
        self.ghost = KvGhost(pool, name) if ghost else None
        self.host: tiers.KvHostState | None = None
        self._host_bytes: npt.NDArray[np.uint8] | None = None  # [host_pages, page_bytes]
        if host_pages:
            self.host = tiers.new_kv_host_state(host_pages, self.page_tokens, pool.pages)
            if pool.payload:
                self._host_bytes = pool.host_memory(host_pages * pool.page_bytes).reshape(host_pages, pool.page_bytes)
        pool.attach(name, self)
        pool.at_close(self._close)

    def lookup(self, user: int, tokens: int, epoch: int = 0) -> int:
        """Return how many of the first `tokens` tokens the pool has; counted once, the user becomes the most recent.

        What the host has beyond them is a miss, unless it is brought back: see `onboardable`.
        """
        user, tokens, epoch = int64("user", user), _tokens(tokens), int64("epoch", epoch)
        with self._pool.lock:
            self._pool.check_open()
            if self.ghost is not None:
                self.ghost.feed(user, -(-tokens // self.page_tokens))
            if self.host is not None:
                return int(tiers.lookup_tiers(self.state, self.host, user, epoch, tokens))
            return int(kernels.lookup_packed(self._packed, user, epoch, tokens))

    def onboardable(self, user: int, tokens: int, epoch: int = 0) -> int:
        """Return how many of the first `tokens` tokens `onboard` could add to what the pool has; changes nothing."""
        user, tokens, epoch = int64("user", user), _tokens(tokens), int64("epoch", epoch)
        with self._pool.lock:
            self._pool.check_open()
            if self.host is None:
                return 0
            return int(tiers.beyond(self.state, self.host, user, epoch, tokens))

    def onboard(self, user: int, tokens: int, epoch: int = 0) -> int:
        """Bring the user's pages back from the host, in order, until the pool has his first `tokens` tokens.

        Pages that must leave for them, never the user's own, go to the host as far as it has room beside his. The lock
        is free between one page and the next, so another thread waits for one copy at most; whatever it does to the
        user meanwhile (a drop, an epoch, an extension), both pages of a copy on its way stay out of others' hands until
        it has ended.

        Returns:
            how many of the first `tokens` tokens the pool has now: fewer than the host could have added where leases,
            the goal or the size of the partition leave too little room. `lookup` counts, this does not.
        """
        user, tokens, epoch = int64("user", user), _tokens(tokens), int64("epoch", epoch)
        while self._onboard_page(user, tokens, epoch):
            pass
        with self._pool.lock:
            e = kernels.find(self.state, user)
            if e == kernels.NONE or self.state.epoch[e] != epoch:
                return 0
            return min(int(self.state.tokens[e]), tokens)

    def offload(self, idle_pages: int) -> int:
        """Evict to the host, least recent users' tails first, until `idle_pages` pages are idle; return how many moved.

        To be called off the critical path; leases may leave fewer idle. The lock is free between one page and the next.
        Without a host tier nothing is evicted.
        """
        if integer("idle_pages", idle_pages) < 0:
            raise ValueError(f"idle_pages must be at least 0, got {idle_pages}")
        moved = 0
        while True:
            with self._pool.lock:
                self._pool.check_open()
                idle = int(self.state.scalars[kernels.N_IDLE])
                if self.host is None or idle >= idle_pages:
                    return moved
                moved += self._copy_out(tiers.make_idle_pages, idle + 1)
                if self.state.scalars[kernels.N_IDLE] == idle:
                    return moved

    def extend(self, user: int, tokens: int, epoch: int = 0) -> bool:
        """Make room for the first `tokens` tokens, evicting the least recent users' tails; all or nothing.

        False where leases, the goal or the size of the partition leave too little room; nothing has changed then,
        except that what another epoch had cached for the user is gone. With payload the caller writes the new pages
        (`pages`) before others look the user up. What the host had of these tokens it has no longer: bring it back
        first (`onboard`).
        """
        user, tokens, epoch = int64("user", user), _tokens(tokens), int64("epoch", epoch)
        with self._pool.lock:
            self._pool.check_open()
            if self.host is None:
                return bool(kernels.extend_packed(self._packed, user, epoch, tokens))
            self._copy_out(tiers.make_room, user, epoch, tokens)
            return bool(tiers.extend_tiers(self.state, self.host, self._pool.state, user, epoch, tokens))

    def pages(self, user: int) -> npt.NDArray[np.int32]:
        """Return the user's pages in the pool from the first token on, int32, empty if he has none."""
        user = int64("user", user)
        with self._pool.lock:
            self._pool.check_open()
            e = kernels.find(self.state, user)
            if e == kernels.NONE:
                return np.empty(0, np.int32)
            out = np.empty(self.state.n_pages[e], np.int32)
            page = self.state.tail[e]
            for i in range(out.size - 1, -1, -1):
                out[i] = page
                page = self.state.before[page]
            return out

    def lease(self, user: int) -> KvLease | None:
        """Hold the user's pages, present and future, against eviction and migration; None if he has none in the pool.

        A leased user can still be dropped: he is unreachable at once, and his pages come back when the last lease ends.
        """
        user = int64("user", user)
        with self._pool.lock:
            self._pool.check_open()
            e = int(kernels.pin(self.state, user))
            return None if e == kernels.NONE else KvLease(user, self._pool, self.state, e)

    def drop(self, user: int) -> bool:
        """Forget the user; False if he was not cached."""
        user = int64("user", user)
        with self._pool.lock:
            self._pool.check_open()
            if self.host is not None:
                return bool(tiers.drop_tiers(self.state, self.host, user))
            return bool(kernels.drop(self.state, user))

    def stats(self) -> KvStats:
        """Return the counters since the last call and start them anew."""
        with self._pool.lock:
            counters = [int(x) for x in self.state.counters]
            self.state.counters[:] = 0
            host = [0] * tiers.N_HOST_COUNTERS
            if self.host is not None:
                host = [int(x) for x in self.host.counters]
                self.host.counters[:] = 0
        return KvStats(
            lookups=counters[kernels.LOOKUPS],
            requested=counters[kernels.REQUESTED],
            hits=counters[kernels.HITS],
            misses=counters[kernels.MISSES],
            extended=counters[kernels.EXTENDED],
            evicted=counters[kernels.EVICTED],
            refused=counters[kernels.REFUSED],
            stale=counters[kernels.STALE],
            host_hits=host[tiers.HOST_HITS],
            offloaded=host[tiers.OFFLOADED],
            onboarded=host[tiers.ONBOARDED],
            given_up=host[tiers.GIVEN_UP],
        )

    @property
    def host_used(self) -> int:
        """Pages of the host that hold tokens."""
        return 0 if self.host is None else int(self.host.scalars[kernels.USED])

    def release(self, budget: int, now_ns: int, limit_ns: int, relocate: bool | None) -> int:
        """Give up at most `budget` pages over the goal (called by the pool)."""
        if self.host is not None:
            self._copy_out(tiers.make_surplus_idle, budget)
        return int(kernels.release_pages(self.state, self._pool.state, budget))

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal (called by the pool)."""
        return int(kernels.accept_pages(self.state, self._pool.state, budget))

    def metadata_bytes(self) -> int:
        """Bytes of user and page metadata; they count against the memory budget."""
        return sum(array.nbytes for array in (*self.state, *(self.host or ())))

    def _close(self) -> None:
        self._host_bytes = None

    def _onboard_page(self, user: int, tokens: int, epoch: int) -> bool:
        """Bring one page back; False if there is none, no room for it, or it came in vain."""
        host, pool = self.host, self._pool
        if host is None:
            with pool.lock:
                pool.check_open()
            return False
        with pool.lock:
            pool.check_open()
            host_bytes = self._host_bytes  # also where the pool is closed meanwhile
            at = self._copy_out(tiers.next_onboard, user, epoch, tokens)
            if at == kernels.NONE:
                return False
            page = int(tiers.start_onboard(self.state, host, at))
        copied = False
        try:
            if host_bytes is not None:
                pool.write_page(page, host_bytes[at])
            copied = True
        finally:
            with pool.lock:
                came = tiers.finish_onboard(self.state, host, at, copied)
        return bool(came)

    def _copy_out(self, kernel: Callable[..., int], *arguments: int) -> int:
        """Run a kernel that evicts to the host, copy what it moved, and return what it returned.

        Where a copy fails, what was not copied is in neither tier; its pages of the pool are idle.
        """
        host = self.host
        assert host is not None
        done = 0
        host.scalars[tiers.N_MOVES] = 0
        try:
            answer = int(kernel(self.state, host, self._pool.state, *arguments))
            moved = int(host.scalars[tiers.N_MOVES])
            if self._host_bytes is None or not moved:
                return answer
            moves = host.moves[:moved].tolist()
            last = {at: i for i, (_, at) in enumerate(moves)}  # the host page may have been given up again
            while done < moved:
                page, at = moves[done]
                if last[at] == done:
                    self._pool.read_page(page, self._host_bytes[at])
                done += 1
            return answer
        except BaseException:
            tiers.forget_moves(host, done)
            raise


def _tokens(value: int) -> int:
    tokens = integer("tokens", value)
    if not 0 <= tokens <= MOST_TOKENS:
        raise ValueError(f"tokens must be in [0, {MOST_TOKENS}], got {tokens}")
    return tokens
