"""A lease: pages that stay where they are while a request or a transfer uses them."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from typing import NoReturn, Self

from cache_engine.pool import HbmPool


class Lease(ABC):
    """Holds pages against eviction and migration until `release`, or the end of a with block.

    One that is lost, collected without having been released, is ended by the pool's next operation; like a file left
    open, it warns (ResourceWarning).
    """

    _open = False

    def __init__(self, pool: HbmPool) -> None:
        """Open the lease, whose pages are pinned already."""
        self._pool = pool
        self._open = True

    def __del__(self) -> None:
        if self._open and not self._pool.closed and not sys.is_finalizing():
            self._pool.end_later(self.release)
            warnings.warn(f"a lease was lost without release: {self!r}", ResourceWarning, stacklevel=2, source=self)

    def release(self) -> None:
        """End the lease; twice, or after the pool was closed, is harmless."""
        with self._pool.lock:
            if self._open:
                self._open = False
                self._end()

    @abstractmethod
    def _end(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lease cannot be copied or pickled: its pages would be released twice")
