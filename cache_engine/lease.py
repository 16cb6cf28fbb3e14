"""A lease: pages that stay where they are while a request or a transfer uses them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, Self

from cache_engine.pool import HbmPool


class Lease(ABC):
    """Holds pages against eviction and migration until `release`, or the end of a with block."""

    def __init__(self, pool: HbmPool) -> None:
        self._pool = pool
        self._open = True

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
