"""The KV cache: attention keys and values of user histories, in pages of the pool."""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import kv as kernels
from cache_engine.lease import Lease
from cache_engine.pool import HbmPool
from cache_engine.stats import KvStats


class KvLease(Lease):
    """Holds a user's pages in place; see `KvCache.lease`."""

    def __init__(self, user: int, pool: HbmPool, state: kernels.KvState, entry: int) -> None:
        super().__init__(pool)
        self.user = user
        self._state = state
        self._entry = entry

    def _end(self) -> None:
        kernels.unpin(self._state, self._pool.state, self._entry)


class KvCache:
    """Per user a prefix of the history, in pages of `page_bytes // token_bytes` tokens.

    History is append-only within an epoch; another epoch (a slide of the window, a new model version) starts anew.
    Users and epochs are any int64.

    Args:
        pool: the pool, in which the cache becomes the member `name`.
        token_bytes: bytes of the keys and values of one token, over all layers.
    """

    def __init__(self, pool: HbmPool, *, token_bytes: int, name: str = "kv") -> None:
        if not 1 <= token_bytes <= pool.page_bytes:
            raise ValueError(f"token_bytes must be in [1, {pool.page_bytes}] (one page), got {token_bytes}")
        self.token_bytes = token_bytes
        self.page_tokens = pool.page_bytes // token_bytes
        self._pool = pool
        self.state = kernels.new_kv_state(pool.pages, self.page_tokens, pool.member(name))
        pool.attach(name, self)

    def lookup(self, user: int, tokens: int, epoch: int = 0) -> int:
        """Return how many of the first `tokens` tokens are cached; counted once, the user becomes the most recent."""
        user, tokens, epoch = _int64("user", user), _tokens(tokens), _int64("epoch", epoch)
        with self._pool.lock:
            self._pool.check_open()
            return int(kernels.lookup(self.state, self._pool.state, user, epoch, tokens))

    def extend(self, user: int, tokens: int, epoch: int = 0) -> bool:
        """Make room for the first `tokens` tokens, evicting the least recent users' tails; all or nothing.

        False where leases, the goal or the size of the partition leave too little room; nothing has changed then,
        except that what another epoch had cached for the user is gone. With payload the caller writes the new pages
        (`pages`) before others look the user up.
        """
        user, tokens, epoch = _int64("user", user), _tokens(tokens), _int64("epoch", epoch)
        with self._pool.lock:
            self._pool.check_open()
            return bool(kernels.extend(self.state, self._pool.state, user, epoch, tokens))

    def pages(self, user: int) -> npt.NDArray[np.int32]:
        """Return the user's pages from the first token on, int32, empty if he has none."""
        user = _int64("user", user)
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
        """Hold the user's pages, present and future, against eviction and migration; None if he has none.

        A leased user can still be dropped: he is unreachable at once, and his pages come back when the last lease ends.
        """
        user = _int64("user", user)
        with self._pool.lock:
            self._pool.check_open()
            e = int(kernels.pin(self.state, user))
            return None if e == kernels.NONE else KvLease(user, self._pool, self.state, e)

    def drop(self, user: int) -> bool:
        """Forget the user; False if he was not cached."""
        user = _int64("user", user)
        with self._pool.lock:
            self._pool.check_open()
            return bool(kernels.drop(self.state, self._pool.state, user))

    def stats(self) -> KvStats:
        """Return the counters since the last call and start them anew."""
        with self._pool.lock:
            counters = [int(x) for x in self.state.counters]
            self.state.counters[:] = 0
        return KvStats(
            lookups=counters[kernels.LOOKUPS],
            requested=counters[kernels.REQUESTED],
            hits=counters[kernels.HITS],
            misses=counters[kernels.MISSES],
            extended=counters[kernels.EXTENDED],
            evicted=counters[kernels.EVICTED],
            refused=counters[kernels.REFUSED],
            stale=counters[kernels.STALE],
        )

    def release(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages over the goal (called by the pool)."""
        return int(kernels.release_pages(self.state, self._pool.state, budget))

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal (called by the pool)."""
        return int(kernels.accept_pages(self.state, self._pool.state, budget))

    def metadata_bytes(self) -> int:
        """Bytes of user and page metadata; they count against the memory budget."""
        return sum(array.nbytes for array in self.state)


def _int64(what: str, value: int) -> int:
    # A wider or another type would be compiled for anew, and compared as a float.
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what} must fit int64, got {number}")
    return number


def _tokens(value: int) -> int:
    tokens = operator.index(value)
    if not 0 <= tokens < 2**63:
        raise ValueError(f"tokens must be at least 0 and fit int64, got {tokens}")
    return tokens
