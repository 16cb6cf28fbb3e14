"""The KV cache: attention keys and values of user histories, in pages of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import kv as kernels
from cache_engine.pool import HbmPool
from cache_engine.stats import KvStats


@dataclass
class KvLease:
    """Holds a user's pages in place until `release` (or the end of a with block); see `KvCache.lease`."""

    user: int
    _cache: KvCache = field(repr=False)
    _entry: int = field(repr=False)
    _open: bool = True

    def release(self) -> None:
        """End the lease; twice is harmless."""
        if self._open:
            self._open = False
            self._cache._unpin(self._entry)

    def __enter__(self) -> KvLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class KvCache:
    """Per user a prefix of the history, in pages of `page_bytes // token_bytes` tokens.

    History is append-only within an epoch; another epoch (a slide of the window, a new model version) starts anew.

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
        member = pool.attach(name, self)
        self.state = kernels.new_kv_state(pool.pages, self.page_tokens, member)

    def lookup(self, user: int, tokens: int, epoch: int = 0) -> int:
        """Return how many of the first `tokens` tokens are cached; counted once, the user becomes the most recent."""
        _check_tokens(tokens)
        with self._pool.lock:
            self._pool.check_open()
            return int(kernels.lookup(self.state, self._pool.state, user, epoch, tokens))

    def extend(self, user: int, tokens: int, epoch: int = 0) -> bool:
        """Make room for the first `tokens` tokens, evicting the least recent users' tails; all or nothing.

        False where leases, the goal or the size of the partition leave too little room; nothing has changed then. With
        payload the caller writes the new pages (`pages`) before others look the user up.
        """
        _check_tokens(tokens)
        with self._pool.lock:
            self._pool.check_open()
            return bool(kernels.extend(self.state, self._pool.state, user, epoch, tokens))

    def pages(self, user: int) -> npt.NDArray[np.int32]:
        """Return the user's pages from the first token on, int32, empty if he has none."""
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
        with self._pool.lock:
            self._pool.check_open()
            e = int(kernels.pin(self.state, user))
            return None if e == kernels.NONE else KvLease(user, self, e)

    def drop(self, user: int) -> bool:
        """Forget the user; False if he was not cached."""
        with self._pool.lock:
            self._pool.check_open()
            return bool(kernels.drop(self.state, self._pool.state, user))

    def stats(self) -> KvStats:
        """Return the counters since the last call and start them anew."""
        with self._pool.lock:
            counters = [int(x) for x in self.state.counters]
            self.state.counters[:] = 0
        return KvStats(*counters)

    def release(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages over the goal (called by the pool)."""
        return int(kernels.release_pages(self.state, self._pool.state, budget))

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal (called by the pool)."""
        return int(kernels.accept_pages(self.state, self._pool.state, budget))

    def metadata_bytes(self) -> int:
        """Bytes of user and page metadata; they count against the memory budget."""
        return sum(array.nbytes for array in self.state)

    def _unpin(self, entry: int) -> None:
        with self._pool.lock:
            kernels.unpin(self.state, self._pool.state, entry)


def _check_tokens(tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, got {tokens}")
